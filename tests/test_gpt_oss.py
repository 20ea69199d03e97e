"""gpt-oss' expert weights: files as they were published become MXArrays of the same bytes."""

import contextlib
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx import gpt_oss
from jax_mx.io import reading

P = PartitionSpec
E, D, INNER = 4, 96, 64
# A nibble's value, as openai/gpt-oss has it in gpt_oss/torch/weights.py.
LUT = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
HF, ORIGINAL = gpt_oss.NAMES.items()


def layer_of(number: int, names=HF, experts: int = E) -> dict[str, np.ndarray]:
    """A layer's tensors, as a checkpoint has them; any bytes but the scale that is NaN."""
    rng = np.random.default_rng(number)
    prefix, suffixes = names
    shapes = {"gate_up": (2 * INNER, D), "down": (D, INNER)}
    tensors = {}
    for word, (rows, k) in shapes.items():
        tensors[f"{word}_blocks"] = rng.integers(0, 256, (experts, rows, k // 32, 16), np.uint8)
        tensors[f"{word}_scales"] = rng.integers(0, 255, (experts, rows, k // 32), np.uint8)
        tensors[f"{word}_bias"] = rng.normal(size=(experts, rows)).astype(ml_dtypes.bfloat16)
    return {prefix.format(layer=number) + suffixes[word]: a for word, a in tensors.items()}


def of(layer: dict, word: str) -> np.ndarray:
    (array,) = (a for name, a in layer.items() if name.endswith(word))
    return array


def published(layer: dict, word: str) -> np.ndarray:
    """The floats that the published implementation makes: a nibble's number times 2^(scale-127)."""
    blocks, scales = of(layer, word + "_blocks"), of(layer, word + "_scales")
    pairs = np.stack([LUT[blocks & 15], LUT[blocks >> 4]], -1)
    with np.errstate(over="ignore"):
        floats = np.ldexp(pairs.reshape(*blocks.shape[:-1], 32), scales[..., None] - np.int32(127))
    return floats.reshape(*blocks.shape[:2], -1)


def assert_loaded(got: gpt_oss.Experts, layer: dict) -> None:
    for q, word in ((got.w_gate_up, "gate_up_proj"), (got.w_down, "down_proj")):
        blocks = of(layer, word + "_blocks")
        assert q.format == jax_mx.MXFP4_E2M1 and q.axis == -1
        assert_bits_equal(q.values, blocks.reshape(*blocks.shape[:2], -1))
        assert_bits_equal(np.asarray(q.scales).view(np.uint8), of(layer, word + "_scales"))
    assert_bits_equal(got.b_gate_up, of(layer, "gate_up_proj_bias"))
    assert_bits_equal(got.b_down, of(layer, "down_proj_bias"))


@pytest.fixture
def folder(tmp_path):
    """Two layers in two files, a layer's own tensors apart, with an index."""
    layers = [layer_of(0), layer_of(1)]
    every = sorted({k: v for layer in layers for k, v in layer.items()}.items())
    files = {"model-00001-of-00002.safetensors": dict(every[::2])}
    files["model-00002-of-00002.safetensors"] = dict(every[1::2])
    for name, tensors in files.items():
        jax_mx.save_safetensors(tensors, tmp_path / name)
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (tmp_path / reading.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tmp_path, layers


def test_values_are_those_of_the_published_implementation(tmp_path):
    layer = layer_of(3)
    jax_mx.save_safetensors(layer, tmp_path / "model.safetensors")
    got = gpt_oss.load_experts(tmp_path / "model.safetensors", 3)
    assert got.w_gate_up.shape == (E, 2 * INNER, D) and got.w_down.shape == (E, D, INNER)
    for q, word in ((got.w_gate_up, "gate_up_proj"), (got.w_down, "down_proj")):
        floats = jax.jit(lambda q: q.dequantize(jnp.float32))(q)
        assert_bits_equal(floats, published(layer, word))


def test_files_folders_and_indices(folder):
    path, layers = folder
    files = sorted(path.glob("*.safetensors"))
    for where in (path, path / reading.INDEX, files, [str(file) for file in files]):
        for number in (0, np.int64(1)):
            assert_loaded(gpt_oss.load_experts(where, number), layers[number])
    (path / reading.INDEX).unlink()
    assert_loaded(gpt_oss.load_experts(str(path), 1), layers[1])


def test_the_original_names(tmp_path):
    hf = layer_of(0)
    names = dict(zip(layer_of(0), layer_of(0, ORIGINAL), strict=True))
    jax_mx.save_safetensors({names[k]: v for k, v in hf.items()}, tmp_path / "model.safetensors")
    assert_loaded(gpt_oss.load_experts(tmp_path, 0), hf)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_each_device_reads_its_part(folder, axis_type, monkeypatch):
    path, layers = folder
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((4, 2), ("expert", "rows"), axis_types=(axis_type,) * 2, devices=devices)
    read = []
    copied = reading.Files._copied

    def counted(self, name, *args):
        out = copied(self, name, *args)
        read.append((name, out.nbytes, self[name].nbytes))
        return out

    monkeypatch.setattr(reading.Files, "_copied", counted)
    one = NamedSharding(mesh, P("expert"))
    got = gpt_oss.load_experts(path, 0, sharding=one)
    assert_loaded(got, layers[0])
    assert got.w_down.scales.sharding.is_equivalent_to(one, 3)
    assert read and all(4 * part == size for _, part, size in read)
    columns = NamedSharding(mesh, P("expert", "rows"))
    got = gpt_oss.load_experts(path, 0, sharding={"w_gate_up": columns})
    assert_loaded(got, layers[0])
    assert got.w_gate_up.values.sharding.is_equivalent_to(columns, 3)
    cut = NamedSharding(mesh, P(None, None, "rows"))
    assert_loaded(gpt_oss.load_experts(path, 0, sharding={"w_down": cut}), layers[0])
    assert_refused(
        lambda: gpt_oss.load_experts(path, 0, sharding={"w_gate_up": cut}),
        ValueError,
        "split into parts of 48 elements, which cuts blocks of 32",
    )
    uneven = NamedSharding(mesh, P(None, None, ("expert", "rows")))
    assert_refused(
        lambda: gpt_oss.load_experts(path, 0, sharding={"w_down": uneven}),
        ValueError,
        "'model.layers.0.mlp.experts.down_proj_blocks'",
    )


def test_the_layer_runs_on_them(tmp_path):
    """`jax_mx.moe` gives the result that it gives for the MXFP4 of the floats."""
    layer = {k: v for k, v in layer_of(0).items()}
    for name in layer:
        if name.endswith("scales"):
            layer[name] = (layer[name] % 4 + 124).astype(np.uint8)
    jax_mx.save_safetensors(layer, tmp_path / "model.safetensors")
    got = gpt_oss.load_experts(tmp_path, 0)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, D)), jnp.bfloat16)
    experts = jnp.asarray(rng.integers(0, E, (8, 2)), jnp.int32)
    weights = jnp.asarray(rng.random((8, 2)), jnp.float32)
    recipe = jax_mx.Recipe(forward="bf16", dgrad="bf16", wgrad="bf16")

    def run(**arrays):
        options = {"activation": "gpt_oss", "interleaved": True, "recipe": recipe}
        return jax_mx.moe(x, experts, weights, **arrays, **options)

    y = jax.jit(run)(**got._asdict())
    gate_up, down = (published(layer, w).astype(np.float64) for w in ("gate_up_proj", "down_proj"))
    want = np.zeros((8, D))
    for t in range(8):
        for e, weight in zip(np.asarray(experts[t]), np.float64(weights[t]), strict=True):
            h = gate_up[e] @ np.asarray(x, np.float64)[t] + np.float64(got.b_gate_up[e])
            gate, up = np.minimum(h[0::2], 7), np.clip(h[1::2], -7, 7)
            act = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            want[t] += weight * (down[e] @ act + np.float64(got.b_down[e]))
    error = np.linalg.norm(np.asarray(y, np.float64) - want) / np.linalg.norm(want)
    assert error < 0.01


def broken(name: str, change) -> dict:
    layer = layer_of(0)
    full = f"model.layers.0.mlp.experts.{name}"
    layer[full] = change(layer[full])
    if layer[full] is None:
        del layer[full]
    return layer


REFUSED = {
    "another layer": (layer_of(2), "there is no layer 0; the files have 2"),
    "a hole": (
        layer_of(1) | layer_of(5) | {"model.layers.².mlp.experts.gate_up_proj_blocks": np.zeros(1)},
        "there is no layer 0; the files have 1, 5",
    ),
    "nothing": ({"w": np.zeros(2, np.float32)}, "no experts in MXFP4, such as 'model.layers.0."),
    "no scales": (
        broken("down_proj_scales", lambda a: None),
        "has no 'model.layers.0.mlp.experts.d",
    ),
    "floats": (
        broken("gate_up_proj_blocks", lambda a: None)
        | {"model.layers.0.mlp.experts.gate_up_proj": np.zeros((E, D, 2 * INNER), np.float32)},
        "it has floats instead, which jax_mx.quantize makes MXFP4 of",
    ),
    "float blocks": (
        broken("gate_up_proj_blocks", lambda a: a.astype(np.float32)),
        "is float32, MXFP4's is uint8",
    ),
    "blocks of 8": (
        broken("gate_up_proj_blocks", lambda a: a[..., :8]),
        "has the shape (4, 128, 3, 8), not (E, rows, K / 32, 16)",
    ),
    "scales": (
        broken("gate_up_proj_scales", lambda a: a[:, :, :2]),
        "(4, 128, 3, 16), it must be (4, 128, 3)",
    ),
    "other experts": (
        broken("down_proj_blocks", lambda a: a[:2]),
        "has the shape (2, 96, 2, 16)",
    ),
    "no experts": (broken("gate_up_proj_blocks", lambda a: a[:0]), "is empty: (0, 128, 3, 16)"),
    "bias": (broken("down_proj_bias", lambda a: a[..., None]), "not (E, rows)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    tensors, sentence = REFUSED[name]
    jax_mx.save_safetensors(tensors, tmp_path / "a.safetensors")
    assert_refused(lambda: gpt_oss.load_experts(tmp_path, 0), ValueError, sentence)


def test_refused_arguments(folder):
    path, _ = folder
    load = gpt_oss.load_experts
    assert_refused(lambda: load(path, 0.5), TypeError, "layer must be an int, got 0.5")
    assert_refused(lambda: load(path / "none", 0), FileNotFoundError, "is no .safetensors file")
    assert_refused(lambda: load(path, 0, sharding="a"), TypeError, "sharding must be a Sharding")
    assert_refused(lambda: load(path, 0, sharding={"w": None}), ValueError, "sharding names 'w'")
    assert_refused(lambda: load(None, 0), TypeError, "path must be a path, or a list of paths")
    assert_refused(lambda: load([3], 0), TypeError, "path must be a path, or a list of paths")
    mesh = jax.make_mesh((1,), ("e",), axis_types=(AxisType.Auto,))
    long = {"w_down": jax.NamedSharding(mesh, jax.P(None, None, None, None, "e"))}
    assert_refused(lambda: load(path, 0, sharding=long), ValueError, "is of more than its 3")
    for text in ("{}", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000):
        (index := path / "other.json").write_text(text)
        assert_refused(lambda: load(index, 0), ValueError, 'other.json has no "weight_map"')
    (path / "model-00002-of-00002.safetensors").unlink()
    assert_refused(lambda: load(path, 0), FileNotFoundError, "which is not there")


def test_progress(folder, capsys, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 2**12)
    gpt_oss.load_experts(folder[0], 0, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("gpt_oss.load_experts 1/") and "gate_up_proj_blocks" in lines[0]
    assert len(lines) > 8
    gpt_oss.load_experts(folder[0], 0)
    assert not capsys.readouterr().err


def test_what_was_read_leaves_the_memory(tmp_path, monkeypatch):
    """Tensors are mapped; pages of one that was read do not stay while the next one is."""
    path, smaps = tmp_path / "model.safetensors", Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("the memory of mappings is not told here")
    jax_mx.save_safetensors(layer_of(0, experts=400), path)
    resident = []

    def say(*_):
        mappings = smaps.read_text().split(str(path))[1:]
        resident.append(sum(int(re.search(r"Rss: +(\d+)", text)[1]) for text in mappings))

    monkeypatch.setattr(reading, "progress", lambda *_: contextlib.nullcontext(say))
    gpt_oss.load_experts(path, 0)
    assert len(resident) == 6 and max(resident) < path.stat().st_size / 1024 / 4


def test_blocks_of_float4(tmp_path):
    """Two codes in a byte, called so."""
    layer = layer_of(0)
    path = tmp_path / "w"
    codes = {k: np.stack([v & 15, v >> 4], -1) for k, v in layer.items() if k.endswith("blocks")}
    codes = {
        k: v.reshape(*v.shape[:-2], 32).view(ml_dtypes.float4_e2m1fn) for k, v in codes.items()
    }
    jax_mx.save_safetensors(layer | codes, path)
    assert_loaded(gpt_oss.load_experts(path, 0), layer)
