"""Known hard cases S: shapes. Rows of different lengths are with the padding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hard_cases import by_kernel, by_layout, check, ring_plan, seen_mean

from ringspun import Causal, Documents, Full, Window, Zigzag
from ringspun.core.layout.base import Layout, Runs, drop_empty
from ringspun.testing.cases import Case, Shape, inputs
from ringspun.testing.torch import run_ring


@by_layout
@pytest.mark.parametrize(("seq_len", "ranks"), [(7, 3), (3, 3), (4, 4), (9, 4), (13, 6)])
def test_S1_lengths_that_do_not_divide(seq_len, ranks, layout):
    """S = 7 on 3, S = R, S = 2R + 1: nothing is padded in silence, exactly S rows come back."""
    for mask in (Causal(), Full()):
        check(Case(ranks, seq_len, mask, layout))


def test_S1_2999_tokens_on_4_ranks():
    """chunk() of 2999 over 4 gives unequal parts, and the halves of the last do not fit."""
    shape = Shape(batch=1, heads=1, kv_heads=1, head_size=4, value_size=3)
    check(Case(4, 2999, Causal(), Zigzag(), shape=shape))


def test_S1_32769_tokens_on_4_ranks():
    """One token more than a power of two."""
    seq_len, window = 32769, 6
    plan = ring_plan(4, Zigzag(), Window(window), seq_len)
    assert plan.partition.core.tokens.tolist() == [8193, 8192, 8192, 8192]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, seq_len, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    out = plan.attention(*(plan.partition.shard(t, dim=2) for t in (q, k, v)), kernel="eager")
    out = plan.partition.gather(out, dim=2)
    assert out.shape == (1, 1, seq_len, 4)
    # the last `window` keys of each row, from padded copies: [S, window, 4]
    keys, values = (
        torch.cat([torch.zeros(window - 1, 4, dtype=torch.float64), t[0, 0]]).unfold(0, window, 1).mT for t in (k, v)
    )
    scores = (keys @ q[0, 0, :, :, None])[..., 0] / 2
    real = torch.arange(seq_len)[:, None] + torch.arange(window) >= window - 1
    weights = scores.masked_fill(~real, -math.inf).softmax(-1)
    torch.testing.assert_close(out[0, 0], (weights[:, None] @ values)[:, 0], rtol=0, atol=1e-13)


@by_layout
@by_kernel
@pytest.mark.parametrize(("ranks", "seq_len"), [(2, 4), (2, 3), (2, 2), (2, 1), (4, 2), (8, 1)])
def test_S3_very_short_sequences(ranks, seq_len, kernel, layout):
    """Chunks of one token, and ranks with none."""
    shape = Shape(batch=1, heads=1, kv_heads=1, head_size=4, value_size=4)
    for mask in (Causal(), Full(), Window(2)):
        check(Case(ranks, seq_len, mask, layout, shape=shape), kernel)


@by_kernel
@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 7), (8, 1), (4, 2)])
def test_S5_grouped_heads(heads, kv_heads, kernel):
    """dk and dv keep the key heads' number and sum over the group."""
    shape = Shape(batch=1, heads=heads, kv_heads=kv_heads, head_size=6, value_size=5)
    case = Case(2, 15, Causal(), Zigzag(), shape=shape)
    check(case, kernel)
    found = run_ring(case, inputs(case), kernel=kernel)
    assert found["dk"].shape == (1, kv_heads, 15, 6) and found["dv"].shape == (1, kv_heads, 15, 5)


@dataclass(frozen=True)
class Dealt(Layout):
    """Slices of given lengths.

        dealt((5, 4, 7))    rank 0: 0 .. 4    rank 1: 5 .. 8    rank 2: 9 .. 15

    Args:
        tokens: of each rank.
    """

    tokens: tuple[int, ...]

    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        assert ring_size == len(self.tokens) and seq_len == sum(self.tokens)
        edges = np.cumsum([0, *self.tokens])
        ranks = np.arange(ring_size)
        return drop_empty(np.stack([ranks, edges[:-1], edges[1:], np.ones_like(ranks)], axis=1))


@by_kernel
@pytest.mark.parametrize("tokens", [(5, 4, 7), (9, 0, 3)], ids=str)
def test_S8_ranks_that_hold_different_numbers_of_keys(tokens, kernel):
    """Blocks padded to one size: a key of zeros has score 0, not -inf, and takes weight."""
    seq_len = sum(tokens)
    plan = ring_plan(3, Dealt(tokens), Full(), seq_len)
    assert plan.partition.core.tokens.tolist() == list(tokens)
    assert seen_mean(plan, kernel) == pytest.approx([(seq_len - 1) / 2] * seq_len, abs=1e-13)
    ones = torch.ones(1, 1, seq_len, 2, dtype=torch.float64)
    out, lse = plan.attention(0 * ones, 0 * ones, ones, return_lse=True, kernel=kernel)
    torch.testing.assert_close(out, ones, rtol=0, atol=1e-15)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(seq_len)), rtol=0, atol=1e-15)
    causal = seen_mean(plan.with_mask(Causal()), kernel)
    assert causal == pytest.approx([i / 2 for i in range(seq_len)], abs=1e-13)
    for mask in (Full(), Causal(), Window(6)):
        check(Case(3, seq_len, mask, Dealt(tokens)), kernel)


@by_kernel
def test_S8_queries_dealt_otherwise_than_keys(kernel):
    """Ranks with queries and no key, and with keys and no query."""
    for layout, key_layout in ((Dealt((5, 4, 7)), Dealt((9, 0, 3))), (Dealt((0, 9, 7)), Dealt((1, 0, 11)))):
        for mask, start in ((Full(), 0), (Causal(), -4)):
            check(Case(3, 16, mask, layout, key_len=12, key_layout=key_layout, query_start=start), kernel)


@by_kernel
@by_layout
def test_S12_sizes_all_equal_and_all_different(layout, kernel):
    """The sequence taken for the heads goes unnoticed where S == H."""
    same = Shape(batch=16, heads=16, kv_heads=16, head_size=16, value_size=16)
    check(Case(2, 16, Causal(), layout, shape=same), kernel)
    check(Case(2, 17, Causal(), layout, shape=Shape(batch=3, heads=10, kv_heads=5, head_size=7, value_size=4)), kernel)
