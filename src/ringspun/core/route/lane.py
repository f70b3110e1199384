"""A lane: blocks relayed from rank to rank in one direction, each as far as it is needed, gradients behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ringspun.core.route.base import Needs, Rows, tally
from ringspun.core.route.diary import Diary, Stay
from ringspun.core.wire import Payload


@dataclass(frozen=True, eq=False)
class Lane:
    """One block of every rank on its way round a circle of ranks. At hop h the rank at place p has that of place p - h.

    Args:
        circle: the ranks, in the direction of travel. block: the number of each place's block. owner: its rank, where
            its gradients go. first, last: hop at which a rank of the circle other than that first and last computes
            with it (first > last: none does). at: the step of a hop. home: steps that gradients have to come home.
    """

    circle: Rows
    block: Rows
    owner: Rows
    first: Rows
    last: Rows
    at: Callable[[int], int]
    home: int = 1

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
            bring_home(diary, int(self.block[place]), farthest, self.at(last), self.home)

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
                diary.send(held, Payload.DKV, block, int(self.owner[whose]), step, step + self.home)
        block, first, last = (int(x[whose - 1]) for x in (self.block, self.first, self.last))
        comes = hop + 1 <= last
        kv = diary.receive(Payload.KV, block, before, step, then) if comes else None
        follow = backward and comes and first <= hop
        return sent, kv, diary.receive(Payload.DKV, block, before, step, then) if follow else None


def sent(tokens: Rows, lanes: Sequence[Lane]) -> Rows:
    """`BoundRoute.sent` of blocks that go by lanes."""
    times = np.concatenate([lane.times() for lane in lanes], axis=1)
    return tally(tokens[np.concatenate([lane.block for lane in lanes])], *times)


def bring_home(diary: Diary, block: int, peer: int, step: int, after: int = 1) -> None:
    """The owner of a block gets what was gathered for it, sent after the tiles of a step, and adds it so many later."""
    diary.home(step + after, block, diary.receive(Payload.DKV, block, peer, step, step + after))


def lane_of(needs: Needs, piece: int, pieces: int, at: Callable[[int], int], *, way: int = 1, home: int = 1) -> Lane:
    """The lane of one of the `pieces` of every rank (`Cutting.PIECES`), up (1) or down (-1) the ring."""
    assert needs.owners is not None
    size, (reader, block) = needs.size, needs.pairs.T
    circle = np.arange(size)[::way]
    travels = (block >= size) & ((block - size) % pieces == piece)
    owner = needs.owners[block[travels]]
    hop = way * (reader[travels] - owner) % size
    first, last = np.full(size, size), np.zeros(size, np.int64)
    np.minimum.at(first, owner, hop)
    np.maximum.at(last, owner, hop)
    return Lane(circle, size + pieces * circle + piece, circle, first[circle], last[circle], at, home)
