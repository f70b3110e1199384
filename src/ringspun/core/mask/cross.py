"""Masks of two different sequences, as in cross-attention: which keys there are, and which belong to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspun.core import regions as rg
from ringspun.core.mask.base import Allowed, Mask, Positions, everything, integer, rectangles
from ringspun.core.mask.documents import Documents
from ringspun.errors import MaskError


@dataclass(frozen=True)
class Keys(Mask):
    """Every query sees the keys from `start` to `stop`: ``start <= k < stop``. The padding of cross-attention's keys.

    `Documents` cannot say it: they compare the positions of queries and of keys alike.

    Args:
        start, stop: positions (tokens, ``0 <= start <= stop``).
    Raises:
        MaskError: anything else.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", integer("Keys start", self.start, least=0))
        object.__setattr__(self, "stop", integer("Keys stop", self.stop, least=self.start))

    @classmethod
    def from_attention_mask(cls, row: Any) -> Keys:
        """From one row of Hugging Face's attention mask of the keys: 1 or True = keep (see `Documents`)."""
        found = Documents.from_attention_mask(row).table()
        return cls(*map(int, found[0])) if len(found) else cls(0, 0)

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        seen = (self.start <= k) & (k < self.stop)
        return np.broadcast_to(seen, np.broadcast_shapes(q.shape, k.shape))

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        return rg.rectangle(q_start, q_start + q_len, self.start, min(self.stop, k_len))


@dataclass(frozen=True)
class DocumentPairs(Mask):
    """Packed pairs of two sequences: the queries of document i see the keys of document i. flash-attention's
    `cu_seqlens_q` and `cu_seqlens_k`.

        DocumentPairs(Documents([2, 1]), Documents([3, 2]))    k 0 1 2 3 4
                                                            q 0  1 1 1 . .
                                                            q 1  1 1 1 . .
                                                            q 2  . . . 1 1

    Args:
        queries, keys: as many documents on either side; empty ones count.
    Raises:
        MaskError: other numbers of documents, or no documents.
    """

    queries: Documents
    keys: Documents

    def __post_init__(self) -> None:
        for name in ("queries", "keys"):
            if not isinstance(getattr(self, name), Documents):
                raise MaskError(f"DocumentPairs {name} must be Documents; got {getattr(self, name)!r}.")
        if len(self.queries.lengths) != len(self.keys.lengths):
            raise MaskError(
                f"DocumentPairs must pair as many documents on either side; got {len(self.queries.lengths)} of queries "
                f"and {len(self.keys.lengths)} of keys."
            )

    def _edges(self) -> tuple[Positions, Positions, Positions, Positions]:
        q0, q_sizes, k0, k_sizes = (
            np.array(x, np.int64) for d in (self.queries, self.keys) for x in (d.starts, d.lengths)
        )
        return q0, q0 + q_sizes, k0, k0 + k_sizes

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        seen = np.zeros(np.broadcast_shapes(q.shape, k.shape), np.bool_)
        for q0, q1, k0, k1 in zip(*self._edges(), strict=True):
            seen |= (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1)
        return seen

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        return rectangles(*self._edges(), everything(q_len, k_len, q_start))
