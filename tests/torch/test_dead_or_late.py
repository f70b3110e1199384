"""D9: whatever happens to one rank, wherever: the others hear of it in time, and hear what it was."""

from __future__ import annotations

import json
import multiprocessing
import re
from pathlib import Path

import pytest
from on_ranks_dead_or_late import TIMEOUT_S, Fault, end_of_a_rank, hang_and_tell, leave_logs, suffer, suffer_all
from torch import distributed as dist

from ringspun.steplog.timeline import read
from ringspun.steplog.verdict import Kind, judge
from ringspun.testing.pool import Failure, RankLost, RankPool

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]
WHERE = ("before", "forward", "between", "backward")
SETTINGS = {2: (0, 1), 4: (0, 1, 2, 3), 3: (3, 0, 1)}
"""World ranks of a ring of each size; the last is unsorted and a part of four."""
IN = {
    "before": "before call 0",
    "forward": r"in call (4 \(forward\), in 1 of Sequential|5 \(backward of call 4\))",  # who needs no more goes on
    "between": r"in call 4 \(forward\), in 1 of Sequential",
    "backward": r"in call 5 \(backward of call 4\)",
}


def check(fault: Fault, outcomes: dict[int, tuple[str, str, float]]) -> None:
    """Every survivor raised in time and named itself, the peer, the step and the call."""
    size = len(fault.ranks)
    for ring_rank, world_rank in enumerate(fault.ranks):
        if world_rank not in outcomes or ring_rank == fault.victim:
            continue
        kind, words, seconds = outcomes[world_rank]
        assert kind == "PeerError", (fault, words)
        assert seconds < TIMEOUT_S + 2, (fault, seconds)
        assert re.match(rf"ring rank {ring_rank} of {size}, {IN[fault.where]}: ", words), words
        assert f"ring rank {fault.victim} " in words.partition(": ")[2] + " ", words
        if fault.where == "before":
            assert f"ring rank {fault.victim} has not been heard of" in words
        else:
            assert re.search(
                r"K?D?KV of ring rank \d at step \d of call \d (from|to) ring rank \d must finish within 1 s; ", words
            )
        if fault.how == "kill" and fault.where != "before":  # who waited for a living neighbour quotes that one
            assert re.search(rf"(from|to) ring rank {fault.victim} must finish within 1 s", words), words
        if fault.how == "raise" and fault.where in ("forward", "backward"):
            assert f"ring rank {fault.victim} reported ArithmeticError: the victim's own words" in words


def check_logs(fault: Fault) -> None:
    """The dumps that the ranks left lead to the victim."""
    rings = [r for r in read(sorted(Path(fault.folder).glob("*.json"))) if r.ranks == fault.ranks]
    verdict = judge(max(rings, key=lambda r: r.window[1]))
    assert verdict.root is not None and verdict.root.ranks == (fault.victim,), (fault, verdict.root)
    kinds = {"kill": {Kind.ABSENT}, "sleep": {Kind.OUTSIDE, Kind.COMPUTE, Kind.ABSENT}, "raise": {Kind.ABSENT}}
    if fault.how == "raise" and fault.where in ("forward", "backward"):
        kinds["raise"] = {Kind.FAILED}
    assert verdict.root.kind in kinds[fault.how], (fault, verdict.root)


@pytest.mark.parametrize("size", SETTINGS)
@pytest.mark.parametrize("how", ["raise", "sleep"])
def test_D9_a_rank_that_fails_or_comes_late(pools, tmp_path, how, size):
    """All the places of one kind in one go, each in a group of its own; the pool goes on."""
    ranks = SETTINGS[size]
    faults = [
        Fault(how, where, n % size, ranks, str(tmp_path / where)) for n, where in enumerate(WHERE, start=size - 1)
    ]
    outcomes = pools(2 if size == 2 else 4).run(suffer_all, faults, timeout_s=40)
    for n, fault in enumerate(faults):
        check(fault, {rank: mine[n] for rank, mine in enumerate(outcomes)})
        check_logs(fault)


@pytest.mark.parametrize(
    ("size", "where"), [(2, "forward"), (2, "before"), (4, "forward"), (4, "backward"), (4, "between"), (3, "backward")]
)
def test_D9_a_rank_that_is_killed(pools, tmp_path, size, where):
    ranks = SETTINGS[size]
    fault = Fault("kill", where, size // 2, ranks, str(tmp_path))
    with pytest.raises(RankLost, match="died with exit code -9") as lost:
        pools(2 if size == 2 else 4).attempt(suffer, fault, timeout_s=20)
    assert lost.value.ranks == (ranks[fault.victim],)
    outcomes = lost.value.outcomes
    assert not any(isinstance(o, Failure) for o in outcomes.values())
    assert {r for r in ranks if r in outcomes} == set(ranks) - {ranks[fault.victim]}
    check(fault, outcomes)
    check_logs(fault)


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_D9_survivors_exit_with_an_error(pools, how, tmp_path):
    """Not by an abort of gloo's, and none stays."""
    pools(2)  # the server that forks has its modules then
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fault = Fault(how, "forward", 2, (0, 1, 2, 3), str(tmp_path), timeout_s=5.0)
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=end_of_a_rank, args=(r, 4, store.port, fault)) for r in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [1, 1, -9 if how == "kill" else 1, 1]


# -- the step log of real processes ----------------------------------------------------------------------------------


def test_a_rank_that_hangs_in_gloo_dumps_at_the_signal(tmp_path):
    """It sits in C++ and runs no Python of its own; and it goes on unharmed."""
    with RankPool(2) as pool:
        stuck, other = pool.run(hang_and_tell, str(tmp_path), timeout_s=40)
    assert stuck["total"] == other["total"] == 24.0
    assert stuck["heard"], "the handler that was there before must still run"
    assert other["file"].startswith("ringspun-rank0-")
    told = json.loads((tmp_path / other["file"]).read_text())
    assert told["reason"] == "signal SIGUSR1" and told["failure"] == ""
    verdict = judge(*read(sorted(tmp_path.glob("*.json"))))
    assert verdict.waits == {0: 1}
    assert verdict.root is not None and (verdict.root.kind, verdict.root.ranks) == (Kind.OUTSIDE, (1,))


def test_the_logs_of_a_contiguous_causal_ring_say_imbalance(pools, tmp_path):
    pools(3).run(leave_logs, str(tmp_path), None)
    cause = judge(*newest(tmp_path)).cause
    assert cause is not None and (cause.kind, cause.ranks) == (Kind.COMPUTE, (2,))


def test_the_logs_of_a_ring_with_a_slow_link_say_link(pools, tmp_path):
    pools(3).run(leave_logs, str(tmp_path), (1, 2))
    cause = judge(*newest(tmp_path)).cause
    assert cause is not None and (cause.kind, cause.ranks) == (Kind.LINK, (1, 2))


def newest(folder: Path):
    """The newest ring's; a pool's processes hold logs of other groups too."""
    rings = read(sorted(folder.glob("*.json")))
    return [max(rings, key=lambda r: r.window[1])]
