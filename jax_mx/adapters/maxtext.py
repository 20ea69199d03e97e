"""MaxText with its products in MX, where MaxText itself is installed.

    python -m jax_mx.adapters.maxtext auto base.yml run_name=... dataset_type=...

It stands where `python -m maxtext.trainers.pre_train.train` stood, with a recipe's name before the
options. A program of its own calls `use` before MaxText makes its model. This follows MaxText
0.2.5, whose list of quantizations is closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, logging
from flax import linen
from maxtext.layers import moe, quantizations
from maxtext.trainers.pre_train import train

from jax_mx.adapters.qwix import Provider
from jax_mx.adapters.rules import Left
from jax_mx.products.dot_general import dot_general, einsum
from jax_mx.products.ragged_dot import ragged_dot
from jax_mx.products.recipes import AUTO, Recipe, check_recipe

OP = "jax_mx.adapters.maxtext"


def use(recipe: Recipe | str = AUTO) -> None:
    """Makes MX of the products of weights in MaxText's layers, dense ones and experts.

        jax_mx.adapters.maxtext.use()
        app.run(train.main)

    Routers, embeddings, logits, attention's own products and the moves of tokens to experts stay in
    floats. So does a product that MX cannot take, and a warning says why, once. With MaxText's
    option `use_qwix_quantization=True`, beside `quantization=fp8_full`, qwix puts the products in
    place; else MaxText's layers do.

    Args:
      recipe: of the products, see `dot_general`.

    Raises:
      TypeError, ValueError: the recipe is invalid. When MaxText makes its model, a ValueError says
        which of its options would keep products from MX.
    """
    check_recipe(OP, recipe)
    layers = Quantization(recipe)
    provider = Provider({r"(.*/)?gate": None, r"decoder/.*layers.*": recipe})

    def configured(config: Any, quant_mode_str: str = "train") -> Any:
        _check(config)
        by = "qwix" if config.use_qwix_quantization else "MaxText's layers"
        logging.log_first_n(logging.INFO, "%s: %s put weights' products in %s", 1, OP, by, recipe)
        return None if config.use_qwix_quantization else layers

    modules: Any = quantizations
    modules.configure_quantization = configured
    modules.get_qt_provider = lambda config: provider
    _keep_routers()


def _check(config: Any) -> None:
    """Refuses options under which MaxText would multiply by means of its own.

    Raises:
      ValueError: there is one.
    """
    if config.use_qwix_quantization and config.quantization != "fp8_full":
        raise ValueError(f"{OP}: use_qwix_quantization=True wants quantization=fp8_full beside it")
    if config.quantization and not config.use_qwix_quantization:
        raise ValueError(
            f"{OP}: quantization={config.quantization} is MaxText's own; leave it out, or add "
            "use_qwix_quantization=True"
        )
    kernels = config.sparse_matmul and (config.megablox or config.use_tokamax_gmm)
    if config.num_experts > 1 and kernels:
        raise ValueError(
            f"{OP}: experts would be multiplied by kernels of MaxText's own; pass megablox=False "
            "use_tokamax_gmm=False, with sparse_matmul=True or False"
        )


@dataclasses.dataclass(unsafe_hash=True)  # a static attribute of MaxText's modules
class Quantization(quantizations.Quantization):
    """The object that MaxText's layers ask for their products.

    Attributes:
      recipe: of the products.
      left: tells what stays in floats.
    """

    recipe: Recipe | str
    left: Left = dataclasses.field(default_factory=lambda: Left(OP), compare=False)
    needs_apply_rngs = False
    quant_mode = "train"

    def dot_general_cls(self, mesh_axes: tuple[str, ...] = ()) -> Callable[[], linen.Module]:
        """The module that multiplies in dense layers."""
        return functools.partial(DotGeneral, self)

    def einsum(self, *_: Any, **__: Any) -> Callable[..., jax.Array]:
        """The function that multiplies experts that are not sparse."""
        return self._einsum

    def _einsum(self, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
        if not self.left.takes(self.recipe, subscripts, x, w):
            return jnp.einsum(subscripts, x, w)
        return einsum(subscripts, x, w, recipe=self.recipe)

    def ragged_dot(self, lhs: Any, rhs: Any, group_sizes: Any, **options: Any) -> jax.Array:
        """jax.lax.ragged_dot of experts."""
        if not self.left.takes(self.recipe, group_sizes, lhs, rhs):
            return _RAGGED_DOT(lhs, rhs, group_sizes, **options)
        return ragged_dot(lhs, rhs, group_sizes, **options, recipe=self.recipe)


class DotGeneral(linen.Module):
    """jax.lax.dot_general as the module that MaxText wants."""

    by: Quantization

    @linen.compact
    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, numbers: Any, precision: Any = None
    ) -> jax.Array:
        """The product."""
        if not self.by.left.takes(self.by.recipe, numbers, lhs, rhs):
            return jax.lax.dot_general(lhs, rhs, numbers, precision)
        return dot_general(lhs, rhs, numbers, precision, recipe=self.by.recipe)


_RAGGED_DOT = jax.lax.ragged_dot


@contextlib.contextmanager
def _experts(quant: Any) -> Iterator[None]:
    """Where MaxText's calls of jax.lax.ragged_dot, which asks no quantization, become ours."""
    module: Any = jax.lax
    plain = module.ragged_dot
    module.ragged_dot = quant.ragged_dot
    try:
        yield
    finally:
        module.ragged_dot = plain


@functools.cache
def _keep_routers() -> None:
    """Parts experts' products from routers and from moves of tokens, which MaxText does not."""
    gate, layer = vars(moe)["GateLogit"], vars(moe)["RoutedMoE"]
    plain_gate, sparse, einsum_of = gate.__init__, layer.sparse_matmul, layer.get_einsum

    @functools.wraps(plain_gate)
    def in_floats(self: Any, *args: Any, quant: Any = None, **kwargs: Any) -> None:
        ours = isinstance(quant, Quantization)
        plain_gate(self, *args, quant=None if ours else quant, **kwargs)

    @functools.wraps(sparse)
    def of_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = isinstance(self.quant, Quantization)
        with _experts(self.quant) if ours else contextlib.nullcontext():
            return sparse(self, *args, **kwargs)

    @functools.wraps(einsum_of)
    def of_weights(self: Any, *args: Any, einsum_name: str | None = None, **kwargs: Any) -> Any:
        if isinstance(self.quant, Quantization) and einsum_name in (moe.DISPATCH, moe.COMBINE):
            return jnp.einsum
        return einsum_of(self, *args, einsum_name=einsum_name, **kwargs)

    gate.__init__, layer.sparse_matmul, layer.get_einsum = in_floats, of_experts, of_weights


def main(argv: list[str]) -> None:
    """MaxText's trainer, with the recipe that is the first argument."""
    if len(argv) < 3:
        raise app.UsageError("python -m jax_mx.adapters.maxtext RECIPE CONFIG.yml OPTION=VALUE ...")
    use(argv[1])
    train.main([argv[0], *argv[2:]])


if __name__ == "__main__":
    app.run(main)
