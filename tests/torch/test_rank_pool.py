"""The pool of rank processes: answers, failures, ranks that hang or die, and an end with their parent."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import on_ranks
import pytest
import torch

from ringspun.testing.pool import Failure, RankFailed, RankLost, RankPool

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


def test_every_rank_is_called_and_answers_in_rank_order(pools):
    assert pools(3).run(on_ranks.describe, 5, "x") == [(r, 3, 5, "x", 1) for r in range(3)]
    sums = pools(3).run(on_ranks.sum_over_ranks, torch.tensor([1.0, 2.0]))
    assert all(torch.equal(s, torch.tensor([6.0, 12.0])) for s in sums)


def test_processes_are_started_once(pools):
    first, second = pools(2).run(on_ranks.pid), pools(2).run(on_ranks.pid)
    assert first == second and len({*first, os.getpid()}) == 3


def test_what_a_rank_raises_comes_back_with_kind_message_and_traceback(pools):
    outcomes = pools(3).attempt(on_ranks.complain, 1)
    assert outcomes[0] == 0 and outcomes[2] == 2
    failure = outcomes[1]
    assert isinstance(failure, Failure) and failure.kind == "KeyError" and failure.message == "'rank 1 complains'"
    assert 'raise KeyError(f"rank {rank} complains")' in failure.traceback and "on_ranks.py" in failure.traceback
    with pytest.raises(RankFailed, match=r"must return on every rank; it raised on 1\.\n--- ring rank 1\n") as caught:
        pools(3).run(on_ranks.complain, 1)
    assert caught.value.failures == {1: failure}


def test_what_cannot_travel_is_a_failure_not_a_hang(pools):
    assert all(o.kind in ("PicklingError", "AttributeError") for o in pools(2).attempt(on_ranks.return_a_lambda))
    assert all(o.kind == "SystemExit" for o in pools(2).attempt(on_ranks.leave))
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        pools(2).run(lambda rank: rank)
    assert pools(2).run(pow, 2) == [0, 1]


def test_a_rank_that_hangs_costs_the_pool_and_is_named():
    with RankPool(2) as pool:
        before = pool.run(on_ranks.pid)
        start = time.monotonic()
        with pytest.raises(RankLost, match=r"hang must return within 0.5 s .*no answer from ring rank 1") as lost:
            pool.run(on_ranks.hang, 1, timeout_s=0.5)
        assert time.monotonic() - start < 10 and lost.value.ranks == (1,) and lost.value.outcomes == {0: 0}
        after = pool.run(on_ranks.pid)
        assert not set(before) & set(after)
        assert all(torch.equal(s, torch.tensor(3.0)) for s in pool.run(on_ranks.sum_over_ranks, torch.tensor(1.0)))


def test_a_rank_that_dies_costs_the_pool_and_is_named():
    with RankPool(2) as pool:
        with pytest.raises(RankLost, match=r"ring rank 1 died with exit code -9") as lost:
            pool.run(on_ranks.die, 1)
        assert lost.value.ranks == (1,) and lost.value.outcomes == {0: 0}
        assert pool.run(pow, 2) == [0, 1]
        os.kill(pool.run(on_ranks.pid)[1], signal.SIGKILL)  # between two calls
        with pytest.raises(RankLost, match="ring rank 1 died"):
            pool.run(pow, 2)
        assert pool.run(pow, 2) == [0, 1]
        assert pool.close() == [0, 0]


def test_restart_gives_new_processes_and_a_new_group():
    with RankPool(2) as pool:
        before = pool.run(on_ranks.pid)
        pool.run(on_ranks.destroy_group)
        pool.restart()
        assert not set(before) & set(pool.run(on_ranks.pid))
        assert all(torch.equal(s, torch.tensor(3.0)) for s in pool.run(on_ranks.sum_over_ranks, torch.tensor(1.0)))


def test_renew_ends_the_groups_that_calls_made():
    with RankPool(2) as pool:
        before = pool.run(on_ranks.pid)
        alone = pool.run(on_ranks.groups_and_threads)
        for _ in range(3):
            pool.run(on_ranks.leave_a_group)
            assert all(groups == 2 for groups, _ in pool.run(on_ranks.groups_and_threads))
            pool.renew()
        assert pool.run(on_ranks.groups_and_threads) == alone and pool.run(on_ranks.pid) == before
        assert all(torch.equal(s, torch.tensor(3.0)) for s in pool.run(on_ranks.sum_over_ranks, torch.tensor(1.0)))


def test_a_closed_pool_says_so():
    with RankPool(1) as pool:
        assert pool.run(pow, 2) == [0]
    with pytest.raises(ValueError, match="pool must be open"):
        pool.run(pow, 2)
    pool.restart()
    assert pool.run(pow, 2) == [0] and pool.close() == [0]


def test_a_pool_of_nobody():
    with pytest.raises(ValueError, match="size must be at least 1; got 0"):
        RankPool(0)


ORPHANS = """
import os, signal, threading
import on_ranks
from ringspun.testing.pool import RankPool
if __name__ == "__main__":
    pool = RankPool(1, preload=("torch",))
    print(*pool.run(on_ranks.pid), flush=True)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    pool.run(on_ranks.hang, 0)  # busy when the parent is killed
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for the process in /proc")
def test_ranks_end_with_their_parent_even_when_it_is_killed(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    paths = os.pathsep.join([os.path.dirname(on_ranks.__file__), *sys.path])
    ended = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=50,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (pid,) = map(int, ended.stdout.split())
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked after yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
