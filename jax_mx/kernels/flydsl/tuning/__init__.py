"""One table per arch, see `jax_mx/kernels/tuning.py`."""
