"""What `dot_general`, `mlp` and `moe` share, each with its derivative.

Operands are split into floats that get a gradient and what is quantized already; both become forms
(forms.py), in the order of dimensions that operands.py says. Each product multiplies two forms.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.arrays.checks import array_of, has_elements, held, name_among, shown
from jax_mx.arrays.sharding import is_explicit, names_in, resharded, shards_of, spec_of, unsplit
from jax_mx.facts.formats import BLOCK
from jax_mx.facts.layouts import ROW_MAJOR, ROW_MAJOR_VALUES
from jax_mx.facts.windows import lengths_of
from jax_mx.lowering import primitive
from jax_mx.ops.activations import Gated
from jax_mx.ops.mxarray import MXArray, checked, dequantize
from jax_mx.ops.quantizing import WithSums
from jax_mx.products.forms import (
    Form,
    QuantizedWeight,
    Use,
    forms_of,
    frozen_or,
    may_be_floats,
)
from jax_mx.products.operands import Arrangement, Layout, padded
from jax_mx.products.product import contracted
from jax_mx.products.recipes import Recipe

RESIDUALS = ("mx", "floats", "inputs")  # what `mlp` and `moe` keep of gate and up

# What jax.lax.dot_general takes as a precision by name; of these, what FP8 tensor cores give.
PRECISIONS = (
    *("default", "fastest", "bfloat16", "high", "bfloat16_3x", "tensorfloat32"),
    *("highest", "float32", *(preset.name for preset in jax.lax.DotAlgorithmPreset)),
)
_LEAST = ("default", "fastest", "bfloat16", "f16_f16_f16", "bf16_bf16_bf16")


# ---- what callers pass ---
def operand_of(op: str, name: str, x: Any) -> Any:
    """An operand as products take it: an array, an `MXArray` in rows, or a `QuantizedWeight`.

    Raises:
      TypeError: it is none of these.
    """
    x = held(x)
    if isinstance(x, MXArray):
        return checked(op, name, x).with_values_in(ROW_MAJOR_VALUES).with_scales_in(ROW_MAJOR)
    if isinstance(x, QuantizedWeight):
        if name == "lhs":
            raise TypeError(f"{op}: lhs is a QuantizedWeight; weights go on the right-hand side")
        return x
    has_elements(op, name, x)
    if not hasattr(x, "dtype"):
        try:
            return jnp.asarray(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{op}: {name} must be an array, got {shown(x)}") from error
    return x.astype(x.dtype.newbyteorder("=")) if isinstance(x, np.ndarray) else x


def is_exact(op: str, precision: Any) -> bool:
    """Whether a precision asks, for some operand, for more than FP8 tensor cores give.

    So does all that is above JAX's default, and an algorithm that sums in float32, unless it names
    FP8.

    Raises:
      TypeError, ValueError: no precision of JAX.
    """
    if precision is None:
        config: Any = jax.config
        precision = config.jax_default_matmul_precision
    if isinstance(precision, jax.lax.DotAlgorithm):  # a tuple, too
        sizes = [jnp.dtype(each).itemsize for each in precision[:3]]
        return sizes[2] > 2 and sizes[:2] != [1, 1]
    if isinstance(precision, tuple | list):
        return any(_names_more(op, each) for each in precision)
    return _names_more(op, precision)


def _names_more(op: str, precision: Any) -> bool:
    if precision is None:
        return False
    if isinstance(precision, jax.lax.Precision | jax.lax.DotAlgorithmPreset):
        name = precision.name.lower()
    else:
        name = name_among(f"{op}: precision", PRECISIONS, precision).lower()
    return name not in _LEAST and not name.startswith("any_f8")


def is_square(rhs: Any, recipe: Recipe) -> bool:
    """Whether rhs are floats that square blocks are made of."""
    return rhs is not None and not isinstance(rhs, MXArray) and recipe.blocks("rhs").square


def check_quantized(op: str, name: str, x: Any, side: Arrangement) -> None:
    """Refuses an operand that was quantized along other dimensions.

    Raises:
      ValueError: so it is.
    """
    if isinstance(x, QuantizedWeight):
        if (own := x.arrangement) != side:
            raise ValueError(
                f"{op}: {name} was quantized for contracted dimensions {[*own.contracted_dims]} "
                f"and batch dimensions {[*own.order[: own.batch]]}; pass those of this product to "
                "Recipe.quantize_weight"
            )
    if not isinstance(x, MXArray):
        return
    last = side.contracted_dims[-1]
    spans = (x.ndim - 2, x.ndim - 1) if len(x.block) == 2 else (x.axis + x.ndim,)
    if last not in spans or (len(x.block) == 2 and len(side.order) - side.batch > 2):
        dims = side.contracted_dims
        remedy = f"quantize it along dimension {last}"
        if x.shape[last] % BLOCK:
            remedy = f"{remedy}, the last of them, once 32 divides it"
        what = f"dimension{'s' * (len(dims) > 1)} {', '.join(map(str, dims))}"
        raise ValueError(
            f"{op}: {name} has blocks along dimension {', '.join(map(str, spans))}, the product "
            f"contracts {what}; {remedy}"
        )


def bias_of(op: str, name: str, bias: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """A bias as an array of JAX, or None.

    Raises:
      TypeError, ValueError: it is none of this shape.
    """
    if bias is None:
        return None
    bias = array_of(op, name, bias)
    if bias.shape != shape:
        raise ValueError(f"{op}: {name} has the shape {bias.shape}, must be {shape}, or None")
    return bias


def residuals_of(op: str, residuals: Any, recipe: Recipe) -> str:
    """What is kept of gate and up, one of `RESIDUALS`; of None what the recipe's forward reads.

    Raises:
      TypeError, ValueError: it is none.
    """
    if residuals is None:
        residuals = "floats" if recipe.uses("lhs")[0].format is None else "mx"
    return name_among(f"{op}: residuals", RESIDUALS, residuals)


def floats_kept(gate_up: Any, dtype: np.dtype) -> jax.Array:
    """Gate and up as floats, of what was kept of them."""
    if not isinstance(gate_up, MXArray):
        return gate_up
    # float16 may be too small for what was rounded up; what meets it is float32 then, too.
    return dequantize(gate_up, jnp.float32 if dtype == jnp.float16 else dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def once_derived(op: str, *args: Any) -> tuple[Any, ...]:
    """The args, in a derivative that has none by any of them: codes would lose it in silence.

    The forward pass gives what it is differentiated by and `MARK`, which it keeps for the backward
    pass to give beside its gradient: of what no gradient reads, JAX removes the check, too.
    """
    del op
    return args


MARK = np.zeros((), bool)


@once_derived.defjvp
def _derived_again(op: str, *_: Any) -> Any:
    return primitive.no_second(op)


def parts_of(x: Any) -> tuple[Any, Any]:
    """The floats that gradients reach, and what is quantized already."""
    if isinstance(x, MXArray):
        return None, x
    if isinstance(x, QuantizedWeight):
        return x.floats, (x.contracted_form, x.free_form)
    return x, None


def gathered_for(lhs: Any, rhs: jax.Array, layout: Layout, placed: bool) -> jax.Array:
    """The weights without splits over mesh axes that split the rows of lhs: FSDP.

    The product gathers them anyway. Here it is one gather of floats, else one for each direction.

    Args:
      lhs: the activations.
      rhs: the weights.
      layout: of the product.
      placed: whether the caller says how the result is split; if not, jax.lax.dot_general refuses
        such splits of columns, and so does this.
    """
    mesh = jax.typeof(rhs).sharding.mesh
    if not is_explicit(mesh):
        return rhs
    lhs = lhs.values if isinstance(lhs, MXArray) else lhs
    rows = {name for axis in layout.lhs.free_dims for name in shards_of(lhs, axis)[0]}
    free = () if placed else layout.rhs.free_dims
    return unsplit(rhs, rows, [axis for axis in range(rhs.ndim) if axis not in free])


# ---- the steps ---
class Static(NamedTuple):
    """What of a product is neither array nor key."""

    layout: Layout
    dtype: np.dtype
    exact: bool
    implementation: str | None
    out_sharding: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Side:
    """What of an operand's floats the backward pass has to know: their type says it.

    Attributes:
      dtype: of the floats.
      spec: their partition spec, on a mesh with explicit axes.
      arranged: that of the arranged operand.
    """

    dtype: np.dtype
    spec: tuple
    arranged: tuple


def forms_for(
    side: Arrangement,
    x: Any,
    quantized: Any,
    recipe: Recipe,
    name: str,
    wanted: tuple[bool, bool],
    as_floats: tuple[bool, bool] = (False, False),
) -> Any:
    """An operand's forms along the contracted and the free axis, those that are wanted."""
    if isinstance(quantized, MXArray):
        form = Form(_arranged_mx(side, quantized), side.axis)
        return form, dataclasses.replace(form, axis=-3 - side.axis)
    if quantized is not None:
        return quantized
    own = (name, side.arranged(x), side.axis, uses_of(recipe, name, wanted), recipe, side.pads)
    return blocks_along(*own, as_floats=as_floats)


