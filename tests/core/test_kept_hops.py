"""A ring whose forward leaves blocks to backward: played out for all ranks, what it saves and what it takes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, Full, Window, Zigzag
from ringspun.core.accounting import account, memory
from ringspun.core.geometry import Geometry
from ringspun.core.partition import Partition
from ringspun.core.route import Ring
from ringspun.core.route.base import KEPT, Action, BoundRoute, MessageColumn, Needs, StepColumn
from ringspun.core.text import parse_route
from ringspun.core.wire import Format, Payload
from ringspun.errors import PlanError
from tests.core import strategies
from tests.core.ring_interpreter import Fault, play

WIRE = Format(2, 6, 3, 5, 7, "bfloat16", 2, 4)


def make(mask, length, size, layout, kept):
    return Geometry(size, tuple(range(size)), layout, Ring(kept_hops=kept)).schedule(mask, length)


def steps_with_tiles(one):
    return {step for step in range(len(one)) if len(one.tiles_of(step))}


def blocks_sent(one):
    m = one.messages
    mine = (m[:, MessageColumn.ACTION] == Action.SEND) & (m[:, MessageColumn.PAYLOAD] == Payload.KV)
    return Counter((m[mine, MessageColumn.STEP] + 1).tolist())  # by hop


def backward_plays(schedules, seed=0, kept=None):
    passes = [s.backward for s in schedules]
    kept = [s.kept for s in schedules] if kept is None else kept
    tokens = schedules[0].travelling_tokens
    return play(passes, list(map(steps_with_tiles, passes)), tokens, backward=True, seed=seed, kept=kept)


@settings(max_examples=40)
@given(strategies.masks(24, leaves=3), st.integers(1, 8), strategies.layouts(), st.integers(1, 8), st.integers(0, 99))
def test_whole_schedules_play_out_and_send_only_what_was_not_kept(mask, size, layout, kept, seed):
    plain, keeping = (make(mask, 24, size, layout, n) for n in (None, kept))
    passes = [s.forward for s in keeping]
    tokens = keeping[0].travelling_tokens
    play(passes, list(map(steps_with_tiles, passes)), tokens, backward=False, seed=seed)
    own = backward_plays(keeping, seed)
    partition, dense = Partition(24, size, layout), mask.as_array(24)
    rows = [partition.positions(r) for r in range(size)]
    assert own == [Counter({i: 1 for i in range(size) if dense[np.ix_(rows[i], rows[j])].any()}) for j in range(size)]
    for before, now in zip(plain, keeping, strict=True):
        assert np.array_equal(now.passing.steps, before.forward.steps)
        assert np.array_equal(now.passing.messages, before.forward.messages)
        assert blocks_sent(now.forward) == blocks_sent(before.forward)
        assert blocks_sent(now.backward) == {h: n for h, n in blocks_sent(before.backward).items() if h > kept}
        assert np.array_equal(now.backward.tiles, before.backward.tiles)


def test_all_ranks_send_what_the_route_says():
    pairs = np.array([(i, j) for i in range(5) for j in range(5) if (i - j) % 5 != 3])
    bound = Ring(kept_hops=2).bind(Needs(pairs, np.arange(10, 15), 5))
    counted = BoundRoute.sent(bound, 5)
    assert sorted(map(tuple, counted.tolist())) == sorted(map(tuple, bound.sent(5).tolist()))


def test_R4_keeping_two_of_three_hops():
    """Rank 0 computes with blocks 3 and 2 as they lie there, gets 1, and sends a copy of 2 alone."""
    one = make(Full(), 16, 4, Contiguous(), 2)[0]
    assert one.kept == {KEPT: 3, KEPT + 1: 2} and one.kept_rows == (4, 4)
    assert one.backward.steps[:, StepColumn.SLOT].tolist() == [-1, KEPT, KEPT + 1, 1, -1]
    m = one.backward.messages
    columns = [MessageColumn.STEP, MessageColumn.ACTION, MessageColumn.SOURCE, MessageColumn.SLOT]
    assert m[m[:, MessageColumn.PAYLOAD] == Payload.KV][:, columns].tolist() == [[2, 0, 2, -1], [2, 1, 1, 1]]


@pytest.mark.parametrize(("mask", "layout"), [(Full(), Contiguous()), (Causal(), Zigzag()), (Window(9), Contiguous())])
def test_bytes_saved_are_bytes_kept(mask, layout):
    """A kept block takes what its message would have; R - 1 hops are all."""
    size, length = 6, 48
    for kept in (1, 2, 5, 9):
        plain, keeping = (make(mask, length, size, layout, n) for n in (None, kept))
        sent = [sum(account(s.backward, WIRE, backward=True).total_sent_bytes for s in one) for one in (plain, keeping)]
        assert sent[0] - sent[1] == sum(s.kept_bytes(WIRE) for s in keeping) > 0
        for before, now in zip(plain, keeping, strict=True):
            assert memory(now, WIRE).kept == now.kept_bytes(WIRE) and memory(before, WIRE).kept == 0
            # blocks of unequal rows come in another order, and the pool gives buffers by classes of sizes
            assert memory(now, WIRE).leased <= 1.0625 * memory(before, WIRE).leased
            if kept >= size - 1:
                assert not account(now.backward, WIRE, backward=True).hops


def test_forward_that_leaves_nothing_is_found():
    schedules = make(Full(), 16, 4, Contiguous(), 2)
    with pytest.raises(Fault, match=r"computes with block \d in slot \d{7}, which holds None"):
        backward_plays(schedules, kept=[None] * 4)
    wrong = [{slot: (block + 1) % 4 for slot, block in s.kept.items()} for s in schedules]
    with pytest.raises(Fault, match=r"computes with block \d in slot \d{7}, which holds \d"):
        backward_plays(schedules, kept=wrong)


def test_what_can_be_asked():
    assert str(Ring(kept_hops=2)) == "ring(kept_hops=2)" and parse_route("ring(kept_hops=2)") == Ring(kept_hops=2)
    assert Ring().turns and not Ring(kept_hops=1).turns
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(PlanError, match=r"kept_hops must be a number of hops >= 1; got .*None keeps no block"):
            Ring(kept_hops=wrong)
    with pytest.raises(PlanError, match="kept_hops must come with whole shards; got block_size=4 too"):
        Ring(4, 2)
