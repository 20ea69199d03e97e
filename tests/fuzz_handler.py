"""Random calls of the handler, in a process of its own without JAX: an error, or the right launch.

    python tests/fuzz_handler.py EXTENSION RUNTIME DRIVER [--vendor hip] [--seed N] [--cases N]

EXTENSION is _ffi.abi3.so, RUNTIME call_handler.cc and DRIVER fake_driver.cc, both compiled. This
program computes the right end of a call from the comment that begins ffi/launch.cc. Each case is
drawn from its own number, counted from the seed on, which the failure names.
"""

import argparse
import collections
import copy
import ctypes
import importlib.util
import json
import mmap
import random
import struct
import sys

import handler_alone  # noqa: F401
import images

from jax_mx.launch.rule import ABI

WIDTHS = {6: 1, 16: 2, 11: 4, 9: 8}  # bytes of an element, by XLA's number of its type
ELEMENTS = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)  # by CUDA's number of a tensor map's type
SWIZZLED = (0, 32, 64, 128, 128, 128, 128)
UNITS, SHARED = 132, {"cuda": 232448, "hip": 65536}  # what the stand-in says of its device
CHIP = {"cuda": "sm_90", "hip": "gfx942"}
MOST, LEAST = 2**63 - 1, -(2**63)
ODD = (0, 1, -1, 2, -2, 3, 5, 7, 16, 33, 99, 255, 256, 1024, 1025, 65536, 2**31 - 1, 2**31, 2**32)
ODD += (-(2**31), 2**40, 2**62, MOST, LEAST, -99, 17, 24, 48, 64, 128)


class Refused(Exception):
    """The call is an error, for this reason."""


def insist(holds: bool, why: str) -> None:
    if not holds:
        raise Refused(why)


# ---- what a call must come to ---
OPTIONAL = ("divide", "grid", "scalars", "maps", "parameters", "settings", "scratch")
OPTIONAL += ("scratch_bytes",)


def rows(array: list[int], width: int) -> list[list[int]]:
    insist(len(array) % width == 0, "size of an attribute")
    return [array[i : i + width] for i in range(0, len(array), width)]


