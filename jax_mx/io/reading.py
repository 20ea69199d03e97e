"""Tensors of .safetensors files, read in parts: when a device gets its shard, and no more of them.

`Files` finds tensors by name, in a file, in several, or in a folder with an index. A `Tensor` is
not read yet; `placed` reads what the devices of this process hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.checks import shown
from jax_mx.formats.formats import BLOCK, Format
from jax_mx.io.checkpoints import FLOAT4, dtype_of, header_of
from jax_mx.progress import progress
from jax_mx.quantizing.mxarray import MXArray

INDEX = "model.safetensors.index.json"
CHUNK = 64 * 2**20  # bytes between two words about progress
LONG = 256 * 2**20  # bytes from which on a terminal is told
Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array that is not read yet.

    Attributes:
      name: for messages.
      shape: of the array.
      dtype: of its elements.
      read: gives a part of it, of as many slices as it has dimensions or fewer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Slices], np.ndarray]

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


# ---- tensors made of others ---
def bounds(index: Slices, shape: Sequence[int]) -> list[tuple[int, int]]:
    """From where to where a part goes, in each dimension."""
    rest = itertools.repeat(slice(None), len(shape) - len(index))
    pairs = zip((*index, *rest), shape, strict=True)
    return [part.indices(length)[:2] for part, length in pairs]


def stacked(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape and dtype beside each other, along a new first axis."""
    first = tensors[0]

    def read(index: Slices) -> np.ndarray:
        (start, stop), *rest = bounds(index, (len(tensors), *first.shape))
        out = np.empty((stop - start, *(b - a for a, b in rest)), first.dtype)
        for i, tensor in enumerate(tensors[start:stop]):
            out[i] = tensor.read(tuple(itertools.starmap(slice, rest)))
        return out

    return Tensor(name, (len(tensors), *first.shape), first.dtype, read)


