"""Sources of floats: a source that no folder knows, variants that exist, and that ship."""

import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_refused, assert_same, call_attributes_in, lowered_apart, stand_in
from helpers import random_bits as bits

import jax_mx
from jax_mx.formats import directions
from jax_mx.formats.formats import FORMATS
from jax_mx.launch import _ffi, store
from jax_mx.launch.chips import ARCHS
from jax_mx.norms.source import NormSource
from jax_mx.products import recipes
from jax_mx.quantizing import registry
from jax_mx.quantizing.activations import Of
from jax_mx.quantizing.calling import WithSums
from jax_mx.quantizing.facts.preprocessing import Preprocessing
from jax_mx.quantizing.facts.signatures import Array, Role
from jax_mx.quantizing.facts.sources import FLOAT32, Source, X
from jax_mx.quantizing.facts.variants import Variant, exists, variants
from jax_mx.quantizing.planning import Options, planned
from jax_mx.quantizing.sources.gated import GatedSource
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.quantizing.sources.rows import RowsSource
from jax_mx.quantizing.support import support_of
from jax_mx.shipping.shipped import BINARIES, SHIPPED, shipped_archs

E4M3 = FORMATS["mxfp8_e4m3"]


# ---- a toy: this class is all that there is of it ---
@dataclasses.dataclass(frozen=True, repr=False)
class ToySource(Source):
    """-x times a factor for each column; the factors' sum also comes out."""

    doubled: bool = False

    word = "toy"

    @property
    def operands(self):
        factors = Array("factors", Role.REPLICATED, dtype="float32")
        return Array("x", Role.SOURCE), factors

    @property
    def results(self):
        return (Array("total", Role.REPLICATED, dtype="float32"),)

    def result_shapes(self, operands: Any, spans: Any) -> list[Any]:
        return [((1,), FLOAT32)]

    def compute(self, x, *other):
        (factors,) = other
        wide = -x.astype(jnp.float32) * factors * (1 + self.doubled)
        return [wide.astype(x.dtype), factors.sum(keepdims=True)]


class FusedToySource(ToySource):
    """The same with a kernel along rows of bfloat16."""

    loaders: ClassVar = {"cutedsl": "toy"}

    def fused(self, variant):
        return (variant.form, variant.dtype) == (directions.LAST, "bfloat16") and not variant.modes


def toy(source: type[ToySource] = ToySource, doubled: bool = False) -> Of:
    return Of(source(doubled), (jnp.arange(96, dtype=jnp.float32),))


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("op", [jax_mx.quantize, jax_mx.quantize_both])
def test_a_toy_source_is_traced_and_computed(op, doubled):
    x = jnp.asarray(bits((64, 96), "bfloat16"))
    source = toy(doubled=doubled)
    floats, total = source.source.compute(x, *source.operands)
    want = op(floats)
    for run in (op, jax.jit(op)):
        *got, factors = run(x, activation=source)
        assert_same(got, want)
        assert float(factors[0]) == float(total[0]) == 95 * 48
    mapped = jax.vmap(lambda x: op(x, activation=source))(jnp.stack([x, x[::-1]]))
    assert_same(jax.tree.map(lambda a: a[1], mapped[:-1]), op(floats[::-1]))


def lowered(source: Of, platform: str) -> str:
    x = jnp.ones((64, 96), jnp.bfloat16)
    traced = jax.jit(lambda x: jax_mx.quantize(x, activation=source)).trace(x)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_toy_source_is_lowered_to_xla_and_a_plain_kernel(platform):
    text = lowered(toy(), platform)
    assert "stablehlo.negate" in text
    assert ": (tensor<64x3x32xbf16>) -> " in call_attributes_in(text)


def test_a_kernel_of_a_toy_source_is_asked_for_by_its_class_alone(monkeypatch):
    monkeypatch.setattr(store, "obstacle", lambda variant, arch: "")
    monkeypatch.setattr(store, "get", stand_in)
    source = toy(FusedToySource)
    with lowered_apart():
        text = lowered(source, "cuda")
        assert "stablehlo.negate" not in text
        assert ": (tensor<64x96xbf16>, tensor<96xf32>) -> " in call_attributes_in(text)
    fused = [*variants("cutedsl", "quantize", source.source)]
    assert {v.name for v in fused} >= {"quantize_last_bfloat16_mxfp8_e4m3_toy"}
    assert all(exists(v, arch) for v in fused for arch in ARCHS["cutedsl"])
    assert not [*variants("flydsl", "quantize", source.source)]
    served, why = jax_mx.is_supported("quantize", "sm_90", source=source.source)
    assert served and why == "cutedsl: quantize_last_bfloat16_mxfp8_e4m3_toy"
    served, why = jax_mx.is_supported("quantize", "sm_90", source=toy().source)
    assert served and why == "cutedsl: quantize_last_bfloat16_mxfp8_e4m3 of floats that XLA makes"


