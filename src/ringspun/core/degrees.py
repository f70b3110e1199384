"""The two degrees of a hybrid (USP): heads are split among a few ranks, the sequence among rings of the others.

    inner="ulysses", ring 2, ulysses 3          inner="ring"
                  heads                                       heads
              0    1    2                                 0    1    2
    ring 0   r0   r1   r2                       ring 0   r0   r2   r4
    ring 1   r3   r4   r5                       ring 1   r1   r3   r5

A row of ranks holds one share of the sequence together and exchanges heads for rows; a column is a ring.

Source: arXiv 2405.07719 (USP).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ringspun.errors import PlanError

Inner = Literal["ulysses", "ring"]


@dataclass(frozen=True)
class Degrees:
    """How `size` ranks are a ring and a split of heads at once.

    Args:
        ring: ranks of each ring R. ulysses: ranks among which heads are split U. inner: whose neighbours are
            neighbours in the group.
    """

    ring: int
    ulysses: int
    inner: Inner = "ulysses"

    @property
    def size(self) -> int:
        """All ranks."""
        return self.ring * self.ulysses

    def rank(self, ring_rank: int, ulysses_rank: int) -> int:
        """The rank of the group at a place."""
        if self.inner == "ulysses":
            return ring_rank * self.ulysses + ulysses_rank
        return ulysses_rank * self.ring + ring_rank

    def place(self, rank: int) -> tuple[int, int]:
        """Ring rank and Ulysses rank of a rank of the group."""
        if self.inner == "ulysses":
            return divmod(rank, self.ulysses)
        ulysses_rank, ring_rank = divmod(rank, self.ring)
        return ring_rank, ulysses_rank

    def row(self, ring_rank: int) -> tuple[int, ...]:
        """The ranks that hold one share of the sequence, by Ulysses rank."""
        return tuple(self.rank(ring_rank, u) for u in range(self.ulysses))

    def column(self, ulysses_rank: int) -> tuple[int, ...]:
        """The ranks of one ring, by ring rank."""
        return tuple(self.rank(r, ulysses_rank) for r in range(self.ring))

    def __str__(self) -> str:
        return f"ring {self.ring} x ulysses {self.ulysses}, inner {self.inner}"


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each Ulysses rank computes: as many query heads as the others, or one less.

        8 heads over 2 KV heads, degree 4       query heads 0 1 | 2 3 | 4 5 | 6 7       KV heads 0 | 0 | 1 | 1

    Args:
        heads: query heads H. kv_heads: K, divides H. degree: U, at most H.
    Raises:
        PlanError: more ranks than query heads.
    """

    heads: int
    kv_heads: int
    degree: int

    def __post_init__(self) -> None:
        if self.degree > self.heads:
            raise PlanError(
                f"ulysses must be at most the number of query heads; got {self.degree} and {self.heads} heads. "
                "Use a smaller ulysses and a longer ring."
            )

    @property
    def shared(self) -> bool:
        """Whether several ranks look at one KV head, so that its gradients are summed over them."""
        ends = [self.keys(rank) for rank in range(self.degree)]
        return any(one[1] > other[0] for one, other in pairwise(ends))

    def queries(self, ulysses_rank: int) -> tuple[int, int]:
        """Query heads ``[first, last)`` of a rank."""
        short, longer = divmod(self.heads, self.degree)  # plain integers: compiled calls work this out too
        first, last = (rank * short + min(rank, longer) for rank in (ulysses_rank, ulysses_rank + 1))
        return first, last

    def keys(self, ulysses_rank: int) -> tuple[int, int]:
        """KV heads ``[first, last)`` that a rank's query heads look at; neighbours may share one."""
        first, last = self.queries(ulysses_rank)
        group = self.heads // self.kv_heads
        return first // group, -(-last // group)

    def held(self, ulysses_rank: int) -> tuple[int, ...]:
        """The KV heads that a rank computes with, counted from its first: each once where its query heads fall into
        equal groups of them, else one per query head."""
        first, last = self.queries(ulysses_rank)
        group = self.heads // self.kv_heads
        low, high = self.keys(ulysses_rank)
        whole = first % group == 0 and last % group == 0
        if whole or high - low == 1:
            return tuple(range(high - low))
        return tuple(head // group - low for head in range(first, last))
