"""The ops as JAX primitives; the only module that touches JAX's extension points.

Operands come as views (forms.py): every dimension but the last, or the last two, which are a block,
is a batch dimension, to vmap, to the partitioner and to the kernel alike. So a sharded array is
quantized where it lies.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import ffi
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

from jax_mx.lowering import store as artifacts
from jax_mx import reference
from jax_mx.facts import launch, variants
from jax_mx.facts.formats import BLOCK, SCALE_DTYPE, Scaling
from jax_mx.arrays.views import Form, minor_to_major
from jax_mx.facts.layouts import ROW_MAJOR, ROW_MAJOR_VALUES
from jax_mx.lowering.plan import IMPLEMENTATIONS, Plan

# What makes operands vary over the same manual axes; since 0.10.1 under the first name.
_vary_alike = getattr(core, "auto_insert_reshard", None) or vars(core)["standard_insert_pvary"]

KERNELS = {platform: name for name, platform in IMPLEMENTATIONS.items() if platform != "any"}


class Emulated(NamedTuple):
    """What the CPU stands in for (jax_mx.testing.emulate)."""

    chip: str
    device: int  # of the stand-in driver


emulation = jax.make_user_context(default_value=None)  # an `Emulated`; part of JAX's caches' keys


# ---- the ops ---
def _quantize_avals(x, *words, plan: Plan):
    """Values and scales of each result, for a view of the plan's form.

    Words are uint32, one for each block, so of the view's shape with 1 for what a block spans: of
    each result its treatment's, seeds first.
    """
    core.standard_vma_rule("mx_quantize", x, *words)
    return _quantized(x, plan.views, plan)


def _quantized(x, form: Form, plan: Plan) -> list:
    """The abstract values and scales of each of the form's results."""
    out = []
    for result, format in zip(form.results, plan.formats, strict=True):
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
    (result,) = plan.views.results
    shape = result.view_shape(values.shape)
    return [values.update(shape=shape, dtype=plan.dtype, weak_type=False)]


def _quantize_reference(x, *words, plan: Plan):
    out, words = [], iter(words)
    results = zip(plan.views.results, plan.formats, plan.treatments, strict=True)
    for result, format, treatment in results:
        y, noise = x, None
        if treatment.stochastic:
            noise = reference.noise(next(words), result.block)
            noise = jnp.moveaxis(noise, result.block, result.last)
        if treatment.hadamard:
            (along,) = result.block
            flips = treatment.flips
            flips = next(words) if flips is None else result.by_parity(flips, y.shape)
            y = reference.flipped(y, flips, along)
            y = reference.hadamard(reference.widened(y), treatment.hadamard, along, result.number)
        if treatment.prescale is not None:
            y = reference.times(reference.widened(y), treatment.prescale)
        blocks, scaling = jnp.moveaxis(y, result.block, result.last), cast(Scaling, plan.scaling)
        how = (format, scaling, result.last, plan.zero_scale, noise)
        values, scales = reference.quantize(blocks, *how)
        values, scales = (jnp.moveaxis(a, result.last, result.block) for a in (values, scales))
        out += [result.pack(values, result.values_in), result.pack(scales, result.layout)]
    return out


def _row_plans(plan: Plan) -> list[Plan]:
    """Of each result, the plan of quantizing it along a last axis, by itself."""
    alone = {"op": "quantize", "axis": -1, "transpose": False, "scale_layout": ROW_MAJOR}
    alone |= {"value_layouts": (ROW_MAJOR_VALUES,)}
    return [
        dataclasses.replace(plan, formats=(format,), treatments=(treatment,), **alone)
        for format, treatment in zip(plan.formats, plan.treatments, strict=True)
    ]


def _quantize_by_rows(x, *words, plan: Plan):
    """`_quantize_reference`, with the primitive along rows: x is transposed for it."""
    out, words, form = [], iter(words), plan.views
    lead = x.ndim - form.tail
    for result, alone in zip(form.results, _row_plans(plan), strict=True):
        (block,) = (dimension % form.tail for dimension in result.block)
        order = (*(i for i in result.order if i != block), block)  # results lie so, or nearly
        operands = [x, *itertools.islice(words, alone.treatments[0].words)]
        outs = quantize_p.bind(*(form.reordered(a, order) for a in operands), plan=alone)
        back = [*range(lead), *(lead + order.index(i) for i in range(form.tail))]
        values, scales = (a.transpose(back) for a in outs)
        out += [result.pack(values, result.values_in), result.pack(scales, result.layout)]
    return out


