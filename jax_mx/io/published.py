"""`load_checkpoint`: folders in the MX layouts that libraries write, as MXArrays.

A library is a row of `LIBRARIES`: where its config says what weights are in, which of these are MX,
and which names values and scales have. Their dtypes and shapes say what a pair of tensors is.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_mx.formats.checks import depth, shown
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2, Format
from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES
from jax_mx.formats.windows import TILE
from jax_mx.io.checkpoints import descriptions_in, require_alike
from jax_mx.io.reading import (
    Files,
    Tensor,
    joined,
    placed,
    placed_mx,
    require_splits,
    spread,
    stacked,
    unpacked,
)
from jax_mx.quantizing import metadata
from jax_mx.quantizing.mxarray import MXArray

OP = "load_checkpoint"
Config = Mapping[str, Any]
Pairs = Sequence[tuple[str, str, str]]  # as `Library.pairs`
Tile = tuple[int, int]  # rows and columns that share a scale
ROW_BLOCK: Tile = (1, BLOCK)
Like = Mapping[str, Any] | Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None]


# ---- what libraries write ---
@dataclasses.dataclass(frozen=True)
class Library:
    """How a library keeps weights in MX.

    Attributes:
      said: the words of messages for the files that are read.
      ways: a function for the formats that a config names; it gives none if the config names none.
      taken: a regular expression of all that is MX.
      pairs: the ends of the names of values and of scales, and the new end of a value's name.
    """

    said: str
    ways: Callable[[Config], Sequence[str]]
    taken: str
    pairs: Pairs


def _of_groups(config: Config) -> list[str]:
    """Compressed-tensors: a format of all, or one of each group, and what else its codes need."""
    transforms = config.get("transform_config") or {}
    more = " with transforms" if transforms.get("config_groups", transforms) else ""
    every = []
    for group in config.get("config_groups", {}).values():
        points = (group.get("weights") or {}).get("symmetric") is False
        way = f"{group.get('format') or config.get('format')}{more}"
        every.append(way + " with zero points" * points)
    return every or [f"{config.get('format')}{more}"]


def _of_modelopt(config: Config) -> list[str]:
    """ModelOpt: an algorithm of all, or one of each layer."""
    config = config.get("quantization", config)
    layers = config.get("quantized_layers", {}).values()
    return [str(layer.get("quant_algo")) for layer in layers] or [str(config.get("quant_algo"))]


def _of_quark(config: Config) -> list[str]:
    """Quark: a dtype and a shape of blocks, of all and of single layers, and what codes need."""
    layers = [config.get("global_quant_config"), *(config.get("layer_quant_config") or {}).values()]
    weights = [layer["weight"] for layer in layers if layer and layer.get("weight")]
    algorithms = config.get("algo_config") or []
    algorithms = algorithms if isinstance(algorithms, list) else [algorithms]
    # The others of a rotation's matrices lie in the weights themselves, or turn keys and queries.
    turns = any(a.get(part) for a in algorithms for part in ("r4", "online_r1_rotation"))
    return [_of_quarks_weight(weight) + " with rotated activations" * turns for weight in weights]


def _of_quarks_weight(weight: Any) -> str:
    if not isinstance(weight, Mapping):
        return "several quantizers in turn"
    length, axis = weight.get("block_size") or weight.get("group_size"), weight.get("ch_axis")
    way = f"{weight['dtype']} {weight['qscheme']} {length} {weight.get('scale_format')}"
    return way + f" along axis {axis}" * (axis not in (None, -1, 1))


def _of_tiles(config: Config) -> list[str]:
    """DeepSeek and those who write as it does: the shape of a scale's tile."""
    tile = config.get("weight_block_size")
    return [f"{config.get('fmt', 'e4m3')}, a scale for {tile or 'each tensor'}"]


