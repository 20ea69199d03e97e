"""Strict settings for every test, what `gpu` means, and the record of what was executed where."""

import collections
import functools
import gc
import itertools
import os
from importlib.util import find_spec
from pathlib import Path

# Eight CPU devices for the sharding tests, and GPU memory as it is needed: tests start processes.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Programs that are exported carry kernels for these; each costs seconds of compiling.
os.environ.setdefault("JAX_MX_ARCHS", "sm_90a gfx942 gfx950")

import hypothesis
import jax
import pytest
from helpers import lowered_apart, stand_in
from jax._src import compiler
from jax._src.interpreters import mlir

from jax_mx.launch import store, targets
from jax_mx.launch.chips import ARCHS, arch_of, dsl_of
from jax_mx.shipping import verified
from jax_mx.shipping.shipped import BINARIES

jax.config.update("jax_numpy_dtype_promotion", "strict")


# Most of what tests take is XLA compiling for the CPU, which these options make three times faster.
# XLA's code differs with its options, also in the bits of converted NaNs: tests marked
# `optimized`, which hold bits, compile as users do. So do all tests with --thorough, tests on a
# GPU, processes that tests start, and programs of several devices: with this code these waited for
# each other forever, once in a thousand steps of training.
QUICK = [("xla_backend_optimization_level", 0), ("xla_llvm_disable_expensive_passes", True)]
QUICK += [("xla_cpu_parallel_codegen_split_count", 1)]  # each core has a process of tests
if jax.__version_info__ < (0, 11):
    QUICK += [("xla_cpu_use_fusion_emitters", False)]  # later versions of XLA have no other ones
_quick = False


def _with_quick_options(get_compile_options):
    @functools.wraps(get_compile_options)
    def get(*args, **kwargs):
        options = get_compile_options(*args, **kwargs)
        alone = kwargs["num_replicas"] * kwargs["num_partitions"] == 1
        if _quick and alone and kwargs["backend"].platform == "cpu":
            options.env_option_overrides = [*QUICK, *options.env_option_overrides]
        return options

    return get


compiler.get_compile_options = _with_quick_options(compiler.get_compile_options)


# MLIR's dialects are loaded once for a hundred programs: loading takes a third of the time of a
# small one.
_uses = itertools.count()
_of_turn = functools.lru_cache(1)(lambda turn, make=mlir.make_ir_context: make())
mlir.make_ir_context = lambda: _of_turn(next(_uses) // 100)


def as_users_do(item) -> bool:
    """Whether a test's programs are compiled with the options that users have."""
    return item.config.getoption("--thorough") or any(
        item.get_closest_marker(name) for name in ("optimized", "gpu")
    )


@pytest.fixture(autouse=True)
def compiled_quickly(request):
    """Programs of one device are compiled quickly, unless a test wants users' options."""
    global _quick
    quick = not as_users_do(request.node)
    if quick != _quick:
        jax.clear_caches()
        _quick = quick


def chip() -> str | None:
    """The GPU's chip if there are binaries for it."""
    name = targets.chip_of(jax.devices()[0])
    return name if arch_of(name) else None


def arch_here() -> str | None:
    """The arch of the binaries that run here."""
    return arch_of(chip() or "")


def pytest_addoption(parser):
    parser.addoption(
        "--record-verified",
        metavar="FOLDER",
        help="write jax_mx/verified's files to FOLDER: which binaries all tests passed for, and "
        "where: those marked gpu on the chip, those with an `arch` in the emulator",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="also run tests marked thorough, which hold on more of the same what others hold",
    )


def pytest_configure(config):
    """How many cases tests of hypothesis draw: a few, the same each time; or many, new ones."""
    common = {"deadline": None, "database": None, "print_blob": True}
    hypothesis.settings.register_profile("short", max_examples=24, derandomize=True, **common)
    hypothesis.settings.register_profile("thorough", max_examples=2000, **common)
    if not config.getoption("--hypothesis-profile", None):
        profile = "thorough" if config.getoption("--thorough") else "short"
        hypothesis.settings.load_profile(profile)


def pytest_collection(session):
    """Thousands of tests are there to stay: nothing of them is garbage, now or later.

    Computations of modules that are imported are compiled quickly.
    """
    global _quick
    _quick = not session.config.getoption("--thorough")
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_xdist_auto_num_workers(config):
    """As many processes as cores, up to four; on a GPU too, where compiling is what takes time."""
    del config
    return min(os.cpu_count() or 1, 4)


def on_emulator(item) -> bool:
    """Whether a test has AMD's kernels executed, which tinygrad's decoder is for."""
    return hasattr(item, "callspec") and item.callspec.params.get("arch") in ARCHS["flydsl"]


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config, items):
    """Leaves out thorough tests without --thorough, and tests that lack their GPU.

    Tests that compile as users do come first, so that few programs are compiled in both ways.
    Without a GPU that has kernels, tests marked gpu are left out, or fail if JAX_MX_REQUIRE_GPU=1
    asks for one.
    """
    cases = collections.Counter()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            n, first = (*mark.args, 0)[:2]
            if cases[item.function] % n != first:
                item.add_marker("thorough")
            cases[item.function] += 1
    required = os.environ.get("JAX_MX_REQUIRE_GPU") == "1"
    left_out = []
    for item in items:
        needs_gpu = item.get_closest_marker("gpu") and chip() is None
        if needs_gpu and required:
            item.add_marker(pytest.mark.usefixtures("gpu_is_missing"))
        skips = item.get_closest_marker("thorough") and not config.getoption("--thorough")
        if skips or (needs_gpu and not required):
            left_out.append(item)
        if find_spec("tinygrad") is None and on_emulator(item):
            item.add_marker(pytest.mark.skip(reason="the emulator takes tinygrad"))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = {*map(id, left_out)}
        items[:] = [item for item in items if id(item) not in gone]
    items.sort(key=as_users_do, reverse=True)


