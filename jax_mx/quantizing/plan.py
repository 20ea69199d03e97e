"""Plans: one call, validated and canonical.

`planning` plans quantizers and refuses calls; `jax_mx.products.kernel_plans` plans products.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jax_mx.formats.directions import Blocks, Direction, Form
from jax_mx.formats.formats import BLOCK, FORMATS, Format, Scaling
from jax_mx.formats.layouts import (
    ROW_MAJOR,
    ROW_MAJOR_VALUES,
    SCALE_LAYOUTS,
    VALUE_LAYOUTS,
    ScaleLayout,
    ValueLayout,
)
from jax_mx.formats.units import covered
from jax_mx.formats.views import View, view_of
from jax_mx.formats.windows import ROW, Window, in_blocks, of_kernels
from jax_mx.quantizing.facts.preprocessing import NO_PREPROCESSING, Preprocessing
from jax_mx.quantizing.facts.product_kernels import ProductKernel
from jax_mx.quantizing.facts.signatures import Array, Role, Signature, signature_of
from jax_mx.quantizing.facts.sources import Source, X


@dataclasses.dataclass(frozen=True)
class Plan:
    """One call, without its shapes: these are the buffers' own, and differ per shard and vmap.

    Attributes:
      op: "quantize", "quantize_both" or "dequantize"; "fake_quantize" until its parts are planned.
      dtype: of the unquantized side.
      formats: of the quantized side; two for quantize_both.
      axis: the axis that blocks run along, negative; of quantize_both's first result.
      scale_layout: where scales lie.
      scaling: the scale's rule; None for dequantize.
      implementation: the one the caller insists on, or None.
      transpose: whether the form transposes: the (last) result of quantize has its block axis
        last, that of dequantize its last two axes swapped.
      block: of the quantized side: (32,), or (32, 32) on the last two axes, with axis -1.
      zero_scale: the scale's byte of an all-zero block; matters to quantize alone.
      value_layouts: where the values of quantize's results lie; dequantize reads row-major ones.
      preprocessing: of the elements of each of quantize's results, beside scaling; with their
        window.
      caller: the public function that makes the call, for messages; empty: the op itself.
      source: of the floats.
      chosen: the chips that the recipe "auto" chose windows of rows for: in a program for others
        they are of 32. Empty: the caller asks for them.
      across: for each result the axes of a shard_map among whose devices a window "row" lies; ():
        none does.
    """

    op: str
    dtype: np.dtype
    formats: tuple[Format, ...]
    axis: int = -1
    scale_layout: ScaleLayout = ROW_MAJOR
    scaling: Scaling | None = None
    implementation: str | None = None
    transpose: bool = False
    block: tuple[int, ...] = (BLOCK,)
    zero_scale: int = 0
    value_layouts: tuple[ValueLayout, ...] = (ROW_MAJOR_VALUES,)
    preprocessing: tuple[Preprocessing, ...] = (NO_PREPROCESSING,)
    caller: str = ""
    source: Source = X
    chosen: str = ""
    across: tuple[tuple[str, ...], ...] = ()

    def __hash__(self) -> int:
        return self._hash  # computed once: jit looks a plan up at every eager call

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.caller or self.op

    @property
    def is_square(self) -> bool:
        """Whether a block spans two axes."""
        return len(self.block) == 2

    @property
    def format(self) -> Format:
        """The format of the (first) quantized array."""
        return self.formats[0]

    @property
    def axes(self) -> tuple[int, ...]:
        """All axes that blocks run along, negative and ascending."""
        return (-2, -1) if self.op == "quantize_both" or self.is_square else (self.axis,)

    @property
    def first_axis(self) -> int:
        """The first of them, in the unquantized array."""
        swapped = self.op == "dequantize" and self.transpose  # -1 and -2 change places
        return min(-3 - axis if swapped else axis for axis in self.axes)

    @functools.cached_property
    def form(self) -> Form:
        """The directions of its quantized arrays."""
        if self.op == "quantize_both":
            return Form((Direction(Blocks.LAST), Direction(Blocks.SECOND, self.transpose)))
        blocks = Blocks.LAST if self.first_axis == -1 else Blocks.SECOND
        return Form((Direction(Blocks.SQUARE if self.is_square else blocks, self.transpose),))

    @property
    def signature(self) -> Signature:
        """The arrays of the call, with those that it lacks."""
        modes = [steps.mode for steps in self.preprocessing]
        return signature_of(self.op.removesuffix("_both"), modes, self.source)

    @property
    def lacks(self) -> tuple[str, ...]:
        """The operands of the signature that the call does not have: their data is a constant."""
        return tuple(
            array.name
            for array in self.signature.operands
            if array.optional and self.preprocessing[array.of].flips is not None
        )

    @property
    def block_data(self) -> list[Array]:
        """The operands of a uint32 per block that the call has, direction by direction."""
        return [a for a in self.signature.present(self.lacks) if a.role is Role.BLOCK_DATA]

    @property
    def given_data(self) -> list[Array]:
        """The block data that callers give; the rest is derived from the floats."""
        return [array for array in self.block_data if not array.derived]

    @property
    def gives_floats(self) -> bool:
        """Whether floats come out of it, in place of the codes of some result."""
        return any(steps.dequantized for steps in self.preprocessing)

    @property
    def finding(self) -> Plan:
        """The plan whose one call finds the amaxes of windows that are rows, and quantizes."""
        changed = (dataclasses.replace(p, finds=p.window == ROW) for p in self.preprocessing)
        return dataclasses.replace(self, preprocessing=tuple(changed))

    @property
    def of_rows(self) -> Plan:
        """The plan of rows in place of a shard's part of them: the call has their amaxes."""
        return self._with_windows(of_kernels)

    @property
    def in_blocks(self) -> Plan:
        """The plan of windows of 32 in place of rows."""
        return dataclasses.replace(self._with_windows(in_blocks), chosen="")

    def _with_windows(self, change: Callable[[Window], Window]) -> Plan:
        """The plan with other windows, which follow from its own."""
        changed = (dataclasses.replace(p, window=change(p.window)) for p in self.preprocessing)
        return dataclasses.replace(self, preprocessing=tuple(changed))

    @property
    def of_codes(self) -> Plan:
        """The plan of the same codes, all of which come out."""
        changed = (dataclasses.replace(p, dequantized=False) for p in self.preprocessing)
        return dataclasses.replace(self, preprocessing=tuple(changed))

    @property
    def inverse(self) -> Plan:
        """The plan that dequantizes what this one quantizes, in one direction."""
        plain: dict[str, Any] = {"preprocessing": (NO_PREPROCESSING,), "zero_scale": 0}
        return dataclasses.replace(self, op="dequantize", scaling=None, source=X, **plain)

    @property
    def of_view(self) -> Plan:
        """The plan with axis -2, if `Viewed` moves its axis there; else the plan."""
        moved = self.axis < -2 and self.has_units
        return dataclasses.replace(self, axis=-2) if moved else self

    @property
    def launch(self) -> str:
        """The launch of a binary that serves the plan; scales' layouts name launches."""
        return self.scale_layout.name

    @property
    def has_units(self) -> bool:
        """Whether more than a block of the last two axes is to stay whole: tiles, windows."""
        return any(cover != (1, BLOCK) for cover in self.covers)

    @property
    def takes_slabs(self) -> bool:
        """Whether x may have more than two dimensions: where rows are all alike."""
        return (
            self.source.has_slabs
            and self.form.directions[0].blocks is Blocks.LAST
            and not (self.form.is_both or self.has_units)
        )

    @property
    def covers(self) -> list[tuple[int, int]]:
        """How many rows and elements of each result stay whole; see `units.covered`."""
        results = zip(self.value_layouts, self.formats, self.preprocessing, strict=True)
        return [
            covered(self.scale_layout, v, f.codes_per_byte, p.group, p.rows) for v, f, p in results
        ]

    @functools.cached_property
    def view(self) -> View:
        """How its arrays are viewed."""
        view = view_of(self.form)
        if self.has_units:
            return view.laid_out(self.scale_layout, self.value_layouts, self.covers)
        return view.spread(self.first_axis)

    @property
    def scalars(self) -> dict[str, int]:
        """The numbers that a kernel may ask for by name."""
        if self.scaling is None:
            return {}
        numbers = {**self.source.scalars}
        for i, (format, steps) in enumerate(zip(self.formats, self.preprocessing, strict=True)):
            add, exception = self.scaling.rounding(format)
            prescale = np.float32(steps.prescale or 0)
            flips = np.array(steps.flips or (0, 0), np.uint32).view(np.int32)
            numbers |= {
                f"round_add_{i}": add,
                f"round_exception_{i}": exception,
                f"zero_scale_{i}": self.zero_scale,
                f"prescale_{i}": int(prescale.view(np.uint32)),
                f"flips_{i}": int(flips[0]),
                f"flips_odd_{i}": int(flips[1]),
                f"value_tiles_{i}": int(self.value_layouts[i].is_tiled),
            }
        return numbers


