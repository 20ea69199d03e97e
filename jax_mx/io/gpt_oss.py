"""gpt-oss' expert weights, read as they were published: MXFP4, never dequantized.

A checkpoint keeps each of a layer's two matrices as `*_blocks` and `*_scales`. Blocks are uint8 (E,
rows, K / 32, 16), two codes of e2m1 a byte, the lower half first. Scales are uint8 (E, rows, K /
32), exponents with the bias 127. This is MXFP4 along K with row-major scales and the shape (E,
rows, K); only the last two dimensions of blocks become one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_mx.formats.checks import shown, whole
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1
from jax_mx.io.reading import Files, Tensor, placed, placed_mx
from jax_mx.quantizing.mxarray import MXArray

OP = "gpt_oss.load_experts"

# How checkpoints call a layer's matrices and biases: transformers' files, and those of
# openai/gpt-oss itself ("original").
NAMES: Mapping[str, Mapping[str, str]] = {
    "model.layers.{layer}.mlp.experts.": {
        "gate_up_blocks": "gate_up_proj_blocks",
        "gate_up_scales": "gate_up_proj_scales",
        "gate_up_bias": "gate_up_proj_bias",
        "down_blocks": "down_proj_blocks",
        "down_scales": "down_proj_scales",
        "down_bias": "down_proj_bias",
    },
    "block.{layer}.mlp.": {
        "gate_up_blocks": "mlp1_weight.blocks",
        "gate_up_scales": "mlp1_weight.scales",
        "gate_up_bias": "mlp1_bias",
        "down_blocks": "mlp2_weight.blocks",
        "down_scales": "mlp2_weight.scales",
        "down_bias": "mlp2_bias",
    },
}


class Experts(NamedTuple):
    """The experts of a layer, as `jax_mx.moe` takes them; a pytree.

    Attributes:
      w_gate_up: MXFP4 (E, 2 I, D), blocks along D. Rows 0, 2, ... are the gate's, 1, 3, ... up's.
      w_down: MXFP4 (E, D, I), blocks along I.
      b_gate_up: floats (E, 2 I), gate and up by turns as well.
      b_down: floats (E, D).
    """

    w_gate_up: MXArray
    w_down: MXArray
    b_gate_up: jax.Array
    b_down: jax.Array


def load_experts(
    path: str | os.PathLike | Sequence[str | os.PathLike],
    layer: int,
    *,
    sharding: jax.sharding.Sharding | Mapping[str, jax.sharding.Sharding] | None = None,
    progress: bool | None = None,
) -> Experts:
    """The experts of one layer, as `jax_mx.moe` takes them.

    With experts = load_experts(path, 0) the layer is jax_mx.moe(x, choices, weights,
    **experts._asdict(), activation="gpt_oss", interleaved=True). Files are mapped into memory, and
    each process reads only the parts of its devices.

    Args:
      path: a .safetensors file, several of them, the folder that they lie in, or their
        model.safetensors.index.json.
      layer: its number, from 0.
      sharding: of all four arrays, whose first dimension is the expert, such as P("expert") on a
        mesh; or one by the name of each array. None: the default device. Blocks stay whole.
      progress: whether to say how far reading is: a bar on a terminal, else lines on stderr. None:
        on a terminal, if there is much to read.

    Returns:
      `Experts`, with codes and scales as the files have them.

    Raises:
      ModuleNotFoundError: safetensors is not installed.
      FileNotFoundError: there is no such file.
      TypeError: path is not a path, layer is not an int, or sharding has another type.
      ValueError: an index is damaged, the files have no such layer, its weights are not in MXFP4 or
        have shapes that do not fit. Shards would cut blocks.
    """
    try:
        layer = whole(layer)
    except TypeError as error:
        raise TypeError(f"{OP}: layer must be an int, got {shown(layer)}") from error
    files = Files(OP, path)
    experts = _Layer.of(files, layer)
    size = sum(tensor.nbytes for tensor in experts.tensors.values())
    with files.progress(size, progress):
        return experts.read(files, _shardings(sharding))


# ---- a layer ---
class _Layer(NamedTuple):
    """A layer's tensors, by the words in `NAMES`, and the files' names of them."""

    tensors: dict[str, Tensor]
    names: dict[str, str]

    @classmethod
    def of(cls, files: Files, layer: int) -> _Layer:
        """Looks the layer up, and checks what it is.

        Raises:
          ValueError: it is not there, or something else.
        """
        for prefix, suffixes in NAMES.items():
            names = {word: prefix.format(layer=layer) + name for word, name in suffixes.items()}
            if any(name in files.places for name in names.values()):
                break
        else:
            raise ValueError(f"{OP}: {_missing(files, layer)}")
        for name in names.values():
            if name not in files.places:
                kept = name.removesuffix("_blocks").removesuffix(".blocks")
                hint = "; it has floats instead, which jax_mx.quantize makes MXFP4 of"
                raise ValueError(
                    f"{OP}: layer {layer} has no {name!r}" + hint * (kept in files.places)
                )
        entry = cls({word: files[name] for word, name in names.items()}, names)
        entry._check()
        return entry

    def _check(self) -> None:
        for word, tensor in self.tensors.items():
            rank = {"blocks": 4, "scales": 3, "bias": 2}[word.rpartition("_")[2]]
            if rank > 2 and tensor.dtype != np.uint8:
                raise ValueError(
                    f"{OP}: {self.names[word]!r} is {tensor.dtype}, MXFP4's is uint8; floats are "
                    "quantized by jax_mx.quantize"
                )
            if tensor.ndim != rank or (rank == 4 and tensor.shape[-1] != BLOCK // 2):
                shape = {4: "(E, rows, K / 32, 16)", 3: "(E, rows, K / 32)", 2: "(E, rows)"}[rank]
                raise ValueError(
                    f"{OP}: {self.names[word]!r} has the shape {tensor.shape}, not {shape}"
                )
        (experts, rows, _, _) = first = self.tensors["gate_up_blocks"].shape
        if 0 in first:
            raise ValueError(f"{OP}: {self.names['gate_up_blocks']!r} is empty: {first}")
        width, inner = first[2] * BLOCK, rows // 2
        wants = {
            "gate_up_scales": first[:3],
            "gate_up_bias": first[:2],
            "down_blocks": (experts, width, inner // BLOCK, BLOCK // 2),
            "down_scales": (experts, width, inner // BLOCK),
            "down_bias": (experts, width),
        }
        for word, want in wants.items():
            if (shape := self.tensors[word].shape) != want:
                raise ValueError(
                    f"{OP}: {self.names[word]!r} has the shape {shape}; beside "
                    f"{self.names['gate_up_blocks']!r}, {first}, it must be {want}"
                )

    def read(self, files: Files, shardings: Mapping[str, jax.sharding.Sharding]) -> Experts:
        """The arrays, on their devices."""

        def matrix(name: str, word: str) -> MXArray:
            blocks = self.names[f"{word}_blocks"]
            shape = self.tensors[f"{word}_blocks"].shape
            codes = files.viewed(blocks, np.uint8, (*shape[:2], shape[2] * shape[3]))
            scales = self.tensors[f"{word}_scales"]
            return placed_mx(OP, codes, scales, MXFP4_E2M1, shardings.get(name))

        def vector(name: str, word: str) -> jax.Array:
            return placed(OP, self.tensors[word], shardings.get(name))

        return Experts(
            matrix("w_gate_up", "gate_up"),
            matrix("w_down", "down"),
            vector("b_gate_up", "gate_up_bias"),
            vector("b_down", "down_bias"),
        )


def _missing(files: Files, layer: int) -> str:
    """The words for the layers that are there instead of a missing one."""
    layers = set()
    for prefix, suffixes in NAMES.items():
        before, after = prefix.split("{layer}")
        end = after + suffixes["gate_up_blocks"]
        for name in files.places:
            number = name.removeprefix(before).removesuffix(end)
            if name == before + number + end and re.fullmatch("[0-9]+", number):
                layers.add(int(number))
    if not layers:
        first = next(iter(NAMES)).format(layer=layer) + "gate_up_proj_blocks"
        return f"the files have no experts in MXFP4, such as {first!r}"
    numbers = sorted(layers)
    whole = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
    present = f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))
    return f"there is no layer {layer}; the files have {present}"


def _shardings(sharding: Any) -> Mapping[str, jax.sharding.Sharding]:
    """By the name of an array."""
    if sharding is None:
        return {}
    whole = isinstance(sharding, Mapping)
    shardings = sharding if whole else dict.fromkeys(Experts._fields, sharding)
    if unknown := [name for name in shardings if name not in Experts._fields]:
        raise ValueError(
            f"{OP}: sharding names {unknown[0]!r}; the arrays are {', '.join(Experts._fields)}"
        )
    for value in shardings.values():
        if not isinstance(value, jax.sharding.Sharding):
            raise TypeError(
                f"{OP}: sharding must be a Sharding such as jax.sharding.NamedSharding, or one by "
                f"the name of each array, got {shown(value)}"
            )
    return shardings
