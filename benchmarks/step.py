"""A training step of a Llama-like transformer: tokens a second by way, on one GPU or under FSDP.

    python -m benchmarks step  # one device, 6 layers of Llama-3-8B.
    python -m benchmarks step --devices 4 --layers 32 --ways bf16 rows flax "rows, explicit"
    python -m benchmarks step --checkpoint none --ways bf16 rows --profile

A way names the products of layers: *bf16*, or one of our recipes; *rows* is `Recipe(window="row")`.
*tensorwise* is FP8 with one scale a tensor in plain JAX, *flax* its `Fp8DirectDotGeneralOp` with
delayed scaling. Words behind a comma add to it: *mlp*, by `jax_mx.mlp`; *once*, weights by
`quantize_weight` outside of the checkpoint. *explicit* is FSDP on explicit axes, *shard_map* FSDP
by `gather_weight`; the default is jit on automatic axes. Each row is the median of steps after the
first ones, on the host's clock, each waited for; "ratio" is to *bf16* of the same run. "compile_s"
is the time to trace, lower and compile; "temp_gb" is XLA's memory besides arguments.

`--lower` only lowers each way for CUDA, which takes no GPU: kernels are then in JAX_MX_CACHE. For
several devices, XLA_FLAGS=--xla_force_host_platform_device_count=4 makes CPUs that stand for them.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks import llama, program, timing
from benchmarks.llama import Model, Ours, Sizes, Way
from benchmarks.runner import Args, Case, Row, repeats
from jax_mx import Recipe

OURS: Mapping[str, Recipe | str] = {
    "auto": "auto",
    "fast": "mxfp8_rows_fast",
    "rows": Recipe(window="row"),
    "w256": Recipe(window=256),
    "tiles": Recipe(window=256, weight_window=(128, 128)),
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
}  # "tiles" are for weights that are split
PEERS: Mapping[str, Way] = {"tensorwise": llama.Current(), "flax": llama.Delayed()}
_APART = ("tiles", "fast")
USUAL = ("bf16", *(name for name in OURS if name not in _APART), *PEERS)  # without --ways
WARM_UP = 3
show = Console(width=120).print
MARKS: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"fused": True},
    "once": {"once": True},
    "mlp, once": {"fused": True, "once": True},
}
SMOKE = {"width": 64, "inner": 128, "heads": 2, "kv_heads": 1, "head": 32, "vocabulary": 64}


def options(add: Callable[..., Any]) -> None:
    """Sizes, devices, and what is shown."""
    sizes = Sizes()
    add("--layers", type=int, default=sizes.layers)
    add("--width", type=int, default=sizes.width)
    add("--inner", type=int, default=sizes.inner, help="width of the MLP")
    add("--heads", type=int, help="of queries, 128 elements each; by default width / 128")
    add("--kv-heads", type=int, default=sizes.kv_heads)
    add("--vocabulary", type=int, default=sizes.vocabulary)
    add("--batch", type=int, default=4, help="sequences a device")
    add("--length", type=int, default=4096, help="tokens of a sequence")
    add("--checkpoint", choices=llama.CHECKPOINTS, default="full")
    add("--devices", type=int, default=1, metavar="N")
    about = "of jax.nn.dot_product_attention; by default cudnn on a GPU"
    add("--attention", choices=("cudnn", "xla"), help=about)
    add("--profile", action="store_true", help="print where the time goes, by kernel")
    add("--moves", action="store_true", help="print what moves between devices, by collective")
    add("--lower", action="store_true", help="only lower for CUDA, here")


def ways(devices: int) -> dict[str, tuple[Way, str]]:
    """By name each way, and in `llama.SPLITS` how devices share it."""
    plain = {"bf16": Way(), **{name: Ours(recipe) for name, recipe in OURS.items()}}
    more = {
        f"{name}, {mark}": Ours(recipe, **options)
        for (name, recipe), (mark, options) in itertools.product(OURS.items(), MARKS.items())
    }
    result = {name: (way, "jit") for name, way in {**plain, **more}.items()}
    if devices > 1:
        for split, (name, way) in itertools.product(("explicit", "shard_map"), plain.items()):
            result[f"{name}, {split}"] = way, split
    return result | {name: (way, "jit") for name, way in PEERS.items()}  # which compile the longest


def sizes_of(args: Args) -> tuple[Sizes, int, int]:
    """The model's, sequences of all devices, and their length."""
    batch, length = args.batch * args.devices, args.length
    sizes = {"width": args.width, "inner": args.inner, "vocabulary": args.vocabulary}
    sizes |= {"heads": args.heads or args.width // Sizes.head, "kv_heads": args.kv_heads}
    if args.smoke:
        least = (128 if args.devices > 1 else 32) * args.devices  # so that parts hold windows
        sizes = {**SMOKE, "width": max(SMOKE["width"], least), "inner": max(SMOKE["inner"], least)}
        sizes["vocabulary"] = max(SMOKE["vocabulary"], least)
        sizes["heads"] = sizes["width"] // SMOKE["head"]
        batch, length = args.devices, 64
    return Sizes(layers=args.layers if not args.smoke else 2, **sizes), batch, length


def cases(args: Args) -> Iterator[Case]:
    """All ways that `--ways` may name; without it the ways of `USUAL`."""
    if not 1 <= args.devices <= jax.device_count():
        raise ValueError(f"--devices must be 1 to {jax.device_count()}, got {args.devices}")
    sizes, batch, length = sizes_of(args)
    names = {
        "devices": args.devices,
        "layers": sizes.layers,
        "width": sizes.width,
        "inner": sizes.inner,
        "batch": batch,
        "length": length,
        "checkpoint": args.checkpoint,
        "device": jax.devices()[0].device_kind,
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
    }
    attention = llama.attention_of(args.attention)
    for name, (way, split) in ways(args.devices).items():
        if name in USUAL or args.ways:
            make = functools.partial(
                Model, sizes, way, checkpoint=args.checkpoint, attention=attention
            )
            measure = functools.partial(measured, name, make, split, (batch, length + 1))
            yield Case("step", name, {"way": name, **names}, measure, "bf16")


def about() -> None:
    """Nothing: a file has rows of several commands, and each row has its device and commit."""


def measured(
    name: str, make: Callable[..., Model], split: str, shape: tuple[int, int], args: Args
) -> Row:
    """A row's numbers: of a model that is compiled, stepped, and deleted."""
    model = make(split=llama.split_of(split, args.devices))
    with model.setting():
        try:
            return lowered(model, shape) if args.lower else timed(name, model, shape, args)
        finally:
            jax.clear_caches()  # a program holds memory of the device


def lowered(model: Model, shape: tuple[int, int]) -> Row:
    """The seconds that it takes to trace a step and to lower it for CUDA; its loss alone, too."""
    where, of_text = model.shardings()
    state = jax.eval_shape(model.begin, jax.random.key(0))
    if model.split.mesh is not None:
        state = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, where
        )
    text = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=of_text)
    start = time.perf_counter()
    step = model.jitted(model.step).trace(state, text).lower(lowering_platforms=("cuda",))
    took = time.perf_counter() - start
    loss = jax.jit(model.loss).trace(state.weights, state.scales, text)
    loss.lower(lowering_platforms=("cuda",))
    calls = step.as_text().count("stablehlo.custom_call")
    return {"lower_s": round(took, 1), "calls": calls}


