"""Striped: tokens (or blocks of them) dealt round robin, so that a causal mask gives every pair of ranks half a
square."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core.host import is_integer
from ringspun.core.layout.base import RANK, Layout, Runs, drop_empty
from ringspun.core.mask import Documents
from ringspun.errors import LayoutError

SMALLEST_BLOCK = 128
LARGEST_BLOCK = 1 << 48  # no sequence is longer


@dataclass(frozen=True)
class Striped(Layout):
    """Token t to rank t mod R; with ``block=b``, block t // b to rank (t // b) mod R.

        8 tokens, 4 ranks    rank 0: 0 4    rank 1: 1 5    rank 2: 2 6    rank 3: 3 7

    Source: Striped Attention, arXiv 2311.09431. With many short documents it makes a tile per document and rank.

    Args:
        block: tokens per stripe: 1, or at least 128 (blocks in between make more tiles than a kernel can be fed).
    Raises:
        LayoutError: any other block.
    """

    block: int = 1

    def __post_init__(self) -> None:
        if not is_integer(self.block):
            raise LayoutError(f"Striped block must be an integer; got {self.block!r}.")
        if self.block != 1 and self.block < SMALLEST_BLOCK:
            raise LayoutError(f"Striped block must be 1 or at least {SMALLEST_BLOCK} tokens; got {self.block}.")
        if self.block > LARGEST_BLOCK:
            raise LayoutError(f"Striped block must be at most 2**48 tokens; got {self.block}.")

    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        if self.block == 1:
            ranks = np.arange(ring_size)
            stops = np.full_like(ranks, seq_len)
            return drop_empty(np.stack([ranks, ranks, stops, np.full_like(ranks, ring_size)], axis=1))
        starts = np.arange(0, seq_len, self.block)
        rank = np.arange(len(starts)) % ring_size
        stops = np.minimum(starts + self.block, seq_len)
        runs = np.stack([rank, starts, stops, np.ones_like(rank)], axis=1)
        return runs[np.argsort(runs[:, RANK], kind="stable")]
