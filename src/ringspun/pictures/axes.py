"""Where tiles lie in the score matrix of the whole ring: from the rows of ranks and blocks to one axis for queries and
one for keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringspun.core import needs
from ringspun.core import regions as rg
from ringspun.core import tiles as tl
from ringspun.core.layout.base import RANK, START, STEP
from ringspun.core.partition import Partition, Sides
from ringspun.core.passes import Blocks
from ringspun.core.wire import Side

EXACT = 128
"""Tokens up to which a layout of single tokens is drawn in the sequence's order, token by token."""

Stretches = NDArray[np.int64]
"""Rows that lie beside each other on an axis, ``[n, 3]``: first row, one past the last, place of the first."""


class Order(Enum):
    """Of an axis: global positions, or the rows of rank 0, then those of rank 1, and so on."""

    SEQUENCE = "sequence"
    RANKS = "ranks"


@dataclass(frozen=True)
class Axis:
    """The axis of one side.

    Args:
        part: who holds what.
    """

    part: Partition
    order: Order

    def of_rows(self, ring_rank: int, row0: int, row1: int) -> Stretches:
        """Some rows of a rank; rows are counted from `row0`."""
        if self.order == Order.RANKS:
            return np.array([[0, row1 - row0, int(self._before[ring_rank]) + row0]], np.int64)
        first, last = np.searchsorted(self.part.runs[:, RANK], [ring_rank, ring_rank + 1])
        runs, begin = self.part.runs[first:last], self.part.run_offsets[first:last]
        if len(runs) and (runs[:, STEP] > 1).any():
            rows = np.arange(row1 - row0)
            return np.column_stack([rows, rows + 1, self.part.indices(ring_rank)[row0:row1]])
        a, b = np.maximum(begin, row0), np.minimum(begin + self.part.run_tokens[first:last], row1)
        found: Stretches = np.column_stack([a - row0, b - row0, runs[:, START] + a - begin])[a < b]
        return found

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        before: NDArray[np.int64] = np.cumsum(self.part.tokens) - self.part.tokens
        return before


@dataclass(frozen=True)
class Axes:
    """Both."""

    queries: Axis
    keys: Axis

    @property
    def order(self) -> Order:
        """Of both."""
        return self.queries.order


def axes_of(sides: Sides) -> Axes:
    """Axes in the sequence's order, where the layout's runs are long enough to be drawn so."""
    parts = (sides.queries, sides.keys)
    strided = any(len(p.runs) and (p.runs[:, STEP] > 1).any() and p.seq_len > EXACT for p in parts)
    order = Order.RANKS if strided else Order.SEQUENCE
    return Axes(*(Axis(part, order) for part in parts))


def places(axes: Axes, mine: Blocks, side: Side, block: int, tiles: tl.Tiles) -> rg.Table:
    """Some tiles that a rank computes with a block, as tight regions on the axes: a tile is cut where its rows part."""
    if len(tiles) == 0:
        return rg.empty()
    around = side == Side.KEYS
    staying, going = (axes.queries, axes.keys) if around else (axes.keys, axes.queries)
    own = staying.of_rows(mine.ring_rank, 0, int(staying.part.tokens[mine.ring_rank]))
    other = _of_block(going, mine, block)
    rows, columns = (own, other) if around else (other, own)
    found = [_cut(region, rows, columns) for region in tiles[:, tl.REGION]]
    return rg.tighten(np.concatenate(found))


def _cut(region: NDArray[np.int64], rows: Stretches, columns: Stretches) -> rg.Table:
    """A region in local rows, by the stretches that its rows and columns fall into."""
    q0, q1, k0, k1, lo, hi = region.tolist()
    q, k = _within(rows, q0, q1), _within(columns, k0, k1)
    a, b = np.repeat(q, len(k), axis=0), np.tile(k, (len(q), 1))
    q_shift, k_shift = a[:, 2] - a[:, 0], b[:, 2] - b[:, 0]
    return np.column_stack([
        np.maximum(a[:, 0], q0) + q_shift, np.minimum(a[:, 1], q1) + q_shift,
        np.maximum(b[:, 0], k0) + k_shift, np.minimum(b[:, 1], k1) + k_shift,
        lo + q_shift - k_shift, hi + q_shift - k_shift,
    ])  # fmt: skip


def _within(stretches: Stretches, first: int, last: int) -> Stretches:
    return stretches[(stretches[:, 0] < last) & (stretches[:, 1] > first)]


def _of_block(axis: Axis, mine: Blocks, block: int) -> Stretches:
    found, place = [], 0
    for owner, row0, row1 in _rows(axis, mine, block):
        some = axis.of_rows(owner, row0, row1)
        found.append(some + np.array([place, place, 0]))
        place += row1 - row0
    return np.concatenate(found) if found else np.zeros((0, 3), np.int64)


def _rows(axis: Axis, mine: Blocks, block: int) -> Iterator[tuple[int, int, int]]:
    """Rows (owner, first, one past the last) that tiles count of a block, in order."""
    if block == mine.whole:
        for part, first, last, _ in mine.gathered[np.argsort(mine.gathered[:, 3], kind="stable")].tolist():
            yield from _part(_travelling(mine, part), first, last)
    elif mine.owners is None and block == mine.ring_rank:
        yield block, 0, int(axis.part.tokens[block])
    else:
        yield from _travelling(mine, block)


def _travelling(mine: Blocks, block: int) -> Iterator[tuple[int, int, int]]:
    first, last = np.searchsorted(mine.travelling[:, needs.OWNER], [block, block + 1])
    for row0, row1 in mine.travelling[first:last, needs.ROW0 :].tolist():
        yield mine.owner(block), row0, row1


def _part(rows: Iterator[tuple[int, int, int]], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Of rows in a row, the first-th to the last-th."""
    place = 0
    for owner, row0, row1 in rows:
        a, b = max(first - place, 0), min(last - place, row1 - row0)
        if a < b:
            yield owner, row0 + a, row0 + b
        place += row1 - row0