def _dequantize_reference(values, scales, *, plan: Plan):
    (result,) = plan.views.results
    scales = result.unpack(scales, result.view_shape(values.shape))
    values, scales = (jnp.moveaxis(a, result.block, result.last) for a in (values, scales))
    y = reference.dequantize(values, scales, plan.format, plan.dtype)
    return [jnp.moveaxis(y, result.last, result.block)]


# ---- which kernel ---
def kernels_for(plan: Plan, platform: str, chips: Sequence[str] | None) -> dict[str, dict]:
    """The attribute `kernels` of the call target (ffi/launch.cc).

    Args:
      plan: the call.
      platform: JAX's name of it, as lowering has it.
      chips: as drivers name them ("sm_90"); None: every chip that this installation has binaries
        for.

    Raises:
      NotImplementedError: no kernel serves the plan there; says why.
    """
    implementation = KERNELS.get(platform)
    if plan.implementation not in (None, implementation):
        where = IMPLEMENTATIONS[plan.implementation]
        raise NotImplementedError(
            f"{plan.op}: implementation {plan.implementation!r} runs on {where}, not on "
            f"{platform}; use implementation=None or 'xla'"
        )
    if implementation is None or implementation not in variants.ARCHS:
        raise NotImplementedError(f"{plan.op}: no kernels for {platform}; 'xla' serves it")
    archs = {variants.device_arch(arch): arch for arch in variants.ARCHS[implementation]}
    for chip in chips or ():
        if chip not in archs:
            raise NotImplementedError(
                f"{plan.op}: no {implementation} kernel for {chip}, only for {', '.join(archs)}; "
                "'xla' serves it"
            )
    variant = variants.choose(plan, implementation)
    if chips is None:  # all but where that is none, which load says
        chips = [chip for chip, arch in archs.items() if artifacts.holds(variant, arch)] or [*archs]
    return {
        chip: artifacts.load(variant, archs[chip]).attributes(plan.scale_layout.name, plan.params)
        for chip in chips
    }


def calls_for(
    plan: Plan, platform: str, chips: Sequence[str] | None
) -> tuple[bool, list[dict[str, dict]]]:
    """Whether it takes calls along rows, one per result; and `kernels_for` of each call.

    Raises:
      NotImplementedError: as `kernels_for` does.
    """
    try:
        return False, [kernels_for(plan, platform, chips)]
    except NotImplementedError:
        # Treated plans alone, of which few have kernels of their own; and not transforms that span
        # two blocks: rows do not tell which blocks are neighbours.
        treated = any(str(treatment) for treatment in plan.treatments)
        if plan.is_square or not treated or any(t.group > BLOCK for t in plan.treatments):
            raise
    try:
        return True, [kernels_for(alone, platform, chips) for alone in _row_plans(plan)]
    except NotImplementedError as error:
        _, _, reason = str(error).partition(":")
        raise NotImplementedError(f"{plan.op}:{reason}") from error


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
        known = ", ".join(
            variants.device_arch(a) for archs in variants.ARCHS.values() for a in archs
        )
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
def _sharding_attributes(ctx: mlir.LoweringRuleContext, batch: int) -> dict | None:
    """What lets the partitioner split the call along its first `batch` dimensions."""
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    if not all(core.is_constant_shape(aval.shape) for aval in avals):
        return None  # shape-polymorphic: sharding rules need numbers
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


def _absent(plan: Plan) -> list[int]:
    """The numbers of a kernel's operands that the call does not have: what they say is a scalar."""
    present = [True]
    for treatment in plan.treatments:
        present += [True] * treatment.stochastic
        present += [treatment.flips is None] * (treatment.hadamard > 0)
    return [i for i, there in enumerate(present) if not there]


def _call(
    ctx: mlir.LoweringRuleContext,
    *operands,
    plan: Plan,
    form: Form | None = None,
    **attributes: Any,
):
    """The custom call, each array in the memory order that its form, by default the plan's, has."""
    form = form or plan.views
    turn = -1 if plan.op == "dequantize" else 1  # which side is the unquantized one
    (x, *_), avals = cast(Any, (ctx.avals_in, ctx.avals_out)[::turn])
    layouts = []
    for result, values, scales in zip(form.results, avals[::2], avals[1::2], strict=True):
        layouts.append(minor_to_major(values.ndim, result.order_in(result.values_in)))
        layouts.append(minor_to_major(scales.ndim, result.order_in(result.layout)))
    views = [minor_to_major(x.ndim, form.operand)]  # of x, and of its words
    operand_layouts, result_layouts = (views, layouts)[::turn]
    operand_layouts += views * (len(ctx.avals_in) - len(operand_layouts))
    rule = ffi.ffi_lowering(
        artifacts.TARGET,
        operand_layouts=operand_layouts,
        result_layouts=result_layouts,
        extra_attributes=_sharding_attributes(ctx, form.batch(x.ndim)),
    )
    attributes["abi"] = np.int64(launch.ABI)
    if absent := _absent(plan):
        attributes["absent"] = np.array(absent, dtype=np.int64)
    if form.merge:
        attributes["merge"] = np.array(form.merge, dtype=np.int64)
    return rule(ctx, *operands, **attributes)


