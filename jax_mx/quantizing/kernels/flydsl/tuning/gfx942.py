"""Nothing was measured on gfx942, as none was at hand: these values are reasoned, not found."""

ROWS = [
    # The side of the tiles of the other forms is no row: it follows from a wave's 32 rows and four
    # waves.
    {"kernel": "quantize.Flat", "where": {}, "value": {"waves": 4},
        "why": "A workgroup has a wave for each SIMD unit of a compute unit."},
    {
        # 8 rounds of a wave's rows of float32, 4 of others.
        "kernel": "quantize.Rows",
        "where": {},
        "value": {"waves": 4},
        "why": "8192 elements of a row stay in registers.",
    },
    {
        # Data that are read again have left the L2 caches (each part of the chip has one), but
        # not the 256 MB behind.
        "kernel": "quantize.NormedTiled",
        "where": {},
        "value": {"lag": 16},
        "why": "About 14 bands of 128 rows of 7168 columns are under way at once.",
    },
    {"kernel": "dequantize.Flat", "where": {}, "value": {"waves": 4},
        "why": "A workgroup has a wave for each SIMD unit of a compute unit."},
]  # fmt: skip
