"""`Loopback`: R ranks of a ring in one thread of one process, in any seeded order.

For tests (thousands of interleavings a minute), for debugging a model on a laptop, and for R virtual ranks on one GPU.
A ring of one is plain attention: it never yields a message.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringspun.core.route.base import Action
from ringspun.errors import RingspunError, TransferError
from ringspun.steplog import StepLog
from ringspun.steplog.log import KEPT
from ringspun.torch.drivers.base import Counts, Driver, RankProgram, RingState, T, Ticket, Together, Transfer, Verdict
from ringspun.torch.drivers.notes import describe

ROWS_OF_ALL = 1 << 16
"""Rows that the step logs of a loopback's ranks hold together at most (but for 32 each)."""


@dataclass(eq=False)
class _Pending(Ticket):
    transfers: list[Transfer]
    open: int = 0
    what: str = ""


@dataclass(eq=False)
class _Rank:
    number: int
    program: RankProgram[Any]
    answer: Any = None
    waiting: _Pending | None = None
    done: bool = False
    result: Any = None
    verdict: Verdict | None = None

    @property
    def ready(self) -> bool:
        return not self.done and (self.waiting is None or self.waiting.open == 0)


@dataclass
class _Link:
    """Messages from one rank to another, in order: posted sends and receives that have not met."""

    sends: deque[tuple[_Pending, Transfer]] = field(default_factory=deque)
    receives: deque[tuple[_Pending, Transfer]] = field(default_factory=deque)

    @property
    def whole(self) -> bool:
        return bool(self.sends and self.receives)


class Loopback(Driver):
    """All ranks of a ring in this thread. `ContextParallel(Loopback(4))` takes and returns all shards joined in rank
    order.

    Args:
        size: ranks R. seed: order in which runnable ranks advance; the results never depend on it.
    """

    def __init__(self, size: int, *, seed: int = 0) -> None:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"Loopback size must be an integer; got {size!r}.")
        if size < 1:
            raise ValueError(f"Loopback size must be at least 1; got {size}.")
        self.size = size
        self.ring_ranks = tuple(range(size))
        self.counts = Counts()
        name, kept = f"loopback {os.getpid()} {next(_names)}", max(32, min(KEPT, ROWS_OF_ALL // size))
        self.state = RingState(tuple(StepLog(name, self.ring_ranks, r, kept=kept) for r in self.ring_ranks))
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._links: dict[tuple[int, int], _Link] = {}
        self._together: list[_Pending] = []

    def deliver(self, sender: int, receiver: int, sent: Transfer, wanted: Transfer) -> None:
        """Move one message. Tests override this to damage messages."""
        if sent.buffer.numel() != wanted.buffer.numel():
            raise TransferError(
                f"ring rank {receiver}: {wanted.what} from ring rank {sender} must be {wanted.buffer.numel()} bytes; "
                f"got {sent.buffer.numel()}."
            )
        wanted.buffer.copy_(sent.buffer)

    def run(self, programs: Sequence[RankProgram[T]]) -> list[T]:
        with self._lock:  # threads that share a loopback take turns
            try:
                return self._run(programs)
            except RingspunError as failure:
                self.state.log_failure(failure, describe(failure))
                raise

    def _run(self, programs: Sequence[RankProgram[T]]) -> list[T]:
        self._links, self._together = {}, []
        ranks = [_Rank(n, p) for n, p in zip(self.ring_ranks, programs, strict=True)]
        while self._step(ranks):
            pass
        stuck = [r for r in ranks if not r.done]
        if stuck:
            waits = "; ".join(
                f"ring rank {r.number} waits for {r.waiting.what or ', '.join(t.what for t in r.waiting.transfers)}"
                for r in stuck
                if r.waiting
            )
            raise TransferError(f"every rank must advance; all wait: {waits}.")
        verdicts = [r.verdict for r in ranks if r.verdict is not None]
        if verdicts and bool(torch.stack([verdict.flag() for verdict in verdicts]).any()):
            for verdict in verdicts:
                verdict.judge()
        return [r.result for r in ranks]

    def _step(self, ranks: list[_Rank]) -> bool:
        """Let one rank that can advance do so; False when none can."""
        ready = [r for r in ranks if r.ready]
        if ready:
            self._advance(self._random.choice(ready))
        return bool(ready)

    def _advance(self, rank: _Rank) -> None:
        """Run one rank to its next yield."""
        rank.waiting = None
        try:
            asked = rank.program.send(rank.answer)
        except StopIteration as end:
            rank.done, rank.result = True, end.value
            return
        rank.answer = None
        if isinstance(asked, list):
            rank.answer = self._post(rank.number, asked)
        elif isinstance(asked, Verdict):
            rank.verdict = asked
        elif isinstance(asked, Together):
            rank.waiting = _Pending([], 1, asked.what)
            self._together.append(rank.waiting)
            if len(self._together) == self.size:  # the last one lets all go
                for ticket in self._together:
                    ticket.open = 0
                self._together.clear()
        else:
            assert isinstance(asked, _Pending)
            rank.waiting = asked

    def _post(self, rank: int, transfers: list[Transfer]) -> _Pending:
        ticket = _Pending(transfers, len(transfers))
        for t in transfers:
            if t.action == Action.SEND:
                self.counts.sent(rank, t)
                ends = (rank, t.peer)
                self._links.setdefault(ends, _Link()).sends.append((ticket, t))
            else:
                ends = (t.peer, rank)
                self._links.setdefault(ends, _Link()).receives.append((ticket, t))
            self._match(*ends)
        return ticket

    def _match(self, sender: int, receiver: int) -> None:
        """Called when a message of this link was posted: it arrives as soon as both ends are there."""
        while self._links[sender, receiver].whole:
            self._arrive(sender, receiver)

    def _arrive(self, sender: int, receiver: int) -> None:
        link = self._links[sender, receiver]
        (out_ticket, sent), (in_ticket, wanted) = link.sends.popleft(), link.receives.popleft()
        self.deliver(sender, receiver, sent, wanted)
        out_ticket.open -= 1
        in_ticket.open -= 1

    def agree(self, topic: str, digest: bytes, fields: dict[str, str], failure: Exception | None = None) -> None:
        if failure is not None:
            raise failure

    def report(self, failure: BaseException) -> None:
        """Nobody else waits: all ranks are in this thread."""

    def all_gather_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        return x  # this process already holds every rank's rows, joined in rank order

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


_names = itertools.count()
