"""Every route gives dense attention: any mask, layout, ring and arguments, in one thread and between processes."""

from __future__ import annotations

import pytest
import torch
from combinations import cases
from hard_cases import judged
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import other_routes, over_slow_links, run_routes

from ringspun import Causal, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.core import ways
from ringspun.core.accounting import account
from ringspun.core.links import Link, Links
from ringspun.core.route import AllGather, Bidirectional, Direct, DoubleRing, Ring
from ringspun.errors import PlanError
from ringspun.testing.cases import Case, inputs
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.execution import wire_of


@st.composite
def routed(draw):
    case = draw(cases(most_ranks=8))
    inner = draw(st.sampled_from([d for d in range(1, case.ranks + 1) if case.ranks % d == 0]))
    pieces = draw(st.integers(1, 5))  # of the longest shard; others may have fewer rows than that
    ring = Ring(max(1, -(-case.seq_len // case.ranks // pieces)))
    gather = AllGather(draw(st.none() | st.integers(1, 4)))
    return case, draw(st.sampled_from([Direct(), Bidirectional(), DoubleRing(inner), ring, gather]))


@settings(max_examples=150)
@given(routed())
def test_float64_equals_the_oracle_by_every_route(drawn):
    case, route = drawn
    context = ContextParallel(Loopback(case.ranks, seed=case.seed), layout=case.layout, route=route, checks="checksum")
    judged(case, run_ring(case, inputs(case), context))


ROUTES = (Direct(), Bidirectional(), DoubleRing(2), Ring(3), AllGather(), AllGather(2))


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_the_bits_do_not_depend_on_the_order_of_arrival(route, layout):
    found = []
    for seed in range(4):
        case = Case(6, 37, Causal() & Window(20), layout, dtype="float32", seed=3)
        context = ContextParallel(Loopback(6, seed=seed), layout=layout, route=route)
        found.append(run_ring(case, inputs(case), context))
    assert all((found[0][name] == other[name]).all() for other in found[1:] for name in other)


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [2, 4])
def test_processes_equal_one_thread_by_every_route(pools, size):
    masks = Full(), Causal(), Causal() & Window(9), Causal() & Documents([5, 17, 9])
    asked = [
        (Case(size, 33, mask, layout, seed=n), route)
        for n, mask in enumerate(masks)
        for layout in (Contiguous(), Zigzag())
        for route in (*ROUTES, DoubleRing(size))
    ]
    for found in pools(size).run(run_routes, asked, timeout_s=60):
        for (case, _), one in zip(asked, found, strict=True):
            judged(case, one)


@pytest.mark.parametrize(
    ("route", "backward"),
    [(route, side) for route in [Ring(), Ring(3), *ROUTES] for side in ["keys", "queries"][: 1 + route.turns]],
    ids=str,
)
def test_the_wire_carries_what_is_counted(route, backward):
    context = ContextParallel(Loopback(4), layout=Zigzag(), route=route, backward=backward)
    plan = context.plan(40, Causal())
    q = torch.randn(1, 2, 40, 8, requires_grad=True)
    out = plan.attention(q, q, q)
    out.sum().backward()
    wire, sent = wire_of(q, q, q), context.driver.counts.bytes
    for s, taken in zip(plan.schedules, ways.taken(plan.schedules, wire, backward), strict=True):
        one, two = account(s.forward, wire, backward=False), account(taken.backward, wire, backward=True)
        for peer in range(4):
            expected = one.sent_bytes.get(peer, 0) + two.sent_bytes.get(peer, 0)
            assert sent[s.ring_rank, peer] == expected


def test_a_route_must_be_the_same_on_all_ranks_and_fit_the_ring():
    with pytest.raises(PlanError, match="inner must divide the ring's 3 ranks; got 2"):
        ContextParallel(Loopback(3), route=DoubleRing(2)).plan(12, Causal())


def test_routes_by_name():
    one = ContextParallel(Loopback(4), route="double_ring(2)").plan(16, Causal())
    assert "double_ring(inner=2)" in str(one)
    with pytest.raises(PlanError, match="did you mean 'direct'"):
        ContextParallel(Loopback(4), route="dirct")
    with pytest.raises(PlanError, match="route must be 'auto', a Route or its string; got 3"):
        ContextParallel(Loopback(4), route=3)


LINKS = Links(4, Link((1 << 20,), (1e-4,), (1e-4,)), Link((1 << 20,), (1e-3,), (2e-3,)), node=2)


def test_auto_takes_the_route_that_its_links_call_for_and_says_why(tmp_path):
    LINKS.save(tmp_path / "links.json")
    for links in (LINKS, tmp_path / "links.json", str(tmp_path / "links.json")):
        case = Case(4, 33, Full(), Contiguous())
        context = ContextParallel(Loopback(4), layout=case.layout, links=links)
        judged(case, run_ring(case, inputs(case), context))
        plan = context.plan(33, Full())
        assert plan.schedule.route == "double_ring(inner=2)" and "double_ring(inner=2)" in str(plan)
        q = torch.zeros(1, 1, 33, 4)
        assert "route chosen by its links, messages alone: double_ring(inner=2) " in str(plan.explain(q, q, q))
    with pytest.raises(PlanError, match="links must come with route='auto'"):
        ContextParallel(Loopback(4), route="ring", links=LINKS)


@pytest.mark.processes
def test_a_slow_link_between_nodes_takes_its_time_and_changes_no_number(pools, tmp_path):
    """Two nodes of two, a full mask: by a double ring 2 blocks leave each node forward, and 2 and 2 gradients backward;
    by a ring 3, 3 and 3."""
    case = Case(4, 32, Full(), Contiguous())
    message = 128 + 8 * 2 * 8 * (case.shape.kv_heads * (case.shape.head_size + case.shape.value_size))
    rate = message / 0.05
    for route, crossing in (("double_ring(2)", 2 + 2 + 2), ("ring", 3 + 3 + 3)):
        folder = tmp_path / route
        folder.mkdir()
        told = pools(4).run(over_slow_links, case, route, rate, str(folder), timeout_s=30)
        assert max(seconds for _, seconds in told) > 0.8 * crossing * message / rate
        for found, _ in told:
            judged(case, found)


@pytest.mark.processes
def test_ranks_with_other_routes_hear_of_it(pools):
    for options, words in (
        (({}, {"route": "direct"}), "route is direct on ring rank 1 and ring on ring rank 0"),
        (({}, {"backward": "auto"}), "backward is auto on ring rank 1 and keys on ring rank 0"),
    ):
        for kind, told in pools(2).run(other_routes, options, timeout_s=30):
            assert kind == "PlanMismatchError" and words in told


def test_ranks_keep_in_step_by_every_route():
    for route in ROUTES:
        results = []
        for sync in (False, True):
            context = ContextParallel(Loopback(4), route=route, sync_steps=sync)
            case = Case(4, 21, Causal(), Zigzag())
            results.append(run_ring(case, inputs(case), context))
        assert all((results[0][name] == results[1][name]).all() for name in results[0])
