"""Runs AMD kernels on a CPU. Needs what the extra `emulator` brings."""

from jax_mx.launch.emulation import emulate as emulate
