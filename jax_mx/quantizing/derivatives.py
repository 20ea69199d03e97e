"""Derivatives by functions of ours: of first order alone, of a linear function, of any order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jax_mx.formats.sharding import spec_of, spread


def no_second(op: str, *_: Any, **__: Any) -> Any:
    """Says which derivative an op has; JAX's rule for others."""
    raise NotImplementedError(
        f"{op}: derivatives of derivatives, and forward-mode ones, are not there; jax_mx.{op} has "
        "reverse-mode ones of first order (jax.grad, jax.vjp)"
    )


reverse_only_p = Primitive("mx_reverse_only")  # the identity
reverse_only_p.multiple_results = True
reverse_only_p.def_abstract_eval(lambda *args, **_: args)


def reverse_only(op: str, args: Any, second: str = "") -> Any:
    """Arrays on their way to a `jax.custom_vjp`: forward mode is refused.

        y = f(*reverse_only("rms_norm", (x, weight)))

    Args:
      op: the public function.
      args: a pytree of arrays. All pass at once: JAX linearizes each primitive by itself.
      second: the end of the sentence.
    """
    leaves, tree = jax.tree.flatten(args)
    return tree.unflatten(reverse_only_p.bind(*leaves, op=op, second=second, is_tangent=False))


def _require_no_tangent(op: str, second: str, is_tangent: bool) -> None:
    """Raises where a tangent is more than transposed, as it is in reverse mode alone."""
    if is_tangent:
        raise NotImplementedError(
            f"{op}: derivatives in forward mode (jax.jvp, jax.jacfwd, jax.hessian) are not there; "
            f"jax_mx.{op} has those of reverse mode (jax.grad, jax.vjp, jax.jacrev){second}"
        )


def _jvp_of_reverse_only(primals: Any, tangents: Any, **params: Any) -> tuple[Any, list[Any]]:
    _require_no_tangent(**params)
    moving = [t for t in tangents if type(t) is not ad.Zero]
    moved = iter(reverse_only_p.bind(*moving, **params | {"is_tangent": True}) if moving else ())
    return primals, [t if type(t) is ad.Zero else next(moved) for t in tangents]


reverse_only_p.def_impl(lambda *args, **params: _require_no_tangent(**params) or args)
mlir.register_lowering(
    reverse_only_p, lambda _, *args, **params: _require_no_tangent(**params) or args
)
batching.primitive_batchers[reverse_only_p] = lambda args, dims, **params: (
    _require_no_tangent(**params) or (reverse_only_p.bind(*args, **params), dims)
)
ad.primitive_jvps[reverse_only_p] = _jvp_of_reverse_only
ad.primitive_transposes[reverse_only_p] = lambda dys, *_, **__: dys


# ---- a linear function that is known by its transpose ---
linear_p = Primitive("mx_linear")
linear_p.multiple_results = True


once_derived_p = Primitive("mx_once_derived")  # the identity of the first operand
once_derived_p.def_abstract_eval(lambda x, *_, op: x)
once_derived_p.def_impl(lambda x, *_, op: x)
mlir.register_lowering(once_derived_p, lambda _, x, *__, op: [x])
batching.primitive_batchers[once_derived_p] = lambda args, dims, *, op: (
    once_derived_p.bind(*args, op=op),
    dims[0],
)
ad.primitive_jvps[once_derived_p] = lambda *_, op: no_second(op)


def once_derived(op: str, x: Any, *others: Any) -> jax.Array:
    """The function returns x, and raises in any second derivative, by `others` too.

    Codes carry no derivative, so a second derivative would silently lack a part. The forward pass
    keeps a `MARK` that its inputs guard. The backward pass guards its gradient by that `MARK`. JAX
    deletes a guard without a reader; the kept `MARK` is one.
    """
    return once_derived_p.bind(x, *jax.tree.leaves(others), op=op)


MARK = np.zeros((), bool)