def test_codes_of_a_toy_source_have_no_derivative():
    x = jnp.ones((64, 96), jnp.bfloat16)
    run = lambda x: jax_mx.quantize(x, activation=toy())[0].dequantize().sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="quantize: codes have no derivative"):
        jax.grad(run)(x)


def test_a_source_beside_rows_is_refused():
    x, rows = jnp.ones((64, 96), jnp.bfloat16), jnp.arange(32, dtype=jnp.int32)
    assert_refused(
        lambda: jax_mx.quantize(x, rows=rows, activation=toy()),
        ValueError,
        "rows are a source of their own; drop them, or activation",
    )
    assert_refused(
        lambda: jax_mx.is_supported("quantize", "sm_90", source="rows"),
        TypeError,
        "source must be a Gated or a source, got 'rows'",
    )
    assert_refused(
        lambda: jax_mx.is_supported("quantize", "sm_90", source=RowsSource(), rows=True),
        ValueError,
        "source says what makes the floats; drop rows",
    )
    assert_refused(
        lambda: jax_mx.is_supported("quantize", "sm_90", row=True),
        TypeError,
        "is_supported has no argument row",
    )


# ---- what has no kernel of its own: XLA makes the floats, a plain kernel quantizes ---
def made_calls():
    """By name a call of x and of its implementation."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 128)), jnp.bfloat16)
    dy, rows = x[:, :64] * 2, jnp.asarray([3, -1, *range(62)], jnp.int32)
    norm = functools.partial(jax_mx.rms_norm, format=E4M3)
    calls = {
        "rows": (jax_mx.quantize, {"rows": rows}),
        "gated": (jax_mx.quantize, {"activation": jax_mx.Gated()}),
        "geglu_erf": (jax_mx.quantize, {"activation": jax_mx.Gated("geglu_erf")}),
        "up": (jax_mx.quantize, {"activation": jax_mx.Gated(up=x[::-1])}),
        "gradient": (jax_mx.quantize_both, {"activation": jax_mx.Gated(gradient=dy)}),
        "sums": (jax_mx.quantize_both, {"activation": WithSums(jax_mx.Gated(gradient=dy))}),
        "norm": (norm, {"floats": True}),
        "added": (norm, {"residual": x[::-1]}),
    }
    return {name: functools.partial(op, x, **options) for name, (op, options) in calls.items()}


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("name", made_calls())
def test_a_missing_fusion_still_takes_a_kernel(name):
    """AMD's chips have none; one call of a plain kernel, and what it gives is x's."""
    run = made_calls()[name]
    traced = jax.jit(lambda: run(implementation=None)).trace()
    text = traced.lower(lowering_platforms=("rocm",)).as_text()
    assert text.count(f"@{store.TARGET}(") == 1
    plain = {"rows": (64, 4), "norm": (64, 4), "added": (64, 4), "up": (64, 4)}
    rows, blocks = plain.get(name, (64, 2))
    view = {"gradient": "2x4x32x32", "sums": "2x4x32x32"}.get(name, f"{rows}x{blocks}x32")
    assert f"(tensor<{view}xbf16>) -> " in call_attributes_in(text)


def test_floats_that_xla_makes_have_the_same_bits_in_a_kernel():
    """Emulated: the kernel of x itself serves each."""
    pytest.importorskip("flydsl")
    from jax_mx.testing import emulate

    for name in ("rows", "gated", "norm"):
        run = made_calls()[name]
        want = jax.jit(lambda run=run: run(implementation="xla"))()
        before = _ffi.counters()["launches"]
        with emulate("gfx950"), lowered_apart():
            got = jax.block_until_ready(jax.jit(lambda run=run: run())())
        assert _ffi.counters()["launches"] == before + 1
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            assert (np.asarray(a).view(np.uint8) == np.asarray(b).view(np.uint8)).all()


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize(
    "source, chip, at_once",
    [
        (GatedSource(), "sm_90", True),  # one kernel
        (GatedSource("gpt_oss"), "sm_90", False),  # a kernel of codes, which another dequantizes
        (GatedSource("geglu"), "sm_90", True),  # no kernel has it: XLA, then the kernel of x
        (GatedSource(), "gfx950", True),
        (GatedSource("gpt_oss"), "gfx950", True),
    ],
)
def test_products_take_floats_from_one_kernel(source, chip, at_once):
    """Where a chip has no kernel of a source, floats by XLA are no reason to take codes."""
    asked = Options((E4M3,), preprocessing=(Preprocessing(dequantized=True),), source=source)
    plan = planned("quantize", jax.ShapeDtypeStruct((64, 96), jnp.bfloat16), asked)
    assert support_of(plan, chip).quantizes_at_once == at_once


# ---- what exists, and what ships ---
def test_existing_variants_have_names_of_their_own():
    sources = (X, RowsSource(), GatedSource(), GatedSource("gpt_oss", True, True),
               GradientSource(sums=True), NormSource(added=True))  # fmt: skip
    every = [v for s in sources for dsl in ARCHS for v in variants(dsl, "quantize", s)]
    assert len({(v.implementation, v.name) for v in every}) == len(every)
    assert all(registry.exists(v) for v in every)


@pytest.mark.parametrize(
    "source, form, dtype, there",
    [
        (GatedSource("gpt_oss", True), directions.LAST, "bfloat16", True),
        (GatedSource("gpt_oss", True), directions.LAST, "float16", False),
        (GatedSource("gpt_oss"), directions.LAST, "float16", True),
        (GatedSource("geglu"), directions.LAST, "bfloat16", False),
        (GatedSource(), directions.SECOND, "bfloat16", False),
        (NormSource(), directions.SECOND_TRANSPOSED, "float32", False),
        (NormSource(), directions.LAST, "float32", True),
        (NormSource(eps=1e-6), directions.LAST, "bfloat16", True),
        (NormSource(added=True), directions.LAST, "float16", False),
        (GradientSource(), directions.LAST, "bfloat16", False),
        (RowsSource(), directions.SQUARE, "bfloat16", True),
    ],
)
def test_which_variants_exist(source, form, dtype, there):
    assert exists(Variant("quantize", "cutedsl", form, dtype, (E4M3,), (), source)) == there
    assert not exists(Variant("quantize", "flydsl", form, dtype, (E4M3,), (), source))
    assert not exists(Variant("dequantize", "cutedsl", form, dtype, (E4M3,), (), source))


def test_what_ships_exists_and_is_short():
    assert all(exists(v) for v in SHIPPED)
    assert sum(len(shipped_archs(b)) for b in BINARIES) <= 1500


def layers():
    """By name a layer's loss and its arguments, of a recipe."""
    x, w = (jnp.ones(shape, jnp.bfloat16) for shape in ((128, 256), (256, 512)))
    w1, w2 = (jnp.ones(shape, jnp.bfloat16) for shape in ((4, 256, 512), (4, 256, 256)))
    experts, router = jnp.zeros((128, 2), jnp.int32), jnp.ones((128, 2), jnp.float32)
    sizes = jnp.full(4, 32, jnp.int32)

    def mlp(recipe):
        return lambda x: jax_mx.mlp(x, w, w2[0], recipe=recipe)

    def moe(recipe):
        return lambda x: jax_mx.moe(x, experts, router, w1, w2, recipe=recipe)

    def normed(recipe):
        return lambda x: jax_mx.matmul(jax_mx.rms_norm(x).floats, w, recipe=recipe)

    return {
        "matmul": lambda recipe: lambda x: jax_mx.matmul(x, w, recipe=recipe),
        "ragged_dot": lambda recipe: lambda x: jax_mx.ragged_dot(x, w1, sizes, recipe=recipe),
        "mlp": mlp,
        "moe": moe,
        "norm": normed,
        "fake": lambda recipe: jax_mx.fake_quantize,
    }, x


