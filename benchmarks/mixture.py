"""A training step of a transformer with experts, which lie among all devices.

    python -m benchmarks mixture --model mixtral --layers 4 --devices 4
    python -m benchmarks mixture --model deepseek --layers 8 --devices 4 --ways auto "bf16, Pallas"

`benchmarks step` has the layers; here a router and experts take the place of the MLP, and shared
experts are an MLP as well. Tokens, experts and the optimizer's state are split over one axis;
attention's weights are split as FSDP does. A way names the products of experts. *bf16, Pallas* and
*bf16, lax.ragged_dot* multiply bfloat16 in the layer `jax_mx.moe`, and tokens move as bfloat16.
*auto* multiplies MX, also in attention and shared experts, unless it says *experts alone*.
`benchmarks step` explains the options and a row; "ratio" is to *bf16, Pallas*.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_mx
from benchmarks import llama, step
from benchmarks.llama import AXIS, Ours, Sizes, Way, Weights
from benchmarks.runner import Args, Case

BASE = "bf16, Pallas"


@dataclasses.dataclass(frozen=True)
class Mixed(Sizes):
    """A model's with experts; `inner` is an expert's.

    Attributes:
      experts: their number.
      k: how many of them each token chooses.
      shared: how many more every token goes through.
    """

    experts: int = 8
    k: int = 2
    shared: int = 0

    @property
    def products(self) -> dict[str, tuple[int, ...]]:
        """The weights of a layer; experts are stacked."""
        dense = {name: super(Mixed, self).products[name] for name in ("q", "k", "v", "o")}
        inner = self.inner * self.shared
        always = {
            "gate": (self.width, inner),
            "up": (self.width, inner),
            "down": (inner, self.width),
        }
        return dense | (always if inner else {}) | {
            "router": (self.width, self.experts),
            "gate_up": (self.experts, self.width, 2 * self.inner),
            "experts_down": (self.experts, self.inner, self.width),
        }  # fmt: skip

    @property
    def multiplied(self) -> int:
        """Weights of a layer that a token meets."""
        weights = self.products
        dense = sum(k * n for k, n in (s for s in weights.values() if len(s) == 2))
        return dense + self.k * 3 * self.width * self.inner


MODELS: Mapping[str, Mixed] = {
    "mixtral": Mixed(4),
    "deepseek": Mixed(8, 2048, 1408, heads=16, kv_heads=16, experts=64, k=6, shared=2),
    "toy": Mixed(2, 256, 128, heads=2, kv_heads=1, vocabulary=256, shared=1),
}


class Spread(llama.Automatic):
    """Experts lie among devices; the other matrices are split along their rows."""

    def spec(self, shape: tuple[int, ...]) -> P:
        """A stack of a layer's experts is split along these."""
        if self.mesh is None or len(shape) < 4:
            return super().spec(shape)
        return P(None, AXIS)

    def rows(self, x: jax.Array) -> jax.Array:
        """One device has all."""
        return x if self.mesh is None else super().rows(x)


@dataclasses.dataclass(frozen=True)
class Experts:
    """How a layer of experts multiplies, and what multiplies beside it.

    Attributes:
      way: of dense products.
      options: of `jax_mx.moe`.
    """

    way: Way
    options: Mapping[str, Any]


WAYS: Mapping[str, Experts] = {
    BASE: Experts(Way(), {"recipe": "bf16", "implementation": "pallas", "wire": "floats"}),
    "bf16, lax.ragged_dot": Experts(
        Way(), {"recipe": "bf16", "implementation": "dequantize", "wire": "floats"}
    ),
    "auto": Experts(Ours("auto"), {}),
    "auto, gather": Experts(Ours("auto"), {"way": "gather"}),
    "auto, rounds": Experts(Ours("auto"), {"way": "rounds"}),
    "auto, experts alone": Experts(Way(), {}),
}


@dataclasses.dataclass(frozen=True)
class Mixture(llama.Model):
    """A model whose MLPs are experts, chosen by the softmax of a router.

    Attributes:
      options: of `jax_mx.moe`.
    """

    options: Any = None

    def mlp(self, x: jax.Array, w: Weights, scales: Weights) -> jax.Array:
        """Experts of tokens (batch, length, width), and those that are shared."""
        s: Any = self.sizes
        tokens = x.reshape(-1, s.width)
        scores = jnp.matmul(tokens, w["router"], preferred_element_type=jnp.float32)
        weights, experts = jax.lax.top_k(jax.nn.softmax(scores), s.k)
        options = dict(self.options) | {"expert_axis": None if self.split.mesh is None else AXIS}
        y = jax_mx.moe(tokens, experts, weights, w["gate_up"], w["experts_down"], **options)
        y = y.reshape(x.shape)
        return y + super().mlp(x, w, scales) if s.shared else y


def options(add: Callable[..., Any]) -> None:
    """The options of a model and of a step."""
    add("--model", choices=sorted(MODELS), default="mixtral")
    add("--layers", type=int, help="by default the model's")
    add("--batch", type=int, default=4, help="sequences a device")
    add("--length", type=int, default=4096, help="tokens of a sequence")
    add("--checkpoint", choices=llama.CHECKPOINTS, default="full")
    add("--devices", type=int, default=1, metavar="N")
    add("--attention", choices=("cudnn", "xla"), help="by default cudnn on a GPU")
    add("--profile", action="store_true", help="print where the time goes, by kernel")
    add("--moves", action="store_true", help="print what moves between devices, by collective")
    add("--lower", action="store_true", help="only lower for CUDA, here")


def made(name: str, sizes: Mixed, args: Args, split: llama.Split) -> Mixture:
    """The model of a way."""
    way = WAYS[name]
    attention = llama.attention_of(args.attention)
    return Mixture(
        sizes, way.way, Spread(split.mesh), args.checkpoint, attention, options=way.options
    )


def cases(args: Args) -> Iterator[Case]:
    """All ways of a model; those that name how tokens travel only with `--ways`."""
    if not 1 <= args.devices <= jax.device_count():
        raise ValueError(f"--devices must be 1 to {jax.device_count()}, got {args.devices}")
    model = "toy" if args.smoke else args.model
    sizes = MODELS[model]
    sizes = dataclasses.replace(sizes, layers=args.layers or sizes.layers)
    batch, length = (1, 128) if args.smoke else (args.batch, args.length)
    names = {"model": model, "devices": args.devices, "layers": sizes.layers}
    names |= {"batch": batch * args.devices, "length": length, "checkpoint": args.checkpoint}
    names |= {"device": jax.devices()[0].device_kind, "commit": args.commit}
    names |= {"date": time.strftime("%Y-%m-%d")}
    for name in WAYS:
        if name in (BASE, "bf16, lax.ragged_dot", "auto") or args.ways:
            make = functools.partial(made, name, sizes, args)
            shape = batch * args.devices, length + 1
            measure = functools.partial(step.measured, name, make, "jit", shape)
            yield Case("step", name, {"way": name, **names}, measure, BASE)


def about() -> None:
    """Nothing: a file has rows of several commands, and each row has its device and commit."""
