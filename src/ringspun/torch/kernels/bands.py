"""How band tiles become calls of an op that knows no bands, but adds a mask to the scores.

A tile is cut into strips of rows. In a strip the keys that all its rows see need no mask (F); what a bound cuts does, on
either side (L, R). Four rows under a band of 8:

    row 0    L L L L F F F R . . .
    row 1    . L L L F F F R R . .
    row 2    . . L L F F F R R R .
    row 3    . . . L F F F R R R R

L and R of a high strip are cut once more, into low strips. What is then left along the diagonals is taken in blocks of few
rows with just the keys that they meet, so that little more is computed than is allowed. Pieces of one shape that follow
each other down the diagonal become one call, as batch rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

HIGH, LOW = (1024, 512), (256, 256)
"""Rows of a strip, and how many keys all its rows must see to have them taken without a mask, as one result more to merge."""

BLOCK = 64
"""Rows of a masked block: it computes about BLOCK / 2 pairs per row too many at each bound."""

BATCH = 1 << 20
"""Pieces are joined up to this many pairs: more would save no more time, and hold more gradients at once."""

Region = tuple[int, int, int, int, int, int]


class Piece(NamedTuple):
    """A rectangle of a tile with ``lo <= i - j <= hi`` counted from its corner, `count` times, each `rows` further down
    and to the right. Every row sees a key and every key a row; if not `masked`, every row sees every key."""

    q0: int
    k0: int
    rows: int
    keys: int
    lo: int
    hi: int
    masked: bool
    count: int = 1


def pieces(tile: Region) -> list[Piece]:
    """One tile as pieces that together hold each of its pairs once."""
    found: list[Piece] = []
    newest: dict[tuple[int, ...], int] = {}  # of each shape
    for piece in _cut(tile):
        at = newest.get(piece[2:], -1)
        if at >= 0 and _follows(piece, found[at]):
            found[at] = found[at]._replace(count=found[at].count + 1)
            continue
        newest[piece[2:]] = len(found)
        found.append(piece)
    return found


def _follows(piece: Piece, before: Piece) -> bool:
    step = before.count * before.rows
    room = (before.count + 1) * before.rows * before.keys <= BATCH
    return room and (piece.q0, piece.k0) == (before.q0 + step, before.k0 + step)


def _cut(tile: Region) -> Iterator[Piece]:
    q0, q1, k0, k1, lo, hi = tile
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi)  # rows that see a key, and keys that a row sees
    tile = (q0, q1, max(k0, q0 - hi), min(k1, q1 - lo), lo, hi)
    if q0 < q1 and not _piece(tile).masked:
        yield _piece(tile)
        return
    for region in _strips(tile, *HIGH):
        piece = _piece(region)
        if piece.masked:
            yield from map(_piece, _strips(region, *LOW))
        else:
            yield piece


def _strips(region: Region, height: int, seen_by_all: int) -> Iterator[Region]:
    """Strips of a region, each whole or as what its bounds cut on the left, what all rows see, and the same on the right."""
    q0, q1, k0, k1, lo, hi = region
    for a in range(q0, q1, height):
        b = min(a + height, q1)
        first, last = max(k0, a - hi), min(k1, b - lo)
        # the last row's first key and the first row's last belong to L and R, so that every row sees a key of each
        left = b - hi if b - 1 - hi > first else first
        right = a - lo if a - lo + 1 < last else last
        if right - left < seen_by_all:
            left = right = last
        yield from ((a, b, c, d, lo, hi) for c, d in ((first, left), (left, right), (right, last)) if c < d)


def _piece(region: Region) -> Piece:
    q0, q1, k0, k1, lo, hi = region
    rows, keys, corner = q1 - q0, k1 - k0, q0 - k0
    lo, hi = max(lo - corner, 1 - keys), min(hi - corner, rows - 1)
    return Piece(q0, k0, rows, keys, lo, hi, masked=(lo, hi) != (1 - keys, rows - 1))


class RowBlock(NamedTuple):
    """Rows and keys of a piece, and what is added to their scores."""

    q0: int
    q1: int
    k0: int
    k1: int
    mask: Tensor


def row_blocks(piece: Piece, dtype: torch.dtype) -> Iterator[RowBlock]:
    """A masked piece in blocks of rows, each with the keys that it sees some of."""
    height = min(BLOCK, piece.rows)
    mask = _additive(height, height + piece.hi - piece.lo, piece.hi - piece.lo, dtype)
    for a in range(0, piece.rows, BLOCK):
        b, start = min(a + BLOCK, piece.rows), a - piece.hi  # of an unclipped block's keys
        first, last = max(0, start), min(piece.keys, b - piece.lo)
        yield RowBlock(a, b, first, last, mask[: b - a, first - start : last - start])


def _additive(rows: int, keys: int, width: int, dtype: torch.dtype) -> Tensor:
    """0 where ``0 <= j - i <= width``, -inf elsewhere."""
    hidden = torch.full((rows, keys), -torch.inf, dtype=dtype)
    return hidden.tril(-1) + hidden.triu(width + 1)


def windows(x: Tensor, start: int, length: int, step: int, count: int) -> Tensor:
    """`count` ranges of rows of ``[B, H, T, D]``, each `step` after the one before, as batch rows ``[B * count, H, length, D]``."""
    if count == 1:
        return x.narrow(2, start, length)
    return x.narrow(2, start, (count - 1) * step + length).unfold(2, length, step).permute(0, 2, 1, 4, 3).flatten(0, 1)


def in_a_row(x: Tensor, count: int) -> Tensor:
    """Batch rows ``[B * count, H, rows, ...]`` that follow each other as ``[B, H, count * rows, ...]``."""
    return x if count == 1 else x.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)
