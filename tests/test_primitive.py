"""How a call reaches XLA: lowering, sharding, export, and the private names of JAX it rests on."""

import dataclasses
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    EVERY,
    assert_bits_equal,
    fitting,
    kernels_for,
    lowered,
    lowered_apart,
    mesh_of,
    normal,
    op_of,
    plan_for,
    preprocessing,
    quantizings,
    random_bits,
)
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx.formats import formats
from jax_mx.formats.directions import LAST, SECOND
from jax_mx.formats.views import minor_to_major
from jax_mx.formats.windows import ROW
from jax_mx.launch import private, store, toolchains
from jax_mx.launch.chips import PLATFORMS
from jax_mx.quantizing import primitive, quantizers, registry
from jax_mx.quantizing.facts import variants
from jax_mx.quantizing.facts.variants import Variant
from jax_mx.quantizing.preprocessing import preprocessing_of
from jax_mx.shipping.shipped import SHIPPED

P = PartitionSpec


RULES = {  # by the number of operands, of dimensions of a view, and of quantized arrays
    ("quantize", 4, 1): "([i, j, k, l])->([i, j, k, m], [i, j, k, n])",
    ("quantize", 5, 1): "([i, j, k, l, m])->([i, j, k, n, o], [i, j, k, p, q])",
    ("quantize", 5, 2): "([i, j, k, l, m])->"
    "([i, j, k, n, o], [i, j, k, p, q], [i, j, k, r, s], [i, j, k, t, u])",
    ("dequantize", 4, 1): "([i, j, k, l], [i, j, k, m])->([i, j, k, n])",
    ("dequantize", 5, 1): "([i, j, k, l, m], [i, j, k, n, o])->([i, j, k, p, q])",
    ("quantize", 6, 1): "([i, j, k, l, m, n])->([i, j, k, o, p, q], [i, j, k, r, s, t])",
    ("quantize", 7, 2): "([i, j, k, l, m, n, o])->([i, j, k, p, q, r, s], [i, j, k, t, u, v], "
    "[i, j, k, w, x, y, z], [i, j, k, z_1, z_2, z_3])",
    ("dequantize", 6, 1): "([i, j, k, l, m, n], [i, j, k, o, p, q])->([i, j, k, r, s, t])",
}
# For floats (8, 256, 384): the view, and how floats, values and scales lie in it, minor to major.
VIEWS = {
    "last": ((8, 256, 12, 32), (3, 2, 1, 0), [(3, 2, 1, 0)] * 2),
    "last_transposed": ((8, 256, 12, 32), (3, 2, 1, 0), [(1, 3, 2, 0)] * 2),
    "second": ((8, 8, 384, 32), (2, 3, 1, 0), [(2, 3, 1, 0)] * 2),
    "second_transposed": ((8, 8, 384, 32), (2, 3, 1, 0), [(3, 1, 2, 0)] * 2),
    "both": ((8, 8, 12, 32, 32), (4, 2, 3, 1, 0), [(4, 2, 3, 1, 0)] * 4),
    "both_transposed": (
        (8, 8, 12, 32, 32),
        (4, 2, 3, 1, 0),
        [*[(4, 2, 3, 1, 0)] * 2, *[(3, 1, 4, 2, 0)] * 2],
    ),
    "square": ((8, 8, 12, 32, 32), (4, 2, 3, 1, 0), [(4, 2, 3, 1, 0)] * 2),
    "square_transposed": ((8, 8, 12, 32, 32), (4, 2, 3, 1, 0), [(3, 1, 4, 2, 0)] * 2),
}
# With scales in tiles of 128 x 4: 2 x 3 units, which are dimensions 1 and 2.
BY_ROWS, BY_COLUMNS = (5, 4, 2, 3, 1, 0), (5, 3, 1, 4, 2, 0)  # of tiles and of floats alike
TILED_VIEWS = {
    "last": ((8, 2, 3, 128, 4, 32), BY_ROWS, [BY_ROWS, BY_ROWS]),
    "last_transposed": ((8, 2, 3, 128, 4, 32), BY_ROWS, [(3, 1, 5, 4, 2, 0), BY_ROWS]),
    "second": ((8, 2, 3, 4, 128, 32), (4, 2, 5, 3, 1, 0), [(4, 2, 5, 3, 1, 0), BY_COLUMNS]),
    "second_transposed": ((8, 2, 3, 4, 128, 32), (4, 2, 5, 3, 1, 0), [BY_COLUMNS, BY_COLUMNS]),
    "both": ((8, 2, 3, 4, 4, 32, 32), (6, 4, 2, 5, 3, 1, 0), [(6, 4, 2, 5, 3, 1, 0), BY_ROWS, (6,
        4, 2, 5, 3, 1, 0), BY_COLUMNS]),
    "both_transposed": ((8, 2, 3, 4, 4, 32, 32), (6, 4, 2, 5, 3, 1, 0), [(6, 4, 2, 5, 3, 1, 0),
        BY_ROWS, (5, 3, 1, 6, 4, 2, 0), BY_COLUMNS]),
}  # fmt: skip
# Not called variant: what conftest.py records as executed goes by that name.
every_kind = pytest.mark.parametrize("variant", EVERY, ids=lambda v: v.name)
each_layout = pytest.mark.parametrize("layout", ["row_major", "blocked_128x4"])


