"""Measures what the tables of docs/performance.md show, on the GPUs of this machine.

    python -m benchmarks record [--only quantizers dense] [--seconds 600] [--out FOLDER]

Each command has a process of its own and says what it measured in a file of FOLDER, which is
benchmarks/results by default; then `python -m docs.tables` and the site show it. A command that
fails, or is not done when the time is over, leaves its file as far as it came; the others go on.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import shapes

RESULTS = Path(__file__).parent / "results"
LARGE = shapes.spell(shapes.REQUIRED[0])
_SOURCES = "quantizers --source"
_MIXTURE = '"bf16, Pallas" "bf16, lax.ragged_dot" "auto, gather" "auto, rounds"'
_LAYER = "--tokens 4096 16384 --ways 'mx, *' --cases 'dispatch, *' 'mxfp8, windows*'"
_AUTO = 'auto "auto, mlp" "auto, mlp, once"'
_FAST = '"fast, mlp, once"'
_FSDP = f'bf16 {_AUTO} {_FAST} mxfp8 tensorwise flax "auto, explicit" "auto, shard_map"'
# For each table how its file's name goes on behind the chip's, and what measures it. Where several
# commands share a file, it is a list of rows, and those measured anew replace the earlier ones.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "quantizers": ("", "quantizers --form all --shapes llm --format mxfp8_e4m3 mxfp4_e2m1"),
    "mxfp6": ("", f"quantizers --form all --shapes {LARGE} --format mxfp6_e2m3"),
    "preprocessing": ("",
        'quantizers --format mxfp4_e2m1 --form "axis -1" "axis -2" "axis -2 transposed" both '
        '"both transposed" --preprocessing h16 h32 h64 sr h16_sr rn_h16 sr_h16_sr '
        f"--shapes {LARGE}"),
    "peers": ("_peers",
        'quantizers --form "axis -1" "axis -2 transposed" square "square transposed" '
        f'"both transposed" dequantize --shapes {LARGE} --peers'),
    "rows": ("_sources",
        f'{_SOURCES} rows --form "axis -1" "axis -2 transposed" "both transposed" '
        "--shapes 16384x7168"),
    "activations": ("_sources",
        f'{_SOURCES} swiglu swiglu_floats --form "axis -1" "both transposed" '
        "--shapes 16384x4096,16384x14336"),
    "gradients": ("_sources",
        f"{_SOURCES} swiglu_gradient swiglu_interleaved_gradient swiglu_gradient_sums "
        '--form "both transposed" --shapes 16384x4096,16384x14336'),
    "norms": ("_sources",
        f'{_SOURCES} rms_norm rms_norm_floats --form "axis -1" "both transposed" '
        "--shapes 16384x7168,65536x7168"),
    "dense": ("_products_dense", "products --cases 'dense*' --peers"),
    "grouped": ("_products_grouped", "products --cases 'grouped*' --peers"),
    "wgrad": ("_products_wgrad", "products --cases 'wgrad*' --peers"),
    "decode": ("_products_decode", "products --cases 'decode*'"),
    "decode_step": ("_decode_step", "decode"),
    "layers": ("_layers", "layers"),
    "moe": ("_moe", "moe"),
    "moe_step": ("_moe_step",
        'moe_step --steps 100 --ways "bf16, lax.ragged_dot" "bf16, Pallas" mxfp8 '
        '"mxfp8, windows of 256"'),
    "moe_step_small": ("_moe_step_small",
        'moe_step --small --rate 1e-3 --ways bf16 mxfp8 "mxfp8, windows of 256" '
        '"mxfp8, rows, experts 256" "mxfp8, gradients in mxfp4" mxfp4 '
        '"mxfp8, forward in mxfp4" "mxfp8, dgrad in mxfp4" "mxfp8, wgrad in mxfp4"'),
    "moe_step_wide": ("_moe_step_wide",
        'moe_step --ways bf16 mxfp8 "mxfp8, windows of 256" "mxfp8, rows, experts 256"'),
    "step": ("_step", f"step --ways bf16 {_AUTO} {_FAST} mxfp8 tensorwise flax"),
    "step_kept": ("_step", f"step --checkpoint none --ways bf16 {_AUTO} {_FAST}"),
    "step_70b": ("_step",
        f"step --layers 2 --width 8192 --inner 28672 --ways bf16 {_AUTO} {_FAST} flax"),
    "learning": ("_learning", "learning --ways bf16 auto mxfp8 tensorwise flax"),
    "counters": ("_counters", "counters"),
    "collectives": ("x2_collectives", "collectives"),
    "moe_sharded": ("x2_moe", "moe_sharded"),
    "collectives_sizes": ("x4_collectives",
        "collectives --mib 64 256 1024 --cases 'gather, split along in*' 'all-to-all*' "
        '--ways bf16 "quantize, all_*" "gather_weight, square blocks" "jit: bf16" '
        '"jit: gather_weight, forward"'),
    "sharded": ("x4_sharded", "sharded --form all --require"),
    "moe_ways": ("x4_moe", f"moe_sharded {_LAYER} --k 1 2"),
    "moe_data": ("x4_moe_data", f"moe_sharded {_LAYER} --k 2 --data 2"),
    "moe_step_sharded": ("x4_moe_step",
        'moe_step --devices 1 2 4 --steps 100 --ways "bf16, Pallas" "mxfp8, windows of 256"'),
    "mixture": ("x4_mixture", f"mixture --devices 4 --ways {_MIXTURE}"),
    "mixture_deepseek": ("x4_mixture", f"mixture --model deepseek --devices 4 --ways {_MIXTURE}"),
    "step_two": ("x2_step", f"step --devices 2 --layers 16 --ways {_FSDP}"),
    "step_sharded": ("x4_step", f"step --devices 4 --layers 32 --ways {_FSDP}"),
}  # fmt: skip
# Commands of several GPUs have files whose names begin with x.
SEVERAL = tuple(name for name, (file, _) in COMMANDS.items() if file.startswith("x"))


def command(name: str) -> str:
    """The command that measures a table, as a person types it."""
    return f"python -m benchmarks {COMMANDS[name][1]}"


def chip() -> str:
    """The name of this machine's GPUs as files have it: "h200"."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"record: no GPU of NVIDIA's here ({error}): say --chip") from error
    return done.stdout.splitlines()[0].removeprefix("NVIDIA ").split()[0].lower()


