"""Random calls of the C++ handler, by tests/fuzz_handler.py in processes of their own.

A crash ends such a process, and so the test. `--thorough` calls it 100,000 times as XLA does on
NVIDIA, and 30,000 times on AMD. The handler built for the address and the undefined-behaviour
sanitizer gets as many calls.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jaxlib
import pytest
from hypothesis import settings

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

HERE = Path(__file__).parent
XLA = Path(jaxlib.__file__).parent / "include"
THOROUGH = settings.default.max_examples > 100  # see conftest
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def compiled(output: Path, source: Path, *options) -> Path:
    """A library of one C++ file."""
    command = ["g++", "-O1", "-g", "-std=c++17", "-shared", "-fPIC", *options, source]
    subprocess.run([*map(str, command), "-o", str(output)], check=True)
    return output


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """The extension that is installed, and what calls it."""
    folder = tmp_path_factory.mktemp("usual")
    return {
        "extension": importlib.util.find_spec("jax_mx.launch._ffi").origin,
        "runtime": compiled(folder / "runtime.so", HERE / "call_handler.cc", "-isystem", XLA),
        "driver": compiled(folder / "driver.so", HERE / "fake_driver.cc"),
        "env": {},
    }


def sanitized_extension(folder: Path) -> Path:
    """The extension, built for the sanitizers; nanobind's own code as usual."""
    nanobind = pytest.importorskip("nanobind")
    source = HERE.parent / "ffi" / "launch.cc"
    if not source.is_file():
        pytest.skip("needs the sources of the extension")
    places = [nanobind.include_dir(), Path(nanobind.include_dir()).parent / "ext/robin_map/include"]
    places += [sysconfig.get_paths()["include"], XLA]
    include = [word for folder in places for word in ("-isystem", folder)]
    flags = [*include, "-fvisibility=hidden", "-fno-strict-aliasing", "-std=c++17", "-O1", "-fPIC"]
    nanobind_source = Path(nanobind.source_dir()) / "nb_combined.cpp"
    command = ["g++", *flags, "-c", nanobind_source, "-o", folder / "nanobind.o"]
    subprocess.run([*map(str, command)], check=True)
    return compiled(folder / "_ffi.so", source, *SANITIZE, *flags, folder / "nanobind.o", "-ldl")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """All of it built for the sanitizers, whose libraries Python has to have first."""
    folder = tmp_path_factory.mktemp("sanitized")
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        library = subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if library == name:
            pytest.skip(f"g++ has no {name}")
        libraries.append(library)
    return {
        "extension": sanitized_extension(folder),
        "runtime": compiled(
            folder / "runtime.so", HERE / "call_handler.cc", *SANITIZE, "-isystem", XLA
        ),
        "driver": compiled(folder / "driver.so", HERE / "fake_driver.cc", *SANITIZE),
        # Python frees little when it ends.
        "env": {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"},
    }


def fuzz(build: dict, *options) -> dict[str, int]:
    """How many calls came to what."""
    script = [sys.executable, HERE / "fuzz_handler.py"]
    script += [build[name] for name in ("extension", "runtime", "driver")]
    done = subprocess.run(
        [*map(str, script), *map(str, options)],
        env={**os.environ, **build["env"]},
        capture_output=True,
        text=True,
        errors="replace",
    )
    said = done.stderr.replace("\r", "\n").splitlines()
    assert done.returncode == 0, "\n".join(line[:2000] for line in said[-60:])
    return json.loads(done.stdout)


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_an_error_or_the_right_launch(usual, vendor):
    pytest.importorskip("msgpack")
    cases = {"cuda": 100_000, "hip": 30_000} if THOROUGH else {"cuda": 3000, "hip": 1000}
    came_to = fuzz(usual, "--vendor", vendor, "--cases", cases[vendor])
    assert sum(came_to.values()) == cases[vendor]
    assert came_to["launched"] > cases[vendor] / 6 and came_to["left out"] < cases[vendor] / 100


@pytest.mark.thorough
@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_the_same_with_sanitizers(sanitized, vendor):
    pytest.importorskip("msgpack")
    cases = {"cuda": 100_000, "hip": 30_000}[vendor]
    came_to = fuzz(sanitized, "--vendor", vendor, "--cases", cases, "--seed", 1_000_000)
    assert came_to["launched"] > cases / 6


@pytest.mark.thorough
def test_the_sanitizers_would_say_so(sanitized):
    """A bug planted in the stand-in driver ends the process: reports are not lost on the way."""
    broken = {**sanitized, "env": {**sanitized["env"], "JAX_MX_FAKE_FAIL": "bounds"}}
    with pytest.raises(AssertionError, match="AddressSanitizer: heap-buffer-overflow"):
        fuzz(broken, "--cases", 20)
