"""Nothing was measured on sm_100f: it takes the rows of sm_90a, but where tiles spill registers."""

from jax_mx.kernels.cutedsl.tuning.sm_90a import ROWS as SM_90A

ROWS = [
    {
        "kernel": "quantize.Tiled",
        "where": {
            "form": "both_transposed",
            "dtype": "float16",
            "codes_per_byte": 1,
            "activation": "geglu",
            "source": "gated",
            "window": "32",
            "aligned": False,
        },
        "value": {"down": 4, "across": 2},
        "why": "(4, 1) spills registers.",
    },
    *SM_90A,
]