def record(name: str, file: Path, seconds: float, commit: str = "") -> str:
    """Runs a table's command; returns how it ended.

    Args:
      name: in `COMMANDS`.
      file: of the table.
      seconds: that it may take.
      commit: that its rows name; empty for this checkout's.
    """
    before = file.stat().st_mtime_ns if file.exists() else 0
    suffix, rest = COMMANDS[name]
    run = [sys.executable, "-m", "benchmarks", *shlex.split(rest), "--json", str(file)]
    if sum(suffix == other for other, _ in COMMANDS.values()) > 1:
        run.append("--join")
    run += ["--commit", commit] * bool(commit)
    process = subprocess.Popen(run, start_new_session=True)
    try:
        code = process.wait(seconds)
        end = f"exit status {code}" if code else "done"
    except subprocess.TimeoutExpired:
        end = "cut off"
    finally:  # it, and what it has started, must not hold the GPU
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    written = file.exists() and file.stat().st_size and file.stat().st_mtime_ns != before
    return end if written else f"{end}, nothing was written"


def options(add: Callable[..., Any]) -> None:
    """Tables, the time for them, and their folder."""
    usual = [name for name in COMMANDS if name not in SEVERAL]
    add("--only", nargs="+", choices=COMMANDS, default=usual)
    add("--seconds", type=float, default=3600.0, help="for all of them")
    add("--out", type=Path, metavar="FOLDER", default=RESULTS)
    add("--commit", default="", help="that rows name; by default this checkout's")
    add("--chip", help="with which names of files begin; by default the GPU's")


def main(args: argparse.Namespace) -> int:
    """See the module's docstring; 1 if a command did not end well."""
    begin = args.chip or chip()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    ends = {}
    for name in args.only:
        print(f"=== {name}: {command(name)}", flush=True)
        start = time.monotonic()
        file = args.out / f"{begin}{COMMANDS[name][0]}.json"
        ends[name] = record(name, file, end - start, args.commit) if start < end else "not begun"
        print(f"=== {name}: {ends[name]}, {time.monotonic() - start:.0f} s", flush=True)
    return int(any(end != "done" for end in ends.values()))
