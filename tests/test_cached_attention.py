"""`CachedAttention` in `matmul_chain`: against float64, in loops, derivatives, errors, launches."""

import functools
import re

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

BF16 = jnp.bfloat16


def arrays(lead=(2,), cache=(2, 24, 2, 64), heads=4, dtype=BF16, width=128):
    """A layer's x, residual and norm; what its attention takes; the weights around that."""
    rng, (batch, length, groups, depth) = np.random.default_rng(3), cache

    def floats(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    def weight(*shape):
        w = jnp.asarray(rng.normal(size=shape) * shape[1] ** -0.5, BF16)
        return jax_mx.quantize(w, "mxfp8_e4m3")

    angles = rng.uniform(0, 6, (batch, depth // 2))
    position = jnp.asarray(rng.integers(0, length, batch), jnp.int32)
    turn = jnp.float32(np.cos(angles)), jnp.float32(np.sin(angles))
    its = floats(*cache), floats(*cache), position, *turn
    weights = []
    if heads * depth % 32 == 0:
        weights = weight((heads + 2 * groups) * depth, width), weight(width, heads * depth)
    return (floats(*lead, width), floats(*lead, width), floats(width)), its, weights


def defined(x, keys, values, position, cos, sin, scale):
    """The definition in float64: y, and the keys and values with the token's own."""
    x, keys, values, cos, sin = (np.array(a, np.float64) for a in (x, keys, values, cos, sin))
    batch, _, groups, depth = keys.shape
    rows = x.reshape(batch, -1, depth)
    heads = rows.shape[1] - 2 * groups
    a, b = np.split(rows[:, : heads + groups], 2, -1)
    c, s = cos[:, None], sin[:, None]
    turned = np.concatenate([a * c - b * s, b * c + a * s], -1)
    y = np.zeros((batch, heads, depth))
    for row, end in enumerate(np.array(position)):
        keys[row, end], values[row, end] = turned[row, heads:], rows[row, heads + groups :]
        for head in range(heads):
            of = head // (heads // groups)
            scores = keys[row, : end + 1, of] @ turned[row, head] * scale
            weights = np.exp(scores - scores.max())
            y[row, head] = weights @ values[row, : end + 1, of] / weights.sum()
    return y.reshape(batch, -1), keys, values


def attending(x, *its, **options):
    return jax_mx.matmul_chain(x, [jax_mx.CachedAttention(*its, **options)])


@pytest.mark.parametrize(
    ("lead", "cache", "heads", "dtype"),
    [
        ((3,), (3, 20, 2, 64), 6, BF16),
        ((2, 1), (2, 9, 1, 128), 8, BF16),
        ((), (1, 33, 4, 16), 4, jnp.float32),
        ((1, 2), (2, 1, 2, 128), 32, BF16),  # of more heads than the kernel takes
        ((2,), (2, 5, 3, 6), 3, jnp.float16),
    ],
)
def test_it_attends_as_defined(lead, cache, heads, dtype):
    _, its, _ = arrays(lead, cache, heads, dtype)
    _, _, groups, depth = cache
    x = jnp.asarray(
        np.random.default_rng(1).normal(size=(*lead, (heads + 2 * groups) * depth)), dtype
    )
    ends = np.arange(cache[1])[None, :, None, None] > np.array(its[2])[:, None, None, None]
    poisoned = [jnp.where(ends, jnp.nan, a).astype(dtype) for a in its[:2]]
    for scale in (None, 0.25):
        y, nothing, [cached] = jax.jit(functools.partial(attending, scale=scale))(
            x, *poisoned, *its[2:]
        )
        want = defined(x, *its, depth**-0.5 if scale is None else scale)
        assert nothing is None and y.shape == (*lead, heads * depth) and y.dtype == dtype
        eps = float(jnp.finfo(dtype).eps)
        rows = np.asarray(y, np.float64).reshape(cache[0], -1)
        np.testing.assert_allclose(rows, want[0], rtol=4 * eps, atol=8 * eps)
        for got, before, expected in zip(cached, poisoned, want[1:], strict=True):
            at_token = np.arange(cache[1]) == np.array(its[2])[:, None]
            assert_bits_equal(np.asarray(got)[~at_token], np.asarray(before)[~at_token])
            expected = np.asarray(expected[at_token], np.float64)
            np.testing.assert_allclose(
                np.asarray(got, np.float64)[at_token], expected, rtol=eps, atol=eps
            )


def test_tokens_one_by_one_are_causal_attention():
    """A loop over tokens, whose cache it carries, against JAX's own attention to all of them."""
    batch, length, heads, groups, depth = 2, 12, 4, 2, 64
    x = jax.random.normal(jax.random.key(0), (length, batch, (heads + 2 * groups) * depth))
    half = jnp.arange(depth // 2) / depth

    def angles_of(positions):
        angles = positions[..., None].astype(jnp.float32) * 10.0**-half
        return jnp.cos(angles), jnp.sin(angles)

    def step(cache, token):
        x, position = token
        y, _, [cache] = attending(x, *cache, position, *angles_of(position))
        return cache, y

    empty = (jnp.full((batch, length, groups, depth), jnp.nan),) * 2
    _, got = jax.lax.scan(step, empty, (x, jnp.arange(length)))
    q, k, v = jnp.split(x.reshape(length, batch, -1, depth), [heads, heads + groups], 2)
    cos, sin = (a[:, None, None] for a in angles_of(jnp.arange(length)))

    def turned(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    by_entry = (a.swapaxes(0, 1) for a in (turned(q), turned(k), v))
    want = jax.nn.dot_product_attention(*by_entry, is_causal=True)
    np.testing.assert_allclose(got, want.swapaxes(0, 1).reshape(got.shape), rtol=1e-4, atol=1e-5)


def layer(args, its, weights, at_once=True):
    """A norm, a product, attention and a product: in a chain, or one after the other."""
    (x, residual, norm), (qkv, o) = args, weights
    attend = jax_mx.CachedAttention(*its)
    if at_once:
        return jax_mx.matmul_chain(x, [(norm, qkv), attend, o], residual=residual)
    y, residual = jax_mx.normed_matmul(x, residual, norm, qkv)
    y, _, caches = jax_mx.matmul_chain(y, [attend])
    return jax_mx.einsum("...k,nk->...n", y, o, recipe="bf16"), residual, caches


@pytest.mark.parametrize("lead", [(2,), (2, 1)])
def test_a_chain_is_its_steps(lead):
    """Values, derivatives in both modes, and under vmap."""
    args, its, weights = arrays(lead)
    text = str(jax.make_jaxpr(lambda *args: layer(args, its, weights))(*args))
    assert text.count("= mx_chain[") == 1
    ways = [functools.partial(layer, weights=weights, at_once=at_once) for at_once in (True, False)]
    for a, b in zip(*(jax.tree.leaves(way(args, its)) for way in ways), strict=True):
        assert_bits_equal(a, b)

    def sums(way, args, keys, values, *rest):
        return sum(
            a.astype(jnp.float32).sum() for a in jax.tree.leaves(way(args, (keys, values, *rest)))
        )

    grads = [jax.grad(functools.partial(sums, way), (0, 1, 2, 4, 5))(args, *its) for way in ways]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        assert_bits_equal(a, b)
    moves = [jax.jvp(lambda args, way=way: way(args, its), (args,), (args,))[1] for way in ways]
    for a, b in zip(*map(jax.tree.leaves, moves), strict=True):
        assert_bits_equal(a, b)
    many = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), (args, its))
    for way in ways:
        batched = jax.tree.leaves(jax.vmap(way)(*many))
        for a, b in zip(batched, jax.tree.leaves(way(args, its)), strict=True):
            assert_bits_equal(a[0], b)


@pytest.mark.parametrize("within", ["jit", "checkpoint", "scan"])
def test_derivatives_where_all_arrays_are_traced(within):
    """A rule that is run later may keep none of the trace's arrays: weights, positions."""
    args, its, weights = arrays()

    def loss(args, its, weights):
        return sum(a.astype(jnp.float32).sum() for a in jax.tree.leaves(layer(args, its, weights)))

    def over_tokens(args, its, weights):
        every = jax.tree.map(lambda a: jnp.stack([a, a]), (its, weights))
        add = lambda total, one: (total + loss(args, *one), None)  # noqa: E731
        return jax.lax.scan(add, 0.0, every)[0] / 2

    way = {"jit": jax.jit(loss), "checkpoint": jax.checkpoint(loss), "scan": over_tokens}[within]
    want = jax.grad(loss)(args, its, weights)
    for outer in (lambda f: f, jax.jit):
        got = outer(jax.grad(way))(args, its, weights)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            assert_bits_equal(a, b)


def test_gradients_meet_nothing_behind_the_token():
    _, (keys, values, *rest), _ = arrays(cache=(2, 24, 2, 96), dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(0), (2, 8 * 96))
    behind = jnp.arange(24)[:, None, None] > rest[0][:, None, None, None]
    poisoned = [jnp.where(behind, jnp.nan, a) for a in (keys, values)]
    grad = jax.grad(lambda x, *its: (attending(x, *its)[0] ** 2).sum(), (0, 1))
    clean, got = grad(x, keys, values, *rest), grad(x, *poisoned, *rest)
    for a, b in zip(got, clean, strict=True):
        assert_bits_equal(a, b)


def test_positions_of_64_bits_end_at_the_cache():
    _, its, _ = arrays((1,), (1, 24, 2, 64))
    x = jnp.ones((1, 8 * 64), BF16)
    want = attending(x, *its[:2], 23, *its[3:])
    for position in (np.int64(2**40), np.array([2**63 - 1]), 2**40, np.uint64(2**32 + 3), 24):
        got = attending(x, *its[:2], position, *its[3:])
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            assert_bits_equal(a, b)
    ways = (attending(x, *its[:2], position, *its[3:]) for position in (np.int8(-5), 0))
    for a, b in zip(*map(jax.tree.leaves, ways), strict=True):
        assert_bits_equal(a, b)


def test_a_chain_whose_attention_has_no_kernel():
    args, its, weights = arrays(cache=(2, 24, 2, 96))
    text = str(jax.make_jaxpr(lambda *args: layer(args, its, weights))(*args))
    assert "op='attention'" not in text
    ways = (layer(args, its, weights, at_once) for at_once in (True, False))
    for a, b in zip(*map(jax.tree.leaves, ways), strict=True):
        assert_bits_equal(a, b)


def test_devices_have_heads_of_their_own():
    args, its, weights = arrays(cache=(2, 24, 4, 64), heads=8)
    want = jax.tree.leaves(layer(args, its, weights))
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P(None, None, "tensor")), NamedSharding(mesh, P())
    placed = [jax.device_put(a, split) for a in its[:2]]
    rest = [jax.device_put(a, whole) for a in its[2:]]
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(layer, weights=weights))(args, (*placed, *rest))
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        a, b = (np.asarray(z, np.float32) for z in (a, b))
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("axis", [None, "batch", "heads"])
def test_explicit_meshes(axis):
    """Caches that lie whole, or split by rows or heads."""
    _, its, _ = arrays(cache=(4, 24, 4, 64), heads=8)
    x = jax.random.normal(jax.random.key(0), (4, 16 * 64)).astype(BF16)
    want = jax.tree.leaves(attending(x, *its[:2], 5, its[3][0], its[4][0]))
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    specs = {None: (P(), P()), "batch": (P("d"), P("d")), "heads": (P(), P(None, None, "d"))}[axis]
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((x, *its[:2]), (specs[0], specs[1], specs[1]), strict=True)
    ]
    with jax.set_mesh(mesh):
        calls = [placed] if axis else [placed, [x, *its[:2]]]
        for arrays_ in calls:
            got = attending(*arrays_, 5, its[3][0], its[4][0])
            for a, b in zip(jax.tree.leaves(got), want, strict=True):
                assert_bits_equal(a, b)


