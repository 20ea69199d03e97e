"""Arguments of products: each is what its function takes, or the call is refused.

Every sentence names the public function, the argument, what is allowed and what to do.
"""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_mx.formats.arrangements import Arrangement, what_of
from jax_mx.formats.checks import array_of, has_elements, held, name_among, padded, shown
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES
from jax_mx.formats.reads import tiles_for_trace
from jax_mx.formats.sharding import is_explicit, spec_of
from jax_mx.launch import private
from jax_mx.products.operand import QuantizedWeight
from jax_mx.products.recipes import Recipe, check_frozen
from jax_mx.quantizing.mxarray import MXArray, checked

RESIDUALS = ("mx", "floats", "inputs")  # what `mlp` and `moe` keep of gate and up

# Names of precisions that jax.lax.dot_general takes, and those that FP8 tensor cores give.
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
        return _as_read(checked(op, name, x))
    if isinstance(x, QuantizedWeight):
        if name == "lhs":
            raise TypeError(f"{op}: lhs and rhs are weights; one must be the activations")
        return x
    has_elements(op, name, x)
    if not hasattr(x, "dtype") or isinstance(x, type):  # jnp.float32
        try:
            return jnp.asarray(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{op}: {name} must be an array, got {shown(x)}") from error
    if isinstance(x, np.ndarray):  # of NumPy's float64, as jnp: float32, unless JAX has 64 bits
        return x.astype(jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("=")), copy=False)
    return x


def check_out_sharding(op: str, out_sharding: Any) -> None:
    """Refuses what says of no result how it is split.

    Raises:
      TypeError: so it is.
    """
    if not isinstance(out_sharding, NamedSharding | PartitionSpec | None):
        raise TypeError(
            f"{op}: out_sharding must be a NamedSharding, a PartitionSpec or None, "
            f"got {shown(out_sharding)}"
        )


def warn_of_fixed_keys(op: str, recipe: Recipe) -> None:
    """Warns where a program holds the key of a recipe: all its runs would round alike."""
    products: Any = (recipe.dgrad, recipe.wgrad)
    keys = [product.rounding.key for product in products if product.rounding is not None]
    if all(isinstance(key, jax.core.Tracer) for key in keys) or not private.is_staged():
        return
    warnings.warn(
        f"{op}: the recipe rounds at random by a key that is a constant of the program, so every "
        "step rounds alike, and every layer with this recipe; pass the key, or the recipe, to the "
        "function that is traced, with fold_in for each step and layer, or use "
        "jax_mx.adapters.flax",
        UserWarning,
        stacklevel=3,
    )


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
        sizes = [jnp.dtype(dtype).itemsize for dtype in precision[:3]]
        return sizes[2] > 2 and sizes[:2] != [1, 1]
    if isinstance(precision, tuple | list):
        return any(_names_more(op, entry) for entry in precision)
    return _names_more(op, precision)


def _names_more(op: str, precision: Any) -> bool:
    if precision is None:
        return False
    if isinstance(precision, jax.lax.Precision | jax.lax.DotAlgorithmPreset):
        name = precision.name.lower()
    else:
        name = name_among(f"{op}: precision", PRECISIONS, precision).lower()
    return name not in _LEAST and not name.startswith("any_f8")


