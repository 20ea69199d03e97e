"""Kernels one after the other in one call, so that one may begin while another one ends.

XLA records calls in CUDA graphs, each in a graph of its own, and a kernel there waits for the graph
ahead. Within a call a kernel starts early, loads its first codes, and then waits for the kernel
ahead.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from jax_mx.formats.layouts import ROW_MAJOR
from jax_mx.launch import calls
from jax_mx.launch.private import define
from jax_mx.launch.targets import target_of
from jax_mx.norms.rms_norm import rms_norm
from jax_mx.products.dot_general import einsum
from jax_mx.products.primitives import OPS
from jax_mx.quantizing.gated import gated
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.plan import ProductPlan
from jax_mx.quantizing.primitive import kernels_by_itself, no_derivative
from jax_mx.quantizing.reference.attention import attended


@dataclasses.dataclass(frozen=True)
class Chain:
    """Steps that follow each other.

    Attributes:
      steps: plans, each with the numbers of its operands. Numbers count the call's operands, then
        the results of one step after the other. No step writes an operand of the call that another
        step reads.
    """

    steps: tuple[tuple[ProductPlan, tuple[int, ...]], ...]


def chain_of(plans: Sequence[ProductPlan], has_residual: bool) -> tuple[Chain, list[int]]:
    """The chain of these products, each of what the one before gives.

    Its operands are x, the residual if there is one, and then the others of one step after the
    other. A step takes the last y as x, and the last sum as the residual.

    Returns:
      The chain, and the numbers of the last "x" and, if there is one, "residual", then of all
      results that replace an operand.
    """
    last = {"x": 0, "residual": 1} if has_residual else {"x": 0}
    weight = 1 + has_residual  # the number of the first operand that only one step takes
    arrays = [plan.signature.present(plan.lacks) for plan in plans]
    result = weight + sum(array.name not in last for step in arrays for array in step)
    steps, replacing = [], []
    for plan, operands in zip(plans, arrays, strict=True):
        numbers = []
        for array in operands:
            numbers.append(last.get(array.name, weight))
            weight += array.name not in last
        steps.append((plan, tuple(numbers)))
        for array in plan.signature.results:
            if array.updates:
                replacing.append(result)
            else:
                last["x" if array.name == "y" else "residual"] = result
            result += 1
    return Chain(tuple(steps)), [*last.values(), *replacing]


def _avals(*operands: Any, plan: Chain) -> list[Any]:
    """The abstract values of all steps' results."""
    return walked(lambda *args, plan: OPS[plan.op].avals(*args, plan=plan), operands, plan)


def in_lines(*operands: jax.Array, plan: Chain) -> list[jax.Array]:
    """The same by the functions that a step stands for, which choose and split for themselves."""

    def results_of(x: jax.Array, *args: jax.Array, plan: ProductPlan) -> list[jax.Array]:
        if plan.op == "rms_norm":
            residual, weight = args
            return [*normed_sum(x, residual, weight, plan.eps)]
        if plan.op == "attention":
            return attended(x, *args, scale=plan.scale)
        *normed, codes, scales = args
        residual, weight = normed or (None, None)
        w = MXArray(codes[0], scales[0], plan.formats[0], -1, ROW_MAJOR)
        y, total = lines_of(x, residual, w, weight, plan.activation, plan.eps)
        return [y, total] if normed else [y]

    return walked(results_of, operands, plan)


def lines_of(
    x: jax.Array, residual: Any, w: Any, weight: Any, activation: str, eps: float
) -> tuple[jax.Array, Any]:
    """The lines that a step stands for: y, and the sum, or the residual where nothing is normed."""
    y: Any = x
    if weight is not None:
        y, residual = normed_sum(x, residual, weight, eps)
    y = einsum("...k,nk->...n", y, w, recipe="bf16")
    return gated(y, activation) if activation else y, residual


def normed_sum(x: jax.Array, residual: Any, weight: Any, eps: float) -> tuple[jax.Array, jax.Array]:
    """The norm of a sum, and the sum."""
    y, _, total, _ = rms_norm(x, weight, eps=eps, residual=residual)
    assert y is not None and total is not None
    return y, total


def walked(results_of: Callable[..., list], operands: Sequence[Any], plan: Chain) -> list[Any]:
    """All steps' results, which a function gives for a step's operands and plan."""
    every = [*operands]
    for step, numbers in plan.steps:
        every += results_of(*(every[i] for i in numbers), plan=step)
    return every[len(operands) :]


def _lower(platform: str | None, ctx: Any, *operands: Any, plan: Chain) -> Any:
    """One call, where every step has a kernel by itself for the same chips, and none is split.

    Otherwise the lines: a product by itself is split as its weight is, and has choices.
    """
    target = target_of(ctx, platform)
    if not target.partitioned:
        kernels = [kernels_by_itself(step, target) for step, _ in plan.steps]
        if all(kernels) and len({(*chips,) for chips in kernels if chips}) == 1:
            steps = _wired(plan, kernels, len(operands))
            more = {"aliases": _aliases(plan, len(operands)), "device": target.device}
            return calls.emit_steps(ctx, *operands, steps=steps, **more)
    rule: Any = mlir.lower_fun(functools.partial(in_lines, plan=plan), multiple_results=True)
    return rule(ctx, *operands)


def _wired(plan: Chain, kernels: Sequence[Any], count: int) -> list[tuple[Any, list, list]]:
    """For each step its kernels, and the numbers of its operands and results; -1 of absent ones."""
    steps = []
    for (step, numbers), by_chip in zip(plan.steps, kernels, strict=True):
        rest = iter(numbers)
        operands = [-1 if a.name in step.lacks else next(rest) for a in step.signature.operands]
        results = range(count, count + len(step.signature.results))
        count = results.stop
        steps.append((by_chip, operands, [*results]))
    return steps


def _aliases(plan: Chain, count: int) -> dict[int, int]:
    """The numbers of the call's operands that a result replaces, and the results' among results."""
    aliases, first = {}, 0
    for step, numbers in plan.steps:
        aliases |= {numbers[i]: first + result for i, result in step.signature.aliases.items()}
        first += len(step.signature.results)
    assert all(operand < count for operand in aliases)
    return aliases


def _batch(args: Any, dims: Any, *, plan: Chain) -> tuple[list, list]:
    """The lines, which choose for all rows of the batch, and split as their weights are."""
    outs = jax.vmap(functools.partial(in_lines, plan=plan), in_axes=dims)(*args)
    return outs, [0] * len(outs)


def _no_derivative(*_: Any, plan: Chain, **__: Any) -> None:
    no_derivative(plan=plan.steps[0][0])


chain_p = define("mx_chain", _avals, _lower, _batch, _no_derivative)
