"""What a driver is: it moves the messages that ring generators yield, and knows nothing of attention.

A rank's part of a call is a generator. It yields a list of `Transfer` to start them and gets a ticket back; it yields a
ticket to wait for it. Everything else is plain code between the yields.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringspun.core.route.base import Action
from ringspun.core.wire import Header
from ringspun.steplog import StepLog, What, dump

T = TypeVar("T")


@dataclass(frozen=True)
class Transfer:
    """One message of one rank: `buffer` is a one-dimensional uint8 tensor, sent whole or filled whole.

    Args:
        action: send or receive. peer: ring rank at the other end. what: words for error messages.
        header: what the message says, or must say, of itself.
    """

    action: Action
    peer: int
    buffer: Tensor
    what: str
    header: Header | None = None


class Ticket:
    """Stands for transfers under way."""


@dataclass(frozen=True)
class Together(Ticket):
    """Waited for until every rank waits for it; `what` says for what, in words."""

    what: str


class Verdict(Ticket, ABC):
    """What messages that arrived say of themselves, kept on their device. A program shows it whenever there is more in
    it; the driver reads it when all that the call does is queued, for nobody can look at a device without waiting."""

    @abstractmethod
    def flag(self) -> Tensor:
        """Queue the comparison with what they must say: one bool ``[]`` on the device, whether anything differs."""

    @abstractmethod
    def judge(self) -> None:
        """Raise what differs, where the flag says so.

        Raises:
            TransferError: naming the first message that is not what it must be.
        """


RankProgram = Generator["list[Transfer] | Ticket", Any, T]


@dataclass
class Waits:
    """How long this process has waited for others so far (seconds)."""

    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around a wait."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


@dataclass
class Counts:
    """What went over the wire since the driver was made; equal to `ringspun.core.accounting`.

    Args:
        messages, bytes: sent, per (sender, receiver) in ring ranks. waits: for messages and in collectives.
    """

    messages: Counter[tuple[int, int]] = field(default_factory=Counter)
    bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    waits: Waits = field(default_factory=Waits)

    def sent(self, sender: int, transfer: Transfer) -> None:
        """Count one message."""
        self.messages[sender, transfer.peer] += 1
        self.bytes[sender, transfer.peer] += transfer.buffer.numel()


def digest_of(facts: object) -> bytes:
    """32 bytes that stand for plain data, for `Driver.agree`."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=32).digest()


@dataclass(eq=False)
class RingState:
    """What all contexts that use one group have in common; it advances alike on every rank.

    Args:
        calls: attention calls so far, forward and backward; a call's number stands in its headers.
        logs: of the ranks that this process plays. log_dir: where they are dumped when the ring breaks; None: nowhere.
        contexts: contexts that have made a plan. agreed_sizes: of the last call's messages.
        opened: whether the driver of a group that needs it has opened its connections.
        broken: why the ring can no longer be used, if it cannot: a call ended on this rank where others may still be in
            it, so that the next one would pair with the wrong messages.
    """

    logs: tuple[StepLog, ...]
    log_dir: str | None = None
    calls: int = 0
    contexts: int = 0
    agreed_sizes: str = ""
    opened: bool = False
    broken: str | None = None

    def log_failure(self, failure: BaseException, words: str) -> None:
        """Log that the ring ended here, and dump the log where there is a folder for it; the error tells of it."""
        for log in self.logs:
            log.note(-1, -1, What.FAILED, words=words)
        if self.log_dir is None:
            return
        try:
            failure.add_note(
                f"step log: {dump(self.log_dir, reason='error', failure=words)}. Run `ringspun explain-hang`."
            )
        except (OSError, ValueError) as problem:  # the error itself matters more
            failure.add_note(f"step log not written: {problem}")


class Driver(ABC):
    """Moves messages for the ranks that this process plays.

    Args:
        size: ranks in the ring. ring_ranks: those that this process plays. state: shared by the group's contexts.
    """

    size: int
    state: RingState
    ring_ranks: tuple[int, ...]
    devices: tuple[str, ...] | None = None
    """Kinds of device whose tensors it can move; None: any."""
    counts: Counts

    def clock(self, ring_rank: int) -> Callable[[], float] | None:
        """What tells a rank's time (seconds); None where ranks take turns, so that it would tell nothing of links."""
        return time.perf_counter if len(self.ring_ranks) == 1 else None

    def defers(self, device: torch.device) -> bool:
        """Whether messages on a device are judged at the end of a call (`Verdict`) rather than on arrival."""
        return device.type != "cpu"

    @abstractmethod
    def run(self, programs: Sequence[RankProgram[T]]) -> list[T]:
        """Run one program per rank of `ring_ranks` to its end; their results in order.

        Raises:
            PeerError: a peer is dead or late.
        """

    @abstractmethod
    def agree(self, topic: str, digest: bytes, fields: dict[str, str], failure: Exception | None = None) -> None:
        """Collective: return when all ranks brought the same 32-byte `digest`.

        Args:
            topic: what is agreed on, in words. fields: named values to tell apart when they differ.
            failure: an error of this rank alone; it joins with a reserved digest so that nobody waits for it.
        Raises:
            PlanMismatchError: digests differ; names rank and field. PeerError: another rank brought a failure.
            The failure itself, on the rank that brought it.
        """

    @abstractmethod
    def all_gather_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Rows ``[T, ...]`` of every rank joined in rank order ``[S, ...]``; `rows` is T per rank."""

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks."""

    @abstractmethod
    def report(self, failure: BaseException) -> None:
        """This rank leaves a call that the others may be in: tell those that will time out, and break the ring."""
