"""What all ops have in common as JAX primitives; the only module that uses names private to JAX.

An op's operands come as views (arrays/views.py). The partitioner may split every dimension of a
view but those inside of a block or a unit, so a sharded array is quantized where it lies; those of
a source, rows or gates and ups, come as they lie. What each operand and result is, its signature
says (facts/signatures.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax import ffi
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from jaxlib.mlir.dialects import stablehlo as hlo

# Private to JAX, all of it; used here alone, pinned by tests/test_primitive.py.
from jax._src import core, dispatch, sharding_impls, xla_bridge  # isort: skip
from jax._src.interpreters import ad as tangents, mlir as modules, partial_eval  # isort: skip
from jax._src.lib import xla_client  # isort: skip
from jax._src.custom_partitioning_sharding_rule import (  # isort: skip
    sdy_sharding_rule_to_mlir,
    str_to_sdy_sharding_rule,
)

from jax._src.core import ShardingTypeError as ShardingTypeError  # isort: skip

from jax_mx.arrays.sharding import is_explicit, shards_of, spec_of, spread
from jax_mx.arrays.views import View, minor_to_major
from jax_mx.facts import chips as chip_table
from jax_mx.facts import launch
from jax_mx.facts.layouts import ROW_MAJOR_VALUES
from jax_mx.facts.product_kernels import Binary
from jax_mx.facts.signatures import Array, Role, Signature
from jax_mx.facts.variants import value_layouts_of
from jax_mx.lowering import compiler, registry, store
from jax_mx.lowering.plan import AnyPlan, Plan, ProductPlan, seconds
from jax_mx.lowering.registry import Refusal, Support
from jax_mx.lowering.targets import Target, target_of

# What makes operands vary over the same manual axes; since 0.10.1 under the first name.
vary_alike = getattr(core, "auto_insert_reshard", None) or vars(core)["standard_insert_pvary"]
# Insists that abstract operands do, behind the op's name for the message.
agree = core.standard_vma_rule

logger = logging.getLogger("jax_mx")


def varies(x: Any) -> bool:
    """Whether an array is known to differ among the shards of a shard_map around it."""
    return "{V:" in jax.typeof(x).str_short()


# By arrays of these types jax.grad, jax.vjp, jax.jvp or jax.linearize takes a derivative.
DIFFERENTIATED = (tangents.JVPTracer, tangents.LinearizeTracer)


def is_tracing() -> bool:
    """Whether some function is being traced: by jit, grad, vmap, scan ..."""
    return not core.trace_state_clean()


def is_staged() -> bool:
    """Whether what is computed now becomes a part of a program, so that constants stay in it."""
    trace: Any = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, partial_eval.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


# ---- lowering ---
def _support(plan: AnyPlan, target: Target) -> tuple[Support, list[str]]:
    """What serves a plan, and for which chips."""
    if target.chips is not None or target.platform not in chip_table.DSLS:
        return registry.chosen(plan, target.platform, target.chips or ()), target.chips or []
    found = registry.chosen(plan, target.platform, ())  # an export: some chip at least
    every = store.exported(chip_table.chips_of(chip_table.DSLS[target.platform]))
    if found.kernels and not every:
        why = f"JAX_MX_ARCHS names no chip of {target.platform}"
        refusal = Refusal(plan.name, why)
        _say_once(f"exporting without kernels: {refusal}")
        named = plan.implementation
        return Support(named, refusal=refusal) if named else Support("xla"), []
    each = {chip: registry.candidates(plan, target.platform, [chip])[0] for chip in every}
    chips = [chip for chip, support in each.items() if support.kernels == found.kernels]
    if found.kernels and len(chips) < len(every):
        missing = [chip for chip in every if chip not in chips]
        _say_once(
            f"exporting {plan.name} without kernels for {', '.join(missing)}: {each[missing[0]]}"
        )
    if every and not found.kernels and store.names_chips() and plan.implementation != "xla":
        refused = registry.candidates(plan, target.platform, every[:1])[0]
        _say_once(f"exporting {plan.name} without kernels for {', '.join(every)}: {refused}")
    if found.kernels and not chips:
        found = registry.chosen(plan, target.platform, every[:1])  # "xla", or why not the one named
    return found, chips


def serves_by_itself(plan: AnyPlan, target: Target) -> bool:
    """Whether a kernel serves a plan by itself, by the tables, which are alike in all processes."""
    with registry.by_tables():
        return _support(plan, target)[0].is_direct


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
            if (needed := _needed.get()) is not None:
                needed[kernel, cast(str, chip_table.arch_of(chip))] = artifact
    return found


Kernels = dict[tuple[Binary, str], store.Artifact]  # by binary and arch
_needed: ContextVar[Kernels | None] = ContextVar("needed", default=None)
_of_shard: ContextVar[bool] = ContextVar("of_shard", default=False)  # see `shard_module`


@contextlib.contextmanager
def kernels_needed() -> Iterator[Kernels]:
    """The kernels of what is lowered within."""
    needed: Kernels = {}
    token = _needed.set(needed)
    try:
        yield needed
    finally:
        _needed.reset(token)


def _attributes(
    ctx: mlir.LoweringRuleContext, plan: AnyPlan, chips: Iterable[str], batch: int
) -> dict[str, Any]:
    """What XLA's scheduler and its partitioner read of the call.

    The scheduler hides collectives behind calls, which it would take for 10 us each, and products
    take a hundred times as long. `latency_metadata`, in ns, is its name of a call's time.
    """
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    if not all(core.is_constant_shape(aval.shape) for aval in avals):
        return {}  # shape-polymorphic: neither has numbers
    sharding = _sharding_attributes(ctx, plan.signature, batch)
    took = max(seconds(plan, chip, ctx.avals_in, ctx.avals_out) for chip in chips)
    read = {"latency_metadata": str(round(1e9 * took))}
    read |= {"num_batch_dims": str(batch)} if sharding else {}
    return {**sharding, "mhlo.frontend_attributes": mlir.ir_attribute(read)}


def _sharding_attributes(
    ctx: mlir.LoweringRuleContext, signature: Signature, batch: int
) -> dict[str, Any]:
    """What lets the partitioner split the call along its first `batch` dimensions."""
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    if signature.has_replicated:
        return {}  # see there
    if len({aval.shape[:batch] for aval in avals}) > 1:
        return {}  # rows have one amax, not one for each block; a program of one device
    # A factor for each other dimension, none of them shared.
    names = map("d{}".format, itertools.count())
    terms = [["...", *itertools.islice(names, len(aval.shape) - batch)] for aval in avals]
    n = len(ctx.avals_in)
    sides = [", ".join(" ".join(term) for term in side) for side in (terms[:n], terms[n:])]
    rule = str_to_sdy_sharding_rule(
        " -> ".join(sides),
        need_replication_factors=tuple(name for term in terms for name in term[1:]),
    )
    types = _types(avals)
    return {"sdy.sharding_rule": sdy_sharding_rule_to_mlir(rule, types[:n], types[n:])}


def _types(avals: Iterable[Any]) -> list[ir.Type]:
    return [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in avals]


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
        extra_attributes=_attributes(ctx, plan, kernels, batch),
    )
    absent = [signature.number(name) for name in plan.lacks]
    attributes = launch.call_attributes(kernels, merge=merge, absent=absent, device=device)
    if _of_shard.get():
        return _in_function(ctx, functools.partial(rule, ctx, **attributes), operands)
    return rule(ctx, *operands, **attributes)


def _in_function(ctx: mlir.LoweringRuleContext, emit: Callable, operands: Sequence[ir.Value]):
    """A call in a function of its own, where its frontend attributes stay.

    XLA's partitioner puts a shard's operations in place of the call that it splits, and gives each
    of them the attributes of that call. It does not look into functions, and drops the attribute
    that keeps this one from being inlined before.
    """
    module = ctx.module_context
    types = [operand.type for operand in operands]
    results = _types(ctx.avals_out)
    function = func.FuncOp("mx_call", (types, results), ip=module.ip)
    function.attributes["sym_visibility"] = ir.StringAttr.get("private")
    module.symbol_table.insert(function)
    with ir.InsertionPoint(function.add_entry_block()):
        func.ReturnOp([*emit(*function.arguments)])
    name = ir.FlatSymbolRefAttr.get(function.name.value)
    call = func.CallOp(results, name, [*operands])
    call.attributes["mhlo.frontend_attributes"] = mlir.ir_attribute({"inlineable": "false"})
    return [*call.results]


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
      op: what is lowered.
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
            kernels = _kernel_attributes(kernel_plan, kernel, chips, target.carries)
        except compiler.CompileError as error:
            if plan.implementation is not None or jax.process_count() > 1:
                raise
            _say_once(f"{plan.name} takes XLA: {error}")
        else:
            call: dict[str, Any] = {"plan": plan, "kernels": kernels, "device": target.device}
            if row_major_values:
                return _call_and_pack(ctx, *operands, op=op, **call)
            return _call(ctx, *operands, view=plan.view, **call)
    return _in_jnp(ctx, in_jnp, operands, plan)


def _in_steps(op: Op, support: Support, apart: bool) -> Callable | None:
    """What computes an op in steps, each a primitive; `apart`: its floats are one by themselves."""
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
    the same everywhere; what an installation holds may not be. So where the tables have a kernel
    and this process cannot get it, the process stops instead of taking another way. A kernel that
    serves by itself is what the tables promise first.

    Raises:
      RuntimeError: so it is.
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
    _say_once(str(refusal))


# ---- vmap and derivatives ---
def batch(primitive: Primitive, args, dims, *, plan: AnyPlan):
    """Leading dimensions are batch dimensions, so a new one goes to the front.

    Operands that are replicated stay as they are; where they differ from entry to entry, so do the
    calls, one after the other.
    """
    roles = [array.role for array in plan.signature.present(plan.lacks)]
    shared = [i for i, role in enumerate(roles) if not role.is_batched]
    if any(dims[i] is not None for i in shared):
        return one_by_one(functools.partial(primitive.bind, plan=plan), args, dims)
    outs = primitive.bind(*batched(args, dims, shared), plan=plan)
    return outs, [0] * len(outs)


def batched(args, dims, shared: Collection[int] = ()) -> list:
    """Operands with the batch as first dimension, but those whose numbers are in `shared`."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    return [
        a
        if i in shared
        else jnp.broadcast_to(a, (size, *a.shape))
        if d is None
        else jnp.moveaxis(a, d, 0)
        for i, (a, d) in enumerate(zip(args, dims, strict=True))
    ]


