"""What an op takes and gives, declared once: the arrays of its call in order, each with a role.

All that handles a call's arrays asks here instead of counting positions: abstract evaluation, vmap,
the memory order of each array, the sharding rule, which operands a call may lack, the argument
types of kernels, the alignment that their entries want, and the buffers that launch rules number.
To add an operand to an op is to add a line to its function below.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_mx.facts.sources import Source
from jax_mx.facts.windows import ROW

if TYPE_CHECKING:
    from jax_mx.facts.variants import Kind


class Role(enum.Enum):
    """What an array of a call is; its shape and its memory order follow."""

    FLOATS = "floats"  # the unquantized side, as the form's view has it
    CODES = "codes"  # values of a quantized array, beside the floats
    SCALES = "scales"  # one byte a block
    BLOCK_DATA = "block data"  # one uint32 a block: what a preprocessing takes besides constants
    REPLICATED = "replicated"  # the same whole array for every slab and shard: group offsets, say
    SOURCE = "source"  # a whole matrix: what the floats are made of, or they, beside codes

    @property
    def is_batched(self) -> bool:
        """Whether its leading dimensions are those of the floats."""
        return self not in (Role.REPLICATED, Role.SOURCE)


@dataclasses.dataclass(frozen=True)
class Array:
    """One operand or result.

    Attributes:
      name: unique in its signature.
      role: what it is.
      of: the number of the direction that it belongs to; matters to codes, scales, block data.
      dtype: of a replicated array, by NumPy's name; that of others follows from their role.
      optional: whether a call may lack this operand; kernels get a null pointer instead.
      derived: whether it follows from the other operands, so that no caller of the primitive's
        function passes it.
    """

    name: str
    role: Role
    of: int = 0
    dtype: str = ""
    optional: bool = False
    derived: bool = False


@dataclasses.dataclass(frozen=True)
class Signature:
    """The arrays of a call.

    Attributes:
      operands: in the kernel's order.
      results: likewise; launch rules number buffers operands first.
    """

    operands: tuple[Array, ...]
    results: tuple[Array, ...]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All, as launch rules number them."""
        return self.operands + self.results

    def number(self, name: str) -> int:
        """The number of a buffer in launch rules."""
        return [array.name for array in self.arrays].index(name)

    def named(self, values: Sequence) -> dict[str, Any]:
        """One value for each array, by the arrays' names."""
        return dict(zip((array.name for array in self.arrays), values, strict=True))

    def present(self, lacks: Sequence[str]) -> tuple[Array, ...]:
        """The operands of a call that lacks those of these names."""
        return tuple(array for array in self.operands if array.name not in lacks)

    @property
    def has_source(self) -> bool:
        """Whether the call picks its floats out of others."""
        return any(array.role is Role.SOURCE for array in self.operands)

    @property
    def has_replicated(self) -> bool:
        """Whether some operand is the same for all shards.

        XLA's partitioner would split it like the others. So such a call is not partitioned: on
        meshes with automatic axes XLA gathers its operands; under shard_map it runs where they lie.
        """
        return any(array.role is Role.REPLICATED for array in self.arrays)


_X, _ROWS = Array("x", Role.SOURCE), Array("rows", Role.REPLICATED, dtype="int32")
_WEIGHTS = Array("weights", Role.REPLICATED, dtype="float32")
_FACTORS = Array("factors", Role.REPLICATED, dtype="float32")
_UP, _DY = Array("up", Role.SOURCE), Array("dy", Role.SOURCE)
_RESIDUAL, _SUM = Array("residual", Role.SOURCE), Array("sum", Role.SOURCE)
_FLOATS = Array("floats", Role.SOURCE)
_SUMS = Array("sums", Role.REPLICATED, dtype="float32")
_CODES_SCALES = Array("scales", Role.REPLICATED, dtype="uint8")


def _quantize(kinds: Sequence[Kind]) -> Signature:
    return Signature((Array("x", Role.FLOATS), *_block_data(kinds)), _quantized(kinds))


def _quantize_rows(kinds: Sequence[Kind]) -> Signature:
    """For the rows of a matrix that `rows` numbers; for other numbers zeros."""
    return Signature((_X, _ROWS, *_block_data(kinds)), _quantized(kinds))


def _quantize_rows_of_codes(kinds: Sequence[Kind]) -> Signature:
    """The same, of an MX array; x are its codes (T, K), scales (T, K / 32)."""
    return Signature((_X, _ROWS, _CODES_SCALES, *_block_data(kinds)), _quantized(kinds))


def _quantize_gated(kinds: Sequence[Kind]) -> Signature:
    """For an activation's results: x (T, 2, K) or (T, K, 2), gates and ups; weights by row."""
    return Signature((_X, _WEIGHTS, *_block_data(kinds)), _quantized(kinds))


def _quantize_gated_apart(kinds: Sequence[Kind]) -> Signature:
    """The same of gates x (T, K) and ups like them."""
    return Signature((_X, _WEIGHTS, _UP, *_block_data(kinds)), _quantized(kinds))


def _quantize_gated_gradient(kinds: Sequence[Kind]) -> Signature:
    """For x's gradient, x (T, 2, K) or, by turns, (T, 2 K); dy (T, K) is that of the results."""
    return Signature((_X, _WEIGHTS, _DY, *_block_data(kinds)), _quantized(kinds))


def _quantize_normed(kinds: Sequence[Kind]) -> Signature:
    """For what `rms_norm` gives; weights by column. It also gives the factors of rows."""
    return Signature((_X, _WEIGHTS, *_block_data(kinds)), (*_quantized(kinds), _FACTORS))


