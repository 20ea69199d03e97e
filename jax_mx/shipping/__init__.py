"""The kernels that a wheel brings: their list, their build, and where each was executed."""
