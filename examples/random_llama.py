"""Writes a checkpoint of a Llama with random weights in MXFP4, as llm-compressor lays it out.

    python examples/random_llama.py FOLDER              # a tiny one
    python examples/random_llama.py FOLDER --size 8b    # of the shapes of Llama-3-8B, 6 GB

`examples/serve.py FOLDER` generates with it, and `jax_mx.load_checkpoint(FOLDER)` reads it.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

import jax_mx

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
         "num_attention_heads", "num_key_value_heads", "vocab_size", "rope_theta",
         "rms_norm_eps")  # fmt: skip
ATTENTION = "cudnn" if jax.default_backend() == "gpu" else "xla"
SIZES: dict[str, dict] = {
    "tiny": dict(zip(NAMES, (128, 256, 2, 32, 4, 2, 256, 500_000, 1e-5), strict=True)),
    "8b": dict(zip(NAMES, (4096, 14336, 32, 128, 32, 8, 128256, 500_000, 1e-5), strict=True)),
}


def config_of(folder) -> dict:
    """The config of a Llama, with what transformers assumes where it says nothing."""
    config = json.loads((Path(folder) / "config.json").read_text())
    config = {name: value for name, value in config.items() if value is not None}
    if (model := config.get("model_type", "llama")) != "llama":
        raise SystemExit(f"serve.py: {folder} is of {model!r}, and this example knows Llamas")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if (scaling := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise SystemExit(f"serve.py: {folder} scales positions by {scaling!r}, which it cannot do")
    heads = config["num_attention_heads"]
    assumed = {"head_dim": config["hidden_size"] // heads, "num_key_value_heads": heads}
    return assumed | {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0} | config | rope


def write(folder: Path, size: str) -> None:
    """Random weights with a Llama's names, in MXFP4 as compressed-tensors keeps it."""
    width, inner, layers, d, heads, groups, vocabulary, *_ = SIZES[size].values()
    shapes = {"q_proj": (heads * d, width), "k_proj": (groups * d, width)}
    shapes |= {"o_proj": (width, heads * d), "gate_proj": (inner, width)}
    shapes["down_proj"] = width, inner
    alike = {"v_proj": "k_proj", "up_proj": "gate_proj"}
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES[size] | {"quantization_config": config}))

    @partial(jax.jit, static_argnums=1)
    def weight(seed, shape):
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * shape[1] ** -0.5

    ones = jnp.ones(width, jnp.bfloat16)
    for i in track(range(layers), "writing layers", transient=True):
        file = {f"model.layers.{i}.{n}_layernorm.weight": ones for n in ("input", "post_attention")}
        for seed, name in enumerate((*shapes, *alike)):
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            w = weight(100 * i + seed, shapes[alike.get(name, name)])
            q, at = jax_mx.quantize(w, "mxfp4_e2m1"), f"model.layers.{i}.{part}.{name}.weight"
            file |= {f"{at}_packed": q.values, f"{at}_scale": np.asarray(q.scales).view(np.uint8)}
        jax_mx.save_safetensors(file, folder / f"layer-{i}.safetensors")
    table = weight(99, (vocabulary, width))
    file = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": ones}
    jax_mx.save_safetensors(file, folder / "tables.safetensors")


def empty_cache(config, batch, length):
    """Keys and values (B, length, heads, D) of each layer."""
    shape = batch, length, config["num_key_value_heads"], config["head_dim"]
    return [tuple(jnp.zeros((2, *shape), jnp.bfloat16)) for _ in range(config["num_hidden_layers"])]


def norm(config, x, weight):
    """RMS norm of the last axis."""
    x32, eps = x.astype(jnp.float32), config["rms_norm_eps"]
    return (x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + eps)).astype(x.dtype) * weight


def rotated(x, cos, sin):
    """(B, S, heads, D) turned by their positions' angles (S, D / 2)."""
    (a, b), cos, sin = jnp.split(x.astype(jnp.float32), 2, -1), cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attention(attend, qkv):
    """The attention of tokens (B, S) from a position on, of their products; and the cache."""
    (b, s, _), (_, _, groups, d) = qkv.shape, attend.keys.shape
    heads = qkv.reshape(b, s, -1, d)
    q, k, v = jnp.split(heads, [heads.shape[2] - 2 * groups, heads.shape[2] - groups], 2)
    q, k = (rotated(x, attend.cos, attend.sin) for x in (q, k))
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=attend.position, axis=1)
    keys, values = put(attend.keys, k), put(attend.values, v)
    lengths = jnp.full(b, attend.position + s, jnp.int32)
    attend = partial(jax.nn.dot_product_attention, key_value_seq_lengths=lengths)
    y = attend(q, keys, values, is_causal=s > 1, implementation=ATTENTION)
    return y.reshape(b, s, -1), (keys, values)


def main() -> None:
    """Writes it, and says how large it is."""
    parser = argparse.ArgumentParser(description="Writes a random Llama in MXFP4.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    options = parser.parse_args()
    write(options.folder, options.size)
    files = [*options.folder.glob("*.safetensors")]
    size = sum(file.stat().st_size for file in files) / 1e9
    print(f"{len(files)} files in {options.folder}, {size:.4f} GB")


if __name__ == "__main__":
    main()
