"""The ops as JAX primitives; the only module that uses names private to JAX.

Operands come as views (arrays/views.py). The partitioner may split every dimension of a view but
those inside of a block or a unit, so a sharded array is quantized where it lies; those of a source,
rows or gates and ups, come as they lie. What each operand and result is, its signature says
(facts/signatures.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import ffi
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec
from jaxlib.mlir import ir

# Private to JAX, all of it; used here alone, pinned by tests/test_primitive.py.
from jax._src import core, dispatch  # isort: skip
from jax._src.custom_partitioning_sharding_rule import (  # isort: skip
    sdy_sharding_rule_to_mlir,
    str_to_sdy_sharding_rule,
)

from jax._src.core import ShardingTypeError as ShardingTypeError  # isort: skip

from jax_mx import reference
from jax_mx.arrays.sharding import spec_of, spread
from jax_mx.arrays.views import Result, View, Viewed, minor_to_major
from jax_mx.facts import chips as chip_table
from jax_mx.facts import launch
from jax_mx.facts.activations import ACTIVATIONS, INTERLEAVED
from jax_mx.facts.formats import BLOCK, SCALE_DTYPE, Scaling
from jax_mx.facts.layouts import ROW_MAJOR_VALUES
from jax_mx.facts.preprocessing import Preprocessing
from jax_mx.facts.products import Binary
from jax_mx.facts.signatures import ADDED, NORMS, RMS_NORM, Array, Role, Signature
from jax_mx.facts.variants import value_layouts_of
from jax_mx.facts.windows import ROW
from jax_mx.lowering import compiler, registry, store
from jax_mx.lowering.plan import AnyPlan, Plan, ProductPlan
from jax_mx.lowering.registry import Support

# What makes operands vary over the same manual axes; since 0.10.1 under the first name.
vary_alike = getattr(core, "auto_insert_reshard", None) or vars(core)["standard_insert_pvary"]

# Values and scales of all that is quantized go by this name in `jax.checkpoint`, so that a policy
# like jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME) keeps them, and the backward
# pass quantizes nothing a second time.
CHECKPOINT_NAME = "jax_mx.quantized"

logger = logging.getLogger("jax_mx")


class Emulated(NamedTuple):
    """What the CPU stands in for (jax_mx.testing.emulate)."""

    chip: str
    device: int  # of the stand-in driver


emulation = jax.make_user_context(default_value=None)  # an `Emulated`; part of JAX's caches' keys


def varies(x: Any) -> bool:
    """Whether an array is known to differ among the shards of a shard_map around it."""
    return "{V:" in jax.typeof(x).str_short()


# ---- abstract values: shapes, dtypes and shardings of results ---
def _quantize_avals(*operands, plan: Plan):
    """Values and scales of each result, for operands as `quantize` has them."""
    core.standard_vma_rule("mx_quantize", *operands)
    x = _floats(operands, plan)
    return [*_quantized(x, plan.view, plan), *_factors(operands, plan)]


def _factors(operands: Sequence[Any], plan: Plan) -> list:
    """The abstract values of the factors of rows, where these are normed, and of the sum."""
    if plan.source not in NORMS:
        return []
    x = operands[0]
    shape = _normed_shape(x.shape, plan)[:-1]
    sharding = x.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    factors = x.update(shape=shape, dtype=FACTOR, weak_type=False, sharding=sharding)
    return [factors, *[x] * (plan.source == ADDED)]


def _floats(operands: Sequence[Any], plan: Plan):
    """The abstract value of the floats, in the view of the plan's form."""
    x = operands[0]
    if not plan.source:
        return x
    apart = plan.source in ACTIVATIONS  # halves of x that make one
    columns = math.prod(x.shape[1 + apart :]) // (1 + plan.source.endswith(INTERLEAVED))
    shape = (math.prod(operands[1].shape), columns)
    if plan.source in NORMS:
        shape = _normed_shape(x.shape, plan)
    shape, _ = plan.view.view(shape, (None,) * len(shape), plan.first_axis)
    sharding = x.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return x.update(shape=shape, dtype=plan.dtype, weak_type=False, sharding=sharding)


