"""Microscaling (MX) quantization for JAX at the speed of memory."""

from jax_mx.adapters.params import quantize_params as quantize_params
from jax_mx.adapters.quantized import Candidate as Candidate
from jax_mx.adapters.quantized import quantized as quantized
from jax_mx.collectives.moves import all_gather as all_gather
from jax_mx.collectives.moves import all_to_all as all_to_all
from jax_mx.collectives.moves import ppermute as ppermute
from jax_mx.collectives.moves import reshard as reshard
from jax_mx.experts.moe import moe as moe
from jax_mx.formats.formats import CEIL as CEIL
from jax_mx.formats.formats import EVEN as EVEN
from jax_mx.formats.formats import FLOOR as FLOOR
from jax_mx.formats.formats import MXFP4_E2M1 as MXFP4_E2M1
from jax_mx.formats.formats import MXFP6_E2M3 as MXFP6_E2M3
from jax_mx.formats.formats import MXFP6_E3M2 as MXFP6_E3M2
from jax_mx.formats.formats import MXFP8_E4M3 as MXFP8_E4M3
from jax_mx.formats.formats import MXFP8_E5M2 as MXFP8_E5M2
from jax_mx.formats.formats import RCEIL as RCEIL
from jax_mx.formats.formats import Format as Format
from jax_mx.formats.formats import Scaling as Scaling
from jax_mx.formats.layouts import BLOCKED_128X4 as BLOCKED_128X4
from jax_mx.formats.layouts import ROW_MAJOR as ROW_MAJOR
from jax_mx.formats.layouts import ROW_MAJOR_VALUES as ROW_MAJOR_VALUES
from jax_mx.formats.layouts import SHUFFLED_16X16 as SHUFFLED_16X16
from jax_mx.formats.layouts import SHUFFLED_32X8 as SHUFFLED_32X8
from jax_mx.formats.layouts import ScaleLayout as ScaleLayout
from jax_mx.formats.layouts import ValueLayout as ValueLayout
from jax_mx.io import gpt_oss as gpt_oss
from jax_mx.io.checkpoints import from_checkpoint as from_checkpoint
from jax_mx.io.checkpoints import load_safetensors as load_safetensors
from jax_mx.io.checkpoints import save_safetensors as save_safetensors
from jax_mx.io.packing import pack_mxfp6 as pack_mxfp6
from jax_mx.io.packing import unpack_mxfp6 as unpack_mxfp6
from jax_mx.io.published import load_checkpoint as load_checkpoint
from jax_mx.launch import DISABLE_EXPORT_CHECKS as DISABLE_EXPORT_CHECKS
from jax_mx.norms.rms_norm import Normed as Normed
from jax_mx.norms.rms_norm import rms_norm as rms_norm
from jax_mx.products import lowering as lowering  # rules that primitives of products need
from jax_mx.products.can_multiply import can_multiply as can_multiply
from jax_mx.products.choices import Choice as Choice
from jax_mx.products.dot_general import dot_general as dot_general
from jax_mx.products.dot_general import einsum as einsum
from jax_mx.products.dot_general import matmul as matmul
from jax_mx.products.gathering import gather_weight as gather_weight
from jax_mx.products.groups import Groups as Groups
from jax_mx.products.mlp import mlp as mlp
from jax_mx.products.operand import QuantizedWeight as QuantizedWeight
from jax_mx.products.oracle import mx_matmul_reference as mx_matmul_reference
from jax_mx.products.ragged_dot import ragged_dot as ragged_dot
from jax_mx.products.recipes import BF16 as BF16
from jax_mx.products.recipes import MXFP4 as MXFP4
from jax_mx.products.recipes import MXFP8 as MXFP8
from jax_mx.products.recipes import MXFP8_HYBRID as MXFP8_HYBRID
from jax_mx.products.recipes import MXFP8_ROWS as MXFP8_ROWS
from jax_mx.products.recipes import MXFP8_WINDOWS as MXFP8_WINDOWS
from jax_mx.products.recipes import Product as Product
from jax_mx.products.recipes import Recipe as Recipe
from jax_mx.products.recipes import mxfp4_backward as mxfp4_backward
from jax_mx.products.tuning import Explanation as Explanation
from jax_mx.products.tuning import autotune as autotune
from jax_mx.products.tuning import explain as explain
from jax_mx.products.weights import quantize_weights as quantize_weights
from jax_mx.quantizing.activations import Gated as Gated
from jax_mx.quantizing.fake_quantize import fake_quantize as fake_quantize
from jax_mx.quantizing.frozen import combine as combine
from jax_mx.quantizing.frozen import partition as partition
from jax_mx.quantizing.gated import Activated as Activated
from jax_mx.quantizing.gated import gated as gated
from jax_mx.quantizing.joining import concatenate as concatenate
from jax_mx.quantizing.joining import stack as stack
from jax_mx.quantizing.joining import swapaxes as swapaxes
from jax_mx.quantizing.mxarray import MXArray as MXArray
from jax_mx.quantizing.mxarray import dequantize as dequantize
from jax_mx.quantizing.preprocessing import Hadamard as Hadamard
from jax_mx.quantizing.preprocessing import Stochastic as Stochastic
from jax_mx.quantizing.preprocessing import hadamard as hadamard
from jax_mx.quantizing.quantize import quantize as quantize
from jax_mx.quantizing.quantize import quantize_both as quantize_both
from jax_mx.quantizing.quantizers import CHECKPOINT_NAME as CHECKPOINT_NAME
from jax_mx.quantizing.support import is_supported as is_supported
from jax_mx.quantizing.windows import align as align
from jax_mx.version import __version__ as __version__


def __dir__() -> list[str]:
    """The public names, without the rooms that importing them leaves here."""
    return [n for n, x in globals().items() if getattr(x, "__name__", "") != f"{__name__}.{n}"]
