"""A ring in one thread whose time is counted, not measured: every rank has a clock, compute and links take what they
are told to take. So a verdict is the same in every run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringspun.core import tiles as tl
from ringspun.core.layout import Layout
from ringspun.core.mask import Mask
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.drivers import Transfer
from ringspun.torch.kernels import AtenCpu

US = 1000
START = 10**15


class VirtualRing(Loopback):
    """Args: pair_us: what a pair of tokens costs a ring rank. link_us: what a message takes from rank to rank."""

    def __init__(self, size: int, pair_us: Callable[[int], float], link_us: Callable[[int, int], float]) -> None:
        super().__init__(size, seed=size)
        self.pair_us, self.link_us = pair_us, link_us
        self.now = [START] * size
        self.rank = 0
        self._posted: dict[int, int] = {}
        self._lands: dict[int, int] = {}
        for rank, log in enumerate(self.state.logs):
            log.monotonic = lambda rank=rank: self.now[rank]
            log.wall = lambda rank=rank: self.now[rank] + 5

    def _advance(self, rank) -> None:
        self.rank = rank.number
        if rank.waiting is not None:
            self.now[self.rank] = max([self.now[self.rank], *(self._lands[id(t)] for t in rank.waiting.transfers)])
        super()._advance(rank)

    def _post(self, rank, transfers):
        self._posted.update((id(t), self.now[rank]) for t in transfers)
        self._kept = getattr(self, "_kept", []) + transfers  # so that no id is used twice
        return super()._post(rank, transfers)

    def deliver(self, sender: int, receiver: int, sent: Transfer, wanted: Transfer) -> None:
        lands = max(self._posted[id(sent)], self._posted[id(wanted)]) + int(US * self.link_us(sender, receiver))
        self._lands[id(sent)] = self._lands[id(wanted)] = lands
        super().deliver(sender, receiver, sent, wanted)


class CountedKernel(AtenCpu):
    """Computes as ever, and takes the ring's virtual time for it."""

    def __init__(self, ring: VirtualRing) -> None:
        self.ring = ring

    def _spend(self, tiles) -> None:
        ring = self.ring
        pairs = int(tl.count_pairs(tiles.tiles).sum())
        ring.now[ring.rank] += int(US * ring.pair_us(ring.rank) * pairs)

    def forward(self, block, tiles):
        self._spend(tiles)
        return super().forward(block, tiles)

    def backward(self, block, saved, tiles):
        self._spend(tiles)
        yield from super().backward(block, saved, tiles)


def run(ring: VirtualRing, mask: Mask, layout: Layout, *, calls: int = 2, tokens: int = 64) -> None:
    """A few calls, forward and backward."""
    kernel = CountedKernel(ring)
    plan = ContextParallel(ring, layout=layout).plan(tokens, mask)
    x = [torch.ones(1, 1, tokens, 2, requires_grad=True) for _ in range(3)]
    for _ in range(calls):
        plan.attention(*x, kernel=kernel).sum().backward()
