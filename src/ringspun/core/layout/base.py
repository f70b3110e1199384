"""What a layout is: the rule that deals the tokens of a sequence to the ranks of a ring."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ringspun.core.mask import Documents

Runs = NDArray[np.int64]
RANK, START, STOP, STEP = range(4)


@dataclass(frozen=True)
class Layout(ABC):
    """The rule that deals tokens to ranks. A new layout is one subclass with one method.

    A layout that `reads_documents` deals other documents otherwise; given none, it takes the whole sequence as one.
    """

    reads_documents: ClassVar[bool] = False

    @abstractmethod
    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        """Who holds which positions, as runs ``[n, 4]`` of (ring rank, start, stop, step), in local order per rank.

        Rows are sorted by rank; the positions of all runs together are 0 .. seq_len - 1, each exactly once. Ranks may
        hold unequal numbers of tokens, or none.
        """

    def __str__(self) -> str:
        """The canonical string; for the layouts of this package ``parse_layout(str(layout)) == layout``."""
        fields = dataclasses.fields(self)
        plain = [f for f in fields if not f.kw_only]
        told = [str(self._value(f)) for f in plain] if any(map(self._is_set, plain)) else []
        told += [f"{f.name}={self._value(f)}" for f in fields if f.kw_only and self._is_set(f)]
        name = type(self).__name__.lower()
        return f"{name}({', '.join(told)})" if told else name

    def _is_set(self, field: dataclasses.Field[Any]) -> bool:
        return bool(getattr(self, field.name) != field.default)

    def _value(self, field: dataclasses.Field[Any]) -> Any:
        value = getattr(self, field.name)
        return list(value) if isinstance(value, tuple) and field.kw_only else value


def chunk_edges(seq_len: int, chunks: int) -> NDArray[np.int64]:
    """Edges ``[chunks + 1]`` of `chunks` parts that differ by at most one token, the longer ones first."""
    short, longer = divmod(seq_len, chunks)
    i = np.arange(chunks + 1)
    return i * short + np.minimum(i, longer)


def runs_between(ranks: NDArray[np.int64], edges: NDArray[np.int64]) -> Runs:
    """One run per chunk between neighbouring `edges`: ``ranks[i]`` holds chunk i."""
    return np.stack([ranks, edges[:-1], edges[1:], np.ones_like(ranks)], axis=1)


def in_order(runs: Runs) -> Runs:
    """`runs` of step 1 sorted by rank and position, without empty ones, neighbours on one rank joined."""
    runs = drop_empty(runs)
    runs = runs[np.lexsort((runs[:, START], runs[:, RANK]))]
    if len(runs) == 0:
        return runs
    joins = (runs[1:, RANK] == runs[:-1, RANK]) & (runs[1:, START] == runs[:-1, STOP])
    first = np.flatnonzero(np.append(True, ~joins))
    joined = runs[first]
    joined[:, STOP] = runs[np.append(first[1:], len(runs)) - 1, STOP]
    return joined


def drop_empty(runs: Runs) -> Runs:
    """`runs` without those that hold no token."""
    return runs[runs[:, STOP] > runs[:, START]]
