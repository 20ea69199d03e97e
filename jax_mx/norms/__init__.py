"""`rms_norm`, all of it: the function, its definition, its source of floats and its kernels."""