class Rule:
    """A kernel's attributes, checked."""

    def __init__(self, kernel: dict):
        for name in ("sha256", "symbols"):
            insist(isinstance(kernel.get(name), str), "an attribute's type")
        for name in ("align", "threads", *OPTIONAL):
            value = kernel.get(name, [])
            insist(isinstance(value, list) and (name in kernel or name in OPTIONAL), "type")
        get = {name: kernel.get(name, []) for name in ("align", "threads", *OPTIONAL)}
        self.symbols = kernel["symbols"].split(",")
        count = len(self.symbols)
        self.buffers = len(get["align"]) // count
        insist(self.buffers in range(1, 17), "buffers")
        insist(len(get["align"]) == self.buffers * count, "align")
        insist(len(get["threads"]) == 3 * count, "threads")
        self.align, self.threads = rows(get["align"], self.buffers), rows(get["threads"], 3)
        insist(min(get["align"]) > 0, "an alignment")
        for x, y, z in self.threads:
            insist(all(1 <= n <= 1024 for n in (x, y, z)) and x * y * z <= 1024, "threads")
        self.scalars = rows(get["scalars"], 4)
        self.scratch = rows(get["scratch"], 2)
        insist(len(self.scalars) <= 24 and len(self.scratch) <= 4, "too many")
        self.grid = self.terms(rows(get["grid"], 6), 3 * count)
        self.divide = self.terms([[*row, 0] for row in rows(get["divide"], 5)], count)
        self.areas = self.terms(rows(get["scratch_bytes"], 6), len(self.scratch))
        for size, buffer, _, _ in self.scalars:
            insist(size in (4, 8) and self.names(buffer), "a scalar")
        settings = rows(get["settings"], 5) or [[0, 1, 1, 1, 0]] * count
        insist(len(settings) == count, "settings")
        self.settings = settings
        for shared, *cluster, early in settings:
            insist(0 <= shared <= 2**30, "shared memory")
            insist(all(1 <= n <= 16 for n in cluster), "a cluster")
            insist(cluster[0] * cluster[1] * cluster[2] <= 16, "a cluster")
            insist(early in (0, 1), "early start")
        self.maps = list(self.maps_of(list(get["maps"])))
        for i, (buffer, clear) in enumerate(self.scratch):
            insist(0 <= buffer < self.buffers and clear in (0, 1), "scratch")
            insist(any(row[0] == i for row in self.areas), "scratch without a size")
        self.parameters = [[] for _ in range(count)]
        numbers = (self.buffers, len(self.scalars), len(self.maps))
        for entry, source, index in rows(get["parameters"], 3):
            insist(0 <= entry < count and 0 <= source < 4, "a parameter")
            insist(1 <= index <= 64 if source == 3 else 0 <= index < numbers[source], "a parameter")
            self.parameters[entry].append((source, index))
            insist(len(self.parameters[entry]) <= 48, "parameters")
        usual = [(0, i) for i in range(self.buffers)] + [(1, i) for i in range(len(self.scalars))]
        self.parameters = [entry_parameters or usual for entry_parameters in self.parameters]

    def names(self, buffer: int) -> bool:
        return -2 <= buffer < self.buffers

    def terms(self, table: list[list[int]], count: int) -> list[list[int]]:
        for index, buffer, _, _, divisor, summand in table:
            insist(0 <= index < count and self.names(buffer), "a term")
            insist(divisor >= 1 and 0 <= summand < 8, "a term")
        return table

    def maps_of(self, numbers: list[int]):
        count = 0
        while numbers:
            insist(len(numbers) >= 6 and count < 8, "maps")
            buffer, element, rank, swizzle, promotion, fill = numbers[:6]
            insist(0 <= buffer < self.buffers and 0 <= element < 13 and 1 <= rank <= 5, "a map")
            insist(0 <= swizzle < 7 and 0 <= promotion < 4 and fill in (0, 1), "a map")
            insist(not (fill == 1 and element < 6), "NaN for integers")
            fields, numbers = numbers[6 : 6 + 11 * rank - 5], numbers[6 + 11 * rank - 5 :]
            insist(len(fields) == 11 * rank - 5, "maps")
            dims, strides = rows(fields[: 6 * rank], 6), rows(fields[6 * rank :], 5)
            for buffer_of, _, _, times, divisor, *box in dims + strides:
                insist(self.names(buffer_of) and times >= 1 and divisor >= 1, "a map's length")
                insist(all(1 <= n <= 256 for n in box), "a box")
            row = dims[0][5] * ELEMENTS[element]
            insist(row % 16 == 0 and (swizzle == 0 or row <= SWIZZLED[swizzle]), "a box's row")
            yield (buffer, element, swizzle, promotion, fill, dims, strides)
            count += 1

    def sizes(self, entry: int) -> list[int]:
        """The sizes of its parameters, in bytes."""
        wide = {0: lambda _: 8, 1: lambda i: self.scalars[i][0], 2: lambda _: 128, 3: lambda n: n}
        return [wide[source](index) for source, index in self.parameters[entry]]


def fits(value: int) -> int:
    insist(LEAST <= value <= MOST, "an overflow")
    return value


