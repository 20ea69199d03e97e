"""A training step of a transformer with experts, in MX beside bfloat16: time and loss.

The model is that of examples/train_moe.py, wider; with --small as it is, which a CPU trains, too.
Each row is one way to compute it: milliseconds of a step, tokens a second, and the mean loss of the
last twentieth of all steps. The time is the median on the host's clock, each step waited for.
`--devices 1 2` trains on one device, then on two, each of which has as many rows as the one had.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pydoc_data import topics
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.runner import Args, Case, Row
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
# Recipes with MXFP4 in one product of three show which one costs learning.
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
    fixed = {"implementation": way.implementation, "recipe": way.experts or way.recipe}
    for block in model.blocks:
        block.moe = functools.partial(block.moe, **fixed)
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


def options(add: Callable[..., Any]) -> None:
    """Sizes."""
    for name, size in WIDER.items():
        add(f"--{name}", type=int, help=f"by default {size}")
    add("--small", action="store_true", help="sizes are those of the example")
    add("--steps", type=int, default=1000)
    add("--rate", type=float, default=3e-4, help="Adam's")
    about = "how many devices to train on, by default one"
    add("--devices", type=int, nargs="+", default=[1], metavar="N", help=about)


def cases(args: Args) -> Iterator[Case]:
    """Every way on every number of devices; `PARTS` only where there are `--ways`."""
    if max(args.devices) > jax.device_count() or min(args.devices) < 1:
        raise ValueError(f"--devices must be 1 to {jax.device_count()}, got {args.devices}")
    small = args.small or args.smoke
    sizes = {name: getattr(train_moe, name.upper()) for name in WIDER} if small else WIDER
    sizes = {name: getattr(args, name) or size for name, size in sizes.items()}
    steps = 2 if args.smoke else args.steps
    for way, devices in itertools.product(WAYS | (PARTS if args.ways else {}), args.devices):
        names = {"way": way, **sizes, "steps": min(steps, SLOW) if "lax" in way else steps}
        names["devices"] = devices
        yield Case(f"{devices} devices", way, names, functools.partial(measure, way, names))


def measure(way: str, names: Row, args: Args) -> Row:
    """A row's times and losses, of a model of these sizes."""
    for name in WIDER:
        setattr(train_moe, name.upper(), names[name])
    steps, devices = names["steps"], names["devices"]
    with jax.numpy_dtype_promotion("standard"):  # which flax wants
        ms, losses = run({**WAYS, **PARTS}[way], steps, args.rate, devices)
    return {
        "ms": round(ms, 3),
        "loss": round(float(np.mean(losses[-max(steps // 20, 1) :])), 4),
        "tokens_s": round(1e3 * devices * names["rows"] * names["length"] / ms),
        "losses": [round(float(x), 4) for x in losses[:: max(steps // 100, 1)]],
    }
