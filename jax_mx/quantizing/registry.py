"""The table of implementations; each says whether it serves a plan.

An implementation is a row of `IMPLEMENTATIONS`. A platform may have several, in the order in which
they are preferred; "xla" comes last and serves everything everywhere.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax_mx.formats.formats import BLOCK
from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES
from jax_mx.launch import chips as chip_table
from jax_mx.launch import store
from jax_mx.quantizing.facts.product_kernels import (
    PRODUCT_ARCHS,
    PRODUCTS,
    Binary,
    ProductKernel,
    archs_of,
)
from jax_mx.quantizing.facts.sources import X
from jax_mx.quantizing.facts.variants import Variant, exists, layouts_of, takes_zero_scale, variants
from jax_mx.quantizing.plan import AnyPlan, Plan, ProductPlan


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why an implementation does not serve a call.

    Attributes:
      call: the name of the op, and of its form.
      why: the implementation does not serve it.
      advice: the remedy: to install something, say.
      instead: the implementation that serves it.
    """

    call: str
    why: str
    advice: str = ""
    instead: str = "'xla' serves it"

    def __str__(self) -> str:
        return "; ".join(filter(None, (f"{self.call}: {self.why}", self.advice, self.instead)))


@dataclasses.dataclass(frozen=True)
class Support:
    """The answer of one implementation for one plan.

    Attributes:
      implementation: the name.
      kernels: the kernels that serve the plan: one, or one per result; none for "xla".
      via_transpose: whether XLA transposes the kernels' operands, and their results back.
      via_floats: whether XLA makes the floats that these kernels read, of rows or by an activation.
      via_codes: whether these kernels make codes, from which others make floats.
      never_fused: whether no kernel of the implementation makes such floats, in any form.
      refusal: the reason why it does not serve the plan, and the implementation that does; else
        None.
    """

    implementation: str
    kernels: tuple[Binary, ...] = ()
    via_transpose: bool = False
    via_floats: bool = False
    via_codes: bool = False
    never_fused: bool = False
    refusal: Refusal | None = None

    def __bool__(self) -> bool:
        return self.refusal is None

    @property
    def is_direct(self) -> bool:
        """Whether a kernel serves the plan by itself."""
        return bool(self.kernels) and not (self.via_transpose or self.via_floats or self.via_codes)

    @property
    def quantizes_at_once(self) -> bool:
        """Whether one kernel gives all results: of floats that XLA makes only if it always does."""
        at_once = bool(self.kernels) and not (self.via_transpose or self.via_codes)
        return at_once and (self.never_fused or not self.via_floats)

    @property
    def reason(self) -> str:
        """The refusal in a sentence; empty where there is none."""
        return "" if self.refusal is None else str(self.refusal)

    def __str__(self) -> str:
        if self.refusal:
            return self.reason
        names = ", ".join(kernel.name for kernel in self.kernels) or "runs everywhere"
        route = " along rows" * self.via_transpose + " of floats that XLA makes" * self.via_floats
        route += ", whose codes other kernels dequantize" * self.via_codes
        return f"{self.implementation}: {names}{route}"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute ops.

    Attributes:
      name: the name for callers.
      platform: JAX's name of the platform that it runs on, or "any".
      support: says whether it serves a plan on chips, which are as drivers name them. No chips at
        all: whether it could on some.
    """

    name: str
    platform: str
    support: Callable[[Any, Sequence[str]], Support]


def candidates(
    plan: Any,
    platform: str,
    chips: Sequence[str],
    table: Mapping[str, Implementation] | None = None,
) -> list[Support]:
    """The answers of all implementations that could run a plan, the preferred one first.

    Args:
      plan: the call, a `Plan` or another type that the table is for. If it names an implementation,
        only that one answers.
      platform: JAX's name of it.
      chips: the program's chips, as drivers name them.
      table: of implementations; None for the table of the ops on views.
    """
    table = IMPLEMENTATIONS if table is None else table
    if plan.implementation is not None:
        named = table[plan.implementation]
        if named.platform in (platform, "any"):
            return [named.support(plan, chips)]
        why = f"implementation {named.name!r} runs on {named.platform}, not on {platform}"
        refusal = Refusal(plan.name, why, instead="use implementation=None or 'xla'")
        return [Support(named.name, refusal=refusal)]
    rows = [row for row in table.values() if row.platform in (platform, "any")]
    return [row.support(plan, chips) for row in rows]


def chosen(plan: AnyPlan, platform: str, chips: Sequence[str]) -> Support:
    """The first candidate that serves the plan; if none does, as one was named, that one."""
    answers = candidates(plan, platform, chips)
    return next((support for support in answers if support), answers[0])


def missing(promised: Support, call: str, chips: Sequence[str], instead: Support) -> Refusal:
    """The kernel that the tables promise and this installation lacks; `instead` serves."""
    for kernel in promised.kernels:
        for arch in filter(None, map(chip_table.arch_of, chips)):
            if advice := store.obstacle(kernel, arch):
                serves = f"what serves it is {instead}" if instead.kernels else "'xla' serves it"
                return Refusal(call, store.lacking(kernel, arch), advice, serves)
    raise AssertionError(f"{call}: {promised} is there, and {instead} serves")


def last_axis_plans(plan: Plan) -> list[Plan]:
    """For each result of a plan, the plan of quantizing it along a last axis, by itself."""
    alone: dict[str, Any] = {
        "op": "quantize",
        "axis": -1,
        "transpose": False,
        "scale_layout": ROW_MAJOR,
    }
    alone |= {"value_layouts": (ROW_MAJOR_VALUES,)}
    return [
        dataclasses.replace(plan, formats=(format,), preprocessing=(steps,), **alone)
        for format, steps in zip(plan.formats, plan.preprocessing, strict=True)
    ]


def is_fused(plan: AnyPlan) -> bool:
    """Whether a kernel of some DSL serves a plan by itself, whatever makes its floats."""
    if isinstance(plan, ProductPlan):
        return any(_product_for(plan, dsl)[0] is not None for dsl in chip_table.ARCHS)
    return any(_variant_for(plan, dsl)[0] is not None for dsl in chip_table.ARCHS)


# ---- kernels ---
_asks_store: contextvars.ContextVar[bool] = contextvars.ContextVar("asks_store", default=True)


@contextlib.contextmanager
def by_tables() -> Iterator[None]:
    """Within it all kernels count as installed: facts alone decide, alike in all processes."""
    token = _asks_store.set(False)
    try:
        yield
    finally:
        _asks_store.reset(token)


def _kernels(dsl: str) -> Callable[[AnyPlan, Sequence[str]], Support]:
    """The support of a DSL's kernels."""

    def support(plan: AnyPlan, chips: Sequence[str]) -> Support:
        answer = of_floats(plan, chips)
        if answer or isinstance(plan, ProductPlan):
            return answer
        if plan.gives_floats:
            codes = support(plan.of_codes, chips)
            if not codes.via_floats:  # else a kernel may still make codes and floats at once
                return dataclasses.replace(codes, via_codes=bool(codes))
        if not plan.source:
            return answer
        plain = support(dataclasses.replace(plan, source=X), chips)
        never = not plan.source.is_fused_by(dsl)
        return dataclasses.replace(plain, via_floats=bool(plain), never_fused=never)

    def of_floats(plan: AnyPlan, chips: Sequence[str]) -> Support:
        direct = _one_kernel(dsl, plan, chips)
        if isinstance(plan, ProductPlan) or plan.gives_floats:
            return direct
        # Few plans with preprocessing have kernels of their own; the others go along rows. Not
        # transforms that span two blocks: rows do not tell which blocks are neighbours.
        preprocessed = plan.scaling and any(str(steps) for steps in plan.preprocessing)
        preprocessed = preprocessed and not plan.source
        spans_two = any(steps.group > BLOCK for steps in plan.preprocessing)
        if direct or plan.is_square or not preprocessed or spans_two:
            return direct
        answers = [_one_kernel(dsl, alone, chips) for alone in last_axis_plans(plan)]
        for refusal in (support.refusal for support in answers if support.refusal):
            return Support(dsl, refusal=dataclasses.replace(refusal, call=plan.name))
        kernels = tuple(kernel for support in answers for kernel in support.kernels)
        return Support(dsl, kernels, via_transpose=True)

    return support


