"""The executor does what the schedule says: masks and layouts that it has never seen work, an edited schedule shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from foreign import Checkerboard, Diagonals, RandomRuns
from hard_cases import judged
from on_ranks import run_cases

from ringspun import Causal, Contiguous, Full, Zigzag
from ringspun.core import tiles as tl
from ringspun.core.passes import Pass
from ringspun.core.route.base import Action, MessageColumn
from ringspun.core.schedule import Schedule
from ringspun.errors import TransferError
from ringspun.testing.cases import Case, inputs
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel, Loopback

S = 26
CASES = [
    *(Case(ranks, S, Checkerboard(3), RandomRuns(ranks)) for ranks in (1, 2, 3, 4, 7)),
    *(Case(ranks, S, Causal() & Checkerboard(2), RandomRuns(9, pieces=5)) for ranks in (3, 4)),
    *(Case(3, S, mask, RandomRuns(4)) for mask in (Diagonals(3), Causal() | Checkerboard(5), Full())),
    *(Case(4, S, Checkerboard(4), layout) for layout in (Contiguous(), Zigzag())),
]


def test_the_foreign_masks_say_the_same_twice():
    for mask in (Checkerboard(1), Checkerboard(3), Diagonals(2), Diagonals(5)):
        for sides in ((S, S, 0), (7, S, 11), (S, 7, -9)):
            q_len, k_len, q_start = sides
            found = tl.rg.as_array(mask.regions(*sides), *sides)
            assert np.array_equal(mask.as_array(q_len, k_len, q_start=q_start), found)


def test_the_foreign_layout_leaves_some_ranks_without_tokens():
    deals = [RandomRuns(case.layout.seed, 5) for case in CASES if isinstance(case.layout, RandomRuns)]
    tokens = [ContextParallel(Loopback(7), layout=deal).partition(S).core.tokens for deal in deals]
    assert any((t == 0).any() for t in tokens)


@pytest.mark.parametrize("kernel", ["aten_cpu", "eager"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mask_and_a_layout_from_outside_on_a_loopback(case, kernel):
    judged(case, run_ring(case, inputs(case), kernel=kernel))


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_mask_and_a_layout_from_outside_over_processes(pools, ranks):
    cases = [case for case in CASES if case.ranks == ranks]
    for found in pools(ranks).run(run_cases, cases):
        for case, tensors in zip(cases, found, strict=True):
            judged(case, tensors)


def one_tile_less(one: Pass, step: int = 1) -> Pass:
    """The pass with the last key of the first tile of `step` taken away."""
    tiles = one.tiles.copy()
    tiles[one.tile_offsets[step], tl.K1] -= 1
    return replace(one, tiles=tiles)


def gradients(plan) -> list[torch.Tensor]:
    """out, and the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(1, 2, S, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]
    out = plan.attention(*x)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    return [out.detach(), *torch.autograd.grad(out, x, weight)]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_one_edited_tile_changes_the_result(which, rank):
    """Neither pass looks anything up elsewhere: an edit of the one shows there, and in no other rows."""
    context = ContextParallel(Loopback(3), layout=Contiguous(), backward="keys")
    part = context.partition(S)
    schedules = context.geometry.schedule(Full(), S)
    assert all(len(s.forward.tiles_of(1)) for s in schedules)
    edited = replace(schedules[rank], **{which: one_tile_less(getattr(schedules[rank], which))})
    assert edited != schedules[rank] and edited.digest != schedules[rank].digest
    right = gradients(part.plan(Full()))
    found = gradients(part.plan(with_one(schedules, rank, edited)))
    rows = part.slices[rank]
    changed = [not torch.equal(a, b) for a, b in zip(right, found, strict=True)]
    assert changed[0] == (which == "forward") and all(changed[1:])
    if which == "forward":
        assert (right[0] != found[0]).any(-1).any(1)[0].nonzero().flatten().tolist() == list(range(S))[rows]
    else:
        assert (right[1] != found[1]).any(-1).any(1)[0].nonzero().flatten().tolist() == list(range(S))[rows]


def test_a_message_taken_away_leaves_its_receiver_waiting_and_is_named():
    context = ContextParallel(Loopback(3), layout=Contiguous())
    schedules = context.geometry.schedule(Full(), S)
    one = schedules[0].forward
    sends = one.messages[:, MessageColumn.ACTION] == Action.SEND
    fewer = replace(one, messages=np.delete(one.messages, np.flatnonzero(sends)[-1], axis=0))
    plan = context.partition(S).plan(with_one(schedules, 0, replace(schedules[0], forward=fewer)))
    waits = r"every rank must advance; all wait: .*ring rank 1 waits for .*KV of ring rank 2"
    with pytest.raises(TransferError, match=waits):
        gradients(plan)


def with_one(schedules: tuple[Schedule, ...], rank: int, edited: Schedule) -> tuple[Schedule, ...]:
    return (*schedules[:rank], edited, *schedules[rank + 1 :])
