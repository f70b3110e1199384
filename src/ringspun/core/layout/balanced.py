"""Balanced: long documents cut, short ones whole, so that tokens and work are even with as few pieces as can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from ringspun.core.layout.base import Runs
from ringspun.core.layout.documents import (
    WHERE_CUT,
    Floats,
    Ints,
    Scale,
    Spans,
    causal_pairs,
    pack,
    runs_of,
    zigzag_widths,
)
from ringspun.core.layout.speeds import UnequalRanks, Weights, are_even
from ringspun.core.mask import Documents

TOLERANCE = 0.05
"""How far the fullest rank may be above its share, of tokens and of every step's pairs."""
_FEW = 32
"""Of so many documents every number is tried, where nothing comes within the tolerance."""
_EXACT_BITS = 26
"""Products of widths that add up to less than 2**26 add up to less than 2**53: exact in float64, in any order."""


@dataclass(frozen=True)
class Balanced(UnequalRanks):
    """Equal tokens and, causally within documents, equal work of all ranks at every step, within 5 %.

        documents([8, 4, 4]), 2 ranks    rank 0: 0 1 6 7 8 9 10 11    rank 1: 2 3 4 5 12 13 14 15

    The longest documents are cut as `DocumentZigzag` cuts, which is even at every step; all others stay whole on one
    rank, where they need no communication and make large tiles. How many can stay whole is found by search. Where
    nothing comes within 5 % (few, tiny documents) it is the best that was found. Tokens of no document go where tokens
    are lacking. Documents whose tokens all see each other come out as even.

    Args:
        speeds: one positive number per rank; tokens and all steps' work together are in their proportion. Default:
            equal.
    Raises:
        LayoutError: speeds that are not positive finite numbers.
    """

    speeds: tuple[float, ...] | None = field(default=None, kw_only=True)
    reads_documents: ClassVar[bool] = True

    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        spans = Spans.of(seq_len, documents)
        weights = self.weights(ring_size)
        return runs_of(spans, _Search(seq_len, spans.lengths, weights).owners(), weights)


