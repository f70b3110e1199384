"""`sync_steps`: the same bits, and no rank begins a step before all have ended the one before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks_dead_or_late import in_step, unlike

from ringspun import Anchors, Causal, Contiguous, Full, Striped, Window, Zigzag
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.kernels import AtenCpu

pytestmark = [pytest.mark.timeout(60)]


def outcome(size: int, mask: Any, layout: Any, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = [torch.randn(2, 2, 23, 4, generator=generator).requires_grad_() for _ in range(3)]
    plan = ContextParallel(Loopback(size), layout=layout, **options).plan(23, mask)
    out, lse = plan.attention(*x, return_lse=True)
    dout = torch.randn(out.shape, generator=generator)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out * dout).sum() + lse.sum(), x)]


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal() & (Window(5) | Anchors(2))], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_same_bits(size, mask, layout):
    for a, b in zip(outcome(size, mask, layout), outcome(size, mask, layout, sync_steps=True), strict=True):
        assert torch.equal(a, b)


class Counted(Loopback):
    """Notes which rank runs."""

    def _advance(self, rank):
        self.rank = rank.number
        super()._advance(rank)


class Steps(AtenCpu):
    """Counts the steps that each rank began, forward and backward; `apart`: most by which two ranks differed."""

    def __init__(self, ring: Counted) -> None:
        self.ring, self.begun, self.apart = ring, [0] * ring.size, 0

    def _begin(self) -> None:
        self.begun[self.ring.rank] += 1
        self.apart = max(self.apart, max(self.begun) - min(self.begun))

    def forward(self, block, tiles):
        self._begin()
        return super().forward(block, tiles)

    def backward(self, block, saved, tiles):
        self._begin()
        yield from super().backward(block, saved, tiles)


@pytest.mark.parametrize("together", [False, True])
def test_no_rank_is_two_steps_ahead(together):
    """Of another; without it, in some order of these, one is."""
    apart = []
    for seed in range(10):
        ring = Counted(4, seed=seed)
        plan, steps = ContextParallel(ring, sync_steps=together).plan(16, Full()), Steps(ring)
        x = [torch.ones(1, 1, 16, 2, requires_grad=True) for _ in range(3)]
        plan.attention(*x, kernel=steps).sum().backward()
        assert len(set(steps.begun)) == 1
        apart.append(steps.apart)
    assert (max(apart) == 1) == together


@pytest.mark.processes
def test_between_processes_the_bits_are_the_same_and_a_hang_names_its_step(pools):
    pool = pools(3)
    for rank, (same, kind, words) in enumerate(pool.run(in_step, 1, timeout_s=30)):
        assert same
        if rank != 1:
            assert kind == "PeerError"
            assert "agreement on the end of step 1 of call 4 (forward) must finish within 1 s" in words
            assert "ring rank 1 has not come, it last agreed on the end of step 0 of call 4 (forward)" in words
    pool.restart()


@pytest.mark.processes
def test_ranks_that_do_not_all_sync_hear_of_it(pools):
    for kind, words in pools(3).run(unlike, timeout_s=30):
        assert kind == "PlanMismatchError" and "sync_steps is True on ring rank 2 and False on ring rank 0" in words