class Run:
    """A rule on buffers: (address, bytes, merged dimensions) each."""

    def __init__(self, rule: Rule, buffers: list[tuple[int, int, list[int]]], operands: int):
        self.rule, self.buffers, self.operands = rule, buffers, operands

    def extent(self, buffer: int, start: int, stop: int) -> int:
        if buffer < 0:
            return start if buffer == -1 else UNITS
        dims = self.buffers[buffer][2]
        rank, product = len(dims), 1
        start = start + rank if start < 0 else start
        stop = stop + rank if stop < 0 else min(stop, rank)
        insist(0 <= start <= stop, "an extent beyond the rank")
        for n in dims[start:stop]:
            product = fits(product * n)
        return product

    def size(self, table: list[list[int]], index: int) -> int:
        terms = sorted((row for row in table if row[0] == index), key=lambda row: row[5])
        if not terms:
            return 1
        sums: dict[int, int] = {}
        for _, buffer, start, stop, divisor, summand in terms:
            n = self.extent(buffer, start, stop)
            insist(n >= 0, "a negative factor")
            sums[summand] = fits(sums.get(summand, 1) * -(-n // divisor))
        return fits(sum(sums.values()))

    def length(self, buffer: int, start: int, stop: int, times: int, divisor: int) -> int:
        value = fits(self.extent(buffer, start, stop) * times)
        insist(value % divisor == 0, "a length that leaves a rest")
        return value // divisor

    def serves(self, entry: int) -> bool:
        aligned = zip(self.buffers, self.rule.align[entry], strict=True)
        if any(address % by for (address, _, _), by in aligned):
            return False
        try:
            wanted = [row for row in self.rule.divide if row[0] == entry]
            return all(self.extent(*row[1:4]) % row[4] == 0 for row in wanted)
        except Refused:
            return False

    def encoded(self, index: int) -> bytes:
        """As the stand-in packs a tensor map."""
        buffer, element, swizzle, promotion, fill, dims, strides = self.rule.maps[index]
        address, held, _ = self.buffers[buffer]
        lengths = [self.length(*row[:5]) for row in dims]
        steps = [self.length(*row) for row in strides]
        insist(all(1 <= n <= 2**32 for n in lengths), "a map's dimension")
        insist(all(0 <= n < 2**40 and n % 16 == 0 for n in steps), "a map's stride")
        reach = ELEMENTS[element] * lengths[0]
        reach += sum((n - 1) * step for n, step in zip(lengths[1:], steps, strict=True))
        insist(reach <= held, "a map beyond its buffer")
        insist(address != 0 and address % 16 == 0, "a map's address")
        rank = len(dims)
        packed = struct.pack(
            "<8BQ5Q4Q5H6x",
            *(element, rank, 0, swizzle, promotion, fill, 0, 0, address),
            *lengths + [0] * (5 - rank),
            *steps + [0] * (5 - rank),
            *[row[5] for row in dims] + [0] * (5 - rank),
        )
        return packed + bytes(128 - len(packed))

    def launch(self, steps: int) -> dict | None:
        """The last one of so many launches; None where there is none."""
        rule = self.rule
        insist(len(self.buffers) == rule.buffers, "another number of buffers")
        serving = [i for i in range(len(rule.symbols)) if self.serves(i)]
        insist(bool(serving), "no entry fits")
        entry = serving[0]
        shared, *cluster, early = rule.settings[entry]
        grid = [self.size(rule.grid, 3 * entry + axis) for axis in range(3)]
        for n, most, by in zip(grid, (2**31 - 1, 65535, 65535), cluster, strict=True):
            insist(n <= most and n % by == 0, "the grid")
        scalars = [self.extent(*row[1:]) for row in rule.scalars]
        for (width, *_), value in zip(rule.scalars, scalars, strict=True):
            insist(width == 8 or -(2**31) <= value < 2**31, "a scalar")
        if 0 in grid:
            return None
        cleared = []
        for i, (buffer, clear) in enumerate(rule.scratch):
            insist(buffer >= self.operands, "scratch that is an operand")
            size = self.size(rule.areas, i)
            insist(size <= self.buffers[buffer][1], "scratch that is too small")
            if clear and size:
                cleared.append([self.buffers[buffer][0], 0, size])
        values = {
            0: lambda i: struct.pack("<Q", self.buffers[i][0]),
            1: lambda i: struct.pack("<q", scalars[i])[: rule.scalars[i][0]],
            2: self.encoded,
            3: bytes,
        }
        parameters = [values[source](index) for source, index in rule.parameters[entry]]
        wide = cluster != [1, 1, 1]
        attributes = ({"4": cluster} if wide else {}) | (
            {"6": [1, 0, 0]} if early and steps > 1 and not cleared else {}
        )
        return {
            "call": "cuLaunchKernelEx" if attributes else "cuLaunchKernel",
            "symbol": rule.symbols[entry],
            "grid": grid,
            "threads": rule.threads[entry],
            "shared": shared,
            "attributes": attributes,
            "parameters": parameters,
            "cleared": cleared * max(steps, 1),
        }


def merged(dims: list[int], merge: list[int]) -> list[int]:
    if len(dims) < len(merge):
        return dims
    alone = len(dims) - len(merge)
    products = [1] * (max(merge, default=-1) + 1)
    for n, group in zip(dims[alone:], merge, strict=True):
        products[group] *= n
    return dims[:alone] + products


class Case:
    """One call: its attributes, its buffers, what the driver says of the kernel's parameters."""

    def __init__(self, number: int, vendor: str):
        self.rng = rng = random.Random(number)
        self.vendor = vendor
        self.operands, self.results = rng.randint(0, 4), rng.randint(1, 3)
        if rng.random() < 0.02:
            self.operands = 15
        self.absent = sorted(rng.sample(range(self.operands + 1), rng.choice((0, 0, 0, 1))))
        self.absent = [i for i in self.absent if i < self.operands + 1]
        self.count = self.operands + len(self.absent) + self.results  # as the kernel numbers them
        usual = (1, 1, 2, 3, 4, 7, 8, 32, 33, 64, 100, 256)
        self.dims = []
        for _ in range(self.operands + self.results):
            dims = [rng.choice(usual) for _ in range(rng.randint(0, 6))]
            if dims and rng.random() < 0.2:
                dims[rng.randrange(len(dims))] = rng.choice((0, 4096, 2**20, 2**31, 2**32, 2**33))
            while product(dims) >= 2**50:
                dims.pop()
            self.dims.append(dims)
        self.types = [rng.choice([*WIDTHS]) for _ in self.dims]
        self.offsets = [
            256 * rng.randrange(1024) + (rng.randrange(64) if rng.random() < 0.1 else 0)
            for _ in self.dims
        ]
        self.image = self.an_image()
        kernel = self.kernel()
        self.sizes = None
        try:
            rule = Rule(kernel)
            self.sizes = rule.sizes(0)
        except Refused:
            pass
        if vendor == "hip":
            self.image = self.code_object(kernel)
            kernel["image"], kernel["sha256"] = self.image, images.sha256(self.image)
        if rng.random() < 0.05:
            self.sizes = [rng.choice((4, 8, 128)) for _ in range(rng.randint(0, 8))]
        self.attributes = {"abi": ABI, "kernels": {CHIP[vendor]: kernel}}
        if self.absent:
            self.attributes["absent"] = self.absent
        if rng.random() < 0.3:
            groups = [0]
            for _ in range(rng.randint(0, 3)):
                groups.append(groups[-1] + rng.choice((0, 1)))
            self.attributes["merge"] = groups
        if rng.random() < 0.1:
            self.attributes["device"] = rng.choice((0, 1, 63))
        if rng.random() < 0.1:
            self.attributes["kernels"][rng.choice(("sm_80", "gfx950", ""))] = kernel
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            self.mutate()
        self.steps = rng.choice((0, 0, 1, 2))  # launches of the same, where a call says so; 0: none

    # ---- what is drawn ---
    def extent(self) -> list[int]:
        rng = self.rng
        if rng.random() < 0.15:
            return [-1, rng.choice((0, 1, 4, 100)), 0]
        if rng.random() < 0.1:
            return [-2, 0, 0]
        if rng.random() < 0.7:
            return [rng.randrange(self.count), 0, rng.choice((99, 99, 99, 1, 2))]
        start = rng.choice((0, 1, -1, -2))
        return [rng.randrange(self.count), start, rng.choice((99, -1, start + 1))]

    def term(self, index: int) -> list[int]:
        rng = self.rng
        return [index, *self.extent(), rng.choice((1, 128, 8192, MOST)), rng.choice((0, 0, 1))]

    def kernel(self) -> dict:
        rng = self.rng
        count = rng.choice((1, 2, 2, 3))
        kernel = {
            "sha256": images.sha256(self.image),
            "image": self.image,
            "symbols": ",".join(f"kernel_{i}" for i in range(count)),
            "align": [rng.choice((1, 1, 2, 4, 16, 32)) for _ in range(count * self.count)],
            "threads": [n for _ in range(count) for n in rng.choice(((512, 1, 1), (32, 4, 8)))],
        }
        kernel["align"][-self.count :] = [1] * self.count
        number = rng.choice((0, 1, 2, 3, 4))
        kernel["grid"] = [n for _ in range(number) for n in self.term(rng.randrange(3 * count))]
        if rng.random() < 0.3:
            kernel["divide"] = [rng.randrange(count), *self.extent(), rng.choice((1, 2, 32))]
        number = rng.choice((0, 1, 2, 4))
        kernel["scalars"] = [n for _ in range(number) for n in (rng.choice((4, 8)), *self.extent())]
        if rng.random() < 0.3:
            some = ((1, 1, 1), (2, 1, 1), (1, 2, 4), (16, 1, 1))
            cluster = some[0] if rng.random() < 0.7 else rng.choice(some)
            one = [rng.choice((0, 1024, 200_000)), *cluster, rng.choice((0, 1))]
            kernel["settings"] = one * count if self.vendor == "cuda" else [0, 1, 1, 1, 0] * count
        if rng.random() < 0.3:
            terms = rng.randint(1, 2)
            first = self.count - self.results
            kernel["scratch"] = [
                n
                for _ in range(terms)
                for n in (rng.randrange(first, self.count), rng.choice((0, 1)))
            ]
            kernel["scratch_bytes"] = [
                n for i in range(terms) for _ in range(rng.randint(1, 2)) for n in self.term(i)
            ]
        maps = rng.choice((0, 0, 0, 1, 2)) if self.vendor == "cuda" else 0
        kernel["maps"] = [n for _ in range(maps) for n in self.tensor_map()]
        if rng.random() < 0.4 or maps:
            one = [(0, rng.randrange(self.count)), (3, rng.choice((4, 8, 64)))]
            one += [(1, i) for i in range(number)] + [(2, i) for i in range(maps)]
            rng.shuffle(one)
            kernel["parameters"] = [n for e in range(count) for row in one for n in (e, *row)]
        for name in OPTIONAL:
            if name in kernel and not kernel[name] and rng.random() < 0.5:
                del kernel[name]
        return kernel

    def tensor_map(self) -> list[int]:
        """Mostly of a buffer as it is: rows of a multiple of 16 bytes."""
        rng = self.rng
        here = [i for i in range(self.count) if i not in self.absent]
        buffer = rng.choice(here)
        element, rank = rng.choice((0, 9, 7, rng.randrange(13))), rng.choice((1, 2, 2, 3, 4, 5))
        head = [
            buffer,
            element,
            rank,
            rng.choice((0, 0, 3)),
            rng.choice((0, 3)),
            rng.choice((0, int(element > 5))),
        ]
        constant = rng.random() < 0.6
        for _ in range(rank):
            length = [-1, rng.choice((1, 2, 4)), 0, 1, 1] if constant else [*self.extent(), 1, 1]
            head += [*length, rng.choice((16, 32))]
        for _ in range(rank - 1):
            head += [-1, rng.choice((1, 2)), 0, 16, 1] if constant else [*self.extent(), 16, 1]
        return head

    def an_image(self) -> bytes:
        """One of a few, so that a process does not keep too many."""
        rng = self.rng
        if rng.random() < 0.97:
            return images.cuda(f"image {rng.randrange(8)}")
        return self.damaged(images.cuda("image 0"), 40)

    def damaged(self, image: bytes, kinds: int) -> bytes:
        """Cut off or changed, in one of so many ways."""
        rng = random.Random(self.rng.randrange(kinds))
        if rng.random() < 0.3:
            return image[: rng.randrange(len(image))]
        changed, header = bytearray(image), rng.random() < 0.5
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(64 if header else len(image))
            changed[at] = rng.choice((0, 255, 128, rng.randrange(256)))
        return bytes(changed)

    def code_object(self, kernel: dict) -> bytes:
        """A code object whose metadata names the kernels; of few sizes, damaged or not."""
        rng, sizes = self.rng, self.sizes or [8]
        sizes = [n if n <= 8 else 8 for n in sizes[:8]]
        while len(sizes) < len(self.sizes or []):
            sizes.append(8)
        symbols = str(kernel.get("symbols")).split(",")
        image = images.amd(dict.fromkeys(symbols, sizes), 0x4C)
        if rng.random() < 0.5:
            return self.damaged(image, 1 << 30)
        return image

    def mutate(self) -> None:
        """Changes something that the call says to anything at all."""
        rng = self.rng
        where: dict = self.attributes
        kernels = where.get("kernels")
        if isinstance(kernels, dict) and kernels and rng.random() < 0.8:
            inner = kernels[rng.choice([*sorted(kernels)])]
            where = inner if isinstance(inner, dict) else where
        name = rng.choice([*sorted(where), "merge", "absent", "device", "settings", "image"])
        value, chance = where.get(name), rng.random()
        if chance < 0.12:
            where.pop(name, None)
        elif chance < 0.24:
            where[name] = rng.choice((1.5, 7, "text", [], {}, (1, 2), {"a": {}}, [1], -1, 2**32))
        elif isinstance(value, list) and value:
            changed = list(value)
            for _ in range(rng.randint(1, 2)):
                changed[rng.randrange(len(changed))] = rng.choice(ODD)
            if rng.random() < 0.3:
                changed = changed[: rng.randrange(len(changed))] + changed * rng.choice((0, 1, 9))
            where[name] = changed
        elif isinstance(value, (str, bytes)) and name != "symbols":
            where[name] = value[: rng.randrange(len(value) + 1)]
        elif isinstance(value, int):
            where[name] = rng.choice(ODD)
        elif name in ("merge", "absent"):
            where[name] = [rng.choice((0, 1, 2, 15, 16, -1)) for _ in range(rng.randint(0, 4))]

    @property
    def sent(self) -> dict:
        """The attributes, or a call of several launches that does the same."""
        attributes, absent = self.attributes, self.attributes.get("absent", [])
        count = self.operands + (len(absent) if isinstance(absent, list) else 0)
        is_right = isinstance(absent, list) and absent == sorted(set(absent) & {*range(count)})
        if not self.steps or not is_right:
            self.steps = 0
            return attributes
        numbers = iter(range(self.operands + self.results))
        step = {name: attributes[name] for name in ("kernels", "merge") if name in attributes}
        step["operands"] = [-1 if i in absent else next(numbers) for i in range(count)]
        step["results"] = [*numbers]
        call = {name: attributes[name] for name in ("abi", "device") if name in attributes}
        return call | {"steps": {str(i): step for i in range(self.steps)}}

    # ---- what must come of it ---
    def expected(self, known: set[bytes], base: int) -> dict | None:
        attributes = self.attributes
        abi = attributes.get("abi")
        insist(type(abi) is int and abi in (ABI - 1, ABI), "abi")
        kernels = attributes.get("kernels")
        insist(isinstance(kernels, dict) and bool(kernels), "kernels")
        rules, binaries = {}, {}
        for chip in sorted(kernels):
            kernel = kernels[chip]
            insist(isinstance(kernel, dict), "a kernel")
            rules[chip] = Rule(kernel)
            if "image" in kernel:
                image = kernel["image"]
                image = image.encode() if isinstance(image, str) else image
                insist(isinstance(image, bytes), "an image's type")
                whole = image in known or (
                    images.sha256(image) == kernel["sha256"] and is_whole(image)
                )
                insist(whole and images.sha256(image) == kernel["sha256"], "an image")
                known.add(image)
                binaries[chip] = True
            else:
                binaries[chip] = kernel["sha256"] in {images.sha256(image) for image in known}
        insist(any(binaries.values()), "no binary")
        device, merge = attributes.get("device", 0), attributes.get("merge", [])
        absent = attributes.get("absent", [])
        insist(isinstance(device, int) and isinstance(merge, list), "a type")
        insist(isinstance(absent, list), "a type")
        insist(all(0 <= n < len(merge) for n in merge), "merge")
        insist(absent == sorted(set(absent)) and all(0 <= n < 16 for n in absent), "absent")
        insist(0 <= device < 64, "device")
        insist(CHIP[self.vendor] in kernels and binaries[CHIP[self.vendor]], "another chip")
        rule = rules[CHIP[self.vendor]]
        if self.vendor == "cuda":
            for i in range(len(rule.symbols)):
                insist(rule.sizes(i) == (self.sizes or []), "parameters of other sizes")
                insist(rule.settings[i][0] <= SHARED["cuda"], "shared memory")
        buffers, here = [], iter(zip(self.offsets, self.types, self.dims, strict=True))
        left = list(absent)
        for i in range(self.operands + len(left)):
            if left and left[0] == i:
                left.pop(0)
                buffers.append((0, 0, merged([], merge)))
                continue
            if i >= self.operands + len(absent) - len(left):
                break
            offset, element, dims = next(here)
            buffers.append((base + offset, WIDTHS[element] * product(dims), merged(dims, merge)))
        insist(not left, "absent beyond the operands")
        operands = len(buffers)
        for offset, element, dims in here:
            buffers.append((base + offset, WIDTHS[element] * product(dims), merged(dims, merge)))
        insist(len(buffers) <= 16, "too many buffers")
        return Run(rule, buffers, operands).launch(self.steps)


def product(numbers) -> int:
    out = 1
    for n in numbers:
        out *= n
    return out


def is_whole(image: bytes) -> bool:
    """Every header, section and segment of a 64-bit ELF file lies inside."""
    if len(image) < 64 or image[:6] != b"\x7fELF\x02\x01":
        return False
    segments, sections = struct.unpack_from("<QQ", image, 0x20)
    width, count, section, sections_count = struct.unpack_from("<HHHH", image, 0x36)
    inside = lambda at, size: at <= len(image) and size <= len(image) - at  # noqa: E731
    if section < 64 or not sections_count or not inside(sections, section * sections_count):
        return False
    if count and (width < 56 or not inside(segments, width * count)):
        return False
    for i in range(sections_count):
        at = sections + i * section
        (note_type,) = struct.unpack_from("<I", image, at + 4)
        if note_type != 8 and not inside(*struct.unpack_from("<QQ", image, at + 24)):
            return False
    return all(
        inside(*(struct.unpack_from("<Q", image, segments + i * width + o)[0] for o in (8, 32)))
        for i in range(count)
    )


# ---- calling ---
def encode(attributes: dict) -> bytes:
    """As call_handler.cc reads them; names in order, as XLA has them."""
    out = struct.pack("<I", len(attributes))
    for name in sorted(attributes):
        text = name.encode()
        out += struct.pack("<I", len(text)) + text
        value = attributes[name]
        if isinstance(value, dict):
            out += b"D" + encode(value)
        elif isinstance(value, (str, bytes)):
            text = value.encode() if isinstance(value, str) else value
            out += b"S" + struct.pack("<I", len(text)) + text
        elif isinstance(value, list):
            out += b"A" + struct.pack(f"<I{len(value)}q", len(value), *value)
        elif isinstance(value, tuple):
            out += b"H" + struct.pack(f"<I{len(value)}i", len(value), *value)
        elif isinstance(value, int):
            out += b"I" + struct.pack("<q", value)
        else:
            out += b"W" + struct.pack("<f", value)
    return out


class Handler:
    """The extension, called as XLA calls it."""

    def __init__(self, extension: str, runtime: str, driver: str, vendor: str):
        spec = importlib.util.spec_from_file_location("jax_mx.launch._ffi", extension)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.use_host_driver(vendor, driver)
        self.driver, self.runtime = ctypes.CDLL(driver), ctypes.CDLL(runtime)
        self.driver.fake_report.restype = ctypes.c_char_p
        for name in ("handler_register", "handler_build", "handler_run"):
            getattr(self.runtime, name).restype = ctypes.c_char_p
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        stages = module.registrations()["cpu"]
        self.instantiate, self.execute = (
            ctypes.c_void_p(pointer(stages[name], None)) for name in ("instantiate", "execute")
        )
        assert self.runtime.handler_register(self.instantiate) is None
        self.arena = mmap.mmap(-1, 1 << 24)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.arena))

    def call(self, case: Case, sent: dict) -> tuple[str | None, dict]:
        """(the error, what the driver wrote down)."""
        sizes = case.sizes or []
        self.driver.fake_parameters(
            (ctypes.c_int64 * len(sizes))(*sizes), ctypes.c_int64(len(sizes)), ctypes.c_int64(0)
        )
        context = ctypes.c_void_p()
        blob = encode(sent)
        error = self.runtime.handler_build(self.instantiate, blob, ctypes.byref(context))
        if error is None:
            ranks = [len(dims) for dims in case.dims]
            dims = [n for dims in case.dims for n in dims]
            longs = lambda numbers: (ctypes.c_int64 * len(numbers))(*numbers)  # noqa: E731
            error = self.runtime.handler_run(
                *(self.execute, context, ctypes.c_int64(case.operands)),
                *(ctypes.c_int64(case.results), longs(case.types), longs(ranks), longs(dims)),
                longs([self.base + offset for offset in case.offsets]),
            )
        self.runtime.handler_free(context)
        return error and error.decode(errors="replace"), json.loads(self.driver.fake_report())


