"""Halos, shifts and short convolutions on a ring: those of each document by itself in one process, with gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks_halo import in_trouble, on_ranks
from torch._dynamo.testing import CompileCounterWithBackend

from ringspun import Balanced, Causal, Contiguous, Documents, DocumentZigzag, Full, Striped, Zigzag
from ringspun.core.wire import END_BYTES, HEADER_BYTES, aligned
from ringspun.errors import DtypeError, NotDifferentiable, PlanError, RingspunError, ShapeError, TransferError
from ringspun.testing.faults import Faulty, Flip
from ringspun.torch import ContextParallel, Loopback

LAYOUTS = (Contiguous(), Zigzag(), Striped(), Striped(128), DocumentZigzag(), Balanced())
B, C = 2, 3


def spans(seq_len, documents):
    table = [[0, seq_len]] if documents is None else documents.table().tolist()
    return [slice(a, b) for a, b in table if a < b]


def by_documents(function, x, documents):
    """`function` of each document ``[B, t, C]`` by itself; 0 on padding."""
    out = x * 0
    for span in spans(x.shape[1], documents):
        out[:, span] = function(x[:, span])
    return out


def back(x, by):
    return F.pad(x, (0, 0, by, 0))[:, : x.shape[1]]


def convolved(x, weight):
    wide = F.pad(x, (0, 0, weight.shape[1] - 1, 0)).transpose(1, 2)
    return F.conv1d(wide, weight[:, None], groups=weight.shape[0]).transpose(1, 2)


@st.composite
def rings(draw):
    """A context, a length, documents with padding or none, and a number of tokens, which may be more than a run has."""
    size, length = draw(st.integers(1, 8)), draw(st.integers(0, 30))
    edges = sorted(draw(st.lists(st.integers(0, length), min_size=6, max_size=6)))
    documents = draw(st.none() | st.just(Documents(np.diff(edges)[::2], edges[:-1:2])))
    ulysses = draw(st.sampled_from([u for u in (1, 2, 3) if size % u == 0]))
    asked = {"ulysses": ulysses, "inner": draw(st.sampled_from(["ulysses", "ring"])), "checks": "checksum"}
    ring = Loopback(size, seed=draw(st.integers(0, 99)))
    return ContextParallel(ring, layout=draw(st.sampled_from(LAYOUTS)), **asked), length, documents


@settings(max_examples=120)
@given(rings(), st.integers(0, 12), st.integers(0, 1000))
def test_float64_equals_one_process(ring, n, seed):
    """Halo, shift and convolution; gradients of rows, weights and bias. Poison in padding reaches nobody."""
    context, length, documents = ring
    part = context.partition(length, documents=documents)
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    x, weight, bias, upstream = normal(B, length, C), normal(C, n + 1), normal(C), normal(3, B, length, C)
    padding = torch.zeros(length, dtype=torch.bool) if documents is None else torch.ones(length, dtype=torch.bool)
    for span in spans(length, documents):
        padding[span] = False
    whole = x.clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()
    summed = by_documents(lambda one: sum((j + 1) * back(one, j) for j in range(n + 1)), whole[0], documents)
    right = [
        summed,
        by_documents(lambda one: back(one, n), whole[0], documents),
        by_documents(lambda one: convolved(one, whole[1]), whole[0], documents) + whole[2],
    ]
    wanted = torch.autograd.grad(right, whole, list(upstream), materialize_grads=True)

    poisoned = torch.where(padding[:, None], torch.nan, x)
    mine = part.shard(poisoned, dim=1).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    wide, rows = part.halo(mine[0], before=n)
    found = [
        sum((j + 1) * wide.index_select(1, rows - j) for j in range(n + 1)),
        part.shift(mine[0], n),
        part.causal_conv1d(*mine),
    ]
    grads = torch.autograd.grad(found, mine, [part.shard(u, dim=1) for u in upstream])
    close = {"rtol": 1e-12, "atol": 1e-12}
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(part.gather(a, dim=1), b, **close)
    torch.testing.assert_close(part.gather(grads[0], dim=1), wanted[0], **close)
    for a, b in zip(grads[1:], wanted[1:], strict=True):
        torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_small_message_to_each_rank_that_borrows_and_one_back(layout):
    """No row travels twice; gradients travel as float32."""
    context = ContextParallel(Loopback(4), layout=layout)
    part = context.partition(48, documents=Documents([30, 18]))
    x = torch.randn(2, 48, 5).bfloat16().requires_grad_()
    wide, _ = part.halo(x, before=2)
    forward = dict(context.driver.counts.messages), dict(context.driver.counts.bytes)
    wide.sum().backward()
    pairs = {(lender, rank) for rank, loans in enumerate(part.halos[2].exchange._loans) for lender in loans.borrowed}
    assert forward[0] == dict.fromkeys(pairs, 1)
    for lender, taker in pairs:
        rows = len(part.halos[2].exchange._loans[taker].borrowed[lender])
        assert forward[1][lender, taker] == HEADER_BYTES + aligned(2 * rows * 5 * 2) + END_BYTES
        there_and_back = context.driver.counts.bytes[taker, lender] - forward[1].get((taker, lender), 0)
        assert there_and_back == HEADER_BYTES + aligned(2 * rows * 5 * 4) + END_BYTES


def test_bits_do_not_depend_on_the_order_of_ranks():
    """A row that several ranks borrow gets its gradients in one order."""
    found = []
    for seed in range(4):
        context = ContextParallel(Loopback(6, seed=seed), layout=Striped())
        part, random = context.partition(40), torch.Generator().manual_seed(0)
        x = torch.randn(1, 40, 4, generator=random).requires_grad_()
        wide, _ = part.halo(x, before=9)
        wide.backward(torch.randn(wide.shape, generator=random))
        found.append(x.grad)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_dtype_along_any_dim(dtype, dim):
    part = ContextParallel(Loopback(3)).partition(11)
    x = (torch.arange(121).view(11, 11) % 7).to(dtype)
    found = part.gather(part.shift(part.shard(x, dim=dim).to(dtype), 2, dim=dim).to(torch.complex64), dim=dim)
    wanted = torch.zeros_like(x).narrow(dim, 2, 9).copy_(x.narrow(dim, 0, 9))._base
    assert torch.equal(found, wanted.to(torch.complex64))


def test_second_derivatives():
    """Both ops are linear, each the other's backward."""
    part = ContextParallel(Loopback(3), layout=Striped()).partition(9)
    x, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 9, 2), (2, 3)))
    torch.autograd.gradcheck(lambda x, w: part.causal_conv1d(x, w), (x, weight))
    torch.autograd.gradgradcheck(lambda x, w: part.causal_conv1d(x, w).sin(), (x, weight))


