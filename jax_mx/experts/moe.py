"""`moe`: the feed-forward part of a mixture of experts, in MX.

    tokens --gather, quantize--> slots --product--> gate, up --activation, quantize--> --product-->
    slots --sum of each token's choices--> tokens

A router's weight scales the result of the activation instead of the second product's, which gives
the same sum. The gradient of the result then reaches the products without a factor, so that one
read gathers and quantizes it like the tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_mx.experts import wires
from jax_mx.experts.costs import WAYS
from jax_mx.experts.rounds import Round
from jax_mx.formats.arrangements import what_of
from jax_mx.formats.checks import array_of, flag, implementation_of, is_symbolic, name_among
from jax_mx.formats.formats import BLOCK
from jax_mx.launch import private
from jax_mx.products.arguments import (
    array_or_quantized,
    bias_of,
    floats_of,
    is_exact,
    residuals_of,
    unsplit,
    warn_of_fixed_keys,
    weight_of,
)
from jax_mx.products.auto import grouped_recipe, recipe_beside
from jax_mx.products.derivative import align_of
from jax_mx.products.fallback import unquantized
from jax_mx.products.groups import Groups, integers
from jax_mx.products.implementations import named
from jax_mx.products.layer import Back, Inputs, Kept, Layer, Moves, Recipes, layer
from jax_mx.products.operand import Moved, QuantizedWeight, Unquantized, weight_forms
from jax_mx.products.recipes import AUTO, Recipe
from jax_mx.products.sides import Side, Static
from jax_mx.quantizing import reference
from jax_mx.quantizing.facts.activations import GATED
from jax_mx.quantizing.mxarray import MXArray


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
    recipe: Recipe | str = AUTO,
    residuals: str | None = None,
    expert_axis: str | None = None,
    tensor_axis: str | None = None,
    token_axes: str | tuple[str, ...] | None = None,
    wire: str = "mx",
    way: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """The experts of a mixture: each token passes through the experts that a router chose for it.

    y[t] = sum over j of weights[t, j] (act(x[t] @ w_gate_up[e] + b_gate_up[e]) @ w_down[e] +
    b_down[e]), e = experts[t, j]. No token is dropped, whatever the routing. Shapes do not depend
    on the routing, and the host does not read it. The function is differentiable in reverse mode
    with respect to x, weights, both matrices and both biases.

    The recipe says how operands of both grouped products, and of their four gradients, are
    quantized (see `dot_general`). Tokens and the result's gradient are quantized as they are
    gathered into slots, sorted by expert. The backward pass keeps in MX the tokens along slots, and
    gate and up.

    `expert_axis` is a mesh axis that tokens and experts are split over. Tokens move to its shards
    as codes and scales, by one of two ways. "gather": all shards gather all tokens, each shard's
    experts take theirs, and a reduce-scatter of floats adds up the results. "rounds": tokens travel
    to the shards that have their experts, in as many rounds of an all-to-all as the fullest shard
    needs. Only one round takes memory at a time. The first round has room for an eighth more than
    an even routing sends, and keeps arrays for the backward pass. The backward pass computes
    further rounds again.

    `wire` is the form in which tokens move. With the default, "mx", the gradients of both matrices
    read tokens that were quantized twice, for the move and then along slots. They differ a little
    from one device's. Inside `jax.shard_map` over
    that axis, arguments are a shard's. Elsewhere they are whole arrays, on the mesh that
    `jax.set_mesh` has set, with automatic or explicit axes. The function then maps the layer over
    their shards.

    Args:
      x: (T, D): bfloat16, float16 or float32. 32 divides D, as do the sizes of the recipe's
        Hadamard transforms in forward and dgrad.
      experts: integers (T, k): the experts of each token. A number out of range adds nothing, and
        its weight's gradient is 0.
      weights: floats (T, k): the router's weight of each.
      w_gate_up: (E, D, 2 I), see `ragged_dot`: floats, a result of `recipe.quantize_weight`, or a
        frozen `MXArray` (E, D, 2 I) or (E, 2 I, D) with its blocks along D. 32 and the size of
        forward's transform divide I; the size of dgrad's divides 2 I.
      w_down: (E, I, D), of the same types.
      b_gate_up: floats (E, 2 I), or None.
      b_down: floats (E, D), or None.
      activation: a name with a gate, see `gated`: "swiglu", "geglu", "geglu_erf", "reglu",
        "reglu2", "bilinear" or "gpt_oss".
      interleaved: whether gate and up alternate along 2 I, not all gates first.
      recipe: the rule for floats, see `dot_general`; "floats" leaves them as they are. It refuses
        the windows "row" and "shard" in wgrad, so `MXFP8_ROWS`; take `MXFP8_WINDOWS`. The router's
        weight multiplies the operand of w_down's product before this is quantized. A split layer
        folds the shard's position on each axis into a `Stochastic` key of the recipe. So no two
        shards round by the same numbers. A `jax.shard_map` over axes that the layer does not know
        folds these in itself: `recipe.fold_in(jax.lax.axis_index(...))`.
      residuals: the form of gate and up that the backward pass keeps: "mx", MXFP8; "floats", as
        they are; "inputs", nothing. For "inputs" it computes the first product again from the
        quantized tokens. None: "mx" where the recipe quantizes the forward product, else "floats".
      expert_axis: the mesh axis that tokens and experts are split over.
      tensor_axis: the mesh axis that I is split over: the columns of w_gate_up (of gates and of
        ups alike), the rows of w_down; floats only, together with `expert_axis`. One more
        all-reduce adds up results.
      token_axes: the mesh axes that tokens are split over where the function maps the layer;
        `expert_axis` is added. The default is the axes of x's type, on a mesh with explicit axes,
        or all of the mesh except `tensor_axis`. Without an `expert_axis` every device has all
        experts, for its tokens.
      wire: the form in which tokens and gradients move along it: "mx", or "floats", which are
        quantized after they arrived. This holds for products in bfloat16, or with a Hadamard
        transform, too.
      way: the way of tokens to their experts' shards, "gather" or "rounds". None: the way that
        costs less, in bytes and launches; `explain` says which, and why.
      precision: of all grouped products, see `dot_general`.
      implementation: of all grouped products, see `ragged_dot`; or None.

    Returns:
      (T, D), of x's dtype.

    Raises:
      TypeError: an operand or argument is of the wrong type.
      ValueError: shapes that do not fit, lengths that 32 or a transform's size does not divide, a
        window that experts do not take, an unknown name.
      NotImplementedError: the named implementation does not serve a product.
    """
    op = "moe"
    if isinstance(w_gate_up, QuantizedWeight) or isinstance(w_down, QuantizedWeight):
        w_gate_up, w_down = unquantized(recipe, w_gate_up, w_down)
    w_gate_up = array_or_quantized(op, "w_gate_up", w_gate_up)
    w_down = array_or_quantized(op, "w_down", w_down)
    recipe = grouped_recipe(op, recipe, x, w_gate_up, w_down)
    pairs = (("w_gate_up", w_gate_up), ("w_down", w_down))
    recipes = tuple(recipe_beside(op, name, w, recipe) for name, w in pairs)
    if vars(recipe)["dgrad"].rounding or vars(recipe)["wgrad"].rounding:
        warn_of_fixed_keys(op, recipe)
    units = recipe.units
    x = floats_of(op, "x", x, 2, math.lcm(units.forward, units.dgrad))
    axes = wires.axes_of(op, expert_axis, tensor_axis)
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
    _check_second(op, second.groups, second.columns, first.groups, x.shape[1])
    experts, weights = _routing(op, x.shape[0], experts, weights)
    biases = [
        bias_of(op, name, bias, (first.groups, columns))
        for name, bias, columns in (
            ("b_gate_up", b_gate_up, first.columns),
            ("b_down", b_down, x.shape[1]),
        )
    ]
    if axes.to_map or token_axes is not None:
        options = {"activation": activation, "interleaved": interleaved, "residuals": residuals}
        options |= {
            "wire": wire,
            "way": way,
            "precision": precision,
            "implementation": implementation,
        }
        return _mapped(
            wires.Mapping.of(op, x, axes, token_axes, first.groups),
            options,
            (x, experts, weights, w_gate_up, w_down, *biases, recipe),
        )
    # No tokens, nothing moves: XLA gathers no empty arrays.
    nothing = not is_symbolic(x.shape[0]) and 0 in experts.shape
    axis = None if nothing else axes.experts
    chosen = implementation_of(op, named("ragged_dot"), implementation)
    exact = is_exact(op, precision)
    product = Static(op, None, x.dtype, exact, chosen, chosen=recipe.chosen)
    wire = name_among(f"{op}: wire", wires.KINDS, wire)
    way = None if way is None else name_among(f"{op}: way", WAYS, way)
    if axis is None:
        trip = wires.Gathered(experts, axis, wire, first.groups)
    else:
        trip = wires.travel(axis, wire, way, experts, first.groups, x.shape[1])
    static = Layer(
        (product,),
        product,
        name_among(f"{op}: activation", GATED, activation),
        flag(op, "interleaved", interleaved),
        residuals_of(op, residuals, recipe),
        Slots(axis, axes.tensor, isinstance(trip, Round)),
    )
    unsplit(op, x, experts, weights, w_gate_up, w_down, *biases)
    b1, b2 = biases
    inputs = Inputs(x, weights, (first.floats,), second.floats, (b1,), b2)
    recipes = tuple(wires.numbered(one, (axes.experts, axes.tensor)) for one in recipes)
    quantized = (first.quantized,), second.quantized
    leaves, tree = jax.tree.flatten((inputs, quantized, trip, recipes))
    return layer(static, *tree.unflatten(private.vary_alike(*leaves)))


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
        over = {"expert_axis": mapping.axes.experts, "tensor_axis": mapping.axes.tensor}
        recipe = wires.numbered(recipe, [n for n in mapping.tokens if n != mapping.axes.experts])
        return moe(
            x, experts, weights, w1, w2, b_gate_up=b1, b_down=b2, recipe=recipe, **over, **options
        )

    operands = (x, experts, weights, w1, w2, b1, b2, recipe)
    return mapping(shard, operands)


# ---- what callers pass ---
def _check_second(op: str, groups: int, columns: int, groups_of_first: int, wanted: int) -> None:
    if (groups, columns) != (groups_of_first, wanted):
        raise ValueError(
            f"{op}: w_down has {groups} matrices of {columns} columns; w_gate_up has "
            f"{groups_of_first} and x has {wanted} columns"
        )


def _routing(op: str, tokens: int, experts: Any, weights: Any) -> tuple[jax.Array, jax.Array]:
    experts = integers(op, "experts", experts)
    weights = array_of(op, "weights", weights)
    if experts.ndim != 2 or experts.shape[0] != tokens or weights.shape != experts.shape:
        raise ValueError(
            f"{op}: experts have the shape {experts.shape} and weights {weights.shape}; both must "
            f"be (T, k), T = {tokens} as x has it"
        )
    return experts, weights


# ---- rows that go to the slots of their experts ---
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SlotPlace:
    """Where tokens are.

    Attributes:
      groups: the slots.
      scale: float32 (R,), the router's weight of each slot.
      trip: the rows that slots hold, and the way back.
    """

    groups: Groups
    scale: jax.Array
    trip: wires.Trip


@dataclasses.dataclass(frozen=True)
class Slots(Moves):
    """Tokens that go to slots, sorted by expert, on the shards that have those; see `Moves`.

    Attributes:
      axis: the mesh axis that tokens and experts are split over, or None.
      tensor: that the inner length is split over, or None.
      rounds: whether tokens travel in rounds.
    """

    axis: str | None
    tensor: str | None
    rounds: bool
    keeps_activation: ClassVar[bool] = False

    def enter(
        self,
        layer: Layer,
        inputs: Inputs,
        quantized: tuple,
        routing: Any,
        recipes: Recipes,
        keep: bool,
    ) -> tuple[Unquantized, list[Any], Any, SlotPlace]:
        """See `Moves`."""
        (first, second), (w,), ((q,), q_second) = recipes, inputs.w_first, quantized
        tokens = Unquantized(inputs.x, first, name="lhs", wanted=(True, False), moves=True)
        x, (experts, weights) = routing.tokens(tokens), routing.choices(inputs.weights)
        align = align_of(first) if keep else 1  # nothing is quantized along slots
        groups = Groups.from_experts(experts, routing.local, align=align, most=routing.most)
        place = SlotPlace(groups, groups.of_slots(weights), routing)
        request = Moved if isinstance(x, MXArray) else Unquantized
        wanted = (True, keep and w is not None)
        rows = request(x, first, groups.rows, name="lhs", wanted=wanted)
        firsts = [weight_forms(w, q, first, keep)]
        return rows, firsts, weight_forms(inputs.w_second, q_second, second, keep), place

    def gradient(
        self, product: Static, dy: Any, place: Any, recipe: Recipe, weight: Side | None
    ) -> Unquantized:
        """See `Moves`."""
        options: dict[str, Any] = {"name": "gradient", "frozen": (weight is None, False)}
        alone = Unquantized(dy, recipe, wanted=(True, False), moves=True, **options)
        rows = place.trip.tokens(alone)
        request, wanted = Moved if isinstance(rows, MXArray) else Unquantized, weight is not None
        return request(rows, recipe, place.groups.rows, wanted=(True, wanted), **options)

    def biased(self, product: Static, y: jax.Array, bias: Any, place: Any) -> jax.Array:
        """See `Moves`."""
        rows = reference.rows_of(bias, place.groups.experts).astype(jnp.float32)
        return (y.astype(jnp.float32) + rows).astype(product.dtype)

    def leave(
        self, product: Static, y: jax.Array, inputs: Inputs, routing: Any, place: Any
    ) -> tuple[jax.Array, Any]:
        """See `Moves`; the backward pass needs b_down and the routing."""
        y, saved = routing.back(place.groups.combined(y)), None
        if inputs.b_second is not None:  # of this shard's tokens and all experts
            bias = wires.gathered(self.axis, inputs.b_second).astype(jnp.float32)
            rows = reference.rows_of(bias, routing.experts)
            rows = rows * inputs.weights.astype(jnp.float32)[:, :, None]
            is_one = _is_one(routing.experts, bias.shape[0])[:, :, None]
            rows = jnp.where(is_one, rows, 0).sum(1)
            y = y + wires.on_first_shard(self.tensor, rows).astype(y.dtype)
            saved = bias, routing.experts, inputs.weights
        return wires.summed_shards(self.tensor, y), saved

    @property
    def in_rounds(self) -> bool:
        """See `Moves`."""
        return self.rounds

    def rest(self, routing: Any, run: Callable[..., Any], sums: Any, operands: Any) -> Any:
        """See `Moves`; random numbers are a round's own."""

        def one(trip: Any, operands: Any) -> Any:
            inputs, quantized, recipes, *more = operands
            recipes = tuple(recipe.fold_in(trip.number) for recipe in recipes)
            return run(trip, (inputs, quantized, recipes, *more))

        return routing.rest(one, sums, operands)

    def gradients(self, layer: Layer, kept: Kept, back: Back) -> Inputs:
        """See `Moves`."""
        groups, trip, sides = kept.place.groups, kept.place.trip, kept.sides
        (gate_up,) = back.gate_up
        halves = reference.halves(gate_up, layer.activation, layer.interleaved)
        act = reference.gated_exactly(halves, layer.activation)
        dscale = (back.dact.astype(jnp.float32) * act).sum(-1)
        dx, dweights = groups.combined(back.dx), groups.of_choices(dscale)
        dx, dweights = trip.back(dx).astype(sides.x.dtype), trip.back_choices(dweights)
        db1 = db2 = None
        ((bias,), (sums,)) = sides.b_first, back.sums
        if bias is not None:
            db1 = _by_expert(sums, groups).astype(bias.dtype)
        if kept.extras is not None:
            bias, experts, weights = kept.extras
            dy, is_one = back.dy.astype(jnp.float32), _is_one(experts, bias.shape[0])
            db2 = _sums(*_shares(experts, weights, bias.shape[0]), dy)
            db2 = wires.on_first_shard(self.tensor, db2)
            db2 = wires.sum_and_scatter(self.axis, db2).astype(sides.b_second.dtype)
            products = (reference.rows_of(bias, experts) * dy[:, None]).sum(-1)
            dweights += wires.on_first_shard(self.tensor, jnp.where(is_one, products, 0))
        dweights = dweights.astype(sides.weights.dtype)
        return Inputs(dx, dweights, back.dw_first, back.dw_second, (db1,), db2)


