"""Calls that XLA splits among devices by the name of their target.

A primitive's lowering emits such a call where XLA splits the program. The call has a `Rule`: the
dimensions of its arrays that are split together, and the dimensions that are summed over. XLA asks
for the program of a shard when it compiles. This program is a function of a name in `SHARDS`, and
takes a device's parts of the operands. Partial sums are added up behind it, or scattered where the
result is split.

The program has names and numbers, and no pointer. So it is the same text in all processes, and
lives in JAX's persistent cache and in exports. It has no mesh: XLA says how devices hold each
array, and devices are counted in axes of prime sizes, p0, p1 ...

>>> rule = Rule((("m", "k"), ("n", "k")), (("m", "n"),), {"m": 64, "n": 32, "k": 8}, ("k",))
>>> shapes = ((64, 256), (32, 256), (64, 32))  # parts of k are blocks of 32.
>>> splits = ((("p0",), ("p1",)), ((), ("p1",)), (("p0",), ()))  # by array and dimension.
>>> chosen(rule, shapes, splits, {"p0": 2, "p1": 2}).axes
{'m': ('p0',), 'k': ('p1',)}
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_mx.launch import calls, private, store
from jax_mx.launch import chips as chip_table
from jax_mx.launch.targets import Target

TARGET = "jax_mx_split"
# For jax.export.export(..., disabled_checks=DISABLE_EXPORT_CHECKS): an exported program carries
# its kernels; jax_mx must be imported where it runs.
DISABLE_EXPORT_CHECKS = [
    jax.export.DisabledSafetyCheck.custom_call(target) for target in (store.TARGET, TARGET)
]
Axes = tuple[str, ...]  # of devices
Dims = tuple[str, ...]  # a factor for each dimension of an array; "": it stays whole


class Rule(NamedTuple):
    """How arrays of a call may be split: dimensions with one factor are split alike.

    Attributes:
      operands: the factors of each one's dimensions.
      results: the same of each result.
      parts: how many parts each factor has, none of which is split; a dimension may have several
        elements for each part, and one part is whole.
      summed: the factors that results are sums over.
      unread: how many operands at the end no device reads: results are to be split as they are.
      named: for each array the dimensions for XLA, where fewer splits pass from one array to others
        than factors say; empty: as factors say.
      equal: for each operand the factors along which its elements are equal, so that a device that
        has a part knows all; empty: there are none.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    parts: Mapping[str, int]
    summed: tuple[str, ...] = ()
    unread: int = 0
    named: tuple[Dims, ...] = ()
    equal: tuple[tuple[str, ...], ...] = ()

    @property
    def read(self) -> int:
        """How many operands devices read."""
        return len(self.operands) - self.unread

    @property
    def arrays(self) -> tuple[Dims, ...]:
        """Operands, then results."""
        return (*self.operands, *self.results)


class Split(NamedTuple):
    """How devices share a call.

    Attributes:
      sizes: of all axes of devices.
      axes: by factor, the axes that split it.
      scattered: by factor of the result, the axes that split what is summed and then the result.
    """

    sizes: Mapping[str, int]
    axes: Mapping[str, Axes]
    scattered: Mapping[str, Axes]

    def of(self, factor: str) -> int:
        """In how many shards a factor is split."""
        return math.prod(self.sizes[a] for a in self.axes.get(factor, ()))

    def spec(self, dims: Dims, is_result: bool = False) -> list[Axes]:
        """The axes that split each dimension of an array."""
        more = self.scattered if is_result else {}
        return [(*self.axes.get(f, ()), *more.get(f, ())) for f in dims]


Local = Callable[[Mapping[str, Any], Split], Callable[..., list]]
# From a call's parameters, an operand's number and (parts, ..., length of a part): whether a device
# reads the operand where parts of its last dimension lie one behind the other, as they arrive.
InParts = Callable[[Mapping[str, Any], int, Sequence[int]], bool]
SHARDS: dict[str, Local] = {}  # by name: from a call's parameters, what a device computes
IN_PARTS: dict[str, InParts] = {}


