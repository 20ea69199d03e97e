"""A perceptron of flax nnx that learns in MXFP8, beside itself in bfloat16.

    python examples/train_mlp.py [--recipe mxfp4] [--steps 200]

All that MX changes is `dot_general=`: products read MX operands, forward and backward, while
weights, gradients and the optimizer's state stay floats. On eight devices data is split over them.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import jax_mx

WIDTH, HIDDEN, ROWS = 128, 512, 1024


class Perceptron(nnx.Module):
    """Two hidden layers; WIDTH numbers in, WIDTH numbers out."""

    def __init__(self, dot_general, rngs: nnx.Rngs):
        make = functools.partial(nnx.Linear, dot_general=dot_general, dtype=jnp.bfloat16, rngs=rngs)
        self.first = make(WIDTH, HIDDEN)
        self.second = make(HIDDEN, HIDDEN)
        self.last = make(HIDDEN, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: (rows, WIDTH)."""
        return self.last(nnx.gelu(self.second(nnx.gelu(self.first(x)))))


def lesson(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(ROWS, WIDTH) inputs and what is to be made of them."""
    x = jax.random.normal(key, (ROWS, WIDTH))
    turn = jax.random.normal(jax.random.key(7), (WIDTH, WIDTH)) / WIDTH**0.5
    return x, jnp.sin(2 * x @ turn)


@nnx.jit(donate_argnums=(0, 1))
def step(model: Perceptron, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """One step of Adam; returns the loss before it."""

    def loss(model):
        return ((model(x).astype(jnp.float32) - y) ** 2).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def train(name: str, dot_general, steps: int, progress: Progress) -> list[float]:
    """The loss of every step."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    everywhere, split = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("data",)))
    model = Perceptron(dot_general, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    for module in (model, optimizer):
        nnx.update(module, jax.device_put(nnx.state(module), everywhere))
    task, losses = progress.add_task(name, total=steps, loss=""), []
    for i in range(steps):
        x, y = jax.device_put(lesson(jax.random.key(i)), split)
        losses.append(float(step(model, optimizer, x, y)))
        progress.update(task, advance=1, loss=f"loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    """Trains both and prints what they reached."""
    parser = argparse.ArgumentParser(description="Trains a perceptron in MX beside bfloat16.")
    parser.add_argument("--recipe", default="mxfp8", choices=["mxfp8", "mxfp8_hybrid", "mxfp4"])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    products = {
        "bfloat16": jax.lax.dot_general,
        options.recipe: functools.partial(jax_mx.dot_general, recipe=options.recipe),
    }
    console = Console()
    columns = (
        TextColumn("{task.description:>12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:
        losses = {name: train(name, f, options.steps, progress) for name, f in products.items()}
    table = Table("products", "first loss", "last loss", "against bfloat16")
    last = {name: sum(curve[-10:]) / len(curve[-10:]) for name, curve in losses.items()}
    for name, curve in losses.items():
        against = f"{last[name] / last['bfloat16'] - 1:+.2%}"
        table.add_row(name, f"{curve[0]:.4f}", f"{last[name]:.4f}", against)
    console.print(table)


if __name__ == "__main__":
    main()
