"""`python -m jax_mx`: the numbers, the sentences for bad input, and one run from end to end."""

import io
import json
import math
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.flax import save_file as save_jax
from safetensors.numpy import save_file

import jax_mx
from jax_mx.command import here, multiplying, output, plain, ran, samples, tensors
from jax_mx.command import report as cli
from jax_mx.formats import reads
from jax_mx.launch import store
from jax_mx.launch.chips import ARCHS
from jax_mx.quantizing.registry import Support
from jax_mx.shipping import verified
from jax_mx.shipping.shipped import SHIPPED

pytestmark = pytest.mark.any_device
ONE = ["--format", "mxfp8_e4m3", "--scaling", "floor"]
ON_CPU = jax.default_backend() == "cpu"


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def rows(text, name):
    """The cells of a tensor's rows in the printed table."""
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    return [line[1:] for line in lines if line[0] == name]


def run(capsys, *arguments):
    status = cli.main([*map(str, arguments)])
    return status, *capsys.readouterr()


@pytest.fixture
def good(tmp_path):
    """A file that can be quantized, to see that a run goes on."""
    np.save(tmp_path / "good.npy", normal(2, 32))
    return tmp_path / "good.npy"


# ---- numbers ---
def test_powers_of_two_are_exact(tmp_path, capsys):
    np.save(tmp_path / "p.npy", np.tile(2.0 ** np.arange(-4, 4, dtype=np.float32), (2, 8)))
    status, out, err = run(capsys, "--file", tmp_path / "p.npy", *ONE)
    assert (status, err) == (0, "")
    (row,) = rows(out, "p.npy")
    # No code is the largest, 448 = 1.75 * 2^8; 33 bytes for 32 elements, against 64.
    assert row[:7] == ["2 x 64", "mxfp8_e4m3", "floor", "exact", "0", "0.00", "0.516"]


def compared(x, y):
    losses = tensors.Losses()
    losses.compare(np.array(x), np.array(y))
    return losses


def test_known_errors():
    losses = compared([3.0, 4.0, 0.0], [3.0, 3.5, 0.0])
    assert losses.snr == pytest.approx(10 * math.log10(25 / 0.25))
    assert losses.relative_error == 0.125
    losses.compare(np.array([12.0]), np.array([10.0]))  # a second part
    assert losses.snr == pytest.approx(10 * math.log10(169 / 4.25))
    assert losses.relative_error == 2 / 12 and losses.remark == ""
    zeros, infinite = compared([0.0] * 3, [0.0] * 3), compared([1.0], [math.inf])
    assert (zeros.snr, zeros.relative_error, zeros.remark) == (math.inf, 0, "all zero")
    assert (infinite.snr, infinite.relative_error) == (-math.inf, math.inf)
    assert infinite.remark == "became infinite"


def test_poisoned_blocks_are_left_out_and_said(tmp_path, capsys):
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[1, 40] = np.nan, np.inf
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "nan.npy", x * np.float32(np.nan))
    files = ["--file", tmp_path / "x.npy", "--file", tmp_path / "nan.npy"]
    status, out, err = run(capsys, *files, "--format", "mxfp4_e2m1", "--scaling", "even")
    assert status == 0
    assert "x.npy: has 2 elements that are NaN or infinite in bfloat16; their blocks" in err
    # The poisoned elements hold the largest magnitude as a stand-in for NaN: not saturated.
    assert rows(out, "x.npy")[0][3:6] == ["exact", "0", "0.00"]
    assert rows(out, "nan.npy")[0][3:6] == ["no finite block", "nan", "nan"]


def test_saturated_is_what_was_larger_than_the_largest(tmp_path, capsys):
    """480 saturates where its block's scale is 1, as floor has it; 448 is E4M3's largest."""
    x = np.ones((1, 64), np.float32)
    x[0, 3], x[0, 40] = 480, 448
    np.save(tmp_path / "x.npy", x)
    options = ["--file", tmp_path / "x.npy", "--format", "mxfp8_e4m3", "--scaling"]
    for scaling, share in (("floor", "1.56"), ("rceil", "0.00")):
        _, out, _ = run(capsys, *options, scaling)
        assert rows(out, "x.npy")[0][5] == share


