"""Tiles that registers do not hold, as compilers showed; `tuning.fits` reads them.

    kernel  the same as in a row of a table;
    archs   the archs that the tile was compiled for;
    where   the facts of the entries that spilled, as in a row of a table;
    tile    the fields that such tiles share.

Sweeps leave such tiles out, and no row of a table has one. No kernel depends on this file.
"""

from typing import Any


def _gated(activation: str, dtype: str, codes_per_byte: int, **more: bool) -> dict[str, Any]:
    """The unaligned entries that quantize what an activation makes, both ways."""
    return {
        "source": "gated",
        "form": "both_transposed",
        "window": "32",
        "activation": activation,
        "dtype": dtype,
        "codes_per_byte": codes_per_byte,
        "aligned": False,
        **more,
    }


SPILLS: list[dict[str, Any]] = [
    {"kernel": "quantize.NormedTiled", "archs": ("sm_90a",), "where": {"window": "256"},
     "tile": {"down": 8, "across": 2}},
    {"kernel": "quantize.Tiled", "archs": ("sm_90a",),
     "where": {"source": "", "form": "both", "window": "32", "dtype": "bfloat16",
         "codes_per_byte": 2, "tiled_scales": True, "aligned": False},
     "tile": {"down": 4, "across": 4}},
    {"kernel": "quantize.Tiled", "archs": ("sm_90a",),
     "where": _gated("gpt_oss", "bfloat16", 2, interleaved=False, tiled_scales=True),
     "tile": {"down": 4, "across": 2}},
    {"kernel": "quantize.Tiled", "archs": ("sm_100f",),
     "where": {"source": "gradient", "activation": "gpt_oss", "interleaved": True,
         "codes_per_byte": 2, "tiled_scales": True, "aligned": False},
     "tile": {"down": 4, "across": 2}},
    {"kernel": "quantize.Tiled", "archs": ("sm_80",),
     "where": _gated("gpt_oss", "float16", 1, tiled_scales=True), "tile": {"down": 4, "across": 1}},
    {"kernel": "quantize.Tiled", "archs": ("sm_89",),
     "where": _gated("swiglu", "bfloat16", 2, interleaved=False, tiled_scales=True),
     "tile": {"down": 4, "across": 2}},
    {"kernel": "quantize.Tiled", "archs": ("sm_80",),
     "where": {"source": "gated", "form": "second_transposed", "window": "32",
         "activation": "gpt_oss", "dtype": "bfloat16", "codes_per_byte": 1, "tiled_scales": True,
         "aligned": False}, "tile": {"down": 4, "across": 1}},
    {"kernel": "quantize.Tiled", "archs": ("sm_80",),
     "where": {"source": "", "form": "second", "window": "32", "dtype": "float16",
         "codes_per_byte": 2, "tiled_scales": True, "aligned": False},
     "tile": {"down": 4, "across": 4}},
    {"kernel": "quantize.Tiled", "archs": ("sm_80",),
     "where": {"source": "", "form": "both_transposed", "window": "row", "dtype": "bfloat16",
         "codes_per_byte": 1, "tiled_scales": True, "aligned": True},
     "tile": {"down": 8, "across": 2}},
    {"kernel": "quantize.Tiled", "archs": ("sm_89",),
     "where": {"source": "rows", "form": "both", "window": "32", "dtype": "bfloat16",
         "codes_per_byte": 2, "aligned": False}, "tile": {"down": 4, "across": 2}},
    {"kernel": "matmul.Warps", "archs": ("sm_90a",),
     "where": {"codes_per_byte": 1, "rows": 256, "free": False}, "tile": {"turns": True}},
    {"kernel": "matmul.Few", "archs": ("sm_90a",), "where": {"codes_per_byte": 2, "rows": 8},
     "tile": {"grouped": ((5, 4),)}},
    {"kernel": "matmul.Few", "archs": ("sm_90a",), "where": {"codes_per_byte": 2, "rows": 16},
     "tile": {"resident": 4, "warps": 4}},
]  # fmt: skip
