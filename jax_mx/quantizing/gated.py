"""`gated`: activations between products, as floats with a derivative and quantized."""

from typing import Any, NamedTuple, overload

import jax

from jax_mx.formats.checks import array_of, flag
from jax_mx.formats.formats import Format
from jax_mx.quantizing.activations import Gated, known, made, row_of
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.quantize import quantizer_of


class Activated(NamedTuple):
    """The result of `gated` with a format.

    Attributes:
      floats: (..., K), of gate_up's dtype, or None without `floats=True`. A NaN has the bits that
        `MXArray.dequantize` gives it.
      quantized: an `MXArray`; with `both`, a pair, as `quantize_both` gives it.
    """

    floats: jax.Array | None
    quantized: MXArray | tuple[MXArray, MXArray]


jax.export.register_namedtuple_serialization(Activated, serialized_name="jax_mx.Activated")


@overload
def gated(
    gate_up: jax.typing.ArrayLike,
    activation: str = "swiglu",
    *,
    weights: jax.typing.ArrayLike | None = None,
    up: jax.typing.ArrayLike | None = None,
    interleaved: bool = False,
) -> jax.Array: ...


@overload
def gated(
    gate_up: jax.typing.ArrayLike,
    activation: str = "swiglu",
    *,
    weights: jax.typing.ArrayLike | None = None,
    up: jax.typing.ArrayLike | None = None,
    interleaved: bool = False,
    format: Format | str,
    both: bool = False,
    floats: bool | None = None,
    **options: Any,
) -> Activated: ...


def gated(
    gate_up: jax.typing.ArrayLike,
    activation: str = "swiglu",
    *,
    weights: jax.typing.ArrayLike | None = None,
    up: jax.typing.ArrayLike | None = None,
    interleaved: bool = False,
    format: Format | str | None = None,
    both: bool = False,
    floats: bool | None = None,
    **options: Any,
) -> jax.Array | Activated:
    """act(gate) * up * weight, as an MLP computes between its products; a format quantizes it.

    The arithmetic is float32, and the result is rounded to gate_up's dtype at the end. A zero of
    its sign stands for each subnormal of float32. From bfloat16 every implementation gives the same
    bits: act(gate) is rounded to 9 bits before it is multiplied. So act(gate) itself is within 0.79
    units in the last place of bfloat16, and a product within 1.07. From float16 and float32
    act(gate) is computed in float64 and is within 0.51 units of float32. Its bits are the same
    everywhere but for TPUs and exact gelu; gate_up.astype(jnp.float32) gives any array these bits.

    The function is differentiable to gate_up, up and weights, in float32. From bfloat16 the bits of
    the gradients of gates and ups are defined. The slope of act is rounded to 8 bits, within 0.58
    units in the last place of bfloat16, and act to 9 as above. Products are rounded to bfloat16 at
    the end.

    Args:
      gate_up: bfloat16, float16 or float32 (..., 2 K): all gates, then all ups. For an activation
        without a gate, and with `up`, it is (..., K).
      activation: "swiglu" is silu(gate) up, "geglu" gelu(gate) up by tanh, "geglu_erf" the exact
        gelu(gate) up. "reglu" is relu(gate) up, "reglu2" relu(gate)^2 up, "bilinear" gate up.
        "gpt_oss" cuts the gate off above 7, and up beyond -7 and 7: gate sigmoid(1.702 gate) (up +
        1). Names without a gate are "silu", "gelu", "gelu_erf", "relu", "relu2" and "identity".
      weights: float32 (...,), the factors of rows, as a router computes them; or None.
      up: the ups, where gate_up has the gates alone; its dtype and shape are gate_up's.
      interleaved: whether gates and ups alternate along the last axis.
      format: of the quantized result, see `quantize`; None: the result is floats. NVIDIA's kernels
        compute and quantize "swiglu" and "gpt_oss" of one array, as a `Gated` does. From bfloat16
        to mxfp8_e4m3 and MXFP4 they also write the floats. In other cases XLA computes these first.
      both: whether `quantize_both` quantizes the result along its last two axes; otherwise
        `quantize` does along the last one.
      floats: whether a call with a format also returns the floats; they have a derivative, codes
        have none.
      options: other keywords of `quantize` or `quantize_both`; `activation` is none of them, and
        `rows` picks rows of the result.

    Returns:
      (..., K), of gate_up's dtype; with a format, an `Activated`.

    Raises:
      TypeError, ValueError: another dtype, an odd length, an unknown name, arrays that do not fit
        each other, options without a format.
      NotImplementedError: a caller takes a second derivative to gates or ups, or one of codes.
    """
    op = "gated"
    row_of(op, activation)
    up = None if up is None else array_of(op, "up", up)
    x, gate = array_of(op, "gate_up", gate_up), Gated(activation, weights, up, interleaved)
    quantizer = quantizer_of(op, format, both, options)
    if quantizer is None:
        if floats is not None:
            raise ValueError(f"{op}: floats come beside a format; drop floats, or give one")
        return made(op, x, gate)
    wanted = floats is not None and flag(op, "floats", floats)
    by_rows = options.get("rows") is not None  # of the result
    if not (wanted or by_rows):
        return Activated(None, quantizer(x, activation=gate))
    stop = jax.lax.stop_gradient if wanted else lambda y: y  # codes have no derivative
    fused = None if by_rows else stop(gate).of(op, x, floats=True)
    if fused is None:
        y = made(op, x, gate)
        return Activated(y if wanted else None, quantizer(stop(y)))
    *forms, y = quantizer(stop(x), activation=fused)
    y = known(y.reshape(gate.gates_of(op, x).shape), x, gate)
    return Activated(y, tuple(forms) if both else forms[0])