def one_by_one(bind: Callable[..., list], args, dims) -> tuple[list, list]:
    """A call for each entry of the batch, one after the other.

    Where explicit axes of a mesh split the batch, each device calls for its own entries.
    """
    moved = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]

    def entries(*moved):
        def one(mapped):
            rest: Iterator = iter(mapped)
            own = [a if d is None else next(rest) for a, d in zip(moved, dims, strict=True)]
            return bind(*own)

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


def no_second(op: str, *_: Any, **__: Any) -> Any:
    """Says which derivative an op has; JAX's rule for others."""
    raise NotImplementedError(
        f"{op}: derivatives of derivatives, and forward-mode ones, are not there; jax_mx.{op} has "
        "reverse-mode ones of first order (jax.grad, jax.vjp)"
    )


reverse_only_p = Primitive("mx_reverse_only")  # the identity
reverse_only_p.def_abstract_eval(lambda x, **_: x)


def reverse_only(op: str, second: str = "") -> Callable[[Any], Any]:
    """A function that arrays pass on their way to a `jax.custom_vjp`: forward mode is refused.

        y = f(*jax.tree.map(reverse_only("rms_norm"), (x, weight)))

    Args:
      op: the public function.
      second: what the sentence adds.
    """
    return functools.partial(reverse_only_p.bind, op=op, second=second, is_tangent=False)


