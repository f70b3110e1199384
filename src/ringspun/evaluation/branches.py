"""The mask by which many questions are asked about one document in one pass, none of which sees another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core.mask import Allowed, Mask, Positions
from ringspun.core.mask.base import everything, integer
from ringspun.errors import MaskError

Edges = int | NDArray[np.int64]


@dataclass(frozen=True)
class Branches(Mask):
    """A document, and behind it branches that go on from its end, each as if the others were not there. Causal.

        Branches(3, (2, 1)), 6 tokens       k 0 1 2 3 4 5
                                         q 0  1 . . . . .    the document
                                         q 1  1 1 . . . .
                                         q 2  1 1 1 . . .
                                         q 3  1 1 1 1 . .    the first branch, at positions 3 and 4 of its sequence
                                         q 4  1 1 1 1 1 .
                                         q 5  1 1 1 . . 1    the second branch, at position 3 of its own

    With a `lead`, each branch begins with the document's last tokens once more, which see what they see there, and are
    seen by nobody: for layers besides attention that look back at most `lead` tokens, all such layers together.

        Branches(3, (1,), lead=2), 6 tokens    q 3  1 1 . . . .    the document's token 1 again
                                               q 4  1 1 1 . . .    its token 2
                                               q 5  1 1 1 . . 1    the branch

    Args:
        document: its tokens. branches: tokens of each, without the lead. lead: tokens ahead of each.
    Raises:
        MaskError: numbers that are none, or a lead longer than the document.
    """

    document: int
    branches: tuple[int, ...]
    lead: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "document", integer("Branches document", self.document, least=0))
        object.__setattr__(self, "branches", tuple(integer("Branches branch", n, least=0) for n in self.branches))
        object.__setattr__(self, "lead", integer("Branches lead", self.lead, least=0))
        if self.lead > self.document:
            raise MaskError(f"Branches lead must be at most the document's {self.document} tokens; got {self.lead}.")

    @property
    def seq_len(self) -> int:
        """Tokens of the document and all branches, with their leads."""
        return self.document + sum(self.branches) + len(self.branches) * self.lead

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each branch begins, with its lead."""
        sizes = np.array(self.branches, np.int64) + self.lead
        return self.document + np.cumsum(sizes) - sizes

    def positions(self) -> NDArray[np.int64]:
        """Position of each token in its own sequence: the document, and the branch that goes on from it."""
        sizes = np.array(self.branches, np.int64) + self.lead
        inside = np.arange(self.seq_len - self.document) - np.repeat(self.starts - self.document, sizes)
        return np.append(np.arange(self.document), self.document - self.lead + inside)

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        place, branch, leads = self._told(q)
        k_place, k_branch, k_leads = self._told(k)
        mine = (k_branch == branch) & ~k_leads & ~leads
        return np.asarray((k_place <= place) & (branch >= -1) & ((k_branch == -1) | ((k_branch >= 0) & mine)))

    def _told(self, at: Positions) -> tuple[NDArray[np.int64], NDArray[np.int64], Allowed]:
        """Of each position: place in its own sequence; branch (-1: the document, -2: none); whether it leads."""
        at = np.asarray(at)
        inside = (at >= 0) & (at < self.seq_len)
        branch = np.where(inside, np.searchsorted(self.starts, at, side="right") - 1, -2)
        behind = branch >= 0
        start = np.append(self.starts, 0)[np.where(behind, branch, -1)]
        place = np.where(behind, self.document - self.lead + at - start, at)
        return place, branch, np.asarray(behind & (at - start < self.lead))

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        n, starts = self.document, self.starts
        begins = starts + self.lead
        ends = begins + np.array(self.branches, np.int64)
        parts = [_bands(0, n, 0, n, 0), _bands(begins, ends, begins, ends, 0)]
        if self.lead:
            parts += [_bands(starts, begins, 0, n, begins - n), _bands(begins, ends, 0, n, -rg.UNBOUNDED)]
        else:  # the branches lie side by side: one rectangle, one kernel call
            parts.append(_bands(n, self.seq_len, 0, n, -rg.UNBOUNDED))
        return rg.intersect(rg.tighten(np.concatenate(parts)), everything(q_len, k_len, q_start))


def _bands(q0: Edges, q1: Edges, k0: Edges, k1: Edges, least: Edges) -> rg.Table:
    """Rectangles in which a query lies at least so far behind a key."""
    columns = np.broadcast_arrays(*(np.atleast_1d(x) for x in (q0, q1, k0, k1, least, rg.UNBOUNDED)))
    return np.stack(columns, axis=1).astype(np.int64)
