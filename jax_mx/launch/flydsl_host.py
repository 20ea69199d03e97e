"""The host half that makes FlyDSL compile entries."""

from collections.abc import Sequence

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import Int32, Int64, Uint8

from jax_mx.launch.entry import Entry, json_of

POINTERS = 10  # that `Host.host` has parameters for


class Host:
    """Makes the compiler emit entries; nothing calls what it compiles."""

    def __init__(self, symbols: list[str], kernels: Sequence[Entry]):
        self.symbols, self.kernels = symbols, kernels

    @flyc.jit
    def host(  # noqa: PLR0913  FlyDSL wants each argument by itself
        self, name: fx.Constexpr, p0: fx.Pointer, p1: fx.Pointer, p2: fx.Pointer, p3: fx.Pointer,
        p4: fx.Pointer, p5: fx.Pointer, p6: fx.Pointer, p7: fx.Pointer, p8: fx.Pointer,
        p9: fx.Pointer, int32: Int32, int64: Int64,
    ):  # fmt: skip
        """`name` tells FlyDSL's cache that another variant is another function."""
        for symbol, kernel in zip(self.symbols, self.kernels, strict=True):
            pointers = (p0, p1, p2, p3, p4, p5, p6, p7, p8, p9)[: len(kernel.align)]
            pointers = typed(pointers, kernel)
            scalars = tuple(int64 if s[0] == 8 else int32 for s in json_of(kernel.scalars))
            entry = type(kernel).__dict__["kernel"]
            entry._name = symbol
            # The real grid is the launch rule's.
            kernel.kernel(pointers, scalars).launch(grid=(1, 1, 1), block=(kernel.threads, 1, 1))


def typed(pointers: tuple, kernel: Entry) -> tuple:
    """Pointers to bytes as pointers to what an entry's types say."""
    if not kernel.types:
        return pointers
    return tuple(
        fx.recast_iter(fx.Pointer[dtype, fx.AddressSpace.Global, align].ir_type, pointer)
        for pointer, dtype, align in zip(pointers, kernel.types, kernel.align, strict=True)
    )


def compile_all(name: str, symbols: list[str], kernels: Sequence[Entry]):
    """Entries of these symbols, as FlyDSL compiles them."""
    if any(len(kernel.align) > POINTERS for kernel in kernels):
        raise RuntimeError(f"{name}: Host.host passes {POINTERS} pointers; give it more")
    address = flyc.from_c_void_p(Uint8, None, assumed_align=1)
    host = Host(symbols, kernels).host
    return flyc.compile(host, name, *[address] * POINTERS, Int32(0), Int64(0))
