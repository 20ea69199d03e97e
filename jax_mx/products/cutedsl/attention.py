"""A token's attention to those before it, and its place in their cache: a step of a chain.

A cluster has a row of x and the heads that share keys. Its warps take 16 positions of the cache at
a time, side by side, and add up what they have: the largest scores, sums of weights, weighted
values. These meet in shared memory, first a thread block's, then the cluster's.

Scores are products of mma.sync, q K^T, whose rows are heads. Their weights are the second operand
of the next one, V^T w, whose columns are heads. All operands are registers. So each lane reads
whole pieces of 16 bytes, elements in an order of its own: which one does not matter to a score, as
queries lie alike.

A launch may start before the one ahead of it in the same call has ended, which writes x. It reads
the cache before that: no launch of a call writes the cache that another one reads.

Waiting: all threads of a thread block meet once, then all of its cluster twice.
"""

import math

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute, range_constexpr

from jax_mx.launch.rule import Extent, Factor, GridTerm, Scalar, constant
from jax_mx.products.cutedsl.matmul_few import product
from jax_mx.products.cutedsl.products import ProductEntry, element, vector
from jax_mx.quantizing.facts.product_kernels import ATTENDED_DEPTHS, ATTENDED_HEADS, ProductKernel
from jax_mx.quantizing.facts.signatures import Array, Role
from jax_mx.quantizing.kernels.cutedsl import convert
from jax_mx.quantizing.kernels.cutedsl.kernel import mapped, two_of_block

POSITIONS = 16  # that a warp has at a time
LEAST = -3.0e38  # a score below any that counts
PAD = 4  # floats between heads in shared memory, so that lanes write to other banks


def power_of_2(value: Float32) -> Float32:
    """2^value; subnormal ones are zeros."""
    return convert.ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32, value)


