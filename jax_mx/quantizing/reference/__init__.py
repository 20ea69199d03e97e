"""The oracle, in plain jnp: kernels match it bit for bit, and "xla" is it."""

from jax_mx.formats.blocks import amax_of as amax_of
from jax_mx.formats.blocks import dequantize as dequantize
from jax_mx.formats.blocks import flipped as flipped
from jax_mx.formats.blocks import float32_bits as float32_bits
from jax_mx.formats.blocks import hadamard as hadamard
from jax_mx.formats.blocks import noise as noise
from jax_mx.formats.blocks import one_nan as one_nan
from jax_mx.formats.blocks import over_windows as over_windows
from jax_mx.formats.blocks import pack as pack
from jax_mx.formats.blocks import quantize as quantize
from jax_mx.formats.blocks import rescaled as rescaled
from jax_mx.formats.blocks import rows_of as rows_of
from jax_mx.formats.blocks import saturates as saturates
from jax_mx.formats.blocks import seeds as seeds
from jax_mx.formats.blocks import times as times
from jax_mx.formats.blocks import unpack as unpack
from jax_mx.formats.blocks import widened as widened
from jax_mx.quantizing.reference.activations import derivative as derivative
from jax_mx.quantizing.reference.activations import gated as gated
from jax_mx.quantizing.reference.activations import gated_exactly as gated_exactly
from jax_mx.quantizing.reference.activations import gated_gradient as gated_gradient
from jax_mx.quantizing.reference.activations import halves as halves
from jax_mx.quantizing.reference.activations import joined as joined
from jax_mx.quantizing.reference.activations import sums_of as sums_of
