"""`python -m jax_mx`."""
