"""The ring's messages, played out for all ranks: right blocks, no slot overwritten, every gradient home once."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.core import accounting
from ringspun.core.geometry import Geometry
from ringspun.core.partition import Partition
from ringspun.core.route import Ring
from ringspun.core.route import ring as ring_module
from ringspun.core.route.base import NONE, OWN, Action, MessageColumn, Moment, Needs, StepColumn
from ringspun.core.wire import Format, Payload
from tests.core import strategies
from tests.core.ring_interpreter import Fault, play, read_steps

WIRE = Format(
    batch=2, heads=4, kv_heads=2, head_size=8, value_size=6, dtype="float32", itemsize=4, accumulator_itemsize=4
)


@st.composite
def needs(draw):
    """Which rank computes with whose block, in a ring of up to 9."""
    size = draw(st.integers(1, 9))
    rank = st.integers(0, size - 1)
    return size, draw(st.frozensets(st.tuples(rank, rank)) | st.just(frozenset(np.ndindex(size, size))))


def bound(size, pairs):
    tokens = np.arange(10, 10 + size)  # every block of another length
    table = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return Ring().bind(Needs(table, tokens, size)), tokens


def computes(all_legs, pairs):
    return [
        {step for source, step in read_steps(one.steps).items() if (rank, source) in pairs}
        for rank, one in enumerate(all_legs)
    ]


def farthest(pairs, size, block):
    return max((i - j) % size for i, j in {*pairs, (block, block)} if j == block)


def sends(all_legs, payload, block):
    columns = [MessageColumn.ACTION, MessageColumn.PAYLOAD, MessageColumn.SOURCE]
    return sum(int((one.messages[:, columns] == (Action.SEND, payload, block)).all(axis=1).sum()) for one in all_legs)


@given(needs(), st.integers(0, 99))
def test_forward_brings_every_needed_block_and_no_farther(case, seed):
    size, pairs = case
    route, tokens = bound(size, pairs)
    legs = [route.forward(r) for r in range(size)]
    steps = computes(legs, pairs)
    assert sum(map(len, steps)) == len(pairs), "a needed block is never named"
    play(legs, steps, tokens, backward=False, seed=seed)
    for block in range(size):
        assert sends(legs, Payload.KV, block) == farthest(pairs, size, block)
        assert sends(legs, Payload.DKV, block) == 0
    assert {len(one.steps) for one in legs} == {1 + max(farthest(pairs, size, b) for b in range(size))}


@given(needs(), st.integers(0, 99))
@example((4, frozenset({(0, 0), (0, 2), (3, 1), (1, 0), (0, 3)})), 1)
def test_backward_brings_every_contribution_home_exactly_once(case, seed):
    size, pairs = case
    route, tokens = bound(size, pairs)
    legs = [route.backward(r) for r in range(size)]
    own = play(legs, computes(legs, pairs), tokens, backward=True, seed=seed)
    assert own == [Counter({i: 1 for i, j in pairs if j == block}) for block in range(size)]
    for block in range(size):
        hops = [(i - j) % size for i, j in pairs if j == block and i != j]
        assert sends(legs, Payload.KV, block) == max(hops, default=0)
        assert sends(legs, Payload.DKV, block) == (max(hops) - min(hops) + 1 if hops else 0), "straight home"


@given(needs())
def test_slots_and_order_of_messages(case):
    """Two slots for blocks, three for gradients; rows sorted by step and moment, so that all ranks post alike."""
    size, pairs = case
    route, _ = bound(size, pairs)
    for rank in range(size):
        for one in (route.forward(rank), route.backward(rank)):
            m = one.messages
            kv = m[:, MessageColumn.PAYLOAD] == Payload.KV
            assert set(m[kv, MessageColumn.SLOT].tolist()) <= {OWN, 0, 1}
            assert set(m[~kv, MessageColumn.SLOT].tolist()) <= {0, 1, 2}
            assert (m[kv, MessageColumn.MOMENT] == Moment.BEFORE).all()
            assert (m[~kv, MessageColumn.MOMENT] == Moment.AFTER).all()
            when = m[:, MessageColumn.STEP] * len(Moment) + m[:, MessageColumn.MOMENT]
            assert (np.diff(when) >= 0).all()
            assert set(m[:, MessageColumn.STEP].tolist()) <= set(range(len(one.steps)))


@st.composite
def plans(draw):
    length = draw(st.integers(0, 32))
    return draw(strategies.masks(length, leaves=3)), length, draw(st.integers(1, 7)), draw(strategies.layouts())


def schedule_all(mask, length, size, layout):
    return Geometry(size, tuple(range(size)), layout, Ring()).schedule(mask, length)


def steps_with_tiles(one):
    return {step for step in range(len(one)) if len(one.tiles_of(step))}


@given(plans(), st.integers(0, 99))
def test_whole_schedules_play_out(plan, seed):
    mask, length, size, layout = plan
    schedules = schedule_all(mask, length, size, layout)
    forward, backward = [s.forward for s in schedules], [s.backward for s in schedules]
    tokens = schedules[0].travelling_tokens
    play(forward, list(map(steps_with_tiles, forward)), tokens, backward=False, seed=seed)
    own = play(backward, list(map(steps_with_tiles, backward)), tokens, backward=True, seed=seed)
    partition, dense = Partition(length, size, layout), mask.as_array(length)
    rows = [partition.positions(r) for r in range(size)]
    assert own == [Counter({i: 1 for i in range(size) if dense[np.ix_(rows[i], rows[j])].any()}) for j in range(size)]


# ---- golden ----


def test_at_step_t_rank_r_of_4_holds_block_r_minus_t():
    for s in schedule_all(Full(), 16, 4, Contiguous()):
        r = s.ring_rank
        assert accounting.sources(s.forward) == [(r - t) % 4 for t in range(4)]
        assert s.forward.steps[:, StepColumn.SLOT].tolist() == [OWN, 1, 0, 1]
        assert accounting.sources(s.backward) == [(r - t) % 4 for t in range(5)]
        assert s.backward.steps[:, StepColumn.HOME_SLOT].tolist() == [NONE] * 4 + [0]


def test_the_walk_drawn_in_the_docstring():
    drawn = [
        [int(word) for word in line.split("rank ")[1].split()[1:5]]
        for line in ring_module.__doc__.splitlines()
        if line.strip().startswith("rank ") and line.split()[1].isdigit()
    ]
    assert drawn == [accounting.sources(s.forward) for s in schedule_all(Full(), 16, 4, Contiguous())]


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_a_full_mask_makes_one_hop_less_than_ranks(size, layout):
    for s in schedule_all(Full(), 3 * size + 2, size, layout):
        assert len(s.forward) == size
        account = accounting.account(s.forward, WIRE, backward=False)
        assert account.hops == account.messages == size - 1


def test_M17_a_balanced_layout_without_causal_needs_every_block():
    """Load-balanced layout with is_causal=False takes the causal shortcut."""
    for layout in (Zigzag(), Striped()):
        for size in (2, 4):
            for s in schedule_all(Full(), 64, size, layout):
                assert (s.forward.pairs == (64 // size) ** 2).all() and len(s.forward) == size


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("local", [1, 4, 7])
def test_a_window_on_contiguous_shards_cuts_hops(size, local):
    for window in range(1, local * size + 3):
        schedules = schedule_all(Window(window), local * size, size, Contiguous())
        hops = min(math.ceil((window - 1) / local), size - 1)
        accounts = [accounting.account(s.forward, WIRE, backward=False) for s in schedules]
        assert {len(s.forward) for s in schedules} == {hops + 1}
        assert max(a.hops for a in accounts) == hops
        assert sum(a.messages for a in accounts) == sum(min(hops, size - 1 - r) for r in range(size))


def test_causal_on_contiguous_shards_never_wraps_round():
    """The last rank's block is needed by nobody else, and rank 0 receives nothing."""
    schedules = schedule_all(Causal(), 40, 5, Contiguous())
    received = [int((s.forward.messages[:, MessageColumn.ACTION] == Action.RECEIVE).sum()) for s in schedules]
    assert received == [0, 1, 2, 3, 4]
    assert accounting.account(schedules[4].forward, WIRE, backward=False).messages == 0


