"""`decide` picks the implementation of a contraction, dense or over groups.

Lowering, explain and autotune ask it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import jax

from jax_mx.launch import targets
from jax_mx.products import choices
from jax_mx.products.choices import key_of
from jax_mx.products.contraction import Contraction, Served
from jax_mx.products.implementations import ProductImplementation, chips_of, named
from jax_mx.quantizing import registry


@dataclasses.dataclass(frozen=True)
class Decision:
    """The implementation that serves a contraction, and who chose it.

    Attributes:
      served: its answer.
      by: who says so: "argument", "context", "JAX_MX_TUNING (<file>)", "table for <chip>", "rule".
      passed_over: sentences about implementations that are fastest, by measurement or by rule, and
        do not serve it before something is installed.
    """

    served: Served
    by: str
    passed_over: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the implementation."""
        return self.served.implementation


def decide(contraction: Contraction, target: targets.Target) -> Served:
    """The implementation of a contraction in a program that is lowered for a target.

    Raises:
      NotImplementedError, ValueError: as `decided` does.
      RuntimeError: the program has several processes, and an installation with all kernels would
        take another one: each process lowers for itself, and all must take the same.
    """
    chips = chips_of(target)
    served = decided(contraction, target.platform, chips).served
    if target.chips is not None and jax.process_count() > 1:
        with registry.by_tables():
            promised = decided(contraction, target.platform, chips).name
        if promised != (name := served.implementation):
            raise RuntimeError(
                f"{contraction.name}: this process takes {name!r}, others of this program may take "
                f"{promised!r}, whose kernels this installation lacks, and all must take the same: "
                f"install them everywhere, or pass implementation={name!r} everywhere"
            )
    return served


def decided(contraction: Contraction, platform: str, chips: Sequence[str]) -> Decision:
    """The implementation of a contraction on a platform and chips, and who chose it.

    The caller's name comes first. Then follow choices: of the context, of the file that
    JAX_MX_TUNING names, of the package's table for the chip. The rule comes last.

    Raises:
      NotImplementedError: the implementation that the caller names does not serve it.
      ValueError: the file that JAX_MX_TUNING names cannot be read.
    """
    if contraction.implementation is not None:
        (served,) = candidates(contraction, platform, chips)
        if not served:
            raise NotImplementedError(served.reason)
        return Decision(served, "argument")
    rows, passed = _here(contraction.op, platform), []
    for by, name in _measured(contraction, chips):
        served = rows[name].support(contraction, chips) if name in rows else None
        if served:
            return Decision(served, by, tuple(passed))
        why = f"{name!r} is no implementation here" if served is None else served.reason
        passed.append(f"{by} names {name!r} for {key_of(contraction, chips[0])}, but {why}")
    preferred = [*_preferred(contraction, platform, chips)]
    for refusal in (served.refusal for served in preferred[:-1]):
        if refusal is not None and refusal.advice:
            passed.append(f"{refusal.call}: {refusal.why}; {refusal.advice}.")
    return Decision(preferred[-1], "rule", tuple(passed))


def by_rule(contraction: Contraction, platform: str, chips: Sequence[str]) -> Served:
    """The first of the table that is preferred and serves, where nobody names or measured one."""
    return [*_preferred(contraction, platform, chips)][-1]


def _preferred(contraction: Contraction, platform: str, chips: Sequence[str]) -> Iterator[Served]:
    """The answers of what is preferred, up to the first that serves."""
    for row in _here(contraction.op, platform).values():
        if row.preferred(contraction, platform, chips):
            yield (served := row.support(contraction, chips))
            if served:
                return


def candidates(contraction: Contraction, platform: str, chips: Sequence[str]) -> list[Served]:
    """The answers of all implementations on a platform; or of the one that the caller names."""
    supports = registry.candidates(contraction, platform, chips, named(contraction.op))
    return cast(list[Served], supports)


def _here(op: str, platform: str) -> Mapping[str, ProductImplementation]:
    """The implementations of an op that run on a platform."""
    rows = named(op).values()
    return {row.name: row for row in rows if row.platform in (platform, "any")}


def _measured(contraction: Contraction, chips: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Measurements of a contraction: who made one, and the fastest implementation on all chips."""
    keys = [key_of(contraction, chip) for chip in chips]
    for sources in zip(*map(choices.known, chips), strict=True):
        entries = [choice.by_key.get(key) for (_, choice), key in zip(sources, keys, strict=True)]
        names = {entry.chosen if entry else None for entry in entries}
        if len(names) == 1 and (name := names.pop()) is not None:
            yield sources[0][0], name
