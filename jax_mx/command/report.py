"""`python -m jax_mx`: what this installation runs on this machine, and what MX does to tensors."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mx
from jax_mx.command import samples as _samples
from jax_mx.facts.chips import ARCHS, dsl_of
from jax_mx.facts.formats import BLOCK, FLOAT_DTYPES, FORMATS, SCALINGS
from jax_mx.lowering import store as store
from jax_mx.lowering.primitive import chip_of

PROGRAM = "python -m jax_mx"
VERIFIED = Path(jax_mx.__file__).with_name("verified.json")
# What the extra `cli` brings: the modules, and what their distributions are called.
EXTRA = {"rich": "rich", "safetensors": "safetensors", "sklearn": "scikit-learn"}
EMULATOR = ("elftools", "msgpack", "tinygrad")  # modules of the extra `emulator`
CALLS, REPEATS = 20, 7  # timing: the median of REPEATS batches of CALLS calls
DEFAULTS = {"format": ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1"], "scaling": ["rceil", "floor"]}

SETUP = ("op", "devices", "formats", "takes", "why")
BINARIES = ("arch", "binaries", "state", "fits")
NUMBERS = ("SNR dB", "max rel error", "saturated %", "bytes / bf16")
TENSORS = ("tensor", "shape", "format", "scaling", *NUMBERS, "bytes equal reference")
SPEED = ("us", "GB/s vs copy")

DESCRIPTION = """\
Says what jax_mx runs on this machine, then quantizes tensors and shows what is lost: by default
those of a small network, trained for a moment on scikit-learn's digits."""
EPILOG = f"""\
columns of the last table:
  SNR dB         10 log10(sum x^2 / sum (x - dequantized)^2), in float64; inf: exact
  max rel error  largest |x - dequantized| / |x| of a nonzero element; 1: it became zero
  saturated %    elements that hold the format's largest magnitude
  bytes / bf16   values and scales, against two bytes an element
  bytes equal reference
                 what implementation=None gives, against implementation="xla"
  us             wall clock of a jitted call, median of {REPEATS} batches of {CALLS}; not on CPU
  GB/s vs copy   bytes read and written a second, and those of a copy of the tensor; not on CPU

A tensor or file that cannot be quantized gets a sentence on stderr, and the run goes on.
Exit status: 0 if a tensor was quantized and no bytes differ, 2 for bad options, else 1.

examples:
  {PROGRAM} --file model.safetensors --format mxfp4_e2m1 --scaling even
  {PROGRAM} --file gradients.npz --axis 0 --dtype float32
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor in one format and scaling. Blocks with a NaN or an infinity are left out."""

    tensor: str
    shape: tuple[int, ...]
    format: str
    scaling: str
    snr: float  # dB; infinite: exact; NaN: no block is finite
    relative_error: float  # the largest, of nonzero elements
    saturated: float  # share of the elements
    ratio: float  # of the bytes to those in bfloat16
    equal: bool | None  # to the reference's bytes; None: it is the reference
    seconds: float | None  # of a call; None where it is not measured
    bandwidth: tuple[float, float] | None  # bytes in a second: the call's, a copy's

    def cells(self) -> list[str]:
        """As the table shows it."""
        cells = [self.tensor, " x ".join(map(str, self.shape)), self.format, self.scaling]
        cells += [f"{self.snr:.1f}", f"{self.relative_error:.3g}", f"{100 * self.saturated:.2f}"]
        cells.append(f"{self.ratio:.3f}")
        cells.append({None: "is the reference", True: "equal", False: "DIFFERENT"}[self.equal])
        if self.seconds is not None and self.bandwidth is not None:
            cells.append(f"{self.seconds * 1e6:.1f}")
            cells.append(" vs ".join(f"{b / 1e9:.3g}" for b in self.bandwidth))
        return cells


# ---- what runs here ---
def taken(op: str, device: jax.Device, **call: Any) -> tuple[str, str]:
    """The implementation that `implementation=None` takes on `device`, and why."""
    supported, why = jax_mx.is_supported(op, device, **call)
    if not supported:
        return "xla", why
    implementation, kernel = why.split(": ")
    return implementation, f"kernel {kernel}"


