"""Direct, bidirectional, double ring and all-gather, played out for all ranks: right blocks, no slot overwritten, every
gradient home once, and as many bytes as they promise."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, Documents, Full, Window, Zigzag, parse_route
from ringspun.core import accounting
from ringspun.core import tiles as tl
from ringspun.core.geometry import Geometry
from ringspun.core.layout.base import STEP
from ringspun.core.links import Link, Links
from ringspun.core.partition import Partition
from ringspun.core.route import (
    AllGather,
    Auto,
    Bidirectional,
    Direct,
    DoubleRing,
    Ring,
    bidirectional,
    direct,
    double_ring,
)
from ringspun.core.route.base import Action, MessageColumn, Needs, StepColumn
from ringspun.core.wire import Format, Payload, heads_of
from ringspun.errors import PlanError
from tests.core import strategies
from tests.core.ring_interpreter import Fault, play


def steps_with_tiles(one):
    return {step for step in range(len(one)) if len(one.tiles_of(step))}


def schedules_of(mask, length, size, layout, route):
    return Geometry(size, tuple(range(size)), layout, route).schedule(mask, length)


@st.composite
def plans(draw):
    size = draw(st.integers(1, 8))
    inner = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    ring, gather = Ring(draw(st.integers(1, 9))), AllGather(draw(st.none() | st.integers(1, 4)))
    route = draw(st.sampled_from([Direct(), Bidirectional(), DoubleRing(inner), ring, gather]))
    length = draw(st.integers(0, 32))
    return draw(strategies.masks(length, leaves=3)), length, size, draw(strategies.layouts()), route


def expected(schedules, mask, length, size, layout):
    """Who adds to the gradients of each block: whoever sees a row of it; of a shard as such, its own rank alone."""
    one, part, dense = schedules[0], Partition(length, size, layout), mask.as_array(length)
    positions = [part.positions(r) for r in range(size)]
    owners = range(size) if one.owners is None else one.owners.tolist()
    found = []
    for block, owner in enumerate(owners):
        keys = positions[owner][one.travelling_rows(block)]
        if one.owners is None:
            keys, readers = positions[owner], range(size)
        else:
            readers = [owner] if block < size else [r for r in range(size) if r != owner]
        found.append(Counter({r: 1 for r in readers if dense[np.ix_(positions[r], keys)].any()}))
    return found


@given(plans(), st.integers(0, 99))
def test_every_block_comes_and_every_contribution_goes_home_once(plan, seed):
    mask, length, size, layout, route = plan
    schedules = schedules_of(mask, length, size, layout, route)
    tokens, owners = schedules[0].travelling_tokens, schedules[0].owners
    forward, backward = [s.forward for s in schedules], [s.backward for s in schedules]
    for passes, back in ((forward, False), (backward, True)):
        assert len({len(one) for one in passes}) == 1, "ranks that keep in step have equally many"
        strides = len(np.unique(forward[0].steps[:, StepColumn.STRIDE]))
        assert sum(int(one.pairs.sum()) for one in passes) == strides * int(mask.as_array(length).sum())
        parts = [s.gathered[:, 0].tolist() for s in schedules]
        computes = list(map(steps_with_tiles, passes))
        own = play(passes, computes, tokens, backward=back, seed=seed, owners=owners, parts=parts)
    found = expected(schedules, mask, length, size, layout)
    if isinstance(route, AllGather):
        assert all(n % strides == 0 for counted in own for n in counted.values())
        own = [Counter({r: n // strides for r, n in counted.items()}) for counted in own]
        # a rank that gathers adds to all of its own rows, whether it needs them or not
        own[:size] = [+Counter({r: n for r, n in own[r].items() if found[r]}) for r in range(size)]
    if isinstance(route, Direct | AllGather):  # a block for one reader: nobody else computes with it
        for block in range(size, len(found)):
            assert len(own[block]) == 1 and own[block] <= found[block]
        found[size:] = own[size:]
        together = Counter((int(owner), r) for block, owner in enumerate(owners) for r in own[block])
        dense, part = mask.as_array(length), Partition(length, size, layout)
        rows = [part.positions(r) for r in range(size)]
        assert together == Counter(
            {(j, i): 1 for i in range(size) for j in range(size) if dense[np.ix_(rows[i], rows[j])].any()}
        )
    assert own == found


@given(plans())
def test_direct_and_all_gather_send_the_rows_that_are_needed_and_no_other(plan):
    mask, length, size, layout, route = plan
    route = route if isinstance(route, AllGather) else Direct()
    schedules = schedules_of(mask, length, size, layout, route)
    dense, part = mask.as_array(length), Partition(length, size, layout)
    rows = [part.positions(r) for r in range(size)]
    for s in schedules:
        sent = Counter()
        of_one_stride = s.forward.messages[s.forward.messages[:, MessageColumn.STRIDE] == 0]
        for m in of_one_stride[of_one_stride[:, MessageColumn.ACTION] == Action.SEND]:
            sent[int(m[MessageColumn.PEER])] += int(m[MessageColumn.ROW1])
        mine = rows[s.ring_rank]
        needed = {i: int(dense[np.ix_(rows[i], mine)].any(0).sum()) for i in range(size) if i != s.ring_rank}
        assert sent == Counter({i: n for i, n in needed.items() if n})


@given(plans())
def test_halves_are_halves_of_what_travels(plan):
    mask, length, size, layout, _ = plan
    one = schedules_of(mask, length, size, layout, Bidirectional())[0]
    ring = schedules_of(mask, length, size, layout, Ring())[0]
    for r in range(size):
        low, high = one.travelling_tokens[size + 2 * r : size + 2 * r + 2]
        assert low + high == ring.travelling_tokens[r] and 0 <= low - high <= 1


def rows_sent(schedules, to=None, payload=Payload.KV, backward=False):
    total = 0
    for s in schedules:
        for m in (s.backward if backward else s.forward).messages.tolist():
            there = to is None or to(s.ring_rank, m[MessageColumn.PEER])
            if m[MessageColumn.ACTION] == Action.SEND and m[MessageColumn.PAYLOAD] == payload and there:
                total += m[MessageColumn.ROW1]
    return total


@pytest.mark.parametrize("size", [3, 4, 8])
def test_bidirectional_sends_half_of_a_rings_rows_each_way(size):
    length = size * 16
    both = schedules_of(Full(), length, size, Zigzag(), Bidirectional())
    ring = rows_sent(schedules_of(Full(), length, size, Zigzag(), Ring()))
    for way in (1, -1):
        assert rows_sent(both, lambda r, peer, way=way: peer == (r + way) % size) == ring / 2


@pytest.mark.parametrize("size", [2, 4, 8])
def test_direct_under_causal_and_zigzag_sends_three_quarters_of_a_rings_rows(size):
    """Of a ring that relays whole shards, which is what others do; ours leaves out the last chunk of all."""
    length = size * 16
    ring, ours = (rows_sent(schedules_of(Causal(), length, size, Zigzag(), route)) for route in (Ring(), Direct()))
    whole = (size - 1) * length
    assert (ours, ring) == (0.75 * whole, whole - (size - 1) * length // (2 * size))


def test_direct_under_a_window_of_half_a_shard_sends_an_eighth_of_a_rings_rows():
    """Eight ranks; up to a row a chunk."""
    local = 64
    window = Window(local // 2 + 1)
    ring = rows_sent(schedules_of(Full(), 8 * local, 8, Contiguous(), Ring()))
    ours = rows_sent(schedules_of(window, 8 * local, 8, Contiguous(), Direct()))
    assert ours == 7 * local // 2 and ring == 8 * 7 * local
    assert rows_sent(schedules_of(window, 8 * local, 8, Contiguous(), Ring())) == 7 * local // 2


def test_a_double_ring_crosses_between_two_halves_once_a_block():
    """Eight ranks as two halves of four: 4 blocks cross each way in a lap, where a ring's link carries 7 and direct
    routes 16."""

    def crosses(r, peer):
        return r < 4 <= peer

    crossing = {
        route: rows_sent(schedules_of(Full(), 8 * 16, 8, Contiguous(), route), crosses) // 16
        for route in (Ring(), Direct(), DoubleRing(4))
    }
    assert crossing == {Ring(): 7, Direct(): 16, DoubleRing(4): 4}
    back = schedules_of(Full(), 8 * 16, 8, Contiguous(), DoubleRing(4))
    assert rows_sent(back, crosses, Payload.DKV, backward=True) // 16 == 4


@pytest.mark.parametrize("route", [Direct(), Bidirectional(), DoubleRing(3), AllGather()], ids=str)
def test_documents_within_shards_need_no_message(route):
    for s in schedules_of(Documents([8] * 6), 48, 6, Contiguous(), route):
        assert len(s.forward) == len(s.backward) == 1
        assert len(s.forward.messages) == len(s.backward.messages) == 0


@pytest.mark.parametrize(
    ("route", "kv", "dkv"), [(Direct(), 3, 2), (Bidirectional(), 4, 4), (DoubleRing(4), 4, 3)], ids=str
)
def test_slots_do_not_grow_with_the_ring(route, kv, dkv):
    """Buffers of a pass; halves count as such."""
    for size in (8, 16):
        for s in schedules_of(Full(), size * 8, size, Contiguous(), route):
            m = s.backward.messages
            used = {
                payload: {
                    abs(x + (x < 0)) for x in m[m[:, MessageColumn.PAYLOAD] == payload, MessageColumn.SLOT].tolist()
                }
                for payload in Payload
            }
            assert len(used[Payload.KV]) <= kv and len(used[Payload.DKV]) <= dkv, used


@pytest.mark.parametrize("inner", [0, -2, True, 2.0, "4"])
def test_inner_must_be_a_number_of_ranks(inner):
    with pytest.raises(PlanError, match="inner must be a number of ranks"):
        DoubleRing(inner)


def test_only_routes_that_cut_shards_have_pieces():
    assert Direct().pieces(7) == Ring().pieces(7) == Ring(7).pieces(7) == Ring(3).pieces(0) == 1
    assert (Bidirectional().pieces(7), Ring(3).pieces(7), Ring(1).pieces(7)) == (2, 3, 7)


def test_inner_must_divide_the_ring():
    with pytest.raises(PlanError, match="inner must divide the ring's 6 ranks; got 4"):
        schedules_of(Full(), 12, 6, Contiguous(), DoubleRing(4))


@pytest.mark.parametrize(
    ("route", "text", "short"),
    [
        (Ring(), "ring", "Ring()"),
        (Ring(512), "ring(block_size=512)", "ring(512)"),
        (Direct(), "direct", "direct"),
        (Bidirectional(), "bidirectional", " bidirectional "),
        (DoubleRing(4), "double_ring(inner=4)", "double_ring(4)"),
        (AllGather(), "all_gather", "all_gather(None)"),
        (AllGather(4), "all_gather(strides=4)", "all_gather(4)"),
    ],
    ids=str,
)
def test_routes_from_their_strings(route, text, short):
    assert str(route) == text and parse_route(text) == parse_route(short) == route


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rnig", "did you mean 'ring'?"),
        ("double_ring", "inner"),
        ("double_ring(0)", "inner must be a number of ranks"),
        ("ring(0)", "block_size must be a number of tokens >= 1"),
        ("", "readable"),
    ],
)
def test_what_is_no_route_is_refused(text, words):
    with pytest.raises(PlanError) as problem:
        parse_route(text)
    assert words in str(problem.value)


def test_auto_stands_for_a_route_and_is_none():
    link = Link((1,), (1.0,), (1.0,))
    with pytest.raises(NotImplementedError):
        Auto(Links(2, link)).bind(Needs(np.zeros((0, 2), np.int64), np.zeros(2, np.int64), 2))


def test_the_walks_drawn_in_the_docstrings():
    def walks(route, size):
        return [accounting.sources(s.forward) for s in schedules_of(Full(), size * 2, size, Contiguous(), route)]

    def owner(blocks, size):
        return [b if b < size else (b - size) // 2 for b in blocks]

    assert walks(DoubleRing(3), 6)[:4] == [
        [0, 2, 1, 3, 5, 4],
        [1, 0, 2, 4, 3, 5],
        [2, 1, 0, 5, 4, 3],
        [3, 5, 4, 0, 2, 1],
    ]
    assert "rank 3      3    5    4          0    2    1" in double_ring.__doc__
    assert [owner(w, 4) for w in walks(Bidirectional(), 4)[:2]] == [[0, 3, 1, 2, 2, 1, 3], [1, 0, 2, 3, 3, 2, 0]]
    assert "rank 0    own      half of 3    half of 1    half of 2    half of 2" in bidirectional.__doc__
    one = schedules_of(Full(), 8, 4, Contiguous(), Direct())[0]
    assert [one.owner(b) for b in one.forward.steps[:, StepColumn.SOURCE].tolist()] == [0, 3, 2, 1]
    assert "rank 0    own         rows of 3   rows of 2   rows of 1" in direct.__doc__


def test_tiles_count_all_rows_of_a_ranks_own_shard_and_of_others_those_that_travel():
    ring = schedules_of(Window(3), 12, 3, Contiguous(), Ring())[1]
    assert ring.rows_of_tiles(1) == slice(0, None)
    assert ring.rows_of_tiles(0) == ring.travelling_rows(0) == slice(2, 4)
    part = Partition(12, 3, Contiguous())
    assert [ring.positions(block, part).tolist() for block in (0, 1)] == [[2, 3], [4, 5, 6, 7]]
    own = schedules_of(Window(3), 12, 3, Contiguous(), Direct())[1]
    assert own.rows_of_tiles(1) == slice(0, 4)


def test_strides_must_be_a_number_of_parts():
    for strides in (0, -1, True, 2.0, "4"):
        with pytest.raises(PlanError, match="strides must be a number of parts of the KV heads >= 1; got"):
            AllGather(strides)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_keys_of_a_head_are_met_at_once(size):
    """Under a causal mask: contiguous shards in one tile, zigzag ones in one per chunk, so that no result is merged."""
    for layout, most in ((Contiguous(), 1), (Zigzag(), 2)):
        for s in schedules_of(Causal(), size * 16, size, layout, AllGather()):
            for step in range(1, size + 1):
                tiles = s.forward.tiles_of(step)
                assert len(tiles) <= most
                ends = sorted(tuple(rows) for rows in tiles[:, [tl.Q0, tl.Q1]].tolist())
                assert ends[0][0] == 0 and ends[-1][1] == 16 and all(a[1] == b[0] for a, b in pairwise(ends))


@given(plans())
def test_what_is_put_together_is_the_shard_and_what_is_needed_in_the_order_of_the_sequence(plan):
    mask, length, size, layout, _ = plan
    schedules, part = schedules_of(mask, length, size, layout, AllGather()), Partition(length, size, layout)
    dense = mask.as_array(length)
    for s in schedules:
        mine = part.positions(s.ring_rank)
        foreign = set(np.flatnonzero(dense[mine].any(0)).tolist()) - set(mine.tolist())
        if not foreign:
            assert len(s.gathered) == 0 and not (s.forward.steps[:, StepColumn.SOURCE] == s.whole).any()
            continue
        held = s.positions(s.whole, part).tolist()
        assert len(held) == len(set(held)) == s.rows(s.whole) and set(held) == foreign | set(mine.tolist())
        assert s.owner(s.whole) == s.ring_rank
        if (part.runs[:, STEP] == 1).all():
            assert held == sorted(held)


def test_heads_of_strides_are_all_heads_and_the_last_are_left_out():
    for kv_heads in range(9):
        for strides in range(1, 10):
            parts = [heads_of(i, strides, kv_heads) for i in range(strides)]
            assert [h for one in parts for h in range(*one.indices(kv_heads))] == list(range(kv_heads))
            sizes = [one.stop - one.start for one in parts]
            assert max(sizes[:kv_heads], default=0) - min(sizes[:kv_heads], default=0) <= 1 and not any(
                sizes[kv_heads:]
            )
    wire = Format(1, 6, 3, 4, 4, "float64", 8, 8)
    assert [(wire.of_stride(i, 4).heads, wire.of_stride(i, 4).kv_heads) for i in range(4)] == [(2, 1)] * 3 + [(0, 0)]


def test_messages_and_buffers_of_strides_without_heads_are_left_out():
    """Two heads in four strides: two strides' messages, each of one head."""
    (s,) = Geometry(4, (1,), Zigzag(), AllGather()).schedule(Causal(), 64)
    few, many = (Format(1, 4, k, 4, 4, "float64", 8, 8) for k in (2, 4))
    counts = [accounting.account(s.forward, wire, backward=False) for wire in (few, many)]
    assert (counts[0].messages, counts[1].messages) == (2 * 3, 4 * 3)
    row = 8 * (4 + 4)
    direct = schedules_of(Causal(), 64, 4, Zigzag(), Direct())[1]
    for one, wire in zip(counts, (few, many), strict=True):
        whole = accounting.account(direct.forward, wire, backward=False)
        assert one.total_sent_bytes - 128 * one.messages == whole.total_sent_bytes - 128 * whole.messages
        assert one.flops == whole.flops
    assert accounting.computing(s.forward, few).tolist() == [True, True, True, False, False]
    slots = s.slot_bytes(s.backward, few)
    assert slots[Payload.KV, 0] == 128 + s.rows(s.whole) * row and slots[Payload.DKV, 0] == slots[Payload.KV, 0]


def test_planted_faults_of_strides_are_found():
    schedules = schedules_of(Causal(), 32, 3, Zigzag(), AllGather(2))

    def played(column, value, table="messages", row=0):
        passes = [s.backward for s in schedules]
        edited = getattr(passes[1], table).copy()
        edited[row, column] = value
        passes[1] = replace(passes[1], **{table: edited})
        one = schedules[0]
        parts = [s.gathered[:, 0].tolist() for s in schedules]
        computes = list(map(steps_with_tiles, passes))
        play(passes, computes, one.travelling_tokens, backward=True, owners=one.owners, parts=parts)

    assert not played(MessageColumn.STEP, 0)
    for column, value, *where in (
        (MessageColumn.STRIDE, 1),
        (MessageColumn.DUE, 2),
        (MessageColumn.SLOT, 0),
        (StepColumn.STRIDE, 1, "steps", 1),
        (StepColumn.GRAD_FRESH, 0, "steps", 2),
        (StepColumn.HOME, 0, "steps", 1),
    ):
        with pytest.raises(Fault):
            played(column, value, *where)