def _rows_of_shape(shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """The shape of what floats are made of, for its operand's, which has halves and blocks."""
    if plan.source in NORMS:
        return _normed_shape(shape, plan)
    return shape[0], math.prod(shape[1:])


def _normed_shape(shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """The shape of an array whose rows are normed, for its operand's, which has blocks."""
    down, across = plan.form.spans
    at = len(shape) - 1 - across
    rows = (math.prod(shape[:at]),) if down else shape[:at]
    return *rows, math.prod(shape[at:])


def _quantized(x, view: View, plan: Plan) -> list:
    """The abstract values and scales of each of the view's results."""
    out = []
    for result, format in zip(view.results, plan.formats, strict=True):
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
    core.standard_vma_rule("mx_dequantize", values, scales)
    (result,) = plan.view.results
    shape = result.view_shape(values.shape)
    return [values.update(shape=shape, dtype=plan.dtype, weak_type=False)]


# ---- the reference on views: what "xla" computes ---
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


def _quantize_reference(x, *block_data, plan: Plan):
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
    """The primitive on floats that XLA makes, by a kernel or not; of a sum on that."""
    if plan.source == ADDED:
        x, residual, *rest = operands
        total = reference.added(x, residual)
        normed = dataclasses.replace(plan, source=RMS_NORM)
        return [*quantize_p.bind(total, *rest, plan=normed), total]
    arrays = zip(plan.signature.present(plan.lacks), operands, strict=True)
    made_of = [
        a.reshape(_rows_of_shape(a.shape, plan)) if array.role is Role.SOURCE else a.reshape(-1)
        for array, a in arrays
        if array.role is not Role.BLOCK_DATA
    ]
    beside, block_data = [], operands[len(made_of) :]
    if plan.source == RMS_NORM:
        x, weight = made_of
        found, factors = reference.rms_norm(x, weight, plan.eps)
        beside = [factors[..., 0]]
    else:
        found = reference.floats_of(plan.source, *made_of)
    viewed = Viewed.of(plan.view, found.shape, spec_of(found), plan.first_axis)
    floats, plan = viewed.to_floats(found), dataclasses.replace(plan, source="", eps=0.0)
    return [*quantize_p.bind(floats, *block_data, plan=plan), *beside]


def _quantize_via_transpose(x, *block_data, plan: Plan):
    """`_quantize_reference`, with the primitive along rows: x is transposed for it."""
    out, view = [], plan.view
    lead = x.ndim - view.tail
    each = zip(view.results, registry.row_plans(plan), _by_direction(plan, block_data), strict=True)
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
    values, scales = (jnp.moveaxis(a, result.block, result.last) for a in (values, scales))
    y = reference.dequantize(values, scales, plan.format, plan.dtype)
    return [jnp.moveaxis(y, result.last, result.block)]


def is_tracing() -> bool:
    """Whether some function is being traced: by jit, grad, vmap, scan ..."""
    return not core.trace_state_clean()


# ---- chips: what a program is lowered for ---
def chip_of(device: jax.Device) -> str:
    """The device's chip as its driver names it: "sm_90", "gfx950"; else its platform."""
    if device.platform == "cpu" and emulation.value is not None:
        return emulation.value.chip
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return device.platform
    return f"sm_{capability.replace('.', '')}" if "gfx" not in capability else capability


def chips_beside(device: jax.Device) -> list[str]:
    """The chips that a program for this device is lowered for: all of its kind in this process.

    JAX lowers once for all of them.
    """
    return sorted({chip_of(other) for other in device.client.local_devices()})


def platform_of(chip: str) -> str:
    """JAX's platform that a chip (or a device without kernels, by its platform) belongs to.

    Raises:
      ValueError: no chip is called that.
    """
    for prefix, platform in (("sm_", "cuda"), ("gfx", "rocm")):
        if chip.startswith(prefix):
            return platform
    if chip not in ("cpu", "tpu"):
        known = ", ".join(c for dsl in chip_table.ARCHS for c in chip_table.chips_of(dsl))
        raise ValueError(f"{chip!r} is no chip's name; use a jax.Device, or one like {known}, cpu")
    return chip


def _chips(ctx: mlir.LoweringRuleContext, platform: str) -> list[str] | None:
    """The chips that a program is lowered for; None where no device is known yet (export)."""
    module = ctx.module_context
    if module.lowering_parameters.for_export or tuple(module.platforms) != (platform,):
        return None
    if module.backend is None or module.backend.platform not in (platform, "gpu"):
        return None
    return chips_beside(module.backend.local_devices()[0])


# ---- lowering ---
class Target(NamedTuple):
    """What a call is lowered for.

    Attributes:
      platform: JAX's name of it.
      chips: as drivers name them; None for an export, which `_support` finds chips for.
      device: of the stand-in driver, in emulation.
      partitioned: whether XLA splits the program among several devices, at least along some axes.
    """

    platform: str
    chips: list[str] | None
    device: int | None = None
    partitioned: bool = False

    @property
    def carries(self) -> bool:
        """Whether the program carries its kernels, as it may leave this machine."""
        return self.chips is None


def target_of(ctx: mlir.LoweringRuleContext, platform: str | None) -> Target:
    """What is lowered for, by a rule of this platform; None: of all that have no own rule."""
    platform = platform or (ctx.platforms or ctx.module_context.platforms)[0]
    chips, emulated = _chips(ctx, platform), emulation.value
    exports = ctx.module_context.lowering_parameters.for_export
    if platform == "cpu" and emulated is not None and not exports:
        return Target(platform_of(emulated.chip), [emulated.chip], emulated.device)
    return Target(platform, chips, partitioned=_is_partitioned(ctx.module_context.axis_context))


def _is_partitioned(context: Any) -> bool:
    """Whether XLA's partitioner looks at what is lowered in this context of JAX's."""
    manual = getattr(context, "manual_axes", None)
    if manual is None:
        return getattr(context, "num_devices", 1) > 1
    return any(n > 1 for name, n in context.mesh.shape.items() if name not in manual)


def _support(plan: AnyPlan, target: Target) -> tuple[Support, list[str]]:
    """What serves a plan, and for which chips."""
    if target.chips is not None or target.platform not in chip_table.DSLS:
        return registry.chosen(plan, target.platform, target.chips or ()), target.chips or []
    found = registry.chosen(plan, target.platform, ())  # an export: some chip at least
    every = store.exported(chip_table.chips_of(chip_table.DSLS[target.platform]))
    if found.kernels and not every:
        reason = f"{plan.name}: JAX_MX_ARCHS names no chip of {target.platform}; 'xla' serves it"
        _say_once(f"exporting without kernels: {reason}")
        named = plan.implementation
        return Support(named, reason=reason) if named else Support("xla"), []
    each = {chip: registry.candidates(plan, target.platform, [chip])[0] for chip in every}
    chips = [chip for chip, support in each.items() if support.kernels]
    if found.kernels and len(chips) < len(every):
        missing = [chip for chip in every if chip not in chips]
        _say_once(
            f"exporting {plan.name} without kernels for {', '.join(missing)}: {each[missing[0]]}"
        )
    if every and not found.kernels and store.names_chips():
        refused = registry.candidates(plan, target.platform, every[:1])[0]
        _say_once(f"exporting {plan.name} without kernels for {', '.join(every)}: {refused}")
    if found.kernels and not chips:
        found = registry.chosen(plan, target.platform, every[:1])  # "xla", or why not the one named
    return found, chips


@functools.cache
def _say_once(sentence: str) -> None:
    logger.warning("jax_mx: %s", sentence)


def _kernel_attributes(
    plan: AnyPlan, kernel: Binary, chips: Sequence[str], carries: bool
) -> dict[str, dict[str, Any]]:
    """The attribute `kernels` of the call target: chip -> attributes (ffi/launch.cc).

    An export goes without chips whose kernel does not compile, as long as there are others.

    Raises:
      CompileError: a kernel is not there and cannot be compiled.
    """
    found = {}
    for chip in chips:
        try:
            artifact = store.get(kernel, cast(str, chip_table.arch_of(chip)))
        except compiler.CompileError as error:
            if not carries or (chip == chips[-1] and not found):
                raise
            _say_once(f"exporting {plan.name} without a kernel for {chip}: {error}")
        else:
            found[chip] = artifact.attributes(plan.launch, plan.scalars, carries)
    return found


def _sharding_attributes(
    ctx: mlir.LoweringRuleContext, signature: Signature, batch: int
) -> dict | None:
    """What lets the partitioner split the call along its first `batch` dimensions."""
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    if not all(core.is_constant_shape(aval.shape) for aval in avals):
        return None  # shape-polymorphic: sharding rules need numbers
    if signature.has_replicated:
        return None  # see there
    # A factor for each other dimension, none of them shared.
    names = map("d{}".format, itertools.count())
    terms = [["...", *itertools.islice(names, len(aval.shape) - batch)] for aval in avals]
    n = len(ctx.avals_in)
    sides = [", ".join(" ".join(term) for term in side) for side in (terms[:n], terms[n:])]
    rule = str_to_sdy_sharding_rule(
        " -> ".join(sides),
        need_replication_factors=tuple(name for term in terms for name in term[1:]),
    )
    types: list[ir.Type] = [
        ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype)) for aval in avals
    ]
    return {
        "mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": str(batch)}),
        "sdy.sharding_rule": sdy_sharding_rule_to_mlir(rule, types[:n], types[n:]),
    }


