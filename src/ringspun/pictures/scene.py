"""What is drawn: a mask over tokens that a layout deals to a ring, by a route, for calls of one format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringspun.core import ways
from ringspun.core.accounting import computing
from ringspun.core.geometry import Geometry
from ringspun.core.layout import Contiguous, Layout, Zigzag
from ringspun.core.mask import Causal, Documents, Mask, RowMasks
from ringspun.core.partition import Partition, Sides
from ringspun.core.passes import Pass
from ringspun.core.route import Ring, Route
from ringspun.core.route.auto import Auto
from ringspun.core.route.base import StepColumn
from ringspun.core.schedule import Schedule, compile_schedules, cuts_of
from ringspun.core.text import shown
from ringspun.core.ways import Turned
from ringspun.core.wire import Format

MOST_RANKS = 64
"""Of rings of more, as many are drawn, evenly spread, first and last among them."""
MOST_PIECES = 1_000_000
"""Of tiles that are made for one picture, about; where each rank makes more of them, fewer ranks are drawn."""
MOST_STEPS = 1 << 14
"""Of all ranks that are drawn together."""
FEWEST_RANKS = 3
WIRE = Format(1, 8, 8, 64, 64, "bfloat16", 2, 4)
"""Calls that are drawn where nobody says: one sequence, 8 heads of 64, bfloat16."""


@dataclass(frozen=True)
class Scene:
    """What is drawn.

    Args:
        sides: who holds which queries and keys. mask: what may be seen. route: by which keys travel.
        wire: heads, sizes and dtype of a call. backward: what travels in it, see `ringspun.core.ways.take`.
    """

    sides: Sides
    mask: Mask | RowMasks
    route: Route
    wire: Format = WIRE
    backward: str = "keys"

    @staticmethod
    def of(
        seq_len: int,
        ring_size: int,
        mask: Mask | None = None,
        layout: Layout | None = None,
        route: Route | None = None,
        *,
        documents: Documents | None = None,
        wire: Format = WIRE,
        backward: str = "keys",
    ) -> Scene:
        """A scene of self-attention.

        Args:
            seq_len: global length (tokens). mask: default `Causal`, within `documents` if there are any; its own are
                the partition's too. layout, route: default `Zigzag`, `Ring`. wire, backward: see `Scene`.
        Raises:
            PlanError, LayoutError, MaskError: what does not go together.
        """
        if mask is None:
            mask = Causal() if documents is None else Causal() & documents
        route = Ring() if route is None else route
        geometry = Geometry(ring_size, (), Zigzag() if layout is None else layout, route)
        return Scene(geometry.sides(seq_len, documents, mask=mask), mask, route, wire, backward)

    @property
    def ring_size(self) -> int:
        """Ranks R."""
        return self.sides.queries.ring_size

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ring ranks that are drawn: all, or some that stand for them."""
        size = self.ring_size
        per_rank = sum(cut.meetings() for cut, _ in cuts_of(self.sides, self.mask)) / size
        counted = min(MOST_STEPS // size, int(MOST_PIECES / max(per_rank, 1)))
        return spread(range(size), min(MOST_RANKS, max(FEWEST_RANKS, counted)))

    @property
    def all_ranks(self) -> bool:
        """Whether every rank is drawn."""
        return len(self.ranks) == self.ring_size

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """Of `ranks`."""
        return compile_schedules(self.sides, self.mask, self.route, self.ranks)

    @cached_property
    def ways(self) -> Sequence[Schedule | Turned]:
        """Whose `backward` a call of this format takes, of `ranks`."""
        return ways.taken(self.schedules, self.wire, self.backward)

    def blocks(self, *, backward: bool) -> Sequence[Schedule | Turned]:
        """What goes round in a pass, as each of `ranks` sees it."""
        return self.ways if backward else self.schedules

    def passes(self, *, backward: bool) -> list[Pass]:
        """One pass of each of `ranks`, with the tiles that a call of this format computes."""
        passes = [s.backward for s in self.ways] if backward else [s.forward for s in self.schedules]
        return [_with_heads(one, self.wire) for one in passes]

    def alone(self) -> Scene:
        """The same on one rank, which sends nothing."""
        sides = self.sides
        parts = [
            Partition(side.seq_len, 1, Contiguous(), side.documents, side.start)
            for side in ((sides.queries,) if sides.same else (sides.queries, sides.keys))
        ]
        return replace(self, sides=Sides(*parts), route=Ring())

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """Of unequal `ranks`, as their layout has them."""
        found = getattr(self.sides.queries.layout, "speeds", None)
        return None if found is None else tuple(float(found[r]) for r in self.ranks)

    @property
    def words(self) -> str:
        """In a line."""
        queries, keys = self.sides.queries, self.sides.keys
        told = f"{shown(self.mask, 60)} over {queries.seq_len:,} tokens"
        told += "" if self.sides.same else f" and {keys.seq_len:,} keys"
        taken = self.schedules[0].route if isinstance(self.route, Auto) else self.route
        ranks = "1 rank" if self.ring_size == 1 else f"{self.ring_size:,} ranks"
        return f"{told}, {shown(queries.layout, 40)} on {ranks}, {taken}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a picture does not show, in words."""
        rows = isinstance(self.mask, RowMasks) and len(set(self.mask.masks)) > 1
        told = ("batch rows have masks of their own: pairs are of all rows together, tiles lie over each other",)
        return self.notes_of(self.ranks) + told * rows

    def notes_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The same, where some ranks alone are drawn."""
        if len(ranks) == self.ring_size:
            return ()
        return (f"{len(ranks)} of {self.ring_size:,} ranks are counted and drawn, evenly spread",)


def _with_heads(one: Pass, wire: Format) -> Pass:
    """A pass without the tiles of strides that a call has no heads for: it computes nothing at their steps."""
    if one.steps[:, StepColumn.STRIDES].max(initial=1) <= max(wire.kv_heads, 1):
        return one
    counts = np.diff(one.tile_offsets)
    kept = computing(one, wire)
    offsets = np.append(0, np.cumsum(counts * kept))
    return Pass(one.steps, one.messages, one.tiles[np.repeat(kept, counts)], offsets, one.side)


def spread(ranks: Sequence[int], most: int) -> tuple[int, ...]:
    """Some of them, evenly spread, the first and the last among them."""
    return tuple(ranks[i] for i in np.unique(np.linspace(0, len(ranks) - 1, min(most, len(ranks))).astype(int)))


def edges(count: int, most: int) -> NDArray[np.int64]:
    """Edges of at most `most` cells, equal but for the last, that `count` things fall into."""
    per_cell = max(1, -(-count // most))
    return np.append(np.arange(0, count, per_cell), count) if count else np.zeros(1, np.int64)
