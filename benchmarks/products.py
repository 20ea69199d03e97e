"""Products that read MX operands, next to products of bfloat16, on one GPU, in one run.

    python -m benchmarks products [--cases 'grouped*'] [--peers] [--join --json out.json]

Weights rotate, so that L2 holds none. A time is the median of a call's time on the device. Each row
says where and when it was measured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mx
from benchmarks import peers, timing
from benchmarks.kernels import by_kernel
from benchmarks.runner import Args, Case, Row, Timed, repeats
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3, SCALE_DTYPE, Format
from jax_mx.formats.layouts import ROW_MAJOR
from jax_mx.formats.windows import ROW

REST = 0.5  # seconds before each measurement: a hot chip is slower
Way = tuple[str, Callable, Callable]  # name, how a key makes the weights, the product


@dataclasses.dataclass(frozen=True)
class Multiplied:
    """The operands of a product: x (rows, k) and matrices (n, k), of groups or one.

    Attributes:
      name: for the table.
      rows: of x.
      k: the contracted length.
      n: columns of y.
      groups: the number of matrices; 0: one, and no groups.
      skew: the difference of groups' sizes: 0: about equal, none a multiple of a tile; 1: as 1 /
        rank.
      wgrad: whether rows are contracted: x (k, rows) and W (n, rows). Each group gives a result of
        its rows, whose number is a multiple of 256.
    """

    name: str
    rows: int
    k: int
    n: int
    groups: int = 0
    skew: float = 0
    wgrad: bool = False

    @property
    def sizes(self) -> np.ndarray | None:
        """The rows of each group."""
        if not self.groups:
            return None
        share = 1 / np.arange(1, self.groups + 1) ** self.skew
        ends = np.round(np.cumsum(share) / share.sum() * self.rows).astype(int)
        if not self.skew:
            ends[:-1] += (97 * (np.arange(self.groups - 1) % 3 - 1)) * self.is_large
        if self.wgrad:
            ends = ends // 256 * 256
        return np.diff(ends, prepend=0).astype(np.int32)

    @property
    def kind(self) -> str:
        """The name that `peers` has for this product."""
        return "wgrad" if self.wgrad else "grouped" if self.groups else "dense"

    @property
    def is_large(self) -> bool:
        """Whether there are more rows than decoding has."""
        return self.rows > 64 * max(self.groups, 1)

    @property
    def weights(self) -> tuple[int, ...]:
        """The shape of what rotates, as a product of floats takes it."""
        one = (self.rows, self.n) if self.wgrad else (self.n, self.k)
        return (self.groups, *one) if self.kind == "grouped" else one

    def speed(self, us: float, read: float) -> Row:
        """A row's numbers, of a time in which so many bytes of weights were read."""
        row = {"us": round(us, 2), "tflops": round(2 * self.rows * self.k * self.n / us / 1e6, 1)}
        return row | {"weights_tbs": round(read / us / 1e6, 3)}

    @property
    def toy(self) -> Multiplied:
        """Sizes that a CPU has done soon."""
        rows = 512 if self.is_large else min(self.rows, 64)
        return dataclasses.replace(self, rows=rows, k=256, n=256, groups=min(self.groups, 2))


