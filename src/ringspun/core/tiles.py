"""Tiles: the pairs that one rank computes in one step, in local row numbers; and how bands become what kernels can do.

A tile is ``batch rows [b0, b1), query rows [q0, q1), key rows [k0, k1), lo <= i - j <= hi`` where i and j count rows of
the local query shard and of the received key block. ``b1 = -1`` is every batch row. All tiles of a rank are one int64
array ``[n, 8]``. Bands stay bands as long as a kernel can use them; `lower` cuts them into exactly three kinds for
those that cannot.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core.cut import Cut
from ringspun.core.layout.base import RANK
from ringspun.errors import RingspunWarning

Tiles = NDArray[np.int64]
B0, B1, Q0, Q1, K0, K1, LO, HI = range(8)
REGION = slice(Q0, HI + 1)
"""The columns of a tile that are a region in local rows."""
MANY_TILES = 1_000_000
"""From so many tiles on a rank is warned, and they are no longer coalesced."""


def count_pairs(tiles: Tiles) -> NDArray[np.int64]:
    """Allowed pairs in each tile, for one batch row and head."""
    return rg.count(tiles[:, REGION])


def rows(tiles: Tiles) -> NDArray[np.int64]:
    """Batch rows of each tile; 1 for a tile that stands for every row."""
    return np.where(tiles[:, B1] < 0, 1, tiles[:, B1] - tiles[:, B0])


def turned(tiles: Tiles) -> Tiles:
    """The same pairs with queries and keys in each other's place."""
    return np.column_stack([tiles[:, [B0, B1]], rg.turned(tiles[:, REGION])])


Placed = Callable[[Tiles, NDArray[np.int64]], tuple[Tiles, NDArray[np.int64]]]
"""Makes of tiles, each with the key run that it is of, tiles with the block of each."""


def build(cut: Cut, ring_rank: int, placed: Placed | None = None) -> tuple[Tiles, NDArray[np.int64]]:
    """All tiles of one rank against every rank's keys, coalesced: ``(tiles [n, 8], source rank of each [n])``.

    Sorted by source, then rows. Warns when a layout and a mask make more than a million of them.

    Args:
        placed: counts the keys in other blocks than ranks' shards.
    Raises:
        PlanError: query and key runs that meet have different steps.
    """
    mine = cut.of_rank(ring_rank)
    total = cut.meetings(mine)
    if total > MANY_TILES:
        warnings.warn(
            f"{cut.queries.layout} under this mask makes up to {total:,} tiles on ring rank {ring_rank}; "
            "a layout that keeps neighbouring tokens together (zigzag, contiguous) makes far fewer.",
            RingspunWarning,
            stacklevel=2,
        )

    def of_owners(tiles: Tiles, k_run: NDArray[np.int64]) -> tuple[Tiles, NDArray[np.int64]]:
        return tiles, cut.keys.runs[k_run, RANK]

    placed = of_owners if placed is None else placed
    found = [placed(of_every_row(local), k_run) for local, _, k_run in cut.pieces(mine)]
    table = np.concatenate([t for t, _ in found])
    source = np.concatenate([s for _, s in found])
    return _coalesce(table, source) if total <= MANY_TILES else _sorted(table, source)


def of_every_row(local: rg.Table) -> Tiles:
    """Regions in local rows as tiles of every batch row."""
    table = np.empty((len(local), 8), np.int64)
    table[:, B0], table[:, B1], table[:, REGION] = 0, -1, local
    return table


def _coalesce(tiles: Tiles, source: NDArray[np.int64]) -> tuple[Tiles, NDArray[np.int64]]:
    """Join neighbours whose union is itself a tile, until none are left; sorted by source, then rows.

    Two disjoint tiles are one exactly when their hull holds as many pairs as both together.
    """
    by_query, by_key = (K0, Q0), (Q0, K0)
    joined = True
    while joined:  # all keys of the same queries first: what is left apart then has nothing to be merged with
        tiles, source, joined = _join_neighbours(tiles, source, by_query, of_same_queries=True)
    settled = 0
    while settled < 2:
        for keys in (by_query, by_key):
            tiles, source, joined = _join_neighbours(tiles, source, keys)
            settled = 0 if joined else settled + 1
    return _sorted(tiles, source)


def _sorted(tiles: Tiles, source: NDArray[np.int64]) -> tuple[Tiles, NDArray[np.int64]]:
    order = np.lexsort((tiles[:, K0], tiles[:, Q0], source))
    return tiles[order], source[order]


