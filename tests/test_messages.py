"""A refusal is one sentence: the argument, the allowed ones, and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused, normal, random_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mx
from jax_mx.launch import calls, private

X = jnp.ones((64, 64), jnp.bfloat16)
OPS = ("quantize", "quantize_both", "fake_quantize", "hadamard")


class Tensor:
    """As torch's: a dtype that is not NumPy's, and DLPack."""

    dtype, shape, ndim = "torch.bfloat16", (64, 64), 2

    def __dlpack__(self):
        raise AssertionError


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "argument,sentence",
    [
        (None, "x is None, must be an array of floats of JAX or NumPy"),
        ("abc", "x is 'abc', must be an array of floats"),
        ({}, "x is {}, must be an array of floats"),
        ([[1.0], [1.0, 2.0]], "x is [[1.0], [1.0, 2.0]], must be an array of floats"),
        (jax_mx.quantize(X, "mxfp4_e2m1"),
         "x is an MXArray in mxfp4_e2m1 already; give floats, as x.dequantize() does"),
        (Tensor(), "x is a test_messages.Tensor, must be an array of floats of JAX or NumPy; "
         "jax.dlpack.from_dlpack(x) makes one of it"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_no_array_of_floats(op, argument, sentence):
    assert_refused(lambda: getattr(jax_mx, op)(argument), TypeError, f"{op}: {sentence}")


def test_what_stands_for_an_array():
    for argument in ([[1.0] * 32], ((1.0,) * 32,), np.ones((1, 32), np.float16), [jnp.ones(32)]):
        assert jax_mx.quantize(argument).shape == (1, 32)


B, M = jax.export.symbolic_shape("b, m")


@pytest.mark.parametrize(
    "shape,call,sentence",
    [
        ((4, B), jax_mx.quantize, "quantize: axis -1 has length b, not a multiple of the block "
         "length 32; write a symbolic one as a multiple, as in jax.export.symbolic_shape('32*n'), "
         "or choose another axis of (4, b)"),
        ((32 * B,), lambda x: jax_mx.quantize(x, hadamard=jax_mx.Hadamard(64)),
         "not a multiple of 64, the size of its Hadamard transform; write a symbolic one as a "
         "multiple, as in jax.export.symbolic_shape('64*n'), or use a smaller one"),
        ((M, 8 * B), jax_mx.hadamard, "hadamard: axis -1 has length 8*b, not a multiple of the "
         "size 16; write a symbolic one as a multiple"),
        ((M, 64), lambda x: jax_mx.quantize(x, value_layout="shuffled_16x16"),
         "which do not divide m rows of 64 bytes; use 'row_major' or pad the array (write symbolic "
         "lengths as multiples)"),
    ],
)  # fmt: skip
def test_symbolic_lengths(shape, call, sentence):
    abstract = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert_refused(lambda: jax.eval_shape(call, abstract), ValueError, sentence)
    number = tuple(n if isinstance(n, int) else 24 for n in shape)
    with pytest.raises(ValueError) as caught:
        jax.eval_shape(call, jax.ShapeDtypeStruct(number, jnp.float32))
    assert "symbolic_shape" not in str(caught.value)


def test_is_supported_in_its_own_words():
    supported = jax_mx.is_supported
    for call, error, sentence in (
        (lambda: supported("quantize", "cuda"), ValueError,
         "is_supported: 'cuda' is a platform, whose chips have different kernels; name one of "
         "sm_80, "),
        (lambda: supported("quantize", "gpu"), ValueError, "is_supported: 'gpu' is a platform"),
        (lambda: supported("quantize", "rocm"), ValueError, "name one of gfx942, gfx950, or give"),
        (lambda: supported("quantize", "H200"), ValueError, "is_supported: 'H200' is no chip's"),
        (lambda: supported("quantize", "sm_90", ndim="2"), TypeError,
         "is_supported: ndim must be an int, got '2'"),
        (lambda: supported("quantize", "sm_90", ndim=2.0), TypeError, "must be an int, got 2.0"),
        (lambda: supported("quantize", "sm_90", ndim=True), TypeError, "must be an int, got True"),
        (lambda: supported("quantize", "sm_90", dtype="bf16"), TypeError,
         "is_supported: dtype is 'bf16', must be one of bfloat16, float16, float32"),
        (lambda: supported("quantize", "sm_90", dtype=None), TypeError,
         "is_supported: dtype is None, must be one of"),
        (lambda: supported("quantize", "sm_90", dtype=jnp.int8), TypeError,
         "is_supported: dtype is int8, must be one of"),
    ):  # fmt: skip
        assert_refused(call, error, sentence)
    assert supported("quantize", "sm_90", ndim=np.int64(3))[0]


def test_numpy_bools_are_bools():
    yes, no = np.True_, np.False_
    q = jax_mx.quantize(X, axis=-2, transpose=yes)
    assert q.axis == -1
    assert q.dequantize(transpose=yes).shape == (64, 64)
    assert jax_mx.quantize_both(X, transpose=(no, yes))[1].axis == -1
    assert_bits_equal(jax_mx.fake_quantize(X, clip=yes), X)
    assert jax_mx.is_supported("quantize", "sm_90", transpose=yes)[0]


def test_layouts_of_scales_and_of_values_have_names_of_their_own():
    assert repr(jax_mx.ROW_MAJOR) == "ROW_MAJOR"
    assert repr(jax_mx.ROW_MAJOR_VALUES) == "ROW_MAJOR_VALUES"
    assert repr(jax_mx.SHUFFLED_16X16) == "SHUFFLED_16X16"
    for name in ("ROW_MAJOR", "ROW_MAJOR_VALUES", "BLOCKED_128X4", "SHUFFLED_16X16"):
        assert repr(getattr(jax_mx, name)) == name


def test_fake_quantize_speaks_for_itself():
    fake, wide = jax_mx.fake_quantize, X.astype(jnp.float32)
    for call, sentence in (
        (lambda: fake(wide, "mxfp6_e3m2", implementation="cutedsl"),
         "fake_quantize: cutedsl has no kernel for mxfp6_e3m2 and dtype float32"),
        (lambda: fake(X, implementation="cutedsl"),
         "fake_quantize: implementation 'cutedsl' runs on cuda, not on cpu"),
        (lambda: jax.jit(lambda x: fake(x, implementation="flydsl"))(X),
         "fake_quantize: implementation 'flydsl' runs on rocm, not on cpu"),
        (lambda: fake(X, "mxfp4_e2m1", hadamard=jax_mx.Hadamard(), implementation="cutedsl"),
         "fake_quantize: implementation 'cutedsl' runs on cuda, not on cpu"),
    ):  # fmt: skip
        assert_refused(call, NotImplementedError, sentence)
    assert_refused(lambda: fake(X, rounding=1), TypeError, "fake_quantize: rounding must be None")
    assert_refused(lambda: fake(X, zero_scale=1), ValueError, "fake_quantize: zero_scale")


def test_shards_that_split_a_transform():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((8, 128)), NamedSharding(mesh, P(None, "d")))
    with jax.set_mesh(mesh):
        for call, op in (
            (lambda x: jax_mx.hadamard(x, 32), "hadamard"),
            (lambda x: jax_mx.fake_quantize(x, hadamard=jax_mx.Hadamard(32)), "fake_quantize"),
        ):
            with pytest.raises(private.ShardingTypeError) as caught:
                jax.jit(call)(x)
            assert str(caught.value).startswith(
                f"{op}: axis -1 of length 128 is split over d in 8 shards of 16, which does not "
                "keep its blocks of 32 whole"
            )
        got = jax.jit(lambda x: jax_mx.hadamard(x, 16))(x)
    assert_bits_equal(got, jax_mx.hadamard(jnp.ones((8, 128)), 16))


@pytest.mark.parametrize("archs,says", [("sm_90a", True), (None, False)])
def test_an_export_without_kernels_for_a_chip_that_is_named_says_so(
    archs, says, monkeypatch, caplog
):
    """float32 into MXFP6 has no kernel, on any chip."""
    calls.say_once.cache_clear()
    if archs is None:
        monkeypatch.delenv("JAX_MX_ARCHS", raising=False)
    else:
        monkeypatch.setenv("JAX_MX_ARCHS", archs)
    jax.export.export(
        jax.jit(lambda x: jax_mx.quantize(x, "mxfp6_e3m2")),
        platforms=["cuda"],
        disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS,
    )(jax.ShapeDtypeStruct((32, 64), jnp.float32))
    said = [line for line in caplog.messages if "without kernels for sm_90" in line]
    assert len(said) == says
    assert all("no kernel for mxfp6_e3m2 and dtype float32" in line for line in said)


# ---- eager shard_map ---
@pytest.mark.thorough
def test_eager_shard_map_compiles_as_many_programs_as_for_jax_s_own_ops():
    """JAX compiles one for the op and one for each array that goes in or comes out."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    compiled = []

    def listen(event, *_, **__):
        if "backend_compile" in event:
            compiled.append(event)

    def count(f, x) -> int:
        call = jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        call(x)  # what is compiled once and for all
        compiled.clear()
        call(x)
        return len(compiled)

    x = jnp.ones((1024, 512), jnp.bfloat16)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        programs = count(jax.jit(lambda x: x + x), x)
        own_of_two = count(jax.jit(lambda x: (x + x, x * x)), x)
        own_of_four = count(jax.jit(lambda x: (x + x, x * x, x - x, -x)), x)
        assert count(jax_mx.quantize, x) <= own_of_two
        assert count(jax_mx.quantize_both, x) <= own_of_four
        assert count(jax_mx.fake_quantize, x) <= programs
        assert count(jax_mx.dequantize, jax_mx.quantize(x)) <= own_of_two
    finally:
        jax.monitoring.clear_event_listeners()


