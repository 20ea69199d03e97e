"""The C++ handler without a GPU: on XLA's CPU platform, over a driver that only writes down.

One process per scenario, since the driver is opened once per process. The kernels are real images
with real facts; nothing executes them.
"""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jax_mx.lowering import store as artifacts
from jax_mx.facts.variants import ARCHS, VARIANTS, device_arch

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

PRELUDE = """
    import ctypes, dataclasses, hashlib, json, os, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax import ffi
    from jax.interpreters import mlir
    import jax_mx
    from jax_mx import _ffi
    from jax_mx.lowering import store as artifacts, primitive
    from jax_mx.lowering.plan import plan_quantize

    _ffi.use_host_driver("cuda", sys.argv[1])
    FIELDS = ["entry", "gx", "gy", "gz", "bx", "by", "bz", "n", "add", "exception"]
    FIELDS += ["launches", "libraries"]
    def report():
        out = (ctypes.c_int64 * 12)()
        ctypes.CDLL(sys.argv[1]).fake_driver_report(out)
        return dict(zip(FIELDS, out))

    X = jnp.ones((4, 256), jnp.bfloat16)
    PLAN = plan_quantize(X, "mxfp8_e4m3", -1, "rceil", "row_major", None)
    KERNELS = primitive.kernels_for(PLAN, "cuda", None)

    def lowering(ctx, *operands, plan):
        rule = ffi.ffi_lowering(artifacts.TARGET)
        return rule(ctx, *operands, kernels=KERNELS)
    mlir.register_lowering(primitive.quantize_p, lowering, platform="cpu")

    def change(**facts):
        for kernel in KERNELS.values():
            kernel.update({k: v(kernel[k]) if callable(v) else v for k, v in facts.items()})

    def attempt(f=jax_mx.quantize, x=X):
        try:
            jax.block_until_ready(jax.jit(f)(x))
        except Exception as error:
            return str(error)
        return None
"""


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory):
    library = tmp_path_factory.mktemp("driver") / "libfake.so"
    source = Path(__file__).parent / "fake_driver.cc"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture
