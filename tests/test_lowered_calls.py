"""The lowered programs: kernels' calls, products and collectives, in their order.

`tests/golden/lowered_calls.json` has it for each case of `CASES`: a call of a public function, a
recipe, what is differentiated, a mesh, and chips. No GPU is there: kernels are stand-ins that say
what they are. `python tests/test_lowered_calls.py` writes the file anew; with words behind, it
writes the cases that have all of them, and keeps the others.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import GOLDEN, covering, lowered_apart, only, step
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mx
from jax_mx import MXFP8, Recipe
from jax_mx.launch import partition, store
from jax_mx.products.recipes import RECIPES
from jax_mx.quantizing.facts.product_kernels import Binary
from jax_mx.quantizing.facts.signatures import signature_of
from jax_mx.quantizing.facts.variants import Variant

GOLDEN_FILE = GOLDEN / "lowered_calls.json"


# ---- what a kernel's call says ---
def words(kernel: Binary) -> tuple[str, list[str]]:
    """The kernel's name, and the names of its operands, in the words of the golden file.

    They outlive a renaming: whoever renames kernels or operands translates the new names here.
    """
    signature = kernel.signature if isinstance(kernel, Variant) else signature_of(kernel.op)
    return kernel.name, [array.name for array in signature.operands]


@dataclasses.dataclass(frozen=True)
class Described(store.Artifact):
    """A kernel without code, whose call says what it is asked for."""

    does: str = ""
    operands: tuple[str, ...] = ()

    def attributes(self, launch, scalars, carry):
        """The words; of scalars those that are not 0."""
        del carry
        asked = [f"{name}={value}" for name, value in sorted(scalars.items()) if value]
        return {"does": " ".join((self.does, launch, *asked)), "operands": " ".join(self.operands)}


def describe(kernel: Binary, arch: str) -> Described:
    """The kernel of an arch, which nobody compiles."""
    del arch
    does, operands = words(kernel)
    return Described({"sha256": ""}, Path(), b"", does, (*operands,))


@contextlib.contextmanager
def lowered_for(archs: str):
    """Programs within are lowered for these archs, with kernels that are described."""
    with pytest.MonkeyPatch.context() as patch, lowered_apart(f"described for {archs}"):
        patch.setenv("JAX_MX_ARCHS", archs)
        patch.delenv("JAX_MX_TUNING", raising=False)
        patch.setattr(store, "obstacle", lambda variant, arch: "")
        patch.setattr(store, "get", describe)
        yield


# ---- what a program has, in its order ---
PRODUCTS = ("stablehlo.dot_general", "chlo.ragged_dot")
COLLECTIVES = tuple(
    f"stablehlo.{name}"
    for name in (
        *("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "collective_permute"),
        "collective_broadcast",
    )
)
KNOWN = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")  # they compute nothing


class Walk:
    """The events of a module on one of its platforms, functions put in where they are called.

    A program for several platforms switches by the number of its platform. The walk takes the
    branch of `platform`, so that nothing depends on the number of switches.
    """

    def __init__(self, module: ir.Module, platform: int = 0):
        self.events: list[str] = []
        self.platform = platform
        self.functions = {
            ir.StringAttr(op.attributes["sym_name"]).value: op.operation
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        main = self.functions["main"]
        attributes = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else ()
        numbers = [platform if "_platform_index" in str(text) else None for text in attributes]
        self.call(main, numbers)

    def call(self, function: ir.Operation, numbers: list[int | None]) -> list[int | None]:
        """Visits a function; gives which results are known numbers, of arguments that are."""
        (block,) = function.regions[0].blocks
        return self.visit(block, dict(zip(block.arguments, numbers, strict=False)))

    def visit(self, block: ir.Block, known: dict[ir.Value, int | None]) -> list[int | None]:
        """Visits a block's operations; gives the numbers that it returns."""
        returned: list[int | None] = []
        for operation_view in block.operations:
            op = operation_view.operation
            numbers = [known.get(operand) for operand in op.operands]
            results: list[int | None] = []
            match op.name:
                case "func.return" | "stablehlo.return":
                    returned = numbers
                case "stablehlo.constant":
                    scalar = re.fullmatch(
                        r"dense<(\d+)> : tensor<u?i\d+>", str(op.attributes["value"])
                    )
                    results = [int(scalar[1])] if scalar else []
                case "stablehlo.convert":
                    results = numbers
                case "func.call":
                    callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
                    results = self.call(self.functions[callee], numbers)
                case "stablehlo.case" if numbers[0] is not None:
                    branch = op.regions[min(numbers[0], len(op.regions) - 1)]
                    results = self.visit(branch.blocks[0], known)
                case _:
                    self.note(op)
                    self.within(op, known)
            known.update(zip(op.results, results, strict=False))
        return returned

    def within(self, op: ir.Operation, known: dict[ir.Value, int | None]) -> None:
        """Visits what an operation holds; loops and branches say that they are there."""
        begin = len(self.events)
        for region in op.regions:
            for block in region.blocks:
                self.visit(block, known)
        if len(self.events) > begin and op.name in ("stablehlo.while", "stablehlo.case"):
            self.events[begin:] = [f"  {event}" for event in self.events[begin:]]
            self.events.insert(begin, op.name.removeprefix("stablehlo."))

    def note(self, op: ir.Operation) -> None:
        """Writes down a call, a product or a collective."""
        if op.name == "stablehlo.custom_call":
            target = ir.StringAttr(op.attributes["call_target_name"]).value
            if target == store.TARGET:
                self.events.append(f"{asked_of(op)}: {types_of(op)}")
            elif target == partition.TARGET:
                self.events.append(f"{split_by(op)}: {types_of(op)}")
            elif target not in KNOWN:
                target = re.sub(r"_v\d+$", "", target)  # Pallas counts its calls' versions
                self.events.append(f"custom call {target}: {types_of(op)}")
        elif op.name == "stablehlo.composite":
            name = ir.StringAttr(op.attributes["name"]).value
            self.events.append(f"composite {name}{numbers_of(op)}: {types_of(op)}")
        elif op.name in PRODUCTS:
            self.events.append(f"{op.name.partition('.')[2]}{numbers_of(op)}: {types_of(op)}")
        elif op.name in COLLECTIVES:
            self.events.append(f"{op.name.partition('.')[2]}: {types_of(op)}")


