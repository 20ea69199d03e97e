"""Products as JAX primitives, as a trace has them; lowering.py has what they become.

`mx_product` is one contraction of operands that are there. lowering.py asks decide.py which
implementation serves it on the chips of the program. So the choice stands in the lowered program,
and vmap, shard_map, scan and export treat the primitive as `jax.lax.dot_general`.

`mx_step` joins quantizers and the products behind them. Some implementations multiply bfloat16. For
such products one kernel quantizes an operand and writes the floats that its codes stand for, and
codes only for the backward pass. A kernel that writes codes first moves 7 bytes an element instead
of 5, for a gradient 10 instead of 6. An H100 took 291 us and 209, 411 and 245 (2026-11-27, (16384,
7168) in MXFP8). The lowering knows what products multiply: XLA says there whether it splits the
program, and an export which chips it is for. So the lowering decides before a quantizer runs.
Transformations see the step of codes. Policies of jax.checkpoint look into it, and find the names
of codes there. An operand that no kernel gives as floats, say in windows, needs no step.

Neither has a derivative, but for products of floats: derivative.py and layer.py have.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

from jax_mx.formats.layouts import ROW_MAJOR_VALUES
from jax_mx.formats.sharding import is_explicit
from jax_mx.launch import private
from jax_mx.products.contraction import (
    ROWS,
    SUMS,
    Contraction,
    Dims,
    Numbers,
)
from jax_mx.quantizing import derivatives, primitive
from jax_mx.quantizing.mxarray import MXArray


# ---- one contraction ---
def contraction_of(tree: Any, leaves: Sequence[Any], numbers: Numbers) -> Contraction:
    """The contraction of arrays, or abstract values: leaves of (lhs, rhs, sizes, like)."""
    return Contraction(numbers, *tree.unflatten(leaves))


def multiplied(contraction: Contraction) -> jax.Array:
    """The product: (batch..., free of lhs..., free of rhs...); over groups see `Numbers`."""
    parts = (contraction.lhs, contraction.rhs, contraction.sizes, contraction.like)
    leaves, tree = jax.tree.flatten(parts)
    (y,) = product_p.bind(*private.vary_alike(*leaves), tree=tree, numbers=contraction.numbers)
    return y


def _avals(*leaves: Any, tree: Any, numbers: Numbers) -> list:
    contraction = contraction_of(tree, leaves, numbers)
    lhs, rhs = contraction.lhs, contraction.rhs
    if not numbers.groups:  # of operands as float32, sharded as their values are
        types: dict[str, Any] = {"dtype": np.dtype(np.float32), "weak_type": False}
        values: list[Any] = [x.values if isinstance(x, MXArray) else x for x in (lhs, rhs)]
        out, _ = jax.lax.dot_general_p.abstract_eval(
            *(v.update(shape=x.shape, **types) for v, x in zip(values, (lhs, rhs), strict=True)),
            dimension_numbers=numbers.dimensions,
            precision=None,
            preferred_element_type=numbers.dtype,
            out_sharding=numbers.out_sharding,
        )
        return [out]
    left, right = lhs.shape, rhs.shape
    a, b = numbers.axes(len(left), len(right))
    if numbers.groups == ROWS and left[a] != right[b]:
        raise ValueError(f"ragged_dot: lhs of {left} does not fit rhs of {right}")
    shape = (left[-3 - a], right[-3 - b])
    shape = (*contraction.sizes.shape, *shape) if numbers.groups == SUMS else shape
    return [private.unsplit("mx_product", leaves, shape, numbers.dtype)]


def _batch(args: Any, dims: Any, *, tree: Any, numbers: Numbers) -> tuple[list, list]:
    """As jax.lax.dot_general: a batch dimension where both operands are mapped, else a free one.

    A grouped product for each entry of the batch, one after the other.
    """
    *sides, result = tree.unflatten(range(len(args)))
    if result is not None:
        tree = jax.tree.structure((*sides, None))
        return _batch(args[:-1], dims[:-1], tree=tree, numbers=numbers)
    if all(d is None for d in dims):  # what is mapped was `like` alone
        return product_p.bind(*args, tree=tree, numbers=numbers), [None]
    if numbers.groups:
        bind: Any = functools.partial(product_p.bind, tree=tree, numbers=numbers)
        return primitive.one_by_one(bind, args, dims)
    return _batch_dense(args, dims, sides, tree, numbers)


def _batch_dense(
    args: Any, dims: Any, sides: Sequence[Any], tree: Any, numbers: Numbers
) -> tuple[list, list]:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    mapped, moved = [], list(args)
    for side in sides[:2]:  # which leaf is whose
        leaves = jax.tree.leaves(side)
        mapped.append(any(dims[i] is not None for i in leaves))
        for i in leaves:
            if dims[i] is not None:
                moved[i] = jnp.moveaxis(args[i], dims[i], 0)
            elif mapped[-1]:
                moved[i] = jnp.broadcast_to(args[i], (size, *args[i].shape))

    def shifted(pair: tuple[Dims, Dims]) -> tuple[Dims, Dims]:
        left, right = (
            tuple(d + is_mapped for d in dims) for dims, is_mapped in zip(pair, mapped, strict=True)
        )
        return left, right

    batch, contracting = shifted(numbers.batch), shifted(numbers.contracting)
    if all(mapped):
        batch, at = ((0, *batch[0]), (0, *batch[1])), 0
    elif mapped[0]:
        at = len(batch[0])
    else:
        lhs, *_ = tree.unflatten([jax.typeof(a) for a in args])
        at = lhs.ndim - len(contracting[0])
    sharding = numbers.out_sharding
    if sharding is not None:
        spec = [*sharding.spec]
        spec.insert(at, derivatives.split_of_mapped(args, dims))
        sharding = sharding.update(spec=jax.sharding.PartitionSpec(*spec))
    numbers = dataclasses.replace(
        numbers, batch=batch, contracting=contracting, out_sharding=sharding
    )
    return product_p.bind(*private.vary_alike(*moved), tree=tree, numbers=numbers), [at]


def _no_second(*_: Any, numbers: Numbers, **__: Any) -> Any:
    return derivatives.no_second("ragged_dot" if numbers.groups else "dot_general")


def _plain(avals: Sequence[Any], *, tree: Any, numbers: Numbers) -> Callable | None:
    """The product of floats as JAX computes it, whose derivatives it has; None of codes."""
    contraction = contraction_of(tree, avals, numbers)
    if numbers.groups or any(isinstance(x, MXArray) for x in (contraction.lhs, contraction.rhs)):
        return None
    return functools.partial(
        jax.lax.dot_general,
        dimension_numbers=numbers.dimensions,
        preferred_element_type=numbers.dtype,
        out_sharding=numbers.out_sharding,
    )


product_p = private.define("mx_product", _avals, None, _batch, _no_second)
derivatives.bilinear(product_p, _plain, _no_second)


# ---- a quantizer and the products behind it ---
Operands = Sequence[Any]  # each `Unquantized`, or a tuple of its forms


class Multiplication(NamedTuple):
    """One product of a step, by the numbers of operands.

    Attributes:
      lhs: the number of an operand of the step, and of the form that the product reads.
      rhs: the same two numbers of the right operand.
      dtype: of the result.
      batch: how many dimensions of both operands are batch dimensions; they come first.
      summed: how many dimensions behind these it sums over, beside the contracted axis.
      like: for a gradient two numbers: the form of its operand, and the axis of the result that
        this form contracts. XLA splits the result like the form.
      spec: the result's partition spec on a mesh with explicit axes; None: as operands have it.
      groups: see `Numbers`.
      align: see `Numbers`.
      exact: see `Numbers`.
      implementation: see `Numbers`.
      chosen: see `Numbers`.
      over_rows: see `Numbers`.
      moved: see `Numbers`.
      caller: see `Numbers`.
      fast: see `Numbers`.
    """

    lhs: tuple[int, int]
    rhs: tuple[int, int]
    dtype: np.dtype
    batch: int = 0
    summed: int = 0
    like: tuple[int, int, int] | None = None
    spec: Any = None
    groups: str = ""
    align: int = 1
    exact: bool = False
    implementation: str | None = None
    chosen: Any = None
    over_rows: bool = False
    moved: np.dtype | None = None
    caller: str = ""
    fast: bool = False

    def of(self, forms: Sequence[Any], sizes: Any) -> Contraction:
        """The contraction of two of the operands' forms."""
        a, b = (forms[i][form] for i, form in (self.lhs, self.rhs))
        lead = tuple(range(self.batch))
        more = tuple(range(self.batch, self.batch + self.summed))
        codes, others = (
            form.array.values if isinstance(form.array, MXArray) else form.array for form in (a, b)
        )
        ranks = (
            values.ndim - (values is not x and x.value_layout != ROW_MAJOR_VALUES)
            for values, x in ((codes, a.array), (others, b.array))
        )
        left, right = ((*more, form.axis % rank) for form, rank in zip((a, b), ranks, strict=True))
        mesh, sharding = jax.typeof(codes).sharding.mesh, None
        if self.spec is not None and is_explicit(mesh):
            spec = jax.sharding.PartitionSpec(*self.spec)
            sharding = jax.sharding.NamedSharding(mesh, spec)
        numbers = Numbers(
            (left, right),
            (lead, lead),
            np.dtype(self.dtype),
            self.groups,
            self.align,
            self.exact,
            sharding,
            self.implementation,
            self.chosen,
            self.over_rows,
            self.moved,
            self.caller,
            self.fast,
        )
        contraction = Contraction(numbers, a.array, b.array, sizes if self.groups else None)
        if self.like is None or not (mesh.empty or mesh.are_all_axes_auto):
            return contraction
        i, form, axis = self.like
        return _split_like(contraction, forms[i][form], axis)


