"""What quantizers write for the products of a trace."""

from __future__ import annotations

from jax_mx.facts.layouts import ROW_MAJOR, ScaleLayout
from jax_mx.products import amd, blackwell


def layout_for_trace() -> ScaleLayout:
    """The layout of scales that products of a trace read as they lie."""
    layouts = (module.layout_for_trace() for module in (blackwell, amd))
    return next((layout for layout in layouts if layout.is_tiled), ROW_MAJOR)