def test_what_it_refuses():
    _, (keys, values, position, cos, sin), _ = arrays()
    x = jnp.ones((2, 8 * 64), BF16)
    good = {"keys": keys, "values": values, "position": position, "cos": cos, "sin": sin}

    def call(x=x, **wrong):
        jax_mx.matmul_chain(x, [jax_mx.CachedAttention(**{**good, **wrong})])

    call()
    call(position=3, cos=cos[0], sin=sin[:1])
    for wrong, error, message in (
        (
            {"keys": keys[0]},
            ValueError,
            r"step 0: keys must be \(B, L, G, D\) with an even D and no zeros, got ",
        ),
        ({"keys": jnp.ones((2, 3, 1, 5))}, ValueError, "with an even D and no zeros, got "),
        ({"values": values[:, :5]}, ValueError, "values must be bfloat16 .* as keys are, got "),
        ({"values": values.astype(jnp.float32)}, ValueError, "as keys are, got float32"),
        (
            {"position": 3.0},
            TypeError,
            r"position must be an integer or integers \(2,\), got float",
        ),
        ({"position": None}, TypeError, r"integers \(2,\), got None"),
        ({"position": 2**70}, TypeError, "position must be an integer or integers"),
        ({"scale": "1"}, TypeError, "scale must be a finite number or None, got '1'"),
        ({"scale": np.inf}, ValueError, "scale must be a finite number or None, got inf"),
        ({"x": jnp.bfloat16(1)}, ValueError, r"x \(\) has 1; each row"),
        ({"position": position[:1]}, ValueError, r"integers \(2,\), got int32 \(1,\)"),
        (
            {"cos": cos[:, :5]},
            ValueError,
            r"cos must be \(32,\) or \(2, 32\) for keys .*, got \(2, 5\)",
        ),
        ({"sin": None}, TypeError, "sin is None"),
        ({"keys": "k"}, TypeError, "keys is"),
        (
            {"x": x[:1]},
            ValueError,
            r"keys have 2 rows, x \(1, 512\) has 1; each row of x is a token",
        ),
        (
            {"x": x[:, :-1]},
            ValueError,
            r"x has 511 columns; .* it needs \(H \+ 4\) \* 64, for H heads",
        ),
        ({"x": x[:, : 4 * 64]}, ValueError, "x has 256 columns"),
        ({"x": x[:, : 7 * 64]}, ValueError, "heads of queries, a multiple of 2"),
    ):
        with pytest.raises(error, match=f"matmul_chain: step 0: .*{message}|{message}"):
            call(**wrong)