def asked_of(op: ir.Operation) -> str:
    """The kernels that a call asks for, by chips, and its operands."""
    config = ir.DictAttr(op.attributes["mhlo.backend_config"])
    chips = {kernel.name: ir.DictAttr(kernel.attr) for kernel in ir.DictAttr(config["kernels"])}
    ((does, names),) = {
        tuple(ir.StringAttr(kernel[key]).value for key in ("does", "operands"))
        for kernel in chips.values()
    }
    absent = {*integers(config["absent"])} if "absent" in config else ()
    present = [name for i, name in enumerate(names.split()) if i not in absent]
    merge = f", merge {integers(config['merge'])}" if "merge" in config else ""
    return f"{does} on {' '.join(chips)}{merge}, of {' '.join(present)}"


def split_by(op: ir.Operation) -> str:
    """The implementation that XLA splits, and the kernels that devices may run."""
    config = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
    by = [
        config["parameters"].get("implementation", "rows"),
        *sorted(kernel["name"] for kernel in config.get("kernels", ())),
    ]
    return f"split {config['name']} by {' '.join(by)}"


def integers(attribute: ir.Attribute) -> list[int]:
    """The numbers of an attribute that is an array."""
    return [*map(int, ir.DenseIntElementsAttr(attribute))]


def numbers_of(op: ir.Operation) -> str:
    """A product's dimension numbers and precision, on one line."""
    numbers = []
    for name in ("dot_dimension_numbers", "ragged_dot_dimension_numbers", "precision_config"):
        if name in op.attributes:
            text = str(op.attributes[name])
            numbers += re.findall(r"(\w)\w*_(\w)\w*_dimensions = (\[[0-9, ]*\])", text)
            numbers += [(word, "", "") for word in re.findall(r"precision (HIGH\w*)", text)]
    if "composite_attributes" in op.attributes:
        numbers.append((str(op.attributes["composite_attributes"]), "", ""))
    return "".join(f" {''.join(letters)}" for letters in numbers)


