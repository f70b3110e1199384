"""Rings of real processes: the oracle's numbers, the right errors on every rank, the known hard cases."""

from __future__ import annotations

import inspect
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import torch
from on_ranks import (
    DISAGREEMENTS,
    STRIDED,
    alone_in_a_group,
    call_and_end,
    counted,
    die_while_computing,
    disagree,
    fail_in_the_second_call,
    first_of_a_fresh_group,
    in_groups,
    leave_after_the_plan,
    leave_at_once,
    one_rank_calls_attention_instead_of_plan,
    one_rank_gathers_wrongly,
    one_rank_uses_ring_attention_wrongly,
    over_meshes,
    run_cases,
    run_sleepy,
    send_much,
    stay_away,
    strided,
    through_shard_and_gather,
    world_again,
)
from torch import distributed as dist

from ringspun import Anchors, Causal, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.testing.cases import Case, Shape, inputs, reference
from ringspun.testing.comparison import TENSORS, errors, judge
from ringspun.testing.pool import Failure, RankLost, RankPool
from ringspun.testing.torch import rounded, run_dense

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]
LAYOUTS = (Contiguous(), Zigzag(), Striped())


def judged(case: Case, found: dict) -> None:
    given = rounded(case, inputs(case))
    ref = reference(case, given)
    dense = [errors(run_dense(case, given), ref)] if case.dtype == "float32" else []
    error = errors(found, ref)
    assert judge(case.dtype, [error], dense)[0], f"{case}: {error.worst}"


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["aten_cpu", "eager"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_processes_give_the_oracle_s_numbers(pools, ranks, kernel):
    """All layouts; uneven shards, empty ones, rows without keys; on every rank."""
    documents = Causal() & Documents([9, 1, 7], [1, 11, 12])
    masks = (Full(), Causal(), Causal() & (Window(5) | Anchors(2)), documents)
    cases = [Case(ranks, n, mask, layout) for layout in LAYOUTS for mask in masks for n in (23,)]
    cases += [Case(ranks, n, mask, layout) for layout in LAYOUTS for mask in (Full(), Causal()) for n in (0, 1, 2, 5)]
    cases += [Case(ranks, 29, Causal(), layout, dtype="float32") for layout in LAYOUTS]
    for found in pools(ranks).run(run_cases, cases, kernel):
        for case, tensors in zip(cases, found, strict=True):
            judged(case, tensors)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_through_shard_and_gather(pools, layout):
    """The loss is the sum of all ranks' losses; each rank's gradient of a replicated input is its share."""
    case = Case(3, 20, Causal(), layout)
    given = inputs(case)
    shares = pools(3).run(through_shard_and_gather, case)
    right = reference(case, replace(given, dout=6 * given.dout, dlse=0 * given.dlse))  # 1 + 2 + 3
    for name in ("dq", "dk", "dv"):
        total = sum(share[name] for share in shares)
        np.testing.assert_allclose(total, getattr(right, name), rtol=0, atol=1e-11)
        held = [(share[name] != 0).any(axis=(0, 1, 3)) for share in shares]
        assert (np.sum(held, axis=0) == 1).all()  # each row's gradient is on the rank that holds it
    assert all(np.abs(share["out"] - right.out).max() < 1e-13 for share in shares)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_on_the_wire_are_those_of_accounting(pools, ranks):
    for mask in (Full(), Causal(), Window(4), Causal() & Documents([9, 8])):
        case = Case(ranks, 18, mask, Contiguous())
        for rank, (forward, backward, told, told_back) in enumerate(pools(ranks).run(counted, case)):
            assert {ends: n for ends, n in forward.items() if n} == {(rank, peer): n for peer, n in told.items()}
            assert backward == {(rank, peer): n for peer, n in told_back.items()}


def test_one_off_calls_always_find_the_present_world(pools):
    """Contexts that were kept for an earlier default group, or for none, must not answer for a later one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RankPool(2) as pool:
        assert pool.run(world_again, store.port) == [(0.0, 0.5, 0.5), (1.0, 0.5, 0.5)]


# -- agreement -------------------------------------------------------------------------------------------------------

LOCAL = {  # wrong on one rank alone: its own error there, a PeerError that quotes it elsewhere
    "a mask that does not fit": "MaskError",
    "no mask": "PlanError",
    "rows that do not fit": "ShapeError",
    "heads that do not divide": "ShapeError",
    "integers": "DtypeError",
    "no such kernel": "KernelRefused",
}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("what", [w for w in DISAGREEMENTS if w not in LOCAL])
def test_every_rank_hears_which_rank_differs_and_in_what(trusted, what, odd):
    """None aborts, none hangs, and the ring goes on."""
    for kind, message in trusted.run(disagree, odd, what, timeout_s=15):
        assert kind == "PlanMismatchError" and "must be the same on all ranks; " in message
        assert (
            f"{what} is " in message and f" on ring rank {odd} and " in message and f"(odd ranks: [{odd}])" in message
        )


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("what", LOCAL)
def test_what_is_wrong_on_one_rank_is_told_to_all(trusted, what, odd):
    outcomes = trusted.run(disagree, odd, what, timeout_s=15)
    own_kind, own_message = outcomes[odd]
    assert own_kind == LOCAL[what]
    for rank, (kind, message) in enumerate(outcomes):
        if rank != odd:
            assert kind == "PeerError" and message.startswith(f"ring rank {odd} failed in ")
            assert f"{own_kind}: {own_message}" in message


def test_two_ranks_cannot_tell_who_is_odd_but_both_raise(pools):
    for what in ("seq_len", "dtype", "heads"):
        for kind, message in pools(2).run(disagree, 1, what, timeout_s=15):
            assert kind == "PlanMismatchError" and f"{what} is " in message and "on ring rank 1 and" in message


def test_ranks_in_different_calls_hear_of_it(trusted):
    for kind, message in trusted.run(one_rank_calls_attention_instead_of_plan, timeout_s=15):
        assert kind == "PlanMismatchError"
        assert "ring rank 1 is in an attention call while ring rank 0 is in the plan" in message


def test_ring_attention_agrees_before_it_sends(trusted):
    outcomes = trusted.run(one_rank_uses_ring_attention_wrongly, timeout_s=15)
    assert [kind for kind, *_ in outcomes] == ["PeerError", "ShapeError", "PeerError"]
    assert all("q must be [B, H, T, D]; got shape (2, 4, 3)" in message for _, message, *_ in outcomes)
    for *_, kind, message in outcomes:
        assert kind == "PlanMismatchError" and "seq_len is 24 on ring rank 1 and 12 on ring rank 0" in message


# -- ranks that do not come ------------------------------------------------------------------------------------------


@pytest.fixture
def broken(pools):
    """A pool of 3 whose group is in disorder afterwards."""
    pool = pools(3)
    yield pool
    pool.restart()


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_never_calls_is_named_within_the_timeout(broken, silent):
    broken.restart()
    for rank, (kind, message, seconds) in enumerate(broken.run(stay_away, silent, 2.0, timeout_s=15)):
        if rank != silent:
            assert kind == "PeerError" and seconds < 4.0
            assert "agreement on the plan must finish within 2 s" in message
            assert f"ring rank {silent} has not been heard of" in message


def test_a_rank_that_does_not_come_again_is_named(broken):
    """It has agreed before: its old note must not pass for a new one."""
    broken.run(run_cases, [Case(3, 12, Causal(), Zigzag())])
    for rank, (kind, message, seconds) in enumerate(broken.run(stay_away, 1, 1.0, timeout_s=15)):
        if rank != 1:
            assert kind == "PeerError" and seconds < 3.0
            assert "ring rank 1 has not come, it last agreed on " in message
            assert message.count("has not come") == 1


def test_a_rank_that_leaves_between_calls_is_named(broken):
    outcomes = broken.run(leave_after_the_plan, 2, 1.0, timeout_s=15)
    assert [kind for kind, *_ in outcomes] == ["PeerError", "PeerError", "silent"]
    assert "KV of ring rank 2 at step 0 of call 1 from ring rank 2 must finish within 1 s" in outcomes[0][1]
    assert "KV of ring rank 1 at step 0 of call 1 to ring rank 2" in outcomes[1][1]
    assert all(seconds < 3.0 for *_, seconds in outcomes)


def test_an_error_of_one_rank_in_a_later_call_reaches_the_others(broken):
    """Facts are agreed on already, so nobody waits in an agreement: the timeout's message quotes it."""
    outcomes = broken.run(fail_in_the_second_call, 1, 1.0, timeout_s=15)
    assert [kind for kind, *_ in outcomes] == ["PeerError", "ShapeError", "PeerError"]
    for rank in (0, 2):
        assert "ring rank 1 reported ShapeError: q, k and v must hold 4 tokens in dim 2" in outcomes[rank][1]


def test_an_error_of_one_rank_in_gather_reaches_the_others(broken):
    outcomes = broken.run(one_rank_gathers_wrongly, timeout_s=15)
    assert [kind for kind, _ in outcomes] == ["PeerError", "ShapeError", "PeerError"]
    for rank in (0, 2):
        assert "ring rank 1 failed in a gather: ShapeError: gather must get 4 rows along dim 0" in outcomes[rank][1]


def test_a_rank_that_is_killed_is_noticed_by_all(pools):
    """At once, not at the timeout; a rank that needs nothing more of it notices at its next call."""
    with pytest.raises(RankLost, match="ring rank 1 died with exit code -9") as lost:
        pools(3).attempt(die_while_computing, 1, timeout_s=9)
    assert lost.value.ranks == (1,) and sorted(lost.value.outcomes) == [0, 2]
    for heard in lost.value.outcomes.values():
        assert not isinstance(heard, Failure)
        assert any(kind == "PeerError" and "ring rank 1" in message for kind, message in heard)


# -- D · distributed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_D1_nobody_waits_for_the_others_to_send_first(pools, ranks):
    """Everyone sends first and the ring hangs, at 4 ranks but not at 3; here every step starts at a random time, and
    blocks are of a few bytes."""
    small = Shape(batch=1, heads=1, kv_heads=1, head_size=1, value_size=1)
    for layout in (Contiguous(), Zigzag())[ranks > 4 :]:
        case = Case(ranks, 2 * ranks + 1, Causal(), layout, shape=small)
        for found in pools(ranks).run(run_sleepy, case, ranks, 0.2, timeout_s=20):
            judged(case, found)


@pytest.mark.parametrize("ranks", [2, 3])
def test_D1_blocks_of_64_megabytes(pools, ranks):
    """Larger than any buffer of the system: both sides send before either receives, at random times."""
    found = pools(ranks).run(send_much, 64, 0.1, timeout_s=30)
    np.testing.assert_allclose(found, [((1 + ranks) / 2, 1.0, 64.0)] * ranks, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_D2_ring_attention_is_the_first_communication_of_its_group(pools, ranks):
    """The first batched messages of a group hang unless all take part: causal skipping leaves some without any."""
    for mask in (Causal(), Window(2), Documents([2], [2])):
        case = Case(ranks, 3 * ranks + 1, mask, Contiguous())
        for found in pools(ranks).run(first_of_a_fresh_group, case, timeout_s=20):
            judged(case, found)


@pytest.mark.parametrize(
    ("groups", "sort_ranks"),
    [
        ([[1, 3], [0, 2]], True),
        ([[3, 0, 1]], False),
        ([[3, 1], [2, 0]], False),
        ([[2, 3, 1, 0]], False),
        ([[5, 1, 3], [0, 2, 4]], False),
        ([[7, 2, 5, 0], [1, 6, 3, 4]], False),
    ],
    ids=str,
)
def test_D3_groups_that_are_not_the_world(pools, groups, sort_ranks):
    """Rank in the group taken for rank in the world: they agree on the world, so tests pass."""
    if not sort_ranks and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        pytest.skip("this torch sorts the ranks of every group")
    cases = [Case(len(g), 17 + n, Causal() & Window(9 + n), LAYOUTS[n], seed=n) for n, g in enumerate(groups)]
    world = max(4, 1 + max(rank for g in groups for rank in g))
    outcomes = pools(world).run(in_groups, groups, cases, sort_ranks, timeout_s=20)
    for rank, (number, place, found, held) in enumerate(outcomes):
        member = [n for n, g in enumerate(groups) if rank in g]
        if not member:
            assert (number, place, found) == (-1, None, None)
            continue
        assert [number] == member and place == (groups[number].index(rank), len(groups[number]))
        judged(cases[number], found)
        part = cases[number].layout.deal(cases[number].seq_len, len(groups[number]), None)
        assert held == [p for r, a, b, step in part if r == place[0] for p in range(a, b, step)]


def test_D3_meshes(pools):
    """The ring is a dimension of the mesh, not the mesh; a group without this rank is no group of it."""
    case = Case(2, 13, Causal(), Zigzag())
    for rank, (found, ring_rank, of_mesh, of_others) in enumerate(pools(4).run(over_meshes, case)):
        judged(case, found)
        assert ring_rank == rank % 2
        assert of_mesh[0] == "PlanError" and "mesh must have one dimension, or the two" in of_mesh[1]
        assert of_others[0] == "PlanError" and "group must be a process group that this rank belongs to" in of_others[1]


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("kind", STRIDED)
def test_D5_keys_and_values_of_any_strides_between_processes(pools, kind, ranks):
    """Raw storage is sent: wrong data in silence."""
    for differences in pools(ranks).run(strided, kind):
        assert max(differences) <= 1e-14


@pytest.mark.parametrize(("ranks", "calls"), [(2, 1), (2, 10), (4, 10)])
def test_D8_leaving_at_once_loses_nothing(pools, ranks, calls):
    """The sender returns without waiting, and its connection closes under the receiver."""
    with RankPool(ranks) as pool:
        for totals in pool.run(leave_at_once, calls, timeout_s=20):
            assert totals == pytest.approx(range(calls))
        assert pool.close() == [0] * ranks


def test_D8_a_process_that_ends_after_its_call(pools):
    """Nobody destroys the group or waits for the others; each has what it needs, and has sent what they need."""
    pools(2)  # its server forks processes that have imported torch
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=call_and_end, args=(rank, 4, store.port), daemon=True) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(30)
        process.kill()  # where it hangs
        process.join()
    assert [process.exitcode for process in ranks] == [0] * 4


def test_D11_a_group_of_one_inside_a_bigger_job(pools):
    """Send to self raises; a group of one must not send."""
    case = Case(1, 15, Causal(), Zigzag())
    for found, ring_size, messages in pools(2).run(alone_in_a_group, case):
        judged(case, found)
        assert (ring_size, messages) == (1, 0)


def test_N12_same_bits_whenever_the_others_come(pools):
    """The order in which messages arrive must not change the order of the sums."""
    case = Case(3, 31, Causal(), Zigzag(), dtype="float32")
    runs = [pools(3).run(run_sleepy, case, seed, 0.02, timeout_s=20) for seed in (1, 2, 3)]
    for run in runs:
        for found in run:
            assert all((found[name] == runs[0][0][name]).all() for name in TENSORS)
    judged(case, runs[0][0])
    assert torch.get_num_threads() == 1
