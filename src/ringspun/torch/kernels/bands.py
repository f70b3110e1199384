"""How band tiles become calls of an op that knows no bands, but adds a mask to the scores.

A tile is cut into strips of rows. In a strip the keys that all its rows see need no mask (F); what a bound cuts on
either side (L, R) does. Four rows under a band of 8:

    row 0    L L L L F F F R . . .
    row 1    . L L L F F F R R . .
    row 2    . . L L F F F R R R .
    row 3    . . . L F F F R R R R

L and R, or a whole strip of which all rows see too few keys, are taken in blocks of few rows with just the keys that
they meet (or few keys, with their rows), so that little more is computed than is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """How large the parts are. Measured with PyTorch's CPU flash attention, one AVX-512 core, float32, D=64.

    Args:
        strip: rows of a strip. From 768 on an unmasked piece runs at the op's full speed; more leave more to L and R.
        seen_by_all: keys that all rows of a strip must see to be taken by themselves, unmasked, as one result more to
            merge. Masked they cost up to 10 % more per pair.
        block: rows (or keys) of a masked block. At each bound it computes half as many pairs per row too many. Per pair
            the op loses a few percent at 64 rows and a third at 16, and each call costs something: triangles and
            packed documents take 2 to 3 % less with 96 than with 64, and a window of 256 takes 2 % more.
    """

    strip: int = 1024
    seen_by_all: int = 512
    block: int = 96


Region = tuple[int, int, int, int, int, int]
"""(q0, q1, k0, k1, lo, hi): rows and keys with ``lo <= i - j <= hi``."""


class Piece(NamedTuple):
    """A rectangle of a tile with ``lo <= i - j <= hi`` counted from its own corner. Every row sees a key and every key
    is seen by a row; where not `masked`, every key by every row. `alone`: no other piece has its rows."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int
    hi: int
    masked: bool
    alone: bool = True


class MaskedBlock(NamedTuple):
    """Rows q0:q1 and keys k0:k1 of a piece, and what is added to their scores."""

    q0: int
    q1: int
    k0: int
    k1: int
    mask: Tensor


@lru_cache(maxsize=1 << 14)
def pieces(tile: Region, sizes: Sizes) -> tuple[Piece, ...]:
    """One tile as pieces that together hold each of its pairs once."""
    return tuple(_pieces(*tile, sizes))


def _pieces(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int, sizes: Sizes) -> Iterator[Piece]:
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi)  # rows that see a key, then keys that a row sees
    whole = _piece(q0, q1, max(k0, q0 - hi), min(k1, q1 - lo), lo, hi)
    if q0 < q1 and not whole.masked:
        yield whole
        return
    for a in range(q0, q1, sizes.strip):
        b = min(a + sizes.strip, q1)
        first, last = max(k0, a - hi), min(k1, b - lo)
        # where a bound cuts, F ends one key early, so that every row sees a key of L and of R
        left = b - hi if b - 1 - hi > first else first
        right = a - lo if a - lo + 1 < last else last
        if right - left < sizes.seen_by_all:
            left = right = last
        parts = [(c, d) for c, d in ((first, left), (left, right), (right, last)) if c < d]
        yield from (_piece(a, b, c, d, lo, hi)._replace(alone=len(parts) == 1) for c, d in parts)


def _piece(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Piece:
    rows, keys, corner = q1 - q0, k1 - k0, q0 - k0
    lo, hi = max(lo - corner, 1 - keys), min(hi - corner, rows - 1)
    return Piece(q0, q1, k0, k1, lo, hi, masked=(lo, hi) != (1 - keys, rows - 1))


def row_blocks(piece: Piece, block: int, dtype: torch.dtype) -> Iterator[MaskedBlock]:
    """A masked piece in blocks of rows, each with all keys that it sees."""
    rows, keys, lo, hi = piece.q1 - piece.q0, piece.k1 - piece.k0, piece.lo, piece.hi
    if min(rows, keys) <= block:
        yield MaskedBlock(0, rows, 0, keys, _additive(rows, keys, lo, hi, dtype))
        return
    mask = _additive(
        block, block + hi - lo, lo - hi, 0, dtype
    )  # of a block that no edge clips: its keys start at a - hi
    for a in range(0, rows, block):
        b, start = min(a + block, rows), a - hi
        first, last = max(0, start), min(keys, b - lo)
        yield MaskedBlock(a, b, first, last, mask[: b - a, first - start : last - start])


def key_blocks(piece: Piece, block: int, dtype: torch.dtype) -> Iterator[MaskedBlock]:
    """A masked piece in blocks of keys, each with all rows that see it."""
    rows, keys, lo, hi = piece.q1 - piece.q0, piece.k1 - piece.k0, piece.lo, piece.hi
    if min(rows, keys) <= block:
        yield MaskedBlock(0, rows, 0, keys, _additive(rows, keys, lo, hi, dtype))
        return
    mask = _additive(
        block + hi - lo, block, 0, hi - lo, dtype
    )  # of a block that no edge clips: its rows start at a + lo
    for a in range(0, keys, block):
        b, start = min(a + block, keys), a + lo
        first, last = max(0, start), min(rows, b + hi)
        yield MaskedBlock(first, last, a, b, mask[first - start : last - start, : b - a])


@lru_cache(maxsize=64)
def _additive(rows: int, keys: int, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
    """0 where ``lo <= i - j <= hi``, -inf elsewhere. Kept: all layers of a model ask for the same few, all small."""
    hidden = torch.full((rows, keys), -torch.inf, dtype=dtype)
    return hidden.triu_(1 - lo) if hi >= rows - 1 else hidden.triu(1 - lo) + hidden.tril(-1 - hi)
