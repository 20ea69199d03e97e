"""Quantizers: what a call asks, the arrays that it gives, sources of floats, and kernels."""
