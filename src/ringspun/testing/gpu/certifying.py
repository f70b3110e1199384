"""Rings of virtual ranks on one device: every kernel there, forward and backward, held against dense float64 on the
same device. The bar is twice the error of one call of PyTorch's own attention in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringspun.core.layout import Contiguous, Layout, Striped, Zigzag
from ringspun.core.mask import Anchors, Band, Causal, Chunks, Documents, Full, Mask, Prefix, Window
from ringspun.errors import KernelRefused
from ringspun.testing.cases import Shape
from ringspun.torch import ContextParallel, Loopback

FACTOR = 2.0
"""How many times the error of one call a ring's may be."""
LSE_BAR = 2e-5
"""Of lse, which PyTorch's attention does not give: in units of its size (scores are float32 in every kernel)."""
TINY = 16 * torch.finfo(torch.float32).eps
TENSORS = ("out", "lse", "dq", "dk", "dv")
PASSED, FAILED, REFUSED = "passed", "failed", "refused"
RINGS = (1, 2, 4, 8)
PLAIN = Shape(batch=2, heads=4, kv_heads=4, head_size=64, value_size=64)


@dataclass(frozen=True)
class GpuCase:
    """One attention on a ring.

    Args:
        kernel: its name. ranks: R, virtual. seq_len: S (tokens). dtype: name. backward: what travels in it.
        lse_gradient: whether lse has an incoming gradient.
    """

    kernel: str
    ranks: int
    mask: Mask
    layout: Layout = field(default_factory=Zigzag)
    dtype: str = "bfloat16"
    shape: Shape = PLAIN
    seq_len: int = 509
    backward: Literal["keys", "queries"] = "keys"
    lse_gradient: bool = False

    def __str__(self) -> str:
        s = self.shape
        more = [", queries travel"] * (self.backward == "queries") + [", gradient of lse"] * self.lse_gradient
        sizes = f"heads {s.heads}/{s.kv_heads} of {s.head_size}/{s.value_size}"
        return f"{self.kernel} R={self.ranks} {self.mask} {self.layout} {self.dtype} {sizes}{''.join(more)}"


Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, and the incoming gradients of out and lse."""


class Outcome(NamedTuple):
    """What came of a case. `tensor`: the one nearest to its bar, or furthest beyond; `error` and `bar` are its."""

    case: GpuCase
    status: str
    tensor: str = ""
    error: float = 0.0
    bar: float = 0.0
    reason: str = ""


def cases(kernel: str, *, quick: bool = False, few: bool = False) -> Iterator[GpuCase]:
    """What is certified: masks, layouts, dtypes, grouped heads, head sizes, value head sizes, on rings of 1, 2, 4, 8.

    Args:
        quick: small and plain ones alone, for CPUs. few: fewer rings and masks, where each new shape is slow.
    """
    rings, size = RINGS[::2] if few or quick else RINGS, 61 if quick else 509
    plain = replace(PLAIN, head_size=16, value_size=16) if quick else PLAIN
    of_rings = [GpuCase(kernel, ranks, Causal(), shape=plain, seq_len=size) for ranks in rings]
    for case in of_rings:
        for mask, layout in _masks(size)[: 3 if few or quick else None]:
            yield replace(case, mask=mask, layout=layout)
    last = of_rings[-1]
    yield replace(last, backward="queries")
    yield replace(last, lse_gradient=True)
    for dtype in ("float16", "float32"):
        yield replace(last, dtype=dtype)
    for shape in _shapes()[: 0 if quick else None]:
        for case in of_rings[::2]:
            yield replace(case, shape=shape)


def _masks(size: int) -> list[tuple[Mask, Layout]]:
    third = size // 3
    documents = Documents([third, 1, third - 7, 2, size - 2 * third + 4])
    return [
        (Causal(), Zigzag()),
        (Causal() & documents, Contiguous()),
        (Window(size // 5), Contiguous()),
        (Full(), Zigzag()),
        (Causal(), Striped()),
        (documents, Zigzag()),
        (Causal() & documents & Window(size // 7), Zigzag()),
        (Causal() | Prefix(size // 4), Zigzag()),
        (Band(size // 6, size // 9), Zigzag()),
        (Causal() & (Window(size // 8) | Anchors(4)), Zigzag()),
        (Causal() & Chunks(third), Zigzag()),
    ]


def _shapes() -> list[Shape]:
    return [
        Shape(2, 8, 2, 128, 128),
        Shape(1, 8, 1, 128, 128),
        Shape(1, 4, 2, 256, 256),
        Shape(2, 4, 4, 128, 64),
        Shape(2, 4, 2, 64, 128),
        Shape(2, 6, 3, 40, 24),
    ]


def certified(case: GpuCase, device: torch.device) -> Outcome:
    """One case, run and judged."""
    try:
        given = _tensors(case, device)
        found = _ring(case, *given)
        allowed = torch.from_numpy(case.mask.as_array(case.seq_len)).to(device)
        exact, one = _dense(case, given, allowed), _errors_of_one_call(case, given, allowed)
        return _judged(case, found, exact, one)
    except KernelRefused as refusal:
        return Outcome(case, REFUSED, reason=str(refusal))
    except (
        Exception
    ) as problem:  # of the kernel; or of one before it, whose error the device keeps: all fail from there
        return Outcome(case, FAILED, reason=f"raised {type(problem).__name__}: {problem}")


def _judged(case: GpuCase, found: dict[str, Tensor], exact: dict[str, Tensor], one: dict[str, float]) -> Outcome:
    errors = {name: _rms(found[name], exact[name]) for name in TENSORS}
    bars = {name: FACTOR * error + TINY for name, error in one.items()}
    bars["lse"] = LSE_BAR * max(1.0, float(exact["lse"].abs().max()))
    worst = max(TENSORS, key=lambda name: errors[name] / bars[name])
    status = PASSED if all(errors[name] <= bars[name] for name in TENSORS) else FAILED  # NaN is no success
    wrong = [name for name in TENSORS if not errors[name] <= bars[name]]
    tensor = worst if status == PASSED else wrong[0]
    reason = "" if status == PASSED else f"{', '.join(wrong)} beyond the bar"
    return Outcome(case, status, tensor, errors[tensor], bars[tensor], reason)


def _rms(x: Tensor, exact: Tensor) -> float:
    if x.shape != exact.shape:
        return float("inf")
    return float((x.double() - exact).square().mean().sqrt())


def _tensors(case: GpuCase, device: torch.device) -> Given:
    """In the case's dtype, dlse in float32; the same whatever the ring and the kernel."""
    generator, s, dtype = torch.Generator().manual_seed(0), case.shape, getattr(torch, case.dtype)

    def random(heads: int, size: int) -> Tensor:
        return torch.randn(s.batch, heads, case.seq_len, size, generator=generator).to(device, dtype)

    q, k, v = random(s.heads, s.head_size), random(s.kv_heads, s.head_size), random(s.kv_heads, s.value_size)
    dout, dlse = random(s.heads, s.value_size), torch.randn(s.batch, s.heads, case.seq_len, generator=generator)
    return q, k, v, dout, dlse.to(device) * case.lse_gradient