def timed(name: str, model: Model, shape: tuple[int, int], args: Args) -> Row:
    """The row of a model that is here."""
    tokens = np.random.default_rng(0).integers(0, model.sizes.vocabulary, shape, np.int32)
    state, text = model.placed(jax.random.key(0), tokens)
    start = time.perf_counter()
    compiled = model.jitted(model.step).lower(state, text).compile()
    row = {"compile_s": round(time.perf_counter() - start, 1)}
    row["temp_gb"] = round(compiled.memory_analysis().temp_size_in_bytes / 2**30, 2)
    times, losses = [], []
    for _ in range(repeats(args, 9) + WARM_UP):
        start = time.perf_counter()
        state, loss = compiled(state, text)
        losses.append(float(loss))
        times.append(1e3 * (time.perf_counter() - start))
    ms = statistics.median(times[WARM_UP:])
    said = f"{name}, {args.devices} x {jax.devices()[0].device_kind}"
    if args.profile:
        state = profiled(said, compiled, state, text)
    if args.moves:
        show(program.move_table(said, program.collectives(compiled.as_text())))
    tokens_s = shape[0] * (shape[1] - 1) / ms * 1e3
    flop = model.sizes.flop(1, shape[1] - 1) * tokens_s / args.devices
    row = {"ms": round(ms, 2), "tokens_s": round(tokens_s), "tflops": round(flop / 1e12, 1)} | row
    return row | {"loss": [round(losses[0], 4), round(losses[-1], 4)]}


def profiled(said: str, compiled: Any, state: Any, text: jax.Array, steps: int = 2) -> Any:
    """Prints what the first device did in a step, by kernel; the state after some steps."""

    def step(_: Any) -> jax.Array:
        nonlocal state
        state, loss = compiled(state, text)
        return loss

    traces = timing.profiles(step, [(None,)], steps)
    for events in [*traces.values()][:1]:
        show(program.kernel_table(said, program.kernels(events, steps)))
        moves, hidden = (ms / steps for ms in program.overlap(events))
        show(f"{said}: collectives take {moves:.1f} ms, {hidden:.1f} of them beside other kernels")
    return state