def types_of(op: ir.Operation) -> str:
    """The types of operands and results; with its order in memory, of an array that lies oddly."""
    sides = []
    for name, values in (("operand_layouts", op.operands), ("result_layouts", op.results)):
        orders = [*ir.ArrayAttr(op.attributes[name])] if name in op.attributes else []
        types = [str(value.type).removeprefix("tensor<").removesuffix(">") for value in values]
        for i, order in enumerate(orders):
            rank = len(ir.RankedTensorType(values[i].type).shape)
            dims = re.findall(r"\d+", str(order).partition(":")[0].removeprefix("dense"))
            if [*map(int, dims)] != [*range(rank)][::-1]:
                types[i] += f"{{{','.join(dims)}}}"
        sides.append(", ".join(types))
    return " -> ".join(sides)


# ---- the cases ---
@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a public function.

    Attributes:
      run: the call, of its arguments and `recipe`.
      args: shapes, or abstract arrays; dtypes other than bfloat16 as pairs.
      specs: how arguments, and behind them the result, are split on a mesh.
      wrt: the numbers of the arguments that have gradients.
      mesh: the mesh's axes.
      manual: the axes along which shard_map splits.
    """

    run: Callable[..., jax.Array]
    args: tuple[Any, ...]
    wrt: tuple[int, ...]
    specs: tuple[P, ...] = ()
    mesh: tuple[tuple[str, int], ...] = (("data", 4), ("tensor", 2))
    manual: tuple[str, ...] = ("data", "tensor")

    @property
    def avals(self) -> list[Any]:
        """The abstract arguments."""
        return [
            jax.ShapeDtypeStruct(arg, jnp.bfloat16)
            if isinstance(arg, tuple) and all(isinstance(n, int) for n in arg)
            else jax.ShapeDtypeStruct(*arg)
            if isinstance(arg, tuple)
            else arg
            for arg in self.args
        ]


M, K, N = 1024, 512, 768  # rows, contracted, columns
T, E, D, I = 1024, 8, 512, 256  # tokens, experts, their length, that between  # noqa: E741
KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


def dot(numbers):
    """dot_general of these dimension numbers."""
    return lambda x, w, recipe: jax_mx.dot_general(x, w, numbers, recipe=recipe)


def matmul(x, w, recipe):
    return jax_mx.matmul(x, w, recipe=recipe)


def once(f, at=(1,), **options):
    """f of weights, the arguments of these numbers, that are quantized once, before."""

    def run(*args, recipe):
        quantize = functools.partial(recipe.quantize_weight, **options)
        args = [quantize(a) if i in at else a for i, a in enumerate(args)]
        return f(*args, recipe=recipe)

    return run


def frozen(shape, format="mxfp4_e2m1", axis=-2):
    """A weight that is quantized already."""
    quantize = functools.partial(jax_mx.quantize, format=format, axis=axis)
    return jax.eval_shape(quantize, jax.ShapeDtypeStruct(shape, jnp.bfloat16))


def ragged(x, w, sizes, recipe):
    return jax_mx.ragged_dot(x, w, sizes, recipe=recipe)


def mlp(x, w1, w2, b1=None, b2=None, *, recipe, **options):
    return jax_mx.mlp(x, w1, w2, b_gate_up=b1, b_down=b2, recipe=recipe, **options)


def moe(x, experts, weights, w1, w2, b1=None, b2=None, *, recipe, **options):
    options |= {"b_gate_up": b1, "b_down": b2, "recipe": recipe}
    return jax_mx.moe(x, experts, weights, w1, w2, **options)


SIZES = ((E,), jnp.int32)
ROUTING = ((T, 2), jnp.int32), ((T, 2), jnp.float32)
OF_MOE = (T, D), *ROUTING, (E, D, 2 * I), (E, I, D)
OVER_EXPERTS = {
    "specs": (P("expert"),) * 6,
    "mesh": (("expert", 4),),
    "manual": ("expert",),
}
ROWS_COLUMNS = (P("data", None), P(None, "tensor"), P("data", "tensor"))
LAYER = (P("data", None), P(None, "tensor"), P("tensor", None), P("data", None))
DENSE, GROUPED = ((M, K), (K, N)), ((M, K), (E, K, N), SIZES)
COLUMNS = (P(), P(None, None, "tensor"), P(), P(None, "tensor"))
CALLS = {
    "matmul": Call(matmul, DENSE, (0, 1), ROWS_COLUMNS),
    "matmul FSDP": Call(matmul, DENSE, (0, 1), (P("data", None),) * 3),
    "nn": Call(dot((((1,), (0,)), ((), ()))), DENSE, (0, 1)),
    "nt": Call(dot((((1,), (1,)), ((), ()))), ((M, K), (N, K)), (0, 1)),
    "batch": Call(dot((((2,), (1,)), ((0,), (0,)))), ((4, M, K), (4, K, N)), (0, 1)),
    "matmul quantized": Call(once(matmul), DENSE, (0, 1)),
    "matmul dequantized": Call(once(matmul, dequantized=True), DENSE, (0, 1)),
    "matmul frozen": Call(matmul, ((M, K), frozen((K, N))), (0,)),
    "matmul frozen, few rows": Call(matmul, ((16, K), frozen((K, N))), (0,)),
    "matmul frozen e4m3": Call(matmul, ((M, K), frozen((K, N), "mxfp8_e4m3")), (0,)),
    "ragged": Call(ragged, GROUPED, (0, 1), COLUMNS, manual=("tensor",)),
    "ragged quantized": Call(once(ragged, contracting=1, batch=0), GROUPED, (0, 1)),
    "ragged frozen": Call(ragged, ((M, K), frozen((E, K, N)), SIZES), (0,)),
    "mlp": Call(mlp, ((M, D), (D, 2 * I), (I, D)), (0, 1, 2), LAYER, manual=("data",)),
    "mlp un-gated": Call(functools.partial(mlp, activation="relu2"), ((M, D), (D, I), (I, D)),
        (0, 1, 2)),
    "mlp biases": Call(mlp, ((M, D), (D, 2 * I), (I, D), (2 * I,), (D,)), (0, 1, 2, 3, 4)),
    "mlp quantized": Call(once(mlp, (1, 2)), ((M, D), (D, 2 * I), (I, D)), (0, 1, 2)),
    "mlp frozen": Call(mlp, ((M, D), frozen((D, 2 * I)), frozen((I, D))), (0,)),
    **{f"mlp {kept}": Call(functools.partial(mlp, residuals=kept), ((M, D), (D, 2 * I), (I, D)),
        (0, 1, 2)) for kept in ("mx", "floats", "inputs")},
    "moe": Call(moe, OF_MOE, (0, 2, 3, 4)),
    "moe biases": Call(moe, (*OF_MOE, (E, 2 * I), (E, D)), (0, 2, 3, 4, 5, 6)),
    "moe gpt-oss": Call(functools.partial(moe, activation="gpt_oss", interleaved=True),
        (*OF_MOE, (E, 2 * I), (E, D)), (0, 2, 3, 4, 5, 6)),
    "moe quantized": Call(once(moe, (3, 4), contracting=1, batch=0), OF_MOE, (0, 2, 3, 4)),
    "moe frozen": Call(moe, ((T, D), *ROUTING, frozen((E, D, 2 * I)), frozen((E, I, D))), (0, 2)),
    **{f"moe {kept}": Call(functools.partial(moe, residuals=kept), OF_MOE,
        (0, 2, 3, 4)) for kept in ("floats", "inputs")},
    **{f"moe wire {wire}": Call(functools.partial(moe, expert_axis="expert", wire=wire), OF_MOE,
        (0, 2, 3, 4), **OVER_EXPERTS) for wire in ("mx", "floats")},
}  # fmt: skip
OWN_RECIPES = {
    "row": Recipe(window="row"),
    "256": Recipe(window=256),
    "128": Recipe(window=128, weight_window=(128, 128)),
    "squares": Recipe(block=(32, 32)),
    "backward": jax_mx.mxfp4_backward,  # takes a key
}
EVERY_RECIPE = {**RECIPES, **OWN_RECIPES}
ROWS = ("row", "mxfp8_rows", "mxfp8_rows_fast")  # whose windows groups do not have
ARCHS = {"sm_90a": "cuda", "sm_100f": "cuda", "gfx942": "rocm", "gfx950": "rocm"}
BOTH = "export"  # a program for all of them


@dataclasses.dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
      call: of `CALLS`.
      recipe: of `EVERY_RECIPE`.
      part: "forward"; "all", "lhs" or "rhs", the gradients beside the result; or "checkpoint" or
        "named", all of them under jax.checkpoint, which keeps nothing or what we name.
      mesh: "one" device; "shard_map", "auto" or "explicit" axes.
      arch: of `ARCHS`, or `BOTH`.
    """

    call: str
    recipe: str = "mxfp8"
    part: str = "all"
    mesh: str = "one"
    arch: str = "sm_90a"

    @property
    def name(self) -> str:
        """As the golden file has it."""
        return " / ".join(dataclasses.astuple(self))