def of_shards(name: str, in_parts: InParts = lambda *_: False) -> Callable[[Local], Local]:
    """Registers what a device computes of calls with this name, and what it reads in parts."""

    def register(local: Local) -> Local:
        SHARDS[name] = local
        IN_PARTS[name] = in_parts
        return local

    return register


def obstacle(target: Target, avals: Sequence[Any]) -> str:
    """Why XLA cannot split a call of these arrays by a rule; empty where it can."""
    if target.is_mixed:
        return "is not split along axes that a jax.shard_map around it leaves to XLA"
    if any(jax.export.is_symbolic_dim(n) for aval in avals for n in aval.shape):
        return "is not split where lengths are symbolic"
    return ""


# ---- which axis splits what ---
def chosen(
    rule: Rule,
    shapes: Sequence[Sequence[int]],
    splits: Sequence[Sequence[Axes]],
    sizes: Mapping[str, int],
) -> Split:
    """The split that arrays ask for, as they lie and are wanted.

    Args:
      rule: of the call.
      shapes: of operands, then of results.
      splits: the axes that split each dimension of these; a result may say nothing, ().
      sizes: of the axes.
    """
    wanted: dict[str, list[tuple[str, int]]] = {name: [] for name in sizes}  # (factor, its array)
    numbers = [*range(rule.read), *range(len(rule.operands), len(rule.arrays))]
    for i in numbers:
        dims, split = rule.arrays[i], splits[i]
        for factor, names in zip(dims, split, strict=False):
            for name in names:
                if rule.parts.get(factor, 1) > 1:
                    wanted[name].append((factor, i))
    picked = {name: _factor(rule, shapes, asked) for name, asked in wanted.items() if asked}
    order = [*numbers[rule.read :], *numbers[: rule.read]]
    axes: dict[str, Axes] = {}
    for factor in dict.fromkeys(picked.values()):
        places = (
            name
            for i in order
            for f, names in zip(rule.arrays[i], splits[i], strict=False)
            if f == factor
            for name in names
        )
        names = [n for n in dict.fromkeys((*places, *picked)) if picked.get(n) == factor]
        while names and rule.parts[factor] % math.prod(sizes[n] for n in names):
            names.pop()
        axes |= {factor: tuple(names)} if names else {}
    return Split(sizes, axes, _scattered(rule, shapes, splits, sizes, axes))


def _factor(rule: Rule, shapes: Sequence, wanted: Sequence[tuple[str, int]]) -> str:
    """The factor that an axis splits, of those that arrays are split along by it.

    A sum stays where all operands that have it are split so: only results move. Else a factor that
    the result wants and some operand has; else one that keeps the largest operand where it lies,
    with sums last.
    """
    count = len(rule.operands)
    inside = [(factor, i) for factor, i in wanted if i < count]
    for factor in rule.summed:
        having = {i for i, dims in enumerate(rule.operands[: rule.read]) if factor in dims}
        if having == {i for f, i in inside if f == factor}:
            return factor
    asked = {factor for factor, i in wanted if i >= count}
    ranked = sorted(
        inside or wanted,
        key=lambda one: (
            one[0] not in asked,
            one[0] in rule.summed,
            -math.prod(shapes[one[1]]),
            one[1],
        ),
    )
    return ranked[0][0]


def _scattered(
    rule: Rule, shapes: Sequence, splits: Sequence, sizes: Mapping[str, int], axes: dict
) -> dict[str, Axes]:
    """The axes of sums that the result is split over, by its factor."""
    summed = {name for factor in rule.summed for name in axes.get(factor, ())}
    count, scattered = len(rule.operands), {}
    if not summed or len(rule.results) > 1:
        return {}
    sides = zip(rule.results[0], shapes[count], splits[count], strict=False)
    for factor, length, names in sides:
        names = [name for name in names if name in summed]
        others = math.prod(sizes[n] for n in axes.get(factor, ()))
        while names and length % (others * math.prod(sizes[n] for n in names)):
            names.pop()
        scattered |= {factor: tuple(names)} if names else {}
    return scattered


