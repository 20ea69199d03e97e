"""gpt-oss' expert weights, read as they were published: MXFP4, never dequantized.

A checkpoint keeps each of a layer's two matrices as `*_blocks` uint8 (E, rows, K / 32, 16), two
codes of e2m1 a byte, the lower half first, and `*_scales` uint8 (E, rows, K / 32), exponents with
the bias 127. That is MXFP4 along K with row-major scales, (E, rows, K) by its shape; only the last
two dimensions of blocks become one.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.arrays.checks import shown, whole
from jax_mx.facts.formats import BLOCK, MXFP4_E2M1
from jax_mx.ops.checkpoints import FLOAT4, dtype_of, header_of
from jax_mx.ops.mxarray import MXArray
from jax_mx.ops.progress import progress as progress_of

OP = "gpt_oss.load_experts"
INDEX = "model.safetensors.index.json"
CHUNK = 64 * 2**20  # bytes between two words about progress
LONG = 256 * 2**20  # bytes from which on a terminal is told

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

    With experts = load_experts(path, 0) that is jax_mx.moe(x, choices, weights,
    **experts._asdict(), activation="gpt_oss", interleaved=True). Files are mapped into memory, and
    each process reads only what its devices hold.

    Args:
      path: a .safetensors file, several of them, the folder that they lie in, or their
        model.safetensors.index.json.
      layer: which one, from 0.
      sharding: of all four arrays, whose first dimension is the expert, such as P("expert") on a
        mesh; or one by the name of each array. None: the default device. Blocks stay whole.
      progress: whether to say how far reading is: a bar on a terminal, else lines on stderr. None:
        on a terminal, if there is much to read.

    Returns:
      `Experts`, with codes and scales as the files have them.

    Raises:
      ModuleNotFoundError: safetensors is not installed.
      FileNotFoundError: there is no such file.
      TypeError: path is none, layer is no int, or sharding of another type.
      ValueError: an index is damaged, the files have no such layer, its weights are not in MXFP4 or
        of shapes that do not belong together, or shards would cut blocks.
    """
    try:
        layer = whole(layer)
    except TypeError as error:
        raise TypeError(f"{OP}: layer must be an int, got {shown(layer)}") from error
    found = _Layer.of(_Files(path), layer)
    size = sum(tensor.nbytes for tensor in found.tensors.values())
    wanted = size >= LONG and sys.stderr.isatty() if progress is None else progress
    with progress_of(OP, -(-size // CHUNK), wanted) as say:
        return found.read(_shardings(sharding), _Told(say))


# ---- files ---
class _Files:
    """Tensors by name, wherever they lie."""

    def __init__(self, path: Any):
        """Finds the files; what they hold is read when it is asked for."""
        self.headers: dict[Path, tuple[dict[str, dict[str, Any]], int]] = {}
        self.places: dict[str, Path] = {}
        paths = [path] if isinstance(path, str | os.PathLike) else path
        if not isinstance(paths, Sequence) or not all(
            isinstance(each, str | os.PathLike) for each in paths
        ):
            raise TypeError(f"{OP}: path must be a path, or a list of paths, got {shown(path)}")
        for each in map(Path, paths):
            index = each / INDEX if each.is_dir() else each
            if index.suffix == ".json":
                if index.exists():
                    names = _weight_map(index)
                    self.places |= {name: index.parent / file for name, file in names.items()}
                    continue
            files = sorted(each.glob("*.safetensors")) if each.is_dir() else [each]
            if not files or not all(file.exists() for file in files):
                raise FileNotFoundError(
                    f"{OP}: {each} is no .safetensors file, no folder with some, and no {INDEX}"
                )
            for file in files:
                self.places |= dict.fromkeys(self.header(file)[0], file)

    def header(self, file: Path) -> tuple[dict[str, dict[str, Any]], int]:
        """A file's tensors by name, and where their bytes begin."""
        if file not in self.headers:
            if not file.exists():
                raise FileNotFoundError(f"{OP}: the index names {file}, which is not there")
            self.headers[file] = header_of(OP, file)[1:]
        return self.headers[file]

    def __getitem__(self, name: str) -> np.memmap:
        """A tensor's bytes, mapped into memory."""
        file = self.places[name]
        header, start = self.header(file)
        if name not in header:
            raise ValueError(f"{OP}: the index says that {file} has {name!r}; it does not")
        entry = header[name]
        dtype, shape = dtype_of(OP, name, entry["dtype"]), tuple(entry["shape"])
        if dtype == FLOAT4:
            dtype, shape = np.dtype(np.uint8), (*shape[:-1], shape[-1] // 2)
        begin = start + entry["data_offsets"][0]
        return np.memmap(file, dtype, "r", begin, shape)


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index has it.

    Raises:
      ValueError: it is no index.
    """
    try:
        found = json.loads(index.read_text("utf-8"))
        names = found["weight_map"]
    except (ValueError, TypeError, KeyError, RecursionError):
        names = None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ValueError(
            f'{OP}: {index} has no "weight_map" of tensors and their files, as an {INDEX} has; '
            "fetch it again, or name the .safetensors files"
        )
    for file in names.values():
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(
                f"{OP}: {index} names {shown(file)}, a file outside of its folder; fetch the index "
                "again, or name the .safetensors files"
            )
    return names


# ---- a layer ---
class _Layer(NamedTuple):
    """A layer's tensors, by the words in `NAMES`, and the files' names of them."""

    tensors: dict[str, np.memmap]
    names: dict[str, str]

    @classmethod
    def of(cls, files: _Files, layer: int) -> _Layer:
        """Looks the layer up, and checks what it is.

        Raises:
          ValueError: it is not there, or something else.
        """
        for prefix, words in NAMES.items():
            names = {word: prefix.format(layer=layer) + name for word, name in words.items()}
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
        found = cls({word: files[name] for word, name in names.items()}, names)
        found._check()
        return found

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

    def read(self, shardings: Mapping[str, jax.sharding.Sharding], told: _Told) -> Experts:
        """The arrays, on their devices."""

        def matrix(name: str, word: str) -> MXArray:
            blocks, scales = self.tensors[f"{word}_blocks"], self.tensors[f"{word}_scales"]
            each = {
                part: self._array(f"{word}_{part}", array, shardings.get(name), told)
                for part, array in (
                    ("blocks", blocks.reshape(*blocks.shape[:2], -1)),
                    ("scales", scales),
                )
            }
            return MXArray.from_parts(each["blocks"], each["scales"], MXFP4_E2M1)

        return Experts(
            matrix("w_gate_up", "gate_up"),
            matrix("w_down", "down"),
            self._array(
                "gate_up_bias", self.tensors["gate_up_bias"], shardings.get("b_gate_up"), told
            ),
            self._array("down_bias", self.tensors["down_bias"], shardings.get("b_down"), told),
        )

    def _array(
        self, word: str, tensor: np.ndarray, sharding: jax.sharding.Sharding | None, told: _Told
    ) -> jax.Array:
        """A tensor on its devices, each of which gets its own part."""
        read = partial(told.copied, self.names[word], tensor)
        if sharding is None:
            return jnp.asarray(read(()))
        refused = f"{OP}: {self.names[word]!r} cannot be split so"
        if len(spec := getattr(sharding, "spec", ())) > tensor.ndim:
            raise ValueError(f"{refused}: {spec} is of more than its {tensor.ndim} dimensions")
        try:
            part = sharding.shard_shape(tensor.shape)
        except ValueError as error:
            raise ValueError(f"{refused}: {str(error).splitlines()[0]}") from error
        if word.endswith("blocks") and part[-1] % (BLOCK // 2):
            raise ValueError(
                f"{OP}: {self.names[word]!r} would be split into parts of {2 * part[-1]} elements, "
                f"which cuts blocks of {BLOCK}"
            )
        return jax.make_array_from_callback(tensor.shape, sharding, read)


def _missing(files: _Files, layer: int) -> str:
    """What is there instead of a layer."""
    layers = set()
    for prefix, words in NAMES.items():
        before, after = prefix.split("{layer}")
        end = after + words["gate_up_blocks"]
        for name in files.places:
            number = name.removeprefix(before).removesuffix(end)
            if name == before + number + end and re.fullmatch("[0-9]+", number):
                layers.add(int(number))
    if not layers:
        first = next(iter(NAMES)).format(layer=layer) + "gate_up_proj_blocks"
        return f"the files have no experts in MXFP4, such as {first!r}"
    numbers = sorted(layers)
    whole = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
    found = f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))
    return f"there is no layer {layer}; the files have {found}"


class _Told:
    """What copies out of files, and says how far it is."""

    def __init__(self, say: Callable[[int, str], None]):
        """Takes what says so."""
        self.say, self.done = say, 0

    def copied(self, name: str, tensor: np.ndarray, index: Any) -> np.ndarray:
        """A part of a tensor, read in chunks of its first dimension."""
        part = tensor[index]
        out = np.empty(part.shape, part.dtype)
        step = max(1, CHUNK // max(part[:1].nbytes, 1))
        for at in range(0, len(part), step):
            self.say(self.done // CHUNK, name)
            out[at : at + step] = part[at : at + step]
            self.done += out[at : at + step].nbytes
        return out


def _shardings(sharding: Any) -> Mapping[str, jax.sharding.Sharding]:
    """By the name of an array."""
    if sharding is None:
        return {}
    each = sharding if isinstance(sharding, Mapping) else dict.fromkeys(Experts._fields, sharding)
    if unknown := [name for name in each if name not in Experts._fields]:
        raise ValueError(
            f"{OP}: sharding names {unknown[0]!r}; the arrays are {', '.join(Experts._fields)}"
        )
    for value in each.values():
        if not isinstance(value, jax.sharding.Sharding):
            raise TypeError(
                f"{OP}: sharding must be a Sharding such as jax.sharding.NamedSharding, or one by "
                f"the name of each array, got {shown(value)}"
            )
    return each