def _require_no_tangent(op: str, second: str, is_tangent: bool) -> None:
    """Raises where a tangent is more than transposed, as it is in reverse mode alone."""
    if is_tangent:
        raise NotImplementedError(
            f"{op}: derivatives in forward mode (jax.jvp, jax.jacfwd, jax.hessian) are not there; "
            f"jax_mx.{op} has those of reverse mode (jax.grad, jax.vjp, jax.jacrev){second}"
        )


reverse_only_p.def_impl(lambda x, **how: _require_no_tangent(**how) or x)
mlir.register_lowering(reverse_only_p, lambda _, x, **how: _require_no_tangent(**how) or [x])
batching.primitive_batchers[reverse_only_p] = lambda x, dims, **how: (
    _require_no_tangent(**how) or (reverse_only_p.bind(*x, **how), dims[0])
)
ad.primitive_jvps[reverse_only_p] = lambda primals, tangents, **how: (
    primals[0],
    tangents[0]
    if _require_no_tangent(**how) or type(tangents[0]) is ad.Zero
    else reverse_only_p.bind(*tangents, **how | {"is_tangent": True}),
)
ad.primitive_transposes[reverse_only_p] = lambda dy, _, **__: [dy]


# ---- a linear function that is known by its transpose ---
linear_p = Primitive("mx_linear")
linear_p.multiple_results = True