def _split_like(contraction: Contraction, form: Any, axis: int) -> Contraction:
    """The contraction, whose result XLA is to split as a form whose contracted axis is `axis`.

    It stays as it is where codes share bytes, dimensions are merged, or devices hold the whole
    form, which XLA would split anew.
    """
    if form is None or form.gathered:
        return contraction
    array = form.array.values if isinstance(form.array, MXArray) else form.array
    array = array if form.axis == axis else jnp.swapaxes(array, -1, -2)
    numbers, shapes = contraction.numbers, [x.shape for x in (contraction.lhs, contraction.rhs)]
    batch = tuple(shapes[0][d] for d in numbers.batch[0])
    free = (tuple(n[d] for d in numbers.free(i, len(n))) for i, n in enumerate(shapes))
    fits = array.shape == (*batch, *itertools.chain(*free))
    return dataclasses.replace(contraction, like=array) if fits else contraction


@dataclasses.dataclass(frozen=True)
class Step:
    """Products, and forms of their operands that are kept.

    A call takes operands, each `Unquantized` or a tuple of its forms; and the sizes of groups, if
    any. It gives the products and the forms that are kept, in order.

    Attributes:
      multiplications: in order.
      kept: numbers of operands and of their forms; the sums of an operand are form 2.
    """

    multiplications: tuple[Multiplication, ...]
    kept: tuple[tuple[int, int], ...] = ()

    def __call__(self, operands: Operands, sizes: Any = None) -> tuple[list[Any], list[Any]]:
        """The products, and the forms that are kept."""
        config: Any = jax.config
        # Without jit each call would be compiled anew, and kept.
        is_at_once = config.jax_disable_jit or not any(map(any, self._may_be_floats(operands)))
        read = self.wanted
        operands = [
            tuple(form if (i, f) in read else None for f, form in enumerate(operand))
            if isinstance(operand, tuple)
            else operand
            for i, operand in enumerate(operands)
        ]
        leaves, tree = jax.tree.flatten((operands, sizes))
        if is_at_once:
            return self.computed(leaves, tree)
        params, passed = self.traced(leaves, tree)
        structure, outs = params["structure"], iter(step_p.bind(*leaves, **params))
        # An array that passes stays the caller's: of a scan, a residual that is one of its
        # constants is not kept once for each iteration, and a vmap does not copy it.
        return structure.unflatten(
            [leaves[passed[i]] if i in passed else next(outs) for i in range(structure.num_leaves)]
        )

    def traced(self, leaves: Sequence[Any], tree: Any) -> tuple[dict, dict[int, int]]:
        """The parameters of `step_p`, and which result is which leaf as it is."""
        passed: dict[int, int] = {}
        structure: Any = None

        def of_codes(*leaves: Any) -> list[Any]:
            nonlocal structure
            results, structure = jax.tree.flatten(self.computed(leaves, tree))
            places = {id(leaf): index for index, leaf in enumerate(leaves)}
            passed.update({i: places[id(y)] for i, y in enumerate(results) if id(y) in places})
            return [y for i, y in enumerate(results) if i not in passed]

        codes = jax.make_jaxpr(of_codes)(*leaves)
        params = {"step": self, "tree": tree, "passed": tuple(passed), "structure": structure}
        return params | {"codes": codes, "mapped": ()}, passed

    @property
    def wanted(self) -> set[tuple[int, int]]:
        """Numbers of operands and of their forms that are read or kept."""
        wanted = {side for one in self.multiplications for side in (one.lhs, one.rhs)}
        wanted |= {one.like[:2] for one in self.multiplications if one.like is not None}
        return wanted | {*self.kept}

    def narrowed(self, number: int, operand: Any) -> Any:
        """An operand of which only those forms are wanted that the step wants."""
        if isinstance(operand, tuple) or operand.sums:
            return operand
        first, second = ((number, f) in self.wanted for f in (0, 1))
        return dataclasses.replace(
            operand, wanted=(operand.wanted[0] and first, operand.wanted[1] and second)
        )

    def computed(
        self, leaves: Sequence[Any], tree: Any, names: Sequence[str] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Quantizes, then multiplies.

        Args:
          leaves: of operands and of the sizes of groups.
          tree: the structure of both.
          names: the implementations of the products, all of which multiply floats; None: products
            read codes, and the lowering of each decides.
        """
        operands, sizes = tree.unflatten(leaves)
        codes = [(False, False)] * len(operands)
        as_floats = self._may_be_floats(operands) if names else codes
        forms: list[Any] = [
            operand if isinstance(operand, tuple) else operand.forms(floats)
            for operand, floats in zip(operands, as_floats, strict=True)
        ]
        contractions = [
            one._replace(implementation=names[i] if names else one.implementation).of(forms, sizes)
            for i, one in enumerate(self.multiplications)
        ]
        return [*map(multiplied, contractions)], [forms[i][f] for i, f in self.kept]

    def of_floats(self, tree: Any, passed: Sequence[int], names: Sequence[str]) -> Callable:
        """`computed` by implementations of these names, of leaves of (operands, sizes).

        It gives the leaves of the results but those that pass.
        """

        def run(*leaves: Any) -> list[Any]:
            results = jax.tree.leaves(self.computed(leaves, tree, names))
            return [y for i, y in enumerate(results) if i not in passed]

        return run

    def _may_be_floats(self, operands: Operands) -> list[tuple[bool, bool]]:
        """For each operand whether each form may come as floats: it is read and not kept."""
        read = {side for one in self.multiplications for side in (one.lhs, one.rhs)}
        read -= {*self.kept}
        may_be = [
            not isinstance(x, tuple)
            and (isinstance(x.x, MXArray) or x.x.dtype == jnp.bfloat16)  # codes come so
            and not x.sums
            and x.recipe.may_be_floats(x.name, x.wanted, x.frozen)
            for x in operands
        ]
        return [(may and (i, 0) in read, may and (i, 1) in read) for i, may in enumerate(may_be)]


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a jaxpr, those within loops, branches and calls too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def contractions_in(jaxpr: Any) -> Iterator[Contraction]:
    """The contractions of a jaxpr, in its order; of a step the contractions of codes."""
    for eqn in equations(jaxpr):
        if eqn.primitive is product_p:
            avals = [v.aval for v in eqn.invars]
            yield contraction_of(eqn.params["tree"], avals, eqn.params["numbers"])


def _step_avals(*leaves: Any, codes: Any, **_: Any) -> list:
    del leaves
    return [*codes.out_avals]


def _batch_step(
    args: Any, dims: Any, *, codes: Any, mapped: tuple, **params: Any
) -> tuple[list, list]:
    mapped_codes = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(codes), in_axes=tuple(dims)))(*args)
    outs = step_p.bind(*args, codes=mapped_codes, mapped=(*mapped, tuple(dims)), **params)
    return outs, [0] * len(outs)


_no_second_step = functools.partial(derivatives.no_second, "dot_general")
step_p = private.define("mx_step", _step_avals, None, _batch_step, _no_second_step)
private.looked_into(step_p, "codes")


def _without_unread(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """JAX's rule for a step some of whose forms nobody reads, as in jax.checkpoint's first pass."""
    if not any(used):
        return [False] * len(eqn.invars), None
    names = ("step", "tree", "passed", "structure", "mapped")
    step, tree, passed, structure, mapped = map(eqn.params.__getitem__, names)
    # The leaves of a mapped step are not those that the step takes.
    if all(used[len(step.multiplications) :]) or mapped:
        return [True] * len(eqn.invars), eqn
    numbers = [i for i in range(structure.num_leaves) if i not in passed]  # of results
    outvars = dict(zip(numbers, eqn.outvars, strict=True))
    read = {*itertools.compress(numbers, used)}
    products, kept = structure.unflatten(range(structure.num_leaves))
    stays = {
        index: form
        for index, form in zip(step.kept, kept, strict=True)
        if not read.isdisjoint(jax.tree.leaves(form))
    }
    if len(stays) == len(kept):
        return [True] * len(eqn.invars), eqn
    step = dataclasses.replace(step, kept=tuple(stays))
    operands, sizes = tree.unflatten([v.aval for v in eqn.invars])
    operands = [step.narrowed(i, operand) for i, operand in enumerate(operands)]
    params, _ = step.traced(*jax.tree.flatten((operands, sizes)))
    left = jax.tree.leaves((products, [*stays.values()]))
    outvars = [outvars[i] for i in left if i in outvars]
    return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=params)


private.drops_unread(step_p, _without_unread)
