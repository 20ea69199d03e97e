"""Others' kernels at the same shapes, on the same chip, in the same run.

`python -m benchmarks --peers` runs torchao's quantizers as they are installed. `python -m
benchmarks products --peers` runs torch's products: cuBLASLt's of FP8 codes with scales, and
products over groups. Each peer has a process of its own, because torch's memory is not JAX's. So a
peer that breaks its CUDA context costs only its own rows.
"""

import contextlib
import functools
import importlib.metadata
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks import shapes, timing
from jax_mx.formats.formats import BLOCK

Case = Mapping[str, Any]  # a row's names, but that its shape is a list of numbers
Tensors = tuple[Any, ...]
TIMEOUT = 300  # seconds that a peer may take for all its cases


class Call(NamedTuple):
    """How a peer computes a form: what is timed, and what makes its arguments of x, (..., M, K)."""

    fn: Callable[..., Any]
    prepare: Callable[[Any], Tensors] = lambda x: (x,)
    scaling: str | None = None  # where it is not the one asked for


# ---- the peers ----------------------------------------------------------------------------------
def to_mx(case: Case) -> Call:
    """`to_mx`, compiled; transposed first where that is what the form wants, in one program."""
    import torch
    from torchao.prototype.mx_formats import mx_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    torch._dynamo.reset()  # it gives up after a few shapes
    element = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}[case["format"]]
    dtype = getattr(torch, case["dtype"])

    def last(x):
        return mx_tensor.to_mx(x, element, BLOCK, ScaleCalculationMode(case["scaling"]))

    def quantized(x):
        scales, values = last(x)
        return scales.view(torch.uint8), values

    def dequantize(scales, values):
        return mx_tensor.to_dtype(values, scales, element, BLOCK, dtype)

    fn = {
        "axis -1": last,
        "axis -2 transposed": lambda x: last(x.mT.contiguous()),
        "both transposed": lambda x: (last(x), last(x.mT.contiguous())),
        "dequantize": dequantize,
    }[case["form"]]
    compiled = torch.compile(fn, dynamic=False)
    return Call(compiled, quantized) if fn is dequantize else Call(compiled)


def triton(case: Case) -> Call:
    """torchao's Triton kernels."""
    import torch

    # They are defined on compute capability 10 alone; of their two scalings, floor needs nothing
    # of what makes it so.
    with mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (10, 0)):
        from torchao.prototype.mx_formats import kernels

    _tune_less(kernels.to_mxfp8_dim0_kernel, divides=False)
    _tune_less(kernels.to_mxfp8_dim1_kernel, divides=True)
    scaling = _scaling(case)
    if case["form"] == "axis -1":
        return Call(lambda x: kernels.triton_to_mxfp8_dim0(x, BLOCK, scaling), scaling=scaling)
    return Call(
        lambda x: kernels.triton_to_mxfp8_dim1(x, BLOCK, scaling),
        lambda x: (x.reshape(-1, x.shape[-1]),),  # it wants a matrix; blocks are the same
        scaling,
    )


def _tune_less(kernel: Any, *, divides: bool) -> None:
    """Has Triton's autotuner try what makes a difference, and anew for each number of rows.

    The kernels have no loop with stages; where `divides`, only tiles that do give right scales.
    """

    def worth_trying(configs, named, **arguments):
        rows, cols = ({**named, **arguments}[name] for name in ("n_rows", "n_cols"))
        tiles = ((c, c.kwargs["ROW_TILE_SIZE"], c.kwargs["COL_TILE_SIZE"]) for c in configs)
        return [
            config
            for config, tall, wide in tiles
            if config.num_stages == 2 and not (divides and (rows % tall or cols % wide))
        ]

    kernel.early_config_prune = worth_trying
    kernel.keys = list(dict.fromkeys(("n_rows", *kernel.keys)))


def cutedsl(case: Case) -> Call:
    """torchao's CuTeDSL kernel of three dimensions: blocks along the second, transposed.

    Forms along the last axis are its transposed view of experts. This is below the function that
    tests for compute capability 10.
    """
    from torchao.prototype.moe_training.kernels.mxfp8 import cutedsl_quantize_3d

    scaling, form = _scaling(case), shapes.FORMS[case["form"]]
    fn = functools.partial(
        cutedsl_quantize_3d.mxfp8_quantize_cutedsl_3d,
        scale_block_dim2=BLOCK if form.square else 1,
        scaling_mode=scaling,
    )

    def experts(x):
        x = x.reshape(-1, *x.shape[-2:])
        return (x if form.transpose else x.mT,)

    return Call(fn, experts, scaling)


