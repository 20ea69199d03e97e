"""How long a jitted function takes: on the device where it can be profiled, else on the wall."""

import collections
import dataclasses
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

Inputs = Sequence[tuple[Any, ...]]  # the arguments of one call each; calls take them in turn

# An H200 has the largest L2 at hand; the same data overruns a smaller one.
L2_BYTES = 60 * 2**20
# Outputs alive at a time: two keep the device busy; a queue of all would fill its memory.
WINDOW = 2
WARM_UP = 5

DEVICE = "device"  # the median over calls of what each spent on the device
DEVICE_MEAN = "device mean"  # the mean: the events could not be told apart by call
WALL = "wall"  # time on the host's clock, launches included


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds a call, and the clock that they were read from."""

    us: float
    clock: str


@dataclasses.dataclass(frozen=True, order=True)
class Event:
    """Something that a device did: a kernel, a copy, a fill."""

    start_ns: float
    duration_ns: float
    name: str


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree, once each, from their shapes and dtypes alone."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def rotation(size: int) -> int:
    """How many distinct inputs of `size` bytes to go through in turn, so that L2 holds none.

    Below 7.5 MB an input the cap of 32 leaves them in L2; nothing there is bound by memory.
    """
    return min(max(3, math.ceil(4 * L2_BYTES / max(size, 1))), 32)


def rotate(make: Callable[[jax.Array], Any], size: int) -> list[tuple[jax.Array]]:
    """`rotation(size)` inputs, each from a key of its own."""
    keys = jax.random.split(jax.random.key(0), rotation(size))
    return jax.block_until_ready([(make(key),) for key in keys])


def measure(fn: Callable[..., Any], inputs: Inputs, calls: int = 30) -> Timing:
    """The time of one call of `fn`, which is compiled and warmed up before any clock runs."""
    run(fn, inputs, WARM_UP)
    if jax.default_backend() != "cpu":
        try:
            return per_call(profile(fn, inputs, calls), calls)
        except Exception as error:  # a worse number is better than none
            warnings.warn(f"no profile, so the host's clock counts: {error}", stacklevel=2)
    return wall(fn, inputs, calls)


def run(fn: Callable[..., Any], inputs: Inputs, calls: int) -> None:
    """Calls `fn` that often, going through the inputs, and waits for the end."""
    outputs: collections.deque[Any] = collections.deque()
    for i in range(calls):
        outputs.append(fn(*inputs[i % len(inputs)]))
        if len(outputs) > WINDOW:
            jax.block_until_ready(outputs.popleft())
    jax.block_until_ready(list(outputs))


def profile(fn: Callable[..., Any], inputs: Inputs, calls: int) -> list[Event]:
    """The device's events for `calls` calls of `fn`, in a trace of their own."""
    return [event for one in profiles(fn, inputs, calls).values() for event in one]


def profiles(fn: Callable[..., Any], inputs: Inputs, calls: int) -> dict[str, list[Event]]:
    """The same, of each device by itself."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it records every Python call, and slows them all down
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run(fn, inputs, calls)
        files = sorted(Path(directory).rglob("*.xplane.pb"))
        data = [jax.profiler.ProfileData.from_file(str(f)) for f in files]
        events_by_name: dict[str, list[Event]] = {}
        for one in data:
            for name in (plane.name for plane in one.planes if "GPU" in plane.name):
                events_by_name.setdefault(name, []).extend(events(one, name))
    return {name: kernels for name, kernels in events_by_name.items() if kernels}


def events(data: jax.profiler.ProfileData, device: str = "") -> list[Event]:
    """All that a profile's GPUs did. Only "Stream" lines: others repeat it by module and op."""
    return [
        Event(event.start_ns, event.duration_ns, event.name)
        for plane in data.planes
        if "GPU" in plane.name and device in ("", plane.name)
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    ]


def per_call(events: Sequence[Event], calls: int) -> Timing:
    """The median over calls of each one's events together.

    Raises:
      ValueError: there are no events.
    """
    if not events:
        raise ValueError("the profile holds no event of a device")
    events = sorted(events)
    kernels, rest = divmod(len(events), calls)
    names = [event.name for event in events]
    if rest or names != names[:kernels] * calls:
        return Timing(sum(event.duration_ns for event in events) / calls / 1e3, DEVICE_MEAN)
    durations = [event.duration_ns for event in events]
    groups = [sum(durations[i : i + kernels]) for i in range(0, len(durations), kernels)]
    return Timing(statistics.median(groups) / 1e3, DEVICE)


def wall(fn: Callable[..., Any], inputs: Inputs, calls: int, batches: int = 5) -> Timing:
    """The median over batches of calls of a batch's time on the wall."""
    size = max(1, calls // batches)
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        run(fn, inputs, size)
        times.append((time.perf_counter() - start) / size)
    return Timing(statistics.median(times) * 1e6, WALL)


def in_a_loop(fn: Callable[..., Any], calls: int) -> Any:
    """A program that calls `fn` so many times, each time when the call before is done.

    As in a program that has other work, too: a small move alone is over before the host has
    launched the next one.
    """

    def run(*args: jax.Array) -> Any:
        abstract = jax.eval_shape(fn, *args)
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract)

        def again(_: jax.Array, held: Any) -> Any:
            args, _ = held
            return jax.lax.optimization_barrier((args, fn(*args)))

        return jax.lax.fori_loop(0, calls, again, (args, nothing))[1]

    return jax.jit(run)


def loop(fn: Callable[..., Any], inputs: Inputs, calls: int, batches: int = 3) -> Timing:
    """The wall time of a call of a loop in one program, in the best batch."""
    program, best = in_a_loop(fn, calls), math.inf
    jax.block_until_ready(program(*inputs[0]))
    for _ in range(batches):
        start = time.perf_counter()
        jax.block_until_ready(program(*inputs[0]))
        best = min(best, (time.perf_counter() - start) / calls)
    return Timing(best * 1e6, WALL)


def fastest(
    candidates: Mapping[str, Callable[..., Any]], inputs: Inputs, calls: int = 30
) -> tuple[str, Timing]:
    """The name and the time of the fastest of several functions; those that fail do not count.

    Raises:
      Exception: none ran; the last one's.
    """
    timings: dict[str, Timing] = {}
    failure: Exception = ValueError("fastest: no candidates")
    for name, fn in candidates.items():
        try:
            timings[name] = measure(fn, inputs, calls)
        except Exception as error:
            failure = error.with_traceback(None)  # which would keep the inputs alive
    if not timings:
        raise failure
    return min(timings.items(), key=lambda item: item[1].us)
