"""For `python -m jax_mx --plot`: histograms of tensors, of their scales and of their losses."""

import collections
import dataclasses
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_mx.command import ran, tensors
from jax_mx.command.output import Table, lines_of
from jax_mx.command.samples import Sample
from jax_mx.facts import files
from jax_mx.facts.formats import SCALE_NAN

SUFFIXES = (".html", ".png", ".svg", ".pdf")
MOST = 100  # tensors in one picture; a page has no such limit
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
Counts = Mapping[int, int]  # the number of times that an integer occurs


@dataclasses.dataclass(frozen=True)
class Histograms:
    """Three histograms of one tensor, of powers of two. Only finite elements count.

    Attributes:
      title: the tensor's name and shape.
      rows: the tensor's rows in the table.
      panels: for elements, scales and errors a text, and counts by label; an error is
        |x - dequantized| / |x| rounded down, of elements that lose something.
    """

    title: str
    rows: Sequence[dict[str, Any]]
    panels: Mapping[str, Mapping[str, Counts]]


def obstacle(path: Path) -> str:
    """Why no picture can be written there; empty if nothing is known to be in the way."""
    if path.suffix.lower() not in SUFFIXES:
        return f"{path} must end in one of {', '.join(SUFFIXES)}"
    if not path.absolute().parent.is_dir():
        return f"there is no folder {path.absolute().parent}"
    try:
        return f"{path} is a folder" if path.is_dir() else ""
    except OSError as error:  # a name too long
        return f"{path} cannot be written ({error.strerror})"


def histograms(
    name: str,
    sample: Sample,
    formats: Sequence[str],
    scaling: str,
    rows: Sequence[dict[str, Any]] = (),
) -> Histograms:
    """The histograms of a tensor that `samples.admit` gave, quantized to each format."""
    elements, zeros = collections.Counter(), 0
    scales = {format: collections.Counter() for format in formats}
    errors = {format: collections.Counter() for format in formats}
    kept = dict.fromkeys(formats, 0)
    for part in sample.parts():
        tensor = part.whole()
        x = tensor.astype(np.float64)
        there = np.isfinite(x) & (x != 0)
        zeros += int(np.count_nonzero(x == 0))
        elements.update(_counts(_exponents(np.abs(x[there]))))
        for format in formats:
            q = tensors.quantize(tensor, format=format, axis=sample.axis, scaling=scaling)
            codes = np.asarray(q.scales).view(np.uint8)
            scales[format].update(_counts(codes[codes != SCALE_NAN].astype(int) - 127))
            y = tensors.dequantized(q)
            finite = there & np.isfinite(y)
            lost = np.abs(x[finite] - y[finite]) / np.abs(x[finite])
            kept[format] += lost.size
            errors[format].update(_counts(_exponents(lost[lost > 0])))
    labelled = {}
    for format, counts in errors.items():
        exact = 1 - counts.total() / kept[format] if kept[format] else 1.0
        labelled[format + f", {exact:.0%} exact" * (exact > 0)] = counts
    share = zeros / sample.tensor.size
    panels = {
        f"elements, power of 2{f'; {share:.1%} are zero' * (zeros > 0)}": {"": elements},
        f"scales by {scaling}, power of 2": scales,
        "error / element, power of 2": labelled,
    }
    return Histograms(f"{name}, {' x '.join(map(str, sample.tensor.shape))}", rows, panels)


def _exponents(x: np.ndarray) -> np.ndarray:
    """The exponents of the powers of two below positive numbers."""
    return np.frexp(x)[1] - 1


