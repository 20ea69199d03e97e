"""Measured on an H200: sm_90a.jsonl has the figures, which benchmarks/sweep.py reads and writes."""

ROWS = [
    # ---- quantize: rows that are normed ---
    {
        "kernel": "quantize.Rows",
        "where": {"itemsize": 4},
        "value": {"threads": 256, "kept": 4, "rows": 2},
        "why": "Sums of float32 rows are float64.",
    },
    {
        "kernel": "quantize.Rows",
        "where": {},
        "value": {"threads": 128, "kept": 4, "rows": 2},
        "why": "The number of bytes of x that a multiprocessor waits for at once decides.",
    },
    {
        "kernel": "quantize.NormedTiled",
        "where": {"window": "256"},
        "value": {"down": 8, "across": 1, "each": 2, "lag": 3},
        "why": "Tiles of two warps side by side spill registers.",
    },
    {
        "kernel": "quantize.NormedTiled",
        "where": {},
        "value": {"down": 4, "across": 2, "each": 2, "lag": 4},
        "why": "Tiles wait for factors with a shorter lag; x has left L2 with a longer one.",
    },
    # ---- quantize: blocks along the last axis ---
    {
        "kernel": "quantize.WholeRows",
        "where": {"source": "gated"},
        "value": {"threads": 256, "kept": 8, "resident": 2},
        "why": "Gates and ups spill registers where more threads run.",
    },
    {
        "kernel": "quantize.WholeRows",
        "where": {},
        "value": {"threads": 512, "kept": 8, "resident": 2},
        "why": "Rows of 32768 bfloat16 stay in registers.",
    },
    {
        "kernel": "quantize.Flat",
        "where": {"source": "rows"},
        "value": {"threads": 256, "elements": 16, "unroll": 2},
        "why": "A thread that picks rows waits once for the numbers of two steps.",
    },
    {
        "kernel": "quantize.Flat",
        "where": {"source": "gated"},
        "value": {"threads": 256, "elements": 16, "unroll": 1},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "quantize.Flat",
        "where": {},
        "value": {"threads": 512, "elements": 16, "unroll": 1},
        "why": "Tiles that keep 32 to 256 bytes a thread in flight are within 1 %.",
    },
    {
        "kernel": "quantize.Flat, preprocessed",
        "where": {"itemsize": 2},
        "value": {"threads": 64, "elements": 32, "unroll": 2},
        "why": "Arithmetic takes longer than memory; a whole block a thread saves addresses.",
    },
    {
        "kernel": "quantize.Flat, preprocessed",
        "where": {"itemsize": 4},
        "value": {"threads": 128, "elements": 16, "unroll": 2},
        "why": "A whole block a thread would wait for strides of 128 bytes.",
    },
    # ---- quantize: forms with the second-to-last axis ---
    # The bytes that a thread block writes side by side decide. Bytes reach memory in pieces of 32
    # and lines of 128; a piece of a few bytes costs as much as a whole one. So transposed values
    # want tall tiles, scales along rows want wide ones, and row-major scales of both directions
    # cannot have both. Two tiles one after the other per thread block are slower in all forms.
    # A tile, or a cluster's tiles, have whole windows.
    {
        "kernel": "quantize.Tiled",
        "where": {
            "source": "rows",
            "form": "both_transposed",
            "codes_per_byte": 2,
            "tiled_scales": True,
        },
        "value": {"down": 4, "across": 2},
        "why": "Registers of an earlier build did not hold (2, 2) in the unaligned entry.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {
            "source": "rows",
            "form": ("both_transposed", "second_transposed"),
            "window": ("32", "128"),
            "aligned": True,
        },
        "value": {"down": 4, "across": 2},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "rows", "form": "second_transposed", "aligned": False},
        "value": {"down": 8, "across": 2, "band": 64},
        "why": "Registers of an earlier build did not hold smaller tiles.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gradient", "interleaved": True},
        "value": {"down": 4, "across": 2, "band": 16},
        "why": "A band of 16 gains more with 14336 columns than it loses with 4096.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gradient", "window": "128"},
        "value": {"down": 4, "across": 2, "band": 16},
        "why": "A window of 128 needs as many columns, and rows, of gates and of ups.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gradient", "codes_per_byte": 2},
        "value": {"down": 4, "across": 2, "band": 16},
        "why": "The tile is the fastest at both widths.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gradient"},
        "value": {"down": 2, "across": 2, "band": 16},
        "why": "A band of 16 gains more with 14336 columns than it loses with 4096.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gated", "window": "32", "codes_per_byte": 1, "tiled_scales": False},
        "value": {"down": 4, "across": 1},
        "why": "The tile is the fastest of those measured, or within 0.1 %.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gated", "window": "32", "codes_per_byte": 1, "aligned": False},
        "value": {"down": 4, "across": 1},
        "why": "(4, 2) is slower where it was measured.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gated", "activation": "gpt_oss", "aligned": False},
        "value": {"down": 4, "across": 1},
        "why": "(4, 2) spills registers of gpt_oss in MXFP4, with scales in tiles.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gated", "window": ("32", "128")},
        "value": {"down": 4, "across": 2},
        "why": "The tile (4, 1) has no whole windows of 128.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"window": "256", "form": "both_transposed"},
        "value": {"down": 4, "across": 4, "below": 2},
        "why": "Two thread blocks of a cluster are faster than one with a larger tile.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"window": "256", "form": "both"},
        "value": {"down": 8, "across": 4},
        "why": "A multiprocessor has registers for 32 warps, so that none load as others store.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"window": "256"},
        "value": {"down": 8, "across": 2, "band": 64},
        "why": "Windows of 256 take as long as blocks by themselves.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"window": "128", "form": "both", "aligned": True},
        "value": {"down": 4, "across": 4},
        "why": "The tile is the fastest of the tiles that have whole windows.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"window": "128", "form": ("both", "second"), "aligned": False},
        "value": {"down": 4, "across": 2},
        "why": "The tile is the fastest of the tiles that have whole windows.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both", "codes_per_byte": 2, "tiled_scales": False},
        "value": {"down": 1, "across": 4},
        "why": "The tile is the fastest of the wide tiles, which row-major scales along rows want.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": ("both", "square"), "codes_per_byte": 2},
        "value": {"down": 4, "across": 2},
        "why": "The tile is the fastest; (4, 4) spills registers of both directions.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {
            "form": "both_transposed",
            "codes_per_byte": 2,
            "tiled_scales": True,
            "itemsize": 2,
        },
        "value": {"down": 2, "across": 2},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both_transposed", "codes_per_byte": 2},
        "value": {"down": 4, "across": 2, "band": 8},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {
            "form": "second_transposed",
            "itemsize": 2,
            "aligned": False,
            "tiled_scales": False,
        },
        "value": {"down": 8, "across": 1},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "second_transposed", "itemsize": 2, "aligned": False},
        "value": {"down": 4, "across": 2},
        "why": "The tile is within 2 % of the fastest.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both_transposed", "itemsize": 2},
        "value": {"down": 8, "across": 2},
        "why": "The requests for scales, one a row and one a column, are what is left.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both_transposed"},
        "value": {"down": 4, "across": 2},
        "why": "The tile is within 1 % of the fastest.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": ("second_transposed", "square_transposed"), "itemsize": 2},
        "value": {"down": 8, "across": 2, "band": 64},
        "why": "The tile is the fastest of those measured, or within 0.3 %.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": ("second_transposed", "square_transposed")},
        "value": {"down": 4, "across": 2, "band": 64},
        "why": "The tile is within 0.3 % of the fastest.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both", "tiled_scales": False},
        "value": {"down": 1, "across": 8},
        "why": "Row-major scales along rows want wide tiles.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both"},
        "value": {"down": 4, "across": 2},
        "why": "The tile is within 0.2 % of the fastest.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "second", "aligned": False, "codes_per_byte": 2, "tiled_scales": True},
        "value": {"down": 4, "across": 4},
        "why": "The tile is the fastest in float16, and within 0.3 % in bfloat16.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "second", "aligned": False},
        "value": {"down": 1, "across": 8},
        "why": "The tile is the fastest, but in float32 with scales in tiles.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"aligned": False},
        "value": {"down": 4, "across": 2},
        "why": "The tile is within 1.5 % of the fastest.",
    },
    {
        "kernel": "quantize.Tiled",
        "where": {},
        "value": {"down": 4, "across": 4},
        "why": "All tiles that were measured are within 1 %.",
    },
    # ---- quantize: the same forms, preprocessed ---
    {
        "kernel": "quantize.PreprocessedTiled",
        "where": {},
        "value": {"down": 2, "across": 2},
        "why": "The tile is the fastest, or within 1.5 %.",
    },
    # ---- dequantize: blocks along the last axis ---
    # Stores with .cs, .wt or .cg, or loads without L1, make no difference.
    {
        "kernel": "dequantize.Flat",
        "where": {"itemsize": 2},
        "value": {"threads": 128, "elements": 8, "unroll": 2},
        "why": "16 bytes of floats a thread and store leave no gaps between a warp's threads.",
    },
    {
        "kernel": "dequantize.Flat",
        "where": {"itemsize": 4},
        "value": {"threads": 256, "elements": 4, "unroll": 4},
        "why": "A thread stores 16 bytes of floats at once, as of 16-bit floats.",
    },
    # ---- dequantize: forms with the second-to-last axis ---
    {
        "kernel": "dequantize.Tiled",
        "where": {
            "form": ("second_transposed", "square_transposed"),
            "aligned": True,
            "codes_per_byte": 2,
            "itemsize": 2,
        },
        "value": {"down": 4, "across": 1, "band": 64},
        "why": "In MXFP4 a tile that is one wide is the fastest.",
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {
            "form": ("last_transposed", "second_transposed", "square_transposed"),
            "aligned": True,
        },
        "value": {"down": 4, "across": 2, "band": 64},
        "why": "The tile is the fastest, or within 2 %.",
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {"form": "second", "aligned": False, "itemsize": 2},
        "value": {"down": 1, "across": 1},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {"form": "second", "aligned": False},
        "value": {"down": 1, "across": 3},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {"form": "last_transposed", "itemsize": 4, "aligned": False},
        "value": {"down": 8},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {
            "form": ("last_transposed", "second_transposed", "square_transposed"),
            "aligned": False,
        },
        "value": {"down": 8, "band": 64},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {"itemsize": 4},
        "value": {"down": 8, "depth": 4},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {"form": ("second", "square")},
        "value": {"down": 2, "across": 2},
        "why": "The tile is the fastest of those measured, or within 0.5 %.",
    },
    # ---- what leaves the cache last: of quantize x, and scales of both_transposed; codes ---
    # DRAM moves the same bytes. With evict_first, or no_allocate, for what is not kept, all forms
    # are slower. Scales of other forms than both_transposed make no difference.
    {
        "kernel": "quantize.keep",
        "where": {"codes_per_byte": 2, "form": "both_transposed", "tiled_scales": False},
        "value": True,
        "why": "MXFP4 gains only where scales are written in the smallest pieces.",
    },
    {
        "kernel": "quantize.keep",
        "where": {"codes_per_byte": 2},
        "value": False,
        "why": "Kept loads make no difference here.",
    },
    {
        "kernel": "quantize.keep",
        "where": {},
        "value": True,
        "why": "All forms are faster with kept loads.",
    },
    {
        "kernel": "dequantize.keep",
        "where": {"codes_per_byte": 1},
        "value": True,
        "why": "All forms are faster with kept loads.",
    },
    {
        "kernel": "dequantize.keep",
        "where": {},
        "value": False,
        "why": "MXFP4 is slower with kept loads.",
    },
    # ---- products ---
    {
        "kernel": "matmul.Warps",
        "where": {"free": True, "codes_per_byte": 2, "rows": 256},
        "value": {"stages": 3, "again": True, "strip": 16, "share": True},
        "why": "Registers and shared memory leave no other number of stages.",
    },
    {
        "kernel": "matmul.Warps",
        "where": {"free": True, "codes_per_byte": 2},
        "value": {"stages": 5, "again": True},
        "why": "No other tile was measured.",
    },
    {
        "kernel": "matmul.Warps",
        "where": {"free": True, "rows": 256},
        "value": {"stages": 5, "strip": 16, "share": True},
        "why": "Registers and shared memory leave no other number of stages.",
    },
    {
        "kernel": "matmul.Warps",
        "where": {"free": True},
        "value": {"stages": 7, "again": True},
        "why": "No other tile was measured.",
    },
    {
        "kernel": "matmul.Warps",
        "where": {"codes_per_byte": 2, "rows": 256},
        "value": {"stages": 3, "again": True, "strip": 16, "share": True, "turns": True},
        "why": "The tile in turns is the fastest of those measured.",
    },
    {
        "kernel": "matmul.Warps",
        "where": {"rows": 256},
        "value": {"stages": 5, "strip": 16, "share": True, "again": True},
        "why": "Turns spill registers.",
    },
    {
        "kernel": "matmul.Warps",
        "where": {"codes_per_byte": 2, "rows": 128},
        "value": {"stages": 4, "split": 2},
        "why": "Two thread blocks that share K are the fastest where tiles are few.",
    },
    {
        "kernel": "matmul.Warps",
        "where": {"codes_per_byte": 1, "rows": 128},
        "value": {"stages": 6, "split": 2, "again": True, "turns": True},
        "why": "Sums that thread blocks share take the place of a stage.",
    },
    {
        "kernel": "matmul.Few",
        "where": {"rows": 8, "codes_per_byte": 2},
        "value": {"stages": 2, "resident": 3, "split": 2, "warps": 4, "grouped": (4, 4)},
        "why": "The arithmetic that makes floats of codes bounds groups.",
    },
    {
        "kernel": "matmul.Few",
        "where": {"rows": 16, "codes_per_byte": 2},
        "value": {"stages": 4, "resident": 2, "split": 2, "warps": 4},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "matmul.Few",
        "where": {"rows": 8},
        "value": {"stages": 2, "resident": 2, "split": 2},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "matmul.Few",
        "where": {"rows": 16},
        "value": {"stages": 3, "resident": 2, "split": 2, "ahead": False},
        "why": "The tile is the fastest of those measured.",
    },
    {
        "kernel": "matmul.Warps",
        "where": {"rows": 64},
        "value": {"stages": 8, "split": 2},
        "why": "Two thread blocks that share K are faster with N 4096, and one is with N 16384.",
    },
    {
        "kernel": "matmul_fp8.Windows",
        "where": {"tiles": True},
        "value": {"stages": 4, "strip": 16, "turns": True},
        "why": "Turns gain, and so do strips, most of all with a wide W.",
    },
    {
        "kernel": "matmul_fp8.Windows",
        "where": {"window": "row"},
        "value": {"stages": 4, "strip": 16, "turns": True},
        "why": "Turns gain 2 to 4 % where power limits the clock, as in a training step.",
    },
    {
        "kernel": "matmul_fp8.Windows",
        "where": {},
        "value": {"stages": 4, "strip": 16},
        "why": "Turns make no difference to windows.",
    },
    {
        "kernel": "wgrad_fp8.Windows",
        "where": {},
        "value": {"stages": 4},
        "why": "No other tile was measured.",
    },
    {
        "kernel": "wgrad.Transposed",
        "where": {},
        "value": {"rows": 128, "columns": 256, "stages": 4, "strip": 8, "cluster": 2},
        "why": "The tile is within 2 % of the fastest everywhere.",
    },
]
