"""Fills jax_mx/products/tables: which implementation serves the products of LLMs' layers.

python -m benchmarks tune --seconds 500                         # on the chip; it resumes a run.
python -m benchmarks tune --seconds 500 --out build/sm_90.json  # into another file.
python -m benchmarks tune --rows 16384 --recipes mxfp8          # some of it.

The command measures the three products of every layer; for few rows, as in decoding, the forward
one alone. It writes the chip's table, and a Markdown table next to it, after every product, so that
a killed run keeps its results. Important cases come first: models, rows and recipes are in the
order of their importance, and a case comes later, the farther behind its three are.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_mx
from jax_mx.products import choices, tuning
from jax_mx.products.choices import Choice, Measured, key_of
from jax_mx.products.decide import by_rule


class Experts(NamedTuple):
    """A layer of experts on one device: of each token `top`, whose gates are `hidden`."""

    groups: int
    top: int
    width: int
    hidden: int


MODELS: dict[str, dict[str, tuple[int, int] | Experts]] = {  # dense layers: contracted, free
    "llama-70b": {"qkv": (8192, 10240), "o": (8192, 8192), "gate and up": (8192, 57344),
        "down": (28672, 8192)},
    "deepseek-v3 experts": {"32 of 256": Experts(32, 8, 7168, 2048),
        "shared gate and up": (7168, 4096), "shared down": (2048, 7168)},
    "llama-8b": {"qkv": (4096, 6144), "o": (4096, 4096), "gate and up": (4096, 28672),
        "down": (14336, 4096)},
    "gpt-oss-120b": {"experts": Experts(128, 4, 2880, 2880), "qkv": (2880, 5120),
        "o": (4096, 2880)},
    "deepseek-v3": {"o": (16384, 7168), "gate and up": (7168, 36864), "down": (18432, 7168),
        "q_a": (7168, 1536), "q_b": (1536, 24576), "kv_a": (7168, 576), "kv_b": (512, 32768)},
}  # fmt: skip
ROWS = (16384, 1, 4096, 64, 16, 8192, 8, 32, 256)
DECODING = 64  # rows up to which nobody asks for gradients
RECIPES = {
    "mxfp8": jax_mx.MXFP8,
    "windows of 256": jax_mx.Recipe(window=256, weight_window=(128, 128)),
    "mxfp4": jax_mx.MXFP4,
    "rows": jax_mx.Recipe(window="row"),
}
WITHOUT = ("xla",)  # float32: never the fastest on a GPU
NOISE = 0.02  # a choice is another one than the rule's if it is faster by more


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, how many tokens it has, and its recipe."""

    model: str
    layer: str
    rows: int
    recipe: str

    def __str__(self) -> str:
        return f"{self.model} {self.layer}, {self.rows} rows, {self.recipe}"

    @property
    def products(self) -> tuple[Any, tuple[Any, ...]]:
        """A function of the layer, or of its gradients, and its arguments."""
        layer, recipe = MODELS[self.model][self.layer], RECIPES[self.recipe]

        def like(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        def experts(x: Any, w1: Any, w2: Any, chosen: Any, weights: Any) -> jax.Array:
            return jax_mx.moe(x, chosen, weights, w1, w2, recipe=recipe)

        forward: Callable[..., jax.Array] = functools.partial(jax_mx.matmul, recipe=recipe)
        weights = (like(*layer),)
        args = (like(self.rows, layer[0]), *weights)
        if isinstance(layer, Experts):
            groups, top, width, hidden = layer
            weights = like(groups, width, 2 * hidden), like(groups, hidden, width)
            routes = [like(self.rows, top, dtype=dtype) for dtype in (jnp.int32, jnp.float32)]
            forward, args = experts, (like(self.rows, width), *weights, *routes)
        wrt = tuple(range(1 + len(weights)))

        def gradients(*args: Any) -> Any:
            return jax.grad(lambda *a: forward(*a).astype(jnp.float32).sum(), wrt)(*args)

        return (forward if self.rows <= DECODING else gradients), args


def layers(models: Sequence[str], rows: Sequence[int], recipes: Sequence[str]) -> list[Case]:
    """The layers of models, what matters most first."""
    ranks = itertools.product(*(range(len(group)) for group in (models, rows, recipes)))
    cases = []
    for i, j, k in sorted(ranks, key=lambda rank: (sum(rank), rank)):
        for layer, shape in MODELS[models[i]].items():
            if not (isinstance(shape, Experts) and recipes[k] == "rows"):  # they span groups
                cases.append(Case(models[i], layer, rows[j], recipes[k]))
    return cases


def settled(entry: Measured, rule: str) -> Measured:
    """An entry as tables have it: the rule's choice unless another one is clearly faster.

    Why a candidate does not serve the call follows from the code; that one failed does not.
    """
    costs = {
        name: cost
        for name, cost in entry.costs
        if not isinstance(cost, str) or cost.startswith("left out: it ")
    }
    best, ruled = costs.get(entry.chosen or ""), costs.get(rule)
    chosen = entry.chosen
    if isinstance(best, float) and isinstance(ruled, float) and ruled <= best * (1 + NOISE):
        chosen = rule
    return dataclasses.replace(entry, chosen=chosen, costs=tuple(costs.items()))


def tuned(
    known: Choice, cases: Sequence[Case], seconds: float, candidates: int, file: Path
) -> Choice:
    """The known choice with new measurements; the file is written after every product.

    Args:
      known: the earlier measurements.
      cases: the layers.
      seconds: for all of them.
      candidates: of each product, at most.
      file: to write; a file that ends in .md is written next to it.
    """
    end = time.monotonic() + seconds
    target = tuning.place_of(())
    for i, case in enumerate(cases):
        print(f"{i + 1}/{len(cases)} {case}: {end - time.monotonic():.0f} s left", flush=True)
        for entry in measured(known, case, target, end, candidates):
            known |= Choice.of([entry])
            print(Choice.of([entry]), flush=True)
            known.save(file)
            file.with_suffix(".md").write_text(markdown(known))
        if time.monotonic() >= end:
            break
    return known


def measured(
    known: Choice, case: Case, target: Any, end: float, candidates: int
) -> Iterator[Measured]:
    """New measurements, for the products of a case that are not known."""
    f, args = case.products
    for traced_call in tuning.calls_in("tune", f, args)[0]:
        call, chip = traced_call.call.in_a_shard, target.chips[0]
        if key_of(call, chip) in known.by_key:
            continue
        entries = tuning.entries_of([traced_call], target, end, candidates, False, WITHOUT)
        rule = by_rule(call, target.platform, target.chips).implementation
        yield from (settled(entry, rule) for entry in entries if entry.chosen)


def markdown(choice: Choice) -> str:
    """A table of what was measured, in microseconds."""
    names = [*dict.fromkeys(name for entry in choice.entries for name, _ in entry.costs)]
    lines = [f"| product | chosen | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for entry in choice.entries:
        costs = dict(entry.costs)
        times = [f"{us:.1f}" if isinstance(us := costs.get(n), float) else "" for n in names]
        lines.append(f"| {entry.key} | {entry.chosen} | {' | '.join(times)} |")
    where = ", ".join(sorted({entry.on for entry in choice.entries}))
    return "\n".join([f"Microseconds, {where}.", "", *lines, ""])


def options(add: Callable[..., Any]) -> None:
    """Layers, the time for them, and their file."""
    add("--seconds", type=float, default=500, help="for all")
    add("--models", nargs="+", choices=MODELS, default=[*MODELS])
    add("--rows", type=int, nargs="+", choices=ROWS, default=[*ROWS])
    add("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES])
    add("--candidates", type=int, default=8, help="of each product, at most")
    add("--anew", action="store_true", help="measure again what is known")
    add("--out", type=Path, metavar="FILE", help="instead of the package's table")


def main(args: argparse.Namespace) -> None:
    """See the module's docstring."""
    chip = tuning.place_of(()).chips[0]
    file = args.out or choices.TABLES / f"{chip}.json"
    known = Choice() if args.anew else choices.shipped(chip)
    if not args.anew and file.exists():
        known |= choices.of_this_version(Choice.load(file))
    asked = layers(args.models, args.rows, args.recipes)
    known = tuned(known, asked, args.seconds, args.candidates, file)
    print(f"{file}: {len(known.entries)} products")
