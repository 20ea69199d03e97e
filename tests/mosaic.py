"""Executes Pallas kernels for Blackwell on a CPU: JAX's interpreter, taught block-scaled products.

JAX's interpreter of Mosaic GPU has TMA, barriers, tensor memory and tcgen05's products. It lacks
copies of scales to tensor memory, and products with scales, and what TMA reads behind an array of
scales is NaN to it. All three are mended here, after NVIDIA's
manual (PTX ISA, tcgen05: layouts of scale factors, block scaling), not after what Pallas lowers to.
A product of 128 or 256 elements along K is summed in float64 and rounded once. How many bits the
tensor core's sums have, no test here can say.
"""

import dataclasses
import functools
import threading
import types

import jax
import numpy as np

VERSIONS = ("0.11.2", "0.12.0.1")  # of JAX, whose interpreter this was written for


def missing() -> str:
    """Why kernels cannot be executed with this JAX; empty where they can."""
    if jax.__version__ in VERSIONS:
        return ""
    return f"JAX's interpreter is taught in {', '.join(VERSIONS)}, this is {jax.__version__}"


def factors(scales: np.ndarray) -> np.ndarray:
    """Float64 that E8M0 scales stand for."""
    exponents = scales.view(np.uint8).astype(np.int32)
    return np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127))


def scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes (rows, K) times their scales (rows, K / 32)."""
    assert codes.shape == (scales.shape[0], 32 * scales.shape[1])
    return codes.astype(np.float64) * np.repeat(factors(scales), 32, axis=1)


def placed(tiles: np.ndarray) -> np.ndarray:
    """Scales (row tiles, column tiles, 32, 16) as the product sees them: (rows, columns).

    Lane r of tensor memory holds 16 bytes: four columns for each of the rows r, 32 + r, 64 + r and
    96 + r.
    """
    if tiles.ndim != 4:  # a copy of something else
        return tiles
    m, k, *_ = tiles.shape
    lanes = tiles.reshape(m, k, 32, 4, 4)
    return lanes.transpose(0, 3, 2, 1, 4).reshape(m * 128, k * 4)


class _Seen:
    """The interpreter's memory, in which some buffers read as what a function makes of them."""

    def __init__(self, memory, changes):
        self.memory, self.changes = memory, changes

    def __getattr__(self, name):
        return getattr(self.memory, name)

    def get_buffer_content(self, key, *args, **kwargs):
        content, *rest = self.memory.get_buffer_content(key, *args, **kwargs)
        return self.changes.get(key, lambda x: x)(content), *rest

    def store_buffer_content(self, key, access, value, *args, **kwargs):
        value = value.astype(self.memory.buffer_shape_and_dtype(key).dtype)
        return self.memory.store_buffer_content(key, access, value, *args, **kwargs)

    def buffer_shape_and_dtype(self, key):
        return types.SimpleNamespace(dtype=np.dtype(np.float64))  # that products are summed in


_lenient = False


@functools.cache
def _teach() -> None:
    """Mends the interpreter."""
    from jax._src.pallas.mosaic_gpu import primitives
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory

    interpret, ended = jaxpr_interpret.JaxprInterpreter.interpret, shared_memory.Barrier.deallocate
    memory, local = gpu_callbacks._get_shared_memory, threading.local()
    copy, multiply = gpu_callbacks.TcGen05Copy.__call__, gpu_callbacks.TcGen05Mma.__call__

    def interpreted(self, jaxpr, token, *args):
        copies = {primitives.async_copy_scales_to_tmem_p: primitives.async_copy_smem_to_tmem_p}
        eqns = [e.replace(primitive=copies.get(e.primitive, e.primitive)) for e in jaxpr.eqns]
        return interpret(self, jaxpr.replace(eqns=eqns), token, *args)

    def seeing(changes, call, *args):
        local.seen = _Seen(memory(), changes)
        try:
            with np.errstate(invalid="ignore"):  # infinity times zero
                return call(*args)
        finally:
            local.seen = None

    def copied(self, *args):
        return seeing({self.smem_key: placed}, copy, self, *args)

    def multiplied(self, *args):
        if self.a_scale_key is None:
            return multiply(self, *args)
        keys = (self.a_scale_key, self.b_scale_key)
        transforms = (self.a_scale_transforms, self.b_scale_transforms)
        reads = [(k, memory().access(k, t)) for k, t in zip(keys, transforms, strict=True)]
        a, b = (memory().get_buffer_content(*read, self.thread)[0] for read in reads)
        columns = self.b_access.shape[1]
        changes = {
            self.a_key: lambda codes: scaled(codes, a),
            self.b_key: lambda codes: scaled(codes.T, b[:columns]).T,
        }
        plain = dataclasses.replace(self, a_scale_key=None, b_scale_key=None)
        clock = seeing(changes, multiply, plain, *args)
        for read in reads if clock is not None else ():
            gpu_callbacks.get_races().check_read(
                self.thread, clock.generic_clock, *read, source_info=self.source_info
            )
        return clock

    def padded(content, shape, dtype, fill):
        whole = np.zeros(shape, dtype)  # TMA fills with zero bytes; of E8M0, 0 itself is NaN
        assert fill == 0
        if content is not None:
            whole[tuple(map(slice, content.shape))] = content
        return whole

    def deallocated(self):
        try:
            ended(self)
        except ValueError:
            if not _lenient:
                raise

    shared_memory.Barrier.deallocate = deallocated
    gpu_callbacks._pad_to_requested = padded
    gpu_callbacks._get_shared_memory = lambda: getattr(local, "seen", None) or memory()
    jaxpr_interpret.JaxprInterpreter.interpret = interpreted
    gpu_callbacks.TcGen05Copy.__call__ = copied
    gpu_callbacks.TcGen05Mma.__call__ = multiplied


def executed(function, lenient=False, **params):
    """A jitted function of JAX whose Pallas kernels are executed on the CPU.

    Args:
      function: of arrays.
      lenient: whether a kernel may end without having waited for what arrived at its barriers.
      **params: of JAX's interpreter.
    """
    from jax._src.pallas.mosaic_gpu.interpret import params as interpret

    _teach()
    # Another function each time: JAX keeps no program that it traced without the interpreter.
    jitted = jax.jit(lambda *args: function(*args))

    def run(*args):
        global _lenient
        _lenient = lenient
        with interpret.force_gpu_interpret_mode(interpret.InterpretGPUParams(**params)):
            return jax.block_until_ready(jitted(*args))

    return run


def races(function, *args) -> tuple[bool, object]:
    """Whether two accesses of a program are in no order, and what it gives, if anything."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    # Copies that share a number count as one after the other.
    run = executed(function, detect_races=True, num_tma_threads_per_device=64)
    try:
        result = run(*args)
    except jax.errors.JaxRuntimeError as error:  # JAX 0.12 raises what earlier ones print
        if "race detected" not in str(error).lower():
            raise
        return True, None
    return gpu_callbacks.get_races().races_found, result
