"""`quantize` and `dequantize` as primitives, on views (quantizing/primitive.py)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from jax_mx.formats.directions import Blocks
from jax_mx.formats.formats import BLOCK, SCALE_DTYPE, Format, Scaling
from jax_mx.formats.sharding import is_explicit, spec_of, spread
from jax_mx.formats.views import Result, Shape, View, Viewed
from jax_mx.formats.windows import ROW, SHARD, SQUARE
from jax_mx.launch import partition
from jax_mx.launch.calls import batched
from jax_mx.launch.partition import Rule, Split
from jax_mx.launch.private import agree, define, unsplit_like, vary_alike
from jax_mx.launch.targets import Target, target_of
from jax_mx.quantizing import reference, registry
from jax_mx.quantizing.amaxes import amax_of, amaxes_of_both_p, amaxes_p, amaxes_plan
from jax_mx.quantizing.facts.preprocessing import Preprocessing
from jax_mx.quantizing.facts.signatures import Role
from jax_mx.quantizing.facts.sources import COLUMNS, ROWS, Source, X
from jax_mx.quantizing.plan import AnyPlan, Plan, described, plan_in
from jax_mx.quantizing.primitive import (
    Op,
    batch,
    make_primitive,
    no_derivative,
    one_by_one,
    serves_by_itself,
)

# Values and scales of all that is quantized go by this name in `jax.checkpoint`, so that a policy
# like jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME) keeps them, and the backward
# pass quantizes nothing a second time.
CHECKPOINT_NAME = "jax_mx.quantized"
_NAMED = (Role.CODES, Role.SCALES, Role.FLOATS)


def _quantize_avals(*operands, plan: Plan, view: View | None = None):
    """Values and scales of each result, for operands as `quantize` has them."""
    agree("mx_quantize", *operands)
    x = _floats(operands, plan)
    return [*_quantized(x, view or plan.view, plan), *_beside(operands, plan)]


def _beside(operands: Sequence[Any], plan: Plan) -> list:
    """The abstract values of what a source gives behind codes and scales."""
    if not plan.source:
        return []
    shapes = plan.source.result_shapes(operands, plan.form.spans)
    return [unsplit_like(operands[0], shape, dtype or plan.dtype) for shape, dtype in shapes]


def floats_shape(operands: Sequence[Any], plan: Plan) -> tuple[int, ...]:
    """The shape of the floats that are made of what `Source.arranged` gave."""
    return plan.source.shape(operands, plan.form.spans)


def _floats(operands: Sequence[Any], plan: Plan):
    """The abstract value of the floats, in the view of the plan's form."""
    x = operands[0]
    if not plan.source:
        return x
    shape = floats_shape(operands, plan)
    shape, _ = plan.view.view(shape, (None,) * len(shape), plan.first_axis)
    return unsplit_like(x, shape, plan.dtype)


def _quantized(x, view: View, plan: Plan) -> list:
    """The abstract values and scales of each of the view's results; or the floats, like x."""
    out = []
    results = zip(view.results, plan.formats, plan.preprocessing, strict=True)
    for result, format, steps in results:
        if steps.dequantized:
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
    directions: list[dict[str, jax.Array]] = [{} for _ in plan.formats]
    for array, data in zip(plan.block_data, block_data, strict=True):
        directions[array.of][array.name.rpartition("_")[0]] = data
    return directions


def _scaled_elements(x, result: Result, steps: Preprocessing, data: Mapping[str, jax.Array]):
    """The elements that are scaled: x itself, or x transformed and multiplied by a prescale."""
    if steps.hadamard:
        (along,) = result.block
        flips = data["signs"] if steps.flips is None else result.by_parity(steps.flips, x.shape)
        x = reference.flipped(x, flips, along)
        x = reference.hadamard(reference.widened(x), steps.hadamard, along, result.number)
    if steps.prescale is not None:
        x = reference.times(reference.widened(x), steps.prescale)
    return x


