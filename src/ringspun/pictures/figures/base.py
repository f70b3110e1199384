"""What all figures have in common, and what a tile is called."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg

Rows = tuple[tuple[int, ...], ...]
"""A table of integers, row by row."""
MOST_CELLS = 64
"""Along each side of a picture."""


@dataclass(frozen=True)
class Figure:
    """The numbers of one picture.

    Args:
        words: what is drawn, in a line. notes: what is summed up or left out, in words.
    """

    name: ClassVar[str]
    title: ClassVar[str] = "Ring attention, step by step"  # of a page that begins with it
    source: ClassVar[str] = "the schedule that a ring runs by"  # what it is drawn from
    words: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"figure": self.name, **asdict(self)}


class Kind(StrEnum):
    """What the allowed pairs of a rectangle look like.

    `FULL`: all. `CAUSAL`: a diagonal cuts off the upper right, `ANTICAUSAL` the lower left, `BAND` both. `IDLE`: none.
    `MIXED`: of several rectangles, not all alike.
    """

    IDLE = "idle"
    FULL = "full"
    CAUSAL = "causal"
    ANTICAUSAL = "anticausal"
    BAND = "band"
    MIXED = "mixed"


KINDS = (Kind.FULL, Kind.CAUSAL, Kind.ANTICAUSAL, Kind.BAND)
"""By twice whether the upper bound of the band cuts, plus whether the lower one does."""


def kinds(regions: rg.Table) -> NDArray[np.int64]:
    """Which of `KINDS` each of some tight regions is."""
    q0, q1, k0, k1, lo, hi = regions.T
    found: NDArray[np.int64] = (lo > q0 - (k1 - 1)) + 2 * (hi < (q1 - 1) - k0).astype(np.int64)
    return found


def one_kind(found: NDArray[np.int64]) -> Kind:
    """The kind of several tiles together."""
    if len(found) == 0:
        return Kind.IDLE
    return KINDS[int(found[0])] if (found == found[0]).all() else Kind.MIXED


def table(array: NDArray[np.int64]) -> Rows:
    """An array of two dimensions as rows."""
    return tuple(tuple(row) for row in array.tolist())


def sums(array: NDArray[np.int64], edges: NDArray[np.int64], axis: int) -> NDArray[np.int64]:
    """Sums of an array between edges along one axis."""
    if array.shape[axis] == 0:
        return array
    found: NDArray[np.int64] = np.add.reduceat(array, edges[:-1], axis=axis)
    return found


def cells_note(per_cell: int, what: str, total: int) -> tuple[str, ...]:
    """Says that cells stand for several things each."""
    return (f"each cell is {per_cell:,} {what} of {total:,}",) if per_cell > 1 else ()
