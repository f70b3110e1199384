"""Ring attention in one thread equals dense attention: every mask, layout, ring size, kernel and dtype."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ringspun import Causal, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.testing.cases import LAYOUTS, Case, Shape, all_masks, inputs, reference
from ringspun.testing.comparison import TENSORS, errors, judge
from ringspun.testing.torch import rounded, run_dense, run_ring
from ringspun.torch import ContextParallel, Loopback

KERNELS = ("aten_cpu", "eager")
LENGTHS = {"aten_cpu": (1, 2, 7, 77), "eager": (1, 7, 29)}
ODD = (Contiguous(), Zigzag(), Striped())


def check_float64(case: Case, kernel: str | None = None) -> None:
    given = inputs(case)
    found = errors(run_ring(case, given, kernel=kernel), reference(case, given))
    ok, bars = judge("float64", [found], [])
    assert ok, f"{case}: {found.worst}, bars {bars}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("ranks", "kernel"), [(r, "aten_cpu") for r in range(1, 9)] + [(r, "eager") for r in (1, 3, 8)]
)
def test_float64_equals_the_oracle(ranks, kernel, layout):
    """Every other mask, in turn: each meets every ring size, and every layout."""
    first = (ranks + LAYOUTS.index(layout)) % 2
    for seq_len in LENGTHS[kernel]:
        for seed, mask in list(enumerate(all_masks(seq_len)))[first::2]:
            check_float64(Case(ranks, seq_len, mask, layout, seed=seed), kernel)


@pytest.mark.parametrize("layout", ODD, ids=str)
def test_float64_equals_the_oracle_at_128_tokens(layout):
    for mask in (Full(), Causal(), Causal() & Window(40), Causal() & Documents([50, 1, 30], [0, 60, 90])):
        check_float64(Case(8, 128, mask, layout))


def test_empty_sequence_and_empty_batch():
    check_float64(Case(3, 0, Causal(), Zigzag()))
    for kernel in KERNELS:
        plan = ContextParallel(Loopback(3)).plan(9, Causal())
        q = torch.randn(0, 4, 9, 8, requires_grad=True)
        out, lse = plan.attention(q, q[:, :2], q[:, :2], return_lse=True, kernel=kernel)
        (out.sum() + lse.sum()).backward()
        assert out.shape == q.shape and lse.shape == q.shape[:-1] and q.grad.shape == q.shape


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_float32_is_as_exact_as_dense_float32(ranks, kernel):
    """Twice the error of dense attention in float32, plus 16 eps."""
    for seed, mask in enumerate(all_masks(61)):
        case = Case(ranks, 61, mask, ODD[seed % 3], dtype="float32", seed=seed)
        given = rounded(case, inputs(case))
        ref = reference(case, given)
        found = errors(run_ring(case, given, kernel=kernel), ref)
        ok, bars = judge("float32", [found], [errors(run_dense(case, given), ref)])
        assert ok, f"{case}: {found.worst}, bars {bars}"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", ODD, ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal(), Causal() & Window(20), Documents([31, 20, 45])], ids=str)
def test_bfloat16_is_as_exact_as_dense_bfloat16_by_rms(mask, layout, kernel):
    """Rms over 4 seeds: at most twice dense bfloat16's, and at R=8 at most 1.25 times its own at R=1."""
    alone, ring, dense = [], [], []
    for seed in range(4):
        case = Case(8, 96, mask, layout, dtype="bfloat16", seed=seed)
        given = rounded(case, inputs(case))
        ref = reference(case, given)
        ring.append(errors(run_ring(case, given, kernel=kernel), ref))
        alone.append(errors(run_ring(replace(case, ranks=1), given, kernel=kernel), ref))
        dense.append(errors(run_dense(case, given), ref))
    ok, bars = judge("bfloat16", ring, dense, alone)
    assert ok, bars


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", ODD, ids=str)
def test_order_of_events_never_changes_a_bit(layout, kernel):
    """Whoever is first: the sums are made in the schedule's order."""
    case = Case(5, 37, Causal() & Window(19), layout, dtype="float32")
    given = rounded(case, inputs(case))
    first, *others = (run_ring(replace(case, seed=seed), given, kernel=kernel) for seed in range(8))
    for other in others:
        assert all(np.array_equal(first[name], other[name]) for name in TENSORS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(batch=1, heads=1, kv_heads=1, head_size=1, value_size=1),
        Shape(batch=3, heads=4, kv_heads=4, head_size=6, value_size=6),
        Shape(batch=2, heads=6, kv_heads=1, head_size=3, value_size=11),
        Shape(batch=1, heads=6, kv_heads=2, head_size=12, value_size=4),
    ],
    ids=str,
)
def test_heads_and_head_sizes(shape, kernel):
    """Equal, grouped and single key heads; values narrower and wider than keys."""
    for ranks, layout in ((1, Contiguous()), (3, Zigzag()), (4, Striped())):
        check_float64(Case(ranks, 21, Causal(), layout, shape=shape), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scale_of_the_scores(kernel):
    case = Case(3, 17, Causal(), Zigzag())
    given = inputs(case)
    half = replace(given, q=given.q * 0.25 * case.shape.head_size**0.5)  # the oracle's default scale on these scores
    plan = ContextParallel(Loopback(3), layout=Zigzag()).plan(17, Causal())
    q, k, v = (plan.partition.shard(torch.from_numpy(x), dim=2) for x in (given.q, given.k, given.v))
    out = plan.partition.gather(plan.attention(q, k, v, scale=0.25, kernel=kernel), dim=2)
    np.testing.assert_allclose(out.numpy(), reference(case, half).out, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_by_finite_differences(kernel):
    plan = ContextParallel(Loopback(3), layout=Striped()).plan(5, Causal() & Window(3))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, heads, 5, size, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads, size in ((2, 2), (1, 2), (1, 3))
    )
    assert torch.autograd.gradcheck(lambda *x: plan.attention(*x, return_lse=True, kernel=kernel), (q, k, v))