def devices() -> dict[str, jax.Device]:
    """One device of each kind that JAX sees, by a label: "8 x NVIDIA H200 (sm_90)"."""
    kinds = Counter((d.device_kind, chip_of(d)) for d in jax.devices())
    one = {(d.device_kind, chip_of(d)): d for d in reversed(jax.devices())}
    return {
        f"{n} x {kind}" + (f" ({chip})" if chip != kind else ""): one[kind, chip]
        for (kind, chip), n in kinds.items()
    }


def implementations(options: argparse.Namespace) -> Iterator[list[str]]:
    """Rows of SETUP; formats with the same answer share one."""
    dtype = FLOAT_DTYPES[options.dtype]
    along = {"axis": options.axis, "ndim": max(2, options.axis + 1, -options.axis)}
    calls = {"quantize": along, "quantize_both": {"transpose": True}, "dequantize": along}
    for label, device in devices().items():
        for op, call in calls.items():
            answers: dict[tuple[str, str], list[str]] = {}
            for format in options.format:
                answer = taken(op, device, dtype=dtype, format=format, **call)
                answers.setdefault(answer, []).append(format)
            for answer, formats in answers.items():
                yield [op, label, ", ".join(formats), *answer]


def binaries() -> Iterator[list[str]]:
    """Rows of BINARIES: what this installation holds."""
    verified = json.loads(VERIFIED.read_text()) if VERIFIED.exists() else {}
    fits = {chip_of(device): label for label, device in devices().items()}
    count: Counter[tuple[str, str]] = Counter()
    for name, facts in store.manifest().items():
        record = verified.get(name, {})
        chips = record.get("executed_on") if record.get("sha256") == facts["sha256"] else None
        state = f"executed on {', '.join(chips)}" if chips else "compiled only"
        state = "executed in emulation" if chips == ["emulated"] else state
        count[name.rpartition(".")[2], state] += 1
    for (arch, state), n in sorted(count.items()):
        yield [
            arch,
            str(n),
            state,
            fits.get(", ".join(ARCHS[dsl_of(arch)][arch]), "no device here"),
        ]


# ---- measuring ---
_CHOICES = ("format", "axis", "scaling", "implementation")
_quantize = jax.jit(jax_mx.quantize, static_argnames=_CHOICES)
_dequantize = jax.jit(jax_mx.dequantize, static_argnames="dtype")
_copy = jax.jit(jnp.copy)


def measure(
    name: str, tensor: np.ndarray, axis: int, options: argparse.Namespace, timed: bool
) -> Iterator[Row]:
    """A row for each format and scaling that the user asked for."""
    x = jax.device_put(tensor)
    copy = 2 * x.nbytes / seconds(functools.partial(_copy, x)) if timed else 0.0
    for format in options.format:
        for scaling in options.scaling:
            call = {"format": format, "axis": axis, "scaling": scaling}
            q = _quantize(x, **call)
            dequantized = np.asarray(_dequantize(q, dtype=jnp.float32), np.float64)
            finite = ~np.isnan(dequantized)
            saturated = _samples.magnitudes(q)[finite] == q.format.max_code
            elapsed = seconds(functools.partial(_quantize, x, **call)) if timed else None
            yield Row(
                name,
                tensor.shape,
                format,
                scaling,
                *_samples.errors(tensor[finite].astype(np.float64), dequantized[finite]),
                saturated=float(saturated.mean()) if saturated.size else math.nan,
                ratio=q.nbytes / (2 * tensor.size),
                equal=_equals_reference(q, x, call),
                seconds=elapsed,
                bandwidth=((x.nbytes + q.nbytes) / elapsed, copy) if elapsed else None,
            )


def _equals_reference(q: jax_mx.MXArray, x: jax.Array, call: dict[str, Any]) -> bool | None:
    if taken("quantize", next(iter(x.devices())), dtype=x.dtype, **call)[0] == "xla":
        return None
    want = _quantize(x, implementation="xla", **call)
    pairs = ((q.values, want.values), (q.scales, want.scales))
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def seconds(call: Callable[[], Any]) -> float:
    """Wall clock of one call among many: a device runs them in order, so the last ends last."""
    result = jax.block_until_ready(call())
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times)


