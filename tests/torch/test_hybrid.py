"""Heads split among some ranks, the sequence among rings of the others: dense attention, in one thread and between
processes; and what cannot be is refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from combinations import cases
from hard_cases import judged
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks_hybrid import (
    GROUPS,
    TROUBLES,
    after_groups_of_some,
    asked_otherwise,
    backward_in_another_order,
    forward_while_others_go_backward,
    in_a_hybrid,
    in_trouble,
    no_grid,
    other_degrees,
    refusals_of_groups,
)

from ringspun import Causal, Contiguous, Documents, DocumentZigzag, Full, Striped, Window, Zigzag
from ringspun.core.accounting import account, exchanged
from ringspun.core.degrees import HeadSplit
from ringspun.core.ways import taken
from ringspun.errors import PlanError
from ringspun.testing.cases import Arguments, Case, Shape, inputs
from ringspun.testing.pool import RankPool
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.execution import wire_of

DEGREES = [(r, u) for r in range(1, 5) for u in range(1, 5) if r * u <= 8]
HEADS = [(8, 8), (8, 2), (6, 3), (7, 7), (28, 7), (8, 1)]


def hybrid(case: Case, ulysses: int, inner: str = "ulysses", **asked) -> ContextParallel:
    driver = Loopback(case.ranks * ulysses, seed=case.seed)
    return ContextParallel(driver, layout=case.layout, ulysses=ulysses, inner=inner, **asked)


@st.composite
def drawn(draw):
    case = draw(cases(most_ranks=4))
    most = min(8 // case.ranks, case.shape.heads, 4)
    asked = {
        "inner": draw(st.sampled_from(["ulysses", "ring"])),
        "backward": draw(st.sampled_from(["keys", "queries"])),
    }
    return case, draw(st.integers(1, most)), asked


@settings(max_examples=80)
@given(drawn())
def test_float64_equals_the_oracle(one):
    """Any mask, layout, lengths, arguments; batch rows with masks of their own; uneven and empty shards."""
    case, ulysses, asked = one
    judged(case, run_ring(case, inputs(case), hybrid(case, ulysses, **asked, checks="checksum")))


@pytest.mark.parametrize("inner", ["ulysses", "ring"])
@pytest.mark.parametrize("ring, ulysses", DEGREES)
def test_every_nesting_and_kind_of_heads(ring, ulysses, inner):
    """Among them head counts that the degree does not divide, KV heads fewer than the degree, and cut groups."""
    layouts = [Contiguous(), Zigzag(), Striped(), DocumentZigzag()]
    for n, (heads, kv_heads) in enumerate(HEADS):
        mask = [Full(), Causal() & Documents([9, 14]), Causal() & Window(7)][n % 3]
        layout = Zigzag() if mask == Full() and n % 4 == 3 else layouts[n % 4]
        case = Case(ring, 23, mask, layout, shape=Shape(1, heads, kv_heads, 4, 3), seed=n)
        judged(case, run_ring(case, inputs(case), hybrid(case, ulysses, inner)))


@pytest.mark.parametrize("seq_len", [0, 1, 3, 5])
def test_shards_may_be_empty(seq_len):
    case = Case(2, seq_len, Causal(), Zigzag())
    judged(case, run_ring(case, inputs(case), hybrid(case, 3)))


@pytest.mark.parametrize("heads, kv_heads", [(28, 7), (8, 1), (4, 2)])
@pytest.mark.parametrize("ring", [1, 2])
def test_S5_heads_split_among_four_ranks(heads, kv_heads, ring):
    """Query and KV heads are not padded by themselves: dk, dv have the KV heads they came with, each summed once."""
    case = Case(ring, 21, Causal(), Zigzag(), shape=Shape(1, heads, kv_heads, 4, 3))
    found = run_ring(case, inputs(case), hybrid(case, 4))
    assert found["dk"].shape[1] == kv_heads
    judged(case, found)


@pytest.mark.parametrize("bias", ["alibi", "table", "function"])
def test_sinks_and_biases_are_cut_by_heads(bias):
    case = Case(2, 19, Causal(), Zigzag(), arguments=Arguments(sinks=True, bias=bias))
    judged(case, run_ring(case, inputs(case), hybrid(case, 2)))


@pytest.mark.parametrize("ring, ulysses", [(1, 2), (2, 2), (2, 3)])
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_the_wire_carries_what_is_counted(ring, ulysses, heads, kv_heads):
    """By each rank, exchanges and rings together, forward and backward."""
    case = Case(ring, 37, Causal(), Zigzag(), shape=Shape(2, heads, kv_heads, 8, 6))
    context = hybrid(case, ulysses, backward="auto")
    plan = context.plan(37, Causal())
    q, k, v = (torch.randn(2, h, 37, d, requires_grad=True) for h, d in ((heads, 8), (kv_heads, 8), (kv_heads, 6)))
    plan.attention(q, k, v).sum().backward()
    split, wire, degrees = HeadSplit(heads, kv_heads, ulysses), wire_of(q, k, v), context.degrees
    for rank in range(degrees.size):
        place, mine = degrees.place(rank)
        of_ring = replace(wire, heads=len(range(*split.queries(mine))), kv_heads=len(split.held(mine)))
        expected = sum(exchanged(split, degrees, plan._sides, rank, wire))
        back = taken(plan.schedules, of_ring, "auto")[place].backward
        for one, backward in ((plan.schedules[place].forward, False), (back, True)):
            expected += account(one, of_ring, backward=backward).total_sent_bytes
        sent = sum(n for (sender, _), n in context.driver.counts.bytes.items() if sender == rank)
        assert sent == expected


def test_bytes_are_those_of_the_formulas():
    """Ring: forward 2, backward 4 blocks of T K D, dK and dV in fp32, times (R - 1) / R, or backward 3 of T H D, dQ in
    fp32, and lse and delta; Ulysses: q, k, v, out and their gradients, times (U - 1) / U. T: the tokens of a whole
    ring, S over the other degree."""
    S, heads, d, itemsize = 64, 8, 16, 2

    def sent(ring: int, ulysses: int, kv_heads: int = 4) -> int:
        context = ContextParallel(Loopback(ring * ulysses), layout=Contiguous(), ulysses=ulysses, backward="auto")
        q, k, v = (
            torch.randn(1, h, S, d, dtype=torch.bfloat16, requires_grad=True) for h in (heads, kv_heads, kv_heads)
        )
        context.plan(S, Full()).attention(q, k, v).sum().backward()
        return sum(context.driver.counts.bytes.values()) - 128 * sum(context.driver.counts.messages.values())

    for ring in (2, 4):
        assert sent(ring, 1) == (ring - 1) * S * 4 * d * (2 * itemsize + 2 * itemsize + 2 * 4)
        queries = (ring - 1) * S * heads * (d * (2 * itemsize + 2 * itemsize + 4) + 2 * 4)
        assert sent(ring, 1, kv_heads=heads) == queries
        assert sent(ring, 2, kv_heads=heads) == queries + sent(1, 2, kv_heads=heads)
    for ulysses in (2, 4):
        assert sent(1, ulysses) * ulysses == (ulysses - 1) * S * d * itemsize * 2 * (2 * heads + 2 * 4)


def test_bits_do_not_depend_on_the_order_of_arrival():
    found = []
    for seed in range(4):
        case = Case(2, 37, Causal() & Window(20), Zigzag(), dtype="float32", seed=3, shape=Shape(1, 7, 7, 8, 5))
        context = ContextParallel(Loopback(6, seed=seed), layout=Zigzag(), ulysses=3)
        found.append(run_ring(case, inputs(case), context))
    assert all((found[0][name] == other[name]).all() for other in found[1:] for name in other)


@pytest.mark.parametrize("inner", ["ulysses", "ring"])
def test_bits_across_rings_depend_on_the_split_of_heads_alone(inner):
    """Torch's op adds up in another order where it gets fewer heads."""
    case = Case(
        1, 1100, Causal(), Zigzag(), dtype="float32", shape=Shape(1, 4, 2, 8, 8), arguments=Arguments(sinks=True)
    )
    asked = {"ulysses": 2, "inner": inner, "deterministic": "across_rings"}
    one, *others = (run_ring(case, inputs(case), ContextParallel(Loopback(2 * r), **asked)) for r in (1, 2, 3))
    assert all(np.array_equal(one[name], other[name]) for other in others for name in other)


