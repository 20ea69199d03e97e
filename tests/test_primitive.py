"""How a call reaches XLA: lowering, sharding, export, and the private names of JAX it rests on."""

import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_same_array, random_bits
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx import artifacts, primitive
from jax_mx.variants import ARCHS, VARIANTS

P = PartitionSpec
COLLECTIVE = re.compile(
    r"\b(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("
)


def lowered_for_cuda(x, **options) -> str:
    call = jax.jit(lambda x: jax_mx.quantize(x, **options))
    return call.trace(x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("scaling", jax_mx.Scaling, ids=str)
def test_the_call_carries_the_kernel(variant, scaling):
    text = lowered_for_cuda(
        jnp.ones((8, 5, 96), variant.dtype), format=variant.format, scaling=scaling
    )
    assert text.count("stablehlo.custom_call") == 1
    assert f"@{artifacts.TARGET}(" in text
    add, exception = scaling.rounding(variant.format)
    for arch in ARCHS[variant.implementation]:
        facts = artifacts.manifest()[f"{variant.name}.{arch}"]
        assert facts["sha256"] in text
        assert all(symbol in text for symbol in facts["symbols"])
    assert text.count('image = "\\7FELF') == len(ARCHS[variant.implementation])
    scalars = f"scalars = dense<[8, 0, 0, 99, 4, -1, {add}, 0, 4, -1, {exception}, 0]>"
    assert text.count(scalars) == len(ARCHS[variant.implementation])
    assert 'num_batch_dims = "3"' in text
    rule = "([i, j, k, l])->([i, j, k, m], [i, j, k, n]) {i=8, j=5, k=3, l=32, m=32, n=1} "
    assert f"#sdy.op_sharding_rule<{rule}need_replication={{l, m, n}}, custom>" in text
    assert "transpose" not in text


@pytest.mark.parametrize(
    "options", [{"axis": 0}, {"format": "mxfp4_e2m1"}, {"scale_layout": "blocked_128x4"}]
)
def test_what_has_no_kernel_is_lowered_to_xla(options):
    x = jnp.ones((64, 64), jnp.bfloat16)
    assert artifacts.TARGET not in lowered_for_cuda(x, **options)
    assert artifacts.TARGET not in lowered_for_cuda(x, implementation="xla", **options)
    assert artifacts.TARGET in lowered_for_cuda(x, implementation="cutedsl")


def test_a_rule_of_plan_reaches_the_kernel_on_an_old_gpu():
    """A chip without binaries: None falls back, a name raises."""
    plan = jax_mx.plan.plan_quantize(
        jnp.ones(32), "mxfp8_e4m3", -1, "rceil", "row_major", "cutedsl"
    )
    with pytest.raises(NotImplementedError, match="no cutedsl kernel for sm_80, only for sm_90"):
        primitive.kernels_for(plan, "cuda", ["sm_80"])
    assert list(primitive.kernels_for(plan, "cuda", ["sm_90"])) == ["sm_90"]


# ---- sharding ---
X = random_bits((4, 16, 512), np.float32)
SPECS = [
    P(), P("a"), P(None, "a"), P("a", "b"), P(None, None, "b"), P(None, None, ("a", "b")),
    P("a", None, "b"),
]  # fmt: skip


def mesh(kind: AxisType):
    devices = jax.devices("cpu")
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind), devices=devices)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_arrays_are_quantized_where_they_lie(kind, spec):
    want = jax_mx.quantize(X)
    with jax.set_mesh(mesh(kind)):
        x = jax.device_put(X, NamedSharding(mesh(kind), spec))
        f = jax.jit(jax_mx.quantize)
        assert not COLLECTIVE.search(f.lower(x).compile().as_text())
        q = f(x)
        for out in (q.values, q.scales):
            assert out.sharding.is_equivalent_to(NamedSharding(mesh(kind), spec), out.ndim)
        y = jax.jit(jax_mx.dequantize)(q)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh(kind), spec), y.ndim)
    assert_same_array(q, want)
    assert_bits_equal(y, want.dequantize())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shard_map(spec):
    f = jax.jit(
        jax.shard_map(
            lambda x: (q := jax_mx.quantize(x), q.dequantize(jnp.float32)),
            mesh=mesh(AxisType.Auto),
            in_specs=spec,
            out_specs=spec,
        )
    )
    q, y = f(X)
    assert not COLLECTIVE.search(f.lower(X).compile().as_text())
    assert_same_array(q, jax_mx.quantize(X))
    assert_bits_equal(y, jax_mx.quantize(X).dequantize(jnp.float32))


# ---- export ---
def test_export_for_every_platform_from_a_machine_without_a_gpu(tmp_path):
    x = jnp.asarray(X)
    call = jax.jit(lambda x: jax_mx.quantize(x).dequantize(jnp.float32))
    exported = jax.export.export(
        call, platforms=["cpu", "cuda", "rocm"], disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS
    )(x)
    assert artifacts.TARGET in exported.mlir_module()
    (tmp_path / "program").write_bytes(exported.serialize())
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "want.npy", np.asarray(call(x)).view(np.uint32))
    code = f"""
        import pathlib, jax, numpy as np
        import jax_mx
        folder = pathlib.Path({str(tmp_path)!r})
        program = jax.export.deserialize((folder / "program").read_bytes())
        got = np.asarray(program.call(np.load(folder / "x.npy"))).view(np.uint32)
        assert (got == np.load(folder / "want.npy")).all()
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


def test_export_with_symbolic_rows():
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 64"), jnp.float32)
    for platforms in (["cpu"], ["cuda"]):
        exported = jax.export.export(
            jax.jit(jax_mx.quantize),
            platforms=platforms,
            disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS,
        )(shape)
        assert str(exported.out_avals[1].shape) == "(n, 2)"
    x = random_bits((7, 64), np.float32)
    exported = jax.export.export(jax.jit(lambda x: jax_mx.quantize(x).scales))(shape)
    assert_bits_equal(exported.call(x), jax_mx.quantize(x).scales)


def test_private_names_of_jax():
    """primitive.py rests on these; an unsupported JAX fails here first."""
    from jax._src import core, dispatch
    from jax._src.custom_partitioning_sharding_rule import (
        sdy_sharding_rule_to_mlir,
        str_to_sdy_sharding_rule,
    )
    from jax.interpreters import mlir

    assert all(map(callable, (core.is_constant_shape, dispatch.apply_primitive)))
    assert all(map(callable, (sdy_sharding_rule_to_mlir, str_to_sdy_sharding_rule)))
    fields = mlir.ModuleContext.__annotations__
    assert {"platforms", "backend", "lowering_parameters"} <= set(fields)
    assert "for_export" in mlir.LoweringParameters.__annotations__
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(X, NamedSharding(mesh(AxisType.Explicit), P("a")))
        assert jax.typeof(x).sharding.mesh._any_axis_explicit
