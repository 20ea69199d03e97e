"""Nothing was measured on sm_120f: it takes the rows of sm_90a."""

from jax_mx.kernels.cutedsl.tuning.sm_90a import ROWS as ROWS

CHIP = ""
