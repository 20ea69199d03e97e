"""The words of the launch rule: launch/rule.py, without a handler."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_mx.launch import _ffi, rule
from jax_mx.launch.rule import (
    ABI,
    Entry,
    Extent,
    Factor,
    GridTerm,
    Launch,
    Length,
    MapAt,
    Padding,
    Pointer,
    Scalar,
    ScalarAt,
    Scratch,
    TensorMap,
    call_attributes,
    constant,
    multiprocessors,
)

# As manifests have had it since before any of the newer words.
PLAIN = {
    "scalars": [[8, [0, 0, 99]], [4, "round_add_0"]],
    "entries": [{"symbol": f"quantize_{i}", "align": [16, 16, 4],
        "divide": [[0, -1, 99, 64]] if i == 0 else [], "threads": [512, 1, 1],
        "grid": [[0, 0, 0, 99, 8192], [1, 0, 0, -2, 1]],
        "usage": {"registers": 32, "stack": 0}} for i in range(2)],
}  # fmt: skip
X_ROWS, X_COLUMNS = Extent(0, 0, -1), Extent(0, -1)
FULL = Launch(
    entries=(
        Entry(
            symbol="product_0",
            align=(16, 16, 1),
            threads=(384, 1, 1),
            grid=(
                GridTerm(0, Factor(multiprocessors())),
                GridTerm(1, Factor(X_ROWS, 128)),
                GridTerm(1, Factor(constant(8), summand=1)),
            ),
            shared=200_000,
            cluster=(2, 1, 1),
            early_start=True,
            parameters=(MapAt(0), Padding(8), Pointer(1), ScalarAt(0)),
        ),
        Entry("product_1", (2, 2, 1), (256, 1, 1), divide=(Factor(X_COLUMNS, 32),)),
    ),
    scalars=(Scalar(4, X_ROWS), Scalar(8, "seed")),
    maps=(
        TensorMap(
            buffer=0,
            type="bfloat16",
            dims=(Length(X_COLUMNS, divisor=2), Length(X_ROWS)),
            strides=(Length(X_COLUMNS, times=2),),
            box=(64, 128),
            swizzle=128,
            promotion=256,
            fill="nan",
        ),
    ),
    scratch=(Scratch(2, (Factor(X_ROWS, 128), Factor(constant(4))), clear=True),),
)


def test_json_is_what_manifests_have():
    plain = Launch.from_json(PLAIN)
    assert plain.to_json() == PLAIN
    assert json.dumps(plain.to_json()) == json.dumps(PLAIN)  # the order too
    assert plain.entries[0].divide == (Factor(Extent(0, -1), 64),)
    assert plain.scalars[1] == Scalar(4, "round_add_0")


def test_json_there_and_back():
    text = json.dumps(FULL.to_json())
    assert Launch.from_json(json.loads(text)) == FULL
    assert json.loads(text)["maps"][0]["dims"] == [[0, -1, 99, 1, 2], [0, 0, -1]]
    assert json.loads(text)["entries"][0]["grid"][2] == [1, -1, 8, 0, 1, 1]
    assert json.loads(text)["entries"][0]["parameters"][:2] == [["map", 0], ["zeros", 8]]
    assert "shared" not in json.loads(text)["entries"][1]
    hash(Launch.from_json(json.loads(text)))  # caches may go by it


def test_attributes_of_a_plain_rule():
    scalars = {"round_add_0": 5, "more": 1}
    attributes = Launch.from_json(PLAIN).attributes("ab" * 32, scalars, b"ELF")
    arrays = {name: value.tolist() for name, value in attributes.items() if name not in STRINGS}
    assert all(attributes[name].dtype == np.int64 for name in arrays)
    assert [attributes[name] for name in STRINGS] == [b"ELF", "ab" * 32, "quantize_0,quantize_1"]
    assert arrays == {
        "align": [16, 16, 4] * 2,
        "divide": [0, 0, -1, 99, 64],
        "threads": [512, 1, 1] * 2,
        "grid": [0, 0, 0, 99, 8192, 0, 1, 0, 0, -2, 1, 0, 3, 0, 0, 99, 8192, 0, 4, 0, 0, -2, 1, 0],
        "scalars": [8, 0, 0, 99, 4, -1, 5, 0],
    }


STRINGS = ("image", "sha256", "symbols")


def test_attributes_of_all_words():
    attributes = FULL.attributes("ab" * 32, {"seed": -3})
    arrays = {name: value.tolist() for name, value in attributes.items() if name not in STRINGS}
    assert "image" not in attributes
    assert arrays == {
        "align": [16, 16, 1, 2, 2, 1],
        "divide": [1, 0, -1, 99, 32],
        "threads": [384, 1, 1, 256, 1, 1],
        "grid": [0, -2, 0, 0, 1, 0, 1, 0, 0, -1, 128, 0, 1, -1, 8, 0, 1, 1],
        "scalars": [4, 0, 0, -1, 8, -1, -3, 0],
        "maps": [0, 9, 2, 3, 3, 1, 0, -1, 99, 1, 2, 64, 0, 0, -1, 1, 1, 128, 0, -1, 99, 2, 1],
        "parameters": [0, 2, 0, 0, 3, 8, 0, 0, 1, 0, 1, 0],
        "settings": [200_000, 2, 1, 1, 1, 0, 1, 1, 1, 0],
        "scratch": [2, 1],
        "scratch_bytes": [0, 0, 0, -1, 128, 0, 0, -1, 4, 0, 1, 0],
    }


def test_a_scalar_without_a_value_is_an_error():
    with pytest.raises(KeyError, match="seed"):
        FULL.attributes("ab" * 32, {"weed": 1})


def test_a_map_of_several_ranks_is_an_error():
    with pytest.raises(ValueError, match="of 2 dimensions has 0 strides and a box of 2"):
        dataclasses.replace(FULL.maps[0], strides=())


def test_attributes_of_a_call():
    kernels = {"sm_90": FULL.attributes("ab" * 32, {"seed": 0})}
    attributes = call_attributes(kernels)
    assert set(attributes) == {"abi", "kernels"} and attributes["abi"] == np.int64(ABI)
    attributes = call_attributes(kernels, merge=(0, 0, 1), absent=[1], device=33)
    assert attributes["merge"].tolist() == [0, 0, 1] and attributes["absent"].tolist() == [1]
    assert attributes["device"] == 33 and isinstance(attributes["device"], np.int64)


def test_the_handler_is_of_the_same_version():
    assert _ffi.ABI == ABI


def test_the_words_need_no_jax():
    code = (
        "import handler_alone, sys\n"
        "import jax_mx.launch.rule\n"
        "assert not {'jax', 'jaxlib', 'jax_mx.launch._ffi'} & set(sys.modules)"
    )
    path = [str(Path(__file__).parent), str(Path(rule.__file__).parents[2])]
    setup = f"import sys; sys.path[:0] = {path!r}\n"
    subprocess.run([sys.executable, "-c", setup + code], check=True)
