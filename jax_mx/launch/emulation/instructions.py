"""Instructions as numpy functions of whole registers.

They follow AMD's "CDNA3 / CDNA4 Instruction Set Architecture" reference guides. A signature has a
letter per source: u i f for 32 bits unsigned, signed, float; U I F for 64 bits; h for the low 16
bits unsigned, e for a float16 there; m for a lane mask. Scalars are arrays (waves,), vectors
(waves, 64) or (waves, 1). The dtype of a result says where it goes: 64 bits to a pair of registers,
bool to a lane mask.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import ml_dtypes
import numpy as np

Op = tuple[str, Callable]

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I32, I64, F32, F64 = np.int32, np.int64, np.float32, np.float64


# ---- helpers ---
def wide(x: np.ndarray) -> np.ndarray:
    """In 64 bits, the sign extended."""
    return x.astype(I64 if x.dtype.kind == "i" else U64)


def low(x: np.ndarray) -> np.ndarray:
    """The low 32 bits."""
    return x.astype(U32) if x.dtype.kind == "u" else x.astype(U64).astype(U32)


def f32(x: np.ndarray) -> np.ndarray:
    """The float32 of these bits."""
    return np.ascontiguousarray(x).view(F32)


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of float32s or signed integers."""
    return np.ascontiguousarray(x).view(U32 if x.itemsize == 4 else U64)


def _shifted(shift: Callable, width: int) -> Callable:
    """A shift that looks at the low bits of its count only."""
    return lambda x, n: shift(x, (n & n.dtype.type(width - 1)).astype(x.dtype))


_left, _right = _shifted(np.left_shift, 32), _shifted(np.right_shift, 32)
_left64, _right64 = _shifted(np.left_shift, 64), _shifted(np.right_shift, 64)
_compare = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}


def _exp2(x: np.ndarray) -> np.ndarray:
    """AMD says: within a unit in the last place, subnormals are flushed. So it is not the nearest.

    It is the number above that or below, by the last bit of the operand; whole powers are exact.
    """
    with np.errstate(over="ignore", under="ignore"):
        exact = np.exp2(x.astype(F64))
        nearest = exact.astype(F32)
    away = np.where(bits(x) & U32(1), F32(0), F32(np.inf))
    result = np.where(nearest == exact, nearest, np.nextafter(nearest, away, dtype=F32))
    return np.where(result < np.finfo(F32).tiny, F32(0), result)


def minimum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """IEEE 754-2008 minNum: a NaN loses; -0 is less than +0."""
    zeros = (x == 0) & (y == 0)
    return np.where(zeros, f32(bits(x) | bits(y)), np.fmin(x, y))


def maximum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """IEEE 754-2008 maxNum."""
    zeros = (x == 0) & (y == 0)
    return np.where(zeros, f32(bits(x) & bits(y)), np.fmax(x, y))


def _maximum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """IEEE 754-2019 maximum: a NaN wins."""
    return np.where(np.isnan(x) | np.isnan(y), F32(np.nan), maximum(x, y))


