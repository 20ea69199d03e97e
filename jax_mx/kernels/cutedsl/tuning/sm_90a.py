"""Measured on an H200, in microseconds.

benchmarks/sweep.py measures and writes rows. Where a row compares kernels that differ in more than
their tile, they were timed alike, candidate after candidate in one run.

The first figure is for floats of (8, 7168, 7168), the second, where there is one, for
(65536, 8192); rows that took other shapes say so. bf16, f16 and f32 are the floats' dtypes. "Tiles"
are those of scales. "Kept" means that loads, and stores of scales, leave the L2 cache last: see the
rows of "keep".
"""

CHIP = "NVIDIA H200"

ROWS = [
    # ---- quantize: rows that are normed; (threads, kept, rows), and (down, across, each, lag) ---
    {
        # Sums of float32 rows are float64.
        "kernel": "quantize.Rows",
        "where": {"itemsize": 4},
        "value": {"threads": 256, "kept": 4, "rows": 2},
        "date": "2026-11-23",
        "measured": [
            "(16384, 7168), f32 to MXFP8: (256, 4, 2) 163.8 to 164.7, (128, 4, 1) 177.2,",
            "(256, 4, 1) 193.7 to 194.9, (256, 4, 3) 232.9, (256, 2, 2) 253.9, (128, 4, 2) 254.5,",
            "(512, 4, 2) 279.2",
        ],
    },
    {
        # What decides is how many bytes of x a multiprocessor waits for at once.
        "kernel": "quantize.Rows",
        "where": {},
        "value": {"threads": 128, "kept": 4, "rows": 2},
        "date": "2026-11-23",
        "measured": [
            "(16384, 7168), bf16 to MXFP8: (128, 4, 2) 91.1 (0.934 of the copy), (256, 4, 2) 98.7,",
            "(256, 4, 1) 101.1, (128, 4, 1) 115.5; loads that leave L2 first: (128, 4, 1)",
            "101.2, (256, 4, 2) 102.7; (65536, 7168): (256, 4, 1) 385.9, (128, 4, 1) 411.9",
        ],
    },
    {
        # Those of two warps side by side spill registers.
        "kernel": "quantize.NormedTiled",
        "where": {"window": "256"},
        "value": {"down": 8, "across": 1, "each": 2, "lag": 3},
        "date": "2026-11-23",
        "measured": [
            "(16384, 7168), bf16 to MXFP8: second_transposed (8, 1, 2, 3) 129.8, lag 4 136.8,",
            "(8, 1, 4, 3) 143.1, (8, 2, 2, 2), which spills, 149.8",
        ],
    },
    {
        # With a shorter lag tiles wait for factors; with a longer one x has left the L2 cache.
        "kernel": "quantize.NormedTiled",
        "where": {},
        "value": {"down": 4, "across": 2, "each": 2, "lag": 4},
        "date": "2026-11-23",
        "measured": [
            "(16384, 7168), bf16 to MXFP8: both_transposed (4, 2, 2, 4) 152.4 (0.748 of the copy),",
            "not kept 159.0, lag 1 184.9, 2 177.4, 8 168.0; (4, 4, 4, 4) 158.9,",
            "(8, 2, 4, 3) 169.4, (4, 4, 2, 3) 172.7, (4, 2, 4, 6) 174.1, (4, 2, 1, 4) 177.3,",
            "(8, 2, 2, 2) 180.6;",
            "MXFP4 (4, 2, 2, 4) 164.8, not kept at first 161.3;",
            "second_transposed (4, 2, 2, 4) 123.2, lag 8 134.2, (8, 2, 2, 2) 147.7;",
            "(65536, 7168): both_transposed (4, 2, 2, 4) 588.7, lag 8 666.4, (8, 2, 2, 2) 698.8;",
            "2026-11-25, (16384, 7168): lag 4 151.2, lag 5 150.3; values of rows by way of shared",
            "memory, too, 164.6. The way between the halves of L2, which x takes twice, is busy",
            "for 91 %",
        ],
    },
    # ---- quantize: blocks along the last axis; (threads, elements, unroll) ---
    {
        # Rows that are picked; with two steps a thread waits once for the numbers of both.
        "kernel": "quantize.Flat",
        "where": {"source": "rows"},
        "value": {"threads": 256, "elements": 16, "unroll": 2},
        "date": "2026-11-23",
        "measured": [
            "(16384, 7168), 15 of 16 rows there, bf16 to MXFP8, of 32 blocks across: (256, 16, 2)",
            "82.0, (128, 16, 1) 83.2, (256, 16, 1) 84.5, (512, 16, 1) 86.9;",
            "of 64: (256, 32, 1) 81.8, (256, 16, 2) 81.9, (512, 16, 1) 90.9; of 8: (512, 16, 1) 88",
        ],
    },
    {
        "kernel": "quantize.Flat",
        "where": {"source": "gated"},
        "value": {"threads": 256, "elements": 16, "unroll": 1},
        "date": "2026-11-23",
        "measured": [
            "(16384, 4096), bf16 to MXFP8: (256, 16, 1) 79.9, (128, 16, 1) 80.2, (256, 32,",
            "1) 80.8,",
            "(128, 16, 2) 80.9, (512, 16, 1) 81.0, (256, 16, 2) 81.7, not kept 91.5, (256,",
            "8, 2) 93.6",
        ],
    },
    {
        "kernel": "quantize.Flat",
        "where": {},
        "value": {"threads": 512, "elements": 16, "unroll": 1},
        "date": "2026-11-20",
        "measured": [
            "96 candidates: bf16 285.7 (best 285.4), f16 285.7 (285.2), f32 467.9 (467.6)",
            "Nothing that keeps 32 to 256 bytes a thread in flight is further than 1 % behind.",
            "32 elements a thread are: their 64-byte strides cost a fifth (340)",
        ],
    },
    {
        # Arithmetic takes longer than memory: a thread that has a whole block spends less on where
        # things lie, and one that has two waits less.
        "kernel": "quantize.Flat, preprocessed",
        "where": {"itemsize": 2},
        "value": {"threads": 64, "elements": 32, "unroll": 2},
        "date": "2026-11-22",
        "measured": [
            "bf16, by 1, 2, 3 and 4 blocks a thread:",
            "h16 295, 264, 256; h32 318, 294, 291; sr 305, 279, 274; h16_sr 381, 357, 351",
            "4 blocks are slower than 3",
            "scales in tiles, by 2 and 3: h16 288, 296; sr 298, 295; h16_sr 373, 404",
            "32 and 128 threads are the same",
            "from coalesced loads, by way of shared memory: 313",
            "with floats that are cut to bf16 before their largest is found: h16 253, but sr 287",
            "and second_transposed h16 381 (365 as it is)",
        ],
    },
    {
        # A whole block a thread would wait for strides of 128 bytes: 502.
        "kernel": "quantize.Flat, preprocessed",
        "where": {"itemsize": 4},
        "value": {"threads": 128, "elements": 16, "unroll": 2},
        "date": "2026-11-22",
        "measured": [
            "f32 (128, 16, 2) h16 419, h32 420, h64 443, sr 454, h16_sr 455",
            "f32 (512, 16, 1) h16 419, h32 427, h64 458, sr 454, h16_sr 511",
        ],
    },
    # ---- quantize: forms with the second-to-last axis; (down, across, band, below) ---
    # What decides is which bytes a thread block writes side by side. Bytes reach memory in pieces
    # of 32 and lines of 128; a piece of a few bytes costs as much as a whole one. So transposed
    # values want tall tiles, scales along rows want wide ones, and row-major scales of both
    # directions cannot have both. Two tiles one after the other per thread block are slower in all
    # forms (both: 451 and more).
    # A tile, or a cluster's tiles, have whole windows. Where that leaves the tile of blocks by
    # themselves, windows take no longer: bf16 to MXFP8, window 128 and 32, in the same run:
    # both_transposed (8, 2) 428 and 428, second_transposed (8, 2, band 64) 295 and 294, second (4,
    # 4) 283 and 285, square 280 and 282; last by shuffles 282 and 282, of 256 too.
    {
        "kernel": "quantize.Tiled",
        "where": {
            "source": "rows",
            "form": "both_transposed",
            "codes_per_byte": 2,
            "tiled_scales": True,
        },
        "value": {"down": 4, "across": 2},
        "date": "2026-11-23",
        "measured": ["(2, 2), faster without rows, spills registers in the unaligned entry"],
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
        "date": "2026-11-23",
        "measured": [
            "(16384, 7168), 15 of 16 rows there, bf16 to MXFP8: both_transposed (4, 2) 127.6,",
            "(4, 4) 128.4, (8, 2) 129.6, band 4 129.0, (2, 4) 129.5, (8, 4) 130.7, not kept 135.8;",
            "MXFP4 (4, 2) 109.3, band 8 110.8, (2, 4) 110.6, (8, 2) 123.1; without branches",
            "in loads",
            "(8, 2) 125.1, (4, 4) 125.6, (4, 2) 126.3, not kept 130.9, MXFP4 (4, 2) 101.0;",
            "second_transposed (4, 2) 90.8, (8, 2, band 64) 93.8, (8, 2) 94.6, (4, 4) 99.3",
        ],
    },
    {
        # The smaller tiles of others spill registers here.
        "kernel": "quantize.Tiled",
        "where": {"source": "rows", "form": "second_transposed", "aligned": False},
        "value": {"down": 8, "across": 2, "band": 64},
        "date": "2026-11-23",
        "measured": [
            "(16384, 7165), 15 of 16 rows there, bf16 to MXFP8: (8, 2, band 64) 143.1,",
            "band 1 142.6, (4, 2) 139.7",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gradient", "interleaved": True},
        "value": {"down": 4, "across": 2, "band": 16},
        "date": "2026-11-25",
        "measured": [
            "swiglu_interleaved_gradient, bf16 to MXFP8, (16384, 4096) and of 14336 columns:",
            "(4, 2, band 16) 191.4, 651.3; (4, 2) 186.9, 698.9; (2, 4) 195.4, 722.1; (4, 1) 198.6,",
            "750.3; (4, 4) 201.5, 726.4; (4, 1, band 16) 205.0, 722.7; (4, 4, band 16) 206.3,",
            "711.1; (2, 4, band 16) 222.1, 773.0",
        ],
    },
    {
        # Windows of 128 want as many columns, and rows, of gates and of ups.
        "kernel": "quantize.Tiled",
        "where": {"source": "gradient", "window": "128"},
        "value": {"down": 4, "across": 2, "band": 16},
        "date": "2026-11-26",
        "measured": [
            "swiglu_gradient, bf16 to MXFP8, (16384, 4096) and of 14336 columns:",
            "(4, 2, band 16) 217.1, 731.9; (4, 2) 225.1, 773.9; half of each vector of gates, half",
            "of ups, (4, 4) 216.8",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gradient", "codes_per_byte": 2},
        "value": {"down": 4, "across": 2, "band": 16},
        "date": "2026-11-26",
        "measured": [
            "swiglu_gradient, bf16 to MXFP4, (16384, 4096) and of 14336 columns:",
            "(4, 2, band 16) 208.8, 696.3; (4, 2) 210.0, 747.9; (2, 2) 213.7, 744.1; (2, 4, band",
            "16) 214.7, 716.8; (2, 2, band 16) 214.8, 731.3; (4, 1, band 16) 218.5, 749.5; half of",
            "each vector of gates, half of ups, (4, 4) 224.3",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gradient"},
        "value": {"down": 2, "across": 2, "band": 16},
        "date": "2026-11-26",
        "measured": [
            "swiglu_gradient, bf16 to MXFP8, (16384, 4096) and of 14336 columns:",
            "(2, 2, band 16) 204.3, 713.4; (2, 2) 202.0, 739.6; (4, 1) 206.5, 759.1; (4, 2) 224.8,",
            "782.8; (4, 1, band 16) 223.3, 781.2; (2, 1) 224.5, 823.5; (1, 2) 226.7, 810.2; not",
            "kept, (2, 2, band 16) 208.2, 741.0; two rows at a time, (2, 4, band 16) 215.6, 745.6,",
            "(4, 1, band 16) 209.2, 729.7; with sums of columns (2, 2, band 16) 220.2, 762.7,",
            "(4, 2) 215.5, 773.6; half of each vector of gates, half of ups, (2, 4, band 16)",
            "208.3, 724.3. Scales go to memory in pieces of 4 and of 2 bytes: without those of",
            "rows (2, 2) takes 196.4, without those of columns 188.7, without any 186.6; clusters",
            "of 2 below each other, which write columns' scales together, (2, 2, band 16) 202.4,",
            "697.8, of 4 210.9, 725.6",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"source": "gated", "window": "32", "codes_per_byte": 1, "tiled_scales": False},
        "value": {"down": 4, "across": 1},
        "date": "2026-11-23",
        "measured": [
            "swiglu, (16384, 4096), bf16 to MXFP8: both_transposed (4, 1) 108.8, band 4 108.7,",
            "band 16 109.6, (4, 2) 111.9; of 14336 columns 370.9, 384.1, 374.3, 373.1;",
            "second_transposed (4, 1) 91.3, band 64 92.7, (4, 2) 94.2",
        ],
    },
    {
        # (4, 2) spills registers of geglu_erf on sm_100f and sm_120f.
        "kernel": "quantize.Tiled",
        "where": {"source": "gated", "window": "32", "codes_per_byte": 1, "aligned": False},
        "value": {"down": 4, "across": 1},
        "date": "2026-11-23",
        "measured": [
            "swiglu, (16384, 4128), bf16 to MXFP8: both_transposed (4, 1) 114.8, (8, 1) 114.4,",
            "(4, 2) 118.3",
        ],
    },
    {
        # (4, 2) spills registers of gpt_oss in MXFP4, with scales in tiles.
        "kernel": "quantize.Tiled",
        "where": {"source": "gated", "activation": "gpt_oss", "aligned": False},
        "value": {"down": 4, "across": 1},
        "date": "2026-11-23",
        "measured": [
            "gpt_oss, (16384, 4128), bf16 to MXFP4: both_transposed (4, 1) 118.6, (4, 2) 115.7",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        # (4, 1) has no whole windows of 128; in MXFP4 it takes 108.9, (4, 2) 106.4.
        "where": {"source": "gated", "window": ("32", "128")},
        "value": {"down": 4, "across": 2},
        "date": "2026-11-23",
        "measured": [
            "(16384, 4096), bf16 to MXFP8: both_transposed (4, 1) 108.4, (2, 4) 110.0, (4,",
            "2) 111.7,",
            "band 4 111.9, not kept 113.6, (8, 2) 114.1, (4, 4) 114.9; MXFP4 (4, 2) 104.8;",
            "second_transposed (4, 1, band 64) 92.7, (4, 2) 94.1, (8, 2, band 64) 99.2",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"window": "256", "form": "both_transposed"},
        "value": {"down": 4, "across": 4, "below": 2},
        "date": "2026-11-26",
        "measured": [
            "bf16 (4, 4, below 2) 459 to 461, band 4 461, (8, 4) 479 to 482, (2, 8, below 4) 488,",
            "(2, 4, below 4) 502, (1, 4, below 8) 572; clusters of 2 x 2 tiles (4, 2) 506; a",
            "thread block that brings a later one's tile into the L2 cache: (4, 4, below 2) 484,",
            "(8, 4) 565; scales of columns written by both together, in longer pieces, 455;",
            "(427 of window 32); rows, (16384, 7168): 138.6, (8, 4) 138.5",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"window": "256", "form": "both"},
        "value": {"down": 8, "across": 4},
        "date": "2026-11-26",
        "measured": [
            "bf16 (8, 4) 432, (1, 4, below 8) 450, (2, 4, below 4) 451 to 460,",
            "(4, 4, below 2) 461; (403 of window 32); 32 warps are all that a multiprocessor has",
            "registers for, so that none load while others store",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"window": "256"},
        "value": {"down": 8, "across": 2, "band": 64},
        "date": "2026-11-22",
        "measured": [
            "second_transposed: bf16 (8, 2, band 64) 295, (8, 1) 300; (294 of window 32)",
            "second: bf16 (8, 2, band 1) 285, (8, 1) 285; (285 of window 32)",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"window": "128", "form": "both", "aligned": True},
        "value": {"down": 4, "across": 4},
        "date": "2026-11-22",
        "measured": ["bf16 (4, 4) 405; (4, 2) 413; (8, 2) 414; (4, 8) 421; (404 of window 32)"],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"window": "128", "form": ("both", "second"), "aligned": False},
        "value": {"down": 4, "across": 2},
        "date": "2026-11-23",
        "measured": [
            "unaligned rows, (8, 7168, 7165): second, bf16 (4, 2) 431, (4, 4) 443, (8, 2) 489",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both", "codes_per_byte": 2, "tiled_scales": False},
        "value": {"down": 1, "across": 4},
        "date": "2026-11-21",
        "measured": [
            "bf16 (1, 4) 299, 389; (2, 4) 313, 407; (1, 8) 314, 409; (1, 16) 432, 561",
            "f32 (1, 4) 479; (2, 4) 503; (1, 8) 507",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": ("both", "square"), "codes_per_byte": 2},
        "value": {"down": 4, "across": 2},
        "date": "2026-11-21",
        "measured": [
            "both, tiles: bf16 (4, 2) 323, 421; (2, 4) 329, 428; (4, 4) spills",
            "square: bf16 (4, 2) 233, 304; (1, 4), (2, 2) and (1, 8) the same",
        ],
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
        "date": "2026-11-21",
        "measured": ["tiles: bf16 (2, 2) 321, 421; (4, 2) 337, 438"],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both_transposed", "codes_per_byte": 2},
        "value": {"down": 4, "across": 2, "band": 8},
        "date": "2026-11-22",
        "measured": [
            "kept: bf16 (4, 2, band 8) 321, 421; band 4 323, 434; band 1 327, 442",
            "not kept: bf16 (4, 2, band 4) 334, 447; band 1 338, 456; band 64 337, 455;",
            "(8, 2) 367, 486; (2, 4) 412, 542; (2, 2) 431, 565",
        ],
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
        "date": "2026-11-21",
        "measured": ["unaligned rows, (8, 7168, 7165): (8, 1) 324; (8, 2) 402"],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "second_transposed", "itemsize": 2, "aligned": False},
        "value": {"down": 4, "across": 2},
        "date": "2026-11-23",
        "measured": [
            "unaligned rows, (8, 7168, 7165), tiles: bf16 (4, 2) 340, (8, 1) 335, (8, 2) 363",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both_transposed", "itemsize": 2},
        "value": {"down": 8, "across": 2},
        "date": "2026-11-22",
        "measured": [
            "kept: bf16 (8, 2) 428, 572, tiles 410, 543; band 4 429, 571; band 8 433, 577;",
            "(4, 4) 428, 573; (4, 2) 433",
            "not kept: bf16 (8, 2) 470, 622, tiles 420, 557; (4, 2) 481, 637, tiles 424, 565;",
            "(4, 4) 471, 624; bands of 2 and 4 are the same, of 16 and 64 slower",
            "What is left is the number of requests: a row's and a column's scales are one each,",
            "384 beside 512 of values",
            "2026-11-25, (16384, 7168), bf16 to e4m3 and e2m1 107.6, to e2m1 and e4m3, by its own",
            "row, 111.0, to e4m3 twice 125.5; values of rows by way of shared memory, too, 127.0.",
            "What is busy, 90 %, is the way between the two halves of L2 (ltcfabric2ltc); of XLA's",
            "x * 1.5 it is, 79 %",
            "2026-11-26: (8, 2) 426.5; without scales of rows 410, of columns 415, of both 401.5;",
            "two tiles beside each other by one thread block, which then writes their scales of",
            "rows in pieces twice as long, 1112, four 465; clusters whose thread blocks put scales",
            "into each other's shared memory and write them in longer pieces: 2 beside each other",
            "441.5, 4 437.5, (4, 2) in 2 x 2 436.9",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both_transposed"},
        "value": {"down": 4, "across": 2},
        "date": "2026-11-23",
        "measured": ["f32 (4, 2) 594.8, (8, 2) 591.1, (4, 4) 594.1"],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": ("second_transposed", "square_transposed"), "itemsize": 2},
        "value": {"down": 8, "across": 2, "band": 64},
        "date": "2026-11-21",
        "measured": [
            "second_transposed: bf16 (8, 2, band 64) 298, 401; band 4 300, 400; band 1 301, 402;",
            "(4, 2) 312, 423; (8, 1) 302, 404",
            "MXFP4: bf16 (8, 2, band 64) 240, 323; (8, 1, 64) 240, 330; (4, 2, 64) 247, 329",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": ("second_transposed", "square_transposed")},
        "value": {"down": 4, "across": 2, "band": 64},
        "date": "2026-11-21",
        "measured": [
            "second_transposed: f32 (4, 2, band 64) 472; (8, 2) 479, with band 64 471",
            "unaligned rows, (8, 7168, 7165): f32 (4, 2, band 64) 578",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both", "tiled_scales": False},
        "value": {"down": 1, "across": 8},
        "date": "2026-11-22",
        "measured": [
            "kept: bf16 (1, 8) 398, 519; (1, 16) 398, 519; (2, 8) 399, 521; (4, 4) 415",
            "not kept: bf16 (1, 16) 407, 529; (1, 8) 415, 539; (2, 8) 416, 541; (4, 4) 424, 553;",
            "(4, 2) 432, 562. f32 (1, 8) 574; (2, 4) 578; (4, 2) 585",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "both"},
        "value": {"down": 4, "across": 2},
        "date": "2026-11-21",
        "measured": [
            "tiles: bf16 (4, 4) 406, 528; (4, 2) 406, 529; (8, 2) 409, 532. f32 (4, 2) 574"
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "second", "aligned": False, "codes_per_byte": 2, "tiled_scales": True},
        "value": {"down": 4, "across": 4},
        "date": "2026-11-23",
        "measured": [
            "unaligned rows, (8, 7168, 7165): bf16 (4, 4) 335, (2, 4) 334, (4, 2) 349, (4, 8) 361;",
            "f16 (4, 4) 345, (4, 2) 353, (1, 8) 382",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"form": "second", "aligned": False},
        "value": {"down": 1, "across": 8},
        "date": "2026-11-21",
        "measured": [
            "unaligned rows, (8, 7168, 7165): bf16 (1, 8) 325, tiles 404; (2, 4) 346, tiles 408;",
            "(4, 2) 387, tiles 420",
            "f32 (1, 8) 622, tiles 684; (2, 4) 625, tiles 671; (4, 2) 677, tiles 691",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {"aligned": False},
        "value": {"down": 4, "across": 2},
        "date": "2026-11-23",
        "measured": [
            "square, (8, 7168, 7136): bf16 (4, 2) 284.7, (4, 4) 282.5, (1, 8) 280.6;",
            "f32 (4, 2) 463.6, (4, 4) 462.0",
        ],
    },
    {
        "kernel": "quantize.Tiled",
        "where": {},
        "value": {"down": 4, "across": 4},
        "date": "2026-11-21",
        "measured": [
            "second: bf16 (4, 4) 287, 374; (4, 2) 288, 376; (2, 8) 287, 373. f32 467; (4, 2) 469",
            "second, MXFP4: bf16 (4, 4) 236, 308; (4, 2) and (2, 4) the same",
        ],
    },
    # ---- quantize: the same forms, preprocessed; (down, across, band) ---
    {
        "kernel": "quantize.PreprocessedTiled",
        "where": {},
        "value": {"down": 2, "across": 2},
        "date": "2026-11-22",
        "measured": [
            "both_transposed, h16 of columns: (2, 2) 465, band 8 467; (4, 1) 564, band 8 491;",
            "(2, 1) 651",
            "both_transposed, sr of rows and h16_sr of columns: (2, 2) 755; (4, 1) 859",
            "both: (2, 2) 470; (1, 4) 464",
            "second_transposed, h16: (2, 2) 366; (4, 1) 374; (8, 1) 415; (4, 2) 425",
            "second, h16: (2, 2) 339; (4, 2) 348",
            "Along rows, behind a transpose by XLA, they took 1041, 741 and 832 with a slower Flat",
            "(321 for h16, not 264)",
            "2026-11-25, (16384, 7168), both_transposed, h16 of columns: e4m3 and e2m1 127.2, e2m1",
            "twice 136.8; both: e4m3 and e2m1 125.0; h16 of rows, e2m1 and e4m3 157.8, both 153.2",
        ],
    },
    # ---- dequantize: blocks along the last axis; (threads, elements, unroll) ---
    # 16 bytes of floats a thread and store: more would leave gaps between those of a warp.
    {
        "kernel": "dequantize.Flat",
        "where": {"itemsize": 2},
        "value": {"threads": 128, "elements": 8, "unroll": 2},
        "date": "2026-11-21",
        "measured": [
            "(8, 5120, 5120), (8, 7168, 7168) and (65536, 8192), bf16 (threads, unroll):",
            "(128, 2) 154.9, 302.3, 394.3; (64, 2) 155.3, 302.3, 394.2;",
            "(256, 2) 155.9, 302.7, 394.8; (512, 2) 156.6, 305.0, 397.9;",
            "(128, 3) 156.0, 303.8, 396.4; (128, 4) 156.0, 304.6, 397.1;",
            "(128, 1) 159.1, 311.9, 406.8; 16 elements 355 at the second shape",
            "Stores with .cs, .wt or .cg, or loads without L1, make no difference above 0.5 %.",
        ],
    },
    {
        "kernel": "dequantize.Flat",
        "where": {"itemsize": 4},
        "value": {"threads": 256, "elements": 4, "unroll": 4},
        "date": "2026-11-21",
        "measured": ["f32 (256, 4) 515; (256, 8) 532"],
    },
    # ---- dequantize: forms with the second-to-last axis; (down, across, depth, band) ---
    # Transposed floats that pass through shared memory as floats, not as codes: 329, 469; 346, 503.
    {
        "kernel": "dequantize.Tiled",
        "where": {
            "form": ("second_transposed", "square_transposed"),
            "aligned": True,
            "codes_per_byte": 2,
            "itemsize": 2,
        },
        "value": {"down": 4, "across": 1, "band": 64},
        "date": "2026-11-22",
        "measured": [
            "second_transposed: bf16 (4, 1, 8, 64) 319, 431, tiles 298, 399;",
            "(4, 2, 8, 64) 348, 463, tiles 313, 430; (8, 1, 8, 64) 332, 451;",
            "not ahead: 346, 466; (4, 2, 8, 64) 363, 491",
            "square_transposed: bf16 (4, 1, 8, 64) 277, 394; (4, 2, 8, 64) 286, 397;",
            "not ahead 307",
        ],
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {
            "form": ("last_transposed", "second_transposed", "square_transposed"),
            "aligned": True,
        },
        "value": {"down": 4, "across": 2, "band": 64},
        "date": "2026-11-22",
        "measured": [
            "last_transposed, kept: bf16 (4, 2, 8, 64) 303, 413, tiles 304, 413",
            "last_transposed, not kept: bf16 (4, 2, 8, 64) 310, 436; band 1 322, 453;",
            "(8, 1, 8, 64) 318, 445; (4, 1, 8, 64) 319, 458. f32 (4, 2, 8) 548; (4, 1, 8) 558",
            "last_transposed, MXFP4: bf16 (4, 2, 8, 64) 262, 359, tiles 271, 363;",
            "(4, 1, 8, 64) 266, 370, tiles 266, 369",
            "second_transposed, kept: bf16 (4, 2, 8, 64) 309, 425, tiles 306, 416;",
            "(4, 1, 8, 64) 315, 439; bands 128 and 256 the same, 32 315, 446;",
            "(2, 2) and (2, 4) 336, 495",
            "second_transposed, not kept: bf16 (4, 1, 8, 64) 322, 466;",
            "(4, 2, 8, 64) 360, 465, tiles 312, 420; (8, 1, 8, 64) 367, 488.",
            "f32 (4, 2, 8) 550; (4, 1, 8) 559",
            "square_transposed, kept: bf16 (4, 2, 8, 64) 300, 408",
            "square_transposed, not kept: bf16 (4, 2, 8, 64) 308, 439; band 1 318, 450",
        ],
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {"form": "second", "aligned": False, "itemsize": 2},
        "value": {"down": 1, "across": 1},
        "date": "2026-11-22",
        "measured": [
            "unaligned rows, (8, 4128, 2881) and (8, 7168, 7165), across of `Shifted`:",
            "bf16 1 76.0, 321; 2 79.7, 331; 3 103, 423; two blocks of rows a lane 106, 421",
            "with floats that go through shared memory and are written by words: bf16 106, 419",
        ],
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {"form": "second", "aligned": False},
        "value": {"down": 1, "across": 3},
        "date": "2026-11-22",
        "measured": [
            "unaligned rows, the same shapes: f32 1 131, 561; 2 128, 546; 3 124, 530",
            "with floats that go through shared memory and are written by words: f32 139, 601",
        ],
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {"form": "last_transposed", "itemsize": 4, "aligned": False},
        "value": {"down": 8},
        "date": "2026-11-23",
        "measured": [
            "unaligned rows, (8, 7168, 7165), (down, band): f32 (8, 1) 566 to 571, (8, 64) 623,",
            "(4, 1) 703; depth 4 783",
        ],
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {
            "form": ("last_transposed", "second_transposed", "square_transposed"),
            "aligned": False,
        },
        "value": {"down": 8, "band": 64},
        "date": "2026-11-23",
        "measured": [
            "the same shape: second_transposed bf16 (8, 64) 490, (8, 1) 556 to 564, (4, 1) 717 to",
            "729, with two across 690; MXFP4 461, 572, 680; f32 914, 955, 1270, depth 4 1197;",
            "last_transposed bf16 490, 498, 540; square_transposed, (8, 7168, 7136): bf16 310,",
            "324; f32 547, 571",
        ],
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {"itemsize": 4},
        "value": {"down": 8, "depth": 4},
        "date": "2026-11-21",
        "measured": ["second, not kept: f32 (8, 1, 4) 513; (4, 1, 8) 516"],
    },
    {
        "kernel": "dequantize.Tiled",
        "where": {"form": ("second", "square")},
        "value": {"down": 2, "across": 2},
        "date": "2026-11-22",
        "measured": [
            "second, not kept: bf16 (2, 2, 8) 305, 395; (4, 1, 8) 309, 399; (2, 4, 8) 319, 415;",
            "(1, 4, 16) 313, 405",
            "second, MXFP4: bf16 (2, 2, 8) 258, tiles 297; (2, 4, 8) 257, 297; (4, 1, 8) 260, 298",
        ],
    },
    # ---- what leaves the cache last: of quantize x, and scales of both_transposed; codes ---
    # Figures are without and with. DRAM moves the same bytes. With evict_first, or no_allocate, for
    # what is not kept: 10 % slower. Scales of other forms than both_transposed make no difference.
    {
        # MXFP4 was 1 % slower so, but where scales are written in the smallest pieces.
        "kernel": "quantize.keep",
        "where": {"codes_per_byte": 2, "form": "both_transposed", "tiled_scales": False},
        "value": True,
        "date": "2026-11-22",
        "measured": ["both_transposed, MXFP4: 333 -> 323, 450 -> 434"],
    },
    {
        "kernel": "quantize.keep",
        "where": {"codes_per_byte": 2},
        "value": False,
        "date": "2026-11-23",
        "measured": ["second_transposed, MXFP4: 240.2 -> 239.9"],
    },
    {
        "kernel": "quantize.keep",
        "where": {},
        "value": True,
        "date": "2026-11-23",
        "measured": [
            "bf16: both_transposed 468 -> 428, 624 -> 571, in tiles 421 -> 410, 556 -> 543;",
            "both 407 -> 398, 529 -> 519; second_transposed 298 -> 292, 403 -> 391,",
            "f16 298 -> 295; last 285 -> 282, 372 -> 368; dequantize 302 -> 298, 395 -> 388",
        ],
    },
    {
        "kernel": "dequantize.keep",
        "where": {"codes_per_byte": 1},
        "value": True,
        "date": "2026-11-22",
        "measured": [
            "second 305 -> 299, 395 -> 389; last_transposed 310 -> 303, 419 -> 413;",
            "square_transposed 308 -> 300, 417 -> 408",
        ],
    },
    {
        "kernel": "dequantize.keep",
        "where": {},
        "value": False,
        "date": "2026-11-22",
        "measured": ["second, MXFP4, of an earlier build: 278 -> 326"],
    },
    # ---- products; benchmarks/products.py ---
    # "Dense" is (16384, 7168) x (7168, 4096), "grouped" 8 groups of the same rows, N 2048. Where
    # tiles have 256 rows, registers and shared memory leave no other choice of stages. "Llama" is
    # (16384, 8192) x (8192, 28672), of whose W the L2 cache does not hold a row of tiles. "(of N)":
    # of another GPU, on which the kernel before took N.
    {
        "kernel": "matmul.Warps",
        "where": {"free": True, "codes_per_byte": 2, "rows": 256},
        "value": {"stages": 3, "again": True, "strip": 16, "share": True},
        "date": "2026-11-23",
        "measured": [
            "MXFP4: dense, grouped, Llama, where cuBLAS takes 1197, -, 11217: 1262, 710, 11120;",
            "not shared, no strips 1286, 721, 11884; in turns too 1292, 727, 11354;",
            "MXFP4, (16384, 4096) x (4096, 7168), where cuBLAS takes 1187: 1287, not again 1296",
        ],
    },
    {
        "kernel": "matmul.Warps",
        "where": {"free": True, "codes_per_byte": 2},
        "value": {"stages": 5, "again": True},
        "date": "2026-11-23",
        "measured": ["the same 1651"],
    },
    {
        "kernel": "matmul.Warps",
        "where": {"free": True, "rows": 256},
        "value": {"stages": 5, "strip": 16, "share": True},
        "date": "2026-11-23",
        "measured": [
            "MXFP8: dense, grouped, Llama: 1244, 699, 11304; not shared, no strips 1284, 712,",
            "12055; no strips 1259, 705, 11752; again 1264, 708, 11265; in turns 1247, 699,",
            "11368; MXFP8, the same: 1316, again 1324; where lanes read two columns' codes at a",
            "time, not by ldmatrix: 1357, with 4 stages the same",
        ],
    },
    {
        "kernel": "matmul.Warps",
        "where": {"free": True},
        "value": {"stages": 7, "again": True},
        "date": "2026-11-23",
        "measured": ["the same 1687"],
    },
    {
        "kernel": "matmul.Warps",
        "where": {"codes_per_byte": 2, "rows": 256},
        "value": {"stages": 3, "again": True, "strip": 16, "share": True, "turns": True},
        "date": "2026-11-23",
        "measured": [
            "MXFP4, where cuBLAS takes 1194: dense, grouped, Llama: 1159, 650, 10508; a tile's",
            "first scales asked for when it begins 1173, 660, 10644. So asked for,",
            "dense, grouped, Llama, where cuBLAS takes 1197, -, 11217: 1174, 663, 10644;",
            "not in turns 1196, 676, 10902; nor shared, no strips 1250, 703, 11469; with swiglu",
            "1192, 673, 10757; 1214, 688, 10956; 1256, 706, 11663. Before: MXFP4: dense 1243 to",
            "1246, not again 1248 to 1260, grouped not again 703; with swiglu in the epilogue",
            "1259, not again 1263, by XLA 1305; MXFP8 with it 1310, again 1315, alone 1283, by",
            "XLA 1334; cuBLAS alone 1203, by XLA 1248",
        ],
    },
    {
        "kernel": "matmul.Warps",
        "where": {"rows": 256},
        "value": {"stages": 5, "strip": 16, "share": True, "again": True},
        "date": "2026-11-23",
        "measured": [
            "MXFP8, where cuBLAS takes 1194: dense, grouped: 1223, 686; a tile's first scales",
            "asked for when it begins 1243, 696. So asked for,",
            "dense, grouped, Llama, where cuBLAS takes 1197, -, 11217: 1248, 701, 11472;",
            "not again 1251, 701, 11495; in turns, which spills, 1266, 711, 11611; not shared, no",
            "strips 1262, 709, 12452; that by float32 instead of pairs of bfloat16 1281, 716,",
            "12591",
        ],
    },
    {
        # Sums that thread blocks share take the place of a stage of MXFP8.
        "kernel": "matmul.Warps",
        "where": {"codes_per_byte": 2, "rows": 128},
        "value": {"stages": 4, "split": 2},
        "date": "2026-11-24",
        "measured": [
            "MXFP4, K 7168: (128, N 4096), (128, N 16384), (256, N 4096), (512, N 4096); 8 groups",
            "of 128 rows, N 2048: split 2 31.2, 54.4, 32.1, 50.7; 105.5, split 4 35.4, 105.8,",
            "67.1, 99.8; not 49.9, 54.8, 50.1, 52.0; 105.5, with 5 stages 50.8, 55.0, -, -;",
            "106.4, again, in turns 51.5, 54.1, -, -; 105.4, shared 51.4, 55.8, -, -; 108.2",
        ],
    },
    {
        "kernel": "matmul.Warps",
        "where": {"codes_per_byte": 1, "rows": 128},
        "value": {"stages": 6, "split": 2, "again": True, "turns": True},
        "date": "2026-11-24",
        "measured": [
            "MXFP8, the same: split 2 32.1, 56.6, 33.1, 53.0; 109.9, split 4 36.3, 109.0, 68.5,",
            "104.7; not, 7 stages 52.6, 58.1, 52.6, 54.6; 110.3",
        ],
    },
    {
        "kernel": "matmul.Few",
        "where": {"rows": 8, "codes_per_byte": 2},
        "value": {"stages": 2, "resident": 3, "split": 2, "warps": 4, "grouped": (4, 4)},
        "date": "2026-11-24",
        "measured": [
            "M 8, N 4096 and 16384; 128 experts, 512 rows, (2880, 2880) and (7168, 2048):",
            "2 stages 11.3, 25.4; 204, 327; 3 resident of groups 11.3, 25.4; 212, 329; 5 spills;",
            "3 stages 11.4, 25.7; 211, 342. With 3: 11.3, 25.7; 210, 344; 2 resident, 8 warps",
            "11.2, 28.1; 210, 343; 4 stages, 4 resident 11.9, 33.4; 243, 374; 5 resident of",
            "groups 351, 564;",
            "codes cut in two 12.0, 29.3; 228, 377; the kernel before 11.6, 31.3; 245, 376.",
            "What bounds groups is what it takes to make floats of codes: Nsight Compute has ALUs",
            "busy for 61 % of the time, issue slots for 68, memory for 53. Of 2880 elements the",
            "last 128 codes of a row are half empty, a fifteenth of all",
        ],
    },
    {
        "kernel": "matmul.Few",
        "where": {"rows": 16, "codes_per_byte": 2},
        "value": {"stages": 4, "resident": 2, "split": 2, "warps": 4},
        "date": "2026-11-23",
        "measured": [
            "M 16, N 4096 and 16384; 128 experts, 1536 rows, (7168, 2048): 14.0, 32.1; 416 (cuBLAS",
            "bf16 18.4, 60.4); 6 stages 14.9, 34.7; 442; 8 stages 16.1, 42.8; 540; 6 stages, 3",
            "resident 15.0, 36.3; 598; 4 resident spills; codes cut in two 14.3, 36.4; 457;",
            "the kernel before 13.6, 45.1; 504",
        ],
    },
    {
        "kernel": "matmul.Few",
        "where": {"rows": 8},
        "value": {"stages": 2, "resident": 2, "split": 2},
        "date": "2026-11-24",
        "measured": [
            "MXFP8, M 8, N 4096 and 16384; 128 experts, 512 rows, (2880, 2880) and (7168, 2048):",
            "2 stages 12.9, 33.2; 272, 468; 3 resident of groups 12.9, 33.3; 292, 493; 4 warps,",
            "4 resident 16.6, 33.9; 275, 469; 3 stages 13.0, 35.0; 278, 480. With 3:",
            "13.1, 35.6; 279, 484; 4 warps where there are groups 282, 502; 4 everywhere",
            "13.8, 38.0; 281, 506; the kernel before 12.7, 36.4; 276, 484",
        ],
    },
    {
        "kernel": "matmul.Few",
        "where": {"rows": 16},
        "value": {"stages": 3, "resident": 2, "split": 2, "ahead": False},
        "date": "2026-11-23",
        "measured": [
            "MXFP8, M 16, N 4096 and 16384; 128 experts, 1536 rows, (7168, 2048): 15.6, 42.4; 568;",
            "4 warps where there are groups 598; 4 everywhere 17.1, 45.6; 588;",
            "x ahead, 6 stages, 1 resident 17.0, 46.3; split 4 22.8, 55.5;",
            "the kernel before 15.7, 49.2; 554",
        ],
    },
    {
        "kernel": "matmul.Warps",
        "where": {"rows": 64},
        "value": {"stages": 8, "split": 2},
        "date": "2026-11-22",
        "measured": [
            "M 64, N 4096 and 16384: split 2 27.0, 55.1; split 4 30.9, 99.6;",
            "not split 49.3 at 16384",
        ],
    },
    {
        "kernel": "matmul_fp8.Windows",
        "where": {"tiles": True},
        "value": {"stages": 4, "strip": 16, "turns": True},
        "date": "2026-11-23",
        "measured": [
            "x 1x128, W 128x128: dense, grouped, Llama, where cuBLAS in bfloat16 takes 1197, -,",
            "11217: two thread blocks 775, 436, 6131; one 789, 398, 7116; two and not in turns",
            "806 (of 843), 450; one, no strips, no turns 864, 427, 8241; two beside each other,",
            "which share x, 791, 400, 6838, without strips 788, 399, 8505; x 1x256: two 712, 400,",
            "5866, not in turns 712, 398, 6283; one 723, 363, 6246, not in turns 734, 370, 6301;",
            "no strips 743, 371, 8068; sharing x 738, 373, 6136",
        ],
    },
    {
        "kernel": "matmul_fp8.Windows",
        "where": {},
        "value": {"stages": 4, "strip": 16},
        "date": "2026-11-23",
        "measured": [
            "rows: dense, grouped, Llama: two thread blocks 667, 373, 5742, in turns 658 (of",
            "657), -, 5625 (of 5370); one 689, 343, 5971; no strips 689, 342, 7040; sharing x",
            "680, 346, 5701; 1x128 both: 981, 490, 8865; no strips 960, 480, 9982; in turns 981,",
            "490; two thread blocks 960 (of 948), 546, in turns the same",
        ],
    },
    {
        "kernel": "wgrad_fp8.Windows",
        "where": {},
        "value": {"stages": 4},
        "date": "2026-11-23",
        "measured": [
            "16384 rows in 8 groups, (7168, 4096) and (2048, 7168): 1x128 992, 513; 1x256 850, 437",
        ],
    },
    {
        "kernel": "wgrad.Transposed",
        "where": {},
        "value": {"rows": 128, "columns": 256, "stages": 4, "strip": 8, "cluster": 2},
        "date": "2026-11-23",
        "measured": [
            "16384 rows; in 8 groups (7168, 4096) and (2048, 7168), in 32 of 126 to 4036 rows",
            "(7168, 2048), in one (7168, 4096): 1269, 646, 809, 1187;",
            "strip 0 1258, 658, 797, 1190;",
            "not in clusters 1291, 658, 820, 1200, strip 0 1290, 683, 807, 1219;",
            "tiles of 256x128 1313, 664, 834, 1201; of 128x128 1468, 678, 877, 1260;",
            "Pallas 1432, 744, 1131; cuBLAS, of all rows 1174, 610, 607, 1174",
        ],
    },
]
