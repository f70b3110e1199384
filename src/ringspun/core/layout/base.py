"""What a layout is: the rule that deals the tokens of a sequence to the ranks of a ring."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ringspun.core.mask import Documents

Runs = NDArray[np.int64]
RANK, START, STOP, STEP = range(4)


@dataclass(frozen=True)
class Layout(ABC):
    """The rule that deals tokens to ranks. A new layout is one subclass with one method."""

    reads_documents: ClassVar[bool] = False
    """Whether it deals by the partition's documents."""

    @abstractmethod
    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        """Who holds which positions, as runs ``[n, 4]`` of (ring rank, start, stop, step), in local order per rank.

        Rows are sorted by rank; the positions of all runs together are 0 .. seq_len - 1, each exactly once. Ranks may
        hold unequal numbers of tokens, or none.
        """

    def __str__(self) -> str:
        values = [getattr(self, f.name) for f in dataclasses.fields(self)]
        defaults = [f.default for f in dataclasses.fields(self)]
        name = type(self).__name__.lower()
        return name if values == defaults else f"{name}({', '.join(map(str, values))})"


def chunk_edges(seq_len: int, chunks: int) -> NDArray[np.int64]:
    """Edges ``[chunks + 1]`` of `chunks` parts that differ by at most one token, the longer ones first."""
    short, longer = divmod(seq_len, chunks)
    i = np.arange(chunks + 1)
    return i * short + np.minimum(i, longer)


def drop_empty(runs: Runs) -> Runs:
    """`runs` without those that hold no token."""
    return runs[runs[:, STOP] > runs[:, START]]
