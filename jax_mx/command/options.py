"""For `python -m jax_mx`: the options and the help."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jax_mx.command import ran, tensors
from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, FORMATS, SCALINGS
from jax_mx.launch.chips import ARCHS

PROGRAM = "python -m jax_mx"
DEFAULTS = {"format": ["mxfp8_e4m3", "mxfp4_e2m1"], "scaling": ["rceil", "floor"]}

DESCRIPTION = """\
Says what jax_mx runs on this machine and runs it: on a GPU it measures kernels at a layer's real
size, without one it compiles and executes two of AMD's kernels in emulation. Then it quantizes
tensors and shows what is lost: by default those of a small network, trained for a moment on
scikit-learn's digits."""
EPILOG = f"""\
columns of the tables:
  of a copy      the speed of the op over that of a copy that moves as many bytes
  plain XLA us   the same in float arithmetic without kernels, the fastest of two versions
  SNR dB         10 log10(sum x^2 / sum (x - dequantized)^2), in float64
  max rel error  largest |x - dequantized| / |x| of a nonzero element; 1: it became zero
  saturated %    elements that became the format's largest number and were larger
  bytes / bf16   values and scales, against two bytes an element
  bytes equal reference
                 what implementation=None gives, against implementation="xla"
  us, GB/s vs copy
                 of tensors of {tensors.LARGE >> 20} MiB and more, not on a CPU

Times are those that calls spend on the device, the mean of {ran.CALLS} calls, from JAX's profiler.

A tensor or file that cannot be quantized gets a sentence on stderr, and the run goes on.
Exit status: 0 if a tensor was quantized and no bytes differ (with --strict: and none failed), 2 for
bad options, 130 when interrupted, else 1.

examples:
  {PROGRAM} --file model.safetensors --format mxfp4_e2m1 --scaling even
  {PROGRAM} --file gradients.npz --axis 0 --dtype float32 --json
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, defaults filled in."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    about = "your own tensors, .safetensors, .npz or .npy; repeatable"
    add("--file", action="append", type=Path, default=[], metavar="PATH", help=about)
    for name, table in (("format", FORMATS), ("scaling", SCALINGS)):
        about = f"of {', '.join(table)}; repeatable; default: {', '.join(DEFAULTS[name])}"
        add(f"--{name}", action="append", choices=table, metavar="NAME", help=about)
    about = f"blocks of {BLOCK} run along it; default: -1"
    add("--axis", type=axis_number, default=-1, metavar="N", help=about)
    about = f"tensors are converted to it, of {', '.join(FLOAT_DTYPES)}; default: bfloat16"
    add("--dtype", choices=FLOAT_DTYPES, default="bfloat16", metavar="NAME", help=about)
    about = f"run AMD's kernels for it on the CPU: {', '.join(ARCHS['flydsl'])}"
    add("--emulate", choices=ARCHS["flydsl"], metavar="ARCH", help=about)
    add("--strict", action="store_true", help="exit with 1 if any tensor or file failed")
    add("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(arguments)
    for name in ("file", *DEFAULTS):  # each once
        values = getattr(options, name) or DEFAULTS.get(name, [])
        setattr(options, name, list(dict.fromkeys(values)))
    return options


def axis_number(text: str) -> int:
    """An axis of any array that is likely; beyond, integers overflow and shapes do not exist."""
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from error
    if not -32 <= number < 32:
        raise argparse.ArgumentTypeError(f"must be -32 to 31, got {text}")
    return number
