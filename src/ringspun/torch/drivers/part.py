"""`Part`: some ranks of a loopback, or all of a group in another order, as a ring of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspun.torch.drivers.base import Counts, Driver, RankProgram, RingState, T, Together, Transfer, Waits


class Part(Driver):
    """Ranks of another driver, in an order of their own. Peers are counted in the part.

    Args:
        whole: the driver. ranks: of it, in the part's order: any of a loopback, whose ranks are in one thread; of
            another all, or this process alone.
    """

    def __init__(self, whole: Driver, ranks: Sequence[int]) -> None:
        self.whole, self.ranks = whole, tuple(ranks)
        self.size, self.devices, self.counts = len(self.ranks), whole.devices, whole.counts
        self.ring_ranks = tuple(i for i, rank in enumerate(self.ranks) if rank in whole.ring_ranks)
        self._here = len(self.ring_ranks) == self.size
        if not self._here and sorted(ranks) != list(range(whole.size)):
            raise ValueError(f"ranks must be all of the driver's {whole.size}; got {ranks}.")
        logs = dict(zip(whole.ring_ranks, whole.state.logs, strict=True))
        self.state = _PartState(whole.state, tuple(logs[self.ranks[i]] for i in self.ring_ranks))

    def defers(self, device: torch.device) -> bool:
        return self.whole.defers(device)

    def run(self, programs: Sequence[RankProgram[T]]) -> list[T]:
        mine = {self.ranks[i]: program for i, program in zip(self.ring_ranks, programs, strict=True)}
        found = self.whole.run([self._named(mine.get(rank)) for rank in self.whole.ring_ranks])
        results = dict(zip(self.whole.ring_ranks, found, strict=True))
        return [results[self.ranks[i]] for i in self.ring_ranks]  # type: ignore[misc]

    def _named(self, program: RankProgram[T] | None) -> RankProgram[T | None]:
        """A rank's program, its peers named as the whole does; of a rank outside of the part, none."""
        answer: Any = None
        while program is not None:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if isinstance(asked, Together) and self._here:
                answer = None  # ranks of one thread need not wait for each other, and the other parts' would not come
                continue
            answer = yield [replace(t, peer=self.ranks[t.peer]) for t in asked] if isinstance(asked, list) else asked
        return None

    def agree(self, topic: str, digest: bytes, fields: dict[str, str], failure: Exception | None = None) -> None:
        if not self._here:
            self.whole.agree(topic, digest, fields, failure)
        elif failure is not None:
            self.whole.report(failure)
            raise failure

    def all_gather_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        if self._here:
            return x
        order = np.argsort(self.ranks).tolist()  # of the part's ranks, as the whole counts them
        parts = torch.split(self.whole.all_gather_rows(x, [rows[i] for i in order]), [rows[i] for i in order])
        return torch.cat([parts[rank] for rank in self.ranks])

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self._here else self.whole.all_reduce(x)

    def report(self, failure: BaseException) -> None:
        self.whole.report(failure)


class CountsOfPart(Counts):
    """Counts of a driver whose ranks are some of another's, kept there.

    Args:
        whole: the other's. ranks: this one's, as the other counts them.
    """

    def __init__(self, whole: Counts, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, tuple(ranks)

    @property
    def messages(self) -> Counter[tuple[int, int]]:  # type: ignore[override]
        return self._whole.messages

    @property
    def bytes(self) -> Counter[tuple[int, int]]:  # type: ignore[override]
        return self._whole.bytes

    @property
    def waits(self) -> Waits:  # type: ignore[override]
        return self._whole.waits

    def sent(self, sender: int, transfer: Transfer) -> None:
        self._whole.sent(self._ranks[sender], replace(transfer, peer=self._ranks[transfer.peer]))


class _PartState(RingState):
    """Counts calls with the whole; what was agreed on is the part's own."""

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