def linear(
    transposed: Callable,
    kept: Any,
    tangents: Sequence[Any],
    like: Sequence[jax.Array],
    forward: Callable | None = None,
) -> list[jax.Array]:
    """A linear function of tangents, for the rule of a `jax.custom_jvp`.

    Reverse mode calls `transposed`, as it does a `jax.custom_vjp`'s backward pass. Forward mode
    calls `forward`, or transposes `transposed` when it executes or lowers the tangent.

    Args:
      transposed: gives cotangents of tangents, from what is kept and the results' cotangents.
      kept: a pytree of arrays.
      tangents: arrays.
      like: arrays of the results' types.
      forward: gives the results, from what is kept and tangents. With it neither function is ever
        transposed: what reverse mode gives is linear again, and its transpose is `forward`.
    """
    leaves, tree = jax.tree.flatten(kept)
    count = len(leaves)

    def of_leaves(f: Callable, *args: Any) -> tuple[Any, ...]:
        return tuple(f(tree.unflatten(args[:count]), *args[count:]))

    ways = (functools.partial(of_leaves, f) if f else None for f in (transposed, forward))
    params = {"count": count, "like": tuple(map(jax.typeof, like))}
    params |= dict(zip(("transposed", "forward"), ways, strict=True))
    return linear_p.bind(*leaves, *tangents, **params)


def _forward(*args: Any, transposed: Callable, forward: Any, count: int, like: Any) -> Any:
    if forward is not None:
        return forward(*args)
    kept, tangents = args[:count], args[count:]
    return jax.linear_transpose(lambda *dys: transposed(*kept, *dys), *like)(tangents)


def _jvp_of_linear(primals: Any, tangents: Any, *, count: int, **how: Any) -> tuple[Any, Any]:
    """Codes that are kept, bytes of whatever dtype, are constants."""
    of_kept = (type(t) is not ad.Zero and t.dtype.itemsize > 1 for t in tangents[:count])
    moving = [i for i, moves in enumerate(of_kept) if moves]
    if not moving:
        moved = map(ad.instantiate_zeros, tangents[count:])
        bind = functools.partial(linear_p.bind, *primals[:count], count=count, **how)
        return bind(*primals[count:]), bind(*moved)
    moving += range(count, len(primals))

    def run(*args: Any) -> Any:
        every = {**dict(enumerate(primals)), **dict(zip(moving, args, strict=True))}
        return _forward(*every.values(), count=count, **how)

    moves = [ad.instantiate_zeros(tangents[i]) for i in moving]
    return jax.jvp(run, [primals[i] for i in moving], moves)


def split_of_mapped(args: Any, dims: Any) -> Any:
    """The names that split the dimension which `jax.vmap` maps, on meshes with explicit axes."""
    mapped = ((x, d) for x, d in zip(args, dims, strict=True) if d is not None)
    x, d = next(mapped)
    return jax.typeof(x).sharding.spec[d]


def _mapped(args: Any, dims: Any, size: int, names: Any) -> list[jax.Array]:
    """Arrays that all have the mapped dimension, in front."""
    return [
        spread(x[None], (size, *x.shape), (names, *spec_of(x)))
        if d is None
        else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]


