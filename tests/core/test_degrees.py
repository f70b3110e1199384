"""Two degrees: places on a grid of ranks, heads split evenly, shares cut into parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, Full, Striped, Zigzag
from ringspun.core.accounting import account, exchanged
from ringspun.core.choice_of_degrees import choose_degrees, of_ring, sent
from ringspun.core.degrees import Degrees, HeadSplit
from ringspun.core.geometry import Geometry
from ringspun.core.layout.in_parts import InParts
from ringspun.core.links import Link, Links
from ringspun.core.partition import Partition, Sides
from ringspun.core.route import Ring
from ringspun.core.ways import WANTED, taken
from ringspun.core.wire import Format, Side
from ringspun.errors import PlanError
from tests.core.strategies import layouts

degrees = st.builds(Degrees, st.integers(1, 5), st.integers(1, 5), st.sampled_from(["ulysses", "ring"]))


@given(degrees)
def test_every_rank_has_one_place(d):
    places = [d.place(rank) for rank in range(d.size)]
    assert [d.rank(*place) for place in places] == list(range(d.size))
    assert sorted(places) == [(r, u) for r in range(d.ring) for u in range(d.ulysses)]
    assert all(d.row(r)[u] == d.column(u)[r] == d.rank(r, u) for r, u in places)


def test_neighbours_are_those_of_the_inner_degree():
    assert Degrees(2, 3).row(1) == (3, 4, 5)
    assert Degrees(2, 3).column(1) == (1, 4)
    assert Degrees(2, 3, "ring").row(1) == (1, 3, 5)
    assert Degrees(2, 3, "ring").column(1) == (2, 3)


@st.composite
def splits(draw):
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 6))
    return HeadSplit(heads, kv_heads, draw(st.integers(1, heads)))


@given(splits())
def test_heads_are_split_evenly_and_find_their_keys(split):
    group, sizes, seen = split.heads // split.kv_heads, [], []
    for rank in range(split.degree):
        first, last = split.queries(rank)
        low, high = split.keys(rank)
        held = [low + head for head in split.held(rank)]
        assert set(held) == set(range(low, high))
        ratio, rest = divmod(last - first, len(held))
        assert rest == 0
        # query head i of a rank looks at KV head i // ratio of those that it holds: the one that it should
        assert [held[i // ratio] for i in range(last - first)] == [h // group for h in range(first, last)]
        sizes.append(last - first)
        seen += range(first, last)
    assert seen == list(range(split.heads))
    assert max(sizes) - min(sizes) <= 1
    assert split.shared == (sum(high - low for low, high in map(split.keys, range(split.degree))) > split.kv_heads)


def test_held_heads_by_hand():
    def held(*sizes):
        split = HeadSplit(*sizes)
        return [(split.keys(rank)[0], split.held(rank)) for rank in range(split.degree)]

    assert held(8, 2, 4) == [(0, (0,)), (0, (0,)), (1, (0,)), (1, (0,))]
    assert held(8, 8, 2) == [(0, (0, 1, 2, 3)), (4, (0, 1, 2, 3))]
    assert held(6, 3, 2) == [(0, (0, 0, 1)), (1, (0, 1, 1))]  # a cut group: one KV head per query head
    assert held(8, 1, 3) == [(0, (0,)), (0, (0,)), (0, (0,))]


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(PlanError, match="at most the number of query heads; got 4 and 3"):
        HeadSplit(3, 3, 4)


@given(layouts(), st.integers(0, 60), degrees)
def test_parts_of_a_row_are_the_ring_s_share_in_order(layout, seq_len, d):
    """And `Partition` itself checks that every token is dealt once."""
    parts, shares = Partition(seq_len, d.size, InParts(layout, d)), Partition(seq_len, d.ring, layout)
    for ring_rank in range(d.ring):
        cut = [parts.positions(rank) for rank in d.row(ring_rank)]
        assert np.array_equal(np.concatenate(cut), shares.positions(ring_rank))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
    assert Sides(parts).of_rings == Sides(shares)
    assert Sides(parts, Partition(9, d.size, InParts(Contiguous(), d))).of_rings.keys == Partition(
        9, d.ring, Contiguous()
    )


def test_a_stride_is_cut_where_its_steps_are():
    parts = Partition(11, 4, InParts(Striped(), Degrees(2, 2)))
    assert [parts.positions(r).tolist() for r in range(4)] == [[0, 2, 4], [6, 8, 10], [1, 3, 5], [7, 9]]
    assert str(parts.layout) == "striped in parts, ring 2 x ulysses 2, inner ulysses"


def test_parts_keep_what_their_layout_says():
    assert InParts(Zigzag(speeds=(1.0, 2.0)), Degrees(2, 2)).speeds == (1.0, 2.0)
    assert InParts(Striped(), Degrees(2, 2)).speeds is None


def test_a_geometry_of_two_degrees_deals_parts_and_schedules_rings():
    d = Degrees(2, 2)
    geometry, ring = Geometry(2, (0, 1), Zigzag(), Ring(), d), Geometry(2, (0, 1), Zigzag(), Ring())
    assert geometry.partition(12) == Partition(12, 4, InParts(Zigzag(), d))
    assert geometry.schedule(Causal(), 12) == ring.schedule(Causal(), 12)


def test_degrees_are_chosen_by_bytes():
    def costs(*sizes, **given):
        return [(d.ring, d.ulysses, cost) for d, cost in choose_degrees(*sizes, **given)]

    # MHA, bf16, 4 ranks. Exchange of 4: 3/4 of q, k, v, out and gradients, 8 x 32 heads x 2 bytes; ring of 4: 3 blocks
    # of 32 heads x 16 bytes, of which keys are 12 in backward; queries 8
    assert costs(4, 32, 32) == [(1, 4, 384.0), (2, 2, 768.0), (4, 1, 1536.0)]
    assert costs(4, 32, 32, backward="auto") == [(1, 4, 384.0), (2, 2, 640.0), (4, 1, 1152.0)]
    assert costs(4, 8, 1) == [(4, 1, 48.0), (2, 2, 72.0), (1, 4, 72.0)]  # one KV head: the ring sends less
    assert [d.ulysses for d, _ in choose_degrees(6, 4, 4)] == [2, 1]  # 3 and 6 do not divide 4 heads
    with pytest.raises(PlanError, match="heads must be H and K"):
        choose_degrees(4, 6, 4)


@given(splits(), st.integers(1, 4), st.sampled_from([2, 4]))
def test_the_choice_counts_what_accounting_counts(split, ring, itemsize):
    """The busiest rank's bytes in exchanges, where all hold as many tokens; framing aside."""
    degrees, rows, d = Degrees(ring, split.degree), 32, 64
    sides = Sides(Partition(rows * degrees.size, degrees.size, InParts(Contiguous(), degrees)))
    wire = Format(1, split.heads, split.kv_heads, d, d, "", itemsize, 4)
    counted = max(sum(exchanged(split, degrees, sides, rank, wire)) for rank in range(degrees.size))
    messages = 6 * (split.degree - 1)
    assert counted - 128 * messages == sent(split, degrees, itemsize)[1] * rows * d


