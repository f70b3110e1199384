"""Needs: which rank computes with whose keys, and which rows of them. What a route sends, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core import tiles as tl
from ringspun.core.cut import Cut, Indices, expand
from ringspun.core.layout.base import RANK, START, STOP
from ringspun.core.partition import LONGEST, Partition

MANY_MEETINGS = 20_000_000
MANY_PLACES = 16_000_000
"""Ranks times key runs that are counted at once."""
PLACES = 4096
"""Key runs that are looked at together otherwise."""
OWNER, ROW0, ROW1 = range(3)
Travelling = NDArray[np.int64]
"""Rows ``[n, 3]`` of (owner, first, one past the last), sorted, disjoint, never touching: key rows that some rank other
than their owner needs. On a grid (`Route.grid`) the block stands for its owner, and all its rows are there."""

FAR = 2 * LONGEST
"""More than any position: ``rank * FAR + position`` orders by rank first."""


def meetings(cut: Cut) -> NDArray[np.int64]:
    """All ``(i, j)`` such that some query of rank i may see some key of rank j, ``[n, 2]``; pairs may repeat.

    Exact, but for runs with steps (striped layouts) that meet in more than `MANY_MEETINGS` places: there everybody is
    taken to need everybody, which is nearly always so and costs at most messages that are not needed.
    """
    ring_size = cut.queries.ring_size
    k_rank = cut.keys.runs[:, RANK]
    if cut.without_steps:
        first, last = cut.reach
        span = len(cut.by_start) + 1
        if cut.meetings() < ring_size * span // 4:
            of_region, place = expand(first, last)
            return np.stack([cut.q_rank[of_region], k_rank[cut.by_start[place]]], axis=1)
        if ring_size * span > MANY_PLACES:
            return _meetings_by_rank(cut)
        edges = np.zeros(ring_size * span, np.int32)
        np.add.at(edges, cut.q_rank * span + first, 1)
        np.add.at(edges, cut.q_rank * span + last, -1)
        i, place = np.nonzero(np.cumsum(edges.reshape(-1, span), axis=1, dtype=np.int32)[:, :-1])
        return np.stack([i, k_rank[cut.by_start[place]]], axis=1)
    if cut.meetings() > MANY_MEETINGS:
        everyone = np.indices((ring_size, ring_size)).reshape(2, -1)
        return np.ascontiguousarray(everyone.T)
    met = np.zeros((ring_size, ring_size), np.bool_)
    for _, q_run, k_run in cut.pieces():
        met[cut.queries.runs[q_run, RANK], k_rank[k_run]] = True
    return np.stack(np.nonzero(met), axis=1)


def _meetings_by_rank(cut: Cut) -> NDArray[np.int64]:
    """`meetings` where ranks times key runs are too many to count at once: rank by rank, the longest stretches of key
    runs first, until everybody is met."""
    ring_size, k_rank = cut.queries.ring_size, cut.keys.runs[cut.by_start, RANK]
    everybody = len(np.unique(k_rank))
    first, last = cut.reach
    met = np.zeros((ring_size, ring_size), np.bool_)
    for rank in range(ring_size):
        mine = cut.of_rank(rank)
        stretches = np.stack(_union(first[mine], last[mine]), axis=1)
        for a, b in stretches[np.argsort(stretches[:, 0] - stretches[:, 1], kind="stable")].tolist():
            for c in range(a, b, PLACES):
                met[rank, k_rank[c : min(c + PLACES, b)]] = True
                if met[rank].sum() == everybody:
                    break
            else:
                continue
            break
    return np.stack(np.nonzero(met), axis=1)


def travelling(cut: Cut) -> Travelling:
    """The key rows that travel, in local row numbers; all, where `meetings` takes everybody to need everybody."""
    if cut.without_steps:
        return _by_positions(cut)
    if cut.meetings() > MANY_MEETINGS:
        return whole(cut.keys.tokens)
    return _by_pieces(cut, lambda owner, reader: owner)


def by_reader(cut: Cut) -> NDArray[np.int64]:
    """The key rows that each rank needs of each other: rows ``[n, 3]`` as `Travelling`, for an owner the number
    ``owner * R + reader``."""
    size = cut.queries.ring_size
    if not cut.without_steps:
        return _by_pieces(cut, lambda owner, reader: owner * size + reader)
    rank = cut.q_rank * FAR
    need0, need1 = _union(rank + cut.clipped[:, rg.K0], rank + cut.clipped[:, rg.K1])
    reader, first = np.divmod(need0, FAR)
    piece, owner, rows = _key_rows(cut, first, first + (need1 - need0))
    number = owner * size + reader[piece]
    return unite([np.column_stack([number, rows])[owner != reader[piece]]])


def _by_pieces(cut: Cut, number: Callable[[Indices, Indices], Indices]) -> Travelling:
    """For runs with steps: the key rows of every place where runs of two ranks meet, for the owner that `number` makes
    of owner and reader."""
    found = [np.zeros((0, 3), np.int64)]
    for local, q_run, k_run in cut.pieces():
        owner, reader = cut.keys.runs[k_run, RANK], cut.queries.runs[q_run, RANK]
        table = np.column_stack([number(owner, reader), local[:, [rg.K0, rg.K1]]])
        found.append(unite([table[owner != reader]]))
    return unite(found)


def _key_rows(cut: Cut, first: Indices, last: Indices) -> tuple[Indices, Indices, Indices]:
    """Where intervals of positions lie, for runs without steps: which interval, whose, and which rows ``[n, 2]``."""
    runs = cut.keys.runs
    starts, stops = runs[cut.by_start, START], runs[cut.by_start, STOP]
    piece, place = expand(np.searchsorted(stops, first, side="right"), np.searchsorted(starts, last, side="left"))
    run = cut.by_start[place]
    shift = cut.keys.run_offsets[run] - runs[run, START]
    row0, row1 = np.maximum(first[piece], runs[run, START]) + shift, np.minimum(last[piece], runs[run, STOP]) + shift
    return piece, runs[run, RANK], np.stack([row0, row1], axis=1)


def cut_by_runs(keys: Partition, owner: Indices, row0: Indices, row1: Indices) -> tuple[Indices, Indices, Indices]:
    """Ranges of rows of ranks, cut where their runs end: of which range, in which run, and which rows ``[n, 2]``."""
    begin = keys.runs[:, RANK] * FAR + keys.run_offsets
    first, last = owner * FAR + row0, owner * FAR + row1
    piece, run = expand(
        np.searchsorted(begin + keys.run_tokens, first, side="right"), np.searchsorted(begin, last, side="left")
    )
    base = owner[piece] * FAR
    rows = np.stack(
        [np.maximum(first[piece], begin[run]) - base, np.minimum(last[piece], (begin + keys.run_tokens)[run]) - base],
        axis=1,
    )
    some = rows[:, 0] < rows[:, 1]
    return piece[some], run[some], rows[some]


def place_among(travelling: Travelling, block: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each row of a block's owner among the rows of that block that travel; it is one of them."""
    return row + _shift(travelling, block, row)


