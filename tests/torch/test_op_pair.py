"""The two ops as torch sees them: schema, fakes, autograd, compiled graphs; no DTensor."""

from __future__ import annotations

import pytest
import torch
from on_ranks import call_with_dtensors
from torch._dynamo.testing import CompileCounterWithBackend

from ringspun import Causal, Window, Zigzag
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.bias import Alibi, Rule
from ringspun.torch.execution import Options
from ringspun.torch.ops import attention_backward_op, attention_op

S = 13


def tensors(grad: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, S, 6), (2, 2, S, 6), (2, 2, S, 5))
    return [torch.randn(size, generator=generator).requires_grad_(grad) for size in sizes]


def handles(rule: Rule | None = None) -> list[int]:
    context = ContextParallel(Loopback(3), layout=Zigzag())
    return [
        context.plan(S, mask)._handle(Options(rule=rule)) for mask in (Causal(), *(Window(w) for w in range(2, 12)))
    ]


def inputs(name: str, grad: bool = False, dtype: torch.dtype = torch.float32) -> tuple:
    """The tensors of a call, plain or with everything, and what follows them: handle, scale and softcap."""
    q, k, v = (x.detach().to(dtype).requires_grad_(grad) for x in tensors(grad=False))
    if name == "plain":
        return (q, k, v, None, None), (handles()[0], 0.3, 0.0)
    sinks, slopes = (torch.rand(4, dtype=dtype, requires_grad=grad) for _ in range(2))
    return (q, k, v, sinks, slopes), (handles(Alibi(slopes).rule)[0], 0.3, 2.0)


both = pytest.mark.parametrize("name", ["plain", "everything"])


@both
def test_forward_op_is_a_good_citizen(name):
    """Schema, autograd registration, fake shapes and strides. (Compiled equals eager: below; opcheck's own comparison
    would also want the calls' numbers to be equal.)"""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    (q, *others), rest = inputs(name, grad=True)
    torch.library.opcheck(attention_op, (q, *others, *rest), test_utils=checks)
    torch.library.opcheck(attention_op, (q.mT.contiguous().mT, *others, *rest), test_utils=checks)


@both
@pytest.mark.parametrize("with_lse", [True, False])
def test_backward_op_is_a_good_citizen(with_lse, name):
    given, rest = inputs(name)
    out, lse, *handed_on = attention_op(*given, *rest)
    dlse = torch.randn_like(lse) if with_lse else None
    saved = (torch.randn_like(out), dlse, *given, out, lse, *handed_on, *rest)
    torch.library.opcheck(attention_backward_op, (*saved, [True] * 5))
    some = [False, True, False, True, False]
    torch.library.opcheck(attention_backward_op, (*saved, some))
    for grad, x, need in zip(attention_backward_op(*saved, some), given, some, strict=True):
        assert grad.shape == (x.shape if need and x is not None else (0,))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_G10_the_ops_themselves_return_the_inputs_dtype(dtype, name):
    """Autograd casts gradients that come in another dtype, and so hides it."""
    given, rest = inputs(name, dtype=dtype)
    out, lse, *handed_on = attention_op(*given, *rest)
    saved = (torch.randn_like(out), None, *given, out, lse, *handed_on, *rest, [True] * 5)
    grads = attention_backward_op(*saved)
    assert out.dtype == dtype and all(g.dtype == dtype and g.is_contiguous() for g in grads)
    torch.library.opcheck(attention_backward_op, saved, test_utils="test_faketensor")


def test_one_graph_serves_every_plan():
    """Two graphs in all, one of the first handle and one of any; fullgraph; bits as in eager."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(q, k, v, handle):
        out, lse, *_ = attention_op(q * 2, k, v, None, None, handle, 0.3, 0.0)
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
