"""`quantized`: a transformation of JAX functions, whose products become MX.

It reads the function's jaxpr and evaluates it anew, equation by equation. Equations without a
chosen product, at any depth, are bound as they are. `INSIDE` has the primitives that it enters.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jax_mx.adapters.rules import Left, Rules, is_float, rules_of
from jax_mx.formats.checks import shown
from jax_mx.formats.sharding import is_explicit
from jax_mx.launch import private
from jax_mx.products.dot_general import dot_general
from jax_mx.products.ragged_dot import ragged_dot
from jax_mx.products.recipes import AUTO, Recipe, check_recipe

OP = "quantized"


class Candidate(NamedTuple):
    """A product of floats that `quantized` met.

    Attributes:
      op: "dot_general" or "ragged_dot".
      lhs: its shape and dtype.
      rhs: its shape and dtype.
      dimension_numbers: of a dot_general; None for a ragged_dot.
      scope: of `jax.named_scope`, which linen and haiku set by their modules' names, and nnx and
        equinox do not: "decoder/mlp".
    """

    op: str
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    dimension_numbers: Any
    scope: str


Where = str | Rules | Callable[[Candidate], bool | Recipe | str | None] | None


def quantized(
    f: Callable[..., Any], recipe: Recipe | str = AUTO, *, where: Where = None
) -> Callable[..., Any]:
    """f with its products in MX: f is any function of JAX, so a model of any library.

        loss = jax_mx.quantized(loss)
        loss = jax_mx.quantized(loss, "mxfp8", where=r"layers/.*(attention|mlp)")
        loss = jax_mx.quantized(loss, where=lambda product: product.rhs.shape[-1] > 1024)

    Its products, dense or over groups, become `jax_mx.dot_general` and `jax_mx.ragged_dot`. They
    may stand in jit, scan, while, cond, checkpoint, shard_map, and in functions with custom
    derivatives. All else stays. jit, grad, vmap and meshes work as on f. Transform the loss before
    you differentiate it, so that the recipe also serves the gradients' products. Each call traces
    f, so jit the caller. A trace keeps what f returns: let it return what it changes, say the
    statistics of an nnx module, as `jax.jit` wants it.

    Args:
      f: a function of pytrees that returns pytrees. Leaves of its arguments that are no arrays of
        JAX, so NumPy's arrays too, are constants: products of two of them stay as they are.
      recipe: of the products, see `dot_general`. If it rounds at random, as `mxfp4_backward(key)`
        does, each product folds a number of its own into the key. Steps of a scan and calls with
        one key round alike: make the recipe of each step's key in the function that is jitted.
      where: the choice of products. None: all ragged ones, and dense ones without batch dimensions,
        as attention's scores have these and weights do not. A regular expression: of these, the
        products whose scope it matches somewhere. A mapping from expressions to recipes: the first
        match counts, and None leaves a product in floats. A warning tells an expression that is
        found in no scope. A function of a `Candidate`, with batch dimensions or without: it returns
        a bool, or a recipe.

    Returns:
      A function like f. A chosen product that MX cannot take stays in floats, and a warning says
      why, once. A custom derivative (`jax.custom_vjp`, `jax.custom_jvp`) of a function that has a
      chosen product stays, and its products become MX, too, by the recipe's forward formats. A
      `jax.custom_jvp` then serves reverse mode alone.

    Raises:
      TypeError: f is no function, or the recipe or `where` is of another type.
      NotImplementedError: a rule of a custom derivative closes over arrays of its caller.
      ValueError: the recipe is unknown, or an expression is not regular. A call of the result
        raises both for an answer of the function `where` that is neither a bool nor a recipe.
    """
    if not callable(f):
        raise TypeError(f"{OP}: f must be a function, got {shown(f)}")
    check_recipe(OP, recipe)
    choice, left = _choice(where, recipe), Left(OP)

    @functools.wraps(f, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        results = _Rewrite(choice, left, {}, itertools.count()).applied(f, "", *args, **kwargs)
        if isinstance(choice, _ByScope):
            choice.tell(left)
        return results

    return call


def _choice(where: Where, recipe: Any) -> Callable[[Candidate], Any]:
    """The function that gives a candidate's recipe, or None."""
    if where is None:
        return lambda product: recipe if _is_of_weights(product) else None
    if isinstance(where, str):
        where = {where: recipe}
    if isinstance(where, Mapping):
        return _ByScope(rules_of(OP, where))
    if not callable(where):
        raise TypeError(
            f"{OP}: where must be None, a regular expression, a mapping of these to recipes, or a "
            f"function, got {shown(where)}"
        )

    def asked(product: Candidate) -> Any:
        answer = where(product)
        if answer is None:
            return None
        if isinstance(answer, bool | np.bool_):
            return recipe if answer else None
        check_recipe(OP, answer)
        return answer

    return asked


