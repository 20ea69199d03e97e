"""What an op costs, against a copy of the same bytes and against XLA: python -m benchmarks."""
