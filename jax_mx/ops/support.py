"""`is_supported`: what serves a call, and why no kernel does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.arrays.checks import flag, float_dtype, shown, whole, window_of, zero_scale_of
from jax_mx.facts import chips as chip_table
from jax_mx.facts.chips import ARCHS
from jax_mx.facts.formats import BLOCK, MXFP8_E4M3, RCEIL, Format, Scaling
from jax_mx.facts.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, ScaleLayout, ValueLayout
from jax_mx.facts.preprocessing import NO_PREPROCESSING
from jax_mx.facts.sources import Source
from jax_mx.facts.windows import Window
from jax_mx.lowering import registry, targets
from jax_mx.lowering.plan import Plan
from jax_mx.lowering.registry import Refusal, Support
from jax_mx.ops.activations import row_of
from jax_mx.ops.planning import Options, planned
from jax_mx.ops.preprocessing import Hadamard, Stochastic, pairs, preprocessing_of


def is_supported(
    op: str,
    device: jax.Device | str,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    format: Format | str = MXFP8_E4M3,
    axis: int = -1,
    ndim: int = 2,
    scaling: Scaling | str = RCEIL,
    scale_layout: ScaleLayout | str = ROW_MAJOR,
    transpose: bool = False,
    block: int | tuple[int, int] = BLOCK,
    zero_scale: int = 0,
    value_layout: ValueLayout | str = ROW_MAJOR_VALUES,
    rounding: Stochastic | tuple[Stochastic | None, Stochastic | None] | None = None,
    hadamard: Hadamard | tuple[Hadamard | None, Hadamard | None] | None = None,
    window: Window = BLOCK,
    rows: bool = False,
    activation: str | None = None,
    interleaved: bool = False,
    up: bool = False,
    gradient: bool = False,
    norm: bool = False,
    floats: bool = False,
    implementation: str | None = None,
) -> tuple[bool, str]:
    """Whether a kernel serves the call on `device`; if not, `implementation=None` takes "xla".

    Args:
      op: "quantize", "quantize_both" or "dequantize".
      device: a JAX device (JAX lowers for all of its kind in a process at once, so all of them
        count), or a chip's name ("sm_90", "gfx950"), or "cpu".
      dtype: of the unquantized side.
      format: see `quantize`; so are axis, scaling and scale_layout.
      axis: of an array of `ndim` dimensions.
      ndim: 1 to 64.
      scaling: no kernel depends on it.
      scale_layout: where scales lie.
      transpose: of quantize, of dequantize, or of quantize_both's second result.
      block: of quantize and dequantize, see `quantize`.
      zero_scale: of quantize and quantize_both.
      value_layout: of all results, or of dequantize's operand. No answer depends on it: what a
        kernel does not write or read in tiles, XLA moves.
      rounding: of quantize; of quantize_both for both directions or a pair; so is hadamard.
      hadamard: see `quantize`.
      window: of quantize and quantize_both; dequantize does not depend on it.
      rows: whether the call picks rows, of quantize and quantize_both.
      activation: the name of a `Gated`, of quantize and quantize_both; all gates, then all ups.
      interleaved: whether that `Gated` has gates and ups by turns.
      up: whether that `Gated` has an array of ups.
      gradient: whether that `Gated` has a gradient.
      norm: whether rows are normed first, as `rms_norm` does with a format.
      floats: whether what is quantized, of an activation or a norm, is given, too.
      implementation: this one only; "xla" serves every call.

    Returns:
      (True, "<implementation>: <name of the kernel>") or (False, the reason). The name of one per
      result, "along rows", where XLA transposes what they read, or puts into tiles what they give;
      "of floats that XLA makes", where it gathers rows, norms or computes an activation before.

    Raises:
      TypeError, ValueError: as for `quantize`; also for an unknown op or device.
    """
    op_name = "is_supported"
    try:
        ndim = whole(ndim)
    except TypeError as error:
        raise TypeError(f"{op_name}: ndim must be an int, got {shown(ndim)}") from error
    if not 1 <= ndim <= 64:
        raise ValueError(f"{op_name}: ndim must be 1 to 64, got {ndim}")
    both = [(rounding, hadamard)]
    if op == "quantize_both":
        both = pairs(op_name, rounding, hadamard, split=False)
    window = window_of(op_name, window)
    of_results = BLOCK if op == "dequantize" else window
    own = tuple(preprocessing_of(op_name, *two, of_results) for two in both)
    zero_scale = zero_scale_of(op_name, zero_scale)
    if op == "dequantize" and (own != (NO_PREPROCESSING,) or zero_scale):
        raise ValueError(
            "is_supported: rounding, hadamard and zero_scale are quantize's, dequantize has none"
        )
    # A length of whole blocks, transforms and tiles of values, whatever is asked for.
    like = jax.ShapeDtypeStruct((2 * BLOCK,) * ndim, float_dtype(op_name, "dtype", dtype))
    if op not in ("quantize", "quantize_both", "dequantize"):
        allowed = "'quantize', 'quantize_both' or 'dequantize'"
        raise ValueError(f"is_supported: op {op!r} is unknown; use {allowed}")
    n = 2 if op == "quantize_both" else 1
    asked = Options(
        formats=(format,) * n,
        axis=axis if n == 1 else -1,
        scaling=scaling,
        scale_layout=scale_layout,
        implementation=implementation,
        transpose=transpose if n == 1 else (False, transpose),
        block=block if n == 1 else BLOCK,
        zero_scale=zero_scale,
        value_layouts=(value_layout,) * n,
        preprocessing=own,
        source=source_of(
            op_name,
            rows=rows,
            activation=activation,
            interleaved=interleaved,
            apart=up,
            gradient=gradient,
            norm=norm,
            floats=floats,
        ),
    )
    if asked.source and (op == "dequantize" or ndim != 2):
        raise ValueError(
            f"{op_name}: rows, activations and norms are those of a matrix to quantize; use ndim=2"
        )
    plan = planned(op, like, asked)
    found = support_of(plan, device)
    if found.implementation == "xla" and implementation is None:
        refused = support_of(plan, device, kernels_only=True)
        return False, str(refused)
    return bool(found), str(found)


def source_of(op: str, *, activation: Any, **flags: Any) -> Source:
    """What makes the floats; what no kernel makes, too.

    Args:
      op: for messages.
      activation: a name, or None.
      flags: of a `Source`, as a caller gave them; `apart` by the name `up`.

    Raises:
      TypeError, ValueError: neither bools nor an activation's name, or not together.
    """
    known: dict[str, Any] = {
        name: flag(op, {"apart": "up"}.get(name, name), value) for name, value in flags.items()
    }
    own = Source(activation=activation or "", **known)
    if own.gradient and (own.rows or activation is None):
        raise ValueError(f"{op}: gradient is that of an activation without rows; give one")
    has_gate = activation is not None and row_of(op, activation).has_gate
    if own.interleaved and not has_gate:
        raise ValueError(
            f"{op}: interleaved is the order of an activation's gates and ups; give one"
        )
    if own.apart and (own.interleaved or own.gradient or not has_gate):
        raise ValueError(f"{op}: up is that of an activation alone, without a gradient; give one")
    if own.floats and (own.rows or own.gradient or not (own.norm or activation is not None)):
        raise ValueError(f"{op}: floats are those of an activation, or of a norm, alone; give one")
    return own


def support_of(plan: Plan, device: jax.Device | str, kernels_only: bool = False) -> Support:
    """What serves a plan on a device, or on a chip that is named.

    Args:
      plan: the call.
      device: see `is_supported`.
      kernels_only: whether to say why no kernel serves it, where "xla" would.

    Raises:
      TypeError, ValueError: the device is neither a device nor a chip's name.
    """
    if isinstance(device, str):
        chips = [next(iter(_chips_of_arch(device)), device)]
    elif isinstance(device, jax.Device):
        chips = targets.chips_beside(device)
    else:
        raise TypeError(f"is_supported: device must be a jax.Device or a chip, got {device!r}")
    platform = _platform_of(chips[0])
    if not kernels_only:
        return registry.chosen(plan, platform, chips)
    first = registry.candidates(plan, platform, chips)[0]
    if first.implementation == "xla":
        refusal = Refusal(plan.name, f"no kernels for {platform}")
        return Support(platform, refusal=refusal)
    return first


def _platform_of(chip: str) -> str:
    """JAX's platform that a chip belongs to.

    Raises:
      ValueError: it is no chip's name; a platform's has several chips.
    """
    try:
        return targets.platform_of(chip)
    except ValueError as error:
        dsl = chip_table.DSLS.get("cuda" if chip == "gpu" else chip)
        if dsl is None:
            raise ValueError(f"is_supported: {error}") from error
        known = ", ".join(chip_table.chips_of(dsl))
        raise ValueError(
            f"is_supported: {chip!r} is a platform, whose chips have different kernels; name one of"
            f" {known}, or give a jax.Device"
        ) from error


def _chips_of_arch(name: str) -> list[str]:
    """The chips that an arch serves, as its name is taken for one of theirs."""
    return [chip for archs in ARCHS.values() for chip in archs.get(name, ())]
