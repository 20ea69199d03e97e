"""Nothing was measured on sm_120f: it takes the rows of sm_90a, none of whose tiles spills."""

from jax_mx.quantizing.kernels.cutedsl.tuning.sm_90a import ROWS as SM_90A

ROWS = SM_90A