def _one_kernel(dsl: str, plan: AnyPlan, chips: Sequence[str]) -> Support:
    """Whether one kernel serves the plan, and this installation has it or can compile it."""
    known = chip_table.chips_of(dsl)
    if isinstance(plan, ProductPlan):
        archs = PRODUCT_ARCHS.get(dsl, ())
        known = [chip for arch in archs for chip in chip_table.ARCHS[dsl][arch]]
        if not known:
            return _refused(dsl, plan.op, f"{dsl} has no kernel")
    for chip in chips:
        if chip not in known:
            why = f"no {dsl} kernel for {chip}, only for {', '.join(known)}"
            return _refused(dsl, plan.name, why)
    if isinstance(plan, ProductPlan):
        variant, reason = _product_for(plan, dsl)
    else:
        variant, reason = _variant_for(plan, dsl)
    if variant is None:
        return _refused(dsl, plan.name, f"{dsl} has no kernel{reason}")
    for chip in chips:
        arch = chip_table.arch_of(chip)
        assert arch is not None  # `known` has it
        if lacks := _lacks(plan, variant, arch):
            why = f"{dsl} has no kernel {variant.name} for {chip}{lacks}"
            return _refused(dsl, plan.name, why)
        if _asks_store.get() and (advice := store.obstacle(variant, arch)):
            return _refused(dsl, plan.name, store.lacking(variant, arch), advice)
    return Support(dsl, (variant,))