WEIGHT = (".weight", ".weight_scale", ".weight")
TILED = ((".weight", ".weight_scale_inv", ".weight"), (".weight", ".scale", ".weight"), WEIGHT)
LIBRARIES: Mapping[str, Library] = {
    "compressed-tensors": Library(
        "MXFP4 and MXFP8 of compressed-tensors",
        _of_groups,
        "mxfp4-pack-quantized|mxfp8-quantized",
        ((".weight_packed", ".weight_scale", ".weight"), WEIGHT),
    ),
    "modelopt": Library("MXFP8 of ModelOpt", _of_modelopt, "MXFP8", (WEIGHT,)),
    "quark": Library(
        "MXFP4 and MXFP8 of Quark",
        _of_quark,
        r"(fp4|fp8_e4m3) (per_group 32|per_block \[\d+, 32\]) e8m0",
        (WEIGHT,),
    ),
    "mxfp4": Library(
        "gpt-oss", lambda _: (), "", (("_blocks", "_scales", ""), (".blocks", ".scales", ""))
    ),
    "fp8": Library(
        "FP8 in tiles with powers of two, as DeepSeek has it",
        _of_tiles,
        r"e4m3, a scale for \[\d+, \d+\]",
        TILED,
    ),
    "mxfp8": Library("MXFP8 of SGLang", _of_tiles, r"e4m3, a scale for \[1, 32\]", TILED),
}
CODES: Mapping[str, Format] = {  # by the dtype of values in a file
    "F8_E4M3": MXFP8_E4M3,
    "F8_E5M2": MXFP8_E5M2,
    **dict.fromkeys(("U8", "I8", "F4"), MXFP4_E2M1),
}
FLOATS = ("F32", "BF16", "F16")  # dtypes of scales, as EXPONENTS are
EXPONENTS = ("U8", "F8_E8M0")


