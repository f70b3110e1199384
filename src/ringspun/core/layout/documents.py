"""What layouts that read documents share: each document is either cut into a zigzag of its own or kept whole on one
rank, and tokens of no document fill up the ranks that lack some.

Everything is decided by integers, or by single IEEE operations in a fixed order, and ties go to the lower rank: the
same input is dealt alike on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspun.core.layout.base import START, STOP, Runs, in_order, runs_between
from ringspun.core.layout.speeds import Weights, are_even, share
from ringspun.core.layout.zigzag import chunk_ranks, mirrored
from ringspun.core.mask import Documents

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
WHERE_CUT = -1
"""In place of a rank: this document is cut, not whole."""


@dataclass(frozen=True, eq=False)
class Spans:
    """A sequence as (start, stop) rows: its `documents` that hold a token, and the `gaps` between and after them."""

    documents: Ints
    gaps: Ints

    @classmethod
    def of(cls, seq_len: int, documents: Documents | None) -> Spans:
        """Without documents the whole sequence is one."""
        found = (Documents([seq_len]) if documents is None else documents).table()
        gaps = np.stack([np.append(0, found[:, 1]), np.append(found[:, 0], seq_len)], axis=1)
        return cls(found, gaps[gaps[:, 1] > gaps[:, 0]])

    @property
    def lengths(self) -> Ints:
        """Tokens of each document."""
        lengths: Ints = self.documents[:, 1] - self.documents[:, 0]
        return lengths


def runs_of(spans: Spans, owners: Ints, weights: Weights) -> Runs:
    """The runs of a dealing: document d whole to rank ``owners[d]``, or cut where that is `WHERE_CUT`; and the gaps."""
    cut = owners == WHERE_CUT
    whole = np.stack([owners, *spans.documents.T, np.ones_like(owners)], axis=1)[~cut]
    edges = spans.documents[cut, :1] + zigzag_edges(spans.lengths[cut], weights)
    ranks = np.broadcast_to(chunk_ranks(len(weights)), edges[:, 1:].shape)
    pieces = np.stack([ranks, edges[:, :-1], edges[:, 1:], np.ones_like(ranks)], axis=2).reshape(-1, 4)
    runs = np.concatenate([whole, pieces])
    if len(spans.gaps):
        held = np.zeros(len(weights), np.int64)
        np.add.at(held, runs[:, 0], runs[:, STOP] - runs[:, START])
        runs = np.concatenate([runs, _fill(spans.gaps, held.tolist(), weights.tolist())])
    return in_order(runs)


def zigzag_widths(lengths: Ints, weights: Weights) -> tuple[Ints, Ints]:
    """Tokens of each document's early chunks and of its late ones, by rank: two ``[D, R]``."""
    edges = zigzag_edges(lengths, weights)
    widths = edges[:, 1:] - edges[:, :-1]
    return widths[:, : len(weights)], widths[:, : len(weights) - 1 : -1]


def zigzag_edges(lengths: Ints, weights: Weights) -> Ints:
    """Edges ``[D, 2R + 1]`` of each document's chunks, counted from its start.

    On equal ranks chunks of a document differ by at most one token, and the longer ones go on in the next document
    where they stopped in this one: over all documents the ranks' tokens differ by at most one. On unequal ranks the
    documents are cut where one long row of tokens would be rounded, which keeps every rank within two tokens of its
    share (while chunks are no narrower than a token).
    """
    chunks = 2 * len(weights)
    if are_even(weights):
        short, longer = np.divmod(lengths, chunks)
        before = (np.cumsum(longer) - longer) % chunks
        i = np.arange(chunks + 1)
        laps = np.stack([np.minimum(before + longer, chunks), before + longer - chunks], axis=1)  # round, and again
        first = np.clip(i, before[:, None], laps[:, :1]) - before[:, None]
        edges: Ints = i * short[:, None] + first + np.minimum(i, np.maximum(laps[:, 1:], 0))
        return edges
    ends = np.cumsum(lengths)
    edges = share(ends, mirrored(weights)) - share(ends - lengths, mirrored(weights))
    return np.maximum.accumulate(edges, axis=1)  # a chunk narrower than a token may come out as -1


