"""How devices share a product, where XLA splits the program among them (launch/partition.py).

Each device has a part of the rows, the columns, the batch or the contracted elements, and
multiplies it as one device would. Where operands lie elsewhere, their codes move, not floats. In a
product over groups rows stay whole, as a device knows no sizes of its part.

Operands in windows "shard" have as many windows along the contracted axis as the program has
devices. A window that a device holds whole is a row to it. A device with several windows computes
one product for each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.formats import BLOCK
from jax_mx.formats.windows import ROW, SHARD, lengths_of
from jax_mx.launch import partition
from jax_mx.launch.partition import Rule, Split
from jax_mx.launch.targets import Target
from jax_mx.products import kernels, primitives
from jax_mx.products.contraction import ROWS, SUMS, Contraction, Numbers, Served
from jax_mx.products.implementations import IMPLEMENTATIONS, chips_of
from jax_mx.quantizing import metadata
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.plan import ProductPlan, described, plan_in

NAME = "product"
_CARRIED = "is lowered for the chip that is here, and this program may leave it"


class Splitting(NamedTuple):
    """A contraction as the program that it is lowered for has it.

    Attributes:
      contraction: its windows are no "shard".
      rule: how devices share it; None where they do not, or XLA sees to it.
      windows: how many there are along the contracted axis of "shard"; else 1.
    """

    contraction: Contraction
    rule: Rule | None = None
    windows: int = 1

    def is_shared_by(self, served: Served) -> bool:
        """Whether devices share it by the rule; XLA splits groups that no kernel multiplies."""
        row = IMPLEMENTATIONS[served.implementation]
        if self.rule is None or row.splits_itself:
            return False
        return not self.contraction.numbers.groups or served.plan is not None or row.is_pallas

    def of_arrays(self, contraction: Contraction) -> Contraction:
        """The same contraction, of arrays, with the windows that are known."""
        sides = (
            dataclasses.replace(x, window=known.window) if isinstance(x, MXArray) else x
            for x, known in (
                (contraction.lhs, self.contraction.lhs),
                (contraction.rhs, self.contraction.rhs),
            )
        )
        lhs, rhs = sides
        return dataclasses.replace(contraction, lhs=lhs, rhs=rhs)

    def call(
        self, ctx: Any, leaves: Sequence[Any], served: Served, target: Target
    ) -> Sequence[Any]:
        """Emits the call that XLA splits; of MLIR values."""
        assert self.rule is not None
        parameters = parameters_of(self, served, target)
        return partition.call(ctx, NAME, parameters, self.rule, leaves, target)


def splitting_of(contraction: Contraction, target: Target) -> Splitting:
    """How the devices of a program share a contraction of abstract operands."""
    windows = _windows_of(contraction, target)
    if target.carries:
        contraction = dataclasses.replace(contraction, carried=_CARRIED)
    if not target.partitioned:
        return Splitting(_in(contraction, ROW))
    why = _obstacle(contraction, target)
    if why or not _reads_codes(contraction):
        known = _in(contraction, BLOCK if windows > 1 else ROW)
        return Splitting(dataclasses.replace(known, unsplit=why))
    known = _in(contraction, ROW)
    rule = _rule(known, windows)
    return Splitting(known, rule if windows == 1 else rule._replace(equal=()), windows)


def as_traced(contraction: Contraction) -> Contraction:
    """A contraction with what its mesh says of how devices share it, where nothing is lowered."""
    mesh = jax.tree.leaves((contraction.lhs, contraction.rhs))[0].sharding.mesh
    manual = () if mesh.empty else mesh.manual_axes
    shape = {} if mesh.empty else mesh.shape
    devices = math.prod(n for name, n in shape.items() if name not in manual)
    target = Target("", [], None, devices > 1, devices, bool(manual))
    return splitting_of(contraction, target).contraction


def _windows_of(contraction: Contraction, target: Target) -> int:
    """How many windows "shard" there are along the contracted axis."""
    sides = (contraction.lhs, contraction.rhs)
    for x, dims in zip(sides, contraction.numbers.contracting, strict=True):
        if isinstance(x, MXArray) and x.window == SHARD:
            return target.shards_of(x.shape[dims[-1]], BLOCK)
    return 1


def _in(contraction: Contraction, window: Any) -> Contraction:
    """The contraction with this window in place of "shard"."""
    return contraction.with_windows(lambda window_of: window if window_of == SHARD else window_of)


def _reads_codes(contraction: Contraction) -> bool:
    """Whether an operand is MX, or kernels of ours may sum floats over groups."""
    sides = (contraction.lhs, contraction.rhs)
    return bool(contraction.numbers.groups) or any(isinstance(x, MXArray) for x in sides)


def _obstacle(contraction: Contraction, target: Target) -> str:
    """Why devices do not share a contraction by a rule; empty where they do."""
    sides = (contraction.lhs, contraction.rhs)
    if any(0 in x.shape for x in sides):
        return "has no elements to split"
    tiled = [x for x in sides if isinstance(x, MXArray) and x.scale_layout.is_tiled]
    if any(len(x.block) == 2 or x.axis not in (-2, -1) for x in tiled):
        return "has tiles of scales of square blocks, or along a dimension before the last two"
    if any(isinstance(x, MXArray) and x.value_layout.is_tiled for x in sides):
        return "has codes in tiles"
    return partition.obstacle(target, jax.tree.leaves((*sides, contraction.sizes)))


# ---- the rule ---
def _rule(contraction: Contraction, windows: int) -> Rule:
    """The dimensions of operands and of the result that are split together."""
    numbers, sides = contraction.numbers, (contraction.lhs, contraction.rhs)
    factors = [_factors(contraction, side) for side in (0, 1)]
    units: dict[str, int] = {}
    lengths: dict[str, int] = {}
    for x, names in zip(sides, factors, strict=True):
        for name, length, unit in zip(names, x.shape, _units(x), strict=True):
            lengths[name] = length
            units[name] = math.lcm(units.get(name, 1), unit)
    if windows > 1:
        name = _summed(numbers)[-1]
        units[name] = math.lcm(units[name], lengths[name] // windows)
    whole = {"g", {ROWS: "m0", SUMS: "k0"}.get(numbers.groups, "")}
    parts = {
        name: n // units[name] if n % units[name] == 0 and name not in whole else 1
        for name, n in lengths.items()
    }
    operands = [dims for x, names in zip(sides, factors, strict=True) for dims in _dims(x, names)]
    operands += [("g",)] * len(jax.tree.leaves(contraction.sizes))
    unread = len(jax.tree.leaves(contraction.like))
    lead = [f"b{i}" for i in range(len(numbers.batch[0]))] + ["g"] * (numbers.groups == SUMS)
    free = [
        f"{axis}{i}" for side, axis in enumerate("mn") for i in range(len(contraction.free(side)))
    ]
    result = (*lead, *free)
    rule = Rule((*operands, *[result] * unread), (result,), parts, _summed(numbers), unread)
    return rule._replace(named=_named(rule, contraction), equal=_equal(rule, sides))


def _dims(x: Any, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The factors of an operand's arrays: codes, scales; a tile of scales stays whole."""
    if not isinstance(x, MXArray):
        return [names] * len(jax.tree.leaves(x))
    turned = (*names[:-2], names[-1], names[-2]) if x.axis == -2 else names
    return [names, (*turned, "") if x.scale_layout.is_tiled else names]


