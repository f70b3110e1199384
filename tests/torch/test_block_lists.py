"""Block lists: each row of each tile is in one block's list, once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringspun.core import regions as rg
from ringspun.core import tiles as tl
from ringspun.torch.kernels.block_lists import FAR, block_list

LENGTH = 24


@st.composite
def tables(draw):
    """A few tiles within `LENGTH` x `LENGTH`, empty ones among them."""
    edges = st.lists(st.integers(0, LENGTH), min_size=2, max_size=2).map(sorted)
    bound = st.integers(-LENGTH, LENGTH)
    rows = []
    for _ in range(draw(st.integers(0, 4))):
        lo, hi = draw(bound | st.just(-rg.UNBOUNDED)), draw(bound | st.just(rg.UNBOUNDED))
        rows.append([0, draw(st.sampled_from((-1, 1))), *draw(edges), *draw(edges), lo, hi])
    return np.array(rows, np.int64).reshape(-1, 8)


def rows_seen(tiles: tl.Tiles) -> np.ndarray:
    """Which rows of which tile see a key."""
    each = [rg.as_array(tile[None, tl.REGION], LENGTH, LENGTH).any(1) for tile in tiles]
    return np.array(each).reshape(-1, LENGTH)


@given(tables(), st.sampled_from((1, 4, 16, 32)))
def test_every_row_of_every_tile_is_met_once(tiles, size):
    seen, found = rows_seen(tiles), block_list(tiles.copy(), size)
    if found is None:
        assert not seen.any()
        return
    rows = np.flatnonzero(seen.any(0))
    assert (found.first, found.last) == (rows[0], rows[-1] + 1)
    assert sorted(found.blocks) == list(range(found.first // size, -(-found.last // size)))
    met = np.zeros((len(found.tiles), LENGTH), int)
    for n, block in enumerate(found.blocks):
        mine = found.order[found.offsets[n] : found.offsets[n + 1]]
        assert np.all(np.diff(mine) > 0)  # in the tiles' order: sums are made alike wherever a block lies
        met[mine, block * size : (block + 1) * size] += 1
    kept = rows_seen(found.tiles)
    assert np.array_equal(kept, seen[seen.any(1)]) and np.all(met[kept] == 1)


@given(tables(), st.sampled_from((4, 16)))
def test_the_heaviest_block_comes_first(tiles, size):
    """Blocks start in this order: one with much to do that starts last would keep a device waiting."""
    found = block_list(tiles, size)
    if found is not None:
        work = [
            sum(
                rg.as_array(found.tiles[t][None, tl.REGION], LENGTH, LENGTH)[b * size : (b + 1) * size].any(0).sum()
                for t in found.order[found.offsets[n] : found.offsets[n + 1]]
            )
            for n, b in enumerate(found.blocks)
        ]
        assert work == sorted(work, reverse=True)


def test_what_is_copied_to_a_device_fits_32_bits():
    wide = np.array([[0, -1, 0, 5, 0, 9, -rg.UNBOUNDED, rg.UNBOUNDED]])
    found = block_list(wide, 4)
    packed, sizes = found.packed()
    assert packed.dtype == np.int32 and sizes == [8, 2, 3, 2] and abs(packed).max() <= FAR
    assert packed[:8].tolist() == [0, -1, 0, 5, 0, 9, -8, 4]  # tightened: a band no wider than its rectangle