def test_rows_are_the_caller_s_to_change():
    """Counting down in place, as a loop over taps may, must not move what later layers read."""
    part = ContextParallel(Loopback(2)).partition(9)
    x = torch.arange(1.0, 10.0)[None, :, None]
    before = part.shift(x, 2)
    _, rows = part.halo(x, before=2)
    rows -= 1
    assert torch.equal(part.shift(x, 2), before)


def test_channels_first_and_the_weight_of_a_module():
    part = ContextParallel(Loopback(2)).partition(9)
    x, module = torch.randn(2, 9, 4), torch.nn.Conv1d(4, 4, 3, groups=4)
    found = part.causal_conv1d(x.transpose(1, 2), module.weight, module.bias, dim=2)
    right = part.causal_conv1d(x, module.weight[:, 0], module.bias)
    torch.testing.assert_close(found.transpose(1, 2), right)
    torch.testing.assert_close(part.gather(found, dim=2), module(F.pad(part.gather(x, dim=1).transpose(1, 2), (2, 0))))


def test_under_autocast_it_is_as_the_convolution():
    part = ContextParallel(Loopback(2)).partition(9)
    with torch.autocast("cpu", torch.bfloat16):
        found = part.causal_conv1d(torch.randn(1, 9, 2), torch.randn(2, 3), torch.randn(2))
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize("checks", ["header", "checksum"])
def test_a_damaged_message_is_noticed(checks):
    bit = 8 * (HEADER_BYTES + 1) if checks == "checksum" else 9
    context = ContextParallel(Faulty(Loopback(3), Flip(bit=bit)), layout=Contiguous(), checks=checks)
    with pytest.raises(TransferError, match=r"the rows ahead of tokens that rank . sent at step 0 of call 0"):
        context.partition(12).halo(torch.randn(1, 12, 2), before=1)


def test_a_plan_s_partition_knows_its_documents():
    plan = ContextParallel(Loopback(2)).plan(6, Causal() & Documents([2, 4]))
    assert plan.partition is plan.queries
    found = plan.partition.shift(plan.partition.shard(torch.arange(1, 7), dim=0), dim=0)
    assert plan.partition.gather(found, dim=0).tolist() == [0, 1, 0, 3, 4, 5]