def _join_neighbours(
    tiles: Tiles, source: NDArray[np.int64], keys: tuple[int, int], *, of_same_queries: bool = False
) -> tuple[Tiles, NDArray[np.int64], bool]:
    """Neighbours in the order of some columns, the last counting first, joined in pairs."""
    order = np.lexsort((*(tiles[:, c] for c in keys), source))
    tiles, source = tiles[order], source[order]
    if len(tiles) < 2:
        return tiles, source, False
    a, b = tiles[:-1], tiles[1:]
    hull = np.where(np.isin(np.arange(8), (B0, Q0, K0, LO)), np.minimum(a, b), np.maximum(a, b))
    pairs = count_pairs(tiles)
    same = (source[:-1] == source[1:]) & (a[:, B0] == b[:, B0]) & (a[:, B1] == b[:, B1])
    if of_same_queries:
        same &= (a[:, Q0] == b[:, Q0]) & (a[:, Q1] == b[:, Q1])
    joins = same & (count_pairs(hull) == pairs[:-1] + pairs[1:])
    # of a chain of joins take every other one: a tile can be joined once per round
    start = np.flatnonzero(joins & ~np.append(False, joins[:-1]))
    position = np.arange(len(joins))
    chain = np.zeros(len(joins), np.int64)
    chain[start] = start
    joins &= (position - np.maximum.accumulate(chain)) % 2 == 0
    if not joins.any():
        return tiles, source, False
    tiles = tiles.copy()
    tiles[:-1][joins] = hull[joins]
    gone = np.append(False, joins)
    return tiles[~gone], source[~gone], True


class Kind(IntEnum):
    """What a lowered tile is. `CAUSAL`: i >= j counted from the tile's own upper-left corner, rectangles allowed.
    `ANTICAUSAL`: causal with both axes flipped, i.e. counted from the lower-right corner, i <= j."""

    FULL = 0
    CAUSAL = 1
    ANTICAUSAL = 2


def lower(tiles: Tiles) -> tuple[Tiles, NDArray[np.int64]]:
    """Cut band tiles into rectangles of exactly three kinds: ``(tiles [m, 8], kind of each [m])``.

    Every allowed pair is in exactly one piece, and every row of a piece sees at least one key of it. The band columns
    of a piece repeat its kind's bound.
    """
    pieces: list[Tiles] = []
    kinds: list[int] = []
    for tile in tiles:
        for q0, q1, k0, k1, kind in _lower_one(*(int(x) for x in tile[REGION])):
            lo = q0 - k0 if kind == Kind.CAUSAL else q0 - (k1 - 1)
            hi = q1 - k1 if kind == Kind.ANTICAUSAL else (q1 - 1) - k0
            pieces.append(np.array([tile[B0], tile[B1], q0, q1, k0, k1, lo, hi], np.int64))
            kinds.append(int(kind))
    table = np.stack(pieces) if pieces else np.zeros((0, 8), np.int64)
    return table, np.array(kinds, np.int64)


Piece = tuple[int, int, int, int, Kind]


def _lower_one(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> list[Piece]:
    """One tile. A tile that both bounds cut is split into blocks of rows as high as its band is wide, so that in each
    block some keys are seen by all rows and either side of them only one bound cuts."""
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi)
    k0, k1 = max(k0, q0 - hi), min(k1, q1 - lo)
    if q0 >= q1 or k0 >= k1 or lo > hi:
        return []
    cuts_low, cuts_high = lo > q0 - (k1 - 1), hi < (q1 - 1) - k0
    if not cuts_low and not cuts_high:
        return [(q0, q1, k0, k1, Kind.FULL)]
    if not cuts_high:
        return _lower_causal(q0, q1, k0, k1, lo)
    if not cuts_low:  # flip both axes: the upper bound becomes a lower one
        flipped = _lower_causal(-q1 + 1, -q0 + 1, -k1 + 1, -k0 + 1, -hi)
        mirror = {Kind.FULL: Kind.FULL, Kind.CAUSAL: Kind.ANTICAUSAL}
        return [(1 - b, 1 - a, 1 - d, 1 - c, mirror[kind]) for a, b, c, d, kind in flipped]
    width = hi - lo + 1
    if q1 - q0 > width:
        return [p for q in range(q0, q1, width) for p in _lower_one(q, min(q + width, q1), k0, k1, lo, hi)]
    # every row sees the keys from the last row's first to the first row's last
    common0, common1 = q1 - 1 - hi, q0 - lo + 1  # k0 < common0 < common1 < k1, as both bounds cut and few rows are left
    return [
        (q0, q1, common0, common1, Kind.FULL),
        *_lower_one(q0, q1, k0, common0, -rg.UNBOUNDED, hi),
        *_lower_one(q0, q1, common1, k1, lo, rg.UNBOUNDED),
    ]


def _lower_causal(q0: int, q1: int, k0: int, k1: int, lo: int) -> list[Piece]:
    """A tile that only its lower bound cuts: the keys that every row sees, and a triangle that starts at its corner."""
    seen_by_all = q0 - lo + 1 - k0  # keys that the first row sees
    if seen_by_all <= 1:
        return [(q0, q1, k0, k1, Kind.CAUSAL)]
    edge = k0 + seen_by_all - 1  # the first row's last key is the triangle's corner
    return [(q0, q1, k0, edge, Kind.FULL), (q0, q1, edge, k1, Kind.CAUSAL)]
