"""Operands as products read them: MX arrays or floats, along one axis and along the other.

Each operand has two readers among the three products of a layer. The forward product and wgrad read
activations, the forward product and dgrad read weights. Dgrad and wgrad read the result's gradient.
So an operand has two forms, which one read of its floats makes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_mx.formats.arrangements import Arrangement
from jax_mx.formats.formats import BLOCK, MXFP8_E4M3, MXFP8_E5M2, Format, Scaling
from jax_mx.formats.layouts import BLOCKED_128X4, ROW_MAJOR, ROW_MAJOR_VALUES, ScaleLayout
from jax_mx.formats.reads import layout_for_trace
from jax_mx.formats.sharding import is_explicit, shards_of
from jax_mx.formats.views import padded
from jax_mx.formats.windows import SHARD, SQUARE, Window, lengths_of, share_a_read
from jax_mx.launch import private
from jax_mx.quantizing import mxarray, reference
from jax_mx.quantizing.activations import made
from jax_mx.quantizing.calling import WithSums, called
from jax_mx.quantizing.mxarray import MXArray, floats_of
from jax_mx.quantizing.planning import Options
from jax_mx.quantizing.preprocessing import Hadamard, Stochastic, data_of, preprocessing_of
from jax_mx.quantizing.requantize import requantize


class Use(NamedTuple):
    """How a product takes an operand.

    Attributes:
      format: of the codes; None for bfloat16.
      hadamard: the transform along the contracted axis.
      rounding: of the codes.
      window: the elements that share an amax.
    """

    format: Format | None
    hadamard: Hadamard | None = None
    rounding: Stochastic | None = None
    window: Window = BLOCK


class BlockRule(NamedTuple):
    """The blocks of an operand, and the rule of their scales; see `quantize`.

    Attributes:
      scaling: the rule.
      square: whether blocks are (32, 32); one array serves both products of one format, but on
        Blackwell.
    """

    scaling: Scaling
    square: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ProductOperand:
    """An operand of one product, in one form.

    Attributes:
      array: an `MXArray` or floats, arranged (arrangements.py).
      axis: the contracted axis, -1 or -2.
      gathered: whether devices hold all of it: its gradient is not split like it.
    """

    array: MXArray | jax.Array
    axis: int = dataclasses.field(default=-1, metadata={"static": True})
    gathered: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class HeldForm(ProductOperand):
    """A form of a `QuantizedWeight`: a pytree whose leaves belong to the array.

    JAX takes derivatives by the whole of the weight, whose forms get zeros that nobody reads; an
    `MXArray` that is a pytree node refuses that.
    """

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """The array's leaves; and what is static, of the array too."""
        leaves, of_array = self.array, None
        if isinstance(leaves, MXArray):
            of_array = tuple(map(vars(leaves).__getitem__, mxarray.STATIC))
            leaves = leaves.values, leaves.scales
        return (leaves,), (self.axis, self.gathered, of_array)

    def tree_flatten_with_keys(self) -> tuple[tuple, tuple]:
        """The same, by the name of its attribute."""
        (leaves,), static = self.tree_flatten()
        return ((jax.tree_util.GetAttrKey("array"), leaves),), static

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: Any) -> HeldForm:
        """The inverse."""
        (leaves,), (axis, gathered, of_array) = children, aux
        array = leaves if of_array is None else mxarray.unflattened(of_array, leaves)
        return cls(array, axis, gathered)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight that many products take and that is quantized once; see `Recipe.quantize_weight`.

    Attributes:
      floats: the weight; gradients reach it, products do not read it.
      contracted_form: the form for the forward product.
      free_form: the form for the product that gives the gradient of the activations.
      recipe: the `Recipe` of both forms.
      arrangement: the arrangement of both forms.
    """

    floats: jax.Array
    contracted_form: HeldForm
    free_form: HeldForm
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

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError("a QuantizedWeight is floats and two quantized forms; take .floats")


def chips_of(chosen: Any) -> str:
    """The chips that "auto" chose a recipe for; "" where a caller passed it."""
    return "" if chosen is None else chosen[1]


def _arrangement(text: bytes) -> tuple[Arrangement]:
    parts: Any = (tuple(part) if isinstance(part, list) else part for part in json.loads(text))
    return (Arrangement(*parts),)


def _serialized(aux: tuple) -> bytes:
    *static, of_array = aux
    text = None if of_array is None else mxarray.serialized(of_array).decode()
    return json.dumps([*static, text]).encode()


def _deserialized(text: bytes) -> tuple:
    *static, of_array = json.loads(text)
    return *static, None if of_array is None else mxarray.deserialized(of_array.encode())


jax.export.register_pytree_node_serialization(
    HeldForm,
    serialized_name="jax_mx.Form",
    serialize_auxdata=_serialized,
    deserialize_auxdata=_deserialized,
)
jax.export.register_pytree_node_serialization(
    QuantizedWeight,
    serialized_name="jax_mx.QuantizedWeight",
    serialize_auxdata=lambda aux: json.dumps(aux[0]).encode(),
    deserialize_auxdata=_arrangement,
)


_SUMMED = {MXFP8_E4M3, MXFP8_E5M2}  # formats of which one call makes both forms, so also the sums
# The content of an operand's two axes, the one that its first reader contracts first.
_AXES = {
    "lhs": ("contracted elements", "rows"),
    "rhs": ("contracted elements", "columns"),
    "gradient": ("columns", "rows"),
}


class _Part(NamedTuple):
    """One of the forms that are wanted: its number, use and axis; whether it comes as floats."""

    number: int
    use: Use
    axis: int
    as_floats: bool


# A number that is folded into the keys of forms, far from those that callers count layers by.
_FORMS = 0x6D78_0000


def _apart(use: Use, number: int) -> Use:
    """How a form is taken, of so many that one call makes: each rounds by bits of its own.

    An element's random bits follow from the key and its place. Two arrays of one width that one key
    rounds would have the same bits, and the second rounding would depend on the first.
    """
    if use.rounding is None or number == 0:
        return use
    key = jax.random.fold_in(use.rounding.key, _FORMS + number)
    return use._replace(rounding=dataclasses.replace(use.rounding, key=key))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Unquantized:
    """A request for an operand: floats, recipe and readers. `forms` makes a form for each reader.

    Attributes:
      x: (..., rows, columns), arranged.
      recipe: a `Recipe`, which says formats, scaling and windows.
      rows: int32 (R,), of x (T, columns): the operand is x[rows], with zeros for numbers that x has
        no row of; or None.
      activation: a `Gated`: the operand is what this makes of x (..., rows, 2 columns); or None.
      name: "lhs", "rhs" or "gradient".
      axis: the axis that the first reader contracts, -1 or -2; the second reader contracts the
        other.
      wanted: whether each of both readers exists.
      frozen: for which of them the other operand is frozen, and this one bfloat16.
      pads: how many zeros follow the last two axes of x.
      across: for each reader the axes of a shard_map among whose devices a row lies that it
        contracts.
      number: of the operand among those that one call rounds at random by one key.
      moves: whether its rows move one by one, with their scales.
      joined: the mesh on which devices' parts of its forms are joined; or None.
      sums: whether sums of its columns are wanted, too.
    """

    x: Any
    recipe: Any
    rows: jax.Array | None = None
    activation: Any = None
    name: str = dataclasses.field(default="lhs", metadata={"static": True})
    axis: int = dataclasses.field(default=-1, metadata={"static": True})
    wanted: tuple[bool, bool] = dataclasses.field(default=(True, True), metadata={"static": True})
    frozen: tuple[bool, bool] = dataclasses.field(default=(False, False), metadata={"static": True})
    pads: tuple[int, int] = dataclasses.field(default=(0, 0), metadata={"static": True})
    across: tuple[Any, Any] = dataclasses.field(default=((), ()), metadata={"static": True})
    number: int = dataclasses.field(default=0, metadata={"static": True})
    moves: bool = dataclasses.field(default=False, metadata={"static": True})
    joined: Any = dataclasses.field(default=None, metadata={"static": True})
    sums: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def of(
        cls,
        side: Arrangement,
        x: jax.Array,
        recipe: Any,
        name: str = "rhs",
        wanted: tuple[bool, bool] = (True, True),
    ) -> Unquantized:
        """The operand of a dense product, of floats that are arranged here."""
        options: dict[str, Any] = {"axis": side.axis, "wanted": wanted, "pads": side.pads}
        return cls(side.arranged(x), recipe, name=name, **options)

    @property
    def uses(self) -> tuple[Use | None, Use | None]:
        """How both readers take it; None where there is none."""
        return self.recipe.uses(self.name, self.wanted, self.frozen)

    @property
    def blocks(self) -> BlockRule:
        """Its blocks, and the rule of their scales."""
        return self.recipe.blocks(self.name)

    def forms(self, as_floats: Sequence[bool] = (False, False)) -> tuple[Any, ...]:
        """Both forms, None where there is no reader.

        Args:
          as_floats: of each form whether it is the floats that codes stand for, which one kernel
            gives in place of these; of an operand of which there may be such.

        Returns:
          Both; with sums a third: float32 sums of the gradient's columns, of 32 rows each where a
          kernel may make both forms (see `reference.sums_of`), else all of its rows.

        Raises:
          ShardingTypeError: on a mesh with explicit axes, a shard splits a block.
        """
        self._require_whole_blocks()
        parts, x = self._parts(as_floats), self.x
        x = padded(x, self.pads) if any(self.pads) else x
        if self.sums and not self._sums_with(parts):
            rows = made("quantize", x, self.activation)
            return *dataclasses.replace(self, sums=False).forms(), rows.astype(jnp.float32)
        forms = self._forms_of(x, parts)
        return forms.get(0), forms.get(1), *([forms[2]] if 2 in forms else [])

    def _parts(self, as_floats: Sequence[bool]) -> list[_Part]:
        """The forms that are wanted, each of which rounds by a key of its own."""
        axes = (self.axis, -3 - self.axis)
        uses = [use and _apart(use, 2 * self.number + i) for i, use in enumerate(self.uses)]
        if self._is_written_twice:
            uses = [use and use._replace(window=SQUARE) for use in uses]
        return [
            _Part(i, use, axis, floats)
            for i, (use, axis, floats) in enumerate(zip(uses, axes, as_floats, strict=True))
            if use is not None
        ]

    @property
    def _is_written_twice(self) -> bool:
        """Whether square blocks are written for each reader: codes along its axis, its scales.

        So Blackwell reads both as they lie; elsewhere one array serves both.
        """
        first, second = self.uses
        alike = self.blocks.square and first == second and self.joined is None
        alike = alike and first is not None and first.format is not None and first.window == BLOCK
        return alike and layout_for_trace(self._type) == BLOCKED_128X4

    def _forms_of(self, x: jax.Array, parts: list[_Part]) -> dict[int, Any]:
        """The forms by their numbers; the sums are number 2."""
        coded = [part for part in parts if part.use.format is not None]
        apart = not share_a_read([part.use.window for part in coded])
        forms: dict[int, Any] = {}
        for part in parts:
            if part not in coded:
                forms[part.number] = ProductOperand(self._floats(x), part.axis)
            elif self.blocks.square and part.use.window != SQUARE:
                same = [p for p in coded if p.use.format == part.use.format]
                if same[0] is part:  # one array serves both
                    (array,) = self._quantized(x, [part])
                    forms |= {p.number: ProductOperand(array, p.axis) for p in same}
            elif apart or part is coded[0]:
                # `quantize_both` gives first what runs along the last axis.
                ordered = [part] if apart else sorted(coded, key=lambda part: -part.axis)
                arrays = self._quantized(x, ordered)
                for p, array in zip(ordered, arrays, strict=False):
                    forms[p.number] = ProductOperand(array, p.axis if p.as_floats else -1)
                forms |= {2 + i: array for i, array in enumerate(arrays[len(ordered) :])}
        return forms

    def _quantized(self, x: jax.Array, parts: list[_Part]) -> tuple[Any, ...]:
        """Codes, or the floats that they stand for, of one part or two, by one call."""
        both = len(parts) == 2
        square = self.blocks.square and parts[0].use.window != SQUARE
        transpose = [not part.as_floats and not square for part in parts]
        first = "quantize_both" if both else "quantize"
        asked = Options(
            formats=tuple(part.use.format for part in parts),
            axis=-1 if both or square else parts[0].axis,
            scaling=self.blocks.scaling,
            scale_layout=ROW_MAJOR if square else self._scale_layout,
            transpose=(False, transpose[1]) if both else transpose[0],
            block=(BLOCK, BLOCK) if square else BLOCK,
            value_layouts=(ROW_MAJOR_VALUES,) * len(parts),
            chosen=chips_of(self.recipe.chosen),
            across=tuple(self.across[part.number] for part in parts) if any(self.across) else (),
            preprocessing=tuple(
                dataclasses.replace(
                    preprocessing_of(first, use.rounding, use.hadamard, use.window, SHARD, SQUARE),
                    dequantized=as_floats,
                )
                for _, use, _, as_floats in parts
            ),
        )
        data = tuple(data_of(part.use.rounding, part.use.hadamard) for part in parts)
        activation = WithSums(self.activation) if self.sums else self.activation
        return called(first, asked, x, data, self.rows, activation)

    @property
    def _scale_layout(self) -> ScaleLayout:
        """The layout of scales, except of square blocks, which kernels write in rows alone."""
        return ROW_MAJOR if self.moves else layout_for_trace(self._type, self.joined)

    def _type(self) -> Any:
        """The shape of what is quantized, and on explicit meshes how it is split."""
        x = padded(self.x, self.pads) if any(self.pads) else self.x
        return jax.eval_shape(self._made, x)

    def _made(self, x: jax.Array) -> jax.Array:
        """The floats that `quantize` would make of x."""
        x = x if self.rows is None else reference.rows_of(x, self.rows)
        return x if self.activation is None else made("quantize", x, self.activation)

    def _floats(self, x: jax.Array) -> jax.Array:
        """The floats that `quantize` would take, in bfloat16 unless the recipe leaves floats."""
        x = self._made(x)
        return x.astype(jnp.bfloat16) if self.recipe.rounds else x

    def _sums_with(self, parts: list[_Part]) -> bool:
        """Whether one call gives both forms and the sums."""
        formats = [part.use.format for part in parts]
        joint = len(parts) == 2 and None not in formats
        joint = joint and share_a_read([part.use.window for part in parts])
        alike = joint and (formats[0] == formats[1] or {*formats} <= _SUMMED)
        return alike and not self.blocks.square and self.activation.has_gate

    def _require_whole_blocks(self) -> None:
        """Refuses an operand of which a shard splits a block, on a mesh with explicit axes.

        Raises:
          ShardingTypeError: so it is.
        """
        if self.rows is not None or not is_explicit(jax.typeof(self.x).sharding.mesh):
            return
        uses, square = self.uses, self.blocks.square
        coded = [use is not None and use.format is not None for use in uses]
        windows = [use.window for use in self.recipe.uses(self.name)]
        sides = (self.axis, -3 - self.axis), _AXES[self.name], uses, coded, windows
        for at, noun, use, is_coded, window in zip(*sides, strict=True):
            names, shards = shards_of(self.x, at)
            turn = use.hadamard.size if use is not None and use.hadamard is not None else 1
            unit = math.lcm(max(lengths_of(window)), turn)
            lies = is_coded or self.pads[at] or (square and any(coded))
            if lies and shards > 1 and self.x.shape[at] % (shards * unit):
                raise private.ShardingTypeError(
                    f"products: the {self.x.shape[at]} {noun} of {self.name} are split over "
                    f"{' x '.join(names)} in {shards} shards of {self.x.shape[at] / shards:g}, "
                    f"which {unit} does not divide, so that blocks would not stay whole; gather "
                    "them with jax.sharding.reshard"
                )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Moved(Unquantized):
    """A request for an operand of rows that moved as codes: x is an `MXArray` along its last axis.

    Along their elements codes stay as they are. Along the other axis rows are quantized anew, from
    what the codes stand for.
    """

    def forms(self, as_floats: Sequence[bool] = (False, False)) -> tuple[Any, ...]:
        """See `Unquantized.forms`."""
        assert self.rows is not None
        if any(as_floats):  # quantized again along its elements, an array is the same floats
            names = ("name", "wanted", "frozen", "number")
            options: dict[str, Any] = {name: getattr(self, name) for name in names}
            floats = Unquantized(floats_of(self.x), self.recipe, self.rows, **options)
            return floats.forms(as_floats)
        forms: dict[int, ProductOperand] = {}
        for number, use, axis, _ in self._parts(as_floats):
            if number == 0:
                forms[0] = ProductOperand(_picked(self.x, self.rows))
            elif use.format is None:
                forms[1] = ProductOperand(self._floats(floats_of(self.x)), axis)
            else:
                turned: Any = requantize(
                    self.x,
                    use.format,
                    rows=self.rows,
                    axis=axis,
                    transpose=True,
                    scaling=self.blocks.scaling,
                    scale_layout=layout_for_trace(),
                    window=use.window,
                    hadamard=use.hadamard,
                    rounding=use.rounding,
                )
                forms[1] = ProductOperand(turned)
        return forms.get(0), forms.get(1)


def moves_as_floats(tokens: Unquantized) -> bool:
    """Whether rows of which the first form alone is read move as floats, whatever the wire."""
    use = tokens.uses[0]
    assert use is not None
    return use.format is None or use.hadamard is not None


def _picked(q: MXArray, rows: jax.Array) -> MXArray:
    """q[rows] of an array with blocks along the last axis, with zeros for rows that it lacks."""
    values, scales = (reference.rows_of(a, rows) for a in (q.values, q.scales))
    return dataclasses.replace(q, values=values, scales=scales)


def held_forms(request: Unquantized, dequantized: bool = False) -> tuple[HeldForm, HeldForm]:
    """Both forms as a `QuantizedWeight` holds them; `dequantized`: as bfloat16."""
    forms = request.forms()
    arrays = {id(form.array): form.array for form in forms}  # of square blocks one serves both
    if dequantized:
        arrays = {i: floats_of(x) if isinstance(x, MXArray) else x for i, x in arrays.items()}
    first, second = (HeldForm(arrays[id(form.array)], form.axis) for form in forms)
    return first, second


def _read(forms: Sequence[HeldForm]) -> tuple[ProductOperand, ...]:
    """The forms of a `QuantizedWeight` as products read them."""
    return tuple(ProductOperand(**vars(form)) for form in forms)


def weight_forms(floats: Any, quantized: Any, recipe: Any, dgrad: bool) -> Any:
    """The forms of a weight of groups: for the forward product, for the gradient of lhs.

    Args:
      floats: (G, K, N), or None.
      quantized: a frozen `MXArray`, (G, K, N) or (G, N, K); or both forms; or None.
      recipe: of floats.
      dgrad: whether the second one is wanted.
    """
    if isinstance(quantized, MXArray):
        at = quantized.axis if len(quantized.block) == 1 else -2
        return ProductOperand(quantized, at), ProductOperand(quantized, -3 - at)
    if quantized is not None:
        return _read(quantized)
    return Unquantized(floats, recipe, name="rhs", axis=-2, wanted=(True, dgrad)).forms()


def operand_for(
    side: Arrangement, x: Any, quantized: Any, recipe: Any, name: str, wanted: tuple[bool, bool]
) -> Any:
    """An operand of a dense product: its floats as they are to be quantized, or its forms.

    Args:
      side: how it is arranged.
      x: floats, which nobody reads where something is quantized already; or None.
      quantized: an `MXArray`, both forms, or None.
      recipe: of floats.
      name: "lhs" or "rhs".
      wanted: whether each of both forms is needed.
    """
    if isinstance(quantized, MXArray):
        form = ProductOperand(_arranged_mx(side, quantized), side.axis)
        return form, dataclasses.replace(form, axis=-3 - side.axis)
    if quantized is not None:
        return _read(quantized)
    return Unquantized.of(side, x, recipe, name, wanted)


def _arranged_mx(side: Arrangement, q: MXArray) -> MXArray:
    """An MXArray arranged like floats: its values and its scales, by themselves."""
    if side.is_moved:
        q = q.with_scales_in(ROW_MAJOR).with_values_in(ROW_MAJOR_VALUES)
    values, scales = (
        a if layout.is_tiled else side.arranged(a)
        for a, layout in ((q.values, q.value_layout), (q.scales, q.scale_layout))
    )
    return dataclasses.replace(
        q, values=values, scales=scales, axis=-1 if len(q.block) == 2 else side.axis
    )
