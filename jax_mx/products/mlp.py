"""`mlp`: a perceptron in MX, two products with an activation in between, gated or not.

One custom_vjp with floats at both ends, forward:

    x --quantize--> --product--> gate, up --activation, quantize--> --product--> y

What the activation gives is never an array of floats where a kernel quantizes it (`Gated`), and
what is kept of everything is MX. The steps are those of `dot_general` (steps.py).
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jax_mx.arrays.checks import float_dtype, implementation_of
from jax_mx.arrays.sharding import is_explicit, names_in, resharded, spec_of
from jax_mx.facts.formats import BLOCK, MXFP8_E4M3
from jax_mx.lowering import primitive
from jax_mx.ops.activations import Gated, made, row_of
from jax_mx.ops.mxarray import MXArray
from jax_mx.ops.quantize import quantize
from jax_mx.ops.quantizing import WithSums
from jax_mx.products.either import Names, by_names, either
from jax_mx.products.forms import Form, QuantizedWeight, may_be_floats
from jax_mx.products.implementations import IMPLEMENTATIONS
from jax_mx.products.operands import Layout, layout_of
from jax_mx.products.recipes import MXFP8, Recipe, check_frozen, recipe_beside, recipe_of
from jax_mx.products.steps import (
    MARK,
    Side,
    Static,
    bias_of,
    blocks_along,
    check_quantized,
    floats_kept,
    forms_for,
    forward,
    gathered_for,
    gathered_once,
    gradient_uses,
    is_exact,
    is_square,
    lhs_gradient,
    may_be_forms_of_floats,
    multiplied,
    once_derived,
    operand_of,
    parts_of,
    residuals_of,
    rhs_gradient,
    side_of,
    uses_of,
)


def mlp(
    x: Any,
    w_gate_up: Any,
    w_down: Any,
    *,
    b_gate_up: Any = None,
    b_down: Any = None,
    activation: str = "swiglu",
    interleaved: bool = False,
    recipe: Recipe | str = MXFP8,
    residuals: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    out_sharding: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """A perceptron: act(x @ w_gate_up + b_gate_up) @ w_down + b_down, see `gated`.

    Operands of both products, and of their four gradients, are quantized as the recipe says (see
    `dot_general`). It gives what `dot_general`, `gated` and `dot_general` give, bit for bit, in one
    function with one derivative: what the activation gives is quantized both ways as it is made,
    and gate and up are kept in MX. Differentiable in reverse mode with respect to all arrays.

    Args:
      x: bfloat16, float16 or float32 (..., D). 32 divides D; there may be any number of rows. On
        automatic meshes set the mesh (jax.set_mesh): without it, an x that is split along another
        axis than the first is gathered.
      w_gate_up: (D, 2 I), all gates, then all ups, of an activation without a gate (D, I): floats
        of x's dtype, what `recipe.quantize_weight` makes of them, or a frozen `MXArray`, also
        (2 I, D), with its blocks along D. 32 divides I.
      w_down: (I, N), likewise.
      b_gate_up: floats (2 I,), or None. The product is rounded to x's dtype, the bias is added in
        float32, and the sum is rounded again. Its gradient is summed in float32, 32 rows at a time
        where both gradients are quantized.
      b_down: floats (N,), or None; likewise.
      activation: see `gated`.
      interleaved: whether gates and ups come by turns along 2 I, not all gates first.
      recipe: how floats are quantized: a `Recipe`, or a name.
      residuals: what is kept of gate and up for the backward pass: "mx", MXFP8; "floats", as they
        are; "inputs", nothing: the first product is computed again from the quantized x. With the
        last two, gradients too are those of the three functions, but for the order of sums.
        None: "mx" where the recipe quantizes the forward product, else "floats".
      precision: see `dot_general`.
      out_sharding: of the result, see `jax.lax.dot_general`. None: on a mesh with explicit axes,
        rows are split as x's and columns as w_down's, but for axes that split both.
      implementation: of all products, see `dot_general`; or None.

    Returns:
      (..., N), of x's dtype.

    Raises:
      TypeError: an operand or argument is of the wrong type.
      ValueError: shapes that do not fit, lengths that 32 does not divide, an unknown name.
      NotImplementedError: the named implementation does not serve a product.
    """
    op = "mlp"
    recipe = recipe_of(op, recipe)
    each = (("x", x), ("w_gate_up", w_gate_up), ("w_down", w_down))
    x, w1, w2 = (operand_of(op, *named_array) for named_array in each)
    if isinstance(x, MXArray | QuantizedWeight):
        raise TypeError(f"{op}: x must be an array of floats, got {type(x).__name__}")
    dtype = float_dtype(op, "x", x.dtype)
    recipes = tuple(
        recipe_beside(op, name, w, recipe) for name, w in (("w_gate_up", w1), ("w_down", w2))
    )
    keep_rows = recipe.window == BLOCK and _may_be_split()
    first = _layout(op, "w_gate_up", x.shape, w1, dtype, recipe, keep_rows)
    halves, units = 1 + row_of(op, activation).has_gate, recipe.units
    columns, own = first.rhs.free[0], Gated(activation, interleaved=interleaved)
    if columns % (wanted := math.lcm(halves * units.forward, units.dgrad)):
        blocks = "blocks" if max(units) == BLOCK else "blocks and Hadamard transforms"
        raise ValueError(
            f"{op}: w_gate_up has {columns} columns, must be a multiple of {wanted}, as {own.name} "
            f"makes I of {halves} I, in {blocks} of {units.forward}; pad gates and ups with zero "
            "columns, and w_down with zero rows"
        )
    hidden = (*x.shape[:-1], columns // halves)
    second = _layout(op, "w_down", hidden, w2, dtype, recipe, keep_rows)
    b1, b2 = (
        bias_of(op, name, bias, (length,))
        for name, bias, length in (
            ("b_gate_up", b_gate_up, columns),
            ("b_down", b_down, second.rhs.free[0]),
        )
    )
    residuals = residuals_of(op, residuals, recipe)
    implementation = implementation_of(op, IMPLEMENTATIONS, implementation)
    w1, w2 = (
        gathered_for(x, w, layout, True) if isinstance(w, jax.Array) else w
        for w, layout in ((w1, first), (w2, second))
    )
    if out_sharding is None and is_explicit(jax.typeof(x).sharding.mesh):
        leaf = w2.values if isinstance(w2, MXArray) else getattr(w2, "floats", w2)
        spec = _spec_between(spec_of(x)[:-1], spec_of(leaf)[second.rhs.free_dims[0]])
        out_sharding = jax.sharding.PartitionSpec(*spec)
    shared = (is_exact(op, precision), implementation)
    static = _Static(
        Static(first, dtype, *shared, None),
        Static(second, dtype, *shared, out_sharding),
        own.name,
        own.interleaved,
        residuals,
    )
    (f1, q1), (f2, q2) = parts_of(w1), parts_of(w2)
    leaves, tree = jax.tree.flatten(((x, f1, f2, b1, b2), (q1, q2), recipes))
    return _mlp(static, *tree.unflatten(primitive.vary_alike(*leaves)))


# ---- what callers pass ---
def _may_be_split() -> bool:
    """Whether XLA may split rows, as far as the mesh that is set says it.

    Where it may not, they become one dimension, as kernels want them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(kind != AxisType.Manual and mesh.shape[name] > 1 for name, kind in kinds)


