"""A ring, simulated message by message: ranks of mixed speeds, slow links, stragglers.

Every rank runs the steps of its own schedule as the executor does (`ringspun.core.route.base`): it waits for what is
due, posts, computes, waits for and posts gradients. A message moves when both ends have posted it and the sender's
link is free; a rank has one link into its node and one out of it, and both move at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspun.core.accounting import bytes_of
from ringspun.core.passes import Pass
from ringspun.core.route.base import Action, MessageColumn, Moment, carried
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format
from ringspun.errors import ConfigError
from ringspun.planner.ring import Place, Work, head_pairs

Edge = tuple[int, int]
_OUT, _IN = -2, -1
"""In place of a peer: any in another node, any in the same."""


class Span(NamedTuple):
    """What a rank did from when until when (seconds): whether it computed the tiles of a step, or waited for messages
    that are due at it."""

    ring_rank: int
    step: int
    computes: bool
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """A message on its way (seconds); `step` posted it."""

    sender: int
    receiver: int
    step: int
    payload: int
    source: int
    n_bytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What each rank did, in seconds ``[R]``.

    Args:
        ends: when it was done. computed: how long it computed. waited: how long it waited for messages.
        spans: of all ranks, rank by rank, in order; none that lasts no time. transfers: of all links.
    """

    ends: NDArray[np.float64]
    computed: NDArray[np.float64]
    waited: NDArray[np.float64]
    spans: tuple[Span, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    @property
    def total(self) -> float:
        """When the last rank was done."""
        return float(self.ends.max())

    @property
    def straggler(self) -> int:
        """The rank that waited least: for it the others wait."""
        return int(self.waited.argmin())


def simulate(
    ranks: Sequence[Schedule],
    work: Work,
    place: Place,
    *,
    backward: bool = False,
    speeds: Sequence[float] | None = None,
    slow: Mapping[Edge, float] | None = None,
) -> Timeline:
    """One pass.

    Args:
        ranks: schedules of all ranks. speeds: of each rank's compute, 1 as `work` says. slow: links (from, to) that
            take so many times as long.
    Raises:
        ConfigError: schedules of some ranks alone, another number of speeds, or one that is none.
    """
    size = ranks[0].ring_size
    if [s.ring_rank for s in ranks] != list(range(size)):
        raise ConfigError(f"ranks must be the schedules of all {size} ranks in order; got {len(ranks)} of them.")
    passes = [s.backward if backward else s.forward for s in ranks]
    return simulate_passes(passes, work, place, backward=backward, speeds=speeds, slow=slow)


def simulate_passes(
    passes: Sequence[Pass],
    work: Work,
    place: Place,
    *,
    backward: bool,
    speeds: Sequence[float] | None = None,
    slow: Mapping[Edge, float] | None = None,
) -> Timeline:
    """The same of the passes of all ranks, in order: of a backward pass in which queries travel too."""
    size = len(passes)
    pace = np.ones(size) if speeds is None else np.array(speeds, np.float64)
    if pace.shape != (size,) or not (np.isfinite(pace).all() and (pace > 0).all()):
        raise ConfigError(f"speeds must be one positive number for each of {size} ranks; got {speeds}.")
    network = _Network(work, place, slow or {})
    programs = [
        _Rank(ring_rank, one, work, network, float(pace[ring_rank]), backward) for ring_rank, one in enumerate(passes)
    ]
    running = [(rank, rank.run()) for rank in programs]
    while running:
        before = network.events
        running = [(rank, flow) for rank, flow in running if next(flow, None) is not None]
        if running and network.events == before:
            raise ConfigError("ranks must not wait for each other in a circle; this schedule makes them.")
    spans = tuple(span for rank in programs for span in rank.spans)
    ends, computed, waited = (np.array([getattr(r, name) for r in programs]) for name in ("now", "computed", "waited"))
    return Timeline(ends, computed, waited, spans, tuple(network.transfers))


class Posted(NamedTuple):
    """A message as a step posts it, see `MessageColumn`; and its bytes."""

    step: int
    moment: int
    action: int
    payload: int
    peer: int
    source: int
    due: int
    n_bytes: int


_TOLD = [getattr(MessageColumn, name.upper()) for name in Posted._fields[:-1]]


def _posts(messages: NDArray[np.int64], wire: Format) -> dict[tuple[int, int], list[Posted]]:
    """Messages by step and moment."""
    found: dict[tuple[int, int], list[Posted]] = defaultdict(list)
    for row in np.column_stack([messages[:, _TOLD], bytes_of(messages, wire)]).tolist():
        message = Posted(*row)
        found[message.step, message.moment].append(message)
    return found


class _Network:
    """Messages by (sender, receiver), matched in the order in which both post them."""

    def __init__(self, work: Work, place: Place, slow: Mapping[Edge, float]) -> None:
        self._work, self._place, self._slow = work, place, slow
        self._posted: dict[tuple[Edge, Action], list[float]] = defaultdict(list)
        self._lengths: dict[Edge, list[float]] = defaultdict(list)
        self._messages: dict[Edge, list[tuple[int, int, int, int]]] = defaultdict(list)
        self._ends: dict[Edge, list[float]] = defaultdict(list)
        self._queue: dict[Edge, list[tuple[Edge, int]]] = defaultdict(list)
        self._free: dict[Edge, float] = defaultdict(float)
        self.events = 0
        self.transfers: list[Transfer] = []

    def post(self, edge: Edge, action: Action, now: float, message: Posted) -> tuple[Edge, int]:
        """Say that one end is ready; a name for the message."""
        times = self._posted[edge, action]
        times.append(now)
        self.events += 1
        number = len(times) - 1
        if action == Action.SEND:
            link = self._place.far if self._place.crosses(*edge) else self._place.near
            self._lengths[edge].append(link.seconds(message.n_bytes) * self._slow.get(edge, 1.0))
            self._messages[edge].append((message.step, message.payload, message.source, message.n_bytes))
            self._queue[self._way(edge)].append((edge, number))
        return edge, number

    def end(self, message: tuple[Edge, int]) -> float | None:
        """When a message is through, if that can be said yet."""
        edge, number = message
        way = self._way(edge)
        while number >= len(self._ends[edge]):
            if not self._advance(way):
                return None
        return self._ends[edge][number]

    def _way(self, edge: Edge) -> Edge:
        """What stands for the link that a message takes."""
        if self._place.crosses(*edge):
            return edge[0], _OUT
        return edge if self._place.apart else (edge[0], _IN)

    def _advance(self, way: Edge) -> bool:
        """Move the next message of a link, if both of its ends are ready."""
        if not self._queue[way]:
            return False
        edge, number = self._queue[way][0]
        comes = self._posted[edge, Action.RECEIVE]
        if number >= len(comes):
            return False
        start = max(self._posted[edge, Action.SEND][number], comes[number], self._free[way])
        self._free[way] = start + self._lengths[edge][number]
        self._ends[edge].append(self._free[way])
        self.transfers.append(Transfer(*edge, *self._messages[edge][number], start, self._free[way]))
        self._queue[way].pop(0)
        self.events += 1
        return True


class _Rank:
    """One rank and its clock."""

    def __init__(self, me: int, one: Pass, work: Work, network: _Network, speed: float, backward: bool) -> None:
        self._me, self._pass, self._network = me, one, network
        self._posts = _posts(carried(one.messages, work.wire.kv_heads), work.wire)
        self._seconds = work.seconds(head_pairs(one, work.wire), backward=backward) / speed
        self._open: dict[tuple[int, Moment], list[tuple[Edge, int]]] = defaultdict(list)
        self.now = self.computed = self.waited = 0.0
        self.spans: list[Span] = []

    def run(self) -> Iterator[int]:
        """All steps; yields where a message cannot be timed yet."""
        for step in range(len(self._pass)):
            yield from self._wait(step, Moment.BEFORE)
            self._post(step, Moment.BEFORE)
            self.computed += self._seconds[step]
            self._until(self.now + float(self._seconds[step]), step, computes=True)
            yield from self._wait(step, Moment.AFTER)
            self._post(step, Moment.AFTER)
        for due, moment in sorted(self._open):
            yield from self._wait(due, moment)

    def _post(self, step: int, moment: Moment) -> None:
        for m in self._posts.get((step, moment), ()):
            edge = (self._me, m.peer) if m.action == Action.SEND else (m.peer, self._me)
            self._open[m.due, moment].append(self._network.post(edge, Action(m.action), self.now, m))

    def _wait(self, step: int, moment: Moment) -> Iterator[int]:
        for message in self._open.pop((step, moment), []):
            while (end := self._network.end(message)) is None:
                yield self._me
            self.waited += max(0.0, end - self.now)
            self._until(max(self.now, end), step, computes=False)

    def _until(self, end: float, step: int, *, computes: bool) -> None:
        if end > self.now:
            self.spans.append(Span(self._me, step, computes, self.now, end))
        self.now = end
