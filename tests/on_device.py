"""Kernels of variants on the device at hand, beside the reference there."""

import jax
from conftest import arch_here
from helpers import assert_same, call, operand, poison_memory

from jax_mx.launch.chips import ARCHS
from jax_mx.shipping.shipped import SHIPPED

# Kernels of sources are in their own tests, as tests/test_rows.py.
EACH = [v for v in SHIPPED if not v.source]
HERE = [v for v in EACH if arch_here() is None or arch_here() in ARCHS[v.implementation]]


def kernel(variant, **options):
    """The op through the variant's kernel, jitted."""
    return jax.jit(call(variant, variant.implementation, **options))


def check(variant, floats, **options):
    """The kernel gives the reference's bytes on the same device."""
    x = operand(variant, floats, **options)
    want = jax.block_until_ready(jax.jit(call(variant, "xla", **options))(x))
    poison_memory()
    got = kernel(variant, **options)(x)
    assert_same(got, want, f"{floats.shape} {variant.dtype} {options}")
