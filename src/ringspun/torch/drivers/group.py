"""`GroupDriver`: one rank per process over a group of torch.distributed, by batched isend / irecv on that group.

Three traps shape this file: a message longer than its buffer aborts a gloo process, so ranks agree on sizes before the
first one; blocking sends on both sides deadlock, so everything is batched and asynchronous; a peer that never comes is
known only by the timeout, so before it waits a rank leaves a note in the group's store for the others to read.
"""

from __future__ import annotations

import functools
import json
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor

from ringspun.core.route.base import Action
from ringspun.errors import PeerError, PlanMismatchError, RingBroken, RingspunError
from ringspun.steplog import StepLog, What
from ringspun.torch.drivers.base import (
    Counts,
    Driver,
    RankProgram,
    RingState,
    T,
    Ticket,
    Together,
    Transfer,
    Verdict,
    digest_of,
)
from ringspun.torch.drivers.notes import Notes, describe
from ringspun.torch.drivers.place import module_words

# torch imports torch.distributed.nn.functional lazily, at the first call of a custom op; its default arguments would
# then hold the default group for good. Imported above, before there is a group, they hold nothing.

FAILED = bytes(32)
"""The digest that a rank with a failure of its own brings to an agreement."""


@dataclass(eq=False)
class Works(Ticket):
    """Transfers under way: what torch gave for them, and what they are in words; `queued`: on a device's streams."""

    works: list[Any]
    whats: list[str]
    queued: bool = False


