"""The numbers behind a picture of time: what each rank does when, as the planner predicts it and as a run's step log
measured it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np

from ringspun.core.passes import Pass
from ringspun.errors import DataError
from ringspun.pictures.figures.base import MOST_CELLS, Figure
from ringspun.pictures.scene import Scene, edges
from ringspun.planner.hardware import Cluster
from ringspun.planner.rates import attention_rate
from ringspun.planner.ring import Place, Work, head_pairs, sent_seconds
from ringspun.planner.simulate import Timeline, simulate_passes
from ringspun.steplog.timeline import Member, Merged, State, partner
from ringspun.steplog.timeline import Span as Spell

PASSES = ("forward", "backward")
IN_STEP = "predicted as if all ranks waited for each other at every step"
_STATES = {State.BUSY: "compute", State.WAITING: "wait", State.TOGETHER: "wait"}


class Span(NamedTuple):
    """A rank from when until when (seconds after the beginning): `what` is "compute" or "wait"; `direction` a place in
    `PASSES`; `step` the step whose tiles are computed, or that waits; -1: before the first."""

    ring_rank: int
    direction: int
    step: int
    what: str
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """A message on its way; `step` posted it, `source` is its block. Measured ones begin when both ends have posted
    them and end when one end has seen it through, which may be later than it was."""

    sender: int
    receiver: int
    direction: int
    step: int
    payload: int
    source: int
    n_bytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Run:
    """One forward and one backward pass, the second right after the first.

    Args:
        name: "predicted" or "measured". seconds: of each pass. spans: rank by rank, in order, disjoint. transfers: in
            order of their beginning.
    """

    name: str
    seconds: tuple[float, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]

    @property
    def total_s(self) -> float:
        """Of all passes."""
        return sum(self.seconds)

    def spent_s(self, ring_rank: int, what: str) -> float:
        """How long a rank computed, or waited."""
        return sum(s.end_s - s.start_s for s in self.spans if s.ring_rank == ring_rank and s.what == what)


@dataclass(frozen=True)
class TimelineFigure(Figure):
    """Runs on one axis.

    Args:
        ranks: that are drawn.
    """

    name: ClassVar[str] = "timeline"
    ring_size: int
    ranks: tuple[int, ...]
    runs: tuple[Run, ...]


def of(
    scene: Scene | None = None, work: Work | None = None, place: Place | None = None, *, log: Merged | None = None,
    call: int | None = None,
) -> TimelineFigure:  # fmt: skip
    """The predicted run of a scene, the measured one of a log, or both.

    Args:
        work, place: what the ranks compute with and lie at; needed with a scene. call: number of the measured forward
            call; default the last that all ranks have told of to its end.
    Raises:
        DataError: the log holds no such call, or is of another ring than the scene.
    """
    runs: list[Run] = []
    words: list[str] = []
    notes: tuple[str, ...] = ()
    size, ranks = 0, tuple[int, ...]()
    if scene is not None and work is not None and place is not None:
        size, ranks = scene.ring_size, scene.ranks
        runs.append(predicted(scene, work, place, in_step=not scene.all_ranks))
        words.append(scene.words)
        notes += scene.notes
        if not scene.all_ranks:
            notes += (IN_STEP,)
    if log is not None:
        if scene is not None and size != log.size:
            raise DataError(f"log must be of a ring of {size} ranks, as is asked for; got one of {log.size}.")
        size, ranks = log.size, tuple(sorted(log.members))
        number = _call(log, call)
        runs.append(measured(log, number))
        words.append(f"call {number} of ring {log.name}, as measured")
        notes += () if log.one_clock else ("measured by the wall clocks of several machines, which differ",)
        if log.absent:
            notes += (f"no log of ring ranks {', '.join(map(str, log.absent))}",)
    return TimelineFigure("; ".join(words), notes, size, ranks, tuple(runs))


def on(scene: Scene, cluster: Cluster) -> tuple[Work, Place]:
    """What the ranks of a scene compute with and lie at, on neighbouring devices of a cluster."""
    rows = max(1.0, scene.sides.queries.seq_len / scene.ring_size)
    rate = attention_rate(cluster.device, scene.wire.heads * scene.wire.batch, rows)
    return Work(scene.wire, rate), Place(cluster.near, cluster.far, cluster.node, cluster.apart)


def predicted(scene: Scene, work: Work, place: Place, *, in_step: bool) -> Run:
    """A forward and a backward pass of a scene.

    Args:
        in_step: all ranks wait for each other at every step, which some of them tell of too; else message by message,
            of all ranks.
    """
    runs = []
    for direction in range(len(PASSES)):
        passes, back = scene.passes(backward=direction == 1), direction == 1
        if not in_step:
            runs.append(_simulated(simulate_passes(passes, work, place, backward=back, speeds=scene.speeds), direction))
        else:
            runs.append(_in_step(scene, passes, work, place, direction))
    return _joined("predicted", runs)


def _simulated(found: Timeline, direction: int) -> Run:
    spans = tuple(
        Span(s.ring_rank, direction, s.step, "compute" if s.computes else "wait", s.start_s, s.end_s)
        for s in found.spans
    )
    transfers = sorted(
        (Transfer(t.sender, t.receiver, direction, *t[2:]) for t in found.transfers), key=lambda t: t.start_s
    )
    return Run("", (found.total,), spans, tuple(transfers))


def _in_step(scene: Scene, passes: list[Pass], work: Work, place: Place, direction: int) -> Run:
    """All ranks wait for each other at every step, as `ringspun.planner.ring.lap` has it; several steps a span."""
    compute = np.stack([work.seconds(head_pairs(one, work.wire), backward=direction == 1) for one in passes])
    if scene.speeds is not None:
        compute = compute / np.array(scene.speeds)[:, None]
    sent = np.stack([sent_seconds(one, r, work.wire, place) for one, r in zip(passes, scene.ranks, strict=True)])
    columns = edges(compute.shape[1], MOST_CELLS)
    lasting = np.add.reduceat(np.maximum(compute.max(0), sent.max(0)), columns[:-1])
    busy = np.add.reduceat(compute, columns[:-1], axis=1)
    starts = np.append(0, np.cumsum(lasting))
    spans = []
    for rank, row in zip(scene.ranks, busy, strict=True):
        for step, start, end, time in zip(columns.tolist(), starts.tolist(), starts[1:].tolist(), row, strict=False):
            middle = min(start + float(time), end)
            spans += [Span(rank, direction, step, "compute", start, middle)] if middle > start else []
            spans += [Span(rank, direction, step, "wait", middle, end)] if end > middle else []
    return Run("", (float(starts[-1]),), tuple(spans), ())


def measured(log: Merged, call: int) -> Run:
    """A forward call of a log and its backward call, the last if there were several."""
    runs = [_measured(log, call, 0, 0)]
    backward = [s.call for m in log.members.values() for s in m.spans if s.phase == call + 1]
    if backward:
        runs.append(_measured(log, max(backward), call + 1, 1))
    return _joined("measured", runs)


def _measured(log: Merged, call: int, phase: int, direction: int) -> Run:
    spells = {
        r: [(a, b) for a, b in _spells(m) if (a.call, a.phase) == (call, phase) and a.state in _STATES]
        for r, m in log.members.items()
    }
    start = min(a.start for found in spells.values() for a, _ in found)
    end = max(b for found in spells.values() for _, b in found)
    spans = tuple(
        Span(r, direction, a.step, _STATES[a.state], (a.start - start) / 1e9, (b - start) / 1e9)
        for r, found in spells.items()
        for a, b in found
        if b > a.start
    )
    return Run("", ((end - start) / 1e9,), spans, tuple(_transfers(log, call, phase, start)))


def _spells(member: Member) -> Iterator[tuple[Spell, int]]:
    """Each span of a log and its end."""
    for span, following in pairwise(member.spans):
        yield span, following.start
    if member.spans:
        yield member.spans[-1], max(member.end, member.spans[-1].start)


def _transfers(log: Merged, call: int, phase: int, start: int) -> Iterator[Transfer]:
    found, direction = [], int(phase > 0)
    for receiver, member in log.members.items():
        for message, landed in member.landed.items():
            number, of_phase, payload, step, source, _ = message.key
            peer = log.members.get(message.peer)
            if message.sends or (number, of_phase) != (call, phase) or peer is None:
                continue
            there = partner(message, receiver)
            begins = max(member.posted[message], peer.posted.get(there, 0))
            ends = max(begins, min(landed, peer.landed.get(there, landed)))
            times = ((begins - start) / 1e9, (ends - start) / 1e9)
            what = (step, int(payload), source, member.lengths[message])
            found.append(Transfer(message.peer, receiver, direction, *what, *times))
    return iter(sorted(found, key=lambda t: t.start_s))


def _call(log: Merged, call: int | None) -> int:
    """The forward call that is drawn.

    Raises:
        DataError: there is none.
    """
    whole = set.intersection(*(_whole_calls(m) for m in log.members.values()))
    if call is None and whole:
        return max(whole)
    if call is None or call not in whole:
        told = ", ".join(map(str, sorted(whole)[-8:])) or "none"
        raise DataError(
            f"call must be a forward call that all ranks' logs hold to its end; got {call}. They hold {told}."
        )
    return call


def _whole_calls(member: Member) -> set[int]:
    """Forward calls of which a log holds all, and all of their backward call if it holds any of that."""
    seen = [(s.call, s.phase) for s in member.spans if s.state in _STATES and s.phase >= 0]
    cut = {member.oldest[0]} if member.oldest is not None else set()
    if member.spans[-1].state != State.OUTSIDE:
        cut.add(member.spans[-1].call)
    broken = {phase - 1 for call, phase in seen if call in cut and phase > 0}
    return {call for call, phase in seen if phase == 0} - cut - broken


def _joined(name: str, runs: list[Run]) -> Run:
    """Passes one after the other."""
    spans: list[Span] = []
    transfers: list[Transfer] = []
    before = 0.0
    for run in runs:
        spans += [s._replace(start_s=s.start_s + before, end_s=s.end_s + before) for s in run.spans]
        transfers += [t._replace(start_s=t.start_s + before, end_s=t.end_s + before) for t in run.transfers]
        before += run.total_s
    spans.sort(key=lambda s: (s.ring_rank, s.start_s))
    return replace(
        runs[0], name=name, seconds=tuple(r.total_s for r in runs), spans=tuple(spans), transfers=tuple(transfers)
    )
