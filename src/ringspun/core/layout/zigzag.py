"""Zigzag: 2R chunks, rank r holds chunks r and 2R - 1 - r, so that a causal mask gives every rank the same work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core.layout.base import RANK, Layout, Runs, chunk_edges, drop_empty
from ringspun.core.mask import Documents


@dataclass(frozen=True)
class Zigzag(Layout):
    """Chunks r and 2R - 1 - r to rank r; the 2R chunks differ by at most one token. Any length works.

        8 tokens, 4 ranks    rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4

    As in Llama 3 (arXiv 2407.21783, section 3.3.2), there for lengths divisible by 2R only.
    """

    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        chunks = 2 * ring_size
        edges = chunk_edges(seq_len, chunks)
        number = np.arange(chunks)
        rank = np.minimum(number, chunks - 1 - number)
        runs = np.stack([rank, edges[:-1], edges[1:], np.ones_like(rank)], axis=1)
        return drop_empty(runs[np.argsort(runs[:, RANK], kind="stable")])
