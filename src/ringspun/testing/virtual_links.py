"""A loopback whose ranks have clocks of their own: how long a ring would take on given links, to the digit.

links = VirtualLinks(4, bytes_per_s=1e9)
plan = ContextParallel(links).plan(seq_len, mask)
plan.attention(q, k, v, kernel=Sleeping(seconds_per_pair, sleep=links.spend))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ringspun.core.route.base import Action
from ringspun.testing.around import Around
from ringspun.torch.drivers import Loopback, Transfer
from ringspun.torch.drivers.base import RankProgram, T


class VirtualLinks(Around):
    """All ranks in this thread, each with a link out whose messages follow each other.

    Args:
        size: ranks R. bytes_per_s: of each link; may be changed between calls. post_s: of posting messages that are
            waited for together (seconds). seed: order in which ranks advance; times never depend on it.
    """

    def __init__(self, size: int, *, bytes_per_s: float, post_s: float = 0.0, seed: int = 0) -> None:
        super().__init__(Loopback(size, seed=seed))
        self.bytes_per_s, self._post_s = bytes_per_s, post_s
        self.now = [0.0] * size
        """The clock of each rank (seconds)."""
        self._free = [0.0] * size
        self._arrivals: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._received: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._running = 0

    def clock(self, ring_rank: int) -> Callable[[], float]:
        return lambda: self.now[ring_rank]

    def spend(self, seconds: float) -> None:
        """The rank that runs takes so long for something."""
        self.now[self._running] += seconds

    def changed(self, rank: int, program: RankProgram[T]) -> RankProgram[T]:
        under_way: dict[int, list[Callable[[], float]]] = {}
        answer: Any = None
        while True:
            self._running = rank
            try:
                asked = program.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if isinstance(asked, list):
                self.spend(self._post_s)
                times = [self._time(rank, t) for t in asked]
                answer = yield asked
                under_way[id(answer)] = times
            else:
                answer = yield asked
                self.now[rank] = max([self.now[rank], *(time() for time in under_way.pop(id(asked), []))])

    def _time(self, rank: int, message: Transfer) -> Callable[[], float]:
        """When a message is through; of one that comes, known when it has."""
        if message.action == Action.SEND:
            through = max(self._free[rank], self.now[rank]) + message.buffer.numel() / self.bytes_per_s
            self._free[rank] = through
            self._arrivals[rank, message.peer].append(through)
            return lambda: through
        ends = message.peer, rank
        number = self._received[ends]
        self._received[ends] += 1
        return lambda: self._arrivals[ends][number]
