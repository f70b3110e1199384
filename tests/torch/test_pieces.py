"""Blocks smaller than a shard: exact whatever their size, counted, and as many as links and compute call for."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hard_cases import judged
from on_ranks_bits import different, in_one_thread
from on_ranks_pieces import choose_together

from ringspun import Causal, Contiguous, Documents, Full, Ring, Striped, Window, Zigzag
from ringspun.core.links import Link, Links
from ringspun.core.wire import Format, Payload
from ringspun.errors import PlanError
from ringspun.testing.cases import Case, all_masks, inputs
from ringspun.testing.sleeping import Sleeping
from ringspun.testing.torch import run_ring
from ringspun.testing.virtual_links import VirtualLinks
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.pieces import CALLS, pieces_of

LENGTH = 29
"""Shards of unequal lengths on every ring, some with fewer rows than pieces."""


@pytest.mark.parametrize("size", range(1, 9))
def test_float64_equals_the_oracle_in_any_number_of_pieces(size):
    layouts, masks = itertools.cycle([Contiguous(), Zigzag(), Striped()]), itertools.cycle(all_masks(LENGTH))
    longest = -(-LENGTH // size)
    for pieces in range(1, 6):
        for mask in itertools.islice(masks, 2):
            case = Case(size, LENGTH, mask, next(layouts), seed=pieces)
            context = ContextParallel(Loopback(size), layout=case.layout, block_size=-(-longest // pieces))
            judged(case, run_ring(case, inputs(case), context))


def test_more_pieces_than_a_shard_has_rows():
    documents = Documents([20, 1, 3, 5])
    for block_size in (1, 2, 1000):
        case = Case(6, LENGTH, Causal() & documents, Zigzag())
        context = ContextParallel(Loopback(6), layout=case.layout, block_size=block_size)
        judged(case, run_ring(case, inputs(case), context))


def test_one_piece_has_the_bits_of_whole_shards_and_every_order_of_arrival_the_same():
    case = Case(4, 40, Causal() & Window(23), Zigzag(), dtype="float32")
    whole, one = in_one_thread(case), in_one_thread(case, block_size=10)
    assert not different(whole, one)
    several = []
    for seed in range(3):
        context = ContextParallel(Loopback(4, seed=seed), layout=Zigzag(), block_size=3)
        several.append(run_ring(case, inputs(case), context))
    assert not any(different(several[0], other) for other in several[1:])


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_buffers_are_those_of_whole_shards_and_a_piece(size, pieces):
    rows = 24

    row = Format(1, 8, 8, 2, 2, "float32", 4, 4)  # 128 bytes of a key and value: messages are whole lines

    def held(block_size):
        plan = ContextParallel(Loopback(size), layout=Contiguous(), block_size=block_size).plan(size * rows, Full())
        found = Counter()
        for (payload, _), n_bytes in plan.schedule.slot_bytes(plan.schedule.backward, row).items():
            found[payload] += (n_bytes - 128) // 128
        return found

    whole, cut, piece = held(None), held(rows // pieces), rows // pieces
    assert cut[Payload.KV] == 2 * rows and cut[Payload.DKV] <= max(whole[Payload.DKV], 2 * rows) + piece


def test_a_block_size_goes_with_the_ring_alone():
    for options in (
        {"route": "direct"},
        {"route": Ring(4)},
        {"deterministic": "across_rings"},
        {"links": Links(2, Link((1,), (1.0,), (1.0,)))},
    ):
        with pytest.raises(PlanError, match="block_size must come with the ring"):
            ContextParallel(Loopback(2), block_size=8, **options)
    for wrong in (0, -3, True, 2.5):
        with pytest.raises(PlanError, match="block_size must be a number of tokens >= 1; got"):
            ContextParallel(Loopback(2), block_size=wrong)
    with pytest.raises(PlanError, match="block_size must be None, a number of tokens or 'auto'; got 'atuo'"):
        ContextParallel(Loopback(2), block_size="atuo")
    assert ContextParallel(Loopback(2), block_size=8, route="ring").geometry.route == Ring(8)


def test_explain_says_how_large_blocks_are_and_why():
    x = torch.zeros(1, 1, 64, 4)
    told = [
        str(ContextParallel(Loopback(4), block_size=size).plan(64, Causal()).explain(x, x, x))
        for size in (None, 6, "auto")
    ]
    assert "blocks" not in told[0]
    assert "blocks of at most 6 tokens, 3 of every shard: as told" in told[1] and "by ring(block_size=6)" in told[1]
    assert "blocks are whole shards: nothing was measured yet" in told[2]


def test_schedules_made_elsewhere_keep_their_blocks():
    context = ContextParallel(Loopback(2), block_size="auto")
    part = context.partition(16)
    assert part.plan(context.geometry.schedule(Causal(), 16)).schedule.route == "ring"
    fixed = ContextParallel(Loopback(2), block_size=3)
    assert part.plan(fixed.geometry.schedule(Causal(), 16)).schedule.route == "ring(block_size=3)"
    direct = ContextParallel(Loopback(2), route="direct").geometry.schedule(Causal(), 16)
    with pytest.raises(PlanError, match="schedule must be made from this partition's length, layout, route"):
        part.plan(direct)


def ring_in_time(size, tokens=24, **options):
    """Virtual links, a context of a ring over them, and its calls: seconds of forward, and of forward + backward, with
    blocks that take 1 s to compute with; `link_s` is how long one takes on its link."""
    links = VirtualLinks(size, bytes_per_s=1.0)
    context = ContextParallel(links, layout=Contiguous(), **options)
    q = torch.zeros(1, 1, size * tokens, 1024, requires_grad=True)
    kernel = Sleeping(1 / tokens**2, sleep=links.spend)

    def called(plan, link_s, backward=True):
        links.bytes_per_s = 2 * 4 * 1024 * tokens / link_s
        begin = max(links.now)
        out = plan.attention(q, q, q, kernel=kernel)
        forward = max(links.now) - begin
        if backward:
            out.backward(torch.zeros_like(out))
        return forward, max(links.now) - begin

    return context, called


@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
@pytest.mark.parametrize("link_s", [0.25, 1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("size", [2, 4])
def test_forward_takes_all_messages_and_the_last_piece_or_all_tiles(size, link_s, pieces):
    """Up to headers, and to pieces that a rank which computes relays late."""
    context, called = ring_in_time(size, block_size=24 // pieces)
    forward, _ = called(context.plan(size * 24, Full()), link_s, backward=False)
    expected = max(size, (size - 1) * max(1.0, link_s) + 1 / pieces) if pieces > 1 else (size - 1) * max(1, link_s) + 1
    assert forward == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("link_s", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("size", [2, 4])
def test_backward_is_no_slower_in_pieces(size, link_s):
    spent = []
    for pieces in (1, 4):
        context, called = ring_in_time(size, block_size=24 // pieces)
        forward, both = called(context.plan(size * 24, Full()), link_s)
        spent.append(both - forward)
    assert spent[1] <= 1.01 * spent[0], spent


def test_gradients_on_their_way_home_hold_nobody_up():
    """8.94 s where they are waited for in the step after they were sent."""
    context, called = ring_in_time(3, block_size=6)
    forward, both = called(context.plan(3 * 24, Full()), 2.0)
    assert both - forward < 8.8


def test_pieces_become_more_when_links_slow_and_one_again_when_they_do_not():
    context, called = ring_in_time(2, block_size="auto")
    seen = []
    for link_s in (0.5, 2.5, 0.5, 1.5, 2.5):
        for _ in range(5):
            plan = context.plan(48, Full())
            seen.append(pieces_of(plan.schedule))
            for _ in range(CALLS):
                called(plan, link_s, backward=False)
    settled = [set(seen[i + 3 : i + 5]) for i in range(0, len(seen), 5)]
    assert settled == [{1}, {8}, {1}, {2}, {8}], settled


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_processes_choose_alike_and_plans_that_were_made_stay(pools):
    case = Case(2, 33, Causal(), Zigzag())
    told = pools(2).run(choose_together, case, [1, 2, 4], timeout_s=60)
    pieces, chosen, _ = told[0]
    assert pieces == [1, 2, 4] and all("a shard's keys took" in c.why or "looks" in c.why for c in chosen), chosen
    assert told[1][:2] == told[0][:2]
    for _, _, results in told:
        for found in results:
            judged(case, found)
