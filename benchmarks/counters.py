"""The hardware's counters, by Nsight Compute, which say what bounds a kernel.

Each row is one launch of one of our kernels with a cold L2 cache, under `ncu`, which must be on the
PATH. Microseconds are at the clocks of `ncu`: compare them within this table alone. Further columns
say how busy memory, the tensor cores and the schedulers were, in per cent of their peak. The last
ones say why warps waited, in warps per cycle and scheduler. With --smoke each call runs once at a
toy size, without `ncu`.
"""

import csv
import functools
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jax_mx
from benchmarks import products
from benchmarks.runner import Args, Case, Row, brief, wanted
from jax_mx.formats.formats import MXFP8_E4M3

OURS = "regex:matmul|wgrad|quantize|amaxes"  # XLA's have other names
METRICS = {  # of ncu, and what the row says: of several the largest
    "gpu__time_duration.sum": "us",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
    "lts__ltcfabric2ltc_cycles_active.avg.pct_of_peak_sustained_elapsed": "L2's halves",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed": "shared memory",
    **{
        f"sm__ops_path_tensor_op_{name}.avg.pct_of_peak_sustained_active": "tensor cores"
        for name in (
            "hgmma_src_bf16_dst_fp32_sparsity_off",
            "hgmma_src_fp8_dst_fp32_sparsity_off",
            "hmma_src_bf16_dst_fp32_sparsity_off",
        )
    },
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": "ALU",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": "FMA",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue slots",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "long_scoreboard", "short_scoreboard", "barrier", "wait", "math_pipe_throttle",
    "mio_throttle", "lg_throttle", "gmma", "membar", "not_selected", "selected", "sleeping",
    "branch_resolve", "dispatch_stall", "no_instruction", "drain",
)  # fmt: skip
CHILD = "import sys; from benchmarks import counters; counters.run(sys.argv[1:])"
FAILED = "failed: "  # what a line of the child's begins with, before a call's name
Call = Callable[[bool], Any]  # with one launch of a kernel of ours; whether it is a toy


def _product(name: str, way: str, toy: bool = False) -> Any:
    case = next(case for case in products.PRODUCTS if case.name == name)
    ways = products.candidates(case.toy, "xla") if toy else products.candidates(case)
    one = next(candidate for candidate in ways if candidate[0] == way)
    (operands,) = products.operands(case.toy if toy else case, one, 1)
    return one[2](*operands)


def _quantized(columns: int, make: Callable[[jax.Array], Any], toy: bool = False) -> Any:
    shape = (64, 128) if toy else (16384, columns)
    return make(jax.random.normal(jax.random.key(0), shape, jnp.bfloat16))


def _picked(x: jax.Array) -> Any:
    return jax_mx.quantize_both(x, rows=jnp.arange(len(x), dtype=jnp.int32)[::-1])


def _gradient(x: jax.Array) -> Any:
    dy = x[:, : x.shape[1] // 2]
    return jax_mx.quantize_both(x, activation=jax_mx.Gated("swiglu", gradient=dy))


_NAMES = ("dense", "decode 16x16384", "decode grouped 2880", "decode grouped 7168")
CALLS: dict[str, Call] = {
    **{f"{n}, {w}": partial(_product, n, w) for n in _NAMES for w in ("mxfp8_e4m3", "mxfp4_e2m1")},
    "dense, fp8 1x128, W 128x128": partial(_product, "dense", "fp8 1x128, W 128x128"),
    "dense, fp8 1x256": partial(_product, "dense", "fp8 1x256, W 1x256"),
    "wgrad up, fp8 1x256": partial(_product, "wgrad up", "fp8 1x256"),
    "both": partial(_quantized, 7168, jax_mx.quantize_both),
    "rows of x, both": partial(_quantized, 7168, _picked),
    "rms_norm, both": partial(
        _quantized, 7168, lambda x: jax_mx.rms_norm(x, format=MXFP8_E4M3, both=True)
    ),
    "gated gradient, both": partial(_quantized, 8192, _gradient),
}


def known(text: str) -> list[str]:
    """The metrics above that `ncu --query-metrics` prints; others would end the run."""
    names = {line.split()[0] for line in text.splitlines() if line.strip()}
    return [metric for metric in METRICS if metric.partition(".")[0] in names]


def run(names: Sequence[str]) -> None:
    """Runs calls one after the other; one that fails leaves the others, and says so."""
    for name in names:
        try:
            jax.block_until_ready(CALLS[name](False))
        except Exception as error:
            print(f"{FAILED}{name}: {brief(error)}", file=sys.stderr)


def launched(
    names: Sequence[str], metrics: Sequence[str] = tuple(METRICS)
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Launches of calls, all in one process, as ncu counts them: units, and values by call.

    Raises:
      RuntimeError: ncu failed, or saw another number of launches; with what it said.
    """
    stalls = [STALL.format(stall) for stall in STALLS]
    child = [sys.executable, "-c", CHILD, *names]
    # ncu saves all memory of the process, and restores it for each group of counters.
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    told = subprocess.run(
        ["ncu", "--csv", "--page", "raw", "--clock-control", "none", "--kernel-name", OURS,
         "--metrics", ",".join([*metrics, *stalls]), *child],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    lines = told.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if told.returncode or start is None:
        raise RuntimeError((told.stdout + told.stderr)[-600:])
    units, *launches = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    bad = [line for line in told.stderr.splitlines() if line.startswith(FAILED)]
    print(*bad, sep="\n", end="\n" * bool(bad), flush=True)
    ran = [n for n in names if not any(line.startswith(f"{FAILED}{n}: ") for line in bad)]
    if len(ran) != len(launches):
        raise RuntimeError(f"{len(launches)} launches of {len(ran)} cases, should be one each")
    return units, dict(zip(ran, launches, strict=True))


def row_of(name: str, units: dict[str, str], values: dict[str, str]) -> dict[str, Any]:
    """A row for the table."""

    def number(metric: str) -> float | None:
        try:
            value = float(values[metric].replace(",", ""))
        except (KeyError, ValueError):  # a metric that this chip does not have
            return None
        return value / {"ns": 1e3, "nsecond": 1e3, "ms": 1e-3, "msecond": 1e-3}.get(
            units[metric], 1
        )

    row: dict[str, Any] = {"case": name, "kernel": values["Kernel Name"]}
    for metric, told in METRICS.items():
        there = [v for v in (number(metric), row.get(told)) if v is not None]
        row[told] = round(max(there), 1) if any(there) else None
    waits = {stall: number(STALL.format(stall)) for stall in STALLS}
    stalls = {stall: round(value, 2) for stall, value in waits.items() if value}
    row["waits"] = dict(sorted(stalls.items(), key=lambda item: -item[1])[:5])
    return row


def cases(args: Args) -> Iterator[Case]:
    """Every call; the first one that is asked for its row launches all."""
    names = [name for name in CALLS if wanted(args, name)]

    @functools.cache
    def launches() -> tuple[dict[str, str], dict[str, dict[str, str]]] | Exception:
        try:
            query = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True)
            return launched(names, known(query.stdout))
        except (OSError, RuntimeError) as error:  # not once more for each row
            return error

    def measure(name: str, args: Args) -> Row:
        if args.smoke:
            start = time.perf_counter()
            jax.block_until_ready(CALLS[name](True))
            return {"us": round((time.perf_counter() - start) * 1e6, 1)}
        if isinstance(counted := launches(), Exception):
            raise counted
        units, values = counted
        if name not in values:
            raise RuntimeError("there was no launch")
        return row_of(name, units, values[name])

    for name in CALLS:
        yield Case(name, "", {"case": name}, partial(measure, name))
