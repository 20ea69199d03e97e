"""The product's derivative: one custom_vjp for dense products in MX and for those over groups.

Products in bfloat16 have derivatives of any order and mode.

Floats come in and go out. Products between them read quantized operands (operand.py), and the
residuals of the backward pass are MX. layer.py makes layers of the same parts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.arrangements import Arrangement
from jax_mx.formats.reads import align_for_trace
from jax_mx.formats.windows import lengths_of
from jax_mx.products.contraction import ROWS, SUMS
from jax_mx.products.groups import Groups
from jax_mx.products.multiply import Step
from jax_mx.products.operand import ProductOperand, Unquantized, operand_for, weight_forms
from jax_mx.products.recipes import AS_THEY_ARE, BF16, Recipe
from jax_mx.products.sides import Pair, Static, parts_of, side_of, values_of
from jax_mx.quantizing import derivatives
from jax_mx.quantizing.mxarray import FROZEN, MXArray

# ---- the product ---
FORWARD = "; recipe='floats' has all, and multiplies what jax_mx.fake_quantize makes of both"


# One jitted function, unlike a layer's passes: equal calls are traced once, also without jit.
@partial(jax.jit, static_argnums=0)
def product(
    static: Static, lhs: Any, lhs_q: Any, rhs: Any, rhs_q: Any, sizes: Any, recipe: Recipe
) -> jax.Array:
    """lhs times rhs, differentiable by the floats of both.

    Args:
      static: of the product.
      lhs: floats, or None beside `lhs_q`.
      lhs_q: an `MXArray`, or None.
      rhs: floats that gradients reach, or None.
      rhs_q: its quantized part: an `MXArray`, both forms, or None.
      sizes: of groups, int32 (G,); None for a dense product.
      recipe: how floats are quantized.
    """
    if not recipe.quantizes and all(isinstance(q, MXArray | None) for q in (lhs_q, rhs_q)):
        if static.layout is None:
            w, at = rhs, -2
            if rhs_q is not None:
                w, at = rhs_q, rhs_q.axis if len(rhs_q.block) == 1 else -2
            grouped = Grouped(ROWS, at, static.dtype, recipe.rounds)
            return _of_groups(static, grouped, lhs, w, sizes)
        lhs, rhs = (x if q is None else q for x, q in ((lhs, lhs_q), (rhs, rhs_q)))
        return _of_floats(static, lhs, rhs, recipe)
    lhs, rhs = derivatives.reverse_only(static.op, (lhs, rhs), FORWARD)
    return _product(static, lhs, lhs_q, rhs, rhs_q, sizes, recipe)


# ---- products of floats, which have all derivatives; codes would have none ---
def _derived(op: str, operands: tuple, value: Callable, gradients: Callable, forward: Any) -> Any:
    """A product of operands, linear in each of both.

    Args:
      op: for messages.
      operands: both, each floats or an `MXArray`; and more, by which there is no derivative.
      value: the product of operands.
      gradients: of both, from operands, which of them are asked for, and the product's; None for
        others. An operand that no gradient reads is None.
      forward: the product's tangent from operands and both tangents, None where there is none; or
        None, where JAX can transpose `gradients`.

    Raises:
      TypeError: a derivative by an `MXArray` is asked for.
    """
    leaves, tree = jax.tree.flatten(operands)
    ends = itertools.accumulate(len(jax.tree.leaves(x)) for x in operands[:2])
    places = [
        None if isinstance(x, MXArray) else n - 1 for x, n in zip(operands, ends, strict=False)
    ]

    def rule(outs: list, args: list, tangents: list) -> list[jax.Array]:
        moved = [None if i is None else tangents[i] for i in places]
        asked = tuple(t is not None for t in moved)
        if sum(asked) < sum(t is not None for t in tangents):
            raise TypeError(f"{op}: {FROZEN}")
        a, b, *more = tree.unflatten(args)
        kept = (a if asked[1] else None, b if asked[0] else None, *more)

        def transposed(kept: tuple, dy: jax.Array) -> list[jax.Array]:
            return [d for d in gradients(kept, asked, dy) if d is not None]

        def tangent(kept: tuple, *some: jax.Array) -> list[jax.Array]:
            tangents = iter(some)
            return [forward(kept, *(next(tangents) if is_asked else None for is_asked in asked))]

        moved = [t for t in moved if t is not None]
        way = None if forward is None else tangent
        return derivatives.linear(transposed, kept, moved, outs, way)

    y = value(*tree.unflatten(map(jax.lax.stop_gradient, leaves)))
    return derivatives.derived([y], leaves, rule)[0]


def _of_floats(static: Static, lhs: Any, rhs: Any, recipe: Recipe) -> jax.Array:
    """A dense product of floats; one of both operands may be an `MXArray`."""
    layout, operands = static.arranged, (lhs, rhs)
    has_codes = any(isinstance(x, MXArray) for x in operands)
    of_lhs = side_of(layout.lhs, parts_of(lhs)[0])
    of_rhs = side_of(layout.rhs, parts_of(rhs)[0])

    def value(lhs: Any, rhs: Any) -> jax.Array:
        unfollowed = static.unfollowed
        return _forward(unfollowed, parts_of(lhs), parts_of(rhs), None, recipe, (False, False))[0]

    def form(side: Arrangement, x: Any, name: str) -> Any:
        if x is None:
            return None
        request = operand_for(side, *parts_of(x), recipe, name, (False, True))
        return (request.forms() if isinstance(request, Unquantized) else request)[1]

    def gradients(operands: tuple, asked: tuple[bool, bool], dy: jax.Array) -> tuple[Any, Any]:
        a, b = form(layout.lhs, operands[0], "lhs"), form(layout.rhs, operands[1], "rhs")
        return _gradients(static, dy, a, b, None, recipe, of_lhs, of_rhs)

    def forward(operands: tuple, dlhs: Any, drhs: Any) -> jax.Array:
        lhs, rhs = operands
        pair = (lhs, drhs) if dlhs is None else (dlhs, rhs)
        return _of_floats(static, pair[0], pair[1], recipe)

    return _derived(static.op, operands, value, gradients, forward if has_codes else None)


class Grouped(NamedTuple):
    """One of the two products over groups.

    Attributes:
      groups: `ROWS` or `SUMS`.
      at: the axis of matrices that `ROWS` contracts, -1 or -2.
      dtype: of the result.
      rounds: whether floats are rounded to bfloat16.
    """

    groups: str
    at: int
    dtype: np.dtype
    rounds: bool


def _of_groups(static: Static, grouped: Grouped, a: Any, b: Any, sizes: jax.Array) -> jax.Array:
    """A product over groups of floats; b may be an `MXArray`."""
    run, is_frozen = partial(_of_groups, static), isinstance(b, MXArray)
    of_a, of_b = a.dtype, None if is_frozen else b.dtype
    recipe = BF16 if grouped.rounds else AS_THEY_ARE

    def value(a: Any, b: Any, sizes: jax.Array) -> jax.Array:
        options: dict[str, Any] = {}
        if grouped.groups == ROWS:
            pair = a, b
            if grouped.rounds:
                pair = (x if isinstance(x, MXArray) else x.astype(jnp.bfloat16) for x in pair)
            axes = -1, grouped.at
            operands = tuple((ProductOperand(*one),) for one in zip(pair, axes, strict=True))
        else:
            groups = Groups.from_sizes(sizes, a.shape[0], align=align_of(recipe))
            operands = tuple((_by_slot("lhs", x, groups, recipe)[1],) for x in (a, b))
            sizes, options = groups.sizes, options | {"align": groups.align, "over_rows": True}
        options["groups"] = grouped.groups
        product = static.multiplication((0, 0), (1, 0), grouped.dtype, **options)
        return Step((product,))(operands, sizes)[0][0]

    def gradients(operands: tuple, asked: tuple[bool, bool], dy: jax.Array) -> tuple[Any, Any]:
        a, b, sizes = operands
        if grouped.groups == SUMS:
            first, second = (ROWS, -1, b, dy), (ROWS, -2, a, dy)
        else:
            order = (a, dy) if grouped.at == -2 else (dy, a)
            first, second = (ROWS, -3 - grouped.at, dy, b), (SUMS, -2, *order)

        def one(product: Any, dtype: Any) -> jax.Array:
            groups, at, a, b = product
            return run(Grouped(groups, at, dtype, grouped.rounds), a, b, sizes)

        da = one(first, of_a) if asked[0] else None
        return da, one(second, of_b) if asked[1] else None

    def forward(operands: tuple, da: Any, db: Any) -> jax.Array:
        a, b, sizes = operands
        parts = [] if da is None else [run(grouped, da, b, sizes)]
        parts += [] if db is None else [run(grouped, a, db, sizes)]
        return functools.reduce(jnp.add, parts)

    return _derived(static.op, (a, b, sizes), value, gradients, forward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    static: Static, lhs: Any, lhs_q: Any, rhs: Any, rhs_q: Any, sizes: Any, recipe: Recipe
) -> jax.Array:
    wanted = (False, False)
    return _forward(static.unfollowed, (lhs, lhs_q), (rhs, rhs_q), sizes, recipe, wanted)[0]


def _operands(
    static: Static, lhs: Pair, rhs: Pair, recipe: Recipe, wanted: tuple[bool, bool]
) -> tuple[Any, Any]:
    """Both operands of the forward product; `wanted`: lhs along rows, rhs along columns."""
    wgrad, dgrad = wanted
    if static.layout is None:
        # Slots that groups begin at hold lhs along rows: it is quantized by itself.
        x = Unquantized(lhs[0], recipe, name="lhs", wanted=(True, False))
        return x, weight_forms(*rhs, recipe, dgrad)
    sides = static.layout
    return (
        operand_for(sides.lhs, *lhs, recipe, "lhs", (True, wgrad)),
        operand_for(sides.rhs, *rhs, recipe, "rhs", (True, dgrad)),
    )


def _forward(
    static: Static, lhs: Pair, rhs: Pair, sizes: Any, recipe: Recipe, wanted: tuple[bool, bool]
) -> tuple[jax.Array, list[Any]]:
    """The result; and lhs along its rows, rhs along its columns, where they are wanted."""
    operands = _operands(static, lhs, rhs, recipe, wanted)
    step = Step((static.forward((0, 0), (1, 0)),), ((0, 1), (1, 1)))
    (y,), kept = step(operands, sizes)
    return y if static.layout is None else static.layout.result(y, static.out_sharding), kept


def _fwd(static: Static, *args: Any) -> tuple[jax.Array, tuple]:
    perturbed = [any(leaf.perturbed for leaf in jax.tree.leaves(arg)) for arg in args]
    lhs, lhs_q, rhs, rhs_q, sizes, recipe = values_of(static.op, args, (args[1], args[3]))
    mark = derivatives.once_derived(static.op, derivatives.MARK, lhs, rhs)
    # A frozen operand gets no gradient, whoever asks for what.
    dgrad, wgrad = perturbed[0], perturbed[2]
    y, (a, b) = _forward(static, (lhs, lhs_q), (rhs, rhs_q), sizes, recipe, (wgrad, dgrad))
    groups = None
    if static.layout is None and rhs is not None:
        groups = Groups.from_sizes(sizes, lhs.shape[0], align=align_of(recipe))
        if wgrad:
            _, a = _by_slot("lhs", lhs, groups, recipe)
    absent = partial(_absent, static, (lhs, lhs_q), (rhs, rhs_q), groups, recipe)
    a_kept = None if rhs is None else a if wgrad else absent()[0]
    b_kept = None if lhs is None else b if dgrad else absent()[1]
    sides = (None, None) if static.layout is None else (static.layout.lhs, static.layout.rhs)
    types = side_of(sides[0], lhs), side_of(sides[1], rhs)
    return y, (a_kept, b_kept, sizes, groups, recipe, *types, mark)


def _by_slot(name: str, x: jax.Array, groups: Groups, recipe: Recipe) -> Any:
    """An operand of groups along its rows, each group at a multiple of blocks."""
    return Unquantized(x, recipe, groups.rows, name=name, wanted=(False, True)).forms()


def _absent(
    static: Static, lhs: Pair, rhs: Pair, groups: Groups | None, recipe: Recipe
) -> tuple[Any, Any]:
    """Placeholders for forms that no gradient wants: equal pytrees, a bool scalar for each array.

    JAX differentiates a jitted product once for each set of wanted gradients, and requires
    residuals of one structure from every set.
    """

    def forms(lhs: Pair, rhs: Pair, groups: Any, recipe: Recipe) -> tuple[Any, Any]:
        a, b = _operands(static, lhs, rhs, recipe, (True, True))
        a, b = (x.forms() if isinstance(x, Unquantized) else x for x in (a, b))
        if groups is not None:
            a = _by_slot("lhs", lhs[0], groups, recipe)
        return a[1], b[1]

    shapes = jax.eval_shape(forms, lhs, rhs, groups, recipe)
    a, b = jax.tree.map(lambda _: jnp.zeros((), bool), shapes)
    return a, b


def _present(form: ProductOperand | None) -> ProductOperand | None:
    """The form; None where a placeholder stands for it."""
    array: Any = None if form is None else form.array
    values = array.values if isinstance(array, MXArray) else array
    return None if values is None or values.dtype == bool else form


def _bwd(static: Static, residual: tuple, dy: Any) -> tuple[Any, ...]:
    a, b, sizes, groups, recipe, lhs, rhs, mark = residual
    a, b = _present(a), _present(b)
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return (None,) * 6
    dy = derivatives.once_derived(static.op, dy, mark)
    gradients = _gradients if static.layout is not None else _gradients_of_groups
    dlhs, drhs = gradients(static, dy, a, b, (sizes, groups), recipe, lhs, rhs)
    return dlhs, None, drhs, None, None, None


def _gradients(
    static: Static, dy: jax.Array, a: Any, b: Any, _: Any, recipe: Recipe, lhs: Any, rhs: Any
) -> tuple[Any, Any]:
    """Both gradients of a dense product, of one read of the result's."""
    layout = static.arranged
    gradient = Unquantized(
        layout.gradient(layout.gathered_gradient(dy, lhs, rhs)),
        recipe,
        name="gradient",
        wanted=(b is not None, a is not None),
        frozen=(rhs is None, lhs is None),
        pads=layout.gradient_pads,
    )
    like_a, like_b = (None if form is None else (i, 0) for i, form in ((1, a), (2, b)))
    multiplications = [] if b is None else [static.dgrad((0, 0), (2, 0), lhs, like_a)]
    multiplications += [] if a is None else [static.wgrad((1, 0), (0, 1), rhs, like_b)]
    products, _ = Step(tuple(multiplications))((gradient, (a,), (b,)))
    gradients = iter(products)
    dlhs = None if b is None else layout.lhs.restored(next(gradients), lhs.spec, swaps=True)
    return dlhs, None if a is None else layout.rhs.restored(next(gradients), rhs.spec)


