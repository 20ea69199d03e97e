"""Measures candidate tiles; the tables in jax_mx/quantizing/kernels/*/tuning come from here.

python -m benchmarks sweep show [--name NAME ...]          # what was measured before, of its row
python -m benchmarks sweep build FOLDER [--name NAME ...]  # anywhere: compiles the candidates
python -m benchmarks sweep run FOLDER [--name NAME ...]    # on the GPU: times and compares each

NAME is a binary's: of windows, preprocessing, rows, activations, norms, or a product. Without one,
--op, --form and --dtype say which quantizers. `run` takes the call that such a binary serves, at
--shape. For a product it takes each of the cases below in which the launch picks the binary. It
ends with the rows of the chip's table, see jax_mx/quantizing/kernels/tuning.py: for each binary the
fastest candidate that gives the reference's bytes. `--table FILE` writes the rows as a module, for
an arch without a table. It adds the figures of all candidates to the JSON lines next to that file.
A person decides, by a row's "where", whether it holds for more entries than those measured.

A record is one measurement. "kernel" and "where" name its row; "case" and "shape" name the
computation, "value" the tile. A "note" says how the kernel differed from today's; with a null
"value" it names another measured program.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import hashlib
import importlib
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks import shapes
from jax_mx.formats.directions import FORMS, LAST
from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, MXFP8_E4M3
from jax_mx.formats.layouts import SCALE_LAYOUTS
from jax_mx.norms.source import NormSource
from jax_mx.quantizing.facts.modes import Mode
from jax_mx.quantizing.facts.product_kernels import PRODUCTS, TILE, Binary, ProductKernel
from jax_mx.quantizing.facts.variants import Variant, layouts_of
from jax_mx.quantizing.kernels import tuning
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.shipping.shipped import existing

if TYPE_CHECKING:
    import jax

# The facts that a sweep's row asks of an entry, see `tuning.facts_of`; a product's row asks all.
WHERE = ("form", "dtype", "codes_per_byte", "tiled_scales", "window", "source", "activation",
         "interleaved")  # fmt: skip
# No multiple of what a thread block covers, in any direction; of norms, two axes are enough.
SMALL = (3, 160, 224)
# The tiles of products: for each row of the table, the module and its class.
TILES = {
    "matmul.Warps": ("matmul_many", "CodeStages"),
    "matmul.Direct": ("matmul_vector", "Lines"),
    "matmul.Few": ("matmul_few", "Rings"),
    "matmul_fp8.Windows": ("matmul_fp8", "Fp8Stages"),
    "wgrad_fp8.Windows": ("matmul_fp8", "Fp8Stages"),
    "wgrad.Transposed": ("wgrad", "Tile"),
}
# Stages: with fewer one would be written while it is read, or none given back.
LEAST = {"Rings": 2, "Fp8Stages": 2, "Tile": 2}
# Products' tiles have too many fields for all combinations: each is changed alone, to these values.
VALUES: Mapping[str, Sequence[Any]] = {
    "resident": (1, 2, 3),
    "split": (1, 2, 4),
    "again": (False, True),
    "strip": (0, 8, 16),
    "share": (False, True),
    "turns": (False, True),
    "ahead": (False, True),
    "warps": (4, 8),
    "steps": (1, 2, 4),
    "grouped": (None,),
    "rows": (128, 256),
    "columns": (128, 256),
    "cluster": (1, 2),
}
# In these a product is timed: (rows of x, K, N, groups).
CASES = {
    "dense": (16384, 7168, 4096, 0),
    "grouped": (16384, 7168, 2048, 8),
    "128 rows": (128, 7168, 4096, 0),
    "64 rows": (64, 7168, 4096, 0),
    "16 rows": (16, 7168, 4096, 0),
    "8 rows": (8, 7168, 4096, 0),
    "1 row": (1, 7168, 4096, 0),
    "decode, 128 experts": (512, 2880, 2880, 128),
}


def candidates(variant: Binary) -> Iterator[Any]:
    """The values of `tile` worth a try for the binary's kernel class."""
    from jax_mx.quantizing.kernels.cutedsl import dequantize, kernel

    if isinstance(variant, ProductKernel):
        yield from _of_products(variant)
        return
    if isinstance(variant.source, NormSource):
        yield from _of_norms(variant)
        return
    if variant.finds_amaxes:
        yield from _of_whole_rows()
        return
    itemsize = FLOAT_DTYPES[variant.dtype].itemsize
    if variant.form == LAST:  # Flat: as many bytes in flight per thread as registers allow
        for threads, elements, unroll in itertools.product(
            (128, 256, 512), (4, 8, 16, 32), (1, 2, 4, 8)
        ):
            in_flight = elements * unroll * itemsize
            # dequantize writes 16 bytes of floats a step: more would leave gaps between threads.
            fits = elements * itemsize in ((16,) if variant.op == "dequantize" else range(16, 129))
            if 32 <= in_flight <= 256 and fits:
                yield kernel.Strip(threads, elements, unroll)
    elif variant.op == "quantize":
        yield from _of_tiles(variant)
    else:
        transposed = variant.form.transposed
        depth = 8 if itemsize == 2 or transposed else 4
        sizes = ((4, 1), (4, 2), (8, 1)) if transposed else ((2, 2), (4, 1), (8, 1), (2, 4))
        for (down, across), band in itertools.product(sizes, (1, 64)):
            if transposed or (down * depth * 4 // itemsize) % BLOCK == 0:  # whole blocks
                yield dequantize.Tiling(down, across, depth, band)


def _of_tiles(variant: Variant) -> Iterator[Any]:
    """How many tiles, in which order, and how many are a cluster, which has whole windows."""
    from jax_mx.quantizing.kernels.cutedsl import tiled

    sizes = ((1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4))
    for (down, across), band in itertools.product(sizes, (1, 16, 64)):
        yield tiled.Tiling(down, across, band)
        gradient = isinstance(
            variant.source, GradientSource
        )  # whose parts' amaxes no cluster finds
        if variant.form.is_both and isinstance(variant.window, int) and not gradient:
            below = variant.window // (BLOCK * down)
            if 1 < below <= 8:
                yield tiled.Tiling(down, across, band, below)


def _of_whole_rows() -> Iterator[Any]:
    """Half or all of the threads that registers hold."""
    from jax_mx.quantizing.kernels.cutedsl import whole_rows

    for threads, kept, running in itertools.product((128, 256, 512), (4, 8), (512, 1024)):
        yield whole_rows.Share(threads, kept, running // threads)


def _of_norms(variant: Variant) -> Iterator[Any]:
    from jax_mx.norms import cutedsl as norms

    if variant.form == LAST:  # Rows: as many bytes in flight as registers allow
        for threads, rows in itertools.product((128, 256), (1, 2, 3, 4)):
            yield norms.Whole(threads, 4, rows)
        return
    sizes = ((4, 2, 2), (4, 4, 4), (8, 2, 4))
    for (down, across, share), lag in itertools.product(sizes, (2, 3, 4, 5, 6)):
        yield norms.Bands(down, across, share=share, lag=lag)


def _of_products(product: ProductKernel) -> Iterator[Any]:
    """The tile that Hopper's table has, and those that differ from it in one field."""
    table, value = chosen(product, "sm_90a")
    module, name = TILES[table]
    tile = getattr(importlib.import_module(f"jax_mx.products.cutedsl.{module}"), name)(**value)
    yield tile
    for field in dataclasses.fields(tile):
        current = getattr(tile, field.name)
        values = (current - 1, current + 1) if field.name == "stages" else VALUES[field.name]
        for value in values:
            if value != current and (field.name != "stages" or value >= LEAST.get(name, 1)):
                yield dataclasses.replace(tile, **{field.name: value})


def chosen(
    variant: Binary, arch: str, layout: str = "row_major", aligned: bool = True
) -> tuple[str, dict[str, Any]]:
    """The row that an entry, of a product the first one, asks the arch's table for, and its tile.

    Raises:
      ValueError: its entries have no tile to choose.
    """
    module = importlib.import_module(f"jax_mx.{variant.ROOM}.cutedsl.{variant.op}")
    choices = []

    def choose(table: str, *where: Any, real: Callable = tuning.choose) -> Any:
        choices.append((table, real(table, *where)))
        return choices[-1][1]

    with mock.patch.object(tuning, "choose", choose):
        if isinstance(variant, ProductKernel):
            module.entries(variant, arch)
        else:
            module.kernel_of(variant, arch, SCALE_LAYOUTS[layout], aligned)
    rows = [(table, value) for table, value in choices if isinstance(value, dict)]
    if not rows:
        raise ValueError(f"{variant.name} has no tile to choose")
    return rows[0]


def fitting(variant: Binary, arch: str) -> Iterator[Any]:
    """The candidates but those that are known to spill in some entry of the binary."""
    kernel, _ = chosen(variant, arch)
    layouts = layouts_of(variant, arch) if isinstance(variant, Variant) else ("row_major",)
    entries = [*itertools.product((SCALE_LAYOUTS[layout] for layout in layouts), (True, False))]
    for tile in candidates(variant):
        fields = dataclasses.asdict(tile)
        if all(tuning.fits(kernel, fields, arch, variant, *entry) for entry in entries):
            yield tile


def build(folder: Path, arch: str, variants: Sequence[Binary]) -> None:
    """Compiles every candidate of every variant into `folder`; leaves out those that spill."""
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    jobs = [(variant, tile) for variant in variants for tile in fitting(variant, arch)]
    manifest = {}
    # Processes: the DSL is not thread-safe.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(functools.partial(_compile, arch), *zip(*jobs, strict=True))
        for (variant, tile), (image, facts) in zip(jobs, results, strict=True):
            size = _name(tile)
            if isinstance(facts, str):
                print(f"{variant.name} {size}: left out, {facts}", flush=True)
                continue
            launches = facts["launches"].values()
            spills = any(e["usage"]["stack"] for launch in launches for e in launch["entries"])
            print(f"{variant.name} {size}{': spills, left out' if spills else ''}", flush=True)
            if spills:
                continue
            name = f"{variant.name}.{arch}.{size}"
            sha256 = hashlib.sha256(image).hexdigest()
            (folder / "kernels" / sha256).write_bytes(image)
            described = {"row": chosen(variant, arch)[0], "tile": dataclasses.asdict(tile)}
            manifest[name] = {"sha256": sha256, **described, **facts}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    print(len(manifest), "candidates")


def _compile(arch: str, variant: Binary, tile: Any) -> tuple[bytes, dict[str, Any] | str]:
    """A binary and the facts that launch it; or nothing, and why there is none."""
    compiling = importlib.import_module(f"jax_mx.{variant.ROOM}.cutedsl.compile")
    try:
        return compiling.compile_variant(variant, arch, tile=tile)
    except Exception as error:  # the tile is too large, or the kernel cannot have it
        return b"", " ".join(f"{type(error).__name__}: {error}".split())[:200]


@dataclasses.dataclass(frozen=True, order=True)
class Timing:
    """The measurement of a candidate."""

    us: float
    tile: str  # as in its file's name
    gbps: float
    registers: int
    same: bool  # whether it gave the reference's bytes
    row: str  # which row of the table has such tiles
    value: dict[str, Any] = dataclasses.field(compare=False)  # the tile as the row has it


def run(
    folder: Path, shape: shapes.Shape, variants: Sequence[Binary], layout: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Times every candidate of every binary; compares its results with the reference's.

    Returns:
      A row of the chip's table for each binary and case, and the records of all.
    """
    from benchmarks import timing

    manifest = json.loads((folder / "manifest.json").read_text())
    rows, records = [], []
    for variant in variants:
        mine = {
            name: facts for name, facts in manifest.items() if name.split(".")[0] == variant.name
        }
        for call in calls(variant, shape, layout):
            timings: list[Timing] = []
            inputs: Any = None
            for name, facts in mine.items():
                install(folder, variant, facts)
                function = call.function()
                if inputs is None:
                    drawn = timing.rotate(call.make, timing.nbytes(call.like()))
                    inputs = [arguments for (arguments,) in drawn]
                if facts["sha256"] not in function.lower(*inputs[0]).as_text():
                    print(f"{variant.name}, {call.name}: the launch picks another binary")
                    break
                us = timing.measure(function, inputs).us
                gbps = timing.nbytes((inputs[0], call.results(function, inputs[0]))) / us / 1e3
                launch = facts["launches"].get(layout) or facts["launches"]["bfloat16"]
                usage = launch["entries"][0]["usage"]
                tile = name.split(".")[2]
                timings.append(
                    Timing(
                        us, tile, gbps, usage["registers"], call.same(), facts["row"], facts["tile"]
                    )
                )
                t = timings[-1]
                print(
                    f"{variant.name}, {call.name}: {t.tile:8} {t.us:8.1f} us {t.gbps:7.1f} GB/s "
                    f"{t.registers:3} registers, equal: {t.same}",
                    flush=True,
                )
            if any(t.same for t in timings):
                rows.append(row_of(variant, layout, timings))
                records += records_of(rows[-1], variant, call.name, timings)
    return rows, records


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that a binary serves.

    Attributes:
      name: for the table.
      make: arguments, as a tuple, from a key.
      function: that call, jitted anew.
      same: whether it gives the reference's bytes, on other arguments.
    """

    name: str
    make: Callable[..., tuple]
    function: Callable[[], Any]
    same: Callable[[], bool]

    def like(self) -> Any:
        """The arguments' shapes and dtypes."""
        import jax

        return jax.eval_shape(self.make, jax.random.key(0))

    @staticmethod
    def results(function: Callable, arguments: Any) -> Any:
        """The results' shapes and dtypes."""
        import jax

        return jax.eval_shape(function, *arguments)


def calls(variant: Binary, shape: shapes.Shape, layout: str) -> Iterator[Call]:
    """The calls in which a binary is timed; of a quantizer one."""
    if isinstance(variant, ProductKernel):
        yield from _of_product(variant)
        return
    import jax

    from benchmarks.quantizers import Quantizer

    form = shapes.form_of(variant.op, variant.form)
    sources = {source: name for name, source in shapes.SOURCES.items()}
    modes = tuple(mode._replace(window=BLOCK) for mode in variant.modes)
    treated = {(): "none", (Mode(),): "none", (Mode(), Mode()): "none"}
    treated |= {its: name for name, its in shapes.PREPROCESSING.items()}
    known = not variant.source or variant.source in sources
    if form is None or modes not in treated or not known or len({*variant.formats}) > 1:
        print(f"{variant.name}: no case measures it")
        return
    case = Quantizer(
        form, shape, variant.dtype, variant.formats[0].name, "rceil", layout,
        variant.implementation, treated[modes], sources.get(variant.source, ""), variant.window,
    )  # fmt: skip
    # A kernel's arguments may be a tuple already.
    tupled = isinstance(jax.eval_shape(case.make, jax.random.key(0)), tuple)

    def same() -> bool:
        small = dataclasses.replace(
            case, shape=(SMALL[0] * SMALL[1], SMALL[2]) if tupled else SMALL
        )
        x = small.make(jax.random.key(1))
        return _equal(
            *(
                dataclasses.replace(small, implementation=i).functions()[0](x)
                for i in (case.implementation, "xla")
            )
        )

    name = "x".join(map(str, shape))
    yield Call(name, lambda key: (case.make(key),), lambda: case.functions()[0], same)


def _of_product(product: ProductKernel) -> Iterator[Call]:
    """The calls of a product, of those in `CASES`; of a weight's gradient, that of groups."""
    import jax

    op, integers = _op(product), functools.partial(jax.random.randint, minval=-1, maxval=2)
    for name in ("grouped",) if product.op.startswith("wgrad") else CASES:
        make = functools.partial(_operands, product=product, case=CASES[name])

        def same(make: Callable = make) -> bool:  # sums of small integers are exact
            exact = jax.jit(functools.partial(make, draw=integers))(jax.random.key(1))
            return _equal(*(jax.jit(op(i))(*exact) for i in (product.implementation, "xla")))

        drawn = functools.partial(make, draw=jax.random.normal)
        yield Call(name, drawn, lambda: jax.jit(op(product.implementation)), same)


def _op(product: ProductKernel) -> Callable[[str], Callable]:
    """The function that a product serves, for an implementation."""
    from benchmarks.kernels import by_kernel

    keywords: dict[str, Any] = {"window": product.window, "tiles": product.tiles}
    keywords |= {"free": product.free, "sums": product.op.startswith("wgrad")}
    op = functools.partial(by_kernel, **keywords)
    return lambda implementation: functools.partial(op, implementation=implementation)


def _operands(
    key: jax.Array, product: ProductKernel, case: tuple[int, ...], draw: Callable[..., jax.Array]
) -> tuple:
    """The operands of a product: x, W and the rows of each group, if there are groups."""
    import jax
    import jax.numpy as jnp

    import jax_mx

    rows, k, n, groups = case
    shapes_of = {"wgrad": ((rows, k), (rows, n)), "wgrad_fp8": ((k, rows), (n, rows))}
    weight = (*(groups,) * (groups > 0), *((k, n) if product.free else (n, k)))
    drawn: list[Any] = [
        draw(its, shape).astype(product.floats or "bfloat16")
        for its, shape in zip(
            jax.random.split(key), shapes_of.get(product.op, ((rows, k), weight)), strict=True
        )
    ]
    for i, format in enumerate(product.formats, 2 - len(product.formats)):
        if product.tiles and i == 1:
            tiles = jax_mx.quantize(drawn[i], format=format, window=(TILE, TILE))
            drawn[i] = tiles.expand(-1)
        else:
            drawn[i] = jax_mx.quantize(drawn[i], format=format, window=product.window)
    if groups:  # none ends at a multiple of a tile; where rows are contracted, all at windows'
        step = 256 if product.op.startswith("wgrad") else 1
        ends = jnp.arange(1, groups + 1) * rows // groups
        ends = ends - jnp.where(jnp.arange(groups) < groups - 1, step, 0)
        drawn.append(jnp.diff(ends, prepend=0).astype(jnp.int32))
    return tuple(drawn)


def _equal(got: Any, want: Any) -> bool:
    """Whether all arrays have the same bytes."""
    import jax
    import numpy as np

    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def row_of(variant: Binary, layout: str, timings: list[Timing]) -> dict[str, Any]:
    """A row of a table of tuning: the fastest tile that is right.

    Args:
      variant: the binary.
      layout: of its scales.
      timings: of its candidates.
    """
    best = min(t for t in timings if t.same)
    facts = tuning.facts_of(variant, SCALE_LAYOUTS[layout], True)
    asked = facts if isinstance(variant, ProductKernel) else WHERE
    return {
        "kernel": best.row,
        "where": {name: facts[name] for name in asked},
        "value": {k: tuple(v) if isinstance(v, list) else v for k, v in best.value.items()},
        "why": "The tile is the fastest of those measured.",
    }


def records_of(
    row: Mapping[str, Any], variant: Binary, shape: str, timings: Sequence[Timing]
) -> list[dict[str, Any]]:
    """The measurements for a row: a record for each candidate that is right."""
    import jax

    chip, date = jax.devices()[0].device_kind, datetime.date.today().isoformat()
    about = {"kernel": row["kernel"], "where": row["where"], "case": variant.name, "shape": shape}
    return [
        {**about, "value": t.value, "us": round(t.us, 1), "chip": chip, "date": date}
        for t in sorted(timings)
        if t.same
    ]


def figures(arch: str) -> Path:
    """The file of an arch's records, beside its table."""
    return Path(tuning.__file__).parent / "cutedsl" / "tuning" / f"{arch}.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Appends records to a file."""
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def key(row: Mapping[str, Any]) -> str:
    """The key that a row of a table and its records share."""
    return json.dumps([row["kernel"], row["where"]], sort_keys=True)


def show(arch: str, variants: Sequence[Binary], layout: str) -> Iterator[str]:
    """For each binary the row that its first entry takes, and the measurements for that row."""
    records = read(figures(arch))
    for variant in variants:
        kernel, value = chosen(variant, arch, layout)
        row = tuning.row_of(kernel, arch, variant, SCALE_LAYOUTS[layout])
        yield f"{variant.name}: {kernel} {value}. {row['why']}"
        for record in records:
            if key(record) == key(row):
                tried = ", ".join(map(str, filter(None, (record["value"], record.get("note")))))
                yield f"  {record['us']:8} us  {record['shape']}, {record['case']}: {tried}"


def table(chip: str, rows: list[dict[str, Any]]) -> str:
    """The source of a table of tuning, but for its line breaks."""
    lines = "".join(f"    {row!r},\n" for row in rows)
    return f'"""Measured on {chip} with benchmarks/sweep.py."""\n\nROWS = [\n{lines}]\n'


def _name(tile: Any) -> str:
    """A tile in the name of a candidate's file."""
    return "x".join(map(str, dataclasses.astuple(tile)))


def install(folder: Path, variant: Binary, facts: dict[str, Any]) -> None:
    """Makes a candidate the kernel of every call of its binary in this process."""
    import jax

    from jax_mx.launch import _ffi, store

    image = (folder / "kernels" / facts["sha256"]).read_bytes()
    _ffi.intern(facts["sha256"], image)
    artifact = store.Artifact(facts, folder / "kernels", image)

    def serving(before: Callable) -> Callable:
        return lambda binary, arch: (
            artifact if binary.name == variant.name else before(binary, arch)
        )

    for name in ("find", "get"):
        setattr(store, name, serving(getattr(store, name)))
    jax.clear_caches()


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=("show", "build", "run"))
    parser.add_argument("folder", type=Path, nargs="?", help="of the candidates")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--shape", default="8x7168x7168")
    said = "binaries, instead of those of --op, --form and --dtype"
    parser.add_argument("--name", nargs="+", default=[], help=said)
    parser.add_argument("--op", choices=("quantize", "dequantize"), default="quantize")
    parser.add_argument("--form", nargs="+", choices=FORMS, default=["last"])
    parser.add_argument("--dtype", nargs="+", choices=FLOAT_DTYPES, default=[*FLOAT_DTYPES])
    parser.add_argument("--scale-layout", choices=SCALE_LAYOUTS, default="row_major")
    parser.add_argument("--table", type=Path, metavar="FILE", help="where to write the rows")
    args = parser.parse_args()
    if args.action != "show" and args.folder is None:
        parser.error(f"{args.action} wants the folder of the candidates")
    by_name = {v.name: v for v in (*existing(), *PRODUCTS) if v.implementation == "cutedsl"}
    if unknown := [name for name in args.name if name not in by_name]:
        parser.error(f"no kernel of CuTeDSL has the name {unknown[0]!r}: see `existing`")
    variants = [by_name[name] for name in args.name] or [
        v
        for v in by_name.values()
        if isinstance(v, Variant)
        and v.op == args.op
        and str(v.form) in args.form
        and v.dtype in args.dtype
        and set(v.formats) == {MXFP8_E4M3}
        and not (v.modes or v.source)
    ]
    try:
        if args.action == "show":
            print(*show(args.arch, variants, args.scale_layout), sep="\n")
        elif args.action == "build":
            build(args.folder, args.arch, variants)
    except ValueError as error:
        parser.error(str(error))
    if args.action == "run":
        (shape,) = shapes.parse(args.shape)
        rows, records = run(args.folder, shape, variants, args.scale_layout)
        import jax

        source = table(jax.devices()[0].device_kind, rows)
        print(source)
        if args.table:
            args.table.write_text(source)
            add(args.table.with_suffix(".jsonl"), records)


if __name__ == "__main__":
    main()
