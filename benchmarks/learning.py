"""Losses of a language model by way to multiply: the cost of each way in learning.

    python -m benchmarks learning --json FILE --join --resume

A run that is cut off keeps the ways that it has done; the same command goes on with the others.

The model is that of `python -m benchmarks step`, of 202 M parameters by default, and its ways are
those. It learns bytes of text that every machine with Python has: sources and documents of the
standard library and of installed packages. All ways see the same bytes in the same order and begin
with the same weights; every fiftieth file is held out. A row has the mean training loss of each
`EVERY` steps, the loss of held-out text then and, over more of it, in the end: "loss". "ms" is a
step's time between two of these, on the host's clock.
"""

import functools
import hashlib
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import llama, report
from benchmarks.llama import Model, Sizes, State, Way
from benchmarks.runner import Args, Case, Row
from benchmarks.step import PEERS, lowered, ways

SIZES = Sizes(layers=3, width=2048, inner=8192, heads=16, kv_heads=16, vocabulary=256)
TINY = Sizes(layers=1, width=64, inner=64, heads=1, kv_heads=1, head=64, vocabulary=256)
EVERY = 50  # steps between two points of a curve
USUAL = ("bf16", "auto", "mxfp8", *PEERS)  # without --ways
SUFFIXES = (".py", ".txt", ".rst", ".md")
LARGEST = 2**18  # bytes of a file; larger ones are tables more often than text
HELD_OUT = 50  # one file of so many


# ---- text ---
class Text(NamedTuple):
    """Bytes to learn, bytes held out, and how many files they are of."""

    train: np.ndarray
    held_out: np.ndarray
    files: int


def folders() -> list[Path]:
    """Where the standard library and the installed packages lie, in one order everywhere."""
    paths = {Path(path).resolve() for path in sys.path if path}
    packages = sorted(path for path in paths if any(path.glob("*.dist-info")))
    return [Path(sysconfig.get_path("stdlib")), *packages]


def files(folder: Path) -> Iterator[Path]:
    """Files with text, by name; packages inside of the standard library's folder left out."""
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder).parts
        if path.suffix in SUFFIXES and not {"site-packages", "dist-packages"} & {*inner}:
            if path.is_file() and 0 < path.stat().st_size <= LARGEST:
                yield path


@functools.cache
def text(most: int) -> Text:
    """Text of at most so many bytes, each file's content once, files in a random order."""
    contents: dict[bytes, bytes] = {}
    for folder in folders():
        for path in files(folder):
            content = path.read_bytes()
            contents.setdefault(hashlib.sha256(content).digest(), content)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, (_, content) in enumerate(sorted(contents.items())):
        parts[number % HELD_OUT == 0].append(content)
        size += len(content)
        if size >= most:
            break
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return Text(train, held_out, sum(map(len, parts)))


def pieces(source: np.ndarray, seed: Sequence[int], count: int, length: int) -> np.ndarray:
    """Bytes at random places, (count, length + 1), int32."""
    starts = np.random.default_rng(seed).integers(0, len(source) - length, (count, 1))
    return source[starts + np.arange(length + 1)].astype(np.int32)


# ---- training ---
def options(add: Callable[..., Any]) -> None:
    """Sizes and steps."""
    for name in ("layers", "width", "inner"):
        add(f"--{name}", type=int, default=getattr(SIZES, name))
    add("--steps", type=int, default=2000)
    add("--batch", type=int, default=8)
    add("--length", type=int, default=1024)
    add("--rate", type=float, default=3e-4, help="AdamW's largest")
    add("--seed", type=int, default=0, help="of weights and of what is read when")
    add("--attention", choices=("cudnn", "xla"), help="by default cudnn on a GPU")
    add("--resume", action="store_true", help="take rows that FILE of --json has already")
    add("--lower", action="store_true", help="only lower for CUDA, here, as step does")
    add("--seconds", type=float, default=float("inf"), help="after which a way stops early")


