"""One table per arch, see `jax_mx/quantizing/kernels/tuning.py`."""