# ---- the public function ---
@dataclasses.dataclass(frozen=True)
class Entry:
    """An array of the result that is not read yet.

    Attributes:
      values: its codes, or all of it.
      scales: of codes.
      format: of codes.
      fields: the other static fields of its MXArray.
    """

    values: Tensor
    scales: Tensor | None = None
    format: Format | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that it becomes."""
        shape = [*self.values.shape]
        if self.format is not None:
            shape[self.fields.get("axis", -1)] *= self.format.codes_per_byte
        return tuple(shape)

    @property
    def abstract(self) -> Any:
        """The array that it becomes, without its elements."""
        if self.scales is None or self.format is None:
            return jax.ShapeDtypeStruct(self.values.shape, self.values.dtype)
        parts = (jax.ShapeDtypeStruct(t.shape, t.dtype) for t in (self.values, self.scales))
        make = functools.partial(MXArray.from_parts, format=self.format, **self.fields)
        return jax.eval_shape(make, *parts)

    @property
    def alike(self) -> tuple[Any, ...]:
        """Equal for entries that can become one array, but for lengths."""
        return len(self.shape), self.values.dtype, self.format, {**self.fields}

    def of(self, make: Callable[[Sequence[Tensor]], Tensor], *others: Entry) -> Entry:
        """One entry of this and others by a function of their tensors."""
        every = (self, *others)
        parts = [entry.scales for entry in every if entry.scales is not None]
        scales = make(parts) if parts else None
        return dataclasses.replace(self, values=make([e.values for e in every]), scales=scales)


def load_checkpoint(
    folder: str | os.PathLike,
    *,
    join: Mapping[str, Sequence[str]] | None = None,
    like: Like | None = None,
    progress: bool | None = None,
) -> dict[str, MXArray | jax.Array]:
    """Reads a folder of a model whose weights are in MX, as libraries for PyTorch write them.

        params = load_checkpoint("folder", join={"gate_up_proj": ("gate_proj", "up_proj")})
        w = params["model.layers.0.mlp.gate_up_proj.weight"]  # MXFP4 (2 I, D), blocks along D
        y = jax_mx.einsum("bk,nk->bn", x, w, recipe="bf16")

    The folder has config.json, whose `quantization_config` says how weights are kept, and
    .safetensors files with or without an index. It may be of compressed-tensors (MXFP4, MXFP8),
    ModelOpt (MXFP8), Quark (both), SGLang (MXFP8), gpt-oss, or DeepSeek, where scales are powers
    of two; or `save_safetensors` wrote it. Codes stay as they are: nothing is quantized. Each
    process reads the codes that its devices hold, and scales in floats whole, a tensor at a time.

    Args:
      folder: of the model, or a .safetensors file or an index in it, beside its config.json.
      join: a mapping from the name of a joined array to the names of the parts of a layer that it
        holds, one behind the other along outputs: one product instead of several. Biases are joined
        like weights, and scalars stay. A later part whose layer lacks the first one stays by
        itself, and a warning says so.
      like: the expected arrays by name, as `load_safetensors` takes them: arrays are placed so. Or
        a function of a name and a shape that gives a sharding or None. Blocks stay whole.
      progress: whether to say how far reading is: a bar on a terminal, else lines on stderr. None:
        on a terminal, if there is much to read.

    Returns:
      By name: an `MXArray` (outputs, inputs), blocks along inputs, in the place of each pair, with
      the name of its floats, such as "model.layers.0.mlp.up_proj.weight"; other tensors as arrays.
      Tiles with one scale, as DeepSeek has them, become square blocks, where these fit; otherwise
      each row has the tile's scale. Experts "experts.0.", "experts.1." ... that are alike become
      one array (experts, outputs, inputs), "experts.", as `moe` takes them.

    Raises:
      ModuleNotFoundError: safetensors is not installed.
      FileNotFoundError: there is no such folder or file.
      TypeError: an argument is of the wrong type.
      ValueError: a file is damaged; weights are in a format that is not MX, such as NVFP4, or have
        scales that are not powers of two; parts to be joined differ, or are not there; two arrays
        have one name; or there is something else than like expects.
    """
    if like is not None and not callable(like) and not isinstance(like, Mapping):
        raise TypeError(f"{OP}: like must be a dictionary or a function, got {shown(like)}")
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{OP}: folder must be the path of one model, got {shown(folder)}")
    files, folder = Files(OP, folder), Path(folder)
    folder = folder if folder.is_dir() else folder.parent
    entries: dict[str, Entry] = {}
    for name, entry in _entries(files, *_pairs(folder)):
        if name in entries:
            raise ValueError(f"{OP}: {folder} has {name!r} in MX and in floats; keep one of them")
        entries[name] = entry
    entries = _with_experts(entries)
    for name, parts in _checked(join).items():
        entries = _with_joined(entries, name, parts)
    if isinstance(like, Mapping):  # before anything is read, which may take minutes
        require_alike(OP, {name: entry.abstract for name, entry in entries.items()}, like)
    return _loaded(files, entries, like, progress)


def _loaded(
    files: Files, entries: Mapping[str, Entry], like: Like | None, progress: bool | None
) -> dict[str, MXArray | jax.Array]:
    """The arrays, read one after the other."""
    tensors = (t for e in entries.values() for t in (e.values, e.scales) if t is not None)
    loaded: dict[str, MXArray | jax.Array] = {}
    places = {name: _sharding(like, name, entry) for name, entry in entries.items()}
    for name, entry in entries.items():
        require_splits(OP, entry.values, places[name], entry.format, **entry.fields)
    with files.progress(sum(tensor.nbytes for tensor in tensors), progress):
        for name in sorted(entries):
            entry, where = entries[name], places[name]
            if entry.scales is None or entry.format is None:
                loaded[name] = placed(OP, entry.values, where)
            else:
                pair = entry.values, entry.scales
                loaded[name] = placed_mx(OP, *pair, entry.format, where, **entry.fields)
    return loaded


def _checked(join: Any) -> Mapping[str, Sequence[str]]:
    """Refuses a `join` that says nothing of the sort.

    Raises:
      TypeError: it says nothing of the sort.
      ValueError: a name comes twice.
    """
    join = {} if join is None else join
    if not isinstance(join, Mapping) or not all(
        isinstance(parts, Sequence) and not isinstance(parts, str) and parts
        and all(isinstance(one, str) and one for one in (name, *parts))
        for name, parts in join.items()
    ):  # fmt: skip
        raise TypeError(f"{OP}: join must map a name to a list of names, got {shown(join)}")
    if twice := [name for name, parts in join.items() if len({*parts}) < len(parts)]:
        raise ValueError(f"{OP}: join names a part of {twice[0]!r} twice; name each part once")
    return join


def _sharding(like: Like | None, name: str, entry: Entry) -> jax.sharding.Sharding | None:
    """Where an array shall lie."""
    if like is None:
        return None
    if not isinstance(like, Mapping):
        where = like(name, entry.shape)
        if where is not None and not isinstance(where, jax.sharding.Sharding):
            raise TypeError(f"{OP}: like gave {shown(where)} for {name!r}, must give a Sharding")
        return where
    want: Any = like.get(name)
    want = getattr(want, "values", want)
    where = getattr(want, "sharding", None)
    is_placed = isinstance(where, jax.sharding.Sharding) and getattr(want, "committed", True)
    return where if is_placed and want.shape == entry.values.shape else None


# ---- config.json ---
def _config(folder: Path) -> Config:
    """The part of a folder's config that names its weights' formats; empty if there is none.

    Raises:
      ValueError: a file that should say so is damaged.
    """
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", None)):
        if not (folder / name).is_file():
            continue
        try:
            config = json.loads((folder / name).read_text("utf-8"))
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise ValueError(f"{OP}: {folder / name} is damaged; fetch it again")
        if key is None:
            return {"quant_method": "modelopt", **config}
        text = config.get("text_config")
        config = config.get(key) or (text.get(key) if isinstance(text, dict) else None) or {}
        if not isinstance(config, dict):
            raise ValueError(f"{OP}: {key} of {folder / name} is damaged; fetch it again")
        if config:
            return config
    return {}


def _pairs(folder: Path) -> tuple[Pairs, Sequence[Tile], bool]:
    """How values and scales are called in a folder, which tiles scales may have; if a config says.

    Raises:
      ValueError: weights are in no MX format, or in one that is unknown.
    """
    config = _config(folder)
    if not config:  # gpt-oss' original files have these names, and no config says so
        return LIBRARIES["mxfp4"].pairs, [ROW_BLOCK], False
    method = str(config.get("quant_method", "nothing that its config names"))
    readable = ", ".join(row.said for row in LIBRARIES.values())
    if method not in LIBRARIES:
        raise ValueError(
            f"{OP}: {folder} is quantized by {method!r}, which jax_mx does not read. It "
            f"reads {readable}. Load the model's floats, and quantize these"
        )
    library = LIBRARIES[method]
    try:
        ways = [*library.ways(config)]
    except (AttributeError, TypeError, KeyError) as error:
        raise ValueError(
            f"{OP}: the quantization_config of {folder} is none of {method}'s: "
            f"{shown(dict(config))}; fetch config.json again"
        ) from error
    for way in ways:
        if not re.fullmatch(library.taken, way):
            raise ValueError(
                f"{OP}: {folder} has weights in {way} ({method}), which is not MX, or no MX that "
                f"jax_mx reads. It reads {readable}. Load the model's floats, and quantize these"
            )
    tiles = (re.search(r"\[(\d+), (\d+)\]", way) for way in ways)
    named = [(int(tile[1]), int(tile[2])) for tile in tiles if tile]
    return library.pairs, [*named, ROW_BLOCK], True


# ---- tensors ---
def _entries(
    files: Files, pairs: Pairs, tiles: Sequence[Tile], has_config: bool
) -> Iterator[tuple[str, Entry]]:
    """Each array by its name: MX for pairs of values and scales, and all others.

    Raises:
      ValueError: codes stand alone.
    """
    described = _described(files)
    taken = {f"{name}.{part}" for name in described for part in ("values", "scales")}
    yield from described.items()
    for values_end, scales_end, end in pairs:
        for scales in files.places:
            name = scales.removesuffix(scales_end)
            if scales in taken or name == scales or (values := name + values_end) in taken:
                continue
            if values in files.places:
                taken |= {values, scales}
                yield name + end, _pair(files, values, scales, tiles)
    _require_no_scales(files, files.places.keys() - taken)
    for name in files.places:
        if name not in taken:
            _require_no_codes(files, name, pairs, has_config)
            yield name, Entry(unpacked(files[name]) if files.dtype(name) == "F4" else files[name])


def _require_no_codes(files: Files, name: str, pairs: Pairs, has_config: bool) -> None:
    """Refuses a tensor of codes without scales, or of scales without codes.

    Raises:
      ValueError: it is one.
    """
    dtype, lacking = files.dtype(name), None
    if has_config and dtype in ("F8_E4M3", "F8_E5M2"):
        lacking = " or ".join(name.removesuffix(v) + s for v, s, _ in pairs)
    for values, scales, _ in pairs:
        is_code = dtype in CODES and (has_config or values != ".weight")
        if name.endswith(values) and is_code:
            lacking = lacking or name.removesuffix(values) + scales
        if name.endswith(scales) and dtype in EXPONENTS:
            raise ValueError(
                f"{OP}: {name!r} has scales, and there is no {name.removesuffix(scales) + values!r}"
                "; fetch the model's files again"
            )
    if lacking is not None:
        raise ValueError(
            f"{OP}: {name!r} is {dtype} and has no scales of its own, as {lacking!r}; whoever "
            "wrote the files lost them, or the index leaves them out"
        )


def _require_no_scales(files: Files, names: Set[str]) -> None:
    """Refuses codes beside scales that no config tells of: codes alone are wrong numbers.

    Raises:
      ValueError: there are such.
    """
    for values_end, scales_end, _ in (pair for row in LIBRARIES.values() for pair in row.pairs):
        for scales in names:
            values = scales.removesuffix(scales_end) + values_end
            if not scales.endswith(scales_end) or values not in names:
                continue
            of_codes = values_end.endswith("_packed") or files.dtype(values) in CODES
            if of_codes or files.dtype(scales) in EXPONENTS:
                raise ValueError(
                    f"{OP}: {values!r} has scales, {scales!r}, and no quantization_config says "
                    "what they mean; fetch the model's config.json into the folder of its files"
                )


def _described(files: Files) -> dict[str, Entry]:
    """The MXArrays that `save_safetensors` wrote."""
    entries = {}
    for file in sorted({*files.places.values()}):
        for name, description in descriptions_in(OP, files.header(file)[0]).items():
            try:
                fields = metadata.read(OP, description)
            except TypeError as error:
                raise ValueError(f"{OP}: {file} is damaged in {name!r}: {error}") from error
            format = fields.pop("format")
            for part in ("values", "scales"):
                if f"{name}.{part}" not in files.places:
                    raise ValueError(
                        f"{OP}: {file} describes {name!r} and there is no '{name}.{part}'"
                    )
            values, scales = files[f"{name}.values"], files[f"{name}.scales"]
            if not -values.ndim <= fields["axis"] < values.ndim:
                raise ValueError(
                    f"{OP}: {file} says that blocks of {name!r} run along axis {fields['axis']}, "
                    f"and it has {values.ndim}; fetch it again"
                )
            entries[name] = Entry(values, scales, format, fields)
            try:
                _ = entries[name].abstract
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{OP}: {name!r} in {file} is not what the file says of it: {error}"
                ) from error
    return entries


def _pair(files: Files, values: str, scales: str, tiles: Sequence[Tile]) -> Entry:
    """The MXArray that a pair of tensors is.

    Raises:
      ValueError: it is none.
    """
    format = CODES.get(files.dtype(values))
    if format is None:
        raise ValueError(
            f"{OP}: {values!r} is {files.dtype(values)}; codes of MX are {', '.join(CODES)}. Load "
            "the model's floats, and quantize these"
        )
    exponents, shape = _exponents(files, scales), files[values].shape
    if values.endswith("blocks") and len(shape) > 2:  # of each block by itself
        shape = (*shape[:-2], shape[-2] * shape[-1])
    codes = files.viewed(values, format.storage, shape)
    shape = (*shape[:-1], *(n * format.codes_per_byte for n in shape[-1:]))
    tile = _tile(shape, exponents.shape, tiles)
    if tile is None:
        raise ValueError(
            f"{OP}: {values!r} is {shape} and {scales!r} {exponents.shape}; MX has a scale for "
            f"{BLOCK} elements of the last axis, and this model may have one for each tile of "
            f"{' or '.join(map(str, dict.fromkeys(tiles)))}. Load the model's floats, and quantize "
            "these"
        )
    fields: dict[str, Any] = {}
    stored, (rows, columns) = [*shape], tile
    stored[-1] //= BLOCK
    if len(shape) > 1 and rows % BLOCK == 0 and shape[-2] % BLOCK == 0:
        stored[-2], rows = stored[-2] // BLOCK, rows // BLOCK
        fields = {"block": (BLOCK, BLOCK)} | ({"window": TILE} if tile == TILE else {})
    elif columns in (128, 256):
        fields = {"window": columns}
    if tile != ROW_BLOCK:
        times = *[1] * (len(shape) - 2), *[rows][: len(shape) - 1], columns // BLOCK
        exponents = spread(exponents, stored, times)
    return Entry(codes, exponents, format, fields)


def _tile(shape: Sequence[int], parts: Sequence[int], tiles: Sequence[Tile]) -> Tile | None:
    """The one tile of these that fits so many scales; None if none does, or several differ.

    A tile may be cut off at the edge.
    """
    if not shape or len(shape) != len(parts) or shape[:-2] != parts[:-2] or shape[-1] % BLOCK:
        return None
    lengths = (1, *shape)[-2:]
    fitting = {
        (min(rows, lengths[0]), min(columns, lengths[1])): (rows, columns)
        for rows, columns in tiles
        if rows and columns and columns % BLOCK == 0
        and (-(-lengths[0] // rows), -(-lengths[1] // columns)) == (1, *parts)[-2:]
    }  # fmt: skip
    return fitting.popitem()[1] if len(fitting) == 1 else None


def _exponents(files: Files, name: str) -> Tensor:
    """Scales as E8M0 bytes.

    Raises:
      ValueError: they are no powers of two.
    """
    tensor, dtype = files[name], files.dtype(name)
    if dtype in EXPONENTS:
        return files.viewed(name, np.uint8, tensor.shape)
    said = f"{OP}: the scales {name!r} are {dtype}"
    if dtype not in FLOATS:
        raise ValueError(
            f"{said}, not the bytes of exponents that MX has (E4M3 is NVFP4's); load the model's "
            "floats, and quantize these"
        )
    bits = tensor.read(()).astype(np.float32).view(np.uint32)
    codes = (bits >> 23).astype(np.uint8)
    good = (bits << 9 == 0) & (bits >> 23 > 0) & (bits >> 23 < 255) | (bits == 1 << 22)
    if not good.all():
        raise ValueError(
            f"{said} and not powers of two, so the weight is not MX; multiply its codes by them, "
            "and quantize the floats"
        )
    return Tensor(name, tensor.shape, np.dtype(np.uint8), lambda index: codes[index])


# ---- experts, and what is one product ---
_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)\.(.+)")


def _with_experts(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """One entry stands for all experts of a layer, where they are alike."""
    groups: dict[str, dict[int, str]] = {}
    for name in entries:
        if match := _EXPERT.fullmatch(name):
            groups.setdefault(match[1] + match[3], {})[int(match[2])] = name
    result = dict(entries)
    for name, experts in groups.items():
        every = [entries[experts[i]] for i in sorted(experts)]
        is_whole = sorted(experts) == [*range(len(experts))] and name not in entries
        is_whole &= all(e.shape == every[0].shape and e.alike == every[0].alike for e in every)
        if not is_whole and len(every) > 1:
            warnings.warn(
                f"{OP}: the {len(every)} experts of {name!r} stay by themselves: some are missing, "
                "or their formats or shapes differ",
                UserWarning,
                stacklevel=depth(),
            )
        elif is_whole:
            result[name] = every[0].of(
                lambda tensors: stacked(tensors[0].name, tensors), *every[1:]
            )
            for expert in experts.values():
                del result[expert]
    return result


def _with_joined(entries: dict[str, Entry], name: str, parts: Sequence[str]) -> dict[str, Entry]:
    """One entry stands for parts of a layer.

    Raises:
      ValueError: one is missing, they differ, or the name of all is taken.
    """
    first, result = _part(parts[0]), dict(entries)
    matching = [one for one in entries if first.search(one) and entries[one].shape]
    if not matching:
        raise ValueError(f"{OP}: join has {parts[0]!r}, which is part of no tensor's name")
    for one in matching:
        names = [first.sub(lambda _, part=part: part, one) for part in (*parts, name)]
        whole = names.pop()
        if missing := [other for other in names if other not in entries]:
            raise ValueError(
                f"{OP}: {one!r} is to be joined with {missing[0]!r}, which is not there"
            )
        for other in names:
            del result[other]
        if whole in result:
            raise ValueError(f"{OP}: join names {whole!r}, which is there already; choose another")
        result[whole] = _as_one(names, [entries[other] for other in names])
    for part in parts[1:]:
        if alone := [one for one in result if _part(part).search(one) and result[one].shape]:
            warnings.warn(
                f"{OP}: {alone[0]!r} stays by itself, as its layer has no {parts[0]!r} that join "
                f"puts before {part!r} ({len(alone)} such)",
                UserWarning,
                stacklevel=depth(),
            )
    return result


def _part(name: str) -> re.Pattern:
    """Where a tensor's name has that of a part."""
    return re.compile(rf"(?:^|(?<=\.)){re.escape(name)}(?=\.|$)")


