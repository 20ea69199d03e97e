"""Nothing was measured on sm_80: it takes the rows of sm_90a, but where tiles spill registers."""

from jax_mx.quantizing.kernels.cutedsl.tuning.sm_90a import ROWS as SM_90A

ROWS = [
    {"kernel": "quantize.Tiled",
     "where": {"form": "second", "dtype": "float16", "codes_per_byte": 2, "source": "",
         "window": "32", "aligned": False}, "value": {"down": 4, "across": 2},
     "why": "(4, 4) spills registers, with scales in tiles of shuffled blocks."},
    {"kernel": "quantize.Tiled",
     "where": {"form": "both_transposed", "dtype": "float16", "codes_per_byte": 1,
         "activation": "gpt_oss", "source": "gated", "window": "32", "aligned": False},
     "value": {"down": 4, "across": 2}, "why": "(4, 1) spills registers, with scales in tiles."},
    {"kernel": "quantize.Tiled",
     "where": {"form": "both_transposed", "codes_per_byte": 1, "source": "", "window": "row",
         "tiled_scales": True, "aligned": True}, "value": {"down": 4, "across": 2},
     "why": "(8, 2) spills registers."},
    {"kernel": "quantize.Tiled",
     "where": {"form": "second_transposed", "dtype": "bfloat16", "codes_per_byte": 1,
         "activation": "gpt_oss", "source": "gated", "window": "32", "tiled_scales": True,
         "aligned": False}, "value": {"down": 4, "across": 2},
     "why": "(4, 1) spills registers, where floats are given, too."},
    *SM_90A,
]  # fmt: skip
