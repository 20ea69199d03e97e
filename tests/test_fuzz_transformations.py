"""Transformations of JAX's, one in another, of every call: the right result, or our sentence.

A chain is compared with loops over calls of one device: what it means, without the transformation.
A refusal is right where it is one line that begins with the name of the call.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx

RNG = np.random.default_rng(0)
W, WS = (jnp.asarray(RNG.integers(-2, 3, s), jnp.float32) for s in ((64, 64), (2, 64, 64)))
IDS = jnp.asarray(RNG.integers(0, 2, 64), jnp.int32)
FROZEN = jax_mx.quantize(W, "mxfp4_e2m1", axis=0)
ROWS = PartitionSpec("d")
POLICIES = ("everything_saveable", "dots_saveable", "nothing_saveable")


def moe(x):
    ids = IDS[: x.shape[0], None]
    return jax_mx.moe(x, ids, jnp.ones(ids.shape), WS, WS[:, :32], recipe="mxfp8")


def of_parts(x):
    q = jax_mx.quantize(x, "mxfp4_e2m1")
    return jax_mx.concatenate([q[8:], q[:8]]).swapaxes(0, 1).dequantize(jnp.float32)


# Calls of an x (32 rows or more, 64), by the names that their refusals may begin with.
CALLS = {
    "matmul": lambda x: jax_mx.matmul(x, W, recipe="mxfp8"),
    "matmul rows": lambda x: jax_mx.matmul(x, W, recipe="mxfp8_rows"),
    "matmul bf16": lambda x: jax_mx.matmul(x, W, recipe="bf16"),
    "matmul frozen": lambda x: jax_mx.matmul(x, FROZEN),
    "dot_general": lambda x: jax_mx.dot_general(x, W, (((1,), (1,)), ((), ())), recipe="mxfp4"),
    "einsum": lambda x: jax_mx.einsum("tk,gkn->tgn", x, WS, recipe="mxfp8"),
    "ragged_dot": lambda x: jax_mx.ragged_dot(
        x, WS, jnp.array([5, x.shape[0] - 5]), recipe="mxfp8"
    ),
    "mlp": lambda x: jax_mx.mlp(x, W, W[:32], recipe="mxfp8"),
    "moe": moe,
    "rms_norm": lambda x: jax_mx.rms_norm(x, W[0]).floats,
    "rms_norm codes": lambda x: (
        jax_mx.rms_norm(x, W[0], residual=x, format="mxfp8_e4m3", floats=True).floats
    ),
    "gated": jax_mx.gated,
    "gated codes": lambda x: jax_mx.gated(x, format="mxfp8_e4m3", both=True, floats=True).floats,
    "fake_quantize": lambda x: jax_mx.fake_quantize(x, "mxfp4_e2m1", clip=True),
    "hadamard": lambda x: jax_mx.hadamard(x),
    "quantize": lambda x: jax_mx.quantize(x, axis=0, transpose=True).dequantize(jnp.float32),
    "quantize parts": of_parts,
    "matmul weight": lambda x: jax_mx.matmul(W, jax_mx.MXFP8.quantize_weight(x.T), recipe="mxfp8"),
}


def total(tree):
    return sum(leaf.sum() for leaf in jax.tree.leaves(tree))


def stacked(results):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def joined(results):
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *results)


def copies(x):
    return [x, 2 * x, -x]


# Transformations of a function, and the same by loops.
INNER = {
    "jit": (jax.jit, lambda f: f),
    "vmap": (
        lambda f: lambda x: jax.vmap(f)(jnp.stack(copies(x))),
        lambda f: lambda x: stacked(map(f, copies(x))),
    ),
    "vmap along columns": (
        lambda f: lambda x: jax.vmap(f, 2)(jnp.stack(copies(x), 2)),
        lambda f: lambda x: stacked(map(f, copies(x))),
    ),
    "grad": (lambda f: jax.grad(lambda x: total(f(x))),) * 2,
    "vjp": (lambda f: lambda x: (lambda y, back: back(y))(*jax.vjp(f, x)),) * 2,
    # Not along x, where the derivative of a norm is 0.
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (2 * x + 1,))[1],) * 2,
    "linearize": (lambda f: lambda x: jax.linearize(f, x)[1](x + 1),) * 2,
    **{
        policy: (
            lambda f, policy=policy: jax.checkpoint(
                f, policy=getattr(jax.checkpoint_policies, policy)
            ),
            lambda f: f,
        )
        for policy in POLICIES
    },
    "scan": (
        lambda f: (
            lambda x: jax.lax.scan(lambda c, s: (c + 1, f(s * x)), 0, jnp.array([1.0, -2.0]))[1]
        ),
        lambda f: lambda x: stacked([f(x), f(-2 * x)]),
    ),
    "map": (
        lambda f: lambda x: jax.lax.map(f, jnp.stack(copies(x))),
        lambda f: lambda x: stacked(map(f, copies(x))),
    ),
    "cond": (
        lambda f: lambda x: jax.lax.cond(x.sum() > 1e9, lambda x: f(2 * x), f, x),
        lambda f: f,
    ),
}


def in_shards(f):
    mesh = mesh_of(2, names="d")
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ROWS, out_specs=ROWS))


def on_mesh(axis_type):
    def transform(f):
        def run(x):
            mesh = mesh_of(2, names="d", axis_type=axis_type)
            with jax.set_mesh(mesh):
                return jax.jit(f)(jax.device_put(x, NamedSharding(mesh, ROWS)))

        return run

    return transform


def exported(f):
    def run(x):
        checks = jax_mx.DISABLE_EXPORT_CHECKS
        program = jax.export.export(jax.jit(f), disabled_checks=checks)(x)
        return jax.export.deserialize(program.serialize()).call(x)

    return run


OUTER = {
    "eager": (lambda f: f,) * 2,
    "jit": INNER["jit"],
    "shard_map": (in_shards, lambda f: lambda x: joined(map(f, jnp.split(x, 2)))),
    "auto": (on_mesh(AxisType.Auto), lambda f: f),
    "explicit": (on_mesh(AxisType.Explicit), lambda f: f),
    "export": (exported, lambda f: f),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A chain: `inner` from the inside out, then `outer`."""

    call: str
    inner: tuple[str, ...]
    outer: str

    @classmethod
    def drawn(cls, seed):
        """A call and at most three transformations in each other, then one of all of them."""
        rng = np.random.default_rng(seed)
        inner = rng.choice([*INNER], rng.integers(0, 4))
        outer = str(rng.choice([*OUTER]))
        return cls(str(rng.choice([*CALLS])), tuple(map(str, inner)), outer)

    def functions(self):
        """The transformed call, and the same by loops."""
        ours = wanted = CALLS[self.call]
        for transform, loop in (*(INNER[name] for name in self.inner), OUTER[self.outer]):
            ours, wanted = transform(ours), loop(wanted)
        return ours, wanted

    def result(self, f):
        """The result of a function; None where it is refused by our sentence."""
        x = jnp.asarray(np.random.default_rng(1).integers(-2, 3, (64, 64)), jnp.float32)
        try:
            return f(x)
        except Exception as error:
            name = self.call.split()[0]
            if not re.match(rf"{name}: ", str(error)) or "\n" in str(error):
                raise AssertionError(f"{self}: {error}") from error
            return None


