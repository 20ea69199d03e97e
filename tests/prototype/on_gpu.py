"""Launches tma_copy's cubin through the handler, on a GPU; prints the handler's counters as JSON.

`python tests/prototype/on_gpu.py CUBIN [early]`; early: by programmatic dependent launch.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import handler_alone  # noqa: F401  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax import ffi
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from tma_rule import LAUNCH, blocks, expected, starting_early

from jax_mx import _ffi
from jax_mx.facts.launch import call_attributes

TARGET = "jax_mx_prototype"
MORE = (37, 24)  # rows and columns of y beyond x's end

copy_p = Primitive("tma_copy")
copy_p.multiple_results = True


@copy_p.def_abstract_eval
def _(x, *, shape):
    return [ShapedArray(shape, x.dtype), ShapedArray((2,), jnp.int32)]


def copy(x, more=MORE):
    """`(y, counters)`, y with so many rows and columns more than x."""
    rows = int(np.prod(x.shape[:-1]))
    return copy_p.bind(x, shape=(rows + more[0], x.shape[-1] + more[1]))


def check(x, y, counters):
    """Raises AssertionError: y or the counters are not what the kernel should leave."""
    want = expected(np.asarray(x), y.shape)
    bad = np.argwhere(np.asarray(y).astype(np.float32) != want)
    assert not len(bad), (x.shape, len(bad), bad[0].tolist(), bad[-1].tolist())
    units = jax.devices()[0].core_count
    assert np.asarray(counters).tolist() == [blocks(y.shape), units], (counters, units)


def integers(i, *shape):
    """Small ones, exact in bfloat16 with a few more."""
    return jax.random.randint(jax.random.key(i), shape, -50, 50).astype(jnp.bfloat16)


def main(file: str, early: str = "") -> None:
    """See the module's docstring."""
    image = Path(file).read_bytes()
    sha256 = hashlib.sha256(image).hexdigest()
    kernel = (starting_early() if early else LAUNCH).attributes(sha256)

    def lower(ctx, x, *, shape):
        attributes = call_attributes({"sm_90": kernel})
        return ffi.ffi_lowering(TARGET)(ctx, x, **attributes)

    mlir.register_lowering(copy_p, lower, platform="cuda")
    for platform, stages in _ffi.registrations().items():
        ffi.register_ffi_target(TARGET, stages, platform=platform)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, sha256).write_bytes(image)
        _ffi.use_store([folder], "this is a test")
        one = integers(0, 128, 64)
        check(one, *jax.jit(copy)(one))
    for i, shape in enumerate([(1, 8), (130, 72), (513, 64), (3, 341, 200), (2100, 264)]):
        x = integers(i, *shape)
        check(x, *jax.jit(copy)(x))
        check(x, *jax.jit(lambda x: copy(x, (0, 0)))(x))

    # Twice in a program, with other kernels between, which XLA captures into a graph: replayed with
    # new buffers and with reused ones.
    @jax.jit
    def twice(x):
        double = x * 2
        first = copy(double)
        again = first[0] - 3
        return double, first, again, copy(again)

    kept = []
    for i in range(12):
        double, first, again, second = twice(integers(i % 5, 700, 136))
        check(double, *first)
        check(again, *second)
        kept += [second] if i < 4 else []
    xs = integers(9, 3, 600, 72)
    ys, counters = jax.jit(lambda xs: jax.lax.map(lambda x: tuple(copy(x)), xs))(xs)
    for x, y, counted in zip(xs, ys, counters, strict=True):
        check(x, y, counted)
    # Columns that 16 bytes do not divide: no entry serves them, and the next call is fine.
    try:
        jax.block_until_ready(jax.jit(copy)(integers(0, 64, 12)))
    except jax.errors.JaxRuntimeError as error:
        assert "fit no entry of jax_mx_prototype_tma_copy_0" in str(error), error
    else:
        raise AssertionError("a call with unaligned rows was launched")
    check(one, *jax.jit(copy)(one))
    print(json.dumps(_ffi.counters()))


if __name__ == "__main__":
    main(*sys.argv[1:])
