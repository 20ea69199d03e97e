"""One call of a quantizer: from a caller's arrays to its primitive's operands, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_mx import reference
from jax_mx.arrays.checks import array_of, shown
from jax_mx.arrays.sharding import is_explicit, spec_of
from jax_mx.arrays.views import Viewed
from jax_mx.facts.sources import ADDED, RMS_NORM, ROWS, Source, X
from jax_mx.facts.windows import lengths_of
from jax_mx.lowering import quantizers
from jax_mx.lowering.plan import Plan
from jax_mx.ops.activations import Gated, made, made_of_parts, weights_of
from jax_mx.ops.mxarray import MXArray
from jax_mx.ops.placing import placed, require_kernel
from jax_mx.ops.planning import Options, planned
from jax_mx.ops.preprocessing import Data, block_data_of


@dataclasses.dataclass(frozen=True)
class Norm:
    """What is quantized is what `rms_norm` gives.

    A quantizer that gets one as its activation also returns the factors of rows, in a tuple.

    Attributes:
      weight: float32 (K,).
      eps: a float32.
      residual: what is added to x before, like it, or None. With it, the sum comes behind the
        factors.
      floats: whether the floats come last.
    """

    weight: jax.Array
    eps: float
    residual: jax.Array | None = None
    floats: bool = False

    @property
    def source(self) -> tuple[Source, tuple]:
        """What makes the floats, and its operands beside x."""
        source, operands = RMS_NORM, (self.weight,)
        if self.residual is not None:
            source, operands = ADDED, (self.residual, self.weight)
        return dataclasses.replace(source, floats=self.floats), operands


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithFloats:
    """What is quantized is what `gated` gives of gates and ups.

    A quantizer that gets one as its activation also returns these floats, in a tuple, last.
    """

    own: Gated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithSums:
    """What is quantized is the gradient of gates and ups.

    A quantizer that gets one as its activation also returns sums of the gradient's columns, float32
    (..., T / 32, 2 K), see `reference.sums_of`, in a tuple, last.
    """

    own: Gated


def called(
    op: str,
    asked: Options,
    x: Any,
    data: tuple[Data, ...],
    rows: Any,
    activation: Any,
) -> tuple[Any, ...]:
    """Checks and plans a call, and runs it; returns what `quantized` does.

    Args:
      op: "quantize" or "quantize_both".
      asked: the caller's options.
      x: see `quantize`; so are rows and activation.
      data: of each direction, see `preprocessing.data_of`.
      rows: see `quantize`.
      activation: see `quantize`.

    Raises:
      TypeError, ValueError, NotImplementedError: see `quantize`.
    """
    x, like, source, other = made_of(op, x, rows, activation)
    if source:
        eps = getattr(activation, "eps", 0.0)
        asked = dataclasses.replace(asked, source=source, eps=eps)
    plan = planned(op, like, asked)
    require_kernel(plan)
    return tuple(quantized(x, data, other, plan=plan))


@partial(jax.jit, static_argnames="plan")
def quantized(
    x: jax.Array, data: tuple[Data, ...], other: tuple[jax.Array, ...] = (), *, plan: Plan
) -> list[Any]:
    """One MXArray per result, for an x that the plan fits; of a norm, then the factors of rows.

    Of a result that comes out dequantized the floats, which lie as x does.

    Under jit, so that eager calls are quick, and calls with one plan share one function of the
    program that they are in, with all its attributes.
    """
    operands, viewed, on_views, beside = operands_of(x, data, other, plan)
    outs, found = iter(quantizers.quantize(operands, on_views)), []
    for i, (result, format) in enumerate(zip(plan.view.results, plan.formats, strict=True)):
        if plan.preprocessing[i].dequantized:
            found.append(viewed.from_floats(next(outs)))
            continue
        axes = plan.axes if plan.op == "quantize" else (plan.axes[-1 - i],)
        pair = next(outs), next(outs)
        (values, scales), axis = viewed.from_arrays(pair, result, axes, format, plan.transpose)
        fields = (format, axis, plan.scale_layout, plan.block, plan.value_layouts[i])
        found.append(MXArray(values, scales, *fields, plan.preprocessing[i].window))
    return [*found, *beside, *outs]


def made_of(op: str, x: Any, rows: Any, activation: Any) -> tuple[Any, Any, Source, tuple]:
    """Returns x, an array like the floats, what makes them, its other operands.

    Args:
      op: for messages.
      x: of a caller. It comes back, an array of JAX, where a kernel may make the floats of it, else
        the floats do.
      rows: see `quantize`; so is activation.
      activation: see `quantize`.

    Raises:
      TypeError, ValueError: see `quantize`.
    """
    x = array_of(op, "x", x)
    floats, sums = (isinstance(activation, kind) for kind in (WithFloats, WithSums))
    activation = activation.own if floats or sums else activation
    if activation is not None and not isinstance(activation, Gated | Norm):
        raise TypeError(f"{op}: activation must be None or a Gated, got {shown(activation)}")
    if rows is not None:
        rows = numbers_of(op, x, rows)
    if activation is None:
        if rows is None:
            return x, x, X, ()
        return x, jax.ShapeDtypeStruct((rows.shape[0], x.shape[1]), x.dtype), ROWS, (rows,)
    if isinstance(activation, Norm):
        return x, x, *activation.source
    up = None if activation.up is None else array_of(op, "up", activation.up)
    activation = dataclasses.replace(activation, up=up)
    gates = activation.gates_of(op, x)
    if rows is not None:
        if activation.gradient is not None:
            raise ValueError(f"{op}: rows of x have no gradient alone; drop rows, or the gradient")
        up = None if up is None else _floats_of(up, (rows,), ROWS)
        x, activation = _floats_of(x, (rows,), ROWS), dataclasses.replace(activation, up=up)
    if rows is not None or not activation.has_gate:
        x = made(op, x, activation)
        return x, x, X, ()
    weights = weights_of(op, gates, activation.weights)
    source = Source(activation=activation.name, interleaved=activation.interleaved, floats=floats)
    if activation.gradient is None:
        source = dataclasses.replace(source, apart=up is not None)
        return x, gates, source, (weights, *[up] * source.apart)
    source = dataclasses.replace(source, gradient=True, sums=sums)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x, like, source, (weights, activation.dy_of(op, gates))


def numbers_of(op: str, x: Any, rows: Any) -> Any:
    """The rows of a caller, see `quantize`.

    Raises:
      TypeError, ValueError: they are none, or x is no matrix.
    """
    dtype, shape = getattr(rows, "dtype", None), getattr(rows, "shape", None)
    if dtype is None or shape is None or dtype != np.int32 or len(shape) != 1:
        found = shown(rows) if dtype is None else f"{dtype}{[*(shape or ())]}"
        error = ValueError if dtype == np.int32 else TypeError
        raise error(
            f"{op}: rows must be an int32 array of rank 1, the number of a row of x for each row "
            f"of the result, got {found}; jnp.asarray(rows, jnp.int32) makes one of integers"
        )
    if x.ndim != 2:
        raise ValueError(
            f"{op}: rows picks rows of a matrix, x has the shape {tuple(x.shape)}; reshape it to "
            "two dimensions"
        )
    return rows


def operands_of(
    x: jax.Array, data: Sequence[Data], other: Sequence[jax.Array], plan: Plan
) -> tuple[list[jax.Array], Viewed, Plan, list[jax.Array]]:
    """The operands of `quantizers.quantize`, how its arrays are viewed, its plan, and what else.

    That is a list of what a norm, or a source with floats, gives beside codes; empty where the
    primitive gives it.

    Args:
      x: what the plan fits.
      data: of each direction, see `preprocessing.data_of`.
      other: the operands beside x that `made_of` returned.
      plan: of the call.

    Raises:
      ShardingTypeError: on a mesh with explicit axes, a shard splits a block.
    """
    beside = []
    if plan.source and not _in_one_call(x, other, plan):
        if plan.source.norm:
            *residual, weight = other
            x = reference.added(x, *residual) if residual else x
            sums = [x] * len(residual)
            x, factors = reference.rms_norm(x, weight, plan.eps)
            beside = [factors[..., 0], *sums]
        else:
            x = _floats_of(x, other, plan.source)
        beside += [reference.sums_of(x)] if plan.source.sums else [x] * plan.source.floats
        plan = dataclasses.replace(plan, source=X, eps=0.0)
    if plan.source:
        operands = quantizers.source_operands(x, other, plan)
        shape = quantizers.floats_shape(operands, plan)
        viewed = Viewed.of(plan.view, shape, (None,) * len(shape), plan.first_axis)
        return operands, viewed, plan, beside
    x = placed(x, x.shape, plan)
    viewed = Viewed.of(plan.view, x.shape, spec_of(x), plan.first_axis)
    operands = [viewed.to_floats(x)]
    if plan.given_data:
        for array, a in zip(plan.given_data, block_data_of(x, data, plan), strict=True):
            operands.append(viewed.to_blocks(a, plan.view.results[array.of]))
    return operands, viewed, plan.of_view, beside


def _in_one_call(x: jax.Array, other: Sequence[jax.Array], plan: Plan) -> bool:
    """Whether the primitive can make the floats itself.

    It needs a matrix that has rows, no block data and no mesh with explicit axes; of a gradient by
    halves whole windows in each; of what is normed along rows, any array.
    """
    meshes = (jax.typeof(a).sharding.mesh for a in (x, *other))
    is_empty = 0 in [n for n in x.shape[:-1] if isinstance(n, int)]
    is_matrix = x.ndim == 2 or (x.ndim > 2 and plan.source.norm and plan.takes_slabs)
    plain = is_matrix and not is_empty and not plan.block_data
    unit = 2 * max(lengths_of(plan.preprocessing[0].window))
    by_halves = plan.source.gradient and not plan.source.interleaved
    whole = not by_halves or x.shape[1] % unit == 0
    return plain and whole and not any(map(is_explicit, meshes))


def _floats_of(x: jax.Array, other: Sequence[jax.Array], source: Source) -> jax.Array:
    """The floats that XLA makes; on a mesh with explicit axes, split as both are."""
    if source.activates:  # with its derivative, so that codes say that they have none
        weights, *up = other
        each = [x, *up] if up else reference.halves(x, source.activation, source.interleaved)
        return made_of_parts(tuple(each), weights, source.activation)
    meshes = [m for m in (jax.typeof(a).sharding.mesh for a in (x, *other)) if is_explicit(m)]
    if source != ROWS or not meshes:
        return reference.floats_of(source, x, *other)
    (rows,) = other
    spec = PartitionSpec(spec_of(rows)[0], spec_of(x)[1])
    return reference.rows_of(x, rows, NamedSharding(meshes[0], spec))