def test_documents_within_shards_need_no_message():
    for s in schedule_all(Documents([8] * 5), 40, 5, Contiguous()):
        assert len(s.forward) == len(s.backward) == 1
        assert len(s.forward.messages) == len(s.backward.messages) == 0


def test_a_cut_ring_sends_gradients_straight_home():
    """Window over one hop: the neighbour computes with the block, and its gradients go back the same link."""
    schedules = schedule_all(Window(4), 12, 3, Contiguous())
    for s in schedules:
        m = s.backward.messages
        gradients = m[(m[:, MessageColumn.PAYLOAD] == Payload.DKV) & (m[:, MessageColumn.ACTION] == Action.SEND)]
        assert gradients[:, MessageColumn.PEER].tolist() == ([s.ring_rank - 1] if s.ring_rank else [])


def test_gradients_that_come_home_while_others_pass_take_a_third_slot():
    """Every block is needed two hops on, block 1 three: at step 3 rank 0 takes its own gradients home while it gathers
    those of block 1, which with two slots would lie in the same one."""
    size = 4
    pairs = {*(((block + 2) % size, block) for block in range(size)), (0, 1)}
    route, tokens = bound(size, pairs)
    legs = [route.backward(r) for r in range(size)]
    assert legs[0].steps[3, [StepColumn.SOURCE, StepColumn.GRAD_SLOT, StepColumn.HOME_SLOT]].tolist() == [1, 1, 2]
    own = play(legs, computes(legs, pairs), tokens, backward=True)
    assert own == [Counter({i: 1 for i, j in pairs if j == block}) for block in range(size)]


