"""From a product to a cubin and the facts that launch it. Needs no GPU and no driver."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from jax_mx.launch.cutedsl import compile_entries
from jax_mx.products.cutedsl import products
from jax_mx.quantizing.facts.product_kernels import ProductKernel


def compile_variant(
    product: ProductKernel, arch: str, **tuning: Any
) -> tuple[bytes, dict[str, Any]]:
    """The cubin of `product` for `arch`, and its manifest entry but for names and hashes.

    `tuning` replaces the rows of the tuning table (benchmarks/sweep.py).

    Raises:
      RuntimeError: the compiler gave no cubin, or its kernels are not the entries asked for.
    """
    module = importlib.import_module(f"jax_mx.products.cutedsl.{product.op}")
    every = module.entries(product, arch, **tuning)
    return compile_entries(product.name, arch, every, functools.partial(products.launches, every))
