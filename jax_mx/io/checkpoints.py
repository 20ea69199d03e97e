"""Checkpoints of MXArrays: a load returns the saved bytes, or an error says how they differ.

Checkpoints keep arrays by name. The key path of an MXArray's scales names all its static fields
(metadata.py). Orbax therefore refuses to restore it into a target of another format, axis or
layout. published.py reads what other libraries write.
"""

import importlib.abc
import importlib.util
import json
import math
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import jax
import jax.core
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_mx.formats.checks import has_elements, shown
from jax_mx.launch import files
from jax_mx.quantizing import metadata
from jax_mx.quantizing.mxarray import MXArray

Tree = Any
_ARRAYS = {"values", "scales"}


def from_checkpoint(tree: Tree) -> Tree:
    """Makes MXArrays of the dictionaries in a checkpoint that was restored without a target.

    Without a target Orbax, and flax's `msgpack_restore`, give a dictionary for each MXArray. Its
    keys hold the format, the axis and the layouts.

    Args:
      tree: dictionaries, lists and tuples of arrays, nested.

    Returns:
      The same tree, with an `MXArray` for each such dictionary.

    Raises:
      TypeError, ValueError: as for `MXArray.from_parts`; a dictionary describes other shapes or
        dtypes than it has, or uses words that this version does not know.
    """
    if isinstance(tree, Mapping):
        parts = _parts_of(tree)
        if parts is not None:
            return MXArray.from_parts(**parts)
        return {key: from_checkpoint(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(from_checkpoint, tree))
    return tree


def _parts_of(tree: Mapping) -> dict[str, Any] | None:
    """The arguments of `MXArray.from_parts` that a dictionary holds; None if it holds others."""
    op = "from_checkpoint"
    if tree.keys() >= {*_ARRAYS, "format", "axis"}:
        static = {name: value for name, value in tree.items() if name not in _ARRAYS}
        return {**metadata.read(op, static), **{name: tree[name] for name in _ARRAYS}}
    names = [name for name in tree if name != "values"]
    if len(tree) != 2 or "values" not in tree or not isinstance(names[0], str):
        return None
    described = metadata.description_in(names[0])
    if described is None:
        return None
    return metadata.read(op, described) | {"values": tree["values"], "scales": tree[names[0]]}


# ---- safetensors ---
# The dtypes of a file that are not a letter and a number of bits.
_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F4": ml_dtypes.float4_e2m1fn,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)  # two a byte in files, the lower half first
_RANK = 64  # NumPy's arrays have no more dimensions
_KEY = "jax_mx"  # of a file's metadata: JSON, the static fields of each MXArray by its name


def save_safetensors(
    tensors: Mapping[str, MXArray | jax.typing.ArrayLike],
    path: str | os.PathLike,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Writes arrays into a .safetensors file.

    An MXArray called "w" becomes the tensors "w.values" and "w.scales". They have its bytes as U8,
    which all loaders of safetensors open. The file's metadata have the format, the axis and the
    layouts of each under "jax_mx", in JSON. Arrays come to the host one at a time, by a copy on
    their devices.

        save_safetensors({"w": quantize(w), "step": 7}, "model.safetensors")

    Args:
      tensors: MXArrays and other arrays by name; numbers and lists become arrays as in JAX.
      path: of the file. An existing file is replaced and keeps its permissions; a link leads to the
        file that is replaced.
      notes: further metadata, strings; not under "jax_mx".

    Raises:
      FileNotFoundError: there is no such folder.
      OSError: the disk refuses the file; an old one is as it was.
      TypeError: tensors is not a dictionary of arrays by name, or an array has a dtype that files
        lack, or an odd number of float4 elements.
      ValueError: an array lies on devices of several processes. Two tensors, or two of the notes,
        would have one name. A name is not Unicode text. The path leads to something else than a
        file.
    """
    op = "save_safetensors"
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise TypeError(f"{op}: tensors must be a dictionary of arrays by name")
    if wrong := [name for name in tensors if not _is_text(name)]:
        raise ValueError(f"{op}: {wrong[0]!r} is no Unicode text, as names of tensors are")
    if "__metadata__" in tensors:
        raise ValueError(f"{op}: files call their metadata '__metadata__'; rename the tensor")
    notes = _notes(op, notes)
    target = Path(os.path.realpath(path))  # the library puts a new file in a link's place
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{op}: there is no folder {target.parent}; make it first")
    arrays: dict[str, np.ndarray | jax.Array] = {}
    described = {}
    plain: set[str] = set()
    for name, tensor in tensors.items():
        parts = _tensors_of(name, tensor)
        if isinstance(tensor, MXArray):
            plain |= parts.keys()
            described[name] = metadata.described(metadata.fields_of(tensor))
        if twice := parts.keys() & (arrays.keys() | (tensors.keys() - {name})):
            raise ValueError(f"{op}: there are two tensors {min(twice)!r}; rename one")
        arrays |= {part: _held(op, part, array) for part, array in parts.items()}
    texts = {**notes, _KEY: json.dumps(described)}
    try:
        _replace(op, target, _content(arrays, plain, texts))
    except OSError as error:
        raise files.failure(op, path, error) from error


def _replace(op: str, target: Path, content: Iterable[bytes | memoryview]) -> None:
    """Writes a file. It replaces an older file and keeps its permissions.

    Raises:
      OSError: the file cannot be written.
      ValueError: the path exists and is no file.
    """
    there = target.stat() if target.exists() else None
    if there is not None and not stat.S_ISREG(there.st_mode):
        raise ValueError(f"{op}: {target} is no file; name one, or what is to become one")
    with files.whole(target) as partial_file:
        files.write(partial_file, content)
        if there is not None:
            partial_file.chmod(stat.S_IMODE(there.st_mode))


def _content(
    arrays: Mapping[str, np.ndarray | jax.Array], plain: Set[str], texts: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """A file's header, then its arrays, one at a time; wide elements come first, so all align.

    Plain arrays are U8: safetensors' loaders for NumPy and flax have no floats of 8 bits.
    """
    header: dict[str, Any] = {"__metadata__": texts}
    names, end = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name)), 0
    for name in names:
        array, begin = arrays[name], end
        dtype, size = np.dtype(array.dtype), array.size * array.dtype.itemsize
        end += size // 2 if dtype == FLOAT4 else size
        usual = f"{dtype.kind.upper()}{8 * dtype.itemsize}"
        header[name] = {
            "dtype": "U8" if name in plain else _NAMES.get(dtype, usual),
            "shape": array.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield _bytes_of(arrays[name]).data


def _bytes_of(array: np.ndarray | jax.Array) -> np.ndarray:
    """An array as files have it, uint8."""
    if isinstance(array, jax.Array):
        local = array if array.is_fully_addressable else array.addressable_data(0)
        with jax.ensure_compile_time_eval():
            # JAX keeps what it brings to the host as long as the array, here a copy's.
            array = jnp.copy(local)
    codes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return codes[::2] & 15 | codes[1::2] << 4 if array.dtype == FLOAT4 else codes


def _tensors_of(name: str, array: Any) -> dict[str, Any]:
    """The tensors, by name, that a file has for an array: two for an MXArray."""
    if isinstance(array, MXArray):
        return {f"{name}.{part}": getattr(array, part) for part in ("values", "scales")}
    return {name: array}


def _is_text(name: str) -> bool:
    """Whether a name can be written; half of a surrogate pair cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _notes(op: str, notes: Any) -> dict[str, str]:
    """Further metadata of a file.

    Raises:
      TypeError, ValueError: they are no strings, or would be taken for the description of arrays.
    """
    notes = {} if notes is None else notes
    if not isinstance(notes, Mapping) or not all(
        isinstance(n, str) for n in (*notes, *notes.values())
    ):
        raise TypeError(f"{op}: notes must be a dictionary of strings, got {shown(notes)}")
    if _KEY in notes:
        raise ValueError(f"{op}: notes have {_KEY!r}, which describes MXArrays; rename it")
    return {**notes}


def _held(op: str, name: str, array: Any) -> np.ndarray | jax.Array:
    """An array whose dtype files have, where it lies.

    Raises:
      TypeError: it is none, or of a dtype that files do not have.
      ValueError: it lies on devices of several processes.
    """
    if isinstance(array, jax.core.Tracer):
        raise TypeError(f"{op}: {name!r} has no values while a program is traced; save its results")
    has_elements(op, repr(name), array)
    dtype = getattr(array, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(f"{op}: {name!r} is a key; save jax.random.key_data of it")
    if isinstance(array, jax.Array):
        if not (array.is_fully_addressable or array.is_fully_replicated):
            raise ValueError(
                f"{op}: {name!r} lies on devices of several processes, and one process writes one "
                "file; call jax.device_put(tensors, jax.sharding.NamedSharding(mesh, "
                "jax.sharding.PartitionSpec())) in all of them, which gives each the whole arrays, "
                "and save in one; where they are too large, save shards with Orbax"
            )
        held: np.ndarray | jax.Array = array
    else:
        try:
            held = np.asarray(array)
        except (TypeError, ValueError):  # lists of lists of different lengths
            held = np.array(None)
        if held.dtype.kind in "OSU":
            raise TypeError(
                f"{op}: {name!r} must be an array or an MXArray, got {shown(array)}; of a "
                "QuantizedWeight save its .floats, of nested dictionaries give each array a name "
                "of its own, as in {'a.b': array}"
            )
        if dtype is None:
            held = _as_jax_takes(op, name, held)
        held = held.astype(held.dtype.newbyteorder("="), copy=False)  # files have one order
    is_plain = held.dtype.kind in "biuf" and held.dtype.itemsize <= 8
    if not is_plain and held.dtype not in _NAMES and held.dtype != np.complex64:
        raise TypeError(f"{op}: {name!r} is {held.dtype}, which files do not have; convert it")
    if held.dtype == FLOAT4 and held.size % 2:
        raise TypeError(
            f"{op}: {name!r} has {held.size} elements of float4, of which files keep two in a byte;"
            " append one"
        )
    return held


def _as_jax_takes(op: str, name: str, numbers: np.ndarray) -> np.ndarray:
    """Python's numbers in the dtype that JAX gives to them.

    Raises:
      TypeError: one is beyond it.
    """
    with np.errstate(over="ignore"):
        kept = numbers.astype(jax.dtypes.canonicalize_dtype(numbers.dtype))
    inexact = kept.dtype.kind in "fc"
    if (np.isfinite(numbers) & ~np.isfinite(kept) if inexact else kept != numbers).any():
        raise TypeError(
            f"{op}: {name!r} is beyond {kept.dtype}; give a NumPy array of {numbers.dtype}"
        )
    return kept


def load_safetensors(
    path: str | os.PathLike, like: Mapping[str, Any] | None = None
) -> dict[str, MXArray | jax.Array]:
    """Reads what `save_safetensors` wrote.

    Args:
      path: of the file. In a file of another writer, every tensor is an array.
      like: the expected arrays and MXArrays by name, or their shapes from jax.eval_shape. A loaded
        array takes the sharding of its expected one. None: any file is accepted.

    Returns:
      Arrays of JAX and MXArrays, by name. Where `like` places nothing, they are where JAX puts new
      arrays.

    Raises:
      ModuleNotFoundError: safetensors is not installed.
      FileNotFoundError: there is no such file.
      TypeError: like is not a dictionary of arrays.
      ValueError: the path is a folder. The file's metadata are damaged, or describe an array that
        the file lacks, holds twice, or holds with other shapes. A tensor has a dtype that JAX does
        not have (float64 and int64 want jax_enable_x64). A name, shape, dtype, format, axis or
        layout differs from `like`.
    """
    op = "load_safetensors"
    if like is not None and not isinstance(like, Mapping):
        raise TypeError(f"{op}: like must be a dictionary of arrays by name, got {shown(like)}")
    texts, header, start = header_of(op, path)
    arrays: dict[str, Any] = {}
    wanted: dict[str, Any] = {}
    for name, want in (like or {}).items():
        wanted |= _tensors_of(name, want)
    with Path(path).open("rb") as file:
        for name, entry in header.items():
            file.seek(start + entry["data_offsets"][0])
            flat = _elements(file, dtype_of(op, name, entry["dtype"]), math.prod(entry["shape"]))
            if len(entry["shape"]) > _RANK:
                raise ValueError(
                    f"{op}: {name!r} has {len(entry['shape'])} dimensions; arrays have at most "
                    f"{_RANK}"
                )
            arrays[name] = _placed(flat.reshape(entry["shape"]), wanted.get(name))
            jax.block_until_ready(arrays[name])  # the host holds one at a time
    loaded: dict[str, Any] = {}
    for name, description in descriptions_in(op, texts).items():
        parts: dict[str, Any] = {
            part: arrays.pop(f"{name}.{part}", None) for part in ("values", "scales")
        }
        if missing := [part for part, array in parts.items() if array is None]:
            raise ValueError(f"{op}: the file describes {name!r} and has no '{name}.{missing[0]}'")
        try:
            loaded[name] = MXArray.from_parts(**parts, **metadata.read(op, description))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{op}: {name!r} is not what the file says of it: {error}") from error
    if twice := loaded.keys() & arrays.keys():
        raise ValueError(f"{op}: the file has an array {min(twice)!r} and describes an MXArray so")
    loaded |= arrays
    if like is not None:
        require_alike(op, loaded, like)
    return loaded


def _elements(file: IO[bytes], dtype: np.dtype, count: int) -> np.ndarray:
    """The next elements of a file."""
    if dtype != FLOAT4:
        return np.fromfile(file, dtype, count)
    pairs = np.fromfile(file, np.uint8, count // 2)
    codes = np.empty(count, np.uint8)
    np.bitwise_and(pairs, 15, out=codes[::2])
    np.right_shift(pairs, 4, out=codes[1::2])
    return codes.view(dtype)


def _placed(array: np.ndarray, like: Any) -> jax.Array:
    """An array of JAX, placed as one of its shape is, if that is placed."""
    where = getattr(like, "sharding", None)
    placed = isinstance(where, jax.sharding.Sharding) and getattr(like, "committed", True)
    if not placed or like.shape != array.shape:
        return jnp.asarray(array)
    return jax.device_put(array, where)


def descriptions_in(op: str, texts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The static fields of each MXArray of a file, by its name.

    Raises:
      ValueError: the text that says so is damaged.
    """
    text = texts.get(_KEY, "{}")
    try:
        descriptions = json.loads(text)
    except (ValueError, RecursionError):
        descriptions = None
    if not isinstance(descriptions, dict) or {*map(type, descriptions.values())} - {dict}:
        raise ValueError(
            f"{op}: the file's metadata have {shown(text)} under {_KEY!r}, which describes no "
            "MXArrays; write the file again"
        )
    return descriptions


def header_of(
    op: str, path: str | os.PathLike
) -> tuple[dict[str, str], dict[str, dict[str, Any]], int]:
    """The header of a .safetensors file: metadata, tensors by name, where their bytes begin.

    A tensor has a "dtype", in safetensors' words, a "shape", and "data_offsets": where its bytes
    begin and end, counted from the end of the header.

    Raises:
      ModuleNotFoundError: safetensors, which checks the header, is not installed.
      ValueError: the file is none of safetensors'.
    """
    library = _safetensors(op)
    if Path(path).is_dir():
        raise ValueError(f"{op}: {os.fspath(path)} is a folder; name a .safetensors file in it")
    if not Path(path).exists():
        raise FileNotFoundError(f"{op}: there is no {os.fspath(path)}; name a .safetensors file")
    if not Path(path).is_file():
        raise ValueError(f"{op}: {os.fspath(path)} is no file; name a .safetensors file")
    try:
        with library.safe_open(os.fspath(path), framework="np") as file:
            texts = file.metadata() or {}
    except library.SafetensorError as error:
        raise ValueError(
            f"{op}: {os.fspath(path)} is no whole .safetensors file ({error}); write or fetch it "
            "again"
        ) from error
    return texts, *tensors_in(path)


def tensors_in(path: str | os.PathLike) -> tuple[dict[str, dict[str, Any]], int]:
    """The tensors of a header that the library has checked, and where their bytes begin."""
    with Path(path).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        return header, file.tell()


def dtype_of(op: str, name: str, dtype: str) -> np.dtype:
    """The dtype that a file calls so."""
    stored = _DTYPES.get(dtype)
    if stored is None:
        try:
            stored = np.dtype(dtype[0].lower() + str(int(dtype[1:]) // 8))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{op}: {name!r} has the dtype {dtype}, which jax_mx does not read; write it as "
                "bytes (U8), or as floats of a dtype that JAX has"
            ) from error
    stored = np.dtype(stored)
    if (kept := jax.dtypes.canonicalize_dtype(stored)) != stored:
        raise ValueError(
            f"{op}: {name!r} is {stored}, which JAX would take for {kept}; set jax_enable_x64"
        )
    return stored


def require_alike(op: str, loaded: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    """Raises ValueError where what was found is not what was expected."""
    if missing := sorted(like.keys() - loaded.keys()):
        raise ValueError(f"{op}: the file has no {missing[0]!r}")
    if more := sorted(loaded.keys() - like.keys()):
        raise ValueError(f"{op}: the file has {more[0]!r}, which is not expected")
    for name, want in like.items():
        got = loaded[name]
        if not hasattr(want, "dtype") or not hasattr(want, "shape"):
            raise TypeError(f"{op}: like has {shown(want)} for {name!r}, must have an array")
        if isinstance(got, MXArray) != isinstance(want, MXArray):
            kinds = ["an MXArray" if isinstance(a, MXArray) else "an array" for a in (got, want)]
            raise ValueError(f"{op}: {name!r} is {kinds[0]}, expected is {kinds[1]}")
        if isinstance(got, MXArray):
            pair = metadata.fields_of(got), metadata.fields_of(want)
            metadata.require_same(op, repr(name), *pair)
        elif got.dtype != want.dtype:
            raise ValueError(f"{op}: {name!r} is {got.dtype}, expected is {want.dtype}")
        if got.shape != want.shape:
            raise ValueError(f"{op}: {name!r} has the shape {got.shape}, expected {want.shape}")


def _safetensors(op: str) -> Any:
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{op}: this needs safetensors; pip install safetensors",
            name="safetensors",
        ) from error
    return safetensors


# ---- flax ---
_FLAX = "flax.serialization"


def _to_state_dict(q: MXArray) -> dict[str, Any]:
    """The state that flax writes: bytes, as not every msgpack of flax knows small floats."""
    arrays = {name: np.asarray(getattr(q, name)).view(np.uint8) for name in ("values", "scales")}
    return arrays | metadata.described(metadata.fields_of(q))


def _from_state_dict(target: MXArray, state: Mapping[str, Any]) -> MXArray:
    """The inverse of `_to_state_dict`, for a target of the same format, axis and layouts.

    Raises:
      ValueError: it has others, or another shape, or holds no MXArray.
    """
    op = "from_state_dict"
    if not isinstance(state, Mapping) or not state.keys() >= _ARRAYS:
        raise ValueError(
            f"{op}: the target has an MXArray where the checkpoint has {shown(state)}; restore "
            "into floats, and quantize these"
        )
    static = {name: value for name, value in state.items() if name not in _ARRAYS}
    fields = metadata.read(op, static)
    metadata.require_same(op, "the checkpoint", tuple(fields.values()), metadata.fields_of(target))
    q = MXArray.from_parts(state["values"], state["scales"], **fields)
    if q.shape != target.shape:
        raise ValueError(f"{op}: the checkpoint has the shape {q.shape}, must have {target.shape}")
    return q


def _register_with_flax(module: ModuleType) -> None:
    module.register_serialization_state(MXArray, _to_state_dict, _from_state_dict)


class _AfterFlax(importlib.abc.MetaPathFinder):
    """Registers MXArray with flax.serialization when a program imports that, and not before."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, whose loader registers when it has run."""
        if fullname != _FLAX:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register_with_flax(module)

        spec.loader.exec_module = run_and_register
        return spec


if _FLAX in sys.modules:
    _register_with_flax(sys.modules[_FLAX])
else:
    sys.meta_path.insert(0, _AfterFlax())
