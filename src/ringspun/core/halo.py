"""Halos: what a rank must borrow so that each of its tokens has the n before it, for short convolutions and shifts.

8 tokens in documents of 5 and 3, zigzag on 2 ranks, n = 2. Dots are zeros, brackets what the other rank lends:

    rank 0 holds 0 1 6 7    widened    .  .  0  1  . [5] 6  7
    rank 1 holds 2 3 4 5    widened   [0][1] 2  3  4  .  .  5

A rank's tokens stand there in the order of the sequence. Between two of one document lie the rows that lie between
them, but at most n; before the first of a document n rows, zeros where the document has no more. So no row is there
twice, and a striped rank, whose tokens are R apart, has min(R, n + 1) rows for each. Padding is not kept: it stands
for a row of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspun.core.cut import expand
from ringspun.core.layout.base import RANK, START, STEP, STOP
from ringspun.core.partition import Partition

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Halo:
    """The rows of one rank with the `before` tokens that precede each, and who sends which.

    Args:
        width: rows of the widened tensor W. rows: where in it each local token lies ``[T]``; the `before` rows ahead of
            that are its predecessors, the last one nearest. kept: the local tokens that are no padding.
        sends: per peer, the local rows that it borrows. receives: per peer, the widened rows that it fills; both in the
            order of the sequence.
    """

    width: int
    rows: Integers
    kept: Integers
    sends: dict[int, Integers]
    receives: dict[int, Integers]


class _Stretches(NamedTuple):
    """Consecutive tokens of one document, on one rank and in consecutive rows there; by rank, then by position.

    Args:
        start, stop: indices of tokens. begin: of the document's first. rank, row: who holds the first, and where.
    """

    start: Integers
    stop: Integers
    begin: Integers
    rank: Integers
    row: Integers


def halos(part: Partition, before: int, ring_ranks: tuple[int, ...]) -> tuple[Halo, ...]:
    """The halos of some ranks.

    Args:
        part: who holds which token; documents are its own. before: tokens ahead of each n.
    """
    held = _stretches(part)
    lengths = held.stop - held.start
    ahead = _rows_ahead(held, before)
    ends = np.cumsum(ahead + lengths)
    of_rank = np.bincount(held.rank, ahead + lengths, part.ring_size).astype(np.int64)
    wide = ends - lengths - (np.cumsum(of_rank) - of_rank)[held.rank]  # where each stretch begins on its rank
    which, borrowed = expand(np.maximum(held.begin, held.start - ahead), held.start)
    owner, row = _places(part, borrowed)
    taker, fills = held.rank[which], wide[which] - held.start[which] + borrowed
    found = []
    for rank in ring_ranks:
        taken, given = np.flatnonzero(taker == rank), np.flatnonzero(owner == rank)
        mine = held.rank == rank
        stretch, local = expand(held.row[mine], (held.row + lengths)[mine])
        tokens, width = int(part.tokens[rank]), int(of_rank[rank])
        rows = np.full(tokens, width + before)
        rows[local] = local + (wide[mine] - held.row[mine])[stretch]
        bare = len(local) < tokens or tokens == 0  # padding, or nothing at all, which shall be no special case
        found.append(
            Halo(
                width + (before + 1) * bare,
                rows,
                np.sort(local),
                _by_peer(taker[given], row[given]),
                _by_peer(owner[taken], fills[taken]),
            )
        )
    return tuple(found)


def _by_peer(peers: Integers, rows: Integers) -> dict[int, Integers]:
    return {int(peer): rows[peers == peer] for peer in np.flatnonzero(np.bincount(peers))}


def _stretches(part: Partition) -> _Stretches:
    runs, documents = part.runs, part.documents
    if (runs[:, STEP] == 1).all():
        ends = () if documents is None else documents.table()
        edges = np.unique(np.concatenate([runs[:, START], runs[:, STOP], [0, part.seq_len], np.ravel(ends)]))
        edges = edges.astype(np.int64)
    else:
        edges = np.arange(part.seq_len + 1)
    start, stop, begin = edges[:-1], edges[1:], np.zeros(max(0, len(edges) - 1), np.int64)
    if documents is not None:
        number = documents.index(start)
        start, stop, number = start[number >= 0], stop[number >= 0], number[number >= 0]
        begin = documents.table()[number, 0]
    rank, row = _places(part, start)
    order = np.argsort(rank, kind="stable")
    return _Stretches(*(x[order] for x in (start, stop, begin, rank, row)))


def _rows_ahead(held: _Stretches, before: int) -> Integers:
    """Rows that come right before each stretch."""
    joined = (held.rank[1:] == held.rank[:-1]) & (held.begin[1:] == held.begin[:-1])
    ahead = np.full(len(held.start), before)
    ahead[1:][joined] = np.minimum(before, held.start[1:] - held.stop[:-1])[joined]
    return ahead


def _places(part: Partition, tokens: Integers) -> tuple[Integers, Integers]:
    """Rank and local row of some tokens."""
    runs = part.runs
    if (runs[:, STEP] == 1).all():
        filled = np.flatnonzero(part.run_tokens)
        order = filled[np.argsort(runs[filled, START])]
        run = order[np.searchsorted(runs[order, START], tokens, side="right") - 1]
        return runs[run, RANK], part.run_offsets[run] + tokens - runs[run, START]
    joined, ends = part.inverse()[tokens], np.cumsum(part.tokens)
    rank = np.searchsorted(ends, joined, side="right")
    return rank, joined - (ends - part.tokens)[rank]
