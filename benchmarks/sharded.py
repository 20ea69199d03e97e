"""Quantizers sharded: the same shard on each of all devices, against one device alone.

    python -m benchmarks sharded --form all

It ends with 1 where the slowest device takes more than `SLACK` of what one takes alone.
"""

import functools
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import quantizers, timing
from benchmarks.runner import Args, Case, Row, repeats

SLACK = 1.05  # how much longer a device may take for its shard than one device for that alone
options = quantizers.options


def cases(args: Args) -> Iterator[Case]:
    """A case of each quantizer."""
    if len(jax.devices()) < 2:
        raise ValueError(f"sharded: there is one device, {jax.devices()[0]}")
    for call in quantizers.quantizers(args):
        yield Case(call.form, "", call.names, functools.partial(measure, call))


def measure(quantizer: quantizers.Quantizer, args: Args) -> Row:
    """Times the op on one operand, then on as many as there are devices, stacked and sharded."""
    calls, fn = repeats(args, 30), quantizer.functions()[0]
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("shard",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("shard"))
    size = timing.nbytes(jax.eval_shape(quantizer.make, jax.random.key(0)))
    alone = timing.measure(fn, timing.rotate(quantizer.make, size), calls)

    stack = jax.jit(jax.vmap(quantizer.make), out_shardings=sharding)  # a new axis in front
    inputs = timing.rotate(lambda key: stack(jax.random.split(key, len(devices))), size)
    call = jax.jit(jax.vmap(fn))
    timing.run(call, inputs, timing.WARM_UP)
    if alone.clock == timing.WALL:
        slowest = timing.wall(call, inputs, calls).us
    else:
        traces = timing.profiles(call, inputs, calls)
        if len(traces) != len(devices):
            raise ValueError(f"the profile shows {len(traces)} of {len(devices)} devices")
        slowest = max(timing.per_call(events, calls).us for events in traces.values())
    row = {"us": round(slowest, 3), "alone_us": round(alone.us, 3), "clock": alone.clock}
    return row | {"devices": len(devices), "to_alone": round(slowest / alone.us, 3)}


def checks(args: Args, rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """Whether the slowest device takes little more than one alone."""
    for row in rows:
        met = row.get("to_alone", 2 * SLACK) <= SLACK
        said = f"{row['to_alone']} of one alone" if "to_alone" in row else "failed"
        line = f"{row['form']} {row['shape']}: {said}"
        yield met or not args.require, f"{'ok' if met else 'MISSED'}: {line}"
