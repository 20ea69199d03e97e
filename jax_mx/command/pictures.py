"""For `python -m jax_mx --plot`: histograms of tensors, of their scales and of what is lost."""

from __future__ import annotations

import dataclasses
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_mx.command import ran, tensors
from jax_mx.command.output import Column
from jax_mx.facts.formats import SCALE_NAN

SUFFIXES = (".html", ".png", ".svg", ".pdf")
MOST = 100  # tensors in one picture; a page has no such limit
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
Counts = Mapping[int, int]  # how often there is an integer


@dataclasses.dataclass(frozen=True)
class Histograms:
    """What a picture shows of one tensor. Elements that are no finite numbers are left out.

    Attributes:
      name: the tensor's.
      rows: what the table says of it.
      shape: its shape.
      scaling: how scales follow from amaxes.
      exponents: of the elements that are not zero, powers of two.
      zeros: the share of elements that are zero.
      scales: powers of two, by format.
      errors: powers of two of |x - dequantized| / |x|, rounded down, by format.
      exact: the share of nonzero elements that nothing is lost of, by format.
    """

    name: str
    rows: Sequence[tensors.Row]
    shape: tuple[int, ...]
    scaling: str
    exponents: Counts
    zeros: float
    scales: Mapping[str, Counts]
    errors: Mapping[str, Counts]
    exact: Mapping[str, float]


def obstacle(path: Path) -> str:
    """Why no picture can be written there; empty if it can, as far as one sees before."""
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
    tensor: np.ndarray,
    axis: int,
    formats: Sequence[str],
    scaling: str,
    rows: Sequence[tensors.Row] = (),
) -> Histograms:
    """The histograms of a tensor that `samples.admit` gave, quantized to each format."""
    x = tensor.astype(np.float64)
    there = np.isfinite(x) & (x != 0)
    scales, errors, exact = {}, {}, {}
    for format in formats:
        q = tensors.quantize(tensor, format=format, axis=axis, scaling=scaling)
        bytes_ = np.asarray(q.scales).view(np.uint8)
        scales[format] = _counts(bytes_[bytes_ != SCALE_NAN].astype(int) - 127)
        back = tensors.dequantize(q, dtype=jnp.float32, implementation="xla")
        y = np.asarray(back, np.float64)
        kept = there & np.isfinite(y)
        lost = np.abs(x[kept] - y[kept]) / np.abs(x[kept])
        exact[format] = float((lost == 0).mean()) if lost.size else 1.0
        errors[format] = _counts(_exponents(lost[lost > 0]))
    zeros = float((x == 0).mean())
    exponents = _counts(_exponents(np.abs(x[there])))
    return Histograms(name, rows, tensor.shape, scaling, exponents, zeros, scales, errors, exact)


def _exponents(x: np.ndarray) -> np.ndarray:
    """The powers of two below positive numbers."""
    return np.frexp(x)[1] - 1


def _counts(x: np.ndarray) -> Counts:
    values, counts = np.unique(x, return_counts=True)
    return {int(value): int(count) for value, count in zip(values, counts, strict=True)}


# ---- drawing ---
def _bars(axes: Any, counts: Counts, of: int, total: int, color: str, label: str) -> None:
    """One histogram, of `total` beside each other; shares of its numbers."""
    i, width = of, 0.9 / total
    every = sum(counts.values()) or 1
    at = [value + (i - (total - 1) / 2) * width for value in counts]
    axes.bar(at, [count / every for count in counts.values()], width, color=color, label=label)


def draw_tensor(grid: Sequence[Any], found: Histograms) -> None:
    """Three histograms, into three axes of matplotlib."""
    elements, scales, errors = grid
    _bars(elements, found.exponents, 0, 1, "#555555", "")
    zeros = f"; {found.zeros:.1%} are zero" * (found.zeros > 0)
    elements.set_xlabel(f"elements, power of 2{zeros}", size=8)
    elements.set_ylabel("share", size=8)
    names = list(found.scales)
    for i, format in enumerate(names):
        color = COLORS[i % len(COLORS)]
        _bars(scales, found.scales[format], i, len(names), color, format)
        label = format + f", {found.exact[format]:.0%} exact" * (found.exact[format] > 0)
        _bars(errors, found.errors[format], i, len(names), color, label)
    scales.set_xlabel(f"scales by {found.scaling}, power of 2", size=8)
    errors.set_xlabel("error / element, power of 2", size=8)
    for axes in (scales, errors):
        axes.legend(fontsize=7, frameon=False)
    for axes in grid:
        axes.tick_params(labelsize=7)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)


