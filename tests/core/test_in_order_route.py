"""The walk in order: its messages played out for all ranks, its sums in order, the same calls whatever the ring."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, Documents, DocumentZigzag, Full, Striped, Window, Zigzag
from ringspun.core import regions as rg
from ringspun.core import tiles as tl
from ringspun.core.geometry import Geometry
from ringspun.core.layout.base import START
from ringspun.core.layout.in_units import InUnits
from ringspun.core.mask import RowMasks
from ringspun.core.partition import Partition
from ringspun.core.route import InOrder, in_order
from ringspun.core.route.base import OWN, MessageColumn, Needs, StepColumn, pack_slot
from ringspun.core.wire import Payload
from ringspun.errors import LayoutError
from tests.core import strategies
from tests.core.ring_interpreter import Fault, play

LAYOUTS = (Contiguous(), Zigzag(), Contiguous(speeds=(1.0, 2.5, 0.5)))


@st.composite
def walks(draw):
    """A ring of up to 5, stages and blocks of anybody, and who meets what."""
    size = draw(st.integers(1, 5))
    rank = st.integers(0, size - 1)
    readers, owners = (np.array(draw(st.lists(rank, max_size=7)), np.int64) for _ in range(2))
    met = np.array([[draw(st.booleans()) for _ in owners] for _ in readers], np.bool_).reshape(
        len(readers), len(owners)
    )
    tokens = np.arange(10, 10 + len(owners))
    return size, met, InOrder().bind(Needs(np.stack(np.nonzero(met), axis=1), tokens, size, readers, owners))


def computes(legs):
    return [set(np.flatnonzero(one.steps[:, StepColumn.READER] >= 0).tolist()) for one in legs]


@given(walks(), st.integers(0, 99))
def test_every_contribution_comes_home_once_and_in_order(walk, seed):
    size, met, route = walk
    forward, backward = [route.forward(r) for r in range(size)], [route.backward(r) for r in range(size)]
    play(forward, computes(forward), route.tokens, owners=route.owners, backward=False, seed=seed)
    own = play(backward, computes(backward), route.tokens, owners=route.owners, backward=True, seed=seed)
    assert [list(added.items()) for added in own] == [[(s, 1) for s in np.flatnonzero(m)[::-1]] for m in met.T]
    for one in (*forward, *backward):
        for stage in np.unique(one.steps[:, StepColumn.READER]):
            blocks = one.steps[one.steps[:, StepColumn.READER] == stage, StepColumn.SOURCE]
            assert stage < 0 or blocks.tolist() == np.flatnonzero(met[stage]).tolist()


@given(walks())
def test_passes_of_all_ranks_are_equally_long_and_forward_sends_no_gradients(walk):
    size, _, route = walk
    for legs in ([route.forward(r) for r in range(size)], [route.backward(r) for r in range(size)]):
        assert len({len(one.steps) for one in legs}) == 1
    assert all((route.forward(r).messages[:, MessageColumn.PAYLOAD] == Payload.KV).all() for r in range(size))


def schedules(mask, length, size, layout, unit):
    return Geometry(size, tuple(range(size)), layout, InOrder(unit)).schedule(mask, length)


def calls(mask, length, size, layout, unit):
    """What kernels are called with, in units and rows of them, in the order of each unit's sums: by query unit (forward
    and backward, out and dq) and by key unit (dk and dv)."""
    part = Partition(length, size, InUnits(layout, unit))
    by_query, by_key, by_query_backward = defaultdict(list), defaultdict(list), defaultdict(list)
    every = schedules(mask, length, size, layout, unit)
    for direction in ("forward", "backward"):
        passes = [getattr(s, direction) for s in every]
        for step in range(len(passes[0])):
            for rank, one in enumerate(passes):
                for b0, b1, q0, q1, k0, k1, lo, hi in one.tiles_of(step).tolist():
                    begin = q0 - q0 % unit
                    query = int(part.positions(rank)[q0]) // unit
                    key = int(one.steps[step, StepColumn.SOURCE])
                    assert q1 - begin <= unit and k1 <= unit, "a tile crosses the grid"
                    call = (b0, b1, q0 - begin, q1 - begin, k0, k1, lo - begin, hi - begin)
                    if direction == "forward":
                        by_query[query].append((key, *call))
                    else:
                        by_key[key].append((query, *call))
                        by_query_backward[query].append((key, *call))
    assert by_query == by_query_backward
    return by_query, by_key


@st.composite
def plans(draw):
    length, unit = draw(st.integers(0, 40)), draw(st.integers(1, 9))
    masks = strategies.masks(length, leaves=3)
    mask = draw(
        masks | st.lists(strategies.plain_masks(length), min_size=2, max_size=2).map(lambda two: RowMasks(tuple(two)))
    )
    return mask, length, unit


@given(plans(), st.integers(2, 8), st.sampled_from(LAYOUTS[:2]))
def test_the_same_calls_in_the_same_order_whatever_the_ring(plan, size, layout):
    mask, length, unit = plan
    alone = calls(mask, length, 1, Contiguous(), unit)
    assert calls(mask, length, size, layout, unit) == alone
    for found in alone[0].values():
        assert [key for key, *_ in found] == sorted(key for key, *_ in found)


@given(plans(), st.integers(1, 6), st.sampled_from(LAYOUTS[:2]))
def test_every_allowed_pair_is_computed_once_and_schedules_play_out(plan, size, layout):
    mask, length, unit = plan
    every = schedules(mask, length, size, layout, unit)
    forward, backward = [s.forward for s in every], [s.backward for s in every]
    tokens, owners = every[0].travelling_tokens, every[0].owners
    play(forward, computes(forward), tokens, owners=owners, backward=False)
    play(backward, computes(backward), tokens, owners=owners, backward=True)
    if isinstance(mask, RowMasks):
        return
    found = np.zeros((length, length), np.int64)
    part = Partition(length, size, InUnits(layout, unit))
    for rank, one in enumerate(forward):
        for step in range(len(one)):
            block = int(one.steps[step, StepColumn.SOURCE])
            for tile in one.tiles_of(step):
                rows = part.positions(rank)
                keys = part.positions(every[0].owner(block))[every[0].travelling_rows(block)]
                seen = rg.as_array(tile[None, tl.REGION], len(rows), len(keys))
                found[np.ix_(rows, keys)] += seen
    np.testing.assert_array_equal(found, mask.as_array(length))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("length", [0, 1, 3, 8, 9, 40])
def test_units_are_dealt_whole(layout, length):
    part = Partition(length, 3, InUnits(layout, 4))
    assert (part.runs[:, START] % 4 == 0).all() and (part.run_tokens <= 4).all()
    assert (part.run_tokens < 4).sum() == (length % 4 > 0)
    assert str(part.layout) == f"{layout} in units of 4" and part.layout.speeds == layout.speeds


def test_the_drawing_in_the_docstring_of_units():
    part = Partition(14, 2, InUnits(Zigzag(), 3))
    drawn = InUnits.__doc__.splitlines()[2]
    for rank in range(2):
        assert f"rank {rank}: {' '.join(map(str, part.positions(rank)))}" in drawn


@pytest.mark.parametrize("layout", [Striped(), Striped(512), DocumentZigzag()], ids=str)
def test_layouts_that_deal_no_units_are_refused(layout):
    with pytest.raises(LayoutError, match=r"layout must be Contiguous or Zigzag .*; got .*whole units of 512 tokens"):
        schedules(Causal(), 2048, 2, layout, 512)


def test_the_walk_drawn_in_the_docstring():
    drawn = {
        int(words[1]): [word for word in words[2:] if word[0].isdigit() and "." in word]
        for line in in_order.__doc__.splitlines()
        if (words := line.split("holds")[0].split())[:1] == ["rank"]
    }
    for s in schedules(Causal(), 12, 2, Zigzag(), 3):
        steps = s.backward.steps[:5, [StepColumn.READER, StepColumn.SOURCE]].tolist()
        assert drawn[s.ring_rank] == [f"{stage}.{block}" for stage, block in steps if stage >= 0]


@pytest.mark.parametrize("mask", [Causal(), Full(), Window(2048), Causal() & Documents([5000, 300, 11_000])], ids=str)
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=str)
def test_memory_in_flight_is_less_than_a_shard(mask, layout):
    """Blocks and gradients that a rank has room for, in units; it holds 128 / R units itself."""
    for size in (2, 4, 8):
        for s in schedules(mask, 65_536, size, layout, 512):
            m = s.backward.messages
            kv = {pack_slot(int(x)) for x in m[m[:, MessageColumn.PAYLOAD] == Payload.KV, MessageColumn.SLOT]}
            gradients = set(m[m[:, MessageColumn.PAYLOAD] == Payload.DKV, MessageColumn.SLOT].tolist())
            gradients |= set(s.backward.steps[:, StepColumn.GRAD_SLOT].tolist()) - {OWN}
            assert max(len(kv), len(gradients)) <= 128 / size


def test_planted_faults_are_found():
    every = schedules(Causal(), 24, 2, Zigzag(), 3)
    legs, tokens, owners = [s.backward for s in every], every[0].travelling_tokens, every[0].owners
    play(legs, computes(legs), tokens, owners=owners, backward=True)
    steps = legs[0].steps.copy()
    steps[np.flatnonzero(steps[:, StepColumn.HOME_SLOT] >= 0)[0], StepColumn.HOME] += 1
    with pytest.raises(Fault, match="not home"):
        play([replace(legs[0], steps=steps), legs[1]], computes(legs), tokens, owners=owners, backward=True)