def test_sync_steps_changes_nothing():
    case = Case(2, 30, Causal(), Zigzag())
    judged(case, run_ring(case, inputs(case), hybrid(case, 2, sync_steps=True)))


def test_a_schedule_may_be_made_in_a_loader_s_worker():
    case = Case(2, 30, Causal(), Zigzag())
    context = hybrid(case, 2)
    plan = context.partition(30).plan(context.geometry.schedule(Causal(), 30))
    judged(case, run_ring(case, inputs(case), context, plan=plan))


def test_explain_says_what_is_exchanged():
    context = ContextParallel(Loopback(4), ulysses=2)
    q, k = torch.zeros(1, 8, 64, 4), torch.zeros(1, 2, 64, 4)
    plan = context.plan(64, Causal())
    found = plan.explain(q, k, k, ring_rank=3)
    split = HeadSplit(8, 2, 2)
    assert found.exchanged == exchanged(split, context.degrees, plan._sides, 3, wire_of(q, k, k))
    assert found.ring_rank == 1
    with pytest.raises(PlanError, match="ring_rank must be from 0 to 3; got True"):
        plan.explain(q, k, k, ring_rank=True)
    assert "ring 2 x ulysses 2" in str(found)


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"ulysses": 3}, "ulysses must divide the group's 4 ranks; got 3"),
        ({"ulysses": 0}, "ulysses must divide"),
        ({"ulysses": True}, "ulysses must divide"),
        ({"ulysses": 2, "inner": "heads"}, "inner must be 'ulysses' or 'ring'"),
        ({"ring_group": object()}, "must come together"),
        ({"inner": "ring"}, "inner must come with ulysses"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(asked, words):
    with pytest.raises(PlanError, match=words):
        ContextParallel(Loopback(4), **asked)


def test_auto_takes_what_sends_the_fewest_bytes_and_says_so():
    many, few = (ContextParallel(Loopback(4), ulysses="auto", heads=h, backward="auto") for h in ((32, 32), (8, 1)))
    for asked in (
        {},
        {"route": "all_gather", "backward": "auto"},
        {"deterministic": "across_rings", "backward": "auto"},
    ):
        by_keys = ContextParallel(Loopback(4), ulysses="auto", heads=(32, 32), **asked)
        assert [cost for _, cost in by_keys.weighed_degrees] == [384.0, 768.0, 1536.0]
    assert (many.ring_size, many.ulysses_size, few.ring_size, few.ulysses_size) == (1, 4, 4, 1)
    q = torch.zeros(1, 32, 16, 4)
    assert "ring x ulysses chosen by what is sent: 1 x 4: 384, 2 x 2: 640, 4 x 1: 1152" in str(
        many.plan(16, Causal()).explain(q, q, q)
    )
    for asked in (
        {"ulysses": "auto"},
        {"heads": (4, 4)},
        {"ulysses": "auto", "heads": 4},
        {"ulysses": "auto", "heads": (4, 3)},
    ):
        with pytest.raises(PlanError, match="heads must"):
            ContextParallel(Loopback(4), **asked)


def test_more_ranks_than_heads_are_refused_before_a_message():
    context = ContextParallel(Loopback(4), ulysses=4)
    q = torch.zeros(1, 3, 8, 4)
    with pytest.raises(PlanError, match="at most the number of query heads; got 4 and 3"):
        context.plan(8, Causal()).attention(q, q, q)
    assert not context.driver.counts.messages


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", GROUPS)
def test_processes_equal_one_thread(pools, how):
    masks = Full(), Causal() & Documents([5, 17, 9])
    asked = [
        Case(GROUPS[how][0], 33, mask, layout, seed=n, shape=shape)
        for n, mask in enumerate(masks)
        for layout in (Contiguous(), Zigzag())
        for shape in (Shape(2, 7, 7, 8, 5), Shape(1, 8, 2, 8, 8))
    ]
    for found in pools(4).run(in_a_hybrid, how, asked, timeout_s=60):
        for case, one in zip(asked, found, strict=True):
            judged(case, one)


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_groups_that_are_no_grid_are_refused_on_every_rank(pools):
    for found in pools(4).run(refusals_of_groups, timeout_s=60):
        assert all(name == "PlanError" and words in text for (name, text), words in found)


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_rank_that_does_otherwise_is_an_error_on_all_in_time(trouble):
    """Also on those that share neither a ring nor an exchange with it; it is never a hang or a wrong number."""
    with RankPool(4) as pool:
        found = pool.run(in_trouble, trouble, 3, timeout_s=60)
    own = {"tokens": "ShapeError", "kernel": "KernelRefused"}.get(trouble)
    if own:
        assert found[3][0] == own
    if trouble not in ("gone", "no backward"):
        assert found[3][0] != "nothing"
    for name, words, seconds in found[:3]:
        # a mismatch where it is found at once: after a backward in which queries travelled all agree again
        assert name in ("PeerError", "TransferError", "RingBroken", "PlanMismatchError"), words
        assert seconds < (7 if trouble == "late" else 5)
    assert not own or any(own in words for _, words, _ in found[:3])


@pytest.mark.parametrize("block_size", [1, 4, "auto"])
def test_rings_of_a_hybrid_may_go_in_pieces(block_size):
    case = Case(2, 30, Causal(), Zigzag())
    judged(case, run_ring(case, inputs(case), hybrid(case, 2, block_size=block_size)))


@pytest.mark.parametrize("route", ["direct", "bidirectional", "double_ring(2)"])
def test_rings_of_a_hybrid_take_any_route(route):
    case = Case(4, 30, Causal(), Zigzag())
    judged(case, run_ring(case, inputs(case), hybrid(case, 2, route=route)))


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize("ulysses", [2, 4])
def test_rings_that_ask_for_different_attention_are_refused(pools, ulysses):
    """Ranks of one ring agree there; nothing but the exchange sees that another ring was asked for something else."""
    for what in ("scale", "softcap", "sinks", "bias", "kernel"):
        for name, words in pools(4).run(asked_otherwise, ulysses, what, timeout_s=60):
            assert name == "PlanMismatchError", (what, words)
            assert f"{what} is " in words


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize("ulysses", [2, 4])
def test_backward_in_another_order_is_an_error(pools, ulysses):
    """Else a rank would get gradients of another call, of the right shape."""
    for name, words in pools(4).run(backward_in_another_order, ulysses, timeout_s=60):
        assert name == "TransferError", words


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_a_rank_that_calls_forward_while_others_go_backward_aborts_no_process():
    with RankPool(4) as pool:
        found = pool.run(forward_while_others_go_backward, timeout_s=60)
    assert [name for name, _ in found[2:]] == ["TransferError"] * 2
    assert all(name in ("PeerError", "TransferError") for name, _ in found), found


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_ranks_may_be_in_different_numbers_of_groups():
    """Torch names a group that not all ranks make by how many groups a rank is in."""
    case = Case(2, 33, Causal(), Zigzag())
    with RankPool(4) as pool:
        for how in ("2", "mesh", "groups"):
            for found in pool.run(after_groups_of_some, how, case, timeout_s=20):
                judged(case, found)


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize("odd", [{"ulysses": 2, "inner": "ring"}, {"ulysses": 4}, {}])
def test_degrees_that_differ_are_refused_before_a_group_is_made(pools, odd):
    for name, words in pools(4).run(other_degrees, odd, timeout_s=20):
        assert name == "PlanMismatchError", words
        assert "degrees" in words


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_a_grid_with_one_row_that_fits_is_refused_on_every_rank():
    with RankPool(6) as pool:
        for name, words in pool.run(no_grid, timeout_s=20):
            assert (name, "the columns and rows of a grid" in words) == ("PlanError", True), words


def test_a_context_is_neither_doubled_nor_pickled():
    context = ContextParallel(Loopback(4), ulysses=2)
    assert copy.copy(context) is context and copy.deepcopy(context) is context
    with pytest.raises(TypeError, match="context must not be pickled"):
        pickle.dumps(context)
