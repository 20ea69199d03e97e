"""Where an array's shards lie before an op's primitive is bound; and whether a kernel is there."""

import jax

from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import gathered, is_explicit, shards_of
from jax_mx.launch import private
from jax_mx.quantizing import registry
from jax_mx.quantizing.plan import Plan


def require_kernel(plan: Plan) -> None:
    """Raises at once where a named implementation has no kernel for the plan on any chip.

    Raises:
      NotImplementedError: so it is; says why.
    """
    if plan.implementation in (None, "xla"):
        return
    named = registry.IMPLEMENTATIONS[plan.implementation]
    if not (support := named.support(plan, ())):
        raise NotImplementedError(support.reason)


def placed(x: jax.Array, shape: tuple[int, ...], plan: Plan) -> jax.Array:
    """x of the logical `shape`, in shards that the primitive takes.

    Raises:
      ShardingTypeError: on a mesh with explicit axes, a shard splits a block.
    """
    for axis in plan.axes:
        preprocessing = plan.preprocessing[-1 - axis if plan.op == "quantize_both" else 0]
        groups = "blocks" if preprocessing.window == BLOCK else "windows"
        require_whole_groups(plan.name, x, shape, axis, preprocessing.group, groups)
    if not plan.has_units:
        return x
    swapped = plan.op == "dequantize" and plan.transpose
    first, last = plan.view.unit_lengths[:: -1 if swapped else 1]
    # A unit spans the block axis and the last one; axes between them may be split anywhere.
    between = (1,) * (-2 - plan.axis)
    return gathered(x, shape, (first, *between, last))


def require_whole_groups(
    op: str, x: jax.Array, shape: tuple[int, ...], axis: int, group: int, groups: str = "blocks"
) -> None:
    """Refuses an x whose shards split groups of elements along `axis`, on an explicit mesh.

    Raises:
      ShardingTypeError: so it is.
    """
    if not is_explicit(jax.typeof(x).sharding.mesh):
        return
    (names, shards), length = shards_of(x, axis), shape[axis]
    if shards > 1 and length % (shards * group):
        raise private.ShardingTypeError(
            f"{op}: axis {axis} of length {length} is split over {' x '.join(names)} in "
            f"{shards} shards of {length / shards:g}, which does not keep its {groups} of "
            f"{group} whole; reshard it with jax.sharding.reshard"
        )