def lies(variant, layout: str) -> tuple[tuple[int, ...], dict[str, list[tuple[int, ...]]]]:
    """The floats' view, and how operands and results lie."""
    table = VIEWS if layout == "row_major" else TILED_VIEWS
    view, floats, quantized = table[str(variant.form)]
    if variant.op == "quantize":
        return view, {"operand": [floats], "result": quantized}
    return view, {"operand": quantized, "result": [floats]}


def serves(variant, layout) -> bool:
    """Whether calls with scales in the layout take the variant.

    Along rows in windows of them a kernel that takes amaxes serves tiles, and one that finds them
    rows.
    """
    if variant.window == ROW and variant.form == LAST and variant.implementation == "cutedsl":
        return variant.finds_amaxes == (layout == "row_major")
    return layout == "row_major" or not variant.form.is_square


@pytest.mark.sampled(250, 30)  # of both DSLs, both ops
@pytest.mark.parametrize(
    "variant", [v for v in SHIPPED if not v.source], ids=lambda v: f"{v.implementation}-{v.name}"
)
def test_the_call_names_the_kernel_and_carries_it_where_it_may_leave(variant):
    for scaling, layout in (("rceil", "row_major"), ("even", "blocked_128x4")):
        if not serves(variant, layout):
            continue
        operand, call = op_of(variant, scaling=scaling, scale_layout=layout)
        x = jax.ShapeDtypeStruct(fitting(variant, (8, 64, 96)), variant.dtype)
        text = lowered(jax.eval_shape(operand, x), call, PLATFORMS[variant.implementation])
        archs = {"cutedsl": ("sm_90a",), "flydsl": ("gfx942", "gfx950")}[variant.implementation]
        for arch in archs:  # those that JAX_MX_ARCHS names for tests
            facts = store.get(variant, arch).facts
            assert facts["sha256"] in text
            assert all(entry["symbol"] in text for entry in facts["launches"][layout]["entries"])
        # Amaxes down columns have a kernel of their own on NVIDIA, of x as it lies.
        amaxes = variant.window == ROW and variant.form != LAST
        amaxes &= variant.implementation == "cutedsl" and layout == "row_major"
        assert text.count('image = "\\7FELF') == len(archs) * (1 + amaxes)
        if variant.op == "quantize":  # dequantize has no scalars that are known here
            numbers = []
            hadamards = preprocessing(variant).get("hadamard")
            if not isinstance(hadamards, tuple):
                hadamards = (hadamards,) * len(variant.formats)
            for i, format in enumerate(variant.formats):
                numbers += formats.SCALINGS[scaling].rounding(format)
                numbers += [0] * variants.takes_zero_scale(format)
                numbers += [0] * (variant.modes != () and variant.modes[i].stochastic)  # prescale
                if variant.modes and variant.modes[i].hadamard:
                    hadamard_steps = preprocessing_of("quantize", None, hadamards[i])
                    flips = np.array(hadamard_steps.flips, np.uint32)
                    numbers += flips.view(np.int32)[: variant.modes[i].blocks].tolist()
                numbers += [0] * (variant.implementation == "flydsl")  # values in rows
            scalars = "".join(f", 4, -1, {number}, 0" for number in numbers)
            assert text.count(f"{scalars}]> : tensor") == len(archs)


