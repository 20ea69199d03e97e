"""Nothing was measured on sm_100f: it takes the rows of sm_90a, but where tiles spill registers."""

from jax_mx.quantizing.kernels.cutedsl.tuning.sm_90a import ROWS as SM_90A

ROWS = [
    {"kernel": "quantize.Tiled",
     "where": {"source": "gradient", "interleaved": True, "codes_per_byte": 2,
         "tiled_scales": True, "aligned": False}, "value": {"down": 4, "across": 1, "band": 16},
     "why": "(4, 2) spills registers."},
    *SM_90A,
]  # fmt: skip
