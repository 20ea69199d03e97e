"""Random calls of `quantize`: an array, options, the oracle's bytes, or the error it raises."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jax_mx

FLOATS = ("bfloat16", "float16", "float32")
SCALE_LAYOUTS = ("row_major", "blocked_128x4", "shuffled_32x8")
COUNT = itertools.count(1)


def forget_some():
    """The same from time to time, so that memory does not grow with the number of cases."""
    if next(COUNT) % 150 == 0:
        jax.clear_caches()


def bytes_in(q) -> tuple[np.ndarray, np.ndarray]:
    """(values, scales) as the oracle has them."""
    return np.asarray(q.values).view(np.uint8), np.asarray(q.scales).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, an array, and the way in which the call is made.

    `way` is one of WAYS; `spec` has the mesh axes that split the array, for ways on meshes. `picks`
    says whether the array consists of some rows of another.
    """

    call: oracle.Call
    shape: tuple[int, ...]
    dtype: str
    seed: int
    key: int | None = None
    way: str = "eager"
    spec: tuple[str | None, ...] = ()
    picks: bool = False

    def floats(self) -> np.ndarray:
        axis = -1 if self.call.square else self.call.axis
        return oracle.hard_floats(self.seed, self.shape, axis, self.dtype)

    def options(self) -> dict:
        """As jax_mx.quantize takes them, but for the key and signs."""
        call = self.call
        options = {
            name: getattr(call, name)
            for name in ("format", "axis", "scaling", "scale_layout", "transpose", "value_layout",
                         "window")
        }  # fmt: skip
        return options | {"zero_scale": call.zero_scale, "block": (32, 32) if call.square else 32}

    def wanted(self, x: np.ndarray, key) -> tuple[np.ndarray, np.ndarray]:
        """By the oracle."""
        seeds = None
        if key is not None:
            key_bits = np.asarray(jax.random.bits(key, (2,), jnp.uint32))
            seeds = oracle.seeds_of(x.shape, self.call.axis, self.call.square, key_bits)
        return oracle.quantize(x, self.call, seeds)

    def run(self, x, key, **more):
        return jax_mx.quantize(x, **self.keywords(key), **more)

    def keywords(self, key) -> dict:
        """All that jax_mx.quantize takes, the key and signs too."""
        call, options = self.call, self.options()
        if call.hadamard:
            signs = None if call.negative is None else np.where(call.negative, -1.0, 1.0)
            options["hadamard"] = jax_mx.Hadamard(call.hadamard, signs)
        if key is not None:
            options["rounding"] = jax_mx.Stochastic(key, call.prescale)
        return options

    def refusal(self) -> type[Exception] | None:
        """The error of a call that the documentation refuses."""
        call, rank = self.call, len(self.shape)
        along = (-2, -1) if call.square else (call.axis,)
        if rank < len(along) or any(self.shape[d] % 32 for d in along):
            return ValueError
        if call.hadamard and (call.square or self.shape[call.axis] % call.hadamard):
            return ValueError
        if rank < 2 and call.scale_layout != "row_major":
            return ValueError
        if call.square and (call.scale_layout != "row_major" or call.axis != -1):
            return ValueError
        if call.value_layout != "row_major":
            if not (call.square or call.transpose or call.axis == -1) or rank < 2:
                return ValueError
            if call.square:
                order = [*self.shape]
                if call.transpose:
                    order[-2:] = order[-1], order[-2]
            else:
                order = np.moveaxis(np.empty(self.shape, np.bool_), call.axis, -1).shape
            if order[-2] % 16 or order[-1] // oracle.FORMATS[call.format].per_byte % 32:
                return ValueError
        return None
