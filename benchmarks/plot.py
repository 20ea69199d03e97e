"""Pictures of measured rows: python -m benchmarks plot draws the README's, of benchmarks/results.

It carries a hash of what it draws, so that a test notices when rows have changed since.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import shapes
from benchmarks.record import RESULTS
from benchmarks.report import one_run, read
from jax_mx.quantizing.registry import IMPLEMENTATIONS

Row = Mapping[str, Any]
OVERVIEW = RESULTS / "speed.png"

WHERE = {
    "shape": shapes.spell(shapes.REQUIRED[0]),
    "dtype": "bfloat16",
    "format": "mxfp8_e4m3",
    "scale_layout": "row_major",
}
SCALING = "rceil"  # of our rows; peers have those that they can do
# Okabe and Ito's colours, which colour-blind readers can tell apart, and shapes for everyone.
OURS, XLA = ("o", "#0072B2"), ("s", "#D55E00")
THEIRS = (("^", "#009E73"), ("D", "#CC79A7"), ("v", "#E69F00"), ("P", "#56B4E9"))


def series(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """TB/s by form, of "jax_mx", "copy", "XLA" and each peer, in that order."""
    speeds_of: dict[str, dict[str, float]] = {"jax_mx": {}, "copy": {}, "XLA": {}}
    for row in rows:
        if not WHERE.items() <= row.items():
            continue
        form, speed = row["form"], row["gbps"] / 1e3
        implementation = row.get("implementation", "cutedsl")
        if implementation not in IMPLEMENTATIONS:
            name = implementation + f" ({row['scaling']})" * (row["scaling"] != SCALING)
            speeds_of.setdefault(name, {})[form] = speed
        elif row["scaling"] == SCALING:
            speeds_of["jax_mx"][form] = speed
            speeds_of["copy"][form] = row["copy_gbps"] / 1e3
            if row["speedup_over_xla"]:
                speeds_of["XLA"][form] = speed / row["speedup_over_xla"]
    return {name: speeds for name, speeds in speeds_of.items() if speeds}


def draw(rows: Sequence[Row], where: str) -> Figure:
    """A line for each form, a mark for each implementation; `where` ends the title.

    Raises:
      ValueError: there are no rows of the kind that is drawn.
    """
    speeds_of = series(rows)
    if not speeds_of:
        raise ValueError(f"draw: no row has {WHERE}")
    forms = [form for form in shapes.FORMS if form in speeds_of["jax_mx"]]
    height = {form: -i for i, form in enumerate(forms)}
    figure = Figure(figsize=(8, 1.5 + 0.45 * len(forms)), layout="constrained")
    axes = figure.add_subplot()
    edge = axes.get_yaxis_transform()  # x from 0 to 1
    axes.hlines([*height.values()], 0, 1, color="#e6e6e6", lw=1, transform=edge)
    marks = {"jax_mx": OURS, "XLA": XLA}
    theirs = iter(THEIRS)
    for name, speeds in speeds_of.items():
        at = [height[form] for form in speeds if form in height]
        values = [speed for form, speed in speeds.items() if form in height]
        if name == "copy":
            axes.plot(values, at, "|", color="#777777", ms=16, mew=2.5, label="copy, same bytes")
            continue
        shape, color = marks.get(name) or next(theirs)
        size = 10 if name == "jax_mx" else 7
        axes.plot(values, at, shape, color=color, ms=size, mec="white", zorder=3, label=name)
    for form, speed in speeds_of["jax_mx"].items():  # a column of numbers, where nothing is hit
        number = axes.text(1.01, height[form], f"{speed:.2f}", transform=edge, va="center")
        number.set(color=OURS[1], weight="bold")
    axes.set_yticks([*height.values()], forms)
    axes.set_ylim(0.6 - len(forms), 0.6)
    fastest = max(max(speeds.values()) for speeds in speeds_of.values())
    axes.set_xlim(0, fastest * 1.04)
    axes.set_xlabel("TB/s: input, values and scales, once each, over the time on the device")
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    shape = WHERE["shape"].replace("x", ", ")
    title = f"({shape}) bfloat16, MXFP8 E4M3, {SCALING} — {where}"
    axes.set_title(title, loc="left", size=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


# ---- the README's ---
# The left half draws these forms.
MAIN_FORMS = {
    "axis -1": "along rows",
    "axis -2 transposed": "along columns,\ntransposed",
    "both transposed": "both",
    "dequantize": "back to\nbfloat16",
}
# The picture of moe draws these cases and ways.
LAYERS = ("forward", "forward and backward")
LAYERS_IN_FLOATS = ("bf16 Pallas", "bf16 lax.ragged_dot")
Bars = Mapping[str, Mapping[str, float]]  # name -> label of a group -> length


def measured() -> list[Row]:
    """The rows for `draw` from benchmarks/results: one run of our quantizers, and torchao's."""
    rows = [row for row in _rows("h200") if WHERE.items() <= row.items()]
    theirs = [row for row in _rows("h200_peers") if row["implementation"] not in IMPLEMENTATIONS]
    return one_run(rows) + theirs


