"""Timing a ring beside one process: the same work in turn, in one run, judged by the ratio of pairs."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringspun.core.host import cores
from ringspun.core.layout import Contiguous
from ringspun.core.mask import Causal, Full, Mask
from ringspun.testing.work import Ratio, Work, paired_ratio, threads_per_rank
from ringspun.torch import ContextParallel, Loopback, Plan
from ringspun.torch.memory import peak_memory

__all__ = [
    "Ratio",
    "Work",
    "paired_ratio",
    "peak_on_rank",
    "plan_on_rank",
    "second_run",
    "threads_per_rank",
    "time_alone",
    "time_on_rank",
]


def time_on_rank(ring_rank: int, work: Work, repeats: int) -> list[float]:
    """On every rank of a pool: seconds of each repeat, all ranks starting together."""
    torch.set_num_threads(threads_per_rank(work.ranks))
    plan = plan_on_rank(work)
    q, k, v, dout = _tensors(work, plan.partition.local_tokens, seed=ring_rank)
    return [_once(plan, q, k, v, dout, barrier=True) for _ in range(repeats)]


def plan_on_rank(work: Work) -> Plan:
    """The plan of a work over the default group."""
    context = ContextParallel(
        layout=work.layout, checks=work.checks, route=work.route, backward=work.backward, ulysses=work.ulysses
    )
    return context.plan(work.seq_len, work.mask)


def second_run(plan: Plan, heads: int, head_size: int, dtype: str = "float32") -> float:
    """On every rank of the default group: seconds of a plan's second forward + backward, all starting together."""
    work = Work(1, 0, heads, heads, head_size, dtype, Causal(), Contiguous())  # as far as its tensors go
    tensors = _tensors(work, plan.partition.local_tokens, seed=0)
    return [_once(plan, *tensors, barrier=True) for _ in range(2)][1]


def peak_on_rank(ring_rank: int, work: Work) -> int:
    """On every rank of a pool: peak bytes of a first forward + backward above what the inputs take, one thread."""
    torch.set_num_threads(1)
    plan = plan_on_rank(work)
    q, k, v, dout = _tensors(work, plan.partition.local_tokens, seed=ring_rank)
    with peak_memory() as peak:
        torch.autograd.grad(plan.attention(q, k, v), (q, k, v), dout)
    return peak.bytes


def time_alone(work: Work, repeats: int) -> tuple[list[float], str]:
    """The whole sequence in this process with all cores: seconds of each repeat, and what ran.

    Causal and full masks run torch's own `scaled_dot_product_attention`; others, which it cannot do without a dense
    mask, run this package's plan on one rank.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        q, k, v, dout = _tensors(work, work.seq_len, seed=0)
        if isinstance(work.mask, Causal | Full):
            return [_once_dense(work.mask, q, k, v, dout) for _ in range(repeats)], "scaled_dot_product_attention"
        plan = ContextParallel(Loopback(1), layout=work.layout).plan(work.seq_len, work.mask)
        return [_once(plan, q, k, v, dout, barrier=False) for _ in range(repeats)], "ringspun on one rank"
    finally:
        torch.set_num_threads(before)


def _tensors(work: Work, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, work.dtype)

    def random(heads: int) -> Tensor:
        return torch.randn(work.batch, heads, rows, work.head_size, generator=generator).to(dtype)

    q, k, v = (random(h).requires_grad_() for h in (work.heads, work.kv_heads, work.kv_heads))
    return q, k, v, random(work.heads)


def _once(plan: Plan, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, barrier: bool) -> float:
    if barrier:
        dist.barrier()
    start = time.perf_counter()
    torch.autograd.grad(plan.attention(q, k, v), (q, k, v), dout)
    return time.perf_counter() - start


def _once_dense(mask: Mask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> float:
    start = time.perf_counter()
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, is_causal=isinstance(mask, Causal), enable_gqa=grouped)
    torch.autograd.grad(out, (q, k, v), dout)
    return time.perf_counter() - start
