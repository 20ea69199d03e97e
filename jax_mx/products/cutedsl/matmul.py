"""Products of floats x and codes W: the kernels of a binary."""

import dataclasses

from jax_mx.products.cutedsl.matmul_few import Few, Nibbles, Rings
from jax_mx.products.cutedsl.matmul_free import Free, PlainFree
from jax_mx.products.cutedsl.matmul_many import CodeStages, Warps
from jax_mx.products.cutedsl.matmul_vector import Direct
from jax_mx.products.cutedsl.products import Plain, ProductEntry
from jax_mx.quantizing.facts.product_kernels import DIRECT, FEWEST, ProductKernel

FEW = 16  # rows of x, up to which `Few` is faster


def entries(product: ProductKernel, arch: str, tile=None) -> list[ProductEntry]:
    """The entries of a product's binary, the fastest first."""
    plain = (PlainFree if product.free else Plain)(product, arch)
    if product.rows == DIRECT:  # what these do not serve, the next larger tiles do
        fewest = dataclasses.replace(product, rows=FEWEST, narrow=False)
        return [Direct(product, arch, tile), *entries(fewest, arch)]
    if product.rows <= FEW:
        entry_class = Few if product.formats[0].codes_per_byte == 1 else Nibbles
        tile = tile or Rings(**plain.tuned("Few"))
        kinds = ["one"] * (tile.split > 1) + ["groups", "any"]
        if product.activation:  # of the calls that chains make: no groups, whole blocks
            return [entry_class(product, arch, kinds[0], tile)]
    else:
        entry_class = Free if product.free else Warps
        tile = tile or CodeStages(**plain.tuned("Warps"))
        kinds = ["one"] * (tile.split > 1) + ["shared"] * tile.share + ["groups"]
        kinds += ["any"] * (not product.free)
    return [*(entry_class(product, arch, which, tile) for which in kinds), plain]