def test_what_became_zero_is_said(tmp_path, capsys):
    """Numbers alone would say that nothing was lost."""
    tiny = np.full((1, 32), 1e-10, np.float32)
    np.save(tmp_path / "cast.npy", tiny)  # zero in float16 already
    np.save(tmp_path / "part.npy", np.concatenate([tiny, tiny / tiny]))
    np.save(tmp_path / "zero.npy", tiny * 0)
    names = [a for n in ("cast", "part", "zero") for a in ("--file", tmp_path / f"{n}.npy")]
    status, out, err = run(capsys, *names, "--dtype", "float16", *ONE)
    assert status == 0
    assert err.splitlines() == [
        "cast.npy: of 32 nonzero elements 32 are zero in float16, so nothing is left to measure; "
        "try --dtype float32, or multiply it",
        "part.npy: of 64 nonzero elements 32 are zero in float16",
    ]
    assert rows(out, "zero.npy")[0][3] == "all zero"
    np.save(tmp_path / "codes.npy", np.full((1, 32), 1e-44, np.float32))  # below the least scale
    status, out, _ = run(capsys, "--file", tmp_path / "codes.npy", "--dtype", "float32", *ONE)
    assert rows(out, "codes.npy")[0][3:5] == ["0.0", "1"]
    assert compared([1.0, 1.0], [0.0, 0.0]).remark == "all became zero"


def test_axis_and_dtype(tmp_path, capsys):
    np.save(tmp_path / "x.npy", normal(64, 5) * np.float32(1e6))
    status, out, err = run(
        capsys, "--file", tmp_path / "x.npy", "--axis", 0, "--dtype", "float16", *ONE
    )
    assert status == 0
    assert "NaN or infinite in float16" in err  # beyond its range
    assert len(rows(out, "x.npy")) == 1


# ---- tensors in files ---
def test_every_kind_of_file(tmp_path, capsys):
    x = normal(2, 32)
    exact = x.astype(ml_dtypes.bfloat16)  # the same in every dtype but float16
    np.save(tmp_path / "a.npy", exact.astype(">f4"))
    np.savez_compressed(tmp_path / "a.npz", w=exact.astype(np.float64), v=x.astype(np.float16))
    save_jax({"w": jax.numpy.asarray(exact)}, tmp_path / "a.safetensors")
    files = [a for n in ("a.npy", "a.npz", "a.safetensors") for a in ("--file", tmp_path / n)]
    status, out, err = run(capsys, *files, *ONE)
    assert status == 0
    assert err == "a.npz:w: was float64 and is measured in bfloat16\n"
    same = [rows(out, name) for name in ("a.npy", "a.npz:w", "a.safetensors:w")]
    bytes_alone = [[row[:8] for row in table] for table in same]  # not the times
    assert bytes_alone[0] == bytes_alone[1] == bytes_alone[2] != []
    assert len(rows(out, "a.npz:v")) == 1


def bad_files(folder):
    """Writes bad files; yields the name of each, and what its sentence must say."""
    x = normal(4, 32)
    yield "missing.npy", "missing.npy: there is no file"
    (folder / "folder.npz").mkdir()
    yield "folder.npz", "folder.npz: is a directory; give the path of a file"
    os.mkfifo(folder / "fifo.npy")  # to open it would wait for ever
    yield "fifo.npy", "fifo.npy: is a FIFO"
    (folder / "loop.npy").symlink_to("loop.npy")
    yield "loop.npy", "loop.npy: cannot be reached (Too many levels of symbolic links)"
    (folder / "dangling.npy").symlink_to("nowhere.npy")
    yield "dangling.npy", "dangling.npy: is a link to nowhere.npy, where there is nothing"
    yield "model.pt/x.npy", "x.npy: cannot be reached (Not a directory)"
    (folder / "model.pt").write_bytes(b"")
    yield "model.pt", "model.pt: suffix '.pt' is unknown; save the tensors as one of .safetensors"
    for suffix in (".npy", ".npz", ".safetensors"):
        for stem, content in (("nothing", b""), ("text", b"hello, this is no tensor at all")):
            (folder / f"{stem}{suffix}").write_bytes(content)
            yield f"{stem}{suffix}", f"{stem}{suffix}: is truncated, damaged or not what its suffix"
    np.save(folder / "whole.npy", x)
    np.savez_compressed(folder / "whole.npz", x=x)
    save_file({"x": x}, folder / "whole.safetensors")
    for suffix in (".npy", ".npz", ".safetensors"):
        whole = (folder / f"whole{suffix}").read_bytes()
        (folder / f"cut{suffix}").write_bytes(whole[:-40])
        yield f"cut{suffix}", f"cut{suffix}: is truncated, damaged or not what its suffix"
    flipped = bytearray((folder / "whole.npz").read_bytes())
    flipped[200] ^= 0xFF
    (folder / "flipped.npz").write_bytes(flipped)
    yield "flipped.npz", "flipped.npz:x: is truncated, damaged"
    np.savez(folder / "none.npz")
    yield "none.npz", "none.npz: holds no tensors"
    np.save(folder / "pickle.npy", np.array([{}], object), allow_pickle=True)
    yield "pickle.npy", "pickle.npy: holds pickled Python objects, which are never loaded"


