"""The operands and results of each op, declared once: arrays in order, each with a role.

Code that handles a call's arrays asks here instead of counting positions: abstract evaluation,
vmap, memory orders, the sharding rule, and calls that lack operands. Kernels take the types of
their arguments and the alignment of their entries from here, launch rules the numbers of buffers. A
new operand of an op is a line in its function below; a source (sources.py) declares its
arrays itself.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jax_mx.quantizing.facts.modes import Mode


class Role(enum.Enum):
    """The role of an array in a call; its shape and its memory order follow."""

    FLOATS = "floats"  # the unquantized side, as the form's view has it
    CODES = "codes"  # values of a quantized array, beside the floats
    SCALES = "scales"  # one byte a block
    BLOCK_DATA = "block data"  # one uint32 a block: what a preprocessing takes besides constants
    REPLICATED = "replicated"  # the same whole array for every slab and shard: group offsets, say
    SOURCE = "source"  # a whole matrix: what the floats are made of, or they, beside codes

    @property
    def is_batched(self) -> bool:
        """Whether its leading dimensions are the floats' leading dimensions."""
        return self not in (Role.REPLICATED, Role.SOURCE)


@dataclasses.dataclass(frozen=True)
class Array:
    """One operand or result.

    Attributes:
      name: unique in its signature.
      role: its role in the call.
      of: the number of the direction that it belongs to; matters to codes, scales, block data.
      dtype: of a replicated array, by NumPy's name; other arrays' dtypes follow from their role.
      optional: whether a call may lack this operand; kernels get a null pointer instead.
      derived: whether it follows from the other operands, so that no caller of the primitive's
        function passes it.
      updates: of a result, the name of the operand that it replaces where that lies.
    """

    name: str
    role: Role
    of: int = 0
    dtype: str = ""
    optional: bool = False
    derived: bool = False
    updates: str = ""


@dataclasses.dataclass(frozen=True)
class Signature:
    """The arrays of a call.

    Attributes:
      operands: in the kernel's order.
      results: in the kernel's order; launch rules number buffers operands first.
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
        """The operands of a call that lacks the operands of these names."""
        return tuple(array for array in self.operands if array.name not in lacks)

    @property
    def aliases(self) -> dict[int, int]:
        """The numbers of operands that a result replaces, and the results' among results."""
        replaced = enumerate(array.updates for array in self.results)
        return {self.number(operand): result for result, operand in replaced if operand}

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


class HasArrays(Protocol):
    """A source declares arrays of its own, see quantizing/facts/sources.py."""

    @property
    def operands(self) -> tuple[Array, ...]:
        """The operands in place of the floats."""
        ...

    @property
    def results(self) -> tuple[Array, ...]:
        """The results behind the quantized arrays."""
        ...


def _quantize(modes: Sequence[Mode]) -> Signature:
    return Signature((Array("x", Role.FLOATS), *_block_data(modes)), _quantized(modes))


def _block_data(modes: Sequence[Mode]) -> tuple[Array, ...]:
    return tuple(
        array
        for i, mode in enumerate(modes)
        for array, there in (
            (Array(f"seeds_{i}", Role.BLOCK_DATA, i), mode.stochastic),
            (Array(f"signs_{i}", Role.BLOCK_DATA, i, optional=True), mode.hadamard > 0),
            (Array(f"amaxes_{i}", Role.BLOCK_DATA, i, derived=True), mode.takes_amaxes),
        )
        if there
    )


def _quantized(modes: Sequence[Mode]) -> tuple[Array, ...]:
    arrays: list[Array] = []
    for i, mode in enumerate(modes):
        if mode.dequantized:
            arrays.append(Array(f"dequantized_{i}", Role.FLOATS, i))
        else:
            arrays += [Array(f"codes_{i}", Role.CODES, i), Array(f"scales_{i}", Role.SCALES, i)]
    return tuple(arrays)