@dataclasses.dataclass(frozen=True)
class ProductPlan:
    """One call of a product: y = x @ dequantize(W)^T, per group of x's rows, or of K.

    Attributes:
      op: "matmul", x in floats, "matmul_fp8", x in MX too, or "wgrad_fp8", groups along K;
        "wgrad", the same of floats; "normed", see `ProductKernel`, or "rms_norm", its norm alone;
        "attention", of a token; or "amaxes", of x alone.
      formats: of the quantized operands, x's before W's.
      dtype: of y.
      grouped: whether the call has sizes of groups; without, all groups have as many rows.
      rows: how many rows of x a tile should have; among kernels with others it does not choose.
      window: see `ProductKernel`; so is `tiles`.
      tiles: of W.
      implementation: the one the caller insists on, or None.
      free: see `ProductKernel`; x then has zeros up to a multiple of `UNIT` columns.
      floats: the dtype of its floats, where kernels take several.
      source: of the floats, for "amaxes"; they come out, too.
      tiled: whether x's values and scales lie in AMD's tiles, and W's; kernels for AMD read them.
      parts: of these floats' rows, each of which has amaxes of columns of its own; of "matmul_fp8"
        the parts of the contracted axis that codes of W lie in, one behind the other.
      fast: see `ProductKernel`.
      eps: of a norm.
      scale: of an attention's scores.
      narrow: see `facts.product_kernels.ProductKernel`; so is `activation`.
    """

    op: str
    formats: tuple[Format, ...]
    dtype: np.dtype
    grouped: bool
    rows: int
    window: int | str = BLOCK
    tiles: bool = False
    implementation: str | None = None
    free: bool = False
    floats: str = ""
    source: Source = X
    tiled: tuple[bool, bool, bool, bool] = (False, False, False, False)
    parts: int = 1
    fast: bool = False
    eps: float = 0.0
    narrow: bool = False
    activation: str = ""
    scale: float = 0.0
    # What the lowering asks of any plan:
    value_layouts: ClassVar[tuple[ValueLayout, ...]] = ()
    scale_layout: ClassVar[ScaleLayout] = ROW_MAJOR
    view: ClassVar[None] = None

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.op

    @property
    def signature(self) -> Signature:
        """The arrays of the call, with those that it lacks."""
        return signature_of(self.op, source=self.source)

    @property
    def lacks(self) -> tuple[str, ...]:
        """The operands of the signature that the call does not have."""
        has = ["group_sizes"] * self.grouped
        return tuple(a.name for a in self.signature.operands if a.optional and a.name not in has)

    @property
    def launch(self) -> str:
        """The launch of a binary that serves the plan; dtypes of y name launches."""
        return self.dtype.name

    @property
    def scalars(self) -> dict[str, int]:
        """The numbers that a kernel may ask for by name."""
        if self.op in ("normed", "rms_norm", "attention"):
            floats = {"eps": self.eps, "scale": self.scale}
            return {name: int(np.float32(f).view(np.int32)) for name, f in floats.items()}
        return {"tiled": sum(is_tiled << i for i, is_tiled in enumerate(self.tiled))}

    def product(self, dsl: str) -> ProductKernel:
        """The kernel that the plan asks for; it may not exist."""
        kinds = self.window, self.tiles, self.free, self.floats, str(self.source)
        parted = self.op == "matmul_fp8" and self.parts > 1
        last = parted, self.fast, self.narrow, self.activation
        return ProductKernel(self.op, dsl, self.formats, self.rows, *kinds, *last)


