"""The tiles of kernels by arch: one table per arch, whose rows say why.

The tables stand in `cutedsl/tuning/` and `flydsl/tuning/`. A table is `ROWS`, a list of
dictionaries of literals:

    kernel  what the row is for: "quantize.Tiled", or another decision, as "quantize.keep"
    where   which entries: facts (see `facts_of`), each with the value or values wanted
    value   what is chosen: the fields of the kernel's tile, or True or False
    why     the reason, in one sentence

The first row whose kernel and facts fit an entry holds. The figures lie beside the table, in a file
of JSON lines, which `benchmarks/sweep.py` reads and writes and no kernel depends on.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from jax_mx.formats.formats import FLOAT_DTYPES
from jax_mx.formats.layouts import ROW_MAJOR, ScaleLayout
from jax_mx.quantizing.facts.product_kernels import Binary, ProductKernel


def facts_of(
    variant: Binary, layout: ScaleLayout = ROW_MAJOR, aligned: bool = True
) -> dict[str, Any]:
    """The facts of an entry that rows may ask for; a product's follow from its product alone."""
    if isinstance(variant, ProductKernel):
        return {
            "codes_per_byte": variant.formats[-1].codes_per_byte if variant.formats else 0,
            "rows": variant.rows,
            "window": variant.window,
            "tiles": variant.tiles,
            "free": variant.free,
            "narrow": variant.narrow,
            "activation": variant.activation,
        }
    return {
        "form": str(variant.form),
        "dtype": variant.dtype,
        "itemsize": FLOAT_DTYPES[variant.dtype].itemsize,
        "codes_per_byte": variant.formats[0].codes_per_byte,
        "tiled_scales": layout.is_tiled,
        "aligned": aligned,
        "window": str(variant.window),
        **variant.source.facts,
    }


def row_of(
    kernel: str, arch: str, variant: Binary, layout: ScaleLayout = ROW_MAJOR, aligned: bool = True
) -> Mapping[str, Any]:
    """The first row that fits.

    Raises:
      LookupError: the arch's table has no such row.
    """
    table = importlib.import_module(
        f"jax_mx.quantizing.kernels.{variant.implementation}.tuning.{arch}"
    )
    facts = facts_of(variant, layout, aligned)
    for row in table.ROWS:
        if row["kernel"] == kernel and has(row["where"], facts):
            return row
    raise LookupError(f"{table.__name__} has no row of {kernel} for {facts}")


def choose(
    kernel: str, arch: str, variant: Binary, layout: ScaleLayout = ROW_MAJOR, aligned: bool = True
) -> Any:
    """The value of the first row that fits; see `row_of`."""
    return row_of(kernel, arch, variant, layout, aligned)["value"]


def fits(
    kernel: str,
    tile: Mapping[str, Any],
    arch: str,
    variant: Binary,
    layout: ScaleLayout = ROW_MAJOR,
    aligned: bool = True,
) -> bool:
    """Whether registers hold a tile of CuTeDSL, as far as compilers said: see `SPILLS`."""
    from jax_mx.quantizing.kernels.cutedsl.tuning.spills import SPILLS

    facts = facts_of(variant, layout, aligned)
    return not any(
        row["kernel"] == kernel
        and arch in row["archs"]
        and has(row["where"], facts)
        and has(row["tile"], tile)
        for row in SPILLS
    )


def has(where: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether the facts have the values that a row wants."""
    return all(
        facts.get(name) in (wanted if isinstance(wanted, tuple) else (wanted,))
        for name, wanted in where.items()
    )