def _gradients_of_groups(
    static: Static, dy: jax.Array, a: Any, b: Any, sizes: Any, recipe: Recipe, lhs: Any, rhs: Any
) -> tuple[Any, Any]:
    """Both gradients of a product over groups; along slots the result's is quantized by itself."""
    of_rows, groups = sizes
    dlhs = drhs = None
    if b is not None:
        asked: dict[str, Any] = {"wanted": (True, False), "frozen": (rhs is None, False)}
        gradient = Unquantized(dy, recipe, name="gradient", **asked)
        (dlhs,), _ = Step((static.dgrad((0, 0), (1, 0), lhs),))((gradient, (b,)), of_rows)
    if a is not None:
        _, along = _by_slot("gradient", dy, groups, recipe)
        wgrad = static.wgrad((0, 0), (1, 0), rhs, align=groups.align)
        (drhs,), _ = Step((wgrad,))(((a,), (along,)), groups.sizes)
    return dlhs, drhs


def align_of(recipe: Recipe) -> int:
    """The divisor of groups' sizes that keeps blocks and transforms along rows whole."""
    return math.lcm(recipe.units.wgrad, lengths_of(recipe.window_in("wgrad"))[1], align_for_trace())


_product.defvjp(_fwd, _bwd, symbolic_zeros=True)
