"""Memory as an emulated kernel sees it: nothing exists but the buffers of the launch."""

import ctypes
import dataclasses

import numpy as np


class Fault(Exception):
    """The kernel did what a chip would not survive, or what this emulator refuses."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Bytes at an address."""

    address: int
    size: int
    writable: bool
    bytes: np.ndarray  # uint8 (size,)
    uint32s: np.ndarray  # from the last multiple of 4 at or before the address
    name: str
    array: np.ndarray  # whose bytes these are


class Global:
    """Global memory. An access that is not inside one buffer, or is unaligned, faults.

    Aligned means to the access's own size, or to 4 where that is more. Chips can be set to do
    without; nothing here depends on it.

    Each buffer lies across a multiple of 4 GiB of its own, with nothing near it. So addresses need
    all 64 bits, and carries between their halves happen.
    """

    def __init__(self):
        self.buffers: list[Buffer] = []

    def add(
        self,
        array: np.ndarray,
        writable: bool = False,
        name: str = "",
        address: int | None = None,
    ) -> int:
        """Makes a contiguous array a buffer and returns its address.

        The address has the low bits of the array's own address. `address` instead places it, say as
        a window of a larger tensor of which only this part is there.
        """
        host, size = array.__array_interface__["data"][0], array.nbytes
        if not array.flags.c_contiguous:
            raise ValueError("a buffer must be contiguous")
        boundary = (0x7F12 + 3 * len(self.buffers)) << 32
        near: int = boundary - size // 2 // 16 * 16 + host % 16
        address = address if address is not None else near
        if (host - address) % 4:
            raise ValueError(f"address {address:#x} has other low bits than the array, {host:#x}")
        whole = -(-(size + host % 4) // 4) * 4 if size else 0
        uint32s = _view(host - host % 4, whole).view(np.uint32)
        buffer = Buffer(address, size, writable, _view(host, size), uint32s, name, array)
        self.buffers.append(buffer)
        return address

    def load(self, addresses: np.ndarray, size: int) -> list[np.ndarray]:
        """`size` bytes from each address (n,): a word (n,), zero-extended, per 4 of them."""
        if not addresses.size:
            return [np.zeros(0, np.uint32)] * -(-size // 4)
        buffer, at = self._find(addresses, size, "read")
        if size >= 4:
            first = (at + buffer.address % 4) >> 2
            return [buffer.uint32s[first + i] for i in range(size // 4)]
        parts = [buffer.bytes[at + i].astype(np.uint32) << np.uint32(8 * i) for i in range(size)]
        return [sum(parts[1:], parts[0])]

    def store(self, addresses: np.ndarray, size: int, words: list[np.ndarray]) -> None:
        """The inverse of `load`; of addresses that are equal, the last lane's value stays."""
        if not addresses.size:
            return
        buffer, at = self._find(addresses, size, "write")
        if not buffer.writable:
            raise Fault(f"write to {buffer.name or 'a buffer'}, which is an operand")
        if size >= 4:
            first = (at + buffer.address % 4) >> 2
            for i in range(size // 4):
                buffer.uint32s[first + i] = words[i]
        else:
            for i in range(size):
                buffer.bytes[at + i] = (words[0] >> np.uint32(8 * i)).astype(np.uint8)

    def _find(self, addresses: np.ndarray, size: int, access: str) -> tuple[Buffer, np.ndarray]:
        """The buffer that all accesses lie in, and where in it."""
        odd = (addresses & np.uint64(min(size, 4) - 1)) != 0
        if odd.any():
            raise Fault(f"unaligned {access} of {size} bytes at {int(addresses[odd][0]):#x}")
        low, high = int(addresses.min()), int(addresses.max()) + size
        for buffer in self.buffers:
            if buffer.address <= low and high <= buffer.address + buffer.size:
                return buffer, (addresses - np.uint64(buffer.address)).astype(np.int64)
        near = [b for b in self.buffers if b.address <= high and low <= b.address + b.size]
        where = near[0].name or "a buffer" if near else "every buffer"
        raise Fault(f"{access} of {size} bytes out of bounds of {where}: {low:#x} to {high:#x}")


class Shared:
    """The LDS of many workgroups at once, `size` bytes each. It begins with garbage."""

    def __init__(self, workgroups: int, size: int):
        self.size = size
        self.stride = -(-max(size, 16) // 16) * 16
        self.bytes = np.full(workgroups * self.stride, 0xC5, np.uint8)
        self.uint32s = self.bytes.view(np.uint32)

    def load(self, workgroup: np.ndarray, address: np.ndarray, size: int) -> list[np.ndarray]:
        """As `Global.load`, for lanes (n,) of these workgroups."""
        at = self._find(workgroup, address, size)
        if size >= 4:
            return [self.uint32s[(at >> 2) + i] for i in range(size // 4)]
        parts = [self.bytes[at + i].astype(np.uint32) << np.uint32(8 * i) for i in range(size)]
        return [sum(parts[1:], parts[0])]

    def store(
        self, workgroup: np.ndarray, address: np.ndarray, size: int, words: list[np.ndarray]
    ) -> None:
        """As `Global.store`."""
        at = self._find(workgroup, address, size)
        if size >= 4:
            for i in range(size // 4):
                self.uint32s[(at >> 2) + i] = words[i]
        else:
            for i in range(size):
                self.bytes[at + i] = (words[0] >> np.uint32(8 * i)).astype(np.uint8)

    def _find(self, workgroup: np.ndarray, address: np.ndarray, size: int) -> np.ndarray:
        if address.size:
            if (address & np.uint32(size - 1)).any():
                raise Fault(f"unaligned LDS access of {size} bytes")
            if int(address.max()) + size > self.size:
                raise Fault(f"LDS access out of bounds: {int(address.max())} + {size}, {self.size}")
        return workgroup * self.stride + address.astype(np.int64)


def _view(address: int, size: int) -> np.ndarray:
    """Bytes of this process."""
    if size == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
