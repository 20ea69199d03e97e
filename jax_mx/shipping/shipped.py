"""The short list of kernels that a wheel ships, `jax_mx/verified` records and tests run.

The list has what layers and recipes take, and quantizers as users call them. A variant that exists
but is not here is compiled when a call wants it, see launch/store.py.
"""

import itertools
from collections.abc import Iterable, Iterator

from jax_mx.formats.directions import BOTH, LAST, SECOND_TRANSPOSED
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2
from jax_mx.formats.windows import ROW, SQUARE
from jax_mx.launch.chips import ARCHS
from jax_mx.norms.source import NormSource
from jax_mx.quantizing.facts.product_kernels import (
    PRODUCT_ARCHS,
    PRODUCTS,
    Binary,
    ProductKernel,
    archs_of,
)
from jax_mx.quantizing.facts.sources import Source, X
from jax_mx.quantizing.facts.variants import KERNELS, OPERANDS, Variant, variants
from jax_mx.quantizing.sources.codes import CodesSource
from jax_mx.quantizing.sources.gated import ACTIVE, GatedSource
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.quantizing.sources.gated_pair import GatedPairSource
from jax_mx.quantizing.sources.rows import RowsSource

_TWO = (False, True)
# All that kernels have.
SOURCES: tuple[Source, ...] = (
    X,
    RowsSource(),
    *(CodesSource(format.name) for format in (MXFP8_E4M3, MXFP8_E5M2)),
    *(GatedSource(*fields) for fields in itertools.product(ACTIVE, _TWO, _TWO)),
    GatedPairSource(),
    *(GradientSource(*fields) for fields in itertools.product(ACTIVE, _TWO, _TWO)),
    *(NormSource(0.0, *fields) for fields in itertools.product(_TWO, _TWO)),
)


def existing(sources: Iterable[Source] = SOURCES) -> Iterator[Variant]:
    """All variants that exist with these sources."""
    for dsl in ARCHS:
        for op in KERNELS:
            for source in sources:
                yield from variants(dsl, op, source)


def ships(variant: Variant) -> bool:
    """Whether a variant that exists is on the list; of windows see `shipped_archs`."""
    formats, last, source = {*variant.formats}, variant.formats[-1], variant.source
    if variant.window == SQUARE:
        return False
    # MLPs have all gates first, gpt-oss' checkpoints have gates and ups by turns.
    if isinstance(source, GatedSource | GradientSource):
        if source.interleaved != (source.activation == "gpt_oss"):
            return False
    if variant.dtype != "bfloat16":  # weights in other floats
        rotated = variant.changes_elements or not variant.modes
        masters = variant.dtype == "float32" and variant.window == ROW
        plain = not source and (rotated or masters) and variant.form in OPERANDS
        return plain and formats in ({MXFP8_E4M3}, {MXFP4_E2M1})
    if last.bits == 6:  # weights and activations of inference
        return variant.form in (LAST, SECOND_TRANSPOSED) and not source
    if variant.changes_elements:  # recipes in MXFP4
        return variant.form in OPERANDS
    if not source:
        return variant.form != BOTH or variant.gives_floats or len(formats) == 1
    if MXFP8_E5M2 in formats:  # gradients
        of_tokens = isinstance(source, RowsSource | GradientSource)
        return of_tokens and len(formats) == 1 and variant.form in (*OPERANDS, BOTH)
    return variant.gives_floats or variant.form in OPERANDS


def product_ships(product: ProductKernel) -> bool:
    """Whether a kernel of products is on the list: of parts that of weights and activations.

    No recipe multiplies E5M2, which gradients have, by E5M2, and no weight that is trained has it.
    """
    formats = {*product.formats}
    is_of_gradients = formats == {MXFP8_E5M2} and (len(product.formats) == 2 or product.free)
    return not is_of_gradients and (not product.parted or formats == {MXFP8_E4M3})


SHIPPED: tuple[Variant, ...] = tuple(filter(ships, existing()))
BINARIES: tuple[Binary, ...] = (*SHIPPED, *filter(product_ships, PRODUCTS))


def shipped_archs(binary: Binary) -> tuple[str, ...]:
    """The archs that a binary of the list is shipped for.

    Windows are for products by FP8 tensor cores in our own kernels.
    """
    archs = archs_of(binary)
    if isinstance(binary, ProductKernel) or binary.window == BLOCK:
        return archs
    have = PRODUCT_ARCHS.get(binary.implementation, ())
    return tuple(arch for arch in archs if arch in have)