def overview_bars() -> tuple[Bars, Bars]:
    """TB/s of quantizers and TF/s of an MoE layer's products, of benchmarks/results."""
    rows = measured()
    speeds_of = series(rows)
    theirs = [name for name in speeds_of if name not in ("jax_mx", "copy", "XLA")]
    fastest = {
        form: max(speeds)
        for form in MAIN_FORMS
        if (speeds := [speeds_of[name][form] for name in theirs if form in speeds_of[name]])
    }
    # Who wants both directions of a peer calls its two kernels, one after the other.
    one, other, both = "axis -1", "axis -2 transposed", "both transposed"
    times = {row["form"]: row["us"] for row in rows if row["implementation"] in IMPLEMENTATIONS}
    if {one, other} <= fastest.keys():
        ours = speeds_of["jax_mx"]
        two_calls = sum(times[form] * ours[form] / fastest[form] for form in (one, other))
        fastest[both] = max(fastest.get(both, 0.0), ours[both] * times[both] / two_calls)
    rows_drawn = {"jax_mx": speeds_of["jax_mx"], "plain JAX, by XLA": speeds_of["XLA"]}
    rows_drawn["torchao, its fastest"] = fastest
    left = {
        name: {label: speeds[form] for form, label in MAIN_FORMS.items() if form in speeds}
        for name, speeds in rows_drawn.items()
    }
    return left, _layers()


def _rows(name: str) -> list[Row]:
    """The rows of a file of benchmarks/results that have a time."""
    return [row for row in read(RESULTS / f"{name}.json")[1] if "us" in row]


def _layers() -> Bars:
    """The layer in MX by its fastest recipe, and both ways in bfloat16."""
    by_way: dict[str, dict[str, float]] = {}
    for row in _rows("h200_moe"):
        if row["case"] in LAYERS:
            by_way.setdefault(row["way"], {})[row["case"]] = row["tflops"]
    ours = [way for way in by_way if way.startswith("mxfp8")]
    best = max(ours, key=lambda way: max(by_way[way].values()))
    shown = {best: f"jax_mx.moe, {best}"} | {way: way for way in LAYERS_IN_FLOATS}
    return {name: by_way[way] for way, name in shown.items() if way in by_way}


def overview(left: Bars, right: Bars) -> Figure:
    """Two halves of bars, ours first."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    titles = ("Quantizers, TB/s of input and output", "An MoE layer, TF/s")
    places = (
        "one H200, (8, 7168, 7168) bfloat16 and MXFP8 E4M3",
        "one H200, 16384 rows, 8 experts, quantizing included",
    )
    colors = (OURS[1], "#999999", "#CC79A7")  # ours, XLA's, a peer's
    halves = zip(figure.subplots(1, 2), (left, right), titles, places, strict=True)
    for axes, bars, title, below in halves:
        labels = list(dict.fromkeys(label for group in bars.values() for label in group))
        height = 0.84 / len(bars)
        for i, ((name, group), color) in enumerate(zip(bars.items(), colors, strict=False)):
            at = [-labels.index(label) - (i - (len(bars) - 1) / 2) * height for label in group]
            axes.barh(at, [*group.values()], height * 0.9, color=color, label=name)
            for y, length in zip(at, group.values(), strict=True):
                text = f" {length:.2f}" if length < 20 else f" {length:.0f}"
                axes.text(length, y, text, va="center", size=8, color="#333333")
        axes.set_yticks([-i for i in range(len(labels))], labels)
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.set_title(f"{title}\n", loc="left", size=11, weight="bold")
        axes.text(0, 1.02, below, transform=axes.transAxes, size=8.5, color="#555555")
        axes.margins(x=0.12)
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.45, 0), ncols=2, frameon=False, fontsize=8
        )
    return figure


def digest(*bars: Bars) -> str:
    """The digest in a picture that identifies the rows that it draws."""
    return hashlib.sha256(json.dumps(bars, sort_keys=True).encode()).hexdigest()


def options(add: Callable[..., Any]) -> None:
    """Where the picture is put."""
    add("picture", type=Path, nargs="?", default=OVERVIEW)


def main(args: argparse.Namespace) -> None:
    """Draws the README's picture."""
    bars = overview_bars()
    overview(*bars).savefig(args.picture, dpi=110, metadata={"Rows": digest(*bars)})
