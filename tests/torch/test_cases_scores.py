"""Known hard cases N4 and N10: scores of 10,000 and more, and products beyond float16."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hard_cases import by_kernel, by_layout, ring_plan

from ringspun import Causal, Contiguous, Full, Striped, Window, Zigzag
from ringspun.core.layout import Layout
from ringspun.core.mask import Mask
from ringspun.core.partition import Partition
from ringspun.testing.cases import Arguments, Case, Inputs, Shape, inputs, reference
from ringspun.testing.torch import rounded, run_ring

SWINGS = (1e4, -1e4, 9999.0, 0.0)
"""Scores of a rank's keys: two of them so near that both count, the others beyond all reach."""


def swinging(case: Case, levels: tuple[float, ...]) -> Inputs:
    """Scores that are ``+-levels[ring rank that holds the key]`` and a bit: +- by the query. Exact in float32."""
    given, rng = inputs(case), np.random.default_rng(case.seed)
    part = Partition(case.seq_len, case.ranks, case.layout)
    owner = np.repeat(np.arange(case.ranks), part.tokens)[part.inverse()]
    q, k = (rng.integers(-4, 5, x.shape) / 8 for x in (given.q, given.k))
    q[..., 0] = 64.0 * rng.choice([-1, 1], q.shape[:-1])
    k[..., 0] = np.asarray(levels)[owner] / 64.0
    return replace(rounded(case, given), q=q, k=k)


@by_kernel
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("layout", "mask"), [(Contiguous(), Full()), (Zigzag(), Causal()), (Striped(), Causal() & Window(11))], ids=str
)
def test_N4_block_maxima_that_swing_by_10000_in_every_order(layout: Layout, mask: Mask, dtype, kernel):
    """Every order in which the blocks' maxima can arrive, and every order of events.

    An lse near 1e4 is known to 1e4 eps, and so are the weights; gradients by q and k are as large as k and q.
    """
    shape = Shape(batch=1, heads=4, kv_heads=2, head_size=3, value_size=2)
    lowest: list[float] = []
    for seed, levels in enumerate(itertools.permutations(SWINGS)):
        case = Case(4, 14, mask, layout, dtype, shape, seed, Arguments(scale=1.0))
        given = swinging(case, levels)
        right = reference(case, given)
        lowest.append(right.lse.min())
        assert right.lse.max() > 9990
        found = run_ring(case, given, kernel=kernel)
        unit = 1e4 * np.finfo(dtype).eps
        sizes = {"out": 1, "lse": 1, "dq": np.abs(given.k).max(), "dk": np.abs(given.q).max(), "dv": 1}
        for name, size in sizes.items():
            np.testing.assert_allclose(found[name], getattr(right, name), rtol=0, atol=8 * unit * size, err_msg=name)
    assert mask == Full() or min(lowest) < -9000  # rows that see low blocks alone


@by_kernel
def test_N4_blocks_that_rise_and_rise(kernel):
    """Each block far above all before it, up to 1e4: the running result is thrown away and begun again."""
    seq_len = 16
    plan = ring_plan(seq_len, Striped(), Full(), seq_len)
    v = torch.arange(float(seq_len)).view(1, 1, -1, 1).requires_grad_()
    k = (torch.linspace(-1e4, 1e4, seq_len)).view(1, 1, -1, 1).requires_grad_()
    q = torch.ones(1, 1, seq_len, 1, requires_grad=True)
    out, lse = plan.attention(q, k, v, scale=1.0, return_lse=True, kernel=kernel)
    assert out.flatten().tolist() == [seq_len - 1.0] * seq_len and lse.flatten().tolist() == [1e4] * seq_len
    dq, dk, dv = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    last = torch.arange(seq_len) == seq_len - 1
    assert dq.flatten().tolist() == [1e4] * seq_len
    assert torch.equal(dk.flatten(), seq_len * last.float()) and torch.equal(dv.flatten(), seq_len * last.float())


@by_kernel
@by_layout
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_N10_float16_scores_that_overflow_before_they_are_scaled(mask, layout, kernel):
    """40 x 40 x 64 = 102400 is beyond float16, 12800 after scaling is not."""
    plan = ring_plan(2, layout, mask, 64)
    q = torch.full((1, 1, 64, 64), 40.0, dtype=torch.float16, requires_grad=True)
    v = torch.randn(1, 1, 64, 8, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    k, shard, gather = q.detach().clone().requires_grad_(), plan.partition.shard, plan.partition.gather
    out, lse = plan.attention(*(shard(t, dim=2) for t in (q, k, v)), return_lse=True, kernel=kernel)
    out, lse = gather(out, dim=2), gather(lse, dim=2)
    weights = torch.from_numpy(mask.as_array(64)).double()
    weights /= weights.sum(1, keepdim=True)
    # an lse of 12800 is known to 2^-10 in float32, so a merged value may fall on float16's other neighbour
    torch.testing.assert_close(out[0, 0].double(), (weights @ v[0, 0].double()).half().double(), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse[0, 0].double(), 12800 - weights.amax(1).log(), rtol=2e-7, atol=0)
    dq, dk, dv = torch.autograd.grad(out.float().sum(), (q, k, v))
    torch.testing.assert_close(dv[0, 0].double(), weights.sum(0)[:, None].expand(64, 8), rtol=2e-3, atol=1e-3)
    assert dq.isfinite().all() and dk.isfinite().all()


@by_kernel
def test_N10_the_reporter_s_numbers(kernel):
    """Largest q 576 and k 383; one key stands out, so the output is its value exactly."""
    plan = ring_plan(2, Zigzag(), Full(), 8)
    q, k = torch.full((1, 1, 8, 4), 576.0).half(), torch.full((1, 1, 8, 4), -383.0).half()
    k[:, :, 5] = 383
    v = torch.randn(1, 1, 8, 3, generator=torch.Generator().manual_seed(0)).half()
    shard = plan.partition.shard
    out = plan.attention(*(shard(t, dim=2) for t in (q, k, v)), scale=0.01, kernel=kernel)
    assert torch.equal(out, v[:, :, 5:6].expand_as(out))