def check(case):
    """Whether a case was computed, not refused."""
    ours, wanted = map(case.result, case.functions())
    if ours is None or wanted is None:
        return False
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        most = np.abs(b).max(initial=0)
        assert a.shape == b.shape and not np.isnan(a).any(), case
        assert np.abs(np.asarray(a) - np.asarray(b)).max(initial=0) <= 1e-4 * most, case
    return True


@pytest.mark.parametrize("seed", range(2, 6))
def test_chains(seed):
    check(Case.drawn(seed))


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (("grad", "jvp"), "shard_map"),
        (("vmap", "jvp"), "explicit"),
        (("scan", "grad", "grad"), "jit"),
        pytest.param(("everything_saveable", "grad", "jvp"), "auto", marks=pytest.mark.thorough),
        pytest.param(("jvp", "grad"), "export", marks=pytest.mark.thorough),
    ],
)
def test_products_of_floats_are_never_refused(inner, outer):
    assert check(Case("matmul bf16", inner, outer))


FOUND = [  # chains that failed once, each of another kind
    Case("ragged_dot", ("scan",), "jit"),  # constants that XLA computed wrongly
    Case("rms_norm codes", ("grad", "grad"), "eager"),  # a second derivative that lacked a part
    Case("rms_norm codes", ("cond", "jvp", "linearize"), "eager"),  # JAX's own sentence
]