def test_compiled_calls_of_new_partitions_make_two_graphs_and_equal_eager():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(part, x, weight):
        return part.causal_conv1d(x * 2, weight) + part.shift(x, 1)

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    context = ContextParallel(Loopback(3))
    x, weight = torch.randn(1, 30, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    layer(context.partition(30), x, weight)
    for i in range(5):
        part = context.partition(30, documents=Documents([5 + i, 25 - i]))
        results = [[out := call(part, x, weight), *torch.autograd.grad(out.sin().sum(), (x, weight))]
                   for call in (compiled, layer)]  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counter.frame_count == 2


X = torch.zeros(1, 8, 2)
REFUSED = {
    "before": (lambda part: part.halo(X, before=-1), PlanError, "must be an integer >= 0 .tokens.; got -1"),
    "by": (lambda part: part.shift(X, 1.5), PlanError, "must be an integer >= 0 .tokens.; got 1.5"),
    "rows": (lambda part: part.halo(X[:, 1:], before=1), ShapeError, "must hold 8 tokens along dim 1"),
    "dim": (lambda part: part.halo(X, before=1, dim=3), ShapeError, "must hold 8 tokens along dim 3"),
    "list": (lambda part: part.halo([1], before=1), DtypeError, "must be a dense tensor"),
    "channels": (lambda part: part.causal_conv1d(X, torch.zeros(3, 4)), ShapeError, "with C = 2 as x has; got .3, 4."),
    "no weight": (lambda part: part.causal_conv1d(X, torch.zeros(2, 0)), ShapeError, "weight must be"),
    "dtype": (lambda part: part.causal_conv1d(X, torch.zeros(2, 3).double()), DtypeError, "of one dtype"),
    "bias": (lambda part: part.causal_conv1d(X, torch.zeros(2, 3), torch.zeros(3)), ShapeError, "bias must be .2."),
    "meta": (
        lambda part: part.causal_conv1d(X, torch.zeros(2, 3, device="meta")),
        DtypeError,
        "on x's device; got meta",
    ),
    "unsigned": (lambda part: part.shift(X.to(torch.uint16)), DtypeError, "torch can place .*; got torch.uint16"),
    "tangent": (lambda part: torch.func.jvp(part.shift, (X,), (X,)), NotDifferentiable, "no.* carry a forward-mode"),
    "conv dim": (lambda part: part.causal_conv1d(X, torch.zeros(2, 3), dim=0), ShapeError, r"or \[B, C, T\]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused(what):
    call, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        call(ContextParallel(Loopback(2)).partition(8))


def test_rows_with_other_documents_and_later_starts_are_refused():
    context = ContextParallel(Loopback(2))
    plan = context.plan(8, [Causal() & Documents([8]), Causal() & Documents([3, 5])])
    with pytest.raises(PlanError, match="one division into documents"):
        plan.partition.halo(torch.zeros(2, 8, 1), before=1)
    with pytest.raises(PlanError, match="starts at 5"):
        context.plan(8, Full(), key_len=20, query_start=5).queries.shift(X)
    compiled = torch.compile(lambda part, x: part.shift(x, 3), backend="eager", fullgraph=True)
    with pytest.raises((RingspunError, torch._dynamo.exc.Unsupported)):
        compiled(context.partition(8), X)


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_between_processes_it_equals_one_process(pools):
    """Several layouts and hybrids, an empty shard, more tokens than a run has; and attention in between."""
    for found in pools(4).run(on_ranks):
        for name, (a, b) in found.items():
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("trouble, own, words", [
    ("tokens", "ShapeError", "x must hold 4 tokens"),
    ("tokens later", "ShapeError", "x must hold 4 tokens"),
    ("before", "PlanMismatchError", "before is"),
    ("channels", "PlanMismatchError", "other sizes is"),
    ("number", "PlanError", "must be an integer"),
])  # fmt: skip
def test_all_hear_of_a_rank_that_asks_for_something_else(pools, trouble, own, words, at):
    """At once; within the timeout, here 2 s, where the others need no agreement any more."""
    for rank, (kind, message, seconds) in enumerate(pools(3).run(in_trouble, trouble, at)):
        assert kind == (own if rank == at or own == "PlanMismatchError" else "PeerError")
        assert words in message and seconds < 5