RECIPES = {
    **recipes.RECIPES,
    "backward": jax_mx.mxfp4_backward(jax.random.key(0)),
    "windows": jax_mx.Recipe(window=128),
    "rows": jax_mx.Recipe(window="row"),
    "tiles": jax_mx.Recipe(window=128, weight_window=(128, 128)),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*key that is a constant of the program")
@pytest.mark.parametrize(
    "layer, recipe",
    [
        (layer, recipe)
        for layer, recipe in itertools.product(layers()[0], RECIPES)
        if "rows" not in recipe or layer not in ("ragged_dot", "moe")  # which refuse such windows
    ],
)
def test_what_layers_take_ships(layer, recipe, monkeypatch):
    """Each kernel that a layer's forward and backward pass takes is on the list, for the arch."""
    taken = []

    def get(binary, arch):
        taken.append((binary, arch))
        return stand_in(binary, arch)

    monkeypatch.setattr(store, "obstacle", lambda variant, arch: "")
    monkeypatch.setattr(store, "get", get)
    calls, x = layers()
    run = calls[layer](RECIPES[recipe])
    step = jax.jit(jax.value_and_grad(lambda x: run(x).astype(jnp.float32).sum()))
    # Wider windows ship where our products read them.
    windows = any(name in recipe for name in ("windows", "rows", "tiles"))
    monkeypatch.setenv("JAX_MX_ARCHS", "sm_90a" if windows else "sm_90a,sm_100f,gfx950")
    with lowered_apart():
        for platform in ("cuda",) if windows else ("cuda", "rocm"):
            step.trace(x).lower(lowering_platforms=(platform,))
    assert taken or recipe == "bf16"
    listed = {(b.name, arch) for b in BINARIES for arch in shipped_archs(b)}
    assert {(b.name, arch) for b, arch in taken} <= listed
