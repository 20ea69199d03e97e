"""The largest magnitudes of rows and of columns, as primitives."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from jax_mx.formats.formats import BLOCK
from jax_mx.formats.views import Result, View
from jax_mx.launch import partition
from jax_mx.launch.partition import Rule, Split
from jax_mx.launch.private import agree, define, unsplit, vary_alike
from jax_mx.launch.targets import target_of
from jax_mx.quantizing import reference
from jax_mx.quantizing.facts.sources import COLUMNS, ROWS, Source, X
from jax_mx.quantizing.plan import Plan, ProductPlan, described, plan_in
from jax_mx.quantizing.primitive import (
    Op,
    make_primitive,
    no_derivative,
    one_by_one,
    serves_by_itself,
)

AT_ONCE = 8  # columns that the kernel of amaxes reads; it takes a multiple of them
AMAX = np.dtype(np.uint32)  # the bits of a float32
TILE, MOST_PARTS = 128, 256  # rows of that kernel's tiles; see `made_with_amaxes`


def _amaxes_avals(x, *other, plan: ProductPlan):
    """The abstract values for x (batch, T, K), which is not split: by row and by column.

    A source makes floats, which come last; columns then have amaxes in each of the plan's parts.
    """
    operands = [x, *other]
    if not plan.source:
        return [unsplit("mx_amaxes", operands, (x.shape[0], n), plan.dtype) for n in x.shape[1:]]
    shape, dtype = plan.source.floats_type(x, *other)
    sizes = (1, shape[0]), (plan.parts, shape[1])
    avals = [unsplit("mx_amaxes", operands, size, plan.dtype) for size in sizes]
    avals.append(unsplit("mx_amaxes", operands, shape, dtype))
    return avals * (len(plan.signature.results) // len(avals))


def _of_both_avals(view, *, plan: Plan):
    """For each direction as `reference.amax_of` keeps dimensions."""
    agree("mx_amaxes_of_both", view)
    avals = []
    for result in plan.view.results:
        along = [d % view.ndim for d in plan.view.along(result)]
        shape = tuple(1 if i in along else n for i, n in enumerate(view.shape))
        spec = [None if i in along else axes for i, axes in enumerate(view.sharding.spec)]
        sharding = view.sharding.update(spec=PartitionSpec(*spec))
        avals.append(view.update(shape=shape, dtype=AMAX, weak_type=False, sharding=sharding))
    return avals


def _of_both_reference(view, *, plan: Plan):
    return [reference.amax_of(view, plan.view.along(result)) for result in plan.view.results]


def _of_both_from_matrices(view, *, plan: Plan):
    """The same of x as it lies: a kernel reads it once."""
    amaxes = _of_matrices(view, plan.view)
    avals = _of_both_avals(jax.typeof(view), plan=plan)
    return [a.reshape(aval.shape) for a, aval in zip(amaxes, avals, strict=True)]


def _of_matrices(floats, view: View) -> list:
    """The amaxes of the rows and of the columns of floats whose blocks run down columns, too."""
    lead = floats.ndim - view.tail
    x = floats.transpose((*range(lead), *(lead + i for i in view.operand)))
    sizes = x.shape[:lead], x.shape[lead : lead + 2], x.shape[lead + 2 :]
    x = x.reshape(*map(math.prod, sizes))
    return amaxes_p.bind(x, plan=amaxes_plan(x.dtype))


def amaxes_plan(dtype: np.dtype, source: Source = X, parts: int = 1) -> ProductPlan:
    """The plan of the amaxes of rows and columns: of floats of a dtype, which a source may make."""
    floats = "" if dtype == jnp.bfloat16 else dtype.name
    return ProductPlan("amaxes", (), AMAX, False, TILE, floats=floats, source=source, parts=parts)


def amax_of(floats, view: View, result: Result, by_kernel: bool):
    """The amaxes of a result's windows, which are rows, or columns; see `reference.amax_of`.

    `by_kernel`: by that of both, where columns alone are wanted and it takes them.
    """
    along, columns = view.along(result), floats.shape[floats.ndim - view.tail + 1]
    fits = isinstance(columns, int) and columns % AT_ONCE == 0 and view.tail == 3
    if not (by_kernel and fits and result.block == (-1,)):
        return reference.amax_of(floats, along)
    shape = [1 if i - floats.ndim in along else n for i, n in enumerate(floats.shape)]
    return _of_matrices(floats, view)[1].reshape(shape)


def _lower_of_both(platform: str | None, ctx, view, *, plan: Plan):
    """By the kernel where XLA splits nothing, else by its two reductions."""
    target = target_of(ctx, platform)
    one_read = plan.implementation != "xla" and not target.partitioned and plan.view.units is None
    fn = _of_both_from_matrices if one_read and target.platform == "cuda" else _of_both_reference
    return mlir.lower_fun(fn, multiple_results=True)(ctx, view, plan=plan)


def _batch_of_both(args, dims, *, plan: Plan):
    """Leading dimensions are batch dimensions."""
    amaxes = amaxes_of_both_p.bind(jnp.moveaxis(args[0], dims[0], 0), plan=plan)
    return amaxes, [0] * len(amaxes)


def _lower_made(platform: str | None, ctx, *operands, plan: ProductPlan):
    """By the kernel, of a device's part where XLA splits the program by a rule; else by XLA."""
    target = target_of(ctx, platform)
    is_shared = target.partitioned and plan.parts % target.devices == 0
    if is_shared and not partition.obstacle(target, ctx.avals_in):
        rule, parameters = _made_rule(ctx.avals_in, plan), {"plan": described(plan)}
        return partition.call(ctx, MADE_NAME, parameters, rule, operands, target)
    by_kernel = not target.partitioned and serves_by_itself(plan, target)
    fn = amaxes_p.bind if by_kernel else _amaxes_reference
    return mlir.lower_fun(fn, multiple_results=True)(ctx, *operands, plan=plan)


