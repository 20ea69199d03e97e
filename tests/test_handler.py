"""The C++ handler without a GPU: on XLA's CPU platform, over a driver that only writes down.

One process per scenario, since the driver is opened once per process. The kernels are binaries
without code (images.py), called by a primitive that does nothing but call the handler: neither the
installation's kernels nor the ops are in play.
"""

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import textwrap
from pathlib import Path

import jax
import pytest
from forks import Running

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

HERE = Path(__file__).parent
PACKAGE = importlib.util.find_spec("jax_mx").submodule_search_locations[0]
ALONE = f"""
    import ctypes, dataclasses, functools, json, os, sys
    sys.path.insert(0, {str(HERE)!r})
    import handler_alone
"""
PRELUDE = """
    import jax, jax.numpy as jnp, numpy as np
    from jax import ffi
    from jax.core import ShapedArray
    from jax.extend.core import Primitive
    from jax.interpreters import mlir
    import images
    from jax_mx.launch import _ffi
    from jax_mx.launch.rule import *
    from jax_mx.launch.rule import call_attributes, constant, multiprocessors

    for platform, stages in _ffi.registrations().items():
        ffi.register_ffi_target("jax_mx_launch", stages, platform=platform)
    _ffi.use_host_driver("cuda", sys.argv[1])
    DRIVER = ctypes.CDLL(sys.argv[1]) if os.path.exists(sys.argv[1]) else None
    if DRIVER is not None:
        DRIVER.fake_report.restype = ctypes.c_char_p

    def takes(*sizes, shared=0):
        array = (ctypes.c_int64 * len(sizes))(*sizes)
        DRIVER.fake_parameters(array, ctypes.c_int64(len(sizes)), ctypes.c_int64(shared))
    def report():
        return json.loads(DRIVER.fake_report())
    def launches():
        return report()["launches"]
    def number(text):
        return int.from_bytes(bytes.fromhex(text), "little", signed=True)

    # The kernel x -> y, z: its entries, what it takes, and the attributes that name it.
    X = jnp.ones((4, 256), jnp.bfloat16)
    tiles = (GridTerm(0, Factor(Extent(0), 8192)),)
    entry = functools.partial(Entry, threads=(512, 1, 1), grid=tiles)
    RULE = Launch(
        entries=(entry("stand_in_0", (16, 16, 4)), entry("stand_in_1", (2, 1, 1))),
        scalars=(Scalar(8, Extent(0)), Scalar(8, Extent(0, 0, -1)), Scalar(4, "a"), Scalar(4, "b")),
    )
    VALUES = {"a": 7, "b": -1}
    IMAGE = images.cuda()
    SHA = images.sha256(IMAGE)
    CHIPS = ("sm_90", "sm_100")
    def kernels(rule=RULE, image=IMAGE, chips=CHIPS, values=VALUES):
        found = rule.attributes(images.sha256(image), values, image)
        return {chip: dict(found) for chip in chips}
    def first(**changes):  # the rule, of its first entry only, with changes
        return dataclasses.replace(RULE, entries=(dataclasses.replace(RULE.entries[0], **changes),))
    KERNELS, CALL = kernels(), {}
    if DRIVER is not None:
        takes(8, 8, 8, 8, 8, 4, 4)

    # Calls the handler with KERNELS and CALL as they are.
    call_p = Primitive("call")
    call_p.multiple_results = True
    call_p.def_abstract_eval(lambda *operands, outs: [ShapedArray(*out) for out in outs])
    def lowering(ctx, *operands, outs):
        attributes = call_attributes(KERNELS) | CALL
        return ffi.ffi_lowering("jax_mx_launch")(ctx, *operands, **attributes)
    mlir.register_lowering(call_p, lowering)

    def outs_of(x):
        scales = (*x.shape[:-1], x.shape[-1] // 32)
        return ((x.shape, np.dtype(np.uint8)), (scales, np.dtype(np.uint8)))
    def run(*operands, outs=None):
        outs = outs or outs_of(operands[0])
        return jax.block_until_ready(jax.jit(lambda *o: call_p.bind(*o, outs=outs))(*operands))
    def attempt(*operands, outs=None):
        try:
            run(*(operands or (X,)), outs=outs)
        except Exception as error:
            return str(error)
        return None

    def change(**facts):
        for kernel in KERNELS.values():
            kernel.update({k: v(kernel[k]) if callable(v) else v for k, v in facts.items()})
"""


def number(text: str) -> int:
    """A parameter's value, from its bytes."""
    return int.from_bytes(bytes.fromhex(text), "little", signed=True)


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory):
    library = tmp_path_factory.mktemp("driver") / "libfake.so"
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-o", library]
    subprocess.run([*command, HERE / "fake_driver.cc"], check=True)
    return library


@pytest.fixture
def scenario(fake_driver):
    """Runs code after PRELUDE in a new process and returns the JSON value it prints last."""

    def run(*code: str, driver=fake_driver, **env: str):
        script = "".join(map(textwrap.dedent, (ALONE, PRELUDE, *code)))
        env = {**os.environ, "JAX_PLATFORMS": "cpu", **env}
        process = Running(script, str(driver), env=env)
        status, out, errors = process.wait(120)
        process.kill()
        assert status == 0, errors[-3000:]
        return json.loads(out.strip().splitlines()[-1])

    return run