def scaled_mm(case: Case, *, tiles: bool) -> Call:
    """cuBLASLt's product of codes with a float32 scale, all alike, for each 128 of x and W."""
    import torch
    from torch.nn.functional import ScalingType, scaled_mm

    rows, (n, k) = case["rows"], case["shape"]
    blocks = k // 128
    at = {"dtype": torch.float32, "device": "cuda"}
    xs = torch.full((blocks, rows), 2.0**-8, **at).t()
    # In the order that torch asks for, with blocks beside each other in memory, four at a time.
    ws = torch.full((n // 128, -(-blocks // 4) * 4) if tiles else (blocks, n), 2.0**-8, **at).t()
    of_w = ScalingType.BlockWise128x128 if tiles else ScalingType.BlockWise1x128

    def codes(x):
        return (100 * x).to(torch.float8_e4m3fn)

    x = codes(torch.randn(rows, k, dtype=torch.bfloat16, device="cuda"))

    def product(w):
        one = ScalingType.BlockWise1x128
        return scaled_mm(x, w.t(), xs, one, ws, of_w, output_dtype=torch.bfloat16)

    return Call(product, lambda w: (codes(w),))


def grouped_mm(case: Case) -> Call:
    """torch's product of groups in bfloat16, of rows or of a gradient of weights."""
    import torch

    ends = torch.tensor(case["sizes"], device="cuda").cumsum(0).to(torch.int32)
    x = torch.randn(case["rows"], case["k"], dtype=torch.bfloat16, device="cuda")

    def product(w):
        x_, w_ = (x.t(), w) if w.dim() == 2 else (x, w.mT)
        return torch._grouped_mm(x_, w_, offs=ends)

    return Call(product)


def _scaling(case: Case) -> str:
    """The case's, where the chip has the instruction that torchao rounds up with; else floor."""
    import torch

    return case["scaling"] if torch.cuda.get_device_capability() >= (10, 0) else "floor"


class Peer(NamedTuple):
    """A kernel of others: its call, the cases that it serves, bytes of an element of W."""

    call: Callable[[Case], Call]
    forms: Sequence[str]
    dtypes: Sequence[str] = ("bfloat16",)
    formats: Sequence[str] = ("mxfp8_e4m3",)
    scalings: Sequence[str] = ("floor", "rceil")
    library: str = "torchao"
    itemsize: int = 2

    def serves(self, case: Case) -> bool:
        """Whether the case is one of its own."""
        one_of = {"form": self.forms, "dtype": self.dtypes, "format": self.formats}
        one_of |= {"scaling": self.scalings, "scale_layout": ("row_major",)}
        known = all(case[name] in names for name, names in one_of.items())
        return known and len(case["shape"]) > 1


_LAST, _FLOATS = ("axis -1", "axis -2 transposed"), ("bfloat16", "float32")
PEERS: dict[str, Peer] = {
    "to_mx, torch.compile": Peer(to_mx, (*_LAST, "both transposed", "dequantize"), dtypes=_FLOATS,
        formats=("mxfp8_e4m3", "mxfp8_e5m2"), scalings=("floor", "rceil", "ceil")),
    "Triton": Peer(triton, _LAST),
    "CuTeDSL": Peer(cutedsl, (*_LAST, "square", "square transposed"), dtypes=_FLOATS),
}  # fmt: skip
PRODUCTS: dict[str, Peer] = {  # of products.py: forms are kinds of its cases
    **{
        f"cuBLASLt 1x128, W {name}": Peer(
            functools.partial(scaled_mm, tiles=tiles), ("dense",), library="torch", itemsize=1
        )
        for name, tiles in (("128x128", True), ("1x128", False))
    },
    "bf16 torch._grouped_mm": Peer(grouped_mm, ("grouped", "wgrad"), library="torch"),
}


# ---- in the benchmark's process -----------------------------------------------------------------
def run(
    name: str, cases: Sequence[Case], repeats: int
) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """The number of a case and its timing, or an "error"; None and one of a process that fails."""
    if not cases:
        return
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.peers", name, str(repeats)],
            input=json.dumps(cases),
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        output, error = done.stdout, ""
        if done.returncode:
            error = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode()  # bytes, whatever was asked for
        error = f"not done after {TIMEOUT} seconds"
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # what somebody else printed
            index, answer = json.loads(line)
            yield index, answer
    if error:
        yield None, {"error": error}


# ---- in the peer's process ---
def measure(call: Call, case: Case, repeats: int) -> dict[str, Any]:
    """The fields of a row."""
    import torch

    dtype = getattr(torch, case["dtype"])
    make = functools.partial(torch.randn, case["shape"], dtype=dtype, device="cuda")
    count = timing.rotation(math.prod(case["shape"]) * dtype.itemsize)
    inputs = [call.prepare(make()) for _ in range(count)]
    moved = torch.utils._pytree.tree_leaves((inputs[0], call.fn(*inputs[0])))
    size = sum(t.numel() * t.element_size() for t in moved)
    del moved  # room
    for i in range(timing.WARM_UP):
        call.fn(*inputs[i % len(inputs)])
    timed = timing.per_call(profile(call.fn, inputs, repeats), repeats)
    return {
        "us": timed.us,
        "clock": timed.clock,
        "bytes": size,
        "scaling": call.scaling or case.get("scaling", ""),
    }


def profile(fn: Callable[..., Any], inputs: Sequence[Tensors], calls: int) -> list[timing.Event]:
    """The device's events for so many calls, as `timing.profile` has them."""
    import torch

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for i in range(calls):
            fn(*inputs[i % len(inputs)])
        torch.cuda.synchronize()
    return [
        timing.Event(e.time_range.start * 1e3, e.time_range.elapsed_us() * 1e3, e.name)
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
    ]


def answer(name: str, repeats: str) -> None:
    """Reads cases from stdin; prints [index, answer] for each, a line each."""
    answers, sys.stdout = sys.stdout, sys.stderr  # which compilers may write to
    import torch

    peer = (PEERS | PRODUCTS)[name]
    library = f"{peer.library} {importlib.metadata.version(peer.library)}"
    for index, case in enumerate(json.load(sys.stdin)):
        try:
            answer = {**measure(peer.call(case), case, int(repeats)), "library": library}
        except Exception as error:  # of this case; the others are worth having
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        torch.cuda.empty_cache()
        print(json.dumps([index, answer]), file=answers, flush=True)


if __name__ == "__main__":
    answer(*sys.argv[1:])
