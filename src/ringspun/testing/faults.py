"""Faults to order: what bad networks and dying ranks do, done to chosen messages of any driver.

ring = Faulty(Loopback(4), Flip(sender=0, step=1))                   # in one thread, or between processes:
ring = Faulty(Gloo(group, timeout_s=5.0), Kill(sender=2, backward=True))
plan = ContextParallel(ring, checks="checksum").plan(seq_len, mask)
plan.attention(q, k, v)                                              # raises; never returns a wrong number
ring.injected                                                        # what was done to which message, and when

`Faulty` stands between the ring and its driver and needs nothing of either: it changes what the ring posts. Whatever
it does with a message it does behind its sender's back, with a copy, as a network would: a sender waits only for what
was really posted in its name. A new kind of fault is one class with one method.
"""

from __future__ import annotations

import os
import random
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ringspun.core.route.base import Action
from ringspun.core.wire import Header, Payload
from ringspun.testing.around import Around
from ringspun.torch.drivers.base import Driver, RankProgram, T, Transfer


@dataclass(frozen=True)
class Fate:
    """What becomes of one message.

    Args:
        now: what is posted in its place. late: what goes out afterwards, when `delay_s` seconds are over and `behind`
            more messages of its link are gone, at the latest when its sender is done with the call.
        dies: whether the rank ends here.
    """

    now: tuple[Transfer, ...] = ()
    late: Transfer | None = None
    delay_s: float = 0.0
    behind: int = 0
    dies: bool = False


@dataclass(frozen=True, kw_only=True)
class Fault(ABC):
    """Something that happens once, to one message: on its link the `nth` of those that match all that is given.

    Args:
        sender, receiver: ring ranks. step: of the schedule. backward: whether in a backward call. payload: what it
            carries. call: number of the call on this ring, forward and backward counted together.
        nth: from 0. Where several links match, the one that gets so far first.
    """

    sender: int | None = None
    receiver: int | None = None
    step: int | None = None
    backward: bool | None = None
    payload: Payload | None = None
    call: int | None = None
    nth: int = 0

    befalls: ClassVar[Action] = Action.SEND
    """Whose end of the message it changes."""

    def matches(self, sender: int, receiver: int, header: Header | None) -> bool:
        """Whether a message is one of those that are counted."""
        facts: dict[str, Any] = {"sender": sender, "receiver": receiver}
        if header is not None:
            facts |= {"step": header.step, "payload": header.payload, "call": header.call}
            facts["backward"] = header.phase > 0
        wanted = {name: getattr(self, name) for name in _ADDRESS}
        return all(value is None or facts.get(name) == value for name, value in wanted.items())

    @abstractmethod
    def befall(self, message: Transfer, draw: random.Random) -> Fate:
        """What becomes of `message`. What is not given is taken from `draw`."""


_ADDRESS = tuple(f.name for f in fields(Fault) if f.name != "nth")


@dataclass(frozen=True, kw_only=True)
class Drop(Fault):
    """The message is lost."""

    def befall(self, message: Transfer, draw: random.Random) -> Fate:
        return Fate()


@dataclass(frozen=True, kw_only=True)
class Delay(Fault):
    """The message is late by `seconds`, and so is all that its sender does next. Ranks that share a thread have no
    clocks: there it leaves just before that."""

    seconds: float = 0.2

    def befall(self, message: Transfer, draw: random.Random) -> Fate:
        return Fate(late=_copied(message), delay_s=self.seconds)


@dataclass(frozen=True, kw_only=True)
class Duplicate(Fault):
    """The message comes twice, the second time after `behind` later ones of its link."""

    behind: int = 0

    def befall(self, message: Transfer, draw: random.Random) -> Fate:
        return Fate((message,), late=_copied(message), behind=self.behind)


@dataclass(frozen=True, kw_only=True)
class Reorder(Fault):
    """The message is overtaken by the next one of its link; where none follows in the call it is late."""

    def befall(self, message: Transfer, draw: random.Random) -> Fate:
        return Fate(late=_copied(message), behind=1)


