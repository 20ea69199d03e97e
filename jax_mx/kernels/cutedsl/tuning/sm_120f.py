"""Nothing was measured on sm_120f: it takes the rows of sm_90a, but where tiles spill registers."""

from jax_mx.kernels.cutedsl.tuning.sm_90a import ROWS as SM_90A

CHIP = ""

ROWS = [
    *SM_90A,
]
