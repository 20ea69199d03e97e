"""Attention of one token to a KV cache on NVIDIA: a thread block has a head of keys and values.

Each half of a warp takes tokens by itself, one in 32: a lane has 8 elements of a key and of a
value. All parts meet in shared memory.
"""

import math

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute, range_constexpr

from jax_mx.launch.cutedsl import Kernel
from jax_mx.launch.rule import Extent, Factor, GridTerm, Scalar

D, SHARED = 128, 4  # elements of a head; heads of queries that share one of keys
LANES, AT_ONCE = 16, 2  # that share a token; tokens that they have at a time
LOW = -1e30  # less than each score
SCALE = math.log2(math.e) / math.sqrt(D)


def exp2(x):
    """2 to the power of a float32."""
    return getattr(cute.math, "exp2")(x)  # noqa: B009 - types do not know it


def vector(pointer, offset, count=8):
    """The elements of a bfloat16 array from a multiple of `count` on."""
    address = pointer.toint() + 2 * Int64(offset)
    at = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=2 * count)
    return cute.make_tensor(at, cute.make_layout(count))


def shared(rows, columns):
    """A matrix of float32 in shared memory."""
    at = cute.arch.alloc_smem(Float32, rows * columns, alignment=16)
    return cute.make_tensor(at, cute.make_layout((rows, columns), stride=(columns, 1)))