def draw_speeds(axes: Any, speeds: Sequence[ran.Speed]) -> None:
    """Bars of TB/s, a copy's beside them, and plain XLA's."""
    names = [f"{each.op}\n{each.format}" for each in speeds]
    by = {
        "jax_mx": lambda s: s.us,
        "plain XLA": lambda s: s.plain_us,
        "a copy": lambda s: s.copy_us,
    }
    for i, (label, us) in enumerate(by.items()):
        at = [j + (i - 1) * 0.28 for j, each in enumerate(speeds) if us(each)]
        axes.bar(
            at,
            [each.nbytes / us(each) / 1e6 for each in speeds if us(each)],
            0.26,
            color=(COLORS[0], COLORS[1], "#999999")[i],
            label=label,
        )
    axes.set_xticks(range(len(names)), names, size=7)
    axes.set_ylabel("TB/s", size=8)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def _spelled(found: Histograms) -> str:
    return f"{found.name}, {' x '.join(map(str, found.shape))}"


def picture(all_found: Sequence[Histograms], speeds: Sequence[ran.Speed]) -> Any:
    """One figure: a row for each tensor, one for speeds if there are any."""
    from matplotlib.figure import Figure

    shown = all_found[:MOST]
    count = len(shown) + bool(speeds)
    height = 2.3 * max(count, 1)
    figure = Figure(figsize=(11, height))
    if not count:
        figure.text(0.5, 0.5, "no tensor was quantized", ha="center")
        return figure
    # By hand: what matplotlib computes takes time that grows with the square of the rows.
    grid = figure.add_gridspec(
        count, 3, left=0.06, right=0.99, top=1 - 0.4 / height, bottom=0.5 / height, hspace=0.64
    )
    for row, found in enumerate(shown):
        axes = [figure.add_subplot(grid[row, column]) for column in range(3)]
        axes[0].set_title(_plain(_spelled(found)), size=9, loc="left")
        draw_tensor(axes, found)
    if speeds:
        draw_speeds(figure.add_subplot(grid[-1, :]), speeds)
    return figure


def _svg(figure: Any) -> str:
    """As an element of a page."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]


STYLE = """
body { font-family: sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.2rem 0.6rem; text-align: left; border-bottom: 1px solid #ddd; }
svg { max-width: 100%; height: auto; }
"""
PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>jax_mx</title><style>{style}</style></head>
<body>
<h1>jax_mx</h1>
{body}
</body>
</html>
"""


def page(
    all_found: Sequence[Histograms],
    speeds: Sequence[ran.Speed],
    about: Sequence[str],
) -> str:
    """A page that needs nothing else: sentences, pictures, and the numbers of each tensor."""
    from matplotlib.figure import Figure

    parts = [f"<p>{html.escape(line)}</p>" for line in about]
    if speeds:
        figure = Figure(figsize=(11, 3), layout="constrained")
        draw_speeds(figure.subplots(), speeds)
        parts += ["<h2>Speed</h2>", _svg(figure), _table(ran.SPEED, [s.cells() for s in speeds])]
    for found in all_found:
        figure = Figure(figsize=(11, 2.3), layout="constrained")
        draw_tensor(figure.subplots(1, 3), found)
        own = [row.cells() for row in found.rows]
        parts += [f"<h2>{html.escape(_spelled(found))}</h2>", _svg(figure)]
        parts.append(_table(tensors.COLUMNS, own))
    body = "\n".join(parts)
    return PAGE.format(style=STYLE, body=body)


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """The first cells of each row, as many as there are columns."""
    lines = [[column.name for column in columns], *(row[: len(columns)] for row in rows)]
    texts = [
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)
        for line, tag in zip(lines, ["th"] + ["td"] * len(rows), strict=True)
    ]
    return "<table>" + "".join(f"<tr>{text}</tr>" for text in texts) + "</table>"


def write(
    path: Path,
    all_found: Sequence[Histograms],
    speeds: Sequence[ran.Speed],
    about: Sequence[str],
) -> str:
    """Writes the page or the picture that the suffix names.

    Returns:
      What it holds, a sentence.
    """
    if path.suffix.lower() == ".html":
        path.write_text(page(all_found, speeds, about), encoding="utf-8")
        return f"{path}: {len(all_found)} tensors."
    picture(all_found, speeds).savefig(path, dpi=100)
    shown = min(len(all_found), MOST)
    rest = f" of {len(all_found)}; .html takes all" * (shown < len(all_found))
    return f"{path}: {shown} tensors{rest}."
