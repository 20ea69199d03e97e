"""`autotune` measures the calls of a function, `explain` says what serves them."""

import dataclasses
import json
import numbers
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from jax_mx.collectives.barrier import notes_in
from jax_mx.formats.checks import shown, whole
from jax_mx.launch import private, targets
from jax_mx.products import choices, measuring
from jax_mx.products.choices import Choice, Cost, Key, Measured, key_of
from jax_mx.products.contraction import Contraction
from jax_mx.products.decide import candidates as candidates_of
from jax_mx.products.decide import decided
from jax_mx.products.implementations import IMPLEMENTATIONS
from jax_mx.products.multiply import contractions_in, equations
from jax_mx.products.recipes import Chosen
from jax_mx.products.splitting import as_traced
from jax_mx.progress import progress as progress_of

GLOBAL_SHAPES = (
    "Some calls stand on a mesh with automatic axes: a trace knows their global shapes alone, so "
    "these were looked up, and measured on one device; explicit axes or shard_map have a shard's."
)
WHOLE_GROUPS = (
    "Automatic axes split columns of a product over groups and what it contracts. Each device has "
    "all rows and groups; jax_mx.moe splits these, and so does jax.shard_map."
)


# ---- the calls of a function ---
@dataclasses.dataclass
class _Found:
    """A call in a trace, and how often it is there."""

    call: Contraction
    count: int = 1


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where calls run.

    Attributes:
      device: that measures; None where a chip is only named.
      platform: JAX's name of it.
      chips: that a program is lowered for.
    """

    device: jax.Device | None
    platform: str
    chips: list[str]


def place_of(args: Any, device: Any = None) -> _Place:
    """Where a function of these arguments runs: on their device, else on the default one."""
    if isinstance(device, str):
        return _Place(None, targets.platform_of(device), [device])
    if device is None:
        arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
        local = [
            d for x in arrays for d in x.sharding.device_set
            if x.committed and d.process_index == jax.process_index()
        ]  # fmt: skip
        device = (*sorted(local, key=lambda d: d.id), targets.default_device())[0]
    if not isinstance(device, jax.Device):
        raise TypeError(f"explain: device must be a jax.Device or a chip, got {shown(device)}")
    chips = targets.chips_beside(device)
    return _Place(device, targets.platform_of(chips[0]), chips)


def calls_in(op: str, f: Any, args: Any) -> tuple[list[_Found], list[str]]:
    """The calls in the trace of a function, the same ones together, and notes on them.

    Raises:
      TypeError: f is not a function.
    """
    if not callable(f):
        raise TypeError(f"{op}: f must be a function, got {shown(f)}")
    calls: dict[Any, _Found] = {}
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    notes = notes_in(equations(jaxpr))
    for traced in contractions_in(jaxpr):
        call = as_traced(traced)
        key = key_of(call, ""), call.implementation, call.numbers.chosen
        known = calls.setdefault(key, _Found(call, 0))
        known.count += 1
        leaves = jax.tree.leaves((call.lhs, call.rhs, call.sizes))
        if any(map(_is_automatic, leaves)):
            notes += [GLOBAL_SHAPES, *[WHOLE_GROUPS] * bool(call.numbers.groups)]
        why = call.unsplit
        notes += [f"Our kernels are left out of a product that {why}."] if why else []
    return [*calls.values()], [*dict.fromkeys(notes)]


def _is_automatic(aval: Any) -> bool:
    """Whether an array stands on a mesh whose axes may split it and do not say so."""
    mesh = aval.sharding.mesh
    axes = () if mesh.empty else zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(axis_type == AxisType.Auto and mesh.shape[name] > 1 for name, axis_type in axes)


# ---- measuring ---
def autotune(
    f: Callable[..., Any],
    *args: Any,
    seconds: float = 60.0,
    candidates: int = 8,
    progress: bool = True,
) -> Choice:
    """Measures which implementation of each product in f is the fastest on this device.

    The trace of f has the products, in its loops, branches and gradients too (pass `jax.grad(loss)`
    for these). Their shapes are a shard's under shard_map and on meshes with explicit axes, and
    global on meshes with automatic axes. Each candidate is compiled by itself, compared with the
    implementation "xla" and timed on random operands. One program has many launches, with a cold L2
    cache. A candidate that does not serve the product, fails, or differs by more than products may
    is left out. Our kernels' tilings with about as many rows as the product are candidates, too. In
    a program of several processes all of them call this together; process 0 measures, and all get
    its choice.

    Args:
      f: the function.
      *args: its arguments, arrays or jax.ShapeDtypeStruct; their values do not matter.
      seconds: the time after which no further candidate begins. Large products come first; the rule
        decides for products that were not measured.
      candidates: the most candidates of a product; the rule's choice is among them.
      progress: whether to say on stderr what is being measured.

    Returns:
      The choice: `print` shows a table, `save` writes it, `with` uses it.

    Raises:
      TypeError, ValueError: an argument is of the wrong type, or out of range.
      RuntimeError: the call is within a trace, where nothing can be measured; or process 0 failed.
    """
    op = "autotune"
    if private.is_tracing():
        raise RuntimeError(
            f"{op}: this is a trace, in which nothing can be measured; call it outside of jit, "
            "grad, vmap and the like, and use what it returns around them"
        )
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:
        raise ValueError(f"{op}: seconds must be a number above 0, got {shown(seconds)}")
    try:
        limit = whole(candidates)
    except TypeError as error:
        raise TypeError(f"{op}: candidates must be an int, got {shown(candidates)}") from error
    if limit < 1:
        raise ValueError(f"{op}: candidates must be 1 or more, got {limit}")
    calls, notes = calls_in(op, f, args)
    target = place_of(args)

    def measure() -> str:
        entries = entries_of(calls, target, time.monotonic() + float(seconds), limit, progress)
        return choices.to_text(Choice.of(entries, notes))

    return choices.from_text(from_process_0(measure))


def entries_of(
    calls: Sequence[_Found],
    target: _Place,
    end: float,
    limit: int,
    progress: bool,
    without: Sequence[str] = (),
) -> list[Measured]:
    """Measurements of calls, the largest first, as far as time goes.

    Args:
      calls: the calls; a call that names an implementation has nothing to choose.
      target: where they run.
      end: of the time, on the monotonic clock.
      limit: of candidates.
      progress: whether to say what is measured.
      without: candidates that are left out and not listed.
    """
    free = [c for c in calls if c.call.implementation is None and c.call.work]
    free.sort(key=lambda counted: -counted.count * counted.call.work)
    entries = []
    nothing = Mesh(np.empty((), object), ())  # whatever mesh is set, one device measures
    with progress_of("autotune", len(free), progress) as say, jax.set_mesh(nothing):
        with jax.default_device(target.device):
            for i, counted in enumerate(free):
                key = key_of(counted.call, targets.chip_of(target.device))
                say(i, str(key))
                entries.append(_entry(counted, key, target, end, limit, without))
    return entries


def _entry(
    counted: _Found, key: Key, target: _Place, end: float, limit: int, without: Sequence[str]
) -> Measured:
    call = counted.call.in_a_shard
    rule = decided(call, target.platform, target.chips).name
    asked = [
        s
        for s in candidates_of(call, target.platform, target.chips)
        if s.implementation == rule
        or (s.implementation not in without and IMPLEMENTATIONS[s.implementation].worth(call))
    ]
    costs: dict[str, Cost] = {s.implementation: f"left out: {s}" for s in asked if not s}
    names = sorted((s.implementation for s in asked if s), key=lambda name: name != rule)
    for name in names[limit:]:
        costs[name] = f"not measured: {limit} candidates were asked for"
    chosen = None
    if time.monotonic() >= end:
        costs |= dict.fromkeys(names[:limit], measuring.OVER)
    else:
        try:
            is_over = lambda: time.monotonic() >= end  # noqa: E731
            chosen, measured = measuring.measured(call, names[:limit], is_over)
            costs |= measured
        except Exception as error:  # the operands themselves do not fit, say
            costs |= dict.fromkeys(names[:limit], f"left out: it {measuring.failed(error)}")
    order = [s.implementation for s in asked]
    on = f"{target.device.device_kind}, jax {jax.__version__}" if target.device else ""
    return Measured(key, chosen, tuple((name, costs[name]) for name in order), on)


def from_process_0(make: Callable[[], str]) -> str:
    """The result of `make` in process 0, for all processes, which call this together.

    Raises:
      RuntimeError: it raised in process 0, where its own error is raised.
    """
    if jax.process_count() == 1:
        return make()
    text, failure = "", None
    if jax.process_index() == 0:
        try:
            text = make()
        except BaseException as error:  # the others wait
            failure = error
    why = "" if failure is None else str(failure) or type(failure).__name__
    sent = json.dumps([text, why]).encode()
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(sent))))
    data = np.zeros(length, np.uint8)
    if jax.process_index() == 0:
        data[:] = np.frombuffer(sent, np.uint8)
    text, why = json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(data))))
    if failure is not None:
        raise failure
    if why:
        raise RuntimeError(f"autotune: process 0 could not measure: {why}")
    return text


# ---- saying what serves what ---
@dataclasses.dataclass(frozen=True)
class Explained:
    """One call of a function.

    Attributes:
      key: the call in words.
      count: the number of its occurrences in the trace.
      chosen: the implementation.
      by: the origin of the choice: "argument", "context", "JAX_MX_TUNING (<file>)", "table for
        <chip>", "rule".
      costs: microseconds of each candidate, or why it was left out. They come from the first of the
        context, the file and the table that has the call.
      recipe: the name of the recipe that "auto" became; "" where the call passes another.
    """

    key: Key
    count: int
    chosen: str
    by: str
    costs: tuple[tuple[str, Cost], ...] = ()
    recipe: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The implementations that serve the calls of a function; `print` shows a table.

    Attributes:
      calls: in the order of the trace, equal ones together. An entry has `key`, `count`, `costs`,
        the implementation `chosen`, `by` which rule, and the `recipe` that "auto" became.
      notes: further sentences for the reader.
    """

    calls: tuple[Explained, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Explanation({len(self.calls)} calls)"

    def __str__(self) -> str:
        rows = [(c.key, str(c.count), c.chosen, c.by, c.recipe, c.costs) for c in self.calls]
        return "\n".join([*choices.table(("times", "chosen", "by", "auto is"), rows), *self.notes])


def explain(
    f: Callable[..., Any], *args: Any, device: jax.Device | str | None = None
) -> Explanation:
    """Says which implementation serves each product in f, why, and what candidates cost.

    Nothing is measured and nothing runs. Costs are known for products that the context's `Choice`,
    the file of JAX_MX_TUNING or the package's table has; others have none.

    Args:
      f: a function; `jax.grad(loss)` has the gradients' products too.
      *args: its arguments, arrays or jax.ShapeDtypeStruct.
      device: the device of f, or a chip's name ("sm_90"); None: the arguments' device, or the
        default one.

    Returns:
      An `Explanation`, with a row in `calls` for each distinct product; `print` shows a table.

    Raises:
      TypeError, ValueError: f is not a function, device is neither a device nor a chip's name, or
        JAX_MX_TUNING's file cannot be read.
      NotImplementedError: an implementation that f names does not serve its product.
    """
    target = place_of(args, device)
    with targets.traced_for(None if device is None else tuple(target.chips)):
        calls, notes = calls_in("explain", f, args)
    rows = []
    for counted in calls:
        decision = decided(counted.call, target.platform, target.chips)
        key = key_of(counted.call, target.chips[0])
        entries = [choice.by_key.get(key) for _, choice in choices.known(target.chips[0])]
        entry = next(filter(None, entries), Measured(key, None))
        became = counted.call.numbers.chosen
        name = "" if became is None else Chosen(*became).name
        rows.append(Explained(key, counted.count, decision.name, decision.by, entry.costs, name))
        notes += decision.passed_over
    return Explanation(tuple(rows), tuple(dict.fromkeys(notes)))
