"""A stand-in for libamdhip64: the functions that ffi/driver.h calls, over the emulator."""

import collections
import ctypes
import dataclasses
import functools
import itertools
import struct
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import numpy as np

from jax_mx.launch import _ffi
from jax_mx.launch.code_object import CodeObject
from jax_mx.launch.emulation.emulator import ORDERS, Emulator
from jax_mx.launch.emulation.memory import Fault, Global

INVALID_DEVICE, NO_BINARY, NOT_FOUND, LAUNCH_FAILURE = 101, 209, 500, 719  # hipError_t
NAMES = {
    INVALID_DEVICE: "hipErrorInvalidDevice",
    NO_BINARY: "hipErrorNoBinaryForGpu",
    NOT_FOUND: "hipErrorNotFound",
    LAUNCH_FAILURE: "hipErrorLaunchFailure",
}


class HipError(Exception):
    """Ends a call with this code; the text is what hipGetErrorString gives."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Device:
    """An emulated chip, and the order that its waves run in (emulator.ORDERS)."""

    arch: str
    order: str


@dataclasses.dataclass
class Thread:
    """HIP's state of a thread: the current device, and the text of the last error."""

    device: int = 0
    error: str = ""
    strings: tuple[ctypes.Array[c_char], ...] = ()  # that C has pointers to


devices: list[Device] = []  # by the number that HIP has for them, from FIRST on
FIRST = 32  # beyond a machine's own: the handler keeps what is loaded by a device's number
# By the system's number: threading.local() forgets XLA's threads between two calls.
_threads: collections.defaultdict[int, Thread] = collections.defaultdict(Thread)
_modules: dict[int, tuple[Device, Emulator]] = {}
_functions: dict[int, tuple[Device, Emulator, str]] = {}
_numbers = itertools.count(1)
_keep: list[Any] = []  # what only C points at


def device(arch: str, order: str) -> int:
    """The number of a device that emulates `arch`; makes calls on the CPU platform find it.

    Raises:
      ValueError: no such order.
    """
    if order not in ORDERS:
        raise ValueError(f"order {order!r} is unknown; use one of {', '.join(ORDERS)}")
    _install()
    wanted = Device(arch, order)
    if wanted not in devices:
        devices.append(wanted)
    return FIRST + devices.index(wanted)


@functools.cache
def _install() -> None:
    """Once per process: calls on the CPU platform then launch through these functions."""
    addresses = {}
    for name, (types, function) in FUNCTIONS.items():
        callback = ctypes.CFUNCTYPE(c_int, *types)(_guarded(function))
        _keep.append(callback)
        addresses[name] = ctypes.cast(callback, c_void_p).value or 0
    for name, function in (("hipGetErrorName", _name), ("hipGetErrorString", _text)):
        callback = ctypes.CFUNCTYPE(c_void_p, c_int)(function)
        _keep.append(callback)
        addresses[name] = ctypes.cast(callback, c_void_p).value or 0
    _ffi.use_host_driver("hip", addresses)


def _guarded(function: Callable[..., None]) -> Callable[..., int]:
    """As C calls it: a status, never an exception."""

    def call(*args: Any) -> int:
        try:
            function(*args)
        except HipError as error:
            _here().error = str(error)
            return error.code
        except (Fault, NotImplementedError) as error:
            _here().error = str(error)
            return LAUNCH_FAILURE
        except BaseException as error:  # Ctrl-C too: else C reads a status that nobody gave
            _here().error = f"{type(error).__name__} in the emulator: {error}"
            return LAUNCH_FAILURE
        return 0

    return call


def _name(code: int) -> int:
    return _c_string(NAMES.get(code, "hipErrorUnknown"))


def _text(code: int) -> int:
    return _c_string(_here().error)


def _c_string(text: str) -> int:
    """The address of its bytes, which live until this thread has two others."""
    here = _here()
    here.strings = (*here.strings[-1:], ctypes.create_string_buffer(text.encode()))
    return ctypes.addressof(here.strings[-1])


