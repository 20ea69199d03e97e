"""Activations: `Gated`, for quantizers, and its floats with a derivative."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.formats.checks import array_of, flag, floats, shown
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import is_explicit
from jax_mx.quantizing import reference
from jax_mx.quantizing.amaxes import made_with_amaxes
from jax_mx.quantizing.derivatives import derived
from jax_mx.quantizing.facts.activations import ACTIVATIONS, Activation
from jax_mx.quantizing.facts.product_kernels import ACTIVE_SOURCES
from jax_mx.quantizing.facts.sources import Source
from jax_mx.quantizing.metadata import register_for_export
from jax_mx.quantizing.preprocessing import Value
from jax_mx.quantizing.sources.gated import GatedSource
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.quantizing.sources.gated_pair import GatedPairSource
from jax_mx.quantizing.sources.pair_gradient import KnownSource, PairGradientSource


@partial(jax.tree_util.register_dataclass, data_fields=("operands",), meta_fields=("source",))
@dataclasses.dataclass(frozen=True, eq=False)
class Of:
    """A request to quantize the floats that a source makes of x and of other arrays.

    A quantizer that gets one as its activation also returns the results of the source, in a tuple,
    last.

    Attributes:
      source: of quantizing/facts/sources.py.
      operands: beside x, as the source's `compute` takes them.
    """

    source: Source
    operands: tuple[Any, ...] = ()


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("weights", "up", "gradient"),
    meta_fields=("name", "interleaved"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Gated(Value):
    """An activation for `quantize`, which then quantizes `gated(x, name, ...)` or its gradient.

    A kernel never writes the floats in between. A pytree; weights, up and gradient are data.

    Attributes:
      name: of the activation, see `gated`.
      weights: float32, the factors of rows, or None. With `rows` of `quantize`, each row of the
        result has one.
      up: the ups, where x has the gates alone; or None.
      interleaved: whether gates and ups alternate along the last axis.
      gradient: (..., K) of x's dtype, the gradient of the result of `gated`; or None. With it,
        `quantize` quantizes the gradient of x, (..., 2 K), which the derivative of `gated`
        computes.
    """

    name: str = "swiglu"
    weights: jax.typing.ArrayLike | None = None
    up: jax.typing.ArrayLike | None = None
    interleaved: bool = False
    gradient: jax.typing.ArrayLike | None = None

    def __post_init__(self):
        """Raises TypeError or ValueError for unknown activations and fields that do not fit."""
        row = row_of("Gated", self.name)
        flag("Gated", "interleaved", self.interleaved)
        if not row.has_gate and (self.up is not None or self.interleaved):
            raise ValueError(
                f"Gated: {self.name!r} has no gate, so there is no up, nor an order of both"
            )
        if self.up is not None and self.interleaved:
            raise ValueError("Gated: interleaved is the order of one array; drop it, or up")
        if self.up is not None and self.gradient is not None:
            raise ValueError(
                "Gated: with an up of its own there are two gradients; give gates and ups as one "
                "array, or drop the gradient"
            )

    @property
    def has_gate(self) -> bool:
        """Whether there are gates and ups, which kernels read."""
        return ACTIVATIONS[self.name].has_gate

    def checked(self, op: str, x: Any) -> Gated:
        """The activation with `up` as an array of JAX.

        Raises:
          TypeError, ValueError: x and up do not fit each other.
        """
        checked = self
        if self.up is not None:
            checked = dataclasses.replace(self, up=array_of(op, "up", self.up))
        checked.gates_of(op, x)
        return checked

    def of(self, op: str, x: jax.Array, floats: bool = False, sums: bool = False) -> Of | None:
        """The source of the floats of x, as kernels know it; None: no kernel computes them.

        Args:
          op: for messages.
          x: gates and ups.
          floats: whether the caller also wants the floats.
          sums: whether the caller also wants sums of a gradient's columns.

        Raises:
          TypeError, ValueError: weights or the gradient do not fit.
        """
        if not self.has_gate or (self.up is not None and (floats or sums)):
            return None
        gates = self.gates_of(op, x)
        weights = weights_of(op, gates, self.weights)
        if self.up is not None:
            return Of(GatedPairSource(self.name), (jnp.asarray(self.up), weights))
        if self.gradient is None:
            return Of(GatedSource(self.name, self.interleaved, floats), (weights,))
        source = GradientSource(self.name, self.interleaved, sums)
        return Of(source, (weights, self.dy_of(op, gates)))

    def parts_of(self, x: jax.Array) -> list[jax.Array]:
        """Gates and ups, or gates alone, of an x that fits."""
        if self.up is not None:
            return [x, jnp.asarray(self.up)]
        return reference.halves(x, self.name, self.interleaved)

    def gates_of(self, op: str, x: Any) -> jax.ShapeDtypeStruct:
        """The shape and the dtype of the gates of x; the result has the same.

        Raises:
          TypeError, ValueError: x and up do not fit.
        """
        if self.up is None:
            halves = 1 + self.has_gate
            if x.ndim == 0 or x.shape[-1] % halves:
                form = "gates and ups, halves of the last axis" if halves > 1 else "a last axis"
                raise ValueError(
                    f"{op}: activation {self.name!r} wants {form}, got the shape {tuple(x.shape)}"
                )
            return jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] // halves), x.dtype)
        up = floats(op, self.up, "up")
        if up.dtype != x.dtype or tuple(up.shape) != tuple(x.shape) or x.ndim == 0:
            error = ValueError if up.dtype == x.dtype else TypeError
            raise error(
                f"{op}: gates are {x.dtype}{[*x.shape]} and ups {up.dtype}{[*up.shape]}; both must "
                "have one dtype and one shape"
            )
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def dy_of(self, op: str, gates: Any) -> jax.Array:
        """The gradient of the result for these gates.

        Raises:
          TypeError, ValueError: it has another dtype or shape.
        """
        dy = array_of(op, "gradient", floats(op, self.gradient, "gradient"))
        if dy.dtype != gates.dtype or dy.shape != tuple(gates.shape):
            error = ValueError if dy.dtype == gates.dtype else TypeError
            raise error(
                f"{op}: the gradient must be {gates.dtype}{[*gates.shape]}, as what `gated` gives, "
                f"got {dy.dtype}{[*dy.shape]}"
            )
        return dy


def made(op: str, x: jax.Array, gated: Gated) -> jax.Array:
    """`gated` of an x that `array_of` has checked, or its gradient.

    Raises:
      TypeError, ValueError: x and what belongs to it do not fit.
    """
    gates = gated.gates_of(op, x)
    weights = None if gated.weights is None else weights_of(op, gates, gated.weights)
    parts = gated.parts_of(x)
    if gated.gradient is not None:
        dy = gated.dy_of(op, gates)
        return reference.joined(_gradient(tuple(parts), weights, dy, gated.name), gated.interleaved)
    return made_of_parts(tuple(map(jnp.asarray, parts)), weights, gated.name)


def gradients_of_parts(op: str, x: jax.Array, gated: Gated, dy: jax.Array) -> list[jax.Array]:
    """The gradients of gates and of ups that are two arrays, for that of what `gated` gives."""
    gates = gated.gates_of(op, x)
    weights = None if gated.weights is None else weights_of(op, gates, gated.weights)
    return _gradient(tuple(gated.parts_of(x)), weights, dy, gated.name)


def known_gradients_of_parts(
    op: str, x: jax.Array, gated: Gated, dy: jax.Array
) -> list[tuple[jax.Array, Of]] | None:
    """The same of matrices, each with what tells a quantizer of it the amaxes of rows and columns.

    None: no kernel makes both.
    """
    source, sizes = PairGradientSource(gated.name), [n for n in x.shape if isinstance(n, int)]
    whole = len(sizes) == x.ndim == 2 and all(n and n % BLOCK == 0 for n in sizes)
    plain = x.dtype == jnp.bfloat16 and not is_explicit(jax.typeof(x).sharding.mesh)
    if str(source) not in ACTIVE_SOURCES or not (whole and plain):
        return None
    weights = weights_of(op, gated.gates_of(op, x), gated.weights)
    results = made_with_amaxes((*gated.parts_of(x), weights, dy), source)
    return [(floats, Of(KnownSource(), (rows, columns))) for rows, columns, floats in results]


def weights_of(op: str, gates: Any, weights: Any) -> jax.Array:
    """The weights of rows, checked; ones where there are none.

    Raises:
      TypeError, ValueError: their dtype is not float32, or the gates have another number of rows.
    """
    shape = tuple(gates.shape[:-1])
    if weights is None:
        return jnp.ones(shape, jnp.float32)
    dtype = getattr(weights, "dtype", None)
    if dtype != jnp.float32 or tuple(weights.shape) != shape:
        got = shown(weights) if dtype is None else f"{dtype}{[*weights.shape]}"
        error = TypeError if dtype != jnp.float32 else ValueError
        raise error(f"{op}: weights must be float32{[*shape]}, one for each row, got {got}")
    return jnp.asarray(weights)


def row_of(op: str, name: Any) -> Activation:
    """The activation of this name.

    Raises:
      ValueError: there is none.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        allowed = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{op}: activation must be {allowed}, got {shown(name)}")
    return ACTIVATIONS[name]


