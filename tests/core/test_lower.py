"""Lowering: band tiles become rectangles of three kinds that hold the same pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun.core import regions as rg
from ringspun.core import tiles as tl
from ringspun.core.cut import Cut
from ringspun.core.partition import Partition
from tests.core import strategies

LENGTH = 32


@st.composite
def band_tiles(draw):
    q0, k0 = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    q1, k1 = q0 + draw(st.integers(0, 20)), k0 + draw(st.integers(0, 20))
    bound = st.integers(-45, 45)
    lo, hi = draw(bound | st.just(-rg.UNBOUNDED)), draw(bound | st.just(rg.UNBOUNDED))
    return np.array([draw(st.integers(0, 3)), draw(st.integers(-1, 5)), q0, q1, k0, k1, lo, hi], np.int64)


def assert_lowered(tiles, size):
    pieces, kinds = tl.lower(tiles)
    assert set(kinds.tolist()) <= set(tl.Kind)
    times = np.zeros((size, size), int)
    for (_, _, q0, q1, k0, k1, lo, hi), kind in zip(pieces, kinds, strict=True):
        assert 0 <= q0 < q1 <= size and 0 <= k0 < k1 <= size
        i, j = np.arange(q0, q1)[:, None], np.arange(k0, k1)[None, :]
        allowed = {
            tl.Kind.FULL: np.ones((q1 - q0, k1 - k0), bool),
            tl.Kind.CAUSAL: i - q0 >= j - k0,
            tl.Kind.ANTICAUSAL: (q1 - 1) - i >= (k1 - 1) - j,
        }[tl.Kind(kind)]
        assert allowed.any(axis=1).all(), "a row of a piece without a key"
        np.testing.assert_array_equal((lo <= i - j) & (i - j <= hi), allowed, "the bounds are not the kind's")
        assert lo >= q0 - (k1 - 1) and hi <= (q1 - 1) - k0, "the bounds reach beyond the piece"
        times[q0:q1, k0:k1] += allowed
    np.testing.assert_array_equal(times, sum((rg.as_array(t[None, tl.REGION], size, size) for t in tiles), times * 0))
    return pieces, kinds


@given(band_tiles())
def test_lowered_tiles_are_three_kinds_and_the_same_pairs(tile):
    pieces, _ = assert_lowered(tile[None], 40)
    assert (pieces[:, [tl.B0, tl.B1]] == tile[[tl.B0, tl.B1]]).all()


@given(strategies.plans(LENGTH))
def test_lowered_plans_are_three_kinds_and_the_same_pairs(plan):
    mask, length, size, layout = plan
    partition = Partition(length, size, layout)
    for rank in range(size):
        tiles, source = tl.build(Cut(partition, partition, mask.regions(length, length)), rank)
        for owner in np.unique(source):
            assert_lowered(tiles[source == owner], LENGTH)


def test_every_small_tile_is_lowered_right():
    bounds = [*range(-4, 5), rg.UNBOUNDED]
    for q1, k1 in np.ndindex(5, 5):
        for lo in (-b for b in bounds):
            for hi in bounds:
                assert_lowered(one(q1, k1, lo, hi), 4)


def one(q1, k1, lo, hi):
    return np.array([[0, -1, 0, q1, 0, k1, lo, hi]], np.int64)


@pytest.mark.parametrize(
    ("tile", "kinds"),
    [
        (one(6, 6, -9, 9), [tl.Kind.FULL]),
        (one(6, 6, 0, 9), [tl.Kind.CAUSAL]),
        (one(6, 9, 0, 9), [tl.Kind.CAUSAL]),
        (one(6, 6, -9, 0), [tl.Kind.ANTICAUSAL]),
        (one(6, 9, -3, 9), [tl.Kind.FULL, tl.Kind.CAUSAL]),
        (one(6, 9, -9, 2), [tl.Kind.FULL, tl.Kind.ANTICAUSAL]),
        (one(4, 4, 1, 2), [tl.Kind.CAUSAL, tl.Kind.FULL]),
        (one(4, 4, 9, 9), []),
        (one(4, 4, 1, 0), []),
    ],
    ids=str,
)
def test_kinds_of_simple_tiles(tile, kinds):
    _, got = assert_lowered(tile, 9)
    assert got.tolist() == kinds


def test_a_window_lowers_to_few_pieces():
    """Blocks as high as the band is wide: about three pieces for each, whatever the length."""
    pieces, _ = tl.lower(one(1024, 1024, 0, 63))
    assert len(pieces) <= 3 * (1024 // 64)
    assert tl.count_pairs(pieces).sum() == 64 * 1024 - 63 * 64 // 2


def test_lower_of_nothing():
    pieces, kinds = tl.lower(np.zeros((0, 8), np.int64))
    assert pieces.shape == (0, 8) and kinds.shape == (0,)
