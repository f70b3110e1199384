"""Every order in which the events of a small ring can happen, one after the other.

for ring in every_order(2):                     # 2 ranks in one thread; a new order each time, until there is none
    plan = ContextParallel(ring).plan(seq_len, mask)
    assert torch.equal(plan.attention(q, k, v), right)

An event is a rank that goes on to its next wait, or a message that arrives. Orders that differ only in events that
share no rank are one order and tried once (sleep sets: Godefroid, LNCS 1032, section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from ringspun.torch.drivers.loopback import Loopback, _Rank

Event = tuple[int, ...]
"""The ranks that take part: one that advances, or sender and receiver of a message that arrives."""


class Ordered(Loopback):
    """A loopback in which messages do not arrive at once: each arrives when its turn comes, by a seed or a rule.

    Args:
        size: ranks R. choose: index of the event to happen next; default drawn. seed: of that draw.
    """

    def __init__(self, size: int, *, choose: Callable[[list[Event]], int] | None = None, seed: int = 0) -> None:
        super().__init__(size, seed=seed)
        self._choose = choose or (lambda events: self._random.randrange(len(events)))

    def _match(self, sender: int, receiver: int) -> None:
        """It arrives later."""

    def _step(self, ranks: list[_Rank]) -> bool:
        events: dict[Event, Callable[[], None]] = {(r.number,): partial(self._advance, r) for r in ranks if r.ready}
        events |= {ends: partial(self._arrive, *ends) for ends, link in self._links.items() if link.whole}
        names = sorted(events)
        if names:
            events[names[self._choose(names)]]()
        return bool(names)


def every_order(size: int, *, limit: int | None = None) -> Iterator[Ordered]:
    """A loopback for each order of events of what is done with it; what is done must be the same each time.

    Args:
        size: ranks R. limit: stop after so many; there are 9 for one forward call of 2 ranks, and very many soon.
    """
    search, count = _Search(), 0
    while limit is None or count < limit:
        yield Ordered(size, choose=search.choose)
        count += 1
        if not search.turn():
            return


@dataclass
class _Node:
    """One moment of a run: what could happen, what happens, and what need not be tried here (any more)."""

    events: list[Event]
    asleep: set[Event]
    event: Event = field(init=False)

    def __post_init__(self) -> None:
        self.event = next(iter(self.awake), self.events[0])  # where all sleep, the run repeats another one; it ends so

    @property
    def awake(self) -> list[Event]:
        return [e for e in self.events if e not in self.asleep]


class _Search:
    """Depth first over runs that start anew each time."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._depth = 0

    def choose(self, events: list[Event]) -> int:
        if self._depth == len(self._nodes):
            before = self._nodes[-1] if self._nodes else None
            # what was tried before this event and has nothing to do with it: that order is known
            asleep = {e for e in before.asleep if not set(e) & set(before.event)} if before else set()
            self._nodes.append(_Node(events, asleep))
        node = self._nodes[self._depth]
        if node.events != events:
            raise ValueError("what is done with each ring of every_order must be the same; got other events.")
        self._depth += 1
        return events.index(node.event)

    def turn(self) -> bool:
        """Go back to the last moment at which something else could happen; False where there is none left."""
        self._depth = 0
        while self._nodes:
            node = self._nodes[-1]
            node.asleep.add(node.event)
            if node.awake:
                node.event = node.awake[0]
                return True
            self._nodes.pop()
        return False