def over_four(value, join):
    """The values of four neighbouring lanes, joined by a function of two."""
    for offset in (1, 2):
        value = join(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


def of_columns(value, q: Int32) -> list:
    """The values of the lanes of heads 2 q and 2 q + 1."""
    return [cute.arch.shuffle_sync(value, offset=8 * q + 4 * e) for e in range(2)]


def halves_of(word: Uint32) -> tuple:
    """A word's two bfloat16 as floats."""
    low, high = word << Uint32(16), word & Uint32(0xFFFF0000)
    return convert.bits_to_float(low), convert.bits_to_float(high)


class Attention(ProductEntry):
    """See above; of bfloat16."""

    dtypes = ("bfloat16",)
    early_start = True

    def __init__(self, product: ProductKernel, arch: str, depth: int):
        super().__init__(product, arch)
        tile = self.tuned("Attention")
        self.split, self.warps = tile["split"], tile["warps"]
        self.threads = 32 * self.warps
        self.depth = depth
        self.pieces_of_row = depth // 32  # of eight elements, that a lane has of a row
        self.columns_of_lane = depth // 8  # of values
        self.pitch = depth + PAD
        self.elements_per_thread = ATTENDED_HEADS * depth // self.threads
        self.divide = (Factor(Extent(self.signature.number("keys"), 3), depth),)

    def align_of(self, array: Array, itemsize: int) -> int:
        """Vectors of rows."""
        del itemsize
        return 4 if array.name == "position" else 16

    def element_of(self, array: Array):
        """Floats are bfloat16."""
        return super().element_of(array) if array.role is Role.REPLICATED else BFloat16

    @property
    def scalars(self) -> list:
        """Positions and heads of the cache, x's columns, the bits of the scale, y's dtype."""
        keys = self.signature.number("keys")
        extents = Extent(keys, 1, 2), Extent(keys, 2, 3), Extent(0, 1)
        return [*(Scalar(4, e) for e in extents), Scalar(4, "scale"), Scalar(4, constant(0))]

    @property
    def grid(self) -> list:
        """A cluster for each row and head of the cache."""
        keys = self.signature.number("keys")
        sizes = Extent(keys, 0, 1), Extent(keys, 2, 3), constant(self.split)
        return [GridTerm(0, Factor(size)).to_json() for size in sizes]

    @cute.jit
    def __call__(self, pointers, scalars):
        self.kernel(pointers, scalars).launch(
            grid=[1, 1, 1], block=[self.threads, 1, 1], cluster=[self.split, 1, 1]
        )

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        length, groups, wide, bits, _ = scalars
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        rank, pair = block % self.split, block // self.split
        row, group = pair // groups, pair % groups
        lane, warp = tid % 32, tid // 32
        g, q = lane // 4, lane % 4
        heads = wide // self.depth - 2 * groups
        sharers = heads // groups  # heads that share keys
        position = element(arrays["position"], row, Int32)
        position = cutlass.max(cutlass.min(position, length - 1), Int32(0))
        line = Int64(row) * wide  # where x's row begins
        tiles = (position + POSITIONS - 1) // POSITIONS
        tile, step = rank + self.split * warp, self.split * self.warps
        turns = (tiles - tile + step - 1) // step  # none, where it is below 1
        used = cutlass.min(tiles // self.split + 1, Int32(self.warps))  # warps
        where: cutlass.Constexpr = (arrays, row, group, length, groups, position)
        rK = cute.make_rmem_tensor((4, self.pieces_of_row, 2), Uint32)
        rV = cute.make_rmem_tensor((4, self.columns_of_lane // 8, 4), Uint32)
        self.load_keys(rK, where, tile, g, q)
        self.load_values(rV, where, tile, g, q)
        cute.arch.griddepcontrol_wait()
        rQ = cute.make_rmem_tensor((4, self.pieces_of_row), Uint32)
        rQ.fill(0)
        if g < sharers:
            self.load_row(
                rQ, arrays["x"].toint() + 2 * (line + (group * sharers + g) * self.depth), q
            )
            self.rotate(rQ, arrays, row, q)
        scale = convert.bits_to_float(Uint32(bits)) * Float32(math.log2(math.e))
        acc = cute.make_rmem_tensor((2, self.columns_of_lane), Float32)
        state = cute.make_rmem_tensor(2, Float32)  # the largest score, and the sum of weights
        acc.fill(0.0)
        state[0], state[1] = Float32(LEAST), Float32(0.0)
        for _ in cutlass.range(0, turns, 1, unroll=1):
            weights: cutlass.Constexpr = self.weights_of(
                rQ, rK, acc, state, scale, position - tile * POSITIONS - 1, q
            )
            tile += step
            self.load_keys(rK, where, tile, g, q)
            self.add_values(acc, weights, rV)
            self.load_values(rV, where, tile, g, q)
        if (rank == self.split - 1) & (warp == used - 1):  # which has the fewest positions
            first = arrays["x"].toint() + 2 * (line + (heads + group) * self.depth)
            self.add_own(rQ, acc, state, scale, first, where, lane)
        self.meet(acc, state, arrays["y"], (row, group, groups, sharers), used, rank, tid)

    # ---- what it reads ---
    @cute.jit
    def load_row(self, to, address: Int64, q: Int32):
        """A lane's pieces of a row of a head: every fourth."""
        for i in range_constexpr(self.pieces_of_row):
            cute.autovec_copy(vector(address + 16 * (q + 4 * i), Uint32, 4), to[None, i])

    def place(self, name: str, where: tuple, position):
        """The address of a position's row of a cache."""
        arrays, row, group, length, groups, _ = where
        at = (Int64(row) * length + position) * groups + group
        return arrays[name].toint() + 2 * self.depth * at

    @cute.jit
    def load_keys(self, to, where: cutlass.Constexpr, tile: Int32, g: Int32, q: Int32):
        """Keys of a tile, of a lane's two positions; zeros from the token on."""
        for n in range_constexpr(2):
            position = tile * POSITIONS + 8 * n + g
            for i in range_constexpr(self.pieces_of_row):
                for w in range_constexpr(4):
                    to[w, i, n] = Uint32(0)
            if position < where[-1]:
                self.load_row(to[None, None, n], self.place("keys", where, position), q)

    @cute.jit
    def load_values(self, to, where: cutlass.Constexpr, tile: Int32, g: Int32, q: Int32):
        """Values of a tile, neighbouring columns of a lane's four positions."""
        for s in range_constexpr(4):
            position = tile * POSITIONS + self.of_slot(s, q)
            for i in range_constexpr(self.columns_of_lane // 8):
                for w in range_constexpr(4):
                    to[w, i, s] = Uint32(0)
            if position < where[-1]:
                self.load_columns(to[None, None, s], self.place("values", where, position), g)

    def of_slot(self, s: int, q: Int32):
        """The position, in a tile, of a lane's values in a slot."""
        return 8 * (s // 2) + 2 * q + s % 2

    @cute.jit
    def load_columns(self, to, address: Int64, g: Int32):
        """A lane's columns of a row."""
        first = address + 2 * self.columns_of_lane * g
        for i in range_constexpr(self.columns_of_lane // 8):
            cute.autovec_copy(vector(first + 16 * i, Uint32, 4), to[None, i])

    # ---- the token's own ---
    @cute.jit
    def add_own(
        self, rQ, acc, state, scale: Float32, first: Int64, where: cutlass.Constexpr, lane: Int32
    ):  # fmt: skip
        """Adds the token's own weighted value, and puts its key and value into the cache."""
        arrays, row, _, _, groups, position = where
        g, q = lane // 4, lane % 4
        turned = cute.make_rmem_tensor((4, self.pieces_of_row), Uint32)
        value = cute.make_rmem_tensor((4, self.columns_of_lane // 8), Uint32)
        self.load_row(turned, first, q)
        self.load_columns(value, first + 2 * groups * self.depth, g)
        self.rotate(turned, arrays, row, q)
        score = self.scores(rQ, turned)[0] * scale  # in all columns, as all lanes have the same key
        largest = cute.arch.fmax(state[0], score)
        factor, weight = power_of_2(state[0] - largest), power_of_2(score - largest)
        state[0] = largest
        if q == 0:  # else it is added four times
            state[1] = state[1] * factor + weight
        else:
            state[1] = state[1] * factor
        factors, weights = of_columns(factor, q), of_columns(weight, q)
        for w in range_constexpr(self.columns_of_lane // 2):
            two = halves_of(value[w % 4, w // 4])
            for r in range_constexpr(2):
                for e in range_constexpr(2):
                    acc[e, 2 * w + r] = acc[e, 2 * w + r] * factors[e] + two[r] * weights[e]
        to = self.place("new_values", where, position) + 2 * self.columns_of_lane * g
        if q == 0:  # other lanes have the same
            for i in range_constexpr(self.columns_of_lane // 8):
                cute.autovec_copy(value[None, i], vector(to + 16 * i, Uint32, 4))
        to = self.place("new_keys", where, position) + 16 * q
        if g == 0:
            for i in range_constexpr(self.pieces_of_row):
                cute.autovec_copy(turned[None, i], vector(to + 64 * i, Uint32, 4))

    @cute.jit
    def rotate(self, words, arrays: cutlass.Constexpr, row: Int32, q: Int32):
        """Turns pairs of elements half a row apart by their angles."""
        half: cutlass.Constexpr = self.pieces_of_row // 2
        for i in range_constexpr(half):
            angle = 4 * (Int64(row) * (self.depth // 2) + 8 * (q + 4 * i))
            for v in range_constexpr(2):
                cos, sin = (cute.make_rmem_tensor(4, Float32) for _ in "ab")
                cute.autovec_copy(vector(arrays["cos"].toint() + angle + 16 * v, Float32, 4), cos)
                cute.autovec_copy(vector(arrays["sin"].toint() + angle + 16 * v, Float32, 4), sin)
                for w in range_constexpr(2):
                    a, b = (halves_of(words[2 * v + w, i + half * h]) for h in range(2))
                    c, s = ([turn[2 * w + e] for e in range(2)] for turn in (cos, sin))
                    low, high = (a[e] * c[e] - b[e] * s[e] for e in range(2))
                    words[2 * v + w, i] = convert.round_two(low, high, "bfloat16")
                    low, high = (b[e] * c[e] + a[e] * s[e] for e in range(2))
                    words[2 * v + w, i + half] = convert.round_two(low, high, "bfloat16")

    # ---- what it computes ---
    def scores(self, rQ, keys) -> list:
        """A lane's two scores, of its head; two more are zeros."""
        none, sums = Uint32(0), None
        for j in range(2 * self.pieces_of_row):
            q, k = ([row[2 * (j % 2) + h, j // 2] for h in range(2)] for row in (rQ, keys))
            sums = product([q[0], none, q[1], none], k, sums)
        return sums or []

    @cute.jit
    def weights_of(self, rQ, rK, acc, state, scale: Float32, last: Int32, q: Int32):
        """Weights of a tile's positions up to `last`; sums so far become relative to the largest.

        Returns:
          two words of a lane's head, its positions 2 q and 2 q + 1, and those 8 behind.
        """
        scores = cute.make_rmem_tensor((2, 2), Float32)
        largest = state[0]
        for n in range_constexpr(2):
            sums = self.scores(rQ, rK[None, None, n])
            for e in range_constexpr(2):
                scores[e, n] = cutlass.select_(
                    8 * n + 2 * q + e <= last, sums[e] * scale, Float32(LEAST)
                )
                largest = cute.arch.fmax(largest, scores[e, n])
        largest = over_four(largest, cute.arch.fmax)
        factor = power_of_2(state[0] - largest)
        state[0], total = largest, state[1] * factor
        rounded = []
        for n in range_constexpr(2):
            two = []
            for e in range_constexpr(2):
                weight = power_of_2(scores[e, n] - largest)
                there = 8 * n + 2 * q + e <= last
                two.append(cutlass.select_(there, weight, Float32(0.0)))
            rounded.append(convert.round_two(two[0], two[1], "bfloat16"))
            low, high = halves_of(rounded[n])
            total = total + low + high
        state[1] = total
        factors = of_columns(factor, q)
        for i in range_constexpr(self.columns_of_lane):
            for e in range_constexpr(2):
                acc[e, i] = acc[e, i] * factors[e]
        return tuple(rounded)

    @cute.jit
    def add_values(self, acc, weights: cutlass.Constexpr, rV):
        """Adds a tile's weighted values: a lane's columns, of heads 2 q and 2 q + 1."""
        for j in range_constexpr(self.columns_of_lane // 2):
            slots = [rV[j % 4, j // 4, s] for s in range(4)]
            a = [
                convert.bytes_of(slots[2 * h], slots[2 * h + 1], select)
                for h in range(2)
                for select in (0x5410, 0x7632)
            ]
            at = [(e, 2 * j + r) for r in range(2) for e in range(2)]
            sums = product(a, [*weights], [acc[i] for i in at])
            for i, value in zip(at, sums, strict=True):
                acc[i] = value

    # ---- where sums meet ---
    @cute.jit
    def meet(
        self, acc, state, y, head: cutlass.Constexpr, used: Int32, rank: Int32, tid: Int32
    ):  # fmt: skip
        """Adds up what warps and thread blocks have, always in one order, and writes y."""
        *_, sharers = head
        count: cutlass.Constexpr = ATTENDED_HEADS
        lane, warp = tid % 32, tid // 32
        g, q = lane // 4, lane % 4
        sums = cute.arch.alloc_smem(Float32, self.warps * count * self.pitch, alignment=16)
        kept = cute.arch.alloc_smem(Float32, (self.warps + 1) * count * 2, alignment=8)
        state[1] = over_four(state[1], lambda a, b: a + b)
        if q == 0:
            cute.autovec_copy(state, self.floats(kept.toint() + 8 * (warp * count + g), 2))
        for e in range_constexpr(2):
            to = sums.toint() + 4 * ((warp * count + 2 * q + e) * self.pitch)
            to += 4 * self.columns_of_lane * g
            for i in range_constexpr(self.columns_of_lane // 4):
                four = cute.make_rmem_tensor(4, Float32)
                for k in range_constexpr(4):
                    four[k] = acc[e, 4 * i + k]
                cute.autovec_copy(four, self.floats(to + 16 * i, 4))
        cute.arch.sync_threads()
        self.add_warps(kept, sums, used, tid)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        share = sharers * self.depth // (2 * self.split)
        most: cutlass.Constexpr = count * self.depth // (2 * self.split)
        for i in range_constexpr((most + self.threads - 1) // self.threads):
            if i * self.threads + tid < share:
                self.write(kept, sums, y, head, rank * share + i * self.threads + tid)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def add_warps(self, kept, sums, used: Int32, tid: Int32):
        """Adds up what this thread block's warps that have positions have, some elements a thread.

        All elements of a warp are read at once, so that none waits for another one.
        """
        count: cutlass.Constexpr = ATTENDED_HEADS * self.depth // self.threads
        items: cutlass.Constexpr = [i * self.threads + tid for i in range(count)]
        states: cutlass.Constexpr = [kept.toint() + 8 * (item // self.depth) for item in items]
        parts: cutlass.Constexpr = [
            sums.toint() + 4 * (item // self.depth * self.pitch + item % self.depth)
            for item in items
        ]
        largest, total, weight = (cute.make_rmem_tensor(count, Float32) for _ in range(3))
        largest.fill(Float32(LEAST))
        total.fill(0.0)
        weight.fill(0.0)
        for w in cutlass.range(0, used, 1, unroll=1):
            for i in range_constexpr(count):
                state = self.floats(states[i] + 8 * ATTENDED_HEADS * w, 2)
                largest[i] = cute.arch.fmax(largest[i], state[0])
        for w in cutlass.range(0, used, 1, unroll=1):
            for i in range_constexpr(count):
                state = self.floats(states[i] + 8 * ATTENDED_HEADS * w, 2)
                part = self.floats(parts[i] + 4 * ATTENDED_HEADS * self.pitch * w, 1)
                factor = power_of_2(state[0] - largest[i])
                total[i] = total[i] + part[0] * factor
                weight[i] = weight[i] + state[1] * factor
        for i in range_constexpr(count):
            to = self.floats(parts[i], 1)
            to[0] = total[i]
            if items[i] % self.depth == 0:
                two = self.floats(states[i] + 8 * ATTENDED_HEADS * self.warps, 2)
                two[0], two[1] = largest[i], weight[i]

    @cute.jit
    def write(self, kept, sums, y, head: cutlass.Constexpr, pair: Int32):
        """Adds up a pair of neighbours of all thread blocks, and writes it."""
        row, group, groups, sharers = head
        item = 2 * pair
        h, column = item // self.depth, item % self.depth
        state_at = kept.toint() + 8 * (self.warps * ATTENDED_HEADS + h)
        at = sums.toint() + 4 * (h * self.pitch + column)
        states = [two_of_block(mapped(state_at, Int32(r))) for r in range(self.split)]
        parts = [two_of_block(mapped(at, Int32(r))) for r in range(self.split)]
        largest, low, high, weight = states[0][0], Float32(0.0), Float32(0.0), Float32(0.0)
        for r in range_constexpr(1, self.split):
            largest = cute.arch.fmax(largest, states[r][0])
        for r in range_constexpr(self.split):
            factor = power_of_2(states[r][0] - largest)
            low += parts[r][0] * factor
            high += parts[r][1] * factor
            weight += states[r][1] * factor
        line = (Int64(row) * groups + group) * sharers * self.depth
        word = convert.round_two(low / weight, high / weight, "bfloat16")
        there = vector(y.toint() + 2 * (line + item), Uint32)
        there[0] = word


def entries(product: ProductKernel, arch: str) -> list[ProductEntry]:
    """An entry for each depth of heads, the largest first."""
    return [Attention(product, arch, depth) for depth in ATTENDED_DEPTHS]