@partial(jax.jit, static_argnums=2)
def made_of_parts(parts: tuple[jax.Array, ...], weights: jax.Array | None, name: str) -> jax.Array:
    """`gated` of gates and ups, or of gates alone, that were checked."""
    return _gated(None, parts, weights, name)


@partial(jax.jit, static_argnums=3)
def _gradient(
    parts: tuple[jax.Array, ...], weights: jax.Array | None, dy: jax.Array, name: str
) -> list[jax.Array]:
    return reference.gated_gradient(parts, weights, dy, name)


def _gated(y: Any, parts: tuple[jax.Array, ...], weights: Any, name: str) -> jax.Array:
    """y where it is given, else what it is; nothing is differentiated through y."""
    leaves, tree = jax.tree.flatten((parts, weights))
    if y is None:
        fixed: Any = tree.unflatten(map(jax.lax.stop_gradient, leaves))
        y = reference.gated(fixed[0], fixed[1], name)

    def rule(outs: list, args: list, tangents: list) -> list[jax.Array]:
        return [_changed(outs[0], tree.unflatten(args), tree.unflatten(tangents), name)]

    return derived([y], leaves, rule)[0]


@jax.jit
def known(y: jax.Array, x: jax.Array, gated: Gated) -> jax.Array:
    """y, which is `made` of x and what belongs to it, with the derivative of that."""
    return _gated(y, tuple(gated.parts_of(x)), gated.weights, gated.name)


