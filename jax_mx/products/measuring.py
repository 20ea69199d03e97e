"""The cost of an implementation of a product on this device, and whether its result is right.

The timed program holds the product many times, each on other operands, so that neither the host nor
the L2 cache counts. All launches belong to one program, a CUDA graph where XLA makes one, and
operands are read from memory.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.products.by_xla import exact_floats
from jax_mx.products.choices import Cost
from jax_mx.products.contraction import Contraction, Operand
from jax_mx.products.implementations import IMPLEMENTATIONS
from jax_mx.products.multiply import multiplied
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.quantize import quantize

COLD_BYTES = 240 * 2**20  # four times the largest L2 at hand, an H200's
FEWEST, MOST = 2, 32  # products of a program; a CPU needs no more, it has no launches
BATCH_SECONDS = 0.02  # a clock runs at least so long, as far as MOST_RUNS go
MOST_RUNS = 64
ROUNDS = 5
HOPELESS = 3.0  # a candidate that takes so many times as long as another is timed once
# "xla" computes in float32, which is what others are compared with and never the fastest on a GPU:
# there XLA does not look for its best algorithm, which takes ten seconds for a large product.
_UNTUNED = {"xla_gpu_autotune_level": 0}
TERMS = 8  # nonzero products of a sum, of the sparse operands that are compared

OVER = "not measured: the time was over"

Pair = tuple[Operand, Operand]


# ---- operands ---
def operands(call: Contraction, count: int) -> list[Pair]:
    """Random operands of a call, quantized from normal numbers.

    Args:
      call: of one shard.
      count: how many pairs.
    """

    @jax.jit
    def pair(key: jax.Array) -> Pair:
        left, right = jax.random.split(key)
        return _operand(call.lhs, left), _operand(call.rhs, right)

    return [pair(jax.random.key(seed)) for seed in range(count)]


def _operand(like: Any, key: jax.Array) -> Operand:
    if not isinstance(like, MXArray):
        return jax.random.normal(key, like.shape, like.dtype)
    return quantize(
        jax.random.normal(key, like.shape, jnp.bfloat16),
        like.format,
        axis=like.axis,
        block=like.block if len(like.block) == 2 else like.block[0],
        window=like.window,
        scale_layout=like.scale_layout,
        value_layout=like.value_layout,
    )


def _sparse(x: Operand, length: int) -> Operand:
    """x with some `TERMS` elements, or bytes of codes, in a row of `length` that are not zero.

    Sums of few terms tell a wrong factor or place, which the bound of long sums may hide.
    """

    def thinned(array: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(jax.random.key(7), min(1.0, TERMS / length), array.shape)
        return jnp.where(kept, array, jnp.zeros((), array.dtype))

    if isinstance(x, MXArray):
        return dataclasses.replace(x, values=jax.jit(thinned)(x.values))
    return jax.jit(thinned)(x)


# ---- the product of a call ---
def product(
    call: Contraction, name: str, lhs: Operand, rhs: Operand, dtype: np.dtype | None = None
) -> jax.Array:
    """The product of a call by one implementation; groups have equal sizes where they can.

    Args:
      call: of one shard.
      name: of the implementation.
      lhs: the operand, or floats in its place.
      rhs: the operand, or floats in its place.
      dtype: of the result, the call's by default.
    """
    numbers, sizes = call.numbers, None
    if numbers.groups:
        rows = call.rows // max(call.groups, 1) // numbers.align * numbers.align
        sizes = jnp.full(call.groups, rows, jnp.int32)
    numbers = dataclasses.replace(
        numbers, implementation=name, dtype=np.dtype(dtype or numbers.dtype)
    )
    return multiplied(Contraction(numbers, lhs, rhs, sizes))


# ---- what a product may differ by ---
class Reference:
    """The product of two operands by "xla", and the largest difference of others from it."""

    def __init__(self, call: Contraction, value: jax.Array, size: jax.Array):
        """Takes the results of `_reference`.

        Args:
          call: of one shard.
          value: the product, float32.
          size: the product of the operands' magnitudes.
        """
        self.call, self.value, self.size = call, value, size

    def obstacle(self, y: jax.Array, error: float) -> str:
        """The reason why y is not the product; empty where it is.

        Args:
          y: the result of an implementation.
          error: the largest difference over sum |a||b|, besides eps32 * k.
        """
        error = max(error, float(np.finfo(np.float32).eps) * self.call.length)
        far = float(_distance(y, self.value, self.size, error))
        if far <= 1:
            return ""
        return f"differs from 'xla' by {'NaN' if math.isnan(far) else f'{far:.3g} times'} the bound"


def _reference(call: Contraction) -> Callable[[Operand, Operand], tuple[jax.Array, jax.Array]]:
    """A function for the product of two operands in float32, and sum |a||b| of each element."""

    @partial(jax.jit, compiler_options=_options("xla"))
    def both(lhs: Operand, rhs: Operand) -> tuple[jax.Array, jax.Array]:
        a, b = exact_floats(lhs), exact_floats(rhs)
        plain = partial(product, call, "xla", dtype=np.dtype(np.float32))
        return plain(a, b), plain(jnp.abs(a), jnp.abs(b))

    return both


@jax.jit
def _distance(y: jax.Array, value: jax.Array, size: jax.Array, error: float) -> jax.Array:
    """How far y is from the value at most, in units of what is allowed; NaN counts as far."""
    allowed = error * size + float(jnp.finfo(y.dtype).eps) * jnp.abs(value)
    allowed += float(np.finfo(np.float32).tiny)
    rounded = value.astype(y.dtype)  # equal where both overflow
    far = jnp.where(y == rounded, 0.0, jnp.abs(y.astype(jnp.float32) - value) / allowed)
    return jnp.max(far)


# ---- time ---
class Candidate:
    """One implementation of a call."""

    def __init__(self, name: str, call: Contraction, sets: Sequence[Pair]):
        """Lowers a program of as many products as there are operands.

        Args:
          name: of the implementation.
          call: of one shard.
          sets: the pairs of operands in memory, one for each of its products.

        Raises:
          Exception: it cannot be lowered.
        """
        self.name, self.sets = name, sets
        program = jax.jit(partial(_products, name, _Asked(call)), compiler_options=_options(name))
        self.lowered = program.lower(sets)

    def compile(self) -> None:
        """Compiles the program; several threads may do so for a candidate each.

        Raises:
          Exception: it does not compile.
        """
        self.program = self.lowered.compile()

    def first(self, sets: Sequence[Pair]) -> jax.Array:
        """The first product of these operands."""
        return jax.block_until_ready(self.program(sets))[0]

    def run(self) -> Any:
        """Starts the program."""
        return self.program(self.sets)


@dataclasses.dataclass(frozen=True, eq=False)
class _Asked:
    call: Contraction


def _products(name: str, static: _Asked, sets: Sequence[Pair]) -> tuple[jax.Array, jax.Array]:
    """The first of the products, and a number that depends on all of them, one after the other."""
    results: list[jax.Array] = []
    for lhs, rhs in sets:
        if results:  # not before the last one is done, nor together with it
            (lhs, rhs), results[-1] = jax.lax.optimization_barrier(((lhs, rhs), results[-1]))
        results.append(product(static.call, name, lhs, rhs))
    results = jax.lax.optimization_barrier(results)
    return results[0], jnp.stack([y[(0,) * y.ndim].astype(jnp.float32) for y in results]).sum()


def seconds(candidate: Candidate, runs: int) -> float:
    """The time on the host's clock that a candidate's program takes, that often in a row."""
    last = jax.block_until_ready(candidate.run())
    start = time.perf_counter()
    for _ in range(runs):
        last = candidate.run()
    jax.block_until_ready(last)
    return time.perf_counter() - start


def _launches(call: Contraction) -> int:
    """How many products a program has."""
    leaves = jax.tree.leaves((call.lhs, call.rhs))
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    on_cpu = _platform() == "cpu"
    return min(max(math.ceil(COLD_BYTES / nbytes), FEWEST), FEWEST if on_cpu else MOST)


def _options(name: str) -> dict[str, int] | None:
    """The compiler's options for the program of an implementation."""
    return _UNTUNED if name == "xla" and _platform() == "gpu" else None


