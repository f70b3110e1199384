"""Readings: which keys travel together as a block, who reads which, and the tiles of each reading.

A rank's whole shard is a block and tiles are as large as can be (`of_shards`); or what one rank needs of another
(`of_readers`), perhaps put together for tiles as large as can be (`of_gathered`), or an equal part of what travels
(`of_pieces`); or, for routes that fix the order of every sum, a block is a unit of the grid and no tile crosses its
lines (`of_units`). A route says which it wants (`ringspun.core.route.base.Cutting`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspun.core import needs
from ringspun.core import tiles as tl
from ringspun.core.cut import Cut, Indices
from ringspun.core.layout.base import RANK, START
from ringspun.core.partition import Partition, Sides
from ringspun.core.route.base import Cutting, Needs, Route

STAGES_PER_RANK = 4
"""At least, where there are units enough. More gain little time and make more steps."""
BatchRows = Sequence[tuple[int, int]]
Cuts = Sequence[tuple[Cut, BatchRows]]
"""Each different mask's cut, with the ranges of batch rows that it holds for."""
Gathered = NDArray[np.int64]
"""Rows ``[n, 4]`` of (block, first, one past the last, place): ranges of rows of blocks, counted among those that
travel, and where each begins in what a rank puts together of them, in its order."""
BLOCK, FIRST, LAST, PLACE, ROW = range(5)
Read = tuple[tl.Tiles, Indices, Indices]
"""Tiles of one rank, and the reader and the block of each."""


@dataclass(frozen=True, eq=False)
class Readings:
    """What a route is bound to.

    Args:
        travelling: key rows of each block that travel, counted on their owner (`ringspun.core.needs`).
        needs: who reads what. of_rank: the tiles of one rank's queries. gathered: what one rank puts together; nothing,
            where its tiles count rows of the blocks themselves.
    """

    travelling: needs.Travelling
    needs: Needs
    of_rank: Callable[[int], Read]
    gathered: Callable[[int], Gathered] = lambda ring_rank: np.zeros((0, 4), np.int64)


def of_shards(sides: Sides, cuts: Cuts) -> Readings:
    """A block per rank; tiles joined as far as they can be. Tiles count all rows of the rank's own block, and of others
    those that travel."""
    size = sides.keys.ring_size
    travelling = needs.unite([needs.travelling(cut) for cut, _ in cuts])
    met = np.concatenate([needs.meetings(cut) for cut, _ in cuts])

    def of_rank(ring_rank: int) -> Read:
        found = []
        for tiles, source, batch_rows in _built(cuts, ring_rank):
            needs.number_anew(tiles, source, source != ring_rank, travelling)
            found += [(_of_batch_rows(tiles, some), source) for some in batch_rows]
        return _joined(found, ring_rank)

    return Readings(travelling, Needs(met, needs.count(travelling, size), size), of_rank)


def _built(cuts: Cuts, ring_rank: int) -> Iterator[tuple[tl.Tiles, Indices, BatchRows]]:
    """A rank's tiles under each mask, and whose keys they are of, in rows of that rank."""
    for cut, batch_rows in cuts:
        yield *tl.build(cut, ring_rank), batch_rows


def _joined(found: Sequence[tuple[tl.Tiles, Indices]], ring_rank: int) -> Read:
    tables, blocks = zip(*found, strict=True)
    block = np.concatenate(blocks)
    return np.concatenate(tables), np.full_like(block, ring_rank), block


def of_readers(sides: Sides, cuts: Cuts) -> Readings:
    """The shards, and for every two ranks a block of the rows that one needs of the other."""
    size = sides.keys.ring_size
    number, travelling, wants = _of_each_other(sides, cuts)

    def of_rank(ring_rank: int) -> Read:
        found = []
        for tiles, source, batch_rows in _built(cuts, ring_rank):
            away = source != ring_rank
            block = source.copy()
            block[away] = size + np.searchsorted(number, source[away] * size + ring_rank)
            needs.number_anew(tiles, block, away, travelling)
            found += [(_of_batch_rows(tiles, some), block) for some in batch_rows]
        return _joined(found, ring_rank)

    return Readings(travelling, wants, of_rank)


