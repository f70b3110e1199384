"""Known hard cases M: masks. Padding has a file of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hard_cases import LAYOUTS, by_kernel, by_layout, check, judged, ring_plan, seen_mean
from on_ranks import run_cases
from torch import Tensor

from ringspun import Causal, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.core.reference import attention
from ringspun.errors import KernelRefused
from ringspun.testing.cases import Arguments, Case, inputs
from ringspun.testing.torch import run_ring
from ringspun.torch import Plan


@by_kernel
@by_layout
def test_M1_positions_decide_not_shapes(layout, kernel):
    """Unequal lengths: one backend aligns the causal triangle at the upper left, another at the lower right."""
    last = ring_plan(2, layout, Causal(), 2, key_len=5, query_start=3)
    assert seen_mean(last, kernel, first=1) == pytest.approx([2.5, 3.0], abs=1e-14)
    assert seen_mean(last.with_mask(Window(2)), kernel, first=1) == pytest.approx([3.5, 4.5], abs=1e-14)
    early = ring_plan(2, layout, Causal(), 5, key_len=2, query_start=-3)
    assert seen_mean(early, kernel, first=1) == pytest.approx([0, 0, 0, 1.0, 1.5], abs=1e-14)
    from_zero = ring_plan(2, layout, Causal(), 2, key_len=5)
    assert seen_mean(from_zero, kernel, first=1) == pytest.approx([1.0, 1.5], abs=1e-14)


@by_kernel
@by_layout
@pytest.mark.parametrize(("queries", "keys", "start"), [(2, 5, 3), (5, 2, -3), (7, 19, 12), (19, 7, -12), (6, 9, 1)])
def test_M1_rows_before_the_first_key_and_gradients(queries, keys, start, layout, kernel):
    """Out, lse (-inf where a query stands before all keys) and every gradient, keys dealt like queries or otherwise."""
    other = {Contiguous(): Zigzag(), Zigzag(): Contiguous()}.get(layout)  # strides that meet have to be equal
    for ranks, key_layout in ((2, None), (3, other)):
        case = Case(ranks, queries, Causal(), layout, key_len=keys, key_layout=key_layout, query_start=start)
        found = run_ring(case, inputs(case), kernel=kernel)
        judged(case, found)
        empty = np.arange(queries) + start < 0
        assert np.isneginf(found["lse"][:, :, empty]).all() and np.isfinite(found["lse"][:, :, ~empty]).all()
        assert not found["out"][:, :, empty].any() and not found["dq"][:, :, empty].any()


@by_kernel
def test_M2_a_window_sees_the_query_and_size_minus_one_before_it(kernel):
    """One token too many: Hugging Face counts the query in the window, flash-attention does not."""
    for ranks, layout in ((1, Contiguous()), (2, Zigzag()), (3, Striped())):
        rows = seen_mean(ring_plan(ranks, layout, Window(4), 8), kernel)
        assert rows == pytest.approx([0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5], abs=1e-14)
        assert seen_mean(ring_plan(ranks, layout, Causal() & Window(4), 8), kernel) == pytest.approx(rows, abs=0)
        assert seen_mean(ring_plan(ranks, layout, Window(1), 8), kernel) == pytest.approx(range(8), abs=1e-14)
        causal = seen_mean(ring_plan(ranks, layout, Causal(), 8), kernel)
        assert causal == pytest.approx([i / 2 for i in range(8)], abs=1e-14)
        for wide in (8, 9, 1000, None):
            assert seen_mean(ring_plan(ranks, layout, Window(wide), 8), kernel) == causal


@by_kernel
@by_layout
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 12])
def test_M3_windows_across_ranks(window, layout, kernel):
    """A window switched off where it should be on, and negative widths on blocks from elsewhere."""
    right = [float(np.mean(range(max(0, i - window + 1), i + 1))) for i in range(16)]
    assert window != 5 or right == [0, 0.5, 1, 1.5, *(float(i) for i in range(2, 14))]
    assert seen_mean(ring_plan(4, layout, Window(window), 16), kernel) == pytest.approx(right, abs=1e-13)
    check(Case(4, 16, Window(window), layout), kernel)


def test_M3_blocks_outside_the_window_are_not_computed():
    """Contiguous shards of 4: block j meets rank i only where the window reaches."""
    for window in (1, 3, 4, 5, 8, 12):
        plan = ring_plan(4, Contiguous(), Window(window), 16)
        for schedule in plan.schedules:
            steps = [int(t) for t, pairs in enumerate(schedule.forward.pairs) if pairs]
            assert steps == list(range(min(schedule.ring_rank, -(-(window - 1) // 4)) + 1))


@by_kernel
@by_layout
def test_M5_documents_do_not_see_each_other(layout, kernel):
    """Packed documents attended to each other under context parallelism; a control of one document was right."""
    lengths = [200, 300, 100, 324, 100]
    plan = ring_plan(2, layout, Causal() & Documents(lengths), 1024)
    part = plan.partition
    generator = torch.Generator().manual_seed(4)
    start = [torch.randn(1, 2, 1024, 8, generator=generator) for _ in range(4)]

    def results(x: list[Tensor]) -> list[Tensor]:
        x, dout = [t.clone().requires_grad_() for t in x[:3]], x[3]
        out = part.gather(plan.attention(*(part.shard(t, dim=2) for t in x), kernel=kernel), dim=2)
        return [out.detach(), *torch.autograd.grad(out, x, dout)]

    before = results(start)
    for t in start[:3]:
        t[:, :, 57] += 1.0
    after = results(start)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :, 200:], b[:, :, 200:]) and not torch.equal(a[:, :, :200], b[:, :, :200])
    allowed = (Causal() & Documents(lengths)).as_array(1024)
    out, _, _ = attention(*(t.numpy() for t in start[:3]), allowed=allowed)
    np.testing.assert_allclose(after[0].numpy(), out, rtol=0, atol=2e-6)


def test_M5_boundaries_that_would_be_ignored_are_refused():
    """A call that cannot honour document boundaries must not take them."""
    plan, x = ring_plan(2, Zigzag(), Causal(), 8), torch.ones(1, 1, 8, 2)
    for name, words in (("cu_seqlens", r"Documents\.from_cu_seqlens"), ("position_ids", "no such argument")):
        with pytest.raises(TypeError, match=f"{name} must not be given to plan.attention; .*{words}"):
            plan.attention(x, x, x, **{name: torch.tensor([0, 5, 8])})


@by_layout
def test_M15_softcap_before_the_mask_leaks_nothing(layout):
    """cap * tanh(-inf / cap) is -cap, a score like any other: with S = 2 a fourth of row 0 would be the future's."""
    assert seen_mean(ring_plan(2, layout, Causal(), 2), "eager", softcap=1.0) == [0.0, 0.5]
    assert math.exp(-1) / (1 + math.exp(-1)) == pytest.approx(0.269, abs=1e-4)  # what the leak would be
    plan = ring_plan(2, layout, Causal(), 8)
    generator = torch.Generator().manual_seed(0)
    q = torch.zeros(1, 1, 8, 4, dtype=torch.float64)
    k, v = (torch.randn(1, 1, 8, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    rows = []
    for _ in range(2):
        out, lse = plan.attention(
            q, *(plan.keys.shard(x, dim=2) for x in (k, v)), softcap=1.0, return_lse=True, kernel="eager"
        )
        rows.append((plan.queries.gather(out, dim=2), plan.queries.gather(lse, dim=2)))
        k[:, :, 7], v[:, :, 7] = 50.0, 1e6
    (before, lse_before), (after, lse_after) = rows
    assert torch.equal(before[:, :, :7], after[:, :, :7]) and torch.equal(lse_before[:, :, :7], lse_after[:, :, :7])
    assert not torch.equal(before[:, :, 7], after[:, :, 7])
    torch.testing.assert_close(
        lse_after.flatten(), torch.arange(1.0, 9.0, dtype=torch.float64).log(), rtol=0, atol=1e-14
    )


@by_layout
@pytest.mark.parametrize("bias", ["", "alibi", "table", "function"])
def test_M15_softcap_of_scores_beyond_it(bias, layout):
    """Scores of about 200 under a cap of 50, with and without biases, which the cap does not bend."""
    case = Case(2, 17, Causal(), layout, arguments=Arguments(scale=70.0, softcap=50.0, bias=bias))
    given = inputs(case)
    scores = 70 * np.einsum("bhqd,bhkd->bhqk", given.q[:, ::2], given.k)
    assert 150 < scores.std() < 300
    judged(case, run_ring(case, given, kernel="eager"), given)


def test_M15_the_slope_of_the_cap():
    """One key: lse = c tanh(s / c), so its derivative by s is 1 - tanh^2(s / c)."""
    plan, cap = ring_plan(1, Contiguous(), Causal(), 1), 50.0
    q = torch.full((1, 1, 1, 1), 200.0, dtype=torch.float64, requires_grad=True)
    one = torch.ones_like(q).detach()
    _, lse = plan.attention(q, one, one, scale=1.0, softcap=cap, return_lse=True)
    (dq,) = torch.autograd.grad(lse.sum(), q)
    assert lse.item() == pytest.approx(cap * math.tanh(4.0), abs=1e-13)
    assert dq.item() == pytest.approx(1 - math.tanh(4.0) ** 2, rel=1e-11)


def test_M15_a_kernel_without_softcap_refuses_it():
    plan, x = ring_plan(2, Zigzag(), Causal(), 8), torch.ones(1, 1, 8, 2)
    with pytest.raises(KernelRefused, match=r"aten_cpu: softcap must be None; got 1\.0"):
        plan.attention(x, x, x, softcap=1.0, kernel="aten_cpu")
    assert plan.attention(x, x, x, softcap=1.0).isfinite().all()  # another one can


def sink_call(plan: Plan, sinks: Tensor, kernel: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Scores 0 and values 1."""
    tokens, heads = plan.keys.local_tokens, len(sinks)
    zero = torch.zeros(1, heads, tokens, 2, dtype=dtype)
    return plan.attention(zero, zero, torch.ones_like(zero), sinks=sinks, return_lse=True, kernel=kernel)


@by_kernel
@by_layout
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_M16_a_sink_counts_once_per_row(ranks, layout, kernel):
    """Dropped in silence out is 1, counted in every ring step it is 0.667."""
    sinks = torch.tensor([0.0, -math.inf], dtype=torch.float64, requires_grad=True)
    out, lse = sink_call(ring_plan(ranks, layout, Full(), 4), sinks, kernel)
    right = torch.tensor([[0.8, math.log(5)], [1.0, math.log(4)]], dtype=torch.float64)  # head 1: no sink
    found = torch.stack([out[..., 0], lse], -1)
    torch.testing.assert_close(found, right[None, :, None].expand(1, 2, 4, 2), rtol=0, atol=1e-14)
    assert math.log(5) == pytest.approx(1.609438, abs=5e-7)
    (of_out,) = torch.autograd.grad(out.sum(), sinks, retain_graph=True)
    (of_lse,) = torch.autograd.grad(lse.sum(), sinks)
    assert of_out.tolist() == pytest.approx([4 * 2 * -0.2 * 0.8, 0.0], abs=1e-14)  # 4 rows, 2 columns: -p_sink * out
    assert of_lse.tolist() == pytest.approx([4 * 0.2, 0.0], abs=1e-14)


@by_kernel
@pytest.mark.parametrize("sink", [1e4, -1e4])
def test_M16_sinks_far_above_and_below_the_scores(sink, kernel):
    """exp(sink) overflows, or vanishes: the sink takes all, or nothing."""
    for dtype in (torch.float64, torch.float32):
        sinks = torch.tensor([sink], dtype=dtype, requires_grad=True)
        out, lse = sink_call(ring_plan(2, Zigzag(), Full(), 4), sinks, kernel, dtype)
        won = sink > 0
        assert torch.equal(out, torch.zeros_like(out) if won else torch.ones_like(out))
        torch.testing.assert_close(lse, torch.full_like(lse, sink if won else math.log(4)), rtol=1e-7, atol=0)
        (grad,) = torch.autograd.grad(out.sum() + lse.sum(), sinks)
        assert grad.item() == (4.0 if won else 0.0)


@by_kernel
@by_layout
def test_M16_sinks_and_their_gradients(layout, kernel):
    """Rows without keys too: out 0, lse the sink; and one mask per batch row."""
    for mask in (Causal(), Causal() & Documents([5, 1, 7], [1, 6, 9]), (Causal(), Documents([4], [9]))):
        case = Case(4, 19, mask, layout, arguments=Arguments(sinks=True))
        given = inputs(case)
        found = run_ring(case, given, kernel=kernel)
        judged(case, found)
        empty = ~np.broadcast_to(case.allowed.any(-1), found["lse"].shape)
        assert not found["out"][empty].any()
        assert np.array_equal(found["lse"][empty], np.broadcast_to(given.sinks[:, None], empty.shape)[empty])


@pytest.mark.processes
@by_kernel
def test_M16_gradients_of_what_all_ranks_hold_are_summed_once(pools, kernel):
    """A replicated parameter: each of 4 processes returns its share, and their sum is dense attention's gradient."""
    asked = [Arguments(sinks=True)]
    if kernel == "eager":
        asked += [Arguments(sinks=True, bias="alibi"), Arguments(softcap=3.0, bias="table")]
    cases = [Case(4, 19, Causal(), layout, arguments=one) for layout in LAYOUTS for one in asked]
    for found in pools(4).run(run_cases, cases, kernel):
        for case, tensors in zip(cases, found, strict=True):
            judged(case, tensors)


@by_kernel
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", [Zigzag(), Striped()], ids=str)
def test_M17_balanced_layouts_without_a_causal_mask(layout, ranks, kernel):
    """The causal shortcut hung on the layout: every rank must meet every block."""
    plan = ring_plan(ranks, layout, Full(), 64)
    for schedule in plan.schedules:
        assert schedule.forward.pairs.tolist() == [(64 // ranks) ** 2] * ranks
    check(Case(ranks, 64, Full(), layout), kernel)


@by_kernel
@by_layout
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("lengths", [[7, 5, 12], [1, 1, 1, 21]], ids=str)
def test_M19_documents_whose_lengths_no_ring_divides(lengths, ranks, layout, kernel):
    """cu_seqlens // W truncates: the packed path was corrupt while one dense sequence passed."""
    docs = Documents(lengths)
    edges = np.cumsum([0, *lengths])
    means = [(edges[d] + edges[d + 1] - 1) / 2 for d, n in enumerate(lengths) for _ in range(n)]
    assert seen_mean(ring_plan(ranks, layout, docs, 24), kernel) == pytest.approx(means, abs=1e-13)
    for mask in (docs, Causal() & docs):
        check(Case(ranks, 24, mask, layout), kernel)