def _is_of_weights(product: Candidate) -> bool:
    return product.op == "ragged_dot" or not product.dimension_numbers[1][0]


class _ByScope:
    """A choice by expressions, the first that is found in a product's scope; see `quantized`."""

    def __init__(self, rules: dict[re.Pattern, Any]):
        self._rules, self._scopes = rules, set[str]()

    def __call__(self, product: Candidate) -> Any:
        if not _is_of_weights(product):
            return None
        self._scopes.add(product.scope)
        matching = (r for pattern, r in self._rules.items() if pattern.search(product.scope))
        return next(matching, None)

    def tell(self, left: Left) -> None:
        """Tells expressions that no scope up to now has."""
        for pattern, recipe in self._rules.items():
            if recipe is not None and not any(map(pattern.search, self._scopes)):
                left.tell_unmatched(pattern.pattern, "scope of a product", self._scopes)


class _Rewrite(NamedTuple):
    """One call of what `quantized` gives.

    Attributes:
      choice: gives a candidate's recipe, or None.
      left: tells what stays in floats.
      known: the recipes of equations, by identity and scope; it keeps the equations alive.
      numbers: of products, which keys of a recipe fold in.
      keyed: what stands for a traced key of a recipe, by its identity.
    """

    choice: Callable[[Candidate], Any]
    left: Left
    known: dict[tuple[int, str], tuple[Any, Any]]
    numbers: Iterator[int]
    keyed: Mapping[int, Any] = types.MappingProxyType({})

    def applied(self, f: Callable[..., Any], scope: str, *args: Any, **kwargs: Any) -> Any:
        """The result of f, of this scope, with its products in MX."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def of_arrays(*arrays: Any) -> Any:
            whole = [*leaves]
            for i, array in zip(at, arrays, strict=True):
                whole[i] = array
            args, kwargs = jax.tree.unflatten(tree, whole)
            return f(*args, **kwargs)

        arrays = [leaves[i] for i in at]
        closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        if not all(map(private.is_alive, closed.consts)):
            raise NotImplementedError(
                f"{OP}: a rule of a custom derivative closes over arrays that its caller computes "
                "or gets, which jax.grad of a jitted function refuses, too; pass them as arguments"
            )
        results = self.run(closed.jaxpr, closed.consts, arrays, scope)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], scope: str) -> list[Any]:
        """Evaluates a jaxpr of this scope with its products in MX."""
        values: dict[Any, Any] = {}
        values.update(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        last = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not _is_literal(v)}
        last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not _is_literal(v)}
        for i, equation in enumerate(jaxpr.eqns):
            inputs = [read(atom) for atom in equation.invars]
            inner = str(equation.source_info.name_stack)
            named = jax.named_scope(inner) if inner else contextlib.nullcontext()
            with named, equation.ctx.manager:
                results = self.equation(equation, inputs, f"{scope}/{inner}".strip("/"))
            values.update(zip(equation.outvars, results, strict=True))
            for atom in {v for v in equation.invars if not _is_literal(v)}:
                if last[atom] == i:  # as soon as nobody reads it, its memory is free
                    del values[atom]
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, inputs: Sequence[Any], scope: str) -> Sequence[Any]:
        """The results of an equation."""
        if (recipe := self.recipe_of(equation, scope)) is not None:
            if keys := _keys_in(recipe):
                values = [self.keyed.get(id(key), key) for key in keys]
                recipe = jax.tree.unflatten(jax.tree.structure(recipe), values)
                recipe = recipe.fold_in(next(self.numbers))
            return [_product(equation, inputs, recipe)]
        if self.has_product(equation, scope):
            name = equation.primitive.name
            if name in INSIDE:
                return INSIDE[name](self, equation, inputs, scope)
            self.left.tell(f"what {name!r} computes", "it is not entered")
        return _bound(equation, inputs)

    def keys(self) -> list[Any]:
        """The traced keys of the recipes that were chosen up to now."""
        leaves = (key for _, recipe in self.known.values() for key in _keys_in(recipe))
        return [*{id(key): key for key in leaves if isinstance(key, jax.core.Tracer)}.values()]

    def recipe_of(self, equation: Any, scope: str) -> Any:
        """The recipe that an equation's product becomes MX by; None: it does not."""
        name = equation.primitive.name
        if name not in ("dot_general", "ragged_dot_general"):
            return None
        if (id(equation), scope) not in self.known:
            self.known[id(equation), scope] = equation, self._recipe_of(equation, scope)
        return self.known[id(equation), scope][1]

    def _recipe_of(self, equation: Any, scope: str) -> Any:
        lhs, rhs, *sizes = (
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars
        )
        if not (is_float(lhs) and is_float(rhs) and is_float(equation.outvars[0].aval)):
            return None
        if sizes and not _is_plain_ragged(equation.params):
            return None
        op = "ragged_dot" if sizes else "dot_general"
        numbers = equation.params.get("dimension_numbers")
        recipe = self.choice(Candidate(op, lhs, rhs, numbers, scope))
        if recipe is None:
            return None
        sums = sizes[0] if sizes else numbers
        if not self.left.takes(recipe, sums, lhs, rhs, where=scope):
            return None
        return None if self._splits_blocks(equation, recipe, scope) else recipe

    def _splits_blocks(self, equation: Any, recipe: Any, scope: str) -> bool:
        """Whether explicit axes split the blocks of a product or of its gradients; tells so."""
        avals = [v.aval for v in equation.invars]
        if not any(is_explicit(aval.sharding.mesh) for aval in avals):
            return False

        def gradients(*args: Any) -> Any:
            y, pull = jax.vjp(lambda *two: _product(equation, [*two, *args[2:]], recipe), *args[:2])
            return pull(y)

        typed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in avals]
        try:
            with equation.ctx.manager:
                jax.eval_shape(gradients, *typed)
        except private.ShardingTypeError as error:
            shapes = " times ".join(aval.str_short() for aval in avals[:2])
            self.left.tell(f"{shapes} in {scope!r}" if scope else shapes, str(error))
            return True
        return False

    def has_product(self, equation: Any, scope: str) -> bool:
        """Whether a chosen product stands in an equation, at any depth; a kernel's do not count."""
        if equation.primitive.name.startswith("pallas"):
            return False
        return any(
            self.recipe_of(inner, here) is not None or self.has_product(inner, here)
            for jaxpr in _jaxprs_in(equation.params)
            for inner in jaxpr.eqns
            for here in [f"{scope}/{inner.source_info.name_stack}".strip("/")]
        )


