"""From a product to a code object and the facts that launch it. Needs no GPU, ROCm or torch."""

from __future__ import annotations

import functools
from typing import Any

from jax_mx.launch.flydsl import compile_entries, prepared
from jax_mx.quantizing.facts.product_kernels import ProductKernel


def compile_variant(product: ProductKernel, arch: str) -> tuple[bytes, dict[str, Any]]:
    """The code object of `product` for `arch`, and its manifest entry but for names and hashes.

    A process that did this cannot import CuTeDSL.

    Raises:
      RuntimeError: the compiler gave no code object, or its kernels are not the entries asked for.
    """
    with prepared(arch):
        from jax_mx.products.flydsl import products

        every = products.entries(product, arch)
        return compile_entries(
            product.name, arch, every, functools.partial(products.launches, every)
        )
