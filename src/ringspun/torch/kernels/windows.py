"""How band tiles become calls of an op that knows windows counted from the lower right corner, as flash attention does
on GPUs: row i of n sees keys ``i + m - n - left <= j <= i + m - n + right`` of m. A band is such a window, whole:

    lo <= i - j <= hi    is    left = hi + m - n,  right = n - m - lo

The op takes a bound that reaches as far as there are keys for no bound, and a missing right bound beside a left one for
m. Both are right as long as a tile is no taller than wide; a taller one is cut into pieces that are not.
Pieces with one window, one below and to the right of the other, are one call: documents packed into a sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

FEW = 8
"""Windows of a step among which a piece looks for one that it can share, so that short documents go with long ones."""


class Window(NamedTuple):
    """What rows see, from the lower right corner; None: no bound."""

    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        """Whether it is what every op calls causal, the way that all of them are fastest in."""
        return self == (None, 0)

    def shows_the_same(self, piece: Piece, own: Window) -> bool:
        """Whether rows of a piece see what `own` shows them: its bounds are these, or these reach beyond its ends."""
        reach = piece.k1 - piece.k0 - 1, piece.q1 - piece.q0 - 1
        return all(
            mine == its or (its is None and mine is not None and mine >= end)
            for mine, its, end in zip(self, own, reach, strict=True)
        )


class Piece(NamedTuple):
    """Query rows q0:q1 and keys k0:k1; every row sees a key and every key is seen by a row."""

    q0: int
    q1: int
    k0: int
    k1: int


@dataclass(frozen=True)
class WindowCall:
    """Pieces of one window and of the same batch rows, none of them sharing rows or keys, from the upper left on.

    Args:
        batch: the first batch row and the last + 1; -1: all.
    """

    batch: tuple[int, int]
    window: Window
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> tuple[int, int]:
        """First query row, and last + 1."""
        return self.pieces[0].q0, self.pieces[-1].q1

    @property
    def keys(self) -> tuple[int, int]:
        """First key, and last + 1."""
        return self.pieces[0].k0, self.pieces[-1].k1

    def sequences(self) -> list[tuple[int, int]]:
        """Rows and keys of each sequence of a packed call, pieces and what lies between them: rows without keys, and
        keys without rows, so that nothing is computed there."""
        found: list[tuple[int, int]] = []
        q, k = self.rows[0], self.keys[0]
        for piece in self.pieces:
            found += [(rows, keys) for rows, keys in ((piece.q0 - q, 0), (0, piece.k0 - k)) if rows or keys]
            found.append((piece.q1 - piece.q0, piece.k1 - piece.k0))
            q, k = piece.q1, piece.k1
        return found

    @cached_property
    def cumulative(self) -> tuple[list[int], list[int]]:
        """Where the sequences begin, and the last one ends, among rows and among keys."""
        rows, keys = zip(*self.sequences(), strict=True)
        return list(accumulate(rows, initial=0)), list(accumulate(keys, initial=0))

    @cached_property
    def stretches(self) -> list[Piece]:
        """The pieces, those that touch in rows and in keys joined: what of a packed call's results is meant."""
        found: list[Piece] = []
        for piece in self.pieces:
            if found and (found[-1].q1, found[-1].k1) == (piece.q0, piece.k0):
                found[-1] = found[-1]._replace(q1=piece.q1, k1=piece.k1)
            else:
                found.append(piece)
        return found


def calls(tiles: Iterable[list[int]]) -> list[WindowCall]:
    """Tiles ``(b0, b1, q0, q1, k0, k1, lo, hi)`` as calls that together hold each of their pairs once."""
    each = [((b0, b1), piece, window) for b0, b1, *tile in tiles for piece, window in pieces(*tile)]
    count = Counter((batch, window) for batch, _, window in each)
    groups: list[tuple[tuple[int, int], Window, list[Piece]]] = []
    last: dict[tuple[tuple[int, int], Window], list[Piece]] = {}
    for batch, piece, own in each:
        others = [w for b, w in count if b == batch and w.shows_the_same(piece, own)] if len(count) <= FEW else [own]
        window = max(others, key=lambda w: (count[batch, w], 2 - w.count(None), w == own))
        open_ = last.get((batch, window))
        if open_ is None or piece.q0 < open_[-1].q1 or piece.k0 < open_[-1].k1:
            open_ = last[batch, window] = []
            groups.append((batch, window, open_))
        open_.append(piece)
    return [WindowCall(batch, window, tuple(found)) for batch, window, found in groups]


def pieces(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Iterator[tuple[Piece, Window]]:
    """One tile in pieces, from the top down; none is taller than wide, unless all its rows see all its keys."""
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi)  # rows that see a key, then keys that a row sees
    k0, k1 = max(k0, q0 - hi), min(k1, q1 - lo)
    n, m = q1 - q0, k1 - k0
    if n <= 0 or m <= 0 or lo > hi:
        return
    lo, hi = lo - (q0 - k0), hi - (q0 - k0)  # from the piece's own corner
    cuts_low, cuts_high = lo > 1 - m, hi < n - 1
    if n <= m or not (cuts_low or cuts_high):
        left, right = (hi + m - n if cuts_high else None), (n - m - lo if cuts_low else None)
        yield Piece(q0, q1, k0, k1), Window(left, right)
        return
    below = m + lo if cuts_low else 0  # rows from here on see the last key
    above = hi + 1 if cuts_high else n  # rows up to here see the first
    edges = [0, *(e for e in ((below, above) if below <= above else (above,)) if 0 < e < n), n]
    for first, end in pairwise(edges):
        yield from pieces(q0 + first, q0 + end, k0, k1, lo + q0 - k0, hi + q0 - k0)
