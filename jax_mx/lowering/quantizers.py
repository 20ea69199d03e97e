"""`quantize` and `dequantize` as primitives, on views (lowering/primitive.py)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from jax_mx import reference
from jax_mx.arrays.checks import is_symbolic
from jax_mx.arrays.sharding import spec_of, spread
from jax_mx.arrays.views import Result, View, Viewed
from jax_mx.facts.formats import BLOCK, SCALE_DTYPE, Format, Scaling
from jax_mx.facts.preprocessing import Preprocessing
from jax_mx.facts.signatures import Role
from jax_mx.facts.sources import X
from jax_mx.facts.windows import ROW
from jax_mx.lowering import registry
from jax_mx.lowering.plan import Plan
from jax_mx.lowering.primitive import (
    Op,
    agree,
    batch,
    batched,
    make_primitive,
    unsplit_like,
    vary_alike,
)
from jax_mx.lowering.products import amaxes_of_both_p

# Values and scales of all that is quantized go by this name in `jax.checkpoint`, so that a policy
# like jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME) keeps them, and the backward
# pass quantizes nothing a second time.
CHECKPOINT_NAME = "jax_mx.quantized"
_NAMED = (Role.CODES, Role.SCALES, Role.FLOATS)
FACTOR = np.dtype(np.float32)
# HIP launches fewer than 2^32 threads, and AMD's norms have 256 for a row, or for padding.
MOST_NORMED_ROWS = (1 << 24) - 256


def _quantize_avals(*operands, plan: Plan, view: View | None = None):
    """Values and scales of each result, for operands as `quantize` has them."""
    agree("mx_quantize", *operands)
    x = _floats(operands, plan)
    return [*_quantized(x, view or plan.view, plan), *_beside(operands, plan)]


def _beside(operands: Sequence[Any], plan: Plan) -> list:
    """The abstract values of what comes behind codes and scales.

    Of rows that are normed their factors, and the sum; of a gradient sums of its columns; then the
    floats, where they are given.
    """
    x, source, found = operands[0], plan.source, []
    if source.norm:
        shape = _normed_shape(x.shape, plan)[:-1]
        found = [unsplit_like(x, shape, FACTOR), *[x] * source.added]
    if source.sums:
        rows, columns = floats_shape(operands, plan)
        found.append(unsplit_like(x, (rows // BLOCK, columns), FACTOR))
    if source.floats:
        found.append(unsplit_like(x, floats_shape(operands, plan), plan.dtype))
    return found


def source_operands(x: jax.Array, other: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """The operands of `quantize` where the plan has a source, of arrays as callers have them.

    Args:
      x: what floats are made of; so is `other`.
      other: the operands beside x: numbers of rows, and the scales of codes; of an activation the
        weights of rows, and ups apart or, of its gradient, dy; of a norm the residual, if any, and
        weights.
      plan: the call.
    """
    down, across = plan.form.spans  # an axis is counted in blocks where these run along it
    if plan.source.norm:
        spans = zip((down, across), x.shape[-2:], strict=True)
        tail = [m for along, n in spans for m in ((n // BLOCK, BLOCK) if along else (n,))]
        *residual, weight = other
        return [*(a.reshape(*a.shape[:-2], *tail) for a in (x, *residual)), weight]
    halves = plan.source.halves
    count, length = other[0].shape[0], x.shape[1] // halves
    tail = (length // BLOCK, BLOCK) if across else (length,)
    by_row = other[0].reshape((count // BLOCK, BLOCK) if down else (count, 1))
    if plan.source.interleaved:  # how many gates a block of the floats has beside it
        each = BLOCK >> plan.source.gradient if across else 1
        x = x.reshape(count, length // each, 2 * each)
        more = [a.reshape(count, length // each, each) for a in other[1:]]
    else:
        x = x.reshape(x.shape[0], *[2] * (halves - 1), *tail)
        more = [a if plan.source.codes else a.reshape(count, *tail) for a in other[1:]]
    return [x, by_row, *more]


def floats_shape(operands: Sequence[Any], plan: Plan) -> tuple[int, ...]:
    """The shape of the floats that are made of what `source_operands` gave."""
    x = operands[0]
    if plan.source.norm:
        return _normed_shape(x.shape, plan)
    by_row = operands[plan.signature.number("rows" if plan.source.rows else "weights")]
    return math.prod(by_row.shape), math.prod(x.shape[1:]) // (1 + plan.source.makes_one_of_two)


def _floats(operands: Sequence[Any], plan: Plan):
    """The abstract value of the floats, in the view of the plan's form."""
    x = operands[0]
    if not plan.source:
        return x
    shape = floats_shape(operands, plan)
    shape, _ = plan.view.view(shape, (None,) * len(shape), plan.first_axis)
    return unsplit_like(x, shape, plan.dtype)


