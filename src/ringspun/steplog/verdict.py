"""Who waits for whom, and why: the root of a wait, what all waiting was for, and a page that says so.

A wait of rank r has a root, found by going from each rank to the one it waits for:

    the peer has not posted its end of the message   ->  go on with what the peer is doing
    both ends are posted                             ->  the link between them is the root: "transfer"
    in a collective                                  ->  go on with the first rank that has not come

It ends at a rank that computes, one that is between calls, one that left no dump, one that an error ended, a link, or
at a rank that was met before: a circle.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from ringspun.steplog.timeline import Member, Merged, Message, Span, State, partner

NOTABLE = 0.05
"""Share of the time inside of calls below which waiting is not worth a verdict."""


class Kind(Enum):
    """What a wait comes down to."""

    COMPUTE = "imbalance"
    LINK = "link"
    OUTSIDE = "late"
    ABSENT = "gone"
    FAILED = "failure"
    CIRCLE = "circle"


@dataclass(frozen=True)
class Root:
    """What a wait comes down to, and at which ranks: one, or the two ends of a link (sender, receiver)."""

    kind: Kind
    ranks: tuple[int, ...]


@dataclass
class Share:
    """How one rank spent the window (ns).

    Args:
        compute: its own work in calls. peer, transfer: waiting, by what it came down to. outside: between calls.
    """

    compute: float = 0.0
    peer: float = 0.0
    transfer: float = 0.0
    outside: float = 0.0


@dataclass
class Verdict:
    """What the dumps of one ring say.

    Args:
        now: just before the first of them ends (ns): the moment explained. waits: per waiting rank, for whom.
        root: what most ranks then wait for, if any waits. shares: per member. blame: waiting by root (ns).
    """

    ring: Merged
    now: int
    waits: dict[int, int | None]
    root: Root | None
    shares: dict[int, Share]
    blame: Counter[Root] = field(default_factory=Counter)

    @property
    def waited(self) -> Counter[Kind]:
        """Waiting by kind (ns)."""
        total: Counter[Kind] = Counter()
        for root, time in self.blame.items():
            total[root.kind] += time
        return total

    @property
    def cause(self) -> Root | None:
        """What most of the waiting in the whole window was for; None where little was waited."""
        inside = sum(s.compute + s.peer + s.transfer for s in self.shares.values())
        if self.blame.total() <= NOTABLE * inside:
            return None
        kind = self.waited.most_common(1)[0][0]
        return max((r for r in self.blame if r.kind == kind), key=lambda r: self.blame[r])


def judge(ring: Merged) -> Verdict:
    """Who waits for whom when the first dump ends, and what all waiting before it was for."""
    start, end = ring.window
    now = end - 1  # just before the first error, which is where the first dump ends
    waits = {r: _waits_for(ring, r, now) for r, m in ring.members.items() if _is_waiting(m.at(now))}
    roots: Counter[Root] = Counter()
    for r in waits:
        roots.update(_roots(ring, r, now).keys())
    verdict = Verdict(ring, now, waits, None, {r: Share() for r in ring.members})
    _share_out(verdict, start, end)
    verdict.root = _own_failure(ring) or (max(roots, key=lambda r: (roots[r], -min(r.ranks))) if roots else None)
    return verdict


def _own_failure(ring: Merged) -> Root | None:
    """The rank that failed by itself first: `PeerError` is only ever a consequence."""
    failed = [m for m in ring.members.values() if m.failure and not m.failure.words.startswith("PeerError")]
    return Root(Kind.FAILED, (min(failed, key=lambda m: m.end).ring_rank,)) if failed else None


def _is_waiting(span: Span) -> bool:
    return span.state in (State.WAITING, State.TOGETHER)


def _share_out(verdict: Verdict, start: int, end: int) -> None:
    """Give every moment of every rank to what it was spent on; nothing changes between two spans' starts or posts."""
    ring = verdict.ring
    moments = {start, end}
    for m in ring.members.values():
        moments.update(s.start for s in m.spans)
        moments.update(m.posted.values())
        moments.update(m.landed.values())
    cuts = sorted(t for t in moments if start <= t <= end)
    for a, b in pairwise(cuts):
        for r, member in ring.members.items():
            span, share = member.at(a), verdict.shares[r]
            if span.state == State.BUSY:
                share.compute += b - a
            elif span.state == State.OUTSIDE or span.start > a:
                share.outside += b - a
            else:
                for root, part in _roots(ring, r, a).items():
                    verdict.blame[root] += part * (b - a)  # type: ignore[assignment]  # a counter of real numbers
                    if root.kind == Kind.LINK:
                        share.transfer += part * (b - a)
                    else:
                        share.peer += part * (b - a)


def _roots(ring: Merged, rank: int, time: int) -> dict[Root, float]:
    """What a waiting rank's wait comes down to, in parts of 1 (several where several links may be meant)."""
    met: list[int] = []
    while True:
        if rank not in ring.members:
            return {Root(Kind.ABSENT, (rank,)): 1.0}
        if rank in met:
            circle = met[met.index(rank) :]
            return {Root(Kind.CIRCLE, tuple(sorted(circle))): 1.0}
        span = ring.members[rank].at(time)
        if not _is_waiting(span):
            kind = {State.BUSY: Kind.COMPUTE, State.OUTSIDE: Kind.OUTSIDE, State.FAILED: Kind.FAILED}[span.state]
            return {Root(kind, (rank,)): 1.0}
        met.append(rank)
        following = _waits_for(ring, rank, time)
        if following is None:
            links = _links(ring, rank, span, time)
            return {Root(Kind.LINK, link): 1 / len(links) for link in links}
        rank = following


def _waits_for(ring: Merged, rank: int, time: int) -> int | None:
    """The rank that a waiting rank waits for; None where all have done their part and a transfer is under way."""
    span = ring.members[rank].at(time)
    if span.state == State.TOGETHER:
        late = [r for r in range(ring.size) if r != rank and not _has_come(ring.members.get(r), span.collective, time)]
        return min(late, key=lambda r: (r not in ring.members, r), default=None)
    missing = [m for m in span.messages if not _posted_there(ring, rank, m, time)]
    return min(missing, key=lambda m: m.sends).peer if missing else None


def _has_come(member: Member | None, collective: int, time: int) -> bool:
    if member is None:
        return False
    return any(s.collective >= collective and s.start <= time for s in member.spans) or _is_past(member, collective)


def _is_past(member: Member, collective: int) -> bool:
    """Whether its rows begin after the collective: then it took part."""
    numbers = [s.collective for s in member.spans if s.collective >= 0]
    return member.oldest is not None and bool(numbers) and min(numbers) > collective


def _posted_there(ring: Merged, rank: int, message: Message, time: int) -> bool:
    peer = ring.members.get(message.peer)
    return peer is not None and peer.has_posted(partner(message, rank), time)


def _links(ring: Merged, rank: int, span: Span, time: int) -> list[tuple[int, int]]:
    """Links (sender, receiver) whose messages neither end says to be through."""
    messages = under_way(ring, rank, span, time) or span.messages
    return [(rank, m.peer) if m.sends else (m.peer, rank) for m in messages] or [(rank, rank)]  # a collective's own


def under_way(ring: Merged, rank: int, span: Span, time: int) -> list[Message]:
    """Of the messages that a rank waits for, those that the other end does not say to be through."""
    there = [(m, ring.members.get(m.peer)) for m in span.messages]
    return [m for m, peer in there if peer is None or not peer.has_landed(partner(m, rank), time)]
