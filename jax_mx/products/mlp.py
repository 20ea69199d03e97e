"""`mlp`: a perceptron in MX, two products with an activation in between, gated or not."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jax_mx.formats.arrangements import Arrangements, arrangements_of
from jax_mx.formats.checks import float_dtype, implementation_of
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import is_explicit, names_in, resharded, spec_of
from jax_mx.launch import private
from jax_mx.products.arguments import (
    bias_of,
    check_out_sharding,
    check_quantized,
    is_exact,
    operand_of,
    residuals_of,
    warn_of_fixed_keys,
)
from jax_mx.products.auto import Sizes, recipe_beside, resolved
from jax_mx.products.fallback import unquantized
from jax_mx.products.implementations import named
from jax_mx.products.layer import Back, Inputs, Kept, Layer, Moves, Recipes, layer
from jax_mx.products.operand import QuantizedWeight, Unquantized, operand_for
from jax_mx.products.recipes import AUTO, PRODUCTS, Recipe, check_frozen
from jax_mx.products.sides import Side, Static, keeps_rows, parts_of
from jax_mx.quantizing.activations import Gated, row_of
from jax_mx.quantizing.mxarray import MXArray


def mlp(
    x: Any,
    w_gate_up: Any,
    w_down: Any,
    *,
    b_gate_up: Any = None,
    b_down: Any = None,
    activation: str = "swiglu",
    interleaved: bool = False,
    recipe: Recipe | str = AUTO,
    residuals: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    out_sharding: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """A perceptron: act(x @ w_gate_up + b_gate_up) @ w_down + b_down, see `gated`.

    The recipe says how operands of both products, and of their four gradients, are quantized (see
    `dot_general`). The bits equal the results of `dot_general`, `gated` and `dot_general`, except
    for rounding at random. One function has one derivative: the activation's result is quantized
    both ways as it is made, and gate and up are kept as `residuals` says. The function is
    differentiable in reverse mode with respect to all arrays.

    Args:
      x: bfloat16, float16 or float32 (..., D). 32 divides D; the number of rows is free. On
        automatic meshes set the mesh (jax.set_mesh): without it, an x that is split along another
        axis than the first is gathered.
      w_gate_up: (D, 2 I), all gates, then all ups; (D, I) for an activation without a gate. It is
        floats (bfloat16, float16 or float32, not necessarily x's), a result of
        `recipe.quantize_weight`, or a frozen `MXArray`, also (2 I, D), with its blocks along D. 32
        divides I. It may be a pair of these, (D, I) for gates and (D, I) for ups, as checkpoints
        have them. x is quantized once for both; the gradient of x is the sum of both parts, added
        in x's dtype.
      w_down: (I, N), of the same types.
      b_gate_up: floats (2 I,), or None; with a pair of weights a pair of these, each (I,). The
        product is rounded to x's dtype, the bias is added in float32, and the sum is rounded again.
        Its gradient is summed in float32, 32 rows at a time where both gradients are quantized.
      b_down: floats (N,), or None; rounded and summed as b_gate_up is.
      activation: see `gated`.
      interleaved: whether gates and ups alternate along 2 I, not all gates first.
      recipe: the rule for floats, see `dot_general`; "floats" leaves them as they are.
      residuals: the form of gate and up that the backward pass keeps: "mx", MXFP8; "floats", as
        they are; "inputs", nothing. For "inputs" it computes the first product again from the
        quantized x. With the last two, gradients equal the three functions' gradients, except for
        the order of sums. None: "mx" where a kernel makes the activation from one array of gates
        and ups, with windows up to 128, so that it costs no pass; else "floats".
      precision: see `dot_general`.
      out_sharding: of the result, see `jax.lax.dot_general`. None: on a mesh with explicit axes,
        rows are split as in x and columns as in w_down, except by axes that split both.
      implementation: of all products, see `dot_general`; or None.

    Returns:
      (..., N), of x's dtype.

    Raises:
      TypeError: an operand or argument is of the wrong type.
      ValueError: shapes that do not fit, lengths that 32 does not divide, an unknown name.
      NotImplementedError: the named implementation does not serve a product.
    """
    op = "mlp"
    pair = isinstance(w_gate_up, tuple | list)
    names = ("w_gate_up[0]", "w_gate_up[1]") if pair else ("w_gate_up",)
    gate = _activation(op, activation, interleaved, w_gate_up if pair else None)
    x, w2 = operand_of(op, "x", x), operand_of(op, "w_down", w_down)
    if isinstance(x, MXArray | QuantizedWeight):
        raise TypeError(f"{op}: x must be an array of floats, got {type(x).__name__}")
    dtype = float_dtype(op, "x", x.dtype)
    weights = w_gate_up if pair else [w_gate_up]
    if any(isinstance(w, QuantizedWeight) for w in (*weights, w2)):
        *weights, w2 = unquantized(recipe, *weights, w2)
    first = [operand_of(op, *named) for named in zip(names, weights, strict=True)]
    exact = is_exact(op, precision)
    sizes = functools.partial(_sizes, x, [*first, w2])
    is_free = implementation is None and not exact
    recipe = resolved(op, recipe, (x, *first, w2), sizes, is_free)
    if vars(recipe)["dgrad"].rounding or vars(recipe)["wgrad"].rounding:
        warn_of_fixed_keys(op, recipe)
    recipes = _beside_first(op, names, first, recipe), recipe_beside(op, "w_down", w2, recipe)
    keep_rows = not recipe.has_windows and _may_be_split()
    layouts = [
        _layout(op, name, x.shape, w, dtype, recipe, keep_rows)
        for name, w in zip(names, first, strict=True)
    ]
    columns = _columns(op, names, layouts, gate, recipe)
    hidden = (*x.shape[:-1], columns // (1 + gate.has_gate * (not pair)))
    second = _layout(op, "w_down", hidden, w2, dtype, recipe, keep_rows)
    b1 = _biases(op, names, b_gate_up, columns)
    b2 = bias_of(op, "b_down", b_down, (second.rhs.free[0],))
    residuals = residuals_of(op, residuals, recipe, _plain_residuals(pair, recipe))
    implementation = implementation_of(op, named("dot_general"), implementation)
    # Floats of a weight are gathered over mesh axes that also split rows of x.
    pairs = zip(first, layouts, strict=True)
    first = [layout.gathered(x, w, None, placed=True) for w, layout in pairs]
    w2 = second.gathered(x, w2, None, placed=True)
    check_out_sharding(op, out_sharding)
    splits: list[Any] = [None] * len(first)
    if is_explicit(jax.typeof(x).sharding.mesh):
        rows = spec_of(x)[:-1]
        # Of rows that become one only the first dimension stays split.
        arranged = (*rows[:1], *[None] * len(rows[1:])) if layouts[0].lhs.merged else rows
        pairs = zip(layouts, first, strict=True)
        splits = [_split_between(layout, arranged, w) for layout, w in pairs]
        if out_sharding is None:
            out_sharding = _split_between(second, rows, w2)
    shared = (exact, implementation)
    more, after = (recipe.chosen, recipe.fast), keeps_rows(w2, recipes[1])
    static = Layer(
        tuple(
            Static(op, layout, dtype, *shared, split, *more, keeps_rows(w, recipes[0]))
            for w, layout, split in zip(first, layouts, splits, strict=True)
        ),
        Static(op, second, dtype, *shared, out_sharding, *more, after),
        gate.name,
        gate.interleaved,
        residuals,
        InPlace(),
    )
    f1, q1 = zip(*map(parts_of, first), strict=True)
    f2, q2 = parts_of(w2)
    inputs = Inputs(x, None, f1, f2, b1, b2)
    leaves, tree = jax.tree.flatten((inputs, (q1, q2), None, recipes))
    return layer(static, *tree.unflatten(private.vary_alike(*leaves)))


# ---- what callers pass ---
def _activation(op: str, name: str, interleaved: bool, pair: Any) -> Gated:
    """The activation between the products.

    Raises:
      TypeError, ValueError: it is none, or not of a pair of weights.
    """
    row_of(op, name)
    gate = Gated(name, interleaved=interleaved)
    if pair is None:
        return gate
    if len(pair) != 2:
        raise ValueError(f"{op}: w_gate_up has {len(pair)} weights, must be one or a pair")
    if not gate.has_gate or interleaved:
        why = "interleaved is the order in one weight" if interleaved else f"{name!r} has no gate"
        raise ValueError(f"{op}: w_gate_up is a pair of weights, and {why}; pass one weight")
    return gate


def _sizes(x: Any, weights: list) -> list[Sizes]:
    """Rows, columns and contracted length of the product with each weight."""
    rows = math.prod(x.shape[:-1])
    return [(rows, *w.shape) for w in weights if w.ndim == 2]


def _beside_first(op: str, names: tuple[str, ...], weights: list, recipe: Recipe) -> Recipe:
    """The recipe of the first products, which quantize one x.

    Raises:
      ValueError: weights were quantized by another recipe, or each brings signs of its own.
    """
    quantized = [isinstance(w, QuantizedWeight) for w in weights]
    for name, w in zip(names, weights, strict=True):
        recipe = recipe_beside(op, name, w, recipe)
    if all(quantized) and len(weights) > 1 and jax.tree.leaves((recipe.forward, recipe.dgrad)):
        raise ValueError(
            f"{op}: both weights of w_gate_up bring signs of a Hadamard transform, and one x is "
            "multiplied with both; pass floats, or one weight"
        )
    return recipe


def _columns(
    op: str, names: tuple[str, ...], layouts: list[Arrangements], gate: Gated, recipe: Recipe
) -> int:
    """How many columns each first weight has.

    Raises:
      ValueError: a pair has two numbers, or blocks do not divide what the activation makes of them.
    """
    units, columns = recipe.units, [layout.rhs.free[0] for layout in layouts]
    if len({*columns}) > 1:
        raise ValueError(f"{op}: the weights of w_gate_up have {columns} columns; both must agree")
    halves = 2 if gate.has_gate and len(columns) == 1 else 1
    if columns[0] % (wanted := math.lcm(halves * units.forward, units.dgrad)):
        blocks = "blocks" if max(units) == BLOCK else "blocks and Hadamard transforms"
        raise ValueError(
            f"{op}: {names[0]} has {columns[0]} columns, must be a multiple of {wanted}, as "
            f"{gate.name} makes I of {halves} I, in {blocks} of {units.forward}; pad gates and "
            "ups with zero columns, and w_down with zero rows"
        )
    return columns[0]


def _biases(op: str, names: tuple[str, ...], biases: Any, columns: int) -> tuple:
    """The biases beside first weights.

    Raises:
      TypeError, ValueError: they are none.
    """
    if len(names) == 1:
        return (bias_of(op, "b_gate_up", biases, (columns,)),)
    if biases is None:
        return (None,) * len(names)
    if not isinstance(biases, tuple | list) or len(biases) != len(names):
        raise TypeError(
            f"{op}: w_gate_up is a pair of weights, so b_gate_up must be a pair, or None"
        )
    return tuple(bias_of(op, f"b_gate_up[{i}]", b, (columns,)) for i, b in enumerate(biases))


def _plain_residuals(pair: bool, recipe: Recipe) -> str:
    """The default form in which gate and up are kept, "mx" where it costs no time.

    Kernels for the activation and its gradient read one array, and have windows of 32 and 128.
    Without such a kernel MX takes one more pass to write and one to read.
    """
    windows = {recipe.window_in(product) for product in PRODUCTS}
    return "mx" if not pair and windows <= {BLOCK, 128} else "floats"


def _may_be_split() -> bool:
    """Whether XLA may split rows, as far as the mesh that is set says it.

    Where it may not, they become one dimension, as kernels want them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(axis_type != AxisType.Manual and mesh.shape[name] > 1 for name, axis_type in kinds)


def _layout(
    op: str, name: str, lhs: tuple, w: Any, dtype: Any, recipe: Recipe, keep_rows: bool
) -> Arrangements:
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
    else:
        float_dtype(op, name, w.dtype)
    if w.shape[at] != lhs[-1]:
        raise ValueError(
            f"{op}: {name} has the shape {tuple(w.shape)}, whose contracted axis {at} should have "
            f"{lhs[-1]} elements"
        )
    numbers = (((len(lhs) - 1,), (at,)), ((), ()))
    layout = arrangements_of(
        op, jax.ShapeDtypeStruct(lhs, dtype), w, numbers, recipe.units, keep_rows
    )
    if isinstance(w, MXArray | QuantizedWeight):
        check_quantized(op, name, w, layout.rhs)
    if isinstance(w, MXArray):
        layout = Arrangements(layout.lhs, layout.rhs._replace(unit=1))
    return layout


def _split_between(layout: Arrangements, rows: tuple, w: Any) -> PartitionSpec:
    """How a product with a weight is split: rows, and columns but for axes that split rows."""
    leaf = w.values if isinstance(w, MXArray) else getattr(w, "floats", w)
    taken = {name for spec in rows for name in names_in(spec)}
    columns = names_in(spec_of(leaf)[layout.rhs.free_dims[0]])
    return PartitionSpec(*rows, tuple(n for n in columns if n not in taken) or None)


# ---- rows that stay where they are ---
@dataclasses.dataclass(frozen=True)
class InPlace(Moves):
    """The rows of x, of any rank; see `Moves`."""

    keeps_activation: ClassVar[bool] = True

    def enter(
        self,
        layer: Layer,
        inputs: Inputs,
        quantized: tuple,
        routing: Any,
        recipes: Recipes,
        keep: bool,
    ) -> tuple[Unquantized, list[Any], Any, Any]:
        """See `Moves`."""
        (first, second), products = recipes, (*layer.first, layer.second)
        wgrad = keep and any(w is not None for w in inputs.w_first)
        side, wanted = products[0].arranged.lhs, (True, wgrad)
        rows = Unquantized.of(side, inputs.x, first, "lhs", wanted)
        floats, codes = (*inputs.w_first, inputs.w_second), (*quantized[0], quantized[1])
        by = (*[first] * len(layer.first), second)
        *firsts, w_second = (
            operand_for(product.arranged.rhs, w, q, recipe, "rhs", (True, keep))
            for product, w, q, recipe in zip(products, floats, codes, by, strict=True)
        )
        return rows, firsts, w_second, None

    def gradient(
        self, product: Static, dy: Any, place: Any, recipe: Recipe, weight: Side | None
    ) -> Unquantized:
        """See `Moves`."""
        layout, frozen = product.arranged, weight is None
        options: dict[str, Any] = {"wanted": (True, not frozen), "frozen": (frozen, False)}
        options |= {"name": "gradient", "pads": layout.gradient_pads}
        dy = layout.gradient(layout.gathered_gradient(dy, None, weight))
        return Unquantized(dy, recipe, **options)

    def biased(self, product: Static, y: jax.Array, bias: Any, place: Any) -> jax.Array:
        """See `Moves`."""
        return _plus(y, bias, product.arranged.lhs.rows)

    def leave(
        self, product: Static, y: jax.Array, inputs: Inputs, routing: Any, place: Any
    ) -> tuple[jax.Array, Any]:
        """See `Moves`."""
        y = product.arranged.result(y, product.out_sharding)
        return y if inputs.b_second is None else _plus(y, inputs.b_second), None

    def gradients(self, layer: Layer, kept: Kept, back: Back) -> Inputs:
        """See `Moves`."""
        first, second, sides = layer.first, layer.second, kept.sides
        dw1 = tuple(
            None if side is None else product.arranged.rhs.restored(dw, side.spec)
            for product, dw, side in zip(first, back.dw_first, sides.w_first, strict=True)
        )
        dw2 = None
        if sides.w_second is not None:
            dw2 = second.arranged.rhs.restored(back.dw_second, sides.w_second.spec)
        dx = first[0].arranged.lhs.restored(back.dx, sides.x.spec, swaps=True)
        db1, db2 = tuple(map(_summed, back.sums, sides.b_first)), None
        if sides.b_second is not None:
            dy = second.arranged.gathered_gradient(back.dy, None, sides.w_second)
            db2 = _summed(dy, sides.b_second)
        return Inputs(dx, None, dw1, dw2, db1, db2)


def _plus(y: jax.Array, bias: Any, zeros: int = 0) -> jax.Array:
    """y and a bias, but for so many rows behind, which stay zeros."""
    mesh, wide = jax.typeof(y).sharding.mesh, bias.astype(jnp.float32)
    if is_explicit(mesh):
        wide = resharded(wide, spec_of(y)[-1:], mesh)
    wide = wide.reshape(*[1] * (y.ndim - 1), -1)
    if zeros:  # no number of a row: there may be more than int32 counts
        parts = jnp.ones((y.shape[-2] - zeros, 1), bool), jnp.zeros((zeros, 1), bool)
        wide = jnp.where(jnp.concatenate(parts), wide, np.float32(0))
    return (y.astype(jnp.float32) + wide).astype(y.dtype)


def _summed(rows: jax.Array | None, bias: Side | None) -> jax.Array | None:
    """The gradient of a bias: the sum of all rows, in float32."""
    if bias is None or rows is None:
        return None
    total = rows.astype(jnp.float32).sum(range(rows.ndim - 1)).astype(bias.dtype)
    mesh = jax.typeof(total).sharding.mesh
    return resharded(total, bias.spec, mesh) if is_explicit(mesh) else total