def _platform() -> str:
    """The platform of the device where arrays are made by default."""
    (device,) = jnp.zeros(()).devices()
    return device.platform


def measured(
    call: Contraction, names: Sequence[str], is_over: Callable[[], bool]
) -> tuple[str | None, dict[str, Cost]]:
    """The fastest of some implementations that compute a call's product.

    Args:
      call: of one shard.
      names: of implementations that serve it. None is chosen unless the first one was tried.
      is_over: whether the time for measuring is.

    Returns:
      The name of the fastest, or None; of each name microseconds, or why it was left out.
    """
    count = _launches(call)
    sets = operands(call, count)
    thin = [(_sparse(sets[0][0], call.length), sets[0][1]), *sets[1:]]
    reference = _reference(call)
    references = [(pairs, Reference(call, *reference(*pairs[0]))) for pairs in (sets, thin)]
    costs: dict[str, Cost] = {}
    running = []
    # Most of the time goes to compiling, by one core for each program: they are compiled side by
    # side. Lowering stays here, where the context says on which device.
    pool = ThreadPoolExecutor(min(len(names), os.cpu_count() or 1))
    try:
        compiled: dict[str, tuple[Candidate, Future[bool]]] = {}
        for name in names:
            try:
                candidate = Candidate(name, call, sets)
                compiled[name] = candidate, pool.submit(_compiled_in_time, candidate, is_over)
            except Exception as failure:  # of the implementation: the others go on
                costs[name] = f"left out: it {failed(failure)}"
        for name, (candidate, done) in compiled.items():
            try:
                if not done.result():
                    costs[name] = OVER
                    continue
                error = IMPLEMENTATIONS[name].error
                refusals = (known.obstacle(candidate.first(x), error) for x, known in references)
                if why := next(filter(None, refusals), ""):
                    costs[name] = f"left out: it {why}"
                else:
                    running.append(candidate)
            except Exception as failure:  # of XLA, of the device: the others go on
                costs[name] = f"left out: it {failed(failure)}"
    finally:
        pool.shutdown(cancel_futures=True)
    del references, thin
    costs |= _timed(running, count)
    times = {name: cost for name, cost in costs.items() if isinstance(cost, float)}
    chosen = min(times, key=times.__getitem__) if times and costs[names[0]] != OVER else None
    return chosen, {name: costs[name] for name in names}


def _compiled_in_time(candidate: Candidate, is_over: Callable[[], bool]) -> bool:
    """Compiles a candidate in a thread, unless the time is over by then."""
    if is_over():
        return False
    candidate.compile()
    return True


def _timed(candidates: Sequence[Candidate], launches: int) -> dict[str, float]:
    """Microseconds of one product: the median over rounds in which candidates take turns."""
    once = {c.name: seconds(c, 1) for c in candidates}
    best = min(once.values(), default=0.0)
    times = {name: [first] for name, first in once.items()}
    for i in range(ROUNDS):
        for c in candidates:
            if once[c.name] <= HOPELESS * best:
                runs = min(max(round(BATCH_SECONDS / max(once[c.name], 1e-9)), 1), MOST_RUNS)
                times[c.name] = [*(times[c.name] if i else ()), seconds(c, runs) / runs]
    us = {name: statistics.median(runs) / launches * 1e6 for name, runs in times.items()}
    return {name: round(us_of_one, 3) for name, us_of_one in us.items()}


def failed(error: Exception) -> str:
    """An error in a line."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"failed: {type(error).__name__}: {text[:160]}"