def _dequantize(modes: Sequence[Mode]) -> Signature:
    del modes  # dequantizing undoes no preprocessing
    return Signature(
        operands=(Array("codes_0", Role.CODES), Array("scales_0", Role.SCALES)),
        results=(Array("y", Role.FLOATS),),
    )


def _group_sizes(optional: bool) -> Array:
    return Array("group_sizes", Role.REPLICATED, dtype="int32", optional=optional)


# Kernels can do this to a product's sums before they are rounded; no call has these operands.
EPILOGUE = ("bias", "row_scale", "added")


def _epilogue(*names: str) -> tuple[Array, ...]:
    return tuple(Array(name, Role.REPLICATED, dtype="float32", optional=True) for name in names)


def _matmul(modes: Sequence[Mode]) -> Signature:
    del modes
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


# What a norm of a sum takes and gives.
_OF_SUM = (
    Array("x", Role.FLOATS),
    Array("residual", Role.FLOATS),
    Array("weights", Role.REPLICATED, dtype="bfloat16"),
)
_AND_SUM = (Array("y", Role.FLOATS), Array("sum", Role.FLOATS))


def _normed(modes: Sequence[Mode]) -> Signature:
    del modes
    return Signature((*_OF_SUM, Array("codes", Role.CODES), Array("scales", Role.SCALES)), _AND_SUM)


def _rms_norm(modes: Sequence[Mode]) -> Signature:
    del modes
    return Signature(_OF_SUM, _AND_SUM)


def _attention(modes: Sequence[Mode]) -> Signature:
    del modes
    return Signature(
        operands=(
            Array("x", Role.FLOATS),
            Array("keys", Role.FLOATS),
            Array("values", Role.FLOATS),
            Array("position", Role.REPLICATED, dtype="int32"),
            Array("cos", Role.REPLICATED, dtype="float32"),
            Array("sin", Role.REPLICATED, dtype="float32"),
        ),
        results=(
            Array("y", Role.FLOATS),
            Array("new_keys", Role.FLOATS, updates="keys"),
            Array("new_values", Role.FLOATS, updates="values"),
        ),
    )


def _matmul_fp8(
    modes: Sequence[Mode], optional: bool = True, epilogue: Sequence[str] = EPILOGUE
) -> Signature:
    del modes
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


def _wgrad_fp8(modes: Sequence[Mode]) -> Signature:
    return _matmul_fp8(modes, optional=False, epilogue=("added",))


def _wgrad(modes: Sequence[Mode]) -> Signature:
    del modes
    return Signature(
        operands=(
            Array("x", Role.FLOATS),
            Array("dy", Role.FLOATS),
            _group_sizes(optional=True),
            *_epilogue("added"),
        ),
        results=(Array("y", Role.FLOATS),),
    )


def _amaxes(modes: Sequence[Mode]) -> Signature:
    del modes
    return Signature(
        operands=(Array("x", Role.FLOATS),),
        results=tuple(
            Array(name, Role.BLOCK_DATA, i) for i, name in enumerate(("of_rows", "of_columns"))
        ),
    )


SIGNATURES: Mapping[str, Callable[[Sequence[Mode]], Signature]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "matmul": _matmul,
    "normed": _normed,
    "rms_norm": _rms_norm,
    "attention": _attention,
    "matmul_fp8": _matmul_fp8,
    "wgrad_fp8": _wgrad_fp8,
    "wgrad": _wgrad,
    "amaxes": _amaxes,
}


def signature_of(op: str, modes: Sequence[Mode] = (), source: HasArrays | None = None) -> Signature:
    """The signature of a call of `op`.

    Args:
      op: a key of `SIGNATURES`.
      modes: the preprocessing of each direction, one each also where there is none; products have
        none.
      source: of the floats; None where the floats are the first operand.
    """
    plain = SIGNATURES[op](modes)
    if not source:
        return plain
    _, *others = plain.operands
    floats = (Array("floats", Role.SOURCE),) if op == "amaxes" else ()
    return Signature((*source.operands, *others), (*plain.results, *floats, *source.results))
