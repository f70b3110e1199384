"""Ranks of unequal speed: tokens or work in proportion, and speeds that make no sense refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Balanced, Causal, Contiguous, Documents, DocumentZigzag, Full, Striped, Zigzag, parse_layout
from ringspun.core import tiles
from ringspun.core.cut import Cut
from ringspun.core.partition import Partition
from ringspun.errors import LayoutError
from tests.core.test_layouts_of_documents import long_tailed, packs

KINDS = (Contiguous, Zigzag, DocumentZigzag, Balanced)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
speeds = st.lists(st.floats(1e-3, 1e3) | st.sampled_from((1, 2.0, 1e-300, 1e300)), min_size=1, max_size=17)


def work(partition, mask):
    """Pairs of each rank, all steps together."""
    regions = mask.regions(partition.seq_len, partition.seq_len)
    return np.array(
        [
            tiles.count_pairs(tiles.build(Cut(partition, partition, regions), rank)[0]).sum()
            for rank in range(partition.ring_size)
        ]
    )


@given(packs(), speeds, st.sampled_from(KINDS))
def test_every_position_exactly_once(pack, given_speeds, kind):
    length, docs = pack
    partition = Partition(length, len(given_speeds), kind(speeds=given_speeds), docs)
    np.testing.assert_array_equal(np.sort(partition.order()), np.arange(length))


@given(st.integers(0, 100_000), speeds)
def test_contiguous_and_zigzag_hold_their_share_of_tokens(length, given_speeds):
    share = np.array(given_speeds) / max(given_speeds)
    share = share / share.sum() * length
    for kind, chunks in ((Contiguous, 1), (Zigzag, 2)):
        tokens = Partition(length, len(given_speeds), kind(speeds=given_speeds)).tokens
        assert (abs(tokens - share) < chunks + 1e-3).all()


@given(st.integers(0, 3000), speeds)
def test_causal_work_of_zigzag_is_in_proportion(length, given_speeds):
    """Exactly so but for rounding, which moves each edge by less than a token."""
    partition = Partition(length, len(given_speeds), Zigzag(speeds=given_speeds))
    share = np.array(given_speeds) / max(given_speeds)
    fair = share / share.sum() * length * (length + 1) / 2
    assert (abs(work(partition, Causal()) - fair) <= 2 * length + 1).all()


@given(st.lists(st.integers(60, 120), max_size=30), st.lists(st.floats(1, 5), min_size=1, max_size=6))
def test_many_cut_documents_leave_ranks_within_two_tokens_of_their_share(lengths, given_speeds):
    docs = Documents(lengths)
    share = np.array(given_speeds) / max(given_speeds)
    tokens = Partition(docs.end, len(given_speeds), DocumentZigzag(speeds=given_speeds), docs).tokens
    assert (abs(tokens - share / share.sum() * docs.end) < 2 + 1e-3).all()


@given(st.integers(1 << 30, 1 << 46), speeds, st.sampled_from(KINDS))
def test_lengths_beyond_any_float_are_cut_in_proportion(length, given_speeds, kind):
    share = np.array(given_speeds) / max(given_speeds)
    tokens = Partition(length, len(given_speeds), kind(speeds=given_speeds)).tokens
    np.testing.assert_allclose(tokens / length, share / share.sum(), atol=1e-7)


def test_a_document_that_stays_whole_goes_to_the_fast_rank():
    for kind in (DocumentZigzag, Balanced):
        assert Partition(3, 2, kind(speeds=[1, 9]), Documents([3])).tokens.tolist() == [0, 3]


def test_balanced_judges_unequal_ranks_by_all_steps_together():
    """So that more documents may stay whole than where every step is judged."""
    for seed in range(4):
        docs = long_tailed(seed)
        even, uneven = (len(layout.deal(docs.end, 4, docs)) for layout in (Balanced(), Balanced(speeds=[2, 2, 2, 3])))
        assert uneven < even


@pytest.mark.parametrize("seed", range(8))
def test_work_is_in_proportion(seed):
    docs, rng = long_tailed(seed), np.random.default_rng(seed)
    some = tuple(rng.uniform(0.3, 3.0, rng.integers(2, 17)))
    share = np.array(some) / sum(some)
    for kind, mask in ((Contiguous, Full()), (Zigzag, Causal()), (DocumentZigzag, docs), (Balanced, docs)):
        partition = Partition(docs.end, len(some), kind(speeds=some), docs)
        done = work(partition, mask & Causal() if mask is docs else mask)
        np.testing.assert_allclose(done / done.sum(), share, rtol=0.05)
        assert (partition.tokens / docs.end <= share * 1.05).all()


@given(packs(), st.integers(1, 17), st.floats(1e-300, 1e300), st.sampled_from(KINDS))
def test_equal_speeds_deal_as_none_do(pack, size, speed, kind):
    length, docs = pack
    np.testing.assert_array_equal(
        Partition(length, size, kind(speeds=[speed] * size), docs).runs, Partition(length, size, kind(), docs).runs
    )


@given(packs(), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=17), st.integers(-40, 40), st.sampled_from(KINDS))
def test_only_ratios_matter(pack, given_speeds, exponent, kind):
    length, docs = pack
    scaled = [s * 2.0**exponent for s in given_speeds]
    np.testing.assert_array_equal(
        Partition(length, len(scaled), kind(speeds=given_speeds), docs).runs,
        Partition(length, len(scaled), kind(speeds=scaled), docs).runs,
    )


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        (Contiguous(speeds=[1, 3]), [[0, 1], [2, 3, 4, 5, 6, 7]]),
        (Zigzag(speeds=[1, 3]), [[0, 7], [1, 2, 3, 4, 5, 6]]),
        (Contiguous(speeds=[1e-300, 3]), [[], [0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
    ids=str,
)
def test_speeds_drawn(layout, held):
    assert [Partition(8, 2, layout).positions(r).tolist() for r in range(2)] == held


@given(speeds, st.sampled_from(KINDS))
def test_strings_parse_back(given_speeds, kind):
    layout = kind(speeds=given_speeds)
    assert parse_layout(str(layout)) == layout and hash(parse_layout(str(layout))) == hash(layout)
    assert str(layout) != str(kind(speeds=[*given_speeds, 1.0])) != str(kind()) == kind.__name__.lower()


def test_speeds_are_a_tuple_of_floats():
    for given_speeds in ([1, 2], (1.0, 2.0), np.array([1, 2]), [np.float32(1), np.int64(2)]):
        layout = Zigzag(speeds=given_speeds)
        assert layout.speeds == (1.0, 2.0) and [type(s) for s in layout.speeds] == [float, float]
        assert str(layout) == "zigzag(speeds=[1.0, 2.0])"


@each_kind
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([1, 0], r"speeds must be positive finite numbers; got 0\."),
        ([1, -2.5], r"speeds must be positive finite numbers; got -2\.5\."),
        ([1, float("nan")], r"speeds must be positive finite numbers; got nan\."),
        ([float("inf"), 1], r"speeds must be positive finite numbers; got inf\."),
        ([10**400, 1], r"speeds must be positive finite numbers; got 1000"),
        ([1, True], r"speeds must be positive finite numbers; got True\."),
        ([1, "2"], r"speeds must be positive finite numbers; got '2'\."),
        ([[1, 2]], r"speeds must be "),
        ("12", r"speeds must be a sequence of numbers, one per rank; got '12'\."),
        (2.0, r"speeds must be a sequence of numbers, one per rank; got 2\.0\."),
        (np.float64(2), r"speeds must be a sequence of numbers, one per rank; got "),
    ],
)
def test_speeds_that_make_no_sense_are_refused(kind, bad, words):
    with pytest.raises(LayoutError, match=rf"^{kind.__name__} {words}"):
        kind(speeds=bad)


@each_kind
def test_there_is_one_speed_per_rank(kind):
    with pytest.raises(LayoutError, match=rf"^{kind.__name__} speeds must be one per rank; got 3 speeds for 2 ranks\."):
        Partition(8, 2, kind(speeds=[1, 2, 3]))
    with pytest.raises(LayoutError, match=r"got 0 speeds for 2 ranks\."):
        Partition(8, 2, kind(speeds=[]))


def test_striped_has_no_speeds():
    with pytest.raises(TypeError, match="speeds"):
        Striped(speeds=[1, 2])
    with pytest.raises(LayoutError, match=r"striped: .*speeds"):
        parse_layout("striped(speeds=[1, 2])")
