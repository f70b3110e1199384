"""`Plan.explain` counts what a call then does."""

from __future__ import annotations

import pytest
import torch

from ringspun import Causal, Contiguous, Documents, Window, Zigzag
from ringspun.errors import PlanError, ShapeError
from ringspun.torch import Alibi, ContextParallel, Loopback

S = 64


def tensors(batch: int = 1) -> list[torch.Tensor]:
    return [torch.randn(batch, h, S, d, requires_grad=True) for h, d in ((4, 8), (2, 8), (2, 6))]


@pytest.mark.parametrize("layout", [Zigzag(), Contiguous()], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Window(9), Causal() & Documents([40, 5, 15])], ids=str)
def test_bytes_are_those_that_a_call_sends(mask, layout):
    ring = Loopback(4)
    plan = ContextParallel(ring, layout=layout).plan(S, mask)
    x = tensors(batch=2)
    told = [plan.explain(*x, ring_rank=r) for r in range(4)]
    out = plan.attention(*x)
    forward = sum(ring.counts.bytes.values())
    assert sum(s.sent_bytes for e in told for s in e.forward) == forward
    assert sum(s.received_bytes for e in told for s in e.forward) == forward
    out.backward(torch.randn_like(out))
    assert sum(s.sent_bytes for e in told for s in e.backward) == sum(ring.counts.bytes.values()) - forward
    assert sum(s.pairs for e in told for s in e.forward) == mask.as_array(S).sum()
    assert {e.forward[i].imbalance for e in told for i in range(len(e.forward))} <= {
        s.imbalance for s in told[0].forward
    }, "the same on every rank"


def test_balance_of_a_causal_mask():
    x = tensors()
    even, uneven = (
        ContextParallel(Loopback(4), layout=layout).plan(S, Causal()).explain(*x) for layout in (Zigzag(), Contiguous())
    )
    assert [s.imbalance for s in even.forward] == [1.0] * 4
    assert [round(s.imbalance, 2) for s in uneven.forward] == [1.0, 1.33, 2.0, 4.0]
    assert [s.source for s in even.forward] == [0, 3, 2, 1] and even.hops == 3


def test_kernels_and_their_reasons():
    plan = ContextParallel(Loopback(2)).plan(S, Causal())
    x = tensors()
    assert plan.explain(*x).kernel == "aten_cpu" and plan.explain(*x).refusals == {}
    capped = plan.explain(*x, softcap=3.0)
    assert capped.kernel == "eager" and capped.refusals == {"aten_cpu": "softcap must be None; got 3.0"}
    none = plan.explain(*x, bias=Alibi(torch.ones(4)), kernel="aten_cpu")
    assert none.kernel is None and none.refusals == {"aten_cpu": "bias must be None; got alibi"}
    page = str(capped)
    ring = "all ranks, by ring: wait 1.00, 4 tiles, sends 5.5 KiB, 32 tokens a rank"
    for words in ("causal over 64 tokens, zigzag\n", ring, "kernel eager", "not aten_cpu: softcap", "as ring rank 0"):
        assert words in page
    assert "no kernel can do this call" in str(none)


def test_what_layouts_are_compared_by():
    x = tensors()

    def ring(layout):
        return ContextParallel(Loopback(4), layout=layout).plan(S, Causal()).explain(*x).ring

    even, uneven = ring(Zigzag()), ring(Contiguous())
    assert (even.wait, even.tokens) == (1.0, (16, 16)) and round(uneven.wait, 2) == 1.74
    assert even.sent_bytes > uneven.sent_bytes and even.tiles > 0
    # totals are in proportion to speeds, steps are not: a clock that waits gains nothing, and is told so
    fast = ring(Zigzag(speeds=[1.0, 1.0, 2.0, 4.0]))
    assert fast.wait > 1.5 and fast.tokens == (8, 32)


def test_two_sides_are_named():
    plan = ContextParallel(Loopback(2)).plan(4, Causal(), key_len=10, query_start=6)
    q, k = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 10, 2)
    assert str(plan.explain(q, k, k)).startswith("causal over 4 tokens, zigzag from 6, and 10 keys, zigzag\n")
    assert repr(plan) == "Plan(causal over 4 tokens, zigzag from 6, and 10 keys, zigzag, tokens=[2, 2])"


def test_flops_follow_batch_rows_and_their_masks():
    x = tensors(batch=2)
    one = ContextParallel(Loopback(1)).plan(S, Causal()).explain(*x)
    rows = ContextParallel(Loopback(1)).plan(S, [Causal(), Causal()]).explain(*x)
    half = ContextParallel(Loopback(1)).plan(S, [Causal(), Documents([])]).explain(*x)
    assert one.flops == rows.flops == tuple(2 * f for f in half.flops)
    assert one.flops[0] == S * (S + 1) // 2 * 2 * (8 + 6) * 4 * 2


def test_wrong_arguments_are_refused_and_nobody_else_is_asked():
    ring = Loopback(2)
    plan = ContextParallel(ring).plan(S, Causal())
    x = tensors()
    with pytest.raises(ShapeError, match="must hold 64 tokens"):
        plan.explain(*(t[:, :, 1:] for t in x))
    with pytest.raises(PlanError, match="ring_rank must be from 0 to 1; got 2"):
        plan.explain(*x, ring_rank=2)
    assert plan.attention(*x).shape == (1, 4, S, 6), "the ring is whole"
