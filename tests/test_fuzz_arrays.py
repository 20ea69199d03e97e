"""Random sequences of what can be done to an MXArray, against a model of its elements.

The model has a code and a scale's byte for each element, in NumPy; what is done to the array is
done to both as to any array. After each step the array must have the bytes that the oracle lays
out, and dequantize to the oracle's floats.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fuzz_calls import FLOATS, SCALE_LAYOUTS, Case, bytes_in, forget_some
from helpers import assert_bits_equal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx

SHAPES = ((64,), (48, 96), (160, 64), (2, 32, 128), (3, 64, 64), (2, 2, 64, 64), (1, 3, 5, 96))
VALUE_LAYOUTS = ("row_major", "shuffled_16x16")


@dataclasses.dataclass(frozen=True)
class Model:
    """An array's elements: codes and scales of one shape, and how they are kept."""

    codes: np.ndarray
    scale: np.ndarray  # of each element
    call: oracle.Call  # format, axis, square and layouts

    def __getattr__(self, name):
        return getattr(self.call, name)

    def changed(self, codes=None, scale=None, **call) -> Model:
        new = dataclasses.replace(self.call, **call)
        return Model(
            self.codes if codes is None else codes, self.scale if scale is None else scale, new
        )

    def each(self, f, **call) -> Model:
        """The same done to codes and scales."""
        return self.changed(f(self.codes), f(self.scale), **call)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """(values, scales)."""
        codes, scales = (np.moveaxis(a, self.axis, -1) for a in (self.codes, self.scale))
        scales = scales[..., ::32, ::32] if self.square else scales[..., ::32]
        return oracle.placed(codes, scales, self.call)

    def can_lie(self) -> bool:
        """Whether an array of this shape may be kept so."""
        return Case(self.call, self.shape, "float32", 0).refusal() is None


def model_of(x: np.ndarray, call: oracle.Call) -> Model:
    """Quantized by the oracle."""
    codes, scales = oracle.quantized(x, dataclasses.replace(call, transpose=False))
    scales = np.repeat(scales, 32, -1)
    scales = np.repeat(scales, 32, -2) if call.square else scales
    back = -1 if call.transpose and not call.square else call.axis
    codes, scales = (np.moveaxis(a, -1, back) for a in (codes, scales))
    if call.square and call.transpose:
        codes, scales = np.swapaxes(codes, -1, -2), np.swapaxes(scales, -1, -2)
    return Model(codes, scales, dataclasses.replace(call, axis=back, transpose=False))


def axis_after(shape: tuple[int, ...], axis: int, index) -> int:
    """Where an axis lies after indexing, negative: where coordinates along it vary."""
    along = np.arange(shape[axis]).reshape([-1 if d == axis else 1 for d in range(-len(shape), 0)])
    indexed = np.broadcast_to(along, shape)[index]
    (block_axis,) = [d for d in range(-indexed.ndim, 0) if np.diff(indexed, axis=d).any()]
    return block_axis