def _is_one(experts: jax.Array, number: int) -> jax.Array:
    """The choices that name one of `number` experts, as bools."""
    return (experts >= 0) & (experts < number)


def _shares(experts: jax.Array, weights: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """(T, E): the sum of the weights that each token gives each expert, float32; if it has any."""
    is_it = experts[:, :, None] == jnp.arange(number, dtype=experts.dtype)[None, None]
    shares = jnp.where(is_it, weights.astype(jnp.float32)[:, :, None], 0).sum(1)
    return shares, is_it.any(1)


def _sums(shares: jax.Array, takes: jax.Array, rows: jax.Array) -> jax.Array:
    """Float32 (E, columns): each expert's sum of rows, each row by its share.

    An infinity or a NaN makes NaN in the sums of the experts that take its row, and in no others; a
    product of matrices would have 0 * NaN there.

    Args:
      shares: float32 (R, E).
      takes: bool (R, E), whether an expert's sum has a row.
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


def _by_expert(sums: jax.Array, groups: Groups) -> jax.Array:
    """Float32 (E, columns): the sum of each expert's slots, after sums of `align` slots each.

    Args:
      sums: float32 (R / 32, columns), of 32 slots each, or of all slots themselves.
      groups: the slots.
    """
    length = groups.align // (1 if sums.shape[0] == groups.rows.shape[0] else BLOCK)
    runs = sums.reshape(-1, length, sums.shape[-1]).sum(1)
    experts = groups.experts[:: groups.align]
    is_it = experts[:, None] == jnp.arange(groups.num_experts, dtype=experts.dtype)[None]
    return _sums(is_it.astype(jnp.float32), is_it, runs)
