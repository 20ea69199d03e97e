"""The meaning and the places of bytes: tables without JAX, which the kernels' build reads too."""