PRODUCTS = (
    Multiplied("dense", 16384, 7168, 4096),
    Multiplied("dense, its dgrad", 16384, 4096, 7168),
    Multiplied("dense, its wgrad", 7168, 16384, 4096),
    Multiplied("dense, Llama 70B qkv", 16384, 8192, 10240),
    Multiplied("dense, Llama 70B out", 16384, 8192, 8192),
    # The MLPs of Llama 70B and of DeepSeek-V3's first layers: one's dgrad has the other's shape.
    Multiplied("dense, Llama 70B up", 16384, 8192, 28672),
    Multiplied("dense, Llama 70B down", 16384, 28672, 8192),
    Multiplied("dense, DeepSeek-V3 up", 16384, 7168, 18432),
    Multiplied("dense, DeepSeek-V3 down", 16384, 18432, 7168),
    Multiplied("grouped up", 16384, 7168, 4096, 8),
    Multiplied("grouped 2048", 16384, 7168, 2048, 8),
    Multiplied("grouped down", 16384, 2048, 7168, 8),
    Multiplied("grouped skewed", 16384, 7168, 4096, 64, 1.0),
    # A device's 32 of DeepSeek-V3's 256 experts, gate and up beside each other.
    Multiplied("grouped, DeepSeek-V3 up", 32768, 7168, 4096, 32),
    Multiplied("grouped, DeepSeek-V3 down", 32768, 2048, 7168, 32),
    Multiplied("wgrad up", 16384, 7168, 4096, 8, wgrad=True),
    Multiplied("wgrad down", 16384, 2048, 7168, 8, wgrad=True),
    Multiplied("wgrad skewed", 16384, 7168, 2048, 32, 1.0, wgrad=True),
    Multiplied("decode grouped 2880", 512, 2880, 2880, 128),
    Multiplied("decode grouped 7168", 512, 7168, 2048, 128),
    *(Multiplied(f"decode {m}x{n}", m, 7168, n) for n in (4096, 16384) for m in (1, 8, 16, 64)),
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


def candidates(case: Multiplied, implementation: str = "cutedsl") -> Iterator[Way]:
    """Our products, whose kernels `implementation` computes, and JAX's."""
    if case.wgrad:
        yield from gradients(case, implementation)
        return
    shape = case.weights
    kernel = functools.partial(by_kernel, implementation=implementation)
    for format in (MXFP8_E4M3, MXFP4_E2M1):
        yield format.name, functools.partial(codes, shape=shape, format=format), kernel
    eights = functools.partial(codes, shape=shape, format=MXFP8_E4M3)
    if case.is_large:
        across = (*shape[:-2], case.k, case.n)  # as the gradient of x reads a weight (k, n)
        free = functools.partial(kernel, free=True)
        for format in (MXFP8_E4M3, MXFP4_E2M1):
            make = functools.partial(codes, shape=across, format=format)
            yield f"{format.name}, free blocks", make, free
        for window, tiles in ((128, True), (256, True), (128, False), (256, False)):
            name = f"fp8 1x{window}, W {'128x128' if tiles else f'1x{window}'}"
            yield name, eights, functools.partial(kernel, window=window, tiles=tiles)
        yield "fp8 rows", eights, functools.partial(kernel, window=ROW)
    floats = functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
    if not case.groups:
        yield "bf16 dot", floats, lambda x, w: jnp.dot(x, w.T)
        yield "mxfp8 scaled_dot", eights, scaled_dot
        yield "fp8 dot of codes", eights, dot_of_codes
        return
    yield "bf16 Pallas", floats, pallas
    if case.is_large:
        yield "bf16 ragged_dot", floats, lambda x, w, s: jax.lax.ragged_dot(x, w.mT, s)


def gradients(case: Multiplied, implementation: str) -> Iterator[Way]:
    """The same of a gradient of weights."""
    eights = functools.partial(codes, shape=(case.n, case.rows), format=MXFP8_E4M3)
    kernel = functools.partial(by_kernel, sums=True, implementation=implementation)
    for window in (128, 256):
        yield f"fp8 1x{window}", eights, functools.partial(kernel, window=window)
    floats = functools.partial(jax.random.normal, shape=case.weights, dtype=jnp.bfloat16)
    yield "bf16", floats, kernel
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
    """JAX's own product, which dequantizes w."""
    ones = jnp.full((x.shape[0], x.shape[1] // BLOCK), 127, jnp.uint8)
    ones = jax.lax.bitcast_convert_type(ones, SCALE_DTYPE)
    return jax.lax.scaled_dot(
        x, w.values, lhs_scale=ones, rhs_scale=w.scales,
        dimension_numbers=(((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16,
    )  # fmt: skip


def dot_of_codes(x: jax_mx.MXArray, w: jax_mx.MXArray) -> jax.Array:
    """The product of FP8 codes alone by cuBLASLt: another product, as scales lack; the same reads.

    JAX cannot call cuBLASLt's product of windows; `--peers` measures that through torch.
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
def operands(case: Multiplied, way: Way, count: int = 0) -> timing.Inputs:
    """x, weights and sizes of groups; where no count is asked for, weights that overrun L2."""
    name, make, _ = way
    shape = (case.k, case.rows) if case.wgrad else (case.rows, case.k)
    x: Any = jax.random.normal(jax.random.key(1), (case.rows, case.k), jnp.bfloat16)
    if name.startswith("fp8"):
        x = codes(jax.random.key(1), shape, MXFP8_E4M3)
    sizes = [] if case.sizes is None else [jnp.asarray(case.sizes)]
    size, weights = bytes_of(make), jax.jit(make)
    count = count or min(timing.rotation(size), max(2, int(40e9 // size)))
    keys = jax.random.split(jax.random.key(0), count)
    return [(x, jax.block_until_ready(weights(key)), *sizes) for key in keys]


def bytes_of(make: Callable) -> int:
    """The size of the weights that a key makes."""
    return timing.nbytes(jax.eval_shape(make, jax.random.key(0)))


def measure(case: Multiplied, way: Way) -> Callable[[Args], Row]:
    """How one of our products, or of JAX's, is measured."""
    sizes = case.sizes
    part = 1 if case.wgrad or sizes is None else float(np.mean(sizes > 0))  # that is read
    inputs = functools.partial(operands, case, way)
    more = lambda time: case.speed(time.us, bytes_of(way[1]) * part)  # noqa: E731
    return Timed(jax.jit(way[2]), inputs, 20, more=more, rest=REST)


def measure_peer(case: Multiplied, name: str, args: Args) -> Row:
    """A product of others, in a process of its own."""
    asked = {"shape": case.weights, "rows": case.rows, "k": case.k, "dtype": "bfloat16"}
    if case.sizes is not None:
        asked["sizes"] = case.sizes.tolist()
    _, answer = next(peers.run(name, [asked], repeats(args, 20)))
    read = math.prod(case.weights) * peers.PRODUCTS[name].itemsize
    row = answer | (case.speed(answer["us"], read) if "us" in answer else {})
    kept = ("us", "tflops", "weights_tbs", "error", "library")
    return {key: row[key] for key in kept if key in row}


def options(add: Callable[..., Any]) -> None:
    """Whether others are measured."""
    about = "torch's products too: cuBLASLt's with scales, and those of groups"
    add("--peers", action="store_true", help=about)


def cases(args: Args) -> Iterator[Case]:
    """Every way of every product; of peers those that serve it, where it has many rows."""
    implementation = "xla" if args.smoke and jax.default_backend() == "cpu" else "cutedsl"
    where = {"device": jax.devices()[0].device_kind, "date": time.strftime("%Y-%m-%d")}
    where["commit"] = args.commit
    for case in PRODUCTS:
        case = case.toy if args.smoke else case
        about: Row = {"case": case.name, "rows": case.rows, "k": case.k, "n": case.n}
        about["groups"] = case.groups
        ways = {way[0]: measure(case, way) for way in candidates(case, implementation)}
        for name, peer in peers.PRODUCTS.items() if args.peers and case.is_large else ():
            if case.kind in peer.forms:
                ways[name] = functools.partial(measure_peer, case, name)
        for name, take in ways.items():
            yield Case(case.name, name, about | {"implementation": name} | where, take)
