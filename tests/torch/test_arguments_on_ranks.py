"""Ranks of processes that ask for different arguments: the right error on every rank."""

from __future__ import annotations

import pytest
from on_ranks_arguments import (
    DIFFERENCES,
    differ,
    function_raises_late,
    functions_differ,
    one_rank_has_other_keys,
    tables_differ,
)

from ringspun import Contiguous

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

LOCAL = {  # wrong on one rank alone: its own error there, a PeerError that quotes it elsewhere
    "sinks of another shape": "ShapeError",
    "a table that does not fit": "ShapeError",
    "a dense bias": "DtypeError",
    "another batch": "ShapeError",
    "no softcap": "PlanError",
    "a kernel that cannot": "KernelRefused",
    "a function that raises": "LookupError",
}


@pytest.mark.parametrize("what", [w for w in DIFFERENCES if w not in LOCAL])
def test_every_rank_hears_which_argument_differs(trusted, what):
    odd = list(DIFFERENCES).index(what) % 3
    name = "mask" if what == "the order of the masks" else what
    for kind, message in trusted.run(differ, odd, what, timeout_s=15):
        assert kind == "PlanMismatchError" and f"{name} is " in message
        assert f" on ring rank {odd} and " in message and f"(odd ranks: [{odd}])" in message


@pytest.mark.parametrize("what", LOCAL)
def test_an_argument_that_is_wrong_on_one_rank_is_told_to_all(trusted, what):
    odd = list(DIFFERENCES).index(what) % 3
    outcomes = trusted.run(differ, odd, what, timeout_s=15)
    own_kind, own_message = outcomes[odd]
    assert own_kind == LOCAL[what]
    for kind, message in outcomes[:odd] + outcomes[odd + 1 :]:
        assert kind == "PeerError" and message.startswith(f"ring rank {odd} failed in ")
        assert f"{own_kind}: {own_message}" in message


def test_tables_of_different_shapes(trusted):
    for kind, message in trusted.run(tables_differ, 1, timeout_s=15):
        assert kind == "PlanMismatchError" and "(odd ranks: [1])" in message
        assert "5 rows" in message or "[5, 2]" in message


@pytest.mark.parametrize(("how", "afterwards"), [("computed", "RingBroken"), ("tried", "nothing")])
def test_a_function_that_fails_on_one_rank_is_heard_of(pools, how, afterwards):
    """None hangs; and a ring that has begun to compute is not used again."""
    pool = pools(3)
    try:
        outcomes = pool.run(function_raises_late, 1, how, timeout_s=30)
    finally:
        pool.restart()
    assert outcomes[1][0] == ("LookupError", "not for these positions")
    for rank, (first, second) in enumerate(outcomes):
        assert first[0] == ("LookupError" if rank == 1 else "PeerError"), first
        assert second[0] == afterwards


@pytest.mark.parametrize(
    ("sides", "name"),
    [
        ({"key_len": 13}, "key_len"),
        ({"key_len": 12, "query_start": 1}, "query_start"),
        ({"key_layout": Contiguous()}, "key_layout"),
    ],
    ids=str,
)
def test_keys_of_one_rank_alone_are_named(trusted, sides, name):
    for kind, text in trusted.run(one_rank_has_other_keys, 1, sides, timeout_s=30):
        assert kind == "PlanMismatchError" and f"{name} is " in text and "on ring rank 1" in text


def test_functions_of_one_name_are_told_apart_by_what_they_give(pools):
    for kind, text in pools(2).run(functions_differ, timeout_s=30):
        assert kind == "PlanMismatchError" and "bias at some positions is" in text