def median(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """v_med3_f32: with a NaN among them, the smallest of the others."""
    poisoned = np.isnan(x) | np.isnan(y) | np.isnan(z)
    middle = np.maximum(np.minimum(x, y), np.minimum(np.maximum(x, y), z))
    return np.where(poisoned, np.fmin(np.fmin(x, y), z), middle)


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z, rounded once.

    The product is exact in float64. The sum is rounded there to odd, so that rounding it again, to
    float32, is as if there had been one rounding.
    """
    product, addend = x.astype(F64) * y.astype(F64), z.astype(F64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.view(U64) & U64(1)) == 0
    away = np.where((error > 0) == (total > 0), 1, -1)
    odd = (total.view(I64) + away).view(F64)
    return np.where((error != 0) & even & np.isfinite(total), odd, total).astype(F32)


def _to_odd(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x + y, and the same rounded to the neighbour whose last bit is set, where it is rounded."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    even = (total.view(U64) & U64(1)) == 0
    away = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where(
        (error != 0) & even & np.isfinite(total), (total.view(I64) + away).view(F64), total
    )
    return np.asarray(total), odd


def _two(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x + y, and what its rounding left out."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def fused64(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z in float64, rounded once (S. Boldo and G. Melquiond, IEEE Trans. Comput. 57, 2008).

    Raises:
      NotImplementedError: magnitudes for which its steps are not exact.
    """
    x, y, z = np.broadcast_arrays(x, y, z)
    product = x * y
    sizes = [np.abs(a[np.isfinite(a) & (a != 0)]) for a in (x, y, z, product)]
    if any(((a > 2.0**500) | (a < 2.0**-500)).any() for a in sizes):
        raise NotImplementedError("a fused float64 beyond 2^-500 to 2^500")
    halves = []
    for a in (x, y):  # G. W. Veltkamp
        wide = a * (2.0**27 + 1)
        high = wide - (wide - a)
        halves.append((high, a - high))
    (xh, xl), (yh, yl) = halves
    rest = ((xh * yh - product) + xh * yl + xl * yh) + xl * yl
    high, low = _two(z, rest)
    total, error = _two(product, high)
    _, odd = _to_odd(low, error)
    exact = np.isfinite(product) & np.isfinite(z)
    rounded = np.where(total == 0, product + z, total + odd)  # zeros by the signs of both
    return np.where(exact, np.where((total == 0) & (odd != 0), odd, rounded), product + z)


# AMD says of v_rcp_f64 and v_rsq_f64: within 2^29 units in the last place. So they are off by this.
OFF64 = 1 << 27


def _inexact64(exact: np.ndarray) -> np.ndarray:
    """Off by `OFF64` units in the last place, to either side; zeros and what is no number stay."""
    away = np.where(exact.view(U64) & U64(1), -OFF64, OFF64)
    return np.where(np.isfinite(exact) & (exact != 0), (exact.view(I64) + away).view(F64), exact)


def _reciprocal64(x: np.ndarray) -> np.ndarray:
    return _inexact64(np.asarray(F64(1) / x))


def _reciprocal_root64(x: np.ndarray) -> np.ndarray:
    return _inexact64(np.asarray(F64(1) / np.sqrt(x)))


def _to_unsigned(x: np.ndarray) -> np.ndarray:
    """float32 to uint32: towards zero, saturated, NaN to 0."""
    return np.clip(np.nan_to_num(x.astype(F64), nan=0.0), 0, 2.0**32 - 1).astype(U64).astype(U32)


def _permute(x: np.ndarray, y: np.ndarray, select: np.ndarray) -> np.ndarray:
    """v_perm_b32: each byte one of the 8 of (x, y), y's first.

    8 to 11 are 8 copies of the sign of bytes 1, 3, 5 and 7; 12 is 0x00, above 12 0xFF.
    """
    both = wide(x) << U64(32) | wide(y)
    out = np.zeros(np.broadcast_shapes(both.shape, select.shape), U32)
    for i in range(4):
        which = select >> U32(8 * i) & U32(0xFF)
        byte = (both >> (wide(which & U32(7)) * U64(8)) & U64(0xFF)).astype(U32)
        sign = (both >> (wide(which & U32(3)) * U64(16) + U64(15)) & U64(1)).astype(U32) * U32(0xFF)
        beyond = np.where(which < 12, sign, np.where(which == 12, U32(0), U32(0xFF)))
        out = out | np.where(which < 8, byte, beyond) << U32(8 * i)
    return out


def _reversed(x: np.ndarray) -> np.ndarray:
    """The bits in the opposite order."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        x = (x >> U32(shift) & U32(mask)) | (x & U32(mask)) << U32(shift)
    return x >> U32(16) | x << U32(16)


def _ones(x: np.ndarray) -> np.ndarray:
    """How many bits of 64 are set."""
    return np.unpackbits(np.ascontiguousarray(x).view(U8).reshape(-1, 8), axis=1).sum(1, U32)


def _field(x: np.ndarray, first: np.ndarray, width: np.ndarray) -> np.ndarray:
    """v_bfe_u32."""
    mask = (U32(1) << (width & U32(31))) - U32(1)
    return _right(x, first) & mask


# ---- scalar: results are (value, SCC); None: not written ---
def _with_overflow(op: Callable) -> Callable:
    def run(x, y, _):
        total = op(wide(x), wide(y))
        return bits(total.astype(I32)), total != total.astype(I32)

    return run


def _shifted_sum(n: int) -> Callable:
    """With SCC where it does not fit in 32 bits."""

    def run(x, y, _):
        total = (wide(x) << U64(n)) + wide(y)
        return low(total), total > U64(0xFFFFFFFF)

    return run


def _nonzero(op: Callable) -> Callable:
    def run(*args):
        value = op(*args[:-1])
        return value, value != 0

    return run


def _saveexec(op: Callable) -> Callable:
    """The old EXEC is the result, the new one the third."""

    def run(x, exec_, _):
        new = op(x, exec_)
        return exec_, new != 0, new

    return run


SCALAR: Mapping[str, Op] = {
    "s_mov_b32": ("u", lambda x, _: (x, None)),
    "s_mov_b64": ("U", lambda x, _: (x, None)),
    "s_movk_i32": ("i", lambda x, _: (bits(x), None)),
    "s_addk_i32": ("ii", _with_overflow(np.add)),
    "s_mulk_i32": ("ii", lambda x, y, _: (bits(x * y), None)),
    "s_brev_b32": ("u", lambda x, _: (_reversed(x), None)),
    "s_not_b32": ("u", _nonzero(np.invert)),
    "s_not_b64": ("U", _nonzero(np.invert)),
    "s_add_u32": ("uu", lambda x, y, _: (x + y, x + y < x)),
    "s_addc_u32": ("uu", lambda x, y,
        c: (x + y + c.astype(U32), wide(x) + wide(y) + wide(c) > U64(0xFFFFFFFF))),
    "s_sub_u32": ("uu", lambda x, y, _: (x - y, x < y)),
    "s_subb_u32": ("uu", lambda x, y, c: (x - y - c.astype(U32), wide(x) < wide(y) + wide(c))),
    "s_add_i32": ("ii", _with_overflow(np.add)),
    "s_sub_i32": ("ii", _with_overflow(np.subtract)),
    "s_mul_i32": ("uu", lambda x, y, _: (x * y, None)),
    "s_mul_hi_u32": ("uu", lambda x, y, _: (low(wide(x) * wide(y) >> U64(32)), None)),
    "s_mul_hi_i32": ("ii",
        lambda x, y, _: (bits((wide(x) * wide(y) >> I64(32)).astype(I32)), None)),
    "s_and_b32": ("uu", _nonzero(np.bitwise_and)),
    "s_or_b32": ("uu", _nonzero(np.bitwise_or)),
    "s_xor_b32": ("uu", _nonzero(np.bitwise_xor)),
    "s_andn2_b32": ("uu", _nonzero(lambda x, y: x & ~y)),
    "s_and_b64": ("UU", _nonzero(np.bitwise_and)),
    "s_or_b64": ("UU", _nonzero(np.bitwise_or)),
    "s_xor_b64": ("UU", _nonzero(np.bitwise_xor)),
    "s_andn2_b64": ("UU", _nonzero(lambda x, y: x & ~y)),
    "s_lshl_b32": ("uu", _nonzero(_left)),
    "s_lshr_b32": ("uu", _nonzero(_right)),
    "s_ashr_i32": ("iu", _nonzero(lambda x, n: bits(_right(x, n)))),
    **{f"s_lshl{n}_add_u32": ("uu", _shifted_sum(n)) for n in range(1, 5)},
    "s_bcnt1_i32_b64": ("U", _nonzero(_ones)),
    "s_bitcmp0_b32": ("uu", lambda x, n, _: (None, _right(x, n) & U32(1) == 0)),
    "s_bitcmp1_b32": ("uu", lambda x, n, _: (None, _right(x, n) & U32(1) == 1)),
    "s_lshl_b64": ("Uu", _nonzero(_left64)),
    "s_lshr_b64": ("Uu", _nonzero(_right64)),
    "s_ashr_i64": ("Iu", _nonzero(lambda x, n: bits(_right64(x, n)))),
    "s_bfe_u32": ("uu", _nonzero(lambda x, y: _field(x, y & U32(31), y >> U32(16) & U32(127)))),
    "s_min_i32": ("ii", lambda x, y, _: (bits(np.minimum(x, y)), x < y)),
    "s_min_u32": ("uu", lambda x, y, _: (np.minimum(x, y), x < y)),
    "s_max_i32": ("ii", lambda x, y, _: (bits(np.maximum(x, y)), x > y)),
    "s_max_u32": ("uu", lambda x, y, _: (np.maximum(x, y), x > y)),
    "s_cselect_b32": ("uu", lambda x, y, c: (np.where(c, x, y), None)),
    "s_cselect_b64": ("UU", lambda x, y, c: (np.where(c, x, y), None)),
    "s_and_saveexec_b64": ("UX", _saveexec(np.bitwise_and)),
    "s_or_saveexec_b64": ("UX", _saveexec(np.bitwise_or)),
    "s_andn2_saveexec_b64": ("UX", _saveexec(lambda x, e: x & ~e)),
    **{f"s_{cmp}_{name}_{letter}32": (letter * 2, lambda x, y, _,
        op=op: (None, op(x, y))) for cmp in ("cmp", "cmpk") for name,
        op in _compare.items() for letter in "ui" if name != "ne"},
    "s_cmp_eq_u64": ("UU", lambda x, y, _: (None, x == y)),
    "s_cmp_lg_u64": ("UU", lambda x, y, _: (None, x != y)),
}  # fmt: skip


# ---- vector ---
VECTOR: Mapping[str, Op] = {
    "v_mov_b32": ("u", lambda x: x),
    "v_mov_b64": ("U", lambda x: x),
    "v_not_b32": ("u", np.invert),
    "v_add_u32": ("uu", np.add),
    "v_add_u32 clamp": ("uu", lambda x, y: np.where(x + y < x, U32(0xFFFFFFFF), x + y)),
    "v_sub_u32": ("uu", np.subtract),
    "v_sub_u32 clamp": ("uu", lambda x, y: np.where(x < y, U32(0), x - y)),
    "v_subrev_u32": ("uu", lambda x, y: y - x),
    "v_add_co_u32": ("uu", lambda x, y: (x + y, x + y < x)),
    "v_addc_co_u32": ("uum", lambda x, y,
        c: (x + y + c.astype(U32), wide(x) + wide(y) + wide(c) > U64(0xFFFFFFFF))),
    "v_add3_u32": ("uuu", lambda x, y, z: x + y + z),
    "v_xad_u32": ("uuu", lambda x, y, z: (x ^ y) + z),
    "v_mul_lo_u32": ("uu", np.multiply),
    "v_mul_hi_u32": ("uu", lambda x, y: (wide(x) * wide(y) >> U64(32)).astype(U32)),
    "v_mad_u64_u32": ("uuU", lambda x, y, z: (wide(x) * wide(y) + z, wide(x) * wide(y) + z < z)),
    "v_mad_i64_i32": ("iiI", lambda x, y, z: (bits(wide(x) * wide(y) + z), None)),
    "v_and_b32": ("uu", np.bitwise_and),
    "v_or_b32": ("uu", np.bitwise_or),
    "v_xor_b32": ("uu", np.bitwise_xor),
    "v_or3_b32": ("uuu", lambda x, y, z: x | y | z),
    "v_and_or_b32": ("uuu", lambda x, y, z: x & y | z),
    "v_bfi_b32": ("uuu", lambda x, y, z: x & y | ~x & z),
    "v_bfrev_b32": ("u", _reversed),
    "v_bfe_u32": ("uuu", _field),
    "v_perm_b32": ("uuu", _permute),
    "v_alignbit_b32": ("uuu", lambda x, y,
        n: _right64(wide(x) << U64(32) | wide(y), n & U32(31)).astype(U32)),
    "v_pack_b32_f16": ("hh", lambda x, y: x | y << U32(16)),
    "v_lshlrev_b32": ("uu", lambda n, x: _left(x, n)),
    "v_lshrrev_b32": ("uu", lambda n, x: _right(x, n)),
    "v_ashrrev_i32": ("ui", lambda n, x: bits(_right(x, n))),
    "v_lshlrev_b16": ("hh", lambda n, x: x << (n & U32(15)) & U32(0xFFFF)),
    "v_lshrrev_b16": ("hh", lambda n, x: x >> (n & U32(15))),
    "v_lshlrev_b64": ("uU", lambda n, x: _left64(x, n)),
    "v_lshrrev_b64": ("uU", lambda n, x: _right64(x, n)),
    "v_ashrrev_i64": ("uI", lambda n, x: bits(_right64(x, n))),
    "v_lshl_or_b32": ("uuu", lambda x, n, y: _left(x, n) | y),
    "v_lshl_add_u32": ("uuu", lambda x, n, y: _left(x, n) + y),
    "v_add_lshl_u32": ("uuu", lambda x, y, n: _left(x + y, n)),
    "v_lshl_add_u64": ("UuU", lambda x, n, y: _left64(x, n & U32(7)) + y),
    "v_min_u32": ("uu", np.minimum),
    "v_max_u32": ("uu", np.maximum),
    "v_min_i32": ("ii", lambda x, y: bits(np.minimum(x, y))),
    "v_max_i32": ("ii", lambda x, y: bits(np.maximum(x, y))),
    "v_min3_u32": ("uuu", lambda x, y, z: np.minimum(np.minimum(x, y), z)),
    "v_max3_u32": ("uuu", lambda x, y, z: np.maximum(np.maximum(x, y), z)),
    "v_add_u16": ("hh", lambda x, y: x + y & U32(0xFFFF)),
    "v_max_u16": ("hh", np.maximum),
    "v_cndmask_b32": ("uum", lambda x, y, m: np.where(m, y, x)),
    "v_add_f32": ("ff", np.add),
    "v_sub_f32": ("ff", np.subtract),
    "v_mul_f32": ("ff", np.multiply),
    "v_fma_f32": ("fff", fused),
    "v_min_f32": ("ff", minimum),
    "v_max_f32": ("ff", maximum),
    "v_med3_f32": ("fff", median),
    "v_maximum3_f32": ("fff", lambda x, y, z: _maximum(_maximum(x, y), z)),
    "v_rcp_f32": ("f", lambda x: F32(1) / x),
    "v_exp_f32": ("f", _exp2),
    "v_cvt_f32_u32": ("u", lambda x: x.astype(F32)),
    "v_cvt_u32_f32": ("f", _to_unsigned),
    "v_cvt_f32_f16": ("e", lambda x: x.astype(F32)),
    "v_cvt_f64_u32": ("u", lambda x: x.astype(F64)),
    "v_cvt_f64_i32": ("i", lambda x: x.astype(F64)),
    "v_cvt_f64_f32": ("f", lambda x: x.astype(F64)),
    "v_cvt_f32_f64": ("F", lambda x: x.astype(F32)),
    "v_cvt_i32_f64": ("F",
        lambda x: bits(np.clip(np.nan_to_num(x, nan=0.0), -(2.0**31), 2.0**31 - 1).astype(I32))),
    "v_add_f64": ("FF", np.add),
    "v_mul_f64": ("FF", np.multiply),
    "v_fma_f64": ("FFF", fused64),
    "v_fmac_f64": ("FFF", fused64),  # the third source is the register of the result
    "v_rndne_f64": ("F", np.rint),
    "v_ldexp_f64": ("Fi", np.ldexp),
    "v_rcp_f64": ("F", _reciprocal64),
    "v_rsq_f64": ("F", _reciprocal_root64),
    "v_cvt_f16_f32": ("f", lambda x: x.astype(np.float16).view(np.uint16).astype(U32)),
    **{f"v_cmp_{name}_{suffix}": (letter * 2, op) for name, op in _compare.items() for suffix,
        letter in (("u32", "u"), ("i32", "i"), ("u64", "U"), ("i64", "I"),
        ("u16", "h")) if name != "lg"},
    **{f"v_cmp_{name}_{suffix}": (letter * 2, op) for name, op in _compare.items() for suffix,
        letter in (("f32", "f"), ("f64", "F"), ("f16", "e")) if name not in ("ne", "lg")},
    "v_cmp_lg_f32": ("ff", lambda x, y: (x < y) | (x > y)),
    "v_cmp_neq_f32": ("ff", np.not_equal),
    "v_cmp_neq_f64": ("FF", np.not_equal),
    **{  # true of NaNs
        f"v_cmp_n{name}_{suffix}": (letter * 2, lambda x, y, op=_compare[name]: ~op(x, y))
        for name in ("lt", "le", "gt", "ge")
        for suffix, letter in (("f32", "f"), ("f16", "e"))
    },
    "v_cmp_u_f32": ("ff", lambda x, y: np.isnan(x) | np.isnan(y)),
    "v_cmp_o_f32": ("ff", lambda x, y: ~(np.isnan(x) | np.isnan(y))),
}  # fmt: skip


# On gfx950: lanes of the second register swap with lanes of the first, so many before them.
SWAPS: Mapping[str, int] = {"v_permlane16_swap_b32": 16, "v_permlane32_swap_b32": 32}

# Any function of three bits, given as a table; the bits that it computes. The other bits
# are not documented, so they are garbage.
TRUTH_TABLES: Mapping[str, np.uint32] = {
    "v_bitop3_b32": U32(0xFFFFFFFF),
    "v_bitop3_b16": U32(0x0000FFFF),
}


def truth_table(table: int, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Bit 4 * x + 2 * y + z of the table, for each bit of the registers."""
    out = U32(0)
    for i in range(8):
        if table >> i & 1:
            out = out | (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
    return out + np.zeros_like(x)


# Two at once: each half of the registers (16 bits of one, or one of two) as the named op has it.
PACKED: Mapping[str, str] = {
    "v_pk_mul_f32": "v_mul_f32",
    "v_pk_add_f32": "v_add_f32",
    "v_pk_fma_f32": "v_fma_f32",
    "v_pk_max_u16": "v_max_u16",
}

# ---- matrices ---
# The numbers that cbsz and blgp have for formats of codes, but those of 6 bits.
CODES: Mapping[int, str] = {0: "float8_e4m3fn", 1: "float8_e5m2", 4: "float4_e2m1fn"}


def _table(name: str) -> np.ndarray:
    """The float of each code."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    return np.arange(16 if "float4" in name else 256, dtype=U8).view(dtype).astype(F64)


_TABLES = {name: _table(name) for name in CODES.values()}


@dataclasses.dataclass(frozen=True)
class Matrix:
    """An instruction that multiplies matrices: D (side, side) = A (side, depth) @ B^T + C.

    A lane of the g-th `side` lanes has row `lane % side` of A and of B: bfloat16 of neighbours, or
    codes and a scale. With codes of 8 bits it has 16 neighbours, and 16 that lie half the depth
    behind; with codes of 4 bits 32 neighbours. A scale belongs to a block of 32, the g-th of them.
    AMD measured this: composable_kernel, test/mx_mfma_op. Sums are as good as float64's and rounded
    once; the manual does not say how a chip rounds.
    """

    side: int
    depth: int
    archs: tuple[str, ...]

    @property
    def groups(self) -> int:
        """How many times `side` lanes a wave has."""
        return 64 // self.side

    def registers(self, format: str) -> int:
        """How many registers an operand takes: of a format of codes, or "" of bfloat16."""
        bits = {"": 16, "float4_e2m1fn": 4}.get(format, 8)
        return self.side * self.depth * bits // 64 // 32

    def floats(self, words: np.ndarray, format: str) -> np.ndarray:
        """The floats in the registers (n, waves, 64): float64 (waves, side, depth)."""
        octets = np.ascontiguousarray(np.moveaxis(words, 0, -1)).view(U8)
        lanes = octets.reshape(-1, self.groups, self.side, octets.shape[-1])
        if not format:
            whole = np.ascontiguousarray(lanes).view(U16).astype(U32) << U32(16)
            columns = whole.view(F32).astype(F64)[..., None, :]
        elif format == "float4_e2m1fn":
            nibbles = np.stack([lanes & U8(15), lanes >> U8(4)], axis=-1)
            columns = _TABLES[format][nibbles].reshape(*lanes.shape[:3], 1, -1)
        else:
            columns = _TABLES[format][lanes].reshape(*lanes.shape[:3], 2, -1)
        return columns.transpose(0, 2, 3, 1, 4).reshape(-1, self.side, self.depth)

    def scaled(self, floats: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Floats times their blocks' scales, of which each lane (waves, 64) has a byte."""
        factors = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(I32) - 127))
        blocks = factors.reshape(-1, self.groups, self.side).transpose(0, 2, 1)
        return floats * np.repeat(blocks, 32, axis=2)

    def multiplied(
        self, sides: Sequence, total: np.ndarray, formats: Sequence[str], scales: Sequence
    ) -> np.ndarray:
        """D, as registers have it, of A and B; `total` is C in the same form."""
        a, b = (self.floats(*pair) for pair in zip(sides, formats, strict=True))
        if any(formats):
            a, b = (self.scaled(*pair) for pair in zip((a, b), scales, strict=True))
        d = a @ b.transpose(0, 2, 1)
        d = d.reshape(-1, len(total) // 4, self.groups, 4, self.side)
        d = d.transpose(1, 3, 0, 2, 4).reshape(total.shape)
        return (total.astype(F64) + d).astype(F32)


_BOTH, _LATER = ("gfx942", "gfx950"), ("gfx950",)
MATRICES: Mapping[str, Matrix] = {
    "v_mfma_f32_16x16x16_bf16": Matrix(16, 16, _BOTH),
    "v_mfma_f32_32x32x8_bf16": Matrix(32, 8, _BOTH),
    "v_mfma_scale_f32_16x16x128_f8f6f4": Matrix(16, 128, _LATER),
    "v_mfma_scale_f32_32x32x64_f8f6f4": Matrix(32, 64, _LATER),
}

# Float32 to 4, 8 or 16 bits, two at once. gfx942 has other formats than gfx950 (and than OCP).
# Rounding is ml_dtypes': this is the one thing here that only silicon can confirm.
CONVERSIONS: Mapping[tuple[str, str], np.dtype] = {
    ("v_cvt_pk_fp8_f32", "gfx942"): np.dtype(ml_dtypes.float8_e4m3fnuz),
    ("v_cvt_pk_bf8_f32", "gfx942"): np.dtype(ml_dtypes.float8_e5m2fnuz),
    ("v_cvt_pk_fp8_f32", "gfx950"): np.dtype(ml_dtypes.float8_e4m3fn),
    ("v_cvt_pk_bf8_f32", "gfx950"): np.dtype(ml_dtypes.float8_e5m2),
    ("v_cvt_scalef32_pk_fp4_f32", "gfx950"): np.dtype(ml_dtypes.float4_e2m1fn),
    ("v_cvt_pk_bf16_f32", "gfx950"): np.dtype(ml_dtypes.bfloat16),
    ("v_cvt_pk_f16_f32", "gfx950"): np.dtype(np.float16),
}

# Bytes, and which half of the register they are; "": they are the register, zero-extended.
LOADS: Mapping[str, tuple[int, str]] = {
    "ubyte": (1, ""),
    "ushort": (2, ""),
    "ubyte_d16": (1, "low"),
    "ubyte_d16_hi": (1, "high"),
    "short_d16": (2, "low"),
    "short_d16_hi": (2, "high"),
    "dword": (4, ""),
    "dwordx2": (8, ""),
    "dwordx4": (16, ""),
    # LDS has other names.
    "u8": (1, ""),
    "u16": (2, ""),
    "u8_d16": (1, "low"),
    "u16_d16_hi": (2, "high"),
    "b32": (4, ""),
    "b64": (8, ""),
    "b128": (16, ""),
}
STORES: Mapping[str, tuple[int, str]] = {
    "byte": (1, ""),
    "byte_d16_hi": (1, "high"),
    "short": (2, ""),
    "short_d16_hi": (2, "high"),
    "dword": (4, ""),
    "dwordx2": (8, ""),
    "dwordx4": (16, ""),
    # LDS has other names.
    "b8": (1, ""),
    "b8_d16_hi": (1, "high"),
    "b16_d16_hi": (2, "high"),
    "b16": (2, ""),
    "b32": (4, ""),
    "b64": (8, ""),
    "b128": (16, ""),
}
