"""Bidirectional: half of every block goes up the ring, the other half down, so that both directions of a link carry
half of a ring's bytes.

    R = 4         step 0   step 1       step 2       step 3       step 4
        rank 0    own      half of 3    half of 1    half of 2    half of 2
        rank 1    own      half of 0    half of 2    half of 3    half of 3
                           from below   from above   from below   from above

A half is under way for two steps, while both halves of the hop before are computed with.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringspun.core.route.base import BoundRoute, Cutting, Needs, Route, Rows
from ringspun.core.route.diary import Diary, Written
from ringspun.core.route.lane import Lane, lane_of, sent

UP, DOWN = 1, -1


@dataclass(frozen=True)
class Bidirectional(Route):
    """Two rings, one each way, of half a block each."""

    @property
    def cutting(self) -> Cutting:
        return Cutting.PIECES

    def pieces(self, longest: int) -> int:
        return 2

    def bind(self, needs: Needs) -> BoundRoute:
        up, down = lane_of(needs, 0, 2, _step_up, way=UP), lane_of(needs, 1, 2, _step_down, way=DOWN)
        return BoundBidirectional(needs.tokens, up, down)


def _step_up(hop: int) -> int:
    return max(0, 2 * hop - 1)


def _step_down(hop: int) -> int:
    return 2 * hop


@dataclass(frozen=True, eq=False)
class BoundBidirectional(Written):
    """Args:
    tokens: rows of each block. up, down: the lanes.
    """

    tokens: Rows
    up: Lane
    down: Lane

    @property
    def count(self) -> int:
        return 1 + max(lane.at(int(lane.last.max())) for lane in (self.up, self.down))

    def sent(self, size: int) -> Rows:
        return sent(self.tokens, (self.up, self.down))

    def write(self, ring_rank: int, *, backward: bool) -> Diary:
        diary = Diary(ring_rank, self.tokens)
        diary.compute_own(self.own_step(backward=backward))
        for lane, place in ((self.up, ring_rank), (self.down, len(self.down.circle) - 1 - ring_rank)):
            lane.write(diary, place, backward=backward)
            if backward:
                lane.bring_home(diary, place)
        return diary