def _keys_in(recipe: Any) -> list[Any]:
    return jax.tree.leaves(recipe) if isinstance(recipe, Recipe) else []


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def _jaxprs_in(params: Any) -> Iterator[Any]:
    """The jaxprs of an equation, without the jaxprs of its derivatives."""
    for leaf in jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        if hasattr(leaf, "eqns"):
            yield leaf


def _is_plain_ragged(params: Any) -> bool:
    """Whether a product is what jax.lax.ragged_dot computes."""
    numbers = params["ragged_dot_dimension_numbers"]
    dense = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
    groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    is_plain = (dense, *groups) == ((((1,), (1,)), ((), ())), (0,), (0,))
    return is_plain and params["group_offset"] is None


def _product(equation: Any, inputs: Sequence[Any], recipe: Any) -> jax.Array:
    params, dtype = equation.params, equation.outvars[0].aval.dtype
    precision = params["precision"]
    if equation.primitive.name == "ragged_dot_general":
        lhs, rhs, sizes = inputs
        return ragged_dot(lhs, rhs, sizes, precision, dtype, recipe=recipe)
    lhs, rhs = inputs
    return dot_general(
        lhs,
        rhs,
        params["dimension_numbers"],
        precision,
        dtype,
        out_sharding=params.get("out_sharding"),
        recipe=recipe,
    )


