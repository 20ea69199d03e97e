"""Names private to JAX, in the only module that uses them, and what rules of primitives share.

A primitive's abstract evaluation, lowering and vmap come together in `define`. XLA splits calls of
a target by `register_partitioner` and `split_call`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec
from jaxlib.mlir import ir
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

from jax_mx.launch import chips as chip_table

# Makes operands vary over the same manual axes; since 0.10.1 under the first name.
vary_alike = getattr(core, "auto_insert_reshard", None) or vars(core)["standard_insert_pvary"]
# Insists that abstract operands do, behind the op's name for the message.
agree = core.standard_vma_rule


def varies(x: Any) -> bool:
    """Whether an array is known to differ among the shards of a shard_map around it."""
    return "{V:" in jax.typeof(x).str_short()


# By arrays of these types jax.grad, jax.vjp, jax.jvp or jax.linearize takes a derivative.
DIFFERENTIATED = (tangents.JVPTracer, tangents.LinearizeTracer)


def is_tracing() -> bool:
    """Whether some function is being traced: by jit, grad, vmap, scan ..."""
    return not core.trace_state_clean()


def is_lowering() -> bool:
    """Whether JAX lowers a program now, so that what is traced is a part of an equation's rule."""
    return ir.Context.current is not None


def is_alive(x: Any) -> bool:
    """Whether an array can be computed with: a tracer of a finished program cannot."""
    of_x = x._trace if isinstance(x, core.Tracer) else None
    alive: list[Any] = [core.trace_ctx.trace]
    for trace in alive:  # which grows: a trace and those that it hands values to
        names = ("parent_trace", "tangent_trace", "jaxpr_trace")
        alive += [getattr(trace, name) for name in names if hasattr(trace, name)]
    return of_x in alive or not isinstance(of_x, partial_eval.DynamicJaxprTrace)


def is_staged() -> bool:
    """Whether what is computed now becomes a part of a program, so that constants stay in it."""
    trace: Any = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, partial_eval.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def define(
    name: str,
    avals: Callable,
    lower: Callable | None,
    batch: Callable,
    no_derivative: Callable,
    unread: Callable[[Sequence[bool], dict], dict] | None = None,
) -> Primitive:
    """A primitive of several results, with all of JAX's rules.

    Args:
      name: of the primitive.
      avals: abstract values of results, from operands' abstract values and the parameters.
      lower: the lowering rule, with the platform that it is registered for before its arguments;
        None for all platforms without kernels. Or None: a call of `lowers` follows.
      batch: the rule of vmap.
      no_derivative: a function that raises.
      unread: a function for the parameters of a call that gives only results that are read; it
        takes a bool for each result, and the parameters. None: a call gives all.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    primitive.def_abstract_eval(avals)
    if lower is not None:
        lowers(primitive, lower)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = no_derivative
    ad.primitive_transposes[primitive] = no_derivative
    if unread is not None:
        drops_unread(primitive, functools.partial(_without_unread, unread))
    return primitive


def lowers(primitive: Primitive, lower: Callable) -> None:
    """Registers a lowering rule for all platforms; see `define`."""
    mlir.register_lowering(primitive, functools.partial(lower, None))
    for platform in (*chip_table.DSLS, "cpu"):  # where there may be a kernel; the CPU emulates one
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)


def _without_unread(unread: Callable, used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """JAX's rule for an equation some of whose results nobody reads."""
    if not any(used) and not eqn.effects:
        return [False] * len(eqn.invars), None
    outvars = [v for v, is_used in zip(eqn.outvars, used, strict=True) if is_used]
    return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=unread(used, eqn.params))


def drops_unread(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Lets a rule replace an equation with unread results by a smaller one.

    Args:
      primitive: of the equations.
      rule: takes a bool for each result, whether it is read, and the equation; returns a bool for
        each operand, whether it is still read, and the smaller equation or None.
    """
    # Since 0.12 JAX passes before the equation which of its operands live on.
    partial_eval.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])


def looked_into(primitive: Primitive, jaxpr: str) -> None:
    """Lets jax.checkpoint's policies look into a primitive, as into a jitted function.

    Args:
      primitive: the primitive with the bodies.
      jaxpr: the parameter that is one, closed.
    """
    rules = partial_eval.partial_eval_jaxpr_custom_rules
    call = core.closed_call_p

    def rule(saveable, unknown, instantiated, eqn):
        body = {"call_jaxpr": eqn.params[jaxpr]}
        as_call = eqn.replace(primitive=call, params=body)
        parts = rules[call](saveable, unknown, instantiated, as_call)
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


def reduced(
    ctx: mlir.LoweringRuleContext, x: ir.Value, *, exponent_bits: int, mantissa_bits: int
) -> list[ir.Value]:
    """The lowering of lax.reduce_precision, which leaves floats of a byte and less as they are.

    jax.checkpoint puts all floats that it keeps through it, with the bits of their dtype. XLA
    assumes infinities in each dtype, and turns e4m3fn's floats from 256 on into them: NaN. Rounded
    floats only have to stay apart from the operation that made them.
    """
    (aval,) = ctx.avals_out
    info = jnp.finfo(aval.dtype)
    if info.bits <= 8 and (exponent_bits, mantissa_bits) == (info.nexp, info.nmant):
        apart: Any = hlo.optimization_barrier([x])
        return [apart]
    bits = modules.i32_attr(exponent_bits), modules.i32_attr(mantissa_bits)
    out = hlo.reduce_precision(x, *bits)
    return [modules.lower_with_sharding_in_types(ctx, out, aval)]


def unsplit(op: str, operands: Sequence[Any], shape: tuple[int, ...], dtype: Any):
    """The abstract value of a result that, on a mesh with explicit axes, is not split.

    Args:
      op: for messages.
      operands: abstract values, which vary over the same manual axes as the result.
      shape: of the result.
      dtype: of the result.
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
    call.attributes["sdy.sharding_rule"] = sharding_rule(notation, ins, outs, **kinds)
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
        return modules.build_mlir_module_helper(
            jaxpr,
            name=name,
            platforms=[platform],
            backend=backend,
            axis_context=sharding_impls.SPMDAxisContext(mesh, frozenset(sizes)),
        )


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


def sharding_rule(notation: str, ins: list, outs: list, **kinds: Any) -> Any:
    """A sharding rule in MLIR, of arrays of these types; `kinds` as in JAX's notation."""
    return sdy_sharding_rule_to_mlir(str_to_sdy_sharding_rule(notation, **kinds), ins, outs)
