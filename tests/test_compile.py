"""Compiled calls run the same op pair as eager ones; a new plan every batch must not mean a new graph every batch."""

from __future__ import annotations

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ringspun import Causal, Documents
from ringspun.torch import ContextParallel, Loopback

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
