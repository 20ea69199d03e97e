"""Nothing was measured on gfx950: it takes the rows of gfx942, which were not measured either."""

from jax_mx.quantizing.kernels.flydsl.tuning.gfx942 import ROWS as ROWS