@given(splits(), st.integers(1, 3), st.sampled_from([2, 4]))
def test_it_takes_the_way_of_a_ring_s_backward_that_calls_take(split, ring, itemsize):
    """The bytes of the busiest rank in its ring, less frames, lse and delta."""
    degrees, rows, d = Degrees(ring, split.degree), 16, 64
    schedules = Geometry(ring, tuple(range(ring)), Contiguous(), Ring()).schedule(Full(), ring * split.degree * rows)
    for backward in WANTED:
        counted = []
        for mine in range(split.degree):
            heads, kv_heads = len(range(*split.queries(mine))), len(split.held(mine))
            wire = Format(1, heads, kv_heads, d, d, "", itemsize, 4)
            one, back = schedules[0].forward, taken(schedules, wire, backward)[0].backward
            of_passes = account(one, wire, backward=False), account(back, wire, backward=True)
            small = 8 * heads * split.degree * rows * (ring - 1) if back.side == Side.QUERIES else 0
            counted.append(sum(a.total_sent_bytes - 128 * a.messages for a in of_passes) - small)
        assert max(counted) == sent(split, degrees, itemsize, backward)[0] * rows * d


def test_rings_of_a_hybrid_have_links_of_their_own():
    near, far = (Link((1 << 20,), (t,), (t,)) for t in (1e-4, 1e-3))
    links = Links(16, near, far, node=4)
    assert of_ring(Links(8, near), Degrees(4, 2)) == Links(4, near)
    assert of_ring(links, Degrees(8, 2)) == Links(8, near, far, node=2)
    assert of_ring(links, Degrees(4, 4)) == Links(4, far)
    assert of_ring(links, Degrees(4, 4, "ring")) == Links(4, near, far)  # a node holds the whole ring
    # heads are split inside a node alone; the ring of 4 between nodes costs more than the exchange inside
    assert {d.ulysses for d, _ in choose_degrees(16, 32, 32, links=links)} == {1, 2, 4}
    assert choose_degrees(16, 32, 32, links=links)[0][0] == Degrees(4, 4)
    assert choose_degrees(2, 4, 4, links=Links(2, near))[0][0] == Degrees(1, 2)
