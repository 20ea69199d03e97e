"""Formats: their numbers and layouts, how arrays lie in blocks, and blocks in integers.

`formats`, `layouts`, `directions` and `windows` are tables without JAX.
"""
