"""A step of a chain that is a product, perhaps of a norm, and what steps pass on."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_mx.decoding.chain import lines_of
from jax_mx.formats.checks import is_symbolic
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import is_explicit
from jax_mx.products.kernel_plans import plan_of, strips_of
from jax_mx.quantizing.facts.product_kernels import (
    DIRECT,
    FEWEST,
    PRODUCTS,
    normed_fits,
)
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.plan import ProductPlan

_FORMATS = {p.formats[0] for p in PRODUCTS if p.op == "matmul"}


class State(NamedTuple):
    """The arrays that steps pass on: x, the residual, and the caches of the attentions so far."""

    x: jax.Array
    residual: Any  # None where no step has a norm
    caches: tuple[tuple[jax.Array, jax.Array], ...] = ()


class Product(NamedTuple):
    """A product, perhaps of a norm, perhaps with an activation behind it."""

    w: Any
    weight: jax.Array | None = None
    activation: str = ""

    @property
    def floats(self) -> list[jax.Array]:
        """Its arrays that have derivatives."""
        return [] if self.weight is None else [self.weight]

    @property
    def constants(self) -> list[jax.Array]:
        """Its other arrays."""
        return jax.tree.leaves(self.w)

    def of(self, floats: Sequence[jax.Array], constants: Sequence[jax.Array]) -> "Product":
        """The same of other arrays."""
        w = jax.tree.unflatten(jax.tree.structure(self.w), constants)
        return self._replace(w=w, weight=floats[0] if floats else None)

    @property
    def operands(self) -> list[jax.Array]:
        """The arrays that its kernels take besides x and the residual."""
        return [*self.floats, self.w.values[None], self.w.scales[None]]

    def lines(self, state: State, eps: float) -> State:
        """The lines that it stands for."""
        y, residual = lines_of(state.x, state.residual, *self, eps)
        return State(y, residual, state.caches)

    def length_behind(self, length: int) -> int:
        """The columns of its result, of an x that has so many."""
        del length
        return self.w.shape[0] // (2 if self.activation else 1)

    def plans(self, state: State, length: int, eps: float) -> list[ProductPlan]:
        """The plans of its kernels, of an x of so many columns; none where there are none."""
        lead, residual = state.x.shape[:-1], state.residual
        if not _is_served(self.w, length):
            return []
        if self.weight is not None:
            assert residual is not None
            fits = self.weight.shape == (length,) and residual.shape == (*lead, length)
            if not (fits and is_plain(self.weight, residual)):
                return []
        if self.activation and (self.w.shape[0] % 2 or length % (2 * BLOCK)):
            return []
        return self._plans(math.prod(lead), length, state.x.dtype, eps)

    def _plans(self, rows: int, length: int, dtype: Any, eps: float) -> list[ProductPlan]:
        """The plans, whose kernels may not exist: one of all, or a norm and a product."""
        (format, columns), activation = (self.w.format, self.w.shape[0]), self.activation
        if self.weight is not None and normed_fits(rows, length):
            options = {"eps": eps, "activation": activation}
            normed = ProductPlan("normed", (format,), dtype, False, DIRECT, **options)
            if normed.product("cutedsl") in PRODUCTS:
                return [normed]
        plan = plan_of((format,), dtype, rows, strips=strips_of(1, columns))
        if activation:
            least = max(plan.rows, FEWEST)  # fewer rows have no such kernel
            plan = dataclasses.replace(plan, rows=least, narrow=False, activation=activation)
        norm = ProductPlan("rms_norm", (), dtype, False, 1, eps=eps)
        return [plan] if self.weight is None else [norm, plan]


def is_plain(*arrays: jax.Array) -> bool:
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
