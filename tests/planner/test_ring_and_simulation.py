"""Time of a ring: against closed forms, against the accounting, and the simulation against the clock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspun import (
    AllGather,
    Bidirectional,
    Causal,
    Contiguous,
    Direct,
    DoubleRing,
    Full,
    Ring,
    Striped,
    Window,
    Zigzag,
)
from ringspun.core.accounting import account
from ringspun.core.links import Link
from ringspun.core.wire import Format
from ringspun.errors import ConfigError
from ringspun.planner.rates import LAUNCH_S
from ringspun.planner.ring import Place, Work, head_pairs, lap, schedules, sent_seconds
from ringspun.planner.simulate import simulate

WIRE = Format(1, 8, 2, 64, 64, "bfloat16", 2, 4)
WORK = Work(WIRE, 1e12)
ROUTES = (Ring(), Direct(), Bidirectional(), DoubleRing(4), AllGather())
LAYOUTS = (Contiguous(), Zigzag(), Striped())


def flat(seconds):
    """A link on which every message takes as long."""
    return Link((1, 1 << 40), (seconds, seconds), (seconds, seconds))


def rated(bytes_per_s):
    """A link without latency."""
    sizes = (1, 1 << 40)
    times = tuple(n / bytes_per_s for n in sizes)
    return Link(sizes, times, times)


def place(seconds, node=8, apart=False):
    return Place(flat(seconds), flat(seconds), node, apart)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_free_messages_cost_nothing_and_compute_is_the_accounts(route, backward):
    ranks = schedules(8, Zigzag(), route, Causal(), 4096)
    found = lap(ranks, WORK, place(1e-12), backward=backward)
    passes = [s.backward if backward else s.forward for s in ranks]
    flops = [account(one, WIRE, backward=backward).flops for one in passes]
    steps = [int((head_pairs(one, WIRE) > 0).sum()) for one in passes]
    assert found.busy == pytest.approx(np.mean(flops) / WORK.rate + LAUNCH_S * np.mean(steps))
    assert found.exposed == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("route", [*ROUTES[:2], *ROUTES[3:]], ids=str)
def test_messages_alone_take_what_the_account_sends(route, backward):
    """A kernel that takes no time: links without latency carry the bytes of the busiest rank."""
    ranks = schedules(8, Contiguous(), route, Full(), 4096)
    passes = [s.backward if backward else s.forward for s in ranks]
    sent = max(account(one, WIRE, backward=backward).total_sent_bytes for one in passes)
    one = Place(rated(1e9), rated(1e9), 8)
    seconds = [sent_seconds(p, s.ring_rank, WIRE, one).sum() for p, s in zip(passes, ranks, strict=True)]
    assert max(seconds) == pytest.approx(sent / 1e9)


def test_a_full_ring_takes_its_closed_form():
    """(R - 1) hops that compute or transfer, whichever is longer, and a last step that only computes."""
    ranks = schedules(8, Contiguous(), Ring(), Full(), 4096)
    step = lap(ranks, WORK, place(1e-12), backward=False).busy / 8
    for seconds in (step / 3, 3 * step):
        found = lap(ranks, WORK, place(seconds), backward=False)
        assert found.total == pytest.approx(7 * max(step, seconds) + step)
        assert simulate(ranks, WORK, place(seconds)).total == pytest.approx(found.total)


@settings(max_examples=40)
@given(
    st.sampled_from(ROUTES),
    st.sampled_from(LAYOUTS),
    st.sampled_from([Causal(), Full(), Causal() & Window(900)]),
    st.sampled_from([1e-6, 1e-4, 1e-3]),
    st.booleans(),
    st.booleans(),
)
def test_the_simulation_lies_between_compute_and_the_clock(route, layout, mask, seconds, backward, apart):
    """Every message of every route finds its other end; nobody is done before it has computed. The clock with a
    barrier is
    close: it spreads what is due later, and the simulation waits for gradients at the end of a step."""
    ranks = schedules(8, layout, route, mask, 4096)
    where = place(seconds, node=4, apart=apart)
    told = simulate(ranks, WORK, where, backward=backward)
    clock = lap(ranks, WORK, where, backward=backward)
    assert (told.ends >= told.computed + told.waited - 1e-9).all()
    assert told.computed.mean() == pytest.approx(clock.busy)
    assert max(told.computed) <= told.total + 1e-12
    assert told.total <= 1.25 * clock.total + 4 * seconds


def test_a_straggler_is_found_and_holds_up_the_ring():
    ranks = schedules(8, Contiguous(), Ring(), Full(), 4096)
    alone = simulate(ranks, WORK, place(1e-9)).total
    slow = simulate(ranks, WORK, place(1e-9), speeds=[1, 1, 1, 0.25, 1, 1, 1, 1])
    assert slow.straggler == 3
    assert slow.total == pytest.approx(4 * alone, rel=0.01)


def test_shares_by_speed_end_together():
    """Two speeds, tokens in proportion: nobody waits for the slow ranks as they did."""
    speeds = [2.0, 1.0, 2.0, 1.0]
    even, shared = (
        simulate(schedules(4, layout, Ring(), Full(), 4096), WORK, place(1e-9), speeds=speeds).total
        for layout in (Contiguous(), Contiguous(speeds=tuple(speeds)))
    )
    assert shared < 0.8 * even


def test_one_slow_link_sets_the_pace_of_a_ring():
    ranks = schedules(8, Contiguous(), Ring(), Full(), 4096)
    step = lap(ranks, WORK, place(1e-12), backward=False).busy / 8
    told = simulate(ranks, WORK, place(step / 10), slow={(2, 3): 50.0})
    assert told.total == pytest.approx(7 * 5 * step, rel=0.1)


def test_a_slow_link_between_nodes_hides_better_in_a_double_ring():
    """The block between nodes has a whole lap of the inner ring to arrive."""
    step = lap(schedules(8, Contiguous(), Ring(), Full(), 4096), WORK, place(1e-12), backward=False).busy / 8
    where = Place(flat(step / 10), flat(3 * step), 4)
    single, double = (
        simulate(schedules(8, Contiguous(), route, Full(), 4096), WORK, where).total
        for route in (Ring(), DoubleRing(4))
    )
    assert double < 1.02 * 8 * step < 0.5 * single


def test_bidirectional_pays_where_each_neighbour_has_its_own_link():
    where = [place(1.0, apart=apart) for apart in (False, True)]
    shared, apart = (
        lap(schedules(8, Contiguous(), Bidirectional(), Full(), 4096), WORK, w, backward=False) for w in where
    )
    assert apart.total < 0.55 * shared.total
    ranks = schedules(8, Contiguous(), Bidirectional(), Full(), 4096)
    assert simulate(ranks, WORK, where[1]).total < 0.55 * simulate(ranks, WORK, where[0]).total


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speeds": [1.0]}, "speeds must be one positive number for each of 4 ranks"),
        ({"speeds": [1.0, 0.0, 1.0, 1.0]}, "speeds must be one positive number"),
    ],
)
def test_speeds_that_make_no_sense(options, words):
    with pytest.raises(ConfigError, match=words):
        simulate(schedules(4, Zigzag(), Ring(), Full(), 64), WORK, place(1.0), **options)
    with pytest.raises(ConfigError, match="ranks must be the schedules of all 4 ranks"):
        simulate(schedules(4, Zigzag(), Ring(), Full(), 64)[:2], WORK, place(1.0))