def check(case: Case, handler: Handler, known: set[bytes], launches: int) -> tuple[str, int]:
    """The end of the call; raises AssertionError if another one is right."""
    sent = case.sent
    try:
        want, why = case.expected(known, handler.base), None
    except Refused as refused:
        want, why = None, str(refused)
    if want and sum(size for _, _, size in want["cleared"]) > 1 << 20:
        return "left out", launches  # more memory than there is here
    error, report = handler.call(case, sent)
    done = report["launches"] - launches
    if case.vendor == "hip":  # its metadata may say anything: what is launched must be right
        assert done in (0, max(case.steps, 1)) and (why is None or error is not None), (why, error)
        if done:
            last = report["last"]
            assert (last["symbol"], last["grid"]) == (want["symbol"], want["grid"]), last
    elif why is not None:
        assert error is not None and done == 0, f"no error, expected one about {why}"
    else:
        assert error is None, f"{error}; expected {want}"
        assert done == (want is not None) * max(case.steps, 1), f"{done} launches"
        if want is not None:
            last = report["last"] | {
                "cleared": [n for event, n in report["events"] if event == "clear"]
            }
            last.pop("entry")
            last["parameters"] = [bytes.fromhex(text) for text in last["parameters"]]
            assert last == want, f"launched {last}, expected {want}"
    if error is not None:
        assert error.startswith("jax_mx: ") and "\n" not in error, error
    return "refused" if error else "launched" if done else "nothing to do", report["launches"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("extension", "runtime", "driver"):
        parser.add_argument(name)
    parser.add_argument("--vendor", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    options = parser.parse_args()
    handler = Handler(options.extension, options.runtime, options.driver, options.vendor)
    outcomes, known, launches = collections.Counter(), set(), 0
    for number in range(options.seed, options.seed + options.cases):
        case = Case(number, options.vendor)
        print(number, end="\r", file=sys.stderr)
        try:
            outcome, launches = check(copy.copy(case), handler, known, launches)
        except BaseException:
            print(f"case {number}: {case.attributes}", file=sys.stderr)
            raise
        outcomes[outcome] += 1
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
