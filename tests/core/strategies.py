"""What the laws of the core are tried on: random masks, layouts and region sets, small enough for dense arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from ringspun import (
    Anchors,
    Balanced,
    Band,
    Blocks,
    Causal,
    Chunks,
    Contiguous,
    DocumentPairs,
    Documents,
    DocumentZigzag,
    Full,
    Keys,
    Layout,
    Prefix,
    Striped,
    Window,
    Zigzag,
)
from ringspun.core import regions as rg


@st.composite
def documents(draw, length):
    """Up to five documents inside `length` tokens: empty ones, one-token ones, gaps between and padding at the end."""
    count = draw(st.integers(0, 5))
    edges = sorted(draw(st.lists(st.integers(0, length), min_size=2 * count, max_size=2 * count)))
    starts, stops = np.array(edges[::2], np.int64), np.array(edges[1::2], np.int64)
    if draw(st.booleans()):  # back to back, so that `starts` may be left out
        return Documents(stops - starts)
    return Documents(stops - starts, starts)


@st.composite
def leading(draw, kind, length):
    """`Prefix` or `Anchors`: one count, one count within documents, or one count per document."""
    n = st.integers(0, 2 * length + 2)
    form = draw(st.sampled_from(("plain", "documents", "each")))
    if form == "plain":
        return kind(draw(n))
    docs = draw(documents(length))
    count = len(docs.lengths)
    return kind(draw(n) if form == "documents" else draw(st.lists(n, min_size=count, max_size=count)), docs)


@st.composite
def bands(draw, length):
    """Any `Band` that is not empty by its own bounds; either bound may be open."""
    reach = st.integers(-length - 2, length + 2) | st.none()
    left, right = draw(reach), draw(reach)
    if left is not None and right is not None and left < -right:
        left, right = -right, -left
    return Band(left, right)


def blocks(length):
    """Block masks of any block size; their tables may end before or after `length` tokens."""
    row = st.lists(st.integers(0, 6), max_size=5)
    return st.builds(Blocks, st.lists(row, max_size=6), st.integers(1, length // 2 + 2))


def keys(length):
    """Some keys, which may lie beyond `length` tokens."""
    edges = st.tuples(st.integers(0, length + 2), st.integers(0, length + 2)).map(sorted)
    return edges.map(lambda ab: Keys(*ab))


@st.composite
def pairs(draw, length):
    """Documents of queries and of keys, as many of either."""
    both = [draw(documents(length)) for _ in range(2)]
    count = min(len(d.lengths) for d in both)
    return DocumentPairs(*(Documents(d.lengths[:count], d.starts[:count]) for d in both))


def plain_masks(length):
    """One mask, not combined, for at least `length` tokens."""
    return st.one_of(
        st.just(Full()),
        st.just(Causal()),
        st.builds(Window, st.integers(1, length + 3) | st.none()),
        bands(length),
        documents(length),
        leading(Prefix, length),
        leading(Anchors, length),
        st.builds(Chunks, st.integers(1, length + 3)),
        blocks(length),
        keys(length),
        pairs(length),
    )


def masks(length, leaves=5):
    """Masks combined at will by ``&`` and ``|``."""

    def combine(inner):
        return st.builds(lambda a, b: a & b, inner, inner) | st.builds(lambda a, b: a | b, inner, inner)

    return st.recursive(plain_masks(length), combine, max_leaves=leaves)


@st.composite
def region_sets(draw, length, most=4):
    """Disjoint regions inside ``length x length``, not necessarily tight: rectangles with random bands, united."""
    table = rg.empty()
    for _ in range(draw(st.integers(0, most))):
        q0, q1 = sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length))))
        k0, k1 = sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length))))
        lo = draw(st.integers(-length - 1, length + 1) | st.just(-rg.UNBOUNDED))
        hi = draw(st.integers(-length - 1, length + 1) | st.just(rg.UNBOUNDED))
        table = rg.unite(table, np.array([[q0, q1, k0, k1, lo, hi]], np.int64))
    return table


@dataclass(frozen=True)
class Scattered(Layout):
    """A layout that the package has never seen: arithmetic progressions of one step, cut anywhere, dealt to anyone."""

    seed: int
    step: int = 1

    def deal(self, seq_len, ring_size, documents):
        rng = np.random.default_rng((self.seed, seq_len, ring_size))
        runs = []
        for residue in range(min(self.step, seq_len)):
            members = np.arange(residue, seq_len, self.step)
            cuts = np.unique(rng.integers(0, len(members) + 1, rng.integers(0, 4)))
            for piece in np.split(members, cuts):
                if len(piece):
                    runs.append((rng.integers(ring_size), piece[0], piece[-1] + 1, self.step))
        runs = [runs[i] for i in rng.permutation(len(runs))]  # local order need not be global order
        return np.array(sorted(runs, key=lambda run: run[0]), np.int64).reshape(-1, 4)


@dataclass(frozen=True)
class MixedSteps(Layout):
    """Even positions in one run; odd ones in runs of step 4. Its runs rarely share a step."""

    def deal(self, seq_len, ring_size, documents):
        ranks = np.arange(3) * (ring_size - 1) // 2
        starts, steps = np.array([0, 1, 3]), np.array([2, 4, 4])
        runs = np.stack([ranks, starts, np.full(3, seq_len), steps], axis=1)
        return runs[starts < seq_len]


def layouts():
    """The layouts of the package and two kinds that it does not know."""
    return st.one_of(
        st.sampled_from((Contiguous(), Zigzag(), Striped(), DocumentZigzag(), Balanced())),
        st.builds(Scattered, st.integers(0, 10_000), st.integers(1, 4)),
    )


@st.composite
def plans(draw, longest):
    """A mask, a length, a ring size and a layout."""
    length = draw(st.integers(0, longest))
    return draw(masks(length)), length, draw(st.integers(1, 7)), draw(layouts())