def _of_blocks(amax, y, result: Result):
    """The amaxes of rows, or columns, of what is scaled, repeated for each of their blocks."""
    shape = tuple(1 if d - y.ndim in result.block else n for d, n in enumerate(y.shape))
    return amax if amax.shape == shape else spread(amax, shape, spec_of(y))


def _amaxes(y, result: Result, steps: Preprocessing, data: Mapping[str, jax.Array], along: Shape):
    """For each block of what is scaled its window's largest magnitude; None: its own.

    `along` are the dimensions of a whole row, or of a square block.
    """
    if steps.window == BLOCK:
        return None
    if steps.window in (ROW, SQUARE):
        amax = data["amaxes"] if steps.mode.takes_amaxes else reference.amax_of(y, along)
        return _of_blocks(amax, y, result)
    blocks = result.blocks_in(steps.window)
    return reference.over_windows(reference.amax_of(y, result.block), blocks)


def _with_derived(
    view, passed: Sequence[jax.Array], plan: Plan, once: bool, rows: Sequence[Rows]
) -> list[jax.Array]:
    """The block data that a call takes, for what callers pass of it: with the amaxes of rows.

    `once`: each row, or column, has its amax once, as a kernel reads it, not for each block.
    """
    with_derived, rest = [], iter(passed)
    known: list[dict[str, jax.Array]] = [{} for _ in plan.formats]
    # Both ways from one read, where nothing changes elements before.
    plain = all(p == plan.preprocessing[0] and not p.hadamard for p in plan.preprocessing)
    both = plain and len(plan.formats) == 2 and plan.preprocessing[0].prescale is None
    both = both and all(windows.count == 1 for windows in rows)
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
            if rows[i].count > 1:
                amax = _of_parts(y, plan, i, rows[i].count)
            else:
                amax = pair[i] if pair else amax_of(y, plan.view, result, once)
            if rows[i].across:  # then it is the same on all of them, beside a view that is not
                _, amax = vary_alike(view, jax.lax.pmax(amax, rows[i].across))
            known[i][name] = amax if once else _of_blocks(amax, y, result)
        else:
            known[i][name] = next(rest)
        with_derived.append(known[i][name])
    return with_derived