def linear(
    transposed: Callable,
    kept: Any,
    tangents: Sequence[Any],
    results: Sequence[jax.Array],
    forward: Callable | None = None,
) -> list[jax.Array]:
    """A linear function of tangents, for the rule of a `jax.custom_jvp`.

    Reverse mode calls `transposed`, as it does a `jax.custom_vjp`'s backward pass. Forward mode
    calls `forward`, or transposes `transposed` when it executes or lowers the tangent.

    Args:
      transposed: a function of `kept` and the results' cotangents that gives cotangents of
        tangents.
      kept: a pytree of arrays.
      tangents: arrays.
      results: arrays of the results' types.
      forward: gives the results, from what is kept and tangents. With it neither function is ever
        transposed: what reverse mode gives is linear again, and its transpose is `forward`.
    """
    leaves, tree = jax.tree.flatten(kept)
    count = len(leaves)

    def of_leaves(f: Callable, *args: Any) -> tuple[Any, ...]:
        return tuple(f(tree.unflatten(args[:count]), *args[count:]))

    ways = (functools.partial(of_leaves, f) if f else None for f in (transposed, forward))
    params = {"count": count, "results": tuple(map(jax.typeof, results))}
    params |= dict(zip(("transposed", "forward"), ways, strict=True))
    return linear_p.bind(*leaves, *tangents, **params)


def _forward(*args: Any, transposed: Callable, forward: Any, count: int, results: Any) -> Any:
    if forward is not None:
        return forward(*args)
    kept, tangents = args[:count], args[count:]
    return jax.linear_transpose(lambda *dys: transposed(*kept, *dys), *results)(tangents)


def _jvp_of_linear(primals: Any, tangents: Any, *, count: int, **params: Any) -> tuple[Any, Any]:
    """Codes that are kept, bytes of whatever dtype, are constants."""
    of_kept = (type(t) is not ad.Zero and t.dtype.itemsize > 1 for t in tangents[:count])
    moving = [i for i, moves in enumerate(of_kept) if moves]
    if not moving:
        moved = map(ad.instantiate_zeros, tangents[count:])
        bind = functools.partial(linear_p.bind, *primals[:count], count=count, **params)
        return bind(*primals[count:]), bind(*moved)
    moving += range(count, len(primals))

    def run(*args: Any) -> Any:
        every = {**dict(enumerate(primals)), **dict(zip(moving, args, strict=True))}
        return _forward(*every.values(), count=count, **params)

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
    args: Any, dims: Any, *, transposed: Callable, forward: Any, count: int, results: Any
) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    names = split_of_mapped(args, dims)
    tangents = _mapped(args[count:], dims[count:], size, names)

    def mapped(aval: Any) -> Any:
        sharding = aval.sharding.update(spec=PartitionSpec(names, *aval.sharding.spec))
        return aval.update(shape=(size, *aval.shape), sharding=sharding)

    of_batch = jax.vmap(transposed, in_axes=(*dims[:count], *[0] * len(results)))
    if forward is not None:
        forward = jax.vmap(forward, in_axes=(*dims[:count], *[0] * len(tangents)))
    params = {"transposed": of_batch, "forward": forward, "count": count}
    params["results"] = tuple(map(mapped, results))
    return linear_p.bind(*args[:count], *tangents, **params), [0] * len(results)


def _transpose_of_linear(
    dys: Any, *args: Any, transposed: Callable, forward: Any, count: int, **_: Any
) -> Any:
    zeros = [None] * len(args)
    if all(type(dy) is ad.Zero for dy in dys):
        return zeros
    operands = *args[:count], *map(ad.instantiate_zeros, dys)
    if forward is None:
        return [*zeros[:count], *transposed(*operands)]
    params = {"transposed": forward, "forward": transposed, "count": count}
    params["results"] = tuple(x.aval for x in args[count:])

    def rule(_: list, args: list, tangents: list) -> list[jax.Array]:
        tangents = [
            ad.Zero(jax.typeof(x).to_tangent_aval()) if t is None else t
            for x, t in zip(args, tangents, strict=True)
        ]
        return _jvp_of_linear(args, tangents, **params)[1]

    # Not behind a primitive: `explain` and policies of jax.checkpoint look for products.
    values = transposed(*map(jax.lax.stop_gradient, operands))
    return [*zeros[:count], *derived(values, operands, rule)]


linear_p.def_impl(_forward)
linear_p.def_abstract_eval(lambda *_, results, **__: results)
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
