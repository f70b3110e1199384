"""The ring: blocks are relayed from neighbour to neighbour. At step t rank r holds block (r - t) mod R.

    R = 4, forward                 step 0   step 1   step 2   step 3
                          rank 0     0        3        2        1
                          rank 1     1        0        3        2        a block moves one rank down per step,
                          rank 2     2        1        0        3        while the one before it is computed
                          rank 3     3        2        1        0

A block stops at the last rank that needs it (a *cut* hop). In backward the gradients of a block gather from the first
rank that computes with it, follow it down the ring one step behind, and go straight home from the last one; the home
rank keeps its own share and adds what arrives. Backward computes its own block last: the gradients that come home are
waited for behind it, and until then nobody holds a sum of its own beside those that travel. Blocks may be smaller than
a shard (`ringspun.core.route.pieces`).

With `kept_hops` = n, forward leaves the blocks of its first n hops to backward, which sends only those of the others:

    R = 4, n = 2, rank 0's backward    step 0   step 1   step 2   step 3   step 4
                          computes              3, kept  2, kept  1        0
                          sends                          2                          and dK, dV as ever

Of the first hops, because backward waits for the very first block with nothing to compute meanwhile: that one is there.
Source: Ring Attention, arXiv 2310.01889, there with R hops and no cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core.host import is_integer
from ringspun.core.route.base import (
    KEPT,
    NONE,
    OWN,
    Action,
    BoundRoute,
    Cutting,
    Legs,
    Moment,
    Needs,
    Route,
    Rows,
    StepColumn,
    legs,
    messages,
    tally,
)
from ringspun.core.route.pieces import BoundPieces
from ringspun.core.wire import Payload
from ringspun.errors import PlanError

SLOTS = 2


@dataclass(frozen=True)
class Ring(Route):
    """Relay round the ring, hops that nobody needs left out.

    Args:
        block_size: most rows of a block (tokens); None: a rank's whole shard.
        kept_hops: of how many hops, at most, forward leaves the blocks to backward, each as many bytes as one message;
            R - 1 are all. None: of none. Keys travel in backward then, never queries.
    Raises:
        PlanError: no number of tokens, no number of hops, or both.
    """

    block_size: int | None = None
    kept_hops: int | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None and not (is_integer(self.block_size) and self.block_size >= 1):
            raise PlanError(f"block_size must be a number of tokens >= 1; got {self.block_size!r}.")
        if self.kept_hops is None:
            return
        if not (is_integer(self.kept_hops) and self.kept_hops >= 1):
            raise PlanError(f"kept_hops must be a number of hops >= 1; got {self.kept_hops!r}. None keeps no block.")
        if self.block_size is not None:
            raise PlanError(
                f"kept_hops must come with whole shards; got block_size={self.block_size!r} too. Leave one out."
            )

    @property
    def turns(self) -> bool:
        return self.kept_hops is None and super().turns

    @property
    def cutting(self) -> Cutting:
        return Cutting.SHARDS if self.block_size is None else Cutting.PIECES

    def pieces(self, longest: int) -> int:
        return 1 if self.block_size is None else max(1, -(-longest // self.block_size))

    def __str__(self) -> str:
        return "ring" if self == Ring() else super().__str__()  # what it was before it had an option

    def bind(self, needs: Needs) -> BoundRoute:
        if self.block_size is not None:
            return BoundPieces.of(needs)
        size, pairs = len(needs.tokens), needs.pairs
        hop = (pairs[:, 0] - pairs[:, 1]) % size
        travels = hop > 0
        first, last = np.full(size, size, np.int64), np.zeros(size, np.int64)
        np.minimum.at(first, pairs[travels, 1], hop[travels])
        np.maximum.at(last, pairs[travels, 1], hop[travels])
        kept = min(self.kept_hops or 0, int(last.max(initial=0)))
        return BoundRing(needs.tokens, first, last, kept)


@dataclass(frozen=True)
class BoundRing(BoundRoute):
    """A ring whose blocks go as far as they are needed.

    Args:
        tokens: rows of each rank's block. first, last: step at which a rank other than its owner first and last
            computes with each block (R and 0 where none does). kept: hops whose blocks are left to backward.
    """

    tokens: Rows
    first: Rows
    last: Rows
    kept: int = 0

    def forward(self, ring_rank: int) -> Legs:
        return legs(self._steps(ring_rank, self._hops + 1), self._blocks(ring_rank))

    def backward(self, ring_rank: int) -> Legs:
        # one step more than forward, for the gradients that come home last
        steps = self._steps(ring_rank, self._hops + 2 if self._hops else 1)
        if self._hops:
            steps[0, StepColumn.READER] = NONE
            steps[-1, [StepColumn.SOURCE, StepColumn.SLOT]] = ring_rank, OWN
        t, source = np.arange(len(steps)), steps[:, StepColumn.SOURCE]
        travels = (self.first[source] <= t) & (t <= self.last[source])
        steps[:, StepColumn.GRAD_SLOT] = np.where(travels, t % SLOTS, OWN)
        steps[:, StepColumn.GRAD_FRESH] = travels & (t == self.first[source])
        tables = [*self._blocks(ring_rank, self.kept), *self._gradients(ring_rank, t[travels], source[travels])]
        home = int(self.last[ring_rank])
        if home:
            slot = SLOTS if travels[home + 1] else (home + 1) % SLOTS  # a third where the next step's is taken
            steps[home + 1, StepColumn.HOME_SLOT] = slot
            peer = (ring_rank + home) % len(self.tokens)
            at, own = np.array([home]), np.array([ring_rank])
            tables.append(self._rows(at, Moment.AFTER, Action.RECEIVE, Payload.DKV, peer, own, slot))
        return legs(steps, tables)

    def sent(self, size: int) -> Rows:
        return tally(self.tokens, np.maximum(self.last - self.kept, 0), np.maximum(self.last - self.first + 1, 0))

    @property
    def _hops(self) -> int:
        return int(self.last.max())

    def _steps(self, ring_rank: int, count: int) -> Rows:
        t = np.arange(count)
        steps = np.empty((count, len(StepColumn)), np.int64)
        steps[:, StepColumn.SOURCE] = (ring_rank - t) % len(self.tokens)
        steps[:, StepColumn.SLOT] = self._slots(t)
        steps[:, StepColumn.GRAD_SLOT] = OWN
        steps[:, StepColumn.GRAD_FRESH] = 0
        steps[:, StepColumn.HOME_SLOT] = NONE
        steps[:, [StepColumn.HOME, StepColumn.READER]] = ring_rank
        steps[:, [StepColumn.STRIDE, StepColumn.STRIDES]] = 0, 1
        return steps

    def _rows(
        self,
        t: Rows,
        moment: Moment,
        action: Action,
        payload: int,
        peer: Rows | int,
        source: Rows,
        slot: Rows | int,
    ) -> Rows:
        return messages(t, moment, action, payload, peers=peer, sources=source, tokens=self.tokens, slots=slot)

    def _slots(self, t: Rows) -> Rows:
        """Where the block of each step lies."""
        return np.where(t == 0, OWN, np.where(t <= self.kept, KEPT - 1 + t, t % SLOTS))

    def _blocks(self, ring_rank: int, kept: int = 0) -> list[Rows]:
        """Step t sends the block it computes with to the next rank and receives the next step's from the previous; but
        for the first hops, whose blocks were `kept`. Of a kept one a copy is sent on, for it stays as it is."""
        size, t = len(self.tokens), np.arange(kept, self._hops)
        tables = []
        for action, source in (
            (Action.SEND, (ring_rank - t) % size),
            (Action.RECEIVE, (ring_rank - t - 1) % size),
        ):
            goes = t < self.last[source]
            peer = (ring_rank + (1 if action == Action.SEND else -1)) % size
            slot = self._slots(t) if action == Action.SEND else self._slots(t + 1)
            if kept and action == Action.SEND:
                slot = np.where(t == kept, OWN - t % SLOTS, slot)
            tables.append(self._rows(t[goes], Moment.BEFORE, action, Payload.KV, peer, source[goes], slot[goes]))
        return tables

    def _gradients(self, ring_rank: int, t: Rows, source: Rows) -> list[Rows]:
        """Gradients follow their block to the next rank, or from the last rank that needs it straight home."""
        size = len(self.tokens)
        peer = np.where(t < self.last[source], (ring_rank + 1) % size, source)
        sends = self._rows(t, Moment.AFTER, Action.SEND, Payload.DKV, peer, source, t % SLOTS)
        arrives = t > self.first[source]  # with the block of step t, sent while step t - 1 was ours
        at, previous = t[arrives] - 1, (ring_rank - 1) % size
        slot = t[arrives] % SLOTS
        return [
            sends,
            self._rows(at, Moment.AFTER, Action.RECEIVE, Payload.DKV, previous, source[arrives], slot),
        ]


def passing(slots: Rows) -> Rows:
    """Slots of a pass that keeps nothing, from those of one that does: the block of every hop lies where it passes."""
    return np.where(slots >= KEPT, (slots - KEPT + 1) % SLOTS, slots)
