"""For `python -m jax_mx`: the tensors of a small network or of files."""

from __future__ import annotations

import contextlib
import stat
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, MXFP8_E4M3, RCEIL
from jax_mx.io.checkpoints import tensors_in
from jax_mx.quantizing.planning import Options, planned

# The names in a file, and what reads the tensor, or says why it cannot be read.
Opened = tuple[Sequence[str], Callable[[str], "np.ndarray | str"]]
# The dtypes that are quantized, by numpy's name and by that of a .safetensors header.
FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
PART = 2**22  # elements of a tensor that are worked on at a time; their losses take 26 bytes each


# ---- the default: a network on scikit-learn's digits ---
def digits(steps: int = 30, batch: int = 128) -> dict[str, np.ndarray]:
    """Weights, activations and gradients of 64 -> 128 -> 64 -> 10 after `steps` of descent.

    The output layer is left out: 32 does not divide its 10 columns.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = np.float32(images[:batch] / 16)  # (batch, 64), pixels in 0..1
    y = np.eye(10, dtype=np.float32)[labels[:batch]]
    random = np.random.default_rng(0)
    weights = [
        np.float32(random.standard_normal(shape) * (2 / shape[0]) ** 0.5)
        for shape in ((64, 128), (128, 64), (64, 10))
    ]
    weights, gradients, hidden = jax.jit(_train, static_argnums=0)(steps, weights, x, y)
    tensors = {"input": x, "w1": weights[0], "w2": weights[1], "h1": hidden[0], "h2": hidden[1]}
    tensors |= {"grad w1": gradients[0], "grad w2": gradients[1]}
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


def _loss(weights: list[Any], x: Any, y: Any) -> tuple[jax.Array, list[jax.Array]]:
    """Cross entropy, and the activations of the hidden layers."""
    hidden = [jax.nn.relu(x @ weights[0])]
    hidden.append(jax.nn.relu(hidden[0] @ weights[1]))
    return -jnp.mean(jnp.sum(y * jax.nn.log_softmax(hidden[1] @ weights[2]), axis=-1)), hidden


def _train(steps: int, weights: list[Any], x: Any, y: Any) -> Any:
    """The weights after `steps`, and the gradients and activations there."""
    gradient = jax.grad(_loss, has_aux=True)

    def step(_, weights: list[jax.Array]) -> list[jax.Array]:
        return [w - 0.2 * g for w, g in zip(weights, gradient(weights, x, y)[0], strict=True)]

    weights = jax.lax.fori_loop(0, steps, step, weights)
    return weights, *gradient(weights, x, y)


# ---- files ---
def read(path: Path) -> Iterator[tuple[str, np.ndarray | str]]:
    """The tensors of a file, one at a time.

    Args:
      path: a .safetensors, .npz or .npy file. Nothing is ever unpickled.

    Yields:
      `(name, tensor)`; instead of a tensor or file that cannot be read, the sentence that says why.

    Raises:
      ModuleNotFoundError: safetensors is needed and not installed.
    """
    if obstacle := _obstacle(path):
        yield path.name or str(path), obstacle
        return
    # A damaged file makes its parsers raise almost anything: OSError, ValueError, EOFError,
    # BadZipFile, zlib.error, TokenError, SafetensorError, NotImplementedError were all seen.
    try:
        with _READERS[path.suffix.lower()](path) as (keys, load):
            for key in keys:
                try:
                    tensor = load(key)
                except Exception as error:
                    tensor = _unreadable(error)
                yield f"{path.name}:{key}" if key else path.name, tensor
        if not keys:
            yield path.name, "holds no tensors; save some in it"
    except ImportError:
        raise
    except Exception as error:
        yield path.name, _unreadable(error)


def _obstacle(path: Path) -> str | None:
    """Why a path is not even opened: opening a FIFO would wait for a writer, perhaps for ever."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            return f"is a link to {path.readlink()}, where there is nothing; mend it"
        return f"there is no file {path}; check the path"
    except OSError as error:  # a loop of links, a closed folder, a name too long
        return f"cannot be reached ({error.strerror}); check the path"
    if not stat.S_ISREG(mode):
        filetype = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        return f"is {filetype}; give the path of a file"
    if path.suffix.lower() not in _READERS:
        known = ", ".join(_READERS)
        return f"suffix {path.suffix!r} is unknown; save the tensors as one of {known}"
    return None


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _unreadable(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return "may not be read; change its permissions"
    if isinstance(error, MemoryError):
        return "does not fit into memory; save a slice of it"
    if "Object arrays" in str(error) or "Python objects" in str(error):
        return "holds pickled Python objects, which are never loaded; save it as an array of floats"
    detail = textwrap.shorten(str(error) or type(error).__name__, 160)
    return f"is truncated, damaged or not what its suffix says ({detail}); save it again"


@contextlib.contextmanager
def _open_numpy(path: Path) -> Iterator[Opened]:
    magic = b"PK" if path.suffix.lower() == ".npz" else np.lib.format.MAGIC_PREFIX
    with path.open("rb") as file:  # np.load would leave a damaged one open
        if (start := file.read(len(magic))) != magic:  # np.load would take it for a pickle
            raise ValueError(f"it begins with {start!r}, not with {magic!r}")
        if path.suffix.lower() == ".npy":
            yield [""], lambda _: np.lib.format.open_memmap(path, "r")
            return
        file.seek(0)
        loaded = np.load(file, allow_pickle=False)

        def load(key: str) -> np.ndarray | str:
            member = loaded[key]
            return member if isinstance(member, np.ndarray) else "is no .npy array; save it as one"

        yield loaded.files, load


@contextlib.contextmanager
def _open_safetensors(path: Path) -> Iterator[Opened]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as members:  # it checks the header
        keys = list(members.keys())
    header, start = tensors_in(path)

    def load(key: str) -> np.ndarray | str:
        entry = header[key]
        if entry["dtype"] not in FLOATS.values():  # numpy cannot even name some of them
            return _no_float(entry["dtype"])
        dtype = next(np.dtype(d) for d, name in FLOATS.items() if name == entry["dtype"])
        begin = start + entry["data_offsets"][0]
        # Each tensor is mapped by itself: what was read of one leaves the memory with it.
        return np.memmap(path, dtype, "r", begin, tuple(entry["shape"]))

    yield keys, load


_READERS = {".safetensors": _open_safetensors, ".npz": _open_numpy, ".npy": _open_numpy}


def printable(text: str) -> str:
    """Text of a file with escapes for what would act on a terminal instead of being seen."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# ---- what is quantized ---
class Sample(NamedTuple):
    """A tensor that can be quantized.

    Attributes:
      tensor: as its file has it, perhaps mapped into memory.
      axis: the axis that blocks run along, counted from the end.
      dtype: the dtype from which the tensor is quantized.
      notes: sentences for the user.
    """

    tensor: np.ndarray
    axis: int
    dtype: np.dtype
    notes: Sequence[str] = ()

    def whole(self) -> np.ndarray:
        """All of it in its dtype; elements that overflow become infinite."""
        with np.errstate(all="ignore"):
            return self.tensor.astype(self.dtype)

    def parts(self) -> Iterator[Sample]:
        """Parts of at most `PART` elements that hold whole blocks, in a fixed order."""
        if self.tensor.size <= PART:
            yield self
            return
        shape = self.tensor.shape
        units = [1] * len(shape)
        units[self.axis] = BLOCK
        along = next(i for i, (n, unit) in enumerate(zip(shape, units, strict=True)) if n > unit)
        fit = PART // (self.tensor.size // shape[along])
        step = max(fit - fit % units[along], units[along])
        for start in range(0, shape[along], step):
            part = self.tensor[(slice(None),) * along + (slice(start, start + step),)]
            yield from self._replace(tensor=part).parts()


def admit(tensor: np.ndarray | str, axis: int, dtype: str) -> Sample:
    """Prepares a tensor of `read` for quantizing.

    Raises:
      TypeError, ValueError: it cannot be quantized; says why.
    """
    if isinstance(tensor, str):
        raise ValueError(tensor)
    if tensor.dtype == np.dtype("V2"):
        raise TypeError(
            f"has dtype {tensor.dtype}, what numpy's files make of bfloat16; save it as float32, "
            "or to .safetensors"
        )
    if tensor.dtype.name not in FLOATS:
        raise TypeError(_no_float(tensor.dtype.name))
    kept = FLOAT_DTYPES[dtype]
    shape = jax.ShapeDtypeStruct(tensor.shape, kept)
    # Whether a tensor can be quantized depends on its shape alone, not on the format or scaling.
    axis = planned("quantize", shape, Options((MXFP8_E4M3,), axis, RCEIL)).axis
    if tensor.size == 0:
        raise ValueError(f"is empty, shape {tensor.shape}; there is nothing to measure")
    before = after = wider = poison = 0
    for part in Sample(tensor, axis, kept).parts():
        x = part.whole()
        before += np.count_nonzero(part.tensor)
        after += np.count_nonzero(x)
        wider += np.count_nonzero(part._replace(dtype=np.dtype(np.float32)).whole())
        poison += x.size - np.count_nonzero(np.isfinite(x))
    notes = [f"was float64 and is measured in {dtype}"] if tensor.dtype.name == "float64" else []
    if zeros := before - after:
        loss = f"of {before} nonzero elements {zeros} are zero in {dtype}"
        if zeros == before:
            way = "try --dtype float32, or multiply it" if wider else "multiply it"
            raise ValueError(f"{loss}, so nothing is left to measure; {way}")
        notes.append(loss)
    if poison:
        elements = "1 element that is" if poison == 1 else f"{poison} elements that are"
        notes.append(
            f"has {elements} NaN or infinite in {dtype}; their blocks become NaN and are left out "
            "of the errors"
        )
    return Sample(tensor, axis, kept, notes)


def _no_float(dtype: str) -> str:
    return f"has dtype {dtype}, must be one of {', '.join(FLOATS)}; convert it first"
