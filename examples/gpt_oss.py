"""Runs the experts of gpt-oss on the MXFP4 weights of its checkpoint, as they were published.

    python examples/gpt_oss.py FOLDER --layer 5    # of a downloaded checkpoint
    python examples/gpt_oss.py                     # of a small one with the same names, made here

The router's weights come from the same files. The weights stay in MXFP4: on Hopper products read
their codes and scales, elsewhere each call dequantizes them. A few tokens are computed again in
float64, expert by expert, to compare.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jax_mx

AT = "model.layers.{}.mlp."
EXPERTS, WIDTH, INNER, CHOICES = 16, 288, 320, 4  # of the small one


def make_checkpoint(folder: Path) -> None:
    """A layer by the names of the published files."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    at, tensors = AT.format(0), {}
    for name, rows, cols in (("gate_up_proj", 2 * INNER, WIDTH), ("down_proj", WIDTH, INNER)):
        w = jax.random.normal(next(keys), (EXPERTS, rows, cols), jnp.bfloat16) * cols**-0.5
        q = jax_mx.quantize(w, "mxfp4_e2m1")
        tensors[f"{at}experts.{name}_blocks"] = q.values.reshape(EXPERTS, rows, cols // 32, 16)
        tensors[f"{at}experts.{name}_scales"] = np.asarray(q.scales).view(np.uint8)
        bias = jax.random.normal(next(keys), (EXPERTS, rows), jnp.bfloat16) / 10
        tensors[f"{at}experts.{name}_bias"] = bias
    router = jax.random.normal(next(keys), (EXPERTS, WIDTH), jnp.bfloat16) * WIDTH**-0.5
    tensors |= {at + "router.weight": router, at + "router.bias": jnp.zeros(EXPERTS, jnp.bfloat16)}
    jax_mx.save_safetensors(tensors, folder / "model.safetensors")


def router_of(folder: Path, layer: int) -> tuple[jax.Array, jax.Array]:
    """The router's (E, D) and (E,), from whichever file has them."""
    name = AT.format(layer) + "router."
    index = folder / "model.safetensors.index.json"
    file = "model.safetensors"
    if index.exists():
        file = json.loads(index.read_text())["weight_map"][name + "weight"]
    tensors = jax_mx.load_safetensors(folder / file)
    weight, bias = (tensors[name + part] for part in ("weight", "bias"))
    assert not isinstance(weight, jax_mx.MXArray) and not isinstance(bias, jax_mx.MXArray)
    return weight, bias


@partial(jax.jit, static_argnames="recipe")
def feed_forward(x, router, bias, experts, recipe):
    """(T, D) of tokens (T, D); and the experts that were chosen, with their weights."""
    logits = x.astype(jnp.float32) @ router.T.astype(jnp.float32) + bias.astype(jnp.float32)
    top, chosen = jax.lax.top_k(logits, CHOICES)
    weights = jax.nn.softmax(top)
    options = {"activation": "gpt_oss", "interleaved": True, "recipe": recipe}
    return jax_mx.moe(x, chosen, weights, **experts._asdict(), **options), chosen, weights


def in_float64(x, chosen, weights, experts) -> np.ndarray:
    """One token, written out; the weights are what MX says they are."""
    y = np.zeros(x.shape, np.float64)
    for e, weight in zip(np.asarray(chosen), np.asarray(weights, np.float64), strict=True):
        up_down = (experts.w_gate_up[int(e)], experts.w_down[int(e)])
        first, second = (np.asarray(w.dequantize(jnp.float32), np.float64) for w in up_down)
        b_first, b_second = (np.asarray(b[e], np.float64) for b in experts[2:])
        gate_up = first @ np.asarray(x, np.float64) + b_first
        gate, up = np.minimum(gate_up[::2], 7), np.clip(gate_up[1::2], -7, 7)
        hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        y += weight * (second @ hidden + b_second)
    return y


def main() -> None:
    """Loads a layer, runs it, compares."""
    parser = argparse.ArgumentParser(description="Runs gpt-oss' experts in MXFP4.")
    parser.add_argument("folder", type=Path, nargs="?", help="of the checkpoint")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--recipe", default="bf16", help="of tokens; mxfp8 quantizes them, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made_folder:
        folder = options.folder or Path(made_folder)
        if options.folder is None:
            make_checkpoint(folder)
        experts = jax_mx.gpt_oss.load_experts(folder, options.layer)
        router, bias = router_of(folder, options.layer)
    shape = (options.tokens, router.shape[1])
    x = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    run = partial(feed_forward, x, router, bias, experts, options.recipe)
    y, chosen, weights = jax.block_until_ready(run())  # compiles
    start = time.perf_counter()
    jax.block_until_ready(run())
    took = time.perf_counter() - start
    want = np.stack([in_float64(x[t], chosen[t], weights[t], experts) for t in range(4)])
    error = np.abs(np.asarray(y[:4], np.float64) - want).max() / np.abs(want).max()
    held = sum(w.nbytes for w in experts[:2])
    table = Table("what", "value", title=f"layer {options.layer}: {router.shape[0]} experts")
    table.add_row("matrices in MXFP4", f"{held:,} bytes")
    table.add_row("the same in bfloat16", f"{2 * sum(w.size for w in experts[:2]):,} bytes")
    table.add_row(f"{options.tokens} tokens on {jax.devices()[0].device_kind}", f"{took:.3g} s")
    table.add_row("differs from float64 by at most", f"{error:.1e} of the largest element")
    Console().print(table)


if __name__ == "__main__":
    main()