@every_kind
@each_layout
@pytest.mark.usefixtures("without_code")
def test_a_call_is_one_custom_call_on_views(variant, layout):
    if not serves(variant, layout):
        return
    operand, call = op_of(variant, scale_layout=layout)
    text = lowered(jax.eval_shape(operand, jax.ShapeDtypeStruct((8, 256, 384), "bfloat16")), call)
    assert text.count("stablehlo.custom_call") == text.count(f"@{store.TARGET}(") == 1
    assert 'num_batch_dims = "3"' in text
    view, orders = lies(variant, layout)
    for side in ("operand", "result"):
        dense = (f"dense<{[*order]}> : tensor<{len(order)}xindex>" for order in orders[side])
        assert f"{side}_layouts = [{', '.join(dense)}]" in text
    assert f"tensor<{'x'.join(map(str, view))}xbf16>" in text
    rule = RULES[variant.op, len(view), len(variant.formats)]
    assert f"#sdy.op_sharding_rule<{rule} {{i={view[0]}, j={view[1]}, k={view[2]}, " in text
    merge = re.search(r"merge = (?:dense<\[|array<i64: )([0-9, ]+)", text)
    if layout == "row_major":
        assert not merge
    else:
        assert merge[1] == ", ".join(map(str, [0, 1, 0, 1, 2, 3][: len(view) - 1]))


@pytest.mark.usefixtures("without_code")
def test_axes_behind_the_blocks_are_dimensions_of_the_call():
    """Rules see these axes as one dimension, but the partitioner does not."""
    x = jax.ShapeDtypeStruct((2, 64, 3, 5, 8), "bfloat16")
    for options in ({}, {"transpose": True}):
        text = lowered(x, axis=1, **options)
        assert 'num_batch_dims = "5"' in text and "merge = dense<[0, 1, 1, 1, 2]>" in text
        assert "tensor<2x2x3x5x8x32xbf16>" in text
        assert "operand_layouts = [dense<[4, 3, 2, 5, 1, 0]> : tensor<6xindex>]" in text
    assert "result_layouts = [dense<[5, 1, 4, 3, 2, 0]> : tensor<6xindex>, " in text


@pytest.mark.sampled(10)
@every_kind
@each_layout
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4_e2m1"])
def test_views_are_arrays_as_they_lie(variant, layout, format, monkeypatch):
    """Read in the order of its layout, a view is the array: XLA can make a bitcast of it."""
    if not serves(variant, layout):
        return
    row_formats = (formats.FORMATS[format],) * len(variant.formats)
    operand, call = op_of(dataclasses.replace(variant, formats=row_formats), scale_layout=layout)
    operand = operand(jnp.asarray(random_bits((8, 256, 384), variant.dtype)))
    name, seen = f"{variant.op}_p", []
    real = getattr(quantizers, name)

    class Spy:
        def bind(self, *views, plan):
            assert plan.form == variant.form
            outs = real.bind(*views, plan=plan)
            seen.extend([*views, *outs])
            return outs

    monkeypatch.setattr(quantizers, name, Spy())
    with jax.disable_jit():  # so that views are arrays
        arrays = [*jax.tree.leaves(operand), *jax.tree.leaves(call(operand))]
    view, orders = lies(variant, layout)
    assert view in [v.shape for v in seen]
    for a, v, order in zip(arrays, seen, [*orders["operand"], *orders["result"]], strict=True):
        assert_bits_equal(v.transpose(order[::-1]).reshape(-1), a.reshape(-1))


IN_TILES = [variant for variant in EVERY if variant.op == "quantize" and variant.form != SECOND]


def with_tiles(variant, **options):
    """`op_of` with all values in tiles whose blocks end a row."""
    both, tiles = variant.form.is_both, "shuffled_16x16"
    if both:
        pair = (tiles, tiles if variant.form.transposed else "row_major")
        return op_of(variant, value_layouts=pair, **options)
    return op_of(variant, value_layout=tiles, **options)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("variant", IN_TILES, ids=lambda v: v.name)