# ---- the command ---
def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, defaults filled in."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    about = "your own tensors, .safetensors, .npz or .npy; repeatable"
    add("--file", action="append", type=Path, default=[], metavar="PATH", help=about)
    for name, table in (("format", FORMATS), ("scaling", SCALINGS)):
        about = f"of {', '.join(table)}; repeatable; default: {', '.join(DEFAULTS[name])}"
        add(f"--{name}", action="append", choices=table, metavar="NAME", help=about)
    about = f"blocks of {BLOCK} run along it; default: -1"
    add("--axis", type=axis_number, default=-1, metavar="N", help=about)
    about = f"tensors are converted to it, of {', '.join(FLOAT_DTYPES)}; default: bfloat16"
    add("--dtype", choices=FLOAT_DTYPES, default="bfloat16", metavar="NAME", help=about)
    about = f"run AMD's kernels for it on the CPU: {', '.join(variants.ARCHS['flydsl'])}"
    add("--emulate", choices=variants.ARCHS["flydsl"], metavar="ARCH", help=about)
    options = parser.parse_args(arguments)
    for name in ("file", *DEFAULTS):  # each once
        given = getattr(options, name) or DEFAULTS.get(name, [])
        setattr(options, name, list(dict.fromkeys(given)))
    return options


def axis_number(text: str) -> int:
    """An axis of any array that is likely; beyond, integers overflow and shapes do not exist."""
    number = int(text)
    if not -32 <= number < 32:
        raise argparse.ArgumentTypeError(f"must be -32 to 31, got {text}")
    return number


def complain(name: str, sentence: str) -> None:
    """About a tensor or file, on stderr."""
    print(_samples.printable(f"{name}: {sentence}"), file=sys.stderr)


def report(options: argparse.Namespace) -> int:
    """Prints all there is to say; returns the exit status."""
    from rich.console import Console

    # A pipe has no width: rich would fold everything at 80 columns.
    width = None if sys.stdout.isatty() else 1000
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    console.print(f"JAX {jax.__version__} sees {', '.join(devices())}.\n")
    show(console, f"Implementations, for {options.dtype}", SETUP, implementations(options))
    show(console, "Binaries of this installation", BINARIES, binaries())
    timed = jax.default_backend() != "cpu"
    rows: list[Row] = []
    own = (tensor for path in options.file for tensor in _samples.read(path))
    for name, tensor in own if options.file else _samples.digits().items():
        try:
            tensor, axis, remarks = _samples.admit(tensor, options.axis, options.dtype)
        except (TypeError, ValueError) as error:
            complain(name, str(error))
            continue
        rows += measure(_samples.printable(name), tensor, axis, options, timed)
        for remark in remarks:
            complain(name, remark)
    title = f"Tensors in {options.dtype}, blocks of {BLOCK} along axis {options.axis}"
    show(console, title, TENSORS + SPEED if timed else TENSORS, [row.cells() for row in rows])
    return 0 if rows and all(row.equal is not False for row in rows) else 1


def show(console: Any, title: str, columns: tuple[str, ...], rows: Iterable[list[str]]) -> None:
    """A table; that of the tensors has a gap between tensors."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        right = column in (*NUMBERS, *SPEED, "binaries")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for _, group in itertools.groupby(rows, key=lambda row: row[0]):
        for row in group:
            table.add_row(*row)
        if columns[0] == TENSORS[0]:
            table.add_section()
    console.print(table if table.rows else f"{title}: none\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `--help` for the exit status."""
    options = parse(arguments)
    try:
        if options.emulate is None:
            return report(options)
        from jax_mx.testing import emulate

        with jax.default_device(jax.devices("cpu")[0]), emulate(options.emulate):
            return report(options)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in EMULATOR:
            print(f"{PROGRAM}: {error}", file=sys.stderr)
            return 1
        library = EXTRA.get(module)
        if library is None:
            raise
        print(
            f"{PROGRAM}: this needs {library}; install it with pip install 'jax-mx[cli]'",
            file=sys.stderr,
        )
        return 1
