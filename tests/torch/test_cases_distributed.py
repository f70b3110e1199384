"""Known hard cases D: distributed, as far as one thread goes; the rest is in `test_gloo.py`."""

from __future__ import annotations

import pytest
import torch
from hard_cases import by_kernel, judged
from on_ranks import STRIDED

from ringspun import Causal, Contiguous, Zigzag
from ringspun.testing.cases import Case, inputs
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel, Loopback


@by_kernel
@pytest.mark.parametrize("kind", STRIDED)
def test_D5_keys_and_values_of_any_strides(kind, kernel):
    """Raw storage is sent: wrong data in silence. The caller's tensors stay as they are."""
    plan = ContextParallel(Loopback(2), layout=Contiguous()).plan(12, Causal())
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


@by_kernel
def test_D11_without_torch_distributed_a_ring_of_one_is_plain_attention(kernel):
    """Send to self raises, an empty list of operations fails: a ring of one must not get there."""
    assert not torch.distributed.is_initialized()
    context = ContextParallel()
    assert (context.ring_size, context.ring_rank) == (1, 0)
    case = Case(1, 19, Causal(), Zigzag())
    judged(case, run_ring(case, inputs(case), context, kernel=kernel))
    assert not context.driver.counts.messages
