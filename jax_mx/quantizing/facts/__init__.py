"""Tables of what kernels compute, without JAX."""
