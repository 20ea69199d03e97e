"""Tables of the documents, from the code, from jax_mx/verified and from benchmarks/results.

The site has all of them (docs/conf.py writes them when it is built). README.md keeps its own
between comments: `python -m docs.tables` writes it anew, and a test fails where it is not so.
"""

import ast
import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import shapes
from benchmarks.record import LARGE, RESULTS, command
from benchmarks.report import one_run, read
from jax_mx.command.multiplying import multiplying
from jax_mx.formats import formats, reads
from jax_mx.formats.formats import FORMATS
from jax_mx.formats.layouts import SCALE_LAYOUTS, VALUE_LAYOUTS
from jax_mx.formats.windows import ROW
from jax_mx.launch.chips import ARCHS
from jax_mx.norms.source import NormSource
from jax_mx.quantizing.facts import amd
from jax_mx.quantizing.facts.sources import Source, X
from jax_mx.quantizing.facts.variants import differ_in_bits, variants
from jax_mx.quantizing.registry import IMPLEMENTATIONS
from jax_mx.quantizing.sources.gated import GatedSource
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.quantizing.sources.gated_pair import GatedPairSource
from jax_mx.shipping import verified
from jax_mx.shipping.shipped import SOURCES, existing

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NAMES = {"cutedsl": "CuTeDSL", "flydsl": "FlyDSL"}
# How the names of kernels begin that a program of quantizers, and one of products, may take.
QUANTIZERS = ("quantize_", "dequantize_")
GEMMS = ("matmul_", "wgrad_")
EVERY = QUANTIZERS + GEMMS
ROWS_WAY = "(fp8|mxfp8,) rows"  # how ways with windows that are rows are named
AUTO = (*EVERY, ROW)  # with kernels for windows that are rows, as "auto" takes them on Hopper

Rows = Sequence[Mapping[str, Any]]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


# ---- what runs where -----------------------------------------------------------------------------
def chips() -> list[str]:
    """A row for each arch: its chips, who makes its kernels, what serves products, where it ran."""
    makers = {arch: NAMES[dsl] for dsl, archs in ARCHS.items() for arch in archs}
    with mock.patch.object(reads, "VERSION", (0,)):  # as the newest JAX has it
        multiplies = multiplying()
    rows: list[tuple[str, ...]] = []
    for row in multiplies:
        arch, served = row["arch"], (row["dense"], row["grouped"])
        names = [", ".join(f'`"{name}"`' for name in group) for group in served]
        where = "; ".join(f'`"{name}"`: {by}' for name, by in row["executed"].items())
        rows.append((arch, row["products"], makers[arch], state(arch), *names, where))
    other = ("", "all other devices, CPUs too", "XLA", "the reference itself")
    rows.append((*other, '`"xla"`', '`"xla"`', ""))
    head = ("arch", "GPUs", "quantizers from", "our kernels were", "products by")
    return table((*head, "over groups by", "products' kernels ran in"), rows)


def state(arch: str) -> str:
    """Where all of an arch's kernels were executed, by verified/<arch>.json."""
    runs = [
        {run for run in entry["executed_on"] if ", " not in run}  # the others name a sanitizer
        for entry in verified.read(arch).values()
    ]
    if not runs or not all(runs):
        return "compiled, not yet executed"
    if all("emulated" in text for text in runs):
        return "compared bit for bit in emulation"
    every = set.intersection(*runs) or set.union(*runs)
    return f"compared bit for bit on {' or '.join(sorted(every - {'emulated'}))}"


def kernels() -> list[str]:
    """A row for each op with the same forms and formats, and what is done before it rounds."""
    cells_by_key: dict[tuple, dict[str, dict[str, None]]] = {}
    for v in existing():
        if v.implementation != "cutedsl":
            continue
        before = "".join(mode.suffix or "_rn" for mode in v.modes)[1:].replace("_", " ")
        before = f"{before} {v.source}".strip()
        key = (v.op, "both" if v.form.is_both else "one", before, v.dtype)
        row = cells_by_key.setdefault(key, {"forms": {}, "formats": {}})
        row["forms"][str(v.form)] = None
        names = [format.name for format in v.formats]
        row["formats"] |= dict.fromkeys(
            [" with ".join(names)] if differ_in_bits(v.formats) else names
        )
    merged: dict[tuple, list[str]] = {}
    for (op, _, before, dtype), row in cells_by_key.items():
        merged.setdefault((op, before, *map(tuple, row.values())), []).append(dtype)
    grouped: dict[tuple, list[str]] = {}
    for (op, before, *cells), dtypes in merged.items():
        grouped.setdefault((op, *cells, tuple(dtypes)), []).append(before)
    rows = [
        (op, *(", ".join(cell) for cell in (*cells, [step or "nothing" for step in before])))
        for (op, *cells), before in grouped.items()
    ]
    return table(("op", "forms", "formats", "floats", "before"), rows)


def lacks() -> list[str]:
    """The kernels that AMD lacks."""
    refused = (f"It has none for {kernels}." for kernels in amd.LACKS)
    return [" ".join(("AMD has the kernels of this table, with exceptions.", *refused))]


