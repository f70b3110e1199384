"""Compiled calls run the same op pair as eager ones; a new plan every batch must not mean a new graph every batch."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ringspun import Causal, Documents
from ringspun.testing.cases import BUCKETS, bias_of_positions
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.bias import Alibi, RelativeTable

R, B, H, K, S, D = 3, 2, 4, 2, 50, 8


def test_compiled_calls_with_a_new_plan_each_make_two_graphs_and_equal_eager():
    """Recompiling for every batch of documents; or a graph that breaks, or cannot find its plan."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(q, k, v, plan):
        return plan.attention(q * 2, k, v)

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    context = ContextParallel(Loopback(R))
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    for i in range(10):
        plan = context.plan(S, Causal() & Documents([10 + i, 20, S - 30 - i]))
        inputs = [plan.partition.shard(random(B, heads, S, D), dim=2).requires_grad_() for heads in (H, K, K)]
        upstream = random(B, H, S, D)
        results = []
        for call in (compiled, layer):
            out = call(*inputs, plan)
            results.append([out, *torch.autograd.grad(out, inputs, upstream)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counter.frame_count == 2  # one with the first handle, one with any handle


BIASES = {
    "no": lambda slopes, table: None,
    "alibi": lambda slopes, table: Alibi(slopes),
    "table": lambda slopes, table: RelativeTable(table, BUCKETS),
    "function": lambda slopes, table: bias_of_positions,
}


def arguments_of(name: str):
    """A layer with sinks, softcap and a bias, and tensors for it that want gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, S, D), (B, K, S, D), (B, K, S, D), (H,), (H,), (BUCKETS.count, H)
    given = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]

    def layer(plan, q, k, v, sinks, slopes, table):
        bias = BIASES[name](slopes * 2, table * 2)
        return plan.attention(q * 2, k, v, sinks=sinks, softcap=3.0, bias=bias, return_lse=True)

    return layer, given


def results(call, plan, given):
    out, lse = call(plan, *given)
    grads = torch.autograd.grad(out.sin().sum() + lse.sum(), given, allow_unused=True)
    return [out, lse, *(g for g in grads if g is not None)]


@pytest.mark.parametrize("name", BIASES)
def test_sinks_softcap_and_biases_compile_for_plans_that_come_later(name):
    """One call uncompiled, of the first plan; then every new plan is ready."""
    torch._dynamo.reset()
    layer, given = arguments_of(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    context = ContextParallel(Loopback(R))
    layer(context.plan(S, Causal()), *given)
    for i in range(4):
        plan = context.plan(S, Causal() & Documents([10 + i, S - 10 - i]))
        found, right = results(compiled, plan, given), results(layer, plan, given)
        assert len(found) == len(right) == (6 if name in ("no", "function") else 7)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert counter.frame_count == 2


def test_the_first_call_of_a_bias_cannot_be_part_of_a_whole_graph():
    """It says so, rather than what dynamo could not trace; and without `fullgraph` it runs."""
    layer, given = arguments_of("alibi")
    torch._dynamo.reset()
    plan = ContextParallel(Loopback(R)).plan(S, Causal())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attention must be called once uncompiled with this"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(plan, *given)
    torch._dynamo.reset()
    found = torch.compile(layer, backend="aot_eager")(plan, *given)
    assert all(torch.equal(a, b) for a, b in zip(found, layer(plan, *given), strict=True))


@pytest.mark.parametrize("name", BIASES)
def test_calls_that_split_heads_compile_for_plans_that_come_later(name):
    torch._dynamo.reset()
    layer, given = arguments_of(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    context = ContextParallel(Loopback(4), ulysses=2)
    layer(context.plan(S, Causal()), *given)
    for i in range(3):
        plan = context.plan(S, Causal() & Documents([10 + i, S - 10 - i]))
        pairs = zip(results(compiled, plan, given), results(layer, plan, given), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert counter.frame_count <= 2
