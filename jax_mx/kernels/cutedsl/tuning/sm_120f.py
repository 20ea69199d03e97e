"""Nothing was measured on sm_120f: it takes the rows of sm_90a, but where tiles spill registers."""

from jax_mx.kernels.cutedsl.tuning.sm_90a import ROWS as SM_90A

CHIP = ""

ROWS = [
    {
        "kernel": "quantize.Tiled",
        "where": {
            "form": "both_transposed",
            "codes_per_byte": 1,
            "source": "gradient",
            "window": "128",
            "aligned": False,
        },
        "value": {"down": 8, "across": 4},
        "date": "2026-11-25",
        "measured": ["(4, 4) spills registers"],
    },
    *SM_90A,
]
