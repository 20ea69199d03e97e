"""A Llama-like transformer and its training step, for measurements: `Model`.

Weights are float32. A layer casts its own to bfloat16 and multiplies by them, as users write it.
How it multiplies is a `Way`, how devices share the work a `Split`; neither knows the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mx
from benchmarks import fp8
from jax_mx import Recipe

Weights = Mapping[str, Any]
AXIS = "fsdp"
# Under `scan` nothing is computed twice but by the backward pass, and JAX's barriers copy weights.
_checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)
CHECKPOINTS: Mapping[
    str, Callable[..., Any]
] = {  # what of a layer its backward pass computes again
    "full": _checkpoint,
    "names": functools.partial(
        _checkpoint,
        policy=jax.checkpoint_policies.save_only_these_names(jax_mx.CHECKPOINT_NAME),
    ),
    "none": lambda layer: layer,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model's; the default layer is that of Llama-3-8B.

    Attributes:
      layers: their number.
      width: of a token between layers.
      inner: of the MLP.
      heads: of queries.
      kv_heads: of keys and values.
      head: elements of a head.
      vocabulary: number of different tokens.
    """

    layers: int = 6
    width: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    vocabulary: int = 32768

    @property
    def products(self) -> Mapping[str, tuple[int, ...]]:
        """The weights that a layer multiplies by, (in, out)."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        return {
            "q": (self.width, queries),
            "k": (self.width, keys),
            "v": (self.width, keys),
            "o": (queries, self.width),
            "gate": (self.width, self.inner),
            "up": (self.width, self.inner),
            "down": (self.inner, self.width),
        }

    @property
    def multiplied(self) -> int:
        """Weights of a layer that a token meets."""
        return sum(k * n for k, n in self.products.values())

    def flop(self, tokens: int, length: int) -> float:
        """Operations of a step's products and causal attention, what is computed again left out."""
        weights = self.layers * self.multiplied
        weights += self.width * self.vocabulary
        attention = self.layers * self.heads * self.head * length  # half of both products
        return 6.0 * tokens * (weights + attention)


class State(NamedTuple):
    """The arrays that a step takes and gives, all in float32.

    Attributes:
      weights: of the model.
      scales: that products keep from one step to the next, where the way has such.
      optimizer: optax's.
    """

    weights: Weights
    scales: Any
    optimizer: Any


