"""Zigzag: 2R chunks, rank r holds chunks r and 2R - 1 - r, so that a causal mask gives every rank the same work."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ringspun.core.layout.base import RANK, Runs, chunk_edges, drop_empty, runs_between
from ringspun.core.layout.speeds import UnequalRanks, Weights, are_even, share
from ringspun.core.mask import Documents


@dataclass(frozen=True)
class Zigzag(UnequalRanks):
    """Chunks r and 2R - 1 - r to rank r; the 2R chunks differ by at most one token. Any length works.

        8 tokens, 4 ranks    rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4

    As in Llama 3 (arXiv 2407.21783, section 3.3.2), there for lengths divisible by 2R only.

    Args:
        speeds: one positive number per rank. Both chunks of a rank are then as wide as its share, and its causal work
            in all steps together is in proportion: a query and its mirror image see as many keys together as any other
            two, so work goes as tokens. Single steps are not in proportion. Default: equal.
    Raises:
        LayoutError: speeds that are not positive finite numbers.
    """

    speeds: tuple[float, ...] | None = field(default=None, kw_only=True)

    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        weights = self.weights(ring_size)
        even = are_even(weights)
        edges = chunk_edges(seq_len, 2 * ring_size) if even else share(np.array(seq_len), mirrored(weights))
        runs = runs_between(chunk_ranks(ring_size), edges)
        return drop_empty(runs[np.argsort(runs[:, RANK], kind="stable")])


def chunk_ranks(ring_size: int) -> NDArray[np.int64]:
    """The rank that holds each of the 2R chunks: 0, 1, .. R - 1, R - 1, .. 1, 0."""
    return mirrored(np.arange(ring_size))


def mirrored(values: Weights) -> Weights:
    """`values` and then the same backwards: one per chunk, of one per rank."""
    return np.concatenate([values, values[::-1]])