def test_launch_follows_the_rule_and_the_buffers(scenario):
    """Grid and scalars come from the shapes of each call; nothing is launched for size 0."""
    out = scenario(
        """
        rows = []
        for shape in [(4, 256), (1, 32), (3, 5, 96), (33, 8192), (0, 64)]:
            for values in ({"a": 0x1FFFFF, "b": (8 << 23) + 0x600001}, {"a": 0, "b": -1}):
                KERNELS = kernels(values=values)
                x = jnp.ones(shape, jnp.bfloat16)
                outs = outs_of(x if x.size else X)  # a call without any bytes is none to XLA
                results = run(x, outs=outs)
                addresses = [a.unsafe_buffer_pointer() for a in (x, *results)]
                rows.append([shape, values, addresses, report()])
        print(json.dumps(rows))
        """
    )
    tile, launches = 8192, 0
    for shape, values, addresses, report in out:
        n = 1
        for extent in shape:
            n *= extent
        launches += n > 0
        assert report["launches"] == launches and report["libraries"] == 1
        if n == 0:
            assert report["events"] == []
            continue
        last = report["last"]
        assert (last["call"], last["entry"], last["shared"]) == ("cuLaunchKernel", 0, 0)
        assert last["grid"] == [-(-n // tile), 1, 1]
        assert last["threads"] == [512, 1, 1]
        numbers = [*addresses, n, n // shape[-1], values["a"], values["b"]]
        assert [*map(number, last["parameters"])] == numbers


def test_multiprocessors_that_the_driver_does_not_tell(scenario):
    code = """
        KERNELS = kernels(first(grid=(GridTerm(0, Factor(multiprocessors())),)))
        print(json.dumps([attempt(), launches()]))
    """
    error, launches = scenario(code, JAX_MX_FAKE_UNITS="0")
    assert "the driver does not say how many multiprocessors" in error and launches == 0
    error, launches = scenario(code, JAX_MX_FAKE_FAIL="cuDeviceGetAttribute")
    assert "cuDeviceGetAttribute: FAKE_ERROR" in error and launches == 0


IMAGE_IS = "image=lambda image: "
BAD_CALLS = [  # a change of the call's attributes, what is said of it; None: it is launched
    (IMAGE_IS + "image[:len(image) // 2]", "image is not a whole 64-bit ELF file"),
    (IMAGE_IS + "image[:100]", "image is not a whole 64-bit ELF file"),
    (IMAGE_IS + "b''", "image is not a whole 64-bit ELF file"),
    (IMAGE_IS + "b'\\x7fELF' + b'\\xff' * 5000", "image is not a whole 64-bit ELF file"),
    (IMAGE_IS + "image[:-9] + bytes([image[-9] ^ 1]) + image[-8:]", "does not have the sha256"),
    ("image=np.int64(3)", "is missing or has the wrong type"),
    ("sha256='00'", "image does not have the sha256 00"),
    ("sha256=np.int64(3)", "is missing or has the wrong type"),
    ("symbols='only_one'", "has the wrong size"),
    ("symbols='only_one', threads=np.array([512, 1, 1]), grid=np.array([0, 0, 0, 99, 1, 0])",
     "parameter 5 of only_one takes 4 bytes, the call passes 8"),
    ("symbols='a_0,b_1,c_2,d_3'", "has the wrong size"),
    ("align=np.array([16, 0, 1, 2, 1, 1])", "an alignment is not positive"),
    ("align=np.array([16], np.int32)", "is missing or has the wrong type"),
    ("align=np.array([16], np.int64)", "has the wrong size"),
    ("threads=np.array([512, 1, 1])", "has the wrong size"),
    ("threads=np.array([4096, 1, 1, 512, 1, 1])", "out of range"),
    ("threads=np.array([0, 1, 1, 512, 1, 1])", "out of range"),
    ("threads=np.array([512, 1, 1, 32, 33, 1])",
     "a thread block of stand_in_1 has 1056 threads, at most 1024 fit"),
    ("grid=lambda g: g * 0", "out of range"),
    ("grid=lambda g: g[:-1]", "has the wrong size"),
    ("grid=np.array([0.5])", "is missing or has the wrong type"),
    ("grid=np.array([6, 0, 0, 99, 1, 0])", "out of range"),
    ("grid=np.array([0, 7, 0, 99, 1, 0])", "out of range"),
    ("grid=np.array([0, -3, 0, 99, 1, 0])", "out of range"),
    ("grid=np.array([0, 0, 0, 99, 1, 8])", "out of range"),
    ("grid=np.array([0, 0, 0, 99, 1, -1])", "out of range"),
    ("grid=np.array([0, 0, -9, 99, 1, 0])", "grid axis 0 of"),
    ("grid=np.array([0, 0, 7, 99, 1, 0])", "grid axis 0 of"),
    ("grid=np.array([0, 0, 2, 1, 1, 0])", "grid axis 0 of"),
    ("grid=np.array([0, -1, 1 << 40, 0, 1, 0, 0, -1, 1 << 40, 0, 1, 0])", "grid axis 0 of"),
    ("grid=np.array([1, 0, 0, 99, 1, 0])", None),
    ("grid=np.array([0, 0, 0, 99, 1, 0, 1, 0, 0, 1, 2, 0])", None),
    ("divide=np.array([0, 0, 0, 99, 1000])", None),  # the other entry
    ("divide=np.array([0, 0, 0, 99, 1000, 1, 0, 0, 99, 1000])", "shapes fit no entry of"),
    ("divide=np.array([2, 0, 0, 99, 1])", "out of range"),
    ("divide=np.array([0, 0, 0, 99, 0])", "out of range"),
    ("divide=np.array([0, 0, 0, 99])", "has the wrong size"),
    ("grid=np.array([1, -1, 65536, 0, 1, 0])",
     "axis 1 of stand_in_0 would need 65536 thread blocks, at most 6"),
    ("grid=np.array([0, -1, 1 << 40, 0, 1, 0])", "thread blocks, at most"),
    ("grid=np.array([0, -1, -5, 0, 1, 0])", "grid axis 0 of"),
    ("scalars=lambda s: s[:-4]",
     "parameter 6 of stand_in_0 takes 4 bytes, the call passes 0"),
    ("scalars=lambda s: np.where(np.arange(16) == 0, 4, s)",
     "parameter 3 of stand_in_0 takes 8 bytes, the call passes 4"),
    ("scalars=lambda s: np.array([*s, *s[-4:]])",
     "parameter 7 of stand_in_0 takes 0 bytes, the call passes 4"),
    ("scalars=lambda s: np.where(np.arange(16) == 0, 2, s)", "neither 4 nor 8 bytes wide"),
    ("scalars=lambda s: np.where(np.arange(16) == 10, 1 << 31, s)", "does not fit 4 bytes"),
    ("scalars=lambda s: s[:-1]", "has the wrong size"),
    ("scalars=lambda s: np.array([*s[:4]] * 25)", "has the wrong size"),
    ("settings=np.array([0, 1, 1, 1, 0])", "has the wrong size"),
    ("settings=np.array([0, 1, 1, 1, 0] * 2)", None),
    ("settings=np.array([-1, 1, 1, 1, 0] * 2)", "the shared memory of stand_in_0 is out of range"),
    ("settings=np.array([1 << 40, 1, 1, 1, 0] * 2)", "the shared memory of stand_in_0 is out of"),
    ("settings=np.array([232449, 1, 1, 1, 0] * 2)",
     "the kernel needs 232449 bytes of shared memory, the device has 232448 for a thread block ("
     "stand_in_0, image "),
    ("settings=np.array([0, 0, 1, 1, 0] * 2)", "a cluster of stand_in_0 is not 1 to 16 thread"),
    ("settings=np.array([0, 1, 1, 1, 0, 0, 4, 4, 2, 0])", "a cluster of stand_in_1 is not 1 to 16"),
    ("settings=np.array([0, 1 << 62, 1 << 62, 1, 0] * 2)", "a cluster of stand_in_0 is not 1 to"),
    ("settings=np.array([0, 2, 1, 1, 0] * 2)",
     "grid axis 0 of stand_in_0 has 1 thread blocks, which clusters of 2 do not divide"),
    ("settings=np.array([0, 1, 1, 1, 2] * 2)", "early start of stand_in_0 is neither 0 nor 1"),
    ("parameters=np.array([0, 0])", "has the wrong size"),
    ("parameters=np.array([2, 0, 0])", "a parameter has an entry or kind out of range"),
    ("parameters=np.array([0, 4, 0])", "a parameter has an entry or kind out of range"),
    ("parameters=np.array([0, -1, 0])", "a parameter has an entry or kind out of range"),
    ("parameters=np.array([0, 0, 3])", "a parameter is of no buffer, scalar or tensor map"),
    ("parameters=np.array([0, 1, 4])", "a parameter is of no buffer, scalar or tensor map"),
    ("parameters=np.array([0, 2, 0])", "a parameter is of no buffer, scalar or tensor map"),
    ("parameters=np.array([0, 3, 0])", "or not 1 to 64 bytes of zeros"),
    ("parameters=np.array([0, 3, 65])", "or not 1 to 64 bytes of zeros"),
    ("parameters=np.array([0, 0, 0] * 49)", "an entry has more than 48 parameters"),
    ("parameters=np.array([0, 1, 2, 0, 0, 0])",
     "parameter 0 of stand_in_0 takes 8 bytes, the call passes 4"),
    ("parameters=np.array([0, 0, 0])",
     "parameter 1 of stand_in_0 takes 8 bytes, the call passes 0"),
    ("parameters=np.array([*[0, 0, 0] * 5, 0, 3, 4, 0, 1, 2])", None),
    ("scratch=np.array([2])", "has the wrong size"),
    ("scratch=np.array([2, 0])", "a scratch buffer has no size"),
    ("scratch=np.array([3, 0])", "scratch names a buffer out of range"),
    ("scratch=np.array([-1, 0])", "scratch names a buffer out of range"),
    ("scratch=np.array([2, 2])", "or is neither cleared nor not"),
    ("scratch=np.array([2, 0] * 5)", "has the wrong size"),
    ("scratch=np.array([2, 0]), scratch_bytes=np.array([0, -1, 32, 0, 1])", "has the wrong size"),
    ("scratch=np.array([2, 0]), scratch_bytes=np.array([1, -1, 32, 0, 1, 0])", "out of range"),
    ("scratch=np.array([2, 0]), scratch_bytes=np.array([0, -1, 32, 0, 1, 0])", None),
    ("scratch=np.array([2, 0]), scratch_bytes=np.array([0, -1, 33, 0, 1, 0])",
     "scratch buffer 0 of stand_in_0 needs 33 bytes, the call passes 32"),
    ("scratch=np.array([2, 0]), scratch_bytes=np.array([0, -1, -1, 0, 1, 0])",
     "the size of scratch buffer 0 of stand_in_0 does not fit the buffers"),
    ("scratch=np.array([0, 1]), scratch_bytes=np.array([0, -1, 8, 0, 1, 0])",
     "scratch buffer 0 of stand_in_0 is an operand, not a result"),
    ("maps=np.array([0, 9])", "attribute maps of the call has the wrong size"),
    ("maps=np.array([0, 9, 2, 0, 0, 0, 0, 0, 99, 1])", "attribute maps of the call has the wrong"),
]  # fmt: skip

BAD_TRIES = """
    import copy
    good, rows = copy.deepcopy(KERNELS), []
    def attempts():
        before = launches()
        return attempt(), launches() - before
    for text in TEXTS:
        eval(f"change({text})")
        bad, KERNELS = attempts(), copy.deepcopy(good)
        rows.append([*bad, *attempts()])
    print(json.dumps(rows))
"""


def assert_refused(bad_calls, out):
    """Each is refused in a sentence, and launches nothing; after it the call as it was does."""
    for (change, message), (error, launches, *after) in zip(bad_calls, out, strict=True):
        if message is None:
            assert (error, launches) == (None, 1), change
        else:
            assert error is not None and "jax_mx: " in error and message in error, (change, error)
            assert launches == 0, change
        assert after == [None, 1], change


def test_bad_calls_are_errors_and_the_process_lives(scenario):
    """One process for all of them; after each, the call as it was."""
    texts = [change for change, _ in BAD_CALLS]
    assert_refused(BAD_CALLS, scenario(f"TEXTS = {texts!r}\n", BAD_TRIES))


MAPS = """
    # A copy by tensor maps: x (rows, columns) in boxes of 64 x 32, y and z by their pointers.
    ROWS, COLUMNS = Extent(0, 0, -1), Extent(0, -1, 99)
    MAP = TensorMap(0, "bfloat16", (Length(COLUMNS), Length(ROWS)), (Length(COLUMNS, 2),), (64, 32),
                    swizzle=128, promotion=256)
    TAKES = (Pointer(1), MapAt(0), Padding(8), ScalarAt(2), Pointer(2), ScalarAt(0))
    def mapped(*maps, **changes):
        return dataclasses.replace(first(parameters=TAKES, **changes), maps=maps or (MAP,))
    KERNELS = kernels(mapped())
    takes(8, 128, 8, 4, 8, 8)
    def seen(map):
        map = bytes.fromhex(map)
        names = ("type", "rank", "interleave", "swizzle", "promotion", "fill")
        found = dict(zip(names, map))
        for name, at, size, count in (
            ("address", 8, 8, 1), ("dims", 16, 8, 5), ("strides", 56, 8, 4), ("box", 88, 2, 5)
        ):
            numbers = [number(map[at + i * size :][:size].hex()) for i in range(count)]
            found[name] = numbers
        return found
"""


BAD_ATTRIBUTES = [  # of a call, beside its kernels
    ("kernels={}", "the call has no attribute kernels"),
    ("kernels={'sm_90': 3}", "an entry of kernels is not a dictionary"),
    ("kernels={'sm_90': {}}", "an attribute of the call is missing"),
    *((f"merge=np.array([0, {n}, 0, 1])", "merge numbers a dimension out of range")
      for n in (5, -1)),
    ("absent=np.array([0])", "takes 3 buffers, the call passes 4"),
    ("absent=np.array([2])", "absent numbers a buffer beyond the operands"),
    ("absent=np.array([16])", "absent is not ascending or out of range"),
    ("absent=np.array([1, 1])", "absent is not ascending or out of range"),
    ("absent=3", "attribute absent has the wrong type"),
    ("steps={}", "steps is not a dictionary of launches"),
    ("steps=3", "steps is not a dictionary of launches"),
    ("steps={'1': step()}", "steps has no launch 0"),
    ("steps={'0': step(), '1': {}}", "the call has no attribute kernels"),
    ("steps={'0': step(operands=[1 << 40])}", "a launch takes buffer 1099511627776, the call has"),
    ("steps={'0': step(operands=[3])}", "a launch takes buffer 3, the call has 3"),
    ("steps={'0': step(operands=[-1])}", "scalar 1 of stand_in_0 does not fit 8 bytes"),
    ("steps={'0': step(operands=[-2])}", "operands or results number a buffer out of range"),
    ("steps={'0': step(results=[1, -1])}", "operands or results number a buffer out of range"),
    ("steps={'0': step(results=[1])}", "takes 3 buffers, the call passes 2"),
    ("steps={'0': step(operands=[0] * 20)}", "takes 3 buffers, the call passes 16"),
    ("align=np.array([1 << 40, 1, 1] * 2)", "the buffers' addresses and shapes fit no entry of"),
]  # fmt: skip


def test_calls_whose_attributes_are_wrong(scenario):
    texts = [text for text, _ in BAD_ATTRIBUTES]
    code = """
        good, errors = KERNELS, []
        def step(operands=(0,), results=(1, 2)):
            numbers = {"operands": np.array(operands), "results": np.array(results)}
            return {"kernels": kernels(), **numbers}
        for text in TEXTS:
            CALL = eval(f"dict({text})")
            KERNELS = kernels()
            if "align" in CALL:
                change(**CALL)
                CALL = {}
            errors.append(attempt())
        print(json.dumps(errors))
    """
    for (_, message), error in zip(
        BAD_ATTRIBUTES, scenario(f"TEXTS = {texts!r}\n", code), strict=True
    ):
        assert message in error


def test_another_version_is_named(scenario):
    out = scenario(
        """
        rows = []
        for abi in (np.int64(2), np.int64(3), np.int64(1), np.int64(4), np.int32(3)):
            CALL = {"abi": abi}
            rows.append(attempt())
        del call_attributes
        def lowering(ctx, *operands, outs):  # as programs of version 1 are
            return ffi.ffi_lowering("jax_mx_launch")(ctx, *operands, kernels=KERNELS)
        mlir.register_lowering(call_p, lowering)
        print(json.dumps([*rows, attempt(), _ffi.ABI, launches()]))
        """
    )
    assert out[:2] == [None, None] and out[6:] == [3, 2]
    for error, version in ((out[2], 1), (out[3], 4), (out[5], 1)):
        assert f"calls kernels by version {version} of jax_mx's launch attributes" in error
        assert "launches versions 2 to 3; export or lower the program again with this" in error
    assert "attribute abi of the call is not an i64" in out[4]


@pytest.mark.parametrize(
    "call", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuLaunchKernel"]
)
def test_driver_errors_carry_the_drivers_text(scenario, call):
    out = scenario("print(json.dumps([attempt(), launches()]))", JAX_MX_FAKE_FAIL=call)
    assert f"jax_mx: {call}: FAKE_ERROR (as asked for) (stand_in_0" in out[0]
    assert out[1] == 0


def test_another_chip_is_named(scenario):
    out = scenario("print(json.dumps(attempt()))", JAX_MX_FAKE_ARCH="80")
    assert "the program holds kernels for sm_100, sm_90, this device is sm_80" in out
    for arch in ("90", "100"):
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
            return [attempt(jnp.ones((i + 1, 32 * n), jnp.bfloat16)) for n in range(1, 9)]
        with ThreadPoolExecutor(8) as pool:
            errors = [e for row in pool.map(work, range(8)) for e in row if e]
        seen = report()
        print(json.dumps([errors, seen["libraries"], seen["launches"]]))
        """
    )
    assert out == [[], 1, 64]


# ---- tensor maps ---
def test_tensor_maps_follow_the_buffers(scenario):
    out = scenario(
        MAPS,
        """
        rows = []
        for shape in ((4, 256), (1, 32), (3, 5, 96)):
            x = jnp.ones(shape, jnp.bfloat16)
            results = run(x)
            last = report()["last"]
            addresses = [a.unsafe_buffer_pointer() for a in (x, *results)]
            others = [number(last["parameters"][i]) for i in (0, 2, 3, 4, 5)]
            rows.append([shape, addresses, seen(last["parameters"][1]), others])
        print(json.dumps([rows, _ffi.counters()["encoded"]]))
        """,
    )
    rows, encoded = out
    assert encoded == 3
    for shape, addresses, map, others in rows:
        *lead, columns = shape
        count = lead[0] * (lead[1] if len(lead) > 1 else 1)
        assert map == {
            "type": 9, "rank": 2, "interleave": 0, "swizzle": 3, "promotion": 3, "fill": 0,
            "address": [addresses[0]], "dims": [columns, count, 0, 0, 0],
            "strides": [2 * columns, 0, 0, 0], "box": [64, 32, 0, 0, 0],
        }  # fmt: skip
        assert others == [addresses[1], 0, 7, addresses[2], columns * count]


BAD_MAPS = [  # a change of a map's numbers: buffer, type, rank, swizzle, promotion, fill, then
    # columns (5) and box at 6, rows (5) and box at 12, the stride (5) at 18
    ("put(m, 0, 3)", "tensor map 0 is of no buffer"),
    ("put(m, 0, -1)", "tensor map 0 is of no buffer"),
    ("put(m, 1, 13)", "tensor map 0 has an unknown element type"),
    ("put(m, 1, -1)", "tensor map 0 has an unknown element type"),
    ("put(m, 2, 0)", "tensor map 0 has not 1 to 5 dimensions"),
    ("put(m, 2, 6)", "tensor map 0 has not 1 to 5 dimensions"),
    ("put(m, 2, 1 << 62)", "tensor map 0 has not 1 to 5 dimensions"),
    ("put(m, 2, 3)", "attribute maps of the call has the wrong size"),
    ("put(m, 3, 7)", "tensor map 0 has an unknown swizzle, promotion or fill"),
    ("put(m, 4, 4)", "tensor map 0 has an unknown swizzle, promotion or fill"),
    ("put(m, 5, 2)", "tensor map 0 has an unknown swizzle, promotion or fill"),
    ("put(put(m, 5, 1), 1, 0)", "tensor map 0 fills integers with NaN"),
    ("put(m, 11, 0)", "tensor map 0 has a box of 0 elements, not 1 to 256"),
    ("put(m, 17, 257)", "tensor map 0 has a box of 257 elements, not 1 to 256"),
    ("put(m, 11, -64)", "tensor map 0 has a box of -64 elements"),
    ("put(m, 11, 7)", "tensor map 0 has a box with rows of 14 bytes, which 16 does not divide"),
    ("put(m, 11, 72)",
     "tensor map 0 has a box with rows of 144 bytes, its swizzle takes at most 128"),
    ("put(put(m, 11, 72), 3, 0)", None),
    ("put(m, 11, 8)", None),
    ("put(m, 6, 7)", "tensor map 0 names a buffer, factor or divisor out of range"),
    ("put(m, 9, 0)", "tensor map 0 names a buffer, factor or divisor out of range"),
    ("put(m, 10, 0)", "tensor map 0 names a buffer, factor or divisor out of range"),
    ("put(m, 22, 0)", "tensor map 0 names a buffer, factor or divisor out of range"),
    ("put(m, 10, 3)", "dimension 0 of tensor map 0 of stand_in_0 is not 1 to 2^32"),  # a rest
    ("put(m, 7, 9)", "dimension 0 of tensor map 0 of stand_in_0 is not 1 to 2^32"),
    ("put(m, 9, 1 << 62)", "dimension 0 of tensor map 0 of stand_in_0 is not 1 to 2^32"),
    ("put(put(m, 12, -1), 13, 0)", "dimension 1 of tensor map 0 of stand_in_0 is not 1 to 2^32"),
    ("put(put(m, 12, -1), 13, (1 << 32) + 1)", "dimension 1 of tensor map 0 of stand_in_0 is not"),
    ("put(put(m, 12, -1), 13, 1 << 32)", "tensor map 0 of stand_in_0 reaches beyond its buffer"),
    ("put(put(m, 12, -1), 13, 5)", "tensor map 0 of stand_in_0 reaches beyond its buffer"),
    ("put(m, 1, 7)", "tensor map 0 of stand_in_0 has"),
    ("put(m, 0, 2)", "tensor map 0 of stand_in_0 reaches beyond its buffer"),
    ("put(put(m, 18, -1), 19, 4)",
     "stride 1 of tensor map 0 of stand_in_0 is not a multiple of 16 bytes below 2^40"),
    ("put(m, 21, 1 << 61)", "stride 1 of tensor map 0 of stand_in_0 is not a multiple of 16"),
    ("put(m, 21, 1 << 62)", "stride 1 of tensor map 0 of stand_in_0 is not a multiple of 16"),
    ("put(put(m, 18, -1), 19, 1 << 40)", "stride 1 of tensor map 0 of stand_in_0 is not a"),
    ("put(put(m, 18, -1), 19, (1 << 39) - 8)", "tensor map 0 of stand_in_0 reaches beyond its"),
    ("np.tile(m, 9)", "a kernel has more than 8 tensor maps"),
    ("np.tile(m, 8)", None),
    ("m[:-1]", "attribute maps of the call has the wrong size"),
    ("m[:0]", "a parameter is of no buffer, scalar or tensor map"),
]  # fmt: skip
BAD_MAPS = [(f"maps=lambda m: {text}", message) for text, message in BAD_MAPS]


def test_bad_tensor_maps_are_errors_and_the_process_lives(scenario):
    bad = [
        (c, "box with rows of 256 bytes" if m and m.endswith("stand_in_0 has") else m)
        for c, m in BAD_MAPS
    ]
    put = """
    def put(numbers, at, value):
        return np.where(np.arange(len(numbers)) == at, value, numbers)
    """
    texts = [change for change, _ in bad]
    assert_refused(bad, scenario(MAPS, put, f"TEXTS = {texts!r}\n", BAD_TRIES))


def test_a_tensor_map_needs_a_buffer_that_is_there(scenario):
    """A null one has no bytes; an empty one launches nothing if the grid is 0, else has no map."""
    out = scenario(
        MAPS,
        """
        CALL = {"absent": np.array([1])}
        there = dataclasses.replace(MAP, buffer=1)
        there = dataclasses.replace(there, dims=(Length(constant(64)), Length(constant(2))))
        there = dataclasses.replace(there, strides=(Length(constant(128)),))
        four = dataclasses.replace(RULE.entries[0], align=(1, 1, 1, 1), parameters=TAKES, grid=())
        KERNELS = kernels(dataclasses.replace(mapped(there), entries=(four,)))
        rows = [attempt(), launches()]
        CALL, KERNELS = {}, kernels(mapped())
        empty, outs = jnp.ones((0, 64), jnp.bfloat16), outs_of(X)  # else XLA drops the call
        rows += [attempt(empty, outs=outs), launches()]
        KERNELS = kernels(mapped(grid=()))
        print(json.dumps([*rows, attempt(empty, outs=outs), launches()]))
        """,
    )
    assert "tensor map 0 of stand_in_0 reaches beyond its buffer" in out[0]
    assert out[1:4] == [0, None, 0]
    assert "dimension 1 of tensor map 0 of stand_in_0 is not 1 to 2^32" in out[4]
    assert out[5] == 0


def test_a_tensor_map_needs_an_aligned_buffer(tmp_path):
    source = Path(PACKAGE).parent / "ffi"
    if not source.exists():
        pytest.skip("needs the sources of the extension")
    program = tmp_path / "follow"
    include = ["-I", source, "-isystem", jax.ffi.include_dir()]
    command = ["g++", "-std=c++17", "-DNDEBUG", *include, "-o", program, HERE / "follow.cc", "-ldl"]
    subprocess.run(command, check=True)
    done = subprocess.run([program], check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["0 followed", "16 followed"]
    refused = "jax_mx: the address of the buffer of tensor map 0 of copy is not a multiple of 16"
    assert all(refused in line for line in lines[2:])
    assert len(lines) == 6


# ---- what an entry asks for ---
def test_shared_memory_clusters_and_early_starts(scenario):
    out = scenario(
        """
        rows = []
        def launched(grid=8, **changes):
            global KERNELS
            changes["grid"] = (GridTerm(0, Factor(constant(grid))),)
            KERNELS = kernels(first(**changes))
            failed = attempt()
            seen = report()
            rows.append(failed or [seen["last"][name] for name in ("call", "shared", "attributes")])
            rows[-1] = failed or [*rows[-1], seen["events"]]
        launched(shared=1000)
        launched(shared=200_000)
        launched(shared=100_000)  # what is allowed to the other call stays
        launched(shared=200_000, cluster=(2, 1, 1))
        launched(early_start=True)
        launched(cluster=(4, 1, 1), early_start=True)
        launched(cluster=(16, 1, 1), grid=32)
        launched(cluster=(2, 1, 1), grid=7)
        launched(cluster=(2, 1, 1), grid=0)
        CALL = {"device": np.int64(3)}
        launched(shared=150_000)  # is allowed on each device by itself
        CALL = {}
        takes(8, 8, 8, 8, 8, 4, 4, shared=40_000)
        launched(shared=200_000)
        print(json.dumps(rows))
        """
    )
    launch = ["launch", []]
    assert out[0] == ["cuLaunchKernel", 1000, {}, [["set", [8, 1000, 0]], launch]]
    assert out[1] == ["cuLaunchKernel", 200_000, {}, [["set", [8, 200_000, 0]], launch]]
    assert out[2] == ["cuLaunchKernel", 100_000, {}, [launch]]
    assert out[3] == ["cuLaunchKernelEx", 200_000, {"4": [2, 1, 1]}, [launch]]
    assert out[4] == ["cuLaunchKernel", 0, {}, [launch]]  # the first launch of a call waits
    assert out[5] == ["cuLaunchKernelEx", 0, {"4": [4, 1, 1]}, [launch]]
    assert out[6] == ["cuLaunchKernelEx", 0, {"4": [16, 1, 1]}, [["set", [14, 1, 0]], launch]]
    assert "grid axis 0 of stand_in_0 has 7 thread blocks, which clusters of 2 do not" in out[7]
    assert out[8][3] == []
    assert out[9][3] == [["set", [8, 150_000, 3]], launch]
    assert "the kernel needs 240000 bytes of shared memory, the device has 232448" in out[10]


def test_a_device_without_clusters(scenario):
    code = """
        KERNELS = kernels(first(cluster=(2, 1, 1), grid=()), chips=("sm_80",))
        print(json.dumps([attempt(), launches()]))
    """
    error, launches = scenario(code, JAX_MX_FAKE_ARCH="80")
    assert "the device launches no clusters of thread blocks (stand_in_0, image " in error
    assert launches == 0


@pytest.mark.parametrize("call", ["cuKernelGetAttribute", "cuKernelSetAttribute",
                                  "cuLaunchKernelEx", "cuTensorMapEncodeTiled",
                                  "cuMemsetD8Async"])  # fmt: skip
def test_functions_that_fail_or_that_old_drivers_lack(scenario, call):
    """Each is an error of a call that needs it, and of no other."""
    code = """
        if LACKS:
            names = [line.split()[0] for line in os.popen(f"nm -D --defined-only -P {sys.argv[1]}")]
            address = lambda name: ctypes.cast(getattr(DRIVER, name), ctypes.c_void_p).value
            functions = {n: address(n) for n in names if n.startswith("cu") and n != LACKS}
            _ffi.use_host_driver("cuda", functions)
        rule = mapped(shared=100_000, cluster=(2, 1, 1), grid=(GridTerm(0, Factor(constant(4))),))
        scratch = (Scratch(2, (Factor(constant(32)),), clear=True),)
        KERNELS = kernels(dataclasses.replace(rule, scratch=scratch))
        errors, before = [attempt(), attempt()], launches()
        KERNELS = kernels()
        takes(8, 8, 8, 8, 8, 4, 4)
        print(json.dumps([*errors, before, attempt(), launches()]))
    """
    out = scenario(MAPS, "LACKS = ''\n", code, JAX_MX_FAKE_FAIL=call)
    assert all(f"jax_mx: {call}: FAKE_ERROR (as asked for) (stand_in_0" in e for e in out[:2])
    assert out[2:] == [0, None, 1]
    out = scenario(MAPS, f"LACKS = {call!r}\n", code)
    assert all(f"the stand-in has no {call}; update the GPU driver (stand" in e for e in out[:2])
    assert out[2:] == [0, None, 1]


# ---- scratch ---
def test_scratch_is_cleared_before_each_launch(scenario):
    """As many bytes as the rule says, and only if there is a launch."""
    out = scenario(
        """
        def scratch(*factors, clear):
            return dataclasses.replace(RULE, scratch=(Scratch(2, factors, clear),))
        size = Factor(Extent(0, 0, -1)), Factor(Extent(0, -1, 99), 64)  # 4 * 4 of 32 bytes
        rows = []
        for rule in (scratch(*size, clear=True), scratch(*size, clear=False),
                     scratch(*size, Factor(constant(16), 1, 1), clear=True),
                     scratch(*size, Factor(constant(17), 1, 1), clear=True),
                     scratch(Factor(constant(0)), clear=True)):
            KERNELS = kernels(rule)
            try:
                address = run(X)[1].unsafe_buffer_pointer()
                rows.append([address, report()["events"]])
            except Exception as error:
                rows.append(str(error))
        KERNELS = kernels(scratch(*size, clear=True))
        rows.append([attempt(jnp.ones((0, 64)), outs=outs_of(X)), report()["events"]])
        print(json.dumps([rows, _ffi.counters()["cleared"]]))
        """
    )
    rows, cleared = out
    launch = ["launch", []]
    assert rows[0][1] == [["clear", [rows[0][0], 0, 16]], launch]
    assert rows[1][1] == [launch]
    assert rows[2][1] == [["clear", [rows[2][0], 0, 32]], launch]
    assert "scratch buffer 0 of stand_in_0 needs 33 bytes, the call passes 32" in rows[3]
    assert rows[4][1] == [launch] and rows[5] == [None, []]
    assert cleared == 2


# ---- binaries by content ---
def test_binaries_are_found_by_their_content(scenario, tmp_path):
    """In the process, else in the first folder that has it whole; each is read once."""
    out = scenario(
        f"""
        folders = [os.path.join({str(tmp_path)!r}, name) for name in ("none", "a", "b")]
        for folder in folders[1:]:
            os.mkdir(folder)
        def put(folder, image, sha256=None):
            path = os.path.join(folder, sha256 or images.sha256(image))
            with open(path, "wb") as file:
                file.write(image)
        def calls(image, chips=CHIPS):
            global KERNELS
            KERNELS = {{chip: RULE.attributes(images.sha256(image), VALUES) for chip in chips}}
            return attempt()
        def read():
            return _ffi.counters()["read_from_store"]
        one, two, three, four = (images.cuda(name) for name in ("one", "two", "three", "four"))
        rows = [calls(one)]                             # nowhere: no folder is registered
        _ffi.use_store(folders, "fetch it with a-tool")
        rows += [calls(one)]                            # nowhere: in none of the folders
        put(folders[2], one)
        rows += [calls(one), calls(one), read()]        # in the second folder
        for folder, damaged in ((1, two[:-1]), (2, two[:-9] + b"x" + two[-8:])):
            put(folders[folder], damaged, images.sha256(two))
            rows += [calls(two)]                        # damaged here, then there too
        put(folders[1], two)
        rows += [calls(two), read()]
        _ffi.intern(images.sha256(three), three)
        rows += [calls(three), read()]                  # in the process
        KERNELS = kernels(image=four)
        rows += [attempt(), calls(four), read()]        # a call has carried it
        for sha256, image in (("0" * 64, four), (images.sha256(four[:-1]), four[:-1])):
            try:
                _ffi.intern(sha256, image)
            except ValueError as error:
                rows.append(str(error))
        print(json.dumps(rows))
        """
    )
    none, nowhere, first, again, read, damaged, damaged_both, whole, *rest = out
    assert "no binary is found of stand_in_0 (sha256 " in none
    assert "for sm_100, stand_in_0 (sha256 " in none and ") for sm_90; no folder of bin" in none
    folders = ", ".join(str(tmp_path / name) for name in ("none", "a", "b"))
    assert nowhere.split("; ")[1] == f"searched in {folders}"
    assert nowhere.split("; ")[2].startswith("fetch it with a-tool")
    assert (first, again, read) == (None, None, 1)
    assert f"; damaged or not readable: {tmp_path / 'a'}/" in damaged
    assert f"; damaged or not readable: {tmp_path / 'a'}/" in damaged_both
    assert f", {tmp_path / 'b'}/" in damaged_both.split("damaged or not readable")[1]
    assert whole is None and rest[:6] == [2, None, 2, None, None, 2]
    assert "jax_mx: image does not have the sha256 000" in rest[6]
    assert "jax_mx: image is not a whole 64-bit ELF file" in rest[7]


def test_only_this_machines_binary_is_needed(scenario, tmp_path):
    """Others may be missing; that it is itself is said when it is to be loaded, then looked for."""
    code = f"""
        _ffi.use_store([{str(tmp_path)!r}], "fetch it with a-tool")
        mine, other = images.cuda("mine"), images.cuda("other")
        rule = lambda image, *carried: RULE.attributes(images.sha256(image), VALUES, *carried)
        KERNELS = {{"sm_90": rule(mine, mine), "sm_100": rule(other)}}
        rows = [attempt()]
        mine = images.cuda("mine too")
        KERNELS = {{"sm_90": rule(mine), "sm_100": rule(other, other)}}
        compiled = jax.jit(lambda x: call_p.bind(x, outs=outs_of(X))).lower(X).compile()
        for _ in range(2):
            try:
                rows.append(jax.block_until_ready(compiled(X)) and None)
            except Exception as error:
                rows.append(str(error))
            with open(os.path.join({str(tmp_path)!r}, images.sha256(mine)), "wb") as file:
                file.write(mine)
        print(json.dumps([*rows, images.sha256(mine)]))
    """
    here, missing, known, sha256 = scenario(code)
    assert here is None and known is None
    assert f"no binary is found of stand_in_0 (sha256 {sha256}) for sm_90; searched" in missing
    assert "sm_100" not in missing and "fetch it with a-tool" in missing


def test_a_folder_cannot_make_the_process_wait_or_read_elsewhere(scenario, tmp_path):
    """A pipe, a folder, a link to nothing and a huge file in the binary's place; a path as name."""
    out = scenario(
        f"""
        folder = os.path.join({str(tmp_path)!r}, "store")
        os.mkdir(folder)
        _ffi.use_store([folder], "")
        with open(os.path.join({str(tmp_path)!r}, "secret"), "wb") as file:
            file.write(IMAGE)
        path, rows = os.path.join(folder, SHA), []
        def huge(path):
            with open(path, "wb") as file:
                file.truncate(1 << 34)
        makers = [os.mkfifo, os.mkdir, lambda path: os.symlink("/nowhere/at/all", path), huge]
        KERNELS = {{"sm_90": RULE.attributes(SHA, VALUES)}}
        for make in makers:
            make(path)
            rows.append(attempt())
            (os.rmdir if os.path.isdir(path) else os.unlink)(path)
        for name in ("../secret", "", "A" * 64, "0" * 63, "/" + "0" * 63, "0" * 65):
            KERNELS["sm_90"]["sha256"] = name
            rows.append(attempt())
        print(json.dumps(rows))
        """
    )
    assert all("damaged or not readable: " in error for error in out[:4])
    assert all("searched in" in error and "damaged" not in error for error in out[4:])


def test_a_hundred_call_sites_are_small(scenario):
    """The HLO of a kernel with all that a call can have, a hundred times, without binaries."""
    out = scenario(
        MAPS,
        """
        _ffi.intern(SHA, IMAGE)
        entries = [dataclasses.replace(mapped().entries[0], symbol=f"a_long_name_of_a_kernel_{i}",
                                       shared=200_000, cluster=(2, 1, 1)) for i in range(2)]
        entries = [dataclasses.replace(e, grid=(*e.grid, *(GridTerm(a, Factor(ROWS, 128, s))
                   for a in (0, 1, 2) for s in (0, 1))), divide=(Factor(COLUMNS, 128),) * 3,
                   parameters=TAKES * 3) for e in entries]
        scratch = (Scratch(2, (Factor(ROWS), Factor(COLUMNS)), True),)
        full = Launch(tuple(entries), RULE.scalars * 3, (MAP,) * 4, scratch)
        KERNELS = {"sm_90": full.attributes(SHA, VALUES)}
        def f(x):
            for _ in range(100):
                y, _ = call_p.bind(x, outs=outs_of(x))
                x = x + y.astype(x.dtype)
            return x
        lowered = jax.jit(f).lower(X)
        proto = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
        integers = sum(a.size for a in KERNELS["sm_90"].values() if isinstance(a, np.ndarray))
        print(json.dumps([len(proto), len(lowered.as_text()), integers]))
        """,
    )
    proto, _, integers = out
    assert integers > 200  # far more than any kernel's
    assert proto < 1_000_000


# ---- HIP ---
HIP = """
    _ffi.use_host_driver("hip", sys.argv[1])
    SIZES = (8, 8, 8, 4, 8, 4, 4)
    MACH = {"gfx942": 0x4C, "gfx950": 0x4F}
    scalars = (Scalar(4, Extent(0)), Scalar(8, Extent(0, 0, -1)), Scalar(4, "a"), Scalar(4, "b"))
    RULE = dataclasses.replace(RULE, scalars=scalars)
    def amd(rule=RULE, sizes=SIZES):
        found = {}
        for chip, mach in MACH.items():
            image = images.amd({entry.symbol: sizes for entry in rule.entries}, mach)
            found[chip] = rule.attributes(images.sha256(image), VALUES, image)
        return found
    KERNELS = amd()
"""


@pytest.mark.parametrize("arch,mach", [("gfx942:sramecc+:xnack-", 0x4C), ("gfx950", 0x4F)])
def test_hip_gets_the_arguments(scenario, arch, mach):
    """Each at the next multiple of its size, as AMD's ABI has it; and the binary of its arch."""
    code = """
        results = run(X)
        addresses = [a.unsafe_buffer_pointer() for a in (X, *results)]
        print(json.dumps([addresses, report(), list(KERNELS)]))
    """
    addresses, report, archs = scenario(HIP, code, JAX_MX_FAKE_ARCH=arch)
    assert archs == ["gfx942", "gfx950"] and report["launches"] == 1
    assert report["events"] == [["load", [mach]], ["launch", []]]
    last = report["last"]
    assert (last["entry"], last["grid"], last["threads"]) == (0, [1, 1, 1], [512, 1, 1])
    block = bytes.fromhex(last["parameters"][0])
    assert struct.unpack("<QQQi4xqii", block) == (*addresses, 1024, 4, 7, -1)


def test_a_call_of_several_launches(scenario):
    """A launch has the buffers that it numbers, and may start early behind one that is launched."""
    out = scenario(
        """
        def step(rule, *operands):
            numbers = {"operands": np.array(operands[0]), "results": np.array(operands[1])}
            return {"kernels": kernels(rule), **numbers}
        def called(*steps):
            global CALL
            CALL = {"steps": {str(i): one for i, one in enumerate(steps)}}
            results = run(X, outs=outs_of(X) * 2)
            seen = report()
            addresses = [0, *(a.unsafe_buffer_pointer() for a in (X, *results))]
            found = [addresses.index(number(p)) - 1 for p in seen["last"]["parameters"][:3]]
            rows.append([found, seen["last"]["attributes"], seen["events"], seen["launches"]])
        rows = []
        early, empty = first(early_start=True), first(grid=(GridTerm(0, Factor(constant(0))),))
        called(step(early, [0], [1, 2]), step(early, [1], [3, 4]))
        called(step(RULE, [0], [1, 2]), step(early, [2], [4, 3]))
        called(step(early, [0], [1, 2]), step(RULE, [0], [3, 4]))
        called(step(empty, [0], [1, 2]), step(early, [0], [3, 4]))
        x, CALL = jnp.ones((8, 256), jnp.bfloat16), {}
        print(json.dumps([rows, attempt(x), report()["last"]["attributes"]]))
        """
    )
    rows, failed, attributes = out
    launch, early = ["launch", []], {"6": [1, 0, 0]}
    assert rows[0][:2] == [[1, 3, 4], early] and rows[0][3] == 2
    assert [event for event in rows[0][2] if event[0] == "launch"] == [launch] * 2
    assert rows[1] == [[2, 4, 3], early, [launch] * 2, 4]
    assert rows[2] == [[0, 3, 4], {}, [launch] * 2, 6]
    assert rows[3] == [[0, 3, 4], {}, [launch], 7]
    assert (failed, attributes) == (None, {})


def test_hip_takes_shared_memory_and_scratch_and_nothing_of_cuda(scenario):
    out = scenario(
        HIP,
        """
        rows = []
        def launched(rule, sizes=SIZES):
            global KERNELS
            KERNELS = amd(rule, sizes)
            failed = attempt()
            seen = report()
            rows.append(failed or [seen["last"]["shared"], seen["last"]["grid"], seen["events"]])
        units = (GridTerm(1, Factor(multiprocessors(), 2)),)
        launched(first(shared=65536, grid=units))
        launched(first(shared=65537))
        launched(first(cluster=(2, 1, 1)))
        launched(first(early_start=True))
        scratch = (Scratch(2, (Factor(constant(32)),), True),)
        launched(dataclasses.replace(first(), scratch=scratch))
        map = TensorMap(0, "bfloat16", (Length(constant(32)),), (), (32,))
        launched(dataclasses.replace(first(parameters=(MapAt(0),)), maps=(map,)))
        order = (ScalarAt(1), Pointer(2), ScalarAt(2), Padding(4))
        launched(first(parameters=order), (8, 8, 4, 4))
        block = report()["last"]["parameters"]
        launched(first(parameters=order), (8, 8, 4, 8))
        print(json.dumps([rows, block]))
        """,
        JAX_MX_FAKE_UNITS="304",
    )
    rows, (block,) = out
    load, launch = ["load", [0x4C]], ["launch", []]
    assert rows[0] == [65536, [1, 152, 1], [load, launch]]
    assert "needs 65537 bytes of shared memory, the device has 65536 for a workgroup" in rows[1]
    assert "HIP launches no clusters of thread blocks (stand_in_0" in rows[2]
    assert "HIP starts no kernel before the one that precedes it has ended (stand" in rows[3]
    assert [name for name, _ in rows[4][2]] == ["clear", "launch"]
    assert "HIP has no tensor maps (stand_in_0" in rows[5]
    assert rows[6][0] == 0 and struct.unpack("<qQii", bytes.fromhex(block))[::2] == (4, 7)
    assert "parameter 3 of stand_in_0 takes 8 bytes, the call passes 4" in rows[7]


@pytest.mark.parametrize("call", ["hipModuleLoadData", "hipModuleGetFunction",
                                  "hipModuleLaunchKernel", "hipMemsetAsync"])  # fmt: skip
def test_hip_errors_carry_hips_text(scenario, call):
    code = """
        scratch = (Scratch(2, (Factor(constant(32)),), True),)
        KERNELS = amd(dataclasses.replace(RULE, scratch=scratch))
        print(json.dumps([attempt(), attempt()]))
    """
    out = scenario(HIP, code, JAX_MX_FAKE_FAIL=call)
    assert all(f"jax_mx: {call}: hipFakeError (as asked for) (stand_in_0" in e for e in out)


def test_hip_on_another_chip_or_without_a_driver(scenario):
    out = scenario(HIP, "print(json.dumps(attempt()))", JAX_MX_FAKE_ARCH="gfx90a:xnack-")
    assert "the program holds kernels for gfx942, gfx950, this device is gfx90a" in out
    out = scenario(HIP, "print(json.dumps(attempt()))", driver="/nowhere/libamdhip64.so")
    assert "jax_mx: no GPU driver: /nowhere/libamdhip64.so" in out


def test_damaged_metadata_is_an_error_and_the_process_lives(scenario):
    """Every byte of the note, one after the other, becomes 0xFF, then random ones do."""
    out = scenario(
        HIP,
        """
    import random
    image = KERNELS["gfx942"]["image"]
    start = image.index(b"AMDGPU") + 8
    end = image.index(b"_1.kd", start) + 5  # of the two entries that the call names
    random.seed(0)
    tries = [(at, 255) for at in range(start - 20, end, 5)]
    tries += [(random.randrange(start - 20, end), random.randrange(256)) for _ in range(150)]
    errors = 0
    for at, byte in tries:
        damaged = image[:at] + bytes([byte]) + image[at + 1 :]
        KERNELS["gfx942"].update(image=damaged, sha256=images.sha256(damaged))
        error = attempt()
        errors += error is not None
    KERNELS["gfx942"].update(image=image, sha256=images.sha256(image))
    print(json.dumps([errors, len(tries), attempt()]))
    """,
    )
    assert out[0] > out[1] // 4 and out[2] is None
