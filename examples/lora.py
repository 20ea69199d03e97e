"""Adapters (LoRA) that learn over a frozen base in MXFP4, and what each takes in memory.

    python examples/lora.py [--format mxfp8_e4m3] [--rank 8] [--steps 300]

A perceptron learns a task in floats. Then its matrices become MX arrays, and two thin matrices
beside each learn another task. `jax_mx.partition` parts what learns from what does not: optax sees
the adapters alone, and the codes of the base stay the bytes that they are.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import jax_mx

WIDTH, HIDDEN, ROWS = 64, 256, 512
SHAPES = {"first": (WIDTH, HIDDEN), "second": (HIDDEN, HIDDEN), "last": (HIDDEN, WIDTH)}


def start(key: jax.Array) -> dict:
    """The base, in floats."""
    keys = jax.random.split(key, len(SHAPES))
    return {
        name: {"base": jax.random.normal(k, shape) / shape[0] ** 0.5}
        for k, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def with_adapters(params: dict, format: str, rank: int, key: jax.Array) -> dict:
    """The base as MX arrays, with adapters that change nothing yet."""
    adapted = {}
    for k, (name, layer) in zip(jax.random.split(key, len(params)), params.items(), strict=True):
        rows, columns = layer["base"].shape
        adapted[name] = {
            "base": jax_mx.quantize(layer["base"], format, axis=0),
            "down": jax.random.normal(k, (rows, rank)) / rows**0.5,
            "up": jnp.zeros((rank, columns)),
        }
    return adapted


def product(layer: dict, x: jax.Array) -> jax.Array:
    """A layer's product; x is floats, the base floats or MX."""
    if not isinstance(layer["base"], jax_mx.MXArray):
        return x @ layer["base"]
    return jax_mx.matmul(x, layer["base"]) + (x @ layer["down"]) @ layer["up"]


def model(params: dict, x: jax.Array) -> jax.Array:
    """x: (rows, WIDTH)."""
    x = jax.nn.gelu(product(params["first"], x))
    return product(params["last"], jax.nn.gelu(product(params["second"], x)))


def lesson(task: int, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(ROWS, WIDTH) inputs and what a task makes of them; the second differs by a thin matrix."""
    x = jax.random.normal(jax.random.key(step), (ROWS, WIDTH))
    turn, left, right = (jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) for i in (7, 8, 9))
    return x, jnp.tanh(x @ (turn + 2 * task * left[:, :2] @ right[:2]) / WIDTH**0.5)


def train(params: dict, task: int, steps: int) -> tuple[dict, list[float]]:
    """Trains all but MX arrays; gives the parameters, and every step's loss."""
    trained, frozen = jax_mx.partition(params)
    optimizer = optax.adam(2e-3)

    @jax.jit
    def step(trained, frozen, state, i):
        x, y = lesson(task, i)

        def loss(trained):
            return ((model(jax_mx.combine(trained, frozen), x) - y) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(trained, updates), state, value

    state, losses = optimizer.init(trained), []
    for i in range(steps):
        trained, state, value = step(trained, frozen, state, i)
        losses.append(float(value))
    return jax_mx.combine(trained, frozen), losses


def size(tree) -> int:
    """Bytes of a tree's arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def main() -> None:
    """Trains the base, then the adapters, and prints what they reached."""
    parser = argparse.ArgumentParser(description="Trains adapters over a frozen base in MX.")
    parser.add_argument("--format", default="mxfp4_e2m1", choices=["mxfp8_e4m3", "mxfp4_e2m1"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    base, losses = train(start(jax.random.key(0)), 0, options.steps)
    print(f"base, in float32:   loss {losses[0]:.4f} -> {losses[-1]:.4f}, {size(base)} bytes")
    before = with_adapters(base, options.format, options.rank, jax.random.key(1))
    adapted, losses = train(before, 1, options.steps)
    trained, frozen = jax_mx.partition(adapted)
    print(f"adapters, new task: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {size(trained)} bytes")
    print(f"base, in {options.format}: {size(frozen)} bytes")
    pairs = zip(*(jax.tree.leaves(jax_mx.partition(p)[1]) for p in (before, adapted)), strict=True)
    same = all(bool((a.view(jnp.uint8) == b.view(jnp.uint8)).all()) for a, b in pairs)
    print("the base's codes and scales are", "the same bytes" if same else "OTHER BYTES")


if __name__ == "__main__":
    main()