# ---- fake_quantize's preprocessing ---
SIGNS = np.resize([1, -1, -1, 1, 1], 64)
HOW = {
    "zero_scale": {"zero_scale": 127},
    "rounding": {"rounding": jax_mx.Stochastic(np.array([0, 7], np.uint32))},
    "prescale": {"rounding": jax_mx.Stochastic(np.array([0, 7], np.uint32), 0.75)},
    "16": {"hadamard": jax_mx.Hadamard(16)},
    "32, signs": {"hadamard": jax_mx.Hadamard(32, SIGNS[:32])},
    "64, signs": {"hadamard": jax_mx.Hadamard(64, SIGNS)},
    "64, JAX's signs": {"hadamard": jax_mx.Hadamard(64, jnp.asarray(SIGNS))},
    "both": {"hadamard": jax_mx.Hadamard(16, jnp.asarray(SIGNS[:16])),
             "rounding": jax_mx.Stochastic(np.array([0, 7], np.uint32), 0.75)},
}  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize("axis", [-1, -2, 0])
@pytest.mark.parametrize("name", HOW)
def test_fake_quantize_undoes_what_it_does(name, axis):
    dtype = {-1: jnp.bfloat16, -2: jnp.float16, 0: jnp.float32}[axis]
    x = normal((64, 64, 64), 1, dtype)
    options, float32 = HOW[name] | {"axis": axis, "scaling": "floor"}, jnp.float32
    q = jax_mx.quantize(x, "mxfp4_e2m1", **options)
    hadamard, rounding = options.get("hadamard"), options.get("rounding")
    signs = np.ones(1) if hadamard is None or hadamard.signs is None else hadamard.signs
    signs = np.tile(np.asarray(signs, np.float32), 64 // len(signs))
    signs = signs.reshape([64 if d == axis % 3 else 1 for d in range(3)])

    def back(y):
        if rounding is not None and rounding.prescale is not None:
            y = y / np.float32(0.75)
        if hadamard is not None:
            y = jax_mx.hadamard(y, hadamard.size, axis=axis) * signs
        return y

    def fake(x, **more):
        return jax_mx.fake_quantize(x, "mxfp4_e2m1", **options, **more)

    want = back(q.dequantize(float32)).astype(dtype)
    y, vjp = jax.vjp(fake, x)
    assert_bits_equal(y, want)
    assert np.abs(np.asarray(y - x, np.float32)).mean() < 0.25  # it is x, but for the format
    cotangent = jnp.asarray(random_bits(x.shape, dtype, 1))
    assert_bits_equal(vjp(cotangent)[0], cotangent)

    # Clipped: of what is rounded, the elements beyond the largest magnitude have no derivative.
    y, vjp = jax.vjp(lambda x: fake(x, clip=True), x)
    assert_bits_equal(y, want)
    turned = x.astype(float32)
    if hadamard is not None:
        turned = jax_mx.hadamard(turned * signs, hadamard.size, axis=axis)
    if rounding is not None and rounding.prescale is not None:
        turned = turned * 0.75
    scales = np.repeat(np.asarray(q.scales).astype(np.float64), 32, axis=axis)
    kept = ~(np.abs(np.asarray(turned, np.float64)) > 6 * scales)
    assert not kept.all()
    cotangent = normal(x.shape, 2)
    got = vjp(cotangent.astype(dtype))[0]
    if hadamard is None:
        assert_bits_equal(got, jnp.where(kept, cotangent.astype(dtype), jnp.zeros_like(got)))
    else:
        turned = jax_mx.hadamard(cotangent * signs, hadamard.size, axis=axis)
        turned = jnp.where(kept, turned, np.float32(0))
        want = np.asarray(jax_mx.hadamard(turned, hadamard.size, axis=axis) * signs)
        bound = {2: 0.04, 4: 1e-5}[dtype.dtype.itemsize]  # some roundings to 8 bits, or to 24
        assert np.abs(np.asarray(got, np.float32) - want).max() < bound * np.abs(want).max()


def test_fake_quantize_of_nans_is_a_block_of_nans():
    x = jnp.ones((2, 64)).at[0, 3].set(jnp.nan)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        y = jax_mx.fake_quantize(x.astype(dtype), hadamard=jax_mx.Hadamard(16, SIGNS[:16]))
        bits = np.dtype(f"uint{8 * y.dtype.itemsize}")
        bits_of_y = np.asarray(y).view(bits)
        assert (bits_of_y[0, :32] == np.iinfo(bits).max >> 1).all()
        assert np.isfinite(np.asarray(y[0, 32:], np.float32)).all()


@pytest.mark.parametrize("name", ["cutedsl", "pallas"])
@pytest.mark.parametrize("op", ["matmul", "ragged_dot"])
def test_products_of_other_platforms(op, name):
    """A named implementation that this platform has not."""
    sizes = jnp.array([64], jnp.int32)
    calls = {
        "matmul": lambda: jax_mx.matmul(X, X, implementation=name),
        "ragged_dot": lambda: jax_mx.ragged_dot(X, X[None], sizes, implementation=name),
    }
    if (op, name) == ("matmul", "pallas"):
        assert_refused(calls[op], ValueError, "implementation 'pallas' is unknown")
    else:
        assert_refused(
            calls[op], NotImplementedError, f"{op}: implementation {name!r} runs on cuda"
        )


Q, M = jax_mx.quantize(X), jnp.ones((64, 64), jnp.float32)
ODD = {
    "lines": np.full((64, 64), 1.5),  # its text has many lines
    "key": jax.random.split(jax.random.key(0), 64),
    "type": jnp.float32,
    "objects": np.array([None, None]),
    "scalar": np.float32(3),
    "text": "abc",
}
TAKERS = {  # a name that refusals begin with, a call, what it takes of the above
    "quantize": (jax_mx.quantize, {"lines"}),
    "quantize: format": (lambda x: jax_mx.quantize(M, x), set()),
    "with_scales_in": (Q.with_scales_in, set()),
    "matmul": (lambda x: jax_mx.matmul(x, M), {"lines"}),
    "matmul: implementation": (lambda x: jax_mx.matmul(M, M, implementation=x), set()),
    "matmul: out_sharding": (lambda x: jax_mx.matmul(M, M, out_sharding=x), set()),
    "matmul: ": (lambda x: jax_mx.matmul(x, M, fallback="floats"), {"lines"}),
    "mlp": (lambda x: jax_mx.mlp(x, M, M[:32]), {"lines"}),
    "mlp: out_sharding": (lambda x: jax_mx.mlp(M, M, M[:32], out_sharding=x), set()),
    "dot_general": (lambda x: jax_mx.dot_general(M, M, x), set()),
    "rms_norm": (jax_mx.rms_norm, {"lines", "scalar"}),
    "MXArray.reshape": (Q.reshape, set()),
    "concatenate": (jax_mx.concatenate, set()),
    "quantized": (jax_mx.quantized, {"type"}),
}


@pytest.mark.parametrize("call", TAKERS)
def test_odd_arguments(call):
    """The sentence is one line that names the call, whatever the argument is."""
    f, taken = TAKERS[call]
    for name in ODD.keys() - taken:
        with pytest.raises((TypeError, ValueError), match=f"^{call}") as refusal:
            f(ODD[name])
        assert "\n" not in str(refusal.value), name