def _ring(case: GpuCase, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    context = ContextParallel(Loopback(case.ranks), layout=case.layout, backward=case.backward)
    plan = context.plan(case.seq_len, case.mask)
    part = plan.partition
    given = [part.shard(x, dim=2).requires_grad_() for x in (q, k, v)]
    out, lse = plan.attention(*given, return_lse=True, kernel=case.kernel)
    ends, into = [out], [part.shard(dout, dim=2)]
    if case.lse_gradient:
        ends, into = [*ends, lse], [*into, part.shard(dlse, dim=2)]
    grads = torch.autograd.grad(ends, given, into)
    named = zip(TENSORS, (out, lse, *grads), strict=True)
    return {name: part.gather(x.detach(), dim=2) for name, x in named}


def _dense(case: GpuCase, given: Given, allowed: Tensor) -> dict[str, Tensor]:
    q, k, v, dout, dlse = (x.double() for x in given)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    groups = case.shape.heads // case.shape.kv_heads
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ keys.mT * case.shape.head_size**-0.5).masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.exp(scores - lse[..., None]) @ values
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    return {name: x.detach() for name, x in zip(TENSORS, (out, lse, *grads), strict=True)}


def _errors_of_one_call(case: GpuCase, given: Given, allowed: Tensor) -> dict[str, float]:
    """Of PyTorch's own attention, which gives no lse: so that has no gradient here, whatever the case says."""
    q, k, v, dout, dlse = given
    exact = _dense(case, (q, k, v, dout, torch.zeros_like(dlse)), allowed)
    return {name: _rms(x, exact[name]) for name, x in _one_call(case, given, allowed).items()}


def _one_call(case: GpuCase, given: Given, allowed: Tensor) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    groups = case.shape.heads // case.shape.kv_heads
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = scaled_dot_product_attention(q, keys, values, attn_mask=allowed)
    grads = torch.autograd.grad(out, (q, k, v), given[3])
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
