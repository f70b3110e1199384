"""Known hard cases D: distributed, as far as one thread goes; the rest is in `test_gloo.py`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hard_cases import by_kernel, judged
from on_ranks import STRIDED

from ringspun import Causal, Contiguous, Documents, Full, Window, Zigzag
from ringspun.errors import TransferError
from ringspun.testing.cases import Case, Shape, inputs
from ringspun.testing.faults import Faulty, Kill
from ringspun.testing.orders import Ordered
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel, Loopback

RANKS = range(2, 9)
SMALL = Shape(batch=1, heads=1, kv_heads=1, head_size=1, value_size=1)


@pytest.mark.parametrize("ranks", RANKS)
def test_D1_messages_may_arrive_at_any_time(ranks):
    """Everyone sends first and the ring hangs, at 4 ranks but not at 3."""
    case = Case(ranks, 2 * ranks + 1, Causal(), Zigzag(), shape=SMALL)
    runs = [
        run_ring(case, inputs(case), ContextParallel(Ordered(ranks, seed=seed), layout=Zigzag())) for seed in range(4)
    ]
    judged(case, runs[0])
    assert all((run[name] == runs[0][name]).all() for run in runs for name in run)


@pytest.mark.parametrize("ranks", RANKS)
def test_D2_some_have_nothing_to_send_in_the_first_call(ranks):
    """The first messages of a group hang unless all take part."""
    for mask in (Causal(), Window(2), Documents([2], [2])):
        case = Case(ranks, 3 * ranks + 1, mask, Contiguous(), shape=SMALL)
        judged(case, run_ring(case, inputs(case)))


def test_D3_two_rings_at_once():
    """Each in its own thread, and two contexts of one ring in two."""
    shared = Loopback(4)
    cases = [Case(3, 17, Causal(), Zigzag(), seed=1), *(Case(4, 18, Window(9), Contiguous(), seed=n) for n in (2, 3))]
    rings = [Loopback(3), shared, shared]
    with ThreadPoolExecutor(3) as pool:
        contexts = [ContextParallel(r, layout=c.layout) for r, c in zip(rings, cases, strict=True)]
        jobs = [
            pool.submit(run_ring, c, inputs(c), context)
            for _ in range(5)
            for c, context in zip(cases, contexts, strict=True)
        ]
        for n, job in enumerate(jobs):
            judged(cases[n % 3], job.result(timeout=30))


@by_kernel
@pytest.mark.parametrize("ranks", [2, 5, 8])
@pytest.mark.parametrize("kind", STRIDED)
def test_D5_keys_and_values_of_any_strides(kind, ranks, kernel):
    """Raw storage is sent: wrong data in silence. The caller's tensors stay as they are."""
    plan = ContextParallel(Loopback(ranks), layout=Contiguous()).plan(12, Causal())
    generator = torch.Generator().manual_seed(6)
    start = [torch.randn(2, 2, 12, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    strided = [STRIDED[kind](x) for x in start[:3]]
    plain = [x.contiguous().clone() for x in strided]
    assert not any(x.is_contiguous() for x in strided)
    results = []
    for x in (strided, plain):
        x = [t.detach().requires_grad_() for t in x]
        out = plan.attention(*x, kernel=kernel)
        results.append([out.detach(), *torch.autograd.grad(out, x, start[3])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    assert all(torch.equal(x, y) for x, y in zip(strided, plain, strict=True))


@pytest.mark.parametrize("ranks", RANKS)
def test_D8_what_was_returned_needs_the_inputs_no_more(ranks):
    """Keys and values are overwritten right after each of 10 calls."""
    plan = ContextParallel(Loopback(ranks)).plan(2 * ranks, Full())
    found = []
    for number in range(10):
        x = torch.full((1, 1, 2 * ranks, 3), float(number))
        found.append(plan.attention(x, x, x))
        x.fill_(torch.nan)
    for number, out in enumerate(found):
        torch.testing.assert_close(out, torch.full_like(out, float(number)))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("ranks", RANKS)
def test_D9_a_rank_that_dies_is_noticed(ranks, backward):
    """Whichever rank, at whichever step: the call raises, and says who waits for what."""
    x = torch.ones(1, 1, ranks, 2, requires_grad=True)
    for victim in range(ranks):
        ring = Faulty(Loopback(ranks), Kill(sender=victim, step=victim % (ranks - 1), backward=backward))
        plan = ContextParallel(ring).plan(ranks, Full())
        with pytest.raises(TransferError, match=f"ring rank {victim} waits for nothing more: it was killed"):
            plan.attention(x, x, x).sum().backward()
        assert [found.fault.backward for found in ring.injected] == [backward]


@by_kernel
def test_D11_without_torch_distributed_a_ring_of_one_is_plain_attention(kernel):
    """Send to self raises, an empty list of operations fails: a ring of one must not get there."""
    assert not torch.distributed.is_initialized()
    context = ContextParallel()
    assert (context.ring_size, context.ring_rank) == (1, 0)
    case = Case(1, 19, Causal(), Zigzag())
    judged(case, run_ring(case, inputs(case), context, kernel=kernel))
    assert not context.driver.counts.messages
