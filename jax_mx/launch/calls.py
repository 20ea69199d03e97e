"""A kernel's custom call: its attributes, how XLA splits it, what vmap makes of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import jax.numpy as jnp
from jax import ffi
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from jax_mx.launch import compiler, private, store
from jax_mx.launch.binary import Binary
from jax_mx.launch.chips import arch_of
from jax_mx.launch.rule import call_attributes

logger = logging.getLogger("jax_mx")


@functools.cache
def say_once(sentence: str) -> None:
    """Logs a sentence, the first time."""
    logger.warning("jax_mx: %s", sentence)


Kernels = dict[tuple[Binary, str], store.Artifact]  # by binary and arch
_needed: ContextVar[Kernels | None] = ContextVar("needed", default=None)


@contextlib.contextmanager
def kernels_needed() -> Iterator[Kernels]:
    """The kernels of what is lowered within."""
    needed: Kernels = {}
    token = _needed.set(needed)
    try:
        yield needed
    finally:
        _needed.reset(token)


def kernels_of(
    name: str,
    binary: Binary,
    chips: Sequence[str],
    launch: tuple[str, Mapping[str, int]],
    carries: bool,
) -> dict[str, dict[str, Any]]:
    """The attribute `kernels` of the call target: chip -> attributes (ffi/launch.cc).

    An export goes without chips whose kernel does not compile, as long as there are others.

    Args:
      name: of the call, for messages.
      binary: the kernel.
      chips: those that the program is for.
      launch: whose entries the call takes, and the values of scalars that have a name.
      carries: whether the call carries the binary, for a program that leaves this machine.

    Raises:
      CompileError: a kernel is not there and cannot be compiled.
    """
    kernels = {}
    for chip in chips:
        arch = cast(str, arch_of(chip))
        try:
            artifact = store.get(binary, arch)
        except compiler.CompileError as error:
            if not carries or (chip == chips[-1] and not kernels):
                raise
            say_once(f"exporting {name} without a kernel for {chip}: {error}")
        else:
            kernels[chip] = artifact.attributes(*launch, carries)
            if (needed := _needed.get()) is not None:
                needed[binary, arch] = artifact
    return kernels


def emit(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    kernels: Mapping[str, Mapping[str, Any]],
    layouts: Sequence[Sequence[int]] | None = None,
    batch: int | None = None,
    seconds: Callable[[str], float] | None = None,
    **attributes: Any,
) -> Any:
    """The custom call that launches a kernel.

    Args:
      ctx: JAX's.
      operands: MLIR values.
      kernels: see `kernels_of`.
      layouts: of operands, then of results, from minor to major; None: row-major.
      batch: how many leading dimensions XLA may split, all alike; None: none.
      seconds: a function of a chip that gives the call's time there, for XLA's scheduler.
      attributes: of `rule.call_attributes`.
    """
    n = len(ctx.avals_in)
    rule = ffi.ffi_lowering(
        store.TARGET,
        operand_layouts=None if layouts is None else layouts[:n],
        result_layouts=None if layouts is None else layouts[n:],
        extra_attributes=_read_by_xla(ctx, kernels, batch, seconds),
    )
    attributes = call_attributes(kernels, **attributes)
    if private.of_shard.get():
        return _in_function(ctx, functools.partial(rule, ctx, **attributes), operands)
    return rule(ctx, *operands, **attributes)


def _read_by_xla(
    ctx: mlir.LoweringRuleContext,
    chips: Iterable[str],
    batch: int | None,
    seconds: Callable[[str], float] | None,
) -> dict[str, Any]:
    """Attributes for XLA's scheduler and its partitioner.

    The scheduler hides collectives behind calls. Without `latency_metadata`, in ns, it counts 10 us
    for each call, and some take a hundred times as long.
    """
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    if not all(isinstance(n, int) for aval in avals for n in aval.shape):
        return {}  # shape-polymorphic: neither has numbers
    sharding = {} if batch is None else _sharding_attributes(ctx, batch)
    read = {"num_batch_dims": str(batch)} if sharding else {}
    if seconds is not None:
        read = {"latency_metadata": str(round(1e9 * max(map(seconds, chips)))), **read}
    return sharding | ({"mhlo.frontend_attributes": mlir.ir_attribute(read)} if read else {})


def _sharding_attributes(ctx: mlir.LoweringRuleContext, batch: int) -> dict[str, Any]:
    """The attributes that let the partitioner split a call along its first `batch` dimensions."""
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    if len({aval.shape[:batch] for aval in avals}) > 1:
        return {}  # leading dimensions differ: a program of one device
    # A factor for each other dimension, none of them shared.
    names = map("d{}".format, itertools.count())
    terms = [["...", *itertools.islice(names, len(aval.shape) - batch)] for aval in avals]
    n = len(ctx.avals_in)
    sides = [", ".join(" ".join(term) for term in side) for side in (terms[:n], terms[n:])]
    types = _types(avals)
    whole = tuple(name for term in terms for name in term[1:])
    notation = " -> ".join(sides)
    rule = private.sharding_rule(notation, types[:n], types[n:], need_replication_factors=whole)
    return {"sdy.sharding_rule": rule}


def _types(avals: Iterable[Any]) -> list[ir.Type]:
    return [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in avals]


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


store.register()