def _batch_of_linear(
    args: Any, dims: Any, *, transposed: Callable, forward: Any, count: int, like: Any
) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    names = split_of_mapped(args, dims)
    tangents = _mapped(args[count:], dims[count:], size, names)

    def mapped(aval: Any) -> Any:
        sharding = aval.sharding.update(spec=PartitionSpec(names, *aval.sharding.spec))
        return aval.update(shape=(size, *aval.shape), sharding=sharding)

    of_batch = jax.vmap(transposed, in_axes=(*dims[:count], *[0] * len(like)))
    if forward is not None:
        forward = jax.vmap(forward, in_axes=(*dims[:count], *[0] * len(tangents)))
    params = {"transposed": of_batch, "forward": forward, "count": count}
    params["like"] = tuple(map(mapped, like))
    return linear_p.bind(*args[:count], *tangents, **params), [0] * len(like)


def _transpose_of_linear(
    dys: Any, *args: Any, transposed: Callable, forward: Any, count: int, **_: Any
) -> Any:
    zeros = [None] * len(args)
    if all(type(dy) is ad.Zero for dy in dys):
        return zeros
    operands = *args[:count], *map(ad.instantiate_zeros, dys)
    if forward is None:
        return [*zeros[:count], *transposed(*operands)]
    how = {"transposed": forward, "forward": transposed, "count": count}
    how["like"] = tuple(x.aval for x in args[count:])

    def rule(_: list, args: list, tangents: list) -> list[jax.Array]:
        tangents = [
            ad.Zero(jax.typeof(x).to_tangent_aval()) if t is None else t
            for x, t in zip(args, tangents, strict=True)
        ]
        return _jvp_of_linear(args, tangents, **how)[1]

    # Not behind a primitive: `explain` and policies of jax.checkpoint look for products.
    values = transposed(*map(jax.lax.stop_gradient, operands))
    return [*zeros[:count], *derived(values, operands, rule)]


linear_p.def_impl(_forward)
linear_p.def_abstract_eval(lambda *_, like, **__: like)
mlir.register_lowering(linear_p, mlir.lower_fun(_forward, multiple_results=True))
batching.primitive_batchers[linear_p] = _batch_of_linear
ad.primitive_jvps[linear_p] = _jvp_of_linear
ad.primitive_transposes[linear_p] = _transpose_of_linear


# ---- arrays that have the derivative of a function ---
derived_p = Primitive("mx_derived")  # the identity of the first operands
derived_p.multiple_results = True


def derived(values: Sequence[jax.Array], args: Sequence[jax.Array], rule: Callable) -> list:
    """The values, which are a function of `args`, with its derivatives of any order and mode.

    It is what a `jax.custom_jvp` is. JAX's scan forgets a rule of that when it looks for what all
    steps share, and second derivatives then lack a part, in silence. A primitive's rule stays.

    Args:
      values: made of `args` under `jax.lax.stop_gradient`, or by a kernel.
      args: arrays.
      rule: gives the results' tangents, from results, `args` and their tangents; None is zero.
    """
    return derived_p.bind(*values, *args, count=len(values), rule=rule)


def _jvp_of_derived(primals: Any, tangents: Any, *, count: int, rule: Callable) -> tuple:
    outs = derived_p.bind(*primals, count=count, rule=rule)  # what is kept has derivatives
    tangents = [None if type(t) is ad.Zero else t for t in tangents[count:]]
    if all(t is None for t in tangents):
        return outs, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
    return outs, [*rule(outs, [*primals[count:]], tangents)]


def _batch_of_derived(args: Any, dims: Any, *, count: int, rule: Callable) -> tuple[list, list]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    values = _mapped(args[:count], dims[:count], size, split_of_mapped(args, dims))
    of_batch = jax.vmap(rule, in_axes=(0, *[[*dims[count:]]] * 2))
    outs = derived_p.bind(*values, *args[count:], count=count, rule=of_batch)
    return outs, [0] * count


derived_p.def_impl(lambda *args, count, rule: args[:count])
derived_p.def_abstract_eval(lambda *args, count, rule: args[:count])
mlir.register_lowering(derived_p, lambda _, *args, count, rule: args[:count])
batching.primitive_batchers[derived_p] = _batch_of_derived
ad.primitive_jvps[derived_p] = _jvp_of_derived


