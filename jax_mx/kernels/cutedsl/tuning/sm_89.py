"""Nothing was measured on sm_89: it takes the rows of sm_90a, but where tiles spill registers."""

from jax_mx.kernels.cutedsl.tuning.sm_90a import ROWS as SM_90A

CHIP = ""

ROWS = [
    {
        "kernel": "quantize.Tiled",
        "where": {
            "form": "both",
            "dtype": "bfloat16",
            "codes_per_byte": 2,
            "source": "rows",
            "window": "32",
            "aligned": False,
        },
        "value": {"down": 4, "across": 1},
        "date": "2026-11-24",
        "measured": ["larger tiles spill registers"],
    },
    *SM_90A,
]
