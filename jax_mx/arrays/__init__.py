"""Quantized arrays, how arrays are viewed on the way to a kernel, and shardings of either."""