def joined(name: str, tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors of one dtype, one behind the other along an axis, counted from the start."""
    first = tensors[0]
    ends = [*itertools.accumulate(tensor.shape[axis] for tensor in tensors)]
    shape = (*first.shape[:axis], ends[-1], *first.shape[axis + 1 :])

    def read(index: Slices) -> np.ndarray:
        parts = bounds(index, shape)
        start, stop = parts[axis]
        out = np.empty([b - a for a, b in parts], first.dtype)
        for tensor, end in zip(tensors, ends, strict=True):
            begin = end - tensor.shape[axis]
            low, high = max(start, begin), min(stop, end)
            if low < high:
                parts[axis] = low - begin, high - begin
                of_it = tensor.read(tuple(itertools.starmap(slice, parts)))
                out[(slice(None),) * axis + (slice(low - start, high - start),)] = of_it
        return out

    return Tensor(name, shape, first.dtype, read)


def spread(tensor: Tensor, shape: Sequence[int], times: Sequence[int]) -> Tensor:
    """A tensor whose elements stand so many times beside each other, cut off at a shape."""

    def read(index: Slices) -> np.ndarray:
        parts = bounds(index, shape)
        pairs = [*zip(parts, times, strict=True)]
        out = tensor.read(tuple(slice(a // n, -(-b // n)) for (a, b), n in pairs))
        for axis, ((a, b), n) in enumerate(pairs):
            cut = slice(a % n, a % n + b - a)
            out = out.repeat(n, axis)[(slice(None),) * axis + (cut,)]
        return out

    return Tensor(tensor.name, tuple(shape), tensor.dtype, read)


def unpacked(tensor: Tensor) -> Tensor:
    """Bytes of two elements as elements of float4."""
    shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])

    def read(index: Slices) -> np.ndarray:
        *rest, (start, stop) = bounds(index, shape)
        packed = tensor.read((*itertools.starmap(slice, rest), slice(start // 2, -(-stop // 2))))
        both = np.stack([packed & 15, packed >> 4], -1)
        codes = both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
        return codes[..., start % 2 : start % 2 + stop - start].view(FLOAT4)

    return Tensor(tensor.name, shape, np.dtype(FLOAT4), read)


# ---- files ---
class Files:
    """Tensors by name, wherever they lie."""

    def __init__(self, op: str, path: Any):
        """Finds the files; their tensors are read when a caller asks for them.

        Raises:
          FileNotFoundError: there is no such file.
          TypeError: path is neither a path nor a list of paths.
          ValueError: an index is damaged, or two files have a tensor of one name.
        """
        self.op = op
        self.headers: dict[Path, tuple[dict[str, str], dict[str, dict[str, Any]], int]] = {}
        self.places: dict[str, Path] = {}
        self._say: Callable[[int, str], None] = lambda i, text: None
        self._done = 0
        paths = [path] if isinstance(path, str | os.PathLike) else path
        if not isinstance(paths, Sequence) or not all(
            isinstance(one, str | os.PathLike) for one in paths
        ):
            raise TypeError(f"{op}: path must be a path, or a list of paths, got {shown(path)}")
        for one in map(Path, paths):
            index = one / INDEX if one.is_dir() else one
            if index.suffix == ".json":
                if index.exists():
                    names = _weight_map(op, index)
                    self.places |= {name: index.parent / file for name, file in names.items()}
                    continue
            files = sorted(one.glob("*.safetensors")) if one.is_dir() else [one]
            if not files or not all(file.exists() for file in files):
                raise FileNotFoundError(
                    f"{op}: {one} is no .safetensors file, no folder with some, and no {INDEX}"
                )
            for file in files:
                names = self.header(file)[1]
                if twice := sorted(names.keys() & self.places.keys()):
                    raise ValueError(
                        f"{op}: {file} and {self.places[twice[0]]} both have {twice[0]!r}; name "
                        "the file that counts, or move the other one away"
                    )
                self.places |= dict.fromkeys(names, file)

    def header(self, file: Path) -> tuple[dict[str, str], dict[str, dict[str, Any]], int]:
        """A file's metadata, its tensors by name, and where their bytes begin."""
        if file not in self.headers:
            if not file.exists():
                raise FileNotFoundError(f"{self.op}: the index names {file}, which is not there")
            self.headers[file] = header_of(self.op, file)
        return self.headers[file]

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, as its file calls it."""
        return self._entry(name)["dtype"]

    def __getitem__(self, name: str) -> Tensor:
        """A tensor as its file has it; of F4 the bytes, of two elements each."""
        entry = self._entry(name)
        dtype, shape = dtype_of(self.op, name, entry["dtype"]), tuple(entry["shape"])
        if dtype == FLOAT4:
            if not shape or shape[-1] % 2:
                raise ValueError(f"{self.op}: {name!r} is F4 {shape}; rows must have whole bytes")
            dtype, shape = np.dtype(np.uint8), (*shape[:-1], shape[-1] // 2)
        return self.viewed(name, dtype, shape)

    def viewed(self, name: str, dtype: Any, shape: Sequence[int]) -> Tensor:
        """A tensor's bytes as another dtype and shape."""
        file = self.places[name]
        begin = self.header(file)[2] + self._entry(name)["data_offsets"][0]
        read = functools.partial(self._copied, name, file, begin, np.dtype(dtype), tuple(shape))
        return Tensor(name, tuple(shape), np.dtype(dtype), read)

    def _entry(self, name: str) -> dict[str, Any]:
        header = self.header(self.places[name])[1]
        if name not in header:
            file = self.places[name]
            raise ValueError(f"{self.op}: the index says that {file} has {name!r}; it does not")
        return header[name]

    @contextlib.contextmanager
    def progress(self, nbytes: int, wanted: bool | None) -> Iterator[None]:
        """Says meanwhile how much of so many bytes is read; None: if they are many."""
        if wanted is None:
            wanted = nbytes >= LONG and sys.stderr.isatty()
        with progress(self.op, -(-nbytes // CHUNK), wanted) as say:
            self._say, self._done = say, 0
            yield

    def _copied(
        self,
        name: str,
        file: Path,
        begin: int,
        dtype: np.dtype,
        shape: tuple[int, ...],
        index: Slices,
    ) -> np.ndarray:
        """A part of a tensor, read in chunks of its first dimension.

        Each tensor is mapped by itself: the parts of it that were read leave the memory with it.
        """
        if 0 in shape:
            return np.empty(shape, dtype)[index]
        part = np.memmap(file, dtype, "r", begin, shape)[index]
        if not part.ndim:
            return np.array(part)
        out = np.empty(part.shape, dtype)
        step = max(1, CHUNK // max(part[:1].nbytes, 1))
        for at in range(0, len(part), step):
            self._say(self._done // CHUNK, name)
            out[at : at + step] = part[at : at + step]
            self._done += out[at : at + step].nbytes
        return out


def _weight_map(op: str, index: Path) -> dict[str, str]:
    """The file of each tensor, as an index has it.

    Raises:
      ValueError: it is no index.
    """
    try:
        content = json.loads(index.read_text("utf-8"))
        names = content["weight_map"]
    except (ValueError, TypeError, KeyError, RecursionError):
        names = None
    is_map = isinstance(names, dict) and all(isinstance(file, str) for file in names.values())
    if not names or not is_map:
        raise ValueError(
            f'{op}: {index} has no "weight_map" of tensors and their files, as an {INDEX} has; '
            "fetch it again, or name the .safetensors files"
        )
    for file in names.values():
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(
                f"{op}: {index} names {shown(file)}, a file outside of its folder; fetch the index "
                "again, or name the .safetensors files"
            )
    return names


# ---- on devices ---
def placed(op: str, tensor: Tensor, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """A tensor on devices, each of which gets its own part; None: on the default device.

    Raises:
      ValueError: it cannot be split so.
    """
    if sharding is None:
        return jax.block_until_ready(jnp.asarray(tensor.read(())))
    _shard_shape(op, tensor, sharding)
    parts: dict[tuple, np.ndarray] = {}  # each is read once, however many devices have it

    def read(index: Slices | None) -> np.ndarray:
        key = (*map(tuple, bounds(index or (), tensor.shape)),)
        if key not in parts:
            parts[key] = tensor.read(index or ())
        return parts[key]

    array = jax.make_array_from_callback(tensor.shape, sharding, read)
    return jax.block_until_ready(array)  # the host holds one array at a time


def placed_mx(
    op: str,
    values: Tensor,
    scales: Tensor,
    format: Format,
    sharding: jax.sharding.Sharding | None,
    **fields: Any,
) -> MXArray:
    """An MXArray of codes and scales, both split alike.

    Raises:
      ValueError: shards would cut blocks.
    """
    require_splits(op, values, sharding, format, **fields)
    codes, exponents = (placed(op, tensor, sharding) for tensor in (values, scales))
    return MXArray.from_parts(codes, exponents, format, **fields)


def require_splits(
    op: str,
    values: Tensor,
    sharding: jax.sharding.Sharding | None,
    format: Format | None,
    **fields: Any,
) -> None:
    """Refuses a sharding that a tensor, of codes if there is a format, cannot have.

    Raises:
      ValueError: it does not divide the tensor, or shards would cut blocks.
    """
    if sharding is None:
        return
    shape = _shard_shape(op, values, sharding)
    if format is None:
        return
    elements = shape[fields.get("axis", -1)] * format.codes_per_byte
    if elements % BLOCK:
        raise ValueError(
            f"{op}: {values.name!r} would be split into parts of {elements} elements, "
            f"which cuts blocks of {BLOCK}"
        )


def _shard_shape(op: str, tensor: Tensor, sharding: jax.sharding.Sharding) -> tuple[int, ...]:
    refused = f"{op}: {tensor.name!r} cannot be split so"
    if len(spec := getattr(sharding, "spec", ())) > tensor.ndim:
        raise ValueError(f"{refused}: {spec} is of more than its {tensor.ndim} dimensions")
    try:
        return sharding.shard_shape(tensor.shape)
    except ValueError as error:
        raise ValueError(f"{refused}: {str(error).splitlines()[0]}") from error
