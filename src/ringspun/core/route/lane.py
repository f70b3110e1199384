"""A lane: blocks relayed from rank to rank in one direction, each as far as it is needed, gradients behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringspun.core.route.base import Rows
from ringspun.core.route.diary import Diary, Stay
from ringspun.core.wire import Payload


@dataclass(frozen=True, eq=False)
class Lane:
    """One block of every rank on its way round a circle of ranks. At hop h the rank at place p has that of place p - h.

    Args:
        circle: the ranks, in the direction of travel. block: the number of each place's block. owner: its rank, where
            its gradients go. first, last: hop at which a rank of the circle other than that first and last computes
            with it (first > last: none does). at: the step of a hop.
    """

    circle: Rows
    block: Rows
    owner: Rows
    first: Rows
    last: Rows
    at: Callable[[int], int]

    def write(self, diary: Diary, place: int, *, backward: bool, entered: Stay | None = None) -> Stay | None:
        """What the rank at `place` does.

        Args:
            entered: the block of hop 0, where it came from elsewhere; default: the rank's own rows.
        Returns:
            where that block lies once it was sent on.
        """
        begun, kv, grads = self._hop(diary, place, 0, entered, None, backward=backward)
        for hop in range(1, int(self.last.max()) + 1):
            _, kv, grads = self._hop(diary, place, hop, kv, grads, backward=backward)
        return begun

    def times(self) -> tuple[Rows, Rows]:
        """How often the block of each place is sent, and how often its gradients are."""
        return np.maximum(self.last, 0), np.maximum(self.last - self.first + 1, 0)

    def bring_home(self, diary: Diary, place: int) -> None:
        """What was gathered for the block of the rank at `place`, in this circle, comes home."""
        if self.first[place] <= self.last[place]:
            last = int(self.last[place])
            farthest = int(self.circle[(place + last) % len(self.circle)])
            bring_home(diary, int(self.block[place]), farthest, self.at(last))

    def _hop(
        self, diary: Diary, place: int, hop: int, kv: Stay | None, grads: Stay | None, *, backward: bool
    ) -> tuple[Stay | None, Stay | None, Stay | None]:
        """One hop: where its block lies then; the block of the next, and gradients that come with it."""
        size = len(self.circle)
        step, then, whose = self.at(hop), self.at(hop + 1), (place - hop) % size
        after, before = (int(self.circle[(place + d) % size]) for d in (1, -1))
        block, first, last = (int(x[whose]) for x in (self.block, self.first, self.last))
        sent = diary.send(kv, Payload.KV, block, after, step, then) if hop < last else kv
        if kv is not None:
            diary.compute(step, block, kv)
        if backward and kv is not None and first <= hop:
            held = diary.gather(step, block, grads)
            if hop < last:
                diary.send(held, Payload.DKV, block, after, step, then)
            else:
                diary.send(held, Payload.DKV, block, int(self.owner[whose]), step, step + 1)
        block, first, last = (int(x[whose - 1]) for x in (self.block, self.first, self.last))
        comes = hop + 1 <= last
        kv = diary.receive(Payload.KV, block, before, step, then) if comes else None
        follow = backward and comes and first <= hop
        return sent, kv, diary.receive(Payload.DKV, block, before, step, then) if follow else None


def bring_home(diary: Diary, block: int, peer: int, step: int) -> None:
    """The owner of a block gets what was gathered for it, sent after the tiles of a step, and adds it in the next."""
    diary.home(step + 1, block, diary.receive(Payload.DKV, block, peer, step, step + 1))
