"""Products that read MX operands beside those of bfloat16, on one GPU, in one run.

    python -m benchmarks.products [--case grouped] [--peers] [--json out.json]

Weights rotate, so that L2 holds none; times are medians of what a call spends on the device. A file
keeps its rows of cases and candidates that a run does not measure: each says where and when it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mx
from benchmarks import peers, report, timing
from jax_mx.facts.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3, SCALE_DTYPE, Format
from jax_mx.facts.layouts import ROW_MAJOR
from jax_mx.facts.windows import ROW
from jax_mx.ops.gemm import gemm, gemm_fp8, gemm_wgrad

REST = 0.5  # seconds before each measurement: a hot chip is slower


@dataclasses.dataclass(frozen=True)
class Case:
    """What is multiplied: x (rows, k) and matrices (n, k), of groups or one.

    Attributes:
      name: for the table.
      rows: of x.
      k: the contracted length.
      n: columns of y.
      groups: how many matrices there are; 0: one, and no groups.
      skew: how sizes of groups differ: 0: about equal, none a multiple of a tile; 1: as 1 / rank.
      active: how many groups have rows; all by default.
      wgrad: whether rows are what is contracted: x (k, rows) and W (n, rows), for each group a
        result of its part of them, which is a multiple of 256.
    """

    name: str
    rows: int
    k: int
    n: int
    groups: int = 0
    skew: float = 0
    active: int = 0
    wgrad: bool = False

    @property
    def sizes(self) -> np.ndarray | None:
        """The rows of each group."""
        if not self.groups:
            return None
        count = self.active or self.groups
        share = 1 / np.arange(1, count + 1) ** self.skew
        ends = np.round(np.cumsum(share) / share.sum() * self.rows).astype(int)
        if not self.skew:
            ends[:-1] += (97 * (np.arange(count - 1) % 3 - 1)) * (self.rows > 64 * count)
        if self.wgrad:
            ends = ends // 256 * 256
        sizes = np.zeros(self.groups, np.int32)
        order = np.random.default_rng(0).permutation(self.groups)[:count]
        sizes[np.sort(order)] = np.diff(ends, prepend=0)
        return sizes

    @property
    def kind(self) -> str:
        """Which product it is, by the name that `peers` has for it."""
        return "wgrad" if self.wgrad else "grouped" if self.groups else "dense"

    @property
    def matrices(self) -> int:
        """That are read."""
        sizes = self.sizes
        return 1 if sizes is None else int((sizes > 0).sum())

    @property
    def is_large(self) -> bool:
        """Whether there are more rows than decoding has."""
        return self.rows > 64 * max(self.groups, 1)

    @property
    def tflop(self) -> float:
        """Operations, in 10^12."""
        return 2 * self.rows * self.k * self.n / 1e12


CASES = (
    Case("dense", 16384, 7168, 4096),
    Case("dense, its dgrad", 16384, 4096, 7168),
    Case("dense, its wgrad", 7168, 16384, 4096),
    Case("dense, Llama 70B qkv", 16384, 8192, 10240),
    Case("dense, Llama 70B out", 16384, 8192, 8192),
    # The MLPs of Llama 70B and of DeepSeek-V3's first layers: one's dgrad has the other's shape.
    Case("dense, Llama 70B up", 16384, 8192, 28672),
    Case("dense, Llama 70B down", 16384, 28672, 8192),
    Case("dense, DeepSeek-V3 up", 16384, 7168, 18432),
    Case("dense, DeepSeek-V3 down", 16384, 18432, 7168),
    Case("grouped up", 16384, 7168, 4096, 8),
    Case("grouped 2048", 16384, 7168, 2048, 8),
    Case("grouped down", 16384, 2048, 7168, 8),
    Case("grouped skewed", 16384, 7168, 4096, 64, 1.0),
    # A device's 32 of DeepSeek-V3's 256 experts, gate and up beside each other.
    Case("grouped, DeepSeek-V3 up", 32768, 7168, 4096, 32),
    Case("grouped, DeepSeek-V3 down", 32768, 2048, 7168, 32),
    Case("wgrad up", 16384, 7168, 4096, 8, wgrad=True),
    Case("wgrad down", 16384, 2048, 7168, 8, wgrad=True),
    Case("wgrad skewed", 16384, 7168, 2048, 32, 1.0, wgrad=True),
    Case("decode grouped 2880", 512, 2880, 2880, 128),
    Case("decode grouped 7168", 512, 7168, 2048, 128),
    *(Case(f"decode {m}x{n}", m, 7168, n) for n in (4096, 16384) for m in (1, 8, 16, 64)),
)


# ---- operands ---
def codes(key: jax.Array, shape: Sequence[int], format: Format) -> jax_mx.MXArray:
    """Normal numbers, all scales alike."""
    *lead, k = shape
    if format == MXFP4_E2M1:
        values = jax.random.bits(key, (*lead, k // 2), jnp.uint8)
    else:
        values = (100 * jax.random.normal(key, shape, jnp.bfloat16)).astype(format.storage)
    scales = jnp.full((*lead, k // BLOCK), 119, jnp.uint8)
    return jax_mx.MXArray(
        values, jax.lax.bitcast_convert_type(scales, SCALE_DTYPE), format, -1, ROW_MAJOR
    )


def candidates(case: Case) -> Iterator[tuple[str, Callable, Callable]]:
    """(name, how a key makes the weights, the product of x, weights and sizes)."""
    if case.wgrad:
        yield from gradients(case)
        return
    shape = (case.groups, case.n, case.k) if case.groups else (case.n, case.k)
    kernel = functools.partial(gemm, implementation="cutedsl")
    fast = functools.partial(gemm_fp8, implementation="cutedsl")
    for format in (MXFP8_E4M3, MXFP4_E2M1):
        yield format.name, functools.partial(codes, shape=shape, format=format), kernel
    eights = functools.partial(codes, shape=shape, format=MXFP8_E4M3)
    if case.is_large:
        across = (*shape[:-2], case.k, case.n)  # as the gradient of x reads a weight (k, n)
        for format in (MXFP8_E4M3, MXFP4_E2M1):
            make = functools.partial(codes, format=format)
            free = functools.partial(kernel, contracting=-2)
            yield f"{format.name}, free blocks", functools.partial(make, shape=across), free
        for window, tiles in ((128, True), (256, True), (128, False), (256, False)):
            name = f"fp8 1x{window}, W {'128x128' if tiles else f'1x{window}'}"
            yield name, eights, functools.partial(fast, window=window, tiles=tiles)
        yield "fp8 rows", eights, functools.partial(fast, window=ROW)
    floats = functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
    if not case.groups:
        yield "bf16 dot", floats, lambda x, w: jnp.dot(x, w.T)
        yield "mxfp8 scaled_dot", eights, scaled_dot
        yield "fp8 dot of codes", eights, dot_of_codes
        return
    yield "bf16 Pallas", floats, pallas
    if case.is_large:
        yield "bf16 ragged_dot", floats, lambda x, w, s: jax.lax.ragged_dot(x, w.mT, s)


def gradients(case: Case) -> Iterator[tuple[str, Callable, Callable]]:
    """The same of a gradient of weights."""
    eights = functools.partial(codes, shape=(case.n, case.rows), format=MXFP8_E4M3)
    for window in (128, 256):
        product = functools.partial(gemm_wgrad, window=window, implementation="cutedsl")
        yield f"fp8 1x{window}", eights, product
    floats = functools.partial(jax.random.normal, shape=(case.rows, case.n), dtype=jnp.bfloat16)
    yield "bf16", floats, functools.partial(gemm_wgrad, implementation="cutedsl")
    contracted = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    yield "bf16 Pallas", floats, transposed_pallas
    yield (
        "bf16 ragged_dot",
        floats,
        functools.partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=contracted),
    )
    yield "bf16 dot of all rows", floats, lambda x, w, s: jnp.dot(x.T, w)


def transposed_pallas(x, w, sizes) -> jax.Array:
    """JAX's Pallas kernel, with the tiles of its own test."""
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    return transposed_ragged_dot_mgpu.transposed_ragged_dot(
        x, w, group_sizes=sizes, block_m=128, block_n=128, block_k=64,
        max_concurrent_steps=4, grid_block_n=8,
    )  # fmt: skip


