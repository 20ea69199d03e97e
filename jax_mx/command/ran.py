"""For `python -m jax_mx`: kernels that run. On a GPU how fast; elsewhere AMD's, in emulation."""

import collections
import functools
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mx
from jax_mx.command import here, plain
from jax_mx.command.output import Screen, Table
from jax_mx.formats.formats import FLOAT_DTYPES
from jax_mx.launch import store, toolchains

logger = logging.getLogger("jax_mx")
CALLS = 20  # that are timed together
ARCH = "gfx950"  # it is emulated on a machine without a GPU
SMALL = (256, 256)
LAYER = (8, 7168, 7168)  # the weights of eight experts


def same(a: Any, b: Any) -> bool:
    """Whether two pytrees of arrays hold the same bytes."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def verdict(equal: bool | None) -> str:
    """The result of a comparison with the reference, None where the reference ran itself."""
    return {None: "reference ran", True: "equal", False: "DIFFERENT"}[equal]


# ---- in emulation ---
def emulation_lacks() -> str:
    """A sentence about tools that compiling or emulating a kernel needs; empty if all are there."""
    if obstacle := toolchains.obstacle("flydsl"):
        return obstacle
    try:
        from jax_mx.launch.emulation import hip as hip
    except ModuleNotFoundError as error:
        return f"the emulator needs {error.name}; {toolchains.install(*toolchains.EMULATOR)}"
    return ""


def emulated(formats: Sequence[str], screen: Screen) -> Iterator[dict[str, Any]]:
    """Compiles and executes the quantizer of a small array for each format."""
    from jax_mx.testing import emulate

    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        x = jax.random.normal(jax.random.key(0), SMALL, jnp.bfloat16)
        for format in formats:
            with emulate(ARCH):
                kernels = here.support("quantize", cpu, x, format).kernels
                missing = [kernel for kernel in kernels if store.find(kernel, ARCH) is None]
                start = time.perf_counter()
                for kernel in missing:
                    with screen.step(f"compiling {kernel.name} for {ARCH}"):
                        store.get(kernel, ARCH)
                compiled = time.perf_counter()
                with screen.step(f"running {format} on an emulated {ARCH}"):
                    q = jax.block_until_ready(jax_mx.quantize(x, format))
                seconds = time.perf_counter() - compiled
            yield {
                "kernel": ", ".join(kernel.name for kernel in kernels),
                "arch": ARCH,
                "compiled": compiled - start if missing else None,
                "seconds": seconds,
                "equal": same(q, jax_mx.quantize(x, format, implementation="xla")),
            }


def emulated_table(runs: Sequence[dict[str, Any]]) -> Table:
    """A row for each kernel."""
    rows = [
        [
            run["kernel"],
            "was there" if run["compiled"] is None else f"{run['compiled']:.1f} s",
            f"{run['seconds']:.1f} s",
            verdict(run["equal"]),
        ]
        for run in runs
    ]
    return ("kernel", "compiled in", "ran in", "bytes, against the reference"), rows


# ---- on a GPU ---
def speeds(formats: Sequence[str], dtype: str, screen: Screen) -> Iterator[dict[str, Any]]:
    """Measures each op in each format on JAX's default device."""
    shape = layer(jax.devices()[0], FLOAT_DTYPES[dtype])
    with screen.step(f"making {shape} in {dtype}"):
        make = jax.jit(jax.random.normal, static_argnums=(1, 2))
        x = jax.block_until_ready(make(jax.random.key(0), shape, FLOAT_DTYPES[dtype]))
    for format in formats:
        pair = {"formats": (format, format), "transpose": (False, True)}
        calls = {
            "quantize": functools.partial(jax_mx.quantize, format=format),
            "quantize_both": functools.partial(jax_mx.quantize_both, **pair),
            "dequantize": functools.partial(jax_mx.dequantize, dtype=dtype),
        }
        for op, call in calls.items():
            argument = jax.jit(calls["quantize"])(x) if op == "dequantize" else x
            with screen.step(f"measuring {op} {format}"):
                speed = _speed(op, format, x, call, argument, screen)
            yield {"op": op, "format": format, "shape": shape} | speed


