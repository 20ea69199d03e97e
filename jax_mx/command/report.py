"""`python -m jax_mx`: a report on this installation and machine, and on tensors in MX."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import jax_mx
from jax_mx.command import here, multiplying, ran, samples, tensors
from jax_mx.command.options import PROGRAM, parse
from jax_mx.command.output import Screen
from jax_mx.formats.formats import BLOCK
from jax_mx.launch.toolchains import install

# The extra `cli` brings these modules, of these distributions.
EXTRA = {"rich": "rich", "safetensors": "safetensors", "sklearn": "scikit-learn"}
EMULATOR = ("elftools", "msgpack", "tinygrad")  # modules


# ---- the report ---
class Report:
    """Shows tables as they come, or one JSON object at the end.

    Attributes:
      options: the command line's.
      screen: shows tables and steps; on stderr where stdout has to be JSON.
      facts: the content of the JSON object.
      differ: whether the bytes of some kernel are not the reference's.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.screen = Screen(sys.stderr if options.json else sys.stdout, silent=options.json)
        self.facts: dict[str, Any] = {"failures": []}
        self.differ = False

    def remark(self, name: str, sentence: str) -> None:
        """Says on stderr what a reader of a tensor's row should know."""
        print(samples.printable(f"{name}: {sentence}"), file=sys.stderr, flush=True)

    def compare(self, rows: Sequence[dict[str, Any]]) -> None:
        """Remembers whether the bytes of some row differ, and says so."""
        if wrong := sum(row["equal"] is False for row in rows):
            self.differ = True
            self.remark(PROGRAM, f"in {wrong} rows the bytes are DIFFERENT from the reference's")

    def verdict(self) -> str:
        """A sentence about the bytes of the kernels that ran, or nothing where none ran."""
        runs = self.facts.get("speed", []) + self.facts.get("emulated", [])
        compared = [run["equal"] for run in runs if run["equal"] is not None]
        if not compared:
            return ""
        if all(compared):
            return f"{len(compared)} kernels ran and gave the reference's bytes. "
        return f"{compared.count(False)} of {len(compared)} kernels gave OTHER bytes. "

    def run(self) -> int:
        """Shows all; returns the exit status."""
        start = time.monotonic()
        with self.screen.logging():
            self.describe()
            self.measure_tensors()
            if not self.options.file and self.options.emulate is None:
                self.run_kernels()
        seconds = time.monotonic() - start
        self.screen.say(f"{self.verdict()}Took {seconds:.0f} s.")
        if self.options.json:
            text = json.dumps(self.facts | {"seconds": round(seconds, 1)})
            # JSON knows neither NaN nor infinities.
            facts = json.loads(text, parse_constant=lambda constant: None)
            print(json.dumps(facts, indent=1), flush=True)
        failed = self.options.strict and self.facts["failures"]
        return 0 if self.facts["tensors"] and not self.differ and not failed else 1

    def describe(self) -> None:
        """Shows the devices, the implementations that serve each op, and compiled kernels."""
        options, say, devices = self.options, self.screen.say, here.devices()
        versions = {"jax_mx": jax_mx.__version__, "jax": jax.__version__}
        self.facts |= versions | {"devices": [facts for facts, _ in devices.values()]}
        say(f"jax_mx {jax_mx.__version__}, JAX {jax.__version__}, which sees:")
        say(*(f"  {name}" for name in devices), "")
        if hint := here.hidden_gpu():
            say(hint, "")
        servings = here.servings(options.format, options.axis, options.dtype)
        self.facts["implementations"] = servings
        for name in devices:
            title = f"What serves a call in {options.dtype} on {name}"
            served = [serving for serving in servings if serving["device"] == name]
            self.screen.show(title, *here.serving_table(served))
        with self.screen.step("looking through the kernels that are here"):
            self.facts["kernels"] = here.held()
        title = "Kernels that are compiled already"
        self.screen.show(title, *here.held_table(self.facts["kernels"]))
        say(*here.demands(), "")
        self.facts["products"] = multiplying.multiplying()
        title = "What multiplies MXFP8 on each chip, with this JAX"
        self.screen.show(title, *multiplying.multiplying_table(self.facts["products"]))
        if lacking := multiplying.lacking(self.facts["products"]):
            say(*lacking, "")

    def measure_tensors(self) -> None:
        """Quantizes the tensors of files, or of the small network."""
        options, rows = self.options, []
        self.facts["tensors"] = rows
        for name, tensor in self.tensors():
            shown = samples.printable(name)
            try:
                sample = samples.admit(tensor, options.axis, options.dtype)
            except (TypeError, ValueError) as error:
                self.facts["failures"].append({"name": shown, "reason": str(error)})
                self.remark(name, str(error))
                continue
            with self.screen.step(f"quantizing {shown}"):
                rows += tensors.measure(shown, sample, options.format, options.scaling)
            for remark in sample.notes:
                self.remark(name, remark)
        self.compare(rows)
        title = f"Tensors in {options.dtype} (--help explains the columns)"
        title += f", blocks of {BLOCK} along axis {options.axis}"
        self.screen.show(title, *tensors.table(rows))

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Names and tensors; instead of an unreadable tensor the sentence that says why."""
        for path in self.options.file:
            yield from samples.read(path)
        if not self.options.file:
            with self.screen.step("training a small network on scikit-learn's digits"):
                network = samples.digits()
            yield from network.items()

    def run_kernels(self) -> None:
        """Runs kernels on the GPU, or without one AMD's kernels in emulation."""
        formats, dtype, on_cpu = (
            self.options.format,
            self.options.dtype,
            jax.default_backend() == "cpu",
        )
        if not on_cpu and any(serving["kernels"] for serving in self.facts["implementations"]):
            rows = self.facts["speed"] = list(ran.speeds(formats, dtype, self.screen))
            title = f"Speed at {rows[0]['shape']} in {dtype}, on {jax.devices()[0].device_kind}"
            table = ran.speed_table(rows)
        elif lacks := ran.emulation_lacks():
            why = "no GPU" if on_cpu else "none is here for this device"
            self.screen.say(f"No kernel ran: {why}, and no emulation: {lacks}.", "")
            return
        else:
            rows = self.facts["emulated"] = list(ran.emulated(formats, self.screen))
            size = " x ".join(map(str, ran.SMALL))
            title = f"Kernels for {ran.ARCH}, executed in emulation on {size} elements"
            table = ran.emulated_table(rows)
        self.screen.show(title, *table)
        self.compare(rows)


# ---- the command ---
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
        with jax.debug_nans(False), jax.debug_infs(False):  # tensors may have some
            if options.emulate is None:
                return Report(options).run()
            from jax_mx.testing import emulate

            with jax.default_device(jax.devices("cpu")[0]), emulate(options.emulate):
                return Report(options).run()
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
