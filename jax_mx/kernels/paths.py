"""How many instructions a wave of threads issues, from where a kernel's instructions lead."""

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

Counts = dict[str, int]


def count(follow: Sequence[set[int] | None], moved: Sequence[int], trips: int = 0) -> Counts | None:
    """The longest and the shortest path through a kernel.

    "longest" is the longest path from entry to exit, an upper bound for all waves whose threads do
    not part over an if and its else. "shortest" is the shortest of the paths that move the most
    bytes: the least that a wave issues which has all its elements. A loop, with all that lies in
    it, counts `trips` times; where these are not known, once, and "loops" says so.

    Args:
      follow: by instruction, from the entry on, which ones may be next; one beyond the last stands
        for the exit, and None for no telling.
      moved: by instruction, the bytes that it loads from global memory or stores there.
      trips: the most that a loop makes; 0 if that is not known, or there is no loop.

    Returns:
      None where there is no telling.
    """
    end = len(follow)
    graph: dict[int, set[int]] = {end: set()}
    reached = [0]
    while reached:
        at = reached.pop()
        if at not in graph:
            successors = follow[at]
            if successors is None:
                return None
            graph[at] = successors
            reached += successors
    instructions = dict.fromkeys(graph, 1) | {end: 0}
    size = {at: moved[at] for at in graph if at != end} | {end: 0}
    order, loops = _without_loops(graph, (instructions, size))
    for table in (instructions, size):
        table |= {at: table[at] * max(trips, 1) for at in loops}
    longest: dict[int, int] = {}
    best: dict[int, tuple[int, int]] = {}  # the most bytes, and minus the fewest instructions
    for at in order:  # successors come first, so the entry last
        longest[at] = instructions[at] + max((longest[i] for i in graph[at]), default=0)
        most, fewest = max((best[i] for i in graph[at]), default=(0, 0))
        best[at] = most + size[at], fewest - instructions[at]
    return {
        "shortest": -best[order[-1]][1],
        "longest": longest[order[-1]],
        "loops": bool(loops) and trips == 0,
    }


def _without_loops(
    graph: dict[int, set[int]], tables: Sequence[dict[int, int]]
) -> tuple[tuple[int, ...], set[int]]:
    """Makes each loop of a graph one node, whose entry in the tables is the sum over its nodes.

    Returns:
      The nodes, each after its successors, and which of them were loops.
    """
    loops: set[int] = set()
    while True:
        try:
            return tuple(TopologicalSorter(graph).static_order()), loops
        except CycleError as error:
            head, *rest = body = set(error.args[1])
            loops = loops - body | {head}  # a branch in a loop closes it twice
            for table in tables:
                table[head] = sum(table[at] for at in body)
            graph[head] = set().union(*(graph[at] for at in body)) - body
            for at in rest:
                del graph[at]
            for at, successors in graph.items():
                if successors & body:
                    graph[at] = successors - body | {head}
