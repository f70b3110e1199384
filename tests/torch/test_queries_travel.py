"""A backward in which queries travel gives the gradients of one in which keys do; which is taken, and what it says."""

from __future__ import annotations

import pytest
import torch
from combinations import cases
from hard_cases import judged
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import run_routes

from ringspun import Causal, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.core.route import Bidirectional, Direct, DoubleRing, Ring
from ringspun.core.wire import Payload, Side
from ringspun.errors import PlanError
from ringspun.testing.cases import Case, Shape, inputs
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel, Loopback

ROUTES = (Ring(), Direct(), Bidirectional(), DoubleRing(2), Ring(4))
EQUAL_HEADS = Shape(2, 3, 3, 8, 5)


@st.composite
def routed(draw):
    case = draw(cases(most_ranks=8))
    inner = draw(st.sampled_from([d for d in range(1, case.ranks + 1) if case.ranks % d == 0]))
    return case, draw(st.sampled_from([Ring(), Ring(3), Direct(), Bidirectional(), DoubleRing(inner)]))


@settings(max_examples=60)
@given(routed())
def test_float64_equals_the_oracle(drawn):
    """Any mask, layout, heads, sizes, two sides, masks of batch rows, sinks, biases, softcap, dlse."""
    case, route = drawn
    ring = Loopback(case.ranks, seed=case.seed)
    context = ContextParallel(ring, layout=case.layout, route=route, checks="checksum", backward="queries")
    judged(case, run_ring(case, inputs(case), context))
    sent = {row.payload for log in ring.state.logs for row in log.rows if row.phase}
    assert not sent & {Payload.KV, Payload.DKV}


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [2, 4])
def test_processes_equal_one_thread(pools, size):
    masks = Full(), Causal(), Causal() & Window(9), (Causal(), Documents([5, 17, 9])), Causal()
    asked = [
        (Case(size, 33, mask, layout, seed=n, shape=shape), route)
        for n, (mask, route) in enumerate(zip(masks, ROUTES, strict=True))
        for layout in (Contiguous(), Zigzag())
        for shape in (Shape(), EQUAL_HEADS)
    ]
    for found in pools(size).run(run_routes, asked, "queries", timeout_s=60):
        for (case, _), one in zip(asked, found, strict=True):
            judged(case, one)


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_the_bits_do_not_depend_on_the_order_of_arrival(route):
    found = []
    for seed in range(4):
        case = Case(6, 37, Causal() & Window(20), Striped(), dtype="float32", seed=3)
        context = ContextParallel(Loopback(6, seed=seed), layout=case.layout, route=route, backward="queries")
        found.append(run_ring(case, inputs(case), context))
    assert all((found[0][name] == other[name]).all() for other in found[1:] for name in other)


def tensors(heads, kv_heads, tokens, dtype=torch.float32, size=64):
    generator = torch.Generator().manual_seed(7)
    sizes = (heads, kv_heads, kv_heads)
    return [torch.randn(1, h, tokens, size, generator=generator).to(dtype).requires_grad_() for h in sizes]


def sent_in_backward(context, x, tokens, mask):
    out = context.plan(tokens, mask).attention(*x)
    before, messages = sum(context.driver.counts.bytes.values()), sum(context.driver.counts.messages.values())
    out.backward(torch.randn_like(out))
    counts = context.driver.counts
    return sum(counts.bytes.values()) - before, sum(counts.messages.values()) - messages


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 3 / 4), (torch.bfloat16, 2 / 3)], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_the_driver_counts(ranks, dtype, share):
    """A full mask, as many heads of keys as of queries: 3/4 and 2/3 of the bytes, and lse and delta, less frames."""
    rows = 32
    x = tensors(4, 4, ranks * rows, dtype)
    counted = {}
    for backward in ("keys", "queries", "auto"):
        context = ContextParallel(Loopback(ranks), layout=Contiguous(), backward=backward)
        n_bytes, messages = sent_in_backward(context, x, ranks * rows, Full())
        counted[backward] = n_bytes - 128 * messages
    small = ranks * (ranks - 1) * rows * 4 * 2 * 4
    assert counted["queries"] - small == share * counted["keys"]
    assert counted["auto"] == counted["queries"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "side"),
    [
        (4, 4, torch.float32, "queries"),
        (4, 4, torch.bfloat16, "queries"),
        (4, 2, torch.bfloat16, "keys"),
        (4, 2, torch.float32, "keys"),
        (4, 1, torch.float64, "keys"),
    ],
)
def test_auto_takes_what_is_less_and_says_so(heads, kv_heads, dtype, side):
    context = ContextParallel(Loopback(4), layout=Zigzag(), backward="auto")
    x = tensors(heads, kv_heads, 64, dtype, size=16)
    told = [context.plan(64, Causal()).explain(*x, ring_rank=r) for r in range(4)]
    n_bytes, _ = sent_in_backward(context, x, 64, Causal())
    assert {one.travels for one in told} == {Side(side)}
    assert sum(s.sent_bytes for one in told for s in one.backward) == n_bytes == told[0].sent[Side(side)]
    assert n_bytes == min(told[0].sent.values())
    page = str(told[1])
    assert f"backward: {side} travel; all ranks would send: keys " in page and f"step  {side} of" in page
    assert [s.source for s in told[1].backward][:4] == [1, 0, 3, 2]


