"""A kernel with tensor maps, shared memory beyond 48 KB, clusters and cleared scratch is launched.

prototype/tma_copy.py is small and does nothing but use these. JAX_MX_PROTOTYPE names its cubin
where CuTeDSL is missing: `python tests/prototype/tma_copy.py FILE` writes it.
"""

import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "prototype"
sys.path.insert(0, str(FOLDER))

import tma_rule  # noqa: E402


@pytest.fixture(scope="session")
def cubin(tmp_path_factory) -> Path:
    """The prebuilt one, else a new one."""
    if path := os.environ.get("JAX_MX_PROTOTYPE"):
        return Path(path)
    pytest.importorskip("cutlass", reason="neither JAX_MX_PROTOTYPE nor CuTeDSL is there")
    path = tmp_path_factory.mktemp("prototype") / "tma_copy.cubin"
    subprocess.run([sys.executable, FOLDER / "tma_copy.py", path], check=True, timeout=300)
    return path


def parameters_of(image: bytes) -> dict[str, list[tuple[int, int]]]:
    """Per kernel of a cubin the offset and size of each parameter (EIATTR_KPARAM_INFO)."""
    from elftools.elf.elffile import ELFFile

    found = {}
    for section in ELFFile(io.BytesIO(image)).iter_sections():
        if not section.name.startswith(".nv.info."):
            continue
        data, at, rows = section.data(), 0, {}
        while at < len(data):
            form, attribute, size = struct.unpack_from("<BBH", data, at)
            at += 4
            if form == 4:
                if attribute == 0x17:
                    _, ordinal, offset, flags = struct.unpack_from("<IHHI", data, at)
                    rows[ordinal] = offset, flags >> 18
                at += size
        found[section.name.removeprefix(".nv.info.")] = [rows[i] for i in sorted(rows)]
    return found


def test_the_compiled_kernel_takes_what_the_rule_passes(cubin):
    pytest.importorskip("elftools")
    (entry,) = tma_rule.LAUNCH.entries
    sizes = {
        "MapAt": lambda p: 128,
        "Pointer": lambda p: 8,
        "Padding": lambda p: p.bytes,
        "ScalarAt": lambda p: tma_rule.LAUNCH.scalars[p.index].bytes,
    }
    passed = [sizes[type(p).__name__](p) for p in entry.parameters]
    parameters = parameters_of(cubin.read_bytes())[entry.symbol]
    assert [size for _, size in parameters] == passed
    base = 0x210  # where sm_90 has parameters; a tensor map lies at a multiple of 64 bytes
    assert (base + parameters[0][0]) % 64 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("early", ["", "early"])
@pytest.mark.parametrize(
    "flags",
    ["", "--xla_gpu_graph_min_graph_size=1", "--xla_gpu_enable_command_buffer="],
)
def test_it_runs_on_a_gpu(cubin, flags, early):
    """In and out of graphs, with and without programmatic dependent launch: the same bits."""
    import jax

    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("the prototype is compiled for sm_90a only")
    env = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, FOLDER / "on_gpu.py", cubin, *[early] * bool(early)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    counters = json.loads(done.stdout.strip().splitlines()[-1])
    assert counters["libraries"] == 1 == counters["read_from_store"]
    assert counters["encoded"] == counters["launches"] == counters["cleared"]
    if flags.endswith("command_buffer="):
        assert counters["captured"] == 0
    elif flags:
        assert counters["captured"] > 0, counters
