"""The numbers behind a picture of a layout: how many tokens of each stretch of the sequence each rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ringspun.core.layout.base import RANK, START, STEP, Runs
from ringspun.core.partition import Partition
from ringspun.pictures.figures.base import MOST_CELLS, Figure, Rows, cells_note, sums, table
from ringspun.pictures.scene import MOST_RANKS, Scene, edges

MOST_RUNS = 4096
"""That are listed one by one."""
_CHUNK = 100_000


@dataclass(frozen=True)
class LayoutFigure(Figure):
    """Who holds which tokens.

    Args:
        ranks: first ring rank of each row, and one past the last. columns: edges of the cells, in tokens.
        held: tokens of each row and column. tokens: of each row. runs: ``(ring rank, start, stop, step)`` in local
            order, or none where there are more than `MOST_RUNS`. documents: where each begins, if the layout was given
            any and they are at most as many.
    """

    name: ClassVar[str] = "layout"
    ranks: tuple[int, ...]
    columns: tuple[int, ...]
    held: Rows
    tokens: tuple[int, ...]
    runs: Rows
    documents: tuple[int, ...]


def of(scene: Scene, most: int = MOST_CELLS, *, most_ranks: int = MOST_RANKS) -> LayoutFigure:
    """Who holds which queries, in at most `most_ranks` x `most` cells."""
    part = scene.sides.queries
    ranks, columns = edges(part.ring_size, most_ranks), edges(part.seq_len, most)
    held = sums(_held(part, columns), ranks, 0)
    starts = np.zeros(0, np.int64) if part.documents is None else part.documents.table()[:, 0]
    notes = cells_note(
        int(columns[-1] - columns[-2]) if len(columns) == 2 else int(np.diff(columns).max(initial=0)),
        "tokens",
        part.seq_len,
    )
    if len(ranks) <= part.ring_size:
        notes += (f"each row is {ranks[1] - ranks[0]:,} ranks of {part.ring_size:,}, together",)
    if len(starts) > MOST_RUNS:
        notes += (f"{len(starts):,} documents, whose edges are not drawn",)
    return LayoutFigure(
        scene.words,
        notes,
        tuple(ranks.tolist()),
        tuple(columns.tolist()),
        table(held),
        tuple(sums(part.tokens, ranks, 0).tolist()),
        table(part.runs) if len(part.runs) <= MOST_RUNS else (),
        tuple(starts.tolist()) if len(starts) <= MOST_RUNS else (),
    )


def _held(part: Partition, columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of each rank in each column ``[R, columns]``."""
    found = np.zeros((part.ring_size, len(columns) - 1), np.int64)
    for first in range(0, len(part.runs), _CHUNK):
        some = slice(first, first + _CHUNK)
        np.add.at(found, part.runs[some, RANK], np.diff(_below(part.runs[some], part.run_tokens[some], columns)))
    return found


def _below(runs: Runs, tokens: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many tokens of each run lie before each edge."""
    before: NDArray[np.int64] = -((runs[:, START, None] - columns) // runs[:, STEP, None])
    return np.clip(before, 0, tokens[:, None])
