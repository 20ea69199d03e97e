"""The meaning of the bytes: element formats, the block length and the scaling rules.

The module imports nothing of JAX: the kernels' build reads these tables too.

Sources: OCP Microscaling Formats (MX) v1.0 for the formats and FLOOR; CEIL, EVEN and RCEIL as in
pytorch/ao (prototype/mx_formats), which calls them by the same names.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

BLOCK = 32  # consecutive elements along one axis that share a scale
SCALE_DTYPE = np.dtype(ml_dtypes.float8_e8m0fnu)
SCALE_NAN = 255  # the E8M0 byte of a block that holds a NaN or an infinity

# The input types, by the name that variants and files carry.
FLOAT_DTYPES: Mapping[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}

T = TypeVar("T")


def shown(value: Any) -> str:
    """For a message of one line."""
    text = repr(value)
    return text if "\n" not in text and len(text) < 80 else type(value).__name__


def named(label: str, table: Mapping[str, T], value: Any) -> T:
    """The member of `table` that `value` is or names; the one place where strings are accepted.

    Raises:
      ValueError: a string that is no name of the table.
      TypeError: neither a member nor a string.
    """
    allowed = ", ".join(repr(name) for name in table)
    if isinstance(value, str):
        if value not in table:
            raise ValueError(f"{label} {value!r} is unknown; use one of {allowed}")
        return table[value]
    for member in table.values():
        if type(value) is type(member) and value == member:
            return member
    raise TypeError(f"{label} must be one of {allowed}, got {shown(value)}")


@dataclasses.dataclass(frozen=True)
class Format:
    """An MX format: blocks of `BLOCK` elements of one small float type and an E8M0 scale each.

    An element's code is sign, exponent and mantissa, with bias 2^(exponent_bits - 1) - 1 and
    subnormals. The members are `MXFP8_E4M3`, `MXFP8_E5M2`, `MXFP6_E3M2`, `MXFP6_E2M3` and
    `MXFP4_E2M1`. MXFP4 has two codes in a byte, the first in the low bits; MXFP6 has one, see
    `pack_mxfp6`.

    Attributes:
      name: in lower case, as arguments take it.
      storage: the dtype of values: a float8 type, or uint8 for fewer than 8 bits.
      exponent_bits: of a code.
      mantissa_bits: of a code.
      max_code: of the largest finite value.
      nan_code: of each element of a block whose scale is NaN.
      codes_per_byte: 2 for MXFP4, else 1.
    """

    name: str
    storage: np.dtype
    exponent_bits: int
    mantissa_bits: int
    max_code: int
    nan_code: int
    codes_per_byte: int = 1

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """The bias of the element's exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def emax(self) -> int:
        """The exponent of the largest finite value."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def max_mantissa(self) -> int:
        """The mantissa field of the largest finite value, as float32 has it."""
        field = self.max_code & (2**self.mantissa_bits - 1)
        return field << (23 - self.mantissa_bits)

    @property
    def max(self) -> float:
        """The largest finite value."""
        return 2.0**self.emax * (1 + self.max_mantissa / 2**23)

    def __repr__(self) -> str:
        return self.name.upper()


_E4M3, _E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
_BYTE = np.dtype(np.uint8)
MXFP8_E4M3 = Format("mxfp8_e4m3", _E4M3, 4, 3, max_code=0x7E, nan_code=0x7F)
MXFP8_E5M2 = Format("mxfp8_e5m2", _E5M2, 5, 2, max_code=0x7B, nan_code=0x7F)
MXFP6_E3M2 = Format("mxfp6_e3m2", _BYTE, 3, 2, max_code=31, nan_code=31)
MXFP6_E2M3 = Format("mxfp6_e2m3", _BYTE, 2, 3, max_code=31, nan_code=31)
MXFP4_E2M1 = Format("mxfp4_e2m1", _BYTE, 2, 1, max_code=7, nan_code=7, codes_per_byte=2)

# The format of 8 bits whose lowest codes are those of one of 6, for smaller numbers.
WIDER: Mapping[Format, Format] = {MXFP6_E3M2: MXFP8_E5M2, MXFP6_E2M3: MXFP8_E4M3}

FORMATS: Mapping[str, Format] = {
    f.name: f for f in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4_E2M1)
}


class Scaling(enum.Enum):
    """How a block's scale follows from its largest magnitude (amax).

    - `FLOOR`: from the exponent of amax (OCP MX v1.0, section 6.3); the top of a block may clip.
    - `CEIL`: from the exponent of amax rounded up to a power of two.
    - `EVEN`: from the exponent of amax rounded to the element's mantissa, as AMD's stacks do.
    - `RCEIL`: the smallest scale that clips nothing, as in cuBLAS and TransformerEngine.
    """

    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"
    RCEIL = "rceil"

    def rounding(self, format: Format) -> tuple[int, int]:
        """This rule as one addition: `(add, exception)`.

        With `b` the float32 bits of amax, the scale's byte is `((b + add) >> 23) - emax`, at
        least 0: adding to the mantissa carries into the exponent exactly where the rule rounds up.
        For RCEIL that is where amax > max * 2^k. There the rule is defined by a float32 division
        that underflows for one value, `exception`, whose scale is 0; -1: there is none.
        """
        if self is Scaling.FLOOR:
            return 0, -1
        if self is Scaling.CEIL:
            return 0x7FFFFF, -1
        if self is Scaling.EVEN:
            return 1 << (22 - format.mantissa_bits), -1
        return 0x7FFFFF - format.max_mantissa, (format.emax << 23) + format.max_mantissa + 1

    def __repr__(self) -> str:
        return self.name


SCALINGS: Mapping[str, Scaling] = {s.value: s for s in Scaling}
FLOOR, CEIL, EVEN, RCEIL = Scaling
