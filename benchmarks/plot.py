"""A picture of a run's rows: TB/s per form, beside the copy, XLA and the peers.

python -m benchmarks.plot benchmarks/results/h200.json benchmarks/results/h200.png
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import shapes
from jax_mx.lowering.registry import IMPLEMENTATIONS

Row = Mapping[str, Any]

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
    found: dict[str, dict[str, float]] = {"jax_mx": {}, "copy": {}, "XLA": {}}
    for row in rows:
        if not WHERE.items() <= row.items():
            continue
        form, speed = row["form"], row["gbps"] / 1e3
        implementation = row.get("implementation", "cutedsl")
        if implementation not in IMPLEMENTATIONS:
            name = implementation + f" ({row['scaling']})" * (row["scaling"] != SCALING)
            found.setdefault(name, {})[form] = speed
        elif row["scaling"] == SCALING:
            found["jax_mx"][form] = speed
            found["copy"][form] = row["copy_gbps"] / 1e3
            if row["speedup_over_xla"]:
                found["XLA"][form] = speed / row["speedup_over_xla"]
    return {name: speeds for name, speeds in found.items() if speeds}


def draw(rows: Sequence[Row], chip: str, date: str) -> Figure:
    """A line for each form, a mark for each implementation.

    Raises:
      ValueError: there are no rows of the kind that is drawn.
    """
    found = series(rows)
    if not found:
        raise ValueError(f"draw: no row has {WHERE}")
    forms = [form for form in shapes.FORMS if form in found["jax_mx"]]
    height = {form: -i for i, form in enumerate(forms)}
    figure = Figure(figsize=(8, 1.5 + 0.45 * len(forms)), layout="constrained")
    axes = figure.add_subplot()
    edge = axes.get_yaxis_transform()  # x from 0 to 1
    axes.hlines([*height.values()], 0, 1, color="#e6e6e6", lw=1, transform=edge)
    marks = {"jax_mx": OURS, "XLA": XLA}
    theirs = iter(THEIRS)
    for name, speeds in found.items():
        at = [height[form] for form in speeds if form in height]
        values = [speed for form, speed in speeds.items() if form in height]
        if name == "copy":
            axes.plot(values, at, "|", color="#777777", ms=16, mew=2.5, label="copy, same bytes")
            continue
        shape, color = marks.get(name) or next(theirs)
        size = 10 if name == "jax_mx" else 7
        axes.plot(values, at, shape, color=color, ms=size, mec="white", zorder=3, label=name)
    for form, speed in found["jax_mx"].items():  # a column of numbers, where nothing is hit
        number = axes.text(1.01, height[form], f"{speed:.2f}", transform=edge, va="center")
        number.set(color=OURS[1], weight="bold")
    axes.set_yticks([*height.values()], forms)
    axes.set_ylim(0.6 - len(forms), 0.6)
    fastest = max(max(speeds.values()) for speeds in found.values())
    axes.set_xlim(0, fastest * 1.04)
    axes.set_xlabel("TB/s: input, values and scales, once each, over the time on the device")
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    shape = WHERE["shape"].replace("x", ", ")
    title = f"({shape}) bfloat16, MXFP8 E4M3, {SCALING} — {chip}, {date}"
    axes.set_title(title, loc="left", size=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def date_of(commit: str) -> str:
    """The day of a commit of this checkout; where there is none, today."""
    command = ["git", "show", "--no-patch", "--format=%cs", commit]
    where = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return str(datetime.date.today())
    return done.stdout.strip() or str(datetime.date.today())


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser("python -m benchmarks.plot")
    parser.add_argument("rows", type=Path, help="what python -m benchmarks --json wrote")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--chip", help="default: the rows' file name")
    parser.add_argument("--date", help="of the run; default: that of its commit")
    args = parser.parse_args(argv)
    rows = json.loads(args.rows.read_text())
    date = args.date or date_of(rows[0]["commit"])
    figure = draw(rows, args.chip or args.rows.stem.upper(), date)
    figure.savefig(args.picture, dpi=160)


if __name__ == "__main__":
    main()
