"""`dot_general`, `matmul` and `einsum`: products in MX with derivatives, floats at both ends."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.arrays.checks import float_dtype, shown
from jax_mx.arrays.sharding import is_explicit, names_in, resharded, shards_of, spec_of, unsplit
from jax_mx.facts.formats import BLOCK, named
from jax_mx.facts.layouts import ROW_MAJOR, ROW_MAJOR_VALUES
from jax_mx.facts.windows import lengths_of
from jax_mx.lowering import primitive
from jax_mx.ops.mxarray import MXArray, checked
from jax_mx.products.forms import Form, QuantizedWeight, Use, forms_of
from jax_mx.products.implementations import IMPLEMENTATIONS
from jax_mx.products.operands import Arrangement, Layout, layout_of, padded
from jax_mx.products.product import contracted
from jax_mx.products.recipes import MXFP8, Recipe, check_frozen, recipe_of

DimensionNumbers = Any  # as jax.lax.dot_general takes them


def dot_general(
    lhs: jax.typing.ArrayLike | MXArray,
    rhs: jax.typing.ArrayLike | MXArray | QuantizedWeight,
    dimension_numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    recipe: Recipe | str = MXFP8,
    out_sharding: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """jax.lax.dot_general with its operands in MX, differentiable in reverse mode.

    Operands that are floats are quantized as the recipe says, in blocks along the contracted
    elements, and so are those of both gradients' products. What is kept for the backward pass is
    MX too, by the name CHECKPOINT_NAME: lhs along its rows, rhs along its columns. Accumulation is
    in float32. flax takes it as `dot_general=`, with functools.partial for a recipe.

    Args:
      lhs: the activations: bfloat16, float16 or float32 of any rank; or an `MXArray` whose blocks
        run along its last contracted dimension.
      rhs: the weights: likewise; or what `Recipe.quantize_weight` returns. An operand that is an
        `MXArray` gets no gradient. For the other one's gradient it counts as the floats that it
        stands for, in a product in bfloat16.
      dimension_numbers: as for jax.lax.dot_general. 32 divides the product of the contracted
        lengths; other lengths may be any.
      precision: HIGHEST keeps FP8 tensor cores out, which sum with reduced precision.
      preferred_element_type: of the result: bfloat16, float16 or float32; None for that of the
        floats, bfloat16 where both are MX.
      recipe: a `Recipe`, or a name: mxfp8, mxfp8_hybrid, mxfp4.
      out_sharding: of the result, see jax.lax.dot_general.
      implementation: "fp8" (the chip's FP8 product of the codes, for arrays of one scale a row),
        "cutedsl" (our kernels on Hopper: windows of 128 and more on FP8 tensor cores, and floats
        times MX; not where XLA splits the program among devices),
        "scaled_dot" (jax.lax.scaled_dot), "dequantize" (our kernels, then jax.lax.dot_general),
        "xla" (plain, runs everywhere); or None: what was measured to be the fastest, or is known
        to be. It is taken for all three products.

    Returns:
      (batch..., free of lhs..., free of rhs...), as jax.lax.dot_general. It equals the product of
      the dequantized operands bit for bit where all products and sums are exact in float32; else
      within eps32 * k * sum |a||b| of it, before it is rounded to its type.

    Raises:
      TypeError: an operand or argument is of the wrong type.
      ValueError: dimension numbers that do not fit, a contracted length that 32 does not divide, an
        unknown name, an `MXArray` whose blocks run along another dimension, or one `MXArray` and a
        recipe whose forward has a Hadamard transform.
      NotImplementedError: the named implementation does not serve the call.
    """
    op = "dot_general"
    recipe = recipe_of(op, recipe)
    lhs, rhs = _operand(op, "lhs", lhs), _operand(op, "rhs", rhs)
    layout = layout_of(op, lhs, rhs, dimension_numbers, keep_rows=recipe.window == BLOCK)
    sides: Any = (("lhs", lhs, layout.lhs), ("rhs", rhs, layout.rhs))
    floats = [float_dtype(op, name, x.dtype) for name, x, _ in sides if not isinstance(x, MXArray)]
    if len({*floats}) > 1:
        raise TypeError(
            f"{op}: lhs is {floats[0]}, rhs is {floats[1]}; convert one to the other's type"
        )
    dtype = (*floats, np.dtype(jnp.bfloat16))[0]
    if preferred_element_type is not None:
        dtype = float_dtype(op, "preferred_element_type", preferred_element_type)
    if implementation is not None:
        names = {name: name for name in IMPLEMENTATIONS}
        implementation = named(f"{op}: implementation", names, implementation)
    for name, x, side in sides:
        _check_quantized(op, name, x, side, recipe)
    frozen = [name for name, x, _ in sides if isinstance(x, MXArray)]
    if len(frozen) == 1:
        check_frozen(op, frozen[0], recipe)
    static = _Static(layout, dtype, _is_exact(precision), implementation, out_sharding)
    if isinstance(lhs, MXArray) or isinstance(rhs, MXArray):  # nothing is quantized along rows
        static = static._replace(layout=layout.unpadded(_is_square(rhs, recipe)))
    if isinstance(rhs, jax.Array):
        rhs = _gathered_for(lhs, rhs, layout, out_sharding is not None)
    # In shard_map, what one operand alone varies over: the other one's gradient is summed over it.
    leaves, tree = jax.tree.flatten((*_parts(lhs), *_parts(rhs)))
    return _dot(static, *tree.unflatten(primitive.vary_alike(*leaves)), recipe)


# ---- what callers pass ---
def _operand(op: str, name: str, x: Any) -> Any:
    if isinstance(x, MXArray):
        return checked(op, name, x).with_values_in(ROW_MAJOR_VALUES).with_scales_in(ROW_MAJOR)
    if isinstance(x, QuantizedWeight):
        if name == "lhs":
            raise TypeError(f"{op}: lhs is a QuantizedWeight; weights go on the right-hand side")
        return x
    if not hasattr(x, "dtype"):
        try:
            return jnp.asarray(x)
        except TypeError as error:
            raise TypeError(f"{op}: {name} must be an array, got {shown(x)}") from error
    return x


def _is_exact(precision: Any) -> bool:
    """Whether a precision is, or for some operand is, HIGHEST."""
    if precision is None:
        config: Any = jax.config
        precision = config.jax_default_matmul_precision
    each = precision if isinstance(precision, tuple | list) else (precision,)
    return any(str(p).lower().rpartition(".")[2] in ("highest", "float32") for p in each)


def _is_square(rhs: Any, recipe: Recipe) -> bool:
    """Whether rhs are floats that square blocks are made of."""
    return rhs is not None and not isinstance(rhs, MXArray) and recipe.blocks("rhs").square


def _check_quantized(op: str, name: str, x: Any, side: Arrangement, recipe: Recipe) -> None:
    """Refuses an operand that was quantized for another product.

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
        if jax.tree.structure(x.recipe) != jax.tree.structure(recipe):
            raise ValueError(f"{op}: {name} was quantized by another recipe than this product's")
    if not isinstance(x, MXArray):
        return
    last = side.contracted_dims[-1]
    spans = (x.ndim - 2, x.ndim - 1) if len(x.block) == 2 else (x.axis + x.ndim,)
    if last not in spans or (len(x.block) == 2 and len(side.order) - side.batch > 2):
        raise ValueError(
            f"{op}: {name} has blocks along dimension {', '.join(map(str, spans))}, the product "
            f"contracts dimension {last}; quantize it along that one"
        )


def _parts(x: Any) -> tuple[Any, Any]:
    """The floats that gradients reach, and what is quantized already."""
    if isinstance(x, MXArray):
        return None, x
    if isinstance(x, QuantizedWeight):
        return x.floats, (x.contracted_form, x.free_form)
    return x, None


def _gathered_for(lhs: Any, rhs: jax.Array, layout: Layout, placed: bool) -> jax.Array:
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


# ---- the product and its derivative ---
class _Static(NamedTuple):
    """What of a product is neither array nor key."""

    layout: Layout
    dtype: np.dtype
    exact: bool
    implementation: str | None
    out_sharding: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Side:
    """What of an operand's floats the backward pass has to know: their type says it.

    Attributes:
      dtype: of the floats.
      spec: their partition spec, on a mesh with explicit axes.
      arranged: that of the arranged operand.
    """

    dtype: np.dtype
    spec: tuple
    arranged: tuple


Residual = tuple[Any, ...]


@partial(jax.jit, static_argnums=0)
def _dot(static: _Static, lhs: Any, lhs_q: Any, rhs: Any, rhs_q: Any, recipe: Recipe) -> jax.Array:
    return _dot_vjp(static, lhs, lhs_q, rhs, rhs_q, recipe)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot_vjp(static: _Static, lhs: Any, lhs_q: Any, rhs: Any, rhs_q: Any, recipe: Recipe) -> Any:
    layout = static.layout
    if rhs_q is None:  # nothing is quantized along rows, unless the weight was
        layout = layout.unpadded(_is_square(rhs, recipe))
        static = static._replace(layout=layout)
    a, _ = _forms(layout.lhs, lhs, lhs_q, recipe, "lhs", (True, False))
    b, _ = _forms(layout.rhs, rhs, rhs_q, recipe, "rhs", (True, False))
    return _forward(static, a, b)


def _forms(
    side: Arrangement, x: Any, quantized: Any, recipe: Recipe, name: str, wanted: tuple[bool, bool]
) -> Any:
    """An operand's forms along the contracted and the free axis, those that are wanted."""
    if isinstance(quantized, MXArray):
        form = Form(_arranged_mx(side, quantized), side.axis)
        return form, dataclasses.replace(form, axis=-3 - side.axis)
    if quantized is not None:
        return quantized
    each = zip(recipe.uses(name), wanted, strict=True)
    first, second = (use if want else None for use, want in each)
    return _forms_of(name, side.arranged(x), side.axis, (first, second), recipe, side.pads)


# What the two axes of an operand hold, the one that comes first in `Recipe.uses` first.
_AXES = {
    "lhs": ("contracted elements", "rows"),
    "rhs": ("contracted elements", "columns"),
    "gradient": ("columns", "rows"),
}


def _forms_of(
    name: str, x: jax.Array, axis: int, uses: Any, recipe: Recipe, pads: tuple[int, int]
) -> Any:
    """`forms_of`, with zeros behind the last two axes of x.

    Raises:
      ShardingTypeError: on a mesh with explicit axes, a shard splits a block.
    """
    blocks = recipe.blocks(name)
    quantized = [use is not None and use.format is not None for use in uses]
    unit = max(lengths_of(blocks.window))
    for at, what, here in zip((axis, -3 - axis), _AXES[name], quantized, strict=True):
        names, shards = shards_of(x, at)
        lies = here or pads[at] or (blocks.square and any(quantized))
        if lies and shards > 1 and x.shape[at] % (shards * unit):
            raise primitive.ShardingTypeError(
                f"dot_general: the {x.shape[at]} {what} of {name} are split over "
                f"{' x '.join(names)} in {shards} shards of {x.shape[at] / shards:g}, which {unit} "
                "does not divide, so that blocks would not stay whole; gather them with "
                "jax.sharding.reshard"
            )
    return forms_of(padded(x, pads), axis, uses, blocks)


def _arranged_mx(side: Arrangement, q: MXArray) -> MXArray:
    """An MXArray arranged like floats: its values and its scales, by themselves."""
    values, scales = side.arranged(q.values), side.arranged(q.scales)
    return dataclasses.replace(
        q, values=values, scales=scales, axis=-1 if len(q.block) == 2 else side.axis
    )


def _product(static: _Static, a: Form, b: Form, rows: int, spec: Any, dtype: Any) -> jax.Array:
    """(B..., free of a..., free of b...).

    Args:
      static: of the whole.
      a: (B..., rows..., .., ..).
      b: likewise.
      rows: how many dimensions behind B are contracted besides the forms' own.
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


def _forward(static: _Static, a: Form, b: Form) -> jax.Array:
    layout, out = static.layout, static.out_sharding
    spec, given = None, ()
    if out is not None:
        given = out.spec if isinstance(out, jax.sharding.NamedSharding) else out
        ndim = layout.lhs.batch + len(layout.lhs.free) + len(layout.rhs.free)
        given = (*given, *[None] * (ndim - len(given)))
        spec = layout.result_spec(given)
    y = layout.result(_product(static, a, b, 0, spec, static.dtype))
    if out is None:
        return y
    if is_explicit(jax.typeof(y).sharding.mesh):
        return resharded(y, given, jax.typeof(y).sharding.mesh)
    return jax.lax.with_sharding_constraint(y, out)


def _side(side: Arrangement, x: Any) -> _Side | None:
    if x is None:
        return None
    return _Side(x.dtype, spec_of(x), spec_of(side.arranged(x)))


def _dot_fwd(static: _Static, *args: Any) -> tuple[jax.Array, Residual]:
    perturbed = [jax.tree.leaves(jax.tree.map(lambda p: p.perturbed, arg)) for arg in args]
    lhs, lhs_q, rhs, rhs_q, recipe = (jax.tree.map(lambda p: p.value, arg) for arg in args)
    dgrad, wgrad = any(perturbed[0]), any(perturbed[2])
    layout = static.layout
    a, a_rows = _forms(layout.lhs, lhs, lhs_q, recipe, "lhs", (True, wgrad))
    b, b_rows = _forms(layout.rhs, rhs, rhs_q, recipe, "rhs", (True, dgrad))
    y = _forward(static, a, b)
    # A frozen operand gets no gradient, whoever asks for what.
    a_kept = b_kept = None
    if rhs is not None:
        a_kept = a_rows if wgrad else _absent(layout.lhs, lhs, lhs_q, recipe, "lhs")
    if lhs is not None:
        b_kept = b_rows if dgrad else _absent(layout.rhs, rhs, rhs_q, recipe, "rhs")
    return y, (a_kept, b_kept, recipe, _side(layout.lhs, lhs), _side(layout.rhs, rhs))


def _absent(side: Arrangement, x: Any, quantized: Any, recipe: Recipe, name: str) -> Any:
    """In place of a form along rows that no gradient wants: its pytree, with bools for arrays.

    JAX differentiates a jitted product once for each set of arguments that gradients are asked of,
    and wants residuals of one structure of all.
    """

    def form(x: Any, quantized: Any) -> Any:
        return _forms(side, x, quantized, recipe, name, (True, True))[1]

    return jax.tree.map(lambda _: jnp.zeros((), bool), jax.eval_shape(form, x, quantized))


def _wanted(form: Any) -> Any:
    """The form; None where it is absent."""
    return (
        None if form is None or all(leaf.dtype == bool for leaf in jax.tree.leaves(form)) else form
    )


def _dot_bwd(static: _Static, residual: Residual, dy: Any) -> tuple[Any, ...]:
    a, b, recipe, lhs, rhs = residual
    a, b = _wanted(a), _wanted(b)
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return (None,) * 5
    layout = static.layout
    dy = _gathered_once(layout, dy, lhs, rhs)
    uses = recipe.uses("gradient")
    # A frozen operand's floats are multiplied by the gradient's, in bfloat16.
    frozen = [form is not None and x is None for form, x in ((b, rhs), (a, lhs))]
    wanted: Any = tuple(
        None if form is None else Use(None) if cold else use
        for form, cold, use in zip((b, a), frozen, uses, strict=True)
    )
    along_n, along_m = _forms_of(
        "gradient", layout.gradient(dy), -1, wanted, recipe, layout.gradient_pads
    )
    dlhs = drhs = None
    if b is not None:
        dx = _product(static, along_n, b, 0, _out_spec(lhs, layout.lhs), lhs.dtype)
        dx = jnp.swapaxes(dx, -1, -2) if layout.lhs.swapped else dx
        dlhs = layout.lhs.restored(dx, lhs.spec)
    if a is not None:
        rows = len(layout.lhs.free_out) - 1
        order = (a, along_m) if layout.rhs.swapped else (along_m, a)
        dw = _product(static, *order, rows, rhs.arranged, rhs.dtype)
        drhs = layout.rhs.restored(dw, rhs.spec)
    return dlhs, None, drhs, None, None


def _gathered_once(layout: Layout, dy: Any, lhs: _Side | None, rhs: _Side | None) -> jax.Array:
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


def _out_spec(side: _Side, arrangement: Arrangement) -> tuple:
    """The partition spec of (B..., M..., K), from that of the arranged operand."""
    if not arrangement.swapped:
        return side.arranged
    *lead, k, m = side.arranged
    return (*lead, m, k)


_dot_vjp.defvjp(_dot_fwd, _dot_bwd, symbolic_zeros=True)
