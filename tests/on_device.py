"""Kernels of variants on the device at hand, beside the reference there."""

import jax
from conftest import arch_here
from helpers import assert_bits_equal, assert_same_array, call, operand, poison_memory

import jax_mx
from jax_mx.launch.chips import ARCHS
from jax_mx.shipping.shipped import SHIPPED

# Those of rows have tests of their own, tests/test_rows.py.
EACH = [v for v in SHIPPED if not v.source]
HERE = [v for v in EACH if arch_here() is None or arch_here() in ARCHS[v.implementation]]


def kernel(variant, **options):
    """The op through the variant's kernel, jitted."""
    return jax.jit(call(variant, variant.implementation, **options))


def assert_same(got, want, what=""):
    """Two lists of arrays are equal in every byte."""
    for g, w in zip(got, want, strict=True):
        (assert_same_array if isinstance(w, jax_mx.MXArray) else assert_bits_equal)(g, w, what)


def check(variant, floats, **options):
    """The kernel gives the reference's bytes on the same device."""
    x = operand(variant, floats, **options)
    want = jax.block_until_ready(jax.jit(call(variant, "xla", **options))(x))
    poison_memory()
    got = kernel(variant, **options)(x)
    assert_same(got, want, f"{floats.shape} {variant.dtype} {options}")
