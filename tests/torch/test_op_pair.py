"""The two ops as torch sees them: schema, fakes, autograd, compiled graphs; no DTensor."""

from __future__ import annotations

import pytest
import torch
from on_ranks import call_with_dtensors
from torch._dynamo.testing import CompileCounterWithBackend

from ringspun import Causal, Window, Zigzag
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.ops import attention_backward_op, attention_op

S = 13


def tensors(grad: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, S, 6), (2, 2, S, 6), (2, 2, S, 5))
    return [torch.randn(size, generator=generator).requires_grad_(grad) for size in sizes]


def handles() -> list[int]:
    context = ContextParallel(Loopback(3), layout=Zigzag())
    return [context.plan(S, mask)._handle(None) for mask in (Causal(), *(Window(w) for w in range(2, 12)))]


def test_forward_op_is_a_good_citizen():
    """Schema, autograd registration, fake shapes and strides. (Compiled equals eager: below; opcheck's own comparison
    would also want the calls' numbers to be equal.)"""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(attention_op, (*tensors(grad=True), handles()[0], 0.3), test_utils=checks)
    q, k, v = tensors(grad=True)
    turned = (q.mT.contiguous().mT, k, v.double().float(), handles()[0], 0.3)
    torch.library.opcheck(attention_op, turned, test_utils=checks)


@pytest.mark.parametrize("with_lse", [True, False])
def test_backward_op_is_a_good_citizen(with_lse):
    q, k, v = tensors(grad=False)
    out, lse, call = attention_op(q, k, v, handles()[0], 0.3)
    dlse = torch.randn_like(lse) if with_lse else None
    saved = (torch.randn_like(out), dlse, q, k, v, out, lse, call, handles()[0], 0.3)
    torch.library.opcheck(attention_backward_op, (*saved, True, True, True))
    torch.library.opcheck(attention_backward_op, (*saved, False, True, False))
    empty, dk, _ = attention_backward_op(*saved, False, True, False)
    assert empty.shape == (0,) and dk.shape == k.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_G10_the_ops_themselves_return_the_inputs_dtype(dtype):
    """Autograd casts gradients that come in another dtype, and so hides it."""
    q, k, v = (x.to(dtype) for x in tensors(grad=False))
    out, lse, call = attention_op(q, k, v, handles()[0], 0.3)
    saved = (torch.randn_like(out), None, q, k, v, out, lse, call, handles()[0], 0.3, True, True, True)
    grads = attention_backward_op(*saved)
    assert out.dtype == dtype and all(g.dtype == dtype and g.is_contiguous() for g in grads)
    torch.library.opcheck(attention_backward_op, saved, test_utils="test_faketensor")


def test_one_graph_serves_every_plan():
    """Two graphs in all, one of the first handle and one of any; fullgraph; bits as in eager."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(q, k, v, handle):
        out, lse, _ = attention_op(q * 2, k, v, handle, 0.3)
        return (out * out).sum() + lse.sum()

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for handle in handles():
        x = tensors(grad=True)
        found, right = (torch.autograd.grad(call(*x, handle), x) for call in (compiled, function))
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert counter.frame_count == 2


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_dtensors_are_refused_with_the_line_to_write(pools):
    for name, kind, message in pools(2).run(call_with_dtensors):
        assert kind == "DtypeError" and f"{name} must be a plain tensor" in message
        assert "got a DTensor. Pass its `.to_local()`." in message
