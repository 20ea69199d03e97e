"""A kernel's custom call: its attributes, how XLA splits it, what vmap makes of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import jax.numpy as jnp
from jax import ffi
from jax.interpreters import mlir
from jaxlib.mlir import ir

from jax_mx.launch import compiler, private, store
from jax_mx.launch.binary import Binary
from jax_mx.launch.chips import arch_of
from jax_mx.launch.rule import call_attributes, steps_attributes

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
      chips: the program's chips.
      launch: the name of the launch, and the values of scalars that have a name.
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
    aliases: Mapping[int, int] | None = None,
    **attributes: Any,
) -> Any:
    """The custom call that launches a kernel.

    Args:
      ctx: JAX's.
      operands: MLIR values.
      kernels: see `kernels_of`.
      layouts: of operands, then of results, from minor to major; None: row-major.
      batch: how many leading dimensions XLA may split, all alike; None: none.
      aliases: the numbers of operands and of the results that lie where these do.
      attributes: of `rule.call_attributes`.
    """
    n = len(ctx.avals_in)
    rule = ffi.ffi_lowering(
        store.TARGET,
        operand_layouts=None if layouts is None else layouts[:n],
        result_layouts=None if layouts is None else layouts[n:],
        extra_attributes=None if batch is None else _sharding_attributes(ctx, batch),
        operand_output_aliases=dict(aliases or {}),
    )
    return rule(ctx, *operands, **call_attributes(kernels, **attributes))


def emit_steps(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    steps: Sequence[Any],
    aliases: Mapping[int, int],
    device: int | None,
) -> Any:
    """The custom call that launches several kernels, of row-major arrays; XLA splits none of them.

    Args:
      ctx: JAX's.
      operands: MLIR values.
      steps: see `rule.steps_attributes`.
      aliases: see `emit`.
      device: see `rule.call_attributes`.
    """
    rule = ffi.ffi_lowering(store.TARGET, operand_output_aliases=dict(aliases))
    return rule(ctx, *operands, **steps_attributes(steps, device=device))


def _sharding_attributes(ctx: mlir.LoweringRuleContext, batch: int) -> dict | None:
    """The attributes by which the partitioner splits the call along `batch` dimensions."""
    avals: list[Any] = [*ctx.avals_in, *ctx.avals_out]
    if not all(isinstance(n, int) for aval in avals for n in aval.shape):
        return None  # shape-polymorphic: sharding rules need numbers
    if len({aval.shape[:batch] for aval in avals}) > 1:
        return None  # leading dimensions differ: a program of one device
    # A factor for each other dimension, none of them shared.
    names = map("d{}".format, itertools.count())
    terms = [["...", *itertools.islice(names, len(aval.shape) - batch)] for aval in avals]
    n = len(ctx.avals_in)
    sides = [", ".join(" ".join(term) for term in side) for side in (terms[:n], terms[n:])]
    types: list[ir.Type] = [
        ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype)) for aval in avals
    ]
    return {
        "mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": str(batch)}),
        "sdy.sharding_rule": private.sharding_rule(
            " -> ".join(sides),
            types[:n],
            types[n:],
            need_replication_factors=tuple(name for term in terms for name in term[1:]),
        ),
    }


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
