"""The pace of a ring: into how many pieces its shards are best cut (`ringspun.core.route.pieces`), from how long its
calls computed, waited, and had messages under way.

On a link that is slower than compute, whole shards take `link + last`: all messages, and then the tiles of the last
block. n pieces take `link + last / n`, but no less than the tiles of all blocks, and the work around a step n times as
often. Where the link is faster, pieces cost that work, gain nothing, and hide how fast it is: then whole shards are
looked at again from time to time. A change that turns out to be no faster is taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
from numpy.typing import NDArray

PIECES = (1, 2, 4, 8)
"""What is chosen from: 8 leave an eighth of what there is to gain."""
GAIN = 0.05
"""Part of the time that a change has to promise."""
ALIKE = 0.02
"""Times that differ by less are the same; of such, fewest pieces are best."""
HIDDEN = 0.05
"""Part of the time that a ring may wait which hides its messages."""
PATIENCE, MOST_PATIENCE = 4, 64
"""Measurements before whole shards are looked at again, or what was no faster tried again; at first, and after many
failures."""


@dataclass(frozen=True)
class Pace:
    """What some forward calls took together, on a rank or, of the slowest, on a ring.

    Args:
        calls: their number. hops: by which blocks travelled. steps: of all of them. pairs: of query and key.
        compute_s, wait_s: in tiles; for messages, beyond what the busiest rank's tiles explain (on a rank: at all).
        link_s: from the first message posted to the last that was there. span_s: all (seconds).
    """

    calls: float = 0.0
    hops: float = 0.0
    steps: float = 0.0
    pairs: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    link_s: float = 0.0
    span_s: float = 0.0

    def __add__(self, other: Pace) -> Pace:
        return Pace(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> Pace:
        return Pace(*(times * a for a in astuple(self)))

    @property
    def hidden(self) -> bool:
        """Whether nobody waited for a message, so that nothing tells how fast it was."""
        return self.wait_s < HIDDEN * self.span_s

    def seconds(self, pieces: int) -> float:
        """What the same calls would have taken in so many pieces, by what they took."""
        last = self.compute_s * self.calls / (self.hops + self.calls)
        around = max(0.0, self.span_s - self.compute_s - self.wait_s) / self.steps
        return max(self.compute_s, self.link_s + last / pieces) + around * self.hops * pieces

    @property
    def best(self) -> int:
        """The fewest pieces among those that take least."""
        times = {n: self.seconds(n) for n in PIECES}
        return next(n for n in PIECES if times[n] <= (1 + ALIKE) * min(times.values()))

    def __str__(self) -> str:
        hop, block = 1e3 * self.link_s / self.hops, 1e3 * self.compute_s / (self.hops + self.calls)
        return f"a shard's keys took {hop:.3g} ms to come and {block:.3g} ms to compute with"


def typical(calls: Sequence[Pace]) -> Pace:
    """Calls of one plan on one rank, each taken for the one in their middle: first calls, and those that something else
    held up, are no measure."""
    return sorted(calls, key=lambda pace: pace.span_s)[len(calls) // 2] * len(calls)


def of_ring(ranks: NDArray[np.float64]) -> Pace:
    """The pace of a ring whose ranks measured the same calls, a row each (`Pace`, in order)."""
    calls, hops, steps, pairs, compute, wait, link, span = ranks.T
    busiest = compute.max()
    beyond = (compute + wait).max() - busiest
    times = busiest, beyond, link.max(), span.max()
    return Pace(*map(float, (calls[0], hops[0], steps[0], pairs.sum(), *times)))


@dataclass(frozen=True)
class Choice:
    """A number of pieces, and what it was chosen by. Made anew from every measurement; ranks that measured together
    choose alike.

    Args:
        pieces: of every shard. why: in words.
        before: the number of pieces before the last change, and seconds per pair then; None: it has been judged.
        look, more: measurements until whole shards are looked at, and more pieces may be tried. failed: in a row.
    """

    pieces: int = 1
    why: str = "nothing was measured yet"
    before: tuple[int, float] | None = None
    look: int = 0
    more: int = 0
    failed: int = 0

    def after(self, pace: Pace) -> Choice:
        """The next choice, when calls with this one took so long."""
        now = replace(self, before=None, look=max(0, self.look - 1), more=max(0, self.more - 1))
        if self.before is None:
            return now._go_on(pace)
        pieces, then = self.before
        here = pace.span_s / pace.pairs
        if self.pieces > pieces and here > (1 - ALIKE) * then:
            return now._again(pieces, f"{self.pieces} pieces were no faster than {pieces}")
        if self.pieces < pieces and here > (1 + ALIKE) * then:
            best = max(pace.best, 2)
            return replace(now._again(best, str(pace)), before=(self.pieces, here), more=0)
        return (replace(now, failed=0) if self.pieces < pieces else now)._go_on(pace)

    def _go_on(self, pace: Pace) -> Choice:
        here, best = pace.span_s / pace.pairs, pace.best
        if self.pieces > 1 and pace.hidden:
            if self.look:
                return self
            return replace(self, pieces=1, why="looks how whole shards do", before=(self.pieces, here))
        if pace.seconds(best) > (1 - GAIN) * pace.seconds(self.pieces) or (best > self.pieces and self.more):
            return replace(self, why=str(pace))
        return replace(self, pieces=best, why=str(pace), before=(self.pieces, here), look=PATIENCE)

    def _again(self, pieces: int, why: str) -> Choice:
        """Back, for longer after every failure."""
        rest = min(MOST_PATIENCE, PATIENCE * 2**self.failed)
        return replace(self, pieces=pieces, why=why, look=rest, more=rest, failed=self.failed + 1)