def may_be_forms_of_floats(
    name: str, x: Any, quantized: Any, recipe: Recipe, wanted: tuple[bool, bool]
) -> bool:
    """Whether there may be a kernel that gives the first of `forms_for` as floats."""
    uses = uses_of(recipe, name, wanted)
    return quantized is None and may_be_floats(x, uses, recipe.blocks(name))


def uses_of(recipe: Recipe, name: str, wanted: tuple[bool, bool]) -> tuple[Use | None, Use | None]:
    """How products take an operand along both of its axes, those that are wanted."""
    first, second = (
        use if want else None for use, want in zip(recipe.uses(name), wanted, strict=True)
    )
    return first, second


def gradient_uses(recipe: Recipe, is_frozen: bool) -> tuple[Use, Use | None]:
    """How both products take a gradient; beside a frozen weight there is one."""
    along, across = recipe.uses("gradient")
    return frozen_or(along, is_frozen), None if is_frozen else across


# What the two axes of an operand hold, the one that comes first in `Recipe.uses` first.
_AXES = {
    "lhs": ("contracted elements", "rows"),
    "rhs": ("contracted elements", "columns"),
    "gradient": ("columns", "rows"),
}


def blocks_along(
    name: str,
    x: jax.Array,
    axis: int,
    uses: Any,
    recipe: Recipe,
    pads: tuple[int, int] = (0, 0),
    activation: Gated | WithSums | None = None,
    as_floats: tuple[bool, bool] = (False, False),
) -> Any:
    """`forms_of`, with zeros behind the last two axes of x.

    Raises:
      ShardingTypeError: on a mesh with explicit axes, a shard splits a block.
    """
    blocks = recipe.blocks(name)
    quantized = [use is not None and use.format is not None for use in uses]
    for at, what, use, here in zip((axis, -3 - axis), _AXES[name], uses, quantized, strict=True):
        names, shards = shards_of(x, at)
        turn = use.hadamard.size if use is not None and use.hadamard is not None else 1
        unit = math.lcm(max(lengths_of(blocks.window)), turn)
        lies = here or pads[at] or (blocks.square and any(quantized))
        if lies and shards > 1 and x.shape[at] % (shards * unit):
            raise primitive.ShardingTypeError(
                f"products: the {x.shape[at]} {what} of {name} are split over "
                f"{' x '.join(names)} in {shards} shards of {x.shape[at] / shards:g}, which {unit} "
                "does not divide, so that blocks would not stay whole; gather them with "
                "jax.sharding.reshard"
            )
    made_of: dict[str, Any] = {"activation": activation, "as_floats": as_floats}
    return forms_of(padded(x, pads), axis, uses, blocks, **made_of)


