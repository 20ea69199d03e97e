"""`python -m jax_mx`: what this installation runs on this machine, and what MX does to tensors."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import jax_mx
from jax_mx.command import here, output, pictures, ran, samples, tensors
from jax_mx.command.output import Column, Steps
from jax_mx.facts.chips import ARCHS
from jax_mx.facts.formats import BLOCK, FLOAT_DTYPES, FORMATS, SCALINGS
from jax_mx.facts.toolchains import install

PROGRAM = "python -m jax_mx"
# What the extra `cli` brings: the modules, and what their distributions are called.
EXTRA = {"rich": "rich", "safetensors": "safetensors", "sklearn": "scikit-learn"}
PLOT = "matplotlib"
EMULATOR = ("elftools", "msgpack", "tinygrad")  # modules
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

Times are those that calls spend on the device, the median of {2 * ran.CALLS} calls, from JAX's
profiler.

A tensor or file that cannot be quantized gets a sentence on stderr, and the run goes on.
Exit status: 0 if a tensor was quantized and no bytes differ (with --strict: and none failed), 2 for
bad options, 130 when interrupted, else 1.

examples:
  {PROGRAM} --file model.safetensors --format mxfp4_e2m1 --scaling even
  {PROGRAM} --file gradients.npz --axis 0 --dtype float32 --json
  {PROGRAM} --file model.safetensors --plot report.html
"""


# ---- options -------------------------------------------------------------------------------------
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
    about = "draw histograms of tensors, and speeds: a page (.html), a picture (.png, .svg, .pdf)"
    add("--plot", type=picture_path, metavar="PATH", help=about)
    options = parser.parse_args(arguments)
    for name in ("file", *DEFAULTS):  # each once
        given = getattr(options, name) or DEFAULTS.get(name, [])
        setattr(options, name, list(dict.fromkeys(given)))
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


def picture_path(text: str) -> Path:
    """Where a picture can be written."""
    path = Path(text)
    if reason := pictures.obstacle(path):
        raise argparse.ArgumentTypeError(reason)
    return path


# ---- the report ----------------------------------------------------------------------------------
class Report:
    """What the command prints: tables as they come, or one JSON object at the end.

    Attributes:
      options: the command line's.
      steps: says what goes on; on stderr where stdout has to be JSON.
      facts: all that was found out, as JSON has it.
      differ: whether the bytes of some kernel are not the reference's.
      histograms: what pictures show of tensors, where they are asked for.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.steps = Steps(sys.stderr if options.json else sys.stdout)
        self.facts: dict[str, Any] = {"failures": []}
        self.differ = False
        self.histograms: list[pictures.Histograms] = []
        # A pipe has no width.
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000

    def say(self, *lines: str) -> None:
        """Prints lines, unless JSON is wanted."""
        if not self.options.json:
            print(*lines, sep="\n", flush=True)

    def show(self, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Prints a table, unless JSON is wanted."""
        self.say(*output.table(title, columns, rows, self._width))

    def fail(self, name: str, sentence: str) -> None:
        """Complains about a tensor or file."""
        self.facts["failures"].append({"name": samples.printable(name), "reason": sentence})
        self.remark(name, sentence)

    def remark(self, name: str, sentence: str) -> None:
        """Says on stderr what a reader of a tensor's row should know."""
        print(samples.printable(f"{name}: {sentence}"), file=sys.stderr, flush=True)

    def compare(self, rows: Sequence[Any]) -> None:
        """Remembers whether some row's bytes differ, and says so: its column may not be shown."""
        if wrong := sum(row.equal is False for row in rows):
            self.differ = True
            self.remark(PROGRAM, f"in {wrong} rows the bytes are DIFFERENT from the reference's")

    def verdict(self) -> str:
        """What the kernels that ran gave, or nothing where none ran."""
        ran_here = self.facts.get("speed", []) + self.facts.get("emulated", [])
        compared = [row.equal for row in ran_here if row.equal is not None]
        if not compared:
            return ""
        if all(compared):
            return f"{len(compared)} kernels ran and gave the reference's bytes. "
        return f"{compared.count(False)} of {len(compared)} kernels gave OTHER bytes. "

    @property
    def status(self) -> int:
        """The exit status."""
        failed = self.options.strict and self.facts["failures"]
        return 0 if self.facts.get("tensors") and not self.differ and not failed else 1


def report(options: argparse.Namespace) -> int:
    """Prints all there is to say; returns the exit status."""
    start, out = time.monotonic(), Report(options)
    with out.steps.logging():
        tell_devices(out)
        tell_implementations(out)
        tell_kernels(out)
        measure_tensors(out)
        if not options.file and options.emulate is None:
            run_kernels(out)
        draw(out)
    seconds = time.monotonic() - start
    if options.json:
        out.facts["seconds"] = round(seconds, 1)
        print(json.dumps(output.jsonable(out.facts), indent=1, allow_nan=False), flush=True)
    else:
        out.say(f"{out.verdict()}Took {seconds:.0f} s.")
    return out.status


def tell_devices(out: Report) -> None:
    """What JAX sees."""
    versions = f"jax_mx {jax_mx.__version__}, JAX {jax.__version__}, which sees:"
    out.facts |= {"jax_mx": jax_mx.__version__, "jax": jax.__version__}
    out.facts["devices"] = list(here.devices())
    out.say(versions, *(f"  {device}" for device in here.devices()), "")
    if hint := here.hidden_gpu():
        out.say(*output.wrapped(hint, out._width), "")


def tell_implementations(out: Report) -> None:
    """What serves each op."""
    options = out.options
    found = here.servings(options.format, options.axis, options.dtype)
    out.facts["implementations"] = found
    for device in here.devices():
        mine = [each for each in found if each.device == str(device)]
        title = f"What serves a call in {options.dtype} on {device}"
        out.show(title, here.SERVING, list(here.serving_rows(mine)))