def program(case: Case) -> tuple[Callable[..., Any], list[Any], Any]:
    """The function that is lowered, its abstract arguments, and the mesh or None."""
    call, recipe = CALLS[case.call], EVERY_RECIPE[case.recipe]
    avals, specs = call.avals, [*call.specs]
    wrt = {"lhs": call.wrt[:1], "rhs": call.wrt[1:2], "forward": ()}.get(case.part, call.wrt)
    takes_key = callable(recipe)

    def run(*args):
        *args, key = (*args, None) if not takes_key else args
        return call.run(*args, recipe=recipe(key) if takes_key else recipe)

    if case.part == "checkpoint":
        run = jax.checkpoint(run)
    if case.part == "named":
        keep = jax.checkpoint_policies.save_only_these_names(jax_mx.CHECKPOINT_NAME)
        run = jax.checkpoint(run, policy=keep)
    if takes_key:
        avals, specs = [*avals, KEY], [*specs[:-1], P(), *specs[-1:]] if specs else []
    lowered, outs = run, specs[-1:]
    if wrt:
        lowered = step(run, wrt)
        result = jax.ShapeDtypeStruct((*avals[0].shape[:-1], columns(call)), avals[0].dtype)
        avals, outs = [*avals, result], [*outs, *(specs[i] for i in wrt if specs)]
    if case.mesh == "one":
        return lowered, avals, None
    ins = specs if wrt else specs[:-1]
    axis_type = AxisType.Explicit if case.mesh == "explicit" else AxisType.Auto
    names, sizes = zip(*call.mesh, strict=True)
    devices = jax.devices("cpu")[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes), devices=devices)
    if case.mesh == "shard_map":
        ins, outs = ([only(spec, call.manual) for spec in specs] for specs in (ins, outs))
        out_specs = (*outs,) if wrt else outs[0]
        lowered = jax.shard_map(lowered, mesh=mesh, in_specs=(*ins,), out_specs=out_specs)
    avals = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip(avals, ins, strict=True)
    ]
    return lowered, avals, mesh


