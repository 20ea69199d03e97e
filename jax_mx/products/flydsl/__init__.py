"""Kernels of products for AMD, in FlyDSL."""
