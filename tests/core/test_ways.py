"""The backward pass in which queries travel: the ring of the turned problem, and when it is taken."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, Documents, Full, Window, Zigzag
from ringspun.core import regions as rg
from ringspun.core import tiles as tl
from ringspun.core import ways
from ringspun.core.accounting import account, memory
from ringspun.core.geometry import Geometry
from ringspun.core.partition import Partition, Sides
from ringspun.core.readings import of_route
from ringspun.core.route import AllGather, Bidirectional, Direct, DoubleRing, InOrder, Ring
from ringspun.core.route.base import BoundRoute, MessageColumn, StepColumn
from ringspun.core.schedule import compile_schedules, cuts_of
from ringspun.core.wire import Format, Payload, Side, buffer_bytes
from ringspun.errors import PlanError
from tests.core import strategies
from tests.core.ring_interpreter import play
from tests.core.strategies import Scattered

LENGTH = 32


def wire_of(heads, kv_heads, itemsize, size=64):
    return Format(1, heads, kv_heads, size, size, f"float{8 * itemsize}", itemsize, max(4, itemsize))


@st.composite
def plans(draw):
    """A mask over two sides of one ring, of lengths and layouts of their own, and a route."""
    size = draw(st.integers(1, 6))
    inner = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    route = draw(st.sampled_from([Ring(), Ring(draw(st.integers(1, 9))), Direct(), Bidirectional(), DoubleRing(inner)]))
    if draw(st.booleans()):
        length = draw(st.integers(0, LENGTH))
        return (
            draw(strategies.masks(length, leaves=3)),
            Sides(Partition(length, size, draw(strategies.layouts()))),
            route,
        )
    queries, keys, start = draw(st.integers(0, LENGTH)), draw(st.integers(0, LENGTH)), draw(st.integers(-9, LENGTH))
    one_step = st.sampled_from((Contiguous(), Zigzag())) | st.builds(Scattered, st.integers(0, 99))
    sides = Sides(Partition(queries, size, draw(one_step), None, start), Partition(keys, size, draw(one_step)))
    return draw(strategies.masks(keys, leaves=3)), sides, route


def compiled(plan):
    mask, sides, route = plan
    return compile_schedules(sides, mask, route, range(sides.keys.ring_size))


def dense_of(plan):
    mask, sides, _ = plan
    return mask.as_array(sides.queries.seq_len, sides.keys.seq_len, q_start=sides.queries.start)


@given(plans(), st.integers(0, 99))
def test_every_pair_is_computed_once_and_every_gradient_goes_home_once(plan, seed):
    _, sides, _ = plan
    size, dense, times = sides.keys.ring_size, dense_of(plan), np.zeros_like(dense_of(plan), int)
    turned, met = ways.turned(compiled(plan)), Counter()
    for one in turned:
        keys, back = sides.keys.indices(one.ring_rank), one.backward
        assert back.side == Side.QUERIES and (tl.count_pairs(back.tiles) > 0).all()
        for step in range(len(back)):
            block = int(back.steps[step, StepColumn.SOURCE])
            queries = sides.queries.indices(one.owner(block))[one.rows_of_tiles(block)]
            for tile in back.tiles_of(step):
                q, k = slice(*tile[[tl.Q0, tl.Q1]]), slice(*tile[[tl.K0, tl.K1]])
                seen = rg.as_array(tile[None, tl.REGION], len(queries), len(keys))
                assert len(queries[q]) == q.stop - q.start and len(keys[k]) == k.stop - k.start
                times[np.ix_(queries, keys)] += seen
            met.update({(block, one.ring_rank): 1} if len(back.tiles_of(step)) else {})
    np.testing.assert_array_equal(times, dense)
    computes = [{t for t in range(len(one.backward)) if len(one.backward.tiles_of(t))} for one in turned]
    owners = turned[0].owners
    own = play(
        [one.backward for one in turned], computes, turned[0].travelling_tokens, backward=True, seed=seed, owners=owners
    )
    assert {(block, rank): n for block, found in enumerate(own) for rank, n in found.items()} == met
    assert len(own) == (size if owners is None else len(owners))


@given(plans())
def test_rows_travel_that_another_rank_meets_and_no_others(plan):
    mask, sides, _ = plan
    dense = dense_of(plan)
    turned = ways.turned(compiled((mask, sides, Ring())))[0]
    for owner in range(sides.keys.ring_size):
        away = np.setdiff1d(np.arange(sides.keys.seq_len), sides.keys.indices(owner))
        rows = sides.queries.indices(owner)[turned.travelling_rows(owner)]
        wanted = dense[np.ix_(sides.queries.indices(owner), away)].any(1)
        assert rows.tolist() == sides.queries.indices(owner)[wanted].tolist()


@given(plans())
def test_what_all_ranks_send_is_what_each_of_them_does(plan):
    """By every route, and of the turned problem too; the routes' own short cuts and the count of all messages agree."""
    mask, sides, route = plan
    schedules, size, wire = compiled(plan), sides.keys.ring_size, wire_of(4, 2, 2, size=5)
    turned = ways.turned(schedules)
    sent = ways.sent_bytes(schedules[0], wire)
    for side, passes in ((Side.KEYS, schedules), (Side.QUERIES, turned)):
        counted = [account(one.backward, wire, backward=True).total_sent_bytes for one in passes]
        assert sent[side] == sum(counted)
    bound = route.bind(of_route(route, sides, cuts_of(sides, mask)).needs)
    assert sorted(bound.sent(size).tolist()) == sorted(BoundRoute.sent(bound, size).tolist())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("route", [Ring(), Ring(16), Direct(), Bidirectional()], ids=str)