def bad_tensors(folder):
    """As `bad_files`, of files that can be read."""
    for name, tensor, sentence in (
        ("ints", np.ones((2, 32), np.int64), "has dtype int64, must be one of bfloat16, float16"),
        ("strings", np.array(["a"] * 32), "has dtype str32, must be one of"),
        ("bf16", normal(2, 32).astype(ml_dtypes.bfloat16), "what numpy's files make of bfloat16"),
        ("f8", normal(2, 32).astype(ml_dtypes.float8_e4m3fn), "has dtype void8, must be one of"),
        ("pairs", np.zeros((2, 32), [("re", "i1"), ("im", "i1")]), "has dtype void16, must be"),
        ("scalar", np.float32(1), "x is a scalar"),
        ("empty", np.ones((0, 32), np.float32), "is empty, shape (0, 32)"),
        ("odd", normal(2, 40), "axis -1 has length 40, not a multiple of the block length 32"),
    ):
        np.save(folder / f"{name}.npy", tensor)
        yield f"{name}.npy", f"{name}.npy: ", sentence
    header = {"x": {"dtype": "F8_E4M3", "shape": [2, 32], "data_offsets": [0, 64]}}
    header = json.dumps(header).encode()
    (folder / "f8.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    yield "f8.safetensors", "f8.safetensors:x: ", "has dtype F8_E4M3, must be one of bfloat16"


def test_bad_input_gets_a_sentence_and_the_run_goes_on(tmp_path, good, capsys):
    bad = [(name, (sentence,)) for name, sentence in bad_files(tmp_path)]
    bad += [(name, sentences) for name, *sentences in bad_tensors(tmp_path)]
    files = [a for name, _ in bad for a in ("--file", tmp_path / name)]
    status, out, err = run(capsys, *files, "--file", good, *ONE)
    assert status == 0
    assert len(rows(out, "good.npy")) == 1
    lines = err.splitlines()
    assert len(lines) == len(bad)
    for line, (_, sentences) in zip(lines, bad, strict=True):
        for sentence in sentences:
            assert sentence in line


def test_one_bad_tensor_does_not_hide_its_neighbours(tmp_path, capsys):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.array([{}], object), b=normal(2, 32), c=normal(3))
    status, out, err = run(capsys, "--file", path, *ONE)
    assert status == 0
    assert len(rows(out, "a.npz:b")) == 1
    assert [line.split(": ")[0] for line in err.splitlines()] == ["a.npz:a", "a.npz:c"]


def test_names_from_files_do_nothing_to_the_terminal(tmp_path, capsys):
    names = ["\x1b[31mred", "two\nlines", "[bold]rich[/bold]", "\u202egpj"]
    tensors = {name: normal(2, 32) for name in names}
    np.savez(tmp_path / "a.npz", **tensors, **{"bad\x1b[2J\r": normal(3)})
    (tmp_path / "\x1b]0;title\x07.npy").write_bytes(b"")
    files = ["--file", tmp_path / "a.npz", "--file", tmp_path / "\x1b]0;title\x07.npy"]
    status, out, err = run(capsys, *files, *ONE)
    assert status == 0
    for name in (r"\x1b[31mred", r"two\nlines", "[bold]rich[/bold]", r"\u202egpj"):
        assert len(rows(out, f"a.npz:{name}")) == 1
    assert [line.split(": ")[0] for line in err.splitlines()] == [
        r"a.npz:bad\x1b[2J\r",
        r"\x1b]0;title\x07.npy",
    ]
    assert all(c.isprintable() or c == "\n" for c in out + err)


