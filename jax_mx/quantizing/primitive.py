"""The common rules of all ops as JAX primitives: the kernel that serves a plan, and vmap.

An op's operands come as views (formats/views.py). The partitioner may split every dimension of a
view, except inside a block or a unit, so a sharded array is quantized where it lies. The operands
of a source, such as rows or gates and ups, come as they lie. The signature
(quantizing/facts/signatures.py) gives each operand and result its role.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec
from jaxlib.mlir import ir

from jax_mx.formats.layouts import ROW_MAJOR_VALUES
from jax_mx.formats.sharding import is_explicit, shards_of
from jax_mx.formats.views import View, minor_to_major
from jax_mx.launch import calls, compiler, private, store
from jax_mx.launch import chips as chip_table
from jax_mx.launch.calls import batched, say_once
from jax_mx.launch.private import define, vary_alike
from jax_mx.launch.targets import Target, target_of
from jax_mx.quantizing import registry
from jax_mx.quantizing.facts.signatures import Array, Role
from jax_mx.quantizing.facts.variants import value_layouts_of
from jax_mx.quantizing.plan import AnyPlan, Plan, ProductPlan
from jax_mx.quantizing.registry import Refusal, Support


# ---- lowering ---
def _support(plan: AnyPlan, target: Target) -> tuple[Support, list[str]]:
    """The implementation that serves a plan, and the chips that it is for."""
    if target.chips is not None or target.platform not in chip_table.DSLS:
        return registry.chosen(plan, target.platform, target.chips or ()), target.chips or []
    choice = registry.chosen(plan, target.platform, ())  # an export: some chip at least
    every = store.exported(chip_table.chips_of(chip_table.DSLS[target.platform]))
    if choice.kernels and not every:
        why = f"JAX_MX_ARCHS names no chip of {target.platform}"
        refusal = Refusal(plan.name, why)
        say_once(f"exporting without kernels: {refusal}")
        named = plan.implementation
        return Support(named, refusal=refusal) if named else Support("xla"), []
    by_chip = {chip: registry.candidates(plan, target.platform, [chip])[0] for chip in every}
    chips = [chip for chip, support in by_chip.items() if support.kernels == choice.kernels]
    if choice.kernels and len(chips) < len(every):
        missing = [chip for chip in every if chip not in chips]
        say_once(
            f"exporting {plan.name} without kernels for {', '.join(missing)}: {by_chip[missing[0]]}"
        )
    if every and not choice.kernels and store.names_chips() and plan.implementation != "xla":
        refused = registry.candidates(plan, target.platform, every[:1])[0]
        say_once(f"exporting {plan.name} without kernels for {', '.join(every)}: {refused}")
    if choice.kernels and not chips:
        # "xla", or why not the one named.
        choice = registry.chosen(plan, target.platform, every[:1])
    return choice, chips


def serves_by_itself(plan: AnyPlan, target: Target) -> bool:
    """Whether a kernel serves a plan by itself, by the tables, which are alike in all processes."""
    with registry.by_tables():
        return _support(plan, target)[0].is_direct


def kernels_by_itself(plan: ProductPlan, target: Target) -> dict[str, dict[str, Any]] | None:
    """The attribute `kernels` of a plan that a kernel serves by itself; None where none does."""
    support, chips = _support(plan, target)
    if not support or not support.is_direct:
        return None
    (kernel,) = support.kernels
    try:
        launch = plan.launch, plan.scalars
        return calls.kernels_of(plan.name, kernel, chips, launch, target.carries)
    except compiler.CompileError:
        return None  # the call by itself says so


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
      operands: MLIR values for the operands of the plan's signature that the call has.
      plan: the call.
      view: of its arrays; the plan's own, or with row-major values; None: they lie as they are.
      kernels: see `calls.kernels_of`.
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
    absent = [signature.number(name) for name in plan.lacks]
    splits = not signature.has_replicated  # see there
    where = {"merge": merge, "absent": absent, "device": device, "aliases": signature.aliases}
    return calls.emit(
        ctx, *operands, kernels=kernels, layouts=layouts, batch=batch if splits else None, **where
    )


def _call_and_pack(ctx: mlir.LoweringRuleContext, *operands, op: Op, plan: Plan, **call: Any):
    """The custom call of a kernel that gives row-major values, which XLA then puts into tiles."""
    rows, tiled = plan.view.with_row_major_values(), plan.view
    avals = op.avals(*ctx.avals_in, plan=plan, view=rows)
    outs = _call(ctx.replace(avals_out=avals), *operands, plan=plan, view=rows, **call)

    def pack(*outs):
        quantized = 2 * len(tiled.results)
        outs, rest = outs[:quantized], outs[quantized:]
        values = [r.pack(v, r.values_in) for r, v in zip(tiled.results, outs[::2], strict=True)]
        return [*(a for pair in zip(values, outs[1::2], strict=True) for a in pair), *rest]

    return mlir.lower_fun(pack, multiple_results=True)(ctx.replace(avals_in=avals), *outs)


def _lower(op: Op, platform: str | None, ctx, *operands, plan: AnyPlan):
    """The call of a kernel; where none serves the plan, the reference.

    Args:
      op: the op that is lowered.
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
    row_major_values = any(layout.name not in written for layout in plan.value_layouts)
    kernel_plan = plan
    if row_major_values:
        assert isinstance(plan, Plan)
        rows = (ROW_MAJOR_VALUES,) * len(plan.value_layouts)
        kernel_plan = dataclasses.replace(plan, value_layouts=rows)
    support, chips = _support(kernel_plan, target)
    _check_processes(kernel_plan, target, support)
    if not support:
        raise NotImplementedError(support.reason)
    apart = plan.signature.has_source and target.partitioned
    in_jnp = _in_steps(op, support, apart) or op.reference
    if in_jnp is op.reference and support.kernels:
        (kernel,) = support.kernels
        try:
            launch = kernel_plan.launch, kernel_plan.scalars
            kernels = calls.kernels_of(plan.name, kernel, chips, launch, target.carries)
        except compiler.CompileError as error:
            if plan.implementation is not None or jax.process_count() > 1:
                raise
            say_once(f"{plan.name} takes XLA: {error}")
        else:
            call: dict[str, Any] = {"plan": plan, "kernels": kernels, "device": target.device}
            if row_major_values:
                return _call_and_pack(ctx, *operands, op=op, **call)
            return _call(ctx, *operands, view=plan.view, **call)
    return _in_jnp(ctx, in_jnp, operands, plan)