def _arranged_mx(side: Arrangement, q: MXArray) -> MXArray:
    """An MXArray arranged like floats: its values and its scales, by themselves."""
    values, scales = side.arranged(q.values), side.arranged(q.scales)
    return dataclasses.replace(
        q, values=values, scales=scales, axis=-1 if len(q.block) == 2 else side.axis
    )


def multiplied(static: Static, a: Form, b: Form, rows: int, spec: Any, dtype: Any) -> jax.Array:
    """(B..., free of a..., free of b...).

    Args:
      static: of the whole.
      a: (B..., rows..., .., ..).
      b: likewise.
      rows: how many dimensions right behind B the product also sums over.
      spec: the partition spec of the result on a mesh with explicit axes; None: not known.
      dtype: of the result.
    """
    n = static.layout.lhs.batch
    batch, more = tuple(range(n)), tuple(range(n, n + rows))
    values = a.array.values if isinstance(a.array, MXArray) else a.array
    mesh = jax.typeof(values).sharding.mesh
    sharding = None
    if spec is not None and is_explicit(mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return contracted(
        a.array,
        b.array,
        ((*more, a.axis), (*more, b.axis)),
        (batch, batch),
        dtype,
        exact=static.exact,
        out_sharding=sharding,
        implementation=static.implementation,
    )


def forward(static: Static, a: Form, b: Form) -> jax.Array:
    """The result as its caller wants it, without zero rows; of two arranged forms."""
    layout, out = static.layout, static.out_sharding
    spec = None
    if out is not None:
        ndim = layout.lhs.batch + len(layout.lhs.free) + len(layout.rhs.free)
        spec = layout.result_spec(_spec_in(out, ndim))
    return placed(layout.result(multiplied(static, a, b, 0, spec, static.dtype)), out)


def placed(y: jax.Array, out_sharding: Any) -> jax.Array:
    """y split as its caller wants it, if he says it; on explicit meshes and automatic ones."""
    if out_sharding is None:
        return y
    mesh: Any = jax.typeof(y).sharding.mesh
    if mesh.empty:  # operands that no mesh is known of
        mesh = getattr(out_sharding, "mesh", jax.sharding.get_abstract_mesh())
    if not is_explicit(mesh):
        return jax.lax.with_sharding_constraint(y, out_sharding)
    return resharded(y, _spec_in(out_sharding, y.ndim), mesh)


def _spec_in(out_sharding: Any, ndim: int) -> tuple:
    """The partition spec that a caller gives, by itself or with a mesh, an entry a dimension."""
    is_named = isinstance(out_sharding, jax.sharding.NamedSharding)
    spec = out_sharding.spec if is_named else out_sharding
    return (*spec, *[None] * (ndim - len(spec)))


def side_of(side: Arrangement, x: Any) -> Side | None:
    """What the backward pass has to know of an operand's floats; None where there are none."""
    if x is None:
        return None
    return Side(x.dtype, spec_of(x), spec_of(side.arranged(x)))


def lhs_gradient(static: Static, along_n: Form, b: Form, lhs: Side) -> jax.Array:
    """The gradient of lhs as its caller has it, from the result's along columns and rhs."""
    layout = static.layout.lhs
    spec = lhs.arranged
    if layout.swapped:  # of (B..., M..., K)
        *lead, k, m = spec
        spec = (*lead, m, k)
    dx = multiplied(static, along_n, b, 0, spec, lhs.dtype)
    return layout.restored(jnp.swapaxes(dx, -1, -2) if layout.swapped else dx, lhs.spec)


def rhs_gradient(static: Static, a: Form, along_m: Form, rhs: Side) -> jax.Array:
    """The gradient of rhs as its caller has it, from lhs and the result's, both along rows."""
    layout = static.layout
    order = (a, along_m) if layout.rhs.swapped else (along_m, a)
    dw = multiplied(static, *order, len(layout.lhs.free_out) - 1, rhs.arranged, rhs.dtype)
    return layout.rhs.restored(dw, rhs.spec)


def gathered_once(layout: Layout, dy: Any, lhs: Side | None, rhs: Side | None) -> jax.Array:
    """The result's gradient without splits over mesh axes that split what is contracted.

    Such a result was scattered. Here it is one gather of floats, else one for each direction.
    """
    if not is_explicit(jax.typeof(dy).sharding.mesh):
        return dy
    names = {
        name
        for side, arrangement in ((lhs, layout.lhs), (rhs, layout.rhs))
        if side is not None
        for axis in arrangement.contracted_dims
        for name in names_in(side.spec[axis])
    }
    return unsplit(dy, names, range(dy.ndim))
