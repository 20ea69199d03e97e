"""Rounds of `moe`: what travels, how much of it, and the layer's results, whatever the routing."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_moe
from helpers import assert_refused, on_eight, with_table
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from moe_oracle import Layer
from test_moe_sharding import DOCS, operands, placed, with_gradients

import jax_mx
from jax_mx import MXFP8
from jax_mx.experts.costs import GATHER, ROUNDS, Costs
from jax_mx.experts.rounds import Limits, Round
from jax_mx.products.operand import Unquantized

T, K, OWN = 48, 3, 2  # of a shard
MESHES = {"8": ((1, 8), False), "4": ((1, 4), True), "2 x 4": ((2, 4), True), "1": ((1, 1), False)}


@functools.cache
def walked(mesh: str):
    """A program of tokens, ids and weights: what each round sends and returns, summed."""
    shape, check = MESHES[mesh]
    count = shape[0] * shape[1]
    kinds = (AxisType.Auto,) * 2
    grid = jax.make_mesh(shape, ("data", "e"), axis_types=kinds, devices=jax.devices()[:count])

    def one(trip, operands):
        x, weights = operands
        rows = trip.tokens(Unquantized(x, MXFP8, wanted=(True, False)))
        ids, scale = trip.choices(weights)
        is_one = ids >= 0
        number = is_one.sum(1, dtype=jnp.float32)
        named = (ids[:, :, None] == jnp.arange(OWN)).astype(jnp.float32).sum(1)
        y = trip.back(rows * number[:, None])
        choices = trip.back_choices(jnp.where(is_one, scale * (ids + 1).astype(scale.dtype), 0))
        sums = jnp.einsum("re,rd->ed", named, rows)
        too_many = (is_one.sum() > trip.most).astype(jnp.int32)[None]
        return y, choices, sums, too_many, jnp.ones(1, jnp.int32)

    def shard(x, ids, weights):
        first = Round.first("e", "floats", ids, OWN)
        result = one(first, (x, weights))
        return first.rest(one, result, (x, weights))

    rows = P(("data", "e"))
    mapped = jax.shard_map(shard, mesh=grid, in_specs=rows, out_specs=rows, check_vma=check)
    return jax.jit(mapped), count, shape


def routings(count: int, experts: int, seed: int, routing: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (count * T, K)
    if routing == "even":
        return (np.arange(count * T)[:, None] + OWN * np.arange(K)).astype(np.int32) % experts
    if routing == "one":
        return np.full(shape, seed % experts, np.int32)
    if routing == "none":
        return np.full(shape, -1, np.int32)
    chances = rng.random(experts) ** rng.integers(1, 9)
    ids = rng.choice(experts, shape, p=chances / chances.sum())
    return np.where(rng.random(shape) < 0.1, rng.choice([-7, experts, 2**30]), ids).astype(np.int32)


@pytest.mark.parametrize(
    "mesh", ["2 x 4", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("8", "4", "1"))]
)
@given(seed=st.integers(0, 99), routing=st.sampled_from(["even", "one", "none", "any", "any"]))
def test_each_row_travels_once_to_each_shard(mesh, seed, routing):
    """Exact integers come back: nothing is lost, sent twice, or more than there are slots for."""
    call, count, shape = walked(mesh)
    experts = OWN * shape[1]
    rng = np.random.default_rng(seed)
    ids = routings(count, experts, seed, routing)
    x = rng.integers(-8, 9, (count * T, 4)).astype(np.float32)
    weights = rng.integers(0, 9, ids.shape).astype(np.float32)
    y, choices, sums, too_many, rounds = map(np.asarray, call(x, ids, weights))
    is_one = (ids >= 0) & (ids < experts)
    np.testing.assert_array_equal(y, x * is_one.sum(1)[:, None])
    np.testing.assert_array_equal(choices, np.where(is_one, weights * (ids % OWN + 1), 0))
    pairs = zip(ids.reshape(shape[0], -1, K), x.reshape(shape[0], -1, 4), strict=True)
    want = [(shard_ids == e).sum(1) @ tokens for shard_ids, tokens in pairs for e in range(experts)]
    np.testing.assert_array_equal(sums, want)
    assert not too_many.any()
    rounds = rounds.reshape(shape)
    assert (rounds == rounds[:, :1]).all() and (routing != "even" or rounds.max() == 1)


# ---- the layer ---
ORACLES = {  # recipe, its options, devices
    "gpt-oss": (
        "mxfp4",
        {"activation": "gpt_oss", "interleaved": True, "residuals": "inputs", "wire": "floats"},
        4,
    ),
    "mxfp8": ("mxfp8", {"wire": "floats"}, 8),
    "hybrid": ("hybrid", {"residuals": "floats", "wire": "floats"}, 2),
    "windows": ("windows", {"activation": "geglu", "wire": "floats"}, 2),
    "bf16": ("bf16", {"residuals": "floats"}, 4),
    "wgrad": ("wgrad in bf16", {"activation": "reglu2", "wire": "floats"}, 4),
}


def against_the_oracle(name: str, devices: int, routings: tuple[str, ...]) -> None:
    """Values and every gradient, biases too, of one program, which serves all these routings."""
    recipe, options, _ = ORACLES[name]
    mesh = jax.make_mesh(
        (devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    experts = max(8, devices)
    rng = np.random.default_rng(5)
    scale = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    args = [scale(64, 64), None, rng.random((64, 2)).astype(np.float32)]
    args += [scale(experts, 64, 256) / 8, scale(experts, 128, 64) / 8]
    args += [scale(experts, 256), scale(experts, 64), scale(64, 64)]
    options = {"recipe": test_moe.RECIPES[recipe], **options}
    call = with_gradients(expert_axis="expert", way="rounds", **options)
    oracle = Layer(**{key: v for key, v in options.items() if key != "wire"})
    for routing in routings:
        args[1] = rng.integers(-1, experts + 1, (64, 2)).astype(np.int32)
        if routing == "even":
            args[1] = (np.arange(128, dtype=np.int32) % experts).reshape(64, 2)
        elif routing != "any":
            args[1][:] = 5 if routing == "one" else -1
        with jax.set_mesh(mesh):
            got = call(*placed(args, mesh, ("expert",)))
        y, gradients = oracle(*test_moe.exact(args))
        for i, (a, b) in enumerate(zip(got, (y, *gradients), strict=True)):
            # Rounds part tokens among blocks in another way, which few bits and rotations show.
            apart = routing == "one" and i in (3, 4) and recipe == "mxfp4"
            test_moe.assert_close(a, b, 0.3 if apart else 4e-3, f"{routing}, result {i}")
    assert call._cache_size() == 1  # so memory is that of an even routing


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.thorough) for n in ORACLES])
def test_the_oracle_in_float64(name):
    against_the_oracle(name, ORACLES[name][2], ("even", "any", "one", "none"))


def test_all_tokens_of_eight_devices_to_one_expert():
    """One device's result, in further rounds of the program of any other routing."""
    x, _, weights, w1, w2, *_ = operands()
    ids = jnp.full((64, 2), 5, jnp.int32)
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    layer = functools.partial(jax_mx.moe, recipe="bf16")
    want = jax.jit(layer)(x, ids, weights, w1, w2)
    with jax.set_mesh(mesh):
        call = jax.jit(functools.partial(layer, expert_axis="expert", way="rounds"))
        got = call(*placed((x, ids, weights, w1, w2, x, x, x), mesh, ("expert",))[:5])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mxfp8", "gpt-oss"])