def sharding_no() -> list[str]:
    """The cells of docs/sharding.md that are not "yes", calls with the same ones together."""
    calls: dict[tuple[str, ...], list[str]] = {}
    head: list[str] = []
    for line in (ROOT / "docs" / "sharding.md").read_text().splitlines():
        cells = _cells(line)
        if line.startswith(("| scales | calls |", "| dot_general |", "| mlp |")):
            head = cells
        if not head or len(cells) != len(head) or "yes" not in cells:
            continue
        heads = 2 if head[0] == "scales" else 1  # the layout and its calls, or the call
        name = f"all calls with scales in `{cells[0]}`" if heads == 2 else cells[0] or head[0]
        marks = [
            f"{split}" + f" ({mark})" * (mark != "no")
            for split, mark in zip(head[heads:], cells[heads:], strict=True)
            if mark != "yes"
        ]
        if name not in (names := calls.setdefault(tuple(marks), [])):
            names.append(name)
    everywhere = calls.pop((), [])
    split_calls = [name for names in calls.values() for name in names]
    assert len(split_calls) == len({*split_calls} - {*everywhere}), "a layout's calls differ"
    rows = [("; ".join(names), "; ".join(marks)) for marks, names in calls.items()]
    return table(("calls", "splits that gather"), rows)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


# ---- facts ---
def formats_table() -> list[str]:
    """A row for each format."""
    rows = [
        (
            f"`{f.name}`",
            f"{f.exponent_bits}, {f.mantissa_bits}",
            f"{f.max:g}",
            f"{2.0 ** (1 - f.bias - f.mantissa_bits):g}",
            f"{f.storage.name}" + f", {f.codes_per_byte} codes a byte" * (f.codes_per_byte > 1),
            f"{f.bits + 8 / formats.BLOCK:g}",
        )
        for f in FORMATS.values()
    ]
    head = ("format", "exponent, mantissa bits", "largest", "smallest above 0", "stored as")
    return table((*head, "bits an element, scales included"), rows)


def layouts_table() -> list[str]:
    """A row for each layout of scales and of values."""
    layouts = [("scales", layout) for layout in SCALE_LAYOUTS.values()]
    layouts += [("values", layout) for layout in VALUE_LAYOUTS.values()]
    rows = [
        (
            of,
            f"`{layout.name}`",
            " x ".join(map(str, layout.tile)) if layout.is_tiled else "none",
            " x ".join(map(str, layout.pad)) if layout.is_tiled else "nothing",
        )
        for of, layout in layouts
    ]
    return table(("of", "layout", "tile, rows x bytes", "padded to"), rows)


def examples() -> list[str]:
    """A row for each program of examples/: its page and its first sentence."""
    rows = [
        (f"[{path.name}](generated/examples/{path.stem}.md)", _about(path))
        for path in sorted(EXAMPLES.glob("*.py"))
    ]
    rows += [
        (f"[{path.name}](generated/examples/{path.name})", _about(path))
        for path in sorted(EXAMPLES.glob("*.ipynb"))
    ]
    return table(("example", "what it does"), rows)


def _about(path: Path) -> str:
    """The first sentence of a program's docstring, or of the second line of a notebook."""
    if path.suffix == ".ipynb":
        first = json.loads(path.read_text())["cells"][0]["source"]
        return "".join(first).split("\n\n")[1].replace("\n", " ")
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.split("\n\n")[0].replace("\n", " ")


