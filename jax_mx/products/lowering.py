"""Lowering rules of the primitives of multiply.py: decide, then quantize, then multiply."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir

from jax_mx.launch import private, targets
from jax_mx.products.contraction import Numbers, Served
from jax_mx.products.decide import decide
from jax_mx.products.implementations import IMPLEMENTATIONS, chips_of
from jax_mx.products.multiply import (
    Step,
    contraction_of,
    contractions_in,
    equations,
    product_p,
    step_p,
)
from jax_mx.products.splitting import Splitting, splitting_of
from jax_mx.quantizing import registry
from jax_mx.quantizing.plan import Plan


# ---- one contraction ---
def _lower(platform: str | None, ctx: Any, *leaves: Any, tree: Any, numbers: Numbers) -> Any:
    target = targets.target_of(ctx, platform)
    abstract = contraction_of(tree, ctx.avals_in, numbers).lowered_for(target)
    splitting = splitting_of(abstract, target)
    abstract = splitting.contraction
    served = decide(abstract, target)
    carries = target.carries and IMPLEMENTATIONS[served.implementation].is_pallas
    with targets.pallas_lowers_for(chips_of(target) if carries else (), ctx) as ctx:
        if splitting.is_shared_by(served):
            return splitting.call(ctx, leaves, served, target)
        return _lower_alone(ctx, leaves, tree, numbers, splitting, served)


def _lower_alone(
    ctx: Any,
    leaves: Sequence[Any],
    tree: Any,
    numbers: Numbers,
    splitting: Splitting,
    served: Served,
) -> Any:
    """Lowers a product that devices do not share by a rule."""
    abstract, name = splitting.contraction, served.implementation
    if not numbers.groups and any(0 in x.shape for x in (abstract.lhs, abstract.rhs)):
        name = "xla"  # libraries divide by lengths, or read elements

    def product(*leaves: Any) -> list[jax.Array]:
        contraction = splitting.of_arrays(contraction_of(tree, leaves, numbers))
        with jax.named_scope(f"by_{served.implementation}"):  # so that profiles and dumps say it
            return [IMPLEMENTATIONS[name].compute(contraction, served)]

    rule: Any = mlir.lower_fun(product, multiple_results=True)
    return rule(ctx, *leaves)


# ---- a quantizer and the products behind it ---
def _lower_step(
    platform: str | None,
    ctx: Any,
    *leaves: Any,
    codes: Any,
    mapped: tuple,
    structure: Any,
    **params: Any,
) -> Any:
    del structure
    target, run = targets.target_of(ctx, platform), codes
    if names := names_of_floats(codes, target):
        of_floats = traced_of_floats(ctx.avals_in, mapped, names, **params)
        run = of_floats if gives_floats(of_floats, target) else codes
    rule: Any = mlir.lower_fun(jaxpr_as_fun(run), multiple_results=True)
    return rule(ctx, *leaves)


def traced_of_floats(
    avals: Sequence[Any], mapped: tuple, names: Sequence[str], step: Step, **params: Any
) -> Any:
    """The jaxpr of a step of floats.

    Args:
      avals: of its leaves.
      mapped: for each vmap around it, the inner one first, which axis of each leaf it maps.
      names: of the implementations of products.
      step: the step.
      **params: see `Step.of_floats`.
    """
    run = step.of_floats(names=names, **params)
    for dims in mapped:
        run = jax.vmap(run, in_axes=dims)
    return jax.make_jaxpr(run)(*avals)


def names_of_floats(codes: Any, target: targets.Target) -> tuple[str, ...]:
    """The implementations of a step's products, where all of them multiply floats; else none."""
    names = []
    for contraction in contractions_in(codes.jaxpr):
        try:
            served = decide(splitting_of(contraction, target).contraction, target)
        except NotImplementedError:  # which lowering the product says, too
            return ()
        if not served.reads_floats:
            return ()
        names.append(served.implementation)
    return tuple(names)


def gives_floats(of_floats: Any, target: targets.Target) -> bool:
    """Whether a step of floats has kernels that give them, and products that take them.

    By the tables alone, which are the same in all processes of a program.
    """
    chips = chips_of(target)
    plans = [eqn.params.get("plan") for eqn in equations(of_floats.jaxpr)]
    asked = [plan for plan in plans if isinstance(plan, Plan) and plan.gives_floats]
    with registry.by_tables():
        return (
            bool(asked)
            and all(
                registry.chosen(plan, target.platform, chips).quantizes_at_once for plan in asked
            )
            and all(
                IMPLEMENTATIONS[str(contraction.implementation)].support(contraction, chips)
                for contraction in (
                    splitting_of(contraction, target).contraction
                    for contraction in contractions_in(of_floats.jaxpr)
                )
            )
        )


private.lowers(product_p, _lower)
private.lowers(step_p, _lower_step)
