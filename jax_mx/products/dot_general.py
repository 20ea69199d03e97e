"""`dot_general`: a product in MX with a derivative, floats at both ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.arrays.checks import float_dtype, implementation_of
from jax_mx.facts.formats import BLOCK
from jax_mx.lowering import primitive
from jax_mx.ops.mxarray import MXArray
from jax_mx.products.either import Names, by_names, either
from jax_mx.products.forms import QuantizedWeight, frozen_or, may_be_floats
from jax_mx.products.implementations import IMPLEMENTATIONS
from jax_mx.products.operands import Arrangement, layout_of
from jax_mx.products.recipes import MXFP8, Recipe, check_frozen, recipe_beside, recipe_of
from jax_mx.products.steps import (
    MARK,
    Static,
    blocks_along,
    check_quantized,
    forms_for,
    forward,
    gathered_for,
    gathered_once,
    is_exact,
    is_square,
    lhs_gradient,
    may_be_forms_of_floats,
    once_derived,
    operand_of,
    parts_of,
    rhs_gradient,
    side_of,
)

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
      precision: one above JAX's default (HIGH, HIGHEST, "F32_F32_F32" ...) keeps FP8 tensor cores
        out, which sum with reduced precision. None is `jax.default_matmul_precision`.
      preferred_element_type: of the result: bfloat16, float16 or float32; None for that of the
        floats, bfloat16 where both are MX.
      recipe: a `Recipe`, or the name of one: "mxfp8", "mxfp8_hybrid", "mxfp4" or "bf16".
      out_sharding: of the result, see jax.lax.dot_general.
      implementation: "fp8" (the chip's FP8 product of the codes, for arrays of one scale a row),
        "cutedsl" (our kernels on Hopper: windows of 128 and more on FP8 tensor cores, others as
        bfloat16; of few rows they read the codes of rhs as they lie; not where XLA splits the
        program among devices), "cutedsl_r8" and others (these with tiles of so many rows of lhs),
        "scaled_dot" (jax.lax.scaled_dot), "dequantize" (our kernels, then jax.lax.dot_general),
        "xla" (plain, runs everywhere); or None: what was measured to be the fastest, or is known
        to be. It is taken for all three products.

    Returns:
      (batch..., free of lhs..., free of rhs...), as jax.lax.dot_general. It equals the product of
      the dequantized operands bit for bit where all products and sums are exact in float32, and no
      element stands for less than 2^-126 (see "Numbers" in docs/training.md); else
      within eps32 * k * sum |a||b| of it, before it is rounded to its type; where FP8 tensor cores
      sum ("fp8", and "cutedsl" of windows), within window * 2^-13 * sum |a||b|, where "row" counts
      as 256 (4e-4 * sum |a||b| for normal numbers, see "Numbers" in docs/training.md).

    Raises:
      TypeError: an operand or argument is of the wrong type.
      ValueError: dimension numbers that do not fit, a contracted length that 32 does not divide, an
        unknown name, an `MXArray` whose blocks run along another dimension, or one `MXArray` and a
        recipe whose forward has a Hadamard transform.
      NotImplementedError: the named implementation does not serve the call.
    """
    op = "dot_general"
    recipe = recipe_of(op, recipe)
    lhs, rhs = operand_of(op, "lhs", lhs), operand_of(op, "rhs", rhs)
    recipe = recipe_beside(op, "rhs", rhs, recipe)
    keep_rows = recipe.window == BLOCK
    layout = layout_of(op, lhs, rhs, dimension_numbers, recipe.units, keep_rows)
    sides: Any = (("lhs", lhs, layout.lhs), ("rhs", rhs, layout.rhs))
    floats = [float_dtype(op, name, x.dtype) for name, x, _ in sides if not isinstance(x, MXArray)]
    if len({*floats}) > 1:
        raise TypeError(
            f"{op}: lhs is {floats[0]}, rhs is {floats[1]}; convert one to the other's type"
        )
    dtype = (*floats, np.dtype(jnp.bfloat16))[0]
    if preferred_element_type is not None:
        dtype = float_dtype(op, "preferred_element_type", preferred_element_type)
    implementation = implementation_of(op, IMPLEMENTATIONS, implementation)
    for name, x, side in sides:
        check_quantized(op, name, x, side)
    frozen = [name for name, x, _ in sides if isinstance(x, MXArray)]
    if len(frozen) == 1:
        check_frozen(op, frozen[0], recipe)
    static = Static(layout, dtype, is_exact(op, precision), implementation, out_sharding)
    if isinstance(lhs, MXArray) or isinstance(rhs, MXArray):  # nothing is quantized along rows
        keep = isinstance(rhs, QuantizedWeight) or is_square(rhs, recipe)
        static = static._replace(layout=layout.unpadded(keep))
    if isinstance(rhs, jax.Array):
        rhs = gathered_for(lhs, rhs, layout, out_sharding is not None)
    # In shard_map an operand, or a key, may vary over an axis that the others do not. Where all of
    # them vary, JAX sums the gradients of those others over it.
    leaves, tree = jax.tree.flatten((*parts_of(lhs), *parts_of(rhs), recipe))
    return _dot(static, *tree.unflatten(primitive.vary_alike(*leaves)))


# ---- the product and its derivative ---
Residual = tuple[Any, ...]