def layer(device: jax.Device, dtype: np.dtype) -> tuple[int, ...]:
    """A layer's shape whose floats take a tenth of the device's memory at most."""
    free = (device.memory_stats() or {}).get("bytes_limit", 16 * 2**30)
    fits = (n for n in (8, 4, 2, 1) if n * math.prod(LAYER[1:]) * dtype.itemsize <= free / 10)
    return (next(fits, 1), *LAYER[1:])


def _speed(
    op: str, format: str, x: jax.Array, call: Callable[..., Any], argument: Any, screen: Screen
) -> dict[str, Any]:
    """Times of a call on an argument made of x, and whether kernels give the reference's bytes."""
    jitted = jax.jit(call)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves((argument, jitted(argument))))
    plain_us = []
    for name, version in plain.versions(op, format, x.dtype).items():
        try:
            plain_us.append(microseconds(jax.jit(version), argument))
        except Exception as error:
            screen.log(f"... plain XLA, {name}: {type(error).__name__}: {error}"[:200])
    taken, equal = here.support(op, jax.devices()[0], x, format), None
    if taken.kernels:
        part = jax.tree.map(lambda leaf: leaf[:1], argument)
        equal = same(jitted(part), jax.jit(functools.partial(call, implementation="xla"))(part))
    return {
        "implementation": taken.implementation,
        "us": microseconds(jitted, argument),
        "nbytes": nbytes,
        "copy_us": microseconds(jax.jit(jnp.copy), jnp.zeros(nbytes // 2, jnp.uint8)),
        "plain_us": min(plain_us, default=None),
        "equal": equal,
    }


def speed_table(speeds: Sequence[dict[str, Any]]) -> Table:
    """A row for each op and format."""
    rows = []
    for speed in speeds:
        us, plain_us = speed["us"], speed["plain_us"]
        row = [speed["op"], speed["format"], f"{us:.0f}", f"{speed['nbytes'] / us / 1e6:.2f}"]
        row += [f"{speed['copy_us'] / us:.2f}"]
        row += [f"{plain_us:.0f}", f"{plain_us / us:.1f}x"] if plain_us else ["-", "-"]
        rows.append([*row, verdict(speed["equal"])])
    names = "op", "format", "us", "TB/s", "of a copy", "plain XLA us", "against it"
    return (*names, "bytes, against the reference"), rows


# ---- time ---
def microseconds(call: Callable[[Any], Any], argument: Any) -> float:
    """The mean time of a call: on the device by a profile, else by the host's clock."""
    _run(call, argument, 3)
    if jax.default_backend() != "cpu":
        try:
            return _on_device(call, argument)
        except Exception as error:  # a worse number is better than none
            logger.warning("jax_mx: no profile (%s), so the host's clock counts", error)
    start = time.perf_counter()
    _run(call, argument, CALLS)
    return (time.perf_counter() - start) / CALLS * 1e6


def _run(call: Callable[[Any], Any], argument: Any, calls: int) -> None:
    """Calls that often; two results wait at a time, as more would fill the memory."""
    waiting: collections.deque[Any] = collections.deque()
    for _ in range(calls):
        waiting.append(call(argument))
        if len(waiting) > 2:
            jax.block_until_ready(waiting.popleft())
    jax.block_until_ready(list(waiting))


def _on_device(call: Callable[[Any], Any], argument: Any) -> float:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it records every Python call, and slows them all down
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            _run(call, argument, CALLS)
        files = [str(path) for path in Path(folder).rglob("*.xplane.pb")]
        durations = [
            event.duration_ns
            for file in files
            for plane in jax.profiler.ProfileData.from_file(file).planes
            for line in plane.lines
            if "GPU" in plane.name and "Stream" in line.name  # other lines repeat the events
            for event in line.events
        ]
    if not durations:
        raise ValueError("it holds no event of a device")
    return sum(durations) / CALLS / 1e3
