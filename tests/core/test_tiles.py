"""Tiles: every allowed pair is computed once, by the rank that holds the query, at the step that holds the key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ringspun import (
    Anchors,
    Band,
    Blocks,
    Causal,
    Chunks,
    Contiguous,
    Documents,
    Full,
    Layout,
    Prefix,
    Striped,
    Window,
    Zigzag,
)
from ringspun.core import cut, needs
from ringspun.core import regions as rg
from ringspun.core import tiles as tl
from ringspun.core.cut import Cut
from ringspun.core.geometry import Geometry
from ringspun.core.partition import LONGEST, Partition
from ringspun.core.route import Ring
from ringspun.core.route.base import StepColumn
from ringspun.errors import PlanError, RingspunWarning
from tests.core import strategies
from tests.core.strategies import MixedSteps, Scattered

LENGTH = 32


def times_computed(queries, keys, tiles_by_rank, on_their_way=None):
    """How often each global pair is in a tile: ``tiles_by_rank`` yields (rank, source, tile).

    `on_their_way` gives the rows of a block that is not the rank's own; without it blocks travel whole.
    """
    times = np.zeros((queries.seq_len, keys.seq_len), int)
    for rank, source, (b0, b1, q0, q1, k0, k1, lo, hi) in tiles_by_rank:
        assert (b0, b1) == (0, -1)
        rows = slice(None) if on_their_way is None or source == rank else on_their_way(source)
        q, k = queries.positions(rank)[q0:q1], keys.positions(source)[rows][k0:k1]
        assert len(q) == q1 - q0 > 0 and len(k) == k1 - k0 > 0, "a tile reaches beyond the rows of its rank"
        behind = np.arange(q0, q1)[:, None] - np.arange(k0, k1)[None, :]
        times[np.ix_(q, k)] += (lo <= behind) & (behind <= hi)
    return times


def built(queries, keys, regions):
    for rank in range(queries.ring_size):
        tiles, source = tl.build(Cut(queries, keys, regions), rank)
        np.testing.assert_array_equal(np.lexsort((tiles[:, tl.K0], tiles[:, tl.Q0], source)), np.arange(len(tiles)))
        yield from ((rank, s, tile) for s, tile in zip(source, tiles, strict=True))


@given(strategies.plans(LENGTH))
def test_every_allowed_pair_is_computed_exactly_once_at_the_right_step(plan):
    mask, length, size, layout = plan
    geometry = Geometry(size, tuple(range(size)), layout, Ring())
    partition = geometry.sides(length, mask=mask).queries
    schedules = geometry.schedule(mask, length)
    for direction in ("forward", "backward"):
        passes = [getattr(s, direction) for s in schedules]
        tiles = [
            (rank, one.steps[step, StepColumn.SOURCE], tile)
            for rank, one in enumerate(passes)
            for step in range(len(one))
            for tile in one.tiles_of(step)
        ]
        computed = times_computed(partition, partition, tiles, schedules[0].travelling_rows)
        np.testing.assert_array_equal(computed, mask.as_array(length))
        assert sum(int(one.pairs.sum()) for one in passes) == mask.as_array(length).sum()
        assert all(tl.count_pairs(one.tiles).all() for one in passes), "a tile without pairs"


@given(strategies.plans(LENGTH))
def test_rows_that_travel_are_those_that_another_rank_needs(plan):
    mask, length, size, layout = plan
    partition = Partition(length, size, layout)
    dense, held = mask.as_array(length), [partition.positions(r) for r in range(size)]
    travelling = needs.travelling(Cut(partition, partition, mask.regions(length, length)))
    for owner, mine in enumerate(held):
        others = np.concatenate([np.zeros(0, int), *(held[r] for r in range(size) if r != owner)])
        wanted = dense[np.ix_(others, mine)].any(axis=0)
        rows = travelling[travelling[:, needs.OWNER] == owner, needs.ROW0 :]
        assert [i for a, b in rows for i in range(a, b)] == np.flatnonzero(wanted).tolist()
        assert (rows[1:, 0] > rows[:-1, 1]).all(), "neighbouring rows are one range"


def test_rows_that_travel_on_two_sides_and_for_several_masks():
    queries, keys = Partition(9, 3, Zigzag()), Partition(20, 3, Contiguous())
    tables = [needs.travelling(Cut(queries, keys, rg.rectangle(0, 9, k, k + 2))) for k in (1, 3, 12)]
    assert needs.unite(tables).tolist() == [[0, 1, 5], [1, 5, 7]]
    assert needs.count(needs.unite(tables), 3).tolist() == [4, 2, 0]
    alone = needs.travelling(Cut(Partition(9, 1, Zigzag()), Partition(20, 1, Zigzag()), rg.rectangle(0, 9, 0, 20)))
    assert len(alone) == 0


@pytest.mark.parametrize("size", [2, 3])
def test_rows_that_travel_of_the_longest_sequence(size):
    """Ranks and positions are ordered as one number, which the last position must not carry over to the next rank."""
    partition = Partition(LONGEST, size, Contiguous())
    travelling = needs.travelling(Cut(partition, partition, Full().regions(LONGEST, LONGEST)))
    np.testing.assert_array_equal(travelling, needs.whole(partition.tokens))


@given(strategies.plans(LENGTH))
def test_meetings_are_the_ranks_that_share_a_pair(plan):
    mask, length, size, layout = plan
    partition = Partition(length, size, layout)
    met = np.zeros((size, size), bool)
    met[tuple(needs.meetings(Cut(partition, partition, mask.regions(length, length))).T)] = True
    dense, held = mask.as_array(length), [partition.positions(r) for r in range(size)]
    np.testing.assert_array_equal(met, [[dense[np.ix_(a, b)].any() for b in held] for a in held])


@st.composite
def two_lengths(draw):
    q_len, k_len = draw(st.integers(0, LENGTH)), draw(st.integers(0, LENGTH))
    size = draw(st.integers(1, 5))
    one_step = st.sampled_from((Contiguous(), Zigzag())) | st.builds(Scattered, st.integers(0, 99))
    mask = draw(strategies.masks(min(q_len, k_len)))
    return mask, Partition(q_len, size, draw(one_step)), Partition(k_len, size, draw(one_step))


@given(two_lengths())
def test_queries_and_keys_may_be_dealt_differently(case):
    mask, queries, keys = case
    regions = mask.regions(queries.seq_len, keys.seq_len)
    times = times_computed(queries, keys, built(queries, keys, regions))
    np.testing.assert_array_equal(times, mask.as_array(queries.seq_len, keys.seq_len))
    met = set(map(tuple, needs.meetings(Cut(queries, keys, regions)).tolist()))
    assert met == {(r, s) for r, s, _ in built(queries, keys, regions)}


def test_many_short_documents_on_few_ranks():
    """Far more regions than runs: `meetings` counts by edges instead of listing."""
    docs = Documents([1, 2] * 40)
    for layout in (Contiguous(), Zigzag(), Scattered(5)):
        partition = Partition(docs.end, 3, layout)
        regions = (Causal() & docs).regions(docs.end, docs.end)
        times = times_computed(partition, partition, built(partition, partition, regions))
        np.testing.assert_array_equal(times, (Causal() & docs).as_array(docs.end))
        met = set(map(tuple, needs.meetings(Cut(partition, partition, regions)).tolist()))
        assert met == {(r, s) for r, s, _ in built(partition, partition, regions)}


# ---- steps ----


@given(strategies.masks(12), st.integers(1, 4))
@example(Documents([2], starts=[1]) & Band(0, 5), 3)  # query 1 (step 4) sees key 2 (step 2), and no pair the other way
def test_runs_that_meet_without_a_common_step_are_refused_and_never_lost(mask, size):
    """A layout of mixed steps either computes exactly what the mask says, or makes no plan at all."""
    partition = Partition(12, size, MixedSteps())
    regions = mask.regions(12, 12)
    try:
        needs.meetings(Cut(partition, partition, regions))
    except PlanError:
        with pytest.raises(PlanError):
            list(built(partition, partition, regions))
        return
    times = times_computed(partition, partition, built(partition, partition, regions))
    np.testing.assert_array_equal(times, mask.as_array(12))


def test_mixed_steps_that_never_meet_run():
    mask = Documents([1] * 12)
    partition = Partition(12, 3, MixedSteps())
    times = times_computed(partition, partition, built(partition, partition, mask.regions(12, 12)))
    np.testing.assert_array_equal(times, np.eye(12))


def test_differing_steps_name_steps_and_layouts():
    queries, keys = Partition(12, 3, Striped()), Partition(12, 3, Contiguous())
    for call in (
        lambda: tl.build(Cut(queries, keys, Causal().regions(12, 12)), 0),
        lambda: needs.meetings(Cut(queries, keys, Causal().regions(12, 12))),
    ):
        with pytest.raises(
            PlanError,
            match=r"query and key runs that meet must share a step; got steps 3 and 1 \(striped and contiguous\)\. "
            r"Use one layout for both\.",
        ):
            call()


@dataclass(frozen=True)
class HalfStriped(Layout):
    """Neighbours on rank 0, and from position 4 on even positions on rank 1 and odd ones on rank 2."""

    def deal(self, seq_len, ring_size, documents):
        return np.array([[0, 0, 4, 1], [1, 4, seq_len, 2], [2, 5, seq_len, 2]])


def test_keys_with_steps_under_queries_without():
    """Single queries meet every step; that a region reaches a run with steps does not mean that it sees a key of it."""
    queries, keys = Partition(3, 3, Contiguous()), Partition(12, 3, HalfStriped())
    regions = Band(-4, 4).regions(3, 12)  # query i sees key i + 4
    of_keys, of_both = Cut(queries, keys, regions), Cut(queries, queries, regions)
    assert of_both.without_steps and not of_keys.without_steps
    assert set(map(tuple, needs.meetings(of_keys).tolist())) == {(0, 1), (1, 2), (2, 1)}
    assert needs.travelling(of_keys).tolist() == [[1, 0, 2], [2, 0, 1]]
    times = times_computed(queries, keys, built(queries, keys, regions))
    np.testing.assert_array_equal(times, Band(-4, 4).as_array(3, 12))
    regions = Band(4, -4).regions(12, 3)  # and the other way round: query i + 4 sees key i
    assert set(map(tuple, needs.meetings(Cut(keys, queries, regions)).tolist())) == {(1, 0), (2, 1), (1, 2)}
    times = times_computed(keys, queries, built(keys, queries, regions))
    np.testing.assert_array_equal(times, Band(4, -4).as_array(12, 3))


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_single_tokens_have_every_step(size):
    """Striped over more ranks than half the tokens leaves runs of one token; they share a step with all others."""
    for length in (size, size + 1, 2 * size - 1):
        partition = Partition(length, size, Striped())
        times = times_computed(partition, partition, built(partition, partition, Causal().regions(length, length)))
        np.testing.assert_array_equal(times, Causal().as_array(length))


@given(strategies.masks(300, leaves=3), st.integers(1, 3), st.sampled_from((128, 131)))
def test_block_stripes(mask, size, block):
    partition = Partition(300, size, Striped(block))
    regions = mask.regions(300, 300)
    assume(len(regions) < 40)
    times = times_computed(partition, partition, built(partition, partition, regions))
    np.testing.assert_array_equal(times, mask.as_array(300))


# ---- how many ----


def counts(mask, layout, size, length):
    """Tiles and pairs by rank and step, ``[R, R]`` each, before hops that nobody needs are cut."""
    partition = Partition(length, size, layout)
    tiles, pairs = np.zeros((size, size), int), np.zeros((size, size), int)
    for rank, source, tile in built(partition, partition, mask.regions(length, length)):
        step = (rank - source) % size
        tiles[rank, step] += 1
        pairs[rank, step] += tl.count_pairs(tile[None])[0]
    return tiles, pairs


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped(), Striped(128)], ids=str)
@pytest.mark.parametrize(("size", "length"), [(1, 5), (4, 64), (4, 61), (8, 1029), (5, 3)])
def test_a_full_mask_is_one_tile_a_block(layout, size, length):
    """Coalescing joins chunks and stripes again: rectangles that touch are one."""
    held = Partition(length, size, layout).tokens > 0
    tiles, _ = counts(Full(), layout, size, length)
    for rank in range(size):
        for step in range(size):
            assert tiles[rank, step] == (held[rank] and held[(rank - step) % size])


def test_contiguous_causal_on_8_ranks_skips_28_of_64_blocks():
    tiles, _ = counts(Causal(), Contiguous(), 8, 8 * 16)
    assert tiles.sum(axis=1).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (tiles == 0).sum() == 28


@pytest.mark.parametrize("layout", [Zigzag(), Striped()], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_and_striped_give_every_rank_the_same_work_at_every_step(layout, size):
    local = 16
    tiles, pairs = counts(Causal(), layout, size, local * size)
    assert (tiles == 1).all(), "equal tile counts at every step, and one tile does"
    assert (np.ptp(pairs, axis=0) <= local).all()
    assert pairs.sum() == local * size * (local * size + 1) // 2


def test_a_causal_window_stays_one_band_per_block():
    """Bands stay bands as long as a kernel can use them."""
    tiles, _ = counts(Window(20), Contiguous(), 4, 64)
    assert tiles.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]


def test_documents_make_a_tile_each_and_one_more_where_they_are_cut():
    docs = Documents([10, 6, 20, 28])
    tiles, _ = counts(Causal() & docs, Contiguous(), 4, 64)
    assert tiles.tolist() == [[2, 0, 0, 0], [1, 0, 0, 0], [2, 1, 0, 0], [1, 1, 0, 0]]


def test_tiles_are_in_order_of_their_rows():
    partition = Partition(6, 1, Contiguous())
    tiles, _ = tl.build(Cut(partition, partition, Blocks([[2], [0], [1]], size=2).regions(6, 6)), 0)
    assert tiles[:, [tl.Q0, tl.K0]].tolist() == [[0, 4], [2, 0], [4, 2]]


def test_coalescing_keeps_what_cannot_be_joined():
    """Touching corner to corner, or differing in batch rows, is not touching."""
    one, two = [0, -1, 0, 2, 0, 2, -1, 1], [0, -1, 2, 4, 2, 4, -1, 1]
    for a, b, joined in (
        (one, two, False),
        ([0, -1, 0, 2, 0, 2, -1, 1], [0, -1, 0, 2, 2, 4, -3, -1], True),
        ([0, -1, 0, 2, 0, 2, -1, 1], [0, -1, 2, 4, 0, 2, 1, 3], True),
        ([0, 1, 0, 2, 0, 2, -1, 1], [1, 2, 0, 2, 2, 4, -3, -1], False),
    ):
        table, source = tl._coalesce(np.array([b, a], np.int64), np.zeros(2, np.int64))
        assert (len(table) == 1) == joined and len(source) == len(table)
        assert tl.count_pairs(table).sum() == 8
    apart, source = tl._coalesce(np.array([one, one], np.int64), np.array([1, 0]))
    assert len(apart) == 2 and source.tolist() == [0, 1], "tiles of different blocks are never joined"


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_work_in_chunks_is_the_same_work(monkeypatch, chunk):
    mask, length = Causal() & (Window(9) | Anchors(2)) | Chunks(5), 60
    for layout in (Zigzag(), Striped(), Scattered(3, 2)):
        partition, regions = Partition(length, 4, layout), mask.regions(length, length)
        whole = [tl.build(Cut(partition, partition, regions), r) for r in range(4)]
        met = set(map(tuple, needs.meetings(Cut(partition, partition, regions)).tolist()))
        with monkeypatch.context() as patch:
            patch.setattr(cut, "CHUNK", chunk)
            for rank, (tiles, source) in enumerate(whole):
                again, its_source = tl.build(Cut(partition, partition, regions), rank)
                np.testing.assert_array_equal(again, tiles)
                np.testing.assert_array_equal(its_source, source)
            assert set(map(tuple, needs.meetings(Cut(partition, partition, regions)).tolist())) == met


@given(st.lists(st.integers(0, 12), max_size=20), st.integers(1, 15))
def test_parts_of_work_are_all_of_it_and_bounded(sizes, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "CHUNK", chunk)
        parts = cut._parts(np.array(sizes, np.int64))
    assert [i for part in parts for i in range(len(sizes))[part]] == list(range(len(sizes)))
    assert all(sum(sizes[part][:-1]) <= chunk for part in parts), "a part goes on beyond its bound"


@pytest.mark.parametrize(("row_gap", "column_gap", "left"), [(0, 0, 1), (1, 0, 4), (0, 1, 5), (1, 1, 20)])
def test_coalescing_goes_on_until_nothing_joins(row_gap, column_gap, left):
    """4 x 5 rectangles of 3 x 2 pairs, in any order, with or without a gap between rows or between columns."""
    rows = []
    for i, j in np.random.default_rng(1).permutation(list(np.ndindex(4, 5))):
        q, k = i * (3 + row_gap), j * (2 + column_gap)
        rows.append([0, -1, q, q + 3, k, k + 2, q - k - 1, q + 2 - k])
    table, source = tl._coalesce(np.array(rows, np.int64), np.zeros(20, np.int64))
    assert len(table) == len(source) == left
    assert tl.count_pairs(table).sum() == 20 * 6


def test_too_many_tiles_warn_with_their_number_and_stay_exact(monkeypatch):
    """Beyond so many they are no longer coalesced, but they are the same pairs in the same order."""
    monkeypatch.setattr(tl, "MANY_TILES", 63)
    docs = Documents([4] * 16)
    striped, zigzag = Partition(64, 4, Striped()), Partition(64, 4, Zigzag())
    for rank in range(4):
        with pytest.warns(
            RingspunWarning,
            match=rf"striped under this mask makes up to 64 tiles on ring rank {rank}; a layout that keeps",
        ):
            tiles, source = tl.build(Cut(striped, striped, docs.regions(64, 64)), rank)
        np.testing.assert_array_equal(np.lexsort((tiles[:, tl.K0], tiles[:, tl.Q0], source)), np.arange(len(tiles)))
    with pytest.warns(RingspunWarning):
        times = times_computed(striped, striped, built(striped, striped, docs.regions(64, 64)))
    np.testing.assert_array_equal(times, docs.as_array(64))
    tl.build(Cut(zigzag, zigzag, docs.regions(64, 64)), 2)  # warnings are errors here
    monkeypatch.setattr(tl, "MANY_TILES", 64)
    tl.build(Cut(striped, striped, docs.regions(64, 64)), 0)  # as many as that are not too many


def test_too_many_meetings_of_stripes_are_taken_for_all(monkeypatch):
    """Nobody misses a block that it needs; some get one that they do not."""
    docs = Documents([2] * 16)
    partition, regions = Partition(32, 4, Striped()), docs.regions(32, 32)
    exact = set(map(tuple, needs.meetings(Cut(partition, partition, regions)).tolist()))
    assert len(exact) < 16
    travelling = needs.travelling(Cut(partition, partition, regions))
    with monkeypatch.context() as patch:
        patch.setattr(needs, "MANY_MEETINGS", Cut(partition, partition, regions).meetings())
        assert set(map(tuple, needs.meetings(Cut(partition, partition, regions)).tolist())) == exact
        np.testing.assert_array_equal(needs.travelling(Cut(partition, partition, regions)), travelling)
    with monkeypatch.context() as patch:
        patch.setattr(needs, "MANY_MEETINGS", 10)
        np.testing.assert_array_equal(
            needs.travelling(Cut(partition, partition, regions)), needs.whole(partition.tokens)
        )
        assert sorted(map(tuple, needs.meetings(Cut(partition, partition, regions)).tolist())) == list(np.ndindex(4, 4))
        schedules = Geometry(4, (0, 1, 2, 3), Striped(), Ring()).schedule(docs, 32)
        assert sum(int(s.forward.pairs.sum()) for s in schedules) == docs.as_array(32).sum()
        assert all(len(s.forward) == 4 for s in schedules)


def test_M19_prefix_and_documents_of_odd_lengths_run_as_they_are():
    """Packed path corrupt because cu_seqlens were divided by the ring size."""
    for lengths in ([7, 5, 12], [1, 1, 1, 21], [3, 5], [5, 4, 7]):
        docs = Documents(lengths)
        for size in (2, 4, 8):
            for layout in (Contiguous(), Zigzag(), Striped()):
                partition = Partition(docs.end, size, layout)
                for mask in (docs, Causal() & docs, docs & (Causal() | Prefix([1] * len(lengths), docs))):
                    regions = mask.regions(docs.end, docs.end)
                    times = times_computed(partition, partition, built(partition, partition, regions))
                    np.testing.assert_array_equal(times, mask.as_array(docs.end))
