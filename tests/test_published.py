"""Folders of other libraries: every byte keeps its meaning, and what is not MX is refused."""

import json
import runpy
import struct
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused, mesh_of, normal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx.io import reading

pytest.importorskip("safetensors")
P = PartitionSpec
GOLDEN = Path(__file__).parent / "golden/compressed_tensors"  # written by its own code: write.py
EXPORTED = Path(__file__).parent / "golden/exported"  # likewise
LAYER = "model.layers.0."
UP = "model.layers.0.mlp.up_proj"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
KINDS = {"uint8": "U8", "float8_e4m3fn": "F8_E4M3", "float32": "F32", "bfloat16": "BF16"}


# ---- folders ---
def write(folder: Path, tensors: dict, config: dict | None = None, dtypes: dict | None = None):
    """A folder: an array of bytes is of the dtype that `dtypes` says of the end of its name."""
    folder.mkdir(exist_ok=True)
    header, blobs, end = {}, [], 0
    for name, array in tensors.items():
        dtype = next((d for e, d in (dtypes or {}).items() if name.endswith(e)), None)
        shape = [*array.shape]
        if dtype == "F4":  # which counts elements
            shape[-1] *= 2
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype or KINDS[array.dtype.name], "shape": shape}
        header[name]["data_offsets"] = [end, end := end + len(data)]
        blobs.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blobs = [struct.pack("<Q", len(text)), text, *blobs]
    (folder / "model.safetensors").write_bytes(b"".join(blobs))
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def codes_of(shape, seed=0) -> np.ndarray:
    """Any bytes of E4M3 but NaN."""
    return np.random.default_rng(seed).integers(0, 0x7F, shape, np.uint8)


def floats_of(codes: np.ndarray) -> np.ndarray:
    """The floats that E4M3 bytes stand for."""
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def nibbles_of(packed: np.ndarray) -> np.ndarray:
    """The floats of packed codes of E2M1, the lower half of a byte first."""
    pairs = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], -1)
    return pairs.reshape(*packed.shape[:-1], -1)


def scaled(floats: np.ndarray, exponents: np.ndarray, tile=(1, 32)) -> np.ndarray:
    """Floats times powers of two, one for each tile; tiles may be cut off."""
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    for axis, times in zip((-2, -1), tile, strict=True):
        scales = scales.repeat(times, axis)
    return floats * scales[..., : floats.shape[-2], : floats.shape[-1]]


def dequantized(q) -> np.ndarray:
    assert isinstance(q, jax_mx.MXArray)
    return np.asarray(jax.jit(lambda q: q.dequantize(jnp.float32))(q))


# ---- compressed-tensors' own files ---
@pytest.mark.parametrize("scheme", ["mxfp4a16", "mxfp8a16"])
def test_files_by_compressed_tensors(scheme):
    params = jax_mx.load_checkpoint(GOLDEN / scheme)
    want = jax_mx.load_safetensors(GOLDEN / f"{scheme}.safetensors")
    for name in ("q_proj", "k_proj", "v_proj"):
        name = f"{LAYER}self_attn.{name}"
        assert_bits_equal(dequantized(params[name + ".weight"]), np.float32(want[name + ".weight"]))
        assert params[name + ".bias"].dtype == jnp.bfloat16
    for name in ("gate_proj", "up_proj", "down_proj"):
        experts = params[f"{LAYER}mlp.experts.{name}.weight"]
        names = (f"{LAYER}mlp.experts.{i}.{name}.weight" for i in range(2))
        assert_bits_equal(dequantized(experts), np.stack([np.float32(want[n]) for n in names]))
    assert params[f"{LAYER}mlp.gate.weight"].dtype == jnp.bfloat16  # a router stays in floats
    assert len(params) == 10


EXPORTERS = {  # how many arrays there are, and how many of them are MX
    "modelopt": (12, 7), "quark": (12, 7), "deepseek": (13, 7), "mxfp8": (12, 7), "gpt_oss": (2, 2),
}  # fmt: skip


@pytest.mark.parametrize("library", EXPORTERS)
def test_files_by_exporters(library):
    """A model as a library's own code writes it, and what its own code makes of the codes."""
    params = jax_mx.load_checkpoint(EXPORTED / library)
    if library == "gpt_oss":
        params |= jax_mx.load_checkpoint(EXPORTED / library / "original")
    want = jax_mx.load_safetensors(EXPORTED / f"{library}.safetensors")
    in_mx = [name for name, w in params.items() if isinstance(w, jax_mx.MXArray)]
    assert (len(params), len(in_mx)) == EXPORTERS[library] and want
    for name, floats in want.items():
        assert_bits_equal(dequantized(params[name]), np.float32(floats))
    head = params.get("lm_head.weight")
    assert head is None or head.dtype == jnp.bfloat16


