"""What products read: the operands of a layer's three products, quantized or not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jax_mx import reference
from jax_mx.facts.formats import BLOCK, MXFP8_E4M3, MXFP8_E5M2, Format, Scaling
from jax_mx.facts.windows import Window
from jax_mx.ops.activations import Gated, made
from jax_mx.ops.fake_quantize import through_codes
from jax_mx.ops.metadata import register_for_export
from jax_mx.ops.mxarray import MXArray, dequantize
from jax_mx.ops.preprocessing import Hadamard, Stochastic
from jax_mx.ops.quantize import quantize, quantize_both
from jax_mx.ops.quantizing import WithSums
from jax_mx.ops.requantize import requantize
from jax_mx.products.operands import Arrangement


class Use(NamedTuple):
    """How a product takes an operand.

    Attributes:
      format: of the codes; None for bfloat16.
      hadamard: the transform along the contracted axis.
      rounding: of the codes.
    """

    format: Format | None
    hadamard: Hadamard | None = None
    rounding: Stochastic | None = None


def frozen_or(use: Use, is_frozen: bool) -> Use:
    """How a product takes a gradient: beside a frozen operand, in bfloat16."""
    return Use(None) if is_frozen else use


class Blocks(NamedTuple):
    """Which elements of an operand share scales, and by which rule; see `quantize`.

    Attributes:
      scaling: the rule.
      window: which elements share an amax.
      square: whether blocks are (32, 32); then one array serves both products of one format.
    """

    scaling: Scaling
    window: Window = BLOCK
    square: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `quantize` that say so."""
        return {"scaling": self.scaling, "window": self.window}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """An operand of one product.

    Attributes:
      array: an `MXArray` or floats.
      axis: the contracted axis, -1 or -2.
    """

    array: MXArray | jax.Array
    axis: int = dataclasses.field(default=-1, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight that many products take and that is quantized once; see `Recipe.quantize_weight`.

    Attributes:
      floats: the weight; gradients reach it, products do not read it.
      contracted_form: what the forward product reads.
      free_form: what the product for the gradient of the activations reads.
      recipe: the `Recipe` that made them.
      arrangement: how they are arranged.
    """

    floats: jax.Array
    contracted_form: Form
    free_form: Form
    recipe: Any
    arrangement: Arrangement = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.floats.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the weight."""
        return self.floats.ndim

    @property
    def dtype(self) -> Any:
        """The dtype of the weight's floats."""
        return self.floats.dtype


def _arrangement(text: bytes) -> tuple[Arrangement]:
    parts: Any = (tuple(part) if isinstance(part, list) else part for part in json.loads(text))
    return (Arrangement(*parts),)


register_for_export(Form)
jax.export.register_pytree_node_serialization(
    QuantizedWeight,
    serialized_name="jax_mx.QuantizedWeight",
    serialize_auxdata=lambda aux: json.dumps(aux[0]).encode(),
    deserialize_auxdata=_arrangement,
)


_SUMMED = {MXFP8_E4M3, MXFP8_E5M2}  # formats of which one call makes both forms, so also the sums
Forms = tuple[Form | None, Form | None]  # along the contracted axis, along the free one


def forms_of(
    x: Any,
    axis: int,
    uses: tuple[Use | None, Use | None],
    blocks: Blocks,
    rows: jax.Array | None = None,
    activation: Gated | WithSums | None = None,
    as_floats: tuple[bool, bool] = (False, False),
) -> tuple[Any, ...]:
    """The forms of an arranged operand, two by one `quantize_both`, but for square blocks.

    Args:
      x: (..., rows, columns), arranged; with rows it may be an `MXArray`.
      axis: the contracted one, -1 or -2; the other one is the free axis.
      uses: how each product takes it, along the contracted and along the free axis; None: the
        product does not take it.
      blocks: which elements share scales.
      rows: int32 (R,), of x (T, columns): the operand is x[rows], with zeros for numbers that x has
        no row of.
      activation: the operand is what this makes of x (..., rows, 2 columns).
      as_floats: of each form whether it is the floats that codes stand for, see `through_codes`;
        some of an operand that `may_be_floats`.

    Returns:
      Both forms; of a `WithSums` a third: float32 sums of the gradient's columns, of 32 rows each
      where a kernel may make both forms, see `reference.sums_of`; else all of its rows.
    """
    if any(as_floats):
        return _forms_of_floats(x, axis, uses, blocks, rows, activation, as_floats)
    if isinstance(activation, WithSums):
        own = activation.own
        joint = _joint_formats(uses)
        summed = joint and (joint[0] == joint[1] or {*joint} <= _SUMMED)
        if blocks.square or not (summed and own.has_gate):
            every = made("quantize", x, own).astype(jnp.float32)
            return *forms_of(x, axis, uses, blocks, rows, own), every
    axes = (axis, -3 - axis)
    if blocks.square or rows is None or None not in uses:  # what `requantize` does not make
        x = _in_floats(x)
    made_of: dict[str, Any] = {"rows": rows, "activation": activation}
    if blocks.square:
        codes = {
            use.format: quantize(x, use.format, block=(BLOCK, BLOCK), **made_of, **blocks.options)
            for use in uses
            if use is not None and use.format is not None
        }
        each = [
            _floats(x, **made_of) if u is None or u.format is None else codes[u.format]
            for u in uses
        ]
        first, second = (
            None if use is None else Form(array, at)
            for use, array, at in zip(uses, each, axes, strict=True)
        )
        return first, second
    joint: Any = _joint_formats(uses)
    if joint:
        order = slice(None, None, 1 if axis == -1 else -1)
        last, second = cast(tuple[Use, Use], uses[order])
        found: Any = quantize_both(
            x,
            formats=joint[order],
            **blocks.options,
            hadamard=(last.hadamard, second.hadamard),
            rounding=(last.rounding, second.rounding),
            **made_of,
        )
        first, second = (Form(q) for q in found[:2][order])
        return first, second, *found[2:]
    first, second = (_one(x, use, at, blocks, made_of) for use, at in zip(uses, axes, strict=True))
    return first, second


def may_be_floats(
    x: Any,
    uses: tuple[Use | None, Use | None],
    blocks: Blocks,
    activation: Gated | WithSums | None = None,
) -> bool:
    """Whether there may be a kernel that gives an operand's forms as floats, see `forms_of`."""
    wanted = [use for use in uses if use is not None]
    formats = {use.format for use in wanted}
    plain = all(use.hadamard is None and use.rounding is None for use in wanted)
    is_one = len(formats) == 1 and None not in formats
    is_float = getattr(x, "dtype", None) == jnp.bfloat16
    by_blocks = blocks.window == BLOCK and not blocks.square
    return is_one and plain and is_float and by_blocks and not isinstance(activation, WithSums)


def _forms_of_floats(
    x: jax.Array,
    axis: int,
    uses: tuple[Use | None, Use | None],
    blocks: Blocks,
    rows: jax.Array | None,
    activation: Any,
    as_floats: tuple[bool, bool],
) -> Forms:
    # As `quantize_both` gives them, what runs along the last axis comes first.
    wanted = sorted(
        (at, i, use.format)
        for i, (use, at) in enumerate(zip(uses, (axis, -3 - axis), strict=True))
        if use is not None
    )[::-1]
    floats = tuple(as_floats[i] for _, i, _ in wanted)
    how: dict[str, Any] = {"axis": wanted[0][0], "scaling": blocks.scaling}
    formats: Any = tuple(format for *_, format in wanted)
    found = through_codes(x, formats, floats, rows, activation, **how)
    forms: list[Form | None] = [None, None]
    for (at, i, _), array in zip(wanted, found, strict=True):
        forms[i] = Form(array, at) if as_floats[i] else Form(array)
    first, second = forms
    return first, second


def dequantized_forms(first: Form, second: Form) -> tuple[Form, Form]:
    """Both forms as bfloat16: of one array that serves both, one again."""
    floats = _in_floats(first.array)
    others = floats if second.array is first.array else _in_floats(second.array)
    return Form(floats, first.axis), Form(others, second.axis)


def _joint_formats(uses: tuple[Use | None, Use | None]) -> tuple[Format, Format] | None:
    """The formats of both uses, where both are quantized."""
    first, second = (None if use is None else use.format for use in uses)
    return None if first is None or second is None else (first, second)


def _one(
    x: Any, use: Use | None, axis: int, blocks: Blocks, made_of: dict[str, Any]
) -> Form | None:
    if use is None:
        return None
    if use.format is None:
        return Form(_floats(x, **made_of), axis)
    how = {"axis": axis, "transpose": True, "hadamard": use.hadamard, "rounding": use.rounding}
    if isinstance(x, MXArray):
        return Form(requantize(x, use.format, **how, **blocks.options, rows=made_of["rows"]))
    return Form(quantize(x, use.format, **how, **blocks.options, **made_of))


def _in_floats(x: Any) -> Any:
    return dequantize(x) if isinstance(x, MXArray) else x


def _floats(x: Any, rows: jax.Array | None, activation: Gated | None) -> jax.Array:
    """In bfloat16 what `quantize` would quantize."""
    x = _in_floats(x)
    x = x if rows is None else reference.rows_of(x, rows)
    return (x if activation is None else made("quantize", x, activation)).astype(jnp.bfloat16)
