"""The facts of an entry for a launch, whichever DSL it is written in; see ffi/launch.cc."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax_mx.formats.formats import FLOAT_DTYPES
from jax_mx.formats.layouts import ScaleLayout
from jax_mx.launch.entry import Entry
from jax_mx.quantizing.facts.modes import Mode
from jax_mx.quantizing.facts.signatures import Array, Role, Signature
from jax_mx.quantizing.facts.variants import Variant, takes_zero_scale, value_layouts_of
from jax_mx.quantizing.kernels import geometry


class QuantizerEntry(Entry):
    """The arrays and the launch rule of an entry that quantizes or dequantizes; of both DSLs.

    Attributes:
      aligned: whether it takes aligned operands only, or any.
      source: what makes the floats.
      signature: its arrays, in the order of its pointers.
      extents: the scalars that follow from the buffers' dimensions.
      divide: the number that must divide a dimension, for an aligned entry.
      elements_per_thread: see `reported`.
    """

    # The scalars that a kernel may ask for each quantized result, see `Plan.scalars`.
    NAMES = (
        "round_add",
        "round_exception",
        "zero_scale",
        "prescale",
        "flips",
        "flips_odd",
        "value_tiles",
    )
    extents: Sequence = ()
    elements_per_thread: int

    def __init__(self, variant: Variant, layout: ScaleLayout, aligned: bool):
        self.variant, self.layout, self.aligned = variant, layout, aligned
        self.dtype, self.formats = variant.dtype, variant.formats
        self.itemsize = FLOAT_DTYPES[variant.dtype].itemsize
        self.source = variant.source
        self.signature: Signature = variant.signature

    @property
    def of(self) -> int:
        """The dimension of x that is its columns where the floats are made of x, else 0."""
        return self.source.columns(self.variant.form.spans)

    @property
    def parts(self) -> int:
        """How many parts a row of the floats has, of each of which a tile has columns."""
        return self.source.parts

    @property
    def count(self) -> int:
        """How many quantized arrays there are."""
        return len(self.formats)

    @property
    def align(self) -> list[int]:  # type: ignore[bad-override]
        """The number of bytes that divides the address of each buffer."""
        return [self.align_of(array) for array in self.signature.arrays]

    def align_of(self, array: Array) -> int:
        """The number of bytes that divides the address of one of its arrays."""
        least, most = {
            Role.FLOATS: (self.itemsize, 16),
            Role.SOURCE: (1 if array.dtype == "uint8" else self.itemsize, 16),
            Role.REPLICATED: (1 if array.dtype == "uint8" else 4, 16),
            Role.BLOCK_DATA: (4, 4),
            Role.CODES: (1, 16),
            Role.SCALES: (1, 4),
        }[array.role]
        return most if self.aligned else least

    @property
    def scalars(self) -> list:  # type: ignore[bad-override]
        """The scalars of the launch rule: the extents, then what a plan knows by name."""
        if self.variant.op != "quantize":
            return [*self.extents]
        names = [
            f"{name}_{i}"
            for i, format in enumerate(self.formats)
            for name in self.NAMES
            if name != "zero_scale" or takes_zero_scale(format)
            if name != "prescale" or self.mode(i).stochastic
            if name != "flips" or self.mode(i).hadamard
            if name != "flips_odd" or self.mode(i).blocks > 1
            if name != "value_tiles" or self.tiles_values
        ]
        return [*self.extents, *([4, name] for name in (*names, *self.source.scalars))]

    @property
    def tiles_values(self) -> bool:
        """Whether each result has a scalar that says if values go into tiles."""
        return len(value_layouts_of(self.variant.implementation, self.layout.name)) > 1

    def named(self, pointers: Sequence) -> dict[str, Any]:
        """The kernel's pointers by the names that the signature gives its arrays."""
        return self.signature.named(pointers)

    def block_data(self, arrays: Mapping[str, Any], i: int) -> list:
        """The pointers to what the i-th direction has for each block: seeds, signs, amaxes."""
        operands = [a for a in self.signature.operands if (a.role, a.of) == (Role.BLOCK_DATA, i)]
        return [arrays[array.name] for array in operands]

    def is_turned(self, result: geometry.Output) -> bool:
        """Whether a result's scales lie the other way round than x."""
        return geometry.is_turned(result.direction, self.layout)

    def mode(self, i: int) -> Mode:
        """The preprocessing of the i-th quantized array."""
        return self.variant.modes[i] if self.variant.modes else Mode()

    def of_result(self, scalars: Sequence, i: int) -> dict[str, Any]:
        """The kernel's scalars that belong to the i-th result, by name."""
        pairs = zip(self.scalars, scalars, strict=True)
        named = ((key.rpartition("_"), s) for (_, key), s in pairs if isinstance(key, str))
        return {name: scalar for (name, _, number), scalar in named if number == str(i)}

    @staticmethod
    def rule(settings: Mapping[str, Any]) -> list:
        """The scalars of a result that its scales follow from."""
        return [settings[name] for name in QuantizerEntry.NAMES[:3] if name in settings]

    @property
    def reported(self) -> dict[str, int]:  # type: ignore[bad-override]
        """For tests, which count its instructions."""
        return {"elements_per_thread": self.elements_per_thread}

    @property
    def launch(self) -> dict[str, Any]:
        """The entry's launch rule; one that is not aligned takes whatever length."""
        return super().launch | ({} if self.aligned else {"divide": []})