@pytest.mark.parametrize("layout", ["row_major", "shuffled_32x8"])
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4_e2m1"])
def test_tiles_are_arrays_as_they_lie(variant, layout, format, monkeypatch):
    """The arrays lie as the kernel's results do: with values in tiles and in rows."""
    if not serves(variant, layout):
        return
    same_format = (formats.FORMATS[format],) * len(variant.formats)
    of_format = dataclasses.replace(variant, formats=same_format)
    _, call = with_tiles(of_format, scale_layout=layout)
    real, seen = quantizers.quantize_p, []

    class Spy:
        def bind(self, *views, plan):
            outs = real.bind(*views, plan=plan)
            view = plan.view
            pairs = zip(view.results, plan.value_layouts, strict=True)
            orders = [r.order_in(one) for r, v in pairs for one in (v, plan.scale_layout)]
            seen.extend(zip([*views, *outs], [view.operand, *orders], strict=True))
            return outs

    monkeypatch.setattr(quantizers, "quantize_p", Spy())
    x = jnp.asarray(random_bits((2, 192, 320), variant.dtype))
    with jax.disable_jit():
        arrays = [x, *jax.tree.leaves(call(x))]
    for a, (v, order) in zip(arrays, seen, strict=True):
        lies = v.transpose(minor_to_major(v.ndim, order)[::-1])
        assert_bits_equal(lies.reshape(-1), a.reshape(-1))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("layout", ["row_major", "shuffled_32x8"])
@pytest.mark.usefixtures("without_code")
def test_who_puts_values_into_tiles(platform, layout):
    """AMD's kernels, and NVIDIA's beside AMD's scales; after others of NVIDIA's, XLA."""
    x = jax.ShapeDtypeStruct((48, 128), "bfloat16")
    options = {"value_layout": "shuffled_16x16", "scale_layout": layout}
    text = lowered(x, platform=platform, format="mxfp4_e2m1", **options)
    assert text.count(f"stablehlo.custom_call @{store.TARGET}(") == 1
    results = text.partition(f"@{store.TARGET}(")[2].partition(" -> ")[2].partition("\n")[0]
    by_xla = (platform, layout) == ("cuda", "row_major")
    # Units hold whole tiles of scales, too.
    tiles = "3x2x1x1x512" if layout == "row_major" else "1x1x3x2x512"
    assert results.startswith(f"(tensor<{'3x2x16x2x16' if by_xla else tiles}xui8>, tensor<")
    assert ("stablehlo.pad" in text) == by_xla  # of layouts.pack


@pytest.mark.gpu
def test_a_thousand_call_sites_compile_in_a_minute():
    """One after the other, as a deep model's layers are, so that XLA merges none."""
    x = jnp.ones((128, 256), jnp.bfloat16)

    def deep(x):
        for _ in range(1000):
            x = x + jax_mx.quantize(x).values.astype(x.dtype)
        return x

    begun = time.perf_counter()
    compiled = jax.jit(deep).lower(x).compile()
    seconds = time.perf_counter() - begun
    print(f"1,000 call sites of quantize compiled in {seconds:.1f} s")
    assert compiled.as_text().count("custom-call(") >= 1000
    assert seconds < 60


@pytest.mark.sampled(9, 4)
@pytest.mark.gpu
@every_kind
@each_layout
@pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize("shape", [(64, 96), (2, 64, 96), (2, 3, 64, 96)])
@pytest.mark.usefixtures("without_code")
def test_views_are_bitcasts(variant, layout, shape, tiles, monkeypatch):
    """Compiled, not run: no copy and no transpose around the call, alone and inside a program."""
    if not serves(variant, layout) or (tiles and variant not in IN_TILES):
        return
    monkeypatch.setattr(primitive, "value_layouts_of", lambda *_: ("row_major", "shuffled_16x16"))
    operand, call = (with_tiles if tiles else op_of)(variant, scale_layout=layout)
    operand = jax.eval_shape(operand, jax.ShapeDtypeStruct(shape, variant.dtype))
    with lowered_apart():
        text = jax.jit(call).lower(operand).compile().as_text()
    assert text.count(f'custom_call_target="{store.TARGET}"') == 1
    assert not re.findall(r"= \S+ (?:copy|transpose)\(", text), text