def test_status_and_repeated_options(tmp_path, good, capsys):
    """The status is 1 when nothing was quantized, with --strict also when a file failed."""
    bad = ["--file", tmp_path / "missing.npz"]
    status, out, err = run(capsys, *bad, *ONE)
    assert status == 1 and "there is no file" in err and "along axis -1: none" in out
    files = ["--file", good]
    for options, want in ((files * 2, 0), (files + bad, 0), (files + bad, 1), (files, 0)):
        strict = ["--strict"] * (want or options == files)
        status, out, _ = run(capsys, *options, *ONE, *ONE, *strict)
        assert status == want
        assert len(rows(out, "good.npy")) == 1


# ---- what a screen shows, and a program reads ---
@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_shows_all_words(width, monkeypatch):
    """Cells wrap between words; names from files are no markup."""
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    screen = output.Screen(stream)
    row = ["grad w1", "128 x 64", "mxfp8_e4m3", "[b]floor[/b]", "39.8", "0.0667", "0.62", "0.516"]
    names = "tensor", "shape", "format", "scaling", "SNR dB", "max rel error", "sat %", "bytes"
    with screen.step("measuring [b]"):
        screen.show("A [b]title", [*names, "why"], [[*row, "words that say why " * 9]])
    screen.show("Nothing", names, [])
    text = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert max(map(len, text.splitlines())) <= max(80, width)
    parts = ["A [b]title", "grad", "Nothing: none", "measuring [b]", *row[1:], "error", "why"]
    assert all(part in text for part in parts), text
    assert output.lines_of(["a", "b"], [["long", ""], ["c", "d"]]) == [
        "  a     b",
        "  ----  -",
        "  long",
        "  c     d",
    ]


def test_json_holds_the_same_facts(tmp_path, good, capsys):
    files = ["--file", good, "--file", tmp_path / "missing.npy"]
    np.save(tmp_path / "zero.npy", np.zeros(32, np.float32))
    status, out, err = run(capsys, *files, "--file", tmp_path / "zero.npy", *ONE, "--json")
    assert status == 0
    facts = json.loads(out)
    assert facts["jax_mx"] == jax_mx.__version__ and facts["jax"] == jax.__version__
    assert [device["kind"] for device in facts["devices"]] == [
        d["kind"] for d, _ in here.devices().values()
    ]
    assert {row["op"] for row in facts["implementations"]} == {*here.OPS}
    assert {row["arch"] for row in facts["kernels"]} >= {"sm_90a", "gfx950"}
    row, zero = facts["tensors"]
    assert (row["tensor"], row["shape"], row["format"]) == ("good.npy", [2, 32], "mxfp8_e4m3")
    assert 20 < row["snr"] < 60
    assert (zero["snr"], zero["remark"]) == (None, "all zero")
    (failure,) = facts["failures"]
    assert failure["name"] == "missing.npy" and "there is no file" in failure["reason"]
    assert "missing.npy: there is no file" in err


def test_long_steps_say_what_they_do(monkeypatch):
    monkeypatch.setattr(output, "FIRST", 0.05)
    monkeypatch.setattr(output, "NEXT", 0.05)
    stream = io.StringIO()
    with output.Screen(stream).step("waiting"):
        time.sleep(0.4)
    lines = stream.getvalue().splitlines()
    assert len(lines) > 1
    assert all(re.fullmatch(r"\.\.\. waiting, \d s", line) for line in lines)


