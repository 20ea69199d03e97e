"""MXArrays are indexed and cut like arrays: what test_fuzz_arrays.py does not draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused, assert_same_array, random_bits
from jax.sharding import PartitionSpec as P

import jax_mx

# --thorough runs all cases of a test, CI one of 5.
pytestmark = pytest.mark.sampled(10)

# How an array lies: (shape, options of quantize).
WAYS = {
    "rows": ((3, 40, 128), {}),
    "columns": ((3, 128, 40), {"axis": -2}),
    "128x4": ((3, 200, 320), {"scale_layout": "blocked_128x4"}),
}


def made(way: str, format: str = "mxfp8_e4m3"):
    shape, options = WAYS[way]
    x = jnp.asarray(random_bits(shape, np.float32))
    return jax_mx.quantize(x, format, **options)


@pytest.mark.parametrize("way", ["rows", "128x4", "columns"])
def test_indices_may_be_traced(way):
    q = made(way)
    y = q.dequantize(jnp.float32)
    at = jax.jit(lambda q, i: q[i].dequantize(jnp.float32))
    assert_bits_equal(at(q, jnp.int32(2)), y[2])
    assert_bits_equal(at(q, jnp.array([2, 0])), y[jnp.array([2, 0])])
    grown = jax.vmap(lambda q, i: q[i], in_axes=(0, 0))(q[None][:, :], jnp.array([1]))
    assert_bits_equal(grown.dequantize(jnp.float32), y[1][None])


@pytest.mark.optimized
def test_length_and_iteration():
    q = made("128x4")
    assert (len(q), q.size) == (3, 3 * 200 * 320)
    assert len([*q]) == 3
    for part, y in zip(q, q.dequantize(), strict=True):
        assert_bits_equal(part.dequantize(), y)


def test_the_transpose_of_a_matrix_leaves_its_tiles():
    """No scale moves: a tile is of the block axis and the other one."""
    q = made("128x4")
    jaxpr = str(jax.make_jaxpr(lambda q: q.mT.scales)(q))
    assert "reshape" not in jaxpr and "transpose" not in jaxpr.partition("let")[2].replace(
        "transpose[permutation=(0, 2, 1)]", "", 1
    )


def test_rows_of_whole_tiles_are_split():
    q = jax_mx.quantize(jnp.asarray(random_bits((512, 128), np.float32)),
                        scale_layout="blocked_128x4")  # fmt: skip
    got = q.reshape(4, 128, 128)
    assert_bits_equal(got.dequantize(), q.dequantize().reshape(4, 128, 128))
    assert_same_array(got.reshape(512, 128), q)
    assert_refused(lambda: q.reshape(8, 64, 128), ValueError, "would cut blocks or tiles")
    rows = jax_mx.quantize(jnp.ones((4, 6, 64)))
    assert rows.reshape(24, 64).shape == (24, 64)
    assert_refused(lambda: rows.reshape(24, 32, 2), ValueError, "would cut blocks or tiles")


Q = jax_mx.quantize(jnp.ones((40, 64), jnp.bfloat16))
TILED = jax_mx.quantize(jnp.ones((40, 64), jnp.bfloat16), scale_layout="blocked_128x4")
TALL = jax_mx.quantize(jnp.ones((41, 64), jnp.bfloat16))


@pytest.mark.parametrize(
    "call,error,sentence",
    [
        (lambda: Q[:, 3:40], ValueError,
         "MXArray[...]: blocks of 32 run along axis -1 of length 64, and stay whole: index it with "
         "a slice from and to multiples of 32, got slice(3, 40, None)"),
        (lambda: Q[:, 0], ValueError, "blocks of 32 run along axis -1"),
        (lambda: Q[:, ::2], ValueError, "blocks of 32 run along axis -1"),
        (lambda: Q[40], IndexError,
         "MXArray[...]: index 40 is out of range for axis 0 of length 40"),
        (lambda: Q[np.int64(-41)], IndexError,
         "MXArray[...]: index -41 is out of range for axis 0 of length 40"),
        (lambda: Q[0, 0, 0], IndexError, "(0, 0, 0) has too many indices for the shape (40, 64)"),
        (lambda: Q[..., ...], IndexError, "an index has one ... at most, got (Ellipsis, Ellipsis)"),
        (lambda: Q[1.5], TypeError, "an index has ints, slices, None, ... and arrays of ints"),
        (lambda: Q[True], TypeError, "an index has ints, slices, None, ... and arrays of ints"),
        (lambda: Q["rows"], TypeError, "and arrays of ints or bools, got 'rows'"),
        (lambda: Q[[0, 1]], TypeError, "and arrays of ints or bools, got [0, 1]"),
        (lambda: Q[np.ones(3, bool)], IndexError, "a mask (3,) does not fit the shape (40, 64)"),
        (lambda: Q[..., np.ones(41, bool), :], IndexError, "a mask (41,) does not fit the shape"),
        (lambda: Q[..., np.ones((3, 3), bool), :], IndexError, "has too many indices"),
        (lambda: TILED[3], ValueError,
         "MXArray[...]: scale_layout 'blocked_128x4' tiles a matrix's rows and columns, the array "
         "has rank 1; use 'row_major' or a matrix"),
        (lambda: jax_mx.concatenate([]), ValueError, "concatenate: it takes one array at least"),
        (lambda: jax_mx.concatenate(Q), TypeError, "concatenate: it takes a list of MXArrays"),
        (lambda: jax_mx.stack(None), TypeError, "it takes a list of MXArrays, got None"),
        (lambda: jax_mx.concatenate([Q, Q.values]), TypeError,
         "concatenate: array 1 must be an MXArray, as quantize returns, got ArrayImpl"),
        (lambda: jax_mx.concatenate([Q, TILED]), ValueError,
         "concatenate: array 1 has the scale_layout BLOCKED_128X4, must have ROW_MAJOR"),
        (lambda: jax_mx.concatenate([Q, Q[None]]), ValueError, "array 1 has rank 3, array 0 2"),
        (lambda: jax_mx.concatenate([Q, TALL], 1), ValueError,
         "concatenate: array 1 has the shape (41, 64), array 0 (40, 64); they may differ along "
         "axis 1 alone"),
        (lambda: jax_mx.concatenate([Q], 2), ValueError, "axis 2 is out of range for rank 2"),
        (lambda: jax_mx.stack([Q, TALL]), ValueError, "stack: array 1 has the shape (41, 64)"),
        (lambda: jax_mx.swapaxes(Q, 0, 3), ValueError, "axis 3 is out of range for rank 2"),
        (lambda: jax_mx.swapaxes(Q.values, 0, 1), TypeError, "swapaxes: q must be an MXArray"),
        (lambda: Q.with_scales_in("rows"), ValueError, "with_scales_in: scale_layout 'rows' is"),
    ],
)  # fmt: skip
def test_bad_calls_get_one_sentence(call, error, sentence):
    assert_refused(call, error, sentence)


# ---- cuts behind its back ---
def cut(q, index):
    return jax.tree.map(lambda a: a[index], q)


WHERE = {
    "rows of a tile": ((256, 128), np.s_[1:2], {}),
    "the first rows": ((256, 128), np.s_[0:1], {}),
    "rows, in tiles of values": ((256, 128), np.s_[1:2], {"value_layout": "shuffled_16x16"}),
    "columns": ((128, 512), np.s_[:, 0:1], {"value_layout": "shuffled_16x16"}),
    "rows of the other axis": ((128, 256), np.s_[:, :1], {"axis": -2}),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("case", WHERE)
def test_a_cut_inside_of_a_tile_is_refused(case, jit):
    shape, index, options = WHERE[case]
    x = jnp.asarray(random_bits(shape, np.float32))
    q = jax_mx.quantize(x, scale_layout="blocked_128x4", **options)
    call = jax.jit(jax_mx.dequantize) if jit else jax_mx.dequantize
    part = cut(q, index)
    # A program that was made for an honest array of these shapes does not take the other one.
    honest = jax_mx.quantize(jnp.ones(part.shape), scale_layout="blocked_128x4",
                             **options)  # fmt: skip
    if honest.scales.shape == part.scales.shape:
        call(honest)
    with pytest.raises(ValueError, match=r"cut inside of a tile|have scales of the shape"):
        call(part)
    with pytest.raises(ValueError, match=r"cut inside of a tile|have scales of the shape"):
        jax.jit(lambda q: cut(q, index).dequantize())(q)
    for use in (lambda q: q[:1], lambda q: jax_mx.concatenate([q]), lambda q: q.mT):
        with pytest.raises(ValueError, match=r"cut inside of a tile|have scales of the shape"):
            use(part)


def test_the_review_s_slice_is_right_where_the_array_is_indexed():
    x = jnp.concatenate([jnp.ones((128, 128)), jnp.full((128, 128), 1000.0)])
    q = jax_mx.quantize(x, scale_layout="blocked_128x4")
    assert_bits_equal(q[1:2].dequantize(jnp.float32), jnp.ones((1, 128)))


@pytest.mark.parametrize("rows,right", [(256, True), (200, False)])
def test_shards_that_cut_tiles_are_refused(rows, right):
    """Halves of 200 rows have two tiles, but the second tile begins at row 128."""
    q = jax_mx.quantize(jnp.asarray(random_bits((rows, 128), np.float32)),
                        scale_layout="blocked_128x4")  # fmt: skip
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(jax_mx.dequantize, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    if right:
        assert_bits_equal(jax.jit(f)(q), q.dequantize())
    else:
        with pytest.raises(ValueError, match="cut inside of a tile"):
            jax.jit(f)(q)
    sharded = jax.jit(
        jax.shard_map(
            lambda x: jax_mx.quantize(x, scale_layout="blocked_128x4"),
            mesh=mesh, in_specs=P("d"), out_specs=P("d"),
        )
    )(jnp.ones((rows, 128)))  # fmt: skip
    if right:
        sharded.dequantize()
    else:
        with pytest.raises(ValueError, match="cut inside of a tile"):
            sharded.dequantize()


def test_what_shapes_may_become():
    """Leading dimensions come and go; leaves may be anything."""
    q = made("128x4")
    y = q.dequantize(jnp.float32)  # XLA's CPU may move bfloat16 as float32, and NaNs lose bits
    assert_bits_equal(jax.vmap(lambda q: q.dequantize(jnp.float32))(q), y)
    _, ys = jax.lax.scan(lambda c, q: (c, q.dequantize(jnp.float32)), 0, q)
    assert_bits_equal(ys, y)
    assert_bits_equal(jax.lax.map(lambda q: q.dequantize(jnp.float32), q), y)
    for i in range(3):
        assert_bits_equal(cut(q, i).dequantize(jnp.float32), y[i])
    twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), q)
    assert_bits_equal(twice.dequantize(jnp.float32), jnp.concatenate([y, y]))
    abstract = jax.eval_shape(lambda: q)
    padding = getattr(abstract, "padding", None)
    assert padding == q.padding and padding.numbers == (56, 2)
    treedef = jax.tree.structure(q)
    for leaf in (None, object(), P(), 0, jax.ShapeDtypeStruct((), jnp.uint8)):
        odd = jax.tree.unflatten(treedef, [leaf, leaf])
        assert jax.tree.structure(odd, is_leaf=lambda a: a is None) == treedef
        assert vars(odd)["padding"].numbers == (56, 2)
    specs = jax_mx.MXArray(0, None, "mxfp8_e4m3", -1, "blocked_128x4")
    same = jax.vmap(lambda q: q.dequantize(jnp.float32), in_axes=(specs,))
    assert_bits_equal(same(jax_mx.MXArray(q.values, q.scales[0], q.format, -1, q.scale_layout))[0],
                      y[0])  # fmt: skip


# ---- the constructor and from_parts ---
def test_the_constructor_takes_names():
    q = made("rows")
    named = jax_mx.MXArray(q.values, q.scales, "mxfp8_e4m3", np.int64(2), "row_major", 32)
    assert_same_array(named, q)
    assert (named.shape, named.axis, type(named.axis)) == (q.shape, -1, int)
    with pytest.raises(ValueError, match="MXArray: axis counts from the end"):
        jax_mx.MXArray(None, None, "mxfp8_e4m3", 0, "row_major")
    for fields, error, sentence in (
        (("mxfp9", -1, "row_major"), ValueError, "MXArray: format 'mxfp9' is unknown"),
        (("mxfp8_e4m3", -1, "rows"), ValueError, "MXArray: scale_layout 'rows' is unknown"),
        (("mxfp8_e4m3", 1.5, "row_major"), TypeError, "MXArray: axis must be an int, got 1.5"),
        (("mxfp8_e4m3", 7, "row_major"), ValueError, "MXArray: axis 7 is out of range for rank 3"),
        (("mxfp8_e4m3", -1, "row_major", 16), ValueError, "MXArray: block must be 32 or"),
        (("mxfp8_e4m3", -1, "row_major", 32, jax_mx.ROW_MAJOR), TypeError,
         "MXArray: value_layout must be one of 'row_major', 'shuffled_16x16', got ROW_MAJOR"),
    ):  # fmt: skip
        assert_refused(lambda f=fields: jax_mx.MXArray(q.values, q.scales, *f), error, sentence)


def test_parts_that_do_not_fit_get_one_sentence():
    q, make = TILED, jax_mx.MXArray.from_parts
    rows = jax_mx.quantize(jnp.ones((40, 64), jnp.bfloat16)).scales
    for call, error, sentence in (
        (lambda: make(q.values, rows, "mxfp8_e4m3", scale_layout="blocked_128x4"), ValueError,
         "from_parts: scales in 'blocked_128x4' of an array (40, 64) with blocks along axis -1 "
         "have the shape (1, 1, 512), or lie flat in (512,), got (40, 2); if their bytes are in "
         "this order already, pass scales.reshape(-1), if they lie in rows, "
         "scale_layout='row_major' and then .with_scales_in('blocked_128x4')"),
        (lambda: make(q.values, q.scales.reshape(128, 4), "mxfp8_e4m3",
                      scale_layout="blocked_128x4"), ValueError, "pass scales.reshape(-1)"),
        (lambda: make(q.values, rows, "mxfp8_e5m2"), TypeError,
         "from_parts: values are float8_e4m3fn, must be float8_e5m2 or its bits as uint8"),
        (lambda: make(q.values, rows.astype(jnp.float32), "mxfp8_e4m3"), TypeError,
         "from_parts: scales are float32, must be float8_e8m0fnu or its bits as uint8"),
        (lambda: make(q.values, None, "mxfp8_e4m3"), TypeError, "from_parts: scales are NoneType"),
        (lambda: make(q.values, rows[:3], "mxfp8_e4m3"), ValueError,
         "have scales of the shape (40, 2), got (3, 2)"),
        (lambda: make(q.values, rows, "mxfp8_e4m3", axis=2), ValueError, "axis 2 is out of range"),
        (lambda: make(q.values, rows, "mxfp8_e4m3", axis=-3), ValueError, "axis -3 is out of"),
    ):  # fmt: skip
        assert_refused(call, error, sentence)


def test_blocks_of_a_symbolic_length():
    """A slice that says what it takes without the length."""
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((2, 32 * n + 64), jnp.float32)

    def exported(part):
        f = jax.jit(lambda x: part(jax_mx.quantize(x)).dequantize(jnp.float32))
        return jax.export.export(f, disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS)(x)

    y = jnp.arange(256, dtype=jnp.float32).reshape(2, 128)
    for part in (
        lambda q: q[..., :64],
        lambda q: q[..., 32:64],
        lambda q: q[:1, 32:],
        lambda q: q[..., np.int64(64) :],
        lambda q: q[..., 64 : q.shape[-1]],
        lambda q: q[..., 32 : 1 * q.shape[-1]],  # an equal symbol, not the same one
    ):
        assert_bits_equal(exported(part).call(y), part(jax_mx.quantize(y)).dequantize(jnp.float32))
    assert_refused(lambda: exported(lambda q: q[..., :40]), ValueError, "and stay whole: index it")
    for part in (lambda q: q[..., -32:], lambda q: q[..., :128], lambda q: q[..., 128:]):
        sentence = f"depends on its length {x.shape[-1]}; take from a multiple of 32"
        assert_refused(lambda part=part: exported(part), ValueError, sentence)
