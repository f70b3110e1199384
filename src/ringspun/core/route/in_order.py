"""In order: every sum is formed in the order of the sequence, so that its bits do not depend on the number of ranks.

Queries and keys are cut at the multiples of one unit, only whole units are dealt, and a kernel is called for one unit
of queries and one of keys at a time. A block is a unit of keys; a stage is a few neighbouring units of queries on one
rank. Every stage meets the blocks in ascending order, and every block visits the stages in descending order and takes
its unfinished dK, dV along. So out, lse and dQ of a unit are folded over ascending keys, dK and dV over descending
queries.

    2 ranks, 4 units, zigzag, causal     step    0     1     2     3     4       stage.block
                                       rank 0   3.0   3.1   3.2   0.0   3.3      holds units 0, 3
                                       rank 1         2.0   1.0   2.1   1.1 ...  holds units 1, 2

Block 0 visits stages 3, 2, 1, 0 at steps 0, 1, 2, 3. Were queries ascending too, a window would make each rank wait for
all work of the one before: a block's last query would be the last of its rank, and the next rank's first.

Forward walks the same way without gradients. A block stays in its slot between two stages of one rank, and a rank never
gets what it owns. Gradients go home from the last stage, under a causal mask that of the owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringspun.core.layout.base import Layout
from ringspun.core.layout.in_units import InUnits
from ringspun.core.route.base import NONE, BoundRoute, Cutting, Legs, Needs, Route, Rows
from ringspun.core.route.diary import Diary, Stay
from ringspun.core.wire import Payload

UNIT = 512


@dataclass(frozen=True)
class InOrder(Route):
    """The same bits on every number of ranks.

    Args:
        unit: tokens at whose multiples queries and keys are cut. Kernels are as fast on 512 as on more.
    """

    unit: int = UNIT

    @property
    def cutting(self) -> Cutting:
        return Cutting.UNITS

    @property
    def grid(self) -> int:
        return self.unit

    def layout(self, layout: Layout) -> Layout:
        return layout if isinstance(layout, InUnits) else InUnits(layout, self.unit)

    def bind(self, needs: Needs) -> BoundRoute:
        ranks = np.arange(len(needs.tokens))
        readers, owners = (ranks if x is None else x for x in (needs.readers, needs.owners))
        met = np.zeros((len(readers), len(owners)), np.bool_)
        met[needs.pairs[:, 0], needs.pairs[:, 1]] = True
        return Walk(met, needs.tokens, readers, owners)


Visit = tuple[int, int, int]
"""Of a block: rank, step, stage."""


@dataclass(frozen=True, eq=False)
class Walk(BoundRoute):
    """Args:
    met: which stages meet which blocks ``[stages, blocks]``. tokens: rows of each block. readers, owners: ring rank of
        each stage and of each block.
    """

    met: NDArray[np.bool_]
    tokens: Rows
    readers: Rows
    owners: Rows

    def forward(self, ring_rank: int) -> Legs:
        return self._legs(ring_rank, backward=False)

    def backward(self, ring_rank: int) -> Legs:
        return self._legs(ring_rank, backward=True)

    @cached_property
    def times(self) -> Rows:
        """The step of each meeting ``[stages, blocks]``, -1 where there is none. Every rank does one at a time, of
        those that can be next the one of its first stage: what is nearly done is finished before more is begun."""
        times = np.full(self.met.shape, NONE, np.int64)
        visits = [np.flatnonzero(column)[::-1].tolist() for column in self.met.T]  # stages of a block, then blocks of a
        todo = [np.flatnonzero(row)[::-1].tolist() for row in self.met]  # stage, the next one last
        ready = [int(bool(v) and self.readers[v[0]] != owner) for v, owner in zip(visits, self.owners, strict=True)]
        turn = [0] * len(visits)
        stages_of = [np.flatnonzero(self.readers == rank).tolist() for rank in np.unique(self.readers)]
        left, step = int(self.met.sum()), 0
        while left:
            for stages in stages_of:
                for stage in stages:
                    block = todo[stage][-1] if todo[stage] else NONE
                    if block != NONE and ready[block] <= step and visits[block][turn[block]] == stage:
                        todo[stage].pop()
                        times[stage, block], ready[block] = step, step + 1
                        turn[block] += 1
                        left -= 1
                        break
            step += 1
        return times

    @cached_property
    def _visits(self) -> list[list[Visit]]:
        """The way of each block."""
        found = []
        for block in range(len(self.owners)):
            stages = np.flatnonzero(self.met[:, block])[::-1]
            ways = zip(self.readers[stages].tolist(), self.times[stages, block].tolist(), stages.tolist(), strict=True)
            found.append(list(ways))
        return found

    @cached_property
    def _homes(self) -> dict[int, int]:
        """The step at which the gradients of a block are added at home: one a step on every rank."""
        ends = [(block, *visits[-1][:2]) for block, visits in enumerate(self._visits) if visits]
        found, free = {}, dict.fromkeys(self.owners.tolist(), 0)
        for first, block in sorted((step + (rank != self.owners[block]), block) for block, rank, step in ends):
            owner = int(self.owners[block])
            found[block] = max(first, free[owner])
            free[owner] = found[block] + 1
        return found

    def _legs(self, ring_rank: int, *, backward: bool) -> Legs:
        diary = Diary(ring_rank, self.tokens, reader=NONE)
        for block, visits in enumerate(self._visits):
            if visits and (self.owners[block] == ring_rank or any(rank == ring_rank for rank, _, _ in visits)):
                self._write(diary, block, visits, backward=backward)
        last = max(int(self.times.max(initial=0)), *(self._homes.values() if backward else ()), 0)
        return diary.legs(last + 1)

    def _write(self, diary: Diary, block: int, visits: list[Visit], *, backward: bool) -> None:
        """What one rank has to do with one block."""
        me, owner = diary.ring_rank, int(self.owners[block])
        kv: Stay | None = None
        grads: Stay | None = None
        before = owner
        for n, (rank, step, stage) in enumerate(visits):
            if me == before != rank != owner:
                diary.send(None if me == owner else kv, Payload.KV, block, rank, step - 1, step)
            if backward and n and me == before != rank:
                diary.send(grads, Payload.DKV, block, rank, step - 1, step)
            if rank == me:
                if me == owner:
                    kv = None
                elif before != me:
                    kv = diary.receive(Payload.KV, block, before, step - 1, step)
                diary.compute(step, block, kv, stage)
                if backward:
                    if n and before != me:
                        grads = diary.receive(Payload.DKV, block, before, step - 1, step)
                    grads = diary.gather(step, block, grads if n else None)
            before = rank
        if backward:
            self._go_home(diary, block, before, visits[-1][1], grads)

    def _go_home(self, diary: Diary, block: int, last: int, step: int, grads: Stay | None) -> None:
        me, owner = diary.ring_rank, int(self.owners[block])
        if me == last != owner:
            diary.send(grads, Payload.DKV, block, owner, step, step + 1)
        if me == owner:
            there = grads if last == me else diary.receive(Payload.DKV, block, last, step, step + 1)
            assert there is not None
            diary.home(self._homes[block], block, there)
