"""`Groups`: against a loop, for every routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_refused
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx.formats.groups import clamped
from jax_mx.products.groups import ranks_by_counting, ranks_by_sorting
from jax_mx.quantizing.reference import rows_of

FIELDS = ("rows", "sizes", "starts", "counts", "slots", "dropped")


def by_loop(experts, num_experts, align):
    """The fields of `Groups`, one choice after the other."""
    tokens, k = experts.shape
    chosen = [[] for _ in range(num_experts)]
    slots = np.full((tokens, k), -1)
    for t in range(tokens):
        for j in range(k):
            if 0 <= experts[t, j] < num_experts:
                chosen[experts[t, j]].append((t, j))
    counts = np.array([len(tokens) for tokens in chosen])
    sizes = -(-counts // align) * align
    starts = np.cumsum([0, *sizes])[:-1]
    most = tokens * k + min(num_experts, tokens * k) * (align - 1)
    rows = np.full(-(-most // align) * align, -1)
    for tokens_of_expert, start in zip(chosen, starts, strict=True):
        for i, (t, j) in enumerate(tokens_of_expert):
            rows[start + i], slots[t, j] = t, start + i
    return rows, sizes, starts, counts, slots, tokens * k - counts.sum()


def assert_equal(groups, want):
    for name, expected in zip(FIELDS, want, strict=True):
        got = getattr(groups, name)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, expected, err_msg=name)


def routing(rng, tokens, k, num_experts):
    """Experts of some skew, of which some are none."""
    if rng.random() < 0.2:
        return np.full((tokens, k), rng.integers(num_experts), np.int32)
    low, high = (-1, num_experts + 1) if rng.random() < 0.5 else (0, num_experts)
    return np.minimum(
        rng.integers(low, high, (tokens, k)), rng.integers(low, high, (tokens, k))
    ).astype(np.int32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [ranks_by_counting, ranks_by_sorting])
@pytest.mark.parametrize("choices", [0, 1, 255, 256, 257, 1000])
def test_ways_to_rank(way, choices):
    """GPUs count, other devices sort; each way runs here."""
    for seed, number in enumerate((1, 7, 300)):
        experts = routing(np.random.default_rng(seed), choices, 1, number)[:, 0]
        experts = np.where(experts < 0, number, np.minimum(experts, number))
        counts, earlier = np.zeros(number + 1, np.int32), np.zeros(choices, np.int32)
        for i, expert in enumerate(experts):
            earlier[i] = counts[expert]
            counts[expert] += 1
        got, total = jax.jit(way, static_argnums=1)(jnp.asarray(experts), number)
        assert got.dtype == total.dtype == np.int32
        is_one = experts < number
        np.testing.assert_array_equal(got[is_one], earlier[is_one])
        np.testing.assert_array_equal(total, counts[:number])


def test_memory_does_not_grow_with_experts():
    """262,144 choices take 4 bytes each in every array; their comparisons with experts took GB."""
    experts = jax.ShapeDtypeStruct((65536, 4), jnp.int32)
    program = jax.jit(lambda e: jax_mx.Groups.from_experts(e, 1024)).lower(experts).compile()
    memory = program.memory_analysis().temp_size_in_bytes
    assert memory < 16 * 4 * 65536 * 4 or jax.default_backend() != "cpu"


@pytest.mark.parametrize("align", [1, 32, 128])
@pytest.mark.parametrize("shape", [(0, 2, 4), (1, 1, 1), (7, 2, 300), (300, 4, 8), (129, 2, 3)])
def test_from_experts(shape, align):
    *size, num_experts = shape
    for seed in range(3):
        experts = routing(np.random.default_rng(seed), *size, num_experts)
        groups = jax_mx.Groups.from_experts(experts, num_experts, align=align)
        assert_equal(groups, by_loop(experts, num_experts, align))
        assert groups.align == align
        assert groups.num_experts == num_experts


def test_more_choices_than_were_announced():
    """Slots, sizes and counts agree, and `dropped` counts what got no slot."""
    groups = jax_mx.Groups.from_experts(np.array([1, 0, 0, 1, -1]), 2, align=1, most=2)
    assert_equal(groups, ([1, 2], [2, 0], [0, 2], [2, 0], [[-1], [0], [1], [-1], [-1]], 3))
    groups = jax_mx.Groups.from_experts(np.array([[1, 0], [1, 1]]), 2, align=2, most=1)
    assert_equal(groups, ([0, -1], [2, 0], [0, 2], [1, 0], [[-1, 0], [-1, -1]], 3))
    groups = jax_mx.Groups.from_experts(np.array([1, -1, 1]), 2, align=2, most=2)
    assert_equal(groups, ([0, 2, -1, -1], [0, 2], [0, 0], [0, 2], [[0], [-1], [1]], 1))
    assert_equal(
        jax_mx.Groups.from_experts(np.array([[1], [0]]), 2, align=4, most=9),
        by_loop(np.array([[1], [0]]), 2, 4),
    )


@pytest.mark.thorough
def test_ten_thousand_routings():
    rng, n = np.random.default_rng(1), 10_000
    experts = rng.integers(-1, 6, (n, 9, 2)).astype(np.int32)
    groups = jax.vmap(lambda e: jax_mx.Groups.from_experts(e, 5, align=4))(experts)
    fields = {name: np.asarray(getattr(groups, name)) for name in FIELDS}
    for i in range(n):
        want = by_loop(experts[i], 5, 4)
        for name, expected in zip(FIELDS, want, strict=True):
            np.testing.assert_array_equal(fields[name][i], expected, err_msg=f"{i} {name}")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int32])
def test_types_of_integers(dtype):
    experts = np.array([[2, 0], [1, 100], [2, 2]]).astype(dtype)
    groups = jax_mx.Groups.from_experts(experts, 3, align=2)
    assert_equal(groups, by_loop(experts.astype(int), 3, 2))


def test_numbers_beyond_int32_are_no_experts():
    experts = np.array([[2**31, 1], [2**32 - 1, 2**31 - 1], [0, 2**31 + 1]], np.uint32)
    for ids in (experts, experts.astype(np.int64) + (experts > 2) * 2**32):
        groups = jax_mx.Groups.from_experts(ids, 2, align=2)
        assert_equal(groups, by_loop(experts.astype(np.int64), 2, 2))


@pytest.mark.parametrize(("dtype", "num_experts"), [(np.uint8, 256), (np.int8, 128)])
def test_as_many_experts_as_the_type_has_numbers(dtype, num_experts):
    experts = np.arange(num_experts - 16, num_experts).reshape(8, 2)
    groups = jax_mx.Groups.from_experts(experts.astype(dtype), num_experts, align=1)
    assert_equal(groups, by_loop(experts, num_experts, 1))


def test_of_one_dimension():
    groups = jax_mx.Groups.from_experts(np.array([1, 0, 1]), 2)
    assert groups.slots.shape == (3, 1)


def test_choices_to_slots_and_back():
    experts = np.array([[1, 3], [0, 1], [-1, 1]], np.int32)
    groups = jax_mx.Groups.from_experts(experts, 3, align=4)
    weights = jnp.arange(1, 7, dtype=jnp.float32).reshape(3, 2)
    slots = groups.of_slots(weights)
    assert sorted(np.asarray(slots)[np.asarray(groups.rows) >= 0]) == [1, 3, 4, 6]
    assert not np.asarray(slots)[np.asarray(groups.rows) < 0].any()
    np.testing.assert_array_equal(
        groups.of_choices(slots), np.where((experts < 0) | (experts > 2), 0, weights)
    )
    x = jnp.arange(6, dtype=jnp.float32).reshape(3, 2)
    chosen = np.array([1, 2, 1])[:, None]  # of each token
    rows = rows_of(x, groups.rows)
    summed = groups.combined(rows)
    np.testing.assert_array_equal(groups.combined(np.asarray(rows)), summed)  # of NumPy, too
    np.testing.assert_array_equal(summed, chosen * np.asarray(x))


def test_from_sizes():
    sizes = np.array([3, 0, -5, 4, 9], np.int32)  # of ten rows: three of the last group's
    experts = np.repeat([0, 3, 4], [3, 4, 3])[:, None]
    groups = jax_mx.Groups.from_sizes(jnp.asarray(sizes), 10, align=8)
    assert_equal(groups, by_loop(experts, 5, 8))
    fewer = jax_mx.Groups.from_sizes([2, 3], 10, align=1)
    np.testing.assert_array_equal(fewer.rows, [0, 1, 2, 3, 4, -1, -1, -1, -1, -1])
    assert (np.asarray(jax_mx.Groups.from_sizes(jnp.zeros(0, jnp.int32), 5).rows) == -1).all()
    small = jax_mx.Groups.from_sizes(np.array([100, 100], np.int8), 300, align=1)
    np.testing.assert_array_equal(small.counts, [100, 100])


def test_more_rows_than_int32_counts():
    """Sizes whose sum wraps, of rows that few groups or many could have."""
    most = np.iinfo(np.int32).max
    sizes = jnp.array([most, most, 3, most], jnp.int32)
    np.testing.assert_array_equal(clamped(sizes, 7), [7, 0, 0, 0])
    np.testing.assert_array_equal(clamped(sizes, most), [most, 0, 0, 0])
    np.testing.assert_array_equal(clamped(jnp.array([5, -1, most]), most), [5, 0, most - 5])


def test_what_jax_takes_for_an_array():
    class Variable:
        def __init__(self, value):
            self.value = value

        def __jax_array__(self):
            return self.value

    want = by_loop(np.array([[1], [0]]), 2, 1)
    of = lambda experts: jax_mx.Groups.from_experts(experts, 2, align=1)  # noqa: E731
    assert_equal(of(Variable(jnp.array([1, 0]))), want)
    assert_equal(jax.jit(lambda a, b: of([a, b]))(1, 0), want)


def test_experts_of_slots_under_vmap():
    experts = jnp.array([[0, 1], [1, 1]])
    many = jax.vmap(lambda row: jax_mx.Groups.from_experts(row, 2, align=1))(experts)
    np.testing.assert_array_equal(many.experts, experts)
    slots = jnp.arange(4.0).reshape(2, 2)
    with pytest.raises(ValueError, match=r"Groups\.of_slots: jax\.vmap made these, \(2,\) of them"):
        many.of_slots(slots)
    with pytest.raises(ValueError, match=r"Groups\.of_choices: jax\.vmap made these"):
        many.combined(slots)
    combined = jax.vmap(lambda groups, slots: groups.combined(slots))(many, slots)
    np.testing.assert_array_equal(combined, slots)


def test_on_a_mesh_with_explicit_axes():
    """Numbers are gathered, as a slot depends on all of them."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    experts = np.arange(16).reshape(8, 2) % 3
    with jax.set_mesh(mesh):
        split = jax.device_put(experts, NamedSharding(mesh, PartitionSpec("a", None)))
        assert_equal(jax_mx.Groups.from_experts(split, 3), by_loop(experts, 3, 32))


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda g: g(np.zeros((2, 2)), 3), TypeError, "must be integers"),
        (lambda g: g(np.zeros((2, 2, 2), int), 3), ValueError, "must be (T, k) or (T,)"),
        (lambda g: g(np.zeros((2, 2), int), 0), ValueError, "num_experts must be 1 or more, got 0"),
        (lambda g: g(np.zeros((2, 2), int), 2.0), TypeError, "num_experts must be an int"),
        (lambda g: g(np.zeros((2, 2), int), 2, align=0), ValueError, "align must be 1 or more"),
        (lambda g: g(np.zeros((2, 2), int), 2, align=2**30), ValueError, "slots than int32 counts"),
        (lambda g: g(np.zeros((2, 2), int), 2**31), ValueError, "slots than int32 counts"),
        (lambda g: jax.eval_shape(lambda e: g(e, 64), jax.ShapeDtypeStruct((2**29, 4), jnp.int32)),
            ValueError,
            "2147483648 choices among 64 groups, aligned to 32, need more slots than int32 counts"),
        (lambda g: g(np.zeros((7, 2), int), 2).combined(jnp.ones((5, 4))), ValueError,
            "slots have the shape (5, 4), must have 96 rows"),
        (lambda g: g(np.zeros((7, 2), int), 2).of_choices(jnp.ones(())), ValueError,
            "slots have the shape (), must have 96 rows"),
        (lambda g: g(np.zeros((7, 2), int), 2).of_slots(jnp.ones((5, 2))), ValueError,
            "choices have the shape (5, 2), must be (7, 2)"),
        (lambda g: g(np.zeros((1, 2), int), 2).combined(jax_mx.quantize(jnp.ones((64, 32)))),
            TypeError, "Groups.combined: slots are MXArray, must be an array of numbers"),
    ],
)  # fmt: skip
def test_messages(call, error, sentence):
    assert_refused(lambda: call(jax_mx.Groups.from_experts), error, sentence)


def test_messages_of_sizes():
    of = jax_mx.Groups.from_sizes
    assert_refused(lambda: of(np.ones(2), 3), TypeError, "sizes are float64, must be integers")
    assert_refused(lambda: of(np.ones((2, 1), int), 3), ValueError, "shape (2, 1), must be (G,)")
    assert_refused(lambda: of([1, 2], -3), ValueError, "rows must be 0 or more, got -3")
    assert_refused(lambda: of([1, 2], 3, align=1.5), TypeError, "align must be an int, got 1.5")
    assert_refused(lambda: of([1, 2], 2**31), ValueError, "need more slots than int32 counts")