# ---- the interpreter itself must be able to fail ----


def legs_of_a_full_ring():
    route, tokens = bound(4, frozenset(np.ndindex(4, 4)))
    pairs = frozenset(np.ndindex(4, 4))
    legs = [route.backward(r) for r in range(4)]
    return legs, computes(legs, pairs), tokens


def spoil(legs, rank, find, column, value):
    messages = legs[rank].messages.copy()
    place = np.flatnonzero((messages[:, list(find)] == list(find.values())).all(axis=1))
    messages[place[0], column] = value
    return [replace(one, messages=messages) if r == rank else one for r, one in enumerate(legs)]


@pytest.mark.parametrize(
    ("find", "column", "value", "words"),
    [
        # a block received into the slot that is still being sent
        (
            {MessageColumn.STEP: 1, MessageColumn.ACTION: Action.RECEIVE, MessageColumn.PAYLOAD: Payload.KV},
            MessageColumn.SLOT,
            1,
            "overwrites",
        ),
        # the wrong block sent on
        (
            {MessageColumn.STEP: 1, MessageColumn.ACTION: Action.SEND, MessageColumn.PAYLOAD: Payload.KV},
            MessageColumn.SLOT,
            0,
            "sends 2",
        ),
        # gradients expected from the wrong side
        (
            {MessageColumn.STEP: 1, MessageColumn.ACTION: Action.RECEIVE, MessageColumn.PAYLOAD: Payload.DKV},
            MessageColumn.PEER,
            3,
            "wait for each other|sends|expects",
        ),
        # a send one step late
        (
            {MessageColumn.STEP: 1, MessageColumn.ACTION: Action.SEND, MessageColumn.PAYLOAD: Payload.DKV},
            MessageColumn.STEP,
            2,
            "wait for each other|under way|expects",
        ),
        # half a block
        (
            {MessageColumn.STEP: 0, MessageColumn.ACTION: Action.SEND, MessageColumn.PAYLOAD: Payload.KV},
            MessageColumn.ROW1,
            5,
            "not the whole block",
        ),
    ],
)
def test_planted_faults_are_found(find, column, value, words):
    legs, steps, tokens = legs_of_a_full_ring()
    play(legs, steps, tokens, backward=True)
    with pytest.raises(Fault, match=words):
        play(spoil(legs, 2, find, column, value), steps, tokens, backward=True)


def test_a_missing_message_is_found():
    legs, steps, tokens = legs_of_a_full_ring()
    legs[1] = replace(legs[1], messages=legs[1].messages[:-1])
    with pytest.raises(Fault, match=r"receives|wait for each other|not home"):
        play(legs, steps, tokens, backward=True)


def test_a_gradient_slot_that_does_not_start_from_zero_is_found():
    legs, steps, tokens = legs_of_a_full_ring()
    changed = legs[0].steps.copy()
    changed[1, StepColumn.GRAD_FRESH] = 0
    legs[0] = replace(legs[0], steps=changed)
    with pytest.raises(Fault, match="which holds None"):
        play(legs, steps, tokens, backward=True)