@dataclass(frozen=True, kw_only=True)
class Truncate(Fault):
    """Only the first `keep` bytes come."""

    keep: int | None = None

    def befall(self, message: Transfer, draw: random.Random) -> Fate:
        keep = draw.randrange(message.buffer.numel()) if self.keep is None else self.keep
        copy = _copied(message)
        return Fate((replace(copy, buffer=copy.buffer[:keep]),))


@dataclass(frozen=True, kw_only=True)
class Flip(Fault):
    """Bit `bit` of the message is inverted; bits of the header come first."""

    bit: int | None = None

    def befall(self, message: Transfer, draw: random.Random) -> Fate:
        copy = _copied(message)
        bit = draw.randrange(8 * copy.buffer.numel()) if self.bit is None else self.bit
        copy.buffer[bit // 8] ^= 1 << bit % 8
        return Fate((copy,))


@dataclass(frozen=True, kw_only=True)
class Swap(Fault):
    """Two 8-byte `words` of the message change places: sums do not see it."""

    words: tuple[int, int] | None = None

    def befall(self, message: Transfer, draw: random.Random) -> Fate:
        copy = _copied(message)
        inside = copy.buffer[: copy.buffer.numel() // 8 * 8].view(torch.int64)
        a, b = self.words or _unlike(inside, draw)
        inside[[a, b]] = inside[[b, a]]
        return Fate((copy,))


@dataclass(frozen=True, kw_only=True)
class Stale(Fault):
    """The receiver is told that the message came, and finds in its buffer what was there before: the block of an
    earlier step or call, or whatever the memory held."""

    befalls = Action.RECEIVE

    def befall(self, message: Transfer, draw: random.Random) -> Fate:
        return Fate((replace(message, buffer=torch.empty_like(message.buffer)),))


@dataclass(frozen=True, kw_only=True)
class Kill(Fault):
    """The sender dies before it sends: its process is killed; where ranks share a process, it does nothing more."""

    def befall(self, message: Transfer, draw: random.Random) -> Fate:
        return Fate(dies=True)


KINDS: tuple[type[Fault], ...] = (Delay, Drop, Duplicate, Reorder, Truncate, Flip, Swap, Stale, Kill)


def random_fault(seed: int, messages: Mapping[tuple[int, int], int], *, kinds: Sequence[type[Fault]] = KINDS) -> Fault:
    """A fault of some kind in one of some messages; what it does there is drawn when it strikes.

    Args:
        seed: the same seed, the same fault. messages: how many there are, by (sender, receiver): what
            `Driver.counts.messages` says after calls in peace. kinds: to choose from.
    """
    draw = random.Random(seed)
    links = sorted(messages)
    if not links:
        raise ValueError("messages must hold at least one link; got none. A ring of one sends nothing.")
    sender, receiver = draw.choices(links, [messages[link] for link in links])[0]
    nth = draw.randrange(messages[sender, receiver])
    return draw.choice(kinds)(sender=sender, receiver=receiver, nth=nth)


@dataclass(frozen=True)
class Injected:
    """A fault that struck.

    Args:
        fault: which. sender, receiver: ring ranks. what: the message, in words. at_s: `time.monotonic()` then.
    """

    fault: Fault
    sender: int
    receiver: int
    what: str
    at_s: float


@dataclass
class _Late:
    transfer: Transfer
    due_s: float
    behind: int


class Faulty(Around):
    """A driver to whose messages `faults` happen, one to a message.

    Args:
        driver: moves the messages: a `Loopback`, a `Gloo`, your own. faults: each strikes once.
        seed: of what the faults leave open.
    """

    def __init__(self, driver: Driver, *faults: Fault, seed: int = 0) -> None:
        super().__init__(driver)
        self.injected: list[Injected] = []
        self._seed = seed
        self._unwaited: list[Any] = []  # nobody waits for these, and a message must not be freed under way
        self.arm(*faults)

    def arm(self, *faults: Fault) -> None:
        """From now on these may strike, and no others; counting begins anew.

        Raises:
            ValueError: a fault between ranks that this ring does not have, which would never strike.
        """
        for fault in faults:
            ends = [rank for rank in (fault.sender, fault.receiver) if rank is not None]
            if any(not 0 <= rank < self.size for rank in ends):
                raise ValueError(f"fault must be between ring ranks 0 to {self.size - 1}; got {fault}.")
            if fault.nth < 0:
                raise ValueError(f"nth must be at least 0; got {fault}. Counting begins at 0.")
        self._armed = list(faults)
        self._matched: Counter[tuple[int, int, int]] = Counter()

    def changed(self, rank: int, program: RankProgram[T]) -> RankProgram[T]:
        """What `program` does, with what happens to its messages."""
        late: list[_Late] = []
        answer: Any = None
        while True:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                yield from self._send_delayed(late)
                yield from self._send_late(late, lambda x: True)
                return end.value  # type: ignore[no-any-return]
            yield from self._send_delayed(late)
            if isinstance(asked, list):
                fates = [self._fate(rank, t) for t in asked]
                if any(fate.dies for fate in fates):
                    yield from self._die(rank)
                answer = yield [t for fate in fates for t in fate.now]
                for t in asked:
                    _pass_by(late, t)
                late += [_Late(f.late, time.monotonic() + f.delay_s, f.behind) for f in fates if f.late]
                yield from self._send_late(late, lambda x: x.behind <= 0 and x.due_s <= time.monotonic())
            else:
                answer = yield asked

    def _send_delayed(self, late: list[_Late]) -> Iterator[Any]:
        """The rank wants to go on: what is delayed goes first, for a link keeps its messages in order."""
        if len(self.ring_ranks) == 1:  # else nobody could move while this rank sleeps
            time.sleep(max([0.0, *(x.due_s - time.monotonic() for x in late)]))
        yield from self._send_late(late, lambda x: x.behind <= 0)

    def _send_late(self, late: list[_Late], due: Callable[[_Late], bool]) -> Iterator[Any]:
        for one in [x for x in late if due(x)]:
            late.remove(one)
            self._unwaited.append((yield [one.transfer]))

    def _fate(self, rank: int, message: Transfer) -> Fate:
        sends = message.action == Action.SEND
        ends = (rank, message.peer) if sends else (message.peer, rank)
        struck = None
        for number, fault in enumerate(self._armed):
            if fault.befalls == message.action and fault.matches(*ends, message.header):
                self._matched[number, *ends] += 1
                if struck is None and self._matched[number, *ends] == fault.nth + 1:
                    struck = number
        if struck is None:
            return Fate((message,))
        fault = self._armed[struck]
        self._armed[struck] = _Spent()
        self.injected.append(Injected(fault, *ends, message.what, time.monotonic()))
        return fault.befall(message, random.Random(f"{self._seed}, {ends}, {message.header}"))

    def _die(self, rank: int) -> Iterator[Any]:
        if len(self.ring_ranks) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        nothing = Transfer(Action.RECEIVE, rank, torch.empty(1, dtype=torch.uint8), "nothing more: it was killed")
        ticket = yield [nothing]
        while True:
            yield ticket


@dataclass(frozen=True, kw_only=True)
class _Spent(Fault):
    """A fault that has struck."""

    def matches(self, sender: int, receiver: int, header: Header | None) -> bool:
        return False

    def befall(self, message: Transfer, draw: random.Random) -> Fate:
        return Fate((message,))


def _copied(message: Transfer) -> Transfer:
    return replace(message, buffer=message.buffer.clone())


def _pass_by(late: list[_Late], message: Transfer) -> None:
    """`message` goes past those of its link that are held back."""
    for one in late:
        one.behind -= message.action == Action.SEND and one.transfer.peer == message.peer


def _unlike(words: Tensor, draw: random.Random) -> tuple[int, int]:
    """Two places with different words, where there are such."""
    a = draw.randrange(len(words))
    others = (words != words[a]).nonzero().flatten().tolist()
    return a, draw.choice(others or [a])
