"""Launches kernels that CuTeDSL and FlyDSL compiled from JAX; knows nothing of MX."""