def _of_each_other(sides: Sides, cuts: Cuts) -> tuple[Indices, needs.Travelling, Needs]:
    """Blocks of what one rank needs of another, after the shards: the number ``owner * R + reader`` of each, the rows
    of all blocks, and who reads which."""
    size = sides.keys.ring_size
    needed = needs.unite([needs.by_reader(cut) for cut, _ in cuts])
    number, place = np.unique(needed[:, needs.OWNER], return_inverse=True)
    needed[:, needs.OWNER] = size + place
    travelling = np.concatenate([needs.whole(sides.keys.tokens), needed])
    owners, readers = np.append(np.arange(size), number // size), number % size
    pairs = np.stack([readers, size + np.arange(len(number))], axis=1)
    return number, travelling, Needs(pairs, needs.count(travelling, len(owners)), size, owners=owners)


def of_gathered(sides: Sides, cuts: Cuts) -> Readings:
    """The blocks of `of_readers`; and tiles that count the rows of a rank's shard and of all that it needs, put
    together run by run in the order of the sequence: of the block after the last. A rank that needs nothing has its
    shard alone."""
    number, travelling, wants = _of_each_other(sides, cuts)
    size, owners = sides.keys.ring_size, wants.owners
    assert owners is not None

    def gathered(ring_rank: int) -> Gathered:  # and the row of the owner at which each range begins
        mine = np.append(np.zeros(size, np.bool_), number % size == ring_rank)
        if not mine.any():
            return np.zeros((0, 5), np.int64)
        mine[ring_rank] = True
        block, row0, row1 = travelling[mine[travelling[:, needs.OWNER]]].T
        piece, run, rows = needs.cut_by_runs(sides.keys, owners[block], row0, row1)
        order = np.lexsort((rows[:, 0], sides.keys.runs[run, START]))
        block, rows = block[piece[order]], rows[order]
        first = needs.place_among(travelling, block, rows[:, 0])
        sizes = rows[:, 1] - rows[:, 0]
        return np.stack([block, first, first + sizes, np.cumsum(sizes) - sizes, rows[:, 0]], axis=1)

    def of_rank(ring_rank: int) -> Read:
        table = gathered(ring_rank)
        start = owners[table[:, BLOCK]] * needs.FAR + table[:, ROW]
        order = np.argsort(start)

        def placed(tiles: tl.Tiles, k_run: Indices) -> tuple[tl.Tiles, Indices]:
            if not len(table):
                return tiles, np.full(len(tiles), ring_rank)
            at = (
                np.searchsorted(start[order], sides.keys.runs[k_run, RANK] * needs.FAR + tiles[:, tl.K0], side="right")
                - 1
            )
            shift = (table[:, PLACE] - table[:, ROW])[order][at]
            return needs.shift_keys(tiles, shift), np.full(len(tiles), len(owners))

        built = [(tl.build(cut, ring_rank, placed), batch_rows) for cut, batch_rows in cuts]
        found = [(_of_batch_rows(tiles, some), block) for (tiles, block), batch_rows in built for some in batch_rows]
        return _joined(found, ring_rank)

    return Readings(travelling, wants, of_rank, lambda ring_rank: gathered(ring_rank)[:, :ROW])


def of_pieces(sides: Sides, cuts: Cuts, count: Callable[[int], int]) -> Readings:
    """The shards, and the equal parts of what travels of each.

    Args:
        count: how many parts, where so many rows travel of the rank of which most do.
    """
    size = sides.keys.ring_size
    shards = needs.unite([needs.travelling(cut) for cut, _ in cuts])
    rows = needs.count(shards, size)
    n = count(int(rows.max(initial=0)))
    edges = -(-rows[:, None] * np.arange(n + 1) // n)  # the first parts are the larger ones
    travelling = np.concatenate([needs.whole(sides.keys.tokens), _in_pieces(shards, edges)])
    owners = np.append(np.arange(size), np.repeat(np.arange(size), n))

    def of_rank(ring_rank: int) -> Read:
        found = []
        for tiles, source, batch_rows in _built(cuts, ring_rank):
            away = source != ring_rank
            needs.number_anew(tiles, source, away, shards)
            parts = [(tiles[~away], source[~away]), *_cut_at(edges, tiles[away], source[away])]
            cut, block = (np.concatenate(some) for some in zip(*parts, strict=True))
            found += [(_of_batch_rows(cut, some), block) for some in batch_rows]
        return _joined(found, ring_rank)

    pairs = _met_in_pieces(needs.unite([needs.by_reader(cut) for cut, _ in cuts]), shards, edges)
    return Readings(travelling, Needs(pairs, needs.count(travelling, len(owners)), size, owners=owners), of_rank)


def _met_in_pieces(needed: Indices, shards: needs.Travelling, edges: Indices) -> Indices:
    """Who reads which piece, of who needs which rows (`needs.by_reader`)."""
    size, n = len(edges), edges.shape[1] - 1
    owner, reader = np.divmod(needed[:, needs.OWNER], size)
    first = needs.place_among(shards, owner, needed[:, needs.ROW0])[:, None]
    last = needs.place_among(shards, owner, needed[:, needs.ROW1] - 1)[:, None]
    which, piece = np.nonzero((first < edges[owner, 1:]) & (last >= edges[owner, :-1]))
    return np.stack([reader[which], size + n * owner[which] + piece], axis=1)


def _in_pieces(shards: needs.Travelling, edges: Indices) -> needs.Travelling:
    """The rows of each shard that travel, as blocks between its edges."""
    size, n = len(edges), edges.shape[1] - 1
    owner, row0, row1 = shards.T
    at = np.clip(row0[:, None] + edges[owner] - needs.place_among(shards, owner, row0)[:, None], *_columns(row0, row1))
    blocks = size + n * owner[:, None] + np.arange(n)
    return needs.unite([np.stack([blocks, at[:, :-1], at[:, 1:]], axis=2).reshape(-1, 3)])


def _columns(*tables: Indices) -> list[Indices]:
    return [table[:, None] for table in tables]


def _cut_at(edges: Indices, tiles: tl.Tiles, source: Indices) -> list[tuple[tl.Tiles, Indices]]:
    """Tiles that count the rows of a shard that travel, as tiles of its pieces."""
    size, n = len(edges), edges.shape[1] - 1
    found = []
    for piece in range(n):
        start, stop = edges[source, piece], edges[source, piece + 1]
        part = needs.shift_keys(tiles, -start)
        part[:, tl.K0] = np.maximum(part[:, tl.K0], 0)
        part[:, tl.K1] = np.minimum(part[:, tl.K1], stop - start)
        real = (part[:, tl.K0] < part[:, tl.K1]) & (tl.count_pairs(part) > 0)
        found.append((part[real], size + n * source[real] + piece))
    return found


def of_units(sides: Sides, cuts: Cuts, unit: int) -> Readings:
    """A block per unit of keys; a tile per region and pair of units, which counts the rows of its block. The runs of
    both sides are the units (`ringspun.core.layout.in_units`).

    Tiles of one reading are sorted, later units first, so that their order too is the same whoever computes them.
    """
    keys = sides.keys
    block_of_run, stage_of_run = keys.runs[:, START] // unit, _stages(sides.queries)
    owners, travelling = np.empty(len(keys.runs), np.int64), np.empty((len(keys.runs), 3), np.int64)
    owners[block_of_run] = keys.runs[:, RANK]
    ends = keys.run_offsets + keys.run_tokens
    travelling[block_of_run] = np.stack([block_of_run, keys.run_offsets, ends], axis=1)
    readers = np.zeros(stage_of_run.max(initial=-1) + 1, np.int64)
    readers[stage_of_run] = sides.queries.runs[:, RANK]

    def of_rank(ring_rank: int) -> Read:
        found = [(np.zeros((0, 8), np.int64), _NOBODY, _NOBODY)]
        for cut, batch_rows in cuts:
            for local, q_run, k_run in cut.pieces(cut.of_rank(ring_rank)):
                tiles = needs.shift_keys(tl.of_every_row(local), -keys.run_offsets[k_run])
                found += [(_of_batch_rows(tiles, some), q_run, k_run) for some in batch_rows]
        tiles, q_run, k_run = (np.concatenate(parts) for parts in zip(*found, strict=True))
        later_first = -sides.queries.runs[q_run, START]
        order = np.lexsort((*tiles[:, [tl.LO, tl.B0, tl.K0, tl.Q0]].T, later_first))
        return tiles[order], stage_of_run[q_run[order]], block_of_run[k_run[order]]

    met = [
        np.stack([stage_of_run[q_run], block_of_run[k_run]], axis=1)
        for cut, _ in cuts
        for _, q_run, k_run in cut.pieces()
    ]
    pairs = np.concatenate([np.zeros((0, 2), np.int64), *met])
    tokens = travelling[:, 2] - travelling[:, 1]
    return Readings(travelling, Needs(pairs, tokens, keys.ring_size, readers, owners), of_rank)


_NOBODY = np.zeros(0, np.int64)


def _stages(queries: Partition) -> Indices:
    """The stage of each query run: up to a quarter of a rank's share of neighbours on it, so that ranks that wait for
    each other wait for little; numbered in the sequence's order."""
    count = len(queries.runs)
    most = max(1, -(-count // (STAGES_PER_RANK * queries.ring_size)))
    order = np.argsort(queries.runs[:, START], kind="stable")
    ranks, at = queries.runs[order, RANK], np.arange(count)
    first = np.append(True, ranks[1:] != ranks[:-1])[:count]
    within = at - np.maximum.accumulate(np.where(first, at, 0))
    stage = np.empty(count, np.int64)
    stage[order] = np.cumsum(first | (within % most == 0)) - 1
    return stage


def _of_batch_rows(tiles: tl.Tiles, rows: tuple[int, int]) -> tl.Tiles:
    mine = tiles.copy()
    mine[:, tl.B0], mine[:, tl.B1] = rows
    return mine


def of_route(route: Route, sides: Sides, cuts: Cuts) -> Readings:
    """Those that a route wants."""
    if route.cutting == Cutting.UNITS:
        return of_units(sides, cuts, route.grid)
    if route.cutting == Cutting.PIECES:
        return of_pieces(sides, cuts, route.pieces)
    return {Cutting.SHARDS: of_shards, Cutting.READERS: of_readers, Cutting.GATHERED: of_gathered}[route.cutting](
        sides, cuts
    )