def _equal(rule: Rule, sides: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    """For each operand the factors along which its elements are equal: scales along a row."""
    equal: list[tuple[str, ...]] = []
    for x in sides:
        dims = rule.operands[len(equal)]
        is_row = isinstance(x, MXArray) and x.window == ROW and not x.scale_layout.is_tiled
        equal += [(), (dims[x.axis],) if is_row else ()] if isinstance(x, MXArray) else [()]
    return (*equal, *[()] * (len(rule.operands) - len(equal)))


def _named(rule: Rule, contraction: Contraction) -> tuple[tuple[str, ...], ...]:
    """The dimensions of arrays as XLA is to see them.

    XLA goes from arrays whose splits it knows to those which it does not, and meets weights, which
    are arguments, before activations. Where FSDP splits weights over the axis that splits tokens,
    activations would be split along their features, and move to and fro. So a weight's split goes
    to the result alone, along its columns, as tensor parallelism wants. A gradient is split as
    what it is the gradient of, and not as its operands are; in a weight's, these are split alike
    along rows.
    """
    over_rows = contraction.numbers.over_rows
    apart = set() if over_rows else {*rule.summed}
    if over_rows or rule.unread:
        apart |= {f for dims in rule.operands[: rule.read] for f in dims if f[:1] in ("m", "n")}
    counts = [len(jax.tree.leaves(x)) for x in (contraction.lhs, contraction.rhs)]
    sides = ["lhs"] * counts[0] + ["rhs"] * counts[1]
    sides += [""] * (len(rule.arrays) - len(sides))
    return tuple(
        tuple(factor + side * (factor in apart) for factor in dims)
        for dims, side in zip(rule.arrays, sides, strict=True)
    )


def _factors(contraction: Contraction, side: int) -> tuple[str, ...]:
    """The factors of an operand's dimensions."""
    numbers, x = contraction.numbers, (contraction.lhs, contraction.rhs)[side]
    names = dict.fromkeys(range(x.ndim), "g")  # the matrices of groups
    for letter, dims in (
        ("b", numbers.batch[side]),
        ("k", numbers.contracting[side]),
        ("mn"[side], contraction.free(side)),
    ):
        names |= {d: f"{letter}{i}" for i, d in enumerate(dims)}
    return tuple(names.values())


def _summed(numbers: Numbers) -> tuple[str, ...]:
    """The factors of what is contracted."""
    return tuple(f"k{i}" for i in range(len(numbers.contracting[0])))


def _units(x: Any) -> list[int]:
    """How many elements a shard has whole, along each dimension of an operand."""
    units = [1] * x.ndim
    if isinstance(x, MXArray):
        rows, length = lengths_of(x.window)
        axes = [(-2, max(rows, BLOCK)), (-1, length)] if len(x.block) == 2 else [(x.axis, length)]
        if x.scale_layout.is_tiled:
            rows, blocks = x.scale_layout.pad
            axes += [(x.axis, blocks * BLOCK), (-3 - x.axis, rows)]
        for axis, unit in axes:
            units[axis] = math.lcm(units[axis], unit)
    return units


# ---- what a device computes ---
def parameters_of(splitting: Splitting, served: Served, target: Target) -> dict[str, Any]:
    """A contraction, and what serves it, as JSON has them."""
    contraction, windows = splitting.contraction, splitting.windows
    numbers = contraction.numbers
    return {
        "numbers": [
            numbers.contracting,
            numbers.batch,
            numbers.dtype.name,
            numbers.groups,
            numbers.align,
            numbers.exact,
            None if numbers.moved is None else numbers.moved.name,
        ],
        "operands": [
            metadata.described(metadata.fields_of(x)) if isinstance(x, MXArray) else None
            for x in (contraction.lhs, contraction.rhs)
        ],
        "implementation": served.implementation,
        "plan": None if served.plan is None else described(served.plan),
        "windows": windows,
        "parted": windows == 1 and kernels.reads_parts(contraction, served, chips_of(target)),
    }


def _in_parts(parameters: Mapping[str, Any], number: int, parts: Sequence[int]) -> bool:
    """Whether an operand is codes of rhs that a kernel reads in these parts: the third leaf is."""
    return number == 2 and parameters["parted"] and kernels.may_be_parts(parts)


@partition.of_shards(NAME, _in_parts)
def _of_shard(parameters: Mapping[str, Any], split: Split) -> Any:
    """A device's part of a product, of a part of its operands."""
    contracting, batch, dtype, groups, align, exact, moved = parameters["numbers"]
    pairs: Any = [tuple(map(tuple, pair)) for pair in (contracting, batch)]
    numbers = Numbers(pairs[0], pairs[1], jnp.dtype(dtype), groups, align, exact)
    plan = None if parameters["plan"] is None else plan_in(parameters["plan"])
    assert plan is None or isinstance(plan, ProductPlan)
    if moved is not None and any(split.of(factor) > 1 for factor in _summed(numbers)):
        numbers = dataclasses.replace(numbers, dtype=jnp.dtype(moved))
        plan = None if plan is None else dataclasses.replace(plan, dtype=numbers.dtype)
    served = Served(parameters["implementation"], plan=plan)
    windows = parameters["windows"]
    count = 1 if windows == 1 else windows // split.of(_summed(numbers)[-1])

    def run(*leaves: jax.Array) -> list[jax.Array]:
        if parameters["parted"] and leaves[2].ndim > leaves[3].ndim:
            assert plan is not None
            return [primitives.run_once(primitives.by_parts(plan, *leaves))]
        rest, sides = iter(leaves), list[Any]()
        for fields in parameters["operands"]:
            if fields is None:
                sides.append(next(rest))
            else:
                arrays = next(rest), next(rest)
                sides.append(MXArray(*arrays, **metadata.read(NAME, fields)))
        lhs, rhs = sides
        return [computed(Contraction(numbers, lhs, rhs, next(rest, None)), served, count)]

    return run


def computed(contraction: Contraction, served: Served, windows: int = 1) -> jax.Array:
    """The product by the implementation that serves it, window by window of what is contracted."""
    run = IMPLEMENTATIONS[served.implementation].compute
    if windows == 1 or (served.plan is None and served.implementation != "fp8"):
        return run(contraction, served)
    wide = np.dtype(np.float32)
    numbers = dataclasses.replace(contraction.numbers, dtype=wide)
    if served.plan is not None:
        served = dataclasses.replace(served, plan=dataclasses.replace(served.plan, dtype=wide))
    total: Any = None
    for i in range(windows):
        sides = [
            _part(x, dims[-1], i, windows)
            for x, dims in zip((contraction.lhs, contraction.rhs), numbers.contracting, strict=True)
        ]
        y = run(Contraction(numbers, sides[0], sides[1]), served)
        total = y if total is None else total + y
    return total.astype(contraction.numbers.dtype)


def _part(x: Any, axis: int, i: int, count: int) -> Any:
    """The i-th of so many equal parts of an operand along an axis."""

    def part(a: jax.Array) -> jax.Array:
        n = a.shape[axis] // count
        return jax.lax.slice_in_dim(a, i * n, (i + 1) * n, axis=axis)

    return jax.tree.map(part, x)
