"""The numbers behind a picture of a mask: how many pairs each cell of the (query, key) plane allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ringspun.core import regions as rg
from ringspun.core.cut import Cut
from ringspun.core.layout import Contiguous
from ringspun.core.layout.base import RANK
from ringspun.core.mask import RowMasks
from ringspun.core.partition import Partition
from ringspun.core.schedule import cuts_of
from ringspun.pictures.figures.base import MOST_CELLS, Figure, Rows, table
from ringspun.pictures.scene import Scene


@dataclass(frozen=True)
class MaskFigure(Figure):
    """Allowed pairs, cell by cell.

    Args:
        queries, keys: edges of the cells, in tokens; queries counted from `start`, the position of the first.
        allowed: pairs of each cell ``[rows][columns]``. pairs: of all. regions: that the mask compiles to.
    """

    name: ClassVar[str] = "mask"
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    start: int
    allowed: Rows
    pairs: int
    regions: int

    @property
    def exact(self) -> bool:
        """Whether a cell is one pair."""
        return len(self.queries) == self.queries[-1] + 1 and len(self.keys) == self.keys[-1] + 1

    @property
    def sparsity(self) -> float:
        """Part of all pairs that is hidden."""
        return 1 - self.pairs / max(self.queries[-1] * self.keys[-1], 1)


def of(scene: Scene, most: int = MOST_CELLS) -> MaskFigure:
    """The mask of a scene, in at most `most` x `most` cells; of several masks that of the first batch row."""
    cut, _ = cuts_of(scene.sides, scene.mask)[0]
    # the cells of a picture are a contiguous layout, so that the core's own cut counts them
    sides = [_cells(side.seq_len, most) for side in (cut.queries, cut.keys)]
    (rows, queries), (columns, keys) = sides
    allowed = np.zeros((rows.ring_size, columns.ring_size), np.int64)
    for local, q_run, k_run in Cut(rows, columns, cut.regions).pieces():
        np.add.at(allowed, (rows.runs[q_run, RANK], columns.runs[k_run, RANK]), rg.count(local))
    notes: tuple[str, ...] = ()
    if isinstance(scene.mask, RowMasks) and len(cuts_of(scene.sides, scene.mask)) > 1:
        notes += (f"batch row 0 of {len(scene.mask)}; the others have other masks",)
    q_cell, k_cell = (int(np.diff(e).max(initial=0)) for e in (queries, keys))
    if max(q_cell, k_cell) > 1:
        notes += (f"each cell is {q_cell:,} queries x {k_cell:,} keys",)
    return MaskFigure(
        scene.words, notes, tuple(queries.tolist()), tuple(keys.tolist()), cut.queries.start, table(allowed),
        int(allowed.sum()), len(cut.regions),
    )  # fmt: skip


def _cells(seq_len: int, most: int) -> tuple[Partition, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """A side in cells: a partition of as many ranks, and its edges."""
    per_cell = max(1, -(-seq_len // most))
    part = Partition(seq_len, max(1, -(-seq_len // per_cell)), Contiguous())
    return part, np.append(0, np.cumsum(part.tokens))
