"""Exports a program on a laptop, kernels included, and runs it on a GPU, or on the laptop, too.

    python examples/export_and_run.py export mlp --archs "sm_90a"   # here, without a GPU
    python examples/export_and_run.py run mlp                       # there; any machine with jax_mx
    python examples/export_and_run.py                               # both, in two processes

The folder holds the program, its MXFP4 weights, an input and what the laptop computed of it. A GPU
must quantize the input to the same bytes; sums may differ by their order.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_mx

ROWS, WIDTH, HIDDEN = 256, 512, 1024


def mlp(x: jax.Array, up: jax_mx.MXArray, down: jax_mx.MXArray):
    """Floats of x's shape, and x itself in MXFP8, to compare its bytes."""
    hidden = jax.nn.gelu(jax_mx.matmul(x, up))
    return jax_mx.matmul(hidden, down), jax_mx.quantize(x)


def export(folder: Path, platforms: list[str]) -> None:
    """Writes program.bin and arrays.safetensors."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    x, *weights = (
        jax.random.normal(key, shape, jnp.bfloat16) * shape[0] ** -0.5
        for key, shape in zip(keys, shapes, strict=True)
    )
    up, down = (jax_mx.quantize(w, "mxfp4_e2m1", axis=0) for w in weights)
    exported = jax.export.export(
        jax.jit(mlp), platforms=platforms, disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS
    )(x, up, down)
    program = exported.serialize()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.bin").write_bytes(program)
    y, q = jax.jit(mlp)(x, up, down)
    arrays = {"x": x, "up": up, "down": down, "y": y, "q": q}
    jax_mx.save_safetensors(arrays, folder / "arrays.safetensors")
    print(f"exported for {', '.join(platforms)}: {len(program):,} bytes, kernels included")


def run(folder: Path) -> None:
    """Calls the program on this machine's device and compares."""
    arrays = jax_mx.load_safetensors(folder / "arrays.safetensors")
    program = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    y, q = jax.jit(program.call)(arrays["x"], arrays["up"], arrays["down"])
    for ours, theirs in zip(jax.tree.leaves(q), jax.tree.leaves(arrays["q"]), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(), "other bytes"
    want = np.asarray(arrays["y"], np.float64)
    error = np.abs(np.asarray(y, np.float64) - want).max() / np.abs(want).max()
    assert error < 0.01, error
    print(f"ran on {jax.devices()[0].device_kind}: quantized to the same bytes,")
    print(f"and y differs by {error:.1e} of its largest element at most")


def main() -> None:
    """Does what is asked, or both one after the other."""
    parser = argparse.ArgumentParser(description="Exports a program, or runs one.")
    parser.add_argument("what", choices=["export", "run"], nargs="?")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--platforms", nargs="+", default=["cpu", "cuda"], help="cpu, cuda, rocm")
    parser.add_argument("--archs", default="sm_90a", help="that it carries kernels for")
    options = parser.parse_args()
    if options.what and options.folder is None:
        parser.error("which folder?")
    os.environ.setdefault("JAX_MX_ARCHS", options.archs)
    if options.what == "run":
        run(options.folder)
    elif options.what == "export":
        export(options.folder, options.platforms)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for command in ("export", "run"):
                subprocess.run([sys.executable, __file__, command, folder], check=True)


if __name__ == "__main__":
    main()
