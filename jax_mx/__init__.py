"""Microscaling (MX) quantization for JAX at the speed of memory."""

from jax_mx.array import MXArray as MXArray
from jax_mx.formats import CEIL as CEIL
from jax_mx.formats import EVEN as EVEN
from jax_mx.formats import FLOOR as FLOOR
from jax_mx.formats import MXFP4_E2M1 as MXFP4_E2M1
from jax_mx.formats import MXFP6_E2M3 as MXFP6_E2M3
from jax_mx.formats import MXFP6_E3M2 as MXFP6_E3M2
from jax_mx.formats import MXFP8_E4M3 as MXFP8_E4M3
from jax_mx.formats import MXFP8_E5M2 as MXFP8_E5M2
from jax_mx.formats import RCEIL as RCEIL
from jax_mx.formats import Format as Format
from jax_mx.formats import Scaling as Scaling
from jax_mx.layouts import BLOCKED_128X4 as BLOCKED_128X4
from jax_mx.layouts import ROW_MAJOR as ROW_MAJOR
from jax_mx.layouts import SHUFFLED_16X16 as SHUFFLED_16X16
from jax_mx.layouts import SHUFFLED_32X8 as SHUFFLED_32X8
from jax_mx.layouts import ScaleLayout as ScaleLayout
from jax_mx.layouts import ValueLayout as ValueLayout
from jax_mx.matmul import mx_matmul_reference as mx_matmul_reference
from jax_mx.ops import CHECKPOINT_NAME as CHECKPOINT_NAME
from jax_mx.ops import DISABLE_EXPORT_CHECKS as DISABLE_EXPORT_CHECKS
from jax_mx.ops import dequantize as dequantize
from jax_mx.ops import fake_quantize as fake_quantize
from jax_mx.ops import is_supported as is_supported
from jax_mx.ops import quantize as quantize
from jax_mx.ops import quantize_both as quantize_both
