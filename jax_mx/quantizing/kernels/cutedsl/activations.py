"""Gated activations in registers, a word at a time; see quantizing/facts/activations.py."""

import math
from collections.abc import Mapping

import numpy as np
from cutlass import Float32, Uint32, cute

from jax_mx.quantizing.facts.activations import ACTIVATIONS, EXP, SHARPNESS, Activation, Rounding
from jax_mx.quantizing.kernels.cutedsl import convert

_LOG2E = math.log2(math.e)


def _number(x: float) -> str:
    """A float32 as PTX has it."""
    return f"0f{int(np.float32(x).view(np.uint32)):08X}"


_ZERO, _ONE = _number(0.0), _number(1.0)
# x sigmoid(z), of h = exp(-|z| / 2), whose square is multiplied in two steps, so that no factor is
# subnormal; leaves b, s and d for the slope.
_BY_SIGMOID = (
    f"ex2.approx.ftz.f32 h, h; fma.rn.ftz.f32 d, h, h, {_ONE}; rcp.approx.ftz.f32 d, d; "
    f"setp.lt.f32 p, g, {_ZERO}; selp.f32 b, h, {_ONE}, p; "
    "mul.rn.ftz.f32 t, g, b; mul.rn.ftz.f32 s, b, d; mul.rn.ftz.f32 t, t, s; "
)


def _silu(sharpness: float) -> str:
    scale = _number(-sharpness * _LOG2E / 2)
    return f"abs.f32 a, g; mul.rn.ftz.f32 h, a, {scale}; {_BY_SIGMOID}"


# The part of an activation that depends on a float32 `g`, in `t`; the others are scratch.
_PARTS: Mapping[str, str] = {
    "silu": _silu(1.0),
    "sharp_silu": _silu(SHARPNESS),
}
# No slope depends on what is further from 0; a NaN stays.
_NEAR = f"max.NaN.f32 a, g, {_number(-128.0)}; min.NaN.f32 a, a, {_number(128.0)}; "


def _sigmoid_slope(dz: str) -> str:
    """Instructions behind a part by sigmoid; `dz` multiplies `a` by the derivative of z there."""
    return (
        f"{_NEAR}{dz}mul.rn.ftz.f32 h, h, h; selp.f32 h, {_ONE}, h, p; mul.rn.ftz.f32 h, h, d; "
        f"fma.rn.ftz.f32 v, a, h, {_ONE}; mul.rn.ftz.f32 v, v, b; mul.rn.ftz.f32 v, v, s; "
    )


# Its derivative `v` by g, behind the part: of what that left in h, d, b, s and p.
_SLOPES: Mapping[str, str] = {
    "silu": _sigmoid_slope(""),
    "sharp_silu": _sigmoid_slope(f"mul.rn.ftz.f32 a, a, {_number(SHARPNESS)}; "),
}


# ---- in float64, by the steps of `EXP` ---
def _double(x: float) -> str:
    """A float64 as PTX has it."""
    return f"0d{int(np.float64(x).view(np.uint64)):016X}"


_WHOLE = 1.5 * 2.0**52  # added to a number, it leaves whole ones in the low bits


def _masked(name: str, mask: int) -> str:
    return (
        f"mov.b64 {{lo, hi}}, {name}; and.b32 lo, lo, 0x{mask & 0xFFFFFFFF:08X}; "
        f"mov.b64 {name}, {{lo, hi}}; "
    )


# The magnitude of z, from the gate's, a float64 `size`.
_SIZES: Mapping[str, str] = {
    "silu": "",
    "sharp_silu": f"mul.rn.f64 size, size, {_double(SHARPNESS)}; {_masked('size', EXP.most)}",
}
# The dividend is finite, or the gate is not; a quotient of zeros loses its sign.
_DIVIDE = (
    f"rcp.approx.ftz.f64 y, below; neg.f64 m, below; fma.rn.f64 rest, m, y, {_double(1)}; "
    "fma.rn.f64 rest, rest, rest, rest; fma.rn.f64 y, y, rest, y; "
    f"fma.rn.f64 rest, m, y, {_double(1)}; fma.rn.f64 y, y, rest, y; "
    "mul.rn.f64 ratio, x, y; fma.rn.f64 rest, m, ratio, x; fma.rn.f64 ratio, rest, y, ratio; "
)


