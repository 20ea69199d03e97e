"""Gated activations in registers, of two bfloat16 at a time; see facts/activations.py."""

from cutlass import Float32, Uint32, cute
from cutlass.cutlass_dsl import dsl_user_op

from jax_mx.facts.activations import ACTIVATIONS

# Of a float32 `g`, the part of an activation that depends on it, `t`; scratch: a, h, d, p. h is
# exp(-|g| / 2), whose square is multiplied in two steps, so that no factor is subnormal.
_PARTS = {
    "silu": "abs.f32 a, g; mul.rn.ftz.f32 h, a, 0fBF38AA3B; ex2.approx.ftz.f32 h, h; "
    "fma.rn.ftz.f32 d, h, h, 0f3F800000; rcp.approx.ftz.f32 d, d; setp.lt.f32 p, g, 0f00000000; "
    "selp.f32 h, h, 0f3F800000, p; mul.rn.ftz.f32 t, g, h; mul.rn.ftz.f32 d, h, d; "
    "mul.rn.ftz.f32 t, t, d; "
}


@dsl_user_op
def gated(name: str, gates: Uint32, ups: Uint32, weight: Float32, *, loc=None, ip=None) -> Uint32:
    """A word of act(gate) * up * weight, bfloat16, of words of gates and of ups."""
    row = ACTIVATIONS[name]
    rounding = row.rounding.part
    assert rounding is not None
    # Rounded where it is finite: others must stay what they are.
    round_ = (
        "abs.f32 a, t; setp.lt.f32 p, a, 0f7F800000; mov.b32 w, t; "
        f"@p add.u32 w, w, {rounding.up}; @p and.b32 w, w, {rounding.mask}; mov.b32 t, w; "
    )
    each = [
        f"{take[0]} mov.b32 g, w; {take[1]} mov.b32 u, w; {_PARTS[row.unary]}{round_}"
        f"mul.rn.ftz.f32 t, t, u; mul.rn.ftz.f32 y{i}, t, {{$r2}}; "
        for i, take in enumerate(
            [("shl.b32 w, {$r0}, 16;", "shl.b32 w, {$r1}, 16;"),
             ("and.b32 w, {$r0}, 0xFFFF0000;", "and.b32 w, {$r1}, 0xFFFF0000;")]
        )
    ]  # fmt: skip
    return cute.arch.inline_ptx(
        "{ .reg .f32 g, u, a, h, d, t, y0, y1; .reg .b32 w; .reg .pred p; "
        f"{''.join(each)}cvt.rn.bf16x2.f32 {{$w0}}, y1, y0; }}",
        write_only_types=[Uint32],
        read_only_args=[gates, ups, weight],
        loc=loc,
        ip=ip,
    )