def write_examples(folder: Path) -> None:
    """A page for each program, and each notebook, which is executed when the site is built."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in EXAMPLES.glob("*.py"):
        source = f"```{{literalinclude}} /../examples/{path.name}\n:language: python\n```"
        text = f"# {path.name}\n\n{_about(path)}\n\n{source}\n"
        (folder / f"{path.stem}.md").write_text(text)
    for path in EXAMPLES.glob("*.ipynb"):
        shutil.copyfile(path, folder / path.name)


# ---- what was measured ---------------------------------------------------------------------------
def results(name: str) -> tuple[dict[str, Any], Rows]:
    """The facts of a run from a file of benchmarks/results, or from its rows; and the rows.

    Rows of failed cases are left out, and the times of a recipe with windows of rows, where kernels
    for these were built anew since.
    """
    about, rows = read(RESULTS / f"{name}.json")
    rows = [row for row in rows if "error" not in row]
    about = about or of_rows(rows)
    commit = about.get("commit", "")
    if others_now(commit, kernels_of_rows(commit)):
        ways = ((row, row.get("way", row.get("implementation", ""))) for row in rows)
        rows = [row for row, way in ways if "us" not in row or not re.match(ROWS_WAY, way)]
    return about, rows


def kernels_of_rows(commit: str) -> list[str]:
    """The kernels at a commit for windows that are rows."""
    return [name for name in verified_at(commit) if f"_w{ROW}" in name]


def of_rows(rows: Rows) -> dict[str, Any]:
    """The facts of a run that its rows have."""
    keys = ("device", "commit", *["date"] * all("date" in row for row in rows))
    values = {key: dict.fromkeys(row[key] for row in rows) for key in keys}
    return {key: ", ".join(texts) for key, texts in values.items()}


def caption(about: Mapping[str, Any], measures: str, kernels: Sequence[str] = ()) -> str:
    """The sentence under a table: device, commit or date, command.

    The run may have taken kernels whose names begin as `kernels` say. The caption counts the ones
    that were different then.
    """
    where = [about["device"], about.get("runs", "one run")]
    commit = about.get("commit", "")
    where += [f"commit {commit}"] * bool(commit)
    where += [about["date"]] if about.get("date") else []
    where += [f"jax {about['jax']}"] if about.get("jax") else []
    said = f"{', '.join(where)}; `{measures}`."
    taken = [n for n in verified_at(commit) if n.startswith(tuple(kernels))]
    if ROW not in kernels:
        taken = [*{*taken}.difference(kernels_of_rows(commit))]
    if other := others_now(commit, taken):
        of = f"of the {len(taken)} kernels of such programs"
        return f"{said} Since then {other} {of} have been built anew."
    return said


def rebuilt(rows: Rows) -> str:
    """Says how many rows measured kernels whose binaries are others now; nothing if none did."""
    names = [_kernel_of(row) for row in rows if row["implementation"] == "cutedsl"]
    if other := others_now(rows[0]["commit"], names):
        return f" The kernels of {other} of these {len(names)} rows have been built anew since."
    return ""


def others_now(commit: str, names: Iterable[str]) -> int:
    """How many kernels for an H200 had other binaries at a commit, if this clone has the commit."""
    then, now = verified_at(commit), verified.read("sm_90a")
    return sum(n in now and then.get(n) != now[n]["sha256"] for n in names) if then else 0


@functools.cache
def verified_at(commit: str) -> Mapping[str, str]:
    """The sha256 of each variant's binary for an H200 at a commit; empty where git lacks it."""
    for path, end in (("jax_mx/verified/sm_90a.json", ""), ("jax_mx/verified.json", ".sm_90a")):
        command = ["git", "show", f"{commit}:{path}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            held = json.loads(done.stdout)
            return {n.removesuffix(end): e["sha256"] for n, e in held.items() if n.endswith(end)}
    return {}


def _kernel_of(row: Mapping[str, Any]) -> str:
    """The name of the variant that a row measured; empty of what goes between transposes."""
    name, _, preprocessing = row["form"].partition(", ")
    form = shapes.FORMS[name]
    modes = shapes.PREPROCESSING[preprocessing or "none"]
    if form.kernel.is_both and len(modes) == 1:
        modes *= 2
    for v in variants("cutedsl", form.op.removesuffix("_both"), X, modes):
        if (v.form, v.dtype) == (form.kernel, row["dtype"]):
            if {f.name for f in v.formats} == {row["format"]}:
                return v.name
    return ""


def _of(rows: Rows, **where: Any) -> list[Mapping[str, Any]]:
    return [row for row in rows if where.items() <= row.items()]


def _quantizers(name: str, **where: Any) -> list[str]:
    """A table of our rows of h200.json that have these fields, of one run, as `name` measures."""
    quantizer_rows = [
        row
        for row in _of(results("h200")[1], implementation="cutedsl", scaling="rceil", **where)
        if row["form"] in shapes.FORMS
    ]
    rows = one_run(quantizer_rows)
    order = list(shapes.FORMS)
    rows = sorted(rows, key=lambda row: (order.index(row["form"]), row["shape"]))
    lines = table(
        ("form", "shape", "scales", "us", "TB/s", "of the copy", "against XLA"),
        [
            (
                row["form"],
                f"({row['shape'].replace('x', ', ')})",
                row["scale_layout"],
                f"{row['us']:.0f}" if row["us"] >= 20 else f"{row['us']:.1f}",
                f"{row['gbps'] / 1e3:.2f}",
                f"{row['fraction_of_copy']:.2f}",
                f"{row['speedup_over_xla']:.2f}x" if row["speedup_over_xla"] else "",
            )
            for row in rows
        ],
    )
    return [*lines, "", caption(of_rows(rows), command(name)) + rebuilt(rows)]


def speed_mxfp8() -> list[str]:
    """Quantizers to MXFP8 at one shape."""
    where = {"format": "mxfp8_e4m3", "dtype": "bfloat16", "shape": LARGE}
    return _quantizers("quantizers", scale_layout="row_major", **where)


def speed_shapes() -> list[str]:
    """Quantizers to MXFP8 at other shapes."""
    rows = [r for r in results("h200")[1] if r["shape"] != LARGE and r["dtype"] == "bfloat16"]
    rows = _of(rows, implementation="cutedsl", format="mxfp8_e4m3", scale_layout="row_major")
    commit = one_run(rows)[0]["commit"]
    where = {"format": "mxfp8_e4m3", "scale_layout": "row_major", "commit": commit}
    return _quantizers("quantizers", **where)


def speed_mxfp6() -> list[str]:
    """Quantizers to MXFP6."""
    return _quantizers("mxfp6", format="mxfp6_e2m3")


def speed_mxfp4() -> list[str]:
    """Quantizers to MXFP4."""
    where = {"format": "mxfp4_e2m1", "scale_layout": "row_major", "op": "quantize"}
    return _quantizers("quantizers", **where)


def speed_sources() -> list[str]:
    """Quantizers that make their floats: of picked rows, or by an activation."""
    about, rows = results("h200_sources")
    lines = table(
        ("form", "format", "shape", "us", "TB/s", "of the copy", "against XLA and our kernel"),
        [
            (
                row["form"],
                row["format"],
                f"({row['shape'].replace('x', ', ')})",
                f"{row['us']:.0f}",
                f"{row['gbps'] / 1e3:.2f}",
                f"{row['fraction_of_copy']:.2f}",
                f"{row['speedup_over_xla']:.2f}x",
            )
            for row in rows
        ],
    )
    said = caption(about, command("rows"))
    others = [f"`{command(name)}`" for name in ("activations", "gradients", "norms")]
    return [*lines, "", said[:-1] + "; " + "; ".join(others) + "."]


def speed_dequantize() -> list[str]:
    """Dequantizing, MXFP8 and MXFP4."""
    lines = []
    for name in ("mxfp8_e4m3", "mxfp4_e2m1"):
        lines += [f"From `{name}`:", ""]
        lines += [*_quantizers("quantizers", format=name, op="dequantize"), ""]
    return lines


def speed_peers() -> list[str]:
    """torchao's quantizers beside ours, in one run."""
    # The run on an H200 is of an earlier build; README's picture takes torchao's bars from it.
    rows = results("h100_peers")[1]
    peers = [row for row in rows if row["implementation"] not in IMPLEMENTATIONS]
    commit = peers[-1]["commit"]
    ours = _of(rows, commit=commit, implementation="cutedsl", scale_layout="row_major")
    names = list(dict.fromkeys(row["implementation"] for row in peers))
    us = {(row["implementation"], row["form"]): f"{row['us']:.0f}" for row in (*peers, *ours)}
    forms = [form for form in shapes.FORMS if any((name, form) in us for name in names)]
    lines = table(
        ("form", "jax_mx, us", *(f"{name}, us" for name in names)),
        [(form, *(us.get((name, form), "") for name in ("cutedsl", *names))) for form in forms],
    )
    return [*lines, "", caption(of_rows(ours), command("peers")) + rebuilt(ours)]


def speed_preprocessing() -> list[str]:
    """MXFP4 with transforms and stochastic rounding, one table for each run."""
    rows = [row for row in results("h200")[1] if ", " in row["form"] and row["dtype"] == "bfloat16"]
    rows = _of(rows, format="mxfp4_e2m1", scale_layout="row_major", shape=LARGE)
    lines = []
    for commit in dict.fromkeys(row["commit"] for row in rows):
        by_form = {tuple(row["form"].split(", ")): row for row in _of(rows, commit=commit)}
        forms, kinds = (list(dict.fromkeys(key[i] for key in by_form)) for i in (0, 1))
        lines += table(
            ("form", *kinds),
            [
                (f, *(f"{by_form[f, k]['us']:.0f}" if (f, k) in by_form else "" for k in kinds))
                for f in forms
            ],
        )
        about = of_rows([*by_form.values()])
        said = caption(about, command("preprocessing")) + rebuilt([*by_form.values()])
        lines += ["", f"us; {said}", ""]
    return lines


PRODUCTS = {  # in `COMMANDS` of benchmarks/record.py: what is said above the table
    "dense": "A weight for all rows:",
    "grouped": "Grouped weights, many rows:",
    "wgrad": "Gradients of grouped weights:",
    "decode": "Few rows:",
}


def speed_products() -> list[str]:
    """Products that read MX operands, next to products of bfloat16."""
    lines = []
    for name, title in PRODUCTS.items():
        lines += [title, "", *_products(name), ""]
    return lines


def _products(name: str) -> list[str]:
    """A table of products, or that nobody has measured the kernels of this build."""
    if not (RESULTS / f"h200_products_{name}.json").exists():
        return [f"not measured since kernels were last built; `{command(name)}` measures it."]
    about, rows = results(f"h200_products_{name}")
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        by_way = {row["implementation"]: row for row in _of(rows, case=case)}
        floats = [row["us"] for way, row in by_way.items() if way.startswith("bf16")]
        for way in filter(by_way.__contains__, names):
            row = by_way[way]
            shape = f"({row['rows']}, {row['k']}) x ({row['k']}, {row['n']})"
            groups = f", {row['groups']} groups" * bool(row["groups"])
            faster = f"{min(floats) / row['us']:.2f}x" if floats else ""
            speed = f"{row['tflops']:.0f} | {row['weights_tbs']:.2f}"
            lines.append((case, shape + groups, way, f"{row['us']:.0f}", speed, faster))
    head = ("case", "shape", "operands and implementation", "us", "TF/s", "W, TB/s")
    return [*table((*head, "against bf16"), lines), "", caption(about, command(name), GEMMS)]


def _unmeasured(name: str) -> list[str]:
    """The line in place of a table that nobody has measured."""
    return [f"Not measured yet; `{command(name)}` measures it."]


def _listed(
    file: str,
    name: str,
    kernels: Sequence[str],
    columns: Mapping[str, Callable[[Mapping[str, Any], Rows], object]],
    **where: Any,
) -> list[str]:
    """A line for each row of a file, or that nothing is measured yet.

    Args:
      file: of results.
      name: of the command that measures it.
      kernels: see `caption`.
      columns: by their heads what gives a cell, from a row and all rows.
      where: fields of rows, which then say of their run themselves; without, all rows.
    """
    if not (RESULTS / f"{file}.json").exists():
        return _unmeasured(name)
    about, rows = results(file)
    if where:
        rows = _of(rows, **where)
        about = of_rows(rows)
    lines = table([*columns], [[cell(row, rows) for cell in columns.values()] for row in rows])
    return [*lines, "", caption(about, command(name), kernels)]


# Ways of `python -m benchmarks step` as README names them; others are in the site's table.
STEPS = {
    "bf16": "bfloat16",
    "auto": '`jax_mx`, `recipe="auto"` (the default)',
    "auto, mlp, once": "the same, with `mlp` and `quantize_weights`",
    "fast, mlp, once": "the same, with fast accumulation",
    "auto, explicit": "the default, on explicit axes",
    "auto, shard_map": "the default, in `shard_map`",
    "mxfp8": '`jax_mx`, `recipe="mxfp8"`',
    "tensorwise": "FP8, one scale a tensor, in plain JAX",
    "flax": "FP8 by flax, delayed scaling",
}


def _steps() -> list[tuple[str, Rows]]:
    """For one H100, and for several, the rows of a step of Llama-3-8B's layers."""
    runs: list[tuple[str, Rows]] = []
    for file in ("h100_step", "h100x2_step"):
        if (RESULTS / f"{file}.json").exists():
            rows = _of(results(file)[1], width=4096, checkpoint="full")
            runs.append((file, [row for row in rows if "ratio" in row]))
    return runs


def step() -> list[str]:
    """A training step by way: tokens a second and of bfloat16's time, on one H100 and more."""
    if not (runs := _steps()):
        return _unmeasured("step")
    head, by_way = ["products of layers"], [{row["way"]: row for row in rows} for _, rows in runs]
    for _, rows in runs:
        count, layers = rows[0]["devices"], rows[0]["layers"]
        where = f"{count} H100{'s' * (count > 1)}, {layers} layers"
        head += [f"{where}: tokens a second", "of bf16's time", "compiled in, s"]
    lines = []
    for way, name in STEPS.items():
        cells: list[str] = []
        for rows in by_way:
            row = rows.get(way)
            cells += _step_cells(row) if row else [""] * 3
        if any(cells):
            lines.append((name, *cells))
    length = runs[0][1][0]["length"]
    lines = [*table(head, lines), "", *_said_of_steps(runs)]
    said = f"* AdamW, cuDNN attention, sequences of {length} tokens, layers computed again."
    if missing := [f"*{way}*" for way in STEPS if not any(way in ways for ways in by_way)]:
        said += f" Not measured yet: {', '.join(missing)}."
    return [*lines, said]


def _said_of_steps(runs: Sequence[tuple[str, Rows]]) -> list[str]:
    """A sentence under the table for each run: they may have different commits."""
    said = []
    for (_, rows), name in zip(runs, ("step", "step_two"), strict=False):
        where = f"{rows[0]['devices']} GPU{'s' * (rows[0]['devices'] > 1)}"
        line = caption(of_rows(rows), command(name), AUTO)
        said.append(f"* {where}: {line} {_notes(rows)}".strip())
    return said


def _notes(rows: Rows) -> str:
    """Sentences that rows have of their own, once each."""
    return " ".join(dict.fromkeys(row["note"] for row in rows if "note" in row))


def _step_cells(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['tokens_s']:,}", f"{row['ratio']:.2f}", f"{row['compile_s']:.0f}"]


def speed_step() -> list[str]:
    """Every row of steps, one table for each number of devices."""
    lines: list[str] = []
    for file, names in (
        ("h100_step", ("step", "step_kept", "step_70b")),
        ("h100x2_step", ("step_two",)),
        ("h100x4_step", ("step_sharded",)),
    ):
        if not (RESULTS / f"{file}.json").exists():
            lines += [*_unmeasured(names[0]), ""]
            continue
        about, rows = results(file)
        head = ("way", "devices", "layers", "width, inner", "checkpoint", "ms", "tokens a second")
        more = ("of bf16's time", "compiled in, s", "temporaries, GB")
        lines += table(
            (*head, *more),
            [
                (
                    row["way"],
                    row["devices"],
                    row["layers"],
                    f"{row['width']}, {row['inner']}",
                    row["checkpoint"],
                    f"{row['ms']:.0f}",
                    f"{row['tokens_s']:,}",
                    f"{row['ratio']:.2f}" if "ratio" in row else "",
                    f"{row['compile_s']:.0f}",
                    f"{row['temp_gb']:.1f}",
                )
                for row in rows
            ],
        )
        said = caption(about, "`; `".join(map(command, names)), AUTO)
        lines += ["", f"{said} {_notes(rows)}".strip(), ""]
    return lines


def learning() -> list[str]:
    """The losses that each way ends with, on the same text."""
    if not (RESULTS / "h100_learning.json").exists():
        return _unmeasured("learning")
    about, rows = results("h100_learning")
    floats = next(row for row in rows if row["way"] == "bf16")
    lines = table(
        ("way", "steps", "loss of held-out text", "to bf16", "of the last training steps"),
        [
            (
                row["way"],
                f"{row['steps']:,}",
                f"{row['loss']:.4f}",
                f"{row['loss'] / floats['loss'] - 1:+.2%}",
                f"{row['train'][-1]:.3f}",
            )
            for row in rows
        ],
    )
    return [*lines, "", caption(about, command("learning"), AUTO)]


def speed_layers() -> list[str]:
    """A linear layer, forward and backward."""
    about, rows = results("h200_layers")
    lines = table(
        ("layer", "rows, in, out", "way", "us", "TF/s", "of bf16's time", "first call, s"),
        [
            (
                row["name"],
                ", ".join(map(str, row["shape"])),
                row["way"],
                f"{row['us']:.0f}",
                f"{row['tflops']:.0f}",
                f"{row['ratio']:.2f}",
                row["first_s"],
            )
            for row in rows
        ],
    )
    kept = {name: f"{size / 1e6:.0f} MB" for name, size in about.get("kept", {}).items()}
    said = ", ".join(f"{name} {size}" for name, size in kept.items())
    lines += ["", caption(about, command("layers"), EVERY)]
    return [*lines, "", f"Kept for the backward pass of `7168x4096`: {said}."] if said else lines


def speed_moe() -> list[str]:
    """An MoE layer, with its heading."""
    about, every = results("h200_moe")
    rows = [row for row in every if "tflops" in row]
    floats: dict[str, float] = {}
    for row in rows:
        if row["way"].startswith("bf16"):
            floats[row["case"]] = min(row["us"], floats.get(row["case"], row["us"]))
    lines = table(
        ("case", "tokens, choices, experts, width, inner", "way", "us", "TF/s", "of best bf16"),
        [
            (
                row["case"],
                ", ".join(str(row[n]) for n in ("tokens", "k", "experts", "width", "inner")),
                row["way"],
                f"{row['us']:.0f}",
                f"{row['tflops']:.0f}",
                f"{row['us'] / floats[row['case']]:.2f}",
            )
            for row in rows
        ],
    )
    head = ["## MoE layers", "", "Routing, gathering, quantizing, products, activation, combine:"]
    said = f"{caption(about, command('moe'), EVERY)} {about.get('note', '')}".strip()
    return [*head, "", *lines, "", *_routing(every), said]


def _routing(rows: Rows) -> list[str]:
    """The time to sort tokens by expert, where it was measured."""
    routing_rows = _of(rows, case="routing")
    lines = table(
        ("routing: ids, choices, experts", "way", "us"),
        [
            (f"{row['tokens'] * row['k']:,}, {row['k']}, {row['experts']}", row["way"], row["us"])
            for row in routing_rows
        ],
    )
    return [*lines, ""] if routing_rows else []


def speed_moe_step() -> list[str]:
    """A training step of a transformer with experts."""
    about, rows = results("h200_moe_step")
    lines = table(
        ("way", "ms a step", "steps", "loss in the end"),
        [(row["way"], f"{row['ms']:.1f}", str(row["steps"]), f"{row['loss']:.3f}") for row in rows],
    )
    return [*lines, "", caption(about, command("moe_step"), EVERY)]


def speed_moe_step_sharded() -> list[str]:
    """The same on several GPUs, each of which has as many rows as one alone."""
    return _listed(
        "h100x4_moe_step",
        "moe_step_sharded",
        EVERY,
        {
            "way": lambda row, _: row["way"],
            "GPUs": lambda row, _: row["devices"],
            "ms a step": lambda row, _: f"{row['ms']:.1f}",
            "tokens a second": lambda row, _: f"{row['tokens_s']:,}",
            "of one GPU's": lambda row, rows: f"{row['tokens_s'] / _alone(row, rows):.2f}",
        },
    )


def _alone(row: Mapping[str, Any], rows: Rows) -> float:
    """The tokens a second of the same way on one GPU."""
    pairs = {(other["way"], other["devices"]): other["tokens_s"] for other in rows}
    return pairs[row["way"], 1]


def speed_decode(chip: str = "h200") -> list[str]:
    """A decoding step by batch and way."""
    return _listed(
        f"{chip}_decode_step",
        "decode_step",
        GEMMS,
        {
            "batch": lambda row, _: row["batch"],
            "weights": lambda row, _: row["way"],
            "ms a token": lambda row, _: f"{row['ms']:.2f}",
            "of bf16's time": lambda row, _: f"{row['ratio']:.2f}",
            "GB of weights": lambda row, _: row["weights_gb"],
        },
    )


def loss_moe(of: str = "moe_step_small") -> list[str]:
    """The losses of a small transformer with experts, and MXFP4's loss by product."""
    about, rows = results(f"h200_{of}")
    losses = {row["way"]: row["losses"] for row in rows}  # of every tenth step

    def against(way: str, first: int, last: int) -> str:
        part, whole = (losses[name][first // 10 : last // 10] for name in (way, "bf16"))
        return f"{sum(part) / sum(whole) - 1:+.1%}" if len(part) == len(whole) else ""

    lines = table(
        ("way", "steps", "loss in the end", "to bf16, steps 300 to 400", "800 to 1,000"),
        [
            (way, f"{row['steps']:,}", f"{row['loss']:.3f}", against(way, 300, 400),
             against(way, 800, 1000))
            for way, row in ((row["way"], row) for row in rows)
        ],
    )  # fmt: skip
    return [*lines, "", caption(about, command(of), EVERY)]


def speed_collectives(file: str = "h200x2_collectives", name: str = "collectives") -> list[str]:
    """Collectives between GPUs, in MX and in bfloat16."""
    if not (RESULTS / f"{file}.json").exists():
        return _unmeasured(name)
    about, rows = results(file)
    lines = table(
        ("case", "way", "shape", "us", "of bf16's time"),
        [
            (row["case"], row["way"], row["shape"], f"{row['us']:.0f}", f"{row['ratio']:.2f}")
            for row in rows
        ],
    )
    return [*lines, "", caption(about, command(name), QUANTIZERS)]


def speed_sharded() -> list[str]:
    """Quantizers of four GPUs at once, beside one alone."""
    return _listed(
        "h100x4_sharded",
        "sharded",
        QUANTIZERS,
        {
            "form": lambda row, _: row["form"],
            "shape": lambda row, _: row["shape"],
            "us, the slowest of all": lambda row, _: f"{row['us']:.0f}",
            "us, one alone": lambda row, _: f"{row['alone_us']:.0f}",
            "of one alone": lambda row, _: f"{row['to_alone']:.2f}",
        },
    )


FLOATS = "floats, gather"


def speed_moe_sharded() -> list[str]:
    """An MoE layer whose experts two GPUs share, by how tokens move."""
    about, rows = results("h200x2_moe")
    floats = {(row["what"], row["tokens"]): row for row in rows if row["moves"] == FLOATS}
    lines = table(
        ("what", "tokens a device", "us, floats move", "us, MX moves", "MX of floats"),
        [
            (
                row["what"],
                f"{row['tokens']:,}",
                f"{floats[row['what'], row['tokens']]['us']:.0f}",
                f"{row['us']:.0f}",
                f"{row['ratio']:.2f}",
            )
            for row in rows
            if row["moves"] != FLOATS
        ],
    )
    return [*lines, "", caption(about, command("moe_sharded"), EVERY)]


def speed_moe_ways(file: str = "h100x4_moe", name: str = "moe_ways") -> list[str]:
    """The same layer by both ways in which tokens reach their experts."""
    if not (RESULTS / f"{file}.json").exists():
        return _unmeasured(name)
    about, rows = results(file)
    by = {(row["what"], row["tokens"], row["k"], row["moves"]): row["us"] for row in rows}
    lines = table(
        ("what", "tokens a device", "k", "us, gather", "us, rounds", "rounds of gather"),
        [
            (op, f"{tokens:,}", k, f"{us:.0f}", f"{rounds:.0f}", f"{rounds / us:.2f}")
            for (op, tokens, k, moves), us in by.items()
            if moves == "mx, gather" and (rounds := by.get((op, tokens, k, "mx, rounds")))
        ],
    )
    return [*lines, "", caption(about, command(name), EVERY)]


def speed_mixture() -> list[str]:
    """A training step of models with experts: of each model a table, of one run."""
    columns: dict[str, Callable[[Mapping[str, Any], Rows], object]] = {
        "model": lambda row, _: row["model"],
        "layers": lambda row, _: row["layers"],
        "way": lambda row, _: row["way"],
        "ms": lambda row, _: f"{row['ms']:.0f}",
        "tokens a second": lambda row, _: f"{row['tokens_s']:,}",
        "of bf16's time": lambda row, _: f"{row['ratio']:.2f}",
        "temporaries, GB": lambda row, _: f"{row['temp_gb']:.1f}",
    }
    commands = {"mixtral": "mixture", "deepseek": "mixture_deepseek"}
    first, second = (
        _listed("h100x4_mixture", name, AUTO, columns, model=model)
        for model, name in commands.items()
    )
    return [*first, "", *second]


def counters() -> list[str]:
    """The hardware's counters while our kernels run."""
    about, rows = results("h200_counters")
    busy = [name for name in rows[0] if name not in ("case", "kernel", "us", "waits")]
    lines = table(
        ("case", "us", *(f"{name}, %" for name in busy), "what warps wait for"),
        [
            (
                row["case"],
                f"{row['us']:.0f}",
                *(f"{row[name]:.0f}" if row[name] is not None else "" for name in busy),
                ", ".join(f"{why.replace('_', ' ')} {n:.1f}" for why, n in row["waits"].items()),
            )
            for row in rows
        ],
    )
    return [*lines, "", caption(about, command("counters"), EVERY)]


# ---- which floats kernels make as they quantize ---
def sources() -> list[str]:
    """A row for what one kernel makes and quantizes, by dtype and window."""
    formats_by_key: dict[tuple, set[tuple[str, ...]]] = {}
    kinds = GatedSource | GatedPairSource | GradientSource | NormSource
    members = [s for s in SOURCES if isinstance(s, kinds)]
    for source in members:
        for variant in variants("cutedsl", "quantize", source):
            if variant.gives_floats:
                continue
            key = (_made(source), variant.window, variant.dtype, getattr(source, "activation", ""))
            names = tuple(format.name.rpartition("_")[2].upper() for format in variant.formats)
            formats_by_key.setdefault(key, set()).add(names)
    rows: dict[tuple, tuple[dict, dict]] = {}  # what has the same formats: a row
    for (made_text, window, dtype, activation), format_sets in formats_by_key.items():
        one = sorted(first for first, *second in format_sets if not second)
        both = sorted({" beside ".join(sorted({*pair})) for pair in format_sets if len(pair) == 2})
        dtypes, whose = rows.setdefault((made_text, window, *map(", ".join, (one, both))), ({}, {}))
        dtypes[dtype], whose[activation and f"`{activation}`"] = None, None
    lines = [
        (made_text, ", ".join(whose), ", ".join(dtypes), window, one or "none", both or "none")
        for (made_text, window, one, both), (dtypes, whose) in rows.items()
    ]
    head = ("of", "activations", "from", "window", "to, one direction", "to, both directions")
    return table(head, sorted(lines, key=lambda line: (*line[:3], line[3] == ROW, *line[3:])))


def _made(source: Source) -> str:
    """The words for a source of floats, whichever the activation."""
    if isinstance(source, NormSource):
        text = "a norm of a sum" if source.added else "a norm"
        return text + "; the floats, too" * source.floats
    if isinstance(source, GatedPairSource):
        return "gates and ups, two arrays"
    assert isinstance(source, GatedSource | GradientSource)
    text = "gates and ups, " + ("by turns" if source.interleaved else "all gates first")
    if isinstance(source, GatedSource):
        return text + "; the floats, too" * source.floats
    return text + ": the gradient" + "; sums of columns, too" * source.sums


# ---- where they stand ----------------------------------------------------------------------------
TABLES: Mapping[str, Callable[[], list[str]]] = {
    "chips": chips,
    "kernels": kernels,
    "lacks": lacks,
    "examples": examples,
    "sharding_no": sharding_no,
    "formats": formats_table,
    "layouts": layouts_table,
    "sources": sources,
    "speed_mxfp8": speed_mxfp8,
    "speed_shapes": speed_shapes,
    "speed_mxfp6": speed_mxfp6,
    "speed_mxfp4": speed_mxfp4,
    "speed_dequantize": speed_dequantize,
    "speed_sources": speed_sources,
    "speed_peers": speed_peers,
    "speed_preprocessing": speed_preprocessing,
    "speed_products": speed_products,
    "step": step,
    "speed_step": speed_step,
    "learning": learning,
    "speed_layers": speed_layers,
    "speed_moe": speed_moe,
    "speed_moe_step": speed_moe_step,
    "speed_decode": speed_decode,
    "speed_decode_h100": functools.partial(speed_decode, "h100"),
    "loss_moe": loss_moe,
    "loss_moe_wide": functools.partial(loss_moe, "moe_step_wide"),
    "speed_moe_step_sharded": speed_moe_step_sharded,
    "speed_collectives": speed_collectives,
    "speed_collectives_sizes": functools.partial(
        speed_collectives, "h100x4_collectives", "collectives_sizes"
    ),
    "speed_sharded": speed_sharded,
    "speed_moe_sharded": speed_moe_sharded,
    "speed_moe_ways": speed_moe_ways,
    "speed_moe_data": functools.partial(speed_moe_ways, "h100x4_moe_data", "moe_data"),
    "speed_mixture": speed_mixture,
    "counters": counters,
}


def write(folder: Path) -> None:
    """All tables, each in a file of its own, for pages to include."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in TABLES.items():
        (folder / f"{name}.md").write_text("\n".join(make()) + "\n")
    write_examples(folder / "examples")


# Documents may keep tables between comments, for those who read them in the repository.
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def written(text: str) -> str:
    """A document with the tables that it keeps between comments written anew."""
    pattern = r"(<!-- (\w+): written by python -m docs.tables -->\n).*?(<!-- /\2 -->)"

    def one(match: re.Match[str]) -> str:
        return "\n".join([match[1], *TABLES[match[2]](), match[3]])

    return re.sub(pattern, one, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text()))