def check_quantized(op: str, name: str, x: Any, side: Arrangement) -> None:
    """Refuses an operand that was quantized along other dimensions.

    Raises:
      ValueError: so it is.
    """
    if isinstance(x, QuantizedWeight):
        if (now := x.arrangement) != side:
            raise ValueError(
                f"{op}: {name} was quantized for contracted dimensions {[*now.contracted_dims]} "
                f"and batch dimensions {[*now.order[: now.batch]]}; pass those of this product to "
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
        dimensions = f"dimension{'s' * (len(dims) > 1)} {', '.join(map(str, dims))}"
        raise ValueError(
            f"{op}: {name} has blocks along dimension {', '.join(map(str, spans))}, the product "
            f"contracts {dimensions}; {remedy}"
        )


def _as_read(q: MXArray) -> MXArray:
    """An `MXArray` with its values in rows, and its scales, unless products read their tiles."""
    tiles = tiles_for_trace()
    q = q if q.value_layout in tiles else q.with_values_in(ROW_MAJOR_VALUES)
    return q if q.scale_layout in tiles else q.with_scales_in(ROW_MAJOR)


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


def residuals_of(op: str, residuals: Any, recipe: Recipe, plain: str = "mx") -> str:
    """The form in which gate and up are kept for the backward pass, one of `RESIDUALS`.

    Args:
      op: for messages.
      residuals: a caller's argument.
      recipe: of the layer.
      plain: the meaning of None where the recipe quantizes the forward product.

    Raises:
      TypeError, ValueError: it is none.
    """
    if residuals is None:
        residuals = "floats" if recipe.uses("lhs")[0].format is None else plain
    return name_among(f"{op}: residuals", RESIDUALS, residuals)


# ---- of products over groups ---
class Weight(NamedTuple):
    """One matrix a group.

    Attributes:
      floats: (G, K, N), which gradients reach, with zero columns for blocks and transforms along N;
        or None.
      quantized: a frozen `MXArray`, (G, K, N) or (G, N, K); or both forms; or None.
      groups: G.
      columns: N.
    """

    floats: jax.Array | None
    quantized: Any
    groups: int
    columns: int


def floats_of(op: str, name: str, x: Any, ndim: int, unit: int) -> jax.Array:
    """An operand that has to be floats, the unit dividing its last axis.

    Raises:
      TypeError, ValueError: it is not.
    """
    x = array_of(op, name, x)
    if x.ndim != ndim:
        raise ValueError(f"{op}: {name} has the shape {x.shape}, must have {ndim} dimensions")
    if x.shape[-1] % unit:
        raise ValueError(
            f"{op}: the last axis of {name} has {x.shape[-1]} elements, not a multiple of "
            f"{what_of(unit)}; {padded(x.shape[-1], unit)}"
        )
    return x


def array_or_quantized(op: str, name: str, w: Any) -> Any:
    """A weight as an array of JAX, if it is not quantized.

    Raises:
      TypeError: it is neither floats nor quantized.
    """
    w = held(w)
    return w if isinstance(w, MXArray | QuantizedWeight) else array_of(op, name, w)


def weight_of(op: str, name: str, w: Any, length: int, recipe: Recipe) -> Weight:
    """One matrix a group, of `length` contracted elements; of what `array_or_quantized` gives.

    Raises:
      TypeError, ValueError: it is none, or was quantized for another product.
    """
    shape = w.shape
    if len(shape) != 3:
        raise ValueError(
            f"{op}: {name} must have three dimensions, one matrix a group: (groups, contracted, "
            f"columns), got {shape}"
        )
    at = 1
    if not shape[0]:
        raise ValueError(f"{op}: {name} has the shape {tuple(shape)}, must have a matrix at least")
    if isinstance(w, MXArray):
        check_frozen(op, name, recipe)
        w = _as_read(checked(op, name, w))
        at = w.axis % 3 if len(w.block) == 1 else 1
        if at == 0:
            raise ValueError(
                f"{op}: {name} has blocks along the axis of groups; quantize it along the "
                "contracted one"
            )
    elif isinstance(w, QuantizedWeight):
        _check_made_for_groups(op, name, w)
    if shape[at] != length:
        raise ValueError(
            f"{op}: {name} has the shape {tuple(shape)}, whose contracted axis {at} should have "
            f"{length} elements"
        )
    columns = shape[3 - at]
    if isinstance(w, MXArray):
        return Weight(None, w, shape[0], columns)
    if isinstance(w, QuantizedWeight):
        fixed = _columns_padded(w.floats, recipe)
        return Weight(fixed, (w.contracted_form, w.free_form), shape[0], columns)
    return Weight(_columns_padded(w, recipe), None, shape[0], columns)


def _check_made_for_groups(op: str, name: str, w: QuantizedWeight) -> None:
    arrangement = w.arrangement
    if (arrangement.contracted_dims, arrangement.order[: arrangement.batch]) != ((1,), (0,)):
        raise ValueError(
            f"{op}: {name} was quantized for another product; use "
            "recipe.quantize_weight(w, contracting=1, batch=0)"
        )


def _columns_padded(w: jax.Array, recipe: Recipe) -> jax.Array:
    extra = -w.shape[-1] % recipe.units.dgrad
    return jnp.pad(w, ((0, 0), (0, 0), (0, extra))) if extra else w


def sizes_of(op: str, sizes: Any, groups: int) -> jax.Array:
    """The sizes of so many groups as int32, of integers of any type.

    Raises:
      TypeError, ValueError: they are none.
    """
    has_elements(op, "group_sizes", sizes)
    dtype = getattr(sizes, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{op}: group_sizes are {dtype or type(sizes).__name__}, must be an array of integers"
        )
    if sizes.shape != (groups,):
        raise ValueError(
            f"{op}: group_sizes have the shape {sizes.shape}, rhs has {groups} matrices; they "
            f"must be ({groups},)"
        )
    if dtype == jnp.int32 and isinstance(sizes, jax.Array):
        return sizes
    if isinstance(sizes, np.ndarray):  # before JAX cuts 64 bits
        sizes = sizes.astype(dtype.newbyteorder("="), copy=False)
    xp: Any = np if isinstance(sizes, np.ndarray) else jnp
    most = (1 << 31) - 1  # as good as any number of rows that is larger
    if np.iinfo(sizes.dtype).max > most:
        sizes = xp.minimum(sizes, np.array(most, sizes.dtype))
        if np.issubdtype(sizes.dtype, np.signedinteger):
            sizes = xp.maximum(sizes, np.array(0, sizes.dtype))
    return jnp.asarray(sizes.astype(np.int32))


def unsplit(op: str, *operands: Any) -> None:
    """Refuses operands that a mesh with explicit axes splits.

    Raises:
      ShardingTypeError: so it is.
    """
    for x in jax.tree.leaves(operands):
        aval: Any = jax.typeof(x)
        if is_explicit(aval.sharding.mesh) and any(spec_of(x)):
            raise private.ShardingTypeError(
                f"{op}: an operand is split as {aval.sharding.spec}; which rows a group has is "
                "known on the device alone, so that no rule splits this product: use "
                "jax.shard_map, or jax_mx.moe with token_axes or expert_axis"
            )
