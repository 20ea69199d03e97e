"""The layer's derivative: two products, an activation between them, and moves around them.

One custom_vjp with floats at both ends, for `mlp` and `moe`. Forward:

    x --move, quantize--> --product--> gate, up --activation, quantize--> --product--> --move--> y

Gates and ups are one array of one weight, or two arrays of two weights, which read one quantized x.
A kernel that quantizes an activation (`Gated`) writes no floats of it, and the residuals of the
backward pass are MX. A `Moves` says how rows reach the products and come back. `mlp` leaves rows
where they are; `moe` moves them to their experts' slots.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.formats import MXFP8_E4M3
from jax_mx.formats.sharding import is_explicit, spec_of
from jax_mx.formats.windows import ROW, SHARD
from jax_mx.products.multiply import Multiplication, Step
from jax_mx.products.operand import Unquantized
from jax_mx.products.recipes import Recipe
from jax_mx.products.sides import Side, Static, side_of, values_of
from jax_mx.quantizing import derivatives
from jax_mx.quantizing.activations import Gated, gradients_of_parts, known_gradients_of_parts, made
from jax_mx.quantizing.mxarray import MXArray, floats_of
from jax_mx.quantizing.quantize import quantize

Recipes = tuple[Recipe, Recipe]  # of both products: where a weight brings signs, they differ
GateUp = tuple[Any, ...]  # gates and ups as one array, or as one each


class Inputs(NamedTuple):
    """The arrays that gradients reach; None where there is none, or a weight is frozen.

    Attributes:
      x: floats, the rows.
      weights: a router's, (T, k); None in `mlp`.
      w_first: of gates and ups: one, or one each.
      w_second: of the result.
      b_first: the biases beside them.
      b_second: the bias of the second product.
    """

    x: Any
    weights: Any
    w_first: tuple[Any, ...]
    w_second: Any
    b_first: tuple[Any, ...]
    b_second: Any


class Layer(NamedTuple):
    """The static part of a layer.

    Attributes:
      first: the products with each first weight.
      second: the second product.
      activation: its name, see `gated`.
      interleaved: whether gates and ups come by turns.
      residuals: the form in which both are kept: "mx", "floats" or "inputs".
      moves: of rows.
    """

    first: tuple[Static, ...]
    second: Static
    activation: str
    interleaved: bool
    residuals: str
    moves: Moves

    @property
    def op(self) -> str:
        """The public function."""
        return self.second.op

    def hidden(self, gate_up: GateUp) -> Side:
        """The side of the activation's result."""
        if not is_explicit(jax.typeof(gate_up[0]).sharding.mesh):
            return Side(self.second.dtype)
        spec = spec_of(made(self.op, gate_up[0], self.gated(gate_up)))
        return Side(self.second.dtype, arranged=spec)

    def sides(self, inputs: Inputs) -> Inputs:
        """The sides of all inputs."""
        dense = self.second.layout is not None
        side = side_of(self.first[0].arranged.lhs if dense else None, inputs.x)
        firsts = tuple(
            side_of(product.arranged.rhs if dense else None, w)
            for product, w in zip(self.first, inputs.w_first, strict=True)
        )
        return Inputs(
            side,
            side_of(None, inputs.weights),
            firsts,
            side_of(self.second.arranged.rhs if dense else None, inputs.w_second),
            tuple(side_of(None, bias) for bias in inputs.b_first),
            side_of(None, inputs.b_second),
        )

    def forwards(self, align: int) -> tuple[Multiplication, ...]:
        """The first products, of rows and each first weight."""
        return tuple(
            product.forward((0, 0), (i, 0), align) for i, product in enumerate(self.first, 1)
        )

    def gated(self, gate_up: GateUp, scale: Any = None) -> Gated:
        """The activation between both products, times the scale of each row."""
        return Gated(self.activation, scale, *gate_up[1:], interleaved=self.interleaved)

    def requests(
        self, gate_up: GateUp, scale: Any, recipe: Recipe, wanted: tuple[bool, bool]
    ) -> Unquantized:
        """The operand of the activation's result that the second product reads."""
        activation = self.gated(gate_up, scale)
        return Unquantized(gate_up[0], recipe, None, activation, wanted=wanted)


