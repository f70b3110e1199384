"""Pieces: the ring with blocks smaller than a shard. All pieces of a shard travel one behind the other, so that a rank
computes with the first while the next are under way.

    R = 2, 3 pieces    step 0     step 1     step 2     step 3
            rank 0     own        1, first   1, second  1, third
            rank 1     own        0, first   0, second  0, third
            under way  3 pieces   2 and 3    3

With whole shards the last block that comes is computed when all of it is there; here only its last piece is. A piece is
under way for as many steps as there are pieces, and its gradients after it, so at most two shards' worth of either lie
in buffers, and a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ringspun.core.route.base import Needs, Rows
from ringspun.core.route.diary import Diary, Written
from ringspun.core.route.lane import Lane, lane_of, sent


@dataclass(frozen=True, eq=False)
class BoundPieces(Written):
    """Args:
    tokens: rows of each block. lanes: one per piece.
    """

    tokens: Rows
    lanes: Sequence[Lane]

    @staticmethod
    def of(needs: Needs) -> BoundPieces:
        """For given needs, whose owners tell how many pieces there are."""
        n = len(needs.tokens) // needs.size - 1
        lanes = [lane_of(needs, piece, n, partial(_step, n, piece), home=n) for piece in range(n)]
        return BoundPieces(needs.tokens, lanes)

    @property
    def count(self) -> int:
        return 1 + max(lane.at(int(lane.last.max())) for lane in self.lanes)

    @property
    def tail(self) -> int:
        return len(self.lanes)

    def sent(self, size: int) -> Rows:
        return sent(self.tokens, self.lanes)

    def write(self, ring_rank: int, *, backward: bool) -> Diary:
        diary = Diary(ring_rank, self.tokens)
        diary.compute_own(self.own_step(backward=backward))
        for lane in self.lanes:
            lane.write(diary, ring_rank, backward=backward)
            if backward:
                lane.bring_home(diary, ring_rank)
        return diary


def _step(pieces: int, piece: int, hop: int) -> int:
    """Its own pieces a rank sends in step 0, computing with its whole shard."""
    return 1 + (hop - 1) * pieces + piece if hop else 0