class GroupDriver(Driver):
    """One rank of a ring of processes.

    Args:
        group: process group whose order is the ring's order (any world ranks). timeout_s: longest wait for a peer.
    """

    meeting: torch.device = torch.device("cpu")
    """Where what ranks agree on travels."""

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float = 600.0) -> None:
        self._group = weakref.ref(group)
        self.size = dist.get_world_size(group)
        self.ring_rank = dist.get_rank(group)
        self.ring_ranks = (self.ring_rank,)
        self.counts = Counts()
        self.breaks: tuple[GroupDriver, ...] = ()  # over groups that are of no use without this one
        self.state = _state_of(group)
        (self._log,) = self.state.logs
        self._timeout = timedelta(seconds=timeout_s)
        self._notes = Notes(group.get_group_store(), self.ring_rank, patience_s=min(timeout_s, 1.0))

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Held weakly: torch keeps it until it is destroyed, and one that outlives that would let
        gloo's threads free tensors while the interpreter ends, which aborts the process."""
        group = self._group()
        if group is None:
            raise RingBroken(
                f"group must be alive (ring rank {self.ring_rank} of {self.size}); it was destroyed. "
                "Make a new process group and a new ContextParallel."
            )
        return group

    # -- messages ----------------------------------------------------------------------------------------------------

    def run(self, programs: Sequence[RankProgram[T]]) -> list[T]:
        (program,) = programs
        self._check_intact()
        try:
            result = self._driven(program)
            self._conclude()
        except BaseException as failure:
            self.report(failure)
            raise
        return [result]

    def _driven(self, program: RankProgram[T]) -> T:
        """A program's result: everything that it asks for is done, or queued."""
        answer: Any = None
        while True:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = None
            if isinstance(asked, list):
                answer = self._post(asked)
            elif isinstance(asked, Together):
                self.agree(asked.what, digest_of(asked.what), {})
            elif isinstance(asked, Verdict):
                self._hear(asked)
            else:
                assert isinstance(asked, Works)
                self._land(asked)

    def _hear(self, verdict: Verdict) -> None:
        """More messages arrived of which a verdict is to be passed."""
        raise NotImplementedError(f"{type(self).__name__} defers no verdict")

    def _conclude(self) -> None:
        """Everything that a call does is queued: pass the verdict on what arrived."""

    def _check_intact(self) -> None:
        if self.state.broken is not None:
            raise RingBroken(
                f"ring must be in step to be used (ring rank {self.ring_rank} of {self.size}); an earlier call ended "
                f"here while others may be in it: {self.state.broken}. "
                "Make a new process group and a new ContextParallel on every rank, or end the job."
            )

    def _post(self, transfers: list[Transfer]) -> Works:
        whats = [f"{t.what} {'to' if t.action == Action.SEND else 'from'} ring rank {t.peer}" for t in transfers]
        operations = []
        for t in transfers:
            sends = t.action == Action.SEND
            if sends:
                self.counts.sent(self.ring_rank, t)
            # `peer=` of P2POp is a world rank, `group_peer=` is the rank in the group, which is what a ring counts in
            operation = dist.isend if sends else dist.irecv
            operations.append(dist.P2POp(operation, t.buffer, group=self.group, group_peer=t.peer))
        if not operations:
            return Works([], [])
        together = ", ".join(whats)
        works = self._start(operations, together)
        return Works(works, whats if len(works) == len(whats) else [together] * len(works))  # nccl: one for all

    def _start(self, operations: list[dist.P2POp], what: str) -> list[Any]:
        """Start transfers together."""
        works: list[Any] = self._guarded(lambda: dist.batch_isend_irecv(operations), what)
        return works

    def _land(self, ticket: Works) -> None:
        """What comes after this begins when these transfers are done."""
        self._wait(ticket.works, ticket.whats)

    def _wait(self, works: list[Any], whats: list[str]) -> None:
        """Wait here for all of `works`, together no longer than the timeout."""
        end = time.monotonic() + self._timeout.total_seconds()
        with self.counts.waits.timed():
            for work, what in zip(works, whats, strict=True):
                left = timedelta(seconds=max(end - time.monotonic(), 1e-3))  # 0 would mean for ever
                self._guarded(functools.partial(work.wait, left), what)

    def _meet(self, work: Any, what: str, device: torch.device) -> None:
        """Let what comes after this have the result of a collective on tensors of a device."""
        self._wait([work], [what])

    def _guarded(self, action: Callable[[], Any], what: str) -> Any:
        """Run a torch.distributed call; its failure becomes a `PeerError` that says who, what, and what peers said."""
        try:
            return action()
        except RingspunError:
            raise
        except (RuntimeError, ValueError, TimeoutError) as problem:
            words = self._notes.last_words(self.size)
            place = f"ring rank {self.ring_rank} of {self.size}, {self._log.place}{module_words()}"
            found = (
                f"{place}: {what} must finish within {self._timeout.total_seconds():g} s; got {_first_words(problem)}."
            )
            failure = PeerError(found + words)
            self._report(failure, describe(PeerError(found)))  # what others said of others they can read themselves
            raise failure from problem

    # -- agreement ---------------------------------------------------------------------------------------------------

    def agree(self, topic: str, digest: bytes, fields: dict[str, str], failure: Exception | None = None) -> None:
        self._check_intact()
        with self._logged(topic):
            self._agree(topic, digest, fields, failure)

    def _agree(self, topic: str, digest: bytes, fields: dict[str, str], failure: Exception | None) -> None:
        error = describe(failure) if failure else None
        note = self._notes.come(topic, fields, error)
        digests = self._exchange(FAILED if failure else digest, [32] * self.size, topic)
        if failure is None and all(d == digest for d in digests):
            return
        notes = self._exchange_notes(note, topic)  # every rank sees the difference, so every rank comes here
        if failure is not None:
            raise failure
        for rank, other in enumerate(digests):
            if other == FAILED:
                raise PeerError(f"ring rank {rank} failed in {topic}: {notes[rank]['error']}")
        raise PlanMismatchError(_mismatch(topic, digests, notes))

    def _exchange(self, mine: bytes, lengths: Sequence[int], topic: str) -> list[bytes]:
        """Every rank's bytes, of known lengths."""
        padded = mine.ljust(max(lengths), b"\0")
        brought = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self.meeting)
        gathered = [torch.empty_like(brought) for _ in range(self.size)]
        what = f"agreement on {topic}"
        work = self._guarded(lambda: dist.all_gather(gathered, brought, group=self.group, async_op=True), what)
        self._meet(work, what, torch.device("cpu"))
        return [bytes(g.tolist())[:n] for g, n in zip(gathered, lengths, strict=True)]

    def _exchange_notes(self, note: dict[str, Any], topic: str) -> list[dict[str, Any]]:
        """Every rank's note; lengths travel first, because gloo has no uneven all_gather."""
        mine = json.dumps(note).encode()
        lengths = self._exchange(len(mine).to_bytes(8, "little"), [8] * self.size, topic)
        sizes = [int.from_bytes(n, "little") for n in lengths]
        return [json.loads(text) for text in self._exchange(mine, sizes, topic)]

    def report(self, failure: BaseException) -> None:
        self._report(failure, describe(failure))

    def _report(self, failure: BaseException, words: str) -> None:
        if self.state.broken is None:
            self.state.broken = words
            self._notes.leave_error(words)
            self.state.log_failure(failure, words)
            for other in self.breaks:
                other._report(failure, words)

    @contextmanager
    def _logged(self, words: str) -> Iterator[None]:
        """Log that this rank is in a collective."""
        number = self._log.agree(words)
        try:
            yield
        finally:
            self._log.note(number, -1, What.AGREED)

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_gather_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        self._check_intact()
        # no backend has an uneven all_gather of every dtype: rows are padded to the longest and cut again
        longest, where = max(rows), self._carried_on(x.device)
        padded = x.new_zeros((longest, *x.shape[1:]), device=where)
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with self._logged("gather"):
            work = self._guarded(lambda: dist.all_gather(parts, padded, group=self.group, async_op=True), "gather")
            self._meet(work, "gather", x.device)
        return torch.cat([p[:n] for p, n in zip(parts, rows, strict=True)]).to(x.device)

    def all_reduce(self, x: Tensor) -> Tensor:
        self._check_intact()
        total = x.to(self._carried_on(x.device), memory_format=torch.contiguous_format, copy=True)
        with self._logged("all-reduce"):
            work = self._guarded(lambda: dist.all_reduce(total, group=self.group, async_op=True), "all-reduce")
            self._meet(work, "all-reduce", x.device)
        return total.to(x.device)

    def _carried_on(self, device: torch.device) -> torch.device:
        """Where tensors of a device travel."""
        return device


