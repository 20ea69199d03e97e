"""Saved arrays come back as they were, or an error says how the target differs."""

import importlib.util
import json
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused, assert_same_array, random_bits

import jax_mx
from jax_mx.quantizing import metadata

# --thorough runs all cases of a test, CI one of 3.
pytestmark = pytest.mark.sampled(6)

WAYS = {
    "rows": {},
    "columns": {"axis": -2},
    "square": {"block": (32, 32)},
    "tiles": {"scale_layout": "blocked_128x4", "value_layout": "shuffled_16x16"},
    "tiles, transposed": {"axis": -2, "transpose": True, "scale_layout": "shuffled_32x8"},
}
FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1")


def made(way="rows", format="mxfp6_e2m3", seed=0):
    x = jnp.asarray(random_bits((2, 64, 128), np.float32, seed))
    return jax_mx.quantize(x, format, **WAYS[way])


# Targets that differ from made(), by the field that differs.
OTHERS = {
    "format": made(format="mxfp6_e3m2"),
    "axis": made("columns"),
    "scale_layout": made().with_scales_in("blocked_128x4"),
    "block": made("square"),
    "value_layout": made().with_values_in("shuffled_16x16"),
}


def importing(module: str):
    """The module; libraries warn of what they use of JAX."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


# ---- names of leaves ---
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", FORMATS)
def test_names_say_what_is_static(way, format):
    q = made(way, format)
    ((path, _), (other, _)) = jax.tree_util.tree_leaves_with_path({"w": q})
    assert [path[-1].name, path[0].key, other[0].key] == ["values", "w", "w"]
    name = other[-1].name
    fields = metadata.read("test", metadata.description_in(name))
    assert tuple(fields.values()) == metadata.fields_of(q)
    assert "/" not in name and "." not in name and name.isprintable()
    assert metadata.description_in("values") is None
    if way == "rows":
        assert name == f"scales:format={format},axis=-1"


def test_descriptions_that_are_not_known():
    for description, sentence in (
        ({"format": "mxfp8_e4m3"}, "test: an MXArray is described without axis"),
        ({"format": "mxfp8_e4m3", "axis": -1, "window": 2, "zeal": 1}, "which this version"),
        ({"format": "mxfp9", "axis": -1}, "test: format 'mxfp9' is unknown"),
    ):
        assert_refused(lambda d=description: metadata.read("test", d), ValueError, sentence)


# ---- orbax ---
@pytest.fixture
def orbax(tmp_path):
    ocp = importing("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        yield checkpointer, tmp_path / "checkpoint"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_orbax(way, orbax):
    checkpointer, path = orbax
    tree = {"layers": [{"w": made(way, f, i)} for i, f in enumerate(FORMATS)], "b": jnp.ones(3)}
    checkpointer.save(path, tree)
    checkpointer.wait_until_finished()
    target = jax.tree.map(jnp.zeros_like, tree)
    targets = (target, jax.eval_shape(lambda: target), None)
    for restored in (checkpointer.restore(path, target) for target in targets):
        restored = jax_mx.from_checkpoint(restored)
        for got, want in zip(restored["layers"], tree["layers"], strict=True):
            assert_same_array(got["w"], want["w"])
            got["w"].dequantize()
        assert_bits_equal(restored["b"], tree["b"])


@pytest.mark.filterwarnings("ignore")
def test_orbax_refuses_another_target(orbax):
    checkpointer, path = orbax
    checkpointer.save(path, {"w": made()})
    checkpointer.wait_until_finished()
    for name, other in OTHERS.items():
        with pytest.raises(ValueError) as caught:
            checkpointer.restore(path, {"w": other})
        assert name in str(caught.value)


# ---- flax ---
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_flax(way):
    serialization = importing("flax.serialization")
    tree = {"layers": [{"w": made(way, f, i)} for i, f in enumerate(FORMATS)], "b": jnp.ones(3)}
    data = serialization.to_bytes(tree)
    back = serialization.from_bytes(jax.tree.map(jnp.zeros_like, tree), data)
    free = jax_mx.from_checkpoint(serialization.msgpack_restore(data))
    free["layers"] = [free["layers"][str(i)] for i in range(len(FORMATS))]
    for restored in (back, free):
        for got, want in zip(restored["layers"], tree["layers"], strict=True):
            assert_same_array(got["w"], want["w"])
            got["w"].dequantize()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("field", OTHERS)
def test_flax_refuses_another_target(field):
    serialization = importing("flax.serialization")
    data = serialization.to_bytes({"w": made()})
    with pytest.raises(ValueError, match=f"the checkpoint has the {field} "):
        serialization.from_bytes({"w": OTHERS[field]}, data)
    with pytest.raises(ValueError, match="the checkpoint has the shape"):
        serialization.from_bytes({"w": made()[:1]}, data)


@pytest.mark.parametrize("first", ["jax_mx", "flax.serialization"])
def test_flax_knows_the_array_whichever_is_imported_first(first):
    importing("flax.serialization")
    second = {"jax_mx": "flax.serialization", "flax.serialization": "jax_mx"}[first]
    code = f"""
