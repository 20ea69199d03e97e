"""`normed_matmul` and `matmul_chain`: what a layer computes where a few tokens are decoded."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp

from jax_mx.decoding.chain import chain_of, chain_p, in_turn, lines_of
from jax_mx.formats.checks import array_of, is_symbolic, shown
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import is_explicit
from jax_mx.launch.private import vary_alike
from jax_mx.norms.rms_norm import eps_of
from jax_mx.products.kernel_plans import plan_of, strips_of
from jax_mx.products.operand import QuantizedWeight
from jax_mx.quantizing import derivatives
from jax_mx.quantizing.activations import row_of
from jax_mx.quantizing.facts.product_kernels import (
    DIRECT,
    FEWEST,
    PRODUCTS,
    normed_fits,
)
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.plan import ProductPlan

_MOST = 16  # rows: the kernels of more ask for no weight before the kernel ahead has ended
_FORMATS = {p.formats[0] for p in PRODUCTS if p.op == "matmul"}


class _Step(NamedTuple):
    """A product, perhaps of a norm, perhaps with an activation behind it."""

    w: Any
    weight: jax.Array | None = None
    activation: str = ""


def normed_matmul(
    x: jax.typing.ArrayLike,
    residual: jax.typing.ArrayLike,
    weight: jax.typing.ArrayLike,
    w: MXArray,
    *,
    eps: float = 1e-6,
    activation: str = "",
) -> tuple[jax.Array, jax.Array]:
    """The product that begins a layer, of a token stream and of what the layer before adds to it.

        y, x = jax_mx.normed_matmul(x, residual, weight, w)

    It stands for these lines, and gives their bits where products are exact::

        y, _, x, _ = jax_mx.rms_norm(x, weight, eps=eps, residual=residual)
        y = jax_mx.einsum("...k,nk->...n", y, w, recipe="bf16")
        y = jax_mx.gated(y, activation)  # if there is one

    On Hopper one call computes it for 1 to 16 rows, where x and the norm's weight are bfloat16 and
    w has row-major blocks of 32 along K. The call launches one kernel for up to four rows of
    together 16384 elements at most, if w is in MXFP8 (E4M3) or MXFP4 and K is a multiple of 128.
    Else it launches a norm and a product. With an activation only these formats and multiples of 64
    have kernels, of "swiglu". Elsewhere it is these lines. Its derivatives are theirs.
    `matmul_chain` has several products one after the other.

    Args:
      x: bfloat16, float16 or float32 (..., K).
      residual: of x's shape and dtype.
      weight: floats (K,), of the norm.
      w: (N, K), floats or an `MXArray` with its blocks along K.
      eps: see `rms_norm`.
      activation: a name, see `gated`; then the first half of w's rows gives gates, the second one
        ups. "": none.

    Returns:
      y (..., N), with an activation that has a gate (..., N / 2), and x + residual (..., K).

    Raises:
      TypeError, ValueError: as `rms_norm`, `einsum` and `gated` do.
    """
    op = "normed_matmul"
    residual, weight = array_of(op, "residual", residual), array_of(op, "weight", weight)
    _check_activation(op, activation)
    eps = eps_of(op, eps)
    return _chained(array_of(op, "x", x), residual, [_Step(w, weight, activation)], eps)


@overload
def matmul_chain(
    x: jax.typing.ArrayLike,
    steps: list[Any],
    *,
    residual: jax.typing.ArrayLike,
    eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def matmul_chain(
    x: jax.typing.ArrayLike, steps: list[Any], *, residual: None = None, eps: float = 1e-6
) -> tuple[jax.Array, None]: ...


def matmul_chain(
    x: jax.typing.ArrayLike,
    steps: list[Any],
    *,
    residual: jax.typing.ArrayLike | None = None,
    eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array | None]:
    """Products one after the other, each of what the one before gives: a layer behind attention.

        steps = [o, (norm, gate_up, "swiglu"), down, (next_norm, w_qkv)]
        qkv, x = jax_mx.matmul_chain(attended, steps, residual=x)

    A step that is a weight is a product. A step (norm, weight) or (norm, weight, activation) is
    `normed_matmul` of what is there and the residual, and the sum is the next residual. A norm of
    None means that the step does not norm. It stands for these lines, and gives their bits where
    products are exact::

        y = jax_mx.einsum("...k,nk->...n", attended, o, recipe="bf16")
        y, x = jax_mx.normed_matmul(y, x, norm, gate_up, activation="swiglu")
        y = jax_mx.einsum("...k,nk->...n", y, down, recipe="bf16")
        qkv, x = jax_mx.normed_matmul(y, x, next_norm, w_qkv)

    On Hopper one call launches the kernels of neighbouring steps, for 1 to 16 rows of bfloat16.
    Neighbours join a call if `normed_matmul` has kernels for their weights, norms and activations.
    A kernel asks for its weight before the kernel ahead has ended. Elsewhere, on meshes with
    automatic axes, under `vmap` and for other steps it is these lines. Its derivatives are theirs.

    Args:
      x: bfloat16, float16 or float32 (..., K).
      steps: a list of one or more. A weight is (N, K), floats or an `MXArray` with its blocks along
        K, a norm is floats (K,), an activation is a name, see `gated`.
      residual: the array that the first norm adds to its input, of that input's shape and dtype.
        None: no step may have a norm.
      eps: see `rms_norm`.

    Returns:
      y (..., N) of the last step, and the last sum, or the residual where no step has a norm.

    Raises:
      TypeError, ValueError: a step has another form, or `normed_matmul` or `einsum` refuses it.
    """
    op = "matmul_chain"
    if not isinstance(steps, list) or not steps:
        raise TypeError(
            f"{op}: steps must be a list of one or more weights and tuples, got {shown(steps)}"
        )
    checked = [_step_of(op, i, step) for i, step in enumerate(steps)]
    normed = [i for i, step in enumerate(checked) if step.weight is not None]
    if normed and residual is None:
        raise ValueError(
            f"{op}: step {normed[0]} has a norm, which is of a sum; pass residual, the summand"
        )
    stream = None if residual is None else array_of(op, "residual", residual)
    return _chained(array_of(op, "x", x), stream, checked, eps_of(op, eps))


# ---- arguments ---
def _step_of(op: str, number: int, step: Any) -> _Step:
    """A step of a caller, whose arrays JAX takes.

    Raises:
      TypeError, ValueError: it is none.
    """
    parts = step if isinstance(step, tuple) else (None, step)
    if len(parts) not in (2, 3):
        raise ValueError(
            f"{op}: step {number} must be a weight, (norm, weight) or (norm, weight, activation), "
            f"got a tuple of length {len(parts)}"
        )
    weight, w, activation = (*parts, "")[:3]
    _check_activation(f"{op}: step {number}", activation)
    if weight is not None:
        weight = array_of(op, f"the norm of step {number}", weight)
    if not isinstance(w, MXArray | QuantizedWeight):
        w = array_of(op, f"the weight of step {number}", w)
    return _Step(w, weight, activation)


def _check_activation(op: str, name: Any) -> None:
    if not (isinstance(name, str) and name == ""):
        row_of(op, name)


# ---- what it computes ---
def _chained(
    x: jax.Array, residual: Any, steps: Sequence[_Step], eps: float
) -> tuple[jax.Array, Any]:
    """The results of steps: neighbours that kernels serve are one call."""
    done = 0
    while done < len(steps):
        try:
            plans = _plans_of(x, residual, steps[done:], eps)
            now = steps[done : done + max(len(plans), 1)]
            if len(plans) > 1 or (plans and now[0].weight is not None):
                every = [*itertools.chain(*plans)]
                x, residual = _by_kernels(x, residual, now, eps, every)
            else:  # a product by itself has choices of its own
                now = now[:1]
                x, residual = _in_lines(x, residual, now, eps)
        except (TypeError, ValueError) as error:
            if len(steps) > 1:
                error.add_note(f"This is step {done} of matmul_chain.")
            raise
        done += len(now)
    return x, residual


def _in_lines(x: Any, residual: Any, steps: Sequence[_Step], eps: float) -> tuple:
    """The lines that it stands for."""
    for step in steps:
        x, residual = lines_of(x, residual, *step, eps)
    return x, residual


def _plans_of(
    x: jax.Array, residual: Any, steps: Sequence[_Step], eps: float
) -> list[list[ProductPlan]]:
    """The plans of each of the first steps that kernels may serve, of what the one before gives."""
    if not x.ndim or any(map(is_symbolic, x.shape)) or 0 in x.shape or not _is_plain(x):
        return []
    lead, length, plans = x.shape[:-1], x.shape[-1], []
    rows = math.prod(lead)
    for step in steps:
        w, weight, activation = step
        if rows > _MOST or not _is_served(w, length):
            break
        if weight is not None:
            fits = weight.shape == (length,) and residual.shape == (*lead, length)
            if not (fits and _is_plain(weight, residual)):
                break
        if activation and (w.shape[0] % 2 or length % (2 * BLOCK)):
            break
        every = _plans_of_step(step, rows, length, x.dtype, eps)
        if not all(plan.product("cutedsl") in PRODUCTS for plan in every):
            break
        plans.append(every)
        length = w.shape[0] // (2 if activation else 1)
    return plans


def _plans_of_step(
    step: _Step, rows: int, length: int, dtype: Any, eps: float
) -> list[ProductPlan]:
    """The plans of a step, whose kernels may not exist: one of all, or a norm and a product."""
    (format, columns), activation = (step.w.format, step.w.shape[0]), step.activation
    normed = ProductPlan("normed", (format,), dtype, False, DIRECT, eps=eps, activation=activation)
    is_one = normed_fits(rows, length) and normed.product("cutedsl") in PRODUCTS
    if step.weight is not None and is_one:
        return [normed]
    plan = plan_of((format,), dtype, rows, strips=strips_of(1, columns))
    if activation:
        least = max(plan.rows, FEWEST)  # fewer rows have no such kernel
        plan = dataclasses.replace(plan, rows=least, narrow=False, activation=activation)
    norm = ProductPlan("rms_norm", (), dtype, False, 1, eps=eps)
    return [plan] if step.weight is None else [norm, plan]


def _is_plain(*arrays: jax.Array) -> bool:
    """Whether they are bfloat16, on no mesh with explicit axes."""
    meshes = (jax.typeof(a).sharding.mesh for a in arrays)
    return all(a.dtype == jnp.bfloat16 for a in arrays) and not any(map(is_explicit, meshes))


def _is_served(w: Any, length: int) -> bool:
    """Whether kernels take such a weight, of rows of this length."""
    if not isinstance(w, MXArray) or w.format not in _FORMATS:
        return False
    lies = w.ndim == 2 and w.axis == -1 and w.block == (BLOCK,)
    if not lies or w.scale_layout.is_tiled or w.value_layout.is_tiled:
        return False
    if any(map(is_symbolic, w.shape)) or 0 in w.shape or w.shape[1] != length:
        return False
    return not is_explicit(jax.typeof(w.values).sharding.mesh)


def _by_kernels(
    x: jax.Array, residual: Any, steps: Sequence[_Step], eps: float, plans: Sequence[ProductPlan]
) -> tuple[jax.Array, Any]:
    """The same by the kernels of these plans."""
    norms = [step.weight for step in steps if step.weight is not None]
    rows, floats = math.prod(x.shape[:-1]), [x, residual] if norms else [x]
    operands = [a.reshape(rows, -1) for a in floats]
    for step in steps:
        operands += [] if step.weight is None else [step.weight]
        operands += [step.w.values[None], step.w.scales[None]]
    chain, last = chain_of(plans, has_residual=bool(norms))
    # Decoding keeps no y for a backward pass, so the barrier of `run_once` does not stand here.
    fixed = vary_alike(*map(jax.lax.stop_gradient, operands))
    call = chain_p.bind if len(plans) > 1 else in_turn
    every = [*fixed, *call(*fixed, plan=chain)]
    names = ("x", "residual")[: len(floats)]
    outs = [every[last[name]].reshape(*x.shape[:-1], -1) for name in names]

    def lines(*args: jax.Array) -> list[jax.Array]:
        rest = iter(args)
        x, residual = next(rest), next(rest) if norms else None
        again = [s if s.weight is None else s._replace(weight=next(rest)) for s in steps]
        return [*_in_lines(x, residual, again, eps)][: len(floats)]

    def tangents_of(_: Any, args: list, tangents: list) -> Any:
        moves = [jnp.zeros_like(a) if t is None else t for a, t in zip(args, tangents, strict=True)]
        return jax.jvp(lines, args, moves)[1]

    y, *total = derivatives.derived(outs, [*floats, *norms], tangents_of)
    return y, total[0] if total else residual
