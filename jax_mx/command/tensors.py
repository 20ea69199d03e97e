"""For `python -m jax_mx`: the losses of tensors that are quantized."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mx
from jax_mx.command import here, ran
from jax_mx.command.output import Table
from jax_mx.command.samples import Sample
from jax_mx.formats.formats import BLOCK

LARGE = 2**25  # bytes from which on a call takes longer than to launch it
NAME = 80  # characters of a tensor's name in a table
quantize = jax.jit(jax_mx.quantize, static_argnames=("format", "axis", "scaling", "implementation"))
_dequantize = jax.jit(jax_mx.dequantize, static_argnames=("dtype", "implementation"))
_copy = jax.jit(jnp.copy)


def measure(
    name: str, sample: Sample, formats: Sequence[str], scalings: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The losses in each format and scaling; times of large tensors, unless on a CPU."""
    calls = {
        (format, scaling): functools.partial(
            quantize, format=format, axis=sample.axis, scaling=scaling
        )
        for format in formats
        for scaling in scalings
    }
    losses = {pair: Losses() for pair in calls}
    for part in sample.parts():
        tensor = part.whole()
        x = jax.device_put(tensor)
        for pair, call in calls.items():
            q, equal = call(x), None
            if here.support("quantize", next(iter(x.devices())), x, pair[0], part.axis).kernels:
                equal = ran.same(q, call(x, implementation="xla"))
            losses[pair].add(tensor, q, equal)
    nbytes = sample.tensor.size * sample.dtype.itemsize
    x = copy = None
    if jax.default_backend() != "cpu" and nbytes >= LARGE:
        x = jax.device_put(sample.whole())
        copy = 2 * nbytes / ran.microseconds(_copy, x) * 1e6
    for (format, scaling), call in calls.items():
        loss = losses[format, scaling]
        us = ran.microseconds(call, x) if x is not None else None
        yield {
            "tensor": name,
            "shape": sample.tensor.shape,
            "format": format,
            "scaling": scaling,
            **loss.named(),
            "ratio": loss.nbytes / (2 * sample.tensor.size),
            "equal": loss.equal,
            "seconds": us and us / 1e6,
            "bandwidth": ((nbytes + loss.nbytes) / us * 1e6, copy) if us else None,
        }


def dequantized(q: jax_mx.MXArray) -> np.ndarray:
    """The floats of an array, by the reference; NaN in blocks with a NaN or an infinity."""
    return np.asarray(_dequantize(q, dtype=jnp.float32, implementation="xla"), np.float64)


@dataclasses.dataclass
class Losses:
    """The losses of a tensor that is quantized, in its finite blocks; part after part.

    Attributes:
      elements, saturated: their numbers.
      signal, noise: sums of squares, of elements and of errors.
      relative_error: the largest.
      zero, became_zero: whether all elements are zero, and what became of them.
      nbytes: of codes and scales.
      equal: whether the bytes equal the reference's; None where the reference ran itself.
    """

    elements: int = 0
    saturated: int = 0
    signal: float = 0.0
    noise: float = 0.0
    relative_error: float = 0.0
    zero: bool = True
    became_zero: bool = True
    nbytes: int = 0
    equal: bool | None = None

    def add(self, tensor: np.ndarray, q: jax_mx.MXArray, equal: bool | None = None) -> None:
        """Adds a part, and what it became."""
        y = dequantized(q)
        finite = ~np.isnan(y)
        scales = np.repeat(np.asarray(q.scales, np.float64), BLOCK, q.axis)[finite]
        x, y = tensor[finite].astype(np.float64), y[finite]
        largest = np.abs(y) == q.format.max * scales
        self.saturated += int(np.count_nonzero(largest & (np.abs(x) > np.abs(y))))
        self.nbytes += q.nbytes
        if equal is not None:
            self.equal = equal and self.equal is not False
        self.compare(x, y)

    def compare(self, x: np.ndarray, y: np.ndarray) -> None:
        """Adds finite elements and what they became, both in float64."""
        error = np.abs(x - y)
        self.elements += x.size
        self.signal += float(np.sum(x**2))
        self.noise += float(np.sum(error**2))
        there = x != 0
        worst = float((error[there] / np.abs(x[there])).max(initial=0))
        self.relative_error = max(self.relative_error, worst)
        self.zero = self.zero and not there.any()
        self.became_zero = self.became_zero and not y.any()

    @property
    def snr(self) -> float:
        """The signal-to-noise ratio in dB."""
        if not self.elements:
            return math.nan
        if not self.signal or not self.noise:
            return math.inf if not self.noise else -math.inf
        return 10 * math.log10(self.signal / self.noise) if self.noise < math.inf else -math.inf

    @property
    def remark(self) -> str:
        """A text for errors that are not ordinary; empty for ordinary ones."""
        if not self.elements:
            return "no finite block"
        if self.zero:
            return "all zero"
        if self.noise == math.inf:
            return "became infinite"
        if self.became_zero:
            return "all became zero"
        return "" if self.noise else "exact"

    def named(self) -> dict[str, Any]:
        """The losses by their names in JSON."""
        none = not self.elements
        return {
            "snr": self.snr,
            "relative_error": math.nan if none else self.relative_error,
            "saturated": math.nan if none else self.saturated / self.elements,
            "remark": self.remark,
        }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each tensor, format and scaling; times where some tensor has them."""
    names = ["tensor", "shape", "format", "scaling", "SNR dB", "max rel error", "saturated %"]
    names += ["bytes / bf16", "bytes equal reference"]
    if any(row["seconds"] for row in rows):
        names += ["us", "GB/s vs copy"]
    return names, [_cells(row)[: len(names)] for row in rows]


def _short(name: str) -> str:
    """A name that leaves room for the other columns: its begin and its end."""
    return name if len(name) <= NAME else f"{name[: NAME // 2]}...{name[-NAME // 2 + 3 :]}"


def _cells(row: dict[str, Any]) -> list[str]:
    snr = f"{row['snr']:.1f}" if math.isfinite(row["snr"]) else row["remark"]
    return [
        _short(row["tensor"]),
        " x ".join(map(str, row["shape"])),
        row["format"],
        row["scaling"],
        snr,
        f"{row['relative_error']:.3g}",
        f"{100 * row['saturated']:.2f}",
        f"{row['ratio']:.3f}",
        ran.verdict(row["equal"]),
        f"{row['seconds'] * 1e6:.1f}" if row["seconds"] else "",
        " vs ".join(f"{speed / 1e9:.3g}" for speed in row["bandwidth"] or ()),
    ]