def _changed(y: jax.Array, primals: tuple, tangents: tuple, name: str) -> jax.Array:
    """The tangent of y; transposed, that is `reference.gated_gradient`, but for subnormals."""
    (parts, weights), (d_each, d_weights) = primals, tangents
    change: Any = jnp.zeros(y.shape, jnp.float32)
    if any(d is not None for d in d_each):
        change = _along_slopes(parts, d_each, name)
    if weights is not None:
        change = change * weights[..., None]
        if d_weights is not None:
            change = change + _exactly(parts, name) * d_weights[..., None]
    return change.astype(y.dtype)


def _along_slopes(parts: Sequence[jax.Array], tangents: Sequence[Any], name: str) -> Any:
    """The tangent of gates times ups, in float32."""
    stopped = [*map(jax.lax.stop_gradient, parts)]
    slopes = derived(reference.derivative(stopped, name), parts, partial(_no_second, name))
    pairs = zip(tangents, slopes, strict=True)
    return sum(d.astype(jnp.float32) * c for d, c in pairs if d is not None)


def _exactly(parts: Sequence[jax.Array], name: str) -> jax.Array:
    """`gated` in float32, without rounding to few bits."""
    value = reference.gated_exactly([*map(jax.lax.stop_gradient, parts)], name)
    return derived([value], parts, lambda _, parts, d: [_along_slopes(parts, d, name)])[0]


def _no_second(name: str, *_: Any) -> Any:
    raise NotImplementedError(
        f"gated: {name} has first derivatives, no second ones, as slopes are made of bits; for "
        "these take jax.nn's activation of gates, times ups"
    )


register_for_export(Gated)
