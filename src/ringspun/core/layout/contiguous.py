"""Contiguous: rank r holds the r-th slice. Balanced for full masks and windows; under a causal mask the last rank
works most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core.layout.base import Layout, Runs, chunk_edges, drop_empty
from ringspun.core.mask import Documents


@dataclass(frozen=True)
class Contiguous(Layout):
    """Slice r to rank r; slices differ by at most one token.

    8 tokens, 4 ranks    rank 0: 0 1    rank 1: 2 3    rank 2: 4 5    rank 3: 6 7
    """

    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        edges = chunk_edges(seq_len, ring_size)
        ranks = np.arange(ring_size)
        return drop_empty(np.stack([ranks, edges[:-1], edges[1:], np.ones_like(ranks)], axis=1))
