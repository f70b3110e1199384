"""In parts: what each rank of a ring would hold, cut among the ranks that split heads with it (USP)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core.degrees import Degrees
from ringspun.core.layout.base import RANK, START, STEP, STOP, Layout, Runs, chunk_edges, drop_empty
from ringspun.core.mask import Documents


@dataclass(frozen=True)
class InParts(Layout):
    """What `layout` deals to each rank of a ring of `degrees.ring`, cut in order into `degrees.ulysses` parts that
    differ by at most one token.

        12 tokens, ring 2 x ulysses 2, zigzag    ring 0: 0 1 2 9 10 11    rank 0: 0 1 2    rank 1: 9 10 11
                                                 ring 1: 3 4 5 6 7 8      rank 2: 3 4 5    rank 3: 6 7 8

    So that ranks which exchange heads for rows hold a whole share of the ring's, in order.

    Args:
        layout: of the ring. degrees: of the two.
    """

    layout: Layout
    degrees: Degrees

    @property
    def reads_documents(self) -> bool:  # type: ignore[override]
        """As `layout` does."""
        return self.layout.reads_documents

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """Those of `layout`, of its rings."""
        return getattr(self.layout, "speeds", None)

    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        dealt = self.layout.deal(seq_len, self.degrees.ring, documents)
        parts = [np.zeros((0, 4), np.int64)]
        for ring_rank in range(self.degrees.ring):
            runs = dealt[dealt[:, RANK] == ring_rank]
            tokens = -((runs[:, START] - runs[:, STOP]) // runs[:, STEP])
            edges = chunk_edges(int(tokens.sum()), self.degrees.ulysses)
            for rank, first, last in zip(self.degrees.row(ring_rank), edges[:-1], edges[1:], strict=True):
                parts.append(_rows(runs, tokens, int(first), int(last), rank))
        runs = np.concatenate(parts)
        return runs[np.argsort(runs[:, RANK], kind="stable")]

    def __str__(self) -> str:
        return f"{self.layout} in parts, {self.degrees}"


def _rows(runs: Runs, tokens: Runs, first: int, last: int, rank: int) -> Runs:
    """The runs of rows ``[first, last)`` of a rank that holds `runs`, for `rank`."""
    begin = np.cumsum(tokens) - tokens
    low, high = np.clip(first - begin, 0, tokens), np.clip(last - begin, 0, tokens)
    cut = np.stack([np.full(len(runs), rank), runs[:, START], runs[:, START], runs[:, STEP]], axis=1)
    cut[:, START] += low * runs[:, STEP]
    # a run that ends where its original does keeps that end, as far as its last step reaches
    cut[:, STOP] = np.where(high == tokens, runs[:, STOP], runs[:, START] + high * runs[:, STEP])
    cut[high <= low, STOP] = cut[high <= low, START]
    return drop_empty(cut)
