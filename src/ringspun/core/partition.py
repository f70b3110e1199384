"""A partition: a layout bound to a length and a ring size. Who holds which token, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringspun.core.layout.base import RANK, START, STEP, STOP, Layout, Runs
from ringspun.core.mask import Documents
from ringspun.errors import LayoutError

LONGEST = 1 << 48


@dataclass(frozen=True)
class Partition:
    """Which rank holds which global positions, in which local order.

    Args:
        seq_len: global length S (tokens, may be 0). ring_size: number of ranks R. layout: the dealing rule.
        documents: for layouts that read them, and for restarting positions.
    Raises:
        LayoutError: sizes out of range, or a layout that loses or repeats a position.
        MaskError: documents that do not fit the sequence.
    """

    seq_len: int
    ring_size: int
    layout: Layout
    documents: Documents | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.seq_len, int | np.integer) and not isinstance(self.seq_len, bool)
        if not whole or self.seq_len < 0:
            raise LayoutError(f"seq_len must be an integer >= 0; got {self.seq_len!r}.")
        if self.seq_len > LONGEST:
            raise LayoutError(f"seq_len must be at most 2**48 tokens; got {self.seq_len}.")
        if self.ring_size < 1:
            raise LayoutError(f"ring_size must be at least 1; got {self.ring_size}.")
        if not isinstance(self.documents, Documents | None):
            raise LayoutError(f"documents must be Documents or None; got {self.documents!r}. Write Documents(lengths).")
        if self.documents is not None:
            self.documents.check(self.seq_len)
        _check_runs(self.layout, self.runs, self.seq_len, self.ring_size)

    @cached_property
    def runs(self) -> Runs:
        """All runs ``[n, 4]`` (ring rank, start, stop, step), sorted by rank, in local order."""
        runs = self.layout.deal(int(self.seq_len), self.ring_size, self.documents).astype(np.int64)
        runs.setflags(write=False)
        return runs

    @cached_property
    def run_tokens(self) -> NDArray[np.int64]:
        """Tokens in each run."""
        return -((self.runs[:, START] - self.runs[:, STOP]) // self.runs[:, STEP])

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """Local length T of every rank, ``[R]``."""
        tokens = np.bincount(self.runs[:, RANK], self.run_tokens, self.ring_size).astype(np.int64)
        tokens.setflags(write=False)
        return tokens

    @cached_property
    def run_offsets(self) -> NDArray[np.int64]:
        """Local row at which each run begins on its rank."""
        begin = np.cumsum(self.run_tokens) - self.run_tokens
        rank_begin = np.cumsum(self.tokens) - self.tokens
        return begin - rank_begin[self.runs[:, RANK]]

    def rows_of(self, ring_ranks: Sequence[int]) -> int:
        """Rows that some ranks hold together."""
        return sum(int(self.tokens[r]) for r in ring_ranks)

    def positions(self, ring_rank: int) -> NDArray[np.int64]:
        """Global positions that `ring_rank` holds, in local order ``[T]``."""
        rows = self.runs[self.runs[:, RANK] == ring_rank]
        parts = [np.arange(start, stop, step) for _, start, stop, step in rows]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def order(self) -> NDArray[np.int64]:
        """Global positions of all ranks' rows joined in rank order ``[S]``: the permutation that sharding applies."""
        return np.concatenate([self.positions(r) for r in range(self.ring_size)])

    def inverse(self) -> NDArray[np.int64]:
        """The permutation that undoes `order`: ``joined[inverse]`` is in global order."""
        inverse = np.empty(self.seq_len, np.int64)
        inverse[self.order()] = np.arange(self.seq_len)
        return inverse


def _check_runs(layout: Layout, runs: Runs, seq_len: int, ring_size: int) -> None:
    """Raise unless the runs hold every position exactly once, on ranks that exist."""
    ranks, starts, stops, steps = runs.T
    if len(runs) and (ranks.min() < 0 or ranks.max() >= ring_size or (np.diff(ranks) < 0).any()):
        raise LayoutError(f"{layout} must deal to ranks 0..{ring_size - 1} in order; got {ranks[:8].tolist()}.")
    if (steps < 1).any() or (starts < 0).any() or (stops < starts).any() or (stops > seq_len).any():
        raise LayoutError(f"{layout} must deal runs inside 0..{seq_len} with steps >= 1.")
    if (steps == 1).all():
        order = np.lexsort((stops, starts))
        edges = np.append(0, stops[order])
        exact = np.array_equal(edges[:-1], starts[order]) and edges[-1] == seq_len
    else:
        seen = np.zeros(seq_len, np.int8)
        for _, start, stop, step in runs:
            seen[start:stop:step] += 1
        exact = bool((seen == 1).all())
    if not exact:
        raise LayoutError(f"{layout} must deal every one of {seq_len} tokens exactly once.")
