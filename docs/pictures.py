"""Pictures of the site, drawn from the code when the site is built: what it says, not what we say.

Each function draws one picture; `write` saves all of them as SVG.
"""

import contextlib
import functools
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

import jax_mx
from benchmarks import plot, shapes
from benchmarks.record import RESULTS
from benchmarks.report import read
from docs import tables
from jax_mx.formats import layouts, views, windows
from jax_mx.formats.directions import Blocks
from jax_mx.formats.formats import BLOCK, FORMATS, SCALE_DTYPE, SCALINGS
from jax_mx.quantizing import registry
from jax_mx.quantizing.planning import Options, planned

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
)  # fmt: skip
INK, PALE = "#333333", "#e6e6e6"


def _bare(axes: Axes) -> None:
    """Without ticks and frame, y downwards as a matrix has it."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_aspect("equal")
    axes.invert_yaxis()


# ---- formats -------------------------------------------------------------------------------------
def formats() -> Figure:
    """Every value that a format's elements have, from 0 on."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for i, name in enumerate(FORMATS):
        values = _magnitudes(name)
        above = values[values > 0]
        axes.plot(above, np.full(len(above), -i), "|", ms=14, color=BLUE)
        axes.text(1.01, -i, f"{len(values)} and their signs", va="center", size=8,
                  transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yticks([-i for i in range(len(FORMATS))], list(FORMATS))
    axes.set_xlabel("magnitude of an element, before its block's scale; 0 is not drawn")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _magnitudes(name: str) -> np.ndarray:
    """The floats that `dequantize` gives for all codes from 0 to the largest, with a scale of 1."""
    format = FORMATS[name]
    codes = np.arange(256, dtype=np.uint8)
    codes = np.where(codes <= format.max_code, codes, 0).astype(np.uint8)
    if format.codes_per_byte == 2:
        codes = codes[::2] | codes[1::2] << 4
    scales = np.full(256 // BLOCK, 127, np.uint8).view(SCALE_DTYPE)
    q = jax_mx.MXArray.from_parts(codes.view(format.storage), scales, format, axis=-1)
    return np.unique(np.asarray(q.dequantize(jnp.float32)))


def scalings() -> Figure:
    """The largest element of a block after scaling, by the rule and the block's amax."""
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    format = FORMATS["mxfp8_e4m3"]
    amax = np.linspace(1, 4, 1200, endpoint=False).astype(np.float32)
    x = np.zeros((len(amax), BLOCK), np.float32)
    x[:, 0] = amax
    grid = figure.subplots(1, len(SCALINGS), sharey=True)
    for axes, name in zip(grid, SCALINGS, strict=True):
        scales = np.asarray(jax_mx.quantize(x, format, scaling=name).scales)[:, 0]
        ratio = amax / scales.astype(np.float32)
        clips = ratio > format.max
        for part, color in ((~clips, BLUE), (clips, ORANGE)):
            axes.plot(amax[part], ratio[part], ".", color=color, ms=2)
        axes.axhline(format.max, color=INK, lw=1, ls=":")
        axes.set_title(name, size=9, family="monospace")
        axes.set_xlabel("amax of a block", size=8)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("amax / scale", size=8)
    grid[0].text(1, format.max, f"{format.max:g}", va="bottom", size=7)
    return figure


def window_scales() -> Figure:
    """The scales of one row, by window."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axes = figure.add_subplot()
    rng = np.random.default_rng(3)
    x = rng.standard_t(2, (1, 1024)).astype(np.float32)
    along = [w for w in windows.WINDOWS if not isinstance(w, tuple)]
    for window, color in zip(along, (SKY, GREEN, BLUE, ORANGE), strict=True):
        q = jax_mx.quantize(x, window=window)
        exponents = np.asarray(q.scales).view(np.uint8)[0].astype(int) - 127
        edges = np.arange(len(exponents) + 1) * BLOCK
        axes.stairs(exponents, edges, color=color, lw=2, label=str(window), baseline=None)
    axes.set_xlabel("element of the row; whatever the window, a scale is stored for each 32")
    axes.set_ylabel("scale, power of 2")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, title="window")
    return figure


def losses() -> Figure:
    """The loss of each format on three kinds of data."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axes = figure.add_subplot()
    rng = np.random.default_rng(0)
    shape = (256, 1024)
    data = {
        "normal": rng.standard_normal(shape),
        "heavy tails (Student's t, 3)": rng.standard_t(3, shape),
        "channels of many sizes": rng.standard_normal(shape) * 2.0 ** rng.normal(0, 2, shape[1]),
    }
    height = 0.8 / len(data)
    for i, (data_name, color) in enumerate(zip(data, (BLUE, ORANGE, GREEN), strict=True)):
        x = data[data_name].astype(np.float32)
        ratios = []
        for format in FORMATS:
            y = np.asarray(jax_mx.quantize(x, format).dequantize(jnp.float32), np.float64)
            ratios.append(10 * np.log10((x.astype(float) ** 2).sum() / ((x - y) ** 2).sum()))
        at = -np.arange(len(FORMATS)) - (i - 1) * height
        axes.barh(at, ratios, height * 0.9, color=color, label=data_name)
    axes.set_yticks(-np.arange(len(FORMATS)), list(FORMATS))
    axes.set_xlabel("signal over noise in dB, 6 of which are one bit; more is better")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


# ---- forms ---------------------------------------------------------------------------------------
MATRIX = (64, 96)  # as in jax_mx/formats/directions.py


def forms() -> Figure:
    """The floats of each form with their blocks, and the arrays that it gives, to scale."""
    names = [name for name, form in shapes.FORMS.items() if form.op != "dequantize"]
    figure = Figure(figsize=(9, 1.45 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), 1)
    for axes, name in zip(grid, names, strict=True):
        form = shapes.FORMS[name]
        axes.set_title(f"{name}: {_spelled(form)}", loc="left", size=9, family="monospace")
        _bare(axes)
        axes.set_xlim(-4, 560)
        axes.set_ylim(104, -4)
        spans = {d.blocks: color for d, color in zip(form.kernel.directions, (BLUE, ORANGE),
                                                     strict=False)}  # fmt: skip
        _outlined(axes, (0, 0), MATRIX, f"x {MATRIX}", PALE)
        for blocks, color in spans.items():
            _blocks(axes, blocks, color)
        axes.annotate("", (126, 32), (104, 32), arrowprops={"arrowstyle": "->", "color": INK})
        left = 140
        for q, color in zip(_made(form), (BLUE, ORANGE), strict=False):
            for part in ("values", "scales"):
                shape = getattr(q, part).shape
                _outlined(axes, (left, 0), shape, f"{part}\n{shape}", color)
                left += max(shape[1], 46) + 16
            left += 10
    return figure


def _spelled(form: shapes.Form) -> str:
    """The call as it is written."""
    options = {**form.options}
    if not options.get("transpose", True):
        del options["transpose"]
    if options.get("axis") == -1:
        del options["axis"]
    arguments = ", ".join(["x", *(f"{key}={value}" for key, value in options.items())])
    return f"{form.op}({arguments})"


def _made(form: shapes.Form) -> tuple[Any, ...]:
    x = jax.ShapeDtypeStruct(MATRIX, jnp.bfloat16)
    result = jax.eval_shape(functools.partial(getattr(jax_mx, form.op), **form.options), x)
    return result if isinstance(result, tuple) else (result,)


def _outlined(axes: Axes, at: tuple, shape: tuple, text: str, color: str) -> None:
    axes.add_patch(Rectangle(at, shape[1], shape[0], fc=color, alpha=0.35, ec="none"))
    axes.add_patch(Rectangle(at, shape[1], shape[0], fc="none", ec=INK, lw=1))
    axes.text(at[0], at[1] + shape[0] + 3, text, va="top", size=7)


def _blocks(axes: Axes, blocks: Blocks, color: str) -> None:
    """One block filled in the corner, and the borders of all."""
    rows, cols = (BLOCK if spans else 1 for spans in blocks.spans)
    first = max(cols, 4), max(rows, 4)  # one element wide would not be seen
    axes.add_patch(Rectangle((0, 0), *first, fc=color, ec="none", zorder=3))
    for y in range(rows, MATRIX[0], rows) if rows > 1 else ():
        axes.plot([0, MATRIX[1]], [y, y], color=color, lw=1)
    for x in range(cols, MATRIX[1], cols) if cols > 1 else ():
        axes.plot([x, x], [0, MATRIX[0]], color=color, lw=1)


# ---- layouts -------------------------------------------------------------------------------------
def layout(which: layouts.Layout) -> Figure:
    """One tile: where each byte lies in memory, and what memory holds one after the other.

    Without tiles: the same of a small array.
    """
    rows, cols = which.tile if which.is_tiled else (8, 16)
    unit = "tile" if which.is_tiled else "array"
    of = np.indices((rows, cols)).astype(np.uint8)
    row, col = (np.asarray(views.pack(which, jnp.asarray(part))).reshape(-1) for part in of)
    row, col = row[: rows * cols], col[: rows * cols]  # of what is padded, the first tile
    offset = np.empty((rows, cols), int)
    offset[row, col] = np.arange(rows * cols)
    line = 16
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.4))
    left.imshow(offset, aspect="auto", cmap="viridis")
    left.set_title(f"one {unit}, {rows} rows x {cols} bytes:\nwhere each lies", size=9)
    left.set_xlabel("column")
    left.set_ylabel("row")
    for r, c in {(0, 0), (0, cols - 1), (rows - 1, 0), (rows - 1, cols - 1), (rows // 2, 0)}:
        dark = offset[r, c] < rows * cols / 2
        left.text(c, r, str(offset[r, c]), ha="center", va="center", size=7,
                  color="white" if dark else "black")  # fmt: skip
    memory = np.arange(rows * cols).reshape(-1, line)
    right.imshow(memory, aspect="auto", cmap="viridis")
    right.set_title(f"the same bytes in memory, {line} in a line:\nrow, column of each", size=9)
    right.set_xticks([])
    right.set_ylabel("line of memory")
    shown = range(0, memory.shape[0], max(memory.shape[0] // 16, 1))
    for y in shown:
        for x in range(line):
            at = y * line + x
            dark = at < rows * cols / 2
            right.text(x, y, f"{row[at]},{col[at]}", ha="center", va="center", size=5,
                       color="white" if dark else "black")  # fmt: skip
    return figure


# ---- a tensor's path -----------------------------------------------------------------------------
def path() -> Figure:
    """The path of one call, station by station, as the code has it."""
    shape, chip = (8, 256, 512), "sm_90"
    options: dict[str, Any] = {"axis": -2, "transpose": True, "scale_layout": "blocked_128x4"}
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    plan = planned("quantize", x, Options(("mxfp8_e4m3",), **options))
    view = plan.view
    viewed, _ = view.view(shape, (None,) * len(shape), plan.first_axis)
    kernel = registry.chosen(plan, "cuda", [chip]).kernels
    name = kernel[0].name if kernel else "the reference"
    q = jax.eval_shape(functools.partial(jax_mx.quantize, **options), x)
    call = ", ".join(f"{key}={value!r}" for key, value in options.items())
    stations = [
        ("quantizing.quantize", f"quantize(x, {call})", f"x {shape} bfloat16"),
        ("quantizing.planning", "one call, canonical: a Plan; a bad call raises here",
         f"form {plan.form}, {plan.format.name}, {plan.scale_layout.name}"),
        ("quantizing.calling", "operands: x in whole blocks, and what each block needs beside it",
         f"blocks of {plan.block}, tiles of {plan.scale_layout.tile}"),
        ("formats.views", "x as the kernel sees it; a bitcast to XLA",
         f"view {viewed}, in memory order {view.operand}"),
        ("quantizing.registry", f"which implementation serves the plan on {chip}", name),
        ("launch.store", "the kernel by its content key: package, cache, or compiled now",
         "sha256, launch rule"),
        ("launch.calls", "one custom call in the program", "jax_mx: pointers and dimensions"),
        ("ffi/launch.cc", "loads the binary, computes the grid, launches", "on XLA's stream"),
        ("quantizing.mxarray", "MXArray", f"values {q.values.shape}, scales {q.scales.shape}"),
    ]  # fmt: skip
    figure = Figure(figsize=(9, 0.75 * len(stations)), layout="constrained")
    axes = figure.add_subplot()
    axes.axis("off")
    axes.set_xlim(0, 100)
    axes.set_ylim(-len(stations), 0.4)
    for i, (where, step, facts) in enumerate(stations):
        color = SKY if i < 4 else (GREEN if i < 7 else YELLOW)
        axes.add_patch(Rectangle((0, -i - 0.35), 22, 0.6, fc=color, alpha=0.4, ec=INK, lw=0.8))
        axes.text(11, -i - 0.05, where, ha="center", va="center", size=9, family="monospace")
        axes.text(24, -i + 0.07, step, va="center", size=8.5)
        axes.text(24, -i - 0.23, facts, va="center", size=7.5, color="#666666", family="monospace")
        if i + 1 < len(stations):
            ends = (11, -i - 0.35), (11, -i - 0.75)
            axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=9, color=INK))
    return figure


def layer() -> Figure:
    """The three products of y = x . w, with the operands that `explain` finds in their trace."""
    floats = {"x": (64, 96), "w": (96, 128), "dy": (64, 128)}
    x, w = (jax.ShapeDtypeStruct(floats[name], jnp.bfloat16) for name in ("x", "w"))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_mx.matmul(x, w).astype(jnp.float32).sum()

    calls = jax_mx.explain(jax.grad(loss, (0, 1)), x, w).calls
    names = ("forward, y", "dgrad, the gradient of x", "wgrad, the gradient of w")
    colors = {"x": BLUE, "w": GREEN, "dy": ORANGE}
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    for axes, name, call in zip(figure.subplots(3, 1), names, calls, strict=True):
        axes.set_title(name, loc="left", size=9)
        _bare(axes)
        axes.set_xlim(-4, 460)
        axes.set_ylim(150, -4)
        left = 0
        for operand in call.key.operands:
            format, size, _, axis = operand.split()
            shape = rows, cols = tuple(map(int, size.split("x")))
            of = next(n for n, dims in floats.items() if shape in (dims, dims[::-1]))
            turned = " transposed" * (shape != floats[of])
            text = f"{of}{turned} {shape}\n{format}, blocks along axis {axis}"
            _outlined(axes, (left, 0), shape, text, colors[of])
            axes.add_patch(Rectangle((left, 0), BLOCK, 4, fc=colors[of], ec="none", zorder=3))
            for at in range(BLOCK, cols, BLOCK):
                axes.plot([left + at] * 2, [0, rows], color=colors[of], lw=1)
            left += 230
    return figure


# ---- learning ---
def learning() -> Figure:
    """Losses of held-out text by way, and what lies between them and bfloat16's."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    file = RESULTS / "h100_learning.json"
    rows = [row for row in read(file)[1] if "held_out" in row] if file.exists() else []
    colors = (INK, BLUE, GREEN, ORANGE, PURPLE, YELLOW)
    floats = next((row["held_out"] for row in rows if row["way"] == "bf16"), [])
    for row, color in zip(rows, colors, strict=False):
        losses = np.array(row["held_out"])
        steps = row["every"] * (1 + np.arange(len(losses)))
        left.plot(steps, losses, color=color, lw=1.2, label=row["way"])
        both = min(len(losses), len(floats))
        apart = 100 * (losses[:both] / np.array(floats[:both]) - 1)
        right.plot(steps[:both], apart, color=color, lw=1.2)
    for axes, title in ((left, "loss of held-out text"), (right, "% to bf16's")):
        axes.set_title(title if rows else f"{title}: not measured yet", loc="left", size=10)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    if floats:
        left.set_ylim(0.98 * min(floats), floats[len(floats) // 10])
        right.set_ylim(-2, 2)
        figure.legend(loc="outside lower center", ncols=len(rows), frameon=False)
    return figure


def tutorial() -> Figure:
    """The curves of docs/tutorial.md, whose code runs here."""
    page, names = Path(__file__).with_name("tutorial.md").read_text(), {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[:2]:
            exec(compile(block, "tutorial.md", "exec"), names)
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for (name, losses), color in zip(names["curves"].items(), (INK, BLUE, ORANGE), strict=True):
        axes.plot(losses, color=color, lw=1.2, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


# ---- speed ---
def step() -> Figure:
    """Tokens a second of a training step on one H100, by way, from benchmarks/results."""
    rows = [
        row
        for row in read(RESULTS / "h100_step.json")[1]
        if row["way"] in tables.STEPS and row["checkpoint"] == "full" and row["width"] == 4096
    ]
    rows.sort(key=lambda row: row["tokens_s"])
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axes = figure.add_subplot()
    colors = [BLUE if row["way"].startswith(("auto", "mx")) else PALE for row in rows]
    names = [tables.STEPS[row["way"]].replace("`", "") for row in rows]
    names = [name.replace("the same,", "the default,") for name in names]
    bars = axes.barh(names, [row["tokens_s"] for row in rows], color=colors)
    said = [f"{row['tokens_s']:,}, {row['ratio']:.2f} of bf16's time" for row in rows]
    axes.bar_label(bars, said, padding=4, size=8)
    axes.set_xlim(0, 1.5 * rows[-1]["tokens_s"])
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    about = tables.of_rows(rows)
    where = f"{about['device']}, {rows[0]['layers']} layers, commit {about['commit']}"
    axes.set_title(f"tokens a second: {where}", loc="left", size=10)
    return figure


def speed() -> Figure:
    """The speed of every form, beside a copy, XLA and the peers, of one run."""
    rows = plot.measured()
    return plot.draw(rows, f"H200, commit {rows[0]['commit']}")


# ---- all of them ---
PICTURES: Mapping[str, Callable[[], Figure]] = {
    "formats": formats,
    "scalings": scalings,
    "windows": window_scales,
    "losses": losses,
    "forms": forms,
    "path": path,
    "layer": layer,
    "learning": learning,
    "tutorial": tutorial,
    "speed": speed,
    "step": step,
    **{
        f"layout_{layout_drawn.name}": functools.partial(layout, layout_drawn)
        for layout_drawn in (*layouts.SCALE_LAYOUTS.values(), *layouts.VALUE_LAYOUTS.values())
    },
}


def write(folder: Path) -> None:
    """All pictures; one that did not change keeps its file, so that the site is not built anew."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        drawn = io.BytesIO()
        draw().savefig(drawn, format="svg", metadata={"Date": None}, facecolor="white")
        (folder / f"{name}.svg").write_bytes(drawn.getvalue())