def _here() -> Thread:
    return _threads[threading.get_ident()]


# ---- the functions ---
def _init(flags: int) -> None:
    pass


def _properties(properties: int, number: int) -> None:
    if not 0 <= number - FIRST < len(devices):
        raise HipError(INVALID_DEVICE, f"there is no emulated device {number}")
    arch = f"{devices[number - FIRST].arch}:sramecc+:xnack-".encode()
    (c_char * 256).from_address(properties + 1160).value = arch  # gcnArchName


def _set_device(number: int) -> None:
    _here().device = number


def _load(module: Any, image: int) -> None:
    """HIP is not told the size either: section headers end a code object."""
    header = ctypes.string_at(image, 64)
    (sections,) = struct.unpack_from("<Q", header, 40)
    width, count = struct.unpack_from("<HH", header, 58)
    code = CodeObject(ctypes.string_at(image, sections + width * count))
    on = devices[_here().device - FIRST]
    if code.arch != on.arch:
        raise HipError(NO_BINARY, f"the code is for {code.arch}, the device is {on.arch}")
    module[0] = _handle(_modules, (on, Emulator(code)))


def _function(function: Any, module: int, name: bytes) -> None:
    on, emulator = _modules[module]
    symbol = name.decode()
    if symbol not in emulator.code.kernels:
        raise HipError(NOT_FOUND, f"there is no kernel {symbol}")
    function[0] = _handle(_functions, (on, emulator, symbol))


def _clear(address: int, value: int, size: int, stream: int) -> None:
    ctypes.memset(address, value, size)


def _is_capturing(stream: int, status: Any) -> None:
    status[0] = 0


def _launch(
    function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, lds: int, stream: int,
    params: int, extra: Any,
) -> None:  # fmt: skip
    """hipModuleLaunchKernel with the argument block in `extra`: pointer, size, end."""
    on, emulator, symbol = _functions[function]
    if params or [extra[0], extra[2], extra[4]] != [1, 2, 3] or lds:
        raise Fault("only launches with HIP_LAUNCH_PARAM_BUFFER_POINTER are known")
    size = c_size_t.from_address(extra[3]).value
    block = bytearray(ctypes.string_at(extra[1], size))
    memory = Global()
    places = {0: 0}
    for i, (address, length, is_result) in enumerate(_ffi.launching()):
        if address == 0:  # an operand that the call does not have
            continue
        array = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
        places[address] = memory.add(array, is_result, name=f"buffer {i}")
    for parameter in emulator.code.kernels[symbol].parameters:
        if parameter.value_kind == "global_buffer":
            (address,) = struct.unpack_from("<Q", block, parameter.offset)
            if address not in places:
                raise Fault(f"the pointer {address:#x} is to no buffer of the call")
            struct.pack_into("<Q", block, parameter.offset, places[address])
    emulator.launch(symbol, (gx, gy, gz), (bx, by, bz), bytes(block), memory, on.order)


def _handle(table: dict[int, Any], value: Any) -> int:
    number = next(_numbers)  # threads may ask at once
    table[number] = value
    return number


FUNCTIONS: dict[str, tuple[tuple[Any, ...], Callable[..., None]]] = {
    "hipInit": ((c_uint,), _init),
    "hipGetDevicePropertiesR0600": ((c_void_p, c_int), _properties),
    "hipSetDevice": ((c_int,), _set_device),
    "hipModuleLoadData": ((POINTER(c_void_p), c_void_p), _load),
    "hipModuleGetFunction": ((POINTER(c_void_p), c_void_p, c_char_p), _function),
    "hipMemsetAsync": ((c_void_p, c_int, c_size_t, c_void_p), _clear),
    "hipStreamIsCapturing": ((c_void_p, POINTER(c_int)), _is_capturing),
    "hipModuleLaunchKernel": (
        (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, POINTER(c_void_p)),
        _launch,
    ),
}
