"""Launches kernels that CuTeDSL and FlyDSL compiled from JAX; knows nothing of MX. See README.md.

from jax_mx.launch import Kernel, emulate
"""

from jax_mx.launch.emulation import emulate as emulate
from jax_mx.launch.kernel import Kernel as Kernel
from jax_mx.launch.partition import DISABLE_EXPORT_CHECKS as DISABLE_EXPORT_CHECKS