AnyPlan = Plan | ProductPlan


# ---- as JSON has them ---
def described(plan: AnyPlan) -> dict[str, Any]:
    """A plan in names and numbers, from which `plan_in` makes it again."""
    return {f.name: _text(getattr(plan, f.name)) for f in dataclasses.fields(plan)}


def plan_in(description: Mapping[str, Any]) -> AnyPlan:
    """The inverse of `described`."""
    plan_class = Plan if "preprocessing" in description else ProductPlan
    fields = {name: _READ.get(name, _as_is)(value) for name, value in description.items()}
    return plan_class(**fields)


def _text(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [*map(_text, value)]
    if isinstance(value, Preprocessing | Source):
        fields = {f.name: _text(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return fields | ({"class": type(value).__name__} if isinstance(value, Source) else {})
    if isinstance(value, Scaling):
        return value.value
    return getattr(value, "name", value)  # of a format, a layout, a dtype


def _as_is(value: Any) -> Any:
    return tuple(map(_as_is, value)) if isinstance(value, list) else value


def _preprocessing(several: Any) -> tuple[Preprocessing, ...]:
    return tuple(Preprocessing(**{k: _as_is(v) for k, v in one.items()}) for one in several)


def _source(fields: Mapping[str, Any]) -> Source:
    classes = {c.__name__: c for c in (Source, *Source.__subclasses__())}
    return classes[fields["class"]](**{k: v for k, v in fields.items() if k != "class"})


_READ: Mapping[str, Callable[[Any], Any]] = {
    "source": _source,
    "dtype": jnp.dtype,
    "formats": lambda names: tuple(FORMATS[name] for name in names),
    "scale_layout": SCALE_LAYOUTS.__getitem__,
    "scaling": lambda name: None if name is None else Scaling(name),
    "value_layouts": lambda names: tuple(VALUE_LAYOUTS[name] for name in names),
    "preprocessing": _preprocessing,
}