@pytest.fixture
def promoting():
    """JAX's default, which flax and others rely on; other tests run under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def others_frozen():
    """Looking for leaks takes seconds, unless what other tests left is not looked at."""
    gc.freeze()


@pytest.fixture
def gpu_is_missing():
    pytest.fail(f"JAX_MX_REQUIRE_GPU=1, and JAX sees only {jax.devices()}")


@pytest.fixture(autouse=True)
def on_cpu(request):
    """Tests that are not about a device run on the CPU everywhere, and so give the same results."""
    if request.node.get_closest_marker("gpu") or request.node.get_closest_marker("any_device"):
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture
def without_code(monkeypatch):
    """Kernels are stand-ins: programs are lowered, and must not run."""
    monkeypatch.setattr(store, "obstacle", lambda variant, arch: "")
    monkeypatch.setattr(store, "get", stand_in)
    with lowered_apart("without code"):
        yield


# ---- jax_mx/verified ---
_outcomes: dict[tuple[str, str, str], list[bool]] = {}  # by variant, arch and device


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Says in each report which binary ran where; reports also come from pytest-xdist."""
    report = (yield).get_result()
    params = item.callspec.params if hasattr(item, "callspec") else {}
    variant, arch, device = params.get("variant"), params.get("arch"), "emulated"
    if item.get_closest_marker("gpu"):
        arch, device = arch_here(), jax.devices()[0].device_kind
    if variant is not None and arch is not None:
        report.user_properties.append(("executed", (variant.name, arch, device)))


def pytest_runtest_logreport(report):
    if (report.when == "call" and not report.skipped) or report.failed:
        for name, value in report.user_properties:
            if name == "executed":
                _outcomes.setdefault(tuple(value), []).append(report.passed)


def pytest_sessionfinish(session):
    folder = session.config.getoption("--record-verified")
    if not folder or not _outcomes or hasattr(session.config, "workerinput"):
        return
    variants = {(v.implementation, v.name): v for v in BINARIES}
    for arch in {arch for _, arch, _ in _outcomes}:
        entries = verified.read(arch, Path(folder)) or verified.read(arch)
        for (name, its_arch, device), outcomes in _outcomes.items():
            if its_arch != arch:
                continue
            binary = store.find(variants[dsl_of(arch), name], arch)
            if binary is None:
                continue
            entry = entries.get(name, {})
            chips = {*entry["executed_on"]} if entry.get("sha256") == binary.sha256 else set()
            chips = chips | {device} if all(outcomes) else chips - {device}
            entries[name] = {"sha256": binary.sha256, "executed_on": sorted(chips)}
        verified.write(arch, entries, Path(folder))
