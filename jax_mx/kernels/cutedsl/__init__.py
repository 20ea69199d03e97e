"""NVIDIA kernels, in CuTeDSL."""
