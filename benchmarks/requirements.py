"""Whether rows of quantizers reach what shapes.py requires of them."""

from collections.abc import Iterator, Sequence

from benchmarks import shapes
from benchmarks.runner import Args, Row
from jax_mx.quantizing.registry import IMPLEMENTATIONS


def checks(args: Args, rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """For each requirement on a case: whether it is met, or nobody asks, and a line."""
    some = False
    ours = [row for row in rows if row.get("implementation", "xla") in IMPLEMENTATIONS]
    for want in shapes.REQUIREMENTS:
        asked = [want.where]
        if want.fraction_of_row_major is not None:
            asked.append({**want.where, "scale_layout": "row_major"})
        same, *row_major = ([r for r in ours if names.items() <= r.items()] for names in asked)
        if not same or [] in row_major:
            continue
        some, plain = True, row_major[0][0] if row_major else {}
        where = {**want.where, "shape": want.where["shape"].replace("x", ",")}
        line = "{form} ({shape}) {dtype} -> {format} {scaling} {scale_layout}".format(**where)
        for row in same:
            failed = "error" in row or "error" in plain
            met, said = (False, "not measured") if failed else _judge(want, row, plain)
            yield met or not args.require, f"{'ok' if met else 'no'}  {line}: {said}"
    if args.require and not some:
        yield False, "no  nothing is required of what was measured"


def _judge(want: shapes.Requirement, row: Row, row_major: Row) -> tuple[bool, str]:
    """Whether a row meets a requirement, and its numbers beside the least ones."""
    of_row_major = row["gbps"] / row_major["gbps"] if row_major else 0.0
    numbers = (
        (want.fraction_of_copy, row["fraction_of_copy"], "{:.3f} of copy"),
        (want.speedup_over_xla, row["speedup_over_xla"] or 0.0, "{:.2f}x XLA"),
        (want.fraction_of_row_major, of_row_major, "{:.3f} of row_major"),
    )
    asked = [(least, got, text) for least, got, text in numbers if least is not None]
    said = ", ".join(f"{text.format(got)} (>= {least} wanted)" for least, got, text in asked)
    return all(got >= least for least, got, _ in asked), said