# ---- the program of a shard ---
def shard_of(
    config: Mapping[str, Any], avals: Sequence[Any], results: Sequence[Any], splits: Sequence
) -> tuple[Split, Callable, list[Any], list[list[Axes]]]:
    """How a call is split, what a device computes of it, of which operands, and how these are.

    Args:
      config: the call's, see `call`.
      avals: of operands.
      results: their abstract values.
      splits: see `chosen`; (sizes of axes, splits).
    """
    rule = _rule(config)
    sizes, lies = splits
    shapes = [aval.shape for aval in (*avals, *results)]
    split = chosen(rule, shapes, lies, sizes)
    specs = _operand_specs(rule, shapes, split, lies)
    operands = [
        jax.ShapeDtypeStruct(_local(split, aval.shape, spec), aval.dtype)
        for aval, spec in zip(avals, specs, strict=True)
    ]
    shard = _shard(config, split)

    def gathered(*operands: jax.Array) -> list:
        read = []
        for i, dims in enumerate(rule.operands[: rule.read]):
            are_equal = [factor in (rule.equal[i] if rule.equal else ()) for factor in dims]
            reads = functools.partial(IN_PARTS[config["name"]], config["parameters"], i)
            wanted = split.spec(dims)
            read.append(_gathered(operands[i], specs[i], wanted, are_equal, split, reads))
        return shard(*read)

    return split, gathered, operands, specs


def _operand_specs(rule: Rule, shapes: Sequence, split: Split, lies: Sequence) -> list[list[Axes]]:
    """The axes that split each dimension of operands, as a shard's program takes them.

    An operand that nobody reads stays where it lies. So does one that is gathered along a dimension
    behind others: the program gathers parts one behind the other. Then it puts them in order, in
    runs as long as a part's, where what reads them does not take parts. XLA would transpose each
    element, before and after. Equal elements stay, too, as a device knows others' by its own.
    """
    specs = [split.spec(dims) for dims in rule.operands]
    for i, (shape, wanted, dims) in enumerate(zip(shapes, specs, rule.operands, strict=False)):
        there = [
            () if n % math.prod(split.sizes[a] for a in names) else tuple(names)
            for n, names in zip(shape, lies[i] or [()] * len(shape), strict=True)
        ]
        if i >= rule.read:
            specs[i] = there
            continue
        taken = {name for names in wanted for name in names}
        equal = rule.equal[i] if rule.equal else ()
        specs[i] = [
            have
            if (at or factor in equal)
            and have[: len(want)] == want
            and not taken & {*have[len(want) :]}
            else want
            for at, (have, want, factor) in enumerate(zip(there, wanted, dims, strict=True))
        ]
    return specs


def _gathered(
    x: jax.Array,
    spec: Sequence[Axes],
    wanted: Sequence[Axes],
    are_equal: Sequence[bool],
    split: Split,
    reads_parts: Callable[[Sequence[int]], bool],
) -> jax.Array:
    """An operand of which a device has a smaller part than it reads."""
    for at, (have, want, is_equal) in enumerate(zip(spec, wanted, are_equal, strict=True)):
        more = have[len(want) :]
        if more and is_equal:
            count = x.shape[at] * math.prod(split.sizes[name] for name in more)
            first = jax.lax.slice_in_dim(x, 0, 1, axis=at)
            x = jnp.broadcast_to(first, (*x.shape[:at], count, *x.shape[at + 1 :]))
        elif more:
            parts = jax.lax.all_gather(x, more)
            if at == len(spec) - 1 and reads_parts(parts.shape):
                return parts
            parts = jnp.moveaxis(parts, 0, at)
            x = parts.reshape(*x.shape[:at], -1, *x.shape[at + 1 :])
    return x


def _shard(config: Mapping[str, Any], split: Split) -> Callable[..., list]:
    """The function that a device computes, of arrays as they move."""
    rule, (dtypes, results) = _rule(config), config["dtypes"]
    local = SHARDS[config["name"]](config["parameters"], split)
    names = (name for factor in rule.summed for name in split.axes.get(factor, ()))
    summed = tuple(dict.fromkeys(names))  # once, where two factors are taken to have one axis

    def shard(*operands: jax.Array) -> list:
        outs = local(*map(private.of_dtype, operands, dtypes))
        if summed:
            pairs = zip(outs, rule.results, strict=True)
            outs = [_added(y, dims, summed, split) for y, dims in pairs]
            outs = [y.astype(dtype) for y, dtype in zip(outs, results, strict=True)]
        return [*map(private.as_bytes, outs)]

    return shard


