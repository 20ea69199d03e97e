"""`Kernel`: a function of JAX that a kernel of CuTeDSL or FlyDSL computes."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.interpreters import ad, mlir

from jax_mx.launch import calls, private, store
from jax_mx.launch.binary import Files
from jax_mx.launch.chips import DSLS, arch_of, chips_of
from jax_mx.launch.compiler import CompileError
from jax_mx.launch.entry import ONLY
from jax_mx.launch.targets import Target, target_of


@dataclasses.dataclass(frozen=True)
class ModuleBinary:
    """A binary whose entries a module lists; see `launch.binary.Binary`.

    Attributes:
      kernel: the name of the `Kernel`.
      implementation: the DSL.
      module: has `entries(dtypes, arch)`, which gives entries, the fastest first.
      dtypes: the operands', by NumPy's names.
      path: where the module lies.
    """

    kernel: str
    implementation: str
    module: str
    dtypes: tuple[str, ...]
    path: Path

    @property
    def name(self) -> str:
        """See `Binary`."""
        return "_".join((self.kernel, *self.dtypes))

    @property
    def compiled_by(self) -> str:
        """See `Binary`."""
        return f"jax_mx.launch.{self.implementation}:compile_module"

    def files(self, arch: str) -> Files:
        """See `Binary`: the module; if it is in a package, all modules beside it."""
        del arch
        every = sorted(self.path.parent.glob("*.py")) if "." in self.module else [self.path]
        return tuple((path.name, path) for path in every)


class Kernel:
    """A function of arrays that a kernel computes, where there is one for the chip.

        softmax = Kernel(
            "row_softmax",
            {"cutedsl": "my_kernels.softmax_cutedsl", "flydsl": "my_kernels.softmax_flydsl"},
            reference=jax.nn.softmax,
            whole=1,
        )
        y = softmax(x)

    It works under jit, grad, vmap, on meshes and in exported programs. The last `whole` dimensions
    of an array stay whole. All arrays have the same dimensions before them: vmap adds one, and XLA
    splits them among devices. Derivatives are the reference's.

    Args:
      name: unique; the binaries' names begin with it.
      modules: by DSL, the module that has `entries(dtypes, arch)`. Only a process that compiles
        imports it.
      reference: the same function in jax.numpy. It says which arrays come out, and computes them
        where no kernel does.
      whole: how many of the last dimensions a kernel takes whole.

    Raises:
      ValueError: `modules` names a DSL or a module that is not there.
    """

    def __init__(
        self,
        name: str,
        modules: Mapping[str, str],
        *,
        reference: Callable[..., Any],
        whole: int = 1,
    ):
        if unknown := {*modules} - {*DSLS.values()}:
            known = ", ".join(DSLS.values())
            raise ValueError(f"{name}: DSL {unknown.pop()!r} is unknown; use {known}")
        self.name, self.whole, self.reference = name, whole, reference
        self.modules = {dsl: (module, _path_of(name, module)) for dsl, module in modules.items()}
        self.primitive = private.define(name, self._avals, self._lower, self._batch, _underived)
        ad.primitive_jvps[self.primitive] = self._jvp

    def __call__(self, *operands: jax.Array, implementation: str | None = None) -> Any:
        """The reference's results, computed by a kernel.

        Args:
          operands: arrays.
          implementation: "cutedsl", "flydsl" or "xla", which is the reference; None: a kernel
            where there is one, else the reference.

        Raises:
          ValueError: no implementation is called that, or an array has too few dimensions.
          NotImplementedError: the implementation does not serve the chip; raised by the lowering.
        """
        if implementation not in (None, "xla", *self.modules):
            known = ", ".join(["xla", *self.modules])
            raise ValueError(f"{self.name}: implementation {implementation!r}; use one of {known}")
        leading = {jax.numpy.shape(x)[: jax.numpy.ndim(x) - self.whole] for x in operands}
        if len(leading) > 1 or any(jax.numpy.ndim(x) < self.whole for x in operands):
            shapes = ", ".join(str(jax.numpy.shape(x)) for x in operands)
            raise ValueError(
                f"{self.name}: arrays have the shapes {shapes}; all dimensions but the last "
                f"{self.whole} must be equal: broadcast the arrays"
            )
        operands = tuple(private.vary_alike(*map(jax.numpy.asarray, operands)))
        tree = jax.tree.structure(jax.eval_shape(self.reference, *operands))
        return tree.unflatten(self.primitive.bind(*operands, implementation=implementation))

    def binary(self, dsl: str, dtypes: Sequence[Any]) -> ModuleBinary:
        """The binary for operands of these dtypes; `store.get` compiles it ahead of a call."""
        module, path = self.modules[dsl]
        return ModuleBinary(self.name, dsl, module, tuple(str(t) for t in dtypes), path)

    # ---- the rules of the primitive ---
    def _flat(self, *operands: Any) -> list[Any]:
        return jax.tree.leaves(self.reference(*operands))

    def _avals(self, *avals: Any, implementation: str | None) -> list[Any]:
        del implementation
        return jax.make_jaxpr(self._flat)(*avals).out_avals

    def _batch(self, args: Any, dims: Any, *, implementation: str | None) -> tuple[list, list]:
        bound = self.primitive.bind(*calls.batched(args, dims), implementation=implementation)
        return bound, [0] * len(bound)

    def _jvp(self, primals: Any, tangents: Any, *, implementation: str | None) -> tuple:
        outs = self.primitive.bind(*primals, implementation=implementation)
        moves = tuple(map(ad.instantiate_zeros, tangents))
        return outs, jax.jvp(self._flat, tuple(primals), moves)[1]

    def _lower(
        self, platform: str | None, ctx: Any, *operands: Any, implementation: str | None
    ) -> Any:
        target = target_of(ctx, platform)
        dsl, xla = DSLS.get(target.platform, ""), mlir.lower_fun(self._flat, multiple_results=True)
        if implementation == "xla":
            return xla(ctx, *operands)
        why = self._obstacle(implementation or dsl, dsl, target)
        if not why:
            chips = store.exported(chips_of(dsl)) if target.chips is None else target.chips
            binary = self.binary(dsl, [aval.dtype for aval in ctx.avals_in])
            try:
                kernels = calls.kernels_of(self.name, binary, chips, (ONLY, {}), target.carries)
            except CompileError as error:
                why = str(error)
            else:
                batch = ctx.avals_in[0].ndim - self.whole
                return calls.emit(
                    ctx, *operands, kernels=kernels, batch=batch, device=target.device
                )
        if implementation is not None or (dsl in self.modules and jax.process_count() > 1):
            raise NotImplementedError(f"{self.name}: {why}; implementation='xla' runs everywhere")
        if dsl in self.modules:
            calls.say_once(f"{self.name} takes XLA: {why}")
        return xla(ctx, *operands)

    def _obstacle(self, asked: str, dsl: str, target: Target) -> str:
        """Why no kernel of the DSL that is asked for serves a target; empty where one may."""
        if asked != dsl or dsl not in self.modules:
            return f"it has no kernel{f' in {asked}' * bool(asked)} for {target.platform}"
        lacking = [chip for chip in target.chips or () if arch_of(chip) is None]
        return f"{dsl} compiles for no {lacking[0]}" if lacking else ""


def _path_of(name: str, module: str) -> Path:
    """Where a module lies, which is not imported."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise ValueError(f"{name}: there is no module {module}; put its folder on sys.path")
    return Path(spec.origin)


def _underived(*_: Any, **__: Any) -> Any:
    raise AssertionError("the reference is what is transposed")