def scenario(fake_driver):
    """Runs code after PRELUDE in a new process and returns the JSON value it prints last."""

    def run(code: str, driver=fake_driver, **env: str):
        script = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
        result = subprocess.run(
            [sys.executable, "-c", script, str(driver)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads(result.stdout.strip().splitlines()[-1])

    return run


def test_rules_see_merged_dimensions(scenario):
    """Units of tiles are dimensions of views; rules see what they make up together."""
    out = scenario(
        """
        MERGE = [0, 1, 0, 1, 2]

        def lowering(ctx, *operands, plan):
            rule = ffi.ffi_lowering(artifacts.TARGET)
            return rule(ctx, *operands, kernels=KERNELS, merge=np.array(MERGE, np.int64))

        mlir.register_lowering(primitive.quantize_p, lowering, platform="cpu")
        seen = [4, 0, -3, -2, 4, 0, -2, -1]  # rows and columns where the driver reports rounding
        grid = [[0, 0, 0, -3, 1], [1, 0, -3, -2, 100], [2, 0, -2, -1, 1]]
        grid += [[axis + 3, *term] for axis, *term in grid]
        change(scalars=lambda s: np.array([*s[:-8], *seen]), grid=np.array(grid).ravel())

        def launched(shape, tiled=True):
            options = {"scale_layout": "blocked_128x4"} if tiled else {}
            jax.clear_caches()
            x = jnp.ones(shape, jnp.bfloat16)
            failed = attempt(lambda x: jax_mx.quantize(x, **options).values, x)
            seen = report()
            return failed or [seen[name] for name in ("gx", "gy", "gz", "add", "exception")]

        rows = [launched(shape) for shape in [(3, 256, 384), (2, 3, 130, 384), (256, 32)]]
        MERGE = [0, 1, 0, 1, 2, 2, 2, 2]  # more than the buffers have
        rows.append(launched((7, 256, 384), tiled=False))
        for MERGE in ([0, 5, 0, 1, 2], [0, -1, 0, 1, 2]):
            rows.append(launched((3, 256, 384)))
        print(json.dumps(rows))
        """
    )
    assert out[:4] == [
        [3, 3, 12, 256, 12],
        [6, 2, 12, 130, 12],
        [1, 3, 1, 256, 1],
        [7, 3, 12, 256, 12],
    ]
    assert all("merge numbers a dimension out of range" in error for error in out[4:])


def test_absent_operands_are_counted_and_bad_numbers_refused(scenario):
    out = scenario(
        """
        ABSENT = []

        def lowering(ctx, *operands, plan):
            rule = ffi.ffi_lowering(artifacts.TARGET)
            return rule(ctx, *operands, kernels=KERNELS, absent=np.array(ABSENT, np.int64))

        mlir.register_lowering(primitive.quantize_p, lowering, platform="cpu")
        rows = []
        for ABSENT in ([], [0], [1], [2], [12], [-1], [1, 1], [1, 0], [1 << 62], [*range(12)]):
            jax.clear_caches()
            rows.append(attempt())
        print(json.dumps([rows, report()["launches"]]))
        """
    )
    rows, launches = out
    assert rows[0] is None and launches == 1
    assert all("takes 3 buffers, the call passes 4" in error for error in rows[1:3])
    assert "absent numbers a buffer beyond the operands" in rows[3]
    assert all("absent is not ascending or out of range" in error for error in rows[4:9])
    assert "takes 3 buffers" in rows[9]


def test_launch_follows_the_rule_and_the_buffers(scenario):
    """Grid and scalars come from the shapes of each call; nothing is launched for size 0."""
    out = scenario(
        """
        rows = []
        for shape in [(4, 256), (1, 32), (3, 5, 96), (33, 8192), (0, 64)]:
            for scaling in ("rceil", "floor"):
                PLAN = plan_quantize(X, "mxfp8_e4m3", -1, scaling, "row_major", None)
                KERNELS = primitive.kernels_for(PLAN, "cuda", None)
                jax.clear_caches()
                x = jnp.ones(shape, jnp.bfloat16)
                q = jax.jit(lambda x: jax_mx.quantize(x, scaling=scaling))(x)
                filled = set(np.asarray(q.values).view(np.uint8).ravel().tolist())
                rows.append([shape, scaling, report(), sorted(filled)])
        print(json.dumps(rows))
        """
    )
    tile = 8192
    launches = 0
    for shape, scaling, report, filled in out:
        n = 1
        for extent in shape:
            n *= extent
        if n == 0:
            assert report["launches"] == launches and filled == []
            continue
        launches += 1
        assert report["launches"] == launches
        assert (report["gx"], report["gy"], report["gz"]) == (-(-n // tile), 1, 1)
        assert (report["bx"], report["by"], report["bz"]) == (512, 1, 1)
        assert report["n"] == n and report["libraries"] == 1
        assert (report["add"], report["exception"]) == {
            "rceil": (0x1FFFFF, (8 << 23) + 0x600001),
            "floor": (0, -1),
        }[scaling]
        assert filled == [0x40 + report["entry"]]


def test_alignment_picks_the_entry(scenario):
    out = scenario(
        """
        # XLA's CPU client aligns to 64 bytes; an alignment that nothing has takes the other entry,
        # and where that one fits neither, there is no launch.
        seen = [attempt(), report()["entry"], _ffi.counters()["fallback_entries"]]
        change(align=np.array([1 << 40, 1, 1, 2, 1, 1]))
        jax.clear_caches()
        seen += [attempt(), report()["entry"], _ffi.counters()["fallback_entries"]]
        change(align=np.array([1 << 40, 1, 1, 1, 1, 1 << 40]))
        jax.clear_caches()
        seen += [attempt(), report()["launches"]]
        print(json.dumps(seen))
        """
    )
    assert out[:6] == [None, 0, 0, None, 1, 1]
    assert "the buffers' addresses and shapes fit no entry of quantize_last_bfloat16" in out[6]
    assert out[7] == 2


IMAGE = "image=lambda image: "
SHA = "sha256=lambda s: hashlib.sha256(KERNELS['sm_90']['image']).hexdigest()"


BAD_CALLS = [  # a change of the call's attributes, what is said of it; None: it is launched
    (IMAGE + "image[:len(image) // 2]", "image is not a whole 64-bit ELF file"),
    (IMAGE + "image[:100]", "image is not a whole 64-bit ELF file"),
    (IMAGE + "b''", "image is not a whole 64-bit ELF file"),
    (IMAGE + "b'\\x7fELF' + b'\\xff' * 5000", "image is not a whole 64-bit ELF file"),
    (IMAGE + "image[:-9] + bytes([image[-9] ^ 1]) + image[-8:]", "does not have the sha256"),
    ("sha256='00'", "image does not have the sha256 00"),
    ("symbols='only_one'", "has the wrong size"),
    ("symbols='only_one', threads=np.array([512, 1, 1]), grid=np.array([0, 0, 0, 99, 1])",
     "parameter 5 of only_one takes 4 bytes, the call passes 8"),
    ("symbols='a_0,b_1,c_2,d_3'", "has the wrong size"),
    ("align=np.array([16, 0, 1, 2, 1, 1])", "an alignment is not positive"),
    ("align=np.array([16], np.int32)", "is missing or has the wrong type"),
    ("align=np.array([16], np.int64)", "has the wrong size"),
    ("threads=np.array([512, 1, 1])", "has the wrong size"),
    ("threads=np.array([4096, 1, 1, 512, 1, 1])", "out of range"),
    ("grid=lambda g: g * 0", "out of range"),
    ("grid=lambda g: g[:-1]", "has the wrong size"),
    ("grid=np.array([6, 0, 0, 99, 1])", "out of range"),
    ("grid=np.array([0, 7, 0, 99, 1])", "out of range"),
    ("grid=np.array([0, 0, -9, 99, 1])", "grid axis 0 of"),
    ("grid=np.array([0, 0, 7, 99, 1])", "grid axis 0 of"),
    ("grid=np.array([0, 0, 2, 1, 1])", "grid axis 0 of"),
    ("grid=np.array([0, -1, 1 << 40, 0, 1, 0, -1, 1 << 40, 0, 1])", "grid axis 0 of"),
    ("grid=np.array([1, 0, 0, 99, 1])", None),
    ("grid=np.array([0, 0, 0, 99, 1, 1, 0, 0, 1, 2])", None),
    ("divide=np.array([0, 0, 0, 99, 1000])", None),  # the other entry
    ("divide=np.array([0, 0, 0, 99, 1000, 1, 0, 0, 99, 1000])", "shapes fit no entry of"),
    ("divide=np.array([2, 0, 0, 99, 1])", "out of range"),
    ("divide=np.array([0, 0, 0, 99, 0])", "out of range"),
    ("grid=np.array([1, -1, 65536, 0, 1])",
     "axis 1 of quantize_last_bfloat16_mxfp8_e4m3_0 would need 65536 thread blocks, at most 6"),
    ("grid=np.array([0, -1, 1 << 40, 0, 1])", "thread blocks, at most"),
    ("grid=np.array([0, -1, -5, 0, 1])", "grid axis 0 of"),
    ("scalars=lambda s: s[:-4]",
     "parameter 8 of quantize_last_bfloat16_mxfp8_e4m3_0 takes 4 bytes, the call passes 0"),
    ("scalars=lambda s: np.where(np.arange(24) == 0, 4, s)",
     "parameter 3 of quantize_last_bfloat16_mxfp8_e4m3_0 takes 8 bytes, the call passes 4"),
    ("scalars=lambda s: np.where(np.arange(24) == 0, 2, s)", "neither 4 nor 8 bytes wide"),
    ("scalars=lambda s: np.where(np.arange(24) == 18, 1 << 31, s)", "does not fit 4 bytes"),
    ("scalars=lambda s: s[:-1]", "has the wrong size"),
]  # fmt: skip


def test_bad_calls_are_errors_and_the_process_lives(scenario):
    """One process for all of them; after each, the call as it was."""
    out = scenario(
        f"""
        import copy
        good, rows = copy.deepcopy(KERNELS), []
        def attempts():
            before = report()["launches"]
            jax.clear_caches()
            return attempt(), report()["launches"] - before
        for text in {[change for change, _ in BAD_CALLS]!r}:
            eval(f"change({{text}})")
            bad, KERNELS = attempts(), copy.deepcopy(good)
            rows.append([*bad, *attempts()])
        print(json.dumps(rows))
        """
    )
    for (change, message), (error, launches, *after) in zip(BAD_CALLS, out, strict=True):
        if message is None:
            assert (error, launches) == (None, 1), change
        else:
            assert error is not None and "jax_mx: " in error and message in error, (change, error)
            assert launches == 0, change
        assert after == [None, 1], change


def test_every_truncation_is_noticed(scenario):
    """At every length; drivers read past the end."""
    out = scenario(
        """
        image = KERNELS["sm_90"]["image"]
        bad = []
        for size in range(0, len(image), 97):
            short = image[:size]
            sha = hashlib.sha256(short).hexdigest()
            for kernel in KERNELS.values():
                kernel.update(image=short, sha256=sha)
            jax.clear_caches()
            error = attempt()
            if error is None or "not a whole 64-bit ELF" not in error:
                bad.append([size, error])
        print(json.dumps(bad))
        """
    )
    assert out == []


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuLaunchKernel"])
def test_driver_errors_carry_the_drivers_text(scenario, call):
    out = scenario("print(json.dumps([attempt(), report()['launches']]))", JAX_MX_FAKE_FAIL=call)
    assert f"jax_mx: {call}: FAKE_ERROR (as asked for) (quantize_last_bfloat16_" in out[0]
    assert out[1] == 0


def test_another_chip_is_named(scenario):
    out = scenario("print(json.dumps(attempt()))", JAX_MX_FAKE_ARCH="80")
    held = [arch for arch in ARCHS["cutedsl"] if artifacts.holds(VARIANTS[0], arch)]
    chips = sorted(device_arch(arch) for arch in held)
    assert f"the program holds kernels for {', '.join(chips)}, this device is sm_80" in out
    for chip in (chips[0], chips[-1]):
        arch = chip.removeprefix("sm_")
        assert scenario("print(json.dumps(attempt()))", JAX_MX_FAKE_ARCH=arch) is None


def test_no_driver_is_an_error(scenario):
    out = scenario("print(json.dumps(attempt()))", driver="/nowhere/libcuda.so")
    assert "jax_mx: no GPU driver: /nowhere/libcuda.so" in out
    out = scenario("print(json.dumps(attempt()))", JAX_MX_FAKE_FAIL="cuInit")
    assert "jax_mx: no GPU driver: cuInit: FAKE_ERROR" in out


def test_eight_threads_load_one_library(scenario):
    out = scenario(
        """
        from concurrent.futures import ThreadPoolExecutor
        def work(i):
            xs = [jnp.ones((i + 1, 32 * n), jnp.bfloat16) for n in range(1, 9)]
            return [attempt(lambda x: jax_mx.quantize(x * 2), x) for x in xs]
        with ThreadPoolExecutor(8) as pool:
            errors = [e for row in pool.map(work, range(8)) for e in row if e]
        print(json.dumps([errors, report()["libraries"], report()["launches"]]))
        """
    )
    assert out == [[], 1, 64]


def test_two_hundred_shapes_load_each_binary_once(scenario):
    """Jitted calls of two formats from three dtypes: six binaries, 200 programs."""
    out = scenario(
        """
        def lowering(ctx, *operands, plan):
            rule = ffi.ffi_lowering(artifacts.TARGET)
            return rule(ctx, *operands, kernels=primitive.kernels_for(plan, "cuda", ["sm_90"]))
        mlir.register_lowering(primitive.quantize_p, lowering, platform="cpu")

        quantize = jax.jit(jax_mx.quantize, static_argnames="format")
        for i in range(200):
            x = np.ones((1 + i // 6, 32 * (1 + i % 6)), ["bfloat16", "float16", "float32"][i % 3])
            jax.block_until_ready(quantize(x, format=["mxfp8_e4m3", "mxfp8_e5m2"][i // 6 % 2]))
        print(json.dumps([quantize._cache_size(), report()["launches"], report()["libraries"]]))
        """
    )
    assert out == [200, 200, 6]


# ---- HIP ---
HIP = textwrap.dedent(
    """
    _ffi.use_host_driver("hip", sys.argv[1])
    KERNELS = primitive.kernels_for(PLAN, "rocm", None)
    def hip():
        out = (ctypes.c_int64 * 16)()
        ctypes.CDLL(sys.argv[1]).fake_hip_report(out)
        return list(out[:5]), bytes(out)[40:].hex()
"""
)


@pytest.mark.parametrize("arch,mach", [("gfx942:sramecc+:xnack-", 0x4C), ("gfx950", 0x4F)])
def test_hip_gets_the_arguments(scenario, arch, mach):
    """Each at the next multiple of its size, as AMD's ABI has it; and the binary of its arch."""
    code = HIP + textwrap.dedent(
        """
        scalars = [kernel["scalars"].reshape(-1, 4).tolist() for kernel in KERNELS.values()]
        print(json.dumps([attempt(), *hip(), report()["launches"], list(KERNELS), scalars]))
        """
    )
    error, numbers, block, launches, archs, rules = scenario(code, JAX_MX_FAKE_ARCH=arch)
    assert error is None and launches == 1 and archs == ["gfx942", "gfx950"]
    block, end = bytes.fromhex(block), 3 * 8
    assert all(struct.unpack_from("<3Q", block))  # the buffers' addresses
    dims = {0: (4, 8, 32), 1: (4, 8, 32), 2: (4, 8, 1)}
    assert rules[0] == rules[1]
    for size, buffer, start, stop in rules[0]:
        at = -(-end // size) * size
        end = at + size
        found = int.from_bytes(block[at:end], "little", signed=True)
        assert found == (start if buffer < 0 else math.prod(dims[buffer][start:stop]))
    assert numbers == [mach, 0, 1, 256, end] and not any(block[end:])


@pytest.mark.parametrize("call", ["hipModuleLoadData", "hipModuleGetFunction",
                                  "hipModuleLaunchKernel"])  # fmt: skip
def test_hip_errors_carry_hips_text(scenario, call):
    out = scenario(HIP + "print(json.dumps([attempt(), attempt()]))", JAX_MX_FAKE_FAIL=call)
    assert all(f"jax_mx: {call}: hipFakeError (as asked for) (quantize_last" in e for e in out)


def test_hip_on_another_chip_or_without_a_driver(scenario):
    out = scenario(HIP + "print(json.dumps(attempt()))", JAX_MX_FAKE_ARCH="gfx90a:xnack-")
    assert "the program holds kernels for gfx942, gfx950, this device is gfx90a" in out
    out = scenario(HIP + "print(json.dumps(attempt()))", driver="/nowhere/libamdhip64.so")
    assert "jax_mx: no GPU driver: /nowhere/libamdhip64.so" in out


def test_damaged_metadata_is_an_error_and_the_process_lives(scenario):
    """Every byte of the note, one after the other, becomes 0xFF, then random ones do."""
    out = scenario(
        HIP
        + textwrap.dedent("""
    import random
    image = KERNELS["gfx942"]["image"]
    start = image.index(b"AMDGPU") + 8
    end = image.index(b"_1.kd", start) + 5  # of the two entries that the call names
    random.seed(0)
    tries = [(at, 255) for at in range(start - 20, end, 7)]
    tries += [(random.randrange(start - 20, end), random.randrange(256)) for _ in range(150)]
    errors = 0
    for at, byte in tries:
        damaged = image[:at] + bytes([byte]) + image[at + 1 :]
        KERNELS["gfx942"].update(image=damaged, sha256=hashlib.sha256(damaged).hexdigest())
        jax.clear_caches()
        error = attempt()
        errors += error is not None
    KERNELS["gfx942"].update(image=image, sha256=hashlib.sha256(image).hexdigest())
    jax.clear_caches()
    print(json.dumps([errors, len(tries), attempt()]))
    """)
    )
    assert out[0] > out[1] // 4 and out[2] is None
