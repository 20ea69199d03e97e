"""The ways to compute a product that reads MX operands: a table, as lowering/registry.py has one.

Every implementation accumulates in float32 and gives NaN where a block is NaN. Which one serves a
call, `decided` says: the one that is named; the one that was measured to be the fastest
(choices.py); the first of the table that serves the call and is preferred on the chip.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_mx.arrays.checks import is_symbolic
from jax_mx.facts import chips as chip_table
from jax_mx.facts.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2
from jax_mx.facts.windows import ROW
from jax_mx.lowering import registry, store, targets
from jax_mx.lowering.registry import Support
from jax_mx.ops import gemm
from jax_mx.ops.mxarray import MXArray, dequantize
from jax_mx.products import choices, kernels
from jax_mx.products.dot import Call, Dot, Operand, both_along, key_of, refused, scale_floats

# sm_90's FP8 tensor cores cut products at 2^-13 of the largest of them. Of the normal numbers that
# `measuring` draws, no sum was off by more than 4e-4 of sum |a||b| (tests/test_gemm.py).
FP8_ERROR = 2.0**-10


@dataclasses.dataclass(frozen=True)
class Implementation(registry.Implementation):
    """One way to compute products; see `registry.Implementation`.

    Attributes:
      run: computes the product of two operands, and of what else its op takes.
      preferred: whether it is the choice on a platform and chips where nothing was measured.
      error: what its results may differ by of sum |a||b|, where that is more than eps32 * k.
      worth: whether `autotune` measures it for a call that it serves.
      floats: whether it multiplies, of a call that it serves, floats that it makes of lhs or of
        what is quantized anew, see either.py.
    """

    run: Callable[..., jax.Array]
    preferred: Callable[[Any, str, Sequence[str]], bool]
    error: float = 0.0
    worth: Callable[[Any], bool] = lambda _: True
    floats: Callable[[Any], bool] = lambda _: False


# ---- dequantize, then a product of floats ---
def any_call(name: str) -> Callable[[Any, Sequence[str]], Support]:
    """The `support` of an implementation that serves every call."""

    def support(call: Any, chips: Sequence[str]) -> Support:
        del call, chips
        return Support(name)

    return support


def _dequantize(lhs: Operand, rhs: Operand, dot: Dot) -> jax.Array:
    """Kernels make bfloat16 of MX operands, cuBLAS or its like multiplies them.

    bfloat16 holds every element of every format exactly, but for those below 2^-133.
    """
    a, b = (dequantize(x) if isinstance(x, MXArray) else x for x in (lhs, rhs))
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # From bfloat16, cuBLAS gives bfloat16 or float32 out of float32 sums.
    given = jnp.float32 if dot.dtype == jnp.float16 else dot.dtype
    y = jax.lax.dot_general(
        a,
        b,
        dot.numbers,
        precision=jax.lax.Precision.HIGHEST if dot.exact else None,
        preferred_element_type=given,
        out_sharding=dot.out_sharding,
    )
    return y.astype(dot.dtype)


def exact_floats(x: Operand) -> jax.Array:
    """An operand in float32, by plain XLA."""
    if isinstance(x, MXArray):
        return dequantize(x, jnp.float32, implementation="xla")
    return x.astype(jnp.float32)


def _plain(lhs: Operand, rhs: Operand, dot: Dot) -> jax.Array:
    """The definition: float32 throughout, by plain XLA."""
    a, b = exact_floats(lhs), exact_floats(rhs)
    y = jax.lax.dot_general(
        a,
        b,
        dot.numbers,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
        out_sharding=dot.out_sharding,
    )
    return y.astype(dot.dtype)


# ---- the chip's own scaled product ---
def _scaled_dot_support(call: Call, chips: Sequence[str]) -> Support:
    name = "scaled_dot"
    if not both_along(call):
        return refused(name, call, "wants both operands in blocks along one contracted dimension")
    for x in (call.lhs, call.rhs):
        if any(map(is_symbolic, x.shape)):
            return refused(name, call, "takes no symbolic lengths, which JAX cannot refine in it")
        if x.format not in (MXFP8_E4M3, MXFP8_E5M2, MXFP4_E2M1):
            return refused(name, call, f"takes no {x.format.name}")
        if x.format == MXFP4_E2M1 and (x.axis != -1 or len(x.block) == 2):
            return refused(name, call, "takes mxfp4_e2m1 in blocks along the last axis")
    del chips
    return Support(name)


def _scaled_dot(lhs: Operand, rhs: Operand, dot: Dot) -> jax.Array:
    """jax.lax.scaled_dot: of sm_100 and later, and of gfx950, the tensor cores' own.

    It takes no out_sharding: on a mesh with explicit axes XLA splits it, as the product's type is.
    """
    product: Any = functools.partial(_scaled, dot=dot)
    if dot.out_sharding is not None:
        product = jax.sharding.auto_axes(product, out_sharding=dot.out_sharding)
    return product(lhs, rhs)


def _scaled(lhs: Operand, rhs: Operand, *, dot: Dot) -> jax.Array:
    sides, rank = [], max(lhs.ndim, rhs.ndim)  # it wants both of one rank
    for x, dims in zip((lhs, rhs), dot.contracting, strict=True):
        assert isinstance(x, MXArray)  # _scaled_dot_support
        if len(x.block) == 2:
            x = x.expand(dims[0] - x.ndim)
        pair = (x.as_float4() if x.format == MXFP4_E2M1 else x.values, x.scales)
        sides.append([jnp.expand_dims(a, [*range(a.ndim, rank)]) for a in pair])
    (a, a_scale), (b, b_scale) = sides
    y = jax.lax.scaled_dot(
        a,
        b,
        lhs_scale=a_scale,
        rhs_scale=b_scale,
        dimension_numbers=dot.numbers,
        preferred_element_type=jnp.float32,
    )
    if lhs.ndim < rank:  # its dimensions of length 1 lie between the others
        end = y.ndim - (rhs.ndim - len(dot.contracting[1]) - len(dot.batch[1]))
        y = jnp.squeeze(y, [*range(end - (rank - lhs.ndim), end)])
    elif rhs.ndim < rank:
        y = jnp.squeeze(y, [*range(y.ndim - (rank - rhs.ndim), y.ndim)])
    return y.astype(dot.dtype)


def _has_scaled_dot(call: Call, platform: str, chips: Sequence[str]) -> bool:
    del call, platform
    return bool(chips) and all(chip in chip_table.SCALED_DOT for chip in chips)


# ---- FP8 tensor cores on the codes ---
def _fp8_support(call: Call, chips: Sequence[str]) -> Support:
    name = "fp8"
    if call.dot.exact:
        why = "sums with reduced precision, and the call asks for a higher one"
        return refused(name, call, why)
    if not both_along(call):
        return refused(name, call, "wants both operands in blocks along one contracted dimension")
    formats = {call.lhs.format, call.rhs.format}
    if not formats <= {MXFP8_E4M3, MXFP8_E5M2} or formats == {MXFP8_E5M2}:
        return refused(name, call, "takes mxfp8_e4m3, or one operand of it and one of mxfp8_e5m2")
    for x, dims in zip((call.lhs, call.rhs), call.dot.contracting, strict=True):
        length = x.shape[dims[0]]
        one = x.window == ROW or (not is_symbolic(length) and length <= BLOCK)
        if len(x.block) == 2 or not one:
            return refused(name, call, "wants one scale for each row: quantize(..., window='row')")
    for chip in chips:
        if chip not in (*chip_table.FP8, "cpu"):
            return refused(name, call, f"wants FP8 tensor cores, {chip} has none")
    return Support(name)


def _fp8(lhs: Operand, rhs: Operand, dot: Dot) -> jax.Array:
    """The product of the codes, times a row and a column of scales, in float32.

    Precision.HIGHEST makes XLA promote partial sums to float32 instead of leaving them to the
    tensor cores. XLA does not fuse the scales into it: they take 100 to 174 us of a product's 800
    (an H200, 16384 x 7168 x 4096, 2026-11-22). As they are powers of two, a product in bfloat16
    would do and halve that; but XLA then took more than 30 s to compile three of them, not 12.
    """
    assert isinstance(lhs, MXArray)
    assert isinstance(rhs, MXArray)
    y = jax.lax.dot_general(
        lhs.values,
        rhs.values,
        dot.numbers,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
        out_sharding=dot.out_sharding,
    )
    for x, (c,), batch in zip((lhs, rhs), dot.contracting, dot.batch, strict=True):
        row = jax.lax.index_in_dim(x.scales, 0, c, keepdims=False)
        free = [d for d in range(x.ndim) if d != c and d not in batch]
        row = scale_floats(row.transpose([d - (d > c) for d in (*batch, *free)]))
        others = y.ndim - row.ndim  # the other operand's dimensions: behind lhs', before rhs'
        first = row.ndim if x is lhs else len(batch)
        y = y * jnp.expand_dims(row, [*range(first, first + others)])
    return y.astype(dot.dtype)


def _has_fp8(call: Call, platform: str, chips: Sequence[str]) -> bool:
    del call, platform
    return bool(chips) and all(chip in chip_table.FP8 for chip in chips)


def on_gpus(call: Any, platform: str, chips: Sequence[str]) -> bool:
    """The `preferred` of what is chosen on GPUs."""
    del call, chips
    return platform in chip_table.DSLS


def always(call: Any, platform: str, chips: Sequence[str]) -> bool:
    """The `preferred` of what is chosen everywhere."""
    del call, platform, chips
    return True


def yes(call: Any) -> bool:
    """The `floats` of what makes floats of all operands."""
    del call
    return True


def never(call: Any, platform: str, chips: Sequence[str]) -> bool:
    """The `preferred` of what is chosen where it was measured to be the fastest, or is named."""
    del call, platform, chips
    return False


def with_tilings(
    support: Callable[..., Support],
    run: Callable[..., jax.Array],
    preferred: Callable[[Any, str, Sequence[str]], bool],
    worth: Callable[..., bool],
    floats: Callable[..., bool],
) -> tuple[Implementation, ...]:
    """Our kernels, which pick a tiling by themselves, and a row for each tiling.

    Args:
      support: takes a call, chips and `tile`, how many rows of x a tile has.
      run: likewise.
      preferred: of the first row.
      worth: likewise, of the others.
      floats: likewise, of all.
    """
    own = Implementation(kernels.NAME, "cuda", support, run, preferred, FP8_ERROR, floats=floats)

    def row(tile: int) -> Implementation:
        return Implementation(
            kernels.name_of(tile),
            "cuda",
            functools.partial(support, tile=tile),
            functools.partial(run, tile=tile),
            never,
            FP8_ERROR,
            functools.partial(worth, tile=tile),
            functools.partial(floats, tile=tile),
        )

    return (own, *map(row, gemm.ROWS))


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    row.name: row
    for row in (
        *with_tilings(
            kernels.support, kernels.run, kernels.preferred, kernels.worth, kernels.makes_floats
        ),
        Implementation("fp8", "any", _fp8_support, _fp8, _has_fp8, error=FP8_ERROR),
        Implementation("scaled_dot", "any", _scaled_dot_support, _scaled_dot, _has_scaled_dot),
        Implementation(
            "dequantize", "any", any_call("dequantize"), _dequantize, on_gpus, floats=yes
        ),
        Implementation("xla", "any", any_call("xla"), _plain, always),
    )
}


Table = Mapping[str, Implementation]


@dataclasses.dataclass(frozen=True)
class Decision:
    """Which implementation serves a call.

    Attributes:
      name: of the implementation.
      by: who says so: "argument", "context", "JAX_MX_TUNING (<file>)", "table for <chip>", "rule".
      passed_over: what was measured to be the fastest and does not serve the call, a sentence each.
    """

    name: str
    by: str
    passed_over: tuple[str, ...] = ()


def decided(
    call: Any, platform: str, chips: Sequence[str], table: Table = IMPLEMENTATIONS
) -> Decision:
    """What serves a call.

    The order: the one that the caller names; what a `Choice` has for it, of the context, of the
    file that JAX_MX_TUNING names, of the package's own table for the chip; the first of the table
    of implementations that serves the call and is preferred on the chip.

    Raises:
      NotImplementedError: the implementation that the caller names does not serve it.
      ValueError: the file that JAX_MX_TUNING names cannot be read.
    """
    if call.implementation is not None:
        (named,) = registry.candidates(call, platform, chips, table)
        if not named:
            raise NotImplementedError(named.reason)
        return Decision(named.implementation, "argument")
    rows = _here(platform, table)
    passed = []
    for by, name in _measured(call, chips):
        support = rows[name].support(call, chips) if name in rows else None
        if support:
            return Decision(name, by, tuple(passed))
        why = f"{name!r} is no implementation here" if support is None else support.reason
        passed.append(f"{by} names {name!r} for {key_of(call, chips[0])}, but {why}")
    return Decision(by_rule(call, platform, chips, table), "rule", tuple(passed))


def by_rule(call: Any, platform: str, chips: Sequence[str], table: Table = IMPLEMENTATIONS) -> str:
    """What serves a call where nothing was measured and nobody names anything."""
    return next(
        row.name
        for row in _here(platform, table).values()
        if row.preferred(call, platform, chips) and row.support(call, chips)
    )


def _here(platform: str, table: Table) -> Table:
    """The implementations that run on a platform."""
    return {row.name: row for row in table.values() if row.platform in (platform, "any")}


def _measured(call: Any, chips: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Who has measured a call, and which implementation was the fastest on all of the chips."""
    keys = [key_of(call, chip) for chip in chips]
    for sources in zip(*map(choices.known, chips), strict=True):
        entries = [choice.by_key.get(key) for (_, choice), key in zip(sources, keys, strict=True)]
        names = {entry.chosen if entry else None for entry in entries}
        if len(names) == 1 and (name := names.pop()) is not None:
            yield sources[0][0], name


