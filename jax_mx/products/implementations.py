"""The ways to compute a product that reads MX operands: a table, as quantizing/registry.py has one.

Every implementation gives NaN where a block is NaN, and accumulates in float32, FP8 tensor cores
with fewer bits (`error`). A row says whether it serves a contraction on chips, dense or over
groups, and computes it; decide.py picks one.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax

from jax_mx.formats import reads
from jax_mx.formats.layouts import BLOCKED_128X4, ROW_MAJOR, SHUFFLED_16X16, SHUFFLED_32X8, Layout
from jax_mx.launch import chips as chip_table
from jax_mx.launch import store, targets
from jax_mx.products import amd, by_xla, kernel_plans, kernels, pallas, tcgen05
from jax_mx.products.by_xla import FP8_ERROR
from jax_mx.products.contraction import Contraction, Served
from jax_mx.products.primitives import run_once
from jax_mx.quantizing import registry

DENSE, GROUPED = "dot_general", "ragged_dot"


@dataclasses.dataclass(frozen=True)
class ProductImplementation(registry.Implementation):
    """One way to compute products; see `registry.Implementation`.

    Attributes:
      run: computes a contraction of arrays, as `support` said.
      preferred: whether it is the choice on a platform and chips where nothing was measured.
      error: the largest difference of its results over sum |a||b|, where that is more than eps32 *
        k.
      worth: whether `autotune` measures it for a contraction that it serves.
      ops: the public functions whose products it computes: dense ones, or products over groups.
      splits_itself: whether XLA knows how to split it among devices, and no rule of ours does.
      is_pallas: whether its kernels are Pallas', which XLA cannot split.
      layouts: of scales and values, that it reads as they lie; others are brought to rows for it.
      executed: where tests ran its kernels, if jax_mx/verified does not say it; empty: XLA has
        them.
    """

    support: Callable[[Contraction, Sequence[str]], Served]
    run: Callable[[Contraction, Served], jax.Array]
    preferred: Callable[[Contraction, str, Sequence[str]], bool]
    error: float = 0.0
    worth: Callable[[Contraction], bool] = lambda _: True
    ops: tuple[str, ...] = (DENSE, GROUPED)
    splits_itself: bool = False
    is_pallas: bool = False
    layouts: tuple[Layout, ...] = (ROW_MAJOR,)
    executed: str = ""

    def compute(self, contraction: Contraction, served: Served) -> jax.Array:
        """The product of arrays in any layout."""
        y = self.run(contraction.in_layouts(self.layouts), served)
        return y if self.platform == "any" or contraction.numbers.over_rows else run_once(y)


# ---- preferences ---
def _always(contraction: Contraction, platform: str, chips: Sequence[str]) -> bool:
    del contraction, platform, chips
    return True


def _never(contraction: Contraction, platform: str, chips: Sequence[str]) -> bool:
    del contraction, platform, chips
    return False


def _on_gpus(contraction: Contraction, platform: str, chips: Sequence[str]) -> bool:
    del contraction, chips
    return platform in chip_table.DSLS


def _on(known: Callable[[str], bool]) -> Callable[[Contraction, str, Sequence[str]], bool]:
    """Preferred on chips that are all known to be good at it."""

    def preferred(contraction: Contraction, platform: str, chips: Sequence[str]) -> bool:
        del contraction, platform
        return bool(chips) and all(map(known, chips))

    return preferred


# ---- the table ---
def _tiling(tile: int) -> ProductImplementation:
    """Our kernels with one tiling, which `autotune` measures."""
    return ProductImplementation(
        kernels.name_of(tile),
        "cuda",
        functools.partial(kernels.support, tile=tile),
        kernels.run,
        _never,
        FP8_ERROR,
        functools.partial(kernels.worth, tile=tile),
    )


# In order of preference.
IMPLEMENTATIONS: Mapping[str, ProductImplementation] = {
    row.name: row
    for row in (
        ProductImplementation(
            kernels.NAME, "cuda", kernels.support, kernels.run, kernels.preferred, FP8_ERROR
        ),
        *map(_tiling, kernel_plans.ROWS),
        ProductImplementation(
            amd.NAME, "rocm", amd.support, amd.run, _on(chip_table.chips_of("flydsl").__contains__),
            layouts=(SHUFFLED_32X8, SHUFFLED_16X16, ROW_MAJOR),
        ),
        ProductImplementation(
            tcgen05.NAME, "cuda", tcgen05.support, tcgen05.run,
            _on(reads.TCGEN05.__contains__), FP8_ERROR, layouts=(BLOCKED_128X4, ROW_MAJOR),
            executed="JAX's interpreter", is_pallas=True,
        ),
        ProductImplementation(
            "fp8", "any", by_xla.fp8_support, by_xla.fp8, _on(reads.FP8.__contains__), FP8_ERROR,
            ops=(DENSE,),
        ),
        ProductImplementation(
            "scaled_dot", "any", by_xla.scaled_dot_support, by_xla.scaled_dot,
            _on(reads.SCALED_DOT.__contains__), ops=(DENSE,), splits_itself=True,
        ),
        ProductImplementation(
            pallas.HOPPER, "cuda", pallas.hopper_support, pallas.run_hopper,
            _on(lambda chip: chip_table.arch_of(chip) == "sm_90a"), ops=(GROUPED,), is_pallas=True,
        ),
        ProductImplementation(
            pallas.BLACKWELL, "cuda", pallas.blackwell_support, pallas.run_blackwell,
            pallas.prefers_blackwell, executed="dense ones in JAX's interpreter, others nowhere",
            is_pallas=True,
        ),
        ProductImplementation(
            "dequantize", "any", by_xla.serves_all("dequantize", True), by_xla.dequantizing,
            _on_gpus,
        ),
        ProductImplementation("xla", "any", by_xla.serves_all("xla", False), by_xla.plain, _always),
    )
}  # fmt: skip


def named(op: str) -> Mapping[str, ProductImplementation]:
    """The implementations that callers of `op` may name."""
    op = "dot_general" if op in ("matmul", "einsum") else op
    return {name: row for name, row in IMPLEMENTATIONS.items() if op in row.ops}


def chips_of(target: targets.Target) -> list[str]:
    """The chips that products are lowered for: an export may run on any that it has kernels for."""
    if target.chips is not None:
        return target.chips
    dsl = chip_table.DSLS.get(target.platform)
    return [*store.exported(chip_table.chips_of(dsl))] if dsl else []