def test_the_call_writes_caches_where_they_lie(monkeypatch):
    """Its launches are wired, and the results that replace caches are named to XLA."""
    monkeypatch.setattr(store, "get", stand_in)
    monkeypatch.setattr(store, "obstacle", lambda *_: "")
    monkeypatch.setenv("JAX_MX_ARCHS", "sm_90a")
    args, its, weights = arrays()

    def text_of(f, *args):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    text = text_of(functools.partial(layer, weights=weights), args, its)
    wires = re.findall(r"(operands|results) = dense<\[?([-\d, ]+)\]?>", call_attributes_in(text))
    # x, residual, norm, codes, scales, keys, values, position, cos, sin, codes, scales.
    assert [[int(n) for n in numbers.split(",")] for _, numbers in wires] == [
        [0, 1, 2, 3, 4],
        [12, 13],
        [12, 5, 6, 7, 8, 9],
        [14, 15, 16],
        [14, 10, 11, -1, -1, -1, -1],
        [17],
    ]
    aliases = r"output_tuple_indices = \[(\d+)\],\s*operand_index = (\d+)"
    assert re.findall(aliases, text) == [("3", "5"), ("4", "6")]
    x = jnp.ones((2, 8 * 64), BF16)
    assert re.findall(aliases, text_of(attending, x, *its)) == [("1", "1"), ("2", "2")]


