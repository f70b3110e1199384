"""The dumps of a job, merged: for every rank of every ring, what it was doing when.

A dump holds moments; between two of them a rank is in one `State`. Ranks of one machine share its monotonic clock; as
soon as there are two machines the wall clocks must serve, whose offset then enters every comparison.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from ringspun.core.wire import Payload
from ringspun.errors import DataError
from ringspun.steplog.log import FORMAT, Row, What, call_words


class State(Enum):
    """What a rank is doing."""

    OUTSIDE = "between calls"
    BUSY = "computing"
    WAITING = "waiting"
    TOGETHER = "in a collective"
    FAILED = "ended by an error"


class Message(NamedTuple):
    """One message as one end sees it: `key` is the same at both ends. Its last part is when it is waited for
    (`Row.moment`): a step may post several of one source."""

    sends: bool
    peer: int
    key: tuple[int, int, int, int, int, int]

    @property
    def words(self) -> str:
        """For people."""
        call, phase, payload, step, source, _ = self.key
        block = f"{Payload(payload).name} of ring rank {source} at step {step} of {call_words(call, phase)}"
        return f"{block} {'to' if self.sends else 'from'} ring rank {self.peer}"


@dataclass(frozen=True)
class Span:
    """A rank's state from `start` (ns) until the next span.

    Args:
        call, phase, step: where; of `OUTSIDE`, the last call. messages: waited for. collective: number of one.
        words: of a collective or an error.
    """

    start: int
    state: State
    call: int
    phase: int
    step: int
    messages: tuple[Message, ...] = ()
    collective: int = -1
    words: str = ""

    @property
    def place(self) -> str:
        """Where in the ring's calls."""
        if self.call < 0:
            return "before its first call"
        call = call_words(self.call, self.phase)
        if self.state == State.OUTSIDE:
            return f"after {call}"
        return f"step {self.step} of {call}" if self.step >= 0 else call


@dataclass
class Member:
    """One rank of a ring, from its dump.

    Args:
        began: its first row. spans: in order. posted, landed: when each message was; lengths: its bytes. dumped: when.
        source: the file.
        oldest: call and step of its first row, if older ones were dropped.
    """

    ring_rank: int
    source: Path
    began: int
    dumped: int
    oldest: tuple[int, int] | None
    spans: list[Span] = field(default_factory=list)
    posted: dict[Message, int] = field(default_factory=dict)
    landed: dict[Message, int] = field(default_factory=dict)
    lengths: dict[Message, int] = field(default_factory=dict)

    @property
    def first_call(self) -> int:
        """The oldest call that it tells of; -1: none."""
        return min((s.call for s in self.spans if s.call >= 0), default=-1)

    @property
    def last_call(self) -> int:
        """The newest."""
        return max((s.call for s in self.spans), default=-1)

    def at(self, time: int) -> Span:
        """The span that holds `time`."""
        return self.spans[max(bisect_right(self.spans, time, key=lambda s: s.start) - 1, 0)]

    def has_posted(self, message: Message, time: int) -> bool:
        """Whether it had by then. What is older than its rows it has."""
        when = self.posted.get(message)
        if when is not None:
            return when <= time
        return self.oldest is not None and (message.key[0], message.key[3]) < self.oldest

    def has_landed(self, message: Message, time: int) -> bool:
        """Whether it was through for this end by then."""
        return self.landed.get(message, time + 1) <= time

    @property
    def failure(self) -> Span | None:
        """The error that ended it, if one did."""
        last = self.spans[-1]
        return last if last.state == State.FAILED else None

    @property
    def end(self) -> int:
        """Until when it says what it did."""
        return self.failure.start if self.failure else self.dumped


@dataclass
class Merged:
    """One ring, from the dumps of its ranks.

    Args:
        name, ranks: of the ring; its world ranks. members: by ring rank, those that left a dump.
        one_clock: whether their clocks are one.
    """

    name: str
    ranks: tuple[int, ...]
    members: dict[int, Member]
    one_clock: bool

    @property
    def size(self) -> int:
        """Ranks R."""
        return len(self.ranks)

    @property
    def absent(self) -> list[int]:
        """Ring ranks without a dump."""
        return [r for r in range(self.size) if r not in self.members]

    @property
    def window(self) -> tuple[int, int]:
        """From when until when all members say what they did; it ends with the first error (ns)."""
        members = self.members.values()
        starts = [m.began for m in members if m.oldest is not None]
        start = max(starts) if starts else min(m.began for m in members)
        return start, max(start, min(m.end for m in members))


def partner(message: Message, rank: int) -> Message:
    """The same message as its other end sees it."""
    return Message(not message.sends, rank, message.key)