def _call_and_pack(ctx: mlir.LoweringRuleContext, *operands, plan: Plan, **attributes: Any):
    """The custom call of a kernel that gives row-major values, which XLA then puts into tiles."""
    form, tiled = plan.views.in_rows(), plan.views
    avals = _quantized(ctx.avals_in[0], form, plan)
    outs = _call(ctx.replace(avals_out=avals), *operands, plan=plan, form=form, **attributes)

    def pack(*outs):
        values = [r.pack(v, r.values_in) for r, v in zip(tiled.results, outs[::2], strict=True)]
        return [a for pair in zip(values, outs[1::2], strict=True) for a in pair]

    return mlir.lower_fun(pack, multiple_results=True)(ctx.replace(avals_in=avals), *outs)


def _lower_reference(reference_fn: Callable, ctx, *operands, plan: Plan):
    if plan.implementation not in (None, "xla"):
        calls_for(plan, (ctx.platforms or ctx.module_context.platforms)[0], None)  # raises
    return mlir.lower_fun(reference_fn, multiple_results=True)(ctx, *operands, plan=plan)


def _lower_kernel(reference_fn: Callable, platform: str, ctx, *operands, plan: Plan):
    """The call of a kernel; where none serves the plan, the reference."""
    chips, attributes, emulated = _chips(ctx, platform), {}, emulation.value
    exports = ctx.module_context.lowering_parameters.for_export
    if platform == "cpu" and emulated is not None and not exports:
        platform, chips = platform_of(emulated.chip), [emulated.chip]
        attributes["device"] = np.int64(emulated.device)
    if plan.implementation != "xla":
        written = variants.value_layouts_of(KERNELS.get(platform, ""), plan.scale_layout.name)
        call, kernel = _call, plan
        if any(layout.name not in written for layout in plan.value_layouts):
            rows = (ROW_MAJOR_VALUES,) * len(plan.value_layouts)
            call, kernel = _call_and_pack, dataclasses.replace(plan, value_layouts=rows)
        try:
            by_rows, (kernels, *_) = calls_for(kernel, platform, chips)
        except NotImplementedError:
            if plan.implementation is not None:
                raise
        else:
            if not by_rows:
                return call(ctx, *operands, plan=plan, kernels=kernels, **attributes)
            reference_fn = _quantize_by_rows
    return mlir.lower_fun(reference_fn, multiple_results=True)(ctx, *operands, plan=plan)


# ---- registration ---
def _batch(primitive: Primitive, args, dims, *, plan: Plan):
    """Leading dimensions are batch dimensions, so a new one goes to the front."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    args = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args, dims, strict=True)
    ]
    outs = primitive.bind(*args, plan=plan)
    return outs, [0] * len(outs)


def _no_derivative(*_, plan: Plan, **__):
    raise NotImplementedError(
        f"{plan.op} has no derivative, as codes have none; jax_mx.fake_quantize(x) is quantize and "
        "dequantize with a straight-through one, jax.lax.stop_gradient(x) stops asking for one"
    )


def _primitive(op: str, avals: Callable, reference_fn: Callable) -> Primitive:
    primitive = Primitive(f"mx_{op}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    primitive.def_abstract_eval(avals)
    mlir.register_lowering(primitive, functools.partial(_lower_reference, reference_fn))
    for platform in (*KERNELS, "cpu"):  # where there may be a kernel; on the CPU, an emulated one
        rule = functools.partial(_lower_kernel, reference_fn, platform)
        mlir.register_lowering(primitive, rule, platform=platform)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    ad.primitive_jvps[primitive] = _no_derivative
    ad.primitive_transposes[primitive] = _no_derivative
    return primitive


artifacts.register()
quantize_p = _primitive("quantize", _quantize_avals, _quantize_reference)
dequantize_p = _primitive("dequantize", _dequantize_avals, _dequantize_reference)


def dequantize(values: jax.Array, scales: jax.Array, plan: Plan) -> jax.Array:
    """Binds `dequantize_p`, both operands varying over the same manual axes."""
    (out,) = dequantize_p.bind(*_vary_alike(values, scales), plan=plan)
    return out


def quantize(view: jax.Array, words: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """Binds `quantize_p`, all operands varying over the same manual axes."""
    operands = _vary_alike(view, *words) if words else [view]
    return quantize_p.bind(*operands, plan=plan)