def test_one_rank_has_nothing_to_say_of_it():
    told = ContextParallel(Loopback(1)).plan(8, Causal()).explain(*tensors(2, 2, 8))
    assert told.travels == Side.KEYS and "travel" not in str(told)


def test_what_cannot_be_asked():
    with pytest.raises(PlanError, match=r"backward must be one of 'auto', 'keys', 'queries'; got 'query'\."):
        ContextParallel(Loopback(2), backward="query")
    with pytest.raises(PlanError, match=r"'auto' or 'keys' with deterministic='across_rings'.*; got 'queries'\."):
        ContextParallel(Loopback(2), deterministic="across_rings", backward="queries")
    with pytest.raises(
        PlanError, match=r"'auto' or 'keys' with route all_gather, by which no queries travel.*'queries'\."
    ):
        ContextParallel(Loopback(2), route="all_gather", backward="queries")
    context = ContextParallel(Loopback(2), deterministic="across_rings", backward="auto")
    told = context.plan(1024, Causal()).explain(*tensors(2, 2, 1024, size=4))
    assert told.travels == Side.KEYS and told.sent == {}


@pytest.mark.parametrize("kernel", ["aten_cpu", "eager"])
def test_gradients_of_lse_alone_and_of_ranks_without_a_loss(kernel):
    """Where dO is zero, or next to it, and delta is not, nothing can stand in for out in the op's own delta."""
    x = tensors(3, 3, 40, torch.float64, size=8)
    found = {}
    for backward in ("keys", "queries"):
        plan = ContextParallel(Loopback(4), backward=backward).plan(40, Causal())
        for scale in (0.0, 1e-300, 1.0):
            out, lse = plan.attention(*x, return_lse=True, kernel=kernel)
            weight = torch.zeros(40, dtype=torch.float64)
            weight[:13] = scale
            ends = (out * weight[None, None, :, None]).sum() + (lse * torch.arange(40)).sum()
            found[backward, scale] = torch.autograd.grad(ends, x)
            found[backward, scale, "zero"] = torch.autograd.grad((0 * plan.attention(*x)).sum(), x)
    for scale in (0.0, 1e-300, 1.0):
        for a, b in zip(found["keys", scale], found["queries", scale], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert not any(g.any() for g in found["queries", scale, "zero"])


def rms_errors(backward, ranks, dtype, **case):
    """Of dq, dk and dv, without a gradient of lse."""
    errors = dict.fromkeys(("dq", "dk", "dv"), 0.0)
    for seed in range(3):
        one = Case(ranks, mask=Causal(), layout=Zigzag(), dtype=dtype, seed=seed, shape=Shape(1, 2, 2, 16, 16), **case)
        given = inputs(one)
        wide = Case(1, mask=Causal(), layout=Zigzag(), seed=seed, shape=one.shape, **case)
        right = run_ring(wide, given)
        found = run_ring(one, given, ContextParallel(Loopback(ranks), backward=backward))
        for name in errors:
            errors[name] += ((found[name] - right[name]) ** 2).mean() / 3
    return {name: value**0.5 for name, value in errors.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_is_no_worse(dtype):
    """Pieces of more than 512 rows too, which bfloat16 is not widened for."""
    keys, queries = (rms_errors(side, 2, dtype, seq_len=1300) for side in ("keys", "queries"))
    for name, error in queries.items():
        assert error <= 1.1 * keys[name], (name, error, keys[name])


def test_buffers_are_two_of_queries_and_two_of_their_gradients(monkeypatch):
    context = ContextParallel(Loopback(6), layout=Contiguous(), backward="queries")
    leased, lease = [], context.pool.lease
    out = context.plan(96, Full()).attention(*(x := tensors(2, 2, 96, size=8)))
    monkeypatch.setattr(context.pool, "lease", lambda n, device: leased.append(n) or lease(n, device))
    out.sum().backward()
    queries, gradients = 128 + 2 * 16 * (2 * 8 * 4 + 8), 128 + 2 * 16 * 8 * 4
    assert x[0].grad is not None
    delta = 2 * 96 * 4
    assert sorted(leased) == sorted([delta, *(6 * [queries, queries, gradients, gradients])])
