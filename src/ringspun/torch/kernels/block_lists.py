"""Which tiles of a step each block of rows meets: what a device kernel with one program per block has to know.

Programs of one launch must not write to the same rows, and tiles may share rows (a window and anchors, say). So rows
are cut into blocks, and each block goes through all its tiles by itself, in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core import tiles as tl

FAR = 1 << 30
"""Bounds of a band beyond any local length, and small enough for sums in int32."""


class BlockList(NamedTuple):
    """The tiles of each block of `size` rows. Block n is rows ``[n * size, (n + 1) * size)``, wherever tiles begin: so
    a row lies in its block alike whatever a step's tiles are.

    Args:
        first, last: hull of the rows that see something. tiles: ``[n, 8]``, tightened, bounds within `FAR`.
        blocks: numbers of the blocks of the hull, the one with most to do first. offsets: ``[len(blocks) + 1]``, of
            each block in `order`. order: tiles of the blocks, one block after the other, ascending in each.
    """

    first: int
    last: int
    tiles: NDArray[np.int64]
    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    order: NDArray[np.int64]

    def packed(self) -> tuple[NDArray[np.int32], list[int]]:
        """tiles, blocks, offsets and order in one array, to be copied at once; and the length of each."""
        parts = [x.astype(np.int32).ravel() for x in self[2:]]
        return np.concatenate(parts), [len(x) for x in parts]


def block_list(tiles: tl.Tiles, size: int) -> BlockList | None:
    """The tiles of each block of query rows; of key rows where `tiles` are turned. None: there is no pair."""
    tiles = tiles.copy()
    not_empty = rg.tighten_rows(tiles[:, tl.REGION])  # in place: the slice is a view
    tiles = tiles[not_empty]
    if not len(tiles):
        return None
    q0, q1 = tiles[:, tl.Q0], tiles[:, tl.Q1]
    first, last = int(q0.min()), int(q1.max())
    begin, count = first // size, -(-last // size) - first // size
    each = -(-q1 // size) - q0 // size
    which = np.repeat(np.arange(len(tiles)), each)
    block = np.arange(len(which)) - np.repeat(np.cumsum(each) - each, each) + (q0 // size)[which]
    order = np.argsort(block, kind="stable")
    which, block = which[order], block[order]
    work = np.bincount(block - begin, _keys(tiles[which], block * size, size), minlength=count)
    met = np.bincount(block - begin, minlength=count)
    heavy = np.argsort(-work, kind="stable")
    starts = np.cumsum(met) - met
    taken = np.repeat(starts[heavy] - (np.cumsum(met[heavy]) - met[heavy]), met[heavy]) + np.arange(len(which))
    bounds = slice(tl.LO, tl.HI + 1)
    tiles[:, bounds] = np.clip(tiles[:, bounds], -FAR, FAR)
    return BlockList(first, last, tiles, begin + heavy, np.append(0, np.cumsum(met[heavy])), which[taken])


def _keys(tiles: tl.Tiles, start: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Keys that some row of a block sees, per tile and block."""
    a, b = np.maximum(start, tiles[:, tl.Q0]), np.minimum(start + size, tiles[:, tl.Q1])
    first, last = np.maximum(tiles[:, tl.K0], a - tiles[:, tl.HI]), np.minimum(tiles[:, tl.K1], b - tiles[:, tl.LO])
    return last - first
