"""`Provider`: qwix chooses products of a flax model by its modules' paths, and they become MX.

The module is imported by name, `from jax_mx.adapters.qwix import Provider`, as it needs qwix. Two
inner names of qwix, which its own providers use too, tell the module and end interception.

JAX keeps what it has traced of a function: of `jax.jit`, `jax.checkpoint`, `jax.lax.scan` ... A
trace that a model made in MX would reach other models, and one in floats this one. So a context
that JAX keeps traces apart by is set while a provider's model runs, see `_apart`.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import linen
from qwix._src import interception
from qwix._src.utils import flax_util

from jax_mx.adapters.rules import Left, Rules, is_float, rules_of
from jax_mx.adapters.weights import array_of, is_weight
from jax_mx.launch.private import is_lowering
from jax_mx.products.dot_general import dot_general, einsum, with_weight_first
from jax_mx.products.planning import swapped_numbers
from jax_mx.products.ragged_dot import ragged_dot
from jax_mx.products.recipes import AUTO, Recipe

OP = "jax_mx.adapters.qwix.Provider"
JITTED = ("dot", "inner", "matmul", "matvec", "vdot", "vecmat")  # products of jnp that JAX jits
INSIDE = SimpleNamespace(**{name: getattr(jnp, name).__wrapped__ for name in JITTED})
NUMBERS = itertools.count()  # of providers whose recipes have keys
PATHS: dict[Any, set[str]] = {}  # of modules that multiplied, by provider and type of the model
CONTEXT = jax.make_user_context(None)  # the provider that computes, and its rule
RUNNING = threading.local()  # what to leave behind each call of a model
MATCHED = "path of a module that has multiplied by its parameters up to now"
LETTERS = "abcdefghijlmnopqrstuvwxyz"  # of free dimensions; k is the contracted one


class Provider(qwix.QuantizationProvider):
    """Products of a flax model, linen or nnx, in MX.

        provider = Provider({r"layers/.*": "mxfp8"})
        model = qwix.quantize_model(model, provider)  # of nnx: ..., provider, *inputs)

    It stands for `x @ w`, `jnp.matmul`, `jnp.dot`, `jnp.einsum`, `jax.lax.dot`,
    `jax.lax.dot_general` and `jax.lax.ragged_dot` in modules whose path a pattern matches. A
    product becomes MX where one operand is made of the module's parameters alone: attention's
    scores stay in floats. That operand is the recipe's rhs, the weight, on whichever side it
    stands. A product that MX cannot take stays in floats, and a warning says why, once. Another
    tells a pattern that no module of the first call matches.

    Outside of `jit` a cast, a transpose or another shape of a parameter counts, and not a slice. In
    a function of `jax.jit` or `jax.checkpoint` that gets its operands from the module, all that has
    the shape of a parameter counts. Other functions of JAX, `jnp.inner` say, compute in floats, and
    so do other names of `jnp.matmul` and `jnp.dot`, say by `from jax.numpy import dot`. Functions
    of `jax.custom_jvp` have no gradient then; `quantized` takes them.

    Args:
      rules: a recipe for each pattern, see `dot_general`. A pattern is a regular expression that
        matches the whole path, "layers/0/mlp/gate"; the first that does counts; None leaves its
        modules in floats, say a router. By default all modules follow "auto".

    Raises:
      TypeError, ValueError: rules are invalid.
    """

    def __init__(self, rules: Rules | None = None):
        rules = {".*": AUTO} if rules is None else rules
        self.recipes = {pattern.pattern: recipe for pattern, recipe in rules_of(OP, rules).items()}
        # Equal rules share traces.
        self.identity = tuple(self.recipes.items())
        if any(isinstance(recipe, Recipe) and jax.tree.leaves(recipe) for recipe in rules.values()):
            self.identity = next(NUMBERS)  # keys are equal to none
        self._left, self._paths = Left(OP), set[str]()
        super().__init__([qwix.QuantizationRule(module_path=path) for path in self.recipes])

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """The functions that stand for JAX's in the model."""
        PROVIDERS[id(self)] = self  # a copy, too
        # `x @ w` looks its function up where JAX defines it. JAX jits these, and keeps what it has
        # traced: an MX product inside would reach other callers. So inside all is as it was.
        modules = "jax.numpy", "jax._src.numpy.tensor_contractions"
        inside = {f"{__name__}.INSIDE.{name}": _plain(f) for name, f in vars(INSIDE).items()}
        return super().get_intercept_map() | {
            "jax.lax.dot_general": self.dot_general,
            "jax.lax.dot": self.lax_dot,
            "jax.numpy.einsum": self.einsum,
            "jax.lax.ragged_dot": self.ragged_dot,
            **{f"{module}.matmul": self.matmul for module in modules},
            **{f"{module}.dot": self.dot for module in modules},
            **inside,
        }

    def process_model_inputs(self, model: Any, model_args: Any, model_kwargs: Any) -> Any:
        """Finds the paths that were met before, as a trace that is kept meets none."""
        plain = getattr(type(model), "_unquantized_type", type(model))
        self._paths = PATHS.setdefault((self.identity, plain), set())
        return super().process_model_inputs(model, model_args, model_kwargs)

    def process_model_output(self, method_name: str, model_output: Any) -> Any:
        """Tells patterns without a module, behind the first call; then as qwix has it."""
        if not self._initial_run_complete:
            for pattern, recipe in self.recipes.items():
                if recipe is not None and not any(re.fullmatch(pattern, p) for p in self._paths):
                    self._left.tell_unmatched(pattern, MATCHED, self._paths)
        return super().process_model_output(method_name, model_output)

    def dot_general(
        self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any
    ) -> jax.Array:
        """jax.lax.dot_general as a rule has it."""
        lhs, rhs = map(array_of, (lhs, rhs))
        recipe, swaps = self._recipe("dot_general", lhs, rhs)
        numbers = swapped_numbers(dimension_numbers) if swaps else dimension_numbers
        if recipe is None or not self._can(recipe, numbers, *((rhs, lhs) if swaps else (lhs, rhs))):
            return jax.lax.dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)
        multiply = partial(with_weight_first, "dot_general") if swaps else dot_general
        return _plain(multiply)(lhs, rhs, dimension_numbers, *args, recipe=recipe, **kwargs)

    def einsum(self, subscripts: Any, *operands: Any, **kwargs: Any) -> jax.Array:
        """jnp.einsum as a rule has it."""
        plain = partial(jnp.einsum, subscripts)
        text = subscripts.replace(" ", "") if isinstance(subscripts, str) else None
        return self._by_letters("einsum", plain, text, operands, kwargs)

    def matmul(self, a: Any, b: Any, **kwargs: Any) -> jax.Array:
        """jnp.matmul, and @, as a rule has it."""
        left, right = jnp.ndim(a), jnp.ndim(b)
        lhs, rhs = "...mk" if left > 1 else "k", "...kn" if right > 1 else "k"
        free = "..." * (max(left, right) > 1) + "m" * (left > 1) + "n" * (right > 1)
        return self._by_letters("matmul", jnp.matmul, f"{lhs},{rhs}->{free}", (a, b), kwargs)

    def dot(self, a: Any, b: Any, **kwargs: Any) -> jax.Array:
        """jnp.dot as a rule has it."""
        text = None
        if jnp.ndim(a) and jnp.ndim(b):
            left, right = LETTERS[: jnp.ndim(a) - 1], LETTERS[-jnp.ndim(b) + 1 :]
            before, after = (right[:-1], right[-1]) if jnp.ndim(b) > 1 else ("", "")
            text = f"{left}k,{before}k{after}->{left}{before}{after}"
        return self._by_letters("dot", jnp.dot, text, (a, b), kwargs)

    def lax_dot(
        self, lhs: Any, rhs: Any, *args: Any, dimension_numbers: Any = None, **kwargs: Any
    ) -> jax.Array:
        """jax.lax.dot as a rule has it."""
        numbers = dimension_numbers or (((jnp.ndim(lhs) - 1,), (0,)), ((), ()))
        return self.dot_general(lhs, rhs, numbers, *args, **kwargs)

    def ragged_dot(
        self, lhs: Any, rhs: Any, group_sizes: Any, *args: Any, **kwargs: Any
    ) -> jax.Array:
        """jax.lax.ragged_dot as a rule has it; rhs counts as weights."""
        lhs, rhs = map(array_of, (lhs, rhs))
        recipe, _ = self._recipe("ragged_dot", lhs, rhs, is_weight=True)
        if recipe is None or not self._can(recipe, group_sizes, lhs, rhs):
            return jax.lax.ragged_dot(lhs, rhs, group_sizes, *args, **kwargs)
        return _plain(ragged_dot)(lhs, rhs, group_sizes, *args, recipe=recipe, **kwargs)

    def _by_letters(
        self,
        op: str,
        plain: Callable[..., Any],
        text: str | None,
        operands: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> jax.Array:
        """A product that subscripts of einsum say, or what is plain, if they are None or others."""
        operands = [*map(array_of, operands)]
        recipe, swaps = (None, False) if text is None else self._recipe(op, *operands)
        asked = {name for name, value in kwargs.items() if value is not None}
        ours = asked <= {"precision", "preferred_element_type", "out_sharding", "optimize"}
        if text is None or recipe is None or not ours or _contracts_nothing(text):
            return plain(*operands, **kwargs)
        taken = operands
        if len(operands) == 2 and swaps:
            sides, arrow, out = text.partition("->")
            text, taken = ",".join(reversed(sides.split(","))) + arrow + out, operands[::-1]
        if not self._can(recipe, text, *taken):
            return plain(*operands, **kwargs)
        options = {name: kwargs[name] for name in asked - {"optimize"}}
        return _plain(einsum)(text, *taken, recipe=recipe, **options)

    def _recipe(self, op: str, *operands: Any, is_weight: bool = False) -> tuple[Any, bool]:
        """The recipe of a product in the module that computes, and whether the weight is lhs alone.

        None: it stays in floats.
        """
        if is_lowering():  # what JAX, or jax_mx, makes of a product that was traced before
            return None, False
        rule, _ = self._get_current_rule_and_op_id(op)
        if not all(map(is_float, operands)):
            return None, False
        weights = [is_weight or _is_weight(operand) for operand in operands]
        if not any(weights):
            return None, False
        self._paths.add(_path())
        return rule and self.recipes[rule.module_path], weights[0] and not any(weights[1:])

    def _can(self, recipe: Any, options: Any, *operands: Any) -> bool:
        """Whether MX takes the product; tells if not."""
        return _plain(self._left.takes)(recipe, options, *operands, where=_path())


# ---- traces of a provider's models by themselves ---
PROVIDERS: weakref.WeakValueDictionary[int, Provider] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def _apart(provider: Provider) -> Iterator[None]:
    """Keeps traces of a provider apart from all others; of linen, by the rule of the module."""
    outer = CONTEXT.value

    def call(next_call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        path = "/".join(map(str, context.module.path))
        rules = (p for p in provider.recipes if re.fullmatch(p, path))
        with CONTEXT((outer, provider.identity, next(rules, None))):
            return next_call(*args, **kwargs)

    with CONTEXT((outer, provider.identity, None)), linen.intercept_methods(call):
        yield


def _activate(interceptor: Any) -> None:
    _ACTIVATE(interceptor)
    provider = PROVIDERS.get(interceptor.id)
    if provider is not None:
        stacks = vars(RUNNING).setdefault("stacks", {})
        stack = stacks[interceptor.id] = contextlib.ExitStack()
        stack.enter_context(_apart(provider))


def _deactivate(interceptor: Any) -> None:
    stack = vars(RUNNING).get("stacks", {}).pop(interceptor.id, None)
    if stack is not None:
        stack.close()
    _DEACTIVATE(interceptor)


# qwix calls both around each call of a model, whatever happens in it, and has no other hook there.
_MANAGER: Any = interception.interception_manager
_ACTIVATE, _DEACTIVATE = _MANAGER.activate_interceptor, _MANAGER.deactivate_interceptor
_MANAGER.activate_interceptor, _MANAGER.deactivate_interceptor = _activate, _deactivate


def _contracts_nothing(text: str) -> bool:
    """Whether subscripts multiply elements alone, as a norm's scale does."""
    sides, arrow, out = text.partition("->")
    in_all = set.intersection(*map(set, sides.split(",")))
    return bool(arrow) and in_all <= {*out}


def _path() -> str:
    """The path of the module that computes."""
    return "/".join(map(str, flax_util.get_current_module_path()))


def _is_weight(x: Any) -> bool:
    """Whether an operand is a parameter of the module that computes, or made of these alone."""
    return _plain(is_weight)(x, flax_util.get_current_module())


def _plain(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, in which nothing is replaced."""
    return interception.disable_interceptions(f)