def whole(tokens: NDArray[np.int64]) -> Travelling:
    """Every row of every rank."""
    ranks = np.flatnonzero(tokens)
    return np.stack([ranks, np.zeros_like(ranks), tokens[ranks]], axis=1)


def count(travelling: Travelling, ring_size: int) -> NDArray[np.int64]:
    """Rows of every rank that travel ``[R]``."""
    rows = travelling[:, ROW1] - travelling[:, ROW0]
    return np.bincount(travelling[:, OWNER], rows, ring_size).astype(np.int64)


def number_anew(tiles: tl.Tiles, source: NDArray[np.int64], away: NDArray[np.bool_], travelling: Travelling) -> None:
    """Count the key rows of the tiles `away` among the rows that travel instead of all of their owner; in place.

    The keys of a tile are all needed, so they lie next to each other in the block that travels too.
    """
    tiles[away] = shift_keys(tiles[away], _shift(travelling, source[away], tiles[away, tl.K0]))


def _shift(travelling: Travelling, block: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
    rows = travelling[:, ROW1] - travelling[:, ROW0]
    begin = np.cumsum(rows) - rows
    owner_begin = begin[np.searchsorted(travelling[:, OWNER], travelling[:, OWNER])]
    span = int(travelling[:, ROW1].max(initial=0)) + 1  # not `FAR`: there may be as many blocks as pairs of ranks
    start = travelling[:, OWNER] * span + travelling[:, ROW0]
    place = np.searchsorted(start, block * span + row, side="right") - 1
    found: NDArray[np.int64] = (begin - owner_begin - travelling[:, ROW0])[place]
    return found


def shift_keys(tiles: tl.Tiles, shift: NDArray[np.int64]) -> tl.Tiles:
    """The same pairs where the keys of tile n count from ``-shift[n]``."""
    return tiles + shift[:, None] * _KEY_SHIFT


_KEY_SHIFT = np.zeros(8, np.int64)
_KEY_SHIFT[[tl.K0, tl.K1]], _KEY_SHIFT[[tl.LO, tl.HI]] = 1, -1


def unite(tables: list[Travelling]) -> Travelling:
    """Rows that are in any of the tables."""
    rows = np.concatenate(tables)
    span = int(rows[:, ROW1].max(initial=0)) + 1
    first, last = _union(rows[:, OWNER] * span + rows[:, ROW0], rows[:, OWNER] * span + rows[:, ROW1])
    owner = first // span
    return np.stack([owner, first - owner * span, last - owner * span], axis=1)


def _by_positions(cut: Cut) -> Travelling:
    """For runs without steps: count at each position the ranks that need it, the one that holds it left out.

    A tight region holds a pair for each key of its range, so the union of the ranges is what a rank needs.
    """
    runs, rank = cut.keys.runs, cut.q_rank * FAR
    need0, need1 = _union(rank + cut.clipped[:, rg.K0], rank + cut.clipped[:, rg.K1])
    order = np.lexsort((runs[:, START], runs[:, RANK]))
    own0, own1 = (runs[order, RANK] * FAR + runs[order, c] for c in (START, STOP))
    of_need, run = expand(np.searchsorted(own1, need0, side="right"), np.searchsorted(own0, need1, side="left"))
    held0, held1 = np.maximum(need0[of_need], own0[run]), np.minimum(need1[of_need], own1[run])
    at = np.concatenate([need0, held1, need1, held0]) % FAR
    change = np.repeat([1, -1], [len(need0) + len(held0), len(need0) + len(held0)])
    order = np.argsort(at, kind="stable")
    at, wanted = at[order], np.cumsum(change[order]) > 0
    x0, x1 = _union(at[:-1][wanted[:-1]], at[1:][wanted[:-1]])
    _, owner, rows = _key_rows(cut, x0, x1)
    return unite([np.column_stack([owner, rows])])


def _union(first: NDArray[np.int64], last: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The union of intervals, as sorted disjoint ones that do not touch."""
    real = first < last
    order = np.argsort(first[real], kind="stable")
    first, last = first[real][order], last[real][order]
    reach = np.maximum.accumulate(last)
    new = np.append(True, first[1:] > reach[:-1])[: len(first)]
    ends = np.append(new[1:], True)[: len(first)]
    return first[new], reach[ends]
