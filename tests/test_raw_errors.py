"""Calls under transformations that once ended in errors of JAX's: they work, or say what to do."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx.command.tensors import table
from jax_mx.io import gpt_oss, reading

RNG = np.random.default_rng(0)
SIZES = jnp.array([40, 24], jnp.int32)
IDS = jnp.asarray(RNG.integers(0, 2, (64, 1)), jnp.int32)
SPLIT = PartitionSpec("d")


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


XS, WS, STACKS = normal(4, 64, 64), normal(2, 64, 64), normal(4, 2, 64, 64)
GROUPED = {
    "all": (jax_mx.ragged_dot, (XS, STACKS, jnp.tile(SIZES, (4, 1)))),
    "rows": (lambda x: jax_mx.ragged_dot(x, WS, SIZES), (XS,)),
    "moe": (lambda x: jax_mx.moe(x, IDS, jnp.ones((64, 1)), WS, WS[:, :32]), (XS,)),
    "groups": (lambda sizes: jax_mx.Groups.from_sizes(sizes, 64).rows, (jnp.tile(SIZES, (4, 1)),)),
}


@pytest.fixture
def mesh():
    if len(jax.devices("cpu")) < 4:
        pytest.skip("four devices")
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("d", "e"), (AxisType.Explicit,) * 2, devices=devices)
    with jax.set_mesh(mesh):
        yield mesh


thorough = pytest.mark.thorough  # each compiles for ten seconds


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param("groups", SPLIT),
        pytest.param("rows", SPLIT),
        *(
            pytest.param(name, spec, marks=thorough)
            for name in ("all", "moe")
            for spec in (SPLIT, PartitionSpec(("d", "e")))
        ),
    ],
)
def test_vmap_of_groups_over_an_axis_that_an_explicit_mesh_splits(name, spec, mesh):
    """The bits of a loop, of gradients too; each device computes its own entries."""
    call, args = GROUPED[name]
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a in args]
    run = call
    if name != "groups":
        run = jax.value_and_grad(lambda *args: (call(*args) ** 2).sum())
    one = jax.jit(run)
    want = [one(*(a[i] for a in args)) for i in range(4)]
    got = jax.jit(jax.vmap(run))(*placed)
    for i, expected in enumerate(want):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert_bits_equal(np.asarray(a)[i], np.asarray(b))


@pytest.mark.parametrize(
    ("op", "part"),
    [
        (r"MXArray\[\.\.\.\]", lambda q: q[5:9]),
        (r"MXArray\[\.\.\.\]", lambda q: q[3]),
        (r"MXArray\[\.\.\.\]", lambda q: q[jnp.array([1, 2])]),
        (r"MXArray\[\.\.\.\]", lambda q: [*q]),
        (r"MXArray\.reshape", lambda q: q.reshape(3, 16, 64)),
    ],
)
def test_parts_of_an_array_that_an_explicit_mesh_splits(op, part, mesh):
    """The sentence advises what an MXArray has, and the advice works."""
    q = jax_mx.quantize(jax.device_put(jnp.ones((48, 64)), NamedSharding(mesh, SPLIT)))
    with pytest.raises(Exception, match=rf"^{op}: on a mesh with explicit axes .*jax_mx\.reshard"):
        part(q)
    part(jax_mx.reshard(q, PartitionSpec()))


def test_a_symbolic_number_of_groups_is_exported():
    (g,) = jax.export.symbolic_shape("g")
    args = (
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        jax.ShapeDtypeStruct((g, 64, 64), jnp.float32),
        jax.ShapeDtypeStruct((g,), jnp.int32),
    )
    checks = jax_mx.DISABLE_EXPORT_CHECKS
    exported = jax.export.export(jax.jit(jax_mx.ragged_dot), disabled_checks=checks)(*args)
    want = jax_mx.ragged_dot(XS[0], WS, SIZES)
    np.testing.assert_allclose(exported.call(XS[0], WS, SIZES), want, rtol=1e-5, atol=1e-5)


class Elsewhere:
    """A stand-in for parts of an array that other processes hold."""

    is_fully_addressable = is_fully_replicated = False

    def is_deleted(self):
        return False


def test_arrays_of_several_processes_are_not_saved_by_one(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.setattr("jax_mx.io.checkpoints.jax.Array", Elsewhere)
    with pytest.raises(ValueError, match=r"^save_safetensors: 'w' lies on devices of several proc"):
        jax_mx.save_safetensors({"w": Elsewhere()}, tmp_path / "file")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors"])
def test_an_index_names_files_of_its_folder_alone(file, tmp_path):
    index = tmp_path / reading.INDEX
    index.write_text(f'{{"weight_map": {{"w": "{file}"}}}}')
    with pytest.raises(ValueError, match="a file outside of its folder"):
        gpt_oss.load_experts(tmp_path, 0)


def test_a_long_name_leaves_the_other_columns_in_sight():
    row = {"tensor": "a" * 3000 + "end", "shape": (1,), "format": "f", "scaling": "s", "snr": 1.0}
    row |= {"relative_error": 0.0, "saturated": 0.0, "ratio": 1.0, "equal": None, "seconds": None}
    (cells,) = table([row | {"bandwidth": None, "remark": ""}])[1]
    assert len(cells[0]) <= 80 and cells[0].endswith("...") is False and cells[0].endswith("end")


# ---- arrays that have no elements to give ---
LOST = {  # what is wrong, the error, a part of the sentence, and how to make such an array
    "deleted": (RuntimeError, "was deleted, or donated", lambda x: (y := x + 0, y.delete())[0]),
    "masked": (TypeError, "has a mask", lambda x: np.ma.masked_array(np.asarray(x), mask=False)),
    "described": (TypeError, "without elements", lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)),
}
SQUARE, ROWS_OF = normal(64, 64), jax.jit(jax_mx.quantize)(XS[0])
TAKERS = {
    "quantize": jax_mx.quantize,
    "quantize: rounding.key": lambda x: jax_mx.quantize(SQUARE, rounding=jax_mx.Stochastic(x)),
    "quantize_both": jax_mx.quantize_both,
    "fake_quantize": jax_mx.fake_quantize,
    "hadamard": jax_mx.hadamard,
    "rms_norm": jax_mx.rms_norm,
    "gated": jax_mx.gated,
    "matmul": lambda x: jax_mx.matmul(x, SQUARE),
    "einsum": lambda x: jax_mx.einsum("ij,jk->ik", SQUARE, x),
    "mlp": lambda x: jax_mx.mlp(SQUARE, x, SQUARE[:32]),
    "ragged_dot: group_sizes": lambda x: jax_mx.ragged_dot(XS[0], WS, x),
    "moe: x": lambda x: jax_mx.moe(x, IDS, jnp.ones((64, 1)), WS, WS[:, :32]),
    "quantize_weight": jax_mx.Recipe().quantize_weight,
    "save_safetensors": lambda x: jax_mx.save_safetensors({"x": x}, "nothing"),
}


@pytest.mark.parametrize("lost", LOST)
def test_arrays_without_elements(lost, tmp_path, monkeypatch):
    """A mask that is dropped, or JAX's words for it, would hide what the caller wrote."""
    monkeypatch.chdir(tmp_path)
    error, says, make = LOST[lost]
    for call, f in TAKERS.items():
        with pytest.raises(error, match=rf"^{call}.*{says}"):
            f(make(SQUARE))
    if lost != "masked":
        q = jax.tree.map(make, ROWS_OF)
        for call in (lambda: q[:32], q.dequantize, lambda: jax_mx.matmul(q, SQUARE)):
            with pytest.raises(error, match=rf"^[A-Za-z_.\[\]]+: .*values .*{says}"):
                call()


