"""A meter: how long a call computed and waited, by the rows of its step log, as they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringspun.core.pace import Pace
from ringspun.steplog.log import What


class Meter:
    """Measures the forward calls of one plan on one rank.

    Args:
        hops: by which its blocks travel. pairs: that the rank computes. clock: the rank's. heard: is told the pace of
            each call.
    """

    def __init__(self, hops: int, pairs: int, clock: Callable[[], float], heard: Callable[[Pace], None]) -> None:
        self._hops, self._pairs, self._clock, self._heard = hops, pairs, clock, heard

    def hearing(self, note: Callable[..., None]) -> Callable[..., None]:
        """`StepLog.note` of a call that begins now, heard by this meter."""
        begun = last = landed = self._clock()
        state, steps, spent = What.CALL, 0, dict.fromkeys(What, 0.0)

        def noted(what: What, *row: Any, **named: Any) -> None:
            nonlocal last, landed, state, steps
            now = self._clock()
            spent[state] += now - last
            steps += what == What.COMPUTE
            landed = now if what == What.LANDED else landed
            last, state = now, what
            note(what, *row, **named)
            if what == What.END:
                times = spent[What.COMPUTE], spent[What.WAIT], landed - begun, now - begun
                self._heard(Pace(1, self._hops, steps, self._pairs, *times))

        return noted