def columns(call: Call) -> int:
    """How many columns the result has: of calls on a mesh, as many as the last matrix."""
    if call.specs:
        return [a.shape for a in call.avals if len(a.shape) > 1][-1][-1]
    return jax.eval_shape(functools.partial(call.run, recipe=MXFP8), *call.avals).shape[-1]


def events(case: Case) -> list[str]:
    """The events of the case's lowered program."""
    run, avals, mesh = program(case)
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(lowered_for(" ".join(ARCHS) if case.arch == BOTH else case.arch))
        if case.arch != BOTH:
            traced = jax.jit(run).trace(*avals)
            lowered = traced.lower(lowering_platforms=(ARCHS[case.arch],))
            return Walk(lowered.compiler_ir("stablehlo")).events
        platforms = ("cuda", "rocm")
        exported = jax.export.export(
            jax.jit(run), platforms=platforms, disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS
        )(*avals)
    with mlir.make_ir_context():
        module = ir.Module.parse(exported.mlir_module())
        by_platform = ((name, Walk(module, i).events) for i, name in enumerate(platforms))
        return [line for name, lines in by_platform for line in (f"on {name}", *lines)]


def cases() -> Iterator[Case]:
    """All of them."""
    two, three = ("sm_90a", "gfx950"), ("sm_90a", "sm_100f", "gfx950")
    for recipe in EVERY_RECIPE:
        for arch in ARCHS:
            yield Case("matmul", recipe, "all", arch=arch)
        for arch in two:
            yield Case("matmul", recipe, "forward", arch=arch)
            yield Case("mlp", recipe, "all", arch=arch)
            if recipe not in ROWS:
                yield Case("moe", recipe, "all", arch=arch)
        for arch in three if recipe not in ROWS else ():
            yield Case("ragged", recipe, "all", arch=arch)
        if recipe not in ROWS:
            yield Case("ragged", recipe, "forward")
        yield Case("mlp", recipe, "forward")
    for call in CALLS:
        if "wire" in call or call in ("matmul", "ragged", "mlp", "moe", "matmul FSDP"):
            continue
        for arch in three if "frozen" in call else two:
            yield Case(call, arch=arch)
        if "frozen" in call:
            yield Case(call, part="forward")
    for recipe, grouped in (("mxfp8", "mxfp8"), ("row", "128")):
        for part in ("lhs", "rhs", "checkpoint", "named"):
            yield Case("matmul", recipe, part)
            yield Case("ragged", grouped, part)
        yield Case("matmul quantized", recipe)
        yield Case("nt", recipe)
        yield Case("batch", recipe)
        yield Case("matmul", recipe, arch=BOTH)
        yield Case("ragged", grouped, arch=BOTH)
        yield Case("mlp", recipe, arch=BOTH)
    for part in ("checkpoint", "named"):
        yield Case("mlp", part=part)
        yield Case("moe", part=part)
    yield Case("moe", arch=BOTH)
    yield Case("moe", part="forward")
    for mesh in ("shard_map", "auto", "explicit"):
        for recipe in ("mxfp8", "row", "mxfp8_rows", "128"):
            yield Case("matmul", recipe, "all", mesh)
        yield Case("mlp", mesh=mesh)
        for arch in two:
            yield Case("moe wire mx", mesh=mesh, arch=arch)
        yield Case("moe wire floats", mesh=mesh)
        yield Case("matmul", mesh=mesh, arch="gfx950")
        if mesh != "explicit":
            yield Case("ragged", mesh=mesh)
        if mesh != "shard_map":
            yield Case("matmul FSDP", mesh=mesh)


