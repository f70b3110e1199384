"""One row of the table over all peers: each judged first, then measured, then timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median
from typing import Any, TypeVar

from ringspun.testing.peers.base import Peer
from ringspun.testing.peers.judging import Judge
from ringspun.testing.peers.on_ranks import first_on_rank, forget_on_rank, judge_on_rank, time_on_rank
from ringspun.testing.peers.rows import Row
from ringspun.testing.pool import PRELOAD, RankFailed, RankLost, RankPool
from ringspun.testing.timing import Work

LIMIT_S = 1200.0
"""Longest wait for one call (seconds)."""
MOST_INSTEAD = 3
"""Rounds of what stands in the place of a refused row: it takes long, and is not close."""
T = TypeVar("T")
Pools = Callable[[int], RankPool]


@dataclass(frozen=True)
class Outcome:
    """What came of one peer in one row.

    Args:
        peer, version: who. is_ring: whether keys and values travel. is_ours: this package.
        remark: how it is called.
        refusal: why it cannot do the row as asked; "": it can. instead: what was judged and timed in its place.
        status: of that, "right", "wrong", "failed", or "long" for a sequence that it is not timed with; otherwise
            "refused" or "absent". words: why.
        errors: of out, dq, dk, dv, as `Judge.errors`. forward_s, both_s: seconds of each round, the slowest rank's.
        peak_bytes, sent_bytes: of the rank that has most; None: not counted.
    """

    peer: str
    version: str | None
    status: str
    words: str = ""
    is_ring: bool = False
    is_ours: bool = False
    remark: str = ""
    refusal: str = ""
    instead: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    forward_s: tuple[float, ...] = ()
    both_s: tuple[float, ...] = ()
    peak_bytes: int | None = None
    sent_bytes: int | None = None

    @property
    def median_s(self) -> float:
        """Of forward + backward."""
        return median(self.both_s)


@dataclass(frozen=True)
class _Entry:
    """A peer that is timed: what with, and what is known of it so far."""

    peer: Peer
    work: Work
    outcome: Outcome
    backward: bool


@contextmanager
def rank_pools() -> Iterator[Pools]:
    """``pools(n)``: n ranks, started when they are first asked for."""
    made: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in made:
            made[size] = RankPool(size, preload=(*PRELOAD, "ringspun.testing.peers.on_ranks"))
        return made[size]

    try:
        yield pool
    finally:
        for ranks in made.values():
            ranks.close()


def compare(
    row: Row, peers: Sequence[Peer], pools: Pools, *, rounds: int, judged_tokens: int, tokens: int | None = None
) -> list[Outcome]:
    """One row over all peers, in their order.

    Args:
        rounds: timed calls of each, all peers in turn. judged_tokens: length at which errors are measured, for float64
            dense attention must hold S x S scores. tokens: a length instead of the row's own.
    """
    judge = cache(Judge.of)
    work = row.work(tokens)
    small = row.work(min(judged_tokens, work.seq_len))
    entries = [_entered(peer, work, small, pools, judge) for peer in peers]
    timed = [_measured(e, pools) if isinstance(e, _Entry) else e for e in entries]
    seconds: dict[int, list[tuple[float, float]]] = {i: [] for i, e in enumerate(timed) if isinstance(e, _Entry)}
    for turn in range(rounds):
        for i in sorted(seconds, reverse=bool(turn % 2)):  # nobody always follows the same one
            entry = timed[i]
            if isinstance(entry, _Entry) and (turn < MOST_INSTEAD or not entry.outcome.instead):
                found = _attempt(entry, pools, time_on_rank, entry.work, entry.backward)
                if isinstance(found, Outcome):
                    timed[i] = found
                else:
                    forward, both = zip(*found, strict=True)
                    seconds[i].append((max(forward), max(both)))
    for size in {e.peer.ranks(e.work) for e in entries if isinstance(e, _Entry)}:
        pools(size).run(forget_on_rank)
    return [_timed(e, seconds[i]) if isinstance(e, _Entry) else e for i, e in enumerate(timed)]


def _entered(peer: Peer, work: Work, small: Work, pools: Pools, judge: Callable[[Work], Judge]) -> Outcome | _Entry:
    """Judge a peer, or say why it cannot be."""
    base = Outcome(peer.name, peer.version, "right", is_ring=peer.is_ring, is_ours=peer.module == "ringspun")
    if base.version is None:
        return replace(base, status="absent", words=peer.missing)
    reason = peer.refuses(work)
    if reason is not None:
        there, here = peer.nearest(work), peer.nearest(small)
        base = replace(base, refusal=reason)
        if there is None or here is None:
            return replace(base, status="refused")
        base, work, small = replace(base, instead=there.words), there.work, here.work
    entry = _Entry(peer, work, replace(base, remark=peer.remark(work)), True)
    found = _attempt(entry, pools, judge_on_rank, small)
    if isinstance(found, Outcome):
        return found
    errors = judge(small).errors(found)
    wrong = judge(small).wrong(errors)
    outcome = replace(entry.outcome, errors=errors)
    if wrong:
        outcome = replace(outcome, status="wrong", words=f"wrong: {', '.join(wrong)}")
    if peer.most_tokens is not None and work.seq_len > peer.most_tokens:
        words = f"not timed beyond {peer.most_tokens:,} tokens: too slow"
        return replace(outcome, status=outcome.status if wrong else "long", words=outcome.words or words)
    if "out" in wrong:
        return outcome
    return replace(entry, outcome=outcome, backward=not wrong)


def _measured(entry: _Entry, pools: Pools) -> Outcome | _Entry:
    """Memory and bytes of the first call, which also warms what the clock then sees."""
    found = _attempt(entry, pools, first_on_rank, entry.work)
    if isinstance(found, Outcome):
        return found
    if not entry.backward:  # what was measured is forward + backward
        return entry
    peak, sent = (_most([getattr(first, name) for first in found]) for name in ("peak_bytes", "sent_bytes"))
    return replace(entry, outcome=replace(entry.outcome, peak_bytes=peak, sent_bytes=sent))


def _most(counts: Sequence[int | None]) -> int | None:
    """The largest, where every rank counted."""
    known = [n for n in counts if n is not None]
    return max(known) if len(known) == len(counts) else None


def _attempt(entry: _Entry, pools: Pools, function: Callable[..., T], *args: Any) -> list[T] | Outcome:
    """``function(rank, peer, *args)`` on all ranks, or how it failed; the ranks are fresh after that."""
    pool = pools(entry.peer.ranks(entry.work))
    try:
        return pool.run(function, entry.peer, *args, timeout_s=LIMIT_S)
    except RankFailed as problem:
        pool.restart()
        (first, *_) = problem.failures.values()
        words = f"{first.kind}: {first.message}"
    except RankLost as problem:
        words = str(problem)
    return replace(entry.outcome, status="failed", words=words.splitlines()[0])


def _timed(entry: _Entry, seconds: list[tuple[float, float]]) -> Outcome:
    forward = tuple(f for f, _ in seconds)
    both = tuple(b for _, b in seconds) if entry.backward else ()
    return replace(entry.outcome, forward_s=forward, both_s=both)
