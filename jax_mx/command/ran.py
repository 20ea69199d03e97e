"""For `python -m jax_mx`: kernels that run. On a GPU how fast; elsewhere AMD's, in emulation."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mx
from jax_mx.command import here, plain
from jax_mx.command.output import Column, Steps
from jax_mx.facts import toolchains
from jax_mx.facts.formats import FLOAT_DTYPES
from jax_mx.lowering import store

logger = logging.getLogger("jax_mx")
CALLS, BATCHES = 10, 7  # timing on the host's clock: the median of BATCHES batches of CALLS calls
ARCH = "gfx950"  # what is emulated on a machine without a GPU
TAKES_Q = "dequantize"  # the op whose argument is quantized
SMALL = (256, 256)
LAYER = (8, 7168, 7168)  # the weights of eight experts

EMULATED = (
    Column("kernel"),
    Column("compiled in", number=True, optional=1),
    Column("ran in", number=True, optional=2),
    Column("bytes, against the reference"),
)
SPEED = (
    Column("op"),
    Column("format"),
    Column("us", number=True),
    Column("TB/s", number=True),
    Column("of a copy", number=True),
    Column("plain XLA us", number=True, optional=1),
    Column("against it", number=True),
    Column("bytes, against the reference", optional=2),
)


def same(a: Any, b: Any) -> bool:
    """Whether two pytrees of arrays hold the same bytes."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def verdict(equal: bool | None) -> str:
    """What a comparison with the reference gave, None where the reference ran itself."""
    return {None: "is the reference", True: "equal", False: "DIFFERENT"}[equal]


# ---- in emulation --------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Emulated:
    """A kernel that was compiled, if need be, and executed in emulation.

    Attributes:
      kernel: its name.
      arch: what it was compiled for.
      compiled: seconds; None where the binary was there.
      seconds: what the call took.
      equal: whether the bytes are the reference's.
    """

    kernel: str
    arch: str
    compiled: float | None
    seconds: float
    equal: bool

    def cells(self) -> list[str]:
        """As the table shows it."""
        compiled = "was there" if self.compiled is None else f"{self.compiled:.1f} s"
        return [self.kernel, compiled, f"{self.seconds:.1f} s", verdict(self.equal)]


def emulation_lacks() -> str:
    """What is missing to compile and emulate a kernel, and how to get it; empty if nothing is."""
    if obstacle := toolchains.obstacle("flydsl"):
        return obstacle
    try:
        from jax_mx.testing import hip as hip
    except ModuleNotFoundError as error:
        return f"the emulator needs {error.name}; {toolchains.install(*toolchains.EMULATOR)}"
    return ""


def emulated(formats: Sequence[str], steps: Steps) -> Iterator[Emulated]:
    """Compiles and executes the quantizer of a small array for each format."""
    from jax_mx.testing import emulate

    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        x = jax.random.normal(jax.random.key(0), SMALL, jnp.bfloat16)
        for format in formats:
            with emulate(ARCH):
                taken = here.support("quantize", cpu, x, format)
                missing = [k for k in taken.kernels if store.find(k, ARCH) is None]
                start = time.perf_counter()
                for kernel in missing:
                    with steps.step(f"compiling {kernel.name} for {ARCH}"):
                        store.get(kernel, ARCH)
                compiled = time.perf_counter() - start if missing else None
                start = time.perf_counter()
                with steps.step(f"running {format} on an emulated {ARCH}"):
                    q = jax.block_until_ready(jax_mx.quantize(x, format))
                seconds = time.perf_counter() - start
            with steps.step("computing the reference"):
                equal = same(q, jax_mx.quantize(x, format, implementation="xla"))
            names = ", ".join(kernel.name for kernel in taken.kernels)
            yield Emulated(names, ARCH, compiled, seconds, equal)


# ---- on a GPU ------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Speed:
    """What an op takes at a layer's size.

    Attributes:
      op: the op.
      format: the format's name.
      shape: of the floats.
      implementation: what served it.
      us: microseconds of a call, the median.
      nbytes: read and written in a call.
      copy_us: what a copy of as many bytes takes.
      plain_us: what plain float arithmetic in XLA takes; None: it did not run.
      equal: whether the bytes are the reference's; None where it is the reference.
    """

    op: str
    format: str
    shape: tuple[int, ...]
    implementation: str
    us: float
    nbytes: int
    copy_us: float
    plain_us: float | None
    equal: bool | None

    def cells(self) -> list[str]:
        """As the table shows it."""
        cells = [self.op, self.format, f"{self.us:.0f}", f"{self.nbytes / self.us / 1e6:.2f}"]
        cells.append(f"{self.copy_us / self.us:.2f}")
        if self.plain_us is None:
            cells += ["-", "-"]
        else:
            cells += [f"{self.plain_us:.0f}", f"{self.plain_us / self.us:.1f}x"]
        return [*cells, verdict(self.equal)]