# ---- memory ---
@pytest.mark.parametrize(
    ("shape", "axis"), [((7, 96, 3), 1), ((2, 3, 64), -1), ((64, 50), 0), ((32, 1000), 0)]
)
def test_parts_hold_whole_blocks_and_every_element(shape, axis, monkeypatch):
    x = normal(*shape)
    whole = samples.admit(x, axis, "float32")
    q = tensors.quantize(x, format="mxfp4_e2m1", axis=axis, scaling="even")
    want = tensors.Losses()
    want.add(x, q)
    monkeypatch.setattr(samples, "PART", 100)
    parts = [part.whole() for part in whole.parts()]
    assert len(parts) > 1 and max(part.size for part in parts) <= 100
    for part in parts:
        assert part.shape[axis] % 32 == 0
    (row,) = tensors.measure("x", whole, ["mxfp4_e2m1"], ["even"])
    assert row["snr"] == pytest.approx(want.snr, rel=1e-9)
    for name in ("relative_error", "saturated", "remark"):
        assert row[name] == want.named()[name]
    assert row["ratio"] == q.nbytes / (2 * x.size)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_memory_of_a_large_tensor(suffix, tmp_path, capsys, monkeypatch):
    """The host has temporary arrays of a part; the tensor is mapped, not read."""
    x = np.zeros((2**10, 2**10), np.float32)
    save = {".npy": np.save, ".safetensors": lambda path, x: save_file({"x": x}, path)}[suffix]
    save(tmp_path / f"x{suffix}", x)
    monkeypatch.setattr(samples, "PART", 2**14)
    options = ["--file", tmp_path / f"x{suffix}", *ONE]
    assert run(capsys, *options)[0] == 0  # compiled, and modules imported
    peaks = []
    for _ in range(2):  # after a whole suite JAX may have forgotten programs, and trace them again
        tracemalloc.start()
        try:
            assert run(capsys, *options)[0] == 0
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert min(peaks) < x.nbytes


# ---- the command ---
@pytest.mark.parametrize("library", ["safetensors", "sklearn"])
def test_missing_library(library, tmp_path, capsys, monkeypatch):
    """The command says how to install it."""
    save_file({"x": normal(2, 32)}, tmp_path / "x.safetensors")
    for name in [m for m in sys.modules if m.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    options = ["--file", tmp_path / "x.safetensors"] * (library == "safetensors")
    status, _, err = run(capsys, *options, *ONE)
    every = " ".join(cli.EXTRA.values())
    wanted = f"this needs {cli.EXTRA.get(library)}; pip install {every}"
    assert (status, err) == (1, f"python -m jax_mx: {wanted}\n")


@pytest.mark.parametrize(
    ("where", "sentence"),
    [("full", "No space left on device"), ("pipe", "nobody reads the output any more")],
)
def test_output_that_cannot_be_written_ends_in_one_line(where, sentence, good):
    command = [sys.executable, "-m", "jax_mx", "--file", good, *ONE]
    if where == "full" and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full" if where == "full" else write, "w") as stdout:  # noqa: PTH123
        if where == "full":
            os.close(write)
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"python -m jax_mx: {sentence}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("more", "status", "sentence"),
    [
        (
            {"PYTHONIOENCODING": "latin-1", "JAX_DEBUG_NANS": "1"},
            0,
            r"tensors.npz:é\u6f22: has 1 element that is NaN or infinite",
        ),
        ({"JAX_PLATFORMS": "cuda"}, 1, "JAX has no device with JAX_PLATFORMS='cuda'"),
        ({"stdout": "closed"}, 0, ""),
    ],
    ids=str,
)
def test_settings_that_are_in_the_way(more, status, sentence, tmp_path):
    x = np.full((32, 32), 1.0, np.float32)
    x[0, 0] = np.nan
    np.savez(tmp_path / "tensors.npz", **{"é漢": x})
    command = [sys.executable, "-m", "jax_mx", "--file", str(tmp_path / "tensors.npz"), *ONE]
    if more.get("stdout"):
        command = ["sh", "-c", f"exec {shlex.join(command)} >&-"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **more}
    done = subprocess.run(command, capture_output=True, env=env)
    said = (done.stdout + done.stderr).decode("latin-1")
    assert done.returncode == status and sentence in said, said
    assert "Traceback" not in said


