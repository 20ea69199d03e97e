"""MXArray: a quantized array."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats import FORMATS, Format
from jax_mx.layouts import SCALE_LAYOUTS, ScaleLayout


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales"),
    meta_fields=("format", "axis", "scale_layout"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class MXArray:
    """Blocks of small floats that share a scale each. A pytree with the leaves values and scales.

    Attributes:
      values: the elements' codes, of `format.storage`; the logical shape, but with the block axis
        divided by `format.codes_per_byte` (2 for MXFP4).
      scales: float8_e8m0fnu. Row-major: the logical shape with the block axis divided by 32. In a
        tiled layout: (..., row tiles, column tiles, bytes of a tile), see `ScaleLayout.shape`.
      format: what the codes mean.
      axis: the axis that blocks run along, negative, so that it survives vmap.
      scale_layout: where the scale of a block lies.
    """

    values: jax.Array
    scales: jax.Array
    format: Format
    axis: int
    scale_layout: ScaleLayout

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that was quantized."""
        shape = list(self.values.shape)
        shape[self.axis] *= self.format.codes_per_byte
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.values.ndim

    @property
    def dtype(self) -> np.dtype:
        """Of the values as they are stored: a float8 type, or uint8 for formats below 8 bits."""
        return self.format.storage

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales together."""
        return self.values.size + self.scales.size

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.bfloat16, **options) -> jax.Array:
        """See `jax_mx.dequantize`."""
        from jax_mx.ops import dequantize  # ops builds MXArrays

        return dequantize(self, dtype, **options)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("an MXArray is two arrays; take .values and .scales, or .dequantize()")


# So that exported programs may take and return MXArrays. Formats and layouts go by name.
jax.export.register_pytree_node_serialization(
    MXArray,
    serialized_name="jax_mx.MXArray",
    serialize_auxdata=lambda aux: json.dumps([aux[0].name, aux[1], aux[2].name]).encode(),
    deserialize_auxdata=lambda text: (
        lambda format, axis, layout: (FORMATS[format], axis, SCALE_LAYOUTS[layout])
    )(*json.loads(text)),
)