def _layout(
    op: str, name: str, lhs: tuple, w: Any, dtype: Any, recipe: Recipe, keep_rows: bool
) -> Layout:
    """How a product with a weight is arranged.

    Raises:
      TypeError, ValueError: the weight is none for this product.
    """
    if not lhs or getattr(w, "ndim", 0) != 2:
        raise ValueError(
            f"{op}: {name} has the shape {w.shape}, what it is multiplied with {lhs}; must be "
            "(K, N) and (..., K)"
        )
    at = 0
    if isinstance(w, MXArray):
        check_frozen(op, name, recipe)
        at = w.axis % 2 if len(w.block) == 1 else 0
    elif (found := float_dtype(op, name, w.dtype)) != dtype:
        raise TypeError(f"{op}: x is {dtype}, {name} is {found}; convert one to the other's type")
    if w.shape[at] != lhs[-1]:
        raise ValueError(
            f"{op}: {name} has the shape {tuple(w.shape)}, whose contracted axis {at} should have "
            f"{lhs[-1]} elements"
        )
    numbers = (((len(lhs) - 1,), (at,)), ((), ()))
    layout = layout_of(op, jax.ShapeDtypeStruct(lhs, dtype), w, numbers, recipe.units, keep_rows)
    check_quantized(op, name, w, layout.rhs)
    if isinstance(w, MXArray):
        layout = Layout(layout.lhs, layout.rhs._replace(unit=1))
    return layout


def _spec_between(rows: tuple, columns: Any) -> tuple:
    """The partition spec of a product: rows, and columns but for axes that split rows."""
    taken = {name for each in rows for name in names_in(each)}
    return (*rows, tuple(n for n in names_in(columns) if n not in taken) or None)


# ---- the perceptron and its derivative ---
class _Static(NamedTuple):
    """What is neither array nor key: of both products, and of what is between them."""

    first: Static
    second: Static
    activation: str
    interleaved: bool
    residuals: str

    @property
    def gated(self) -> Gated:
        """What is between them."""
        return Gated(self.activation, interleaved=self.interleaved)