def chips_of(target: targets.Target) -> list[str]:
    """The chips that products are lowered for: an export may run on any that it has kernels for."""
    if target.chips is not None:
        return target.chips
    dsl = chip_table.DSLS.get(target.platform)
    return [*store.exported(chip_table.chips_of(dsl))] if dsl else []


def serving(call: Any, target: targets.Target, table: Table = IMPLEMENTATIONS) -> Implementation:
    """The implementation that a call is lowered to.

    Raises:
      NotImplementedError, ValueError: as `decided` does.
      RuntimeError: the program has several processes, and an installation with all kernels would
        take another one: each process lowers for itself, and all must take the same.
    """
    chips = chips_of(target)
    name = decided(call, target.platform, chips, table).name
    if target.chips is not None and jax.process_count() > 1:
        with registry.by_tables():
            promised = decided(call, target.platform, chips, table).name
        if promised != name:
            raise RuntimeError(
                f"{call.op}: this process takes {name!r}, others of this program may take "
                f"{promised!r}, whose kernels this installation lacks, and all must take the same: "
                f"install them everywhere, or pass implementation={name!r} everywhere"
            )
    return table[name]


def lowered(
    given: str | None,
    ctx: Any,
    leaves: Sequence[Any],
    call: Any,
    run: Callable[..., jax.Array],
    table: Table = IMPLEMENTATIONS,
) -> Any:
    """What the primitive of a product is lowered to: the implementation that serves its call.

    Args:
      given: the platform that the rule is registered for; None: the program's.
      ctx: of the rule.
      leaves: its operands.
      call: of their abstract values.
      run: computes the product by an implementation, from that and the operands.
      table: of implementations.
    """
    target = targets.target_of(ctx, given)
    served = serving(dataclasses.replace(call, partitioned=target.partitioned), target, table)

    def product(*leaves: Any) -> list[jax.Array]:
        with jax.named_scope(f"by_{served.name}"):  # so that profiles and dumps say it
            return [run(served, *leaves)]

    rule: Any = mlir.lower_fun(product, multiple_results=True)
    return rule(ctx, *leaves)
