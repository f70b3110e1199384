"""What a caller may do with the op pair: ask for some gradients, pass odd strides, cast, drop the plan."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ringspun import Band, Causal, Striped, Window, Zigzag
from ringspun.errors import DtypeError, NotDifferentiable, RingspunError
from ringspun.torch import ContextParallel, Loopback, Plan
from ringspun.torch.execution import Options
from ringspun.torch.ops import REGISTRY, Registry, attention_op

KERNELS = ("aten_cpu", "eager")
S = 19


def make(ranks: int = 3, layout=None, mask=None) -> Plan:
    return ContextParallel(Loopback(ranks, seed=ranks), layout=layout or Zigzag()).plan(S, mask or Causal())


def tensors(dtype=torch.float64, *, seed=0, heads=4, kv_heads=2, grad=True):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((2, heads, S, 6), (2, kv_heads, S, 6), (2, kv_heads, S, 5))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in sizes]


def upstream(seed=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, S, 5, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_only_the_gradients_that_are_wanted(wanted, kernel):
    plan, dout = make(), upstream()
    whole = tensors()
    torch.autograd.backward(plan.attention(*whole, kernel=kernel), dout)
    some = tensors(grad=False)
    for name, x in zip("qkv", some, strict=True):
        x.requires_grad_(name in wanted)
    torch.autograd.backward(plan.attention(*some, kernel=kernel), dout)
    for name, x, full in zip("qkv", some, whole, strict=True):
        assert (x.grad is not None) == (name in wanted)
        assert x.grad is None or torch.equal(x.grad, full.grad)


def test_nothing_wanted_keeps_nothing():
    out, lse = make().attention(*tensors(grad=False), return_lse=True)
    assert not out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_out_alone_of_lse_alone_and_of_both(kernel):
    """Their sum is linear: both together give the sum of the two alone."""
    plan, dout = make(layout=Striped(), mask=Causal() & Window(7)), upstream()
    dlse = upstream(4)[..., 0]
    losses = {
        "out": lambda out, lse: (out * dout).sum(),
        "lse": lambda out, lse: (lse * dlse).sum(),
        "both": lambda out, lse: (out * dout).sum() + (lse * dlse).sum(),
    }
    grads = []
    for loss in losses.values():
        x = tensors()
        grads.append(torch.autograd.grad(loss(*plan.attention(*x, return_lse=True, kernel=kernel)), x))
    for of_out, of_lse, both in zip(*grads, strict=True):
        torch.testing.assert_close(of_out + of_lse, both, rtol=0, atol=1e-13)
    assert torch.equal(grads[1][2], torch.zeros_like(grads[1][2]))  # lse does not depend on v


@pytest.mark.parametrize("kernel", KERNELS)
def test_G12_gradient_of_the_returned_lse(kernel):
    """A loss that uses lse gets no gradient, or NaN."""
    plan = ContextParallel(Loopback(2)).plan(4, Window(4))
    q = torch.zeros(1, 1, 4, 1, dtype=torch.float64, requires_grad=True)
    k = torch.arange(4.0, dtype=torch.float64).view(1, 1, 4, 1).requires_grad_()
    shard = plan.partition.shard
    _, lse = plan.attention(
        shard(q, dim=2), shard(k, dim=2), shard(k, dim=2), scale=1.0, return_lse=True, kernel=kernel
    )
    last = plan.partition.gather(lse, dim=2)[0, 0, 3]
    dq, dk = torch.autograd.grad(last, (q, k))
    assert dq[0, 0, 3, 0].item() == pytest.approx(1.5, abs=1e-14)
    assert torch.equal(dk, torch.zeros_like(dk)) and torch.equal(dq[0, 0, :3], torch.zeros_like(dq[0, 0, :3]))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_G10_gradients_have_their_inputs_dtype(dtype, kernel):
    """dq comes back in the accumulators' dtype, or in bf16 for fp16."""
    q, k, v = tensors(dtype)
    out, lse = make().attention(q, k, v, return_lse=True, kernel=kernel)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    out.backward(upstream(dtype=dtype))
    for x in (q, k, v):
        assert (x.grad.dtype, x.grad.shape, x.grad.device) == (x.dtype, x.shape, x.device)
        assert x.grad.isfinite().all() and x.grad.abs().max() > 0


