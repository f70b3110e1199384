"""torch's own ring templates with its CPU attention op put in. They are private functions: the public
`context_parallel` has no CPU op in its table and raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental import _attention as public
from torch.distributed.tensor.experimental._context_parallel import _attention as templates

from ringspun.core.layout import Contiguous, Zigzag
from ringspun.core.mask import Causal
from ringspun.testing.peers.base import Peer, Ready, dealt, only_plain, uneven
from ringspun.testing.timing import Work

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class TorchRing(Peer):
    """`_templated_ring_attention` and its backward.

    Args:
        rotate: how keys and values move: "allgather" (the default there; every rank then holds all of them) or
            "alltoall" (one hop at a time).
    """

    name: str = "torch ring"
    module: str = "torch"
    distribution: str = "torch"
    rotate: Literal["allgather", "alltoall"] = "allgather"

    def refuses(self, work: Work) -> str | None:
        causal = isinstance(work.mask, Causal)
        pieces = work.ranks * (2 if causal else 1)
        return only_plain(work) or uneven(work, pieces, "two equal chunks a rank" if causal else "equal shards")

    def remark(self, work: Work) -> str:
        grouped = work.heads != work.kv_heads
        return "private functions, CPU op put in" + ("; keys and values repeated for all query heads" * grouped)

    def prepare(self, ring_rank: int, work: Work) -> Ready:
        causal, groups = isinstance(work.mask, Causal), work.heads // work.kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if groups > 1:  # the templates take equal head counts only
                k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
            return _Ring.apply(q, k, v, causal, self.rotate)  # type: ignore[no-any-return, no-untyped-call]

        return Ready(dealt(Zigzag() if causal else Contiguous(), work, ring_rank), attend)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, rotate: str) -> Tensor:
        _set_options(causal, rotate)
        out, lse = templates._templated_ring_attention(_group(), 2, _forward, q, k, v, is_causal=causal, dropout_p=0.0)[
            :2
        ]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.called = causal, rotate
        return out

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> Any:
        _set_options(*ctx.called)
        q, k, v, out, lse = ctx.saved_tensors
        grads = templates._templated_ring_attention_backward(
            _group(), 2, _backward, dout[0], "grad_out", q, k, v, out, lse, is_causal=ctx.called[0], dropout_p=0.0
        )
        return *grads[:3], None, None


def _set_options(causal: bool, rotate: str) -> None:
    """The templates read them from a global."""
    templates._cp_options.enable_load_balance = causal
    public.set_rotate_method(rotate)


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
