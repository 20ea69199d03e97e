"""`is_supported`: the kernel that serves a call, or why there is none."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.formats.checks import flag, float_dtype, shown, whole, window_of, zero_scale_of
from jax_mx.formats.formats import BLOCK, MXFP8_E4M3, RCEIL, Format, Scaling
from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, ScaleLayout, ValueLayout
from jax_mx.formats.windows import ROW, Window
from jax_mx.launch import chips as chip_table
from jax_mx.launch import targets
from jax_mx.launch.chips import ARCHS
from jax_mx.quantizing import registry
from jax_mx.quantizing.activations import Gated, row_of
from jax_mx.quantizing.facts.activations import GATED
from jax_mx.quantizing.facts.preprocessing import NO_PREPROCESSING
from jax_mx.quantizing.facts.sources import Source, X
from jax_mx.quantizing.plan import Plan
from jax_mx.quantizing.planning import Options, planned
from jax_mx.quantizing.preprocessing import Hadamard, Stochastic, pairs, preprocessing_of
from jax_mx.quantizing.quantizers import takes_amaxes
from jax_mx.quantizing.registry import Refusal, Support
from jax_mx.quantizing.sources.gated import GatedSource
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.quantizing.sources.gated_pair import GatedPairSource
from jax_mx.quantizing.sources.rows import RowsSource


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
    source: Gated | Source | None = None,
    implementation: str | None = None,
    **made_of: Any,
) -> tuple[bool, str]:
    """Whether a kernel serves the call on `device`; if not, `implementation=None` takes "xla".

    Args:
      op: "quantize", "quantize_both" or "dequantize".
      device: a JAX device, a chip's name ("sm_90", "gfx950"), or "cpu". JAX lowers for all devices
        of a kind in a process at once, so all of them count.
      dtype: of the unquantized side.
      format: see `quantize`.
      axis: of an array of `ndim` dimensions.
      ndim: 1 to 64.
      scaling: no kernel depends on it.
      scale_layout: where scales lie.
      transpose: of quantize, of dequantize, or of quantize_both's second result.
      block: of quantize and dequantize, see `quantize`.
      zero_scale: of quantize and quantize_both.
      value_layout: of all results, or of dequantize's operand. No answer depends on it: XLA moves
        values into tiles where a kernel does not.
      rounding: of quantize; of quantize_both for both directions or a pair.
      hadamard: as for rounding.
      window: of quantize and quantize_both; dequantize does not depend on it.
      source: of the floats, for quantize and quantize_both: a `Gated`, whose arrays do not matter,
        or a class of `jax_mx.quantizing.sources`.
      implementation: this one only; "xla" serves every call.
      made_of: the same as `source` in words: `rows`, `norm`, `activation` (a name) with
        `interleaved`, `up` and `gradient`; `floats` asks for the floats, too.

    Returns:
      (True, "<implementation>: <name of the kernel>") or (False, the reason). "along rows" follows
      the name of one kernel per result, where XLA transposes their operand or puts their results
      into tiles. "of floats that XLA makes" follows where XLA gathers rows, norms or computes an
      activation first.

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
    of_operands = tuple(preprocessing_of(op_name, *two, of_results) for two in both)
    zero_scale = zero_scale_of(op_name, zero_scale)
    if op == "dequantize" and (of_operands != (NO_PREPROCESSING,) or zero_scale):
        raise ValueError(
            "is_supported: rounding, hadamard and zero_scale are quantize's, dequantize has none"
        )
    # A length of whole blocks, transforms and tiles of values, whatever is asked for.
    abstract = jax.ShapeDtypeStruct((2 * BLOCK,) * ndim, float_dtype(op_name, "dtype", dtype))
    if op not in ("quantize", "quantize_both", "dequantize"):
        allowed = "'quantize', 'quantize_both' or 'dequantize'"
        raise ValueError(f"is_supported: op {op!r} is unknown; use {allowed}")
    n = 2 if op == "quantize_both" else 1
    makes_floats, by_xla = source_of(op_name, source, made_of, window)
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
        preprocessing=of_operands,
        source=makes_floats,
    )
    if (makes_floats or by_xla) and (op == "dequantize" or ndim != 2):
        raise ValueError(
            f"{op_name}: rows, activations and norms are those of a matrix to quantize; use ndim=2"
        )
    plan = planned(op, abstract, asked)
    served = support_of(plan, device)
    if served.implementation == "xla" and implementation is None:
        refused = support_of(plan, device, kernels_only=True)
        return False, str(refused)
    served = dataclasses.replace(
        served, via_floats=served.via_floats or (by_xla and bool(served.kernels))
    )
    return bool(served), str(served)


