"""Sources make the floats that are quantized: a module for each, see quantizing/facts/sources.py.

A module imports no JAX when it is imported, as kernels' builds read these classes too; methods that
compute import it when they are called.
"""
