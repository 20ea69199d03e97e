"""AMD kernels, in FlyDSL."""