def _order(array: Array, view: View | None) -> tuple[int, ...]:
    """How an array of a call lies in memory: its tail's dimensions, slowest first."""
    if view is None or not array.role.is_batched:
        return ()  # as it is
    if array.role in (Role.FLOATS, Role.BLOCK_DATA):
        return view.operand
    result = view.results[array.of]
    return result.order_in(result.values_in if array.role is Role.CODES else result.layout)


def _call(
    ctx: mlir.LoweringRuleContext,
    *operands,
    plan: AnyPlan,
    view: View | None,
    kernels: Mapping[str, Mapping[str, Any]],
    device: int | None = None,
):
    """The custom call, each array in the memory order that the view says.

    Args:
      ctx: JAX's.
      operands: MLIR values, those of the plan's signature that the call has.
      plan: the call.
      view: of its arrays; the plan's own, or with row-major values; None: they lie as they are.
      kernels: see `_kernel_attributes`.
      device: see `Target`.
    """
    signature = plan.signature
    arrays = (*signature.present(plan.lacks), *signature.results)
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    layouts = [
        minor_to_major(aval.ndim, _order(array, view))
        for array, aval in zip(arrays, avals, strict=True)
    ]
    batch, merge = 0, ()
    if view is not None:
        pairs = zip(arrays, avals, strict=True)
        floats = [aval for array, aval in pairs if array.role is Role.FLOATS]
        batch = view.batch(floats[0].ndim) if floats else 0
        merge = view.merge
    n = len(ctx.avals_in)
    rule = ffi.ffi_lowering(
        store.TARGET,
        operand_layouts=layouts[:n],
        result_layouts=layouts[n:],
        extra_attributes=_sharding_attributes(ctx, signature, batch),
        operand_output_aliases=plan.aliases if isinstance(plan, ProductPlan) else None,
    )
    absent = [signature.number(name) for name in plan.lacks]
    attributes = launch.call_attributes(kernels, merge=merge, absent=absent, device=device)
    return rule(ctx, *operands, **attributes)


