"""`Groups`: the slots of a grouped array, and the tokens that they hold."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.checks import has_elements, held, is_symbolic, shown, whole
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.groups import clamped, owners
from jax_mx.formats.sharding import is_explicit, resharded
from jax_mx.launch.private import vary_alike
from jax_mx.quantizing.metadata import register_for_export

# Choices are counted in chunks of so many: within a chunk each is compared with each, which costs
# a fused reduction; between chunks there are histograms. 131,072 choices: 512 chunks.
_CHUNK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """Tokens sorted by expert, on the device, in arrays whose shapes do not depend on the routing.

    A grouped array has R slots: T k choices, up to align - 1 more for each expert, rounded up to a
    multiple of `align` (see `from_experts`). The slots of expert g are `starts[g]` to `starts[g] +
    sizes[g]`; the first `counts[g]` of them hold its tokens, in the order of the tokens. All other
    slots are padding. Every size, and therefore every start, is a multiple of `align`. A pytree;
    `align` is static. On a mesh with explicit axes each device holds all of it, and an array
    indexed by these slots must be unsplit. Under jax.vmap, map the methods as well; `experts` and
    `num_experts` also work on a whole batch of Groups.

    Attributes:
      rows: int32 (R,), the token in each slot; -1: none.
      sizes: int32 (G,), the number of slots of each group, as grouped products take it.
      starts: int32 (G,), the first slot of each group.
      counts: int32 (G,), the number of tokens of each group.
      slots: int32 (T, k), the slot of each token's choices; -1: the choice has no slot.
      dropped: int32 (), the number of choices without a slot.
      align: the divisor of every size.
    """

    rows: jax.Array
    sizes: jax.Array
    starts: jax.Array
    counts: jax.Array
    slots: jax.Array
    dropped: jax.Array
    align: int = dataclasses.field(default=BLOCK, metadata={"static": True})

    @classmethod
    def from_experts(
        cls,
        experts: jax.typing.ArrayLike,
        num_experts: int,
        *,
        align: int = BLOCK,
        most: int | None = None,
    ) -> Groups:
        """Groups of tokens by the experts that a router chose.

        The slot of a choice is its group's start plus the number of earlier choices of the same
        expert. GPUs count these, which takes less time than sorting.

        Args:
          experts: integers (T, k) or (T,): the experts of each token. A number below 0, or not
            below `num_experts`, names none: the choice gets no slot, and `dropped` counts it.
          num_experts: G, the number of experts.
          align: every group begins at a multiple of it: 32 for blocks along tokens, 128 or 256 for
            windows and tiled scales. 1 is for arrays that are not quantized along tokens, and for
            `ragged_dot`, which takes groups that begin anywhere.
          most: the largest number of choices that name an expert, if a caller knows it; None: all,
            T k. A larger number than T k counts as T k. If more choices name an expert, the choices
            whose slots would be behind the R-th get none, and `dropped` counts these, too.

        Returns:
          Groups of R = most + min(G, most) (align - 1) slots, rounded up to a multiple of align,
          the most that any routing needs.

        Raises:
          TypeError: experts are not integers, or an argument is not an int.
          ValueError: another rank, an argument out of range, or more slots than int32 counts.
        """
        op = "Groups.from_experts"
        number = _positive(op, "num_experts", num_experts)
        align = _positive(op, "align", align)
        experts = integers(op, "experts", experts)
        if experts.ndim not in (1, 2):
            raise ValueError(
                f"{op}: experts have the shape {experts.shape}, must be (T, k) or (T,); reshape "
                "the batch dimensions into one"
            )
        experts = experts if experts.ndim == 2 else experts[:, None]
        choices = experts.shape[0] * experts.shape[1]
        choices = choices if most is None else min(choices, _positive(op, "most", most, least=0))
        _check_slots(op, choices, number, align)
        return _grouped(_unsplit(experts), number, align, choices)

    @classmethod
    def from_sizes(cls, sizes: jax.Array, rows: int, *, align: int = BLOCK) -> Groups:
        """Groups of rows that are sorted by group already, and begin anywhere.

        Args:
          sizes: integers (G,), the number of rows of each group. A negative one counts as 0, and
            rows beyond the last one do not count.
          rows: the number of rows; a row without a group gets no slot.
          align: see `from_experts`.

        Returns:
          Groups of the row numbers, one choice a row.

        Raises:
          TypeError: sizes are not integers, or an argument is not an int.
          ValueError: another rank, an argument out of range, or more slots than int32 counts.
        """
        op = "Groups.from_sizes"
        align = _positive(op, "align", align)
        if not is_symbolic(rows):
            rows = _positive(op, "rows", rows, least=0)
        sizes = integers(op, "sizes", sizes)
        if sizes.ndim != 1:
            raise ValueError(f"{op}: sizes have the shape {sizes.shape}, must be (G,)")
        _check_slots(op, rows, sizes.shape[0], align)
        ends = jnp.cumsum(clamped(_unsplit(sizes), rows))
        row = jnp.arange(rows, dtype=jnp.int32)
        return _grouped(owners(ends, row)[:, None], sizes.shape[0], align, rows)

    @property
    def num_experts(self) -> int:
        """The number of groups, G."""
        return self.sizes.shape[-1]

    @property
    def experts(self) -> jax.Array:
        """int32 (R,), the expert of each slot; G behind the last group's."""
        ends = jnp.cumsum(self.sizes, -1, dtype=jnp.int32)
        slot = jnp.arange(self.rows.shape[-1], dtype=jnp.int32)
        return owners(ends, slot)

    def of_slots(self, choices: jax.Array) -> jax.Array:
        """The number of each slot's choice: (R,) from (T, k), zero where a slot holds nothing.

        Args:
          choices: (T, k), one number for each choice: a router's weights, say.

        Raises:
          ValueError: choices of another shape.
        """
        self._check_one("of_slots")
        choices = _numbers("Groups.of_slots", "choices", choices)
        if not _same_shape(choices.shape, self.slots.shape):
            raise ValueError(
                f"Groups.of_slots: choices have the shape {choices.shape}, must be "
                f"{self.slots.shape}, one number for each choice of a token"
            )
        slots = jnp.where(self.slots < 0, self.rows.shape[0], self.slots)  # -1 would be the last
        none = jnp.zeros(self.rows.shape, choices.dtype)
        return none.at[slots].set(choices, mode="drop", unique_indices=True)

    def of_choices(self, slots: jax.Array) -> jax.Array:
        """The row of each choice's slot: (T, k, ...) from (R, ...), zero for a choice without one.

        Args:
          slots: (R, ...), a row for each slot.

        Raises:
          ValueError: not R rows.
        """
        self._check_one("of_choices")
        slots = _numbers("Groups.of_choices", "slots", slots)
        if not _same_shape(slots.shape[:1], self.rows.shape):
            raise ValueError(
                f"Groups.of_choices: slots have the shape {slots.shape}, must have "
                f"{self.rows.shape[0]} rows, one for each slot"
            )
        return slots.at[self.slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    def combined(self, slots: jax.Array) -> jax.Array:
        """The sum of each token's choices, added up in float32: (T, ...) from (R, ...).

        Args:
          slots: (R, ...), a row for each slot.

        Raises:
          ValueError: not R rows.
        """
        slots = _numbers("Groups.combined", "slots", slots)
        return self.of_choices(slots).astype(jnp.float32).sum(1).astype(slots.dtype)

    def _check_one(self, method: str) -> None:
        if self.rows.ndim != 1:
            raise ValueError(
                f"Groups.{method}: jax.vmap made these, {self.rows.shape[:-1]} of them; map this "
                f"over them, too: jax.vmap(lambda groups, x: groups.{method}(x))(groups, x)"
            )


register_for_export(Groups)


def integers(op: str, name: str, values: Any) -> jax.Array:
    """Integers of any type as int32.

    Wider integers are clipped to -1 and the largest int32.

    Raises:
      TypeError: they are no integers.
    """
    values = held(values)
    has_elements(op, name, values)
    if not isinstance(values, jax.Array):
        # NumPy's first: without x64 JAX cuts int64 off, and makes 0 of 2^32.
        for array in (np.asarray, jnp.asarray):
            with contextlib.suppress(TypeError, ValueError, jax.errors.TracerArrayConversionError):
                values = array(values)
                break
        else:
            raise TypeError(f"{op}: {name} are {shown(values)}, must be integers")
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} are {values.dtype}, must be integers")
    if values.dtype != jnp.int32 and values.dtype.itemsize >= 4:
        least = max(jnp.iinfo(values.dtype).min, -1)
        values = values.clip(least, jnp.iinfo(jnp.int32).max)
    return jnp.asarray(values.astype(np.int32))


