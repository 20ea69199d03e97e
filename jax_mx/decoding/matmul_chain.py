"""`normed_matmul` and `matmul_chain`: what a layer computes where a few tokens are decoded."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.decoding.cached_attention import Attention, CachedAttention, attention_of
from jax_mx.decoding.chain import chain_of, chain_p
from jax_mx.decoding.steps import Product, State, is_plain
from jax_mx.formats.checks import array_of, is_symbolic, shown
from jax_mx.launch.private import vary_alike
from jax_mx.norms.rms_norm import eps_of
from jax_mx.products.operand import QuantizedWeight
from jax_mx.quantizing import derivatives
from jax_mx.quantizing.activations import row_of
from jax_mx.quantizing.facts.product_kernels import PRODUCTS
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.plan import ProductPlan

_MOST = 16  # rows: the kernels of more ask for no weight before the kernel ahead has ended


Step = Product | Attention


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
    w has row-major blocks of 32 along K. It launches one kernel for up to four rows of together
    16384 elements, if w is in MXFP8 (E4M3) or MXFP4 and K is a multiple of 128. Else it launches a
    norm and a product. With an activation only these formats and multiples of 64
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
    state = State(array_of(op, "x", x), residual)
    return _chained(state, [Product(w, weight, activation)], eps)[:2]


def matmul_chain(
    x: jax.typing.ArrayLike,
    steps: list[Any],
    *,
    residual: jax.typing.ArrayLike | None = None,
    eps: float = 1e-6,
) -> tuple[Any, ...]:
    """Products one after the other, each of what the one before gives: layers of a few tokens.

        attend = jax_mx.CachedAttention(keys, values, position, cos, sin)
        steps = [(norm, qkv), attend, o, (next_norm, gate_up, "swiglu"), down]
        y, x, [(keys, values)] = jax_mx.matmul_chain(y, steps, residual=x)

    A step that is a weight is a product. A step (norm, weight) or (norm, weight, activation) is
    `normed_matmul` of what is there and the residual, and the sum is the next residual. A norm of
    None means that the step does not norm. A `CachedAttention` attends. Without it, the chain
    stands for these lines, and gives their bits where products are exact::

        y, x = jax_mx.normed_matmul(y, x, norm, qkv)
        y = ...  # of the attention
        y = jax_mx.einsum("...k,nk->...n", y, o, recipe="bf16")
        y, x = jax_mx.normed_matmul(y, x, next_norm, gate_up, activation="swiglu")
        y = jax_mx.einsum("...k,nk->...n", y, down, recipe="bf16")

    On Hopper one call launches the kernels of neighbouring steps, for 1 to 16 rows of bfloat16.
    Neighbours join a call if `normed_matmul` has kernels for their weights, norms and activations.
    A kernel asks for its weight before the kernel ahead has ended. So all layers of a model are
    best one chain. Elsewhere, on meshes with automatic axes, under `vmap` and for other steps it is
    these lines. Its derivatives are theirs.

    Args:
      x: bfloat16, float16 or float32 (..., K).
      steps: a list of one or more. A weight is (N, K), floats or an `MXArray` with its blocks along
        K, a norm is floats (K,), an activation is a name, see `gated`.
      residual: the array that the first norm adds to its input, of that input's shape and dtype.
        None: no step may have a norm.
      eps: see `rms_norm`.

    Returns:
      y (..., N) of the last step, and the last sum, or the residual where no step has a norm. If a
      step attends, a list too: for each such step its keys and values with the token's own.

    Raises:
      TypeError, ValueError: a step has another form or does not fit x, or `normed_matmul` or
        `einsum` refuses it.
    """
    op = "matmul_chain"
    if not isinstance(steps, list) or not steps:
        raise TypeError(
            f"{op}: steps must be a list of one or more weights and tuples, or of "
            f"CachedAttention, got {shown(steps)}"
        )
    checked = [_step_of(op, i, step) for i, step in enumerate(steps)]
    normed = [i for i, step in enumerate(checked) if isinstance(step, Product) and step.floats]
    if normed and residual is None:
        raise ValueError(
            f"{op}: step {normed[0]} has a norm, which is of a sum; pass residual, the summand"
        )
    stream = None if residual is None else array_of(op, "residual", residual)
    y, last, caches = _chained(State(array_of(op, "x", x), stream), checked, eps_of(op, eps))
    attends = any(isinstance(step, Attention) for step in checked)
    return (y, last, [*caches]) if attends else (y, last)


# ---- arguments ---
def _step_of(op: str, number: int, step: Any) -> Step:
    """A step of a caller, whose arrays JAX takes.

    Raises:
      TypeError, ValueError: it is none.
    """
    if isinstance(step, CachedAttention):
        return attention_of(f"{op}: step {number}", step)
    parts = step if isinstance(step, tuple) else (None, step)
    if len(parts) not in (2, 3):
        raise ValueError(
            f"{op}: step {number} must be a weight, (norm, weight), (norm, weight, activation) or "
            f"a CachedAttention, got a tuple of length {len(parts)}"
        )
    weight, w, activation = (*parts, "")[:3]
    _check_activation(f"{op}: step {number}", activation)
    if weight is not None:
        weight = array_of(op, f"the norm of step {number}", weight)
    if not isinstance(w, MXArray | QuantizedWeight):
        w = array_of(op, f"the weight of step {number}", w)
    return Product(w, weight, activation)


def _check_activation(op: str, name: Any) -> None:
    if not (isinstance(name, str) and name == ""):
        row_of(op, name)


# ---- what it computes ---
def _chained(state: State, steps: Sequence[Step], eps: float) -> State:
    """The results of steps: neighbours that kernels serve are one call."""
    done = 0
    while done < len(steps):
        try:
            plans = _plans_of(state, steps[done:], eps)
            now = steps[done : done + max(len(plans), 1)]
            if len(plans) > 1 or (plans and now[0].floats):
                state = _by_kernels(state, now, eps, [*itertools.chain(*plans)])
            else:  # a product by itself has choices of its own
                now = now[:1]
                state = now[0].lines(state, eps)
        except (TypeError, ValueError) as error:
            if len(steps) > 1:
                error.add_note(f"This is step {done} of matmul_chain.")
            raise
        done += len(now)
    return state


def _plans_of(state: State, steps: Sequence[Step], eps: float) -> list[list[ProductPlan]]:
    """The plans of each of the first steps that kernels may serve, of what the one before gives."""
    x = state.x
    if not x.ndim or any(map(is_symbolic, x.shape)) or 0 in x.shape or not is_plain(x):
        return []
    length, plans = x.shape[-1], []
    if math.prod(x.shape[:-1]) > _MOST:
        return []
    for step in steps:
        every = step.plans(state, length, eps)
        if not every or not all(plan.product("cutedsl") in PRODUCTS for plan in every):
            break
        plans.append(every)
        length = step.length_behind(length)
    return plans


def _by_kernels(
    state: State, steps: Sequence[Step], eps: float, plans: Sequence[ProductPlan]
) -> State:
    """The same by the kernels of these plans."""
    x, residual, caches = state
    has_norm = any(isinstance(step, Product) and step.floats for step in steps)
    floats = [x, residual] if has_norm else [x]
    rows = math.prod(x.shape[:-1])
    operands = [a.reshape(rows, -1) for a in floats]
    chain, numbers = chain_of(plans, has_residual=has_norm)
    # Decoding keeps no y for a backward pass, so the barrier of `run_once` does not stand here.
    every = [*operands, *itertools.chain(*(step.operands for step in steps))]
    fixed = vary_alike(*map(jax.lax.stop_gradient, every))
    results = [*fixed, *chain_p.bind(*fixed, plan=chain)]
    outs = [results[i] for i in numbers]
    count = len(floats)
    outs[:count] = [y.reshape(*x.shape[:-1], -1) for y in outs[:count]]
    args, tree = jax.tree.flatten((floats, [step.floats for step in steps]))
    others, tree_of_others = jax.tree.flatten([step.constants for step in steps])

    def lines(others: list[jax.Array], *args: jax.Array) -> list[jax.Array]:
        (x, *total), of_steps = tree.unflatten(args)
        now = State(x, total[0] if total else None)
        for step, *its in zip(steps, of_steps, tree_of_others.unflatten(others), strict=True):
            now = step.of(*its).lines(now, eps)
        return [now.x, *([now.residual] if total else []), *itertools.chain(*now.caches)]

    def tangents_of(_: Any, every: list, tangents: list) -> Any:
        # No array of a trace that is over is here: all come as arguments.
        args, others = every[:moving], every[moving:]
        pairs = zip(args, tangents[:moving], strict=True)
        moves = [jnp.zeros_like(a) if t is None else t for a, t in pairs]
        return jax.jvp(functools.partial(lines, others), args, moves)[1]

    moving = len(args)
    still = map(jax.lax.stop_gradient, others)
    y, *more = derivatives.derived(outs, [*args, *still], tangents_of)
    if has_norm:
        residual, *more = more
    return State(y, residual, (*caches, *zip(more[::2], more[1::2], strict=True)))
