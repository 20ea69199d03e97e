"""The static fields of an MXArray: read from arguments, and written into files and programs.

A static field is a row of `FIELDS`. Exported programs, safetensors files, flax's state dicts and
the names that checkpoints give to scales all take it from there.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jax_mx.formats.checks import block_of, shown, whole, window_of
from jax_mx.formats.formats import BLOCK, FORMATS, named
from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, SCALE_LAYOUTS, VALUE_LAYOUTS
from jax_mx.formats.windows import SHARD, Window


def _axis(name: str, axis: Any) -> int:
    try:
        return whole(axis)
    except TypeError as error:
        raise TypeError(f"{name} must be an int, got {shown(axis)}") from error


def _window(name: str, window: Any) -> Window:
    window = tuple(window) if isinstance(window, list) else window
    return window_of(name.partition(":")[0], window, SHARD)


@dataclasses.dataclass(frozen=True)
class Field:
    """One static field of an MXArray.

    Attributes:
      read: a function from the field's name in a message and a caller's or a file's value to the
        field.
      text: a function from the field to its value in a file: a string, an int or a list of ints.
      default: the value of the field for a description that lacks it; None: every description has
        it.
    """

    read: Callable[[str, Any], Any]
    text: Callable[[Any], Any]
    default: Any = None


def _name(value: Any) -> str:
    return value.name


FIELDS: Mapping[str, Field] = {
    "format": Field(lambda name, v: named(name, FORMATS, v), _name),
    "axis": Field(_axis, int),
    "scale_layout": Field(lambda name, v: named(name, SCALE_LAYOUTS, v), _name, ROW_MAJOR),
    "block": Field(lambda name, v: block_of(name.partition(":")[0], v), list, (BLOCK,)),
    "value_layout": Field(lambda name, v: named(name, VALUE_LAYOUTS, v), _name, ROW_MAJOR_VALUES),
    "window": Field(_window, lambda v: list(v) if isinstance(v, tuple) else v, BLOCK),
}


def fields_of(q: Any) -> tuple[Any, ...]:
    """The static fields of an array, in the order of `FIELDS`."""
    return tuple(getattr(q, name) for name in FIELDS)


def described(fields: tuple[Any, ...]) -> dict[str, Any]:
    """Static fields as JSON has them."""
    pairs = zip(FIELDS.items(), fields, strict=True)
    return {name: field.text(value) for (name, field), value in pairs}


def read(op: str, description: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `described`: static fields by name; missing ones take their defaults.

    Raises:
      TypeError, ValueError: a field is missing, unknown, or no value of this version's.
    """
    if unknown := set(description) - set(FIELDS):
        raise ValueError(
            f"{op}: an MXArray is described with {', '.join(sorted(unknown))}, which this version "
            "of jax_mx does not know; install a newer one"
        )
    if missing := [n for n, f in FIELDS.items() if f.default is None and n not in description]:
        raise ValueError(f"{op}: an MXArray is described without {', '.join(missing)}")
    return {
        name: field.read(f"{op}: {name}", description[name]) if name in description
        else field.default
        for name, field in FIELDS.items()
    }  # fmt: skip


def require_same(op: str, name: str, fields: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Refuses arrays that differ in a static field.

    Raises:
      ValueError: they do; says in which.
    """
    for field, one, two in zip(FIELDS, fields, other, strict=True):
        if one != two:
            raise ValueError(f"{op}: {name} has the {field} {one!r}, must have {two!r}")


# ---- names of leaves ---
# A checkpoint keeps arrays under the names that key paths give to them. So the name of scales says
# what they belong to: nothing is restored into an array that means something else by these bytes.
_SCALES = "scales:"


@functools.lru_cache
def scales_name(fields: tuple[Any, ...]) -> str:
    """The name in key paths for the scales of an array with these static fields.

    Example: "scales:format=mxfp8_e4m3,axis=-1"; fields with their default are left out.
    """
    said = described(fields)
    kept = [n for n, v in zip(FIELDS, fields, strict=True) if v != FIELDS[n].default]
    texts = ("x".join(map(str, v)) if isinstance(v, list) else v for v in map(said.get, kept))
    return _SCALES + ",".join(f"{name}={text}" for name, text in zip(kept, texts, strict=True))


def description_in(name: str) -> dict[str, Any] | None:
    """The fields in a name of `scales_name`, as `read` takes them; None for another name."""
    if not name.startswith(_SCALES):
        return None
    header: dict[str, Any] = dict(
        pair.split("=", 1) for pair in name.removeprefix(_SCALES).split(",") if "=" in pair
    )
    for field in ("axis", "block", "window"):
        if re.fullmatch(r"-?[0-9]+(x[0-9]+)*", header.get(field, "")):  # else `read` says so
            numbers = [int(n) for n in header[field].split("x")]
            header[field] = numbers if field == "block" or len(numbers) > 1 else numbers[0]
    return header


# ---- what is known of the shape ---
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Known:
    """Numbers that follow from the shape that an array was made with.

    Attributes:
      numbers: they, or None where nothing is known, as leaves have no shape or a symbolic one, or
        nothing need be known. Such a one equals every other.
      name: of the attribute; JAX prints it where two pytrees differ.
    """

    numbers: tuple[int, ...] | None = None
    name: str = "known"

    def __repr__(self) -> str:
        return f"{self.name}={self.numbers}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Known):
            return NotImplemented
        return self.numbers == other.numbers or self.numbers is None or other.numbers is None

    def __hash__(self) -> int:
        return 0


UNKNOWN = Known()


def register_for_export(node_type: type, name: str = "") -> None:
    """Lets exported programs take a pytree of this type, whose static part is a tuple for JSON.

    Args:
      node_type: the type.
      name: by which exported programs know it; its own by default.
    """
    jax.export.register_pytree_node_serialization(
        node_type,
        serialized_name=f"jax_mx.{name or node_type.__name__}",
        serialize_auxdata=lambda aux: json.dumps(aux).encode(),
        deserialize_auxdata=lambda text: tuple(json.loads(text)),
    )