Recipes = tuple[Recipe, Recipe]  # of both products: where a weight brings signs, they differ


class _Kept(NamedTuple):
    """What the backward pass reads; None is what it does not.

    Attributes:
      x: form along rows.
      act: likewise, of what the activation gave.
      gate_up: an `MXArray` or floats, arranged; or the form along D that they are computed from.
      w_first: forms of w_gate_up: along D where gate and up are computed again, and along 2 I.
      w_second: form of w_down along N.
      bias: b_gate_up, where gate and up are computed again.
      recipes: of both products.
      sides: of x, w_gate_up, w_down; then of both biases.
    """

    x: Any
    act: Any
    gate_up: Any
    w_first: tuple[Any, Any]
    w_second: Any
    bias: Any
    recipes: Recipes
    sides: tuple[Any, ...]


@partial(jax.jit, static_argnums=0)
def _mlp(static: _Static, *args: Any) -> jax.Array:
    return _mlp_vjp(static, *args)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp_vjp(static: _Static, given: tuple, quantized: tuple, recipes: Recipes) -> jax.Array:
    first, second = (  # nothing is quantized along rows
        part._replace(layout=part.layout.unpadded(q is not None or is_square(w, recipes[0])))
        for part, w, q in zip((static.first, static.second), given[1:3], quantized, strict=True)
    )
    static = static._replace(first=first, second=second)
    return _forward(static, given, quantized, recipes, (False, False))[0]


def _mlp_fwd(static: _Static, given: tuple, quantized: tuple, recipes: Recipes) -> tuple:
    *floats, mark = once_derived("mlp", *given, MARK)
    trained = (given[1] is not None, given[2] is not None)
    y, kept = _forward(static, tuple(floats), quantized, recipes, trained, keep=True)
    return y, (kept, mark)


def _forward(
    static: _Static,
    given: tuple,
    quantized: tuple,
    recipes: Recipes,
    trained: tuple[bool, bool],
    keep: bool = False,
) -> tuple[jax.Array, Any]:
    """The result, and what the backward pass reads; `trained`: which weights get gradients."""
    x, w1, w2, b1, b2 = given
    first, second = static.first.layout, static.second.layout
    again = keep and static.residuals == "inputs"
    may_be = [
        may_be_forms_of_floats(name, own, q, recipe, (True, more))
        for name, own, q, recipe, more in (
            ("lhs", x, None, recipes[0], trained[0]),
            ("rhs", w1, quantized[0], recipes[0], keep),
            ("lhs", x, None, recipes[1], trained[1]),  # of x's dtype
            ("rhs", w2, quantized[1], recipes[1], keep),
        )
    ]

    def first_step(names: Names | None, x: Any, w1: Any, q1: Any, b1: Any, recipe: Recipe) -> Any:
        by, floats = by_names(static.first, names)
        as_x, as_w = ((floats and may, False) for may in may_be[:2])
        a, a_rows = forms_for(first.lhs, x, None, recipe, "lhs", (True, trained[0]), as_x)
        w, w_free = forms_for(first.rhs, w1, q1, recipe, "rhs", (True, keep), as_w)
        gate_up = _gate_up(next(by), a, w, b1)
        return gate_up, a_rows, w_free, (a, w) if again else None

    def second_step(names: Names | None, gate_up: Any, w2: Any, q2: Any, recipe: Recipe) -> Any:
        by, floats = by_names(static.second, names)
        as_act, as_w = ((floats and may, False) for may in may_be[2:])
        given = ("lhs", gate_up, -1, uses_of(recipe, "lhs", (True, trained[1])), recipe)
        act, act_rows = blocks_along(*given, activation=static.gated, as_floats=as_act)
        v, v_free = forms_for(second.rhs, w2, q2, recipe, "rhs", (True, keep), as_w)
        return forward(next(by), act, v), act_rows, v_free

    worth = any(may_be[:2]) and not again  # what is computed from again is kept in MX
    gate_up, a_rows, w_free, inputs = either(worth, first_step, x, w1, quantized[0], b1, recipes[0])
    y, act_rows, v_free = either(
        any(may_be[2:]), second_step, gate_up, w2, quantized[1], recipes[1]
    )
    y = _plus(y, b2)
    if not keep:
        return y, None
    a, w = inputs or (None, None)
    kept = quantize(gate_up, MXFP8_E4M3) if static.residuals == "mx" else a if again else gate_up
    sides = (first.lhs, x), (first.rhs, w1), (second.rhs, w2)
    types = (*(side_of(*each) for each in sides), *map(_type_of, (b1, b2)))
    bias = b1 if again else None
    return y, _Kept(a_rows, act_rows, kept, (w, w_free), v_free, bias, recipes, types)


