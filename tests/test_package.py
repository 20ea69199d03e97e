"""The installed package: light imports, few needs, every binary."""

import hashlib
from importlib.metadata import requires

from helpers import loaded_after

import jax_mx
from jax_mx.launch import build, store
from jax_mx.shipping.shipped import BINARIES, shipped_archs

HEAVY = ("cutlass", "flydsl", "torch", "rich", "sklearn", "safetensors", "triton", "elftools")
HEAVY += ("tinygrad", "msgpack")


def test_the_library_imports_no_kernel_dsl():
    modules = loaded_after(
        "import jax_mx, jax.numpy as jnp, sys\n"
        "jax_mx.quantize(jnp.ones(32)).dequantize()\n"
        "assert not any(m.startswith('jax_mx.quantizing.kernels') for m in sys.modules)\n"
        "assert not any(m.endswith(('.cutedsl', '.flydsl')) for m in sys.modules)"
    )
    assert modules.isdisjoint(HEAVY), modules & set(HEAVY)
    assert "jax_mx" in modules


def test_the_check_above_can_fail():
    assert "rich" in loaded_after("import rich.table")


def test_the_library_needs_only_jax_and_numpy():
    needs = {r.split(">")[0] for r in requires("jax-mx") if "extra" not in r}
    assert needs == {"jax", "numpy"}


def test_what_the_package_holds_is_whole():
    """Whatever was built ahead: a wheel's kernels, or none."""
    every = {f"{v.name}.{arch}" for v in BINARIES for arch in shipped_archs(v)}
    assert set(store.manifest()) <= every
    for name, facts in store.manifest().items():
        image = (store.BINARIES / facts["sha256"]).read_bytes()
        assert hashlib.sha256(image).hexdigest() == facts["sha256"], name
        for entry in build.entries_of(facts):
            assert entry["usage"]["stack"] == 0, f"{name} spills"
            assert entry["symbol"].encode() in image


def test_public_names():
    public = {name for name in vars(jax_mx) if not name.startswith("_")}
    assert {"quantize", "dequantize", "is_supported", "MXArray", "MXFP8_E4M3", "RCEIL"} <= public
    assert {*dir(jax_mx)} >= {"quantize", "gpt_oss", "__version__"}
    assert not {*dir(jax_mx)} & {"ops", "products", "facts", "version"}
