"""FSDP: devices hold weights in parts, quantize them there, and gather codes instead of floats.

    python examples/fsdp.py [--steps 20]

Trains a perceptron twice, on all devices (eight simulated ones on a CPU): with weights that are
gathered as bfloat16 and quantized everywhere, and with `jax_mx.gather_weight`. Both quantize to
the same bytes; the table says what the compiled steps move between devices.
"""

import argparse
import collections
import functools
import math
import os
import re

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_mx

WIDTH, HIDDEN, ROWS = 256, 1024, 512
BYTES = {"u8": 1, "bf16": 2, "f32": 4}
MOVES = r" = (.+?) (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-done)?\("
RECIPE = jax_mx.Recipe(block=(32, 32))  # square blocks: one array serves forward and backward


def weight_of(way: str, w: jax.Array, split: NamedSharding):
    """The weight for a product, from a float32 w that devices hold in parts."""
    w = w.astype(jnp.bfloat16)
    if way == "codes gathered":
        return jax_mx.gather_weight(w, split, RECIPE)
    everywhere = NamedSharding(split.mesh, PartitionSpec())
    return jax.lax.with_sharding_constraint(w, everywhere)


def make_step(way: str, split: NamedSharding, rate: float = 0.05):
    """A step of descent: (weights, x, y) to (weights, loss)."""

    def loss(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        for i, w in enumerate(weights):
            x = jax.nn.gelu(x) if i else x
            x = jax_mx.matmul(x, weight_of(way, w, split), recipe=RECIPE)
        return ((x.astype(jnp.float32) - y) ** 2).mean()

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=([split] * 3, None))
    def step(weights, x, y):
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return [w - rate * g for w, g in zip(weights, gradients, strict=True)], value

    return step


def moved(program: str) -> dict[str, int]:
    """Bytes of the results of each kind of collective in a compiled program, by its type."""
    counts: collections.Counter[str] = collections.Counter()
    for types, op in re.findall(MOVES, program):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]+)\]", types):
            size = BYTES.get(dtype, 0)  # others are not moved here
            counts[f"{op} {dtype}"] += math.prod(map(int, shape.split(","))) * size
    return dict(counts)


def train(way: str, steps: int) -> tuple[float, dict[str, int]]:
    """The last loss, and what a step moves."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))  # rows of x and y, and of each weight
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(WIDTH, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, WIDTH)]
    weights = [
        jax.device_put(jax.random.normal(key, shape) * shape[0] ** -0.5, split)
        for key, shape in zip(keys, shapes, strict=False)
    ]
    x = jax.device_put(jax.random.normal(keys[3], (ROWS, WIDTH), jnp.bfloat16), split)
    y = jnp.sin(2 * x.astype(jnp.float32))
    step = make_step(way, split)
    compiled = step.lower(weights, x, y).compile()
    value = jnp.inf
    for _ in track(range(steps), f"{way:>16}", transient=True):
        weights, value = compiled(weights, x, y)
    return float(value), moved(compiled.as_text() or "")


def main() -> None:
    """Trains both ways and prints what they did."""
    parser = argparse.ArgumentParser(description="Trains with weights in parts, two ways.")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    table = Table("way", "last loss", "moved in a step, bytes")
    for way in ("floats gathered", "codes gathered"):
        value, bytes_ = train(way, options.steps)
        said = "\n".join(f"{op}: {count:,}" for op, count in sorted(bytes_.items()))
        table.add_row(way, f"{value:.6f}", said, end_section=True)
    Console().print(table)
    if jax.default_backend() == "cpu":
        print("On a CPU, XLA moves bfloat16 as float32; on GPUs it is half of that.")


if __name__ == "__main__":
    main()