import sys, importlib, jax.numpy as jnp
importlib.import_module({first!r})
if {first!r} == "jax_mx":
    import jax_mx
    q = jax_mx.quantize(jnp.ones(32))
    assert not any(name.partition(".")[0] == "flax" for name in sys.modules)
importlib.import_module({second!r})
import jax_mx, flax.serialization
q = jax_mx.quantize(jnp.ones(32)) if {first!r} != "jax_mx" else q
assert flax.serialization.from_bytes(q, flax.serialization.to_bytes(q)).shape == (32,)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


# ---- safetensors ---
@pytest.mark.parametrize("way", WAYS)
def test_safetensors(way, tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {f"layers.{i}.w": made(way, f, i) for i, f in enumerate(FORMATS)}
    plain = {
        "b": jnp.ones((2, 3), jnp.bfloat16),
        "steps": np.int32(7),
        "empty": jnp.zeros((0, 4)),
        "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "mask": np.array([True, False]),
        "small": np.ones(3, ml_dtypes.float8_e5m2),
    }
    jax_mx.save_safetensors(tensors | plain, path, {"made by": "a test"})
    back = jax_mx.load_safetensors(path, jax.eval_shape(lambda: tensors | plain))
    assert back.keys() == tensors.keys() | plain.keys()
    for name, want in tensors.items():
        assert_same_array(back[name], want)
    for name, want in plain.items():
        assert_bits_equal(back[name], np.asarray(want), name)

    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    parts = [header[f"layers.{i}.w.{p}"] for i in range(len(FORMATS)) for p in ("values", "scales")]
    assert {part["dtype"] for part in parts} == {"U8"}
    assert header["small"]["dtype"] == "F8_E5M2"
    assert header["__metadata__"]["made by"] == "a test"
    described = json.loads(header["__metadata__"]["jax_mx"])["layers.4.w"]
    assert described["format"] == "mxfp4_e2m1"
    assert described["scale_layout"] == tensors["layers.4.w"].scale_layout.name


def test_float4_in_files(tmp_path):
    """Two elements a byte, the lower half first, as other libraries write MXFP4."""
    from safetensors import safe_open

    path, q = tmp_path / "w", made(format="mxfp4_e2m1")
    fnuz = np.arange(8, dtype=np.uint8).view(ml_dtypes.float8_e4m3fnuz)
    jax_mx.save_safetensors({"w": q.as_float4(), "s": q.scales, "z": fnuz}, path)
    assert np.asarray(q.values).tobytes() in path.read_bytes()
    with safe_open(path, framework="np") as file:  # the library takes the file
        assert file.get_slice("w").get_dtype() == "F4" and [*file.get_slice("w").get_shape()] == [
            *q.shape
        ]
    back = jax_mx.load_safetensors(path)
    assert_same_array(jax_mx.MXArray.from_float4(back["w"], back["s"]), q)
    assert_bits_equal(back["z"], fnuz)
    odd = {"w": jnp.ones(3, jnp.float4_e2m1fn)}
    sentence = "'w' has 3 elements of float4, of which files keep two in a byte; append one"
    assert_refused(lambda: jax_mx.save_safetensors(odd, path), TypeError, sentence)


def test_memory_of_saving_and_loading(tmp_path):
    """One array at a time comes to the host, and nothing of it stays."""
    mesh = jax.make_mesh((2,), ("a",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    tensors = {f"{i}": jax.device_put(jnp.full(2**18, i, jnp.float32), where) for i in range(12)}
    path, one = tmp_path / "w", 2**20

    def peak(call):
        tracemalloc.start()
        try:
            kept = call()
            now, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return kept, now, peak

    _, now, most = peak(lambda: jax_mx.save_safetensors(tensors, path))
    assert most < 3 * one and now < one
    loaded, now, most = peak(lambda: jax_mx.load_safetensors(path, tensors))
    assert most - now < 3 * one  # a CPU's arrays may be those that were read
    assert all((loaded[name] == tensors[name]).all() for name in tensors)


def test_safetensors_of_others(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.ones((2, 3), np.float32)}, tmp_path / "x.safetensors")
    assert_bits_equal(jax_mx.load_safetensors(tmp_path / "x.safetensors")["x"], jnp.ones((2, 3)))
    save_file({"x": np.ones(2)}, tmp_path / "x.safetensors")
    sentence = "'x' is float64, which JAX would take for float32; set jax_enable_x64"
    load = jax_mx.load_safetensors
    assert_refused(lambda: load(tmp_path / "x.safetensors"), ValueError, sentence)


def test_numbers_and_lists_are_what_jax_makes_of_them(tmp_path):
    path = tmp_path / "w"
    numbers = {"step": 3, "rates": [0.1, 0.2], "on": True, "z": 1 + 2j, "most": float("inf")}
    jax_mx.save_safetensors(numbers, path)
    loaded = jax_mx.load_safetensors(path)
    assert {name: str(a.dtype) for name, a in loaded.items()} == {
        "step": "int32", "rates": "float32", "on": "bool", "z": "complex64", "most": "float32"
    }  # fmt: skip
    assert loaded["z"] == 1 + 2j and np.isposinf(loaded["most"])
    assert loaded["step"] == 3 and np.array_equal(loaded["rates"], np.float32([0.1, 0.2]))


def test_a_file_is_replaced_behind_a_link_and_keeps_its_permissions(tmp_path):
    path, link = tmp_path / "w", tmp_path / "link"
    path.touch(0o640)
    link.symlink_to(path)
    jax_mx.save_safetensors({"w": made()}, link)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert_same_array(jax_mx.load_safetensors(path)["w"], made())


def test_what_is_loaded_is_placed_as_what_is_expected(tmp_path):
    """Each leaf; what like does not place is where JAX puts new arrays."""
    path, mesh = tmp_path / "w", jax.make_mesh((2,), ("a",))
    tensors = {"w": made(), "b": jnp.ones(4), "c": jnp.ones(4)}
    jax_mx.save_safetensors(tensors, path)
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    placed = {name: jax.device_put(tensors[name], where) for name in ("w", "b")}
    abstract = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=where)
    for expected in (placed | {"c": tensors["c"]}, placed | {"b": abstract, "c": tensors["c"]}):
        loaded = jax_mx.load_safetensors(path, expected)
        assert_same_array(loaded["w"], made())
        assert len(loaded["c"].devices()) == 1
        for leaf in jax.tree.leaves((loaded["w"], loaded["b"])):
            assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
    other = {**placed, "b": jnp.ones(3), "c": tensors["c"]}
    sentence = "'b' has the shape (4,), expected (3,)"
    assert_refused(lambda: jax_mx.load_safetensors(path, other), ValueError, sentence)


def test_safetensors_that_are_refused(tmp_path):
    path, save, load = tmp_path / "w", jax_mx.save_safetensors, jax_mx.load_safetensors
    save({"w": made(), "b": jnp.ones(3)}, path)
    ones = {"b": jnp.ones(3)}
    for expected, sentence in (
        *(
            ({"w": other, **ones}, f"load_safetensors: 'w' has the {field} ")
            for field, other in OTHERS.items()
        ),
        ({"w": made()[:1], **ones}, "'w' has the shape (2, 64, 128), expected (1, 64, 128)"),
        ({"w": ones["b"], **ones}, "'w' is an MXArray, expected is an array"),
        ({"w": made(), "b": jnp.ones(3, jnp.bfloat16)}, "'b' is float32, expected is bfloat16"),
        ({"w": made(), "b": jnp.ones(4)}, "'b' has the shape (3,), expected (4,)"),
        ({"w": made(), **ones, "c": 0}, "the file has no 'c'"),
        (ones, "the file has 'w', which is not expected"),
    ):
        assert_refused(lambda expected=expected: load(path, expected), ValueError, sentence)
    for tensors, error, sentence in (
        ({"w": made(), "w.values": jnp.ones(3)}, ValueError, "there are two tensors 'w.values'"),
        ([made()], TypeError, "save_safetensors: tensors must be a dictionary of arrays by name"),
        ({3: made()}, TypeError, "save_safetensors: tensors must be a dictionary"),
        ({"a": {"b": made()}}, TypeError, "'a' must be an array or an MXArray"),
        (
            {"a": jax_mx.MXFP8.quantize_weight(jnp.ones((64, 32)))},
            TypeError,
            "'a' must be an array or an MXArray, got QuantizedWeight; of a QuantizedWeight save",
        ),
        ({"a": "text"}, TypeError, "'a' must be an array or an MXArray"),
        ({"a": [[1], [2, 3]]}, TypeError, "'a' must be an array or an MXArray"),
        ({"a": jax.random.key(0)}, TypeError, "'a' is a key; save jax.random.key_data of it"),
        ({"a": jnp.ones(3, jnp.int4)}, TypeError, "'a' is int4, which files do not have"),
        ({"__metadata__": jnp.ones(3)}, ValueError, "files call their metadata '__metadata__'"),
        ({"\ud800": jnp.ones(3)}, ValueError, "'\\ud800' is no Unicode text"),
        ({"a": 2**40}, TypeError, "'a' is beyond int32; give a NumPy array of int64"),
        ({"a": [0.0, 1e300]}, TypeError, "'a' is beyond float32; give a NumPy array of float64"),
    ):
        assert_refused(lambda t=tensors: save(t, path), error, sentence)
    for notes, error, sentence in (
        ({"jax_mx": "1"}, ValueError, "notes have 'jax_mx', which describes MXArrays; rename it"),
        ({"a": 1}, TypeError, "notes must be a dictionary of strings"),
    ):
        assert_refused(lambda n=notes: save(ones, path, n), error, sentence)
    (link := tmp_path / "link").symlink_to(tmp_path / "none" / "w")
    for lost in (tmp_path / "none" / "w", link):
        assert_refused(lambda p=lost: save(ones, p), FileNotFoundError, "none; make it first")
    assert_refused(lambda: load("/dev/null"), ValueError, "/dev/null is no file; name a")
    assert_refused(lambda: jax.jit(lambda b: save({"b": b}, path))(1.0), TypeError,
                   "'b' has no values while a program is traced")  # fmt: skip
    assert_refused(lambda: load(path, [1]), TypeError, "like must be a dictionary of arrays")
    assert_refused(lambda: load(path, {"w": 1, "b": 1}), TypeError, "like has 1 for 'w'")
    from safetensors.numpy import save_file

    save_file({"w.values": np.ones(3, np.uint8)}, path,
              {"jax_mx": json.dumps({"w": {"format": "mxfp4_e2m1", "axis": -1}})})  # fmt: skip
    assert_refused(lambda: load(path), ValueError, "describes 'w' and has no 'w.scales'")
    parts = {"w.values": np.zeros((2, 64), np.uint8), "w.scales": np.zeros((2, 2), np.uint8)}
    for more, axis, sentence in (
        ({}, "a", "'w' is not what the file says of it: load_safetensors: axis must be an int"),
        ({}, 7, "'w' is not what the file says of it: MXArray: axis 7 is out of range"),
        ({"w": np.zeros(0, np.uint8)}, -1, "the file has an array 'w' and describes an MXArray so"),
    ):
        described = json.dumps({"w": {"format": "mxfp8_e4m3", "axis": axis}})
        save_file(parts | more, path, {"jax_mx": described})
        assert_refused(lambda: load(path), ValueError, sentence)
    for call in (lambda: save(ones, tmp_path), lambda: load(tmp_path)):
        assert_refused(call, ValueError, "name ")
    for text in ("[1,2", "[]", '{"a": null}', "3", "[" * 100_000):
        save_file({"a": np.ones(3, np.uint8)}, path, {"jax_mx": text})
        assert_refused(lambda: load(path), ValueError, "which describes no MXArrays")


def test_without_safetensors_one_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    path = tmp_path / "w"
    jax_mx.save_safetensors({}, path)  # writing needs no library
    load = jax_mx.load_safetensors
    assert_refused(lambda: load(path), ModuleNotFoundError, "pip install safetensors")


def test_other_trees_stay_as_they_are():
    tree = {"values": 1, "other": [2, (3, None)], "scales": {"values": 4, "x": 5}}
    assert jax_mx.from_checkpoint(tree) == tree
    assert jax_mx.from_checkpoint({"values": 1, 5: 6}) == {"values": 1, 5: 6}


def test_what_is_no_file_of_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"junk")
    assert_refused(
        lambda: jax_mx.load_safetensors(path), ValueError, f"{path} is no whole .safetensors file"
    )


