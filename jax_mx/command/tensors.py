"""For `python -m jax_mx`: what quantizing loses of tensors."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mx
from jax_mx.command import here, ran, samples
from jax_mx.command.output import Column

LARGE = 2**25  # bytes from which on a call takes longer than to launch it

COLUMNS = (
    Column("tensor"),
    Column("shape", optional=2),
    Column("format"),
    Column("scaling"),
    Column("SNR dB", number=True),
    Column("max rel error", number=True),
    Column("saturated %", number=True, optional=1),
    Column("bytes / bf16", number=True, optional=4),
    Column("bytes equal reference", optional=3),
)
TIMES = (Column("us", number=True, optional=6), Column("GB/s vs copy", number=True, optional=5))

_CHOICES = ("format", "axis", "scaling", "implementation")
quantize = jax.jit(jax_mx.quantize, static_argnames=_CHOICES)
dequantize = jax.jit(jax_mx.dequantize, static_argnames=("dtype", "implementation"))
_copy = jax.jit(jnp.copy)


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor in one format and scaling. Blocks with a NaN or an infinity are left out.

    Attributes:
      tensor: its name.
      shape: its shape.
      format: the format's name.
      scaling: the scaling's name.
      snr: the signal-to-noise ratio in dB; infinite where nothing is lost, NaN where no block is
        finite.
      relative_error: the largest, of nonzero elements.
      saturated: the share of elements that are larger than the format's largest over their scale.
      ratio: bytes of values and scales to those in bfloat16.
      remark: what the numbers do not say.
      equal: whether the bytes are the reference's; None: it is the reference.
      seconds: of a call; None where it was not measured.
      bandwidth: bytes in a second, the call's and a copy's; None where it was not measured.
    """

    tensor: str
    shape: tuple[int, ...]
    format: str
    scaling: str
    snr: float
    relative_error: float
    saturated: float
    ratio: float
    remark: str
    equal: bool | None
    seconds: float | None
    bandwidth: tuple[float, float] | None

    def cells(self) -> list[str]:
        """As the table shows it."""
        cells = [self.tensor, " x ".join(map(str, self.shape)), self.format, self.scaling]
        snr = f"{self.snr:.1f}" if math.isfinite(self.snr) else self.remark
        cells += [snr, f"{self.relative_error:.3g}", f"{100 * self.saturated:.2f}"]
        cells += [f"{self.ratio:.3f}", ran.verdict(self.equal)]
        if self.seconds is not None and self.bandwidth is not None:
            cells.append(f"{self.seconds * 1e6:.1f}")
            cells.append(" vs ".join(f"{b / 1e9:.3g}" for b in self.bandwidth))
        else:
            cells += ["", ""]
        return cells


def measure(
    name: str, tensor: np.ndarray, axis: int, formats: Sequence[str], scalings: Sequence[str]
) -> Iterator[Row]:
    """A row for each format and scaling; times of large tensors, unless on a CPU."""
    x = jax.device_put(tensor)
    timed = jax.default_backend() != "cpu" and x.nbytes >= LARGE
    copy = 2 * x.nbytes / ran.microseconds(_copy, x) * 1e6 if timed else 0.0
    for format in formats:
        for scaling in scalings:
            call = {"format": format, "axis": axis, "scaling": scaling}
            q = quantize(x, **call)
            us = ran.microseconds(functools.partial(quantize, **call), x) if timed else None
            yield Row(
                name,
                tensor.shape,
                format,
                scaling,
                **_losses(tensor, q),
                ratio=q.nbytes / (2 * tensor.size),
                equal=_equals_reference(q, x, call),
                seconds=us and us / 1e6,
                bandwidth=((x.nbytes + q.nbytes) / us * 1e6, copy) if us else None,
            )


def _losses(tensor: np.ndarray, q: jax_mx.MXArray) -> dict[str, Any]:
    """What q has lost of a tensor, by the names that a row has for it."""
    dequantized = np.asarray(dequantize(q, dtype=jnp.float32, implementation="xla"), np.float64)
    finite = ~np.isnan(dequantized)
    kept, x = dequantized[finite], tensor[finite].astype(np.float64)
    snr, relative_error = samples.errors(x, kept)
    largest = samples.magnitudes(q)[finite] == q.format.max_code
    saturated = largest & (np.abs(x) > np.abs(kept))
    return {
        "snr": snr,
        "relative_error": relative_error,
        "saturated": float(saturated.mean()) if saturated.size else math.nan,
        "remark": remark(x, kept),
    }


def remark(x: np.ndarray, dequantized: np.ndarray) -> str:
    """What to know of the errors, where they are not ordinary ones."""
    if not x.size:
        return "no finite block"
    if not x.any():
        return "all zero"
    if not dequantized.any():
        return "all became zero"
    return "exact" if np.array_equal(x, dequantized) else ""


def _equals_reference(q: jax_mx.MXArray, x: jax.Array, call: dict[str, Any]) -> bool | None:
    device = next(iter(x.devices()))
    if not here.support("quantize", device, x, call["format"], call["axis"]).kernels:
        return None
    return ran.same(q, quantize(x, implementation="xla", **call))
