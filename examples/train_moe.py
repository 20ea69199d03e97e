"""A small transformer with experts learns from Python's sources: bfloat16, MXFP8, MXFP4 gradients.

    python examples/train_moe.py [--steps 1000] [--recipes bf16 mxfp8] [--resume]

Curves go to train_moe.png, models to train_moe/ for --resume. 40 steps: 40 s on two CPU cores.
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.progress import Progress

import jax_mx

BACKWARD = jax_mx.mxfp4_backward(jax.random.key(0))
RECIPES = {"bf16": "bf16", "mxfp8": "mxfp8", "mxfp4_backward": BACKWARD}
WIDTH, INNER, HEADS, EXPERTS, CHOSEN, LAYERS, LENGTH, ROWS = 128, 128, 4, 8, 2, 2, 64, 32


class Block(nnx.Module):
    """Attention, then a mixture of experts, which are split over the mesh axis `axis`."""

    def __init__(self, recipe: jax_mx.Recipe | str, axis: str | None, rngs: nnx.Rngs):
        dot = partial(jax_mx.dot_general, recipe=recipe)
        linear = partial(nnx.Linear, use_bias=False, dot_general=dot, rngs=rngs)
        self.attend, self.back = (linear(WIDTH, n * WIDTH, dtype=jnp.bfloat16) for n in (3, 1))
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2)])
        init = nnx.initializers.lecun_normal(batch_axis=0)
        shapes = (WIDTH, 2 * INNER), (INNER, WIDTH)
        self.stacks = nnx.List([nnx.Param(init(rngs.params(), (EXPERTS, *s))) for s in shapes])
        self.moe = partial(jax_mx.moe, recipe=recipe, expert_axis=axis)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: (rows, LENGTH, WIDTH)."""
        heads = self.attend(self.norms[0](x)).reshape(*x.shape[:2], 3, HEADS, -1)
        attention = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
        x = x + self.back(attention.reshape(x.shape))
        tokens = self.norms[1](x).reshape(-1, WIDTH)
        weights, experts = jax.lax.top_k(jax.nn.softmax(self.router(tokens)), CHOSEN)
        stacks = [w[...].astype(jnp.bfloat16) for w in self.stacks]
        return x + self.moe(tokens, experts, weights, *stacks).reshape(x.shape)


class Model(nnx.Module):
    """Bytes in, logits of the next ones out."""

    def __init__(self, recipe: jax_mx.Recipe | str, axis: str | None, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.place = nnx.Embed(LENGTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(recipe, axis, rngs) for _ in range(LAYERS)])

    def loss(self, text: jax.Array) -> jax.Array:
        """The mean cross entropy of (rows, LENGTH + 1) bytes."""
        x = self.embed(text[:, :-1]) + self.place(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        logits = self.embed.attend(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


@nnx.jit(donate_argnums=(0, 1))
def step(model: Model, optimizer: nnx.Optimizer, text: jax.Array) -> jax.Array:
    """One step of Adam; returns the loss before it."""
    value, gradients = nnx.value_and_grad(Model.loss)(model, text)
    optimizer.update(model, gradients)
    return value


def train(recipe: str, steps: int, resume: bool, progress: Progress) -> list[float]:
    """The losses of all steps, those before a resume too."""
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in sources), np.uint8)
    n, axes = jax.device_count(), ("data", "expert")
    experts, count = int(np.gcd(n, EXPERTS)), -(-ROWS // n) * n  # as many rows on each device
    mesh = jax.make_mesh((n // experts, experts), axes, axis_types=(AxisType.Auto,) * 2)
    sharded = lambda *names: NamedSharding(mesh, PartitionSpec(*names))  # noqa: E731
    with jax.set_mesh(mesh), ocp.CheckpointManager(Path(f"train_moe/{recipe}").resolve()) as files:
        model = Model(RECIPES[recipe], "expert" if mesh.size > 1 else None, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        both, losses = (model, optimizer), np.zeros(0)
        split = lambda a: jax.device_put(a, sharded(*("expert",) * (a.ndim == 3)))  # noqa: E731
        state = jax.tree.map(split, nnx.state(both))  # stacks of experts; all else everywhere
        if resume and (n := files.latest_step()):
            state, losses = files.restore(n, args=ocp.args.StandardRestore([state, np.zeros(n)]))
        nnx.update(both, state)
        losses, bar = losses.tolist(), progress.add_task(recipe, total=steps, completed=len(losses))
        for i in range(len(losses), steps):
            starts = np.random.default_rng(i).integers(0, len(text) - LENGTH, (count, 1))
            rows = jax.device_put(text[starts + np.arange(LENGTH + 1)], sharded(axes))
            losses.append(float(step(model, optimizer, rows.astype(jnp.int32))))
            progress.update(bar, advance=1, description=f"{recipe:>6} loss {losses[-1]:.3f}")
        kept = ocp.args.StandardSave([nnx.state(both), np.array(losses)])
        files.save(steps, args=kept, force=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    with Progress() as bars:
        for name in options.recipes:
            curve = train(name, options.steps, options.resume, bars)
            bars.print(f"{name}: loss {curve[0]:.4f}, of the last 20 {np.mean(curve[-20:]):.4f}")
            plt.plot(curve, label=name)
    plt.figlegend()
    plt.savefig("train_moe.png")