CASES = {case.name: case for case in cases()}


@functools.cache
def golden() -> dict[str, list[str]]:
    """The file."""
    return json.loads(GOLDEN_FILE.read_text())


# Some with every call, recipe, mesh, arch and direction.
FEW = covering(CASES, lambda name: {*name.split(" / ")})


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in FEW)) for name in CASES],
)
def test_programs_are_lowered_to_the_same_calls(name):
    assert events(CASES[name]) == golden()[name], "see python tests/test_lowered_calls.py"


class WithBarriers(Walk):
    """The events of a module, and its barriers."""

    def note(self, op: ir.Operation) -> None:
        """Writes down a barrier, too."""
        if op.name == "stablehlo.optimization_barrier":
            self.events.append("barrier")
        super().note(op)


@pytest.mark.parametrize(("call", "recipe"), [("matmul", "row"), ("ragged", "128")])
def test_xla_computes_a_product_once_that_a_scan_keeps(call, recipe):
    """It would for itself and where it is kept; gradients of weights are only kept."""
    run, avals, _ = program(Case(call, recipe))
    with lowered_for("sm_90a"):
        lowered = jax.jit(run).trace(*avals).lower(lowering_platforms=("cuda",))
        words = [e.split("_")[0] for e in WithBarriers(lowered.compiler_ir("stablehlo")).events]
    order = [word for word in words if word in ("matmul", "wgrad", "barrier")]
    last = "matmul" if call == "matmul" else "wgrad"
    assert order == ["matmul", "barrier", "matmul", "barrier", last]


def test_the_file_has_these_cases():
    assert [*golden()] == [*CASES]


if __name__ == "__main__":
    import conftest  # noqa: F401  (what tests run with: eight devices, strict settings)

    kept = golden() if GOLDEN_FILE.exists() else {}
    anew = {
        name: events(case)
        for name, case in CASES.items()
        if name not in kept or all(word in name for word in sys.argv[1:])
    }
    whole = {name: (kept | anew)[name] for name in CASES}
    GOLDEN_FILE.write_text(json.dumps(whole, indent=1) + "\n")
