"""`concatenate`, `stack` and `swapaxes` of MXArrays, as `jax.numpy` has them of arrays."""

from collections.abc import Iterable, Sequence

from jax_mx.formats.checks import axis_of, shown
from jax_mx.quantizing import indexing, metadata
from jax_mx.quantizing.mxarray import MXArray, checked


def concatenate(arrays: Sequence[MXArray], axis: int = 0) -> MXArray:
    """Joins arrays one behind the other, as `jnp.concatenate` does.

    Args:
      arrays: equal in `format`, `axis`, `block`, `window` and both layouts. Their shapes differ at
        most in the length of `axis`.
      axis: any axis; blocks stay whole.

    Returns:
      An `MXArray` in the layouts of the arrays. Whole tiles are joined as they are. If an array
      before the last one ends inside a tile, scales are taken out of their tiles and put into new
      ones.

    Raises:
      TypeError: one is not an `MXArray`.
      ValueError: there are no arrays, or one of these fields or another length differs.
    """
    return _joined("concatenate", arrays, axis)


def stack(arrays: Sequence[MXArray], axis: int = 0) -> MXArray:
    """Joins arrays of one shape along a new axis, as `jnp.stack` does.

    Args:
      arrays: of one shape, and equal in `format`, `axis`, `block`, `window` and both layouts.
      axis: the new axis of the result.

    Returns:
      An `MXArray` of one dimension more.

    Raises:
      TypeError: one is not an `MXArray`.
      ValueError: there are no arrays, they differ, or square blocks would leave the last two axes.
    """
    op = "stack"
    operands = _alike(op, arrays)
    for i, q in enumerate(operands):
        if q.shape != operands[0].shape:
            raise ValueError(
                f"{op}: array {i} has the shape {q.shape}, array 0 {operands[0].shape}; "
                "they must agree"
            )
    at = axis_of(op, axis, operands[0].ndim + 1) + operands[0].ndim + 1
    index = (*(slice(None),) * at, None)
    return _joined(op, [indexing.indexed(op, q, index) for q in operands], at)


def swapaxes(q: MXArray, axis1: int, axis2: int) -> MXArray:
    """The array with two axes swapped; blocks run along the same elements.

    Args:
      q: an `MXArray`.
      axis1: an axis; with square blocks both axes, or none, belong to the last two.
      axis2: another axis.

    Returns:
      An `MXArray` in the layouts of q, whose `axis` follows its blocks: `q.mT` of one with axis -1
      has axis -2. It dequantizes to what q dequantizes to, with the axes swapped.

    Raises:
      TypeError: q is not an `MXArray`, or an axis not an int.
      ValueError: an axis out of range, or a result that cannot lie in q's layouts.
    """
    op = "swapaxes"
    return checked(op, "q", q).swapaxes(axis1, axis2)


def _alike(op: str, arrays: Sequence[MXArray]) -> list[MXArray]:
    """The arrays, which agree in all static fields and in rank."""
    if isinstance(arrays, MXArray):
        raise TypeError(f"{op}: it takes a list of MXArrays, got one MXArray")
    if not isinstance(arrays, Iterable) or getattr(arrays, "ndim", 1) == 0:
        raise TypeError(f"{op}: it takes a list of MXArrays, got {shown(arrays)}")
    operands = [checked(op, f"array {i}", q) for i, q in enumerate(arrays)]
    if not operands:
        raise ValueError(f"{op}: it takes one array at least, got none")
    for i, q in enumerate(operands):
        first = metadata.fields_of(operands[0])
        metadata.require_same(op, f"array {i}", metadata.fields_of(q), first)
        if q.ndim != operands[0].ndim:
            raise ValueError(f"{op}: array {i} has rank {q.ndim}, array 0 {operands[0].ndim}")
    return operands


def _joined(op: str, arrays: Sequence[MXArray], axis: int) -> MXArray:
    operands = _alike(op, arrays)
    along = axis_of(op, axis, operands[0].ndim)
    for i, q in enumerate(operands):
        pairs = zip(q.shape, operands[0].shape, strict=True)
        if any(a != b for d, (a, b) in enumerate(pairs, -q.ndim) if d != along):
            raise ValueError(
                f"{op}: array {i} has the shape {q.shape}, array 0 {operands[0].shape}; they may "
                f"differ along axis {axis} alone"
            )
    return indexing.joined(op, operands, along)
