"""Nothing was measured on sm_89: it takes the rows of sm_90a, but where tiles spill registers.

It has no clusters of thread blocks.
"""

from jax_mx.quantizing.kernels.cutedsl.tuning.sm_90a import ROWS as SM_90A

ROWS = [
    {"kernel": "quantize.Tiled",
     "where": {"form": "both", "dtype": "bfloat16", "codes_per_byte": 2, "source": "rows",
         "window": "32", "aligned": False}, "value": {"down": 4, "across": 1},
     "why": "Larger tiles spill registers."},
    {"kernel": "quantize.Tiled",
     "where": {"form": "both_transposed", "dtype": "bfloat16", "codes_per_byte": 2,
         "activation": "swiglu", "interleaved": False, "source": "gated", "window": "32",
         "tiled_scales": True, "aligned": False}, "value": {"down": 4, "across": 1},
     "why": "(4, 2) spills registers, of gates and ups as two arrays."},
    {"kernel": "quantize.Tiled", "where": {"form": "both_transposed", "window": "256"},
     "value": {"down": 8, "across": 4}, "why": "(4, 4, below 2) wants clusters."},
    *SM_90A,
]  # fmt: skip