def tell_kernels(out: Report) -> None:
    """What is compiled already."""
    with out.steps.step("looking through the kernels that are here"):
        out.facts["kernels"] = here.held()
    rows = list(here.held_rows(out.facts["kernels"]))
    out.show("Kernels that are compiled already", here.HELD, rows)
    for sentence in here.demands():
        out.say(*output.wrapped(sentence, out._width))
    out.say("")


def run_kernels(out: Report) -> None:
    """Runs kernels: those of the GPU, or without one AMD's in emulation."""
    options = out.options
    served = [each for each in out.facts["implementations"] if each.kernels]
    if served and jax.default_backend() != "cpu":
        found = list(ran.speeds(options.format, options.dtype, out.steps))
        out.facts["speed"] = found
        shape = f" at {found[0].shape}" if found else ""
        title = f"Speed{shape} in {options.dtype}, on {jax.devices()[0].device_kind}"
        out.show(title, ran.SPEED, [each.cells() for each in found])
        out.compare(found)
    elif lacks := ran.emulation_lacks():
        why = "no GPU" if jax.default_backend() == "cpu" else "none is here for this device"
        out.say(*output.wrapped(f"No kernel ran: {why}, and no emulation: {lacks}.", out._width))
        out.say("")
    else:
        found = list(ran.emulated(options.format, out.steps))
        out.facts["emulated"] = found
        size = " x ".join(map(str, ran.SMALL))
        title = f"Kernels for {ran.ARCH}, executed in emulation on {size} elements"
        out.show(title, ran.EMULATED, [each.cells() for each in found])
        out.compare(found)


def measure_tensors(out: Report) -> None:
    """Quantizes the tensors of files, or of the small network."""
    options, rows = out.options, []
    for name, tensor in _tensors(out):
        try:
            tensor, axis, remarks = samples.admit(tensor, options.axis, options.dtype)
        except (TypeError, ValueError) as error:
            out.fail(name, str(error))
            continue
        shown = samples.printable(name)
        with out.steps.step(f"quantizing {shown}"):
            found = [*tensors.measure(shown, tensor, axis, options.format, options.scaling)]
            rows += found
            if options.plot:
                how = (options.format, options.scaling[0], found)
                out.histograms.append(pictures.histograms(shown, tensor, axis, *how))
        for remark in remarks:
            out.remark(name, remark)
    out.facts["tensors"] = rows
    out.compare(rows)
    title = f"Tensors in {options.dtype} (--help explains the columns)"
    title += f", blocks of {BLOCK} along axis {options.axis}"
    timed = any(row.seconds is not None for row in rows)
    columns = tensors.COLUMNS + tensors.TIMES * timed
    out.show(title, columns, [row.cells()[: len(columns)] for row in rows])


def draw(out: Report) -> None:
    """Writes the picture or page that is asked for."""
    path = out.options.plot
    if path is None:
        return
    about = [f"jax_mx {jax_mx.__version__}, JAX {jax.__version__}, on:", *map(str, here.devices())]
    with out.steps.step(f"drawing {path}"):
        said = pictures.write(path, out.histograms, out.facts.get("speed", []), about)
    out.facts["plot"] = str(path)
    out.say(said)


def _tensors(out: Report) -> Iterator[tuple[str, Any]]:
    """Names and tensors; instead of one that cannot be read the sentence that says why."""
    if out.options.file:
        for path in out.options.file:
            yield from samples.read(path)
        return
    with out.steps.step("training a small network on scikit-learn's digits"):
        found = samples.digits()
    yield from found.items()


# ---- the command ---------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see `--help` for the exit status."""
    _prepare_streams()
    options = parse(arguments)
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # JAX asserts that it has what CUDA needs
        asked = os.environ.get("JAX_PLATFORMS", "")
        why = f" ({str(error).splitlines()[0]})" if str(error) else ""
        return _end(f"JAX has no device with JAX_PLATFORMS={asked!r}{why}; unset it", 1)
    try:
        if options.plot:  # not after all else was measured
            importlib.import_module(f"{PLOT}.figure")
        with jax.debug_nans(False), jax.debug_infs(False):  # tensors may have some
            if options.emulate is None:
                return report(options)
            from jax_mx.testing import emulate

            with jax.default_device(jax.devices("cpu")[0]), emulate(options.emulate):
                return report(options)
    except ModuleNotFoundError as error:
        return _missing(error)
    except KeyboardInterrupt:
        return _end("interrupted", 130)
    except BrokenPipeError:
        return _end("nobody reads the output any more", 1)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _end(f"{error.strerror or error}{where}", 1)


def _prepare_streams() -> None:
    """Names are printed whatever the encoding is; a stream that is closed takes and drops all."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _missing(error: ModuleNotFoundError) -> int:
    """Says how to install a module that is not there."""
    module = (error.name or "").partition(".")[0]
    if module in EMULATOR:
        return _end(str(error), 1)
    if module == PLOT:
        return _end(f"--plot needs {PLOT}; {install(PLOT)}", 1)
    library = EXTRA.get(module)
    if library is None:
        raise error
    return _end(f"this needs {library}; {install(*EXTRA.values())}", 1)  # all, to ask once


def _end(sentence: str, status: int) -> int:
    """Ends with one line on stderr, whatever has become of the output."""
    try:
        sys.stdout.flush()
    except OSError:  # what is left in the buffer would fail again when Python ends
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with contextlib.suppress(OSError):
        print(f"{PROGRAM}: {sentence}", file=sys.stderr, flush=True)
    return status