def _call_and_pack(ctx: mlir.LoweringRuleContext, *operands, plan: Plan, **call: Any):
    """The custom call of a kernel that gives row-major values, which XLA then puts into tiles."""
    rows, tiled = plan.view.in_rows(), plan.view
    avals = _quantized(_floats(ctx.avals_in, plan), rows, plan)
    beside = ctx.avals_out[len(avals) :]
    avals = [*avals, *beside]
    outs = _call(ctx.replace(avals_out=avals), *operands, plan=plan, view=rows, **call)

    def pack(*outs):
        outs, rest = outs[: len(outs) - len(beside)], outs[len(outs) - len(beside) :]
        values = [r.pack(v, r.values_in) for r, v in zip(tiled.results, outs[::2], strict=True)]
        return [*(a for pair in zip(values, outs[1::2], strict=True) for a in pair), *rest]

    return mlir.lower_fun(pack, multiple_results=True)(ctx.replace(avals_in=avals), *outs)


def _lower(reference_fn: Callable, platform: str | None, ctx, *operands, plan: AnyPlan):
    """The call of a kernel; where none serves the plan, the reference.

    Args:
      reference_fn: the op in jnp, on views.
      platform: that the rule is registered for; None for all that have no kernels.
      ctx: JAX's.
      operands: MLIR values.
      plan: the call.

    Raises:
      NotImplementedError: the implementation that the plan names does not serve it.
      CompileError: a kernel does not compile, and the caller named its implementation, or other
        processes of the program may have it.
    """
    target = target_of(ctx, platform)
    written = value_layouts_of(chip_table.DSLS.get(target.platform, ""), plan.scale_layout.name)
    in_rows = any(layout.name not in written for layout in plan.value_layouts)
    kernel_plan = plan
    if in_rows:
        assert isinstance(plan, Plan)
        rows = (ROW_MAJOR_VALUES,) * len(plan.value_layouts)
        kernel_plan = dataclasses.replace(plan, value_layouts=rows)
    support, chips = _support(kernel_plan, target)
    _check_processes(kernel_plan, target, support)
    if not support:
        raise NotImplementedError(support.reason)
    if support.via_floats or (plan.signature.has_source and target.partitioned):
        reference_fn = _quantize_via_floats  # XLA splits them, and the call behind
    elif support.via_transpose:
        reference_fn = _quantize_via_transpose
    elif support.kernels:
        (kernel,) = support.kernels
        try:
            kernels = _kernel_attributes(kernel_plan, kernel, chips, target.carries)
        except compiler.CompileError as error:
            if plan.implementation is not None or jax.process_count() > 1:
                raise
            _say_once(f"{plan.name} takes XLA: {error}")
        else:
            call: dict[str, Any] = {"plan": plan, "kernels": kernels, "device": target.device}
            if in_rows:
                return _call_and_pack(ctx, *operands, **call)
            return _call(ctx, *operands, view=plan.view, **call)
    return mlir.lower_fun(reference_fn, multiple_results=True)(ctx, *operands, plan=plan)


