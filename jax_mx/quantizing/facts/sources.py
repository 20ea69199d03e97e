"""Sources make the floats that are quantized: the class of all sources, and `X`, x itself.

A source is a frozen dataclass in a module of `quantizing/sources`, or of a room: it has all that
others ask of it. This module imports no JAX, and no source's module does when it is imported, as
kernels' builds read sources too. `compute`, which makes the floats, imports JAX when it is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jax_mx.quantizing.facts.signatures import Array, Role

if TYPE_CHECKING:
    from jax_mx.quantizing.facts.variants import Variant

Spans = tuple[bool, bool]  # whether blocks run down the rows of the floats, and along them
Shape = tuple[int, ...]
ROWS, COLUMNS = "rows", "columns"


@dataclasses.dataclass(frozen=True, repr=False)
class Source:
    """A source makes the floats of x and of other operands; this class itself takes x as it is.

    A new source is a subclass with `compute` and the shapes; one that a kernel fuses also has
    `loaders` and `fused`.

    Attributes:
      word: the source in the names of kernels.
      loaders: for each DSL that has kernels of it, the name of the loader in the DSL's table.
      modules: for each DSL that has kernels for it alone, their module. `KERNELS` there has two
        classes: for blocks along rows, and for others.
      tuned_as: its name in the tuning tables.
      tiled_on: the archs whose kernels alone write its scales in `blocked_128x4`, too; empty: a
        kernel writes them in every layout that it has for x.
      has_slabs: whether x may have more than two dimensions, where rows are quantized alone.
      of_rows_alone: whether kernels have it in windows of rows alone; else XLA makes the floats.
      has_amaxes: whether the operands behind x are the amaxes of its rows and of its columns.
      derivative: a sentence about functions that have a derivative instead; "": codes have none.
      split: for each operand of the primitive, the first dimensions that XLA splits like `ROWS` and
        `COLUMNS` of the floats; empty: XLA splits no call of it.
    """

    word: ClassVar[str] = ""
    loaders: ClassVar[Mapping[str, str]] = {}
    modules: ClassVar[Mapping[str, str]] = {}
    tuned_as: ClassVar[str] = ""
    tiled_on: ClassVar[tuple[str, ...]] = ()
    has_slabs: ClassVar[bool] = False
    of_rows_alone: ClassVar[bool] = False
    has_amaxes: ClassVar[bool] = False
    derivative: ClassVar[str] = ""
    split: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __bool__(self) -> bool:
        return self != X

    def __str__(self) -> str:
        """The end of kernels' names."""
        return self.word

    def __repr__(self) -> str:
        return f"Source({self})"

    # ---- arrays ---
    @property
    def operands(self) -> tuple[Array, ...]:
        """The operands in place of the floats; the first one is x."""
        return (Array("x", Role.FLOATS),)

    @property
    def results(self) -> tuple[Array, ...]:
        """The results behind codes and scales."""
        return ()

    @property
    def scalars(self) -> Mapping[str, int]:
        """The numbers that its kernels take by name."""
        return {}

    @property
    def kernel(self) -> Source:
        """The source without what kernels take as scalars."""
        return self

    # ---- kernels ---
    def fused(self, variant: Variant) -> bool:
        """Whether a kernel makes the floats itself, of a variant that exists without a source."""
        del variant
        return False

    def is_fused_by(self, dsl: str) -> bool:
        """Whether a DSL has kernels that make the floats."""
        return dsl in self.loaders

    def has_kernel(self, variant: Variant) -> bool:
        """`fused`, in a DSL that has such kernels."""
        return self.is_fused_by(variant.implementation) and self.fused(variant)

    @property
    def parts(self) -> int:
        """How many parts a row of the floats has, of each of which a tile has columns."""
        return 1

    def columns(self, spans: Spans) -> int:
        """The dimension of the operand x that is its columns; 0 where the floats are x."""
        del spans
        return 0

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that rows of the tuning tables may ask for."""
        return {"source": self.tuned_as, "activation": "", "interleaved": False}

    # ---- shapes: of arrays or of what has their shapes ---
    def floats_type(self, x: Any, *other: Any) -> tuple[Shape, Any]:
        """The shape and dtype of the floats, for the arrays of a caller."""
        del other
        return tuple(x.shape), x.dtype

    def fits(self, x: Any, window: int) -> bool:
        """Whether the primitive takes an x of this shape, for windows of this length."""
        del x, window
        return True

    def arranged(self, x: Any, other: Sequence[Any], spans: Spans) -> list[Any]:
        """A caller's arrays as the primitive takes them; an axis along blocks becomes two."""
        del spans
        return [x, *other]

    def whole(self, operands: Sequence[Any], spans: Spans) -> list[Any]:
        """The inverse of `arranged`."""
        del spans
        return [*operands]

    def shape(self, operands: Sequence[Any], spans: Spans) -> Shape:
        """The shape of the floats, for the primitive's operands."""
        del spans
        return tuple(operands[0].shape)

    def result_shapes(self, operands: Sequence[Any], spans: Spans) -> list[tuple[Shape, Any]]:
        """The shape and the dtype of each of `results`; the dtype None is that of the floats."""
        del operands, spans
        return []

    # ---- floats ---
    def compute(self, x: Any, *other: Any) -> list[Any]:
        """The floats that XLA makes of a caller's arrays, and `results` behind them."""
        assert not other
        return [x]

    def in_steps(self, quantize: Callable[..., list], x: Any, *other: Any) -> list[Any]:
        """The primitive's results where no kernel is fused: XLA makes the floats.

        Args:
          quantize: the primitive, of a source and of its arrays as `compute` takes them.
          x: see `compute`; so is other.
          other: the operands beside x.
        """
        floats, *results = self.compute(x, *other)
        return [*quantize(X, floats), *results]


X = Source()
FLOAT32 = np.dtype(np.float32)


def blocks_of(length: int, along: bool, block: int) -> tuple[int, ...]:
    """The dimensions of an axis: two, blocks and their elements, where blocks run along it."""
    return (length // block, block) if along else (length,)
