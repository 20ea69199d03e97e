"""Fills jax_mx/products/tables: which implementation serves the products of LLMs' layers.

python -m benchmarks.tune --seconds 500                      # on the chip; goes on where it ended
python -m benchmarks.tune --rows 16384 --recipes mxfp8       # some of it

Measures the three products of every layer (of few rows, as in decoding, the forward one alone), and
writes the chip's table, and a Markdown table beside it, after every layer: what is killed keeps
what it has.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_mx
from jax_mx.lowering.targets import chip_of
from jax_mx.products import choices
from jax_mx.products.choices import Choice

LAYERS = {  # contracted, free
    "llama-70b qkv": (8192, 10240),
    "llama-70b o": (8192, 8192),
    "llama-70b gate and up": (8192, 57344),
    "llama-70b down": (28672, 8192),
    "deepseek-v3 q_a": (7168, 1536),
    "deepseek-v3 q_b": (1536, 24576),
    "deepseek-v3 kv_a": (7168, 576),
    "deepseek-v3 kv_b": (512, 32768),
    "deepseek-v3 o": (16384, 7168),
    "deepseek-v3 dense gate and up": (7168, 36864),
    "deepseek-v3 dense down": (18432, 7168),
    "deepseek-v3 expert gate and up": (7168, 4096),
    "deepseek-v3 expert down": (2048, 7168),
}
ROWS = (16384, 4096, 256, 16, 1)
DECODING = 16  # rows up to which nobody asks for gradients
RECIPES = {
    "mxfp8": jax_mx.MXFP8,
    "mxfp8 in rows": jax_mx.Recipe(window="row"),
    "mxfp4": jax_mx.MXFP4,
}


def products(rows: int, recipe: jax_mx.Recipe) -> Any:
    """A function that has the products of a layer, by itself and with its gradients."""

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_mx.matmul(x, w, recipe=recipe)

    def every(x: jax.Array, w: jax.Array) -> Any:
        y, pull = jax.vjp(forward, x, w)
        return forward(x, w), pull(y)

    return forward if rows <= DECODING else every


def tuned(
    known: Choice,
    cases: Sequence[tuple[str, int, str]],
    seconds: float,
    candidates: int,
    file: Path,
) -> Choice:
    """What is known, and what is measured beside it; writes both after every case.

    Args:
      known: what has been measured already.
      cases: the layers.
      seconds: for all of them.
      candidates: of each product, at most.
      file: to write; one that ends in .md beside it.
    """
    end = time.monotonic() + seconds
    for i, (layer, rows, recipe) in enumerate(cases):
        k, n = LAYERS[layer]
        args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, k), (k, n))]
        f = products(rows, RECIPES[recipe])
        keys = {call.key for call in jax_mx.explain(f, *args).calls}
        done = {key for key in keys if (at := known.by_key.get(key)) and at.chosen}
        left = end - time.monotonic()
        print(f"{i + 1}/{len(cases)} {layer}, {rows} rows, {recipe}: {left:.0f} s left", flush=True)
        if keys <= done:
            continue
        if left <= 0:
            break
        found = jax_mx.autotune(f, *args, seconds=left, candidates=candidates, progress=False)
        measured = Choice.of(entry for entry in found.entries if entry.chosen)
        known = known | measured
        print(measured, flush=True)
        known.save(file)
        file.with_suffix(".md").write_text(markdown(known))
    return known


def markdown(choice: Choice) -> str:
    """A table of what was measured, in microseconds."""
    names = [*dict.fromkeys(name for entry in choice.entries for name, _ in entry.costs)]
    lines = [f"| product | chosen | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for entry in choice.entries:
        costs = dict(entry.costs)
        each = [f"{us:.1f}" if isinstance(us := costs.get(n), float) else "" for n in names]
        lines.append(f"| {entry.key} | {entry.chosen} | {' | '.join(each)} |")
    where = ", ".join(sorted({entry.on for entry in choice.entries}))
    return "\n".join([f"Microseconds, {where}.", "", *lines, ""])


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=500, help="for all")
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=[*LAYERS])
    parser.add_argument("--candidates", type=int, default=8, help="of each product, at most")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of the package's table")
    args = parser.parse_args()
    file = args.out or choices.TABLES / f"{chip_of(jax.devices()[0])}.json"
    known = choices.of_this_version(Choice.load(file)) if file.exists() else Choice()
    cases = [
        (layer, rows, recipe)
        for rows, recipe, layer in itertools.product(args.rows, args.recipes, args.layers)
    ]
    known = tuned(known, cases, args.seconds, args.candidates, file)
    print(f"{file}: {len(known.entries)} products")


if __name__ == "__main__":
    main()