def _fill(gaps: Ints, held: Sequence[int], weights: Sequence[int]) -> Runs:
    """Gap tokens to the ranks that lack most of their share, as runs; each rank's are neighbours as far as can be."""
    sizes = gaps[:, 1] - gaps[:, 0]
    offsets = np.cumsum(sizes) - sizes
    missing = _missing(int(sizes.sum()), held, weights)
    edges = np.unique(np.concatenate([offsets, np.append(0, np.cumsum(missing))]))  # counted over the gaps alone
    gap = np.searchsorted(offsets, edges[:-1], side="right") - 1
    rank = np.searchsorted(np.cumsum(missing), edges[:-1], side="right")
    runs = runs_between(rank, edges)
    runs[:, START : STOP + 1] += (gaps[gap, 0] - offsets[gap])[:, None]
    return runs


def _missing(tokens: int, held: Sequence[int], weights: Sequence[int]) -> Ints:
    """How many of `tokens` each rank gets, so that the fullest is as little over its share as can be."""
    low = [r for r in range(len(held)) if weights[r]]
    while True:  # ranks that hold more than the rest would with all of `tokens` get none
        level, width = tokens + sum(held[r] for r in low), sum(weights[r] for r in low)
        below = [r for r in low if held[r] * width <= weights[r] * level]
        if len(below) == len(low):
            break
        low = below
    missing = np.zeros(len(held), np.int64)
    sums = np.append(0, np.cumsum([weights[r] for r in low]))
    edges = [level * int(s) // width for s in sums]  # rounds to no less than what a rank holds
    missing[low] = np.diff(edges) - np.array([held[r] for r in low])
    return missing


@dataclass(frozen=True)
class Scale:
    """What counts as all the `work` (causal pairs) and all the `tokens` when loads of whole documents are weighed, and
    the bounds of what a rank may get of each, where 1 is its share of all."""

    work: float
    tokens: float
    most_work: float = np.inf
    most_tokens: float = np.inf
    least_work: float = 0.0


def causal_pairs(lengths: Ints) -> Floats:
    """Causal pairs inside documents of these lengths."""
    n = lengths.astype(np.float64)
    return n * (n + 1) / 2


def pack(lengths: Ints, weights: Weights, scale: Scale, held: Ints | None = None) -> Ints | None:
    """Whole documents to ranks so that both their work and their tokens are in proportion: the owner of each; None
    beyond the scale's bounds. The ranks begin with tokens `held`.

    Longest first, each to the rank where the sum of both squared loads grows least: long documents go by work, short
    ones, which weigh little, by the tokens that are still missing.
    """
    shares = weights / float(weights.sum())
    slowness = np.full(len(weights), 1e200)  # of ranks that get nothing
    np.divide(1.0, shares, out=slowness, where=shares > 0)
    order = np.argsort(-lengths, kind="stable")
    works, sizes = causal_pairs(lengths[order]) / scale.work, lengths[order] / scale.tokens
    work, growth, other = (np.zeros(len(weights)) for _ in range(3))
    tokens = np.zeros(len(weights)) if held is None else held / scale.tokens * slowness
    half_squares = (works * works + sizes * sizes) / 2
    owners = np.empty(len(lengths), np.int64)
    even = are_even(weights)
    for d, w, n, h in zip(order.tolist(), works.tolist(), sizes.tolist(), half_squares.tolist(), strict=True):
        np.multiply(work, w, out=growth)
        growth += np.multiply(tokens, n, out=other)
        if not even:
            growth += np.multiply(slowness, h, out=other)
        rank = int(growth.argmin())
        owners[d] = rank
        work[rank] += w * slowness[rank]
        tokens[rank] += n * slowness[rank]
        if work[rank] > scale.most_work or tokens[rank] > scale.most_tokens:
            return None
    return owners if (work[shares > 0] >= scale.least_work).all() else None
