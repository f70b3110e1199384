"""A driver around another: what tests and measurements put between a ring and whatever moves its messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringspun.torch.drivers import Driver
from ringspun.torch.drivers.base import RankProgram, T


class Around(Driver):
    """Does what `driver` does, with every rank's program changed.

    Args:
        driver: moves the messages.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.size, self.ring_ranks, self.devices = driver.size, driver.ring_ranks, driver.devices
        self.counts, self.state = driver.counts, driver.state

    @abstractmethod
    def changed(self, rank: int, program: RankProgram[T]) -> RankProgram[T]:
        """What `program` does, with what this driver does to it."""

    def run(self, programs: Sequence[RankProgram[T]]) -> list[T]:
        ranks = zip(self.ring_ranks, programs, strict=True)
        return self.driver.run([self.changed(rank, program) for rank, program in ranks])

    def clock(self, ring_rank: int) -> Callable[[], float] | None:
        return self.driver.clock(ring_rank)

    def defers(self, device: torch.device) -> bool:
        return self.driver.defers(device)

    def agree(self, topic: str, digest: bytes, fields: dict[str, str], failure: Exception | None = None) -> None:
        self.driver.agree(topic, digest, fields, failure)

    def all_gather_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        return self.driver.all_gather_rows(x, rows)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.driver.all_reduce(x)

    def report(self, failure: BaseException) -> None:
        self.driver.report(failure)