def test_the_oracle_on_sixteen_devices(name):
    code = """
        from test_rounds import against_the_oracle
        against_the_oracle(sys.argv[2], 16, ("even", "any", "one"))
    """
    on_eight(code, name, devices=16)


@functools.cache
def split(shape: tuple[int, int], way: str | None):
    """The layer with its gradients on so many shards of data and of experts."""
    devices = jax.devices()[: shape[0] * shape[1]]
    axes = ((AxisType.Auto, AxisType.Explicit)[shape[0] > 1],) * 2
    mesh = jax.make_mesh(shape, ("data", "expert"), axis_types=axes, devices=devices)
    return with_gradients(expert_axis="expert", way=way, wire="floats"), mesh


@pytest.mark.thorough
@settings(max_examples=24)
@given(
    seed=st.integers(0, 999),
    routing=st.sampled_from(["even", "one", "none", "any", "any"]),
    shape=st.sampled_from([(1, 2), (1, 8), (2, 4), (4, 2)]),
)
def test_any_routing_on_any_mesh(seed, routing, shape):
    """One device's results, of the layer and of all its gradients."""
    args = list(operands(seed))
    rows = routings(-(-64 // T), 8, seed, routing)[:64, :2]
    args[1] = jnp.asarray(rows)
    want = of_one()(*args)
    call, mesh = split(shape, "rounds")
    with jax.set_mesh(mesh):
        got = call(*placed(args, mesh, ("data", "expert")))
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_allclose(
            a, b, rtol=1e-4, atol=1e-4 * (1 + np.abs(b).max()), err_msg=f"result {i}"
        )


@functools.cache
def of_one():
    """The layer with its gradients on one device."""
    return with_gradients()


# ---- how much moves, and how many slots there are ---
TOKENS, WIDTH, INNER = 16384, 2048, 512


def lowered(e: int, k: int, way: str | None, experts: int = 64, passes: str = "forward") -> str:
    """The layer's program of e devices, none of which has to be there."""
    mesh = AbstractMesh((e,), ("expert",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, P("expert"))

    def aval(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    rows = e * TOKENS
    args = [aval(rows, WIDTH), aval(rows, k, dtype=jnp.int32), aval(rows, k, dtype=jnp.float32)]
    args += [aval(experts, WIDTH, 2 * INNER), aval(experts, INNER, WIDTH)]

    def call(x, ids, weights, *stacks):
        return jax_mx.moe(x, ids, weights, *stacks, expert_axis="expert", way=way)

    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(call).trace(*args).lower(lowering_platforms=("cpu",)).as_text()


# e and k: the way that is taken, bytes of tokens that arrive on a device, slots
CELLS = {
    (2, 1): ("rounds", 19464192, 18432),
    (2, 2): ("rounds", 29365248, 36864),
    (2, 8): ("rounds", 34603008, 147456),
    (4, 1): ("rounds", 29196288, 18432),
    (4, 2): ("rounds", 51448320, 36864),
    (4, 8): ("rounds", 103809024, 147456),
    (8, 1): ("rounds", 34062336, 18432),
    (8, 2): ("rounds", 64458240, 36864),
    (8, 8): ("rounds", 185095680, 147456),
    (16, 1): ("rounds", 36495360, 18432),
    (16, 2): ("rounds", 71470080, 36864),
    (16, 8): ("rounds", 246597120, 147456),
    (32, 1): ("rounds", 39806976, 19456),
    (32, 2): ("rounds", 74899968, 36864),
    (32, 8): ("rounds", 285457920, 147456),
    (64, 1): ("rounds", 42577920, 20480),
    (64, 2): ("rounds", 80898048, 38912),
    (64, 8): ("rounds", 306561024, 147456),
}


def cell(e: int, k: int, way: str | None = None) -> tuple[str, int, int]:
    """The same, of the lowered program."""
    text = lowered(e, k, way)
    moves = re.findall(r"(all_to_all|all_gather)\"[^\n]*-> tensor<(\d+)x(\d+)xui8>", text)[:2]
    size = sum(int(rows) * int(width) for _, rows, width in moves) * (e - 1) // e
    taken = ROUNDS if moves[0][0] == "all_to_all" else GATHER
    slots = max(map(int, re.findall(rf"tensor<(\d+)x{INNER}xf8E4M3FN>", text)))
    return taken, size, slots


@pytest.mark.parametrize(
    ("e", "k"),
    [pytest.param(*at, marks=[pytest.mark.thorough] * (at != (64, 2))) for at in CELLS],
)
def test_what_arrives(e, k):
    """By rounds of an even routing a quarter more, at most, than the devices that want a token."""
    assert cell(e, k) == CELLS[e, k]
    misses = np.prod([(64 - 64 // e - i) / (64 - i) for i in range(k)])
    distinct = (e - 1) * (1 - misses)  # remote devices of a token
    _, arrives, slots = CELLS[e, k] if CELLS[e, k][0] == ROUNDS else cell(e, k, ROUNDS)
    assert arrives <= 1.25 * distinct * TOKENS * WIDTH * 33 / 32
    assert slots <= 1.25 * TOKENS * k


def table() -> list[str]:
    """The part of docs/sharding.md on many devices."""
    lines = ["| e | " + " | ".join(f"k = {k}" for k in (1, 2, 8)) + " | all gather |"]
    lines.append("|---|---|---|---|---|")
    for e in (2, 4, 8, 16, 32, 64):
        cells = [CELLS[e, k] for k in (1, 2, 8)]
        texts = [f"{way}: {size / 1e6:.1f} MB, {slots:,} slots" for way, size, slots in cells]
        size = (e - 1) * TOKENS * WIDTH * 33 / 32e6
        lines.append(f"| {e} | {' | '.join(texts)} | {size:,.1f} MB, {e * TOKENS:,} k slots |")
    return lines


def test_the_table_is_current():
    text = DOCS.read_text()
    assert text == with_table(text, "rounds", table()), "run python tests/test_rounds.py"


@pytest.mark.parametrize("k", [1, 2, 8])
def test_slots_do_not_grow_with_devices(k):
    """Nor do rows with more of them than a token goes to."""
    slots = {e: e * Limits.of(TOKENS, k, 64, e).choices for e in (4, 64)}
    assert slots[64] <= 1.2 * slots[4]
    for e in (2, 4, 8, 16, 32, 64):
        limits = Limits.of(TOKENS, k, 64, e)
        assert limits.rows <= TOKENS and e * limits.choices <= 1.25 * TOKENS * k + 8 * e


@pytest.mark.parametrize(("tokens", "grows"), [(1024, 1.48), (4096, 1.23), (16384, 1.06)])
def test_the_fullest_pair_bounds_slots_of_few_tokens(tokens, grows):
    """As docs/sharding.md says; from 16,384 tokens on slots grow by less than 1.2."""
    limits = {e: Limits.of(tokens, 2, 64, e) for e in (4, 64)}
    assert 64 * limits[64].choices <= grows * 4 * limits[4].choices
    if tokens > 1024:
        return
    chances, fullest = np.random.default_rng(0).random((64 * tokens, 64)), {}
    ids = np.argpartition(chances, 2, axis=1)[:, :2].reshape(64, -1)
    for e in (4, 64):  # of as many devices, each by itself
        fullest[e] = max(np.bincount(shard_ids // (64 // e)).max() for shard_ids in ids[:e])
        assert fullest[e] <= limits[e].choices  # one round holds a random routing
    assert 64 * fullest[64] > 1.5 * 4 * fullest[4]  # as any dense round must have
    tight = 1.2 * 4 * limits[4].choices / 64
    over = np.mean([np.bincount(shard_ids, minlength=64) > tight for shard_ids in ids])
    assert 0.005 < over < 0.02  # so a round of 1.2 would not be the only one


@pytest.mark.thorough
def test_temporaries_do_not_grow_with_devices():
    """XLA compiles the layer, forward and backward, and says what it plans."""
    code = """
        k = 2
        for e in (4, 64):
            kinds, own = (AxisType.Auto,), jax.devices()[:e]
            mesh = jax.make_mesh((e,), ("expert",), devices=own, axis_types=kinds)
            where = NamedSharding(mesh, P("expert"))
            aval = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype, sharding=where)
            rows = 16384 * e
            args = [aval(rows, 64), aval(rows, k, dtype=jnp.int32)]
            args += [aval(rows, k, dtype=jnp.float32), aval(64, 64, 64), aval(64, 32, 64)]
            def both(x, ids, weights, *w):
                how = {"expert_axis": "expert", "way": "rounds"}
                f = lambda x, *w: jax_mx.moe(x, ids, weights, *w, **how)
                y, pull = jax.vjp(f, x, *w)
                return y, pull(y)
            with jax.set_mesh(mesh):
                print(jax.jit(both).lower(*args).compile().memory_analysis().temp_size_in_bytes)
    """
    (out,) = on_eight(code, devices=64)
    four, many = map(int, out.split())
    assert many <= 1.2 * four


# ---- which way ---
def test_the_cheaper_way_is_taken_and_explained():
    """All gather where tokens are few or want most shards; else they travel."""
    assert Costs.of(16384, 2, 64, 64, 7168, "mx").least == ROUNDS
    assert Costs.of(16384, 1, 8, 4, 7168, "mx").least == ROUNDS
    assert Costs.of(16, 8, 64, 8, 7168, "mx").least == GATHER
    assert Costs.of(64, 2, 8, 4, 7168, "mx").least == GATHER
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    args = [jnp.zeros((64, 64)), jnp.zeros((64, 2), jnp.int32), jnp.zeros((64, 2))]
    args += [jnp.zeros((8, 64, 64)), jnp.zeros((8, 32, 64))]
    with jax.set_mesh(mesh):
        for way, said in (("rounds", "tokens travel"), (None, "all shards gather")):
            call = functools.partial(jax_mx.moe, expert_axis="expert", way=way)
            (note, *_) = jax_mx.explain(jax.jit(call), *args).notes
            assert note.startswith("moe over 'expert': " + said) and "MB arrive" in note
        bad = functools.partial(jax_mx.moe, *args, expert_axis="expert", way="fast")
        assert_refused(bad, ValueError, "moe: way")


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text(), "rounds", table()))