def layer(device: jax.Device, dtype: np.dtype) -> tuple[int, ...]:
    """A layer's shape whose floats take a tenth of the device's memory at most."""
    free = (device.memory_stats() or {}).get("bytes_limit", 16 * 2**30)
    fits = (n for n in (8, 4, 2, 1) if n * math.prod(LAYER[1:]) * dtype.itemsize <= free / 10)
    return (next(fits, 1), *LAYER[1:])


def speeds(formats: Sequence[str], dtype: str, steps: Steps) -> Iterator[Speed]:
    """Measures each op in each format on JAX's default device."""
    device = jax.devices()[0]
    shape = layer(device, FLOAT_DTYPES[dtype])
    with steps.step(f"making {shape} in {dtype}"):
        make = jax.jit(jax.random.normal, static_argnums=(1, 2))
        x = jax.block_until_ready(make(jax.random.key(0), shape, FLOAT_DTYPES[dtype]))
    for format in formats:
        for op, call in _calls(format, dtype).items():
            argument = jax.jit(jax_mx.quantize, static_argnums=1)(x, format) if op == TAKES_Q else x
            yield _speed(op, format, call, argument, steps, x)


def _calls(format: str, dtype: str) -> Mapping[str, Callable[..., Any]]:
    """The calls that are measured, by op; each also takes `implementation`."""
    pair = {"formats": (format, format), "transpose": (False, True)}
    return {
        "quantize": functools.partial(jax_mx.quantize, format=format),
        "quantize_both": functools.partial(jax_mx.quantize_both, **pair),
        "dequantize": functools.partial(jax_mx.dequantize, dtype=dtype),
    }


def _speed(
    op: str, format: str, call: Callable[..., Any], argument: Any, steps: Steps, x: jax.Array
) -> Speed:
    """Measures one op."""
    what = f"{op} {format}"
    with steps.step(f"compiling {what}"):
        jitted = jax.jit(call)
        nbytes = _nbytes(argument) + _nbytes(jax.block_until_ready(jitted(argument)))
    with steps.step(f"measuring {what}"):
        own = microseconds(jitted, argument)
    plain_us = None
    for name, version in plain.versions(op, format, x.dtype).items():
        with steps.step(f"measuring plain XLA, {name}"):
            try:
                us = microseconds(jax.jit(version), argument)
            except Exception as error:
                steps.say(f"... plain XLA, {name}: {type(error).__name__}: {error}"[:200])
                continue
            plain_us = us if plain_us is None else min(plain_us, us)
    with steps.step("measuring a copy"):
        words = jnp.zeros(nbytes // 2, jnp.uint8)
        copy = microseconds(jax.jit(jnp.copy), words)
        del words
    taken = here.support(op, jax.devices()[0], x, format)
    equal = None
    if taken.kernels:
        with steps.step(f"comparing {what} with the reference"):
            part = jax.tree.map(lambda a: a[:1], argument) if op == TAKES_Q else x[:1]
            equal = same(jitted(part), jax.jit(functools.partial(call, implementation="xla"))(part))
    return Speed(op, format, x.shape, taken.implementation, own, nbytes, copy, plain_us, equal)


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


# ---- time ----------------------------------------------------------------------------------------
def microseconds(call: Callable[[Any], Any], argument: Any) -> float:
    """The time that a call spends on the device, the median; on the host's clock on a CPU."""
    _run(call, argument, 3)
    if jax.default_backend() != "cpu":
        try:
            return _on_device(call, argument)
        except Exception as error:  # a worse number is better than none
            logger.warning("jax_mx: no profile (%s), so the host's clock counts", error)
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        _run(call, argument, CALLS)
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times) * 1e6


def _run(call: Callable[[Any], Any], argument: Any, calls: int) -> None:
    """Calls that often; two results wait at a time, as more would fill the memory."""
    waiting: collections.deque[Any] = collections.deque()
    for _ in range(calls):
        waiting.append(call(argument))
        if len(waiting) > 2:
            jax.block_until_ready(waiting.popleft())
    jax.block_until_ready(list(waiting))


def _on_device(call: Callable[[Any], Any], argument: Any) -> float:
    """The median over calls of the time of all that each made the device do.

    Raises:
      ValueError: the profile holds no such events.
    """
    calls = CALLS * 2
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it records every Python call, and slows them all down
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            _run(call, argument, calls)
        files = [str(path) for path in Path(folder).rglob("*.xplane.pb")]
        events = [e for f in files for e in _events(jax.profiler.ProfileData.from_file(f))]
    each, rest = divmod(len(events), calls)
    if not events:
        raise ValueError("it holds no event of a device")
    durations = [duration for _, duration in sorted(events)]
    if rest:  # they cannot be told apart by call
        return sum(durations) / calls / 1e3
    groups = [sum(durations[i : i + each]) for i in range(0, len(durations), each)]
    return statistics.median(groups) / 1e3


def _events(data: jax.profiler.ProfileData) -> Iterator[tuple[float, float]]:
    """When each thing that a GPU did began, and how long it took, in nanoseconds."""
    for plane in data.planes:
        if "GPU" in plane.name:
            for line in plane.lines:
                if "Stream" in line.name:  # others repeat it by module and op
                    yield from ((event.start_ns, event.duration_ns) for event in line.events)