def _type_of(bias: Any) -> Side | None:
    return None if bias is None else Side(bias.dtype, spec_of(bias), ())


def _gate_up(static: Static, a: Form, w: Form, bias: Any) -> jax.Array:
    """Gate and up, arranged like x, (M..., 2 I); `static`: of the first product."""
    x, weight = (
        form.array.values if isinstance(form.array, MXArray) else form.array for form in (a, w)
    )
    spec = _spec_between(spec_of(x)[:-1], spec_of(weight)[-3 - w.axis])
    gate_up = multiplied(static, a, w, 0, spec, static.dtype)
    return _plus(gate_up, bias, static.layout.lhs.rows)


def _plus(y: jax.Array, bias: Any, zeros: int = 0) -> jax.Array:
    """y and a bias, but for so many rows behind, which stay zeros."""
    if bias is None:
        return y
    mesh, wide = jax.typeof(y).sharding.mesh, bias.astype(jnp.float32)
    if is_explicit(mesh):
        wide = resharded(wide, spec_of(y)[-1:], mesh)
    wide = wide.reshape(*[1] * (y.ndim - 1), -1)
    if zeros:
        number = jnp.arange(y.shape[-2], dtype=jnp.int32).reshape(*[1] * (y.ndim - 2), -1, 1)
        wide = jnp.where(number < y.shape[-2] - zeros, wide, np.float32(0))
    return (y.astype(jnp.float32) + wide).astype(y.dtype)


def _mlp_bwd(static: _Static, residual: tuple[_Kept, jax.Array], dy: jax.Array) -> tuple:
    kept, mark = residual
    (first, second), (x, w1, w2, b1, b2) = kept.recipes, kept.sides
    layout, dtype = static.second.layout, static.second.dtype
    dy, _ = once_derived("mlp", dy, mark)
    dy = gathered_once(layout, dy, None, w2)
    gate_up = _again(static, kept)
    spec = spec_of(made("mlp", gate_up, static.gated))

    def second_step(names: Names | None, dy: Any, act: Any, w: Any, recipe: Recipe) -> Any:
        by, floats = by_names(static.second, names)
        given = ("gradient", layout.gradient(dy), -1, gradient_uses(recipe, w2 is None), recipe)
        by_row, by_column = blocks_along(*given, layout.gradient_pads, as_floats=(floats, floats))
        dact = multiplied(next(by), by_row, w, 0, spec, dtype)
        return dact, None if w2 is None else rhs_gradient(next(by), act, by_column, w2)

    def first_step(names: Names | None, gate_up: Any, own: Any, a: Any, w: Any, recipe: Any) -> Any:
        by, floats = by_names(static.first, names)
        given = ("gradient", gate_up, -1, gradient_uses(recipe, w1 is None), recipe)
        by_row, by_column, *sums = blocks_along(*given, activation=own, as_floats=(floats, floats))
        dw1 = None if w1 is None else rhs_gradient(next(by), a, by_column, w1)
        return lhs_gradient(next(by), by_row, w, x), dw1, sums

    worth = may_be_floats(dy, gradient_uses(second, w2 is None), second.blocks("gradient"))
    dact, dw2 = either(worth, second_step, dy, kept.act, kept.w_second, second)
    own: Any = dataclasses.replace(static.gated, gradient=dact.astype(gate_up.dtype))
    own = own if b1 is None else WithSums(own)
    worth = may_be_floats(gate_up, gradient_uses(first, w1 is None), first.blocks("gradient"), own)
    dx, dw1, sums = either(worth, first_step, gate_up, own, kept.x, kept.w_first[1], first)
    db1, db2 = _summed(sums[0] if sums else None, b1), _summed(dy, b2)
    return (dx, dw1, dw2, db1, db2), None, None


def _again(static: _Static, kept: _Kept) -> jax.Array:
    """Gate and up, arranged: as they were kept, or computed again."""
    if static.residuals == "inputs":
        return _gate_up(static.first, kept.gate_up, kept.w_first[0], kept.bias)
    return floats_kept(kept.gate_up, static.first.dtype)


def _summed(rows: jax.Array | None, bias: Side | None) -> jax.Array | None:
    """The gradient of a bias: the sum of all rows, in float32."""
    if bias is None or rows is None:
        return None
    total = rows.astype(jnp.float32).sum(range(rows.ndim - 1)).astype(bias.dtype)
    mesh = jax.typeof(total).sharding.mesh
    return resharded(total, bias.spec, mesh) if is_explicit(mesh) else total


_mlp_vjp.defvjp(_mlp_fwd, _mlp_bwd)