def _in_steps(op: Op, support: Support, apart: bool) -> Callable | None:
    """A function that computes an op in steps of primitives; `apart`: one step makes its floats."""
    if support.via_floats or apart:
        return op.via_floats  # XLA splits them, and the call behind
    if support.via_codes:
        return op.via_codes
    return op.via_transpose if support.via_transpose else None


def _in_jnp(ctx, fn: Callable, operands: Sequence[ir.Value], plan: AnyPlan):
    """`fn`, of operands that XLA does not take for constants where shapes have symbols.

    There XLA folds what it makes of a constant in an order of dimensions that it gets wrong: a
    weight that an exported program held came back transposed (jaxlib 0.12, CPU, 2026-11-23;
    without XLA's pass constant_folding it came back right).
    """

    def unfolded(*operands: jax.Array, plan: AnyPlan) -> list:
        return fn(*jax.lax.optimization_barrier(operands), plan=plan)

    symbols = ctx.module_context.shape_poly_state.dim_vars
    rule = mlir.lower_fun(unfolded if symbols else fn, multiple_results=True)
    return rule(ctx, *operands, plan=plan)


def _check_processes(plan: AnyPlan, target: Target, support: Support) -> None:
    """In a program of several processes, insists on the kernel that the tables promise.

    Each process lowers for itself, and all must come to the same program. The tables of facts are
    the same everywhere; installations may differ. So where the tables have a kernel and this
    process cannot get it, the process stops instead of taking another way. The tables promise a
    kernel that serves by itself first.

    Raises:
      RuntimeError: this process lacks the kernel.
    """
    if support.is_direct or not support:
        return
    if target.chips is None or target.platform not in chip_table.DSLS:
        return
    with registry.by_tables():
        promised = registry.chosen(plan, target.platform, target.chips)
    if promised == support:
        return
    refusal = registry.missing(promised, plan.name, target.chips, support)
    if jax.process_count() > 1:
        raise RuntimeError(
            f"{plan.name}: {refusal.why}. Other processes of this program may have the kernel, and "
            "all must take the same: install it everywhere, or pass implementation='xla' everywhere"
        )
    say_once(str(refusal))


