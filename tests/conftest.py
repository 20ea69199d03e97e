"""Strict settings for every test, what `gpu` means, and the record of what was executed where."""

import collections
import json
import os
from pathlib import Path

# Eight CPU devices for the sharding tests, and GPU memory as it is needed: tests start processes.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest

from jax_mx.facts.chips import arch_of
from jax_mx.lowering import primitive
from jax_mx.lowering import store as artifacts

jax.config.update("jax_numpy_dtype_promotion", "strict")


def chip() -> str | None:
    """The GPU's chip if there are binaries for it."""
    name = primitive.chip_of(jax.devices()[0])
    return name if arch_of(name) else None


def arch_here() -> str | None:
    """The arch of the binaries that run here."""
    return arch_of(chip() or "")


def pytest_addoption(parser):
    parser.addoption(
        "--record-verified",
        metavar="PATH",
        help="write verified.json to PATH: which binaries all tests passed for, and where: those "
        "marked gpu on the chip, those with an `arch` in the emulator",
    )


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config, items):
    """What `sampled` means; and without a GPU that there are binaries for, what `gpu` does.

    Tests marked gpu fail there or, by default, are left.
    """
    cases = collections.Counter()
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            n, first = (*mark.args, 0)[:2]
            if cases[item.function] % n != first:
                item.add_marker("thorough")
            cases[item.function] += 1
    if chip() is not None:
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if os.environ.get("JAX_MX_REQUIRE_GPU") == "1":
        for item in gpu:
            item.add_marker(pytest.mark.usefixtures("gpu_is_missing"))
    elif gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


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


# ---- verified.json ---
_outcomes: dict[tuple[str, str], list[bool]] = {}  # of a binary on a device


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Says in each report which binary ran where; reports also come from pytest-xdist."""
    report = (yield).get_result()
    params = item.callspec.params if hasattr(item, "callspec") else {}
    variant, arch, device = params.get("variant"), params.get("arch"), "emulated"
    if item.get_closest_marker("gpu"):
        arch, device = arch_here(), jax.devices()[0].device_kind
    if variant is not None and arch is not None:
        report.user_properties.append(("executed", (f"{variant.name}.{arch}", device)))


def pytest_runtest_logreport(report):
    if (report.when == "call" and not report.skipped) or report.failed:
        for name, value in report.user_properties:
            if name == "executed":
                _outcomes.setdefault(tuple(value), []).append(report.passed)


def pytest_sessionfinish(session):
    path = session.config.getoption("--record-verified")
    if not path or not _outcomes or hasattr(session.config, "workerinput"):
        return
    known = artifacts.BINARIES.with_name("verified.json")
    before = json.loads(known.read_text()) if known.exists() else {}
    verified = {}
    for name, facts in artifacts.manifest().items():
        entry = before.get(name, {})
        chips = set(entry["executed_on"]) if entry.get("sha256") == facts["sha256"] else set()
        for (binary, device), outcomes in _outcomes.items():
            if binary == name:
                chips = chips | {device} if all(outcomes) else chips - {device}
        verified[name] = {"sha256": facts["sha256"], "executed_on": sorted(chips)}
    Path(path).write_text(json.dumps(verified, indent=1) + "\n")