class Moves(ABC):
    """How rows reach a layer's products, and how results return; a static value.

    A `place` says where rows are: None, or a pytree with `groups`, and the `scale` of each row.
    """

    keeps_activation: ClassVar[bool]  # along its rows, for the gradient of w_second

    @abstractmethod
    def enter(
        self,
        layer: Layer,
        inputs: Inputs,
        quantized: tuple,
        routing: Any,
        recipes: Recipes,
        keep: bool,
    ) -> tuple[Unquantized, list[Any], Any, Any]:
        """The operands of rows, of the first weights and of the second; and the place.

        Args:
          layer: the layer.
          inputs: to the layer.
          quantized: the quantized parts of both weights, or None.
          routing: the experts of each row, or None.
          recipes: of both products.
          keep: whether a backward pass follows.
        """

    @abstractmethod
    def gradient(
        self, product: Static, dy: Any, place: Any, recipe: Recipe, weight: Side | None
    ) -> Unquantized:
        """The operand of the result's gradient, which both products of the backward pass read.

        Args:
          product: the second one.
          dy: the gradient.
          place: where rows are.
          recipe: of the second product.
          weight: of its weight, or None where that is frozen.
        """

    @abstractmethod
    def biased(self, product: Static, y: jax.Array, bias: Any, place: Any) -> jax.Array:
        """The first product, and its bias."""

    @abstractmethod
    def leave(
        self, product: Static, y: jax.Array, inputs: Inputs, routing: Any, place: Any
    ) -> tuple[jax.Array, Any]:
        """The result as the caller wants it, and further residuals."""

    @property
    def in_rounds(self) -> bool:
        """Whether a routing may have further rounds, see `rest`."""
        return False

    def rest(self, routing: Any, run: Callable[..., Any], sums: Any, operands: Any) -> Any:
        """The sums of the results of `run` over all rounds of a routing.

        Args:
          routing: of the layer; its first round.
          run: a function of a round and of the operands; it gets the operands from nowhere else.
          sums: the results of the first round.
          operands: inputs, quantized, recipes, and more.
        """
        raise NotImplementedError

    @abstractmethod
    def gradients(self, layer: Layer, kept: Kept, back: Back) -> Inputs:
        """The gradients, with the shapes, dtypes and shardings of the layer's inputs."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "place", "rows", "act", "gate_up", "w_first", "w_second", "biases", "recipes", "extras",
    ),
    meta_fields=("sides",),
)  # fmt: skip
@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """The residuals of a layer. A field is None where the backward pass reads nothing.

    Attributes:
      place: where rows are, see `Moves`.
      rows: form along rows, of what the first product read.
      act: the form along rows of the activation's result.
      gate_up: `MXArray`s or floats, arranged; or the form that they are computed from.
      w_first: of each the contracted form, kept only to compute gates and ups again; and the free
        form.
      w_second: its free form.
      biases: b_first, where gates and ups are computed again.
      recipes: of both products.
      extras: further residuals, of `Moves.leave`.
      sides: the `Side` of every input.
    """

    place: Any
    rows: Any
    act: Any
    gate_up: Any
    w_first: tuple[tuple[Any, Any], ...]
    w_second: Any
    biases: tuple[Any, ...]
    recipes: Recipes
    extras: Any
    sides: Inputs


class Back(NamedTuple):
    """The products of the backward pass, arranged; None where nothing is wanted.

    Attributes:
      dy: the gradient of the result, as JAX passes it.
      gate_up: gates and ups, which were kept or computed again.
      dact: the gradient of the activation's result.
      dx: of rows; of two weights the sum of what each gives, in the dtype of rows.
      dw_first: of the first weights.
      dw_second: of the second weight.
      sums: of the gradients of gates and ups, see `Unquantized`.
    """

    dy: jax.Array
    gate_up: GateUp
    dact: jax.Array
    dx: jax.Array
    dw_first: tuple[Any, ...]
    dw_second: Any
    sums: tuple[Any, ...]


IN_PARTS = "; its two products with recipe='bf16', and jax.nn's activation between them, have all"


def layer(
    static: Layer, inputs: Inputs, quantized: tuple, routing: Any, recipes: Recipes
) -> jax.Array:
    """The layer, differentiable by its inputs.

    Args:
      static: the part of it that is neither array nor key.
      inputs: its arrays.
      quantized: the quantized parts of both weights: an `MXArray`, both forms, or None.
      routing: the experts of each row, or None.
      recipes: of both products.
    """
    inputs = derivatives.reverse_only(static.op, inputs, IN_PARTS)
    return _layer(static, inputs, quantized, routing, recipes)


# Each pass is a jitted function: where gradients follow, nobody traces the pass that keeps nothing.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)
def _layer(
    static: Layer, inputs: Inputs, quantized: tuple, routing: Any, recipes: Recipes
) -> jax.Array:
    first = tuple(product.unfollowed for product in static.first)
    static = static._replace(first=first, second=static.second.unfollowed)
    y, _ = _forward(static, inputs, quantized, routing, recipes, keep=False)
    if static.moves.in_rounds:
        y = _with_rest(static, y, inputs, quantized, routing, recipes)
    return y


def _fwd(static: Layer, *args: Any) -> tuple:
    first, second = args[1]
    args = values_of(static.op, args, (*first, second))
    y, *kept = _kept(static, *args)
    return y, (*kept, args[:3] if static.moves.in_rounds else None)


@partial(jax.jit, static_argnums=0)
def _kept(
    static: Layer, inputs: Inputs, quantized: tuple, routing: Any, recipes: Recipes
) -> tuple[jax.Array, jax.Array, Kept]:
    """The result, the mark of its inputs, and the residuals of its first round."""
    mark = derivatives.once_derived(static.op, derivatives.MARK, inputs)
    y, kept = _forward(static, inputs, quantized, routing, recipes, keep=True)
    if static.moves.in_rounds:
        y = _with_rest(static, y, inputs, quantized, routing, recipes)
    return y, mark, kept


def _with_rest(
    static: Layer, y: jax.Array, inputs: Inputs, quantized: tuple, routing: Any, recipes: Recipes
) -> jax.Array:
    """The result of all rounds, of that of the first."""

    def run(routing: Any, operands: Any) -> jax.Array:
        inputs, quantized, recipes = operands
        return _forward(static, inputs, quantized, routing, recipes, keep=False)[0]

    return static.moves.rest(routing, run, y, (inputs._replace(b_second=None), quantized, recipes))


def _forward(
    static: Layer, inputs: Inputs, quantized: tuple, routing: Any, recipes: Recipes, keep: bool
) -> tuple[jax.Array, Any]:
    """The result; and the residuals, if a backward pass follows."""
    moves, first = static.moves, static.first
    sides: Any = static.sides(inputs) if keep else None
    rows, firsts, second, place = moves.enter(static, inputs, quantized, routing, recipes, keep)
    sizes, scale, align = _of_place(place)
    again = keep and static.residuals == "inputs"
    weights = range(1, 1 + len(first))
    forms = ((0, 1), *((i, 1) for i in weights))
    forms += ((0, 0), *((i, 0) for i in weights)) if again else ()
    step = Step(static.forwards(align), forms)
    gate_up, (rows_kept, *kept) = step((rows, *firsts), sizes)
    gate_up = biased(static, gate_up, inputs.b_first, place)
    wanted = (True, keep and inputs.w_second is not None and moves.keeps_activation)
    act = static.requests(gate_up, scale, recipes[1], wanted)
    step = Step((static.second.forward((0, 0), (1, 0), align),), ((0, 1), (1, 1)))
    (y,), (act_kept, second_free) = step((act, second), sizes)
    y, extras = moves.leave(static.second, y, inputs, routing, place)
    if not keep:
        return y, None
    if static.residuals == "mx":
        gate_up = tuple(quantize(half, MXFP8_E4M3) for half in gate_up)
    frees, (rows_again, *contracted) = kept[: len(first)], kept[len(first) :] or (None,)
    contracted = contracted or (None,) * len(first)
    return y, Kept(
        place,
        rows_kept,
        act_kept,
        rows_again if again else gate_up,
        tuple(zip(contracted, frees, strict=True)),
        second_free,
        inputs.b_first if again else (),
        recipes,
        extras,
        sides,
    )


def biased(static: Layer, gate_up: Any, biases: tuple[Any, ...], place: Any) -> GateUp:
    """The first products and their biases."""
    return tuple(
        y if bias is None else static.moves.biased(product, y, bias, place)
        for product, y, bias in zip(static.first, gate_up, biases, strict=True)
    )


def _of_place(place: Any) -> tuple[Any, Any, int]:
    """The sizes of groups, the scale of each row between both products; and what divides sizes."""
    if place is None:
        return None, None, 1
    return place.groups.sizes, place.scale, place.groups.align


def _bwd(static: Layer, residual: tuple[jax.Array, Kept, Any], dy: Any) -> tuple:
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return (None,) * 4
    return _gradients(static, *residual, dy), None, None, None


@partial(jax.jit, static_argnums=0)
def _gradients(static: Layer, mark: jax.Array, kept: Kept, again: Any, dy: jax.Array) -> Inputs:
    """The gradients of all rounds."""
    dy = derivatives.once_derived(static.op, dy, mark)
    gradients = _backward(static, kept, dy)
    if again is None:
        return gradients
    inputs, quantized, routing = again

    def run(routing: Any, operands: Any) -> Inputs:
        inputs, quantized, recipes, dy = operands
        _, kept = _forward(static, inputs, quantized, routing, recipes, keep=True)
        return _backward(static, kept, dy)

    once = {"b_second": None}  # the first round has all of it
    operands = inputs._replace(**once), quantized, kept.recipes, dy
    rest = static.moves.rest(routing, run, gradients._replace(**once), operands)
    return rest._replace(b_second=gradients.b_second)


def _backward(static: Layer, kept: Kept, dy: jax.Array) -> Inputs:
    """The gradients by what one pass kept."""
    moves, second, w2 = static.moves, kept.recipes[1], kept.sides.w_second
    sizes, scale, align = _of_place(kept.place)
    gradient = moves.gradient(static.second, dy, kept.place, second, w2)
    gate_up = _again(static, kept)
    hidden, act = static.hidden(gate_up), kept.act
    if w2 is not None and not moves.keeps_activation:
        _, act = static.requests(gate_up, scale, second, (False, True)).forms()
    # The gradient of the result: by w_second^T, and along rows for that of w_second.
    products = [static.second.dgrad((0, 0), (2, 0), hidden, (1, 0), align)]
    if w2 is not None:
        products.append(static.second.wgrad((1, 0), (0, 1), w2, (2, 0), align))
    operands = (gradient, (act,), (kept.w_second,))
    (dact, *dw2), _ = Step(tuple(products))(operands, sizes)
    dx, dw1, sums = _through_first(static, kept, gate_up, dact)
    back = Back(dy, gate_up, dact, dx, dw1, next(iter(dw2), None), sums)
    return moves.gradients(static, kept, back)


def _through_first(
    static: Layer, kept: Kept, gate_up: GateUp, dact: jax.Array
) -> tuple[jax.Array, tuple, tuple]:
    """The gradients of rows and of the first weights; sums of the gradients of gates and ups."""
    sides, (sizes, _, align) = kept.sides, _of_place(kept.place)
    gradients = _gradients_of(static, kept, gate_up, dact.astype(gate_up[0].dtype))
    n, dgrads, wgrads = len(gradients), [], {}
    for i, (product, w) in enumerate(zip(static.first, sides.w_first, strict=True)):
        free = (n + 1 + i, 0)
        dgrads.append(product.dgrad((i, 0), free, sides.x, (n, 0), align))
        if w is not None:
            wgrads[i] = product.wgrad((n, 0), (i, 1), w, free, align)
    summed = [i for i, bias in enumerate(sides.b_first) if bias is not None]
    fused = [i for i in summed if gradients[i].sums]
    step = Step((*wgrads.values(), *dgrads), tuple((i, 2) for i in fused))
    operands = (*gradients, (kept.rows,), *((free,) for _, free in kept.w_first))
    results, sums = step(operands, sizes)
    dw = dict(zip(wgrads, results, strict=False))
    dx = functools.reduce(jnp.add, results[len(wgrads) :])
    rows = {i: gradients[i].x.astype(jnp.float32) for i in summed} | dict(
        zip(fused, sums, strict=True)
    )
    return dx, tuple(map(dw.get, range(n))), tuple(map(rows.get, range(n)))


def _gradients_of(static: Layer, kept: Kept, gate_up: GateUp, dact: jax.Array) -> list[Unquantized]:
    """The operands of the gradients of gates and ups, by the argument of the activation."""
    gated = static.gated(gate_up, _of_place(kept.place)[1])
    recipe, ws, known = kept.recipes[0], kept.sides.w_first, None
    if len(gate_up) > 1:
        arguments = static.op, gate_up[0], gated, dact
        rows = all(use.format and use.window in (ROW, SHARD) for use in recipe.uses("gradient"))
        if rows and None not in ws:
            known = known_gradients_of_parts(*arguments)
        operands = known or [(x, None) for x in gradients_of_parts(*arguments)]
    else:
        operands = [(gate_up[0], dataclasses.replace(gated, gradient=dact))]
    return [  # the gradient of the result is number 0
        Unquantized(
            x, recipe, None, activation, "gradient",
            wanted=(True, w is not None), frozen=(w is None, False), number=number,
            sums=len(gate_up) == 1 and bias is not None,
        )
        for number, ((x, activation), w, bias) in enumerate(
            zip(operands, ws, kept.sides.b_first, strict=True), 1
        )
    ]  # fmt: skip


def _again(static: Layer, kept: Kept) -> GateUp:
    """Gates and ups, arranged: as they were kept, or computed again."""
    if static.residuals != "inputs":
        return tuple(floats_kept(half, static.second.dtype) for half in kept.gate_up)
    operands: Any = (kept.gate_up,), *((contracted,) for contracted, _ in kept.w_first)
    sizes, _, align = _of_place(kept.place)
    gate_up, _ = Step(static.forwards(align))(operands, sizes)
    return biased(static, gate_up, kept.biases, kept.place)


def floats_kept(gate_up: Any, dtype: np.dtype) -> jax.Array:
    """Gates and ups as floats."""
    if not isinstance(gate_up, MXArray):
        return gate_up
    # float16 may be too small for what was rounded up; what meets it is float32 then, too.
    return floats_of(gate_up, jnp.float32 if dtype == jnp.float16 else dtype)


_layer.defvjp(_fwd, _bwd, symbolic_zeros=True)
