"""Kernels that keep a state of their own from the first step of a ring to the last: the protocol, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hard_cases import judged
from torch import Tensor

from ringspun import Causal, Contiguous, Documents, Striped, Window, Zigzag
from ringspun.testing.cases import Arguments, Case, Shape, inputs
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.kernels import Call, Eager, accumulate
from ringspun.torch.kernels.accumulate import AccumulatingKernel, Accumulator, Result
from ringspun.torch.kernels.base import Block, Gradients, Saved, StepTiles


class Kept(Accumulator):
    """Sums of ``exp(score)`` and of ``exp(score) * v``, never normalised before the end: fine for small scores."""

    def __init__(self, owner: Keeping, result: Result) -> None:
        self.owner, self.result = owner, result
        self.acc = result.room(result.shape, torch.float64).fill_(0)
        self.total = torch.zeros(result.shape[:-1], dtype=torch.float64)

    def step(self, block: Block, tiles: StepTiles, heads: slice) -> None:
        self.owner.steps += 1
        group = block.q.shape[1] // block.k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (block.k, block.v))
        for b0, b1, q0, q1, k0, k1, lo, hi in tiles.bands:
            batch = slice(b0, None if b1 < 0 else b1)
            behind = torch.arange(q0, q1)[:, None] - torch.arange(k0, k1)
            seen = (behind >= lo) & (behind <= hi)
            weights = (block.q[batch, :, q0:q1] @ k[batch, :, k0:k1].mT * block.scale).exp() * seen
            self.acc[batch, heads, q0:q1] += weights @ v[batch, :, k0:k1]
            self.total[batch, heads, q0:q1] += weights.sum(-1)

    def finish(self, sinks: Tensor | None, parts: Sequence[slice]) -> tuple[Tensor, Tensor]:
        self.owner.finished += 1
        if sinks is not None:
            self.total += sinks.exp()[:, None]
        self.acc /= self.total.where(self.total > 0, 1.0)[..., None]
        return self.acc.to(self.result.dtype), self.total.log()


class Keeping(AccumulatingKernel):
    name = "keeping"

    def __init__(self) -> None:
        self.steps = self.finished = 0

    def refuses(self, call: Call) -> str | None:
        return None

    def start(self, result: Result) -> Accumulator:
        return Kept(self, result)

    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        yield from Eager().backward(block, saved, tiles)


SHAPE = Shape(2, 4, 2, 5, 3)
MASKS = {
    "causal": Causal(),
    "window and padding": Window(9) & Documents([6, 11], [2, 9]),
    "rows of a batch": (Causal(), Window(4)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_one_state_lives_from_the_first_step_to_the_last(mask, layout):
    """Merged twice, dropped at a step, or of another rank: anything but the sums over all steps is not the oracle."""
    case = Case(3, 23, mask, layout, shape=SHAPE, arguments=Arguments(sinks=True))
    kernel = Keeping()
    judged(case, run_ring(case, inputs(case), kernel=kernel))
    assert kernel.finished == case.ranks and kernel.steps >= 2 * case.ranks


@pytest.mark.parametrize("route", ["direct", "bidirectional", "all_gather(1)", "double_ring(2)"])
def test_every_route_shows_a_state_its_keys_once(route):
    """`all_gather` brings some heads at a time, which are parts of the state."""
    case = Case(4, 23, Causal(), Zigzag(), shape=SHAPE)
    context = ContextParallel(Loopback(4), layout=Zigzag(), route=route)
    judged(case, run_ring(case, inputs(case), context, kernel=Keeping()))


def test_a_rank_without_keys_or_without_tokens():
    for seq_len in (1, 2, 3):
        case = Case(4, seq_len, Causal(), Contiguous(), shape=SHAPE)
        judged(case, run_ring(case, inputs(case), kernel=Keeping()))


def test_a_step_by_itself_is_one_partial_result():
    """What those see that drive a kernel without a ring: rows without keys are 0 and -inf."""
    q, k, v = torch.randn(1, 2, 6, 4).double(), torch.randn(1, 1, 5, 4).double(), torch.randn(1, 1, 5, 3).double()
    block, tiles = Block(q, k, v, 0.5), StepTiles(torch.tensor([[0, -1, 2, 6, 0, 5, 0, 9]]).numpy())
    (found,) = Keeping().forward(block, tiles)
    merged = accumulate.Merging(Eager(), Result(found.out.shape, q.dtype, q.device, lambda s, t: q.new_empty(s)))
    merged.step(block, tiles, slice(0, 2))
    out, lse = merged.finish(None, [slice(0, 6)])
    assert torch.equal(found.lse.isneginf(), lse.isneginf()) and found.lse[0, 0].isneginf().tolist()[:3] == [
        True
    ] * 2 + [False]
    torch.testing.assert_close(found.out, out, rtol=0, atol=1e-13)
    torch.testing.assert_close(found.lse, lse, rtol=0, atol=1e-13)