def test_parts_of_a_layer_become_one():
    apart = jax_mx.load_checkpoint(GOLDEN / "mxfp4a16")
    params = jax_mx.load_checkpoint(
        GOLDEN / "mxfp4a16", join={"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    )
    for end in ("weight", "bias"):
        parts = [apart[f"{LAYER}self_attn.{n}_proj.{end}"] for n in "qkv"]
        got = params[f"{LAYER}self_attn.qkv_proj.{end}"]
        join = jax_mx.concatenate if end == "weight" else jnp.concatenate
        jax.tree.map(assert_bits_equal, got, join(parts))
    assert not any("q_proj" in name and "qkv" not in name for name in params)
    load = jax_mx.load_checkpoint
    assert_refused(
        lambda: load(GOLDEN / "mxfp4a16", join={"x": ["gate_proj", "no_proj"]}),
        ValueError,
        "no_proj.weight', which is not there",
    )
    assert_refused(
        lambda: load(GOLDEN / "mxfp4a16", join={"x": ["gate_proj", "down_proj"]}),
        ValueError,
        "cannot be joined: they are MXFP4_E2M1 (2, 96, 64) and MXFP4_E2M1 (2, 64, 96)",
    )
    assert_refused(lambda: load(GOLDEN / "mxfp4a16", join="qkv"), TypeError, "join must map")


def test_a_part_without_the_first_is_told(tmp_path):
    names = ("0.gate_proj", "0.up_proj", "1.up_proj")
    tensors = {f"{name}.weight": np.ones((2, 4), np.float32) for name in names}
    folder = write(tmp_path / "model", tensors)
    with pytest.warns(
        UserWarning, match="'1.up_proj.weight' stays by itself, as its layer"
    ) as told:
        params = jax_mx.load_checkpoint(folder, join={"both": ["gate_proj", "up_proj"]})
    assert {*params} == {"0.both.weight", "1.up_proj.weight"} and told[0].filename == __file__


def test_scalars_of_parts_stay(tmp_path):
    scalars = {f"{name}_proj.input_scale": jnp.ones(()) for name in ("gate", "up")}
    parts = {f"{name}_proj.bias": jnp.ones(4) for name in ("gate", "up")}
    jax_mx.save_safetensors(scalars | parts, tmp_path / "model.safetensors")
    params = jax_mx.load_checkpoint(tmp_path, join={"both": ["gate_proj", "up_proj"]})
    assert {*params} == {*scalars, "both.bias"} and params["both.bias"].shape == (8,)


def test_experts_are_what_a_layer_takes():
    """Gates and ups of all experts are one array, as `moe` takes them."""
    load = jax_mx.load_checkpoint
    params = load(GOLDEN / "mxfp8a16", join={"gate_up_proj": ["gate_proj", "up_proj"]})
    apart, at = load(GOLDEN / "mxfp8a16"), f"{LAYER}mlp.experts."
    both = [apart[f"{at}{name}_proj.weight"] for name in ("gate", "up")]
    x = normal((8, 64), dtype=jnp.bfloat16)
    routed = x, jnp.tile(jnp.arange(2), (8, 1)), jnp.ones((8, 2))
    down = params[f"{at}down_proj.weight"]
    got = jax_mx.moe(*routed, params[f"{at}gate_up_proj.weight"], down)
    assert_bits_equal(got, jax_mx.moe(*routed, jax_mx.concatenate(both, axis=1), down))


# ---- what others write, from their sources ---
PACKED, SCALES = codes_of((40, 64)), codes_of((40, 4), 1)
CODES = codes_of((200, 160), 2)
TILES = codes_of((2, 2), 3)  # 128 x 128, cut off in both directions
TILED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
QUARK = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
POWERS = np.ldexp(np.float32(1), TILES.astype(np.int32) - 127)
FOUR, EIGHT = scaled(nibbles_of(PACKED), SCALES), floats_of(CODES)
LAYOUTS = {  # config, how names of values and scales end, both, their dtypes, what they stand for
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": ["lm_head"]},
        (".weight", ".weight_scale"), (CODES, codes_of((200, 5), 4)), ("F8_E4M3", "U8"),
        scaled(EIGHT, codes_of((200, 5), 4)),
    ),
    "quark": (
        {"quant_method": "quark", "global_quant_config": {"weight": QUARK}},
        (".weight", ".weight_scale"), (PACKED, SCALES), ("U8", "U8"), FOUR,
    ),
    "quark, MXFP8 in tiles": (
        {"quant_method": "quark", "global_quant_config": {"weight": {
            **QUARK, "dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [32, 32]}}},
        (".weight", ".weight_scale"), (CODES[:192], codes_of((6, 5), 5)), ("F8_E4M3", "F8_E8M0"),
        scaled(EIGHT[:192], codes_of((6, 5), 5), (32, 32)),
    ),
    "gpt-oss": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        ("_blocks", "_scales"), (PACKED.reshape(2, 20, 4, 16), SCALES.reshape(2, 20, 4)),
        ("U8", "U8"), FOUR.reshape(2, 20, 128),
    ),
    "gpt-oss, original": (
        None, (".blocks", ".scales"), (PACKED.reshape(2, 20, 4, 16), SCALES.reshape(2, 20, 4)),
        ("U8", "U8"), FOUR.reshape(2, 20, 128),
    ),
    "deepseek, float32": (
        TILED, (".weight", ".weight_scale_inv"), (CODES, POWERS), ("F8_E4M3", "F32"),
        scaled(EIGHT, TILES, (128, 128)),
    ),
    "deepseek, ue8m0": (
        {**TILED, "scale_fmt": "ue8m0"}, (".weight", ".scale"), (CODES[:192], TILES),
        ("F8_E4M3", "F8_E8M0"), scaled(EIGHT[:192], TILES, (128, 128)),
    ),
    "deepseek, experts": (
        {**TILED, "scale_fmt": "ue8m0"}, (".weight", ".scale"), (PACKED, SCALES),
        ("I8", "F8_E8M0"), FOUR,
    ),
    "F4": (
        {"quant_method": "quark", "global_quant_config": {"weight": QUARK}},
        (".weight", ".weight_scale"), (PACKED, SCALES), ("F4", "F8_E8M0"), FOUR,
    ),
    "mxfp8": (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        (".weight", ".weight_scale_inv"), (CODES, codes_of((200, 5), 4)), ("F8_E4M3", "U8"),
        scaled(EIGHT, codes_of((200, 5), 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout(name, tmp_path):
    config, ends, arrays, dtypes, want = LAYOUTS[name]
    tensors = {UP + end: array for end, array in zip(ends, arrays, strict=True)}
    tensors["model.norm.weight"] = np.ones(8, ml_dtypes.bfloat16)
    # Longer ends first: one may be the end of another.
    pairs = sorted(zip(ends, dtypes, strict=True), key=lambda pair: -len(pair[0]))
    folder = write(tmp_path / "model", tensors, config, {UP + e: d for e, d in pairs})
    params = jax_mx.load_checkpoint(folder)
    (weight,) = {*params} - {"model.norm.weight"}
    assert weight.startswith(UP) and params["model.norm.weight"].shape == (8,)
    assert_bits_equal(dequantized(params[weight]), want)
    x = normal((3, want.shape[-1]), dtype=jnp.bfloat16)
    w = params[weight]
    y = jax_mx.einsum("mk,...nk->...mn", x, w, recipe="bf16") if w.ndim == 2 else None
    assert y is None or y.shape == (3, w.shape[0])


def test_modelopts_other_config(tmp_path):
    config, ends, arrays, _, want = LAYOUTS["modelopt"]
    tensors = {UP + end: array for end, array in zip(ends, arrays, strict=True)}
    folder = write(tmp_path / "model", tensors, None, {".weight": "F8_E4M3"})
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MXFP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")
    assert_bits_equal(dequantized(jax_mx.load_checkpoint(folder)[UP + ".weight"]), want)


def test_tiles_keep_what_tensor_cores_want(tmp_path):
    """Windows of 128 x 128, whose codes FP8 tensor cores multiply before scales are applied."""
    tensors = {UP + ".weight": codes_of((256, 256)), UP + ".weight_scale_inv": POWERS}
    folder = write(tmp_path / "model", tensors, TILED, {".weight": "F8_E4M3"})
    q = jax_mx.load_checkpoint(folder)[UP + ".weight"]
    assert isinstance(q, jax_mx.MXArray) and q.block == (32, 32) and q.window == (128, 128)


# ---- what is not MX ---
REFUSED = {
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}, {},
        "weights in NVFP4 (modelopt), which is not MX",
    ),
    "one of several": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "a": {"quant_algo": "MXFP8"}, "b": {"quant_algo": "W4A8_AWQ"}}}, {}, {},
        "weights in W4A8_AWQ (modelopt)",
    ),
    "unknown": ({"quant_method": "awq"}, {}, {}, "by 'awq', which jax_mx does not read"),
    "no tiles": ({"quant_method": "fp8", "fmt": "e4m3"}, {}, {}, "a scale for each tensor (fp8)"),
    "no powers": (
        TILED, {".weight": CODES, ".weight_scale_inv": POWERS * np.float32(1.5)},
        {".weight": "F8_E4M3"},
        "are F32 and not powers of two",
    ),
    "e4m3 scales": (
        {"quant_method": "quark", "global_quant_config": {"weight": QUARK}},
        {".weight": PACKED, ".weight_scale": codes_of((40, 8))}, {".weight_scale": "F8_E4M3"},
        "are F8_E4M3, not the bytes of exponents that MX has (E4M3 is NVFP4's)",
    ),
    "blocks of 16": (
        {"quant_method": "quark", "global_quant_config": {"weight": QUARK}},
        {".weight": PACKED, ".weight_scale": codes_of((40, 8))}, {},
        "MX has a scale for 32 elements",
    ),
    "floats": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        {".weight": POWERS, ".weight_scale": TILES}, {}, "is F32; codes of MX are F8_E4M3",
    ),
    "no scales": (
        TILED, {".weight": CODES, "s_scale_inv": POWERS}, {".weight": "F8_E4M3"},
        "is F8_E4M3 and has no scales",
    ),
    "packed codes alone": (
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        {".weight_packed": PACKED}, {}, "up_proj.weight_packed' is U8 and has no scales",
    ),
    "bytes alone": (
        {"quant_method": "quark", "global_quant_config": {"weight": QUARK}},
        {".weight": PACKED}, {}, "is U8 and has no scales of its own",
    ),
    "blocks alone": (None, {".blocks": PACKED}, {}, "is U8 and has no scales of its own"),
    "scales alone": (
        {"quant_method": "quark", "global_quant_config": {"weight": QUARK}},
        {".weight_scale": SCALES}, {}, "has scales, and there is no",
    ),
    "rotated": (
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
         "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, {}, {},
        "weights in mxfp4-pack-quantized with transforms (compressed-tensors)",
    ),
    "zero points": (
        {"quant_method": "compressed-tensors", "config_groups": {
            "0": {"format": "mxfp4-pack-quantized", "weights": {"symmetric": False}}}}, {}, {},
        "weights in mxfp4-pack-quantized with zero points",
    ),
    "columns": (
        {"quant_method": "quark", "global_quant_config": {"weight": {**QUARK, "ch_axis": 0}}}, {},
        {}, "e8m0 along axis 0 (quark)",
    ),
    "rotated activations": (
        {"quant_method": "quark", "global_quant_config": {"weight": QUARK},
         "algo_config": [{"name": "rotation", "r1": True, "r4": True}]}, {}, {},
        "e8m0 with rotated activations (quark)",
    ),
    "nvfp4 without a config": (
        None, {".weight": PACKED, ".weight_scale": codes_of((40, 8))},
        {".weight_scale": "F8_E4M3"}, "no quantization_config says what",
    ),
    "damaged": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, {}, {},
        "is none of quark's",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_mx_is_refused_by_name(name, tmp_path):
    config, tensors, dtypes, why = REFUSED[name]
    tensors = {UP + end: array for end, array in tensors.items()} or {"x": np.ones(2, np.float32)}
    folder = write(tmp_path / "model", tensors, config, {UP + e: d for e, d in dtypes.items()})
    assert_refused(lambda: jax_mx.load_checkpoint(folder), ValueError, why)


def test_nvfp4_by_compressed_tensors_is_refused():
    assert_refused(
        lambda: jax_mx.load_checkpoint(GOLDEN / "nvfp4a16"),
        ValueError,
        "nvfp4-pack-quantized (compressed-tensors), which is not MX",
    )


def test_bad_arguments(tmp_path):
    folder = write(tmp_path / "model", {"x": np.ones(2, np.float32)})
    load = jax_mx.load_checkpoint
    assert_refused(lambda: load(tmp_path / "no"), FileNotFoundError, "is no .safetensors file")
    assert_refused(lambda: load(folder, like=3), TypeError, "like must be a dictionary or")
    assert_refused(lambda: load(folder, like=lambda *_: 3), TypeError, "must give a Sharding")
    (folder / "config.json").write_text("{")
    assert_refused(lambda: load(folder), ValueError, "config.json is damaged")
    (folder / "config.json").write_text('{"text_config": null, "quantization_config": "awq"}')
    assert_refused(lambda: load(folder), ValueError, "quantization_config of")
    (folder / "config.json").write_text('{"text_config": null}')
    assert_bits_equal(load(folder)["x"], np.ones(2, np.float32))


def test_a_tensor_is_in_one_file(tmp_path):
    folder = write(tmp_path / "model", {"x": np.ones(2, np.float32)})
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert_refused(lambda: jax_mx.load_checkpoint(folder), ValueError, "both have 'x'")
    odd = write(tmp_path / "odd", {"x": np.zeros((2, 3), np.uint8)}, None, {"x": "F4"})
    file = odd / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"[2, 6]", b"[4, 3]"))
    assert_refused(lambda: jax_mx.load_checkpoint(odd), ValueError, "rows must have whole bytes")


