"""One call of a quantizer: from a caller's arrays to its primitive's operands, and back."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from jax_mx.formats.checks import array_of, shown
from jax_mx.formats.sharding import is_explicit, spec_of
from jax_mx.formats.views import Viewed
from jax_mx.formats.windows import arrays_window, lengths_of
from jax_mx.quantizing import primitive, quantizers, registry
from jax_mx.quantizing.activations import Gated, Of, made
from jax_mx.quantizing.facts.sources import Source, X
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.placing import placed, require_kernel
from jax_mx.quantizing.plan import Plan
from jax_mx.quantizing.planning import Options, planned
from jax_mx.quantizing.preprocessing import Data, block_data_of
from jax_mx.quantizing.sources.rows import RowsSource, numbers_of, rows_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithSums:
    """An activation whose quantizer also returns sums of the gradient's columns.

    The quantizer quantizes the gradient of gates and ups. The sums, float32 (..., T / 32, 2 K),
    come last in its tuple; see `reference.sums_of`.
    """

    gated: Gated


def called(
    op: str,
    asked: Options,
    x: Any,
    data: tuple[Data, ...],
    rows: Any,
    activation: Any,
) -> tuple[Any, ...]:
    """Checks, plans and runs a call; returns the results of `quantized`.

    Args:
      op: "quantize" or "quantize_both".
      asked: the caller's options.
      x: see `quantize`.
      data: of each direction, see `preprocessing.data_of`.
      rows: see `quantize`.
      activation: see `quantize`.

    Raises:
      TypeError, ValueError, NotImplementedError: see `quantize`.
    """
    x, source, other = made_of(op, x, rows, activation)
    abstract = x
    if source:
        abstract = jax.ShapeDtypeStruct(*source.floats_type(x, *other))
        asked = dataclasses.replace(asked, source=source)
    plan = planned(op, abstract, asked)
    require_kernel(plan)
    return tuple(quantized(x, data, other, plan=plan))


@partial(jax.jit, static_argnames="plan")
def quantized(
    x: jax.Array, data: tuple[Data, ...], other: tuple[jax.Array, ...] = (), *, plan: Plan
) -> list[Any]:
    """One MXArray per result, for an x that the plan fits; then the results of its source.

    A dequantized result is floats, which lie as x does.

    The function is jitted, so that eager calls are quick. Calls with one plan share one function of
    their program, with all its attributes.
    """
    operands, viewed, on_views, results = operands_of(x, data, other, plan)
    outs, arrays = iter(quantizers.quantize(operands, on_views)), []
    for i, (result, format) in enumerate(zip(plan.view.results, plan.formats, strict=True)):
        if plan.preprocessing[i].dequantized:
            arrays.append(viewed.from_floats(next(outs)))
            continue
        axes = plan.axes if plan.op == "quantize" else (plan.axes[-1 - i],)
        pair = next(outs), next(outs)
        (values, scales), axis = viewed.from_arrays(pair, result, axes, format, plan.transpose)
        fields = (format, axis, plan.scale_layout, plan.block, plan.value_layouts[i])
        window = arrays_window(plan.preprocessing[i].window)
        arrays.append(MXArray(values, scales, *fields, window))
    return [*arrays, *results, *outs]


def made_of(op: str, x: Any, rows: Any, activation: Any) -> tuple[Any, Source, tuple]:
    """Returns x, what makes the floats, and its other operands.

    Args:
      op: for messages.
      x: of a caller. It comes back, an array of JAX, where a kernel may make the floats of it, else
        the floats do.
      rows: see `quantize`.
      activation: see `quantize`; or a `WithSums`, or an `Of`.

    Raises:
      TypeError, ValueError: see `quantize`.
    """
    x = array_of(op, "x", x)
    sums = isinstance(activation, WithSums)
    asked = activation.gated if sums else activation
    if asked is not None and not isinstance(asked, Gated | Of):
        raise TypeError(f"{op}: activation must be None or a Gated, got {shown(asked)}")
    if rows is not None:
        rows = numbers_of(op, x, rows)
    if asked is None:
        return (x, X, ()) if rows is None else (x, RowsSource(), (rows,))
    if isinstance(asked, Of):
        if rows is not None:
            raise ValueError(f"{op}: rows are a source of their own; drop them, or activation")
        return x, asked.source, asked.operands
    asked = asked.checked(op, x)
    if rows is not None:
        if asked.gradient is not None:
            raise ValueError(f"{op}: rows of x have no gradient alone; drop rows, or the gradient")
        up = None if asked.up is None else rows_of(asked.up, rows)
        x, asked = rows_of(x, rows), dataclasses.replace(asked, up=up)
    fused = None if rows is not None else asked.of(op, x, sums=sums)
    if fused is None:  # no kernel reads this: XLA makes the floats
        return made(op, x, asked), X, ()
    return x, fused.source, fused.operands


def operands_of(
    x: jax.Array, data: Sequence[Data], other: Sequence[jax.Array], plan: Plan
) -> tuple[list[jax.Array], Viewed, Plan, list[jax.Array]]:
    """The operands of `quantizers.quantize`, the views of its arrays, its plan; further results.

    The further results are the source's; the list is empty where the primitive gives them.

    Args:
      x: the array of the plan.
      data: of each direction, see `preprocessing.data_of`.
      other: the operands beside x that `made_of` returned.
      plan: of the call.

    Raises:
      ShardingTypeError: on a mesh with explicit axes, a shard splits a block.
    """
    results = []
    if plan.source and not _in_one_call(x, other, plan):
        x, *results = _computed(tuple(other), x, plan)
        plan = dataclasses.replace(plan, source=X)
    if plan.source:
        operands = plan.source.arranged(x, other, plan.form.spans)
        shape = quantizers.floats_shape(operands, plan)
        viewed = Viewed.of(plan.view, shape, (None,) * len(shape), plan.first_axis)
        return operands, viewed, plan, results
    x = placed(x, x.shape, plan)
    viewed = Viewed.of(plan.view, x.shape, spec_of(x), plan.first_axis)
    operands = [viewed.to_floats(x)]
    if plan.given_data:
        for array, a in zip(plan.given_data, block_data_of(x, data, plan), strict=True):
            operands.append(viewed.to_blocks(a, plan.view.results[array.of]))
    return operands, viewed, plan.of_view, results


def _in_one_call(x: jax.Array, other: Sequence[jax.Array], plan: Plan) -> bool:
    """Whether the primitive can make the floats itself.

    It needs a matrix that has rows, no block data and no mesh with explicit axes; and a shape that
    the source takes.
    """
    meshes = (jax.typeof(a).sharding.mesh for a in (x, *other))
    is_empty = 0 in [n for n in x.shape[:-1] if isinstance(n, int)]
    is_matrix = x.ndim == 2 or (x.ndim > 2 and plan.takes_slabs)
    plain = is_matrix and not is_empty and not plan.given_data
    plain = plain and bool(plan.block_data or not plan.source.of_rows_alone)
    if plain and plan.block_data:  # amaxes: a kernel finds them as it makes the floats
        plain = plan.source.has_amaxes or any(map(registry.is_fused, quantizers.finding(plan)))
    fits = plain and plan.source.fits(x, max(lengths_of(plan.preprocessing[0].window)))
    return fits and not any(map(is_explicit, meshes))


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _computed(other: tuple[jax.Array, ...], x: jax.Array, plan: Plan) -> list[jax.Array]:
    """The floats that XLA makes, and the results of their source behind them."""
    return plan.source.compute(x, *other)


@_computed.defjvp
def _has_no_derivative(plan: Plan, primals: tuple, tangents: tuple) -> Any:
    """Says so before it is lost in how the floats are computed."""
    primitive.no_derivative(plan=plan)