def test_numbers_in_the_other_order_of_bytes_are_saved_as_numbers(tmp_path):
    pytest.importorskip("safetensors")
    tensors = {
        "x": np.arange(6.0, dtype=">f4"),
        "i": np.arange(6, dtype=">i2").reshape(2, 3)[:, ::2],
    }
    jax_mx.save_safetensors(tensors, tmp_path / "w")
    again = jax_mx.load_safetensors(tmp_path / "w")
    for name, x in tensors.items():
        np.testing.assert_array_equal(again[name], x)
    missing = tmp_path / "nothing"
    assert_refused(
        lambda: jax_mx.load_safetensors(missing),
        FileNotFoundError,
        f"load_safetensors: there is no {missing}",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_what_a_gpu_holds_is_saved(format, tmp_path):
    """The file is that of copies on the host, and what is loaded of it lies on the GPU."""
    pytest.importorskip("safetensors")
    x = jnp.asarray(random_bits((256, 512), jnp.bfloat16))
    q = jax_mx.quantize(x, format)
    tensors = {"one": jnp.float32(3), "parts": q[64:128], "q": q, "x": x}
    jax_mx.save_safetensors(tensors, tmp_path / "gpu")
    jax_mx.save_safetensors(jax.device_get(tensors), tmp_path / "host")
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "host").read_bytes()
    again = jax_mx.load_safetensors(tmp_path / "gpu")
    assert again["x"].devices() == {jax.devices()[0]}
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(tensors), strict=True):
        assert_bits_equal(got, want)
