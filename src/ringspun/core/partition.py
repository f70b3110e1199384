"""A partition: a layout bound to a length and a ring size. Who holds which token, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core.host import is_integer
from ringspun.core.layout.base import RANK, START, STEP, STOP, Layout, Runs
from ringspun.core.layout.in_parts import InParts
from ringspun.core.mask import Documents, Mask
from ringspun.errors import LayoutError

LONGEST = 1 << 48
LARGEST_RING = 1 << 14


@dataclass(frozen=True)
class Partition:
    """Which rank holds which global positions, in which local order.

    Args:
        seq_len: global length S (tokens, may be 0). ring_size: number of ranks R. layout: the dealing rule.
        documents: for layouts that read them, and for restarting positions.
        start: position of the first token (queries of cross-attention or decoding; may be negative).
    Raises:
        LayoutError: sizes out of range, or a layout that loses or repeats a position.
        MaskError: documents that do not fit the sequence.
    """

    seq_len: int
    ring_size: int
    layout: Layout
    documents: Documents | None = None
    start: int = 0

    def __post_init__(self) -> None:
        if not is_integer(self.seq_len) or self.seq_len < 0:
            raise LayoutError(f"seq_len must be an integer >= 0; got {self.seq_len!r}.")
        if self.seq_len > LONGEST:
            raise LayoutError(f"seq_len must be at most 2**48 tokens; got {self.seq_len}.")
        if not isinstance(self.layout, Layout):
            raise LayoutError(
                f"layout must be a Layout, e.g. Zigzag(); got {self.layout!r}. A string: write parse_layout(text)."
            )
        if not 1 <= self.ring_size <= LARGEST_RING:
            raise LayoutError(f"ring_size must be from 1 to {LARGEST_RING}; got {self.ring_size}.")
        if not isinstance(self.documents, Documents | None):
            raise LayoutError(f"documents must be Documents or None; got {self.documents!r}. Write Documents(lengths).")
        if not is_integer(self.start) or abs(self.start) > LONGEST:
            raise LayoutError(f"start must be an integer within +-2**48; got {self.start!r}.")
        if self.documents is not None:
            self.documents.check(self.start + self.seq_len)
        if self.start and self.documents is not None and self.layout.reads_documents:
            raise LayoutError(
                f"{self.layout} must deal a sequence from its beginning; got one that starts at {self.start}. "
                "Use a layout that reads no documents."
            )
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
        return self.start + self.indices(ring_rank)

    def indices(self, ring_rank: int) -> NDArray[np.int64]:
        """Which of the S tokens `ring_rank` holds, in local order ``[T]``: positions counted from `start`."""
        rows = self.runs[self.runs[:, RANK] == ring_rank]
        parts = [np.arange(start, stop, step) for _, start, stop, step in rows]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def order(self) -> NDArray[np.int64]:
        """Indices of all ranks' rows joined in rank order ``[S]``: the permutation that sharding applies."""
        return np.concatenate([self.indices(r) for r in range(self.ring_size)])

    def inverse(self) -> NDArray[np.int64]:
        """The permutation that undoes `order`: ``joined[inverse]`` is in the sequence's order."""
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


def _of_ring(part: Partition) -> Partition:
    """The shares of a ring, of which `part` may hold parts."""
    if not isinstance(part.layout, InParts):
        return part
    return Partition(part.seq_len, part.layout.degrees.ring, part.layout.layout, part.documents, part.start)


@dataclass(frozen=True)
class Sides:
    """The two partitions of one attention: whose queries meet whose keys.

    Args:
        queries: the queries; their `start` says where they stand among the keys. keys: default: the same tokens
            (self-attention).
    Raises:
        LayoutError: rings of different sizes, or keys that do not start at 0.
    """

    queries: Partition
    keys: Partition

    def __init__(self, queries: Partition, keys: Partition | None = None) -> None:
        object.__setattr__(self, "queries", queries)
        object.__setattr__(self, "keys", queries if keys is None else keys)
        if self.keys.ring_size != queries.ring_size:
            raise LayoutError(
                f"keys must be dealt to the queries' ring of {queries.ring_size}; got one of {self.keys.ring_size}."
            )
        if self.keys.start:
            raise LayoutError(f"keys must start at position 0; got {self.keys.start}. Give query_start to the queries.")

    @property
    def of_rings(self) -> Sides:
        """The sides of a ring, where these are those of a hybrid (`ringspun.core.layout.in_parts`); else these."""
        if self.same:
            return Sides(_of_ring(self.queries))
        return Sides(_of_ring(self.queries), _of_ring(self.keys))

    @property
    def same(self) -> bool:
        """Whether queries and keys are the same tokens (self-attention)."""
        return self.queries == self.keys

    def turned(self) -> Sides:
        """Queries and keys in each other's place. Where queries stand among the keys does not count any more: their
        regions count from the start (`regions`)."""
        queries = self.queries
        if queries.start:  # no layout that reads documents deals these
            queries = Partition(queries.seq_len, queries.ring_size, queries.layout)
        return Sides(self.keys, queries)

    def regions(self, mask: Mask) -> rg.Table:
        """Pairs that `mask` allows, queries counted from their start (`Partition.indices`)."""
        shift = self.queries.start
        table = mask.regions(int(self.queries.seq_len), int(self.keys.seq_len), shift)
        return table - np.array([shift, shift, 0, 0, shift, shift], np.int64)
