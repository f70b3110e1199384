"""A plan: what the core decided about one attention on a ring, as the small tables that a compiled program reads.

One program runs on every rank, so a rank looks up what is its own: the tiles of each hop and the runs of positions that
it holds. No table grows with the length of the sequence, but for masks and layouts that themselves have more pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

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


@dataclass(frozen=True, eq=False)
class Held:
    """The rows of one side: how many a shard has room for, and which positions stand where.

    Args:
        tokens: rows of each rank that hold a token ``[R]``; the first ones. runs: rows ``[R, n, 3]`` of (first row,
            position there, step), padded with rows that no shard has.
    """

    tokens: Table
    runs: Table

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

    @property
    def is_even(self) -> bool:
        """Whether all shards are full."""
        return bool((self.tokens == self.rows).all())

    def real(self, ring_rank: Array) -> Array:
        """Which rows of a shard hold a token ``[T]``."""
        return jnp.arange(self.rows, dtype=jnp.int32) < jnp.asarray(self.tokens)[ring_rank]

    def positions(self, ring_rank: Array) -> Array:
        """The positions of a shard's rows ``[T]``; -1 where a row holds no token."""
        runs, row = jnp.asarray(self.runs)[ring_rank], jnp.arange(self.rows, dtype=jnp.int32)
        first, position, step = runs[jnp.searchsorted(runs[:, 0], row, side="right") - 1].T
        return jnp.where(self.real(ring_rank), position + (row - first) * step, -1)


@dataclass(frozen=True, eq=False)
class Plan:
    """One attention on a ring.

    Args:
        ring_size: R. queries, keys: who holds what.
        distances: how far from their owner blocks are computed with, rising; a rank at distance t of the owner o is
            ``(o + t) mod R``. Distances that nobody needs are not there.
        table: tiles ``[n, 6]`` of all ranks and hops. edges: rank r's tiles of its hop number i are
            ``[edges[r, i], edges[r, i + 1])``.
    """

    ring_size: int
    queries: Held
    keys: Held
    distances: tuple[int, ...]
    table: Table
    edges: Table

    @cached_property
    def moves(self) -> tuple[int, ...]:
        """By how many ranks blocks move before each hop."""
        return tuple(np.diff((0, *self.distances)).tolist())

    @property
    def way_home(self) -> int:
        """By how many ranks what follows a block moves after the last hop."""
        return -self.distances[-1] % self.ring_size

    @property
    def pairs(self) -> NDArray[np.int64]:
        """Allowed pairs of each rank and hop ``[R, hops]``: what is computed."""
        wide = np.zeros((len(self.table), 8), np.int64)
        wide[:, tl.REGION] = self.table
        sums = np.append(0, np.cumsum(tl.count_pairs(wide)))
        found: NDArray[np.int64] = sums[self.edges[:, 1:]] - sums[self.edges[:, :-1]]
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
            f"mask must be a Mask, e.g. Causal() & Window(64); got {shown(mask)}. Documents that differ from row to row "
            "of a batch, or that are known on devices only: segment_ids=. A string: write parse_mask(text)."
        )
    return _plan_of(mask, layout, ring_size, seq_len, key_len, query_start)


@lru_cache(maxsize=256)
def _plan_of(
    mask: Mask, layout: Layout, ring_size: int, seq_len: int, key_len: int | None, query_start: int
) -> Plan:
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
    return Plan(
        ring_size,
        Held.of(sides.queries),
        Held.of(sides.keys),
        distances,
        np.concatenate(table).astype(np.int32),
        edges.astype(np.int32),
    )


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
            f"positions and tiles must fit int32; got up to {last}. Sequences of more than 2**30 tokens are not supported."
        )
