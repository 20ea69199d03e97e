"""Declared operands: what follows from a signature; an op whose operand is the same everywhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import COLLECTIVE, assert_bits_equal, call_attributes_in, mesh_of, plan_for, stand_in
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_mx.launch import private, store
from jax_mx.quantizing import primitive, registry
from jax_mx.quantizing.facts import signatures
from jax_mx.quantizing.facts.signatures import EPILOGUE, Array, Role, Signature, signature_of
from jax_mx.quantizing.facts.variants import Mode, layouts_of
from jax_mx.shipping.shipped import SHIPPED

P = PartitionSpec


def test_quantizers_and_dequantizers():
    plain = signature_of("quantize", [Mode()])
    assert [a.name for a in plain.arrays] == ["x", "codes_0", "scales_0"]
    both = signature_of("quantize", [Mode(16), Mode(16, stochastic=True)])
    assert [a.name for a in both.operands] == ["x", "signs_0", "seeds_1", "signs_1"]
    assert [a.name for a in both.results] == ["codes_0", "scales_0", "codes_1", "scales_1"]
    assert both.number("scales_1") == 7
    assert [a.name for a in both.present(["signs_0"])] == ["x", "seeds_1", "signs_1"]
    product = signature_of("matmul_fp8")
    assert [a.name for a in product.present(["group_sizes", *EPILOGUE])][-1] == "scales"
    assert product.has_replicated and product.number("y") == 8
    assert signature_of("matmul").operands[-4:] == product.operands[-4:]
    assert [a.name for a in signature_of("wgrad_fp8").operands[4:]] == ["group_sizes", "added"]
    assert [a.name for a in signature_of("wgrad").operands] == ["x", "dy", "group_sizes", "added"]
    back = signature_of("dequantize", [Mode()])
    assert [a.role for a in back.arrays] == [Role.CODES, Role.SCALES, Role.FLOATS]


def test_launch_rules_number_the_arrays_of_the_signature():
    """Every variant has one alignment a buffer, as a cheap look at its source's facts tells."""
    for variant in SHIPPED:
        if variant.implementation != "flydsl" or variant.dtype != "bfloat16":
            continue
        binary = store.find(variant, "gfx950")
        if binary is None:
            continue
        count = len(variant.signature.arrays)
        for layout in layouts_of(variant):
            for entry in binary.facts["launches"][layout]["entries"]:
                assert len(entry["align"]) == count
                assert all(0 <= term[1] < count for term in entry["grid"] if term[1] >= 0)


# ---- an op with a replicated operand: one line in SIGNATURES ---
def _shifted(modes) -> Signature:
    return Signature(
        operands=(Array("x", Role.FLOATS), Array("table", Role.REPLICATED, dtype="int32")),
        results=(Array("y", Role.FLOATS),),
    )


def _avals(x, table, *, plan):
    return [x.update(weak_type=False)]


def _reference(x, table, *, plan):
    return [x + jnp.sum(table).astype(x.dtype)]


@pytest.fixture
def shifted(monkeypatch):
    """The primitive x -> x + sum(table), on views of quantize along the last axis."""
    monkeypatch.setitem(signatures.SIGNATURES, "shifted", _shifted)
    shifted_p = primitive.make_primitive("shifted", primitive.Op(_avals, _reference))
    plan = dataclasses.replace(plan_for(jnp.ones((64, 64), jnp.float32)), op="shifted")

    def run(x, table):
        (y,) = shifted_p.bind(*private.vary_alike(x, table), plan=plan)
        return y

    return run


VIEW = np.arange(8 * 2 * 32, dtype=np.float32).reshape(8, 2, 32)
TABLE = np.array([1, 2, 4, 8, 16], np.int32)


def test_vmap_leaves_it_as_it_is(shifted):
    xs = jnp.stack([VIEW, VIEW * 2])
    assert_bits_equal(jax.vmap(shifted, (0, None))(xs, TABLE), xs + 31)
    jaxpr = jax.make_jaxpr(jax.vmap(shifted, (0, None)))(xs, jnp.asarray(TABLE))
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "mx_shifted"]
    assert [getattr(v.aval, "shape", None) for v in eqn.invars] == [(2, 8, 2, 32), (5,)]


def test_vmap_over_it_takes_one_call_after_the_other(shifted):
    tables = jnp.stack([TABLE, TABLE * 3])
    want = jnp.stack([VIEW + 31, VIEW + 93])
    assert_bits_equal(jax.vmap(shifted, (None, 0))(jnp.asarray(VIEW), tables), want)
    xs = jnp.stack([VIEW, VIEW], axis=1)
    assert_bits_equal(jax.jit(jax.vmap(shifted, (1, 0)))(xs, tables), want)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shards(shifted, axis_type):
    """Right on every mesh; under shard_map nothing moves."""
    mesh = mesh_of(8, axis_type=axis_type)
    with jax.set_mesh(mesh):
        x = jax.device_put(VIEW, NamedSharding(mesh, P("a")))
        table = jax.device_put(TABLE, NamedSharding(mesh, P()))
        assert_bits_equal(jax.jit(shifted)(x, table), jnp.asarray(VIEW + 31))
    auto = mesh_of(8)
    mapped = jax.jit(jax.shard_map(shifted, mesh=auto, in_specs=(P("a"), P()), out_specs=P("a")))
    assert_bits_equal(mapped(VIEW, TABLE), jnp.asarray(VIEW + 31))
    assert not COLLECTIVE.search(mapped.lower(VIEW, TABLE).compile().as_text())


def test_the_call_passes_it_whole(shifted, monkeypatch):
    """To the kernel as it lies; and no rule by which the partitioner would split it."""
    kernel = dataclasses.replace(SHIPPED[0], op="shifted")
    support = registry.Support("cutedsl", (kernel,))
    monkeypatch.setattr(primitive, "_support", lambda plan, target: (support, ["sm_90"]))
    monkeypatch.setattr(store, "get", functools.partial(stand_in))
    text = jax.jit(shifted).trace(VIEW, TABLE).lower(lowering_platforms=("cuda",)).as_text()
    line = call_attributes_in(text)
    assert ": (tensor<8x2x32xf32>, tensor<5xi32>) -> " in line
    layouts = "dense<[2, 1, 0]> : tensor<3xindex>, dense<0> : tensor<1xindex>"
    assert f"operand_layouts = [{layouts}]" in line
    assert "num_batch_dims" not in line and "sharding_rule" not in line