def test_G10_mixed_dtypes_raise():
    """fp32 q with bf16 k and v is neither computed nor cast in silence."""
    q, k, v = tensors(torch.float32)
    with pytest.raises(DtypeError, match=r"q, k and v must have one dtype .*got torch.float32, torch.bfloat16"):
        make().attention(q, k.bfloat16(), v.bfloat16())


LOSSES = {  # a loss, and the contiguous gradient of out that it stands for
    "sum": (lambda out, w: out.sum(), torch.ones_like),
    "transposed": (lambda out, w: (out.transpose(1, 2) * w.transpose(1, 2)).sum(), torch.clone),
    "columns first": (lambda out, w: (out.mT * w.mT.contiguous()).sum(), torch.clone),
    "summed over columns": (lambda out, w: (out.sum(-1) * w[..., 0]).sum(), lambda w: w[..., :1].expand_as(w)),
    "every second row": (
        lambda out, w: (out[:, :, ::2] * w[:, :, ::2]).sum(),
        lambda w: w * (torch.arange(S) % 2 == 0)[:, None],
    ),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_S10_incoming_gradients_that_are_not_contiguous(loss, kernel):
    """out.sum() gives a gradient of stride 0, transposed consumers one of swapped strides."""
    plan, weight = make(), upstream()
    x, y = tensors(), tensors()
    found = torch.autograd.grad(LOSSES[loss][0](plan.attention(*x, kernel=kernel), weight), x)
    right = torch.autograd.grad(plan.attention(*y, kernel=kernel), y, LOSSES[loss][1](weight).contiguous())
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
        assert b.abs().max() > 0.1


@pytest.mark.parametrize("kernel", KERNELS)
def test_S10_views_of_a_fused_projection(kernel):
    """q, k and v as strided views of one [B, T, 3, H, D]."""
    plan, weight = make(), upstream()
    generator = torch.Generator().manual_seed(3)
    fused = torch.randn(2, S, 3, 4, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    views = fused.permute(2, 0, 3, 1, 4).unbind(0)
    assert not any(x.is_contiguous() for x in views)
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    (found,) = torch.autograd.grad(plan.attention(*views, kernel=kernel), fused, weight)
    right = torch.autograd.grad(plan.attention(*copies, kernel=kernel), copies, weight)
    torch.testing.assert_close(found.permute(2, 0, 3, 1, 4), torch.stack(right), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_torch_casts_its_own_attention(dtype, wanted):
    """Float tensors to the autocast dtype, float64 left alone; gradients in the inputs' dtype."""
    q, k, v = tensors(dtype)
    plan = make(ranks=1)
    with torch.autocast("cpu", dtype=wanted):
        out, lse = plan.attention(q, k, v, return_lse=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert out.dtype == theirs.dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    cast = [x.detach().to(out.dtype) for x in (q, k, v)]
    assert torch.equal(out, plan.attention(*cast))
    out.sum().backward()
    assert all(x.grad.dtype == dtype for x in (q, k, v))


def test_autocast_does_not_reach_into_the_ring():
    """Backward under autocast too computes what it computes outside."""
    plan, dout = make(), upstream(dtype=torch.bfloat16)
    grads = []
    for enabled in (True, False):
        x = tensors(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.float16, enabled=False):
            out = plan.attention(*x, kernel="eager")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(out, x, dout))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_second_derivatives_are_refused(kernel):
    """They would be wrong, not absent: once_differentiable lets autograd.grad through."""
    plan = make()
    q, k, v = tensors()
    (dq,) = torch.autograd.grad(plan.attention(q, k, v, kernel=kernel).sum(), q, create_graph=True)
    assert dq.requires_grad
    with pytest.raises(NotDifferentiable, match="second derivatives of ring attention must not be asked for"):
        torch.autograd.grad(dq.sum(), q, retain_graph=True)
    with pytest.raises(NotDifferentiable, match="second derivatives"):
        dq.square().sum().backward()


def test_create_graph_alone_changes_nothing():
    plan, dout = make(), upstream()
    x, y = tensors(), tensors()
    plain = torch.autograd.grad(plan.attention(*x), x, dout)
    graph = torch.autograd.grad(plan.attention(*y), y, dout, create_graph=True)
    assert all(torch.equal(a, b.detach()) for a, b in zip(plain, graph, strict=True))


def test_backward_after_plan_and_context_are_gone():
    """Callers drop the plan of a batch before its backward runs."""
    context = ContextParallel(Loopback(3), layout=Zigzag())
    plan = context.plan(S, Causal())
    x, y = tensors(), tensors()
    expected = torch.autograd.grad(plan.attention(*x), x, upstream())
    out = plan.attention(*y)
    del plan, context
    gc.collect()
    assert all(torch.equal(a, b) for a, b in zip(expected, torch.autograd.grad(out, y, upstream()), strict=True))


def test_two_forwards_may_wait_for_their_backwards():
    """Calls nest and interleave: a backward in any order, twice over one graph too."""
    plan, other = make(), make(mask=Window(4))
    x, y, dout = tensors(seed=1), tensors(seed=2), upstream()
    expected = [torch.autograd.grad(p.attention(*t), t, dout) for p, t in ((plan, x), (other, y))]
    first, second = plan.attention(*x), other.attention(*y)
    grads = [torch.autograd.grad(first, x, dout, retain_graph=True)]
    grads.append(torch.autograd.grad(second, y, dout))
    again = torch.autograd.grad(first, x, dout)
    assert all(torch.equal(a, b) for a, b in zip(grads[0], again, strict=True))
    for found, right in zip(grads, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


class Plain:
    """Stands for an executable."""

    holds_function, n_bytes = False, 0


def test_registry_holds_what_lives_and_what_was_used_last():
    registry, held = Registry(kept=2, contexts=2), [Plain(), Plain(), Plain()]
    handles = [registry.add(5, x) for x in held]
    for handle in handles:
        registry.get(handle)
    refs = [weakref.ref(x) for x in held]
    assert [registry.get(h) for h in handles] == held  # a plan that is held lives, however many were used since
    held.clear()
    gc.collect()
    assert [ref() is None for ref in refs] == [True, False, False]  # of the dropped, the last two used
    with pytest.raises(
        RingspunError, match=r"plan must be held or recently used; got handle 1, whose plan was dropped"
    ):
        registry.get(handles[0])
    one, two = Plain(), Plain()
    for context, x in ((6, one), (7, two)):  # two other contexts push the first one out
        registry.get(registry.add(context, x))
    gc.collect()
    assert all(ref() is None for ref in refs)


def test_a_plan_that_is_held_outlives_thousands_of_others():
    context, x = ContextParallel(Loopback(2)), torch.randn(1, 1, 8, 2)
    kept = context.plan(8, Causal())
    expected = kept.attention(x, x, x)
    with_graph = x.clone().requires_grad_()
    waiting = kept.attention(with_graph, x, x)
    for n in range(1100):
        context.plan(8, Causal() | Band(-1 - n % 7, 100 + n))
    for _ in range(70):
        ContextParallel(Loopback(2)).plan(8, Causal()).attention(x, x, x)
    assert torch.equal(kept.attention(x, x, x), expected)
    waiting.sum().backward()
    assert with_graph.grad is not None


def test_an_unknown_handle_is_named():
    q, k, v = tensors()
    with pytest.raises(RingspunError, match="got handle -1"):
        attention_op(q, k, v, None, None, -1, 1.0, 0.0)
    assert REGISTRY.get(make()._handle(Options()))
