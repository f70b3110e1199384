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

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringspun.core.layout.base import Layout
from ringspun.core.layout.in_units import InUnits
from ringspun.core.route.base import (
    NONE,
    OWN,
    Action,
    BoundRoute,
    Cutting,
    Legs,
    MessageColumn,
    Moment,
    Needs,
    Route,
    Rows,
    StepColumn,
    legs,
)
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


@dataclass(eq=False)
class _Stay:
    """A block, or its gradients, in a buffer of one rank. Times count half steps: messages posted before the tiles of
    step t and those tiles at 2t, gradients brought home and messages posted after them at 2t + 1."""

    rank: int
    payload: Payload
    since: int
    until: int
    slot: int = NONE


@dataclass(eq=False)
class _Journal:
    """What all ranks do in one pass, slots not yet numbered."""

    steps: list[tuple[int, int, int, int, _Stay | None, _Stay, bool]] = field(default_factory=list)
    """Rank, step, stage, block, where the block lies (None: with its owner), where gradients gather, whether fresh."""
    messages: list[tuple[int, Moment, Payload, int, _Stay, bool, _Stay]] = field(default_factory=list)
    """Step, moment, payload, block, slot it is sent from, whether packed there, slot it is received in."""
    homes: list[tuple[int, int, int, _Stay]] = field(default_factory=list)
    """Rank, first step at which it can be, block, slot."""
    stays: list[_Stay] = field(default_factory=list)

    def stay(self, rank: int, payload: Payload, since: int) -> _Stay:
        self.stays.append(_Stay(rank, payload, since, since))
        return self.stays[-1]

    def send(self, step: int, moment: Moment, block: int, origin: _Stay, packed: bool, rank: int) -> _Stay:
        """Move what is in a slot to another rank; its slot there. Free again when the next step has waited for it."""
        origin.until = 2 * (step + 1)
        arrival = self.stay(rank, origin.payload, 2 * step + (moment == Moment.AFTER))
        self.messages.append((step, moment, origin.payload, block, origin, packed, arrival))
        return arrival


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
        return self._legs(ring_rank, Payload.KV)

    def backward(self, ring_rank: int) -> Legs:
        return self._legs(ring_rank, Payload.DKV)

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
    def _journal(self) -> _Journal:
        """Every block's way, and of its gradients."""
        journal = _Journal()
        for block, owner in enumerate(self.owners.tolist()):
            stages = np.flatnonzero(self.met[:, block])[::-1]
            visits = list(zip(self.readers[stages].tolist(), self.times[stages, block].tolist(), stages, strict=True))
            kv: _Stay | None = None
            grads: _Stay | None = None
            before = owner
            for rank, step, stage in visits:
                if rank != before and rank != owner:
                    origin = journal.stay(owner, Payload.KV, 2 * (step - 1)) if kv is None else kv
                    kv = journal.send(step - 1, Moment.BEFORE, block, origin, kv is None, rank)
                elif rank == owner:
                    kv = None
                fresh = grads is None
                if grads is None:
                    grads = journal.stay(rank, Payload.DKV, 2 * step)
                elif rank != before:
                    grads = journal.send(step - 1, Moment.AFTER, block, grads, False, rank)
                for stay in (kv, grads):
                    if stay is not None:
                        stay.until = 2 * step + 1
                journal.steps.append((rank, step, int(stage), block, kv, grads, fresh))
                before = rank
            if grads is not None:
                last = visits[-1][1]
                if before != owner:
                    grads = journal.send(last, Moment.AFTER, block, grads, False, owner)
                journal.homes.append((owner, last + (before != owner), block, grads))
        return journal

    @cached_property
    def _homes(self) -> list[tuple[int, int, int, _Stay]]:
        """Rank, step, block and slot of gradients that come home: one in a step."""
        found, free = [], dict.fromkeys(self.owners.tolist(), 0)
        for rank, first, block, stay in sorted(self._journal.homes, key=lambda home: home[1:3]):
            step = max(first, free[rank])
            free[rank], stay.until = step + 1, 2 * step + 1
            found.append((rank, step, block, stay))
        return found

    @cached_property
    def _numbered(self) -> _Journal:
        """The journal with a slot for every stay: the first that is free on its rank."""
        assert self._homes is not None  # they decide how long gradients stay
        free: dict[tuple[int, Payload], list[int]] = {}
        for stay in sorted(self._journal.stays, key=lambda stay: (stay.since, stay.until)):
            slots = free.setdefault((stay.rank, stay.payload), [])
            stay.slot = next((i for i, until in enumerate(slots) if until <= stay.since), len(slots))
            slots[stay.slot : stay.slot + 1] = [stay.until]
        return self._journal

    def _legs(self, ring_rank: int, payload: Payload) -> Legs:
        """One rank's pass: with messages up to those that carry `payload`."""
        journal, backward = self._numbered, payload == Payload.DKV
        last = [int(self.times.max(initial=0)), *(step for _, step, _, _ in self._homes if backward)]
        steps = np.tile(_IDLE, (max(last) + 1, 1))
        for rank, step, stage, block, kv, grads, fresh in journal.steps:
            if rank == ring_rank:
                steps[step, StepColumn.SOURCE], steps[step, StepColumn.READER] = block, stage
                steps[step, StepColumn.SLOT] = OWN if kv is None else kv.slot
                if backward:
                    steps[step, StepColumn.GRAD_SLOT], steps[step, StepColumn.GRAD_FRESH] = grads.slot, fresh
        for rank, step, block, stay in self._homes if backward else ():
            if rank == ring_rank:
                steps[step, StepColumn.HOME_SLOT], steps[step, StepColumn.HOME] = stay.slot, block
        rows = [row for row in self._message_rows(journal, ring_rank) if row[MessageColumn.PAYLOAD] <= payload]
        return legs(steps, [np.array(rows, np.int64).reshape(-1, len(MessageColumn))])

    def _message_rows(self, journal: _Journal, ring_rank: int) -> Iterator[list[int]]:
        for step, moment, payload, block, origin, packed, arrival in journal.messages:
            what = [block, 0, int(self.tokens[block]), 0, -1]
            if origin.rank == ring_rank:
                slot = OWN - origin.slot if packed else origin.slot
                yield [step, moment, Action.SEND, payload, arrival.rank, *what, slot, step + 1]
            if arrival.rank == ring_rank:
                yield [step, moment, Action.RECEIVE, payload, origin.rank, *what, arrival.slot, step + 1]


_IDLE = np.zeros(len(StepColumn), np.int64)
_IDLE[[StepColumn.SLOT, StepColumn.GRAD_SLOT]] = OWN
_IDLE[[StepColumn.HOME_SLOT, StepColumn.HOME, StepColumn.READER]] = NONE