@pytest.mark.parametrize("name", ["matmul", "einsum", "mlp", "ragged_dot", "moe"])
def test_what_lowering_refuses_begins_with_the_call_that_was_written(name):
    by = {"implementation": "fp8" if name in ("matmul", "einsum", "mlp") else "cutedsl"}
    calls = {
        "matmul": lambda x: jax_mx.matmul(x, SQUARE, **by),
        "einsum": lambda x: jax_mx.einsum("ij,jk->ik", x, SQUARE, **by),
        "mlp": lambda x: jax_mx.mlp(x, SQUARE, SQUARE[:32], **by),
        "ragged_dot": lambda x: jax_mx.ragged_dot(x, WS, SIZES, **by),
        "moe": lambda x: jax_mx.moe(x, IDS, jnp.ones((64, 1)), WS, WS[:, :32], **by),
    }
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        jax.jit(calls[name])(XS[0])


@pytest.mark.parametrize(
    "build",
    [
        lambda: jax_mx.Hadamard(16),
        lambda: jax_mx.Hadamard(16, [1, -1] * 8),
        jax_mx.Gated,
        lambda: jax_mx.Recipe(wgrad=jax_mx.Product(hadamard=jax_mx.Hadamard(16, [1, -1] * 8))),
    ],
)
def test_what_is_rebuilt_or_copied_is_no_new_static_argument(build):
    traced = []
    run = jax.jit(lambda static, x: traced.append(static) or x, static_argnums=0)
    for static in (build(), build(), copy.deepcopy(build()), pickle.loads(pickle.dumps(build()))):
        run(static, 1.0)
    assert len(traced) == 1
    assert jax_mx.Hadamard(16, [1, -1] * 8) != jax_mx.Hadamard(16, [-1, 1] * 8)
    assert jax_mx.Hadamard(16) != jax_mx.Hadamard(32)