def _as_one(names: Sequence[str], every: Sequence[Entry]) -> Entry:
    """Entries, one behind the other along outputs.

    Raises:
      ValueError: they differ, or lie so that outputs are not rows.
    """
    first, axis = every[0], max(len(every[0].shape) - 2, 0)
    for other, entry in zip(names, every, strict=True):
        pairs = (e.shape[:axis] + e.shape[axis + 1 :] for e in (entry, first))
        if entry.alike != first.alike or len({*pairs}) > 1:
            raise ValueError(
                f"{OP}: {names[0]!r} and {other!r} cannot be joined: they are {_said(first)} and "
                f"{_said(entry)}"
            )
    fields = {**first.fields}
    layouts = fields.get("scale_layout", ROW_MAJOR), fields.get("value_layout", ROW_MAJOR_VALUES)
    is_plain = fields.get("axis", -1) == -1 and layouts == (ROW_MAJOR, ROW_MAJOR_VALUES)
    if first.format is not None and not (is_plain and len(first.shape) > 1):
        raise ValueError(
            f"{OP}: {names[0]!r} cannot be joined: its blocks must run along the last of two axes "
            "or more, and lie in rows; load it without join, and use jax_mx.concatenate"
        )
    if fields.get("window") == TILE and any(e.shape[axis] % TILE[0] for e in every[:-1]):
        del fields["window"]  # a tile would have rows of two parts
    whole = first.of(lambda tensors: joined(tensors[0].name, tensors, axis), *every[1:])
    return dataclasses.replace(whole, fields=fields)


def _said(entry: Entry) -> str:
    return f"{entry.format or entry.values.dtype} {entry.shape}"
