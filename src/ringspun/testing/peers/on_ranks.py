"""What runs on every rank, the same for all peers."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringspun.testing.peers.base import Peer, Ready
from ringspun.testing.peers.traffic import Traffic
from ringspun.testing.timing import Work, threads_per_rank
from ringspun.torch.memory import peak_memory

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class First:
    """The first call of a peer, on one rank.

    Args:
        peak_bytes: above its inputs, of forward + backward. sent_bytes: either None where it cannot be counted.
    """

    peak_bytes: int | None
    sent_bytes: int | None


def global_inputs(work: Work) -> tuple[Tensor, ...]:
    """q, k, v and the incoming gradient of the whole sequence ``[B, H or K, S, D]``: the same on every rank."""
    generator = torch.Generator().manual_seed(work.seq_len)
    dtype = getattr(torch, work.dtype)
    heads = (work.heads, work.kv_heads, work.kv_heads, work.heads)
    sizes = [(work.batch, h, work.seq_len, work.head_size) for h in heads]
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes)


def judge_on_rank(ring_rank: int, peer: Peer, work: Work) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Positions of this rank's tokens, and float64 copies of its rows of out, dq, dk and dv, ``[B, H, T, D]``."""
    torch.set_num_threads(threads(peer, work))
    ready, (q, k, v, dout) = _prepared(ring_rank, peer, work)
    out = ready.attend(q, k, v)
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
    rows = (x.transpose(1, 2) if ready.by_token else x for x in found)
    return ready.positions, {name: x.double().numpy() for name, x in zip(NAMES, rows, strict=True)}


def first_on_rank(ring_rank: int, peer: Peer, work: Work) -> First:
    """Forward + backward once, with memory and bytes counted. Nothing of it is there yet but its inputs."""
    torch.set_num_threads(threads(peer, work))
    ready, (q, k, v, dout) = _prepared(ring_rank, peer, work)
    traffic = Traffic()
    before = ready.sent_bytes() if ready.sent_bytes else 0
    dist.barrier()
    with peak_memory() as peak, nullcontext() if ready.sent_bytes else traffic:
        torch.autograd.grad(ready.attend(q, k, v), (q, k, v), dout)
    if not ready.seen_by_torch:
        return First(None, None)
    sent = ready.sent_bytes() - before if ready.sent_bytes else traffic.bytes
    return First(peak.bytes, sent)


def time_on_rank(ring_rank: int, peer: Peer, work: Work, backward: bool) -> tuple[float, float]:
    """Seconds from the moment when all ranks start: to the end of forward, and to that of backward."""
    torch.set_num_threads(threads(peer, work))
    ready, (q, k, v, dout) = _prepared(ring_rank, peer, work)
    dist.barrier()
    start = time.perf_counter()
    out = ready.attend(q, k, v)
    forward = time.perf_counter() - start
    if backward:
        torch.autograd.grad(out, (q, k, v), dout)
    return forward, time.perf_counter() - start


def forget_on_rank(ring_rank: int) -> None:
    """Drop what was prepared."""
    _prepared.cache_clear()


def threads(peer: Peer, work: Work) -> int:
    """Threads of each of its processes: together the machine's cores, whoever runs."""
    return threads_per_rank(peer.ranks(work))


@lru_cache(maxsize=32)  # kept between turns, so that a turn is one call
def _prepared(ring_rank: int, peer: Peer, work: Work) -> tuple[Ready, tuple[Tensor, ...]]:
    ready = peer.prepare(ring_rank, work)
    rows = [x[:, :, torch.from_numpy(ready.positions)] for x in global_inputs(work)]
    own = [(x.transpose(1, 2) if ready.by_token else x).contiguous() for x in rows]
    return ready, (*(x.requires_grad_() for x in own[:3]), own[3])
