"""Kernels of products for NVIDIA, in CuTeDSL."""