class DecodeAttention(Kernel):
    """qkv (B, 1, 6 G, 128), cache (B, L, 2 G, 128), turns (B, 1, 1, 128), length (B, 1, 1, 1).

    Results are y (B, 1, 4 G, 128) and the cache, where the token's key and value are behind the
    others. See `attended` in function.py.
    """

    types = (BFloat16, BFloat16, Float32, Int32, BFloat16, BFloat16)
    align = (2, 16, 4, 4, 2, 2)
    threads = 512
    scalars = tuple(Scalar(4, Extent(1, i, i + 1)) for i in (1, 2))  # L, 2 G
    grid = (GridTerm(0, Factor(Extent(1, 2, 3), 2)), GridTerm(1, Factor(Extent(1, 0, 1))))

    @cute.kernel
    def kernel(self, pointers, scalars):
        """The token's own key and value come with its query."""
        (qkv, cache, turns, lengths, y, updated), (most, heads) = pointers, scalars
        groups = heads // 2
        tid, _, _ = cute.arch.thread_idx()
        g, b, _ = cute.arch.block_idx()
        warps = self.threads // 32
        warp, lane = tid // 32, tid % 32
        queries, newest = shared(SHARED, D), shared(2, D)  # newest: the token's key, its value
        tops, totals = shared(SHARED, warps + 1), shared(SHARED, warps + 1)
        sums = shared(warps, SHARED * D)
        length = cute.make_tensor(lengths + b, cute.make_layout(1))[0]
        length = cutlass.max(cutlass.min(length, most - 1), Int32(0))
        first = (Int64(b) * most * heads + g) * D
        ahead = self.fragments()  # what is far away is asked for first
        self.load(ahead, cache, first, groups, tid // LANES * AT_ONCE, length)
        end = updated + (Int64(b) * most + length) * (heads * D)
        self.turn(qkv, turns, end, (queries, newest), (b, g, groups, tid))
        cute.arch.sync_threads()
        if warp < SHARED:
            score = Float32(0)
            for i in range_constexpr(D // 32):
                score += queries[warp, lane + 32 * i] * newest[0, lane + 32 * i]
            score = cute.arch.warp_reduction_sum(score)
            if lane == 0:
                tops[warp, warps] = score
                totals[warp, warps] = Float32(1)
        self.attend(ahead, cache, queries, (tops, totals, sums), (first, groups, length, tid))
        cute.arch.sync_threads()
        h, d = tid // D, tid % D
        top = tops[h, warps]
        for w in range_constexpr(warps):
            top = cute.arch.fmax(top, tops[h, w])
        part = exp2(tops[h, warps] - top)
        total, weighted = part, part * newest[1, d]
        for w in range_constexpr(warps):
            part = exp2(tops[h, w] - top)
            total += part * totals[h, w]
            weighted += part * sums[w, tid]
        at = ((Int64(b) * groups + g) * SHARED + h) * D + d
        cute.make_tensor(y + at, cute.make_layout(1))[0] = BFloat16(weighted / total)

    @cute.jit
    def turn(self, qkv, turns, end, to, place):
        """Queries and the key are turned by their position; the key and the value are stored."""
        (queries, newest), (b, g, groups, tid) = to, place
        i, of = tid % (D // 2), tid // (D // 2)  # of: queries, then the key, then the value
        heads = groups * (SHARED + 2)
        head = g * SHARED + of
        if of >= SHARED:  # the key, the value
            head = groups * of + g
        if of < SHARED + 2:
            start = (Int64(b) * heads + head) * D
            mX = cute.make_tensor(qkv + start, cute.make_layout(D))
            mT = cute.make_tensor(turns + b * D, cute.make_layout(D))
            x, z = Float32(mX[i]), Float32(mX[i + D // 2])
            cos, sin = mT[i], mT[i + D // 2]
            if of == SHARED + 1:
                cos, sin = Float32(1), Float32(0)
            low, high = BFloat16(x * cos - z * sin), BFloat16(z * cos + x * sin)
            if of < SHARED:
                queries[of, i] = Float32(low) * SCALE
                queries[of, i + D // 2] = Float32(high) * SCALE
            else:
                newest[of - SHARED, i] = Float32(low)
                newest[of - SHARED, i + D // 2] = Float32(high)
                mY = cute.make_tensor(end + ((of - SHARED) * groups + g) * D, cute.make_layout(D))
                mY[i] = low
                mY[i + D // 2] = high

    @cute.jit
    def attend(self, ahead, cache, queries, to, place):
        """Each half of a warp's sums over its tokens of the cache; both halves' together."""
        (tops, totals, sums), (first, groups, length, tid) = to, place
        n = D // LANES
        warp, lane = tid // 32, tid % 32
        part = lane % LANES
        apart = AT_ONCE * (self.threads // LANES)
        q = cute.make_rmem_tensor((n, SHARED), Float32)
        acc = cute.make_rmem_tensor((n, SHARED), Float32)
        top = cute.make_rmem_tensor(SHARED, Float32)
        total = cute.make_rmem_tensor(SHARED, Float32)
        acc.fill(Float32(0))
        top.fill(Float32(LOW))
        total.fill(Float32(0))
        for h in range_constexpr(SHARED):
            for i in range_constexpr(n):
                q[i, h] = queries[h, part * n + i]
        for start in range(warp * (2 * AT_ONCE), length, apart):
            token = start + lane // LANES * AT_ONCE
            self.add(q, ahead, acc, top, total, token, length)
            self.load(ahead, cache, first, groups, token + apart, length)
        for h in range_constexpr(SHARED):
            other = cute.arch.shuffle_sync_bfly(top[h], offset=LANES)
            most = cute.arch.fmax(top[h], other)
            mine = exp2(top[h] - most)
            its = cute.arch.shuffle_sync_bfly(mine, offset=LANES)
            all_ = total[h] * mine + cute.arch.shuffle_sync_bfly(total[h], offset=LANES) * its
            for i in range_constexpr(n):
                other_half = cute.arch.shuffle_sync_bfly(acc[i, h], offset=LANES)
                value = acc[i, h] * mine + other_half * its
                if lane < LANES:
                    sums[warp, h * D + part * n + i] = value
            if lane == 0:
                tops[h, warp] = most
                totals[h, warp] = all_

    def fragments(self):
        """A lane's part of keys and of values."""
        return [cute.make_rmem_tensor((D // LANES, AT_ONCE), BFloat16) for _ in range(2)]

    @cute.jit
    def load(self, to, cache, first, groups, token, length):
        """Loads these parts from a token on, of the last one beyond the end."""
        k, v = to
        if length > 0:
            for t in range_constexpr(AT_ONCE):
                here = cutlass.min(token + t, length - 1)
                lane = cute.arch.lane_idx() % LANES
                at = first + Int64(here) * (2 * groups * D) + lane * (D // LANES)
                cute.autovec_copy(vector(cache, at), k[None, t])
                cute.autovec_copy(vector(cache, at + groups * D), v[None, t])

    @cute.jit
    def add(self, q, ahead, acc, top, total, token, length):
        """Adds some tokens; none beyond the end counts."""
        n = D // LANES
        k, v = ahead
        for h in range_constexpr(SHARED):
            scores = []
            for t in range_constexpr(AT_ONCE):
                score = Float32(0)
                for i in range_constexpr(n):
                    score += q[i, h] * Float32(k[i, t])
                for step in range_constexpr(4):
                    score += cute.arch.shuffle_sync_bfly(score, offset=1 << step)
                scores.append(cutlass.select_(token + t < length, score, Float32(LOW)))
            most = top[h]
            for score in scores:
                most = cute.arch.fmax(most, score)
            scale = exp2(top[h] - most)
            top[h] = most
            weights = [
                cutlass.select_(token + t < length, exp2(score - most), Float32(0))
                for t, score in enumerate(scores)
            ]
            total[h] = total[h] * scale + weights[0] + weights[1]
            for i in range_constexpr(n):
                value = acc[i, h] * scale
                for t in range_constexpr(AT_ONCE):
                    value += weights[t] * Float32(v[i, t])
                acc[i, h] = value


def entries(dtypes, arch):
    """The entry, for bfloat16."""
    del arch
    if dtypes != ("bfloat16", "bfloat16", "float32", "int32"):
        raise NotImplementedError(f"decode_attention takes bfloat16, got {dtypes}")
    return [DecodeAttention()]