def read(paths: Iterable[Path]) -> list[Merged]:
    """The rings that some dumps tell of.

    Raises:
        DataError: a file that is no dump, or none that tells of a ring of several ranks.
    """
    dumps = [(path, _load(path)) for path in paths]
    if not dumps:
        raise DataError("explain-hang must get at least one dump; got none.")
    one_clock = len({told["boot"] for _, told in dumps}) == 1
    found: dict[tuple[str, tuple[int, ...]], list[Member]] = {}
    for path, told in dumps:
        try:
            for log in told["logs"]:
                name, ranks = log["ring"], tuple(log["ranks"])
                member = _member(path, log, one_clock)
                if member is not None:
                    found.setdefault((name, ranks), []).append(member)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as problem:
            raise DataError(f"dump must hold step logs; got {path}, which does not: {problem!r}.") from None
    if not found:
        raise DataError("dumps must tell of a ring of at least two ranks that did something; these do not.")
    return [Merged(name, ranks, _of_last_job(members), one_clock) for (name, ranks), members in found.items()]


def _load(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise DataError(f"dump must be a readable JSON file; got {path}: {problem}.") from None
    if not (
        isinstance(told, dict)
        and told.get("format") == FORMAT
        and told.get("columns") == list(Row._fields)
        and isinstance(told.get("boot"), str)
    ):
        raise DataError(f"dump must be a step log of format {FORMAT}; got {path}. Was it written by this version?")
    return told


def _of_last_job(dumps: Sequence[Member]) -> dict[int, Member]:
    """Each rank's newest dump. Every job's default group has the same name; where a rank began to count its calls anew,
    dumps from before that are of an earlier job in the same folder, and stand for no rank of this one."""
    newest: dict[int, Member] = {}
    for member in sorted(dumps, key=lambda m: m.dumped):
        newest[member.ring_rank] = member
    anew = [
        newest[old.ring_rank].began
        for old in dumps
        if old.dumped < newest[old.ring_rank].began and newest[old.ring_rank].first_call <= old.last_call
    ]
    today = max(anew, default=0)
    return {rank: newest[rank] for rank in sorted(newest) if newest[rank].dumped >= today}


def _member(path: Path, log: dict[str, Any], one_clock: bool) -> Member | None:
    rows = [_row(row) for row in log["rows"]]
    if not rows:
        return None
    shift = 0 if one_clock else int(log["wall"]) - int(log["monotonic"])
    first = next(((r.call, r.step) for r in rows if r.phase >= 0), (-1, -1))
    began, dumped, full = rows[0].monotonic + shift, int(log["monotonic"]) + shift, bool(log["full"])
    member = Member(int(log["ring_rank"]), path, began, dumped, first if full else None)
    if not full:
        member.spans.append(Span(0, State.OUTSIDE, -1, -1, -1))
    member.spans.extend(_spans(member, rows, shift))
    return member


def _row(values: Sequence[Any]) -> Row:
    """A row as it was written.

    Raises:
        ValueError, TypeError: it was not.
    """
    row = Row(*values)
    if not all(isinstance(x, int) for x in row[:-1]) or not isinstance(row.words, str):
        raise TypeError(f"row must be numbers and words; got {values!r}")
    return row._replace(what=What(row.what), payload=row.payload if row.payload < 0 else Payload(row.payload))


def _spans(member: Member, rows: Sequence[Row], shift: int) -> Iterator[Span]:
    """Spans from rows; fills in the member's posted and landed messages on the way."""
    call, phase, step = -1, -1, -1
    inside = False
    posts: dict[tuple[int, int, int, int], list[Message]] = {}
    for row in rows:
        time = int(row.monotonic) + shift
        if row.phase >= 0:
            if (row.call, row.phase) != (call, phase):
                call, phase, step = row.call, row.phase, -1
            inside = row.what != What.END
        if row.what in (What.SEND, What.RECEIVE):
            key = (row.call, row.phase, row.payload, row.step, row.source, row.moment)
            message = Message(row.what == What.SEND, row.peer, key)
            member.posted[message] = time
            member.lengths[message] = row.n_bytes
            posts.setdefault((row.call, row.phase, row.step, row.moment), []).append(message)
            continue
        batch = tuple(posts.get((row.call, row.phase, row.step, row.moment), ()))
        if row.what == What.WAIT and batch:  # none: older rows, with its posts, were dropped
            yield Span(time, State.WAITING, call, phase, step, batch)
            continue
        if row.what == What.LANDED:
            member.landed.update(dict.fromkeys(batch, time))
        elif row.what == What.COMPUTE:
            step = row.step
        elif row.what == What.AGREE:
            yield Span(time, State.TOGETHER, call, phase, step, collective=row.call, words=row.words)
            continue
        elif row.what == What.FAILED:
            yield Span(time, State.FAILED, call, phase, step, words=row.words)
            return
        yield Span(time, State.BUSY if inside else State.OUTSIDE, call, phase, step)
