"""Executes AMD code objects on a CPU, for tests. Needs the extra `emulator`: jax-mx[emulator]."""
