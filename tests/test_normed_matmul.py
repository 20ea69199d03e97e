"""`normed_matmul` and `matmul_chain` are the lines that they stand for.

Values, derivatives, vmap, errors, and what is launched.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import on_hopper
from helpers import assert_bits_equal, call_attributes_in, poison_memory, stand_in, step_by_step
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mx
from jax_mx.decoding import matmul_chain
from jax_mx.launch import _ffi, store
from jax_mx.quantizing.facts.product_kernels import DIRECT

SHAPES = [  # x, N, whether kernels may serve it
    ((1, 256), 96, True),
    ((2, 2, 128), 64, True),
    ((384,), 10, True),
    ((9, 256), 32, True),
    ((2, 96), 32, True),
    ((17, 256), 32, False),
]


def lines(x, residual, weight, w):
    floats, _, total, _ = jax_mx.rms_norm(x, weight, eps=1e-5, residual=residual)
    return jax_mx.einsum("...k,nk->...n", floats, w, recipe="bf16"), total


def function(w):
    return lambda *args: jax_mx.normed_matmul(*args, w, eps=1e-5)


def operands(shape, n, format="mxfp8_e4m3"):
    rng = np.random.default_rng(0)
    x, residual = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in "ab")
    weight = jnp.asarray(rng.normal(size=shape[-1:]), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(n, shape[-1])), jnp.bfloat16)
    return (x, residual, weight), jax_mx.quantize(w, format)


@pytest.mark.parametrize(("shape", "n", "served"), SHAPES)
def test_it_is_the_lines_that_it_stands_for(shape, n, served):
    args, w = operands(shape, n, "mxfp4_e2m1" if n == 64 else "mxfp8_e4m3")
    f = function(w)
    text = str(jax.make_jaxpr(f)(*args))
    assert ("mx_normed" in text or "mx_chain" in text) == served
    want = lines(*args, w)
    for got, its in zip(jax.jit(f)(*args), want, strict=True):
        assert_bits_equal(got, its)

    def loss(f):
        return jax.grad(lambda *args: sum(y.astype(jnp.float32).sum() for y in f(*args)), (0, 1, 2))

    grads = loss(f)(*args), loss(lambda *args: lines(*args, w))(*args)
    for got, its in zip(*grads, strict=True):
        assert_bits_equal(got, its)


@pytest.mark.parametrize("batch", [2, 3])  # whose rows together have a kernel, and have none
def test_a_batch_is_more_rows(batch):
    args, w = operands((batch, 2, 128), 64)
    f = function(w)
    for got, its in zip(jax.vmap(f, (0, 0, None))(*args), f(*args), strict=True):
        assert_bits_equal(got, its)
    leaves = [jnp.stack([w.values] * batch), jnp.stack([w.scales] * batch)]
    many = jax.tree.unflatten(jax.tree.structure(w), leaves)
    got = jax.vmap(lambda x, r, w: function(w)(x, r, args[2]))(*args[:2], many)
    assert_bits_equal(got[0], function(w)(*args)[0])


def test_what_it_refuses():
    (x, residual, weight), w = operands((2, 128), 64)
    with pytest.raises(ValueError, match="residual has the shape"):
        function(w)(x, residual[:1], weight)
    with pytest.raises(ValueError, match="eps must be"):
        jax_mx.normed_matmul(x, residual, weight, w, eps=-1.0)


def test_an_activation_is_of_the_product():
    args, w = operands((3, 128), 64)
    y, total = jax_mx.normed_matmul(*args, w, eps=1e-5, activation="swiglu")
    plain, its = function(w)(*args)
    assert_bits_equal(y, jax_mx.gated(plain, "swiglu"))
    assert_bits_equal(total, its)
    y, _ = jax_mx.normed_matmul(*args, w, activation="gelu")  # which no kernel has
    assert y.shape == (3, 64)
    with pytest.raises(ValueError, match="activation must be 'swiglu', "):
        jax_mx.normed_matmul(*args, w, activation="swish")


# ---- several products ---
def of_a_layer(lead=(2,), width=256, inner=384, format="mxfp8_e4m3", scale=1.0):
    """x, a residual and two norms; the steps that begin with these; the lines of the same."""
    rng = np.random.default_rng(1)

    def floats(*shape):
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.bfloat16)

    def weight(*shape):
        return jax_mx.quantize(floats(*shape) * shape[1] ** -0.5, format)

    o, down = weight(width, 128), weight(width, inner)
    gate_up, qkv = weight(2 * inner, width), weight(96, width)

    def steps(first, second):
        return [o, (first, gate_up, "swiglu"), down, (second, qkv)]

    def lines(x, residual, first, second):
        product = partial(jax_mx.einsum, "...k,nk->...n", recipe="bf16")
        y, total = product(x, o), residual
        y, total = jax_mx.normed_matmul(y, total, first, gate_up, activation="swiglu")
        return jax_mx.normed_matmul(product(y, down), total, second, qkv)

    args = floats(*lead, 128), floats(*lead, width), floats(width), floats(width)
    return args, steps, lines


def chained(steps):
    return lambda x, residual, *norms: jax_mx.matmul_chain(x, steps(*norms), residual=residual)


@pytest.mark.parametrize("lead", [(), (1,), (2, 2), (5,), (17,)])
def test_a_chain_is_the_lines_that_it_stands_for(lead):
    args, steps, lines = of_a_layer(lead)
    f = chained(steps)
    assert ("mx_chain" in str(jax.make_jaxpr(f)(*args))) == (lead != (17,))
    for got, want in zip(jax.jit(f)(*args), jax.jit(lines)(*args), strict=True):
        assert_bits_equal(got, want)

    def loss(f, *args):
        return sum(y.astype(jnp.float32).sum() for y in f(*args))

    grads = (jax.grad(partial(loss, g), (0, 1, 2, 3))(*args) for g in (f, lines))
    for got, want in zip(*grads, strict=True):
        assert_bits_equal(got, want)
    moves = (jax.jvp(g, args, args)[1] for g in (f, lines))
    for got, want in zip(*moves, strict=True):
        assert_bits_equal(got, want)


@pytest.mark.parametrize("rows", [2, 5])
def test_a_chain_under_vmap(rows):
    args, steps, lines = of_a_layer((3, rows))
    for dims in ((0, 0, None, None), (1, None, None, None)):
        one = args[1] if dims[1] == 0 else args[1][0, :1].repeat(3, 0)
        here = (args[0], one, *args[2:])
        got, want = (jax.vmap(g, dims)(*here) for g in (chained(steps), lines))
        for a, b in zip(got, want, strict=True):
            assert_bits_equal(a, b)


def test_a_chain_under_vmap_has_tiles_for_all_rows():
    """Tiles for the rows of one entry would read the weights again and again."""
    (x, *_), steps, _ = of_a_layer((40, 7))
    o, normed, down, _ = steps(None, None)

    def f(x):
        return jax_mx.matmul_chain(x, [o, (None, normed[1], "swiglu"), down])[0]

    one, many = (str(jax.make_jaxpr(g)(a)) for g, a in ((f, x[0]), (jax.vmap(f), x)))
    assert "mx_chain" in one and not re.search("mx_chain|rows=8", many)
    assert_bits_equal(jax.vmap(f)(x), jnp.stack([f(entry) for entry in x]))


def test_a_chain_on_a_mesh():
    """Devices share weights, of which each has some rows."""
    args, steps, _ = of_a_layer()
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
    o, normed, down, last = steps(None, None)
    gate_up, qkv = normed[1], last[1]

    def placed(w, *axes):
        return jax.device_put(w, NamedSharding(mesh, P(*axes)))

    shared = [placed(o, "tensor"), placed(gate_up, "tensor"), placed(down, "tensor"), placed(qkv)]

    def f(args, o, gate_up, down, qkv):
        x, residual, first, second = args
        placed_steps = [o, (first, gate_up, "swiglu"), down, (second, qkv)]
        return jax_mx.matmul_chain(x, placed_steps, residual=residual)

    with jax.set_mesh(mesh):
        split = jax.jit(f)(args, *shared)
    for got, want in zip(split, f(args, o, gate_up, down, qkv), strict=True):
        np.testing.assert_allclose(
            got.astype(jnp.float32), want.astype(jnp.float32), rtol=0.02, atol=0.02
        )


def test_steps_without_a_norm_and_of_floats():
    (x, _, first, _), steps, _ = of_a_layer()
    o, normed, down, _ = steps(first, first)
    gate_up = normed[1]
    product = partial(jax_mx.einsum, "...k,nk->...n", recipe="bf16")
    y, nothing = jax_mx.matmul_chain(x, [o, (None, gate_up, "swiglu"), down])
    assert nothing is None
    assert_bits_equal(y, product(jax_mx.gated(product(product(x, o), gate_up)), down))
    y, total = jax_mx.matmul_chain(x, [o, gate_up], residual=first)
    assert_bits_equal(y, product(product(x, o), gate_up))
    assert_bits_equal(total, first)
    floats = jnp.ones((8, 128), jnp.bfloat16)
    y, _ = jax_mx.matmul_chain(x, [floats])
    assert_bits_equal(y, product(x, floats))


def test_steps_that_no_kernel_takes_leave_the_others_theirs():
    (x, residual, first, second), steps, _ = of_a_layer()
    *three, last = steps(first, second)
    floats = jax_mx.dequantize(last[1], jnp.bfloat16)
    text = str(jax.make_jaxpr(chained(lambda *_: [*three, (second, floats)]))(x, residual))
    assert text.count("= mx_chain[") == 1 and "mx_normed" not in text
    got = jax_mx.matmul_chain(x, [*three, (second, floats)], residual=residual)
    y, total = jax_mx.matmul_chain(x, three, residual=residual)
    for g, w in zip(got, jax_mx.normed_matmul(y, total, second, floats), strict=True):
        assert_bits_equal(g, w)
    square = jax_mx.quantize(jnp.eye(128, dtype=jnp.bfloat16))
    y, _ = jax_mx.matmul_chain(x, [square] * 30)  # as many as one likes
    assert_bits_equal(y, x)


def test_an_empty_batch():
    (x, residual, first, second), steps, _ = of_a_layer()
    f = chained(steps)
    many = [jnp.zeros((0, *a.shape), a.dtype) for a in (x, residual)]
    y, total = jax.vmap(f, (0, 0, None, None))(*many, first, second)
    assert y.shape == (0, 2, 96) and total.shape == (0, 2, 256)


def test_what_a_chain_refuses():
    (x, residual, first, second), steps, _ = of_a_layer()
    four = steps(first, second)
    call = partial(jax_mx.matmul_chain, x)
    with pytest.raises(ValueError, match=r"matmul_chain: step 1 has a norm, .*; pass residual"):
        call(four)
    for wrong in (four[0], (first, four[0]), []):
        with pytest.raises(TypeError, match="steps must be a list of one or more weights and"):
            call(wrong, residual=residual)
    with pytest.raises(ValueError, match=r"step 1 must be a weight, .* a tuple of length 4"):
        call([four[0], (*four[1], 3)], residual=residual)
    for wrong in ("swish", None, [], first):
        with pytest.raises(ValueError, match="step 0: activation must be 'swiglu', "):
            call([(None, four[0], wrong)])
    for wrong, named in (
        ([first, four[0]], "the weight of step 1 is"),
        (None, "the weight of step 1 is"),
        ((four[1][1], first), "the norm of step 1 is"),
    ):
        with pytest.raises(TypeError, match=f"matmul_chain: {named}"):
            call([four[0], wrong], residual=residual)
    for wrong, message in ((residual[:1], "residual has the shape"), (x, "residual has the shape")):
        with pytest.raises(ValueError, match=message) as refused:
            call(four, residual=wrong)
        assert refused.value.__notes__ == ["This is step 1 of matmul_chain."]
    with pytest.raises(ValueError, match="128"):
        call(four[::-1], residual=residual)
    with pytest.raises(TypeError, match="normed_matmul: residual is None"):
        jax_mx.normed_matmul(x, None, first, four[0])
    with pytest.raises(TypeError, match="normed_matmul: weight is None"):
        jax_mx.normed_matmul(x, x, None, four[0])


def test_one_call_launches_all_kernels_of_a_chain(monkeypatch):
    """Its launches are wired: what one writes, the next one reads."""
    monkeypatch.setattr(store, "get", stand_in)
    monkeypatch.setattr(store, "obstacle", lambda *_: "")
    monkeypatch.setenv("JAX_MX_ARCHS", "sm_90a")
    args, steps, _ = of_a_layer()
    assert wires_of(steps, *args)[0] == [
        # x, the residual; o; a norm and gates; down; a norm and q, k, v. 12 operands, 6 results.
        ("operands", [0, 2, 3, -1, -1, -1, -1]),
        ("results", [12]),
        ("operands", [12, 1, 4, 5, 6]),
        ("results", [13, 14]),
        ("operands", [13, 7, 8, -1, -1, -1, -1]),
        ("results", [15]),
        ("operands", [15, 14, 9, 10, 11]),
        ("results", [16, 17]),
    ]
    more, its_steps, _ = of_a_layer((8,))
    assert wires_of(its_steps, *more)[0][2:8] == [  # more rows have a kernel that norms
        ("operands", [12, 1, 4]),
        ("results", [13, 14]),
        ("operands", [13, 5, 6, -1, -1, -1, -1]),
        ("results", [15]),
        ("operands", [15, 7, 8, -1, -1, -1, -1]),
        ("results", [16]),
    ]
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    x, *rest = (jax.device_put(a, NamedSharding(mesh, P())) for a in args)
    with jax.set_mesh(mesh):  # each product is split as its weight is
        traced = jax.jit(chained(steps)).trace(x, *rest)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "steps = {" in wires_of(steps, *args)[1] and "steps = {" not in text


def wires_of(steps, *args):
    """The numbers of operands and results of each launch of a chain's call; the call's line."""
    traced = jax.jit(chained(steps)).trace(*args)
    line = call_attributes_in(traced.lower(lowering_platforms=("cuda",)).as_text())
    wires = re.findall(r"(operands|results) = dense<\[?([-\d, ]+)\]?>", line)
    return [(name, [int(n) for n in text.split(",")]) for name, text in wires], line


@on_hopper
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4_e2m1"])
def test_kernels_of_a_chain_wait_for_each_other(format, monkeypatch):
    """Many layers on each other have the bits of a call for each kernel."""
    few = ((1,), 4096, 14336), ((4,), 2048, 640), ((3,), 256, 28672)
    for lead, width, inner in (*few, ((8,), 4096, 14336), ((5,), 2048, 640), ((11,), 256, 28672)):
        (x, *rest), steps, _ = of_a_layer(lead, width, inner, format)
        captured = _ffi.counters()["captured"]
        run = of_many_layers(steps, 1, x, *rest)
        with monkeypatch.context() as patch:
            patch.setattr(matmul_chain.chain_p, "bind", step_by_step)
            count = 4 if lead[0] <= DIRECT else 6
            want = of_many_layers(steps, count, x, *rest)(x, *rest)
        for _ in range(5):
            poison_memory()
            for got, its in zip(run(x, *rest), want, strict=True):
                assert_bits_equal(got, its)
                assert np.isfinite(np.asarray(got, np.float32)).all()
        assert _ffi.counters()["captured"] > captured  # in CUDA graphs


def of_many_layers(steps, calls, *args):
    """A compiled program of many layers, each of which has so many calls of kernels.

    So many layers are written one after the other that XLA records them in CUDA graphs.
    """
    at_once = 8

    def layers(x, residual, *norms):
        def layer(now, _):
            y, total = chained(steps)(*now, *norms)
            y = jnp.tanh(jnp.pad(y, ((0, 0), (0, 32))))
            return (y, jnp.tanh(total)), None

        return jax.lax.scan(layer, (x, residual), None, length=40, unroll=at_once)[0]

    run = jax.jit(layers).lower(*args).compile()
    assert run.as_text().count(f'"{store.TARGET}"') == calls * at_once
    return run
