"""Python's and NumPy's protocols on an MXArray: each is right, or refused by one sentence."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mx

Q = jax_mx.quantize(jnp.full((2, 32), 2.0))
OTHER = jax_mx.quantize(jnp.full((2, 32), 2.0))
TAKE = r"an MXArray is two arrays; take \.values and \.scales, or \.dequantize\(\)"


def test_what_is_right():
    assert len(Q) == 2 and [part.shape for part in Q] == [(32,), (32,)]
    assert (np.shape(Q), np.ndim(Q), np.size(Q), np.size(Q, 0)) == ((2, 32), 2, 64, 2)
    assert np.shape(a=Q) == (2, 32)
    assert Q == Q and not Q != Q and Q in [Q] and Q != None and Q != "text"  # noqa: E711
    assert {Q: 1}[Q] == 1 and len({Q, OTHER}) == 2  # as objects
    for again in (copy.copy(Q), copy.deepcopy(Q), pickle.loads(pickle.dumps(Q))):
        assert (again.values == Q.values).all() and again.format == Q.format
    assert f"{Q}" == str(Q) == repr(Q)
    match Q:
        case jax_mx.MXArray(values=values, axis=-1):
            assert values is Q.values
        case _:
            raise AssertionError
    assert next(reversed(Q)).shape == (32,)


REFUSED = {
    "in": lambda: 2.0 in Q,
    "bool": lambda: bool(Q),
    "not": lambda: not Q,
    "and": lambda: Q and 1,
    "==": lambda: Q == OTHER,
    "!=": lambda: Q != OTHER,
    "== number": lambda: Q == 2.0,
    "== array": lambda: Q == jnp.ones((2, 32)),
    "array ==": lambda: jnp.ones((2, 32)) == Q,
    "numpy ==": lambda: np.ones((2, 32)) == Q,
    "<": lambda: Q < OTHER,
    "+": lambda: Q + 1,
    "numpy +": lambda: np.ones((2, 32)) + Q,
    "array +": lambda: jnp.ones((2, 32)) + Q,
    "@": lambda: jnp.ones((2, 2)) @ Q,
    "-": lambda: -Q,
    "abs": lambda: abs(Q),
    "float": lambda: float(Q),
    "int": lambda: int(Q),
    "range": lambda: range(Q),
    "format": lambda: f"{Q:.2f}",
    "assignment": lambda: Q.__setitem__(0, 1) if hasattr(Q, "__setitem__") else exec("Q[0] = 1"),
    "np.asarray": lambda: np.asarray(Q),
    "np.array of two": lambda: np.array([Q, OTHER]),
    "np.mean": lambda: np.mean(Q),
    "np.array_equal": lambda: np.array_equal(Q, OTHER),
    "np.allclose": lambda: np.allclose(Q, OTHER),
    "np.concatenate": lambda: np.concatenate([Q, OTHER]),
    "np.exp": lambda: np.exp(Q),
    "np.full_like": lambda: np.full_like(Q, 1),
    "np.sort": lambda: np.sort(Q),
    "jnp.asarray": lambda: jnp.asarray(Q),
    "jnp.mean": lambda: jnp.mean(Q),
    "jnp.concatenate": lambda: jnp.concatenate([Q, OTHER]),
    "jnp.array_equal": lambda: jnp.array_equal(Q, OTHER),
    "jnp.allclose": lambda: jnp.allclose(Q, OTHER),
    "jnp.take": lambda: jnp.take(Q, 0, 0),
    "jnp.where": lambda: jnp.where(True, Q, OTHER),
    "jnp.matmul": lambda: jnp.matmul(Q, Q),
    "jax.nn.relu": lambda: jax.nn.relu(Q),
    "jax.lax.add": lambda: jax.lax.add(Q, Q),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_what_is_refused(operation):
    with pytest.raises(TypeError) as refusal:
        REFUSED[operation]()
    if operation.startswith(("bool", "not", "and", "==", "!=", "np.")) or operation == "in":
        refusal.match(TAKE)


def test_within_a_program():
    """Tracers are refused alike, when the function is traced."""
    with pytest.raises(TypeError, match="^in: " + TAKE):
        jax.jit(lambda q: 2.0 in q)(Q)
    with pytest.raises(TypeError, match="^bool: " + TAKE):
        jax.jit(lambda q: q.values if q else q.scales)(Q)


def test_a_weight_is_no_array():
    weight = jax_mx.MXFP8.quantize_weight(jnp.ones((32, 32)))
    for call in (np.asarray, np.mean, lambda w: 1.0 in w):
        with pytest.raises(TypeError):
            call(weight)
