"""`moe`: the feed-forward part of a mixture of experts, in MX.

One custom_vjp with floats at both ends. Between them, forward:

    tokens --gather, quantize--> slots --product--> gate, up --activation, quantize--> --product-->
    slots --sum of each token's choices--> tokens

A router's weight scales what the activation gives instead of what the second product gives: the
sum is the same, and the gradient of the result then reaches the products without being scaled, so
that it is gathered and quantized in one read like the tokens.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx import reference
from jax_mx.arrays.checks import array_of, flag, implementation_of, is_symbolic, name_among
from jax_mx.experts import wires
from jax_mx.facts.activations import GATED
from jax_mx.facts.formats import BLOCK, MXFP8_E4M3
from jax_mx.lowering import primitive
from jax_mx.ops.activations import Gated
from jax_mx.ops.groups import Groups, integers
from jax_mx.ops.mxarray import MXArray, dequantize
from jax_mx.ops.quantize import quantize
from jax_mx.ops.quantizing import WithSums
from jax_mx.products.either import Names, by_names, either
from jax_mx.products.forms import Blocks, Form, Use, forms_of, may_be_floats
from jax_mx.products.operands import what_of
from jax_mx.products.ragged_dot import (
    Weight,
    align_of,
    array_or_quantized,
    floats_of,
    grouped_recipe,
    unsplit,
    weight_forms,
    weight_of,
)
from jax_mx.products.ragged_implementations import IMPLEMENTATIONS
from jax_mx.products.ragged_product import grouped
from jax_mx.products.recipes import MXFP8, Recipe, recipe_beside
from jax_mx.products.steps import (
    MARK,
    bias_of,
    floats_kept,
    gradient_uses,
    is_exact,
    once_derived,
    residuals_of,
    uses_of,
)


def moe(
    x: Any,
    experts: Any,
    weights: Any,
    w_gate_up: Any,
    w_down: Any,
    *,
    b_gate_up: Any = None,
    b_down: Any = None,
    activation: str = "swiglu",
    interleaved: bool = False,
    recipe: Recipe | str = MXFP8,
    residuals: str | None = None,
    expert_axis: str | None = None,
    tensor_axis: str | None = None,
    token_axes: str | tuple[str, ...] | None = None,
    wire: str = "mx",
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """The experts of a mixture: every token through those that a router chose for it.

    y[t] = sum over j of weights[t, j] (act(x[t] @ w_gate_up[e] + b_gate_up[e]) @ w_down[e]
    + b_down[e]), e = experts[t, j]. No token is dropped, whatever the routing; shapes do not depend
    on it, and nothing of it is read by the host. Differentiable in reverse mode with respect to x,
    weights, both matrices and both biases.

    Operands of both grouped products, and of their four gradients, are quantized as the recipe says
    (see `dot_general`): tokens and the result's gradient as they are gathered into slots, sorted by
    expert. Kept for the backward pass, in MX: the tokens along slots, and gate and up.

    With `expert_axis`, tokens and experts are split over it: tokens move to all shards of the axis
    as codes and scales, each shard's experts take theirs, and a reduce-scatter of floats adds up
    what they give. With wire="mx" the gradients of both matrices read what was quantized twice, to
    be moved and then along slots, so that they differ a little from one device's. Inside
    `jax.shard_map` over that axis, arguments are a shard's; elsewhere they are whole arrays, on the
    mesh that `jax.set_mesh` has set, with automatic or explicit axes, and this maps the layer over
    their shards.

    Args:
      x: (T, D): bfloat16, float16 or float32. 32 divides D.
      experts: integers (T, k): the experts of each token. One out of range adds nothing, and its
        weight's gradient is 0.
      weights: floats (T, k): what the router gives each of them.
      w_gate_up: (E, D, 2 I), see `ragged_dot`: floats, what `recipe.quantize_weight` makes of them,
        or a frozen `MXArray` (E, D, 2 I) or (E, 2 I, D) with its blocks along D. 32 divides I.
      w_down: (E, I, D), likewise.
      b_gate_up: floats (E, 2 I), or None.
      b_down: floats (E, D), or None.
      activation: one with a gate, see `gated`: "swiglu", "geglu", "geglu_erf", "reglu", "reglu2",
        "bilinear" or "gpt_oss".
      interleaved: whether gate and up come by turns along 2 I, not all gates first.
      recipe: how floats are quantized; window="row" is refused. The router's weight multiplies
        what w_down's product reads before that is quantized. Where the layer is split, a
        `Stochastic` key of the recipe has the shard's position on each axis that splits it folded
        in, so that no two shards round by the same numbers; in a `jax.shard_map` over axes that
        the layer is not told of, fold those in yourself: `recipe.fold_in(jax.lax.axis_index(...))`.
      residuals: what is kept of gate and up for the backward pass: "mx", MXFP8; "floats", as they
        are; "inputs", nothing: the first product is computed again from the quantized tokens. None:
        "mx" where the recipe quantizes the forward product, else "floats".
      expert_axis: the mesh axis that tokens and experts are split over.
      tensor_axis: the mesh axis that I is split over: the columns of w_gate_up (of gates and of
        ups alike), the rows of w_down; floats only, together with `expert_axis`. One more
        all-reduce adds up results.
      token_axes: the mesh axes that tokens are split over where this maps the layer; by default
        those of x's type, on a mesh with explicit axes, or all of the mesh besides `tensor_axis`.
        `expert_axis` is added. Given without one: every device has all experts, for its tokens.
      wire: how tokens and gradients move along it: "mx", or "floats", which are quantized after
        they arrived; so are those of products in bfloat16, or with a Hadamard transform.
      precision: of all grouped products, see `dot_general`.
      implementation: likewise, see `ragged_dot`; or None.

    Returns:
      (T, D), of x's dtype.

    Raises:
      TypeError: an operand or argument is of the wrong type.
      ValueError: shapes that do not fit, lengths that 32 does not divide, an unknown name.
      NotImplementedError: the named implementation does not serve a product.
    """
    op = "moe"
    recipe = grouped_recipe(op, recipe)
    units = recipe.units
    x = floats_of(op, "x", x, 2, math.lcm(units.forward, units.dgrad))
    axes = wires.axes_of(op, expert_axis, tensor_axis)
    w_gate_up = array_or_quantized(op, "w_gate_up", w_gate_up)
    w_down = array_or_quantized(op, "w_down", w_down)
    given = (("w_gate_up", w_gate_up), ("w_down", w_down))
    recipes = tuple(recipe_beside(op, name, w, recipe) for name, w in given)
    first = weight_of(op, "w_gate_up", w_gate_up, x.shape[1], recipe)
    if first.columns % (wanted := math.lcm(2 * units.forward, units.dgrad)):
        is_shard = tensor_axis is not None and not axes.to_map
        of_a_shard = f"on axis {tensor_axis!r} a shard's " * is_shard
        raise ValueError(
            f"{op}: {of_a_shard}w_gate_up has {first.columns} columns, must be a multiple of "
            f"{wanted}: 2 I, of which I is a multiple of {what_of(units.forward)}; pad gate and up "
            "with zero columns, and w_down with zero rows"
        )
    second = weight_of(op, "w_down", w_down, first.columns // 2, recipe)
    _check_second(op, first, second, x.shape[1])
    experts, weights = _routing(op, x, experts, weights)
    biases = [
        bias_of(op, name, bias, (first.groups, columns))
        for name, bias, columns in (
            ("b_gate_up", b_gate_up, first.columns),
            ("b_down", b_down, x.shape[1]),
        )
    ]
    if axes.to_map or token_axes is not None:
        options = {"activation": activation, "interleaved": interleaved, "residuals": residuals}
        options |= {"wire": wire, "precision": precision, "implementation": implementation}
        return _mapped(
            wires.Mapping.of(op, x, axes, token_axes, first.groups),
            options,
            (x, experts, weights, w_gate_up, w_down, *biases, recipe),
        )
    # No tokens, nothing moves: XLA gathers no empty arrays.
    nothing = not is_symbolic(x.shape[0]) and x.shape[0] == 0
    static = _Static(
        x.dtype,
        name_among(f"{op}: activation", GATED, activation),
        flag(op, "interleaved", interleaved),
        residuals_of(op, residuals, recipe),
        None if nothing else axes.experts,
        axes.tensor,
        name_among(f"{op}: wire", wires.KINDS, wire),
        is_exact(op, precision),
        implementation_of(op, IMPLEMENTATIONS, implementation),
    )
    unsplit(op, x, experts, weights, w_gate_up, w_down, *biases)
    given = (x, weights, first.floats, second.floats, *biases)
    recipes = tuple(wires.numbered(each, (axes.experts, axes.tensor)) for each in recipes)
    leaves, tree = jax.tree.flatten((given, first.quantized, second.quantized, experts, recipes))
    return _moe(static, *tree.unflatten(primitive.vary_alike(*leaves)))


def _mapped(mapping: wires.Mapping, options: dict[str, Any], args: tuple) -> jax.Array:
    """`moe` over the shards of whole arrays.

    Args:
      mapping: how they are split.
      options: of `moe`.
      args: its operands, then the recipe.
    """
    x, experts, weights, w1, w2, b1, b2, recipe = args
    wires.check_weights(mapping.axes, w1, w2)
    apart = mapping.axes.tensor is not None and not options["interleaved"]
    if apart:  # gates and ups each by themselves, so that a shard has those of the same columns
        w1, b1 = (w if w is None else wires.halved(w) for w in (w1, b1))

    def shard(x, experts, weights, w1, w2, b1, b2, recipe):
        if apart:
            w1, b1 = (w if w is None else w.reshape(*w.shape[:-2], -1) for w in (w1, b1))
        own = {"expert_axis": mapping.axes.experts, "tensor_axis": mapping.axes.tensor}
        recipe = wires.numbered(recipe, [n for n in mapping.tokens if n != mapping.axes.experts])
        return moe(
            x, experts, weights, w1, w2, b_gate_up=b1, b_down=b2, recipe=recipe, **own, **options
        )

    operands = (x, experts, weights, w1, w2, b1, b2, recipe)
    return mapping(shard, operands)


# ---- what callers pass ---
def _check_second(op: str, first: Weight, second: Weight, columns: int) -> None:
    if (second.groups, second.columns) != (first.groups, columns):
        raise ValueError(
            f"{op}: w_down has {second.groups} matrices of {second.columns} columns; w_gate_up has "
            f"{first.groups} and x has {columns} columns"
        )


def _routing(op: str, x: Any, experts: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    experts = integers(op, "experts", experts)
    weights = array_of(op, "weights", weights)
    if experts.ndim != 2 or experts.shape[0] != x.shape[0] or weights.shape != experts.shape:
        raise ValueError(
            f"{op}: experts have the shape {experts.shape} and weights {weights.shape}; both must "
            f"be (T, k), T = {x.shape[0]} as x has it"
        )
    return experts, weights


# ---- the layer and its derivative ---
class _Static(NamedTuple):
    """What of a layer is neither array nor key."""

    dtype: np.dtype
    activation: str
    interleaved: bool
    residuals: str
    axis: str | None
    tensor: str | None
    wire: str
    exact: bool
    implementation: str | None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """The dtypes of what gradients reach, None where it is not there."""

    of: tuple[np.dtype | None, ...]


class _Kept(NamedTuple):
    """What the backward pass reads.

    Attributes:
      groups: the slots.
      tokens: form of the gathered tokens, along slots.
      gate_up: (R, 2 I), an `MXArray` or floats; or the form along D that it is computed from.
      scale: float32 (R,), the router's weight of each slot.
      w_first: forms of w_gate_up: along D where gate and up are computed again, and along 2 I.
      w_second: form of w_down along D.
      biases: b_gate_up as it was given, b_down float32 of all experts.
      routing: experts and weights (T, k), as they were given; None without b_down.
      recipes: of both products; where a weight brings signs, they differ.
      types: the dtypes of what was given.
    """

    groups: Groups
    tokens: Any
    gate_up: Any
    scale: jax.Array
    w_first: Any
    w_second: Any
    biases: tuple[Any, Any]
    routing: tuple[jax.Array, jax.Array] | None
    recipes: tuple[Recipe, Recipe]
    types: _Types


@partial(jax.jit, static_argnums=0)
def _moe(static: _Static, *args: Any) -> jax.Array:
    return _moe_vjp(static, *args)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe_vjp(static: _Static, given, first, second, experts, recipes):
    return _forward(static, given, (first, second), experts, recipes, keep=False)[0]


def _moe_fwd(static: _Static, given, first, second, experts, recipes):
    *floats, mark = once_derived("moe", *given, MARK)
    y, kept = _forward(static, tuple(floats), (first, second), experts, recipes, keep=True)
    return y, (kept, mark)


def _forward(
    static: _Static,
    given: tuple,
    quantized: tuple,
    experts: jax.Array,
    recipes: tuple[Recipe, Recipe],
    keep: bool,
) -> tuple[jax.Array, Any]:
    """The result; and what the backward pass reads, if it is to be kept."""
    x, weights, w1, w2, *biases = given
    blocks = recipes[0].blocks("lhs")
    x_all = wires.gather_tokens(static, x, recipes[0].uses("lhs")[0], blocks)
    number = _matrices(w1, quantized[0])
    given_experts = experts
    weights = wires.gather_choices(static.axis, weights)
    experts = wires.local_experts(static.axis, experts, number)
    align = align_of(recipes[0]) if keep else 1  # nothing is quantized along slots
    groups = Groups.from_experts(experts, number, align=align)
    scale = groups.of_slots(weights.astype(jnp.float32))
    first, first_free = weight_forms(w1, quantized[0], recipes[0], keep)
    second, second_free = weight_forms(w2, quantized[1], recipes[1], keep)
    both, again = keep and w1 is not None, keep and static.residuals == "inputs"

    def first_step(names: Names | None, x: Any, w: Any, groups: Groups, bias: Any, recipe: Any):
        by, floats = by_names(static, names)
        uses = uses_of(recipe, "lhs", (True, both))
        tokens, kept = _slots(x, groups.rows, uses, blocks, (floats, False))
        return _gate_up(next(by), tokens, w, groups, bias), kept, tokens if again else None

    def second_step(names: Names | None, gate_up: Any, scale: Any, w: Any, groups: Groups, recipe):
        by, floats = by_names(static, names)
        uses, own = uses_of(recipe, "lhs", (True, False)), _gated(static, scale)
        along, _ = forms_of(gate_up, -1, uses, blocks, activation=own, as_floats=(floats, False))
        return _product(next(by), along, w, groups, static.dtype)

    worth = _may_be_floats(x_all, uses_of(recipes[0], "lhs", (True, both)), blocks)
    worth = worth and not again  # what is computed from is kept in MX
    gate_up, tokens_kept, tokens = either(
        worth, first_step, x_all, first, groups, biases[0], recipes[0]
    )
    worth = may_be_floats(gate_up, uses_of(recipes[1], "lhs", (True, False)), blocks)
    y = either(worth, second_step, gate_up, scale, second, groups, recipes[1])
    y = wires.sum_and_scatter(static.axis, groups.combined(y))
    if biases[1] is not None:  # of this shard's tokens and all experts
        biases[1] = wires.gather_choices(static.axis, biases[1]).astype(jnp.float32)
        each = reference.rows_of(biases[1], given_experts)
        own = each * given[1].astype(jnp.float32)[:, :, None]
        is_one = _is_one(given_experts, biases[1].shape[0])[:, :, None]
        own = jnp.where(is_one, own, 0).sum(1)
        y = y + wires.on_first_shard(static.tensor, own).astype(y.dtype)
    y = wires.summed_shards(static.tensor, y)
    if not keep:
        return y, None
    kept = {"mx": lambda: quantize(gate_up, MXFP8_E4M3), "floats": lambda: gate_up}
    types = _Types(tuple(None if each is None else each.dtype for each in given))
    return y, _Kept(
        groups,
        tokens_kept,
        kept[static.residuals]() if static.residuals in kept else tokens,
        scale,
        (None if static.residuals in kept else first, first_free),
        second_free,
        (biases[0], biases[1]),
        None if biases[1] is None else (given_experts, given[1]),
        recipes,
        types,
    )


def _matrices(floats: Any, quantized: Any) -> int:
    """How many experts there are, of a shard."""
    return (jax.tree.leaves(quantized)[0] if floats is None else floats).shape[0]


def _slots(
    x: Any,
    rows: jax.Array,
    uses: tuple[Use | None, Use | None],
    blocks: Blocks,
    as_floats: tuple[bool, bool] = (False, False),
) -> tuple[Form, Any]:
    """The forms of gathered rows along their elements, and along slots if that one is wanted.

    Args:
      x: (T, D), floats, or MX along D; then what runs along slots is quantized from that.
      rows: the row in each slot.
      uses: how the two products take them; None: the second one does not.
      blocks: which elements share scales.
      as_floats: see `forms_of`.
    """
    if any(as_floats) and isinstance(x, MXArray):
        x = dequantize(x)  # quantized again along its elements, these are the same floats
    if not isinstance(x, MXArray):
        made: Any = forms_of(x, -1, uses, blocks, rows, as_floats=as_floats)
        return made
    first, second = Form(wires.pick_rows(x, rows)), None
    if uses[1] is not None:
        _, second = forms_of(x, -1, (None, uses[1]), blocks, rows)
    return first, second


def _may_be_floats(x: Any, uses: tuple[Use | None, Use | None], blocks: Blocks) -> bool:
    """Whether `_slots` may give floats: of floats, or of codes, which it dequantizes then."""
    like = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) if isinstance(x, MXArray) else x
    return may_be_floats(like, uses, blocks)


def _product(
    static: _Static, a: Any, w: Any, groups: Groups, dtype: Any, sums: bool = False
) -> jax.Array:
    return grouped(
        a.array,
        w.array,
        groups.sizes,
        dtype,
        axes=(a.axis, w.axis),
        sums=sums,
        align=groups.align,
        exact=static.exact,
        implementation=static.implementation,
    )


def _gate_up(static: _Static, tokens: Form, first: Form, groups: Groups, bias: Any) -> jax.Array:
    gate_up = _product(static, tokens, first, groups, static.dtype)
    if bias is None:
        return gate_up
    own = reference.rows_of(bias, groups.experts).astype(jnp.float32)
    return (gate_up.astype(jnp.float32) + own).astype(static.dtype)


def _is_one(experts: jax.Array, number: int) -> jax.Array:
    """Which choices name an expert, of so many."""
    return (experts >= 0) & (experts < number)


def _shares(experts: jax.Array, weights: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """(T, E): the sum of the weights that each token gives each expert, float32; if it has any."""
    is_it = experts[:, :, None] == jnp.arange(number, dtype=experts.dtype)[None, None]
    shares = jnp.where(is_it, weights.astype(jnp.float32)[:, :, None], 0).sum(1)
    return shares, is_it.any(1)


def _sums(shares: jax.Array, takes: jax.Array, rows: jax.Array) -> jax.Array:
    """Float32 (E, columns): each expert's sum of rows, each row by its share.

    What is not finite makes NaN in the sums of the experts that take its row, and in no others,
    where a product of matrices would have 0 * NaN.

    Args:
      shares: float32 (R, E).
      takes: bool (R, E), whose sums a row is in.
      rows: float32 (R, columns).
    """
    good_shares, good_rows = jnp.isfinite(shares), jnp.isfinite(rows)
    sums = jnp.einsum(
        "re,rn->en",
        jnp.where(good_shares, shares, 0),
        jnp.where(good_rows, rows, 0),
        precision="highest",
    )
    bad = jnp.einsum("re,rn->en", takes.astype(jnp.bfloat16), (~good_rows).astype(jnp.bfloat16))
    return jnp.where((bad > 0) | ~good_shares.all(0)[:, None], jnp.nan, sums)


def _moe_bwd(static: _Static, residual: tuple[_Kept, jax.Array], dy: jax.Array):
    kept, mark = residual
    groups, recipes = kept.groups, kept.recipes
    dy, _ = once_derived("moe", dy, mark)
    x_type, _, w1_type, w2_type, b1_type, b2_type = kept.types.of
    first, second = recipes
    blocks = first.blocks("gradient")
    uses = gradient_uses(second, w2_type is None)
    dy_all = wires.gather_tokens(static, dy, uses[0], blocks)
    gate_up = _again(static, kept)
    act_by_slot = dw1 = db1 = db2 = None
    if w2_type is not None:
        lhs, own = (None, second.uses("lhs")[1]), _gated(static, kept.scale)
        _, act_by_slot = forms_of(gate_up, -1, lhs, second.blocks("lhs"), activation=own)

    # The gradient of the result, in slots: by w_down^T, and along slots for that of w_down.
    def second_step(names: Names | None, dy: Any, act: Any, w: Any, groups: Groups, recipe: Recipe):
        by, floats = by_names(static, names)
        own = (groups.rows, gradient_uses(recipe, act is None), blocks)
        by_row, by_slot = _slots(dy, *own, (floats, floats))
        dact = _product(next(by), by_row, w, groups, static.dtype)
        if act is None:
            return dact, None
        return dact, _product(next(by), act, by_slot, groups, w2_type, sums=True)

    worth = _may_be_floats(dy_all, uses, blocks)
    dact, dw2 = either(worth, second_step, dy_all, act_by_slot, kept.w_second, groups, second)
    # Through the activation, whose argument was kept.
    each = reference.halves(gate_up, static.activation, static.interleaved)
    act = reference.gated_exactly(each, None, static.activation)
    dscale = (dact.astype(jnp.float32) * act).sum(-1)
    gated: Any = dataclasses.replace(
        _gated(static, kept.scale), gradient=dact.astype(gate_up.dtype)
    )
    gated = gated if b1_type is None else WithSums(gated)

    def first_step(
        names: Names | None, gate_up: Any, gated: Any, tokens: Any, w: Any, groups: Groups,
        recipe: Recipe,
    ) -> Any:  # fmt: skip
        by, floats = by_names(static, names)
        own = (gate_up, -1, gradient_uses(recipe, w1_type is None), blocks)
        along, across, *sums = forms_of(*own, activation=gated, as_floats=(floats, floats))
        dw1 = None
        if w1_type is not None:
            dw1 = _product(next(by), tokens, across, groups, w1_type, sums=True)
        return _product(next(by), along, w, groups, static.dtype), dw1, sums

    worth = may_be_floats(gate_up, gradient_uses(first, w1_type is None), blocks, gated)
    dx, dw1, sums = either(
        worth, first_step, gate_up, gated, kept.tokens, kept.w_first[1], groups, first
    )
    dx = wires.sum_and_scatter(static.axis, groups.combined(dx)).astype(x_type)
    dweights = wires.sum_and_scatter(static.axis, groups.of_choices(dscale))
    if b1_type is not None:
        db1 = _by_expert(sums[0], groups).astype(b1_type)
    if kept.routing is not None:
        (experts, weights), bias = kept.routing, kept.biases[1]
        floats, is_one = dy.astype(jnp.float32), _is_one(experts, bias.shape[0])
        db2 = _sums(*_shares(experts, weights, bias.shape[0]), floats)
        db2 = wires.on_first_shard(static.tensor, db2)
        db2 = wires.sum_and_scatter(static.axis, db2).astype(b2_type)
        each = (reference.rows_of(bias, experts) * floats[:, None]).sum(-1)
        dweights += wires.on_first_shard(static.tensor, jnp.where(is_one, each, 0))
    dweights = dweights.astype(kept.types.of[1])
    return (dx, dweights, dw1, dw2, db1, db2), None, None, None, None


def _again(static: _Static, kept: _Kept) -> jax.Array:
    """Gate and up, (R, 2 I): as they were kept, or computed again."""
    if static.residuals == "inputs":
        first, _ = kept.w_first
        bias, _ = kept.biases
        return _gate_up(static, kept.gate_up, first, kept.groups, bias)
    return floats_kept(kept.gate_up, static.dtype)


def _gated(static: _Static, scale: jax.Array) -> Gated:
    """What lies between the products, by the router's weight of each slot."""
    return Gated(static.activation, scale, interleaved=static.interleaved)


def _by_expert(sums: jax.Array, groups: Groups) -> jax.Array:
    """Float32 (E, columns): the sum of each expert's slots, those of `align` slots first.

    Args:
      sums: float32 (R / 32, columns), of 32 slots each, or of all slots themselves.
      groups: the slots.
    """
    each = groups.align // (1 if sums.shape[0] == groups.rows.shape[0] else BLOCK)
    runs = sums.reshape(-1, each, sums.shape[-1]).sum(1)
    experts = groups.experts[:: groups.align]
    is_it = experts[:, None] == jnp.arange(groups.num_experts, dtype=experts.dtype)[None]
    return _sums(is_it.astype(jnp.float32), is_it, runs)


_moe_vjp.defvjp(_moe_fwd, _moe_bwd)
