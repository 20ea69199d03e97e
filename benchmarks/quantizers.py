"""Quantizers: the cost of an op, against a copy of the same bytes and against XLA.

    python -m benchmarks --form all --shapes required,8x4096x4096 --format mxfp8_e4m3
    python -m benchmarks --form all --shapes llm --peers --json out.json   # torchao's, too

A row counts the bytes of input, words, values and scales, once each. "copy_gbps" is the speed of a
copy that reads half as many bytes and writes the other half.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mx
from benchmarks import baselines, peers, shapes, timing
from benchmarks.requirements import checks as checks
from benchmarks.runner import Args, Case, Row, brief, repeats
from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, FORMATS, SCALINGS
from jax_mx.formats.layouts import SCALE_LAYOUTS
from jax_mx.formats.windows import Window
from jax_mx.launch.chips import arch_of, dsl_of
from jax_mx.launch.targets import chip_of
from jax_mx.norms.source import NormSource
from jax_mx.quantizing.calling import WithSums
from jax_mx.quantizing.facts.sources import Source, X
from jax_mx.quantizing.reference import rows_of
from jax_mx.quantizing.registry import IMPLEMENTATIONS
from jax_mx.quantizing.sources.gated import GatedSource
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.quantizing.sources.rows import RowsSource

_quantized = jax.jit(
    jax_mx.quantize, static_argnames=("format", "axis", "scaling", "scale_layout", "block")
)


def _made_of(source: Source) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How XLA makes floats, and the keywords of the op that makes them itself, of its operands."""
    if isinstance(source, RowsSource):
        return lambda a: rows_of(*a), lambda a: {"rows": a[1]}
    if isinstance(source, NormSource):
        return lambda a: jax_mx.rms_norm(*a).floats, lambda a: {}
    assert isinstance(source, GatedSource | GradientSource)
    options = {"activation": source.activation, "interleaved": source.interleaved}
    gated = jax_mx.Gated(source.activation, interleaved=source.interleaved)
    if isinstance(source, GatedSource):
        return lambda a: jax_mx.gated(a[0], **options), lambda a: {"activation": gated}
    make = functools.partial(jax_mx.gated, **options)

    def own(dy: jax.Array) -> jax_mx.Gated | WithSums:
        asked = dataclasses.replace(gated, gradient=dy)
        return WithSums(asked) if source.sums else asked

    return lambda a: jax.vjp(make, a[0])[1](a[1])[0], lambda a: {"activation": own(a[1])}


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """One call, by names, and what it is measured beside."""

    form: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    scaling: str
    scale_layout: str
    implementation: str | None
    preprocessing: str = "none"  # in shapes.PREPROCESSING
    # In shapes.SOURCES, or none; the shape is that of what `rows` picks, or an activation gives.
    source: str = ""
    window: Window = BLOCK  # elements that share a scale, of what is quantized

    @property
    def made(self) -> Source:
        """The source of the floats."""
        return shapes.SOURCES.get(self.source, X)

    @property
    def names(self) -> dict[str, str]:
        """As rows have them."""
        return {
            "op": shapes.FORMS[self.form].op,
            "form": shapes.named(self.form, self.preprocessing, self.source),
            "shape": shapes.spell(self.shape),
            "dtype": self.dtype,
            "format": self.format,
            "scaling": self.scaling,
            "scale_layout": self.scale_layout,
        }

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that the ops and their baselines have in common."""
        names = ("format", "scaling", "scale_layout")
        return {name: getattr(self, name) for name in names}

    @property
    def how(self) -> dict[str, Any]:
        """The keywords that quantizing ops have for the preprocessing."""
        modes = shapes.PREPROCESSING[self.preprocessing]
        options: dict[str, Any] = {} if self.window == BLOCK else {"window": self.window}
        signs, key = np.arange(64) % 3 == 0, jax.random.key(0)
        hadamards = [jax_mx.Hadamard(h, signs[:h]) if h else None for h, *_ in modes]
        roundings = [jax_mx.Stochastic(key) if sr else None for _, sr, *_ in modes]
        for name, values in (("hadamard", hadamards), ("rounding", roundings)):
            if any(values):
                options[name] = values[0] if len(values) == 1 else tuple(values)
        return options

    @property
    def words(self) -> int:
        """Bytes of words that the preprocessing takes."""
        axes, modes = shapes.FORMS[self.form].axes, shapes.PREPROCESSING[self.preprocessing]
        random = sum(mode.stochastic for mode in modes) * len(axes) // max(len(modes), 1)
        return 4 * math.prod(self.shape) // BLOCK * random

    def functions(self) -> tuple[Callable[..., Any], dict[str, Callable[..., Any]]]:
        """The op, jitted, and XLA's versions of it."""
        form = shapes.FORMS[self.form]
        options: dict[str, Any] = {**form.options, "implementation": self.implementation}
        versions: dict[str, Callable[..., Any]]
        if form.op == "dequantize":
            options["dtype"], versions = self.dtype, baselines.dequantize(form, self.dtype)
        else:
            options |= self.options | self.how
            versions = baselines.quantize(form, **self.options)
        op = functools.partial(getattr(jax_mx, form.op), **options)
        if self.preprocessing != "none":
            versions = {"reference": jax.jit(functools.partial(op, implementation="xla"))}
        if not self.source:
            return jax.jit(op), versions
        before, activation_of = _made_of(self.made)
        versions |= {"our kernel": op}
        floats = getattr(self.made, "floats", False)

        def after(a: Any, f: Callable[..., Any]) -> Any:
            y = before(a)
            if getattr(self.made, "sums", False):
                return f(y), y.astype(jnp.float32).sum(0)
            return (y, f(y)) if floats else f(y)

        fused: dict[str, Callable[..., Any]] = {
            f"{self.source}, then {name}": jax.jit(functools.partial(after, f=f))
            for name, f in versions.items()
        }
        options |= {"both": form.op == "quantize_both", "floats": floats}
        if isinstance(self.made, NormSource):
            norm = functools.partial(jax_mx.rms_norm, **options)
            return jax.jit(lambda a: norm(*a)[:2] if floats else norm(*a).quantized), fused
        if floats:
            assert isinstance(self.made, GatedSource)
            options |= {"activation": self.made.activation, "interleaved": self.made.interleaved}
            return jax.jit(lambda a: jax_mx.gated(*a, **options)), fused
        return jax.jit(lambda a: op(a[0], **activation_of(a))), fused

    def make(self, key: jax.Array) -> Any:
        """An argument of those."""
        form, dtype = shapes.FORMS[self.form], FLOAT_DTYPES[self.dtype]
        if isinstance(self.made, RowsSource):
            return self.tokens(key)
        if isinstance(self.made, NormSource):
            x = baselines.normal(key, shape=self.shape, dtype=dtype)
            return x, jax.numpy.ones(self.shape[-1:], dtype)
        if self.source:
            shape = (*self.shape[:-1], 2 * self.shape[-1])
            x = baselines.normal(key, shape=shape, dtype=dtype)
            dy = baselines.normal(key, shape=self.shape, dtype=dtype)
            return (x, dy) if isinstance(self.made, GradientSource) else (x,)
        x = baselines.normal(key, shape=self.shape, dtype=dtype)
        if form.op != "dequantize":
            return x
        return _quantized(x, **form.made_by, **self.options)

    def tokens(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x, and numbers of its rows: each one once, and one in 16 of none."""
        count, length = self.shape
        held = count - count // 16
        x = baselines.normal(key, shape=(held, length), dtype=FLOAT_DTYPES[self.dtype])
        rows = jax.random.permutation(key, np.arange(count, dtype=np.int32))
        return x, jnp.where(rows < held, rows, -1)

    def implementation_taken(self) -> tuple[str, str]:
        """The implementation that serves the op; for "xla" also the reason."""
        if self.implementation == "xla":
            return "xla", ""
        form = shapes.FORMS[self.form]
        supported, reason = jax_mx.is_supported(
            form.op,
            jax.devices()[0],
            dtype=self.dtype,
            ndim=len(self.shape),
            transpose=form.transpose,
            source=self.made,
            implementation=self.implementation,
            **form.made_by,
            **self.options,
            **self.how,
        )
        if not supported:
            return "xla", reason
        arch = arch_of(chip_of(jax.devices()[0]))
        return self.implementation or dsl_of(str(arch)), ""


# ---- measuring ----------------------------------------------------------------------------------
def measure(quantizer: Quantizer, args: Args) -> Row:
    """Times the op, XLA's versions of it and the copy, one after the other."""
    calls = repeats(args, 30)
    fn, versions = quantizer.functions()
    shape = jax.eval_shape(quantizer.make, jax.random.key(0))
    size = timing.nbytes((shape, jax.eval_shape(fn, shape))) + quantizer.words
    implementation, reason = quantizer.implementation_taken()

    inputs = timing.rotate(quantizer.make, timing.nbytes(shape))
    time = timing.measure(fn, inputs, calls)
    xla, xla_time = "none", None
    try:
        xla, xla_time = timing.fastest(versions, inputs, calls)
    except Exception as error:
        reason = f"no speedup, XLA's versions fail: {brief(error)}"
    del inputs  # room for the copy's

    sources = timing.rotate(functools.partial(baselines.words, size=size // 2), size // 2)
    copy, copy_time = timing.fastest(baselines.copies(), sources, calls)
    copy_gbps = 2 * timing.nbytes(sources[0]) / copy_time.us / 1e3
    row = figures(time.us, size, copy_gbps, xla_time.us if xla_time else None)
    row |= {"commit": args.commit, "implementation": implementation}
    row["device"] = jax.devices()[0].device_kind
    clocks = dict.fromkeys(t.clock for t in (time, xla_time, copy_time) if t)
    row |= {"_clock": " / ".join(clocks), "_xla": xla, "_copy": copy}
    return row | ({"_note": reason} if reason else {})


def figures(us: float, size: int, copy_gbps: float, xla_us: float | None) -> Row:
    """A row's numbers, of a time in which so many bytes were moved, a copy's and XLA's."""
    gbps = size / us / 1e3
    return {
        "us": round(us, 3),
        "gbps": round(gbps, 2),
        "copy_gbps": round(copy_gbps, 2),
        "fraction_of_copy": round(gbps / copy_gbps, 4),
        "speedup_over_xla": round(xla_us / us, 4) if xla_us else None,
    }


def further(args: Args, rows: Sequence[Row]) -> Iterator[Row]:
    """The peers' rows of what was measured."""
    good = [row for row in rows if "error" not in row]
    asked = [row | {"shape": [int(n) for n in row["shape"].split("x")]} for row in good]
    for name, peer in peers.PEERS.items() if args.peers else ():
        mine = [i for i, case in enumerate(asked) if peer.serves(case)]
        for index, answer in peers.run(name, [asked[i] for i in mine], repeats(args, 30)):
            if index is None or "error" in answer:
                form = "" if index is None else good[mine[index]]["form"]
                yield {"form": form, "implementation": name, "error": answer["error"]}
                continue
            ours = good[mine[index]]
            xla_us = ours["speedup_over_xla"] and ours["speedup_over_xla"] * ours["us"]
            row = ours | figures(answer["us"], answer["bytes"], ours["copy_gbps"], xla_us)
            row |= {"scaling": answer["scaling"], "_clock": answer["clock"]}
            yield row | {"implementation": f"{answer['library']} {name}"}


# ---- what the runner asks for --------------------------------------------------------------------
def options(add: Callable[..., Any]) -> None:
    """Names of what to quantize."""

    def several(flag: str, table: Iterable[str], default: str) -> None:
        names = tuple(table)
        add(flag, nargs="+", metavar="NAME", choices=names, default=[default], help="|".join(names))

    several("--form", (*shapes.FORMS, "all"), "axis -1")
    add("--shapes", default="required", help=f"{'|'.join(shapes.SHAPES)}|AxBxC,...")
    several("--dtype", FLOAT_DTYPES, "bfloat16")
    several("--format", FORMATS, "mxfp8_e4m3")
    several("--scaling", SCALINGS, "rceil")
    several("--scale-layout", SCALE_LAYOUTS, "row_major")
    several("--preprocessing", shapes.PREPROCESSING, "none")
    several("--source", (*shapes.SOURCES, ""), "")
    add("--implementation", choices=tuple(IMPLEMENTATIONS), help="default: the kernel, else xla")
    add("--peers", action="store_true", help="torchao's quantizers too; needs torch and torchao")
    add("--require", action="store_true", help="exit with 1 if a requirement is not met")


def about() -> None:
    """A file holds rows of several runs, each of which says where it was measured."""


def cases(args: Args) -> Iterator[Case]:
    """A case of each quantizer."""
    for call in quantizers(args):
        yield Case(call.form, "", call.names, functools.partial(measure, call))


def quantizers(args: Args) -> Iterator[Quantizer]:
    """All that was asked for, but for what a form does not have."""
    forms = shapes.FORMS if "all" in args.form else args.form
    lengths = shapes.parse("64x64" if args.smoke else args.shapes)
    catalogue = set(itertools.chain.from_iterable(shapes.SHAPES.values()))
    axes: Any = (args.preprocessing, args.source, forms, lengths, args.dtype, args.format)
    axes = map(dict.fromkeys, (*axes, args.scaling, args.scale_layout))
    for preprocessing, source, name, shape, *rest in itertools.product(*axes):
        form, modes = shapes.FORMS[name], shapes.PREPROCESSING[preprocessing]
        if source and (form.op == "dequantize" or len(shape) != 2):
            continue  # they are those of a matrix to quantize
        if modes and (form.op == "dequantize" or form.square):
            continue  # codes are preprocessed no more; a transform has one axis
        if len(modes) > len(form.axes) or (form.square and SCALE_LAYOUTS[rest[-1]].is_tiled):
            continue  # scales of squares are row-major
        if form.fits(shape) or shape not in catalogue:  # a shape typed in may fail
            names = dict(zip(("dtype", "format", "scaling", "scale_layout"), rest, strict=True))
            before = {"preprocessing": preprocessing, "source": source}
            yield Quantizer(name, shape, **names, implementation=args.implementation, **before)