# ---- devices ---
@dataclasses.dataclass(frozen=True)
class Split:
    """How devices share a step: one device alone; FSDP by its subclasses.

    Attributes:
      mesh: of the devices, or None of one.
    """

    mesh: Any = None

    def spec(self, shape: tuple[int, ...]) -> P:
        """A weight's, or a moment's of it: matrices are split along their rows, (in, out) along in.

        A vector for each layer is a matrix of one row, and not split.
        """
        if self.mesh is None or len(shape) < 2 or shape[-2] == 1:
            return P()
        return P(*[None] * (len(shape) - 2), AXIS, None)

    def specs(self, tree: Any) -> Any:
        """The spec of each array of a pytree."""
        return jax.tree.map(lambda a: self.spec(a.shape), tree)

    def sharding(self, spec: P) -> Any:
        """Where an array with this spec lies, for jit and device_put."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def whole(self, w: jax.Array) -> jax.Array:
        """The floats of a weight whose rows are split, for a product."""
        return w

    def weight(self, w: jax.Array, recipe: Recipe | str) -> Any:
        """The same for one of our products, by default its floats."""
        return w

    def rows(self, x: jax.Array) -> jax.Array:
        """Activations, split along the batch, and so their gradient."""
        return x

    def locally(self, fn: Callable[..., Any], *args: Any, whole: int = 0) -> Any:
        """A function of rows of the batch and, first, of so many whole arrays."""
        return fn(*args)

    def loss(self, fn: Callable[..., Any], weights: Any) -> Callable[..., Any]:
        """The mean loss (weights, scales, text), by what computes it of all text at hand."""
        return fn


class Automatic(Split):
    """XLA decides what moves; constraints say that activations are split along the batch."""

    def rows(self, x: jax.Array) -> jax.Array:
        """By a constraint, without which XLA splits some gradients as it splits weights."""
        return jax.lax.with_sharding_constraint(x, self.sharding(P(AXIS)))


class Explicit(Split):
    """Types say how arrays are split; weights are gathered as bfloat16, ours where we do it."""

    def whole(self, w: jax.Array) -> jax.Array:
        """Gathered by what its type becomes."""
        return jax.sharding.reshard(w, P())

    def locally(self, fn: Callable[..., Any], *args: Any, whole: int = 0) -> Any:
        """In shard_map."""
        specs = tuple(P() if i < whole else P(AXIS) for i in range(len(args)))
        return jax.shard_map(fn, in_specs=specs, out_specs=P(AXIS))(*args)


class Manual(Split):
    """Everything in shard_map; `gather_weight` brings the weights of our products."""

    def whole(self, w: jax.Array) -> jax.Array:
        """Gathered."""
        return jax.lax.all_gather(w, AXIS, axis=w.ndim - 2, tiled=True)

    def weight(self, w: jax.Array, recipe: Recipe | str) -> Any:
        """In MX, quantized before it moves."""
        return jax_mx.gather_weight(w, P(AXIS), recipe)

    def loss(self, fn: Callable[..., Any], weights: Any) -> Callable[..., Any]:
        """In shard_map, of all shards."""

        def mean(*args: Any) -> jax.Array:
            return jax.lax.pmean(fn(*args), AXIS)

        specs = (self.specs(weights), P(), P(AXIS))
        return jax.shard_map(mean, mesh=self.mesh, in_specs=specs, out_specs=P())


SPLITS: Mapping[str, tuple[type[Split], AxisType]] = {
    "jit": (Automatic, AxisType.Auto),
    "explicit": (Explicit, AxisType.Explicit),
    "shard_map": (Manual, AxisType.Auto),
}


def split_of(name: str, devices: int) -> Split:
    """One of `SPLITS` over so many devices; one device is alone."""
    if devices == 1:
        return Split()
    split, axes = SPLITS[name]
    return split(Mesh(np.array(jax.devices()[:devices]), (AXIS,), axis_types=(axes,)))


# ---- products ---
class Way:
    """How layers multiply: in bfloat16; otherwise by its subclasses."""

    def scales(self, layers: int) -> Any:
        """Arrays that products of all layers keep from one step to the next."""
        return {}

    def prepared(self, weights: Weights) -> Weights:
        """The weights of all layers, once a step: outside of what a checkpoint computes again."""
        return weights

    def product(self, split: Split, x: jax.Array, w: Any, scales: Any) -> jax.Array:
        """x (..., K) times w (K, N), in bfloat16."""
        return x @ split.whole(w)

    def mlp(self, split: Split, x: jax.Array, w: Weights, scales: Weights) -> jax.Array:
        """silu(x gate) * (x up), times down."""

        def product(name: str, x: jax.Array) -> jax.Array:
            return self.product(split, x, w[name], scales.get(name))

        gated = jax.nn.silu(product("gate", x)) * product("up", x)
        return product("down", split.rows(gated))


class Current(Way):
    """FP8 with a scale a tensor, of its own amax, in plain JAX."""

    def product(self, split: Split, x: jax.Array, w: Any, scales: Any) -> jax.Array:
        """The operands are quantized for it."""
        return fp8.current(x, split.whole(w))


class Delayed(Way):
    """FP8 by flax, a scale a tensor, of the amaxes of earlier steps."""

    def scales(self, layers: int) -> Any:
        """As flax begins."""
        one = {name: fp8.delayed_state() for name in Sizes().products}
        return jax.tree.map(lambda a: jnp.tile(a, (layers, *[1] * a.ndim)), one)

    def product(self, split: Split, x: jax.Array, w: Any, scales: Any) -> jax.Array:
        """Operands are scaled by amaxes of steps before."""
        return fp8.delayed(x, split.whole(w), scales)


@dataclasses.dataclass(frozen=True)
class Ours(Way):
    """`jax_mx.matmul`.

    Attributes:
      recipe: of all products.
      fused: whether `jax_mx.mlp` computes the MLP.
      once: whether weights are quantized outside of the checkpoint.
      implementation: of products; None is what jax_mx chooses.
    """

    recipe: Recipe | str
    fused: bool = False
    once: bool = False
    implementation: str | None = None

    def prepared(self, weights: Weights) -> Weights:
        """Quantized, where that is asked for."""
        if not self.once:
            return weights
        # Norms have one row, and stay.
        return jax_mx.quantize_weights(weights, self.recipe, stacked=1)

    def product(self, split: Split, x: jax.Array, w: Any, scales: Any) -> jax.Array:
        """By `jax_mx.matmul`."""
        w = w if self.once else split.weight(w, self.recipe)
        return jax_mx.matmul(x, w, recipe=self.recipe, implementation=self.implementation)

    def mlp(self, split: Split, x: jax.Array, w: Weights, scales: Weights) -> jax.Array:
        """By `jax_mx.mlp`, where that is asked for."""
        if not self.fused:
            return super().mlp(split, x, w, scales)
        gate, up, down = (
            w[name] if self.once else split.weight(w[name], self.recipe)
            for name in ("gate", "up", "down")
        )
        options = {"recipe": self.recipe, "implementation": self.implementation}
        return jax_mx.mlp(x, (gate, up), down, **options)


# ---- the model ---
def attention_of(asked: Literal["cudnn", "xla"] | None) -> Literal["cudnn", "xla"]:
    """The implementation of attention that a command asks for; of None the fastest here."""
    return asked or ("cudnn" if jax.default_backend() == "gpu" else "xla")


def normed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x over the root of its rows' mean square, times a weight."""
    square = (x.astype(jnp.float32) ** 2).mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-5).astype(x.dtype) * weight.astype(x.dtype)


