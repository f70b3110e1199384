"""A swap: every rank of a row sends every other some tensors and gets some; what exchanges of heads and halos are made
of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor

from ringspun.core.route.base import Action
from ringspun.core.wire import Header, Payload, segments
from ringspun.steplog import StepLog, What
from ringspun.torch import messages
from ringspun.torch.buffers import BufferPool
from ringspun.torch.drivers.base import RankProgram, Transfer


@dataclass(frozen=True)
class Swap:
    """What one rank does in an exchange, v counting the ranks of its row.

    Args:
        payload: what it carries. rank: of the group. mine: its v. row: ranks. sent: ``sent[v][i]``, what v gets of
            tensor i. shapes: ``shapes[v][i]``, of what comes. put: ``put(v, i, x)`` places what came; called in the
            order of v.
    """

    payload: Payload
    rank: int
    mine: int
    row: tuple[int, ...]
    sent: list[list[Tensor]]
    shapes: list[list[tuple[int, ...]]]
    put: Callable[[int, int, Tensor], None]

    @property
    def what(self) -> str:
        """The payload in words."""
        return "heads" if self.payload == Payload.HEADS else "rows ahead of tokens"


class _Parcel(NamedTuple):
    """One message on its way: its buffer, what lies in it, and what moves it."""

    buffer: Tensor
    views: list[Tensor]
    transfer: Transfer
    header: Header


def swapped(
    swap: Swap,
    numbers: Sequence[int],
    pool: BufferPool,
    plan_id: int,
    call: int,
    phase: int,
    sums: bool,
    deferred: bool,
    log: StepLog,
) -> RankProgram[None]:
    """What one rank sends and receives: per number a message to and from every other rank of its row.

    Args:
        numbers: of the message in which each tensor travels. plan_id, call, phase: for headers. sums: whether messages
            carry checksums. deferred: whether they are judged when all of the call is queued, not on arrival.
    """
    log.note(call, phase, What.CALL)
    others = [v for v in range(len(swap.row)) if v != swap.mine]
    found = [list(parts) if v == swap.mine else [x.new_empty(0) for x in parts] for v, parts in enumerate(swap.sent)]
    leased: list[Tensor] = []
    marks = messages.Marks(sums) if deferred else None

    def parcel(v: int, which: list[int], step: int, action: Action) -> _Parcel | None:
        """A message, its buffer ready; none where it would carry nothing."""
        sends, peer = action == Action.SEND, swap.row[v]
        shapes = [tuple(swap.sent[v][i].shape) if sends else swap.shapes[v][i] for i in which]
        if not any(map(prod, shapes)):
            return None
        dtypes = [swap.sent[v][i].dtype for i in which]
        spots, length = segments(shapes, [dtype.itemsize for dtype in dtypes])
        buffer = pool.lease(length, swap.sent[v][which[0]].device)
        leased.append(buffer)
        source = swap.rank if sends else peer
        header = Header(plan_id, call, phase, swap.payload, step, source, length)
        log.note(call, phase, What.SEND if sends else What.RECEIVE, step, 0, swap.payload, source, peer, length)
        words = f"{swap.what} of rank {source} at step {step} of call {call}"
        views = messages.views(buffer, spots, dtypes)
        return _Parcel(buffer, views, Transfer(action, peer, buffer, words, header), header)

    waiting = []
    for step in range(1 + max(numbers)):
        which = [i for i, number in enumerate(numbers) if number == step]
        comes, goes = ([parcel(v, which, step, action) for v in others] for action in (Action.RECEIVE, Action.SEND))
        for v, one in zip(others, goes, strict=True):
            if one is not None:
                for i, view in zip(which, one.views, strict=True):
                    view.copy_(swap.sent[v][i])
                messages.seal(one.buffer, one.header, sums=sums)
        for v, one in zip(others, comes, strict=True):
            if one is not None:
                messages.clear(one.buffer)
                for i, view in zip(which, one.views, strict=True):
                    found[v][i] = view
        ticket = yield [one.transfer for one in (*comes, *goes) if one is not None]
        waiting.append((step, ticket, [one for one in comes if one is not None]))
    for step, ticket, expected in waiting:
        log.note(call, phase, What.WAIT, step, 0)
        yield ticket
        log.note(call, phase, What.LANDED, step, 0)
        for one in expected:
            sent = f"that rank {one.header.source} sent at step {step} of call {call}"
            words = f"rank {swap.rank}: the {swap.what} {sent}"
            messages.check(one.buffer, one.header, words, sums=sums, marks=marks)
        if marks and expected:
            yield marks
    for v, parts in enumerate(found):
        for i, part in enumerate(parts):
            if part.numel():
                swap.put(v, i, part)
    for buffer in leased:
        pool.give_back(buffer)
    log.note(call, phase, What.END)