def bilinear(primitive: Primitive, plain: Callable[..., Callable | None], refuse: Callable) -> None:
    """Gives a product of two arrays, the first operands of a primitive, all derivatives.

    Args:
      primitive: of several results, which gives one.
      plain: from the abstract values of operands and the parameters, a function of two arrays that
        JAX differentiates; None where there is none.
      refuse: raises then.
    """

    def jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list, list]:
        f = plain([jax.typeof(x) for x in primals], **params)
        if f is None:
            return refuse(**params)
        (a, b, *_), (da, db, *_) = primals, tangents
        parts = [] if type(da) is ad.Zero else [(da, b)]
        parts += [] if type(db) is ad.Zero else [(a, db)]
        y, *parts = (primitive.bind(*pair, *primals[2:], **params)[0] for pair in [(a, b), *parts])
        return [y], [functools.reduce(jnp.add, parts)]

    def transpose(cotangents: Any, a: Any, b: Any, *rest: Any, **params: Any) -> list:
        avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in (a, b, *rest)]
        f = plain(avals, **params)
        if f is None:
            return refuse(**params)
        (dy,), none = cotangents, [None] * len(rest)
        if ad.is_undefined_primal(a):
            return [*jax.linear_transpose(lambda a: f(a, b), a.aval)(dy), None, *none]
        return [None, *jax.linear_transpose(lambda b: f(a, b), b.aval)(dy), *none]

    ad.primitive_jvps[primitive], ad.primitive_transposes[primitive] = jvp, transpose


# ---- registration ---
class Op(NamedTuple):
    """What the rules of an op's primitive are made of. Each function has the keyword `plan`.

    Attributes:
      avals: the abstract values of results, from those of operands; of an op that writes layouts
        of values also with the keyword `view`, another one of its arrays.
      reference: the op in jnp, on views: what "xla" computes.
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


def define(
    name: str,
    avals: Callable,
    lower: Callable,
    batch: Callable,
    no_derivative: Callable,
    unread: Callable[[Sequence[bool], dict], dict] | None = None,
) -> Primitive:
    """A primitive of several results, with all of JAX's rules.

    Args:
      name: of the primitive.
      avals: abstract values of results, from those of operands and the parameters.
      lower: the lowering rule, with the platform that it is registered for before its arguments;
        None for all that have no kernels.
      batch: the rule of vmap.
      no_derivative: raises.
      unread: the parameters of a call that gives only the results which are read; from which of
        them are, and from its parameters. None: a call gives all.
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
    if unread is not None:
        drops_unread(primitive, functools.partial(_without_unread, unread))
    return primitive


