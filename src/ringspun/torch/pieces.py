"""Pieces: into how many the shards of a context are cut, chosen anew as calls are measured (`ringspun.core.pace`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch

from ringspun.core.pace import Choice, Pace, of_ring, typical
from ringspun.core.partition import Sides
from ringspun.core.route import Ring, Route
from ringspun.core.schedule import Schedule
from ringspun.steplog.meter import Meter
from ringspun.torch.drivers import Driver

CALLS = 8
"""Forward calls, at least, that a choice is made by."""
TOLD = "as told"


class Pieces:
    """What `ContextParallel(block_size="auto")` chooses.

    Args:
        driver: whose ranks choose together. Where it tells them no time, as a loopback, shards stay whole.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._measured: list[Measured] = []
        self.choice = Choice()
        self._whys = {1: self.choice.why}

    def route(self, sides: Sides) -> Ring:
        """The ring for a plan made now."""
        return self._ring(self.choice.pieces, sides)

    @staticmethod
    def _ring(pieces: int, sides: Sides) -> Ring:
        longest = int(sides.keys.tokens.max(initial=0))
        return Ring() if pieces == 1 else Ring(max(1, -(-longest // pieces)))

    def why(self, route: Route, sides: Sides) -> str:
        """Why a plan with that route was made, by the last choice that called for it; "as told" where none did."""
        return next((why for n, why in self._whys.items() if self._ring(n, sides) == route), TOLD)

    def meters(self, sides: Sides, schedules: Sequence[Schedule]) -> list[Meter]:
        """What measures the calls of a plan made now, a meter per rank; none: they tell nothing of the choice."""
        hops, pieces = hops_of(schedules[0]), self.choice.pieces
        if not hops or schedules[0].route != str(self.route(sides)):
            return []
        calls = Measured([[] for _ in schedules])

        def heard(place: int, pace: Pace) -> None:
            if pieces == self.choice.pieces:  # else it is a plan made before, which goes on as it was
                calls.of_ranks[place].append(pace)
                self._measured += [] if calls in self._measured else [calls]

        clocks = [self._driver.clock(s.ring_rank) for s in schedules]
        return [
            Meter(hops, int(s.forward.pairs.sum()), clock, partial(heard, place))
            for place, (s, clock) in enumerate(zip(schedules, clocks, strict=True))
            if clock is not None
        ]

    def choose(self) -> None:
        """Choose anew if enough was measured. Collective: ranks that agreed on a plan have measured the same calls."""
        measured = self._measured
        if sum(len(calls.of_ranks[0]) for calls in measured) < CALLS:
            return
        mine = [sum(map(typical, of_rank), Pace()) for of_rank in zip(*(c.of_ranks for c in measured), strict=True)]
        rows = torch.tensor([astuple(pace) for pace in mine], dtype=torch.float64)
        self.choice = self.choice.after(of_ring(self._driver.all_gather_rows(rows, [1] * self._driver.size).numpy()))
        self._whys[self.choice.pieces] = self.choice.why
        for calls in measured:
            calls.of_ranks[:] = [[] for _ in mine]
        self._measured.clear()


@dataclass(eq=False)
class Measured:
    """Forward calls of one plan since the last choice, of each rank of this process."""

    of_ranks: list[list[Pace]]


def hops_of(schedule: Schedule) -> int:
    """Hops of a ring's blocks."""
    return (len(schedule.forward) - 1) // pieces_of(schedule)


def pieces_of(schedule: Schedule) -> int:
    """Into how many pieces a ring's shards are cut."""
    return 1 if schedule.owners is None else len(schedule.owners) // schedule.ring_size - 1


def words_of_blocks(schedule: Schedule, why: str | None) -> str:
    """What of a shard travels at once, and why, if it was chosen; of whole shards that nobody chose, nothing.

    Args:
        why: what it was chosen by.
    """
    if not schedule.route.startswith("ring") or (why is None and schedule.owners is None):
        return ""
    pieces = pieces_of(schedule)
    rows = int(schedule.travelling_tokens[-pieces * schedule.ring_size :].max())
    size = f"blocks of at most {rows} tokens, {pieces} of every shard" if pieces > 1 else "blocks are whole shards"
    return f"{size}: {TOLD if why is None else why}"
