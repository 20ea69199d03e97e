"""The launch rule: the facts of a kernel for a launch, and their form in a call.

This is the one place for the words that kernels are written with, that the manifest
keeps as JSON and that the custom call takes as attributes. The header comment of `ffi/launch.cc`
says what each of them does; this module says how they are written down. Needs no JAX.

A kernel's launch rule does not know shapes. The grid, the integers and the tensor maps follow from
the dimensions of the buffers that a call passes. Buffers are numbered: operands first, then
results. In the JSON, words that are not used are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

ABI = 3  # the version of the attributes; ffi/launch.cc launches the one before, too

JSON: TypeAlias = Any
CONSTANT, MULTIPROCESSORS = -1, -2  # in the place of a buffer's number


@dataclasses.dataclass(frozen=True)
class Extent:
    """The product of a buffer's dimensions `dims[start:stop]`.

    `start` and `stop` count from the end when negative; a `stop` beyond the last dimension is the
    last one's end. JSON: [buffer, start, stop].

    Attributes:
      buffer: its number; CONSTANT: the extent is the integer `start`; MULTIPROCESSORS: it is the
        number of the device's multiprocessors.
      start: the first dimension.
      stop: the one after the last dimension.
    """

    buffer: int
    start: int = 0
    stop: int = 99

    def to_json(self) -> JSON:
        """See the class."""
        return [self.buffer, self.start, self.stop]

    @classmethod
    def from_json(cls, json: JSON) -> Extent:
        """See the class."""
        return cls(*json)


def constant(value: int) -> Extent:
    """The extent that is `value` whatever a call passes."""
    return Extent(CONSTANT, value, 0)


def multiprocessors() -> Extent:
    """The extent that is the number of the device's multiprocessors."""
    return Extent(MULTIPROCESSORS, 0, 0)


@dataclasses.dataclass(frozen=True)
class Factor:
    """A factor of a size: ceil(extent / divisor).

    A size is a sum of products: factors with the same summand are multiplied, and the products are
    added. A size without factors is 1. JSON: [buffer, start, stop, divisor] or, if the summand is
    not 0, [buffer, start, stop, divisor, summand].

    Attributes:
      extent: what is divided.
      divisor: at least 1. One beyond any extent makes the factor 0 for an empty buffer, else 1.
      summand: 0 to 7.
    """

    extent: Extent
    divisor: int = 1
    summand: int = 0

    def to_json(self) -> JSON:
        """See the class."""
        return [*self.extent.to_json(), self.divisor, *[self.summand] * (self.summand != 0)]

    @classmethod
    def from_json(cls, json: JSON) -> Factor:
        """See the class."""
        return cls(Extent.from_json(json[:3]), *json[3:])

    def numbers(self) -> list[int]:
        """As the call takes it, the summand always there."""
        return [*self.extent.to_json(), self.divisor, self.summand]


@dataclasses.dataclass(frozen=True)
class GridTerm:
    """A factor of an axis of the grid. JSON: [axis, then the factor's numbers].

    Attributes:
      axis: 0, 1 or 2.
      factor: of the axis's size in thread blocks.
    """

    axis: int
    factor: Factor

    def to_json(self) -> JSON:
        """See the class."""
        return [self.axis, *self.factor.to_json()]

    @classmethod
    def from_json(cls, json: JSON) -> GridTerm:
        """See the class."""
        return cls(json[0], Factor.from_json(json[1:]))


@dataclasses.dataclass(frozen=True)
class Length:
    """A length of a tensor map: extent * times / divisor, which must leave no rest.

    JSON: [buffer, start, stop, times, divisor] without the ones at its end.
    """

    extent: Extent
    times: int = 1
    divisor: int = 1

    def to_json(self) -> JSON:
        """See the class."""
        json = self.numbers()
        while len(json) > 3 and json[-1] == 1:
            json.pop()
        return json

    @classmethod
    def from_json(cls, json: JSON) -> Length:
        """See the class."""
        return cls(Extent.from_json(json[:3]), *json[3:])

    def numbers(self) -> list[int]:
        """As the call takes it."""
        return [*self.extent.to_json(), self.times, self.divisor]


