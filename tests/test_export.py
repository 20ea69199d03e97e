"""Exported programs give the same bits, also for other lengths and in another process."""

import os
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forks import Running
from helpers import assert_bits_equal, on_eight, random_bits

import jax_mx
from jax_mx import Hadamard, Stochastic
from jax_mx.formats.layouts import VALUE_LAYOUTS
from jax_mx.launch import store
from jax_mx.quantizing import mxarray
from jax_mx.quantizing.metadata import Known

KEY, SIGNS = jax.random.key(7), np.resize([1, 1, -1, 1, -1], 64)
ROWS = np.resize(np.array([-1, 40, 3, 39, 0], np.int32), 64)
SQUARE = {"block": (32, 32)}
TILED = {"scale_layout": "blocked_128x4"}


def floats(*shape, dtype=np.float32):
    return random_bits(shape, dtype)


def like(symbols: str, dtype=np.float32):
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(symbols), dtype)


def quantized(x, **options):
    return jax_mx.quantize(x, **options)


def there_and_back(layout):
    def call(x):
        q = jax_mx.quantize(x, scale_layout=layout)
        return q, q.dequantize(jnp.float32)

    return call


def turned(turn):
    return lambda q: q.dequantize(transpose=turn)


def gated(x, up=None):
    return jax_mx.gated(x, up=up, format="mxfp8_e4m3", floats=True)


def at_random(x, rounding, hadamard):
    return jax_mx.quantize(x, "mxfp4_e2m1", rounding=rounding, hadamard=hadamard)


def tiles_like(symbols: str):
    return jax.eval_shape(lambda x: quantized(x, **TILED), like(symbols))


RANDOM = Stochastic(KEY, 0.75), Hadamard(64, jnp.asarray(SIGNS))
TALL, SHORT = (quantized(jnp.ones((3, n, 64)), **TILED) for n in (128, 100))
# The exported function, the arguments that it is exported for, and those that it is called with.
CASES = {
    "rows": (quantized, [like("n, 64")], [[floats(7, 64)]]),
    **{
        f"leading dimensions, {layout}": (
            there_and_back(layout), [like("n, 2*m, 256, 64")], [[floats(3, 4, 256, 64)]]
        )
        for layout in ("row_major", "blocked_128x4")
    },
    **{
        f"square, {turn}": (
            lambda x, turn=turn: quantized(x, transpose=turn, **SQUARE), None, [[floats(64, 96)]]
        )
        for turn in (False, True)
    },
    **{
        f"dequantize square, {turn}": (turned(turn), None, [[quantized(floats(64, 96), **SQUARE)]])
        for turn in (False, True)
    },
    "tiles": (
        lambda x: quantized(x, format="mxfp8_e5m2", **TILED), None, [[floats(4, 64)]]
    ),
    "padding": (lambda q: (q, q.dequantize()), None, [[quantized(floats(200, 320), **TILED)]]),
    "any number of tiles": (jax_mx.dequantize, [tiles_like("b, 128, 64")], [[TALL], [TALL[:2]]]),
    "tiles of any rows": (
        jax_mx.dequantize, [tiles_like("b, m, 64")], [[TALL], [TALL[:2]], [SHORT]]
    ),
    "keys": (
        at_random, [like("n, 128"), *jax.eval_shape(lambda: RANDOM)], [[floats(7, 128), *RANDOM]]
    ),
    "numbers of rows": (
        lambda x, rows: quantized(x, rows=rows),
        [*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(
            (lambda t, k, r: ((t, k), (r,)))(*jax.export.symbolic_shape("t, 96, r")),
            (jnp.bfloat16, np.int32), strict=True))],
        [[floats(40, 96, dtype=jnp.bfloat16), ROWS]],
    ),
    "floats and codes": (gated, None, [[jnp.ones((32, 128), jnp.bfloat16)]]),
    "gates and ups": (gated, None, [[jnp.ones((32, 128), jnp.bfloat16)] * 2]),
}  # fmt: skip


def exported(call, args) -> bytes:
    platforms, checks = ("cpu", "cuda", "rocm"), jax_mx.DISABLE_EXPORT_CHECKS
    export = jax.export.export(jax.jit(call), platforms=platforms, disabled_checks=checks)
    program = export(*args)
    assert store.TARGET in program.mlir_module() or call is at_random  # no kernel rotates by 64
    return bytes(program.serialize())