def _in_float64(unary: str) -> str:
    """Instructions that leave x sigmoid(z) of `g` in `t`."""
    inner, outer = EXP.inner, EXP.outer
    few = "".join(
        f"{_masked('total', EXP.few)}fma.rn.f64 total, total, y, {_double(c)}; " for c in inner[1:]
    )
    last = "".join(
        f"mul.rn.f64 total, total, rest; {_masked('total', EXP.most)}"
        f"add.rn.f64 total, total, {_double(c)}; "
        for c in outer
    )
    infinite = _number(math.inf)
    return (
        f"cvt.ftz.f64.f32 x, g; abs.f64 size, x; {_SIZES[unary]}"
        f"mul.rn.f64 m, size, {_double(EXP.log2e)}; add.rn.f64 m, m, {_double(_WHOLE)}; "
        f"mov.b64 {{w, hi}}, m; sub.rn.f64 m, m, {_double(_WHOLE)}; "
        f"fma.rn.f64 rest, m, {_double(-EXP.ln2)}, size; mov.f64 y, rest; {_masked('y', EXP.few)}"
        f"mov.f64 total, {_double(np.float32(inner[0]))}; {few}{last}"
        "mov.b64 {lo, hi}, total; shl.b32 w, w, 20; sub.u32 hi, hi, w; mov.b64 total, {lo, hi}; "
        f"setp.le.f64 p, size, {_double(EXP.far)}; selp.f64 total, total, {_double(0)}, p; "
        f"add.rn.f64 below, total, {_double(1)}; mul.rn.f64 m, x, total; "
        f"setp.lt.f32 p, g, {_ZERO}; selp.f64 x, m, x, p; {_DIVIDE}"
        f"cvt.rn.f32.f64 t, ratio; copysign.f32 t, g, t; setp.eq.f32 p, g, {infinite}; "
        f"selp.f32 t, {infinite}, t, p; "
    )


# ---- words ---
def _taken(name: str, word: str, half: int, dtype: str = "bfloat16") -> str:
    """Instructions that make a float32 of a half of a word, or of all of it."""
    if dtype == "float32":
        return f"mov.b32 {name}, {word}; "
    if dtype == "float16":
        return f"mov.b32 {{l, k}}, {word}; cvt.f32.f16 {name}, {'lk'[half]}; "
    move = (f"shl.b32 w, {word}, 16;", f"and.b32 w, {word}, 0xFFFF0000;")[half]
    return f"{move} mov.b32 {name}, w; "


def _rounded(name: str, rounding: Rounding | None) -> str:
    """Instructions that leave it few bits where it is finite; others stay what they are."""
    if rounding is None:
        return ""
    return (
        f"abs.f32 a, {name}; setp.lt.f32 p, a, 0f7F800000; mov.b32 w, {name}; "
        f"@p add.u32 w, w, {rounding.up}; @p and.b32 w, w, {rounding.mask}; mov.b32 {name}, w; "
    )


_BEGIN = (
    "{ .reg .f32 g, u, a, h, d, b, s, t, v, e, y0, y1, z0, z1; .reg .b32 w; .reg .pred p, q, r; "
)


def _cut(row: Activation) -> str:
    """Instructions that bring gate and up within the limit, and shift up.

    Where they were beyond it, q is true of the gate, and r of up.
    """
    clamps = ""
    if row.limit is not None:
        high, low = _number(row.limit), _number(-row.limit)
        clamps = (
            f"setp.gt.f32 q, g, {high}; abs.f32 a, u; setp.gt.f32 r, a, {high}; "
            f"min.NaN.f32 g, g, {high}; min.NaN.f32 u, u, {high}; max.NaN.f32 u, u, {low}; "
        )
    return clamps + f"add.rn.ftz.f32 u, u, {_number(row.shift)}; " * bool(row.shift)


def part(first, second) -> None:
    """Two fragments of words of gates and ups by turns, the second one behind: gates, and ups."""
    count = cute.size(first)
    pairs_of_both = [fragment[w] for fragment in (first, second) for w in range(count)]
    for w, pair in enumerate(zip(pairs_of_both[::2], pairs_of_both[1::2], strict=True)):
        first[w], second[w] = turned(*pair)


