"""`Part`: some ranks of a group as a ring of their own, over the group's driver: the rings of a hybrid (USP)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringspun.core.route.base import Action
from ringspun.errors import PeerError, PlanMismatchError
from ringspun.torch.drivers.base import Driver, RankProgram, RingState, T, Together, Transfer
from ringspun.torch.drivers.notes import describe

NOTE_BYTES = 4096
FAILED = bytes(32)


class Part(Driver):
    """Ranks of another driver, in an order of their own. Peers are counted in the part; messages go over the group.

    Several parts that together are the whole group run at once: those that one process plays, one after the other.

    Args:
        whole: the driver. ranks: of its group, in the part's order.
    """

    def __init__(self, whole: Driver, ranks: Sequence[int]) -> None:
        self.whole, self.ranks = whole, tuple(ranks)
        self.size, self.devices, self.counts = len(self.ranks), whole.devices, whole.counts
        self.ring_ranks = tuple(i for i, rank in enumerate(self.ranks) if rank in whole.ring_ranks)
        logs = dict(zip(whole.ring_ranks, whole.state.logs, strict=True))
        self.state = _PartState(whole.state, tuple(logs[self.ranks[i]] for i in self.ring_ranks))

    def run(self, programs: Sequence[RankProgram[T]]) -> list[T]:
        mine = {self.ranks[i]: p for i, p in zip(self.ring_ranks, programs, strict=True)}
        results = dict(
            zip(self.whole.ring_ranks, self.whole.run(list(map(self._program, self._all(mine)))), strict=True)
        )
        return [results[self.ranks[i]] for i in self.ring_ranks]  # type: ignore[misc]

    def _all(self, mine: dict[int, RankProgram[T]]) -> list[RankProgram[T] | None]:
        return [mine.get(rank) for rank in self.whole.ring_ranks]

    def _program(self, program: RankProgram[T] | None) -> RankProgram[T | None]:
        """A rank's program, its peers named as the group does; of ranks outside of the part, none."""
        answer: Any = None
        while program is not None:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if isinstance(asked, Together) and len(self.ring_ranks) == self.size:
                answer = None  # ranks of one thread need not wait for each other, and the other parts' would not come
                continue
            if isinstance(asked, list):
                asked = [replace(t, peer=self.ranks[t.peer]) for t in asked]
            answer = yield asked
        return None

    def agree(self, topic: str, digest: bytes, fields: dict[str, str], failure: Exception | None = None) -> None:
        if len(self.ring_ranks) == self.size:
            if failure is not None:
                raise failure
            return
        note = {"topic": topic, "fields": fields, "error": describe(failure) if failure else None}
        notes = self._exchange((FAILED if failure else digest) + json.dumps(note).encode())
        if failure is not None:
            self.whole.report(failure)  # the other parts wait for this rank too
            raise failure
        for rank, text in enumerate(notes):
            if text[:32] == FAILED:
                raise PeerError(f"ring rank {rank} failed in {topic}: {_read(text).get('error')}")
        odd = [rank for rank, text in enumerate(notes) if text[:32] != digest]
        if odd:
            theirs = _read(notes[odd[0]]).get("fields", {})
            found = "; ".join(
                f"{name} is {theirs.get(name)} on ring rank {odd[0]} and {value} on ring rank {self.ring_ranks[0]}"
                for name, value in fields.items()
                if theirs.get(name) != value
            )
            raise PlanMismatchError(
                f"{topic} must be the same on all ranks; {found or 'the digests differ'} (odd ranks: {odd})."
            )

    def _exchange(self, mine: bytes) -> list[bytes]:
        """What every rank brought, cut to what a note may hold."""
        row = torch.frombuffer(bytearray(mine[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")), dtype=torch.uint8)
        return [bytes(x.tolist()).rstrip(b"\0") for x in self.all_gather_rows(row[None], [1] * self.size)]

    def all_gather_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        if len(self.ring_ranks) == self.size:
            return x
        (parts,) = self.run([self._gather(x.contiguous(), rows)])
        return torch.cat(parts)

    def _gather(self, x: Tensor, rows: Sequence[int]) -> RankProgram[list[Tensor]]:
        me = self.ring_ranks[0]
        parts = [x if rank == me else x.new_empty((n, *x.shape[1:])) for rank, n in enumerate(rows)]
        others = [rank for rank in range(self.size) if rank != me]
        sent = x.reshape(-1).view(torch.uint8)
        transfers = [Transfer(Action.SEND, rank, sent, "a gather") for rank in others if sent.numel()]
        transfers += [
            Transfer(Action.RECEIVE, rank, parts[rank].view(-1).view(torch.uint8), "a gather")
            for rank in others
            if parts[rank].numel()
        ]
        ticket = yield transfers
        yield ticket
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        if len(self.ring_ranks) == self.size:
            return x
        return self.all_gather_rows(x[None], [1] * self.size).sum(0)

    def report(self, failure: BaseException) -> None:
        self.whole.report(failure)


class _PartState(RingState):
    """Counts calls with the whole group; what was agreed on is the part's own."""

    def __init__(self, whole: RingState, logs: tuple[Any, ...]) -> None:
        self._whole, self.logs, self.agreed_sizes = whole, logs, ""

    @property
    def calls(self) -> int:
        return self._whole.calls

    @calls.setter
    def calls(self, value: int) -> None:
        self._whole.calls = value

    @property
    def contexts(self) -> int:
        return self._whole.contexts

    @contexts.setter
    def contexts(self, value: int) -> None:
        self._whole.contexts = value

    @property
    def broken(self) -> str | None:
        return self._whole.broken

    @broken.setter
    def broken(self, value: str | None) -> None:
        self._whole.broken = value


def _read(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text[32:])
    except ValueError:  # cut
        return {}
    return found if isinstance(found, dict) else {}