# ---- vmap and derivatives ---
def batch(primitive: Primitive, args, dims, *, plan: AnyPlan):
    """Leading dimensions are batch dimensions, so a new one goes to the front.

    Operands that are replicated stay as they are. If they differ from entry to entry, each entry
    has a call, one after the other.
    """
    roles = [array.role for array in plan.signature.present(plan.lacks)]
    shared = [i for i, role in enumerate(roles) if not role.is_batched]
    if any(dims[i] is not None for i in shared):
        return one_by_one(functools.partial(primitive.bind, plan=plan), args, dims)
    outs = primitive.bind(*batched(args, dims, shared), plan=plan)
    return outs, [0] * len(outs)


def one_by_one(bind: Callable[..., list], args, dims) -> tuple[list, list]:
    """A call for each entry of the batch, one after the other.

    Where explicit axes of a mesh split the batch, each device calls for its own entries.
    """
    moved = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]

    def entries(*moved):
        def one(mapped):
            rest: Iterator = iter(mapped)
            operands = [a if d is None else next(rest) for a, d in zip(moved, dims, strict=True)]
            return bind(*operands)

        return jax.lax.map(one, [a for a, d in zip(moved, dims, strict=True) if d is not None])

    mapped = [a for a, d in zip(moved, dims, strict=True) if d is not None]
    names = dict.fromkeys(name for a in mapped for name in shards_of(a, 0)[0])
    if not names or not is_explicit(jax.typeof(mapped[0]).sharding.mesh):
        outs = entries(*moved)
    else:
        spec, whole = PartitionSpec((*names,)), PartitionSpec()
        outs = jax.shard_map(
            lambda *moved: entries(*vary_alike(*moved)),
            in_specs=tuple(whole if d is None else spec for d in dims),
            out_specs=spec,
            axis_names={*names},
        )(*moved)
    return outs, [0] * len(outs)


def no_derivative(*_, plan: AnyPlan, **__):
    """Says what has derivatives instead; JAX's rule for both modes."""
    firsts = "jax_mx.dot_general, matmul, ragged_dot, mlp and moe have first derivatives, no second"
    if isinstance(plan, ProductPlan):
        raise NotImplementedError(f"a product of codes has no derivative of its own; {firsts} ones")
    if plan.source.derivative:
        raise NotImplementedError(plan.source.derivative)
    raise NotImplementedError(
        f"{plan.name}: codes have no derivative; jax_mx.fake_quantize(x) is quantize and "
        "dequantize with a straight-through one, jax.lax.stop_gradient(x) stops asking for one "
        f"({firsts} ones)"
    )


# ---- registration ---
class Op(NamedTuple):
    """The parts of the rules of an op's primitive. Each function has the keyword `plan`.

    Attributes:
      avals: the abstract values of results, from the operands' ones. An op that writes layouts of
        values has the keyword `view` too, for another view of its arrays.
      reference: the op in jnp, on views, as "xla" computes it.
      batch: the rule of vmap, which takes the primitive before JAX's arguments.
      via_floats: the primitive on floats that XLA makes of its source.
      via_transpose: the primitive along rows, of x that XLA transposes.
      via_codes: the primitive that gives codes, and the one that makes floats of them.
    """

    avals: Callable[..., list]
    reference: Callable[..., list]
    batch: Callable[..., tuple[list, list]] = batch
    via_floats: Callable[..., list] | None = None
    via_transpose: Callable[..., list] | None = None
    via_codes: Callable[..., list] | None = None


def make_primitive(name: str, op: Op) -> Primitive:
    """The primitive mx_<name> of an op on views; `plan.signature` has its arrays."""

    def rule(args, dims, *, plan: AnyPlan):
        return op.batch(primitive, args, dims, plan=plan)

    lower = functools.partial(_lower, op)
    primitive = define(f"mx_{name}", op.avals, lower, rule, no_derivative)
    return primitive


mlir.register_lowering(jax.lax.reduce_precision_p, private.reduced)