# `is_supported` takes these flags, or a source.
_WORDS = ("rows", "norm", "interleaved", "up", "gradient", "floats")


def source_of(
    op: str, source: Any, made_of: dict[str, Any], window: Window = BLOCK
) -> tuple[Source, bool]:
    """The source of the floats, and whether XLA computes them on every chip.

    Args:
      op: for messages.
      source: see `is_supported`.
      made_of: the words of a caller, see `is_supported`.
      window: of what is quantized.

    Raises:
      TypeError, ValueError: source and words are unknown, or do not go together.
    """
    if unknown := {*made_of} - {*_WORDS, "activation"}:
        raise TypeError(f"{op} has no argument {', '.join(sorted(unknown))}")
    if source is not None and made_of:
        raise ValueError(f"{op}: source says what makes the floats; drop {', '.join(made_of)}")
    if isinstance(source, Source):
        return source.kernel, False
    if isinstance(source, Gated):
        arrays = {name: getattr(source, name) is not None for name in ("up", "gradient")}
        made_of = {"activation": source.name, "interleaved": source.interleaved, **arrays}
    elif source is not None:
        raise TypeError(f"{op}: source must be a Gated or a source, got {shown(source)}")
    return _of_words(op, made_of, window)


def _of_words(op: str, made_of: dict[str, Any], window: Window) -> tuple[Source, bool]:
    """`source_of` in words.

    Raises:
      TypeError, ValueError: see there.
    """
    activation = made_of.get("activation")
    values = {word: flag(op, word, made_of.get(word, False)) for word in _WORDS}
    has_gate = activation is not None and row_of(op, activation).has_gate
    _check_words(op, activation, has_gate, **values)
    rows, norm, interleaved, up, gradient, floats = values.values()
    if up and window == ROW and activation in GATED:
        return GatedPairSource(activation), False
    by_xla = up or activation not in (None, *GATED)
    if by_xla or [rows, norm, activation is not None].count(True) > 1:
        return X, True
    if rows:
        return RowsSource(), False
    if norm:
        sources: dict[str, Any] = {source.word: source for source in Source.__subclasses__()}
        return sources["rms_norm"](floats=floats), False  # of a room above this one
    if activation is None:
        return X, False
    if gradient:
        return GradientSource(activation, interleaved), False
    return GatedSource(activation, interleaved, floats), False


def _check_words(
    op: str, activation: Any, has_gate: bool, *, rows: bool, norm: bool, interleaved: bool,
    up: bool, gradient: bool, floats: bool,
) -> None:  # fmt: skip
    """Insists that the words of a source go together.

    Raises:
      ValueError: they do not.
    """
    for wrong, problem in (
        (gradient and (rows or activation is None),
         "gradient is that of an activation without rows"),
        (interleaved and not has_gate, "interleaved is the order of an activation's gates and ups"),
        (up and (interleaved or gradient or not has_gate),
         "up is that of an activation alone, without a gradient"),
        (floats and (rows or gradient or not (norm or activation is not None)),
         "floats are those of an activation, or of a norm, alone"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"{op}: {problem}; give one")


def support_of(plan: Plan, device: jax.Device | str, kernels_only: bool = False) -> Support:
    """The implementation that serves a plan on a device, or on the chip of a name.

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
    if takes_amaxes(plan):  # a kernel that finds them itself comes first
        choice = registry.chosen(plan.finding, platform, chips)
        if choice.is_direct:
            return choice
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