def _rule(config: Mapping[str, Any]) -> Rule:
    return Rule(*map(_hashable, config["rule"]))


def _added(y: jax.Array, dims: Dims, names: Axes, split: Split) -> jax.Array:
    """A device's part of the sum of what devices have along these axes."""
    scattered = {name for names in split.scattered.values() for name in names}
    if rest := tuple(name for name in names if name not in scattered):
        y = jax.lax.psum(y, rest)
    for at, factor in enumerate(dims):
        if over := split.scattered.get(factor):
            y = jax.lax.psum_scatter(y, over, scatter_dimension=at, tiled=True)
    return y


def _local(split: Split, shape: Sequence[int], spec: Sequence[Axes]) -> tuple[int, ...]:
    pairs = zip(shape, spec, strict=True)
    return tuple(n // math.prod(split.sizes[a] for a in names) for n, names in pairs)


def _hashable(part: Any) -> Any:
    if isinstance(part, list):
        return tuple(map(_hashable, part))
    return part


# ---- what XLA asks ---
def _partition(arg_shapes, arg_shardings, result_shape, result_sharding, text):
    """XLA's question: the program of a shard, and how operands and results are to lie for it."""
    config = json.loads(text)
    for kernel in config.get("kernels", ()):
        if "carried" in kernel:
            store.unpack(kernel["carried"])
    avals, results = map(private.avals_of, (arg_shapes, [result_shape]))
    wanted = private.parts_of(result_sharding, len(results))
    splits = _read_splits(config, (*avals, *results), (*arg_shardings, *wanted))
    split, shard, operands, specs = shard_of(config, avals, results, splits)
    module = private.shard_module(TARGET, shard, operands, split.sizes, config["platform"])
    ins, outs = _shardings(config, split, specs)
    return private.bytecode(module), ins, private.joined(result_shape, outs)


def _infer(arg_shapes, arg_shardings, result_shape, text):
    """XLA's question before Shardy: how results lie for operands that do."""
    config = json.loads(text)
    avals, results = map(private.avals_of, (arg_shapes, [result_shape]))
    unknown = [None] * len(results)
    splits = _read_splits(config, (*avals, *results), (*arg_shardings, *unknown))
    split, _, _, specs = shard_of(config, avals, results, splits)
    return private.joined(result_shape, _shardings(config, split, specs)[1])


def _shardings(config: Mapping[str, Any], split: Split, specs: Sequence) -> tuple[list, list]:
    """XLA's shardings of operands, of which the axes are known, and of results."""
    of = functools.partial(private.sharding_of, split.sizes)
    results = [split.spec(dims, is_result=True) for dims in _rule(config).results]
    return [*map(of, specs)], [*map(of, results)]


def _read_splits(config: Mapping, avals: Sequence, shardings: Sequence) -> tuple[dict, list]:
    """(sizes of axes, for each array the axes of its dimensions): in the first order that fits."""
    best: tuple[dict, list] | None = None
    for sizes in _orders(config["devices"]):
        specs = [
            [] if sharding is None else private.split_in(sharding, sizes, len(aval.shape))
            for sharding, aval in zip(shardings, avals, strict=True)
        ]
        known = sizes, [spec or [] for spec in specs]
        if None not in specs:
            return known
        best = best or known  # what no axes describe counts as whole
    assert best is not None
    return best


def _orders(devices: int) -> Iterator[dict[str, int]]:
    """Axes of prime sizes, in all orders."""
    primes, rest = [], devices
    for prime in range(2, devices + 1):
        while rest % prime == 0:
            primes.append(prime)
            rest //= prime
    for order in dict.fromkeys(itertools.permutations(primes)) if len(primes) < 8 else [primes]:
        yield {f"p{i}": size for i, size in enumerate(order)}


# ---- kernels ---
def _kernels(config: Mapping[str, Any], avals: Sequence[Any], target: Target) -> list[Any]:
    """The kernels that shards may need: compiled now, and named by the program.

    So a program that JAX's persistent cache has names others when kernels change, and finds them.
    One that may leave this machine carries them. Kernels may depend on the split: all and nothing
    are tried, of the whole arrays, as no kernel depends on their shapes.
    """
    needed: calls.Kernels = {}
    rule = _rule(config)
    reads = functools.partial(IN_PARTS[config["name"]], config["parameters"])
    whole = [(a.shape, private.moved_as(a.dtype)) for a in avals[: rule.read]]
    parts = [(2, *shape[:-1], shape[-1] // 2) for shape, _ in whole]
    apart = [
        (part if reads(i, part) else shape, dtype)
        for i, ((shape, dtype), part) in enumerate(zip(whole, parts, strict=True))
    ]
    tried = [((), whole), (("p0",), whole)] + [((), apart)] * (apart != whole)
    for names, types in tried:
        split = Split({"p0": target.devices}, dict.fromkeys(rule.parts, names), {})
        shard = _shard(config, split)
        operands = [jax.ShapeDtypeStruct(*operand) for operand in types]
        with calls.kernels_needed() as more:
            where = (split.sizes, target.platform, not target.carries)
            private.shard_module(TARGET, shard, operands, *where)
        needed |= more
    kernels = []
    for (binary, arch), artifact in needed.items():
        one: dict[str, Any] = {"name": f"{binary.name}.{arch}", "sha256": artifact.sha256}
        if target.carries:
            one["carried"] = store.packed(binary, arch, artifact)
        kernels.append(one)
    return sorted(kernels, key=lambda one: one["name"])


# ---- the call ---
def call(
    ctx: Any,
    name: str,
    parameters: Mapping[str, Any],
    rule: Rule,
    operands: Sequence[Any],
    target: Target,
) -> Sequence[Any]:
    """Emits a call that XLA splits. Floats of a byte go in and come out as uint8, and move so.

    XLA's collectives know not all dtypes of a byte, and make wider ones of those on some platforms.

    Args:
      ctx: JAX's, of a lowering rule.
      name: in `SHARDS`.
      parameters: of what a device computes, as JSON has them.
      rule: how arrays are split.
      operands: MLIR values.
      target: of the lowering.
    """
    config: dict[str, Any] = {
        "name": name,
        "parameters": parameters,
        "rule": rule,
        "dtypes": [[a.dtype.name for a in avals] for avals in (ctx.avals_in, ctx.avals_out)],
        "platform": target.platform,
        "devices": target.devices,
    }
    if target.platform in chip_table.DSLS:
        config["kernels"] = _kernels(config, ctx.avals_in, target)
    text = json.dumps(config, sort_keys=True)
    return private.split_call(ctx, TARGET, text, _sdy(rule, ctx), operands)


def _sdy(rule: Rule, ctx: Any) -> tuple[str, dict[str, Any]]:
    """The rule in Shardy's notation, and what belongs to it."""
    avals, sizes, whole, terms = (*ctx.avals_in, *ctx.avals_out), {}, [], []
    numbers = itertools.count()
    for aval, dims, names in zip(avals, rule.arrays, rule.named or rule.arrays, strict=True):
        term = []
        for length, factor, name in zip(aval.shape, dims, names, strict=True):
            parts = rule.parts.get(factor, 1)
            inner = f"w{next(numbers)}"
            if parts == length and parts > 1:
                term.append(name)
                continue
            whole.append(inner)
            if parts == 1:
                term.append(inner)
            else:
                term.append(f"({name} {inner})")
                sizes |= {name: parts, inner: length // parts}
        terms.append(" ".join(term))
    count = len(rule.operands)
    text = " -> ".join((", ".join(terms[:count]), ", ".join(terms[count:])))
    used = {f for term in terms for f in re.findall(r"\w+", term)}
    alone = {factor for term in terms for factor in term.split(" ")}
    sizes = {factor: n for factor, n in sizes.items() if factor not in alone}
    summed = tuple(f for f in rule.summed if f in used)
    kinds = {"reduction_factors": summed, "need_replication_factors": tuple(whole), **sizes}
    return text, kinds


private.register_partitioner(TARGET, _partition, _infer)
