"""An identity that keeps two programs apart: the maker of an array, and its mover.

XLA's partitioner looks at a whole program. Asked to move codes, it may move their floats instead,
or split the quantizer as the codes' reader wants it. Behind this identity an array is split like
its maker, and XLA moves no conversion of types past it.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

FORWARD = 1  # sdy's PropagationDirection

_as_made_p = Primitive("mx_as_made")
_as_made_p.def_impl(lambda x: x)
_as_made_p.def_abstract_eval(lambda x: x)


def _lowered(_: mlir.LoweringRuleContext, x: ir.Value) -> list[ir.Value]:
    direction = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), FORWARD)
    return [sdy.propagation_barrier(x, direction)]


def _batched(args: list, dims: list) -> tuple:
    return _as_made_p.bind(*args), dims[0]


mlir.register_lowering(_as_made_p, _lowered)
batching.primitive_batchers[_as_made_p] = _batched


def as_made(x: jax.Array) -> jax.Array:
    """x, however its reader wants it split."""
    return jax.lax.optimization_barrier(_as_made_p.bind(x))


# ---- what `explain` says ---
_noted_p = Primitive("mx_noted")
_noted_p.def_impl(lambda x, **_: x)
_noted_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_noted_p, lambda _, x, **__: [x])
batching.primitive_batchers[_noted_p] = lambda args, dims, **params: (
    _noted_p.bind(*args, **params),
    dims[0],
)


def noted(x: jax.Array, sentence: str) -> jax.Array:
    """x, integers; a trace keeps the sentence, for `explain`."""
    return _noted_p.bind(x, sentence=sentence)


def notes_in(equations: Iterable[Any]) -> list[str]:
    """The sentences of equations."""
    return [eqn.params["sentence"] for eqn in equations if eqn.primitive is _noted_p]