def scaled_dot(x, w: jax_mx.MXArray) -> jax.Array:
    """What JAX has: x is dequantized beside w."""
    ones = jnp.full((x.shape[0], x.shape[1] // BLOCK), 127, jnp.uint8)
    ones = jax.lax.bitcast_convert_type(ones, SCALE_DTYPE)
    return jax.lax.scaled_dot(
        x, w.values, lhs_scale=ones, rhs_scale=w.scales,
        dimension_numbers=(((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16,
    )  # fmt: skip


def dot_of_codes(x: jax_mx.MXArray, w: jax_mx.MXArray) -> jax.Array:
    """What cuBLASLt makes of FP8 codes alone: no scales, so another product, but the same reads.

    JAX has no way to its product of windows; `--peers` measures that through torch.
    """
    return jax.lax.dot_general(
        x.values, w.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16
    )


def pallas(x, w, sizes) -> jax.Array:
    """JAX's Pallas kernel, with the tiles that were the fastest of those tried."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    return ragged_dot_mgpu.ragged_dot(
        x, w, group_sizes=sizes, block_m=128, block_n=128, block_k=64,
        max_concurrent_steps=4, grid_block_n=8, transpose_rhs=True,
    )  # fmt: skip


# ---- measuring ---
def measure(case: Case, only: str = "") -> Iterator[dict]:
    """A row for each candidate."""
    floats = jax.random.normal(jax.random.key(1), (case.rows, case.k), jnp.bfloat16)
    shape = (case.k, case.rows) if case.wgrad else (case.rows, case.k)
    eights = codes(jax.random.key(1), shape, MXFP8_E4M3)
    sizes = [] if case.sizes is None else [jnp.asarray(case.sizes)]
    for name, make, product in candidates(case):
        if only not in name:
            continue
        row = about(case, name)
        try:
            weights = jax.jit(make)
            size = timing.nbytes(jax.eval_shape(make, jax.random.key(0)))
            count = min(timing.rotation(size), max(2, int(40e9 // size)))
            keys = jax.random.split(jax.random.key(0), count)
            x = eights if name.startswith("fp8") else floats
            inputs = [(x, jax.block_until_ready(weights(key)), *sizes) for key in keys]
            time.sleep(REST)
            us = timing.measure(jax.jit(product), inputs, 20).us
        except Exception as error:
            yield row | {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            continue
        read = size * (1 if case.wgrad else case.matrices / max(case.groups, 1))
        yield row | speed(case, us, read)


def about(case: Case, name: str) -> dict[str, Any]:
    """What a row says of what it measures."""
    row = {"case": case.name, "rows": case.rows, "k": case.k, "n": case.n}
    row |= {"groups": case.groups, "implementation": name}
    return row | {"device": jax.devices()[0].device_kind, "date": time.strftime("%Y-%m-%d")}


def speed(case: Case, us: float, read: float) -> dict[str, float]:
    """What a row says of a time, during which so many bytes of weights were read."""
    found = {"us": round(us, 2), "tflops": round(case.tflop / us * 1e6, 1)}
    return found | {"weights_tbs": round(read / us / 1e6, 3)}


def measure_peers(case: Case, only: str = "") -> Iterator[dict]:
    """A row for each product of others that serves the case, of many rows."""
    if not case.is_large:
        return
    shape = (case.n, case.k) if case.kind == "dense" else (case.groups, case.n, case.k)
    shape = (case.rows, case.n) if case.wgrad else shape
    asked = {"shape": shape, "rows": case.rows, "k": case.k, "dtype": "bfloat16"}
    if case.sizes is not None:
        asked["sizes"] = case.sizes.tolist()
    for name, peer in peers.PRODUCTS.items():
        if only in name and case.kind in peer.forms:
            for _, answer in peers.run(name, [asked], 20):
                if "us" in answer:
                    answer |= speed(case, answer["us"], math.prod(shape) * peer.itemsize)
                kept = ("us", "tflops", "weights_tbs", "error", "library")
                yield about(case, name) | {key: answer[key] for key in kept if key in answer}


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--case", default="", help="cases whose names begin with this")
    parser.add_argument("--only", default="", help="candidates with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rows are put")
    said = "that rows name; this checkout's by default"
    parser.add_argument("--commit", default=report.head(), metavar="HASH", help=said)
    said = "torch's products too: cuBLASLt's with scales, and those of groups"
    parser.add_argument("--peers", action="store_true", help=said)
    args = parser.parse_args(argv)
    old = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    rows: list[dict] = []
    for case in CASES:
        if not case.name.startswith(args.case):
            continue
        theirs = measure_peers(case, args.only) if args.peers else ()
        for row in itertools.chain(measure(case, args.only), theirs):
            rows.append(row | {"commit": args.commit})
            print(
                f"{row['case']:20} {row['implementation']:26} "
                + (
                    f"{row['us']:9.1f} us {row['tflops']:7.0f} TF/s "
                    f"W {row['weights_tbs']:6.2f} TB/s"
                    if "us" in row
                    else row["error"]
                ),
                flush=True,
            )
        if args.json:  # after every case: what is killed keeps what it has
            found = merged(old, rows)
            commits = dict.fromkeys(row.get("commit", "") for row in found)
            commit = ", ".join(filter(None, commits))
            report.write_record(args.json, "python -m benchmarks.products", found, commit=commit)


def merged(old: Sequence[dict], new: Sequence[dict]) -> list[dict]:
    """Rows by case and implementation, in the order of `CASES`: the new ones, and old others.

    A new row that failed replaces none that has a time.
    """
    found = {(row["case"], row["implementation"]): row for row in old}
    for row in new:
        key = row["case"], row["implementation"]
        if "us" in row or "us" not in found.get(key, {}):
            found[key] = row
    order = [case.name for case in CASES]
    return sorted(found.values(), key=lambda row: order.index(row["case"]))


if __name__ == "__main__":
    main()
