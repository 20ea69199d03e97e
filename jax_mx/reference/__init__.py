"""The oracle, in plain jnp: kernels match it bit for bit, and "xla" is it."""

from jax_mx.reference.activations import (
    derivative as derivative,
)
from jax_mx.reference.activations import (
    gated as gated,
)
from jax_mx.reference.activations import (
    gated_exactly as gated_exactly,
)
from jax_mx.reference.activations import (
    gated_gradient as gated_gradient,
)
from jax_mx.reference.activations import (
    halves as halves,
)
from jax_mx.reference.activations import (
    joined as joined,
)
from jax_mx.reference.activations import (
    sums_of as sums_of,
)
from jax_mx.reference.blocks import (
    amax_of as amax_of,
)
from jax_mx.reference.blocks import (
    dequantize as dequantize,
)
from jax_mx.reference.blocks import (
    flipped as flipped,
)
from jax_mx.reference.blocks import (
    float32_bits as float32_bits,
)
from jax_mx.reference.blocks import (
    hadamard as hadamard,
)
from jax_mx.reference.blocks import (
    noise as noise,
)
from jax_mx.reference.blocks import (
    one_nan as one_nan,
)
from jax_mx.reference.blocks import (
    over_windows as over_windows,
)
from jax_mx.reference.blocks import (
    pack as pack,
)
from jax_mx.reference.blocks import (
    quantize as quantize,
)
from jax_mx.reference.blocks import (
    rescaled as rescaled,
)
from jax_mx.reference.blocks import (
    rows_of as rows_of,
)
from jax_mx.reference.blocks import (
    saturates as saturates,
)
from jax_mx.reference.blocks import (
    seeds as seeds,
)
from jax_mx.reference.blocks import (
    times as times,
)
from jax_mx.reference.blocks import (
    unpack as unpack,
)
from jax_mx.reference.blocks import (
    widened as widened,
)
from jax_mx.reference.products import (
    amaxes as amaxes,
)
from jax_mx.reference.products import (
    matmul as matmul,
)
from jax_mx.reference.products import (
    matmul_fp8 as matmul_fp8,
)
from jax_mx.reference.products import (
    wgrad as wgrad,
)
from jax_mx.reference.products import (
    wgrad_fp8 as wgrad_fp8,
)
