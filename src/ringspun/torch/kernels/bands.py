"""How band tiles become calls of an op that knows no bands, but adds a mask to the scores.

A tile is cut into strips of rows. The keys that all rows of a strip see need no mask; what a bound cuts on either side of
them is taken in blocks of few rows (or few keys) with just the keys (rows) that they meet, so that little more is
computed than is allowed. A strip of 4 rows under a band of 5, F full, L and R masked:

    row 0    L L L F F . . .
    row 1    . L L F F R . .
    row 2    . . L F F R R .
    row 3    . . . F F R R R

Blocks are as tight as tiles: each row of a block meets a key of it, and each key a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

STRIP = 1024
"""Rows of a strip, at most. Measured with PyTorch's CPU flash attention (one core, AVX-512, float32, D=64): between 512 and
1024 a full piece costs the same per pair; fewer rows mean more results to merge, more mean a larger masked share."""

SEEN_BY_ALL = 512
"""So many keys must be seen by all rows of a strip to be a piece of their own. Taking them masked costs up to 15 % more
per pair, and a piece of its own one more result to merge."""

BLOCK = 64
"""Rows or keys of a masked block. A block computes BLOCK / 2 pairs too many per row at each bound."""


class Piece(NamedTuple):
    """A rectangle of a tile, ``lo <= i - j <= hi`` counted from its own corner; not `masked` where it allows all."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int
    hi: int
    masked: bool


class Cut(NamedTuple):
    """One masked block, counted from its piece's corner: rows and keys, and what is added to their scores."""

    q0: int
    q1: int
    k0: int
    k1: int
    mask: Tensor


def pieces(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Iterator[Piece]:
    """One tile as pieces that together hold each of its pairs once."""
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi)
    strips = -(-(q1 - q0) // STRIP)
    if _all_allowed(q0, q1, max(k0, q0 - hi), min(k1, q1 - lo), lo, hi):
        strips = min(strips, 1)
    for i in range(strips):
        a, b = (q0 + (q1 - q0) * edge // strips for edge in (i, i + 1))
        first, last = max(k0, a - hi), min(k1, b - lo)  # keys that some row of the strip sees
        all0, all1 = max(first, b - 1 - hi), min(last, a - lo + 1)  # keys that every row sees
        if all1 - all0 < SEEN_BY_ALL and (first, last) != (all0, all1):
            all0 = all1 = last
        yield from (_tight(a, b, *keys, lo, hi) for keys in ((first, all0), (all0, all1), (all1, last)) if _some(*keys))


def _some(first: int, last: int) -> bool:
    return first < last


def _all_allowed(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> bool:
    return lo <= q0 - (k1 - 1) and q1 - 1 - k0 <= hi


def _tight(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Piece:
    """The rows that see some of these keys, and bounds from their corner no wider than the rectangle."""
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi)
    masked = not _all_allowed(q0, q1, k0, k1, lo, hi)
    corner = q0 - k0
    return Piece(q0, q1, k0, k1, max(lo - corner, 1 - (k1 - k0)), min(hi - corner, q1 - q0 - 1), masked)


def row_blocks(piece: Piece, dtype: torch.dtype) -> Iterator[Cut]:
    """A masked piece in blocks of rows, so that each row's keys are all in one block."""
    rows, keys, lo, hi = piece.q1 - piece.q0, piece.k1 - piece.k0, piece.lo, piece.hi
    height = min(BLOCK, rows)
    mask = additive(height, height + hi - lo, lo - hi, 0, dtype)  # of a whole block, its first key a - hi
    for a in range(0, rows, BLOCK):
        b, shift = min(a + BLOCK, rows), a - hi
        first, last = max(0, shift), min(keys, b - lo)
        yield Cut(a, b, first, last, mask[: b - a, first - shift : last - shift])


def key_blocks(piece: Piece, dtype: torch.dtype) -> Iterator[Cut]:
    """A masked piece in blocks of keys, so that each key's rows are all in one block."""
    rows, keys, lo, hi = piece.q1 - piece.q0, piece.k1 - piece.k0, piece.lo, piece.hi
    width = min(BLOCK, keys)
    mask = additive(width + hi - lo, width, 0, hi - lo, dtype)  # of a whole block, its first row a + lo
    for a in range(0, keys, BLOCK):
        b, shift = min(a + BLOCK, keys), a + lo
        first, last = max(0, shift), min(rows, b + hi)
        yield Cut(first, last, a, b, mask[first - shift : last - shift, : b - a])


def additive(rows: int, keys: int, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
    """0 where ``lo <= i - j <= hi``, -inf elsewhere."""
    hidden = torch.full((rows, keys), -torch.inf, dtype=dtype)
    return hidden.triu(1 - lo) + hidden.tril(-1 - hi)
