"""torch's `scaled_dot_product_attention` over a whole sequence: the peer that shares nothing, and what peers that
exchange heads run between their exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringspun.core.layout import Contiguous
from ringspun.core.mask import And, Causal, Documents, Full, Mask
from ringspun.testing.peers.base import Peer, Ready, dealt
from ringspun.testing.timing import Work

Piece = tuple[int, int, bool]
"""First token, one past the last, and whether it is causal."""


def pieces_of(mask: Mask, seq_len: int) -> tuple[Piece, ...] | None:
    """A mask as plain calls one after the other, each of some tokens among themselves; None where it is none such."""
    parts = mask.masks if isinstance(mask, And) else (mask,)
    documents = [part for part in parts if isinstance(part, Documents)]
    if len(documents) > 1 or not all(isinstance(part, Causal | Full | Documents) for part in parts):
        return None
    causal = any(isinstance(part, Causal) for part in parts)
    if not documents:
        return ((0, seq_len, causal),)
    (only,) = documents
    if sum(only.lengths) != seq_len:
        return None
    return tuple((a, a + n, causal) for a, n in zip(only.starts, only.lengths, strict=True) if n)


def attend_pieces(pieces: Sequence[Piece], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[B, H, S, D]``, any head counts."""
    grouped = q.shape[1] != k.shape[1]
    done = []
    for a, b, causal in pieces:
        some_q, some_k, some_v = (x[:, :, a:b] for x in (q, k, v))
        done.append(scaled_dot_product_attention(some_q, some_k, some_v, is_causal=causal, enable_gqa=grouped))
    return done[0] if len(done) == 1 else torch.cat(done, 2)


def refusal_of(work: Work) -> str | None:
    """Why torch's attention cannot do a mask without a dense one."""
    if pieces_of(work.mask, work.seq_len) is not None:
        return None
    return "torch's attention knows no such mask but as a dense tensor of S x S"


def remark_of(work: Work) -> str:
    """What to say of a mask that takes many calls."""
    pieces = pieces_of(work.mask, work.seq_len) or ()
    return "" if len(pieces) < 2 else "one call per document, by a loop written here"


@dataclass(frozen=True)
class Alone(Peer):
    """One process that holds everything, with all cores."""

    name: str = "SDPA, one process"
    module: str = "torch"
    distribution: str = "torch"
    is_ring: bool = False

    def ranks(self, work: Work) -> int:
        return 1

    def refuses(self, work: Work) -> str | None:
        return refusal_of(work)

    def remark(self, work: Work) -> str:
        return "; ".join(part for part in ("all cores", remark_of(work)) if part)

    def prepare(self, ring_rank: int, work: Work) -> Ready:
        pieces = pieces_of(work.mask, work.seq_len) or ()
        positions = dealt(Contiguous(), replace(work, ranks=1), ring_rank)
        return Ready(positions, lambda q, k, v: attend_pieces(pieces, q, k, v))