@on_hopper
@pytest.mark.parametrize(("rows", "depth"), [(1, 128), (3, 64), (4, 128), (8, 64), (13, 128)])
def test_kernels_of_a_layer_wait_for_each_other(rows, depth, monkeypatch):
    """Many tokens through two layers on each other have the bits of a call for each kernel."""
    args, its, weights = arrays((rows,), (rows, 40, 2, depth), 8, width=512)
    x, residual, norm = args

    def tokens(x, residual, *caches, at_once=True):
        del at_once  # of the two ways, which are traced each for itself

        def token(carry, position):
            x, residual, caches = carry
            steps = []
            for cache in caches:
                attend = jax_mx.CachedAttention(*cache, position, *its[3:])
                steps += [(norm, weights[0]), attend, weights[1]]
            y, total, caches = jax_mx.matmul_chain(x, steps, residual=residual)
            return (jnp.tanh(y), jnp.tanh(total), caches), y

        return jax.lax.scan(token, (x, residual, [*caches]), jnp.arange(40), unroll=8)

    caches = [(a[0], a[1]) for a in (its, (its[1], its[0]))]
    captured = _ffi.counters()["captured"]
    run = jax.jit(tokens).lower(x, residual, *caches).compile()
    assert run.as_text().count(f'"{store.TARGET}"') == 8
    with monkeypatch.context() as patch:
        patch.setattr(matmul_chain.chain_p, "bind", step_by_step)
        by_steps = jax.jit(functools.partial(tokens, at_once=False))
        want = by_steps.lower(x, residual, *caches).compile()
    assert want.as_text().count(f'"{store.TARGET}"') == 8 * (6 if rows <= DIRECT else 8)
    want = jax.tree.leaves(want(x, residual, *caches))
    for _ in range(5):
        poison_memory()
        for a, b in zip(jax.tree.leaves(run(x, residual, *caches)), want, strict=True):
            assert_bits_equal(a, b)
            assert np.isfinite(np.asarray(a, np.float32)).all()
    assert _ffi.counters()["captured"] > captured  # in CUDA graphs


@on_hopper
def test_one_cache_in_two_steps_is_two_results():
    """Neither step sees what the other one writes, and the caller's cache stays."""
    args, its, weights = arrays((1,), (1, 40, 2, 128), 8, width=512)
    (x, residual, norm), (qkv, o) = args, weights
    keys = jnp.array(its[0])

    def f(x, keys, values, position, at_once=True):
        attends = [
            jax_mx.CachedAttention(keys, values, p, *its[3:]) for p in (position, position + 1)
        ]
        steps = [(norm, qkv), attends[0], o, (norm, qkv), attends[1]]
        if at_once:
            return jax_mx.matmul_chain(x, steps, residual=residual)
        y, total, [first] = jax_mx.matmul_chain(x, steps[:3], residual=residual)
        y, total, [second] = jax_mx.matmul_chain(y, steps[3:], residual=total)
        return y, total, [first, second]

    ways = [jax.jit(functools.partial(f, at_once=at_once)) for at_once in (True, False)]
    got, want = (jax.tree.leaves(way(x, keys, its[1], 17)) for way in ways)
    for a, b in zip(got, want, strict=True):
        assert_bits_equal(a, b)
    assert_bits_equal(keys, its[0])