def _counts(x: np.ndarray) -> Counts:
    values, counts = np.unique(x, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


# ---- drawing ---
def draw_tensor(grid: Sequence[Any], histograms: Histograms) -> None:
    """Draws three histograms into three axes of matplotlib."""
    # matplotlib takes what stands between two $ for mathematics.
    grid[0].set_title(histograms.title.replace("$", r"\$"), size=9, loc="left")
    grid[0].set_ylabel("share", size=8)
    for axes, (text, series) in zip(grid, histograms.panels.items(), strict=True):
        _bars(
            axes,
            [
                (label, {k: n / sum(c.values()) for k, n in c.items()})
                for label, c in series.items()
            ],
        )
        axes.set_xlabel(text, size=8)
        axes.xaxis.get_major_locator().set_params(integer=True)


def draw_speeds(axes: Any, speeds: Sequence[dict[str, Any]]) -> None:
    """Draws bars of TB/s for each call, for plain XLA and for a copy."""
    times = {"jax_mx": "us", "plain XLA": "plain_us", "a copy": "copy_us"}
    _bars(
        axes,
        [
            (label, {i: s["nbytes"] / s[key] / 1e6 for i, s in enumerate(speeds) if s[key]})
            for label, key in times.items()
        ],
    )
    axes.set_xticks(range(len(speeds)), [f"{s['op']}\n{s['format']}" for s in speeds])
    axes.set_ylabel("TB/s", size=8)


def _bars(axes: Any, series: Sequence[tuple[str, Mapping[int, float]]]) -> None:
    """Draws series of bars side by side, each with a colour and a label."""
    width = 0.9 / len(series)
    for i, (label, heights) in enumerate(series):
        at = [x + (i - (len(series) - 1) / 2) * width for x in heights]
        axes.bar(at, heights.values(), width, color=COLORS[i % len(COLORS)], label=label)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if any(label for label, _ in series):
        axes.legend(fontsize=7, frameon=False)


def picture(shown: Sequence[Histograms], speeds: Sequence[dict[str, Any]]) -> Any:
    """One figure: a row for each tensor, one for speeds if there are any."""
    from matplotlib.figure import Figure

    count = len(shown) + bool(speeds)
    height = 2.3 * max(count, 1)
    figure = Figure(figsize=(11, height))
    if not count:
        figure.text(0.5, 0.5, "no tensor was quantized", ha="center")
        return figure
    # By hand: matplotlib's layout takes time that grows with the square of the rows.
    grid = figure.add_gridspec(
        count, 3, left=0.06, right=0.99, top=1 - 0.4 / height, bottom=0.5 / height, hspace=0.64
    )
    for row, histograms in enumerate(shown):
        draw_tensor([figure.add_subplot(grid[row, column]) for column in range(3)], histograms)
    if speeds:
        draw_speeds(figure.add_subplot(grid[-1, :]), speeds)
    return figure


PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>jax_mx</title></head>
<body style="font-family: sans-serif; max-width: 70rem; margin: 2rem auto">
<h1>jax_mx</h1>
{}
</body>
</html>
"""


def page(
    shown: Sequence[Histograms], speeds: Sequence[dict[str, Any]], about: Sequence[str]
) -> str:
    """A page that needs nothing else: sentences, pictures, and the numbers of each tensor."""
    parts = [f"<p>{html.escape(line)}</p>" for line in about]
    if speeds:
        parts += _section("Speed", picture([], speeds), ran.speed_table(speeds))
    for one in shown:
        parts += _section(one.title, picture([one], []), tensors.table(one.rows))
    return PAGE.format("\n".join(parts))


def _section(title: str, figure: Any, table: Table) -> list[str]:
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg, text = drawn.getvalue(), "\n".join(lines_of(*table))
    text = f"<pre>{html.escape(text)}</pre>"
    return [f"<h2>{html.escape(title)}</h2>", svg[svg.index("<svg") :], text]


def write(
    path: Path,
    drawn: Sequence[Histograms],
    speeds: Sequence[dict[str, Any]],
    about: Sequence[str],
) -> str:
    """Writes the page or the picture that the suffix names; returns a sentence about it.

    Raises:
      OSError: it cannot be written.
    """
    is_page, image = path.suffix.lower() == ".html", io.BytesIO()
    if is_page:
        image.write(page(drawn, speeds, about).encode())
    else:
        picture(drawn[:MOST], speeds).savefig(image, dpi=100, format=path.suffix[1:].lower())
    try:
        files.replace(path, image.getvalue())
    except OSError as error:
        raise files.failure("--plot", path, error) from error
    if is_page:
        return f"{path}: {len(drawn)} tensors."
    rest = f" of {len(drawn)}; .html takes all" * (len(drawn) > MOST)
    return f"{path}: {min(len(drawn), MOST)} tensors{rest}."