def test_bytes_of_a_full_mask(size, route):
    """3/4 in float32 and 2/3 in bfloat16, and lse, delta and the frames of messages."""
    rows = 64
    schedules = Geometry(size, tuple(range(size)), Contiguous(), route).schedule(Full(), size * rows)
    for itemsize, times in ((4, (3, 4)), (2, (2, 3))):
        wire = wire_of(4, 4, itemsize)
        sent = ways.sent_bytes(schedules[0], wire)
        messages = sum(account(s.backward, wire, backward=True).messages for s in schedules)
        hops = size * (size - 1)
        frames, small = 128 * messages, hops * rows * 4 * 2 * 4
        assert sent[Side.KEYS] - frames == hops * rows * 2 * 4 * 64 * (itemsize + 4)
        assert (sent[Side.QUERIES] - frames - small) * times[1] == (sent[Side.KEYS] - frames) * times[0]


def test_what_is_taken():
    schedules = Geometry(4, (0, 1, 2, 3), Zigzag(), Ring()).schedule(Causal(), 64)
    taken = {
        (heads, kv, itemsize): ways.take(schedules[0], wire_of(heads, kv, itemsize), "auto").value
        for heads, kv in ((4, 4), (4, 2), (8, 1))
        for itemsize in (2, 4, 8)
    }
    assert {kind for kind, side in taken.items() if side == "queries"} == {(4, 4, 2), (4, 4, 4), (4, 4, 8)}
    assert all(ways.take(s, wire_of(4, 4, 2), "auto") == Side.QUERIES for s in schedules), "the same on every rank"
    assert ways.take(schedules[0], wire_of(4, 4, 2)) == Side.KEYS, "unless asked otherwise"
    assert ways.take(schedules[0], wire_of(8, 1, 2), "queries") == Side.QUERIES
    assert ways.taken(schedules, wire_of(8, 1, 2), "auto") is schedules
    assert ways.taken(schedules, wire_of(4, 4, 2), "auto")[1].backward.side == Side.QUERIES


def test_few_queries_travel_to_many_keys_whatever_their_heads():
    few = Geometry(2, (0,), Zigzag(), Ring()).schedule(Causal(), 8, key_len=800, query_start=792)
    many = Geometry(2, (0,), Zigzag(), Ring()).schedule(Full(), 800, key_len=8)
    assert ways.take(few[0], wire_of(16, 1, 2), "auto") == Side.QUERIES
    assert ways.take(many[0], wire_of(4, 4, 2), "auto") == Side.KEYS


@pytest.mark.parametrize("size", [1, 3])
def test_where_nothing_travels_keys_do(size):
    schedules = Geometry(size, (0,), Contiguous(), Ring()).schedule(Documents([4, 4, 4]), 12)
    assert ways.take(schedules[0], wire_of(4, 4, 2), "auto") == Side.KEYS
    assert ways.sent_bytes(schedules[0], wire_of(4, 4, 2)) == {Side.KEYS: 0, Side.QUERIES: 0}
    assert len(ways.turned(schedules)[0].backward.messages) == 0


def test_equal_bytes_leave_it_to_keys():
    """Those of a batch of no rows: every message is its frame alone."""
    (one, _) = Geometry(2, (0, 1), Contiguous(), Ring()).schedule(Full(), 8)
    empty = Format(0, 4, 4, 64, 64, "float32", 4, 4)
    assert len(set(ways.sent_bytes(one, empty).values())) == 1 and ways.take(one, empty, "auto") == Side.KEYS


@pytest.mark.parametrize("route", [InOrder(4), AllGather(2)], ids=str)
def test_routes_by_which_no_queries_travel_send_keys(route):
    (one,) = Geometry(2, (0,), Contiguous(), route).schedule(Full(), 32)
    assert one.origin is None and ways.take(one, wire_of(4, 4, 2), "auto") == Side.KEYS
    words = re.escape(f"backward must be 'auto' or 'keys' by {route}, by which no queries travel; got 'queries'.")
    for ask in (
        lambda: ways.take(one, wire_of(4, 4, 2), "queries"),
        lambda: ways.turned([one]),
        lambda: ways.sent_bytes(one, wire_of(4, 4, 2)),
    ):
        with pytest.raises(PlanError, match=words):
            ask()


