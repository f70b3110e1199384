"""Buckets: which row of a table of biases belongs to a distance. Relative position biases as plain data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.core.host import host_integers
from ringspun.errors import PlanError


@dataclass(frozen=True)
class Buckets:
    """The row for each distance ``d = q - k`` (positive: the key lies before the query), constant between edges.

        Buckets(edges=[0, 1, 3], rows=[0, 1, 2, 3])      d   ... -2 -1 | 0 | 1  2 | 3  4 ...
                                                         row       0     1    2      3

    Args:
        edges: distances at which the row changes, rising. rows: one more than edges; from 0.
    Raises:
        PlanError: edges that do not rise, or another number of rows.
    """

    edges: tuple[int, ...]
    rows: tuple[int, ...]

    def __init__(self, edges: Sequence[int] | Any, rows: Sequence[int] | Any) -> None:
        at, row = host_integers("edges", edges), host_integers("rows", rows)
        if (np.diff(at) <= 0).any():
            raise PlanError(f"edges must rise; got {at[:8].tolist()}.")
        if len(row) != len(at) + 1 or (row < 0).any():
            raise PlanError(f"rows must be one more than edges, each at least 0; got {len(row)} for {len(at)} edges.")
        object.__setattr__(self, "edges", tuple(at.tolist()))
        object.__setattr__(self, "rows", tuple(row.tolist()))

    @classmethod
    def t5(cls, num_buckets: int = 32, max_distance: int = 128, *, bidirectional: bool) -> Buckets:
        """T5's: near distances have their own row, farther ones share rows by their logarithm.

        Args:
            num_buckets, max_distance, bidirectional: as T5's `relative_attention_*`; its encoder is bidirectional.

        Source: arXiv 1910.10683; the table is a T5 layer's `relative_attention_bias.weight`.
        """
        sides = 2 if bidirectional else 1
        exact = num_buckets // sides // 2
        if exact < 1 or num_buckets % sides or max_distance <= exact:
            raise PlanError(
                f"num_buckets must leave at least one exact distance per side, below max_distance; got {num_buckets} "
                f"buckets, max_distance={max_distance}, bidirectional={bidirectional}."
            )
        per_side = num_buckets // sides
        distance = np.arange(max_distance + 1)
        ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
        spread = np.log(ratio) / np.float32(math.log(max_distance / exact)) * np.float32(per_side - exact)
        row = np.where(distance < exact, distance, np.minimum(exact + spread.astype(np.int64), per_side - 1))
        changes = np.flatnonzero(np.diff(row)) + 1
        past, past_rows = changes.tolist(), [0, *row[changes].tolist()]
        if not bidirectional:  # keys ahead count as distance 0
            return cls(past, past_rows)
        # ahead, distance -d has the row of d, `per_side` further on; distance 0 itself ends at the first edge, 1
        ahead, ahead_rows = [1 - d for d in reversed(past)], [per_side + r for r in reversed(past_rows[1:])]
        return cls([*ahead, *past], [*ahead_rows, *past_rows])

    @classmethod
    def clipped(cls, left: int, right: int = 0) -> Buckets:
        """A row for every distance from ``-right`` to `left` (tokens); farther ones take the row at that end.

        Source: relative positions with clipping (arXiv 1803.02155), there as vectors.
        """
        if left < -right:
            raise PlanError(f"left must be at least -right; got left={left}, right={right}.")
        return cls(np.arange(1 - right, left + 1), np.arange(left + right + 1))

    @property
    def count(self) -> int:
        """Rows that a table must have."""
        return max(self.rows) + 1

    def __call__(self, distance: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each distance."""
        return np.array(self.rows, np.int64)[np.searchsorted(np.array(self.edges), distance, side="right")]

    @cached_property
    def _digest(self) -> str:
        return hashlib.blake2b(repr((self.edges, self.rows)).encode(), digest_size=8).hexdigest()

    def __str__(self) -> str:
        return f"buckets({self.count} rows, {self._digest})"