def _check_processes(plan: AnyPlan, target: Target, support: Support) -> None:
    """In a program of several processes, insists on the kernel that the tables promise.

    Each process lowers for itself, and all must come to the same program. The tables of facts are
    the same everywhere; what an installation holds may not be. So where the tables have a kernel
    and this process cannot get it, the process stops instead of taking XLA.

    Raises:
      RuntimeError: so it is.
    """
    served = support.kernels and not support.via_floats
    if served or plan.implementation is not None or target.chips is None:
        return
    if target.platform not in chip_table.DSLS:
        return
    by_tables = registry.chosen(plan, target.platform, ())
    known = chip_table.chips_of(chip_table.DSLS[target.platform])
    if not by_tables.kernels or any(chip not in known for chip in target.chips or ()):
        return
    if support.kernels and by_tables.via_floats:
        return
    refused = registry.candidates(plan, target.platform, target.chips or ())[0]
    if jax.process_count() > 1:
        raise RuntimeError(
            f"{refused.reason.partition('; ')[0]}. Other processes of this program "
            "may have the kernel, and all must take the same: install it everywhere, or pass "
            "implementation='xla' everywhere"
        )
    _say_once(refused.reason)


# ---- vmap and derivatives ---
def _batch(primitive: Primitive, args, dims, *, plan: Plan):
    """Leading dimensions are batch dimensions, so a new one goes to the front.

    Operands that are replicated stay as they are; where they differ from entry to entry, so do the
    calls, one after the other.
    """
    present = plan.signature.present(plan.lacks)
    if plan.source in NORMS:
        if plan.takes_slabs and dims[-1] is None:
            size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
            moved = [
                jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
                for a, d in zip(args[:-1], dims[:-1], strict=True)
            ]
            outs = primitive.bind(*moved, args[-1], plan=plan)
            return outs, [0] * len(outs)
        call = jax.vmap(functools.partial(_quantize_via_floats, plan=plan), dims)
        outs = call(*args)
        return outs, [0] * len(outs)
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    each = list(zip(present, args, dims, strict=True))
    if any(not array.role.is_batched and d is not None for array, _, d in each):
        return one_by_one(functools.partial(primitive.bind, plan=plan), args, dims)
    args = [
        a
        if not array.role.is_batched
        else jnp.broadcast_to(a, (size, *a.shape))
        if d is None
        else jnp.moveaxis(a, d, 0)
        for array, a, d in each
    ]
    outs = primitive.bind(*args, plan=plan)
    return outs, [0] * len(outs)