class Arrays(RuleBasedStateMachine):
    """One array, and what is done to it."""

    @initialize(data=st.data(), shape=st.sampled_from(SHAPES), seed=st.integers(0, 9999))
    def quantize(self, data, shape, seed):
        forget_some()
        rank = len(shape)
        square = rank > 1 and data.draw(st.integers(0, 3)) == 3
        square = square and not any(n % 32 for n in shape[-2:])
        axes = [d for d in range(-rank, 0) if shape[d] % 32 == 0]
        call = oracle.Call(
            format=data.draw(st.sampled_from([*oracle.FORMATS])),
            axis=-1 if square else data.draw(st.sampled_from(axes)),
            scaling=data.draw(st.sampled_from(oracle.SCALINGS)),
            scale_layout=data.draw(st.sampled_from(SCALE_LAYOUTS)),
            transpose=data.draw(st.booleans()),
            square=square,
            value_layout=data.draw(st.sampled_from(VALUE_LAYOUTS)),
        )
        case = Case(call, shape, data.draw(st.sampled_from(FLOATS)), seed)
        if case.refusal():
            plain = {"scale_layout": "row_major", "value_layout": "row_major"}
            case = dataclasses.replace(case, call=dataclasses.replace(call, **plain))
        self.made = case
        self.model = model_of(case.floats(), case.call)
        self.array = case.run(jnp.asarray(case.floats()), None)
        self.holds()

    def become(self, model: Model, do) -> None:
        """The array is what `do` gives, which is the model; or `do` refuses what cannot lie so."""
        if not model.can_lie():
            with pytest.raises((ValueError, TypeError)) as caught:
                do()
            assert "\n" not in str(caught.value)
            return
        self.model, self.array = model, do()
        self.holds()

    def holds(self) -> None:
        q, model = self.array, self.model
        assert (q.shape, q.axis) == (model.shape, model.axis)
        assert (q.scale_layout.name, q.value_layout.name) == (
            model.scale_layout,
            model.value_layout,
        )
        for name, got, want in zip(("values", "scales"), bytes_in(q), model.bytes(), strict=True):
            assert_bits_equal(got, want, name)

    # ---- parts and rearrangements ---
    @rule(data=st.data())
    def index(self, data):
        """Ints, slices, lists, masks, grids and None; whole blocks."""
        shape, blocked = self.model.shape, [self.model.axis]
        if self.model.square:
            blocked = [-2, -1]
        index = []
        for d, n in zip(range(-len(shape), 0), shape, strict=True):
            if d in blocked:
                start = data.draw(st.integers(0, n // 32 - 1))
                stop = data.draw(st.integers(start + 1, n // 32))
                whole = data.draw(st.booleans())
                index.append(slice(None) if whole else slice(32 * start, 32 * stop))
                continue
            kinds = ("all", "all", "slice", "back", "int", "numpy", "list", "mask", "grid", "none")
            entry, one = data.draw(st.sampled_from(kinds)), st.integers(-n, n - 1)
            arrays = [i for i in index if isinstance(i, np.ndarray)]
            if entry in ("int", "numpy"):
                index.append((int if entry == "int" else np.int64)(data.draw(one)))
            elif (
                entry == "list" and arrays and arrays[-1] is index[-1] and arrays[-1].dtype != bool
            ):
                index.append(np.resize(data.draw(st.lists(one, min_size=1)), arrays[-1].shape))
            elif entry == "list" and not arrays:
                index.append(np.array(data.draw(st.lists(one, min_size=1))))
            elif entry == "mask" and not arrays:
                index.append(np.arange(n) % data.draw(st.integers(1, 3)) == 0)
            elif entry == "grid" and not arrays and len(shape) < 4:
                index.append(np.array([[data.draw(one)], [data.draw(one)]]))
            elif entry == "back":
                index.append(slice(None, None, -1))
            elif entry == "slice":
                start = data.draw(st.integers(0, n - 1))
                index.append(slice(start, data.draw(st.integers(start + 1, n)), 1))
            else:
                index += [None] * (entry == "none") + [slice(None)]
        if index[-1:] == [slice(None)]:
            index[-1] = ...
        index = tuple(index)
        if len(self.model.shape) + sum(i is None for i in index) > 6:
            return
        axes = [axis_after(shape, d, index) for d in blocked]
        if self.model.square and axes != [-2, -1]:
            with pytest.raises(ValueError, match="the last two axes"):
                self.array[index]
            return
        new = self.model.each(lambda a: a[index], axis=axes[-1])
        self.become(new, lambda: self.array[index])

    @rule(data=st.data())
    def swap(self, data):
        rank = len(self.model.shape)
        one, two = (data.draw(st.integers(-rank, rank - 1)) for _ in range(2))
        a, b = one % rank - rank, two % rank - rank
        if self.model.square and (a in (-2, -1)) != (b in (-2, -1)):
            with pytest.raises(ValueError, match="the last two axes"):
                jax_mx.swapaxes(self.array, one, two)
            return
        axis = self.model.axis
        if not self.model.square:
            axis = {a: b, b: a}.get(axis, axis)
        new = self.model.each(lambda x: np.swapaxes(x, a, b), axis=axis)
        self.become(new, lambda: jax_mx.swapaxes(self.array, one, two))

    @rule(data=st.data())
    def reshape(self, data):
        """The leading dimensions, split or joined."""
        shape, model = self.model.shape, self.model
        tiled = "row_major" != model.scale_layout or "row_major" != model.value_layout
        kept = max(-model.axis, 2 if tiled or model.square else 1)
        if len(shape) < kept:
            return
        lead = math.prod(shape[: len(shape) - kept])
        split = data.draw(st.sampled_from([n for n in range(1, lead + 1) if lead % n == 0]))
        new = (split, lead // split, *shape[-kept:])
        new = data.draw(st.sampled_from((new, (lead, *shape[-kept:]), (-1, *new[1:]))))
        self.become(model.each(lambda a: a.reshape(new)), lambda: self.array.reshape(new))

    @rule(data=st.data(), seed=st.integers(0, 9999))
    def concatenate(self, data, seed):
        """With another array like it, of another length, on either side; or twice itself."""
        model, q = self.model, self.array
        if math.prod(model.shape) > 30_000:
            return
        axis = data.draw(st.integers(-len(model.shape), -1))
        blocked = axis == model.axis or (model.square and axis == -2)
        part = [slice(None)] * len(model.shape)
        part[axis] = slice(0, 32 if blocked else data.draw(st.integers(1, model.shape[axis])))
        part = tuple(part)
        other, its = model.each(lambda a: a[part]), None
        if not other.can_lie():
            other, its = model, q
        else:
            its = q[part]
        pair = [(model, q), (other, its)]
        pair = pair[::-1] if seed % 2 else pair
        new = model.changed(
            *(
                np.concatenate([getattr(m, name) for m, _ in pair], axis)
                for name in ("codes", "scale")
            )
        )
        self.become(new, lambda: jax_mx.concatenate([array for _, array in pair], axis))

    @rule(data=st.data())
    def stack(self, data):
        rank = len(self.model.shape)
        if rank > 4 or math.prod(self.model.shape) > 30_000:
            return
        position = data.draw(st.integers(0, rank - 2 if self.model.square else rank))
        axis = self.model.axis - (rank + self.model.axis < position)
        new = self.model.each(lambda a: np.stack([a, a], position), axis=axis)
        self.become(new, lambda: jax_mx.stack([self.array] * 2, position))

    # ---- layouts ---
    @rule(layout=st.sampled_from(SCALE_LAYOUTS))
    def scales_in(self, layout):
        new = self.model.changed(scale_layout=layout)
        self.become(new, lambda: self.array.with_scales_in(layout))

    @rule(layout=st.sampled_from(VALUE_LAYOUTS))
    def values_in(self, layout):
        new = self.model.changed(value_layout=layout)
        self.become(new, lambda: self.array.with_values_in(layout))

    @precondition(lambda self: self.model.square)
    @rule(axis=st.sampled_from((-1, -2)), layout=st.sampled_from(SCALE_LAYOUTS))
    def expand(self, axis, layout):
        values = self.model.value_layout if axis == -1 else "row_major"
        call = {"axis": axis, "square": False, "scale_layout": layout, "value_layout": values}
        self.become(self.model.changed(**call), lambda: self.array.expand(axis, layout))

    @precondition(lambda self: self.model.format == "mxfp4_e2m1" and self.model.axis == -1)
    @rule()
    def by_float4(self):
        q = self.array
        if self.model.value_layout != "row_major":
            with pytest.raises(ValueError, match=r"packed along the last axis|row_major"):
                q.as_float4()
            return
        floats = q.as_float4()
        assert floats.shape == self.model.shape
        again = {"scale_layout": q.scale_layout, "block": q.block}
        self.become(self.model, lambda: jax_mx.MXArray.from_float4(floats, q.scales, **again))

    # ---- there and back ---
    @rule(flat=st.booleans())
    def by_parts(self, flat):
        q, (values, scales) = self.array, bytes_in(self.array)
        if flat and self.model.scale_layout != "row_major":
            scales = scales.reshape(-1)
        static = {"axis": q.axis, "scale_layout": self.model.scale_layout, "block": q.block}
        static["value_layout"] = self.model.value_layout
        format = self.model.format
        self.become(self.model, lambda: jax_mx.MXArray.from_parts(values, scales, format, **static))

    @rule()
    def save_and_load(self):
        pytest.importorskip("safetensors")

        def there_and_back():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "a.safetensors"
                jax_mx.save_safetensors({"a": self.array, "b": np.arange(3, dtype=np.int32)}, path)
                abstract = jax.eval_shape(lambda: self.array)
                return jax_mx.load_safetensors(
                    path, {"a": abstract, "b": np.arange(3, dtype=np.int32)}
                )["a"]

        self.become(self.model, there_and_back)

    @rule(data=st.data())
    def reshard(self, data):
        """Over a mesh, where values and scales divide; by jit, or put there."""
        q, spec, names = self.array, [], {"a": 2, "b": 4}
        tiled = "row_major" != self.model.scale_layout or "row_major" != self.model.value_layout
        axes = range(q.ndim - 2 if tiled and self.model.axis >= -2 else 0 if tiled else q.ndim)
        for d in axes:
            sizes = [leaf.shape[d] for leaf in (q.values, q.scales)]
            fitting = [n for n, size in names.items() if not any(s % size for s in sizes)]
            name = data.draw(st.sampled_from([None, *fitting]))
            names.pop(name, None)
            spec.append(name)
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        if data.draw(st.booleans()):
            self.become(self.model, lambda: jax.device_put(q, sharding))
        else:
            self.become(self.model, lambda: jax.jit(lambda q: q, out_shardings=sharding)(q))

    # ---- floats ---
    @rule(dtype=st.sampled_from(FLOATS), turn=st.booleans(), jit=st.booleans())
    def dequantize(self, dtype, turn, jit):
        model, turn = self.model, turn and len(self.model.shape) > 1
        want = oracle.dequantize(*model.bytes(), model.shape, model.call, dtype)
        want = np.swapaxes(want, -1, -2) if turn else want

        def run(q):
            return q.dequantize(dtype, transpose=turn)

        got = np.asarray((jax.jit(run) if jit else run)(self.array))
        assert_bits_equal(got.view(want.dtype), want)


TestArrays = Arrays.TestCase
TestArrays.settings = settings(
    max_examples=max(settings.default.max_examples // 4, 1),
    stateful_step_count=10 if settings.default.max_examples <= 100 else 20,
)
