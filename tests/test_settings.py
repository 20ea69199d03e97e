"""The whole public API under JAX's settings that make code strict: same bytes, no complaint.

A public function is a row of `CALLS`, or excused in `NO_CALLS`.
"""

import contextlib
import io
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal

import jax_mx

KEY = np.array([0, 7], np.uint32)  # a raw key; an import must not start a backend
SIGNS = np.resize([1, 1, -1, 1, -1], 64)
FORMATS = ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1")
LAYOUTS = ("row_major", "blocked_128x4", "shuffled_32x8")


def x(dtype=jnp.bfloat16, shape=(2, 64, 128)):
    """Finite, so that jax_debug_nans has nothing to find."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


def q(format="mxfp8_e4m3", **options):
    return jax_mx.quantize(x(), format, **options)


def quantize():
    for format in FORMATS:
        for layout in LAYOUTS:
            yield q(format, scale_layout=layout)
            yield q(format, scale_layout=layout, axis=1, transpose=True, scaling="even")
        yield q(format, block=(32, 32), zero_scale=127)
        yield q(format, axis=-2)
        yield q(format, value_layout="shuffled_16x16")
        yield jax_mx.quantize(x(jnp.float16), format)
        for rows in (np.array([3, -1, 8], np.int32), jnp.full(64, 5, jnp.int32)):
            yield jax_mx.quantize(x(shape=(9, 64)), format, rows=rows)
    stochastic = jax_mx.Stochastic(jnp.asarray(KEY), 0.75)
    for size in (16, 32, 64):
        for signs in (None, SIGNS[:size], jnp.asarray(SIGNS[:size])):
            hadamard = jax_mx.Hadamard(size, signs)
            yield q("mxfp4_e2m1", hadamard=hadamard, rounding=stochastic)
            yield q("mxfp4_e2m1", hadamard=hadamard, axis=-2)


def quantize_both():
    rounding, hadamard = jax_mx.Stochastic(jnp.asarray(KEY)), jax_mx.Hadamard.random(KEY)
    options = {"rounding": rounding, "hadamard": hadamard}
    for layout in LAYOUTS:
        yield jax_mx.quantize_both(x(), scale_layout=layout)
        yield jax_mx.quantize_both(x(), "mxfp4_e2m1", scale_layout=layout, **options)
        rows = np.arange(32, dtype=np.int32)
        yield jax_mx.quantize_both(x(shape=(9, 64)), scale_layout=layout, rows=rows)


def activations():
    gate_up, weights = x(shape=(32, 128)), jnp.ones(32, jnp.float32)
    y, back = jax.vjp(lambda a, w: jax_mx.gated(a, "swiglu", weights=w), gate_up, weights)
    yield y, back(y)
    yield jax_mx.gated(x(jnp.float16))
    run = lambda a, w: jax_mx.gated(a, weights=w, format="mxfp8_e4m3", floats=True).floats  # noqa: E731
    y, back = jax.vjp(run, gate_up, weights)
    yield y, back(y)
    yield jax_mx.gated(gate_up, format="mxfp4_e2m1", both=True)
    for gated in (
        jax_mx.Gated(),
        jax_mx.Gated("swiglu", weights),
        jax_mx.Gated("swiglu", weights, gradient=y),
    ):
        yield jax_mx.quantize(gate_up, activation=gated)
        yield jax_mx.quantize_both(gate_up, activation=gated)


def dequantize():
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        for layout in LAYOUTS:
            array = q(scale_layout=layout, axis=-2)
            yield jax_mx.dequantize(array, dtype)
            yield array.dequantize(dtype, transpose=True)
    yield q("mxfp4_e2m1", block=(32, 32)).dequantize()


def fake_quantize():
    for clip in (False, True):
        for options in (
            {"zero_scale": 127},
            {"axis": 0, "rounding": jax_mx.Stochastic(jnp.asarray(KEY), 0.75)},
            {"hadamard": jax_mx.Hadamard(64, SIGNS)},
            {"hadamard": jax_mx.Hadamard(16, jnp.asarray(SIGNS[:16])), "axis": 0},
        ):

            def f(x, clip=clip, options=options):
                return jax_mx.fake_quantize(x, "mxfp4_e2m1", scaling="floor", clip=clip, **options)

            y, back = jax.vjp(f, x(shape=(64, 64)))
            yield y
            yield back(y)


def arrays():
    for options in ({}, {"scale_layout": "blocked_128x4"}, {"axis": -2}):
        array = q("mxfp4_e2m1", **options)
        yield array[1], array[:, 32:], array[jnp.array([1, 0])], array[None]
        yield array[np.array([True, False])], [*array], array.mT, array.reshape(2, 1, 64, 128)
        yield array.with_scales_in("shuffled_32x8")
        yield jax_mx.MXArray.from_parts(
            array.values, array.scales.view(jnp.uint8), "mxfp4_e2m1", **(
                {"axis": array.axis, "scale_layout": array.scale_layout}
            )
        )  # fmt: skip
    yield q("mxfp4_e2m1").as_float4()
    floats4 = q("mxfp4_e2m1").as_float4()
    yield jax_mx.MXArray.from_float4(floats4, q("mxfp4_e2m1").scales)
    yield q().with_values_in("shuffled_16x16").with_values_in("row_major")
    for axis in (-1, -2):
        yield q("mxfp4_e2m1", block=(32, 32)).expand(axis, "blocked_128x4")


def hadamard():
    for size in (16, 32, 64):
        for signs in (None, SIGNS[:size], jnp.asarray(SIGNS[:size])):
            f = lambda x, size=size, signs=signs: jax_mx.hadamard(x, size, signs, axis=-2)  # noqa: E731
            y, back = jax.vjp(f, x())
            yield y
            yield back(y)


def random_signs():
    for size in (16, 32, 64):
        yield jax_mx.Hadamard.random(jnp.asarray(KEY), size).signs


def checkpoints(folder):
    tree = {"w": q("mxfp4_e2m1", scale_layout="blocked_128x4"), "b": x()}
    jax_mx.save_safetensors(tree, folder / "w.safetensors")
    yield jax_mx.load_safetensors(folder / "w.safetensors", tree)
    yield jax_mx.load_checkpoint(folder, like=tree)
    yield jax_mx.quantize_params({"w": x()}, {"w": "mxfp4"})


def of_bytes():
    packed = jax_mx.pack_mxfp6(q("mxfp6_e2m3"))
    yield packed, jax_mx.unpack_mxfp6(packed)


def products():
    """Forward and both gradients; a weight quantized once; one that is frozen."""
    a, w = x(shape=(2, 5, 64)), x(shape=(64, 40))
    recipes = (jax_mx.MXFP8, jax_mx.MXFP4, jax_mx.Recipe(window="row", wgrad="bf16"))
    for recipe in recipes:
        y, back = jax.vjp(lambda a, w, r=recipe: jax_mx.matmul(a, w, recipe=r), a, w)
        yield y, back(y)
        yield jax_mx.einsum("bsd,df->bsf", a, recipe.quantize_weight(w), recipe=recipe)
    yield jax_mx.dot_general(a, jax_mx.quantize(w, axis=0), (((2,), (0,)), ((), ())))
    yield jax_mx.matmul(a, jax_mx.quantize_weights({"w": w.astype(jnp.float32)})["w"])


def perceptrons():
    a, w1, w2 = x(shape=(2, 5, 64)), x(shape=(64, 128)), x(shape=(64, 40))
    for residuals in ("mx", "inputs"):

        def call(a, w1, w2, b1, residuals=residuals):
            return jax_mx.mlp(a, w1, w2, b_gate_up=b1, b_down=w2[0], residuals=residuals)

        y, back = jax.vjp(call, a, w1, w2, w1[0])
        yield y, back(y)


def norms():
    a, weight = x(), x(shape=(128,))

    def call(a, residual, weight):
        result = jax_mx.rms_norm(a, weight, residual=residual, factors=True)
        return result.floats, result.sum, result.factors

    y, back = jax.vjp(call, a, a + a, weight)
    yield y, back(y)
    yield jax_mx.rms_norm(a.astype(jnp.float32), format="mxfp8_e4m3", both=True, floats=True)


def collectives():
    """On two devices: in shard_map, and under a mesh that is set."""
    kinds, spec = (jax.sharding.AxisType.Auto,), jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ("a",), axis_types=kinds, devices=jax.devices("cpu")[:2])

    def moved(x):
        part = jax_mx.quantize(x)
        yield jax_mx.all_gather(part, "a", axis=1, tiled=True)
        yield jax_mx.all_to_all(part, "a", 1, 0, tiled=True)
        yield jax_mx.ppermute(part, "a", [(0, 1), (1, 0)])
        yield jax_mx.gather_weight(x, spec(None, "a"), batch=0)

    def local(x):
        return [*moved(x)]

    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec(None, "a"), out_specs=spec("a"))
    yield jax.jit(sharded)(x())
    with jax.set_mesh(mesh):
        yield jax.jit(lambda x: jax_mx.reshard(jax_mx.quantize(x), spec("a")))(x())


def normed_products():
    weight = x(shape=(128,)).astype(jnp.bfloat16)
    a = x().astype(jnp.bfloat16)

    def call(a, residual, weight):
        return jax_mx.normed_matmul(a, residual, weight, q())

    def chain(a, residual, weight):
        w = jax_mx.quantize(jnp.eye(128, dtype=jnp.bfloat16))
        return jax_mx.matmul_chain(a, [w, (weight, w)], residual=residual)

    for function in (call, chain):
        y, back = jax.vjp(function, a, a, weight)
        yield y, back(y)
    cache, half = jnp.ones((len(a), 5, 1, 32), a.dtype), jnp.ones(16, jnp.float32)
    attend = lambda x: jax_mx.matmul_chain(x, [  # noqa: E731
        jax_mx.CachedAttention(cache, cache, 3, half, half)])  # fmt: skip
    (y, _, caches), back = jax.vjp(attend, a)
    yield y, caches, back((y, None, caches))


# A row for each public function: what is called, and all that it gives.
def mixtures():
    rows, stack = x(shape=(64, 64)), x(shape=(2, 64, 64))
    experts = jnp.asarray(np.arange(64) % 3, jnp.int32)[:, None]  # the third one is none
    groups = jax_mx.Groups.from_experts(experts, 2)
    yield groups.rows, groups.slots
    yield jax_mx.ragged_dot(rows, stack, groups.counts)

    def layer(rows, stack):
        weights = jnp.ones((64, 1), jnp.float32)
        return jax_mx.moe(rows, experts, weights, stack, stack[:, :32])

    y, back = jax.vjp(layer, rows, stack)
    yield y, back(y)


CALLS = {
    "MXArray": arrays,
    "Hadamard": random_signs,
    "Stochastic": quantize_both,
    "concatenate": lambda: [jax_mx.concatenate([q(**w), q(**w)], a) for w in (
        {}, {"scale_layout": "blocked_128x4"}) for a in (0, 1, 2)],
    "stack": lambda: [jax_mx.stack([q(), q()], axis) for axis in range(3)],
    "swapaxes": lambda: [jax_mx.swapaxes(q(scale_layout="blocked_128x4"), 0, 1)],
    "dequantize": dequantize,
    "fake_quantize": fake_quantize,
    "from_checkpoint": lambda: [jax_mx.from_checkpoint(
        {"values": q().values, "scales:format=mxfp8_e4m3,axis=-1": q().scales})],
    "hadamard": hadamard,
    "is_supported": lambda: [np.array(jax_mx.is_supported(op, "cpu")[0]) for op in (
        "quantize", "quantize_both", "dequantize")],
    **dict.fromkeys(("save_safetensors", "load_safetensors", "load_checkpoint"), checkpoints),
    "quantize_params": checkpoints,
    "mx_matmul_reference": lambda: [jax_mx.mx_matmul_reference(q(axis=a), q(axis=a)) for a in (
        -1, -2)],
    "pack_mxfp6": of_bytes,
    "unpack_mxfp6": of_bytes,
    "quantize": quantize,
    "quantize_both": quantize_both,
    "gated": activations,
    "Activated": activations,
    "Gated": activations,
    "Normed": norms,
    "rms_norm": norms,
    **dict.fromkeys(("CachedAttention", "matmul_chain", "normed_matmul"), normed_products),
    "align": lambda: [jax_mx.align(q(), window) for window in (128, "row", (128, 128))],
    "can_multiply": lambda: [np.array(jax_mx.can_multiply(x(), x().mT, options)[0]) for options in (
        "abc,acd->abd", (((2,), (1,)), ((0,), (0,))))],
    **dict.fromkeys(("partition", "combine"), lambda: [
        jax_mx.combine(*jax_mx.partition({"q": q(), "x": x(), "none": None}))["q"]]),
    "quantized": lambda: [jax_mx.quantized(jnp.matmul, "mxfp8", where=lambda _: True)(
        x(), x().mT)],
    "dot_general": products,
    "einsum": products,
    "matmul": products,
    "quantize_weights": products,
    "mlp": perceptrons,
    "Recipe": products,
    "QuantizedWeight": products,
    **dict.fromkeys(("Groups", "moe", "ragged_dot"), mixtures),
    **dict.fromkeys(
        ("all_gather", "all_to_all", "ppermute", "reshard", "gather_weight"), collectives),
}  # fmt: skip
# Public names without an array: tables, their members, constants, modules.
NO_CALLS = {
    *("Format", "Scaling", "ScaleLayout", "ValueLayout", "CHECKPOINT_NAME", "__version__"),
    *("DISABLE_EXPORT_CHECKS", "CEIL", "EVEN", "FLOOR", "RCEIL", "ROW_MAJOR", "ROW_MAJOR_VALUES"),
    *("BLOCKED_128X4", "SHUFFLED_16X16", "SHUFFLED_32X8"),
    *(name.upper() for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3")),
    *("MXFP4_E2M1", "MXFP4", "MXFP8", "MXFP8_ROWS", "MXFP8_ROWS_FAST", "MXFP8_WINDOWS"),
    "MXFP8_HYBRID",
    *("BF16", "Product", "mxfp4_backward"),
    *("autotune", "explain", "Choice", "Explanation", "Candidate"),  # of traces, no arrays
}
SETTINGS = {
    "rank promotion": ("jax_numpy_rank_promotion", "raise"),
    "dtype promotion": ("jax_numpy_dtype_promotion", "strict"),
    "nans": ("jax_debug_nans", True),
    "infs": ("jax_debug_infs", True),
    "checks": ("jax_enable_checks", True),
    "leaks": ("jax_check_tracer_leaks", True),
    "x64": ("jax_enable_x64", True),
    "no x64": ("jax_enable_x64", False),
}


def outcome(name, folder):
    call = CALLS[name]
    result = call(folder) if call is checkpoints else call()
    return [np.asarray(leaf) for leaf in jax.tree.leaves([*result])]


@contextlib.contextmanager
def set_to(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """By name what each call gives under no setting, computed once."""
    outcomes = {}

    def of(name):
        if name not in outcomes:
            outcomes[name] = outcome(name, tmp_path_factory.mktemp("plain"))
        return outcomes[name]

    return of


@pytest.mark.sampled(232)
@pytest.mark.usefixtures("others_frozen")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CALLS)
def test_every_setting_gives_the_same_bytes(name, setting, plain, tmp_path):
    if CALLS[name] in [CALLS[other] for other in list(CALLS)[: list(CALLS).index(name)]]:
        return  # the same call stands for several names
    want = plain(name)
    with set_to(*SETTINGS[setting]):
        got = outcome(name, tmp_path)
    assert len(got) == len(want) > 0
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bits_equal(a, b, f"{name}, result {i}")


def test_every_public_name_is_called_or_excused():
    import types

    public = {
        name
        for name, value in vars(jax_mx).items()
        if (not name.startswith("_") or name == "__version__")
        and not isinstance(value, types.ModuleType)
    }
    # A package's functions hide modules of the same name.
    assert public - {*CALLS} - NO_CALLS == set()
    assert {*CALLS} | NO_CALLS <= public
    assert not {*CALLS} & NO_CALLS


def test_settings_from_the_environment():
    """As a user has them: set before JAX is imported."""
    code = (
        "import jax, jax_mx, jax.numpy as jnp; x = jnp.ones((64, 64), jnp.bfloat16);"
        "h = jax_mx.Hadamard.random(jax.random.key(3), 32);"
        "q = jax_mx.quantize(x, 'mxfp4_e2m1', hadamard=h, rounding="
        "jax_mx.Stochastic(jax.random.key(5)));"
        "print(h.signs.astype(int).tolist(), int(q.values.astype(int).sum()))"
    )
    env = os.environ | {"JAX_ENABLE_X64": "1", "JAX_NUMPY_RANK_PROMOTION": "raise"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(code, {})
    assert done.stdout == here.getvalue()
    signs = eval(done.stdout.rpartition("]")[0] + "]")
    # The top bit of each of 32 words of jax.random.bits, which no setting of JAX changes.
    bits = np.asarray(jax.random.bits(jax.random.key(3), (32,), jnp.uint32))
    assert signs == (bits < 2**31).astype(int).tolist()
