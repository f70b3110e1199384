"""Double ring: a fast ring inside each node, a slow one between nodes.

    R = 6, nodes of 3     first lap            second lap
    node 0    rank 0      0    2    1          3    5    4
              rank 1      1    0    2          4    3    5
              rank 2      2    1    0          5    4    3
    node 1    rank 3      3    5    4          0    2    1

In each lap blocks go once round the node. The block that a rank begins a lap with it also sends to its place in the
next node, where it begins the next lap, so that it has the whole lap to arrive: each block enters each node once.
Gradients are gathered round a node and go straight home from the last rank that needed the block there.
Source: LoongTrain, arXiv 2406.18485 (there with whole laps and no cuts).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspun.core.route.base import BoundRoute, Needs, Route, Rows, tally
from ringspun.core.route.diary import Diary, Stay, Written
from ringspun.core.route.lane import Lane, bring_home
from ringspun.core.wire import Payload
from ringspun.errors import PlanError


@dataclass(frozen=True)
class DoubleRing(Route):
    """Rings of `inner` neighbouring ranks, joined by rings of those with one place.

    Args:
        inner: ranks of a node; divides the ring's size.
    Raises:
        PlanError: it does not, or is none.
    """

    inner: int

    def __post_init__(self) -> None:
        if isinstance(self.inner, bool) or not isinstance(self.inner, int) or self.inner < 1:
            raise PlanError(f"inner must be a number of ranks >= 1; got {self.inner!r}.")

    def bind(self, needs: Needs) -> BoundRoute:
        size = needs.size
        if size % self.inner:
            raise PlanError(f"inner must divide the ring's {size} ranks; got {self.inner}.")
        nodes = size // self.inner
        reader, owner = needs.pairs[needs.pairs[:, 0] != needs.pairs[:, 1]].T
        lap = (reader // self.inner - owner // self.inner) % nodes
        hop = (reader - owner) % self.inner
        first = np.full((nodes, size), self.inner, np.int64)
        last = np.full((nodes, size), -1, np.int64)
        np.minimum.at(first, (lap, owner), hop)
        np.maximum.at(last, (lap, owner), hop)
        return BoundDoubleRing(self.inner, needs.tokens, first, last)


@dataclass(frozen=True, eq=False)
class BoundDoubleRing(Written):
    """Args:
    inner: ranks of a node. tokens: rows of each block. first, last: hop at which a rank first and last computes with a
        block ``[laps, R]`` (``first > last``: none does).
    """

    inner: int
    tokens: Rows
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    @property
    def _laps(self) -> Rows:
        """The last lap of each block."""
        needed = self.last >= 0
        return np.where(needed.any(0), len(needed) - 1 - needed[::-1].argmax(0), 0)

    @property
    def count(self) -> int:
        """The last lap ends where its last block is needed."""
        lap = int(self._laps.max())
        return lap * self.inner + int(self.last[lap].max(initial=0)) + 1

    def sent(self, size: int) -> Rows:
        blocks = np.maximum(self.last, 0).sum(0) + self._laps
        return tally(self.tokens, blocks, np.maximum(self.last - self.first + 1, 0).sum(0))

    def write(self, ring_rank: int, *, backward: bool) -> Diary:
        diary, laps, mine = Diary(ring_rank, self.tokens), self._laps, np.array(ring_rank)
        before, after = (
            int(self._block(mine, lap)) for lap in (1, -1)
        )  # this rank's place in the nodes beside its own
        diary.compute_own(self.own_step(backward=backward))
        entered: Stay | None = None
        for lap in range(int(laps.max()) + 1):
            begin, then = lap * self.inner, (lap + 1) * self.inner
            block, coming = (int(self._block(mine, n)) for n in (lap, lap + 1))
            lane, place = self._lane(ring_rank, lap), ring_rank % self.inner
            begun = lane.write(diary, place, backward=backward, entered=entered)
            if lap < laps[block]:
                diary.send(begun, Payload.KV, block, after, begin, then)
            comes = lap + 1 <= laps[coming]
            entered = diary.receive(Payload.KV, coming, before, begin, then) if comes else None
            if backward and self.last[lap, ring_rank] >= 0:
                last = int(self.last[lap, ring_rank])
                bring_home(diary, ring_rank, self._reader(ring_rank, lap, last), begin + last)
        return diary

    def _lane(self, ring_rank: int, lap: int) -> Lane:
        """One lap round the rank's node."""
        ranks = ring_rank - ring_rank % self.inner + np.arange(self.inner)
        blocks = self._block(ranks, lap)
        first, last = self.first[lap, blocks], self.last[lap, blocks]
        return Lane(ranks, blocks, blocks, first, last, lambda hop: lap * self.inner + hop)

    def _block(self, ranks: Rows, lap: int) -> Rows:
        """With whose blocks ranks begin a lap: those of their places, so many nodes back."""
        return (ranks - lap * self.inner) % len(self.tokens)

    def _reader(self, block: int, lap: int, hop: int) -> int:
        """Which rank has a block then."""
        node, place = divmod(block, self.inner)
        return (node + lap) % len(self.last) * self.inner + (place + hop) % self.inner