def _lacks(plan: AnyPlan, variant: Binary, arch: str) -> str:
    """The end of a sentence on why an arch has no kernel; empty where it has one."""
    if arch not in archs_of(variant):
        return ": its registers do not hold a tile"
    if isinstance(variant, Variant) and plan.launch not in layouts_of(variant, arch):
        return f" and scale_layout {plan.launch}"
    return ""


def _refused(dsl: str, call: str, why: str, advice: str = "") -> Support:
    return Support(dsl, refusal=Refusal(call, why, advice))


def _product_for(plan: ProductPlan, dsl: str) -> tuple[ProductKernel | None, str]:
    """The DSL's product that a plan asks for; or None, and for what there is none."""
    wanted = plan.product(dsl)
    if wanted in PRODUCTS:
        return wanted, ""
    names = " and ".join(format.name for format in plan.formats) or plan.floats
    window = f" in windows of {plan.window}" * (plan.window != BLOCK)
    others = sorted(p.rows for p in PRODUCTS if dataclasses.replace(p, rows=plan.rows) == wanted)
    have = f" in tiles of {plan.rows} rows, only of {', '.join(map(str, others))}"
    return None, f" for {names}{window}{have if others else ''}"


def _variant_for(plan: Plan, dsl: str) -> tuple[Variant | None, str]:
    """The DSL's variant that serves a plan; or None, and for what there is none."""
    op = plan.op.removesuffix("_both")
    steps = [str(p) if plan.scaling else "" for p in plan.preprocessing]  # dequantize: none
    asked = steps[0]
    if len({*steps}) > 1:
        asked = f"the pair ({', '.join(step or 'none' for step in steps)})"
    modes = tuple(p.mode for p in plan.preprocessing) if asked else ()
    fields = (plan.form, plan.dtype.name, plan.formats, modes, plan.source.kernel)
    variant, layout = Variant(op, dsl, *fields), plan.scale_layout.name
    zero_scales = [{0, 127} if takes_zero_scale(format) else {0} for format in plan.formats]
    if not exists(variant) or any(plan.zero_scale not in have for have in zero_scales):
        return None, _lack(plan, variant, zero_scales, asked)
    if layout not in layouts_of(variant):
        names = " and ".join(dict.fromkeys(f.name for f in plan.formats))
        have = ", ".join(sorted(layouts_of(variant)))
        return None, f" for {names} and scale_layout {layout}, only for {have}"
    return variant, ""


def _lack(plan: Plan, variant: Variant, zero_scales: list[set[int]], asked: str) -> str:
    """The words for the part of a plan without kernels, and for the parts with kernels.

    Args:
      plan: the call.
      variant: that it asks for.
      zero_scales: the scales of zero blocks that kernels of each format have.
      asked: its preprocessing, in words.
    """
    of_mode = [*variants(variant.implementation, variant.op, variant.source, variant.modes)]
    if not of_mode:
        return f" for {asked}" if asked else ""
    of_form = [v for v in of_mode if v.form == plan.form]
    checks = [
        ("form", str(plan.form), {str(v.form) for v in of_mode}),
        *(("format", f.name, {g.name for v in of_form for g in v.formats}) for f in plan.formats),
        *(("zero_scale", str(plan.zero_scale), {*map(str, have)}) for have in zero_scales),
        ("dtype", plan.dtype.name, {v.dtype for v in of_form}),
    ]
    for name, value, have in checks:
        if value not in have:
            suffix = f" with {asked}" if asked else ""
            return f" for {name} {value}{suffix}, only for {', '.join(sorted(have))}"
    names = " and ".join(dict.fromkeys(f.name for f in plan.formats))
    dtypes = sorted({v.dtype for v in of_form if v.formats == plan.formats})
    if not dtypes:
        return f" for {names} in one call"
    return f" for {names} and dtype {plan.dtype.name}, only for {', '.join(dtypes)}"


def _reference(plan: AnyPlan, chips: Sequence[str]) -> Support:
    """Serves every plan."""
    del plan, chips
    return Support("xla")


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    **{
        dsl: Implementation(dsl, chip_table.PLATFORMS[dsl], _kernels(dsl))
        for dsl in chip_table.ARCHS
    },
    "xla": Implementation("xla", "any", _reference),
}
