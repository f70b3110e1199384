"""Blocks that forward leaves to backward: the same gradients, fewer messages, and memory for it."""

from __future__ import annotations

import pytest
import torch
from combinations import cases
from hard_cases import judged
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import run_routes

from ringspun import Causal, Contiguous, Documents, Full, Window, Zigzag
from ringspun.core.accounting import account
from ringspun.core.route import Ring
from ringspun.core.wire import END_BYTES, HEADER_BYTES, Format
from ringspun.errors import PlanError
from ringspun.testing.cases import Case, inputs
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.memory import peak_memory


def on_loopback(case, **options):
    return ContextParallel(Loopback(case.ranks, seed=case.seed), layout=case.layout, **options)


@settings(max_examples=30)
@given(cases(most_ranks=8), st.integers(1, 8))
def test_float64_equals_the_oracle_and_bits_equal_a_ring_that_keeps_nothing(case, kept):
    """Any mask, layout, heads, sizes, two sides, masks of batch rows, sinks, biases, softcap, dlse."""
    found = run_ring(case, inputs(case), on_loopback(case, route=Ring(kept_hops=kept), checks="checksum"))
    judged(case, found)
    plain = run_ring(case, inputs(case), on_loopback(case, route="ring", backward="keys"))
    assert all((found[name] == plain[name]).all() for name in plain)


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_processes_equal_one_thread(pools):
    masks = Full(), Causal(), Causal() & Window(9), (Causal(), Documents([5, 17, 9]))
    asked = [
        (Case(3, 33, mask, layout, seed=n), Ring(kept_hops=1 + n % 2))
        for n, mask in enumerate(masks)
        for layout in (Contiguous(), Zigzag())
    ]
    for found in pools(3).run(run_routes, asked, timeout_s=60):
        for (case, _), one in zip(asked, found, strict=True):
            judged(case, one)


def tensors(heads, kv_heads, tokens, dtype=torch.float32, size=8):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, size), (kv_heads, size), (kv_heads, size))
    return tuple(torch.randn(1, h, tokens, d, generator=generator).to(dtype).requires_grad_() for h, d in shapes)


@pytest.mark.parametrize("kept", [None, 1, 3])
def test_what_the_driver_counts_is_what_the_schedule_says(kept):
    route = Ring(kept_hops=kept)
    context = ContextParallel(Loopback(4), layout=Contiguous(), route=route, backward="keys")
    plan = context.plan(32, Full())
    out = plan.attention(*tensors(4, 2, 32))
    before = sum(context.driver.counts.bytes.values())
    out.sum().backward()
    wire = Format(1, 4, 2, 8, 8, "float32", 4, 4)
    counted = sum(account(s.backward, wire, backward=True).total_sent_bytes for s in plan.schedules)
    assert sum(context.driver.counts.bytes.values()) - before == counted
    blocks = {None: 3, 1: 2, 3: 0}[kept]
    assert counted == 4 * (blocks + 3) * (HEADER_BYTES + END_BYTES + 2 * 8 * 2 * 8 * 4)


def test_what_is_kept_outlives_forward_only_where_a_backward_may_come():
    """And is one block per hop that is kept; without gradients nothing is."""
    x, bytes_kept = tensors(1, 1, 4096, size=64), {}
    for kept in (None, 2):
        plan = ContextParallel(Loopback(4), layout=Contiguous(), route=Ring(kept_hops=kept)).plan(4096, Full())
        with torch.no_grad():
            plan.attention(*x)  # the pool has its buffers now
        with torch.no_grad(), peak_memory() as peak:
            plan.attention(*x)
        without = peak.bytes
        with peak_memory() as peak:
            plan.attention(*x)
        bytes_kept[kept] = peak.bytes - without
    block = HEADER_BYTES + END_BYTES + 2 * 1024 * 64 * 4
    assert bytes_kept[2] - bytes_kept[None] == pytest.approx(4 * 2 * block, rel=0.02)


def test_backward_may_come_twice():
    """What is kept stays as it was: gradients that are asked for again have the same bits."""
    plan = ContextParallel(Loopback(3), layout=Zigzag(), route=Ring(kept_hops=1)).plan(30, Causal())
    x = tensors(2, 2, 30)
    out = plan.attention(*x).sin().sum()
    once, twice = (torch.autograd.grad(out, x, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_compiled_and_split_heads():
    torch._dynamo.reset()
    context = ContextParallel(Loopback(4), route=Ring(kept_hops=1))
    plan, x = context.plan(32, Causal()), tensors(2, 2, 32, torch.float64)
    right = torch.autograd.grad(plan.attention(*x).sin().sum(), x)
    compiled = torch.compile(lambda *x: plan.attention(*x).sin(), backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*x).sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    hybrid = ContextParallel(Loopback(4), route=Ring(kept_hops=1), ulysses=2).plan(32, Causal())
    given = [hybrid.partition.shard(plan.partition.gather(one.detach(), dim=2), dim=2).requires_grad_() for one in x]
    grads = torch.autograd.grad(hybrid.attention(*given).sin().sum(), given)
    for grad, want in zip(grads, right, strict=True):
        whole = hybrid.partition.gather(grad, dim=2), plan.partition.gather(want, dim=2)
        torch.testing.assert_close(*whole, rtol=1e-12, atol=1e-12)
    counts = hybrid.schedules[0].backward.messages
    assert len(counts) == 2, "dK, dV alone go home"


def test_queries_cannot_travel():
    message = r"backward must be 'auto' or 'keys' with route ring\(kept_hops=1\), by which no queries travel"
    with pytest.raises(PlanError, match=message):
        ContextParallel(Loopback(2), route="ring(kept_hops=1)", backward="queries")
    with pytest.raises(PlanError, match="block_size must come with the ring"):
        ContextParallel(Loopback(2), route=Ring(kept_hops=1), block_size=8)


@pytest.mark.parametrize("size", [2, 8])
def test_Q4_two_blocks_live_at_any_step(size, monkeypatch):
    """Ring keeps every received KV block, so memory grows to the full KV: measured as buffers leased at once, at every
    step of forward and backward, of all ranks together; float32, whose sums are results and leased by nobody."""
    context = ContextParallel(Loopback(size), layout=Contiguous(), backward="keys")
    x = tensors(1, 1, size * 64, size=16)
    block = HEADER_BYTES + END_BYTES + 2 * 64 * 16 * 4
    pool, live = context.pool, []
    lease = pool.lease

    def leased(n_bytes, device):
        buffer = lease(n_bytes, device)
        live.append(pool._leased()[0])
        return buffer

    monkeypatch.setattr(pool, "lease", leased)
    out = context.plan(size * 64, Full()).attention(*x)
    assert max(live) == size * min(2, size) * block
    live.clear()
    out.sum().backward()
    delta = size * 64 * 4
    assert max(live) <= size * 4 * block + 2 * delta, "two of keys and values, two of their gradients"
