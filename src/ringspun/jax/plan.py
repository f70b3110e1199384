"""A plan: what the core decided about one attention on a ring, as the small tables that a compiled program reads.

One program runs on every rank, so a rank looks up what is its own: the tiles of each hop and the runs of positions that
it holds. No table grows with the length of the sequence, but for masks and layouts that themselves have more pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from ringspun.core import tiles as tl
from ringspun.core.cut import Cut
from ringspun.core.geometry import Geometry
from ringspun.core.layout import Layout
from ringspun.core.layout.base import RANK, START, STEP
from ringspun.core.mask import Mask
from ringspun.core.partition import Partition, Sides
from ringspun.core.route import Ring
from ringspun.core.text import shown
from ringspun.errors import PlanError

LARGEST = np.iinfo(np.int32).max
MOST_GROUPS = 4
"""Scans of one pass at most: where hops are more uneven, blocks stop at every rank between."""

Table = NDArray[np.int32]


class Held(NamedTuple):
    """Which positions stand in which rows of a shard.

    Args:
        tokens: rows of each rank that hold a token ``[R]``; the first ones. runs: rows ``[R, n, 3]`` of (first row,
            position there, step), padded with rows that no shard has.
    """

    tokens: Any
    runs: Any

    @classmethod
    def of(cls, part: Partition) -> Held:
        """Those of a partition."""
        counts = np.bincount(part.runs[:, RANK], minlength=part.ring_size)
        runs = np.zeros((part.ring_size, max(1, int(counts.max(initial=0))), 3), np.int32)
        runs[:, :, 0] = LARGEST
        within = np.arange(len(part.runs)) - np.repeat(np.cumsum(counts) - counts, counts)
        table = np.stack([part.run_offsets, part.start + part.runs[:, START], part.runs[:, STEP]], axis=1)
        runs[part.runs[:, RANK], within] = table
        return cls(part.tokens.astype(np.int32), runs)

    @property
    def rows(self) -> int:
        """Rows of a shard: as many as the fullest rank has tokens."""
        return int(self.tokens.max(initial=0))

    def real(self, ring_rank: Array, rows: int) -> Array:
        """Which rows of a shard hold a token ``[rows]``."""
        found: Array = jnp.arange(rows, dtype=jnp.int32) < self.tokens[ring_rank]
        return found

    def positions(self, ring_rank: Array, rows: int) -> Array:
        """The positions of a shard's rows ``[rows]``; -1 where a row holds no token."""
        runs, row = self.runs[ring_rank], jnp.arange(rows, dtype=jnp.int32)
        first, position, step = runs[jnp.searchsorted(runs[:, 0], row, side="right") - 1].T
        return jnp.where(self.real(ring_rank, rows), position + (row - first) * step, -1)


class Tables(NamedTuple):
    """What a program reads; the same on every rank.

    Args:
        tiles: ``[n, 6]``, of all ranks and hops. edges: rank r's tiles of its hop number i are
            ``[edges[r, i], edges[r, i + 1])``. distances: how far from its owner a block is at each hop.
        queries, keys: who holds what.
    """

    tiles: Any
    edges: Any
    distances: Any
    queries: Held
    keys: Held


@dataclass(frozen=True, eq=False)
class Plan:
    """One attention on a ring.

    Args:
        ring_size: R. distances: how far from their owner blocks are computed with, rising; a rank at distance t of the
            owner o is ``(o + t) mod R``. Distances that nobody needs are not there.
        tables: the rest, as NumPy arrays.
    """

    ring_size: int
    distances: tuple[int, ...]
    tables: Tables

    @cached_property
    def moves(self) -> tuple[int, ...]:
        """By how many ranks blocks move before each hop."""
        return tuple(np.diff((0, *self.distances)).tolist())

    @property
    def is_even(self) -> bool:
        """Whether every row of every shard of queries holds a token."""
        held = self.tables.queries
        return bool((held.tokens == held.rows).all())

    @property
    def pairs(self) -> NDArray[np.int64]:
        """Allowed pairs of each rank and hop ``[R, hops]``: what is computed."""
        wide = np.zeros((len(self.tables.tiles), 8), np.int64)
        wide[:, tl.REGION] = self.tables.tiles
        sums = np.append(0, np.cumsum(tl.count_pairs(wide)))
        found: NDArray[np.int64] = sums[self.tables.edges[:, 1:]] - sums[self.tables.edges[:, :-1]]
        return found


def plan_of(
    mask: Any,
    layout: Any,
    ring_size: int,
    seq_len: int,
    *,
    key_len: int | None = None,
    query_start: int = 0,
) -> Plan:
    """The plan of a mask over a sequence that a layout dealt to a ring.

    Raises:
        PlanError, LayoutError, MaskError: what is no mask or layout, or does not go together.
    """
    if not isinstance(mask, Mask):
        raise PlanError(
            f"mask must be a Mask, e.g. Causal() & Window(64); got {shown(mask)}. Documents that differ from row to "
            "row of a batch, or that are known on devices only: segment_ids=. A string: write parse_mask(text)."
        )
    return _plan_of(mask, layout, ring_size, seq_len, key_len, query_start)


@lru_cache(maxsize=256)
def _plan_of(mask: Mask, layout: Layout, ring_size: int, seq_len: int, key_len: int | None, query_start: int) -> Plan:
    sides = sides_of(layout, ring_size, seq_len, mask=mask, key_len=key_len, query_start=query_start)
    cut = Cut(sides.queries, sides.keys, sides.regions(mask))
    built = [tl.build(cut, ring_rank) for ring_rank in range(ring_size)]
    distance = [(ring_rank - source) % ring_size for ring_rank, (_, source) in enumerate(built)]
    distances = _stops(np.unique(np.concatenate(distance)).tolist())
    table, edges = [], np.zeros((ring_size, len(distances) + 1), np.int64)
    begin = 0
    for ring_rank, (tiles, _) in enumerate(built):
        order = np.argsort(distance[ring_rank], kind="stable")
        table.append(tiles[order][:, tl.REGION])
        edges[ring_rank, :-1] = begin + np.searchsorted(distance[ring_rank][order], distances)
        begin += len(tiles)
        edges[ring_rank, -1] = begin
    _check_size(sides, edges)
    tables = Tables(
        np.concatenate(table).astype(np.int32),
        edges.astype(np.int32),
        np.array(distances, np.int32),
        Held.of(sides.queries),
        Held.of(sides.keys),
    )
    return Plan(ring_size, distances, tables)


def sides_of(layout: Layout, ring_size: int, seq_len: int, **options: Any) -> Sides:
    """Who holds which queries and keys."""
    return Geometry(ring_size, (), layout, Ring()).sides(seq_len, **options)


def _stops(needed: list[int]) -> tuple[int, ...]:
    """The distances that blocks stop at: those needed, or all up to the last where a scan cannot skip the others."""
    moves = np.diff([0, *needed])
    if len(needed) and (np.diff(moves) != 0).sum() >= MOST_GROUPS:
        return tuple(range(needed[-1] + 1))
    return tuple(needed)


def _check_size(sides: Sides, edges: NDArray[np.int64]) -> None:
    last = max(abs(sides.queries.start) + sides.queries.seq_len, sides.keys.seq_len, int(edges.max(initial=0)))
    if last > LARGEST // 2:
        raise PlanError(
            f"positions and tiles must fit int32; got up to {last}. Sequences of more than 2**30 tokens are "
            "not supported."
        )