def _bound(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """The equation as it is."""
    bound = equation.primitive.get_bind_params(equation.params)
    if isinstance(bound, tuple):  # JAX before 0.12
        functions, params = bound
        inputs = [*functions, *inputs]
    else:
        params = bound
    results = equation.primitive.bind(*inputs, **params)
    return results if equation.primitive.multiple_results else [results]


# ---- what is entered ---
def _jit(rewrite: _Rewrite, equation: Any, inputs: Sequence[Any], scope: str) -> Sequence[Any]:
    inner = equation.params["jaxpr"]

    def run(*args: Any) -> Any:
        return rewrite.run(inner.jaxpr, inner.consts, args, scope)

    closed = jax.make_jaxpr(run)(*inputs)
    if any(isinstance(const, jax.core.Tracer) for const in closed.consts):  # keys of a recipe
        return jax.jit(run)(*inputs)
    return equation.primitive.bind(*inputs, **{**equation.params, "jaxpr": closed})


def _call(rewrite: _Rewrite, equation: Any, inputs: Sequence[Any], scope: str) -> Sequence[Any]:
    inner = equation.params["call_jaxpr"]
    return rewrite.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs, scope)


def _checkpoint(
    rewrite: _Rewrite, equation: Any, inputs: Sequence[Any], scope: str
) -> Sequence[Any]:
    params = equation.params

    def run(*args: Any) -> Any:
        return rewrite.run(params["jaxpr"], (), args, scope)

    if params["differentiated"]:  # the part of a gradient that is computed again
        return run(*(jax.lax.optimization_barrier(inputs) if params["prevent_cse"] else inputs))
    options = {name: params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(run, **options)(*inputs)


def _scan(rewrite: _Rewrite, equation: Any, inputs: Sequence[Any], scope: str) -> Sequence[Any]:
    params = equation.params
    inner = params["jaxpr"]
    if "ft_in" in params:  # since 0.12: the trees of constants, carries and what is scanned
        before, carries, _ = map(len, params["ft_in"].unpack())
    else:
        before, carries = params["num_consts"], params["num_carry"]
    consts, rest = inputs[:before], inputs[before:]

    def body(carry: Any, x: Any) -> Any:
        results = rewrite.run(inner.jaxpr, inner.consts, [*consts, *carry, *x], scope)
        return results[:carries], results[carries:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(body, [*rest[:carries]], [*rest[carries:]], **options)
    return [*carry, *ys]


def _while(rewrite: _Rewrite, equation: Any, inputs: Sequence[Any], scope: str) -> Sequence[Any]:
    params = equation.params
    n, m = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = inputs[:n], inputs[n : n + m]

    def run(name: str, consts: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
        return rewrite.run(params[name].jaxpr, params[name].consts, [*consts, *carry], scope)

    return jax.lax.while_loop(
        lambda carry: run("cond_jaxpr", of_cond, carry)[0],
        lambda carry: run("body_jaxpr", of_body, carry),
        [*inputs[n + m :]],
    )


def _cond(rewrite: _Rewrite, equation: Any, inputs: Sequence[Any], scope: str) -> Sequence[Any]:
    def branch(closed: Any) -> Callable[..., Any]:
        return lambda *args: rewrite.run(closed.jaxpr, closed.consts, args, scope)

    index, *operands = inputs
    return jax.lax.switch(index, [*map(branch, equation.params["branches"])], *operands)


def _shard_map(
    rewrite: _Rewrite, equation: Any, inputs: Sequence[Any], scope: str
) -> Sequence[Any]:
    params = equation.params
    axes = params.get("newly_manual_axes", params.get("manual_axes"))
    options = {name: params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    run = jax.shard_map(
        lambda *args: tuple(rewrite.run(params["jaxpr"], (), args, scope)),
        axis_names={*axes},
        **options,
    )
    return run(*inputs)


def _with_derivative(
    rewrite: _Rewrite, equation: Any, inputs: Sequence[Any], scope: str
) -> Sequence[Any]:
    """A function with a derivative of its own: both in MX, by what JAX makes of it.

    JAX differentiates the equation as its author wrote it; the jaxprs of that derivative's forward
    and backward parts hold plain products, which become MX.
    """
    # JAX refuses a derivative by what a function closes over, and rules may ask what moves: so it
    # is by what moves alone, which JAX tells outside of shard_map.
    params = equation.params
    by_moved = bool(equation.primitive.name == "custom_vjp_call" and params["num_consts"])
    by_moved = by_moved or params.get("symbolic_zeros") is True
    keys = rewrite.keys()

    # Rules must close over no traced key, so keys are arguments.
    def with_keys(values: Sequence[Any]) -> _Rewrite:
        return rewrite._replace(keyed=dict(zip(map(id, keys), values, strict=True)))

    @jax.custom_vjp
    def call(values: Sequence[Any], *args: Any) -> Any:
        return tuple(_call(with_keys(values), equation, args, scope))

    def forward(values: Sequence[Any], *primals: Any) -> Any:
        args = [p.value for p in primals] if by_moved else [*primals]
        values = [v.value for v in values] if by_moved else values
        moved = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in args]
        if by_moved:
            moved = [p.perturbed and is_float for p, is_float in zip(primals, moved, strict=True)]

        def of_args(*args: Any) -> Any:
            def of_moved(*some: Any) -> Any:
                leaves = iter(some)
                pairs = zip(moved, args, strict=True)
                whole = [next(leaves) if is_moved else x for is_moved, x in pairs]
                return tuple(_bound(equation, whole))

            return jax.vjp(of_moved, *itertools.compress(args, moved))

        results, pull = with_keys(values).applied(of_args, scope, *args)
        # Marks of what is moved lie in the tree, which is static.
        return results, (pull, [() if is_moved else None for is_moved in moved], values)

    def backward(kept: Any, dy: Any) -> Any:
        pull, moved, values = kept
        dy = tuple(_zeros(y) for y in dy)
        results = with_keys(values).applied(lambda pull, dy: pull(dy), scope, pull, dy)
        leaves = iter(results)
        by_args = [None if mark is None else next(leaves) for mark in moved]
        return [None] * len(values), *by_args

    call.defvjp(forward, backward, symbolic_zeros=by_moved)
    return call([rewrite.keyed.get(id(key), key) for key in keys], *inputs)


def _zeros(y: Any) -> Any:
    """A cotangent that JAX knows to be zeros, as an array."""
    if not isinstance(y, jax.custom_derivatives.SymbolicZero):
        return y
    aval: Any = y.aval
    return np.zeros(aval.shape, aval.dtype)


INSIDE = {
    **dict.fromkeys(("jit", "pjit"), _jit),
    **dict.fromkeys(("closed_call", "core_call"), _call),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), _checkpoint),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _with_derivative),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
