"""For `python -m jax_mx`: the losses of tensors that are quantized."""

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
from jax_mx.facts.formats import BLOCK

LARGE = 2**25  # bytes from which on a call takes longer than to launch it
NAME = 80  # characters of a tensor's name in a table
quantize = jax.jit(jax_mx.quantize, static_argnames=("format", "axis", "scaling", "implementation"))
_dequantize = jax.jit(jax_mx.dequantize, static_argnames=("dtype", "implementation"))
_copy = jax.jit(jnp.copy)


def measure(
    name: str, tensor: np.ndarray, axis: int, formats: Sequence[str], scalings: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The losses in each format and scaling; times of large tensors, unless on a CPU."""
    x = jax.device_put(tensor)
    timed = jax.default_backend() != "cpu" and x.nbytes >= LARGE
    copy = 2 * x.nbytes / ran.microseconds(_copy, x) * 1e6 if timed else 0.0
    for format in formats:
        for scaling in scalings:
            call = functools.partial(quantize, format=format, axis=axis, scaling=scaling)
            q, equal = call(x), None
            if here.support("quantize", next(iter(x.devices())), x, format, axis).kernels:
                equal = ran.same(q, call(x, implementation="xla"))
            us = ran.microseconds(call, x) if timed else None
            yield {
                "tensor": name,
                "shape": tensor.shape,
                "format": format,
                "scaling": scaling,
                **_losses(tensor, q),
                "ratio": q.nbytes / (2 * tensor.size),
                "equal": equal,
                "seconds": us and us / 1e6,
                "bandwidth": ((x.nbytes + q.nbytes) / us * 1e6, copy) if us else None,
            }


def dequantized(q: jax_mx.MXArray) -> np.ndarray:
    """The floats of an array, by the reference; NaN in blocks with a NaN or an infinity."""
    return np.asarray(_dequantize(q, dtype=jnp.float32, implementation="xla"), np.float64)


def _losses(tensor: np.ndarray, q: jax_mx.MXArray) -> dict[str, Any]:
    """The losses of a tensor in its finite blocks, by their names in JSON."""
    y = dequantized(q)
    finite = ~np.isnan(y)
    scales = np.repeat(np.asarray(q.scales, np.float64), BLOCK, q.axis)[finite]
    x, y = tensor[finite].astype(np.float64), y[finite]
    saturated = (np.abs(y) == q.format.max * scales) & (np.abs(x) > np.abs(y))
    snr, relative_error = errors(x, y)
    return {
        "snr": snr,
        "relative_error": relative_error,
        "saturated": float(saturated.mean()) if saturated.size else math.nan,
        "remark": remark(x, y),
    }


def errors(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The signal-to-noise ratio in dB and the largest relative error, of float64 arrays."""
    if not x.size:
        return math.nan, math.nan
    error = np.abs(x - y)
    signal, noise = np.sum(x**2), np.sum(error**2)
    with np.errstate(divide="ignore"):  # infinite noise: a value rounded beyond float32's range
        snr = 10 * np.log10(signal / noise) if noise else math.inf
    return float(snr), float((error[x != 0] / np.abs(x[x != 0])).max(initial=0))


def remark(x: np.ndarray, y: np.ndarray) -> str:
    """A text for errors that are not ordinary; empty for ordinary ones."""
    if not x.size:
        return "no finite block"
    if not x.any():
        return "all zero"
    if not y.any():
        return "all became zero"
    return "exact" if np.array_equal(x, y) else ""


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