@pytest.mark.parametrize("route", [Ring(), Ring(3), Direct(), Bidirectional(), DoubleRing(2)], ids=str)
def test_a_copy_from_a_worker_turns_into_the_same(route):
    schedules = Geometry(4, (2, 0), Zigzag(), route).schedule([Causal(), Window(5), Causal()], 29)
    copies = pickle.loads(pickle.dumps(schedules))
    assert copies == schedules
    ways._bound.cache_clear()
    for a, b in zip(ways.turned(schedules), ways.turned(copies), strict=True):
        assert a.ring_rank == b.ring_rank and a.ring_size == b.ring_size
        for name in ("steps", "messages", "tiles", "tile_offsets"):
            one, two = getattr(a.backward, name), getattr(b.backward, name)
            np.testing.assert_array_equal(one, two)
            assert not one.flags.writeable
        np.testing.assert_array_equal(a.travelling, b.travelling)
    pas = ways.turned(schedules)[0].backward
    assert pickle.loads(pickle.dumps(pas)).side == Side.QUERIES


def test_it_is_no_part_of_the_digest_for_it_follows_from_what_is():
    (one,) = Geometry(2, (0,), Zigzag(), Ring()).schedule(Causal(), 12)
    assert replace(one, origin=None) == one


def test_its_slots_are_those_of_a_ring():
    (*_, one) = Geometry(8, tuple(range(8)), Contiguous(), Ring()).schedule(Full(), 64)
    (turned,) = ways.turned([one])
    wire, rows = wire_of(4, 2, 2), 8
    slots = turned.slot_bytes(turned.backward, wire)
    assert {(p - 2, n) for p, n in slots} == set(one.slot_bytes(one.backward, wire))
    assert slots == {(p, n): wire.message_bytes(p, rows) for p in (Payload.QUERIES, Payload.DQ) for n in (0, 1)}
    there, here = memory(one, wire, turned), memory(one, wire)
    held = [128 + rows * 4 * 64 * 2 * 2 + 2 * rows * 4 * 4] * 2 + [128 + rows * 4 * 64 * 4] * 2  # queries; dq
    sums = [wire.message_bytes(Payload.KV, rows)] * 2  # dk and dv find the buffers of forward's two blocks
    assert there.leased == sum(map(buffer_bytes, [*held, *sums])), (there.leased, held, sums)
    assert (there.inputs, there.out) == (here.inputs, here.out)
    counted = account(turned.backward, wire, backward=True)
    assert counted.flops == account(one.backward, wire, backward=True).flops and counted.hops == 7


def test_rows_of_queries_that_nobody_else_meets_stay_and_hops_are_cut():
    """A window of 3 on shards of 4: a query looks back 2 keys, so the first two of a shard go one rank back."""
    schedules = Geometry(4, (0, 1, 2, 3), Contiguous(), Ring()).schedule(Window(3), 16)
    turned = ways.turned(schedules)
    assert turned[0].travelling.tolist() == [[1, 0, 2], [2, 0, 2], [3, 0, 2]]
    assert [
        len(one.backward.messages)
        for one in ways.turned(Geometry(4, (0,), Contiguous(), Direct()).schedule(Window(3), 16))
    ] == [2]
    sends = turned[1].backward.messages[:, [MessageColumn.PAYLOAD, MessageColumn.PEER, MessageColumn.SOURCE]]
    assert (sends[:, 0] >= Payload.QUERIES).all()


@given(strategies.region_sets(12))
def test_turning_regions_transposes_them(regions):
    dense = rg.as_array(regions, 12, 12)
    np.testing.assert_array_equal(rg.as_array(rg.turned(regions), 12, 12), dense.T)
    np.testing.assert_array_equal(rg.turned(rg.turned(regions)), regions)
    tiles = np.column_stack([np.arange(len(regions)), np.arange(len(regions)) + 2, regions])
    np.testing.assert_array_equal(tl.turned(tiles), np.column_stack([tiles[:, :2], rg.turned(regions)]))


def test_sides_turned():
    queries, keys = Partition(7, 2, Zigzag(), None, 5), Partition(12, 2, Contiguous())
    turned = Sides(queries, keys).turned()
    assert turned.queries is keys and turned.keys == Partition(7, 2, Zigzag())
    docs = Documents([3, 4])
    same = Partition(7, 2, Zigzag(), docs)
    assert Sides(same).turned().keys is same
    with_start = Partition(7, 2, Zigzag(), Documents([8], [4]), 5)  # documents that end beyond 7
    assert Sides(with_start, keys).turned().keys.documents is None
