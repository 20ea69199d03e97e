"""A training step of a transformer with experts, in MX beside bfloat16: time and loss.

    python -m benchmarks.moe_step [--steps 1000] [--json out.json]

The model is that of examples/train_moe.py, wider; with --small as it is, which a CPU trains, too.
Each row is one way to compute it: milliseconds of a step (the median on the host's clock, each step
waited for), tokens a second, and the mean loss of the last twentieth of all steps. `--devices 1 2`
trains on one device, then on two, each of which has as many rows as the one had.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import report
from examples import train_moe
from jax_mx import MXFP4_E2M1, Hadamard, Product, Recipe


class Way(NamedTuple):
    """The recipe of a model, what computes its grouped products, and its experts' own recipe."""

    recipe: Any
    implementation: str | None = None
    experts: Any = None


WINDOWS = Recipe(window=256)
WAYS = {
    "bf16": Way("bf16"),
    "bf16, lax.ragged_dot": Way("bf16", "dequantize"),
    "bf16, Pallas": Way("bf16", "pallas"),
    "mxfp8": Way("mxfp8"),
    "mxfp8, windows of 256": Way(WINDOWS),
    "mxfp8, rows, experts 256": Way(Recipe(window="row"), experts=WINDOWS),
    "mxfp4": Way("mxfp4"),
    "mxfp8, gradients in mxfp4": Way(train_moe.RECIPES["mxfp4_backward"]),
}
# Which of a layer's three products MXFP4 costs learning in; as the recipe MXFP4 has each.
PARTS = {
    "mxfp8, forward in mxfp4": Way(Recipe(forward=MXFP4_E2M1)),
    "mxfp8, dgrad in mxfp4": Way(Recipe(dgrad=MXFP4_E2M1)),
    "mxfp8, wgrad in mxfp4": Way(Recipe(wgrad=Product(MXFP4_E2M1, Hadamard(16)))),
}
TIMED = 30  # steps, after as many that warm up
SLOW = 100  # steps of a way that is there for its time alone
WIDER = {"width": 1024, "inner": 512, "layers": 2, "length": 512, "rows": 16, "heads": 8}


def run(way: Way, steps: int, rate: float, devices: int = 1) -> tuple[float, list[float]]:
    """Milliseconds of a step, and all losses; split as the example splits it."""
    pieces, length = np.fromfile(topics.__file__, np.uint8), train_moe.LENGTH
    experts = math.gcd(devices, train_moe.EXPERTS)
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, experts), ("data", "expert"))
    model = train_moe.Model(way.recipe, "expert" if devices > 1 else None, nnx.Rngs(0))
    own = {"implementation": way.implementation, "recipe": way.experts or way.recipe}
    for block in model.blocks:
        block.moe = functools.partial(block.moe, **own)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)

    def placed(a: jax.Array) -> jax.Array:
        return jax.device_put(a, NamedSharding(mesh, P(*("expert",) * (a.ndim == 3))))

    nnx.update((model, optimizer), jax.tree.map(placed, nnx.state((model, optimizer))))
    count, where = train_moe.ROWS * devices, NamedSharding(mesh, P(("data", "expert")))
    losses, times = [], []
    for i in range(steps):
        starts = np.random.default_rng(i).integers(0, len(pieces) - length, (count, 1))
        rows = jax.device_put(pieces[starts + np.arange(length + 1)].astype(np.int32), where)
        jax.block_until_ready(rows)
        start = time.perf_counter()
        with jax.set_mesh(mesh):
            losses.append(float(train_moe.step(model, optimizer, rows)))
        times.append(time.perf_counter() - start)
    settled = times[TIMED : 2 * TIMED] or times[-1:]
    return 1e3 * float(np.median(settled)), losses


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, size in WIDER.items():
        parser.add_argument(f"--{name}", type=int, help=f"by default {size}")
    parser.add_argument("--small", action="store_true", help="sizes are those of the example")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=3e-4, help="Adam's")
    parser.add_argument(
        "--ways", nargs="+", default=[*WAYS], choices=[*WAYS, *PARTS], metavar="WAY"
    )
    said = "how many devices to train on, by default one"
    parser.add_argument("--devices", type=int, nargs="+", default=[1], metavar="N", help=said)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if max(args.devices) > jax.device_count() or min(args.devices) < 1:
        parser.error(f"--devices must be 1 to {jax.device_count()}, got {args.devices}")
    own = {name: getattr(train_moe, name.upper()) for name in WIDER} if args.small else WIDER
    sizes = {name: getattr(args, name) or size for name, size in own.items()}
    for name, size in sizes.items():
        setattr(train_moe, name.upper(), size)
    rows = []
    for name, devices in itertools.product(args.ways, args.devices):
        steps = min(args.steps, SLOW) if "lax" in name else args.steps
        start = time.perf_counter()
        ms, losses = run({**WAYS, **PARTS}[name], steps, args.rate, devices)
        loss = float(np.mean(losses[-max(steps // 20, 1) :]))
        row = {"way": name, **sizes, "steps": steps, "devices": devices}
        row |= {"ms": round(ms, 3), "loss": round(loss, 4)}
        row |= {"tokens_s": round(1e3 * devices * sizes["rows"] * sizes["length"] / ms)}
        row |= {"losses": [round(float(x), 4) for x in losses[:: max(steps // 100, 1)]]}
        rows.append(row)
        took = time.perf_counter() - start
        on = f" on {devices}" * (args.devices != [1])
        print(f"{name + on:30} {ms:8.2f} ms  loss {loss:.4f}  ({took:.0f} s)", flush=True)
        if args.json:
            report.write_record(args.json, "python -m benchmarks.moe_step", rows)


if __name__ == "__main__":
    main()