@dataclasses.dataclass(frozen=True)
class Scalar:
    """An integer that a kernel takes.

    JSON: [bytes, name] or [bytes, [buffer, start, stop]].

    Attributes:
      bytes: 4 or 8.
      value: how it follows from the buffers; or a name, whose value the call fills in.
    """

    bytes: int
    value: Extent | str

    def to_json(self) -> JSON:
        """See the class."""
        value = self.value
        return [self.bytes, value if isinstance(value, str) else value.to_json()]

    @classmethod
    def from_json(cls, json: JSON) -> Scalar:
        """See the class."""
        size, value = json
        return cls(size, value if isinstance(value, str) else Extent.from_json(value))


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """CUDA's description of an array from which a kernel copies boxes, the fastest dimension first.

    Element strides are 1. JSON: an object of these attributes; what has its default is left out.

    Attributes:
      buffer: whose elements it describes; the map begins where the buffer does.
      type: of an element, a key of TYPES.
      dims: per dimension its length in elements, 1 to 2**32.
      strides: per dimension but the first its stride in bytes, a multiple of 16 below 2**40.
      box: per dimension the elements of a box, 1 to 256; a row has a multiple of 16 bytes.
      swizzle: 0, or the bytes that it permutes in shared memory, a key of SWIZZLES. A box's row has
        at most so many.
      promotion: the bytes that L2 fetches at once: 0, 64, 128 or 256.
      fill: the elements of a box beyond the array: "zero", or "nan" for floats.
    """

    buffer: int
    type: str
    dims: tuple[Length, ...]
    strides: tuple[Length, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    promotion: int = 0
    fill: str = "zero"

    TYPES: ClassVar[dict[str, int]] = {  # CUtensorMapDataType
        "uint8": 0,
        "uint16": 1,
        "uint32": 2,
        "int32": 3,
        "uint64": 4,
        "int64": 5,
        "float16": 6,
        "float32": 7,
        "float64": 8,
        "bfloat16": 9,
        "float32_ftz": 10,
        "tfloat32": 11,
        "tfloat32_ftz": 12,
    }
    SWIZZLES: ClassVar[dict[int, int]] = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
    PROMOTIONS: ClassVar[dict[int, int]] = {0: 0, 64: 1, 128: 2, 256: 3}
    FILLS: ClassVar[dict[str, int]] = {"zero": 0, "nan": 1}

    def __post_init__(self):
        """Raises ValueError: the dimensions, strides and the box are not of one rank."""
        rank = len(self.dims)
        if len(self.strides) != rank - 1 or len(self.box) != rank:
            raise ValueError(
                f"a tensor map of {rank} dimensions has {len(self.strides)} strides and a box of "
                f"{len(self.box)}; it needs {rank - 1} and {rank}"
            )

    def to_json(self) -> JSON:
        """See the class."""
        json: JSON = {"buffer": self.buffer, "type": self.type}
        json["dims"] = [length.to_json() for length in self.dims]
        json["strides"] = [length.to_json() for length in self.strides]
        json["box"] = [*self.box]
        return json | _changed(self, "swizzle", "promotion", "fill")

    @classmethod
    def from_json(cls, json: JSON) -> TensorMap:
        """See the class."""
        fields: dict[str, Any] = {**json, "box": tuple(json["box"])}
        for name in ("dims", "strides"):
            fields[name] = tuple(Length.from_json(length) for length in json[name])
        return cls(**fields)

    def numbers(self) -> list[int]:
        """As the call takes it."""
        head = [self.buffer, self.TYPES[self.type], len(self.dims), self.SWIZZLES[self.swizzle]]
        head += [self.PROMOTIONS[self.promotion], self.FILLS[self.fill]]
        for length, box in zip(self.dims, self.box, strict=True):
            head += [*length.numbers(), box]
        for length in self.strides:
            head += length.numbers()
        return head


@dataclasses.dataclass(frozen=True)
class Scratch:
    """A result of the call that is the kernel's workspace.

    JSON: {"buffer": number, "bytes": [factors]} and, where it is cleared, "clear": true.

    Attributes:
      buffer: its number.
      bytes: the factors of the size that it must have at least.
      clear: whether so many bytes are set to zero before each launch.
    """

    buffer: int
    bytes: tuple[Factor, ...]
    clear: bool = False

    def to_json(self) -> JSON:
        """See the class."""
        json = {"buffer": self.buffer, "bytes": [factor.to_json() for factor in self.bytes]}
        return json | _changed(self, "clear")

    @classmethod
    def from_json(cls, json: JSON) -> Scratch:
        """See the class."""
        fields: dict[str, Any] = {**json}
        fields["bytes"] = tuple(Factor.from_json(f) for f in json["bytes"])
        return cls(**fields)


# ---- an entry's parameters ---
@dataclasses.dataclass(frozen=True)
class Pointer:
    """The parameter that points at a buffer. JSON: ["pointer", buffer]."""

    buffer: int


@dataclasses.dataclass(frozen=True)
class ScalarAt:
    """The parameter that is one of the launch's scalars. JSON: ["scalar", index]."""

    index: int


@dataclasses.dataclass(frozen=True)
class MapAt:
    """The parameter that is one of the launch's tensor maps, by value. JSON: ["map", index]."""

    index: int


@dataclasses.dataclass(frozen=True)
class Padding:
    """A parameter of zeros that a compiler declares and no kernel reads. JSON: ["zeros", bytes].

    Attributes:
      bytes: 1 to 64. CuTeDSL declares 8 behind each tensor map.
    """

    bytes: int


Parameter: TypeAlias = Pointer | ScalarAt | MapAt | Padding
_KINDS: dict[str, type[Parameter]] = {  # in the order of their numbers in a call
    "pointer": Pointer,
    "scalar": ScalarAt,
    "map": MapAt,
    "zeros": Padding,
}
_WORDS = {cls: (number, word) for number, (word, cls) in enumerate(_KINDS.items())}


def _number_of(parameter: Parameter) -> int:
    (number,) = dataclasses.astuple(parameter)
    return number


# ---- entries and the launch ---
@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry point of a binary, and what its launch needs.

    JSON: an object of these attributes; those after `grid` are left out where they have their
    default.

    Attributes:
      symbol: its name.
      align: the number of bytes that must divide each buffer's address.
      threads: of a thread block, along three axes.
      divide: (extent, divisor) as factors: the entry takes only extents that the divisor divides.
      grid: the factors of the grid's axes; an axis without any is 1.
      usage: the compiler's figures for the entry; for reports alone.
      shared: bytes of dynamic shared memory per thread block.
      cluster: thread blocks of a cluster, along three axes; 16 at most. CUDA only.
      early_start: whether it may start before the call's launch ahead of it has ended. It always
        waits for that itself, before it writes, or reads what a launch of the call writes. CUDA
        only.
      parameters: in the kernel's order. By default the operands' pointers, the results' pointers,
        then the scalars.
    """

    symbol: str
    align: tuple[int, ...]
    threads: tuple[int, int, int]
    divide: tuple[Factor, ...] = ()
    grid: tuple[GridTerm, ...] = ()
    usage: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    early_start: bool = False
    parameters: tuple[Parameter, ...] = ()

    def to_json(self) -> JSON:
        """See the class."""
        json = {
            "symbol": self.symbol,
            "align": [*self.align],
            "divide": [factor.to_json() for factor in self.divide],
            "threads": [*self.threads],
            "grid": [term.to_json() for term in self.grid],
        }
        json |= {"usage": dict(self.usage)} if self.usage else {}
        json |= _changed(self, "shared", "early_start")
        if self.cluster != (1, 1, 1):
            json["cluster"] = [*self.cluster]
        if self.parameters:
            json["parameters"] = [[_WORDS[type(p)][1], _number_of(p)] for p in self.parameters]
        return json

    @classmethod
    def from_json(cls, json: JSON) -> Entry:
        """See the class."""
        fields: dict[str, Any] = {
            **json,
            "divide": tuple(Factor.from_json(f) for f in json.get("divide", ())),
            "grid": tuple(GridTerm.from_json(t) for t in json.get("grid", ())),
            "parameters": tuple(_KINDS[word](n) for word, n in json.get("parameters", ())),
        }
        for name in ("align", "threads", "cluster"):
            if name in fields:
                fields[name] = tuple(fields[name])
        return cls(**fields)

    @property
    def settings(self) -> list[int]:
        """As the call takes them: shared memory, cluster and early start."""
        return [self.shared, *self.cluster, int(self.early_start)]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel's launch rule: its entries, of which a call launches one, and what they share.

    JSON: an object of these attributes; empty maps and scratch are left out.

    Attributes:
      entries: the fastest first. All compute the same; the first whose `align` and `divide` a call
        satisfies is launched.
      scalars: the integers that entries take.
      maps: the tensor maps that entries take.
      scratch: the results that are workspace.
    """

    entries: tuple[Entry, ...]
    scalars: tuple[Scalar, ...] = ()
    maps: tuple[TensorMap, ...] = ()
    scratch: tuple[Scratch, ...] = ()

    def to_json(self) -> JSON:
        """See the class."""
        json = {"scalars": [scalar.to_json() for scalar in self.scalars]}
        for name in ("maps", "scratch"):
            if items := getattr(self, name):
                json[name] = [item.to_json() for item in items]
        return json | {"entries": [entry.to_json() for entry in self.entries]}

    @classmethod
    def from_json(cls, json: JSON) -> Launch:
        """See the class."""
        kinds = {"entries": Entry, "scalars": Scalar, "maps": TensorMap, "scratch": Scratch}
        fields: dict[str, Any] = {
            name: tuple(kinds[name].from_json(item) for item in items)
            for name, items in json.items()
        }
        return cls(**fields)

    def attributes(
        self, sha256: str, values: Mapping[str, int] | None = None, image: bytes | None = None
    ) -> dict[str, Any]:
        """One chip's kernel as the custom call takes it: an entry of its attribute `kernels`.

        Args:
          sha256: of the binary, hexadecimal.
          values: of the scalars that have a name; more of them do no harm.
          image: the binary; None: the handler looks for it by its sha256.

        Raises:
          KeyError: a scalar's name has no value.
        """
        entries = self.entries
        numbers: dict[str, list] = {
            "align": [entry.align for entry in entries],
            "divide": [
                (i, *factor.extent.to_json(), factor.divisor)
                for i, entry in enumerate(entries)
                for factor in entry.divide
            ],
            "threads": [entry.threads for entry in entries],
            "grid": [
                (3 * i + term.axis, *term.factor.numbers())
                for i, entry in enumerate(entries)
                for term in entry.grid
            ],
            "scalars": [
                (scalar.bytes, *_extent_of(scalar, values or {}).to_json())
                for scalar in self.scalars
            ],
            "maps": [number for item in self.maps for number in item.numbers()],
            "parameters": [
                (i, _WORDS[type(p)][0], _number_of(p))
                for i, entry in enumerate(entries)
                for p in entry.parameters
            ],
            "scratch": [(item.buffer, int(item.clear)) for item in self.scratch],
            "scratch_bytes": [
                (i, *factor.numbers())
                for i, item in enumerate(self.scratch)
                for factor in item.bytes
            ],
        }
        if any(entry.settings != [0, 1, 1, 1, 0] for entry in entries):
            numbers["settings"] = [entry.settings for entry in entries]
        attributes = {} if image is None else {"image": image}
        attributes |= {"sha256": sha256, "symbols": ",".join(entry.symbol for entry in entries)}
        return attributes | {name: _int64(rows) for name, rows in numbers.items() if rows}


def call_attributes(
    kernels: Mapping[str, Mapping[str, Any]],
    *,
    merge: Sequence[int] = (),
    absent: Sequence[int] = (),
    device: int | None = None,
) -> dict[str, Any]:
    """All attributes of the custom call.

    Args:
      kernels: per chip, as its driver names it ("sm_90"), what `Launch.attributes` gives.
      merge: of the last dimensions of every buffer the number of the merged dimension that it
        belongs to; none are merged by default.
      absent: the numbers, ascending, of operands that the kernel knows and the call does not have.
      device: on the CPU, the stand-in driver's device.
    """
    attributes = _of_call(device) | {"kernels": dict(kernels)}
    if merge:
        attributes["merge"] = _int64(merge)
    if absent:
        attributes["absent"] = _int64(absent)
    return attributes


def steps_attributes(
    steps: Sequence[tuple[Mapping[str, Mapping[str, Any]], Sequence[int], Sequence[int]]],
    *,
    device: int | None = None,
) -> dict[str, Any]:
    """The same of a call that launches several kernels, one after the other.

    Args:
      steps: for each launch its kernels, and the numbers of its operands and of its results in the
        call, which counts the call's operands, then its results; -1: the launch has no such one.
      device: see `call_attributes`.
    """
    every = {
        str(i): {
            "kernels": dict(kernels),
            "operands": _int64(operands),
            "results": _int64(results),
        }
        for i, (kernels, operands, results) in enumerate(steps)
    }
    return _of_call(device) | {"steps": every}


def _of_call(device: int | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {"abi": np.int64(ABI)}
    return attributes if device is None else attributes | {"device": np.int64(device)}


def _extent_of(scalar: Scalar, values: Mapping[str, int]) -> Extent:
    value = scalar.value
    return constant(values[value]) if isinstance(value, str) else value


def _int64(rows: Iterable) -> np.ndarray:
    return np.array(rows, dtype=np.int64).ravel()


def _changed(item: Any, *names: str) -> dict[str, JSON]:
    """The attributes of a dataclass that differ from their default."""
    defaults = {field.name: field.default for field in dataclasses.fields(item)}
    return {name: getattr(item, name) for name in names if getattr(item, name) != defaults[name]}