def _quantize_added(kinds: Sequence[Kind]) -> Signature:
    """The same of x and a residual (..., K); it also gives their sum, which is normed."""
    operands = (_X, _RESIDUAL, _WEIGHTS, *_block_data(kinds))
    return Signature(operands, (*_quantized(kinds), _FACTORS, _SUM))


def _and(
    more: Array, make: Callable[[Sequence[Kind]], Signature], kinds: Sequence[Kind]
) -> Signature:
    """The same of a call that gives one more: the floats that it quantizes, or sums of these."""
    own = make(kinds)
    return Signature(own.operands, (*own.results, more))


def _block_data(kinds: Sequence[Kind]) -> tuple[Array, ...]:
    return tuple(
        array
        for i, kind in enumerate(kinds)
        for array, there in (
            (Array(f"seeds_{i}", Role.BLOCK_DATA, i), kind.stochastic),
            (Array(f"signs_{i}", Role.BLOCK_DATA, i, optional=True), kind.hadamard > 0),
            (Array(f"amaxes_{i}", Role.BLOCK_DATA, i, derived=True), kind.window == ROW),
        )
        if there
    )


def _quantized(kinds: Sequence[Kind]) -> tuple[Array, ...]:
    found: list[Array] = []
    for i, kind in enumerate(kinds):
        if kind.dequantized:
            found.append(Array(f"dequantized_{i}", Role.FLOATS, i))
        else:
            found += [Array(f"codes_{i}", Role.CODES, i), Array(f"scales_{i}", Role.SCALES, i)]
    return tuple(found)


def _dequantize(kinds: Sequence[Kind]) -> Signature:
    del kinds  # dequantizing undoes no preprocessing
    return Signature(
        operands=(Array("codes_0", Role.CODES), Array("scales_0", Role.SCALES)),
        results=(Array("y", Role.FLOATS),),
    )


def _group_sizes(optional: bool) -> Array:
    return Array("group_sizes", Role.REPLICATED, dtype="int32", optional=optional)


# What kernels can do to a product's sums before they are rounded; no call has these operands.
EPILOGUE = ("bias", "row_scale", "added")


def _epilogue(*names: str) -> tuple[Array, ...]:
    return tuple(Array(name, Role.REPLICATED, dtype="float32", optional=True) for name in names)


def _matmul(kinds: Sequence[Kind]) -> Signature:
    del kinds
    return Signature(
        operands=(
            Array("x", Role.FLOATS),
            Array("codes", Role.CODES),
            Array("scales", Role.SCALES),
            _group_sizes(optional=True),
            *_epilogue(*EPILOGUE),
        ),
        results=(Array("y", Role.FLOATS),),
    )


def _matmul_fp8(
    kinds: Sequence[Kind], optional: bool = True, epilogue: Sequence[str] = EPILOGUE
) -> Signature:
    del kinds
    return Signature(
        operands=(
            Array("x_codes", Role.CODES),
            Array("x_scales", Role.SCALES),
            Array("codes", Role.CODES, 1),
            Array("scales", Role.SCALES, 1),
            _group_sizes(optional),
            *_epilogue(*epilogue),
        ),
        results=(Array("y", Role.FLOATS),),
    )


def _wgrad_fp8(kinds: Sequence[Kind]) -> Signature:
    return _matmul_fp8(kinds, optional=False, epilogue=("added",))


def _wgrad(kinds: Sequence[Kind]) -> Signature:
    del kinds
    return Signature(
        operands=(
            Array("x", Role.FLOATS),
            Array("dy", Role.FLOATS),
            _group_sizes(optional=True),
            *_epilogue("added"),
        ),
        results=(Array("y", Role.FLOATS),),
    )


def _amaxes(kinds: Sequence[Kind]) -> Signature:
    del kinds
    return Signature(
        operands=(Array("x", Role.FLOATS),),
        results=tuple(
            Array(name, Role.BLOCK_DATA, i) for i, name in enumerate(("of_rows", "of_columns"))
        ),
    )


_MADE = {
    "quantize_gated": _quantize_gated,
    "quantize_gated_apart": _quantize_gated_apart,
    "quantize_normed": _quantize_normed,
    "quantize_added": _quantize_added,
}
SIGNATURES: Mapping[str, Callable[[Sequence[Kind]], Signature]] = {
    "quantize": _quantize,
    "quantize_rows": _quantize_rows,
    "quantize_rows_of_codes": _quantize_rows_of_codes,
    "quantize_gated_gradient": _quantize_gated_gradient,
    "quantize_gated_gradient_sums": functools.partial(_and, _SUMS, _quantize_gated_gradient),
    **_MADE,
    **{f"{name}_floats": functools.partial(_and, _FLOATS, make) for name, make in _MADE.items()},
    "dequantize": _dequantize,
    "matmul": _matmul,
    "matmul_fp8": _matmul_fp8,
    "wgrad_fp8": _wgrad_fp8,
    "wgrad": _wgrad,
    "amaxes": _amaxes,
}


def signature_name(op: str, source: Source) -> str:
    """The name of an op's signature; `source`: what makes its floats."""
    floats = "_floats" * source.floats
    if source.activation:
        of = "_apart" * source.apart + "_gradient" * source.gradient + "_sums" * source.sums
        return f"{op}_gated{of}{floats}"
    if source.norm:
        return (f"{op}_added" if source.added else f"{op}_normed") + floats
    return op + "_rows" * source.rows + "_of_codes" * (source.codes != "")


def signature_of(op: str, kinds: Sequence[Kind] = ()) -> Signature:
    """The signature of a call of `op`.

    Args:
      op: a key of `SIGNATURES`; those of quantizing are made by `signature_name`.
      kinds: the preprocessing of each direction, one each also where there is none; of products
        none.
    """
    return SIGNATURES[op](kinds)