@pytest.mark.optimized
@pytest.mark.parametrize("case", FOUND, ids=str)
def test_chains_that_failed(case):
    check(case)
    if "grad" in case.inner:  # the loop takes the same derivatives: against plain jnp
        plain = jax.grad(lambda x: total(jax.grad(lambda x: total(_norm(x)))(x)))
        x = jnp.asarray(np.random.default_rng(1).integers(-2, 3, (64, 64)), jnp.float32)
        np.testing.assert_allclose(case.result(case.functions()[0]), plain(x), atol=1e-4)


SECOND = {
    "rms_norm": lambda x: jax_mx.rms_norm(x, W[0]).floats,
    "codes": lambda x: jax_mx.rms_norm(x, W[0], format="mxfp8_e4m3", floats=True).floats,
    "fake_quantize": lambda x: jax_mx.fake_quantize(x, clip=True),
    "hadamard": jax_mx.hadamard,
    "gated": jax_mx.gated,
    "ragged_dot": lambda x: jax_mx.ragged_dot(x, WS / 64, jnp.array([1, 1]), recipe="bf16"),
    "frozen": lambda x: jax_mx.matmul(x / 64, FROZEN, recipe="bf16"),
}


QUICK = ("codes", "fake_quantize", "gated")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in QUICK)) for name in SECOND],
)
def test_second_derivatives_in_a_scan(name):
    """JAX's scan forgets rules of custom_jvp, and second derivatives lacked a part, in silence."""
    columns = jnp.arange(64.0)
    x = jnp.asarray(RNG.standard_normal((2, 64)), jnp.float32)

    def second(loop):
        def loss(x):
            return total(
                jax.tree.map(lambda y: y**2 * columns[: y.shape[-1]], loop(SECOND[name])(x))
            )

        return jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())

    scan, calls = INNER["scan"]
    if name == "gated":
        with pytest.raises(NotImplementedError, match=r"^gated: swiglu has first"):
            second(scan)(x)
        return
    got, want = (np.asarray(second(loop)(x)) for loop in (scan, calls))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def _norm(x):
    total = x + x
    return total * jax.lax.rsqrt((total * total).mean(-1, keepdims=True) + 1e-6) * W[0]


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(20))
def test_many_chains(part):
    computed = sum(check(Case.drawn(seed)) for seed in range(100 + 20 * part, 120 + 20 * part))
    assert computed > 3


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "matmul bf16",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("rms_norm", "gated")),
    ],
)
def test_one_cotangent_for_a_batch(name):
    """A gradient keeps mapped arrays, and no operand of its product is mapped; no tracer leaks."""
    x, call = jnp.stack(copies(W)), CALLS[name]
    dy = jnp.ones(jax.eval_shape(call, W).shape)

    def gradient(x):
        return jax.vjp(call, x)[1](dy)[0]

    with jax.checking_leaks():
        got = jax.vmap(gradient)(x)
    np.testing.assert_array_equal(got, jnp.stack([*map(gradient, x)]))