def test_what_there_is_no_kernel_for(monkeypatch):
    plan = plan_for(jnp.ones((32, 32)))
    back = dataclasses.replace(plan, op="dequantize")
    only = (Variant("quantize", "cutedsl", SECOND, "", ()),)
    monkeypatch.setattr(registry, "exists", lambda _: False)
    monkeypatch.setattr(
        registry,
        "variants",
        lambda dsl, op, *_: [v for v in only if (v.implementation, v.op) == (dsl, op)],
    )
    for call, sentence in (
        (plan, "quantize: cutedsl has no kernel for form last, only for second; 'xla' serves it"),
        (back, "dequantize: cutedsl has no kernel; 'xla' serves it"),
    ):
        refused, served = registry.candidates(call, "cuda", ["sm_90"])
        assert not refused and str(refused) == refused.reason == sentence
        assert served == registry.Support("xla") == registry.chosen(call, "cuda", ["sm_90"])


def test_what_an_installation_lacks_has_a_remedy(monkeypatch, tmp_path):
    """Without a binary and without the DSL, "xla"; a name raises."""
    monkeypatch.setenv("JAX_MX_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "BINARIES", tmp_path)
    monkeypatch.setattr(store, "manifest", dict)
    monkeypatch.setattr(toolchains, "_installed", lambda distribution: None)
    monkeypatch.delenv("JAX_MX_ARCHS")
    name = "quantize_last_float32_mxfp8_e4m3"
    supported, why = jax_mx.is_supported("quantize", "sm_90", dtype="float32")
    assert not supported
    assert why == (
        f"quantize: this installation holds no binary {name} for sm_90a; to compile it takes "
        "nvidia-cutlass-dsl 4.8.1, it is not installed; pip install nvidia-cutlass-dsl==4.8.1 "
        "pyelftools; 'xla' serves it"
    )
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    assert store.TARGET not in lowered(x)
    with pytest.raises(NotImplementedError, match="holds no binary"):
        lowered(x, implementation="cutedsl")


@pytest.mark.parametrize("options", [{"format": "mxfp6_e3m2"}, {"scale_layout": "shuffled_32x8"}])
def test_what_has_no_kernel_is_lowered_to_xla(options):
    x = jnp.ones((64, 64), jnp.float16)
    assert store.TARGET not in lowered(x, **options)
    assert store.TARGET not in lowered(x, implementation="xla", **options)
    assert store.TARGET in lowered(x, implementation="cutedsl")


def test_a_chip_without_kernels():
    """None falls back, a name raises."""
    plan = plan_for(jnp.ones(32), implementation="cutedsl")
    refused = registry.chosen(plan, "cuda", ["sm_70"])
    assert not refused and "no cutedsl kernel for sm_70, only for sm_8" in refused.reason
    assert list(kernels_for(plan, ["sm_90"])) == ["sm_90"]


# ---- sharding ---
X = random_bits((4, 16, 512), np.float32)


# ---- export ---


def test_unread_results_in_both_forms_of_jaxs_rule():
    """Since 0.12 JAX says between the two which operands live on."""
    from jax._src.interpreters import partial_eval

    probe = Primitive("probe")
    private.drops_unread(probe, lambda used, eqn: (used, eqn))
    rule = partial_eval.dce_rules.pop(probe)
    assert rule([True], "eqn") == rule([True], [False], "eqn") == ([True], "eqn")


def test_private_names_of_jax():
    """private.py rests on these, and nothing else on others; an unsupported JAX fails here."""
    from jax._src import core, custom_partitioning_sharding_rule, dispatch
    from jax._src.interpreters import ad, partial_eval
    from jax.interpreters import mlir

    source = Path(private.__file__).read_text()
    used = set(re.findall(r"(?<![\w.])(core|dispatch|partial_eval|tangents)\.(\w+)", source))
    assert {("core", "standard_vma_rule"), ("dispatch", "apply_primitive")} <= used
    used |= {("rule", "sdy_sharding_rule_to_mlir"), ("rule", "str_to_sdy_sharding_rule")}
    used.add(("core", "ShardingTypeError"))
    modules = {"core": core, "dispatch": dispatch, "rule": custom_partitioning_sharding_rule}
    modules |= {"partial_eval": partial_eval, "tangents": ad}
    assert core.closed_call_p in partial_eval.partial_eval_jaxpr_custom_rules
    missing = [f"{m}.{name}" for m, name in used if not hasattr(modules[m], name)]
    assert not missing, f"jax {jax.__version__} lacks {missing}, which jax_mx rests on"
    for path in Path(jax_mx.__file__).parent.rglob("*.py"):
        assert path.name == "private.py" or "from jax._src" not in path.read_text(), path
    fields = mlir.ModuleContext.__annotations__
    assert {"platforms", "backend", "lowering_parameters"} <= set(fields)
    assert "for_export" in mlir.LoweringParameters.__annotations__
    with jax.set_mesh(mesh_of(2, 4, axis_type=AxisType.Explicit)):
        x = jax.device_put(X, NamedSharding(mesh_of(2, 4, axis_type=AxisType.Explicit), P("a")))
        assert jax.typeof(x).sharding.spec[0] == "a"


def test_policies_look_into_steps():
    """A policy keeps the named codes of a product's step, so that nothing is quantized twice."""
    x, w = (normal((64, 64), seed, "bfloat16") for seed in range(2))
    keep = jax.checkpoint_policies.save_only_these_names(jax_mx.CHECKPOINT_NAME)

    def gradient(f):
        return jax.grad(lambda x: jnp.sin(f(x, w)).astype(jnp.float32).sum())

    kept, again = (
        gradient(jax.checkpoint(jax_mx.matmul, policy=policy)) for policy in (keep, None)
    )
    assert quantizings(again, x) > quantizings(kept, x) == quantizings(gradient(jax_mx.matmul), x)
    for f in (kept, again):
        assert_bits_equal(jax.jit(f)(x), jax.jit(gradient(jax_mx.matmul))(x))


# ---- what only sharding and other processes show ---
def test_dequantize_varies_where_either_operand_does():
    """Scales that differ per device make the result differ, and shard_map has to know."""
    q = jax_mx.quantize(jnp.ones((8, 32)))

    def f(values, scales):
        return jax_mx.MXArray(values, scales, q.format, -1, q.scale_layout).dequantize()

    a = mesh_of(8)
    specs = {"mesh": a, "in_specs": (P(), P("a"))}
    with pytest.raises(ValueError, match="replica"):
        jax.jit(jax.shard_map(f, out_specs=P(), **specs))(q.values[:1], q.scales)
    out = jax.jit(jax.shard_map(f, out_specs=P("a"), **specs))(q.values[:1], q.scales)
    assert_bits_equal(out, q.dequantize())


@pytest.mark.parametrize("axis", [-1, -2])
def test_explicit_shards_that_split_a_block_get_one_sentence(axis):
    explicit = mesh_of(2, 4, axis_type=AxisType.Explicit)
    spec = P(None, "b") if axis == -1 else P("b", None)
    with jax.set_mesh(explicit):
        x = jax.device_put(jnp.ones((64, 64)), NamedSharding(explicit, spec))
        with pytest.raises(private.ShardingTypeError) as caught:
            jax_mx.quantize(x, axis=axis)
    assert str(caught.value) == (
        f"quantize: axis {axis} of length 64 is split over b in 4 shards of 16, which does not "
        "keep its blocks of 32 whole; reshard it with jax.sharding.reshard"
    )


def test_explicit_shards_that_split_square_or_quantized_blocks():
    explicit = mesh_of(2, 4, axis_type=AxisType.Explicit)
    with jax.set_mesh(explicit):
        x = jax.device_put(jnp.ones((64, 64)), NamedSharding(explicit, P("b")))
        with pytest.raises(private.ShardingTypeError, match="quantize: axis -2 of length 64"):
            jax_mx.quantize(x, **SQUARE)
        q = jax_mx.quantize(jax.sharding.reshard(x, P()), "mxfp4_e2m1")
        split = dataclasses.replace(q, values=jax.sharding.reshard(q.values, P(None, "b")))
        with pytest.raises(private.ShardingTypeError, match="dequantize: axis -1 of length 64"):
            split.dequantize()
        # Values and scales that lie apart come together.
        apart = dataclasses.replace(q, values=jax.sharding.reshard(q.values, P("b")))
        y = apart.dequantize(transpose=True)
        assert jax.typeof(y).sharding.spec == P(None, "b")
    assert_bits_equal(y, jnp.ones((64, 64), jnp.bfloat16))


SQUARE = {"block": (32, 32)}