def _of_parts(y, plan: Plan, i: int, count: int):
    """For each block the amax of its window, of which a direction has so many of one length."""
    result = plan.view.results[i]
    blocks = {result.number: y.shape[result.number] // count}
    return reference.over_windows(reference.amax_of(y, result.block), blocks)


def _quantize_via_codes(*operands, plan: Plan):
    """The primitive with codes in place of floats, and these behind it; of two results by XLA."""
    outs, results = iter(quantize_p.bind(*operands, plan=plan.of_codes)), []
    for result, format, steps in zip(
        plan.view.results, plan.formats, plan.preprocessing, strict=True
    ):
        pair = next(outs), next(outs)
        if not steps.dequantized:
            results += pair
        elif len(plan.formats) == 1:
            results += dequantize_p.bind(*pair, plan=plan.inverse)
        else:
            results.append(_floats_of_codes(*pair, result, format, plan.dtype))
    return [*results, *outs]


def _quantize_reference(x, *block_data, plan: Plan):
    if plan.gives_floats:
        return _quantize_via_codes(x, *block_data, plan=plan)
    if plan.source:
        return _quantize_via_floats(x, *block_data, plan=plan)
    out = []
    quantized = zip(
        plan.view.results,
        plan.formats,
        plan.preprocessing,
        _by_direction(plan, block_data),
        strict=True,
    )
    for result, format, steps, data in quantized:
        noise, last = None, (result.block, result.last)
        if steps.stochastic:
            noise = jnp.moveaxis(reference.noise(data["seeds"], result.block), *last)
        y = _scaled_elements(x, result, steps, data)
        along = plan.view.along(result)
        if steps.window == SQUARE:
            along = tuple(d for result_view in plan.view.results for d in result_view.block)
        amax = _amaxes(y, result, steps, data, along)
        amax = amax if amax is None else jnp.moveaxis(amax, *last)
        blocks, scaling = jnp.moveaxis(y, *last), cast(Scaling, plan.scaling)
        settings = (format, scaling, result.last, plan.zero_scale, noise, amax)
        values, scales = reference.quantize(blocks, *settings)
        values, scales = (jnp.moveaxis(a, result.last, result.block) for a in (values, scales))
        out += [result.pack(values, result.values_in), result.pack(scales, result.layout)]
    return out


def _quantize_via_floats(*operands, plan: Plan, rows: tuple[Rows, ...] = ()):
    """The primitive on floats that XLA makes, by a kernel or not; `rows` where they are known."""
    count = len(plan.source.operands)
    block_data, spans = operands[count:], plan.form.spans

    def quantize(source: Source, x: jax.Array, *other: jax.Array) -> list:
        alone = dataclasses.replace(plan, source=source)
        bind = quantize_p.bind
        if takes_amaxes(alone):  # which follow from the floats, once they are there
            every = (True,) * len(alone.signature.results)
            bind = functools.partial(quantize_rows_p.bind, read=every, rows=rows)
        if source:
            arranged = source.arranged(x, other, spans)
        else:
            viewed = Viewed.of(plan.view, x.shape, spec_of(x), plan.first_axis)
            arranged = [viewed.to_floats(x)]
        return bind(*arranged, *block_data, plan=alone)

    outs = plan.source.in_steps(quantize, *plan.source.whole(operands[:count], spans))
    shapes = plan.source.result_shapes(operands, spans)
    at = len(outs) - len(shapes)
    pairs = zip(outs[at:], shapes, strict=True)
    return [*outs[:at], *(a.reshape(shape) for a, (shape, _) in pairs)]


def _quantize_via_transpose(x, *block_data, plan: Plan):
    """`_quantize_reference`, with the primitive along rows: x is transposed for it."""
    out, view = [], plan.view
    lead = x.ndim - view.tail
    directions = zip(
        view.results, registry.last_axis_plans(plan), _by_direction(plan, block_data), strict=True
    )
    for result, alone, data in directions:
        (block,) = (dimension % view.tail for dimension in result.block)
        order = (*(i for i in result.order if i != block), block)  # results lie so, or nearly
        data = {n: _of_blocks(a, x, result) if n == "amaxes" else a for n, a in data.items()}
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
    """The floats that row-major codes and scales of a view stand for."""
    values, scales = (jnp.moveaxis(a, result.block, result.last) for a in (values, scales))
    y = reference.dequantize(values, scales, format, dtype)
    return jnp.moveaxis(y, result.last, result.block)


# ---- vmap ---
def _batch(primitive: Primitive, args, dims, *, plan: Plan):
    """Entries with rows alike become more rows; of others with such rows, floats are XLA's."""
    if not plan.source.has_slabs:
        return batch(primitive, args, dims, plan=plan)
    operands = plan.signature.present(plan.lacks)
    alike = [i for i, array in enumerate(operands) if array.role is Role.REPLICATED]
    if plan.takes_slabs and all(dims[i] is None for i in alike):
        outs = primitive.bind(*batched(args, dims, alike), plan=plan)
    else:
        outs = jax.vmap(functools.partial(_quantize_via_floats, plan=plan), dims)(*args)
    return outs, [0] * len(outs)


quantize_p = make_primitive(
    "quantize",
    Op(
        _quantize_avals,
        _quantize_reference,
        _batch,
        via_floats=_quantize_via_floats,
        via_transpose=_quantize_via_transpose,
        via_codes=_quantize_via_codes,
    ),
)
dequantize_p = make_primitive("dequantize", Op(_dequantize_avals, _dequantize_reference))


# ---- windows that are rows ---
# Products' operands: amaxes, then codes. The lowering decides whether one kernel does both, or
# another one finds amaxes, as it knows whether XLA splits the program; and what is read of it.
class Rows(NamedTuple):
    """The windows of a direction in the part of an array that is there.

    Attributes:
      count: how many there are along the axis; of "row" one.
      across: the axes of devices that share a window.
    """

    count: int = 1
    across: tuple[str, ...] = ()


def _rows_avals(*operands, plan: Plan, read: tuple[bool, ...], rows: tuple[Rows, ...]):
    del rows
    return [*itertools.compress(_quantize_avals(*operands, plan=plan), read)]


def _lower_rows(
    platform: str | None, ctx, *operands, plan: Plan, read: tuple[bool, ...], rows: tuple[Rows, ...]
):
    target = target_of(ctx, platform)
    if plan.chosen and not target.is_for(plan.chosen):
        fn = functools.partial(_in_blocks, plan=plan, read=read)
        return mlir.lower_fun(fn, multiple_results=True)(ctx, *operands)
    if not rows:  # where the primitive is bound, nobody knows
        is_shared = _is_shared(target, ctx.avals_in, plan)
        by_xla = target.partitioned and plan.source and not is_shared  # binds it again, of floats
        view = _floats(ctx.avals_in, plan)
        rows = tuple(
            Rows(target.shards_of(_along(view, plan, i), BLOCK))
            if steps.window == SHARD and not by_xla
            else Rows()
            for i, steps in enumerate(plan.preprocessing)
        )
        plan = plan if by_xla else plan.of_rows
        if is_shared:
            parameters = {"plan": described(plan), "read": read, "rows": [r.count for r in rows]}
            rule = _rule(ctx.avals_in, ctx.avals_out, plan, rows)
            return partition.call(ctx, ROWS_NAME, parameters, rule, operands, target)
    fn = functools.partial(_quantize_rows, plan=plan, read=read, target=target, rows=rows)
    return mlir.lower_fun(fn, multiple_results=True)(ctx, *operands)


def _in_blocks(*operands, plan: Plan, read: tuple[bool, ...]) -> list:
    """The same with windows of 32: in a program for other chips than rows were chosen for."""
    return [*itertools.compress(quantize_p.bind(*operands, plan=plan.in_blocks), read)]


def _along(view, plan: Plan, i: int) -> int:
    """The length of the axis that blocks of a direction run along."""
    return math.prod(view.shape[d] for d in plan.view.along(plan.view.results[i]))


def _is_shared(target: Target, avals: Sequence[Any], plan: Plan) -> bool:
    """Whether XLA splits the call by a rule: it sees to units and most sources by itself."""
    whole = plan.source and not plan.source.split
    whole = whole or plan.view.units is not None or any(0 in a.shape for a in avals)
    return target.partitioned and not (whole or partition.obstacle(target, avals))


def _rule(
    operands: Sequence[Any], results: Sequence[Any], plan: Plan, rows: Sequence[Rows]
) -> Rule:
    """The rule that splits all arrays alike, along the dimensions of a view that may be split.

    A source says which dimensions of its operands are split like the floats' view.
    """
    x, source = _floats(operands, plan), plan.source.split
    shared = tuple(f"d{i}" for i in range(plan.view.batch(x.ndim)))
    parts = dict(zip(shared, x.shape, strict=False))
    named = {ROWS: "d0", COLUMNS: "d1"}
    if source and not any(COLUMNS in names for names in source):
        shared = named[ROWS], ""
    for result, windows in zip(plan.view.results, rows, strict=True):
        name = shared[result.number % x.ndim]
        if windows.count > 1 and name:
            parts[name] = math.gcd(parts[name], windows.count)

    def dims(aval: Any) -> tuple[str, ...]:
        return (*shared, *[""] * (aval.ndim - len(shared)))

    if not source:
        return Rule(tuple(map(dims, operands)), tuple(map(dims, results)), parts)
    takes = []
    for operand, names in zip(operands, source, strict=True):
        names = tuple(named.get(name, "") for name in names)
        parts |= {f: math.gcd(parts[f], n) for f, n in zip(names, operand.shape, strict=False) if f}
        takes.append((*names, *[""] * (operand.ndim - len(names))))
    return Rule(tuple(takes), tuple(map(dims, results)), parts)


ROWS_NAME = "quantize_rows"


@partition.of_shards(ROWS_NAME)
def _rows_of_shard(parameters: Mapping[str, Any], split: Split) -> Any:
    """A device's part: of a row that others have parts of, too, they share the amax."""
    plan, read = cast(Plan, plan_in(parameters["plan"])), tuple(parameters["read"])

    def quantize(*operands) -> list:
        rows, rank = [], _floats([*map(jax.typeof, operands)], plan).ndim
        for result, count in zip(plan.view.results, parameters["rows"], strict=True):
            factor = f"d{result.number % rank}"
            if count > 1:
                rows.append(Rows(count // split.of(factor)))
            else:
                rows.append(Rows(1, split.axes.get(factor, ())))
        return quantize_rows_p.bind(*operands, plan=plan, read=read, rows=tuple(rows))

    return quantize


def _batch_rows(args, dims, *, plan: Plan, read: tuple[bool, ...], rows: tuple[Rows, ...]):
    """Leading dimensions are batch dimensions; matrices of a source one after the other."""
    bind = functools.partial(quantize_rows_p.bind, plan=plan, read=read, rows=rows)
    if plan.source:
        return one_by_one(lambda *args: bind(*args), args, dims)
    outs = bind(*batched(args, dims))
    return outs, [0] * len(outs)


def takes_amaxes(plan: Plan) -> bool:
    """Whether a call takes what follows from the floats."""
    return any(array.derived for array in plan.block_data)


def _unread(used: Sequence[bool], params: dict) -> dict:
    still = iter(used)
    return {**params, "read": tuple(is_read and next(still) for is_read in params["read"])}


def _quantize_rows(
    *operands, plan: Plan, read: tuple[bool, ...], target: Target, rows: tuple[Rows, ...]
) -> list:
    """The results of the primitive that are read.

    H100, (16384, 4096), bfloat16: along rows alone one kernel moves 3 bytes an element; both ways
    the amaxes' and the quantizer's together 6.
    """
    of = [a.of for a, is_read in zip(plan.signature.results, read, strict=True) if is_read]
    plain = plan.view.units is None and not (plan.given_data or plan.gives_floats)
    plain = plain and not plan.source.results
    plain = plain and not is_explicit(jax.typeof(operands[0]).sharding.mesh)
    if len(plan.formats) == 2 and len({*of}) == 1 and plain:
        outs = _one_of_both(operands, plan, of[0], target, rows[of[0]])
        return [*itertools.compress(outs, read[2 * of[0] : 2 * of[0] + 2])]
    alone = not target.partitioned and all(windows == Rows() for windows in rows)
    if alone and serves_by_itself(plan.finding, target):
        outs = quantize_p.bind(*operands, plan=plan.finding)
    elif plan.source:
        outs = _quantize_made_rows(operands, plan, target, rows)
    else:
        view, *block_data = operands
        once = all(windows.count == 1 for windows in rows) and _takes_each_once(plan, target)
        data = _with_derived(view, block_data, plan, once, rows)
        outs = quantize_p.bind(view, *data, plan=plan)
    return [*itertools.compress(outs, read)]


def _takes_each_once(plan: Plan, target: Target) -> bool:
    """Whether a kernel serves a plan that takes amaxes once a row: `Tiled` of cutedsl."""
    tiled = plan.form.spans[0] and target.platform == "cuda" and not target.partitioned
    return tiled and serves_by_itself(plan, target)


def finding(plan: Plan) -> tuple[AnyPlan, ...]:
    """The plans of one call that finds the amaxes of what a source makes: with codes, or floats."""
    return plan.finding, amaxes_plan(plan.dtype, plan.source.kernel)


def _quantize_made_rows(
    operands: Sequence[jax.Array], plan: Plan, target: Target, rows: Sequence[Rows]
) -> list:
    """By a kernel that makes the floats of a source and finds their amaxes; or XLA makes them.

    Or they are there, and their amaxes are known.
    """
    plain = dataclasses.replace(plan, source=X)
    _, amax_plan = finding(plan)
    known, single = plan.source.has_amaxes, all(windows.count == 1 for windows in rows)
    served = single and _takes_each_once(plain, target)
    if not (served and (known or serves_by_itself(amax_plan, target))):
        # Where XLA splits the program, the call of floats learns of its own windows.
        windows = () if target.partitioned else tuple(rows)
        return _quantize_via_floats(*operands, plan=plan, rows=windows)
    x, *other = plan.source.whole(operands, plan.form.spans)
    if known:
        amaxes, floats = other, x
    else:
        *amaxes, floats = amaxes_p.bind(x, *other, plan=amax_plan)
    viewed = Viewed.of(plain.view, floats.shape, (None,) * 2, plan.first_axis)
    data = []
    directions = zip(plain.view.results, plan.form.directions, rows, strict=True)
    for result, direction, windows in directions:
        along = [i % len(viewed.shape) for i in plain.view.along(result)]
        shape = [1 if i in along else n for i, n in enumerate(viewed.shape)]
        amax = amaxes[direction.blocks is Blocks.SECOND].max(0).reshape(shape)
        if windows.across:
            _, amax = vary_alike(x, jax.lax.pmax(amax, windows.across))
        data.append(amax)
    return quantize_p.bind(viewed.to_floats(floats), *data, plan=plain)


def _one_of_both(
    operands: Sequence[jax.Array], plan: Plan, i: int, target: Target, rows: Rows
) -> list:
    """Codes and scales of one of a plan's two directions, by a plan of its own."""
    view, source = operands[0], plan.source
    lead = view.ndim - plan.view.tail
    shape = (*view.shape[:lead], *(n * BLOCK for n in view.shape[lead : lead + 2]))
    shape = floats_shape(operands, plan) if source else shape
    fields = ("formats", "preprocessing", "value_layouts")
    changes: dict[str, Any] = {name: (getattr(plan, name)[i],) for name in fields}
    changes |= {"op": "quantize", "axis": -1 - i, "transpose": i == 1 and plan.transpose}
    alone = dataclasses.replace(plan, **changes)
    spec = (None,) * len(shape)
    both, one = (Viewed.of(p.view, shape, spec, p.first_axis) for p in (plan, alone))
    if source:
        x, *other = source.whole(operands, plan.form.spans)
        operands = source.arranged(x, other, alone.form.spans)
    else:
        operands = [one.to_floats(both.from_floats(view))]
    outs = _quantize_rows(*operands, plan=alone, read=(True, True), target=target, rows=(rows,))
    (result,), to = alone.view.results, plan.view.results[i]
    (values, scales), _ = one.from_arrays(outs, result, alone.axes, alone.format, alone.transpose)
    return [both.to_values(values, to, alone.format), both.to_scales(scales, to)]


quantize_rows_p = define(
    "mx_quantize_rows", _rows_avals, _lower_rows, _batch_rows, no_derivative, _unread
)


def dequantize(values: jax.Array, scales: jax.Array, plan: Plan) -> jax.Array:
    """Binds `dequantize_p`, both operands varying over the same manual axes."""
    (out,) = dequantize_p.bind(*vary_alike(values, scales), plan=plan)
    return out


def quantize(operands: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds `quantize_p`, all operands varying over the same manual axes.

    Args:
      operands: the views of the floats and of the plan's `given_data`; or the results of `arranged`
        of its source.
      plan: the call.

    Returns:
      Views of each result's values and scales, by the name `CHECKPOINT_NAME`; if the result's
      preprocessing says `dequantized`, a view of the dequantized floats instead. The results of the
      source follow.
    """
    operands = vary_alike(*operands) if len(operands) > 1 else operands
    if takes_amaxes(plan):
        read = (True,) * len(plan.signature.results)
        rows = tuple(Rows(1, names) for names in plan.across)
        outs = quantize_rows_p.bind(*operands, plan=plan, read=read, rows=rows)
    else:
        outs = quantize_p.bind(*operands, plan=plan)
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