def cases(args: Args) -> Iterator[Case]:
    """All ways that `--ways` may name; without it the ways of `USUAL`."""
    heads = args.width // SIZES.head
    sizes = Sizes(args.layers, args.width, args.inner, heads, heads, vocabulary=256)
    steps, batch, length = args.steps, args.batch, args.length
    if args.smoke:
        sizes, steps, batch, length = TINY, 4, 2, 64
    names = {
        "parameters": parameters(sizes),
        "batch": batch,
        "length": length,
        "seed": args.seed,
        "device": jax.devices()[0].device_kind,
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
    }
    done = finished(args, names, steps) if args.resume else {}
    for name, (way, _) in ways(1).items():
        if args.ways or name in USUAL:
            measure = functools.partial(measured, name, way, sizes, (batch, length, steps))
            if name in done:
                measure = functools.partial(lambda row, _: row, done[name])
            yield Case("learning", name, {"way": name, **names}, measure)


def about() -> None:
    """Nothing: several runs may measure ways, so each row has its device and commit."""


def finished(args: Args, names: Row, steps: int) -> dict[str, Row]:
    """By way the rows that the file has of this model, on such a device, after all steps."""
    rows = report.read(args.json)[1] if args.json and args.json.exists() else []
    alike = {key: value for key, value in names.items() if key not in ("commit", "date")}
    alike["steps"] = -(-steps // every_of(steps)) * every_of(steps)
    return {row["way"]: row for row in rows if alike.items() <= row.items()}


def every_of(steps: int) -> int:
    """The steps between two points of a curve."""
    return min(EVERY, max(steps // 2, 1))


def parameters(sizes: Sizes) -> int:
    """Their number."""
    shapes = jax.eval_shape(Model(sizes, Way(), llama.Split()).weights, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def schedule(rate: float, steps: int) -> Callable[..., Any]:
    """AdamW's rates: up for a twentieth of all steps, then down to nothing along a cosine."""
    return optax.warmup_cosine_decay_schedule(0.0, rate, max(steps // 20, 1), steps)


def measured(name: str, way: Way, sizes: Sizes, extent: tuple[int, int, int], args: Args) -> Row:
    """A row's curves."""
    attention = llama.attention_of(args.attention)
    rate = schedule(args.rate, extent[2])
    model = Model(sizes, way, llama.Split(), "none", attention, rate)
    if args.lower:
        with model.setting():
            return lowered(model, (extent[0], extent[1] + 1))
    source = text(2**20 if args.smoke else 2**27)
    read = {"bytes": len(source.train), "files": source.files}
    with model.setting():
        return read | learned(name, model, source, extent, args)


def learned(name: str, model: Model, source: Text, extent: tuple[int, int, int], args: Args) -> Row:
    """Trains a model; its curves, its time and its loss in the end."""
    batch, length, steps = extent
    state = jax.jit(model.begin)(jax.random.key(args.seed))
    step, judge = model.jitted(model.step), jax.jit(model.loss)
    few, many = (
        [pieces(source.held_out, (i,), batch, length) for i in range(count)]
        for count in ((1, 2) if args.smoke else (8, 64))
    )

    def held_out(state: State, chosen: Sequence[np.ndarray]) -> float:
        losses = [judge(state.weights, state.scales, jnp.asarray(piece)) for piece in chosen]
        return float(np.mean(jax.device_get(losses)))

    every, row = every_of(steps), {"steps": 0, "train": [], "held_out": []}
    begin, times = time.perf_counter(), []
    while row["steps"] < steps and time.perf_counter() - begin < args.seconds:
        start, losses = time.perf_counter(), []
        for i in range(row["steps"], row["steps"] + every):
            read = pieces(source.train, (args.seed, i), batch, length)
            state, loss = step(state, jnp.asarray(read))
            losses.append(loss)
        row["train"].append(round(float(np.mean(jax.device_get(losses))), 4))
        times.append((time.perf_counter() - start) / every * 1e3)
        row["steps"] += every
        row["held_out"].append(round(held_out(state, few), 4))
        print(f"{name}: {row['steps']} steps, {row['train'][-1]}, held out {row['held_out'][-1]}")
    ms = statistics.median(times[1:] or times)
    return {"loss": round(held_out(state, many), 5), "ms": round(ms, 2), "every": every, **row}