def one_by_one(bind: Callable[..., list], args, dims) -> tuple[list, list]:
    """A call for each entry of the batch, one after the other."""
    moved = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]

    def one(mapped):
        rest: Iterator = iter(mapped)
        own = [a if d is None else next(rest) for a, d in zip(moved, dims, strict=True)]
        return bind(*own)

    outs = jax.lax.map(one, [a for a, d in zip(moved, dims, strict=True) if d is not None])
    return outs, [0] * len(outs)


def _no_derivative(*_, plan: AnyPlan, **__):
    if isinstance(plan, ProductPlan):
        raise NotImplementedError(
            f"{plan.op} has no derivative of its own, as codes have none; use the product that has "
            "one, jax_mx.dot_general, or jax.lax.stop_gradient(x)"
        )
    raise NotImplementedError(
        f"{plan.name} has no derivative, as codes have none; jax_mx.fake_quantize(x) is quantize "
        "and dequantize with a straight-through one, jax.lax.stop_gradient(x) stops asking for one "
        "(jax_mx.dot_general, ragged_dot, mlp and moe have first derivatives, no second ones)"
    )


# ---- registration ---
def define(
    name: str, avals: Callable, lower: Callable, batch: Callable, no_derivative: Callable
) -> Primitive:
    """A primitive of several results, with all of JAX's rules.

    Args:
      name: of the primitive.
      avals: abstract values of results, from those of operands and the parameters.
      lower: the lowering rule, with the platform that it is registered for before its arguments;
        None for all that have no kernels.
      batch: the rule of vmap.
      no_derivative: raises.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    primitive.def_abstract_eval(avals)
    mlir.register_lowering(primitive, functools.partial(lower, None))
    for platform in (*chip_table.DSLS, "cpu"):  # where there may be a kernel; the CPU emulates one
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = no_derivative
    ad.primitive_transposes[primitive] = no_derivative
    return primitive


def make_primitive(
    op: str, avals: Callable, reference_fn: Callable, batch: Callable = _batch
) -> Primitive:
    """The primitive of an op on views that is declared in facts/signatures.py.

    Args:
      op: its name.
      avals: abstract values of results, from those of operands and the plan.
      reference_fn: the op in jnp, on views, with the keyword `plan`.
      batch: its rule for vmap, which takes the primitive before JAX's arguments.
    """

    def rule(args, dims, *, plan: AnyPlan):
        return batch(primitive, args, dims, plan=plan)

    lower = functools.partial(_lower, reference_fn)
    primitive = define(f"mx_{op}", avals, lower, rule, _no_derivative)
    return primitive


# ---- products: x (T, K), W (G, N, K), one after the other ---
def unsplit(op: str, operands: Sequence[Any], shape: tuple[int, ...], dtype: Any):
    """The abstract value of a result that, on a mesh with explicit axes, is not split.

    Args:
      op: for messages.
      operands: abstract values, which vary over the same manual axes; the result does.
      shape: of the result.
      dtype: likewise.
    """
    core.standard_vma_rule(op, *operands)
    like = operands[0]
    sharding = like.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _product_avals(*operands, plan: ProductPlan):
    """Of y (T, N)."""
    codes, scales = (operands[plan.signature.number(name)] for name in ("codes", "scales"))
    columns = scales.shape[2] * BLOCK if plan.free else codes.shape[1]
    shape = (operands[0].shape[0], columns // 2 if plan.activation else columns)
    return [unsplit(f"mx_{plan.op}", operands, shape, plan.dtype)]


def _wgrad_avals(*operands, plan: ProductPlan):
    """Of y (G, M, N), likewise."""
    names = ("x_codes", "codes", "group_sizes")
    x, codes, sizes = (operands[plan.signature.number(name)] for name in names)
    shape = (sizes.shape[0], x.shape[0], codes.shape[0])
    return [unsplit(f"mx_{plan.op}", operands, shape, plan.dtype)]


def _floats_wgrad_avals(*operands, plan: ProductPlan):
    """Of y (G, K, N), or without sizes (..., K, N), likewise."""
    x, dy = operands[:2]
    lead = operands[2].shape if plan.grouped else x.shape[:-2]
    shape = (*lead, x.shape[-1], dy.shape[-1])
    return [unsplit(f"mx_{plan.op}", operands, shape, plan.dtype)]


def _batch_wgrad(primitive: Primitive, args, dims, *, plan: ProductPlan):
    """Of floats: leading dimensions are batch dimensions; else one call after the other."""
    if plan.grouped or plan.epilogue or plan.op != "wgrad":
        return one_by_one(functools.partial(primitive.bind, plan=plan), args, dims)
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    args = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args, dims, strict=True)
    ]
    return primitive.bind(*args, plan=plan), [0]


def _batch_product(primitive: Primitive, args, dims, *, plan: ProductPlan):
    """Entries of the batch become groups; or more rows of x, where all have the same one matrix.

    With sizes of groups or an epilogue, one call after the other.
    """
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    if plan.grouped or plan.epilogue:
        return one_by_one(functools.partial(primitive.bind, plan=plan), args, dims)
    matrix = plan.signature.number("codes")  # from there on, W's arrays
    shared = args[matrix].ndim == 3 and dims[matrix] is None and dims[matrix + 1] is None
    args = [
        a
        if shared and args[matrix].shape[0] == 1 and i >= matrix
        else jnp.broadcast_to(a, (size, *a.shape))
        if d is None
        else jnp.moveaxis(a, d, 0)
        for i, (a, d) in enumerate(zip(args, dims, strict=True))
    ]
    rows = args[0].shape[1]
    ranks = [3 if array.name in ("codes", "scales") else 2 for array in plan.signature.operands]
    flat = [
        a.reshape(-1, *a.shape[2:]) if a.ndim > rank else a
        for a, rank in zip(args, ranks, strict=False)
    ]
    (y,) = primitive.bind(*flat, plan=plan)
    return [y.reshape(size, rows, y.shape[-1])], [0]


# ---- amaxes of rows and of columns ---
def _amaxes_avals(x, *, plan: ProductPlan):
    """Of x (batch, T, K), which is not split."""
    return [unsplit("mx_amaxes", [x], (x.shape[0], n), plan.dtype) for n in x.shape[1:]]


def _of_both_avals(view, *, plan: Plan):
    """For each direction as `reference.amax_of` keeps dimensions."""
    core.standard_vma_rule("mx_amaxes_of_both", view)
    found = []
    for result in plan.view.results:
        along = [d % view.ndim for d in plan.view.along(result)]
        shape = tuple(1 if i in along else n for i, n in enumerate(view.shape))
        spec = [None if i in along else axes for i, axes in enumerate(view.sharding.spec)]
        sharding = view.sharding.update(spec=PartitionSpec(*spec))
        found.append(view.update(shape=shape, dtype=AMAX, weak_type=False, sharding=sharding))
    return found


def _of_both_reference(view, *, plan: Plan):
    return [reference.amax_of(view, plan.view.along(result)) for result in plan.view.results]


def _of_both_from_matrices(view, *, plan: Plan):
    """The same of x as it lies: a kernel reads it once."""
    lead = view.ndim - plan.view.tail
    rows, columns = (view.shape[lead + i] * BLOCK for i in range(2))
    order = (*range(lead), *(lead + i for i in plan.view.operand))
    x = view.transpose(order).reshape(-1, rows, columns)
    alone = ProductPlan("amaxes", (), AMAX, False, 128)
    found = products_p["amaxes"].bind(x, plan=alone)
    avals = _of_both_avals(jax.typeof(view), plan=plan)
    return [a.reshape(aval.shape) for a, aval in zip(found, avals, strict=True)]


def _lower_of_both(platform: str | None, ctx, view, *, plan: Plan):
    """By the kernel where XLA splits nothing, else by its two reductions."""
    target = target_of(ctx, platform)
    one_read = plan.implementation != "xla" and not target.partitioned and plan.view.units is None
    fn = _of_both_from_matrices if one_read and target.platform == "cuda" else _of_both_reference
    return mlir.lower_fun(fn, multiple_results=True)(ctx, view, plan=plan)


def _batch_of_both(args, dims, *, plan: Plan):
    """Leading dimensions are batch dimensions."""
    found = amaxes_of_both_p.bind(jnp.moveaxis(args[0], dims[0], 0), plan=plan)
    return found, [0] * len(found)


def _batch_amaxes(primitive: Primitive, args, dims, *, plan: ProductPlan):
    """More matrices."""
    x = jnp.moveaxis(args[0], dims[0], 0)
    found = primitive.bind(x.reshape(-1, *x.shape[2:]), plan=plan)
    return [a.reshape(*x.shape[:2], -1) for a in found], [0] * len(found)


AMAX = np.dtype(np.uint32)  # the bits of a float32
FACTOR = np.dtype(np.float32)
store.register()
quantize_p = make_primitive("quantize", _quantize_avals, _quantize_reference)
dequantize_p = make_primitive("dequantize", _dequantize_avals, _dequantize_reference)
products_p = {
    op: make_primitive(op, avals, reference_fn, batch)
    for op, avals, reference_fn, batch in (
        ("matmul", _product_avals, reference.matmul, _batch_product),
        ("matmul_fp8", _product_avals, reference.matmul_fp8, _batch_product),
        ("wgrad_fp8", _wgrad_avals, reference.wgrad_fp8, _batch_wgrad),
        ("wgrad", _floats_wgrad_avals, reference.wgrad, _batch_wgrad),
    )
}


products_p["amaxes"] = make_primitive("amaxes", _amaxes_avals, reference.amaxes, _batch_amaxes)
amaxes_of_both_p = define(
    "mx_amaxes_of_both", _of_both_avals, _lower_of_both, _batch_of_both, _no_derivative
)


def dequantize(values: jax.Array, scales: jax.Array, plan: Plan) -> jax.Array:
    """Binds `dequantize_p`, both operands varying over the same manual axes."""
    (out,) = dequantize_p.bind(*vary_alike(values, scales), plan=plan)
    return out


def quantize(operands: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds `quantize_p`, all operands varying over the same manual axes.

    Args:
      operands: the view of the floats and those of the plan's `given_data`; or what the plan's
        source has. "rows": x (T, K), and numbers of rows (R, 1); of an activation x (T, 2, K), or
        (T, K, 2) of gates and ups by turns, and weights (R, 1); of its gradient these and dy
        (T, K); of a norm x (..., T, K), of a sum the residual, and float32 weights (K,). An axis of
        length n that blocks run along is two: n / 32 and 32; by turns n / 32 and 64.
      plan: the call.

    Returns:
      Views of each result's values and scales, by the name `CHECKPOINT_NAME`; of a norm, then the
      factors of rows, float32 (..., T), and the sum, as x lies.
    """
    view, *given = vary_alike(*operands) if len(operands) > 1 else operands
    data = given if plan.source else _with_derived(view, given, plan)
    outs = quantize_p.bind(view, *data, plan=plan)
    quantized = 2 * len(plan.formats)
    return [*_checkpointed(outs[:quantized]), *outs[quantized:]]


def _checkpointed(given: Sequence[jax.Array]) -> list[jax.Array]:
    """What the primitive gives, by the name `CHECKPOINT_NAME`.

    As bytes: jax.checkpoint puts all floats that it keeps through lax.reduce_precision, which takes
    each type for one with infinities, and so makes infinities of e4m3fn's codes from 256 on.
    """
    outs = []
    for out in given:
        bits = checkpoint_name(jax.lax.bitcast_convert_type(out, jnp.uint8), CHECKPOINT_NAME)
        outs.append(jax.lax.bitcast_convert_type(bits, out.dtype))
    return outs


def product(operands: Sequence[jax.Array], plan: ProductPlan) -> jax.Array:
    """Binds a product's primitive, all operands varying over the same manual axes."""
    (y,) = products_p[plan.op].bind(*vary_alike(*operands), plan=plan)
    return y
