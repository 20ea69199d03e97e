"""A training step of a transformer with experts, in MX beside bfloat16: time and loss.

    python -m benchmarks.moe_step [--steps 1000] [--json out.json]

The model is that of examples/train_moe.py, wider; with --small as it is, which a CPU trains, too.
Each row is one way to compute it: milliseconds of a step (the median on the host's clock, each step
waited for), and the mean loss of the last twentieth of all steps.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import report
from examples import train_moe
from jax_mx import MXFP4_E2M1, Hadamard, Product, Recipe

# Recipe, and what computes grouped products.
WAYS: dict[str, tuple[Any, str | None]] = {
    "bf16": ("bf16", None),
    "bf16, lax.ragged_dot": ("bf16", "dequantize"),
    "bf16, Pallas": ("bf16", "pallas"),
    "mxfp8": ("mxfp8", None),
    "mxfp8, windows of 256": (Recipe(window=256), None),
    "mxfp4": ("mxfp4", None),
    "mxfp8, gradients in mxfp4": (train_moe.RECIPES["mxfp4"], None),
}
# Which of a layer's three products MXFP4 costs learning in; as the recipe MXFP4 has each.
PARTS: dict[str, tuple[Any, str | None]] = {
    "mxfp8, forward in mxfp4": (Recipe(forward=MXFP4_E2M1), None),
    "mxfp8, dgrad in mxfp4": (Recipe(dgrad=MXFP4_E2M1), None),
    "mxfp8, wgrad in mxfp4": (Recipe(wgrad=Product(MXFP4_E2M1, Hadamard(16))), None),
}
TIMED = 30  # steps, after as many that warm up
SLOW = 100  # steps of a way that is there for its time alone
WIDER = {"width": 1024, "inner": 512, "layers": 2, "length": 512, "rows": 16, "heads": 8}


def run(recipe: Any, implementation: str | None, steps: int, rate: float) -> tuple[float, list]:
    """Milliseconds of a step, and all losses."""
    pieces, length = np.fromfile(topics.__file__, np.uint8), train_moe.LENGTH
    model = train_moe.Model(recipe, None, nnx.Rngs(0))
    for block in model.blocks:
        block.moe = functools.partial(block.moe, implementation=implementation)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    losses, times = [], []
    for i in range(steps):
        starts = np.random.default_rng(i).integers(0, len(pieces) - length, (train_moe.ROWS, 1))
        rows = jax.device_put(jnp.asarray(pieces[starts + np.arange(length + 1)], jnp.int32))
        jax.block_until_ready(rows)
        start = time.perf_counter()
        losses.append(float(train_moe.step(model, optimizer, rows)))
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times[TIMED : 2 * TIMED])), losses


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
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    own = {name: getattr(train_moe, name.upper()) for name in WIDER} if args.small else WIDER
    sizes = {name: getattr(args, name) or size for name, size in own.items()}
    for name, size in sizes.items():
        setattr(train_moe, name.upper(), size)
    rows = []
    for name in args.ways:
        recipe, implementation = {**WAYS, **PARTS}[name]
        steps = min(args.steps, SLOW) if "lax" in name else args.steps
        start = time.perf_counter()
        ms, losses = run(recipe, implementation, steps, args.rate)
        row = {"way": name, **sizes, "steps": steps}
        row |= {
            "ms": round(ms, 3),
            "loss": round(float(np.mean(losses[-max(steps // 20, 1) :])), 4),
        }
        row |= {"losses": [round(float(x), 4) for x in losses[:: max(steps // 100, 1)]]}
        rows.append(row)
        took = time.perf_counter() - start
        print(f"{name:24} {ms:8.2f} ms  loss {row['loss']:.4f}  ({took:.0f} s)", flush=True)
        if args.json:
            report.write_record(args.json, "python -m benchmarks.moe_step", rows)


if __name__ == "__main__":
    main()
