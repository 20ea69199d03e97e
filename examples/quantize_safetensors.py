"""Quantizes the matrices of a .safetensors file, writes them, and shows what each of them lost.

    python examples/quantize_safetensors.py model.safetensors model-mx.safetensors
    python examples/quantize_safetensors.py          # of a small model that it makes first

Blocks run along the last axis, which torch's linear layers contract. Other tensors than matrices of
floats, and tensors that `--keep` names, stay as they are. The result loads with
`jax_mx.load_safetensors`.
"""

import argparse
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jax_mx

KEEP = "embed|lm_head|router|norm"  # what published recipes leave in floats


def obstacle(name: str, x: jax.Array, keep: str) -> str:
    """Why a tensor stays as it is; empty where it is quantized."""
    if re.search(keep, name):
        return "kept by name"
    if x.ndim < 2 or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return "no matrix of floats"
    return f"32 does not divide {x.shape[-1]}" if x.shape[-1] % 32 else ""


def snr(x: jax.Array, q: jax_mx.MXArray) -> float:
    """Signal over noise in dB; 6 dB are a bit."""
    signal = np.asarray(x, np.float64)
    noise = signal - np.asarray(q.dequantize(jnp.float32), np.float64)
    return 10 * np.log10((signal**2).sum() / (noise**2).sum())


def make_model(path: Path) -> None:
    """Two layers of a transformer, as it begins to train."""
    tensors, key = {}, jax.random.key(0)
    shapes = {"attn.qkv": (1536, 512), "attn.out": (512, 512), "mlp.up": (2048, 512)}
    shapes |= {"mlp.down": (512, 2048), "norm": (512,)}
    for layer in range(2):
        for name, shape in shapes.items():
            key, key_of_x = jax.random.split(key)
            x = jax.random.normal(key_of_x, shape, jnp.bfloat16) * shape[-1] ** -0.5
            tensors[f"{layer}.{name}"] = x
    tensors["embed"] = jax.random.normal(key, (1000, 512), jnp.bfloat16)
    jax_mx.save_safetensors(tensors, path)


def quantize_file(source: Path, target: Path, format: str, keep: str) -> Table:
    """Writes the quantized tensors; a row for each."""
    table = Table("tensor", "shape", "bytes", "became", "SNR, dB", title=f"{source.name}: {format}")
    quantize = jax.jit(jax_mx.quantize, static_argnames="format")
    arrays: dict[str, jax.Array | jax_mx.MXArray] = {}
    before = after = 0
    for name, x in track(jax_mx.load_safetensors(source).items(), "quantizing", transient=True):
        assert not isinstance(x, jax_mx.MXArray), f"{name} is quantized already"
        arrays[name] = q = x
        lost = obstacle(name, x, keep)
        if not lost:
            arrays[name] = q = quantize(x, format=format)
            lost = f"{snr(x, q):.1f}"
        before, after = before + x.nbytes, after + q.nbytes
        table.add_row(name, " x ".join(map(str, x.shape)), f"{x.nbytes:,}", f"{q.nbytes:,}", lost)
    table.add_section()
    table.add_row("all", "", f"{before:,}", f"{after:,}", f"{after / before:.2f} of the bytes")
    jax_mx.save_safetensors(arrays, target, notes={"quantized from": source.name})
    return table


def main() -> None:
    """Quantizes, then reads back what was written."""
    parser = argparse.ArgumentParser(description="Quantizes the matrices of a .safetensors file.")
    parser.add_argument("source", type=Path, nargs="?", help="default: a small model, made here")
    parser.add_argument("target", type=Path, nargs="?", help="default: beside it, -mx in its name")
    parser.add_argument("--format", default="mxfp8_e4m3", help="or mxfp4_e2m1, ...")
    parser.add_argument("--keep", default=KEEP, help=f"names that stay; default: {KEEP}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = options.source or Path(folder) / "model.safetensors"
        if options.source is None:
            make_model(source)
        target = options.target or source.with_name(f"{source.stem}-mx.safetensors")
        console = Console()
        console.print(quantize_file(source, target, options.format, options.keep))
        again = jax_mx.load_safetensors(target)
        arrays = [x for x in again.values() if isinstance(x, jax_mx.MXArray)]
        console.print(f"{target.name} holds {len(arrays)} MXArrays; one is {arrays[0].format}.")


if __name__ == "__main__":
    main()
