"""Layouts that products of a trace read as they lie."""

from collections.abc import Mapping

import jax

from jax_mx.facts.chips import TCGEN05, chips_of
from jax_mx.facts.layouts import (
    BLOCKED_128X4,
    ROW_MAJOR,
    SHUFFLED_16X16,
    SHUFFLED_32X8,
    Layout,
    ScaleLayout,
)
from jax_mx.lowering import targets
from jax_mx.products import tcgen05

# By chip, where scales lie that a matrix core takes without another pass; elsewhere in rows.
_LAYOUTS: Mapping[str, ScaleLayout] = {
    **dict.fromkeys(TCGEN05, BLOCKED_128X4),
    "gfx950": SHUFFLED_32X8,
}


def layout_for_trace() -> ScaleLayout:
    """The layout of scales that products of a trace read as they lie.

    On a mesh they stay in rows: shards of tiles are whole tiles.
    """
    layouts = {_LAYOUTS.get(chip, ROW_MAJOR) for chip in targets.chips_of_trace(())}
    if len(layouts) != 1 or not jax.sharding.get_abstract_mesh().empty:
        return ROW_MAJOR
    (layout,) = layouts
    is_old = layout == BLOCKED_128X4 and jax.__version_info__ < tcgen05.VERSION
    return ROW_MAJOR if is_old else layout


def tiles_for_trace() -> tuple[Layout, ...]:
    """The tiles that products of a trace read as they lie; on a mesh none."""
    chips = {*targets.chips_of_trace(())}
    if chips and chips <= {*chips_of("flydsl")} and jax.sharding.get_abstract_mesh().empty:
        return (SHUFFLED_32X8, SHUFFLED_16X16)
    return (layout_for_trace(),)