# ---- devices and memory ---
def test_nothing_is_read_for_what_does_not_fit(tmp_path, monkeypatch):
    """Names, formats and shardings are known from headers; reading may take minutes."""
    config, ends, arrays, _, _ = LAYOUTS["modelopt"]
    tensors = {UP + end: array for end, array in zip(ends, arrays, strict=True)}
    folder = write(tmp_path / "model", tensors, config, {".weight": "F8_E4M3"})
    name, load = UP + ".weight", jax_mx.load_checkpoint
    good = load(folder)[name]
    other = jax.ShapeDtypeStruct((2,), jnp.float32)
    where = NamedSharding(jax.make_mesh((3,), "n", devices=jax.devices("cpu")[:3]), P("n"))
    monkeypatch.setattr(reading.Files, "_copied", lambda *_: pytest.fail("it is read"))
    for expected, why in (
        ({name: good, "more": other}, "the file has no 'more'"),
        ({}, "which is not expected"),
        ({name: other}, "is an MXArray, expected is an array"),
        (lambda *_: where, "cannot be split so"),
    ):
        assert_refused(lambda expected=expected: load(folder, like=expected), ValueError, why)


def test_a_part_that_several_devices_have_is_read_once(tmp_path, capsys):
    jax_mx.save_safetensors({"x": jnp.ones((4, 64))}, tmp_path / "model.safetensors")
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=jax.devices("cpu")[:8])
    where = NamedSharding(mesh, P("model"))
    got = jax_mx.load_checkpoint(tmp_path, like=lambda *_: where, progress=True)
    assert got["x"].sharding == where and "2/1" not in capsys.readouterr().err
    reads = []
    part = np.ones((2, 64), np.float32)
    tensor = reading.Tensor("x", (4, 64), part.dtype, lambda at: reads.append(at) or part)
    reading.placed("load", tensor, where)
    assert len(reads) == 2


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shards_are_read_by_their_devices(axis_type):
    mesh = mesh_of(2, 2, names="en", axis_type=axis_type)
    specs = {3: P("e", "n"), 2: P("n"), 1: P()}

    def where(name, shape):
        return NamedSharding(mesh, specs[len(shape)])

    join = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    whole = jax_mx.load_checkpoint(GOLDEN / "mxfp8a16", join=join)
    split = jax_mx.load_checkpoint(GOLDEN / "mxfp8a16", join=join, like=where)
    jax.tree.map(assert_bits_equal, split, whole)
    for name, q in split.items():
        for leaf in jax.tree.leaves(q):
            assert leaf.sharding.is_equivalent_to(where(name, q.shape), q.ndim)
    again = jax_mx.load_checkpoint(GOLDEN / "mxfp8a16", join=join, like=split)
    for one, other in zip(*map(jax.tree.leaves, (again, split)), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    del split[f"{LAYER}mlp.gate.weight"]
    assert_refused(
        lambda: jax_mx.load_checkpoint(GOLDEN / "mxfp8a16", join=join, like=split),
        ValueError,
        "mlp.gate.weight', which is not expected",
    )
    assert_refused(
        lambda: jax_mx.load_checkpoint(
            GOLDEN / "mxfp8a16",
            like=lambda _, s: NamedSharding(mesh, P(*[None] * (len(s) - 1), "n")),
        ),
        ValueError,
        "into parts of 48 elements, which cuts blocks of 32",
    )


def test_a_shard_of_tiles(tmp_path):
    """Each shard's scales begin and end in tiles that it does not have all of."""
    config, ends, _, _, _ = LAYOUTS["deepseek, float32"]
    codes = codes_of((320, 192))
    exponents = codes_of((3, 2), 5)
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    tensors = dict(zip((UP + end for end in ends), (codes, powers), strict=True))
    folder = write(tmp_path / "model", tensors, config, {".weight": "F8_E4M3"})
    mesh = jax.make_mesh((5, 1), ("n", "k"), devices=jax.devices("cpu")[:5])
    params = jax_mx.load_checkpoint(folder, like=lambda *_: NamedSharding(mesh, P("n", "k")))
    assert_bits_equal(
        dequantized(params[UP + ".weight"]), scaled(floats_of(codes), exponents, (128, 128))
    )


def test_memory_is_that_of_the_largest_tensor(tmp_path):
    size = 2**20
    tensors = {f"{i}.weight": np.full((size // 32, 32), i, np.uint8) for i in range(16)}
    folder = write(tmp_path / "model", tensors, None)
    tracemalloc.start()
    try:
        jax_mx.load_checkpoint(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size <= peak < 3 * size


def test_progress_names_tensors(capsys):
    jax_mx.load_checkpoint(GOLDEN / "mxfp4a16", progress=True)
    assert f"load_checkpoint 1/1: {LAYER}mlp.experts.0.down_proj.weight_packed" in (
        capsys.readouterr().err
    )


# ---- our own files ---
def test_our_files(tmp_path):
    """A folder of them, and safetensors' own loaders, which know no floats of 8 bits."""
    import safetensors.flax
    import safetensors.numpy

    x = normal((64, 64))
    saved = {"up": jax_mx.quantize(x, "mxfp4_e2m1", axis=0), "down": jax_mx.quantize(x), "b": x[0]}
    jax_mx.save_safetensors(saved, tmp_path / "model.safetensors")
    loaded = jax_mx.load_checkpoint(tmp_path)
    assert jax.tree.structure(loaded) == jax.tree.structure(saved)
    jax.tree.map(assert_bits_equal, loaded, saved)
    for load in (safetensors.numpy.load_file, safetensors.flax.load_file):
        theirs = load(tmp_path / "model.safetensors")
        assert theirs["up.scales"].dtype == np.uint8
        assert_bits_equal(theirs["up.scales"], np.asarray(saved["up"].scales).view(np.uint8))
        assert_bits_equal(theirs["down.values"], np.asarray(saved["down"].values).view(np.uint8))


def test_files_of_older_versions_are_read(tmp_path):
    """They have values in F8_E4M3 and scales in F8_E8M0."""
    q = jax_mx.quantize(normal((64, 64)))
    file = tmp_path / "model.safetensors"
    jax_mx.save_safetensors({"w": q}, file)
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["w.values"]["dtype"], header["w.scales"]["dtype"] = "F8_E4M3", "F8_E8M0"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
    for loaded in (jax_mx.load_safetensors(file), jax_mx.load_checkpoint(tmp_path)):
        jax.tree.map(assert_bits_equal, loaded["w"], q)


# ---- floats ---
def test_params_are_quantized_by_their_names():
    w = normal((64, 96), dtype=jnp.bfloat16)
    params = {"layers": [{"up": w, "router": w, "norm": w[0], "odd": w[:, :80]}], "embed": w}
    rules = {r".*(embed|router)": None, r"layers/\d+/up": "mxfp4", ".*": "mxfp8"}
    with pytest.warns(UserWarning, match="'layers/0/odd' stays in floats"):
        got = jax_mx.quantize_params(params, rules)
    layer = got["layers"][0]
    jax.tree.map(assert_bits_equal, layer["up"], jax_mx.quantize(w, "mxfp4_e2m1"))
    assert layer["router"] is w and got["embed"] is w and layer["odd"].shape == (64, 80)
    assert layer["norm"].shape == (96,)
    again = jax_mx.quantize_params(got, {".*up": "mxfp8", "embed": "mxfp8_rows"}, axis=-2)
    assert again["layers"][0]["up"] is layer["up"]
    jax.tree.map(assert_bits_equal, again["embed"], jax_mx.quantize(w, axis=-2, window="row"))
    assert_refused(lambda: jax_mx.quantize_params(params, {"(": "mxfp8"}), ValueError, "regular")


# ---- tiles, as the config says ---
@pytest.mark.parametrize(
    ("shape", "tile", "library"),
    [((40, 64), (32, 32), "fp8"), ((30, 64), (16, 32), "quark"), ((300, 128), (160, 128), "fp8")],
    ids=str,
)
def test_tiles_are_those_of_the_config(shape, tile, library, tmp_path):
    codes = codes_of(shape)
    exponents = codes_of([-(-n // t) for n, t in zip(shape, tile, strict=True)], 1) + np.uint8(64)
    weight = {**QUARK, "dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [*tile]}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    if library == "fp8":
        config = {**TILED, "weight_block_size": [*tile]}
    tensors = {UP + ".weight": codes, UP + ".weight_scale": exponents}
    folder = write(tmp_path / "model", tensors, config, {".weight": "F8_E4M3"})
    got = dequantized(jax_mx.load_checkpoint(folder)[UP + ".weight"])
    assert_bits_equal(got, scaled(floats_of(codes), exponents, tile))


# ---- join ---
def test_a_window_of_two_parts_is_none(tmp_path):
    """A tile of 128 rows with scales of two parts would have one scale in a kernel."""
    for rows, window in ((192, 32), (256, (128, 128))):
        tensors = {}
        for name in ("a", "b"):
            tensors |= {f"{name}.weight": codes_of((rows, 256)), f"{name}.weight_scale_inv": POWERS}
        folder = write(tmp_path / str(rows), tensors, TILED, {".weight": "F8_E4M3"})
        params = jax_mx.load_checkpoint(folder, join={"ab": ("a", "b")})
        q = params["ab.weight"]
        assert isinstance(q, jax_mx.MXArray) and q.window == window
        half = scaled(floats_of(tensors["a.weight"]), TILES, (128, 128))
        assert_bits_equal(dequantized(q), np.concatenate([half, half]))


def test_join_names_what_is_there(tmp_path):
    one = np.ones((2, 2), np.float32)
    folder = write(tmp_path / "model", {"a.w": one, "c.w": one, "d.w": one})
    for join, error, why in (
        ({"x": ("b", "a")}, ValueError, "join has 'b', which is part of no tensor's name"),
        ({"x": ("a", "a")}, ValueError, "names a part of 'x' twice"),
        ({"x": ("a", 3)}, TypeError, "join must map"),
        ({3: ("a", "c")}, TypeError, "join must map"),
        ({"d": ("a", "c")}, ValueError, "'d.w', which is there already"),
    ):
        assert_refused(lambda j=join: jax_mx.load_checkpoint(folder, join=j), error, why)
    for name in (r"\1", "a"):
        params = jax_mx.load_checkpoint(folder, join={name: ("a", "c")})
        assert {*params} == {f"{name}.w", "d.w"} and params[f"{name}.w"].shape == (4, 2)


def test_columns_of_blocks_of_our_own(tmp_path):
    """Along axis 0 a shape and a shard's blocks are counted there; join refuses them."""
    q = jax_mx.quantize(normal((64, 96)), "mxfp4_e2m1", axis=0)
    jax_mx.save_safetensors({"a": q, "b": q}, tmp_path / "model.safetensors")
    mesh = jax.make_mesh((2, 2), ("m", "n"), devices=jax.devices("cpu")[:4])
    shapes = []

    def where(_, shape):
        shapes.append(shape)
        return NamedSharding(mesh, P("m", "n"))

    jax.tree.map(assert_bits_equal, jax_mx.load_checkpoint(tmp_path, like=where)["a"], q)
    assert {*shapes} == {(64, 96)}
    split = NamedSharding(mesh, P(("m", "n")))
    for keywords, why in (
        ({"like": lambda *_: split}, "into parts of 16 elements, which cuts blocks"),
        ({"join": {"x": ("a", "b")}}, "'a' cannot be joined: its blocks must run along the last"),
    ):
        assert_refused(lambda k=keywords: jax_mx.load_checkpoint(tmp_path, **k), ValueError, why)


def test_a_name_is_that_of_one_array(tmp_path):
    tensors = {"a.weight_packed": PACKED, "a.weight_scale": SCALES, "a.weight": POWERS}
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    folder = write(tmp_path / "model", tensors, config)
    assert_refused(lambda: jax_mx.load_checkpoint(folder), ValueError, "'a.weight' in MX and in")


# ---- configs that are elsewhere, or nowhere ---
def test_a_file_is_read_by_the_config_beside_it(tmp_path):
    config, ends, arrays, _, want = LAYOUTS["modelopt"]
    tensors = {UP + end: array for end, array in zip(ends, arrays, strict=True)}
    folder = write(tmp_path / "model", tensors, config, {".weight": "F8_E4M3"})
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file.name)}))
    for path in (str(file), index):
        assert_bits_equal(dequantized(jax_mx.load_checkpoint(path)[UP + ".weight"]), want)
    index.write_text('{"weight_map": {}}')
    assert_refused(lambda: jax_mx.load_checkpoint(index), ValueError, 'has no "weight_map"')
    assert_refused(lambda: jax_mx.load_checkpoint([folder]), TypeError, "the path of one model")


@pytest.mark.parametrize("name", [n for n in LAYOUTS if "gpt-oss" not in n])
def test_scales_without_a_config_are_refused(name, tmp_path):
    _, ends, arrays, dtypes, _ = LAYOUTS[name]
    tensors = {UP + end: array for end, array in zip(ends, arrays, strict=True)}
    pairs = sorted(zip(ends, dtypes, strict=True), key=lambda pair: -len(pair[0]))
    folder = write(tmp_path / "model", tensors, None, {UP + e: d for e, d in pairs})
    assert_refused(
        lambda: jax_mx.load_checkpoint(folder), ValueError, "no quantization_config says what"
    )


def test_what_a_config_leaves_out(tmp_path):
    codes = {"a.weight": np.zeros((), np.uint8), "a.weight_scale": np.ones((), np.float32)}
    one = {"x": np.ones(2, np.float32)}
    for config, tensors, why in (
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, one, "in nvfp4"),
        ({"bits": 4}, one, "quantized by 'nothing that its config names'"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, codes, "'a.weight' is ()"),
    ):
        folder = write(tmp_path / "model", tensors, config, {".weight": "F8_E4M3"})
        assert_refused(lambda folder=folder: jax_mx.load_checkpoint(folder), ValueError, why)


def test_float4_without_scales_stays_float4(tmp_path):
    x = jnp.asarray(E2M1[:12].reshape(2, 6), jnp.float4_e2m1fn)
    jax_mx.save_safetensors({"x": x}, tmp_path / "model.safetensors")
    assert_bits_equal(jax_mx.load_checkpoint(tmp_path)["x"], x)
    mesh = jax.make_mesh((2,), ("n",), devices=jax.devices("cpu")[:2])  # of three elements each
    where = NamedSharding(mesh, P(None, "n"))
    assert_bits_equal(jax_mx.load_checkpoint(tmp_path, like=lambda *_: where)["x"], x)


def test_params_that_a_mesh_splits_stay_with_a_warning_at_the_callers_line():
    mesh = mesh_of(4, names="k", axis_type=AxisType.Explicit)
    w = jax.device_put(jnp.ones((8, 64)), NamedSharding(mesh, P(None, "k")))  # 16 a device
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match="'w' stays in floats") as told:
        got = jax_mx.quantize_params({"w": w}, {".*": "mxfp8"})
    assert got["w"] is w and [one.filename for one in told] == [__file__]
    assert_refused(
        lambda: jax_mx.quantize_params({}, {".*": "mxfp8"}, axis=7),
        ValueError,
        "axis must be -1 or -2, got 7",
    )


def test_params_that_are_no_floats_of_mx_are_told():
    w = np.ones((2, 64))
    with pytest.warns(UserWarning, match="'w' stays in floats: it is float64, MX takes bfloat16"):
        got = jax_mx.quantize_params({"w": w, "n": np.ones((2, 64), int)}, {".*": "mxfp8"})
    assert got["w"] is w
    with pytest.warns(UserWarning, match="such as 'w', stays in floats: no pattern that has a rec"):
        jax_mx.quantize_params({"w": jnp.ones((2, 64))}, {".*upp": "mxfp8"})


def test_experts_that_differ_stay_and_are_told(tmp_path):
    shapes = (2, 4), (2, 4), (2, 6)
    experts = {f"experts.{i}.w": jnp.ones(shape) for i, shape in enumerate(shapes)}
    jax_mx.save_safetensors(experts, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="the 3 experts of 'experts.w' stay by themselves") as told:
        assert {*jax_mx.load_checkpoint(tmp_path)} == {*experts}
    assert told[0].filename == __file__


def test_our_damaged_files_are_named(tmp_path):
    w = jax_mx.quantize(jnp.ones((8, 64)), "mxfp8_e4m3")
    jax_mx.save_safetensors({"w": w}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    for old, new, why in (
        (b"[8, 2]", b"[2, 8]", "'w' in .* is not what the file says of it: .* scales of the shape"),
        (b'\\"axis\\": -1', b'\\"axis\\": {}', "is damaged in 'w'"),
    ):
        assert data.count(old) == 1, old
        (tmp_path / "model.safetensors").write_bytes(data.replace(old, new))
        with pytest.raises(ValueError, match=why):
            jax_mx.load_checkpoint(tmp_path)


# ---- the example ---
def test_the_example_reads_configs(tmp_path):
    """Llama's config.json may leave out heads' widths, and scale positions."""
    examples = Path(__file__).parent.parent / "examples"
    serve = runpy.run_path(f"{examples}/serve.py")
    text = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": None, "rms_norm_eps": 3.0}
    (tmp_path / "config.json").write_text(json.dumps(text))
    config = serve["LLAMA"]["config_of"](tmp_path)
    assert config["head_dim"] == 32 and config["num_key_value_heads"] == 4
    assert_bits_equal(serve["norm"](config, jnp.ones(4), 2.0), np.ones(4, np.float32))
    for rope in ({"rope_scaling": {"type": "linear"}}, {"rope_parameters": {"rope_type": "yarn"}}):
        (tmp_path / "config.json").write_text(json.dumps(text | rope))
        with pytest.raises(SystemExit, match="scales positions by"):
            serve["LLAMA"]["config_of"](tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(text | {"model_type": "gemma"}))
    with pytest.raises(SystemExit, match="is of 'gemma', and this example knows Llamas"):
        serve["load"](tmp_path)


@jax.numpy_dtype_promotion("standard")
def test_the_example_generates_by_one_call(tmp_path, monkeypatch):
    """With a head in MX or in bfloat16; floats of any width and all others in plain JAX."""
    serve = runpy.run_path(f"{Path(__file__).parent.parent}/examples/serve.py")
    serve["LLAMA"]["write"](tmp_path, "tiny")
    config, model = serve["load"](tmp_path)
    prompt, calls, chain = jnp.array([[1, 2, 3]]), [], jax_mx.matmul_chain
    head = jax_mx.quantize(model["lm_head"], "mxfp8_e4m3")
    for held, count in ((model, 5 * 2), ({**model, "lm_head": head}, 5 * 2 + 1)):

        def spy(x, steps, **options):
            calls.append(len(steps))
            return chain(x, steps, **options)

        monkeypatch.setattr(jax_mx, "matmul_chain", spy)
        got = serve["generate"](config, 4, held, prompt)
        assert calls.pop() == count and not calls
        monkeypatch.setattr(jax_mx, "matmul_chain", None)
        cache = serve["empty_cache"](config, 1, 7)
        tokens, want = prompt, []
        for _ in range(4):
            logits, _ = serve["forward"](config, held, cache, tokens, 0)
            tokens = jnp.concatenate([tokens, logits.argmax(-1)[:, None]], 1)
            want.append(int(tokens[0, -1]))
        assert got[0].tolist() == want
    jax_mx.save_safetensors({"model.layers.0.self_attn.q_proj.bias": jnp.ones(4)}, tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / "bias.safetensors")
    for name in ("k", "v"):
        bias = {f"model.layers.0.self_attn.{name}_proj.bias": jnp.ones(4)}
        jax_mx.save_safetensors(bias, tmp_path / f"{name}.safetensors")
    with pytest.raises(SystemExit, match="a Llama has no 'model"):
        serve["load"](tmp_path)