def _rows_of_shape(shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """The shape of what floats are made of, for its operand's, which has halves and blocks."""
    if plan.source.norm:
        return _normed_shape(shape, plan)
    return shape[0], math.prod(shape[1:])


def _normed_shape(shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """The shape of an array whose rows are normed, for its operand's, which has blocks."""
    down, across = plan.form.spans
    at = len(shape) - 1 - across
    rows = (math.prod(shape[:at]),) if down else shape[:at]
    return *rows, math.prod(shape[at:])


def _quantized(x, view: View, plan: Plan) -> list:
    """The abstract values and scales of each of the view's results; or the floats, like x."""
    out = []
    each = zip(view.results, plan.formats, plan.preprocessing, strict=True)
    for result, format, own in each:
        if own.dequantized:
            out.append(x.update(dtype=plan.dtype, weak_type=False))
            continue
        for shape, dtype in (
            (result.values_shape(x.shape, format), format.storage),
            (result.scales_shape(x.shape), SCALE_DTYPE),
        ):
            sharding = x.sharding
            if len(shape) < x.ndim:
                spec = PartitionSpec(*tuple(sharding.spec)[: len(shape)])
                sharding = sharding.update(spec=spec)
            out.append(x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding))
    return out


def _dequantize_avals(values, scales, *, plan: Plan):
    """The view of the plan's form, for the values and scales of its result."""
    agree("mx_dequantize", values, scales)
    (result,) = plan.view.results
    shape = result.view_shape(values.shape)
    return [values.update(shape=shape, dtype=plan.dtype, weak_type=False)]


def _by_direction(plan: Plan, block_data: Sequence[jax.Array]) -> list[dict[str, jax.Array]]:
    """For each direction its block data, by the first part of the operand's name."""
    found: list[dict[str, jax.Array]] = [{} for _ in plan.formats]
    for array, data in zip(plan.block_data, block_data, strict=True):
        found[array.of][array.name.rpartition("_")[0]] = data
    return found


def _scaled_elements(x, result: Result, own: Preprocessing, data: Mapping[str, jax.Array]):
    """What of x is scaled: x itself, or transformed and multiplied by a prescale."""
    if own.hadamard:
        (along,) = result.block
        flips = data["signs"] if own.flips is None else result.by_parity(own.flips, x.shape)
        x = reference.flipped(x, flips, along)
        x = reference.hadamard(reference.widened(x), own.hadamard, along, result.number)
    if own.prescale is not None:
        x = reference.times(reference.widened(x), own.prescale)
    return x


def _amaxes(y, result: Result, own: Preprocessing, data: Mapping[str, jax.Array]):
    """For each block of what is scaled its window's largest magnitude; None: its own."""
    if own.window == BLOCK:
        return None
    if own.window == ROW:
        return data["amaxes"]
    return reference.over_windows(reference.amax_of(y, result.block), result.blocks_in(own.window))


def _with_derived(view, given: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """The block data that a call takes, for what callers pass of it: with the amaxes of rows."""
    found, rest = [], iter(given)
    known: list[dict[str, jax.Array]] = [{} for _ in plan.formats]
    # Both ways from one read, where nothing changes elements before.
    plain = all(own == plan.preprocessing[0] and not own.hadamard for own in plan.preprocessing)
    both = plain and len(plan.formats) == 2 and plan.preprocessing[0].prescale is None
    pair = (
        amaxes_of_both_p.bind(view, plan=plan)
        if both and any(array.derived for array in plan.block_data)
        else None
    )
    for array in plan.block_data:  # of each direction, what is derived comes last
        name, i = array.name.rpartition("_")[0], array.of
        if array.derived:
            result = plan.view.results[i]
            y = _scaled_elements(view, result, plan.preprocessing[i], known[i])
            amax = pair[i] if pair else reference.amax_of(y, plan.view.along(result))
            shape = tuple(1 if d - y.ndim in result.block else n for d, n in enumerate(y.shape))
            known[i][name] = spread(amax, shape, spec_of(y))
        else:
            known[i][name] = next(rest)
        found.append(known[i][name])
    return found


def _quantize_via_codes(*operands, plan: Plan):
    """The primitive with codes in place of floats, and these behind it; of two results by XLA."""
    outs, found = iter(quantize_p.bind(*operands, plan=plan.of_codes)), []
    for result, format, own in zip(
        plan.view.results, plan.formats, plan.preprocessing, strict=True
    ):
        pair = next(outs), next(outs)
        if not own.dequantized:
            found += pair
        elif len(plan.formats) == 1:
            found += dequantize_p.bind(*pair, plan=plan.inverse)
        else:
            found.append(_floats_of_codes(*pair, result, format, plan.dtype))
    return [*found, *outs]


def _quantize_reference(x, *block_data, plan: Plan):
    if plan.gives_floats:
        return _quantize_via_codes(x, *block_data, plan=plan)
    if plan.source:
        return _quantize_via_floats(x, *block_data, plan=plan)
    out = []
    each = zip(
        plan.view.results,
        plan.formats,
        plan.preprocessing,
        _by_direction(plan, block_data),
        strict=True,
    )
    for result, format, own, data in each:
        noise, last = None, (result.block, result.last)
        if own.stochastic:
            noise = jnp.moveaxis(reference.noise(data["seeds"], result.block), *last)
        y = _scaled_elements(x, result, own, data)
        amax = _amaxes(y, result, own, data)
        amax = amax if amax is None else jnp.moveaxis(amax, *last)
        blocks, scaling = jnp.moveaxis(y, *last), cast(Scaling, plan.scaling)
        how = (format, scaling, result.last, plan.zero_scale, noise, amax)
        values, scales = reference.quantize(blocks, *how)
        values, scales = (jnp.moveaxis(a, result.last, result.block) for a in (values, scales))
        out += [result.pack(values, result.values_in), result.pack(scales, result.layout)]
    return out


def _quantize_via_floats(*operands, plan: Plan):
    """The primitive on floats that XLA makes, by a kernel or not; of a sum on that.

    Sums of columns are XLA's, beside a kernel that makes the gradient, if there is one.
    """
    if plan.source.sums:
        alone = dataclasses.replace(plan, source=dataclasses.replace(plan.source, sums=False))
        found = reference.floats_of(plan.source, *_made_of(operands, plan))
        return [*quantize_p.bind(*operands, plan=alone), reference.sums_of(found)]
    if plan.source.added:
        x, residual, *rest = operands
        total = reference.added(x, residual)
        normed = dataclasses.replace(plan, source=dataclasses.replace(plan.source, added=False))
        outs = quantize_p.bind(total, *rest, plan=normed)
        at = len(outs) - plan.source.floats
        return [*outs[:at], total, *outs[at:]]
    made_of = _made_of(operands, plan)
    beside, block_data = [], operands[len(made_of) :]
    if plan.source.norm:
        x, weight = made_of
        found, factors = reference.rms_norm(x, weight, plan.eps)
        beside = [factors[..., 0]]
    else:
        found = reference.floats_of(plan.source, *made_of)
    beside += [found] * plan.source.floats
    viewed = Viewed.of(plan.view, found.shape, spec_of(found), plan.first_axis)
    floats, plan = viewed.to_floats(found), dataclasses.replace(plan, source=X, eps=0.0)
    return [*quantize_p.bind(floats, *block_data, plan=plan), *beside]


def _made_of(operands: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """What floats are made of, without block data: matrices, and numbers by row."""
    arrays = zip(plan.signature.present(plan.lacks), operands, strict=True)
    return [
        a.reshape(_rows_of_shape(a.shape, plan)) if array.role is Role.SOURCE else a.reshape(-1)
        for array, a in arrays
        if array.role is not Role.BLOCK_DATA
    ]


def _quantize_via_transpose(x, *block_data, plan: Plan):
    """`_quantize_reference`, with the primitive along rows: x is transposed for it."""
    out, view = [], plan.view
    lead = x.ndim - view.tail
    each = zip(
        view.results, registry.last_axis_plans(plan), _by_direction(plan, block_data), strict=True
    )
    for result, alone, data in each:
        (block,) = (dimension % view.tail for dimension in result.block)
        order = (*(i for i in result.order if i != block), block)  # results lie so, or nearly
        operands = [x, *data.values()]
        outs = quantize_p.bind(*(view.reordered(a, order) for a in operands), plan=alone)
        back = [*range(lead), *(lead + order.index(i) for i in range(view.tail))]
        values, scales = (a.transpose(back) for a in outs)
        out += [result.pack(values, result.values_in), result.pack(scales, result.layout)]
    return out


def _dequantize_reference(values, scales, *, plan: Plan):
    (result,) = plan.view.results
    scales = result.unpack(scales, result.view_shape(values.shape))
    return [_floats_of_codes(values, scales, result, plan.format, plan.dtype)]


def _floats_of_codes(values, scales, result: Result, format: Format, dtype: np.dtype):
    """What row-major codes and scales of a view stand for."""
    values, scales = (jnp.moveaxis(a, result.block, result.last) for a in (values, scales))
    y = reference.dequantize(values, scales, format, dtype)
    return jnp.moveaxis(y, result.last, result.block)


# ---- vmap ---
def _batch(primitive: Primitive, args, dims, *, plan: Plan):
    """Entries of norms along rows alike become more rows; the floats of others are XLA's."""
    if not plan.source.norm:
        return batch(primitive, args, dims, plan=plan)
    if plan.takes_slabs and dims[-1] is None:
        outs = primitive.bind(*batched(args, dims, [len(args) - 1]), plan=plan)
    else:
        outs = jax.vmap(functools.partial(_quantize_via_floats, plan=plan), dims)(*args)
    return outs, [0] * len(outs)


def _is_beyond(*operands, plan: Plan, platform: str) -> bool:
    """Whether rows that are normed are too many for a launch."""
    if not plan.source.norm or platform != "rocm":
        return False
    rows = math.prod(_normed_shape(operands[0].shape, plan)[:-1])
    return not is_symbolic(rows) and rows > MOST_NORMED_ROWS


quantize_p = make_primitive(
    "quantize",
    Op(
        _quantize_avals,
        _quantize_reference,
        _batch,
        via_floats=_quantize_via_floats,
        via_transpose=_quantize_via_transpose,
        via_codes=_quantize_via_codes,
        is_beyond=_is_beyond,
    ),
)
dequantize_p = make_primitive("dequantize", Op(_dequantize_avals, _dequantize_reference))


def dequantize(values: jax.Array, scales: jax.Array, plan: Plan) -> jax.Array:
    """Binds `dequantize_p`, both operands varying over the same manual axes."""
    (out,) = dequantize_p.bind(*vary_alike(values, scales), plan=plan)
    return out


def quantize(operands: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds `quantize_p`, all operands varying over the same manual axes.

    Args:
      operands: the view of the floats and those of the plan's `given_data`; or what the plan's
        source has. "rows": x (T, K), and numbers of rows (R, 1); of an activation x (T, 2, K), or
        (T, K, 2) of gates and ups by turns, and weights (R, 1); or gates x (T, K), weights, and ups
        like x; of its gradient x, weights and dy (T, K), and by turns x (T, 2 K); of a norm
        x (..., T, K), of a sum the residual, and float32 weights (K,). An axis of length n that
        blocks run along is two: n / 32 and 32; by turns n / 32 and 64, and of dy 2 n / 32 and 16.
      plan: the call.

    Returns:
      Views of each result's values and scales, by the name `CHECKPOINT_NAME`, or one of the floats
      that they stand for, if the result's preprocessing says `dequantized`; of a norm, then the
      factors of rows, float32 (..., T), and the sum, as x lies; of a gradient sums of its columns,
      float32 (T / 32, 2 K), see `reference.sums_of`, or the floats, (T, K) or, of a norm,
      (..., T, K), if the source says so.
    """
    view, *given = vary_alike(*operands) if len(operands) > 1 else operands
    data = given if plan.source else _with_derived(view, given, plan)
    outs = quantize_p.bind(view, *data, plan=plan)
    pairs = zip(plan.signature.results, outs, strict=True)
    return [_checkpointed(out) if array.role in _NAMED else out for array, out in pairs]


def _checkpointed(out: jax.Array) -> jax.Array:
    """Codes, scales or floats that the primitive gives, by the name `CHECKPOINT_NAME`.

    Codes as bytes: jax.checkpoint puts all floats that it keeps through lax.reduce_precision, which
    takes each type for one with infinities, and so makes infinities of e4m3fn's codes from 256 on.
    """
    if out.dtype.itemsize > 1:
        return checkpoint_name(out, CHECKPOINT_NAME)
    bits = checkpoint_name(jax.lax.bitcast_convert_type(out, jnp.uint8), CHECKPOINT_NAME)
    return jax.lax.bitcast_convert_type(bits, out.dtype)
