"""What the commands of `ringspun bench` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer

from ringspun.errors import RingspunError

T = TypeVar("T")
U = TypeVar("U")

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Element size of every dtype that a ring takes on a CPU."""
MOST_RANKS = 64


def measured_rows(wanted: Callable[[], list[T]], measure: Callable[[T], U]) -> list[U]:
    """What was measured of all that is wanted; what cannot be is told in one line."""
    try:
        works = wanted()
    except (ValueError, TypeError) as problem:
        typer.echo(f"ringspun bench: {problem}", err=True)
        raise typer.Exit(2) from None
    try:
        return [measure(work) for work in works]
    except RingspunError as problem:
        typer.echo(f"ringspun bench: {_brief(problem)}", err=True)
        raise typer.Exit(1) from None


def _brief(problem: RingspunError) -> str:
    """An error in one line: of an error on the ranks, what the first of them says, not its call stack."""
    for rank, failure in getattr(problem, "failures", {}).items():
        return f"ring rank {rank} raised {failure.kind}: {failure.message}"
    return str(problem)