def _without_unread(unread: Callable, used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """JAX's rule for an equation some of whose results nobody reads."""
    if not any(used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    outvars = [v for v, is_used in zip(eqn.outvars, used, strict=True) if is_used]
    return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=unread(used, eqn.params))


def drops_unread(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Lets a rule say what is left of an equation some of whose results nobody reads.

    Args:
      primitive: whose equations they are.
      rule: takes for each result whether it is read, and the equation; returns for each operand
        whether it still is, and the equation that is left, or None.
    """
    # Since 0.12 JAX passes before the equation which of its operands live on.
    partial_eval.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])


def looked_into(primitive: Primitive, jaxpr: str) -> None:
    """Lets jax.checkpoint's policies look into a primitive, as into a jitted function.

    Args:
      primitive: whose bodies they find.
      jaxpr: the parameter that is one, closed.
    """
    rules = partial_eval.partial_eval_jaxpr_custom_rules
    call = core.closed_call_p

    def rule(saveable, unknown, instantiated, eqn):
        body = {"call_jaxpr": eqn.params[jaxpr]}
        own = eqn.replace(primitive=call, params=body)
        parts = rules[call](saveable, unknown, instantiated, own)
        _, _, unknown_out, instantiated_out, kept = parts
        is_whole = all(any(var is operand for operand in eqn.invars) for var in kept)
        if any(unknown_out) or not all(instantiated_out) or not is_whole:
            return parts
        # Nothing in it is kept: both passes have all of it, and it stays one equation.
        lacking = [
            var
            for var, is_there in zip(eqn.invars, instantiated, strict=True)
            if isinstance(var, core.Var) and not is_there
        ]
        return eqn, eqn, unknown_out, instantiated_out, lacking

    rules[primitive] = rule


def _reduced(
    ctx: mlir.LoweringRuleContext, x: ir.Value, *, exponent_bits: int, mantissa_bits: int
) -> list[ir.Value]:
    """The lowering of lax.reduce_precision, which leaves floats of a byte and less as they are.

    jax.checkpoint puts all floats that it keeps through it, with the bits of their own dtype. XLA
    takes each dtype for one with infinities, and makes them of e4m3fn's codes from 256 on: NaN.
    What is rounded already only has to stay apart from what made it.
    """
    (aval,) = ctx.avals_out
    own = jnp.finfo(aval.dtype)
    if own.bits <= 8 and (exponent_bits, mantissa_bits) == (own.nexp, own.nmant):
        apart: Any = hlo.optimization_barrier([x])
        return [apart]
    bits = modules.i32_attr(exponent_bits), modules.i32_attr(mantissa_bits)
    out = hlo.reduce_precision(x, *bits)
    return [modules.lower_with_sharding_in_types(ctx, out, aval)]


mlir.register_lowering(jax.lax.reduce_precision_p, _reduced)


def make_primitive(name: str, op: Op) -> Primitive:
    """The primitive mx_<name> of an op on views; its arrays are those of `plan.signature`."""

    def rule(args, dims, *, plan: AnyPlan):
        return op.batch(primitive, args, dims, plan=plan)

    lower = functools.partial(_lower, op)
    primitive = define(f"mx_{name}", op.avals, lower, rule, no_derivative)
    return primitive


def unsplit(op: str, operands: Sequence[Any], shape: tuple[int, ...], dtype: Any):
    """The abstract value of a result that, on a mesh with explicit axes, is not split.

    Args:
      op: for messages.
      operands: abstract values, which vary over the same manual axes; the result does.
      shape: of the result.
      dtype: likewise.
    """
    agree(op, *operands)
    return unsplit_like(operands[0], shape, dtype)


def unsplit_like(x: Any, shape: tuple[int, ...], dtype: Any):
    """An abstract value like x, of another shape and dtype, that no mesh splits."""
    sharding = x.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


# ---- calls that XLA splits by name (partition.py) ---
def register_partitioner(target: str, partition: Callable, infer: Callable) -> None:
    """Tells XLA, of CPUs and of plugins that are there or come, who splits calls of a target."""
    rules: dict[str, Any] = {
        "name": target,
        "prop_user_sharding": lambda sharding, shape, text: sharding,
        "partition": partition,
        "infer_sharding_from_operands": infer,
        "can_side_effecting_have_replicated_sharding": True,
    }
    register = functools.partial(xla_client.register_custom_call_partitioner, **rules)
    register()
    xla_bridge.register_plugin_callbacks(register)


def split_call(
    ctx: mlir.LoweringRuleContext,
    target: str,
    text: str,
    rule: tuple[str, Mapping[str, Any]],
    operands: Sequence[ir.Value],
) -> list[Any]:
    """The custom call of a target that XLA splits by a sharding rule; `text` is its config.

    Arrays whose elements are a byte go in and come out as uint8.
    """

    def types(avals: Any, in_bytes: bool) -> list:
        return [
            ir.RankedTensorType.get(
                a.shape,
                mlir.dtype_to_ir_type(moved_as(a.dtype) if in_bytes else a.dtype),
            )
            for a in avals
        ]

    def bitcast(values: Sequence[ir.Value], types: list) -> list[Any]:
        pairs = zip(values, types, strict=True)
        return [v if v.type == t else hlo.BitcastConvertOp(t, v).result for v, t in pairs]

    ins, outs = types(ctx.avals_in, True), types(ctx.avals_out, True)
    call = hlo.CustomCallOp(
        outs,
        bitcast(operands, ins),
        call_target_name=ir.StringAttr.get(target),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=mlir.i32_attr(2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(text),
        operand_layouts=None,
        result_layouts=None,
    )
    notation, kinds = rule
    parsed = str_to_sdy_sharding_rule(notation, **kinds)
    call.attributes["sdy.sharding_rule"] = sdy_sharding_rule_to_mlir(parsed, ins, outs)
    results = bitcast(call.results, types(ctx.avals_out, False))
    pairs = zip(results, ctx.avals_out, strict=True)
    return [modules.lower_with_sharding_in_types(ctx, y, aval) for y, aval in pairs]


def moved_as(dtype: np.dtype) -> np.dtype:
    """The dtype that arrays have on their way: uint8 where an element is a byte, no truth value."""
    return np.dtype(np.uint8) if dtype.itemsize == 1 and dtype.kind != "b" else dtype


def as_bytes(x: jax.Array) -> jax.Array:
    """x as it moves."""
    return of_dtype(x, moved_as(x.dtype))


def of_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_bytes`, to a dtype or its name."""
    named = jnp.dtype(dtype)
    return x if x.dtype == named else jax.lax.bitcast_convert_type(x, named)


def shard_module(
    name: str,
    shard: Callable,
    operands: Sequence[Any],
    sizes: Mapping[str, int],
    platform: str,
    is_here: bool = True,
) -> Any:
    """The MLIR module of what each of several devices computes.

    Args:
      name: of the module.
      shard: of arrays.
      operands: their abstract values, on one device.
      sizes: of the axes of devices.
      platform: of the devices.
      is_here: whether they are this process's; else the program may leave the machine.
    """
    mesh: Any = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    backend = None
    if is_here:
        with contextlib.suppress(RuntimeError):  # a topology's devices, none of which is here
            backend = jax.extend.backend.get_backend(platform)
    # The mesh of the program is none of the shard's: arrays would be split by it once more.
    device = jax.sharding.get_abstract_mesh().abstract_device
    none = jax.sharding.AbstractMesh((), (), abstract_device=device)
    no_mesh = jax.sharding.use_abstract_mesh(none)
    with no_mesh, core.extend_axis_env_nd(sizes.items()):
        jaxpr = jax.make_jaxpr(shard)(*operands)
        token = _of_shard.set(True)
        try:
            return modules.build_mlir_module_helper(
                jaxpr,
                name=name,
                platforms=[platform],
                backend=backend,
                axis_context=sharding_impls.SPMDAxisContext(mesh, frozenset(sizes)),
            )
        finally:
            _of_shard.reset(token)


bytecode = modules.module_to_bytecode


def avals_of(shapes: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """XLA's shapes, those in tuples too, as JAX has them."""
    flat = [s for shape in shapes for s in (shape.tuple_shapes() if shape.is_tuple() else [shape])]
    return [jax.ShapeDtypeStruct(tuple(s.dimensions()), s.numpy_dtype()) for s in flat]


def parts_of(sharding: Any, count: int) -> list[Any]:
    """XLA's sharding of so many results, one by one."""
    return [*sharding.tuple_elements()] or [sharding] * count


def joined(shape: Any, shardings: list[Any]) -> Any:
    """XLA's sharding of all results."""
    if not shape.is_tuple():
        return shardings[0]
    return xla_client.HloSharding.tuple_sharding(shape, shardings)


def sharding_of(sizes: Mapping[str, int], spec: Sequence[tuple[str, ...]]) -> Any:
    """XLA's sharding of an array whose dimensions are split over these axes."""
    mesh: Any = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(*(names or None for names in spec)))
    return sharding._to_xla_hlo_sharding(len(spec))


def split_in(sharding: Any, sizes: Mapping[str, int], ndim: int) -> list | None:
    """The axes that split each dimension of an array, None where axes of these sizes do not."""
    mesh: Any = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    try:
        (spec,) = sharding_impls.parse_flatten_op_sharding(sharding, mesh)
    except Exception:  # of several kinds, none of which JAX promises
        return None
    split = [
        () if names is None else (names,) if isinstance(names, str) else names for names in spec
    ]
    return [*split, *[()] * (ndim - len(split))]


store.register()