def _mismatch(topic: str, digests: list[bytes], notes: list[dict[str, Any]]) -> str:
    """Names the ranks in the minority and the fields in which they differ."""
    usual = max(digests, key=digests.count)
    odd = [rank for rank, d in enumerate(digests) if d != usual]
    most = digests.index(usual)
    one, other = notes[most], notes[odd[0]]
    if one["topic"] != other["topic"]:
        found = f"ring rank {odd[0]} is in {other['topic']} while ring rank {most} is in {one['topic']}"
    else:
        found = "; ".join(
            f"{name} is {other['fields'].get(name)} on ring rank {odd[0]} and {value} on ring rank {most}"
            for name, value in one["fields"].items()
            if other["fields"].get(name) != value
        )
    return f"{topic} must be the same on all ranks; {found or 'the digests differ'} (odd ranks: {odd})."


def _first_words(problem: Exception) -> str:
    """The first line, without the place in its source and without its own advice."""
    line = re.sub(r"^\[\S+:\d+\] ", "", str(problem).splitlines()[0])
    return re.split(r" This (?:may|is) ", line)[0].rstrip(". ") or type(problem).__name__


def _state_of(group: dist.ProcessGroup) -> RingState:
    """What the contexts of a group share."""
    if group not in _states:
        ranks = tuple(dist.get_process_group_ranks(group))
        _states[group] = RingState((StepLog(group.group_name, ranks, dist.get_rank(group)),))
    return _states[group]


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, RingState] = weakref.WeakKeyDictionary()


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each kind of device, as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    pairs = dist.distributed_c10d.get_backend_config(group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)


def meeting_device(group: dist.ProcessGroup) -> torch.device:
    """Where small numbers of a group's ranks are exchanged: on the CPU where it can, else on this process's GPU."""
    if backends(group).get("cpu") == "gloo":
        return torch.device("cpu")
    return cuda_device(group)


def cuda_device(group: dist.ProcessGroup) -> torch.device:
    """The GPU that a group's messages of this process lie on: the one it is bound to, or the current one."""
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