@dataclass(frozen=True, eq=False)
class _Search:
    """Looks for the most documents that may stay whole, shortest first."""

    seq_len: int
    lengths: Ints
    weights: Weights

    def owners(self) -> Ints:
        """Which rank holds each document, or `WHERE_CUT`."""
        tried: list[tuple[float, Ints]] = []
        for tolerance in (TOLERANCE, TOLERANCE / 2):  # the second leaves room for chunks of short documents
            most = self._most_whole(tolerance)
            tried += self._judged(most, tolerance)
            if tried and tried[-1][0] <= TOLERANCE:
                return tried[-1][1]
        count = len(self.lengths)
        several = range(count + 1) if count <= _FEW else np.linspace(most, count, 5).astype(np.int64).tolist()
        for whole in reversed(several):  # of many documents, cutting more would only make more uneven chunks
            tried += self._judged(whole, np.inf)
        return min(tried, key=lambda one: one[0])[1]

    @cached_property
    def shortest(self) -> Ints:
        """Documents, the shortest first."""
        return np.argsort(self.lengths, kind="stable")

    @cached_property
    def works(self) -> Floats:
        """Causal pairs of the 0, 1, 2, ... shortest documents together."""
        return np.append(0.0, np.cumsum(causal_pairs(self.lengths[self.shortest])))

    @cached_property
    def sizes(self) -> Ints:
        """Tokens of the 0, 1, 2, ... shortest documents together."""
        return np.append(0, np.cumsum(self.lengths[self.shortest]))

    def _most_whole(self, tolerance: float) -> int:
        """The largest number of documents that fit whole: first a multiple of the ring size, as documents of one length
        need it, then up to one more round."""
        if self._fits(len(self.lengths), tolerance):
            return len(self.lengths)
        ring_size = len(self.weights)
        rounds = _last(len(self.lengths) // ring_size, lambda n: self._fits(n * ring_size, tolerance))
        most = min(ring_size - 1, len(self.lengths) - rounds * ring_size)
        return rounds * ring_size + _last(most, lambda n: self._fits(rounds * ring_size + n, tolerance))

    def _judged(self, whole: int, tolerance: float) -> list[tuple[float, Ints]]:
        owners = self._packed(whole, tolerance)
        return [] if owners is None else [(self._excess(owners), owners)]

    def _fits(self, whole: int, tolerance: float) -> bool:
        return self._packed(whole, tolerance) is not None

    def _packed(self, whole: int, tolerance: float) -> Ints | None:
        """Owners with the `whole` shortest documents whole; None if some rank's share is exceeded by more."""
        owners = np.full(len(self.lengths), WHERE_CUT)
        if whole:
            chosen, held = self.shortest[:whole], self._held(whole) if tolerance == np.inf else None
            found = pack(self.lengths[chosen], self.weights, self._scale(whole, tolerance), held)
            if found is None:
                return None
            owners[chosen] = found
        return owners

    def _scale(self, whole: int, tolerance: float) -> Scale:
        """All tokens, and the work of one step (unequal ranks: of all); the room that cut documents leave of both."""
        even = are_even(self.weights)
        cut_work = float(self.works[-1] - self.works[whole]) / (len(self.weights) if even else 1)
        work, tokens = float(self.works[whole]) + cut_work, float(self.seq_len)
        return Scale(
            work,
            tokens,
            most_work=1 + tolerance - cut_work / work,
            most_tokens=1 + tolerance - float(self.sizes[-1] - self.sizes[whole]) / tokens,
            least_work=0.0 if even else 1 - tolerance - cut_work / work,
        )

    def _held(self, whole: int) -> Ints:
        """Tokens of the cut documents by rank. They are even but for a few, which matter only where nothing else is."""
        early, late = zigzag_widths(self.lengths[np.sort(self.shortest[whole:])], self.weights)
        held: Ints = (early + late).sum(axis=0)
        return held

    def _excess(self, owners: Ints) -> float:
        """How far the fullest rank is above its share of tokens, or of pairs at a step. For unequal ranks the latter is
        how far any is off its share of all pairs."""
        size, shares = len(self.weights), self.weights / float(self.weights.sum())
        cut, shift = owners == WHERE_CUT, max(0, self.seq_len.bit_length() - _EXACT_BITS)
        whole = self.lengths[~cut] >> shift
        early, late = ((w >> shift).astype(np.float64) for w in zigzag_widths(self.lengths[cut], self.weights))
        both = early + late
        pairs = np.tril(both.T @ early, -1) + np.triu(late.T @ both, 1)  # rank i's queries, rank j's keys
        np.fill_diagonal(pairs, (both * (both + 1) / 2).sum(axis=0))
        pairs[np.diag_indices(size)] += np.bincount(owners[~cut], causal_pairs(whole), size)
        held = both.sum(axis=0) + np.bincount(owners[~cut], whole, size)
        tokens = _ratio(held, shares * (self.seq_len >> shift)).max() - 1
        if not are_even(self.weights):
            return float(max(tokens, abs(_ratio(pairs.sum(axis=1), shares * pairs.sum()) - 1).max()))
        rank = np.arange(size)
        steps = pairs[rank[:, None], (rank[:, None] - rank) % size]
        return float(max(tokens, _ratio(steps, steps.mean(axis=0)).max() - 1))


def _ratio(held: Floats, fair: Floats) -> Floats:
    """What is held over what is fair; 1 where nothing is."""
    fair = np.broadcast_to(fair, held.shape)
    return np.divide(held, fair, out=np.ones(held.shape), where=fair > 0)


def _last(most: int, holds: Callable[[int], bool]) -> int:
    """The largest n from 0 to `most` where `holds`, by bisection; 0 is taken to."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least
