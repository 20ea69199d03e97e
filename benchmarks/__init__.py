"""Measurements: python -m benchmarks NAME; runner.py says how to add one."""
