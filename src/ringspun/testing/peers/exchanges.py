"""Peers that exchange heads for sequence and back, with torch's attention between: DeepSpeed's Ulysses and yunchang's
all-to-all. What runs between is the user's to choose in both; torch's attention is what a CPU has."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ringspun.core.layout import Contiguous
from ringspun.testing.peers.base import Peer, Ready, dealt, uneven
from ringspun.testing.peers.whole import attend_pieces, pieces_of, refusal_of, remark_of
from ringspun.testing.timing import Work

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Exchange(Peer):
    """Of both: what they refuse, and the attention between."""

    is_ring: bool = False

    def refuses(self, work: Work) -> str | None:
        if work.kv_heads % work.ranks:
            return f"it needs as many key/value heads on every rank: {work.ranks} must divide {work.kv_heads}"
        return refusal_of(work) or uneven(work, work.ranks)

    def remark(self, work: Work) -> str:
        return remark_of(work)

    def prepare(self, ring_rank: int, work: Work) -> Ready:
        pieces = pieces_of(work.mask, work.seq_len) or ()

        def between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_pieces(pieces, *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

        return Ready(dealt(Contiguous(), work, ring_rank), self.around(between), by_token=True)

    @abstractmethod
    def around(self, between: Attend) -> Attend:
        """`between`, which sees all tokens and some heads, as attention that sees some tokens and all heads."""


@dataclass(frozen=True)
class DeepSpeed(Exchange):
    """`DistributedAttention` of DeepSpeed Ulysses."""

    name: str = "DeepSpeed Ulysses + SDPA"
    module: str = "deepspeed"
    distribution: str = "deepspeed"

    def around(self, between: Attend) -> Attend:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when it is imported
        import deepspeed
        from deepspeed.sequence.layer import DistributedAttention

        # Its start would compile an all-reduce over shared memory, for minutes; an exchange of heads does not use it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", verbose=False)
        ulysses = DistributedAttention(between, dist.group.WORLD, scatter_idx=2, gather_idx=1)
        return lambda q, k, v: ulysses(q, k, v, 0)


@dataclass(frozen=True)
class Yunchang(Exchange):
    """`SeqAllToAll4D` of yunchang. Its rings need a GPU."""

    name: str = "yunchang all-to-all + SDPA"
    module: str = "yunchang"
    distribution: str = "yunchang"

    def around(self, between: Attend) -> Attend:
        from yunchang.comm.all_to_all import SeqAllToAll4D

        group: Any = dist.group.WORLD

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (SeqAllToAll4D.apply(group, x, 2, 1) for x in (q, k, v))
            return SeqAllToAll4D.apply(group, between(q, k, v), 1, 2)  # type: ignore[no-any-return]

        return attend