def same(got, want) -> None:
    """Static fields, too."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bits_equal(g, w)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("name", CASES)
def test_an_exported_program_gives_the_same_bits(name):
    call, likes, arguments = CASES[name]
    program = jax.export.deserialize(exported(call, likes or arguments[0]))
    for args in arguments:
        same(program.call(*args), jax.jit(call)(*args))


def test_static_fields_survive_serialization():
    aux = (jax_mx.MXFP8_E5M2, -2, jax_mx.BLOCKED_128X4)
    for values in VALUE_LAYOUTS.values():
        for block in ((32,), (32, 32)):
            fields = (*aux, block, values, 32, Known(), Known())
            assert mxarray.deserialized(mxarray.serialized(fields)) == fields
    fields = jax.tree.structure(SHORT).node_data()[1]
    assert b'"padding": [28, 2]' in mxarray.serialized(fields)
    assert mxarray.deserialized(mxarray.serialized(fields)) == fields


@pytest.mark.usefixtures("without_code")
def test_a_process_without_a_gpu_runs_a_program_of_every_platform(tmp_path):
    """It takes and returns arrays with their static fields."""
    x = floats(4, 64)
    q = quantized(x, format="mxfp8_e5m2", **TILED)
    for name, args in (("tiles", [x]), ("dequantize", [q])):
        call = CASES[name][0] if name in CASES else jax_mx.dequantize
        (tmp_path / name).write_bytes(exported(call, args))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "want.npy", np.asarray(q.dequantize()).view(np.uint16))
    code = f"""
        import pathlib, jax, numpy as np
        import jax_mx
        folder = pathlib.Path({str(tmp_path)!r})
        quantize, dequantize = (
            jax.export.deserialize((folder / name).read_bytes()) for name in ("tiles", "dequantize")
        )
        q = quantize.call(np.load(folder / "x.npy"))
        assert q.format is jax_mx.MXFP8_E5M2 and q.scale_layout is jax_mx.BLOCKED_128X4
        got = np.asarray(dequantize.call(q)).view(np.uint16)
        assert (got == np.load(folder / "want.npy")).all()
        """
    process = Running(textwrap.dedent(code), env={**os.environ, "JAX_PLATFORMS": "cpu"})
    status, _, errors = process.wait(120)
    process.kill()
    assert status == 0, errors[-3000:]


EXPORTED = """
    folder = pathlib.Path(sys.argv[2])
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    call = lambda x: jax_mx.quantize_both(x, scale_layout="blocked_128x4")
"""


def test_a_sharded_program_is_exported_and_runs_elsewhere(tmp_path):
    x = floats(256, 512)
    np.save(tmp_path / "x.npy", x)
    export = """
    from helpers import stand_in
    from jax_mx.launch import store
    store.obstacle, store.get = lambda *_: "", stand_in  # its kernels do not run here
    x = jax.ShapeDtypeStruct((256, 512), "float32", sharding=NamedSharding(mesh, P("a", "b")))
    exported = jax.export.export(
        jax.jit(call), platforms=["cpu", "cuda"], disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS
    )(x)
    assert "jax_mx_launch" in exported.mlir_module() and exported.nr_devices == 8
    (folder / "program").write_bytes(exported.serialize())
    """
    run = """
    program = jax.export.deserialize((folder / "program").read_bytes())
    x = jax.device_put(np.load(folder / "x.npy"), NamedSharding(mesh, P("a", "b")))
    compiled = jax.jit(program.call).lower(x).compile()
    assert "all-" not in compiled.as_text()
    for i, a in enumerate(jax.tree.leaves(compiled(x))):
        np.save(folder / f"{i}.npy", np.asarray(a).view(np.uint8))
    """
    for code in (export, run):
        on_eight(textwrap.dedent(EXPORTED) + textwrap.dedent(code), str(tmp_path))
    wants = jax.tree.leaves(jax_mx.quantize_both(x, scale_layout="blocked_128x4"))
    for i, want in enumerate(wants):
        assert_bits_equal(np.load(tmp_path / f"{i}.npy"), np.asarray(want).view(np.uint8))
