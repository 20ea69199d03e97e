"""Tensor cores by chip, and the layouts of operands that they read as they lie."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jax_mx.formats.formats import BLOCK
from jax_mx.formats.layouts import (
    BLOCKED_128X4,
    ROW_MAJOR,
    SHUFFLED_16X16,
    SHUFFLED_32X8,
    Layout,
    ScaleLayout,
)
from jax_mx.launch import targets
from jax_mx.launch.chips import chips_of

# The chips whose tensor cores multiply OCP's FP8, and those that take E8M0 scales as well.
FP8 = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx950")
SCALED_DOT = ("sm_100", "sm_103", "sm_120", "sm_121", "gfx950")
# The chips whose tensor cores sum in tensor memory, by tcgen05's instructions.
TCGEN05 = ("sm_100", "sm_103")
VERSION = (0, 11, 2)  # of JAX, whose interpreter executes a kernel of tcgen05
ALIGN = 128  # elements: groups that it contracts begin at multiples, where it reads codes

# By chip, where scales lie that a matrix core takes without another pass; elsewhere in rows.
_LAYOUTS: Mapping[str, ScaleLayout] = {
    **dict.fromkeys(TCGEN05, BLOCKED_128X4),
    "gfx950": SHUFFLED_32X8,
}


def layout_for_trace(of: Callable[[], Any] | None = None, joined: Any = None) -> ScaleLayout:
    """The layout of scales that products of a trace read as they lie.

    Where XLA splits a program scales stay in rows, unless each shard has whole tiles.

    Args:
      of: gives the type of what is quantized along either of the last two axes; None: not known.
      joined: the mesh on which devices' parts are joined, which then have whole tiles; or None.
    """
    layouts = {_LAYOUTS.get(chip, ROW_MAJOR) for chip in targets.chips_of_trace(())}
    if len(layouts) != 1:
        return ROW_MAJOR
    (layout,) = layouts
    is_old = layout == BLOCKED_128X4 and jax.__version_info__ < VERSION
    return layout if not is_old and _has_whole_tiles(layout, of, joined) else ROW_MAJOR


def _has_whole_tiles(
    layout: Layout, of: Callable[[], Any] | None = None, joined: Any = None
) -> bool:
    """Whether shards have whole tiles along both axes, whatever XLA splits.

    On the automatic axes of a mesh a trace does not know what XLA splits.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_local = mesh.empty or mesh.are_all_axes_manual
    if is_local and joined is None:
        return True
    mesh = joined if mesh.empty else mesh
    if of is None or not layout.is_tiled or (mesh.manual_axes and not is_local):
        return False
    operand = of()
    unit = math.lcm(layout.pad[0], layout.pad[1] * BLOCK)
    unit *= math.prod(mesh.shape[name] for name in mesh.auto_axes)
    split = getattr(operand.sharding, "spec", ())
    entries = (*split, *[None] * (len(operand.shape) - len(split)))
    for n, axes in [*zip(operand.shape, entries, strict=True)][-2:]:
        names = (axes,) if isinstance(axes, str) else axes or ()
        if n % (unit * math.prod(mesh.shape[name] for name in names)):
            return False
    return True


def tiles_for_trace() -> tuple[Layout, ...]:
    """The tiles that products of a trace read as they lie; on a mesh none."""
    chips = {*targets.chips_of_trace(())}
    if chips and chips <= {*chips_of("flydsl")} and _has_whole_tiles(SHUFFLED_32X8):
        return (SHUFFLED_32X8, SHUFFLED_16X16)
    return (layout_for_trace(),)


def align_for_trace() -> int:
    """The multiples at which groups begin along rows, so that products of a trace read codes."""
    chips = targets.chips_of_trace(())
    serves = bool(chips) and {*chips} <= {*TCGEN05} and jax.__version_info__ >= VERSION
    return ALIGN if serves else 1
