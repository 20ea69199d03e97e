"""Gated activations in registers, of two bfloat16 at a time; see facts/activations.py."""

from cutlass import Float32, Uint32, cute
from cutlass.cutlass_dsl import dsl_user_op

from jax_mx.facts.activations import ACTIVATIONS, Rounding

# Of a float32 `g`, the part of an activation that depends on it, `t`; scratch: a, h, d, b, s, p. h
# is exp(-|g| / 2), whose square is multiplied in two steps, so that no factor is subnormal.
_PARTS = {
    "silu": "abs.f32 a, g; mul.rn.ftz.f32 h, a, 0fBF38AA3B; ex2.approx.ftz.f32 h, h; "
    "fma.rn.ftz.f32 d, h, h, 0f3F800000; rcp.approx.ftz.f32 d, d; setp.lt.f32 p, g, 0f00000000; "
    "selp.f32 b, h, 0f3F800000, p; mul.rn.ftz.f32 t, g, b; mul.rn.ftz.f32 s, b, d; "
    "mul.rn.ftz.f32 t, t, s; "
}
# Its derivative `v` by g, behind the part: of what that left in h, d, b, s and p.
_SLOPES = {
    "silu": "max.NaN.f32 a, g, 0fC3000000; min.NaN.f32 a, a, 0f43000000; mul.rn.ftz.f32 h, h, h; "
    "selp.f32 h, 0f3F800000, h, p; mul.rn.ftz.f32 h, h, d; fma.rn.ftz.f32 v, a, h, 0f3F800000; "
    "mul.rn.ftz.f32 v, v, b; mul.rn.ftz.f32 v, v, s; "
}
_LOW, _HIGH = "shl.b32 w, {word}, 16;", "and.b32 w, {word}, 0xFFFF0000;"


def _taken(name: str, word: str, half: int) -> str:
    """Instructions that make a float32 of a half of a word of bfloat16."""
    return f"{(_LOW, _HIGH)[half].format(word=word)} mov.b32 {name}, w; "


def _rounded(name: str, rounding: Rounding | None) -> str:
    """Instructions that leave it few bits where it is finite; others stay what they are."""
    if rounding is None:
        return ""
    return (
        f"abs.f32 a, {name}; setp.lt.f32 p, a, 0f7F800000; mov.b32 w, {name}; "
        f"@p add.u32 w, w, {rounding.up}; @p and.b32 w, w, {rounding.mask}; mov.b32 {name}, w; "
    )


_BEGIN = "{ .reg .f32 g, u, a, h, d, b, s, t, v, e, y0, y1, z0, z1; .reg .b32 w; .reg .pred p; "


@dsl_user_op
def gated(name: str, gates: Uint32, ups: Uint32, weight: Float32, *, loc=None, ip=None) -> Uint32:
    """A word of act(gate) * up * weight, bfloat16, of words of gates and of ups."""
    row = ACTIVATIONS[name]
    each = [
        f"{_taken('g', '{$r0}', i)}{_taken('u', '{$r1}', i)}{_PARTS[row.unary]}"
        f"{_rounded('t', row.rounding.part)}"
        f"mul.rn.ftz.f32 t, t, u; mul.rn.ftz.f32 y{i}, t, {{$r2}}; "
        for i in range(2)
    ]
    return cute.arch.inline_ptx(
        f"{_BEGIN}{''.join(each)}cvt.rn.bf16x2.f32 {{$w0}}, y1, y0; }}",
        write_only_types=[Uint32],
        read_only_args=[gates, ups, weight],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def gradients(
    name: str, gates: Uint32, ups: Uint32, weight: Float32, dy: Uint32, *, loc=None, ip=None
) -> list:
    """Words of the gradients of gates and of ups, of words of these and of the result's."""
    row = ACTIVATIONS[name]
    each = [
        f"{_taken('g', '{$r0}', i)}{_taken('u', '{$r1}', i)}{_taken('e', '{$r3}', i)}"
        f"{_PARTS[row.unary]}{_SLOPES[row.unary]}"
        f"{_rounded('t', row.rounding.part)}{_rounded('v', row.rounding.slope)}"
        f"mul.rn.ftz.f32 e, e, {{$r2}}; mul.rn.ftz.f32 v, v, u; mul.rn.ftz.f32 y{i}, e, v; "
        f"mul.rn.ftz.f32 z{i}, e, t; "
        for i in range(2)
    ]
    found = cute.arch.inline_ptx(
        f"{_BEGIN}{''.join(each)}cvt.rn.bf16x2.f32 {{$w0}}, y1, y0; "
        "cvt.rn.bf16x2.f32 {$w1}, z1, z0; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[gates, ups, weight, dy],
        loc=loc,
        ip=ip,
    )
    return [*found]