def test_bad_options(capsys):
    for options, sentence in (
        (["--format", "mxfp5"], "invalid choice: 'mxfp5' (choose from 'mxfp8_e4m3'"),
        (["--dtype", "float64"], "invalid choice: 'float64'"),
        (["--axis", "rows"], "must be an integer, got 'rows'"),
        (["--axis", "99999999999999999999"], "must be -32 to 31, got 99999999999999999999"),
        (["--axis", "-33"], "must be -32 to 31, got -33"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(options)
        assert stop.value.code == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("axis", [-32, -2, 31])
def test_implementations_of_every_op(axis):
    rows = here.servings(["mxfp4_e2m1", "mxfp6_e3m2"], axis, "bfloat16")
    kinds = len(here.devices())
    assert [row["op"] for row in rows] == [op for op in here.OPS for _ in range(2)] * kinds
    if ON_CPU:
        assert {row["implementation"] for row in rows} == {"xla"}
        assert all("no kernels for cpu" in row["reason"] for row in rows)
        _, table = here.serving_table(rows)
        assert [row[:3] for row in table] == [
            [op, "mxfp4_e2m1, mxfp6_e3m2", "xla"] for op in here.OPS
        ]


def test_devices_are_a_list(monkeypatch):
    class Fake:
        def __init__(self, name):
            self.device_kind, self.platform, self.compute_capability = name, "gpu", "9.0"

    monkeypatch.setattr(jax, "devices", lambda: [Fake("NVIDIA H200")] * 8 + [Fake("NVIDIA H100")])
    assert [*here.devices()] == [
        "8 x NVIDIA H200 (sm_90)",
        "1 x NVIDIA H100 (sm_90)",
    ]


def test_kernels_that_are_held(tmp_path, monkeypatch):
    first, second, third = [v for v in SHIPPED if v.implementation == "cutedsl"][:3]
    held = {
        first: store.Artifact({"sha256": "1"}, store.BINARIES, b""),
        second: store.Artifact({"sha256": "2"}, tmp_path, b""),
        third: store.Artifact({"sha256": "3"}, tmp_path, b""),
    }
    recorded = {
        first.name: {"sha256": "1", "executed_on": ["NVIDIA H200"]},
        second.name: {"sha256": "another", "executed_on": ["NVIDIA H200"]},
        third.name: {"sha256": "3", "executed_on": []},
    }
    monkeypatch.setattr(store, "find", lambda v, arch: held.get(v) if arch == "sm_90a" else None)
    monkeypatch.setattr(verified, "read", lambda arch: recorded if arch == "sm_90a" else {})
    _, table = here.held_table(here.held())
    assert ["sm_90a", "H100, H200", "1", "2", "1: NVIDIA H200"] in table
    assert ["gfx950", "MI350X, MI355X", "0", "0", "0"] in table


@pytest.mark.parametrize("exists", [False, True])
def test_a_gpu_that_jax_does_not_see_is_said(exists, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(here, "DRIVERS", {str(tmp_path if exists else tmp_path / "no"): "a GPU"})
    assert bool(here.hidden_gpu()) == exists


@pytest.mark.parametrize("flip", [0, 1])
def test_bytes_are_compared_and_calls_timed(flip, good, capsys, monkeypatch):
    """The branches of a device with kernels, walked through wherever the test runs."""
    quantize = tensors.quantize

    def kernel(x, implementation=None, **call):
        q = quantize(x, implementation="xla", **call)
        scales = np.asarray(q.scales).view(np.uint8) ^ np.uint8(flip and implementation is None)
        scales = jax.numpy.asarray(scales.view(q.scales.dtype))
        return jax_mx.MXArray(q.values, scales, q.format, q.axis, q.scale_layout)

    monkeypatch.setattr(tensors, "quantize", kernel)
    monkeypatch.setattr(tensors, "LARGE", 0)
    monkeypatch.setattr(here, "support", lambda *_: Support("cutedsl", SHIPPED[:1]))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    status, out, err = run(capsys, "--file", good, *ONE)
    assert status == flip
    assert ("DIFFERENT" in err) == flip
    (row,) = rows(out, "good.npy")
    assert row[7] == ("DIFFERENT" if flip else "equal")
    assert float(row[8]) > 0
    assert all(float(gbps) > 0 for gbps in row[9].split(" vs "))


def test_speed_is_measured(monkeypatch):
    """The measurement of a GPU, small, on any machine."""
    monkeypatch.setattr(ran, "LAYER", (8, 64, 64))
    rows = list(ran.speeds(["mxfp8_e4m3", "mxfp4_e2m1"], "bfloat16", output.Screen(io.StringIO())))
    assert [(speed["op"], speed["format"]) for speed in rows] == [
        (op, format) for format in ("mxfp8_e4m3", "mxfp4_e2m1") for op in here.OPS
    ]
    for speed in rows:
        elements = math.prod(speed["shape"])
        codes = elements // (2 if speed["format"] == "mxfp4_e2m1" else 1) + elements // 32
        assert speed["nbytes"] == 2 * elements + codes * (1 + (speed["op"] == "quantize_both"))
        assert speed["us"] > 0 and speed["copy_us"] > 0 and speed["plain_us"] > 0
        assert speed["equal"] is (None if ON_CPU else True)
    names, table = ran.speed_table(rows)
    assert {len(row) for row in table} == {len(names)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1"])
def test_plain_versions_compute_the_same(format):
    x = jax.numpy.asarray(normal(64, 96), jax.numpy.bfloat16)
    last = jax_mx.quantize(x, format, implementation="xla")
    second = jax_mx.quantize(x, format, axis=-2, transpose=True, implementation="xla")
    for version in plain.versions("quantize", format, x.dtype).values():
        assert ran.same(version(x), (last.values, last.scales))
    for version in plain.versions("quantize_both", format, x.dtype).values():
        want = ((last.values, last.scales), (second.values, second.scales))
        assert ran.same(version(x), want)
    for version in plain.versions("dequantize", format, x.dtype).values():
        assert ran.same(version(last), jax_mx.dequantize(last, dtype=x.dtype, implementation="xla"))
    assert plain.versions("quantize", "mxfp6_e2m3", x.dtype) == {}


@pytest.mark.thorough
def test_default_tensors_are_deterministic():
    first, second = samples.digits(steps=2), samples.digits(steps=2)
    assert list(first) == ["input", "w1", "w2", "h1", "h2", "grad w1", "grad w2"]
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name])
        assert np.any(tensor)
        assert all(length % 32 == 0 for length in tensor.shape)


def test_end_to_end():
    """The README's first command: within its time, it ends in kernels that ran."""
    command = [sys.executable, "-W", "error", "-m", "jax_mx", "--format", "mxfp4_e2m1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "" or not ON_CPU  # GPU libraries write there
    assert done.stdout.startswith(f"jax_mx {jax_mx.__version__}, JAX {jax.__version__}, which sees")
    assert all(f" {op} " in done.stdout for op in here.OPS)
    cells = rows(done.stdout, "grad w1")
    assert [row[:3] for row in cells] == [["64 x 128", "mxfp4_e2m1", s] for s in ("rceil", "floor")]
    for row in cells:
        assert 15 < float(row[3]) < 25  # dB: four bits an element
        assert row[6] == "0.266"
        assert row[7] == "reference ran" if ON_CPU else row[7] != "DIFFERENT"
    if not ON_CPU or not ran.emulation_lacks():
        assert re.search(
            r"\d kernels ran and gave the reference's bytes\. Took \d+ s\.\n$", done.stdout
        )


def test_an_interrupted_process_ends_in_one_line():
    # A shell's background jobs ignore the signal, and so do their children.
    heed = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"import signal, sys; {heed}; from jax_mx.command.report import main; sys.exit(main([]))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it is at work
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[-1:] == ["python -m jax_mx: interrupted"]
    assert "Traceback" not in err


def test_importing_the_library_stays_light():
    code = "import sys, jax_mx; print({'rich', 'safetensors', 'sklearn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_emulated(arch, good, capsys):
    """AMD's binaries on the CPU, compared with the reference."""
    pytest.importorskip("tinygrad")
    status, out, err = run(capsys, "--file", good, *ONE, "--emulate", arch)
    assert (status, err) == (0, "")
    assert rows(out, "good.npy")[0][-1] == "equal"
    assert f"({arch})" in out
    served = rows(out, "quantize")
    assert served[0][:2] == ["mxfp8_e4m3", "flydsl"]


def test_the_command_says_what_a_newer_jax_brings(monkeypatch):
    monkeypatch.setattr(reads, "VERSION", (99, 1))
    monkeypatch.setattr(multiplying, "ARCHS", {"cutedsl": {"sm_100f": ARCHS["cutedsl"]["sm_100f"]}})
    facts = multiplying.multiplying()
    wants = (
        f"sm_100f: 'tcgen05' wants JAX 99.1, this is {jax.__version__}; install it or a newer one."
    )
    assert multiplying.lacking(facts) == [wants]
    monkeypatch.setattr(reads, "VERSION", (0,))
    assert multiplying.lacking(multiplying.multiplying()) == []