@partial(jax.jit, static_argnums=0)
def _dot(static: Static, lhs: Any, lhs_q: Any, rhs: Any, rhs_q: Any, recipe: Recipe) -> jax.Array:
    return _dot_vjp(static, lhs, lhs_q, rhs, rhs_q, recipe)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot_vjp(static: Static, lhs: Any, lhs_q: Any, rhs: Any, rhs_q: Any, recipe: Recipe) -> Any:
    layout = static.layout
    if rhs_q is None:  # nothing is quantized along rows, unless the weight was
        layout = layout.unpadded(is_square(rhs, recipe))
        static = static._replace(layout=layout)
    return _forward(static, (lhs, lhs_q), (rhs, rhs_q), recipe, (False, False))[0]


def _forward(
    static: Static, lhs: tuple, rhs: tuple, recipe: Recipe, wanted: tuple[bool, bool]
) -> tuple[jax.Array, Any, Any]:
    """The result; and lhs along its rows, rhs along its columns, if they are `wanted`."""
    each = ("lhs", static.layout.lhs, wanted[0]), ("rhs", static.layout.rhs, wanted[1])
    may_be = [
        may_be_forms_of_floats(name, x, q, recipe, (True, more))
        for (name, _, more), (x, q) in zip(each, (lhs, rhs), strict=True)
    ]

    def step(names: Names | None, operands: tuple, recipe: Recipe) -> Any:
        by, floats = by_names(static, names)
        (a, a_rows), (b, b_rows) = (
            forms_for(side, x, q, recipe, name, (True, more), (floats and may, False))
            for (name, side, more), (x, q), may in zip(each, operands, may_be, strict=True)
        )
        return forward(next(by), a, b), a_rows, b_rows

    return either(any(may_be), step, (lhs, rhs), recipe)


def _dot_fwd(static: Static, *args: Any) -> tuple[jax.Array, Residual]:
    perturbed = [jax.tree.leaves(jax.tree.map(lambda p: p.perturbed, arg)) for arg in args]
    lhs, lhs_q, rhs, rhs_q, recipe = (jax.tree.map(lambda p: p.value, arg) for arg in args)
    lhs, rhs, mark = once_derived("dot_general", lhs, rhs, MARK)
    dgrad, wgrad = any(perturbed[0]), any(perturbed[2])
    layout = static.layout
    y, a_rows, b_rows = _forward(static, (lhs, lhs_q), (rhs, rhs_q), recipe, (wgrad, dgrad))
    # A frozen operand gets no gradient, whoever asks for what.
    a_kept = b_kept = None
    if rhs is not None:
        a_kept = a_rows if wgrad else _absent(layout.lhs, lhs, lhs_q, recipe, "lhs")
    if lhs is not None:
        b_kept = b_rows if dgrad else _absent(layout.rhs, rhs, rhs_q, recipe, "rhs")
    sides = side_of(layout.lhs, lhs), side_of(layout.rhs, rhs)
    return y, (a_kept, b_kept, recipe, *sides, mark)


def _absent(side: Arrangement, x: Any, quantized: Any, recipe: Recipe, name: str) -> Any:
    """In place of a form along rows that no gradient wants: its pytree, with bools for arrays.

    JAX differentiates a jitted product once for each set of arguments that gradients are asked of,
    and wants residuals of one structure of all.
    """

    def form(x: Any, quantized: Any) -> Any:
        return forms_for(side, x, quantized, recipe, name, (True, True))[1]

    return jax.tree.map(lambda _: jnp.zeros((), bool), jax.eval_shape(form, x, quantized))


def _wanted(form: Any) -> Any:
    """The form; None where it is absent."""
    return (
        None if form is None or all(leaf.dtype == bool for leaf in jax.tree.leaves(form)) else form
    )


def _dot_bwd(static: Static, residual: Residual, dy: Any) -> tuple[Any, ...]:
    a, b, recipe, lhs, rhs, mark = residual
    a, b = _wanted(a), _wanted(b)
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return (None,) * 5
    layout = static.layout
    dy, _ = once_derived("dot_general", dy, mark)
    dy = gathered_once(layout, dy, lhs, rhs)
    absent = b is None, a is None  # so that no step holds the forms themselves

    def uses_of(recipe: Recipe) -> Any:
        # A frozen operand's floats are multiplied by the gradient's, in bfloat16.
        each = zip(absent, (rhs, lhs), recipe.uses("gradient"), strict=True)
        return tuple(None if gone else frozen_or(use, x is None) for gone, x, use in each)

    def step(names: Names | None, dy: jax.Array, a: Any, b: Any, recipe: Recipe) -> Any:
        by, floats = by_names(static, names)
        given = ("gradient", layout.gradient(dy), -1, uses_of(recipe), recipe)
        along_n, along_m = blocks_along(*given, layout.gradient_pads, as_floats=(floats, floats))
        dlhs = None if b is None else lhs_gradient(next(by), along_n, b, lhs)
        return dlhs, None if a is None else rhs_gradient(next(by), a, along_m, rhs)

    worth = may_be_floats(dy, uses_of(recipe), recipe.blocks("gradient"))
    dlhs, drhs = either(worth, step, dy, a, b, recipe)
    return dlhs, None, drhs, None, None


_dot_vjp.defvjp(_dot_fwd, _dot_bwd, symbolic_zeros=True)
