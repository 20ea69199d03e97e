"""What bytes mean and where they lie: tables without JAX, which the kernels' build reads too."""