def turned(low: Uint32, high: Uint32) -> tuple[Uint32, Uint32]:
    """The lower halves of two words, and their upper halves; its own inverse.

    It turns two words of a gate and an up each into words of two gates and of two ups.
    """
    return convert.bytes_of(low, high, 0x5410), convert.bytes_of(low, high, 0x7632)


def gated(name: str, gates: Uint32, ups: Uint32, weight: Float32, dtype: str) -> Uint32:
    """A word of act(gate) * up * weight, of words of gates and of ups, all of this dtype."""
    row = ACTIVATIONS[name]
    begin, part = _BEGIN, f"{_PARTS[row.unary]}{_rounded('t', row.rounding.part)}"
    if dtype != "bfloat16":
        begin += ".reg .f64 x, size, m, rest, y, ratio, below, total; "
        begin += ".reg .b32 lo, hi; .reg .b16 l, k; "
        part = _in_float64(row.unary)
    elements = [
        f"{_taken('g', '{$r0}', i, dtype)}{_taken('u', '{$r1}', i, dtype)}{_cut(row)}{part}"
        f"mul.rn.ftz.f32 t, t, u; mul.rn.ftz.f32 y{i}, t, {{$r2}}; "
        for i in range(1 if dtype == "float32" else 2)
    ]
    end = {
        "float32": "mov.b32 {$w0}, y0; }",
        "float16": "cvt.rn.f16x2.f32 {$w0}, y1, y0; }",
        "bfloat16": "cvt.rn.bf16x2.f32 {$w0}, y1, y0; }",
    }[dtype]
    return convert.ptx(f"{begin}{''.join(elements)}{end}", Uint32, gates, ups, weight)


def sums(words: list) -> list:
    """The bits of the sums of words' lower halves, and of their upper ones, all bfloat16.

    Neighbours are added, then neighbours of these, and so on.
    """
    names = [f"f{i}" for i in range(len(words))]
    code = f"{{ .reg .b32 w; .reg .f32 {', '.join(names)}; "
    for half in range(2):
        code += "".join(_taken(f, f"{{$r{i}}}", half) for i, f in enumerate(names))
        left = names
        while len(left) > 1:
            pairs = [*zip(left[::2], left[1::2], strict=True)]
            code += "".join(f"add.rn.ftz.f32 {a}, {a}, {b}; " for a, b in pairs)
            left = left[::2]
        code += f"mov.b32 {{$w{half}}}, {left[0]}; "
    totals = convert.ptx(f"{code}}}", [Uint32] * 2, *words)
    return [*totals]


def plus(a: Uint32, b: Uint32) -> Uint32:
    """The bits of the sum of two float32, a zero for a subnormal."""
    code = (
        "{ .reg .f32 a, b; mov.b32 a, {$r0}; mov.b32 b, {$r1}; add.rn.ftz.f32 a, a, b; "
        "mov.b32 {$w0}, a; }"
    )
    return convert.ptx(code, Uint32, a, b)


def gradients(name: str, gates: Uint32, ups: Uint32, weight: Float32, dy: Uint32) -> list:
    """Words of the gradients of gates and of ups, of words of these and of the result's."""
    row = ACTIVATIONS[name]
    beyond = ""
    if row.limit is not None:
        beyond = (
            f"selp.f32 v, {_ZERO}, v, q; selp.f32 a, {_ZERO}, {_ONE}, r; mul.rn.ftz.f32 t, t, a; "
        )
    elements = [
        f"{_taken('g', '{$r0}', i)}{_taken('u', '{$r1}', i)}{_taken('e', '{$r3}', i)}"
        f"{_cut(row)}{_PARTS[row.unary]}{_SLOPES[row.unary]}"
        f"{_rounded('t', row.rounding.part)}{_rounded('v', row.rounding.slope)}{beyond}"
        f"mul.rn.ftz.f32 e, e, {{$r2}}; mul.rn.ftz.f32 v, v, u; mul.rn.ftz.f32 y{i}, e, v; "
        f"mul.rn.ftz.f32 z{i}, e, t; "
        for i in range(2)
    ]
    code = (
        f"{_BEGIN}{''.join(elements)}cvt.rn.bf16x2.f32 {{$w0}}, y1, y0; "
        "cvt.rn.bf16x2.f32 {$w1}, z1, z0; }"
    )
    results = convert.ptx(code, [Uint32] * 2, gates, ups, weight, dy)
    return [*results]
