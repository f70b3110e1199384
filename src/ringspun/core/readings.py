"""Readings: which keys travel together as a block, who reads which, and the tiles of each reading.

Two ways: a rank's whole shard is a block and tiles are as large as can be (`of_shards`); or, for routes that fix the
order of every sum, a block is a unit of the grid and no tile crosses the grid's lines (`of_units`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ringspun.core import needs
from ringspun.core import tiles as tl
from ringspun.core.cut import Cut, Indices
from ringspun.core.layout.base import RANK, START
from ringspun.core.partition import Partition, Sides
from ringspun.core.route.base import Needs

STAGES_PER_RANK = 4
"""At least, where there are units enough. More gain little time and make more steps."""
BatchRows = Sequence[tuple[int, int]]
Cuts = Sequence[tuple[Cut, BatchRows]]
"""Each different mask's cut, with the ranges of batch rows that it holds for."""
Read = tuple[tl.Tiles, Indices, Indices]
"""Tiles of one rank, and the reader and the block of each."""


@dataclass(frozen=True, eq=False)
class Readings:
    """What a route is bound to.

    Args:
        travelling: key rows of each block that travel, counted on their owner (`ringspun.core.needs`).
        needs: who reads what. of_rank: the tiles of one rank's queries.
    """

    travelling: needs.Travelling
    needs: Needs
    of_rank: Callable[[int], Read]


def of_shards(sides: Sides, cuts: Cuts) -> Readings:
    """A block per rank; tiles joined as far as they can be. Tiles count all rows of the rank's own block, and of others
    those that travel."""
    travelling = needs.unite([needs.travelling(cut) for cut, _ in cuts])
    met = np.concatenate([needs.meetings(cut) for cut, _ in cuts])

    def of_rank(ring_rank: int) -> Read:
        found = []
        for cut, batch_rows in cuts:
            tiles, source = tl.build(cut, ring_rank)
            needs.number_anew(tiles, source, source != ring_rank, travelling)
            found += [(_of_batch_rows(tiles, some), source) for some in batch_rows]
        tables, sources = zip(*found, strict=True)
        source = np.concatenate(sources)
        return np.concatenate(tables), np.full_like(source, ring_rank), source

    return Readings(travelling, Needs(met, needs.count(travelling, sides.keys.ring_size)), of_rank)


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
    return Readings(travelling, Needs(pairs, travelling[:, 2] - travelling[:, 1], readers, owners), of_rank)


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
