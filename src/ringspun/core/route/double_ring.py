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

from ringspun.core.route.base import BoundRoute, Legs, Needs, Route, Rows
from ringspun.core.route.diary import Diary, Stay
from ringspun.core.route.lane import bring_home
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
class BoundDoubleRing(BoundRoute):
    """Args:
    inner: ranks of a node. tokens: rows of each block. first, last: hop at which a rank first and last computes with a
        block ``[laps, R]`` (``first > last``: none does).
    """

    inner: int
    tokens: Rows
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    def forward(self, ring_rank: int) -> Legs:
        return self._write(ring_rank, backward=False).legs(self._count)

    def backward(self, ring_rank: int) -> Legs:
        return self._write(ring_rank, backward=True).legs(self._count + (self._count > 1))

    @property
    def _laps(self) -> Rows:
        """The last lap of each block."""
        needed = self.last >= 0
        return np.where(needed.any(0), len(needed) - 1 - needed[::-1].argmax(0), 0)

    @property
    def _count(self) -> int:
        """Steps of a pass: the last lap ends where its last block is needed."""
        lap = int(self._laps.max())
        return lap * self.inner + int(self.last[lap].max(initial=0)) + 1

    def _write(self, ring_rank: int, *, backward: bool) -> Diary:
        diary, laps = Diary(ring_rank, self.tokens), self._laps
        diary.compute(0, ring_rank, None)
        entered: Stay | None = None
        for lap in range(int(laps.max()) + 1):
            begin, then = lap * self.inner, (lap + 1) * self.inner
            block = self._block(ring_rank, lap, 0)
            begun = self._round(diary, ring_rank, lap, entered, backward=backward)
            if lap < laps[block]:
                diary.send(begun, Payload.KV, block, self._next_node(ring_rank, 1), begin, then)
            block = self._block(ring_rank, lap + 1, 0)
            comes = lap + 1 <= laps[block]
            entered = diary.receive(Payload.KV, block, self._next_node(ring_rank, -1), begin, then) if comes else None
            if backward and self.last[lap, ring_rank] >= 0:
                last = int(self.last[lap, ring_rank])
                bring_home(diary, ring_rank, self._reader(ring_rank, lap, last), begin + last)
        return diary

    def _round(self, diary: Diary, ring_rank: int, lap: int, kv: Stay | None, *, backward: bool) -> Stay | None:
        """One lap round the node, begun with `kv` (the first: with the rank's own rows); where that lies by then."""
        grads, begun = None, kv
        after, before = self._neighbour(ring_rank, 1), self._neighbour(ring_rank, -1)
        for hop in range(self.inner):
            step, block = lap * self.inner + hop, self._block(ring_rank, lap, hop)
            first, last = int(self.first[lap, block]), int(self.last[lap, block])
            if hop < last:
                sent = diary.send(kv, Payload.KV, block, after, step, step + 1)
                begun = sent if hop == 0 else begun
            if kv is not None:
                diary.compute(step, block, kv)
            if backward and kv is not None and first <= hop <= last:
                held, to = diary.gather(step, block, grads), after if hop < last else block
                diary.send(held, Payload.DKV, block, to, step, step + 1)
            block = self._block(ring_rank, lap, hop + 1)
            first, last = int(self.first[lap, block]), int(self.last[lap, block])
            kv = diary.receive(Payload.KV, block, before, step, step + 1) if hop + 1 <= last else None
            follows = backward and first <= hop < last
            grads = diary.receive(Payload.DKV, block, before, step, step + 1) if follows else None
        return begun

    def _block(self, ring_rank: int, lap: int, hop: int) -> int:
        """Whose block a rank has then."""
        node, place = divmod(ring_rank, self.inner)
        return (node - lap) % len(self.last) * self.inner + (place - hop) % self.inner

    def _reader(self, block: int, lap: int, hop: int) -> int:
        """Which rank has a block then."""
        node, place = divmod(block, self.inner)
        return (node + lap) % len(self.last) * self.inner + (place + hop) % self.inner

    def _neighbour(self, ring_rank: int, way: int) -> int:
        node, place = divmod(ring_rank, self.inner)
        return node * self.inner + (place + way) % self.inner

    def _next_node(self, ring_rank: int, way: int) -> int:
        return (ring_rank + way * self.inner) % (len(self.last) * self.inner)