def _numbers(op: str, name: str, x: Any) -> jax.Array:
    """An array, whatever holds the numbers.

    Raises:
      TypeError: it is none.
    """
    try:
        return x if isinstance(x, jax.Array) else jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name} are {shown(x)}, must be an array of numbers") from error


def _unsplit(x: jax.Array) -> jax.Array:
    """The same, whole on each device, on a mesh with explicit axes: a slot depends on all of it."""
    mesh = jax.typeof(x).sharding.mesh
    return resharded(x, (None,) * x.ndim, mesh) if is_explicit(mesh) else x


def _positive(op: str, name: str, value: Any, least: int = 1) -> int:
    try:
        number = whole(value)
    except TypeError as error:
        raise TypeError(f"{op}: {name} must be an int, got {shown(value)}") from error
    if number < least:
        raise ValueError(f"{op}: {name} must be {least} or more, got {number}")
    return number


def slots_for(choices: int, num_experts: int, align: int) -> int:
    """R: how many slots so many choices need at most."""
    most = choices + jax.core.min_dim(num_experts, choices) * (align - 1)
    return -(-most // align) * align


def _check_slots(op: str, choices: int, num_experts: int, align: int) -> None:
    if is_symbolic(choices) or is_symbolic(num_experts):
        return
    if max(slots_for(choices, num_experts, align), num_experts) > jnp.iinfo(jnp.int32).max:
        raise ValueError(
            f"{op}: {choices} choices among {num_experts} groups, aligned to {align}, need more "
            "slots than int32 counts; split the tokens, or take a smaller align"
        )


def _same_shape(shape: tuple, wanted: tuple) -> bool:
    """Whether they are alike, as far as lengths are known."""
    return len(shape) == len(wanted) and all(
        is_symbolic(a) or is_symbolic(b) or a == b for a, b in zip(shape, wanted, strict=True)
    )


@partial(jax.jit, static_argnums=(1, 2, 3))
def _grouped(experts: jax.Array, number: int, align: int, most: int) -> Groups:
    tokens, k = experts.shape
    total = slots_for(most, number, align)
    is_one = (experts >= 0) & (experts < number)
    flat = jnp.where(is_one, experts, number).astype(jnp.int32).reshape(-1)
    earlier, counts = _ranks(flat, number)
    sizes, lost = -(-counts // align) * align, 0
    if most != tokens * k:  # a caller's number may be too small
        sizes = clamped(sizes, total)
        lost = (counts - jnp.minimum(counts, sizes)).sum(dtype=jnp.int32)
        counts = jnp.minimum(counts, sizes)
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    first = jnp.concatenate([starts, jnp.zeros(1, jnp.int32)])
    # A choice that names no expert is written nowhere, nor is one behind the last slot.
    slots = jnp.where(flat < number, first[flat] + earlier, total)
    token = jnp.arange(tokens * k, dtype=jnp.int32) // max(k, 1)
    rows = jnp.full(total, -1, jnp.int32)
    rows = rows.at[slots].set(token, mode="drop", unique_indices=True)
    slots = jnp.where(slots < total, slots, -1).reshape(tokens, k)
    dropped = (~is_one).sum(dtype=jnp.int32) + lost
    return Groups(rows, sizes, starts, counts, slots, dropped, align)


def _ranks(flat: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """How many earlier choices name the same expert.

    Args:
      flat: int32 (n,), experts; `number`: none, of which any count is given.
      number: of experts.

    Returns:
      int32 (n,), and (number,): how many choices name each expert.
    """
    counting, sorting = (partial(f, number=number) for f in (ranks_by_counting, ranks_by_sorting))
    # Where reductions are not fused, as on a CPU, counting writes n * number comparisons to memory.
    return jax.lax.platform_dependent(flat, cuda=counting, rocm=counting, default=sorting)


def ranks_by_sorting(flat: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """See `_ranks`."""
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    none, _ = vary_alike(jnp.zeros(number + 1, jnp.int32), flat)  # adding nothing keeps its type
    counts = none.at[flat].add(1)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    rank = jnp.arange(flat.shape[0], dtype=jnp.int32) - starts[flat[order]]
    return jnp.zeros_like(flat).at[order].set(rank, unique_indices=True), counts[:number]


def ranks_by_counting(flat: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """See `_ranks`: the earlier ones in the same chunk, plus all in earlier chunks."""
    n = flat.shape[0]
    chunks = -(-n // _CHUNK)
    ids = jnp.pad(flat, (0, chunks * _CHUNK - n), constant_values=number).reshape(chunks, _CHUNK)
    earlier = np.tri(_CHUNK, k=-1, dtype=bool)[None]
    same = (ids[:, :, None] == ids[:, None, :]) & earlier
    earlier_alike = same.sum(-1, dtype=jnp.int32)
    experts = jnp.arange(number, dtype=jnp.int32)[None, :, None]
    histograms = (ids[:, None, :] == experts).sum(-1, dtype=jnp.int32)
    ends = jnp.cumsum(histograms, 0, dtype=jnp.int32)
    before = jnp.pad(ends - histograms, ((0, 0), (0, 1)))
    before = jnp.take_along_axis(before, ids, 1)
    counts = histograms.sum(0, dtype=jnp.int32)
    return (earlier_alike + before).reshape(-1)[:n], counts
