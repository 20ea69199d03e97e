"""What sharding costs: the same shard on each of several devices, against one device alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import timing

SLACK = 1.05  # how much longer a device may take for its shard than one device for that alone


def measure(
    name: str, fn: Callable[..., Any], make: Callable[[jax.Array], Any], repeats: int
) -> tuple[bool, str]:
    """Times `fn` on what `make` gives, then on as much on each device, stacked and sharded.

    Args:
      name: of the case.
      fn: a jitted op on what `make` gives, a pytree of arrays.
      make: an operand from a key.
      repeats: calls that a median is taken over.

    Returns:
      Whether the slowest device takes no more than `SLACK` of the one's time; a line that says so.

    Raises:
      ValueError: there is one device.
    """
    devices = jax.devices()
    if len(devices) < 2:
        raise ValueError(f"--sharded: there is one device, {devices[0]}")
    mesh = jax.make_mesh((len(devices),), ("shard",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("shard"))
    size = timing.nbytes(jax.eval_shape(make, jax.random.key(0)))
    alone = timing.measure(fn, timing.rotate(make, size), repeats)

    stack = jax.jit(jax.vmap(make), out_shardings=sharding)  # a new axis in front, one entry each
    inputs = timing.rotate(lambda key: stack(jax.random.split(key, len(devices))), size)
    call = jax.jit(jax.vmap(fn))
    timing.run(call, inputs, timing.WARM_UP)
    if alone.clock == timing.WALL:
        slowest = timing.wall(call, inputs, repeats).us
    else:
        each = timing.profiles(call, inputs, repeats)
        if len(each) != len(devices):
            raise ValueError(f"--sharded: the profile shows {len(each)} of {len(devices)} devices")
        slowest = max(timing.per_call(events, repeats).us for events in each.values())
    ratio = slowest / alone.us
    return ratio <= SLACK, (
        f"{'ok' if ratio <= SLACK else 'MISSED'}: {name}: {slowest:.1f} us on the slowest of "
        f"{len(devices)} devices, {alone.us:.1f} us on one alone, x{ratio:.3f} ({alone.clock})"
    )
