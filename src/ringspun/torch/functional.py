"""One-off calls: ring attention without holding a plan, and blockwise attention on one device."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from ringspun.core.layout import Contiguous, Layout
from ringspun.core.mask import Causal, Mask
from ringspun.errors import DtypeError, ShapeError
from ringspun.torch.bias import Bias
from ringspun.torch.context import ContextParallel
from ringspun.torch.drivers import Loopback
from ringspun.torch.kernels import Eager
from ringspun.torch.plan import Asked

_contexts: weakref.WeakKeyDictionary[Any, dict[Layout, ContextParallel]] = weakref.WeakKeyDictionary()
_alone: dict[Layout, ContextParallel] = {}
_lock = threading.Lock()


def ring_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K T D"],
    v: Float[Tensor, "B K T Dv"],
    *,
    group: dist.ProcessGroup | Loopback | None = None,
    mask: Mask | None = None,
    layout: Layout | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    bias: Bias | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence cut over the ranks of a group, in one call. Collective. Differentiable.

    A model that calls many layers is better served by `ContextParallel(...).plan(...)`, made once per batch.

    Args:
        q, k, v: this rank's rows. group: the ring; default: all ranks, or this process alone without torch.distributed.
        mask: default `Causal()`. layout: how the rows were dealt; default `Contiguous()`.
        seq_len: global length S; None means equal shards, ``T * R`` (checked on all ranks by the plan's agreement).
        scale, softcap, sinks, bias, return_lse: as in `Plan.attention`.
    Returns:
        ``out [B, H, T, Dv]``, or ``(out, lse)``.
    Raises: as `ContextParallel.plan` and `Plan.attention`.

    >>> q = torch.randn(1, 2, 8, 4)
    >>> ring_attention(q, q, q).shape
    torch.Size([1, 2, 8, 4])

    Source: Ring Attention (arXiv 2310.01889).
    """
    context = _context(group, Contiguous() if layout is None else layout)
    if seq_len is None:
        try:
            seq_len = _length(q) * context.size // len(context.driver.ring_ranks)
        except (ShapeError, DtypeError) as failure:
            context._agree_on_plan(bytes(32), {}, failure)  # where the other ranks wait, so that they hear of it
            raise
    plan = context.plan(seq_len, Causal() if mask is None else mask)
    return plan._attend(q, k, v, Asked(scale, softcap, sinks, bias), return_lse)


def blockwise_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K T D"],
    v: Float[Tensor, "B K T Dv"],
    *,
    mask: Mask | None = None,
    block_size: int = 512,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    bias: Bias | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention on one device with at most block_size x block_size scores alive, forward and backward.

    Args:
        q, k, v: the whole sequence, any device and float dtype. mask: default `Causal()`. block_size: tokens.
        scale, softcap, sinks, bias, return_lse: as in `Plan.attention`.
    Returns:
        ``out [B, H, T, Dv]``, or ``(out, lse)``.
    Raises:
        ShapeError, DtypeError: tensors that do not fit.

    Source: arXiv 2112.05682; the recomputing backward is FlashAttention-2's (arXiv 2307.08691).
    """
    plan = _context(Loopback(1), Contiguous()).plan(_length(q), Causal() if mask is None else mask)
    return plan._attend(q, k, v, Asked(scale, softcap, sinks, bias, _eager(block_size)), return_lse)


def _length(q: Tensor) -> int:
    if not isinstance(q, Tensor):
        raise DtypeError(f"q must be a tensor; got {type(q).__name__}.")
    if q.ndim != 4:
        raise ShapeError(f"q must be [B, H, T, D]; got shape {tuple(q.shape)}.")
    return q.shape[2]


def _context(group: dist.ProcessGroup | Loopback | None, layout: Layout) -> ContextParallel:
    """The context of a group and layout; kept as long as the group lives, so that later calls find their plans."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD  # looked up every time: another one may have been made since the last call
    if isinstance(group, Loopback) and group.size == 1:
        group = None
    if not (group is None or isinstance(group, dist.ProcessGroup)):  # a loopback is not kept, anything else refused
        return ContextParallel(group, layout=layout)
    with _lock:
        mine = _alone if group is None else _contexts.setdefault(group, {})
        if layout not in mine:
            mine[layout] = ContextParallel(Loopback(1) if group is None else group, layout=layout)
        return mine[layout]


def _eager(block_size: int) -> Eager:
    with _lock:
        return _kernels.setdefault(block_size, Eager(block_size))


_kernels: dict[int, Eager] = {}
