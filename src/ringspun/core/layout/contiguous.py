"""Contiguous: rank r holds the r-th slice. Balanced for full masks and windows; under a causal mask the last rank
works most."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ringspun.core.layout.base import Runs, chunk_edges, drop_empty, runs_between
from ringspun.core.layout.speeds import UnequalRanks, are_even, share
from ringspun.core.mask import Documents


@dataclass(frozen=True)
class Contiguous(UnequalRanks):
    """Slice r to rank r; slices differ by at most one token.

        8 tokens, 4 ranks    rank 0: 0 1    rank 1: 2 3    rank 2: 4 5    rank 3: 6 7

    Args:
        speeds: one positive number per rank; slices are in their proportion, which balances full masks. Default: equal.
    Raises:
        LayoutError: speeds that are not positive finite numbers.
    """

    speeds: tuple[float, ...] | None = field(default=None, kw_only=True)

    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        weights = self.weights(ring_size)
        edges = chunk_edges(seq_len, ring_size) if are_even(weights) else share(np.array(seq_len), weights)
        return drop_empty(runs_between(np.arange(ring_size), edges))