MADE_NAME = "made"


def _made_rule(operands: Sequence[Any], plan: ProductPlan) -> Rule:
    """Rows may be split into the parts that columns have amaxes of, columns into blocks."""
    dims = [
        (*names, *[""] * (a.ndim - len(names)))
        for a, names in zip(operands, plan.source.split, strict=True)
    ]
    results = ("", ROWS), (ROWS, COLUMNS), (ROWS, COLUMNS)
    count = len(plan.signature.results) // len(results)
    return Rule(
        tuple(dims), results * count, {ROWS: plan.parts, COLUMNS: operands[0].shape[1] // BLOCK}
    )


@partition.of_shards(MADE_NAME)
def _made_of_shard(parameters: Mapping[str, Any], split: Split) -> Any:
    """A device's part: devices that have columns of one row share its amax."""
    plan = cast(ProductPlan, plan_in(parameters["plan"]))
    plan = dataclasses.replace(plan, parts=plan.parts // split.of(ROWS))
    across = split.axes.get(COLUMNS, ())

    def make(*operands: jax.Array) -> list:
        outs = made_p.bind(*operands, plan=plan)
        return [jax.lax.pmax(a, across) if across and i % 3 == 0 else a for i, a in enumerate(outs)]

    return make


def _batch_made(args, dims, *, plan: ProductPlan):
    """One call after the other."""
    return one_by_one(functools.partial(made_p.bind, plan=plan), args, dims)


def _batch_amaxes(primitive: Primitive, args, dims, *, plan: ProductPlan):
    """More matrices; of a source's, one call after the other."""
    if plan.source:
        return one_by_one(functools.partial(primitive.bind, plan=plan), args, dims)
    x = jnp.moveaxis(args[0], dims[0], 0)
    amaxes = primitive.bind(x.reshape(-1, *x.shape[2:]), plan=plan)
    return [a.reshape(*x.shape[:2], -1) for a in amaxes], [0] * len(amaxes)


def _amaxes_reference(x: jax.Array, *other: jax.Array, plan: Any) -> list:
    """For x (batch, T, K): (batch, T) and (batch, K), float32 bits of the largest magnitudes.

    A plan's source makes floats (T, K), a batch of one, which follow; so for each that it makes.
    Columns then have amaxes (parts, K), of each of the plan's equal parts of the rows.
    """

    def of(x: jax.Array) -> list:
        return [reference.amax_of(x, (axis,)).squeeze(axis) for axis in (-1, -2)]

    if not plan.source:
        return of(x)
    outs = []
    for floats in plan.source.compute(x, *other):
        parts = floats.reshape(plan.parts, -1, floats.shape[-1])
        outs += [of(floats[None])[0], of(parts)[1], floats]
    return outs


amaxes_p = make_primitive("amaxes", Op(_amaxes_avals, _amaxes_reference, _batch_amaxes))
amaxes_of_both_p = define(
    "mx_amaxes_of_both", _of_both_avals, _lower_of_both, _batch_of_both, no_derivative
)
made_p = define("mx_made", _amaxes_avals, _lower_made, _batch_made, no_derivative)


def made_with_amaxes(operands: Sequence[jax.Array], source: Source) -> list[list[jax.Array]]:
    """Three arrays for each that a source makes: amaxes of rows, of columns, and the floats.

    Columns have amaxes of parts of the rows, so that devices may have parts: a power of two, up to
    `MOST_PARTS`, of whole tiles of the kernel.
    """
    rows = operands[0].shape[0]
    parts = 1 if rows % TILE else math.gcd(rows // TILE, MOST_PARTS)
    plan = amaxes_plan(operands[0].dtype, source, parts)
    outs = made_p.bind(*vary_alike(*operands), plan=plan)
    return [outs[i : i + 3] for i in range(0, len(outs), 3)]