def turned(x: jax.Array) -> jax.Array:
    """Heads (batch, length, heads, head) turned by their positions."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
    cos, sin = (f(angles)[:, None] for f in (jnp.cos, jnp.sin))
    a, b = (part.astype(jnp.float32) for part in (x[..., :half], x[..., half:]))
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The loss of each token (batch, length), in float32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, how it multiplies, and how devices share it.

    Attributes:
      sizes: of the model.
      way: of products.
      split: among devices.
      checkpoint: in `CHECKPOINTS`.
      attention: the implementation of jax.nn.dot_product_attention.
      rate: AdamW's, a number or optax's schedule.
    """

    sizes: Sizes
    way: Way
    split: Split
    checkpoint: str = "full"
    attention: Literal["cudnn", "xla"] | None = None
    rate: Any = 3e-4

    def weights(self, key: jax.Array) -> Weights:
        """Random ones; layers are stacked."""
        s = self.sizes
        keys = iter(jax.random.split(key, len(s.products) + 2))

        def normal(*shape: int, scale: float) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.float32) * scale

        layers = {
            name: normal(s.layers, *shape, scale=shape[-2] ** -0.5)
            for name, shape in s.products.items()
        }
        layers |= {name: jnp.ones((s.layers, 1, s.width)) for name in ("norm", "mlp_norm")}
        return {
            "layers": layers,
            "embedding": normal(s.vocabulary, s.width, scale=0.02),
            "out": normal(s.width, s.vocabulary, scale=s.width**-0.5),
            "norm": jnp.ones((s.width,)),
        }

    def begin(self, key: jax.Array) -> State:
        """The state before the first step."""
        weights = self.weights(key)
        return State(weights, self.way.scales(self.sizes.layers), self.optimizer.init(weights))

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW."""
        return optax.adamw(self.rate)

    # ---- forward ---
    def attend(self, x: jax.Array, w: Weights, scales: Weights) -> jax.Array:
        """Causal attention with its four products."""
        s, (batch, length, _) = self.sizes, x.shape

        def heads(name: str, count: int) -> jax.Array:
            y = self.way.product(self.split, x, w[name], scales.get(name))
            return y.reshape(batch, length, count, s.head)

        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(
                turned(q), turned(k), v, is_causal=True, implementation=self.attention
            )

        q, k, v = heads("q", s.heads), heads("k", s.kv_heads), heads("v", s.kv_heads)
        y = self.split.locally(attention, q, k, v).reshape(batch, length, -1)
        return self.way.product(self.split, self.split.rows(y), w["o"], scales.get("o"))

    def mlp(self, x: jax.Array, w: Weights, scales: Weights) -> jax.Array:
        """Behind attention, of normed tokens."""
        return self.way.mlp(self.split, x, w, scales)

    def layer(self, x: jax.Array, w: Weights, scales: Weights) -> jax.Array:
        """One layer of tokens (batch, length, width), in bfloat16."""
        w = {  # codes stay
            name: array.astype(jnp.bfloat16) if isinstance(array, jax.Array) else array
            for name, array in w.items()
        }
        rows = self.split.rows
        x = rows(x + self.attend(rows(normed(x, w["norm"])), w, scales))
        return rows(x + self.mlp(rows(normed(x, w["mlp_norm"])), w, scales))

    def _mean_loss(self, weights: Weights, scales: Any, text: jax.Array) -> jax.Array:
        layer = CHECKPOINTS[self.checkpoint](self.layer)

        def body(x: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
            w, kept = of_layer
            return layer(x, w, kept), None

        def whole(name: str) -> jax.Array:
            return self.split.whole(weights[name].astype(jnp.bfloat16))

        def embedded(table: jax.Array, text: jax.Array) -> jax.Array:
            return table[text]

        x = self.split.locally(embedded, whole("embedding"), text[:, :-1], whole=1)
        layers = self.way.prepared(weights["layers"])
        x, _ = jax.lax.scan(body, x, (layers, scales))
        logits = normed(x, weights["norm"]) @ whole("out")
        return self.split.locally(cross_entropy, logits, text[:, 1:]).mean()

    def loss(self, weights: Weights, scales: Any, text: jax.Array) -> jax.Array:
        """The mean loss of tokens text[:, 1:] after those before them."""
        return self.split.loss(self._mean_loss, weights)(weights, scales, text)

    # ---- a step ---
    def gradients(self, state: State, text: jax.Array) -> Any:
        """The loss, and the gradients of weights and scales."""
        value = jax.value_and_grad(self.loss, argnums=(0, 1))
        return value(state.weights, state.scales, text)

    def step(self, state: State, text: jax.Array) -> tuple[State, jax.Array]:
        """The state after a step of AdamW, and the loss before it."""
        loss, (gradient, scales) = self.gradients(state, text)
        updates, optimizer = self.optimizer.update(gradient, state.optimizer, state.weights)
        weights: Any = optax.apply_updates(state.weights, updates)
        return State(weights, scales, optimizer), loss

    @contextlib.contextmanager
    def setting(self) -> Iterator[None]:
        """The context that programs of the model want: its mesh, and dtypes that mix for flax."""
        mesh = self.split.mesh
        with jax.numpy_dtype_promotion("standard"):
            with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
                yield

    def placed(self, key: jax.Array, tokens: np.ndarray) -> tuple[State, jax.Array]:
        """The state before the first step, and text, where they lie."""
        where, of_text = self.shardings()
        options = {} if self.split.mesh is None else {"out_shardings": where}
        return jax.jit(self.begin, **options)(key), jax.device_put(tokens, of_text)

    def shardings(self) -> tuple[Any, Any]:
        """Where a state and the text lie; None on one device."""
        shapes = jax.eval_shape(self.begin, jax.random.key(0))
        specs = shapes._replace(
            weights=self.split.specs(shapes.weights),
            scales=jax.tree.map(lambda _: P(), shapes.scales),
            optimizer=self.split.specs(shapes.optimizer),
        )
        return jax.tree.map(self.split.sharding, specs), self.split.sharding(P(AXIS))

    def jitted(self, fn: Callable[..., Any], donate: bool = True) -> Any:
        """`step`, or `gradients`, as one program of a split state and split text."""
        state, text = self.shardings()
        options: dict[str, Any] = {}
        if self.split.mesh is not None:
            options["in_shardings"] = state, text
        if self.split.mesh is not None and donate:
            options["out_shardings"] = state, self.split.sharding(P())
        return jax.jit(fn, donate_argnums=0 if donate else (), **options)
