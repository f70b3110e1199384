"""Regions: disjoint rectangles of (query, key) pairs with a diagonal band. The normal form of every mask.

One region is ``q in [q0, q1), k in [k0, k1), lo <= q - k <= hi`` over global positions. A set of regions is one int64
array ``[n, 6]`` with those columns. Regions are closed under intersection and difference, so every combination of masks
by ``&`` and ``|`` is again a set of disjoint regions. `UNBOUNDED` stands for no bound: far beyond any length, small
enough that sums of two never overflow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]

Q0, Q1, K0, K1, LO, HI = range(6)
UNBOUNDED = 1 << 60


def empty() -> Table:
    """The region set that allows no pair."""
    return np.zeros((0, 6), np.int64)


def rectangle(q0: int, q1: int, k0: int, k1: int, lo: int = -UNBOUNDED, hi: int = UNBOUNDED) -> Table:
    """A set of one region (or none, when it holds no pair)."""
    return tighten(np.array([[q0, q1, k0, k1, lo, hi]], np.int64))


def tighten(regions: Table) -> Table:
    """Shrink every rectangle and band to what they really reach and drop the empty ones. Pairs do not change."""
    tight = regions.copy()
    return tight[tighten_rows(tight)]


def tighten_rows(regions: Table) -> NDArray[np.bool_]:
    """`tighten` in place, keeping every row: returns which rows hold a pair."""
    q0, q1, k0, k1, lo, hi = (regions[:, i] for i in range(6))
    np.maximum(q0, k0 + lo, out=q0)
    np.minimum(q1, k1 + hi, out=q1)
    np.maximum(k0, q0 - hi, out=k0)  # drops keys without a query, so no query loses its last key: once is enough
    np.minimum(k1, q1 - lo, out=k1)
    np.maximum(lo, q0 - (k1 - 1), out=lo)
    np.minimum(hi, (q1 - 1) - k0, out=hi)
    return (q0 < q1) & (k0 < k1) & (lo <= hi)


def turned(regions: Table) -> Table:
    """The same pairs with queries and keys in each other's place."""
    return np.column_stack([regions[:, [K0, K1, Q0, Q1]], -regions[:, HI], -regions[:, LO]])


def looks(regions: Table) -> tuple[bool, bool]:
    """Whether any query of the set looks ahead of its position (k > q), and whether any looks back (k < q)."""
    tight = tighten(regions)
    return bool((tight[:, LO] < 0).any()), bool((tight[:, HI] > 0).any())


def count(regions: Table) -> NDArray[np.int64]:
    """Number of allowed pairs in each region, exactly (int64)."""
    q0, q1, k0, k1, lo, hi = regions.T
    n, m = np.maximum(q1 - q0, 0), np.maximum(k1 - k0, 0)
    off = q0 - k0  # q - k = off + (i - j) with i < n, j < m

    def below(bound: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pairs of the n x m rectangle with i - j <= bound: m - 1 + bound + 1 anti-diagonals, trapezoid by
        triangles."""
        s = np.clip(bound + m, 0, n + m)  # number of diagonals taken, counted from the corner (0, m - 1)

        def triangle(x: NDArray[np.int64]) -> NDArray[np.int64]:
            x = np.maximum(x, 0)
            return x * (x + 1) // 2

        return triangle(s) - triangle(s - n) - triangle(s - m) + triangle(s - n - m)

    bounded_hi = np.minimum(np.maximum(hi - off, -UNBOUNDED), UNBOUNDED)
    bounded_lo = np.minimum(np.maximum(lo - off - 1, -UNBOUNDED), UNBOUNDED)
    return np.where(lo <= hi, below(bounded_hi) - below(bounded_lo), 0)


def intersect(a: Table, b: Table) -> Table:
    """All pairs that are in both sets; disjoint if both are."""
    if len(a) == 0 or len(b) == 0:
        return empty()
    if len(a) > len(b):
        a, b = b, a
    pieces = [_clip(b, row) for row in a]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _clip(many: Table, one: Table) -> Table:
    """`many` cut down to the region `one`."""
    near = (many[:, Q0] < one[Q1]) & (many[:, Q1] > one[Q0]) & (many[:, K0] < one[K1]) & (many[:, K1] > one[K0])
    r = many[near]  # boolean indexing copies
    for low in (Q0, K0, LO):
        np.maximum(r[:, low], one[low], out=r[:, low])
    for high in (Q1, K1, HI):
        np.minimum(r[:, high], one[high], out=r[:, high])
    return tighten(r)


def subtract(a: Table, b: Table) -> Table:
    """Pairs of `a` that are not in `b`; disjoint if `a` is."""
    for row in tighten(b):
        near = (a[:, Q0] < row[Q1]) & (a[:, Q1] > row[Q0]) & (a[:, K0] < row[K1]) & (a[:, K1] > row[K0])
        if near.any():
            a = np.concatenate([a[~near], _without(a[near], row)])
    return a


def _without(many: Table, one: Table) -> Table:
    """`many` minus the region `one`: up to four rectangles around it, then the bands below and above inside it."""
    pieces = []

    def keep(column: int, value: int, take_min: bool) -> Table:
        piece = rest.copy()
        piece[:, column] = (np.minimum if take_min else np.maximum)(piece[:, column], value)
        return piece

    rest = many
    for low, high in ((Q0, Q1), (K0, K1)):
        pieces.append(keep(high, int(one[low]), True))
        pieces.append(keep(low, int(one[high]), False))
        rest = keep(low, int(one[low]), False)
        rest = keep(high, int(one[high]), True)
    pieces.append(keep(HI, int(one[LO]) - 1, True))
    pieces.append(keep(LO, int(one[HI]) + 1, False))
    return tighten(np.concatenate(pieces))


def unite(a: Table, b: Table) -> Table:
    """All pairs that are in either set, disjoint: the shorter one and what the longer one adds to it.

    This way round, because `subtract` goes through its second set row by row.
    """
    if len(a) > len(b):
        a, b = b, a
    return np.concatenate([a, subtract(b, a)])


def as_array(regions: Table, q_len: int, k_len: int, q_start: int = 0) -> NDArray[np.bool_]:
    """The dense boolean matrix ``[q_len, k_len]``, whose first row is query `q_start`; for tests and small pictures."""
    allowed = np.zeros((q_len, k_len), np.bool_)
    for q0, q1, k0, k1, lo, hi in regions:
        q, k = np.arange(q0, q1)[:, None], np.arange(k0, k1)[None, :]
        allowed[q0 - q_start : q1 - q_start, k0:k1] |= (lo <= q - k) & (q - k <= hi)
    return allowed
