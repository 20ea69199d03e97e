"""Recipes: how each of a product's operands is quantized, forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp

from jax_mx.formats.arrangements import Units, arrangement_of, check_contracted
from jax_mx.formats.checks import (
    array_of,
    block_of,
    blocks_in,
    flag,
    held,
    name_among,
    shown,
    whole,
    window_of,
)
from jax_mx.formats.formats import (
    BLOCK,
    FORMATS,
    MXFP4_E2M1,
    MXFP8_E4M3,
    MXFP8_E5M2,
    RCEIL,
    SCALINGS,
    Format,
    Scaling,
    named,
)
from jax_mx.formats.windows import ROW, SHARD, TILE, Window
from jax_mx.products.operand import (
    BlockRule,
    QuantizedWeight,
    Unquantized,
    Use,
    held_forms,
)
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.preprocessing import Hadamard, Stochastic, Value

T = TypeVar("T")
_BF16 = "bf16"  # of a product that is not quantized
AUTO = "auto"  # the name of the recipe that a call resolves when it is traced
FLOATS = "floats"  # of products that leave floats as they are: MX is switched off
_PLAIN = (_BF16, FLOATS)


class Chosen(NamedTuple):
    """The recipe that "auto" became.

    Attributes:
      name: of the recipe, see `RECIPES`.
      chips: that it was chosen for, as drivers name them.
    """

    name: str
    chips: str


def _register(node_type: type[T]) -> type[T]:
    """Makes a pytree of a class, which takes any children: JAX puts all kinds of objects there."""
    fields = dataclasses.fields(cast(Any, node_type))
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    data = tuple(field.name for field in fields if field.name not in static)

    def flatten(node: Any) -> tuple[Any, Any]:
        keys = map(jax.tree_util.GetAttrKey, data)
        children = tuple(zip(keys, (getattr(node, name) for name in data), strict=True))
        return children, tuple(getattr(node, name) for name in static)

    def unflatten(aux: Any, children: Any) -> Any:
        node = object.__new__(node_type)
        vars(node).update(zip((*static, *data), (*aux, *children), strict=True))
        return node

    jax.tree_util.register_pytree_with_keys(node_type, flatten, unflatten)
    return node_type


@_register
@dataclasses.dataclass(frozen=True, eq=False)
class Product(Value):
    """The fields by which one of a layer's three products differs from the rest of its recipe.

    A pytree: keys and signs in it are data.

    Attributes:
      format: of both operands, a `Format` or its name; None: the recipe's formats. "bf16": the
        operands are rounded to bfloat16 instead of being quantized. "floats", for all three
        products only: operands stay as they are.
      hadamard: a transform of both operands along the contracted axis, or None. It changes the
        product only by rounding; its size divides the contracted length.
      rounding: a `Stochastic` without a prescale for the gradient, in dgrad and wgrad; None: to
        nearest even.
      window: the number of elements along the contracted axis that share an amax: 32, 128, 256 or
        "row"; None: the recipe's window. It concerns both operands, except weights with a
        `weight_window`. In wgrad also "shard": the rows that a device holds, see
        [training](training.md#windows-on-hopper).
      fast_accumulation: whether FP8 tensor cores on Hopper may add up all of a sum. That takes less
        time and gives fewer bits, see [training](training.md#fast-accumulation). Without, float32
        sums take over every 128 or 256 elements. It concerns dense products of E4M3 codes in
        windows "row"; all others stay as they are.

    Raises:
      TypeError: a field is of the wrong type.
      ValueError: format or window is unknown, such as a window of (128, 128), which is of weights
        alone; "bf16" or "floats" comes with another field; or rounding has a prescale.
    """

    format: Format | str | None = dataclasses.field(default=None, metadata={"static": True})
    hadamard: Hadamard | None = None
    rounding: Stochastic | None = None
    window: Window | None = dataclasses.field(default=None, metadata={"static": True})
    fast_accumulation: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self):
        """Raises TypeError, ValueError for what a field is not, or what a product does not take."""
        if not isinstance(self.hadamard, Hadamard | None):
            raise TypeError(
                f"Product: hadamard must be None or a Hadamard, got {shown(self.hadamard)}"
            )
        if not isinstance(self.rounding, Stochastic | None):
            raise TypeError(
                f"Product: rounding must be None or a Stochastic, got {shown(self.rounding)}"
            )
        if self.format is not None and self.format not in _PLAIN:
            allowed = {**FORMATS, **dict(zip(_PLAIN, _PLAIN, strict=True))}
            format = named("Product: format", allowed, self.format)
            object.__setattr__(self, "format", format)
        if self.window is not None:
            object.__setattr__(self, "window", _along_one_axis("Product", self.window, SHARD))
        fast = flag("Product", "fast_accumulation", self.fast_accumulation)
        object.__setattr__(self, "fast_accumulation", fast)  # no NumPy scalar
        for name in ("hadamard", "rounding", "window", "fast_accumulation"):
            if self.format in _PLAIN and getattr(self, name) not in (None, False):
                raise ValueError(
                    f"Product: {name} is of what is quantized, and format={self.format!r} "
                    "quantizes nothing; leave one of them out"
                )
        if self.rounding is not None and self.rounding.prescale is not None:
            raise ValueError(
                "Product: rounding has a prescale, by which gradients would be too small; leave it "
                "out: with scaling rceil or ceil nothing is clipped without it"
            )


@_register
@dataclasses.dataclass(frozen=True, eq=False)
class Recipe(Value):
    """How a product's operands are quantized, in its forward pass and in both gradients.

    y = lhs . rhs has three products. *forward* takes lhs and rhs along the contracted axis.
    *dgrad*, the gradient of lhs, takes y's gradient and rhs along the free axis of rhs. *wgrad*,
    the gradient of rhs, takes lhs and y's gradient along the rows of lhs. Every operand is
    quantized from its floats, except for tokens that `moe` moved as codes. A frozen value and a
    pytree: its keys and signs are data, all else is static. Recipes are equal if their static parts
    are equal and their keys and signs are the same arrays. So a recipe may be a static argument of
    `jax.jit`. A recipe with a new key then compiles again; as an argument that is not static it
    does not. These have names:

    - `MXFP8`: E4M3 everywhere, scales rounded up.
    - `MXFP8_ROWS`: `MXFP8` for Hopper's FP8 tensor cores, whose sums want one scale. Elements of a
      row share an amax, in wgrad the rows that a device holds.
    - `MXFP8_ROWS_FAST`: `MXFP8_ROWS`, and tensor cores add up all of the forward product's sums.
    - `MXFP8_WINDOWS`: `MXFP8` for experts on Hopper, whose rows are a group's: 256 elements share
      an amax.
    - `MXFP8_HYBRID`: E5M2 for gradients, E4M3 for the rest.
    - `MXFP4`: MXFP4 in all three products, with a Hadamard transform of 16 elements in wgrad.
    - `BF16`: nothing is quantized; operands are rounded to bfloat16.

    Attributes:
      lhs: format of the activations, a `Format` or its name, see `quantize`.
      rhs: format of the weights.
      gradient: format of y's gradient.
      scaling: the rule from amaxes to scales, a `Scaling` or its name.
      block: of rhs: 32, or (32, 32), where one quantized copy serves forward and dgrad.
      window: the number of elements along the contracted axis that share an amax: 32, 128, 256 or
        "row", see `quantize`. A product may name another one. FP8 tensor cores multiply arrays of
        windows wider than 32.
      weight_window: the window of rhs in all products, instead of `window`; also (128, 128), which
        makes square blocks. None: `window`, or a product's own.
      forward: a `Product` that says how the forward product differs, or None. "bf16" or a format
        stands for `Product(format=...)`.
      dgrad: a `Product` that says how dgrad differs, or what stands for it.
      wgrad: a `Product` that says how wgrad differs, or what stands for it.
      chosen: the name and the chips of a recipe that "auto" became; else None.
      weight: the operand of `dot_general`, `matmul` and `einsum` that is the weight, "lhs" or
        "rhs". The fields above call it rhs in either case. `Recipe.auto` says it of "auto".

    Raises:
      TypeError: a field is of the wrong type.
      ValueError: a name or a window is unknown; `window` is (128, 128); forward has a rounding;
        "floats" is not of all three products; "shard" is a window of forward or dgrad; or forward
        or dgrad has a Hadamard transform beside square blocks.
    """

    lhs: Format | str = dataclasses.field(default=MXFP8_E4M3, metadata={"static": True})
    rhs: Format | str = dataclasses.field(default=MXFP8_E4M3, metadata={"static": True})
    gradient: Format | str = dataclasses.field(default=MXFP8_E4M3, metadata={"static": True})
    scaling: Scaling | str = dataclasses.field(default=RCEIL, metadata={"static": True})
    block: int | tuple[int, int] = dataclasses.field(default=BLOCK, metadata={"static": True})
    window: Window = dataclasses.field(default=BLOCK, metadata={"static": True})
    weight_window: Window | None = dataclasses.field(default=None, metadata={"static": True})
    forward: Product | Format | str | None = None
    dgrad: Product | Format | str | None = None
    wgrad: Product | Format | str | None = None
    chosen: Chosen | None = dataclasses.field(default=None, metadata={"static": True})
    weight: str = dataclasses.field(default="rhs", metadata={"static": True})

    def __post_init__(self):
        """Names become what they name.

        Raises:
          TypeError, ValueError: a field is of the wrong type, or an unknown name.
        """
        for name in ("lhs", "rhs", "gradient"):
            format = named(f"Recipe: {name}", FORMATS, getattr(self, name))
            object.__setattr__(self, name, format)
        object.__setattr__(self, "scaling", named("Recipe: scaling", SCALINGS, self.scaling))
        object.__setattr__(self, "window", _along_one_axis("Recipe", self.window))
        if self.weight_window is not None:
            object.__setattr__(self, "weight_window", window_of("Recipe", self.weight_window))
        name_among("Recipe: weight", ("lhs", "rhs"), self.weight)
        block = block_of("Recipe", self.block)
        object.__setattr__(self, "block", block if len(block) > 1 else BLOCK)
        for name in PRODUCTS:
            object.__setattr__(self, name, _product(name, getattr(self, name)))
        if 0 < sum(getattr(self, name).format == FLOATS for name in PRODUCTS) < len(PRODUCTS):
            raise ValueError(
                f"Recipe: {FLOATS!r} is of all three products; give it to forward, dgrad and wgrad"
            )
        if SHARD in (getattr(self, name).window for name in ("forward", "dgrad")):
            raise ValueError(
                f"Recipe: the window {SHARD!r} is of what is summed over rows: give it to wgrad"
            )
        squares = self._has_squares  # refuses what does not fit
        if cast(Product, self.forward).rounding is not None:
            raise ValueError(
                "Recipe: forward has no gradient to round; give rounding to dgrad or wgrad"
            )
        if squares:
            for name in ("forward", "dgrad"):
                if getattr(self, name).hadamard is not None:
                    raise ValueError(
                        f"Recipe: {name}.hadamard goes along one axis, square blocks of rhs span "
                        f"two; use block={BLOCK}"
                    )

    def uses(
        self,
        operand: str,
        wanted: tuple[bool, bool] = (True, True),
        frozen: tuple[bool, bool] = (False, False),
    ) -> tuple[Any, Any]:
        """The formats, transforms, roundings and windows of an operand in both its products.

        Args:
          operand: "lhs" (forward and wgrad), "rhs" (forward and dgrad), "gradient" (dgrad, wgrad).
          wanted: whether each of both products exists; the use is None where it does not.
          frozen: for which of them the other operand is frozen, and this one bfloat16.
        """
        first, second = (
            None if not is_wanted else Use(None) if is_frozen else self._use(operand, product)
            for product, is_wanted, is_frozen in zip(USES[operand], wanted, frozen, strict=True)
        )
        return first, second

    def may_be_floats(
        self, operand: str, wanted: tuple[bool, bool], frozen: tuple[bool, bool]
    ) -> bool:
        """Whether a kernel may give the bfloat16 that an operand's codes stand for; see `uses`."""
        uses = [use for use in self.uses(operand, wanted, frozen) if use is not None]
        formats = {use.format for use in uses}
        plain = all(use.hadamard is None and use.rounding is None for use in uses)
        by_blocks = all(use.window == BLOCK for use in uses) and not self.blocks(operand).square
        return len(formats) == 1 and None not in formats and plain and by_blocks

    def blocks(self, operand: str) -> BlockRule:
        """The blocks of an operand, and the rule of their scales."""
        return BlockRule(cast(Scaling, self.scaling), operand == "rhs" and self._has_squares)

    def window_in(self, product: str, operand: str = "lhs") -> Window:
        """How many elements of an operand share an amax in "forward", "dgrad" or "wgrad"."""
        if operand == "rhs" and self.weight_window is not None:
            return self.weight_window
        window = getattr(self, product).window
        return self.window if window is None else window

    @property
    def fast(self) -> tuple[str, ...]:
        """The products whose sums tensor cores may add up, see `Product`."""
        return tuple(name for name in PRODUCTS if getattr(self, name).fast_accumulation)

    @property
    def quantizes(self) -> bool:
        """Whether some product's operands are quantized, instead of rounded to bfloat16."""
        return any(getattr(self, product).format not in _PLAIN for product in PRODUCTS)

    @property
    def rounds(self) -> bool:
        """Whether floats that are not quantized are rounded to bfloat16."""
        return cast(Product, self.forward).format != FLOATS

    @classmethod
    def auto(cls, *, weight: str = "rhs") -> Recipe:
        """The recipe "auto" as a value, which says where the weight stands.

            y = jax_mx.matmul(w, x, recipe=jax_mx.Recipe.auto(weight="lhs"))

        Each call resolves it, as it does the name. Its formats have no meaning.

        Args:
          weight: "lhs" or "rhs", see `Recipe`.

        Raises:
          TypeError, ValueError: it is neither.
        """
        return cls(weight=weight, chosen=Chosen(AUTO, ""))

    @property
    def has_windows(self) -> bool:
        """Whether some product has windows of several blocks."""
        return any(self.window_in(product) != BLOCK for product in PRODUCTS)

    @property
    def _has_squares(self) -> bool:
        """Whether blocks of rhs are square: asked for, or as its window is a tile."""
        asked = block_of("Recipe", self.block)
        windows = [self.window_in(product, "rhs") for product in USES["rhs"]]
        return max(len(blocks_in("Recipe", window, asked)) for window in windows) > 1

    @property
    def units(self) -> Units:
        """The number that must divide each product's contracted length."""
        turns = [getattr(self, name).hadamard for name in PRODUCTS]
        return Units(*(max(BLOCK, turn.size if turn else 0) for turn in turns))

    def _use(self, operand: str, name: str) -> Use:
        product, window = getattr(self, name), self.window_in(name, operand)
        if product.format in _PLAIN:
            return Use(None, window=window)
        rounding = product.rounding if operand == "gradient" else None
        return Use(product.format or getattr(self, operand), product.hadamard, rounding, window)

    def quantize_weight(
        self,
        w: jax.Array,
        contracting: int | Sequence[int] = -2,
        batch: int | Sequence[int] = (),
        *,
        dequantized: bool = False,
    ) -> QuantizedWeight:
        """Quantizes a weight once for many products with this recipe, in w's place.

        This saves time where several microbatches of a step use a weight, or where `jax.checkpoint`
        would quantize it again. `quantize_weights` does it for a tree of weights. w may be a
        float32 master of activations in bfloat16: it is read once and rounded once. Gradients reach
        w, in its dtype, as if the products had quantized it themselves, and add up. Second
        derivatives, which products of floats refuse, take the quantized weight as a constant: they
        lack its part.

        Args:
          w: the weight's floats, of any rank from 2 on.
          contracting: the dimensions that products contract; 32 divides the product of their
            lengths. The default -2 fits a kernel (in, out).
          batch: its batch dimensions, in the order in which the product names them.
          dequantized: whether bfloat16 holds the quantized values, exactly down to 2^-133, instead
            of codes and scales. Implementation "dequantize" then need not make these floats in
            every product. They take 4 bytes an element for both directions; codes and scales take
            2.1 in MXFP8 and 1.1 in MXFP4. Implementations that read the weight's codes do not serve
            such products. Pass False for windows, for experts and few rows on Hopper, and on chips
            with an MX product in hardware.

        Returns:
          A weight for `dot_general`, `matmul`, `einsum` and `mlp`; with contracting=1 and batch=0,
          for `ragged_dot` and `moe`.

        Raises:
          TypeError, ValueError: as `dot_general` does.
        """
        op, w = "quantize_weight", held(w)
        if is_auto(self):
            raise ValueError(
                f"{op}: {AUTO!r} is no recipe of formats; call jax_mx.quantize_weights(w), which "
                "resolves it, or take a recipe such as jax_mx.MXFP8"
            )
        if isinstance(w, MXArray | QuantizedWeight):
            raise TypeError(
                f"{op}: w is quantized already; products take it as it is, or pass the floats"
            )
        w = array_of(op, "w", w)
        contracted, batched = dimensions(op, w.ndim, contracting, batch)
        check_contracted(op, w.shape, contracted, self.units.forward)
        side = arrangement_of(w.shape, contracted, batched, self.units.dgrad)
        request = Unquantized.of(side, jax.lax.stop_gradient(w), self)
        first, second = held_forms(request, flag(op, "dequantized", dequantized))
        plain = dataclasses.replace(self, chosen=None, weight="rhs")
        return QuantizedWeight(w, first, second, plain, side)

    def fold_in(self, data: Any) -> Recipe:
        """The recipe with keys that `data` is folded into: one for each step and layer.

        Args:
          data: an integer from 0 to 2^32 - 1, see `jax.random.fold_in`.

        Raises:
          TypeError: data is not an integer.
          ValueError: it is out of range.
        """
        op = "fold_in"
        if not isinstance(data, jax.Array):
            try:
                data = whole(data)
            except TypeError as error:
                raise TypeError(f"{op}: data must be an integer, got {shown(data)}") from error
            if not 0 <= data < 2**32:
                raise ValueError(f"{op}: data must be from 0 to 2^32 - 1, got {data}")
        elif not jnp.issubdtype(data.dtype, jnp.integer) or data.ndim:
            raise TypeError(f"{op}: data must be an integer, got {data.dtype}{[*data.shape] or ''}")

        def folded(node: Any) -> Any:
            if not isinstance(node, Stochastic):
                return node
            return dataclasses.replace(node, key=jax.random.fold_in(node.key, data))

        return jax.tree.map(folded, self, is_leaf=lambda node: isinstance(node, Stochastic))


def _along_one_axis(op: str, window: Any, *more: Window) -> Window:
    """Checks a window of activations and gradients; `more` allows further ones.

    Raises:
      TypeError, ValueError: it is none.
    """
    window = window_of(op, window, *more)
    if window == TILE:
        allowed = ", ".join(map(repr, (BLOCK, 128, 256, *more)))
        raise ValueError(
            f"{op}: window is along one axis: {allowed} or {ROW!r}; tiles of {TILE} "
            "are for weights: Recipe's weight_window"
        )
    return window


def _product(name: str, value: Any) -> Product:
    """The `Product` that a recipe's argument stands for.

    Raises:
      TypeError, ValueError: it stands for none.
    """
    if isinstance(value, Product):
        return value
    if value is None or isinstance(value, Format | str):
        return Product(value)
    raise TypeError(
        f"Recipe: {name} must be a Product, a format, {_BF16!r} or None, got {shown(value)}"
    )


def dimensions(
    op: str, ndim: int, contracting: int | Sequence[int], batch: int | Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A weight's contracted dimensions, from 0 and in order, and its batch dimensions, from 0.

    Raises:
      TypeError: no ints.
      ValueError: one is out of range, or named twice.
    """
    dims_given = (d if isinstance(d, Iterable) else (d,) for d in (contracting, batch))
    try:
        dims = [tuple(map(whole, d)) for d in dims_given]
    except TypeError as error:
        raise TypeError(
            f"{op}: contracting and batch must be ints or sequences of them, got "
            f"{shown(contracting)} and {shown(batch)}"
        ) from error
    for d in itertools.chain(*dims):
        if not -ndim <= d < ndim:
            raise ValueError(f"{op}: dimension {d} is out of range for rank {ndim}")
    contracted, batched = (tuple(d % ndim for d in group) for group in dims)
    if len({*contracted, *batched}) < len(contracted) + len(batched):
        raise ValueError(
            f"{op}: contracting dimensions {[*contracted]} and batch dimensions {[*batched]} name "
            "one twice"
        )
    return tuple(sorted(contracted)), batched


PRODUCTS = ("forward", "dgrad", "wgrad")
# The products that take each operand, first along its contracted, then along its free axis.
USES = {"lhs": ("forward", "wgrad"), "rhs": ("forward", "dgrad"), "gradient": ("dgrad", "wgrad")}

# arXiv 2506.08027 v2, TransformerEngine's MXFP8BlockScaling. E5M2 gradients diverged at 8B
# parameters: NVIDIA-NeMo/Megatron-Bridge#638.
MXFP8 = Recipe()
# Sums over tokens run over rows that a device holds, so no amax crosses devices that split tokens.
MXFP8_ROWS = Recipe(window=ROW, wgrad=Product(window=SHARD))
MXFP8_ROWS_FAST = dataclasses.replace(MXFP8_ROWS, forward=Product(fast_accumulation=True))
MXFP8_WINDOWS = Recipe(window=256)
# TransformerEngine's Format.HYBRID.
MXFP8_HYBRID = Recipe(gradient=MXFP8_E5M2)
# The gradient of the weights is what breaks training, and a deterministic Hadamard transform of its
# operands holds it, which stochastic rounding and random signs do not: arXiv 2605.09825.
MXFP4 = Recipe(MXFP4_E2M1, MXFP4_E2M1, MXFP4_E2M1, wgrad=Product(hadamard=Hadamard(16)))


def mxfp4_backward(key: jax.Array) -> Recipe:
    """MXFP8 in the forward product, MXFP4 in both gradients: arXiv 2502.20586, with MXFP8 for bf16.

    Hadamard transforms of 16 elements rotate the operands of dgrad and wgrad. The gradient of y is
    rounded at random, so that the mean of many roundings is the gradient itself. The loss stays
    closer to bfloat16's than with `MXFP4`, whose forward product is in MXFP4 too; docs/training.md
    has figures.

    Args:
      key: of `jax.random`, for the rounding. Each step and layer folds in a number of its own:
        `recipe.fold_in(17)`.

    Raises:
      TypeError: key is not a key, when the recipe is used.
    """
    rotated = Product(MXFP4_E2M1, Hadamard(16), Stochastic(key))
    return Recipe(dgrad=rotated, wgrad=rotated)


# Others are compared with this recipe. Operands of weights that are MX already stay floats.
BF16 = Recipe(forward=_BF16, dgrad=_BF16, wgrad=_BF16)
# The recipe "floats" where a layer's own derivative follows one; of single products JAX has it.
AS_THEY_ARE = Recipe(forward=FLOATS, dgrad=FLOATS, wgrad=FLOATS)
RECIPES = {
    "mxfp8": MXFP8,
    "mxfp8_rows": MXFP8_ROWS,
    "mxfp8_rows_fast": MXFP8_ROWS_FAST,
    "mxfp8_windows": MXFP8_WINDOWS,
    "mxfp8_hybrid": MXFP8_HYBRID,
    "mxfp4": MXFP4,
    "bf16": BF16,
}


def name_of(recipe: Recipe) -> str:
    """The name of one of `RECIPES`."""
    return next(name for name, known in RECIPES.items() if known == recipe)


def recipe_of(op: str, recipe: Any) -> Recipe:
    """A recipe, or one of `RECIPES` by its name; auto.py has "auto".

    Raises:
      TypeError, ValueError: it is neither.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if is_floats(recipe):
        return AS_THEY_ARE
    allowed = ", ".join(map(repr, (AUTO, *RECIPES, FLOATS)))
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(
                f"{op}: recipe {recipe!r} is unknown; use a Recipe or one of {allowed}"
            )
        return RECIPES[recipe]
    raise TypeError(f"{op}: recipe must be a Recipe or one of {allowed}, got {shown(recipe)}")


def is_auto(recipe: Any) -> bool:
    """Whether a recipe is the one that calls resolve (auto.py), by name or as `Recipe.auto`."""
    if isinstance(recipe, Recipe):
        return recipe.chosen is not None and recipe.chosen.name == AUTO
    return isinstance(recipe, str) and recipe == AUTO


def is_floats(recipe: Any) -> bool:
    """Whether a recipe is the name that switches MX off."""
    return isinstance(recipe, str) and recipe == FLOATS


def check_recipe(op: str, recipe: Any) -> None:
    """Refuses neither "auto" nor what `recipe_of` takes.

    Raises:
      TypeError, ValueError: it is something else.
    """
    if not is_auto(recipe):
        recipe_of(op, recipe)


def check_frozen(op: str, name: str, recipe: Recipe) -> None:
    """Refuses an `MXArray` beside an operand that the forward product's recipe rotates.

    An `MXArray` does not say whether its floats were rotated before they were quantized.

    Raises:
      ValueError: the recipe rotates.
    """
    if recipe.uses("rhs")[0].hadamard is not None:
        raise ValueError(
            f"{op}: {name} is quantized already, and the recipe rotates what it is multiplied "
            "with; take a recipe whose forward has no hadamard"
        )


_NAMES = {**FORMATS, **SCALINGS}


def _to_json(aux: Any) -> bytes:
    """The static side of either type; formats and scalings go by name."""
    names = (part.value if isinstance(part, Scaling) else part for part in aux)
    return json.dumps([getattr(part, "name", part) for part in names]).encode()


def _from_json(node_type: Any, text: bytes) -> Any:
    """The inverse for a type; older programs lack the last fields."""
    parts = [tuple(part) if isinstance(part, list) else part for part in json.loads(text)]
    static = [field for field in dataclasses.fields(node_type) if field.metadata.get("static")]
    parts += [field.default for field in static[len(parts) :]]
    return tuple(_NAMES.get(part, part) if isinstance(part, str) else part for part in parts)


for _type in (Product, Recipe):
    jax.export.register_pytree_node_serialization(
        _type,
        serialized_name=f"jax_mx.{_type.__name__}",
        serialize_auxdata=_to_json,
        deserialize_auxdata=partial(_from_json, _type),
    )
