"""Slow links between nodes, on one machine: what leaves a node waits for its turn on a link that its ranks share.

SlowLinks(Gloo(group), node=4, bytes_per_s=1e8, folder=shared)    # alike on every rank; ranks 0-3 are a node
"""

from __future__ import annotations

import fcntl
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringspun.core.route.base import Action
from ringspun.testing.around import Around
from ringspun.torch.drivers import Driver, Transfer
from ringspun.torch.drivers.base import RankProgram, T


class SlowLinks(Around):
    """A driver of one rank per process whose messages between nodes take as long as a shared link would.

    The message itself moves at once; both ends then wait until the link would have had it. Ranks compute meanwhile.

    Args:
        driver: moves the messages. node: ranks of a node. bytes_per_s: of the link that leaves a node, one way; may be
            changed between calls.
        folder: an empty one that all ranks see; the time until which each link is taken is kept there.
    """

    def __init__(self, driver: Driver, *, node: int, bytes_per_s: float, folder: Path) -> None:
        super().__init__(driver)
        if len(self.ring_ranks) != 1:  # others could not move while one sleeps
            raise ValueError(f"driver must play one rank; got {len(self.ring_ranks)}.")
        self.bytes_per_s = bytes_per_s
        self._node, self._folder = node, folder
        self._received: Counter[int] = Counter()

    def changed(self, rank: int, program: RankProgram[T]) -> RankProgram[T]:
        under_way: dict[int, list[Callable[[], float]]] = {}
        answer: Any = None
        while True:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if isinstance(asked, list):
                times = [self._time(rank, t) for t in asked if t.peer // self._node != rank // self._node]
                answer = yield asked
                under_way[id(answer)] = times
            else:
                answer = yield asked
                for arrival in under_way.pop(id(asked), []):
                    time.sleep(max(0.0, arrival() - time.monotonic()))

    def _time(self, rank: int, message: Transfer) -> Callable[[], float]:
        """When a message is through; of one that comes, known when it has."""
        if message.action == Action.SEND:
            through = self._book(rank, message.peer, message.buffer.numel())
            return lambda: through
        number = self._received[message.peer]
        self._received[message.peer] += 1
        return lambda: float((self._folder / f"{message.peer}-{rank}").read_text().split()[number])

    def _book(self, sender: int, receiver: int, n_bytes: int) -> float:
        """Take the sender's link for one message; when it is through."""
        with (self._folder / f"node-{sender // self._node}").open("a+") as link:
            fcntl.flock(link, fcntl.LOCK_EX)
            link.seek(0)
            free = float(link.read() or 0.0)
            through = max(free, time.monotonic()) + n_bytes / self.bytes_per_s
            link.truncate(0)
            link.write(repr(through))
        with (self._folder / f"{sender}-{receiver}").open("a") as times:
            times.write(f"{through!r}\n")
        return through
