"""A run as its step log measured it, beside the predicted one."""

from __future__ import annotations

import json

import pytest

from ringspun.errors import DataError
from ringspun.pictures import Scene
from ringspun.pictures.figures import timeline
from ringspun.steplog.log import FORMAT, Row, StepLog, What
from ringspun.steplog.timeline import read

MS = 1_000_000


def log_of(rank: int, *, calls: int = 1, late: int = 0, again: bool = False):
    """Two steps forward, then the same backward: 3 ms of compute, a wait of 1 ms, 2 ms more; `again`: then the last
    backward once more, of a graph that was kept."""
    log = StepLog("ring", (0, 1), rank)
    clock = [late * MS]

    def note(ms, *row, **told):
        clock[0] += ms * MS
        log.note(*row, **told)

    log.monotonic = lambda: clock[0]
    phases = [0 if call % 2 == 0 else call for call in range(2 * calls)]  # backward of the call before: 1 + its number
    for call, phase in enumerate(phases + phases[-1:] * again):
        note(5, call, phase, What.CALL)
        for what in (What.RECEIVE, What.SEND):
            source = rank if what == What.SEND else 1 - rank
            note(0, call, phase, what, 0, 0, 0, source, 1 - rank, 640)
        note(0, call, phase, What.COMPUTE, 0)
        note(3, call, phase, What.WAIT, 0, 0)
        note(1, call, phase, What.LANDED, 0, 0)
        note(0, call, phase, What.COMPUTE, 1)
        note(2, call, phase, What.END)
    return log


def rings(tmp_path, logs):
    told = {"format": FORMAT, "boot": "b", "columns": Row._fields}
    for i, log in enumerate(logs):
        (tmp_path / f"{i}.json").write_text(json.dumps({**told, "logs": [log.as_data()]}))
    return read(sorted(tmp_path.glob("*.json")))


def test_spans_and_messages_are_the_logs(tmp_path):
    (ring,) = rings(tmp_path, [log_of(0), log_of(1, late=1)])
    figure = timeline.of(log=ring)
    (run,) = figure.runs
    assert run.name == "measured" and run.seconds == pytest.approx((0.007, 0.007))  # rank 1 begins 1 ms late
    for rank in (0, 1):
        assert run.spent_s(rank, "compute") == pytest.approx(2 * 0.005)
        assert run.spent_s(rank, "wait") == pytest.approx(2 * 0.001)
    first = [s for s in run.spans if s.ring_rank == 1 and s.direction == 0 and s.end_s - s.start_s > 1e-9]
    assert [(s.what, round(1e3 * s.start_s), round(1e3 * s.end_s)) for s in first] == [
        ("compute", 1, 4), ("wait", 4, 5), ("compute", 5, 7),
    ]  # fmt: skip
    assert [(t.sender, t.receiver, t.n_bytes) for t in run.transfers if t.direction == 0] == [(1, 0, 640), (0, 1, 640)]
    assert all(t.start_s == pytest.approx(0.001) for t in run.transfers if t.direction == 0), "both have posted"


def test_the_last_whole_call_is_drawn_or_the_one_asked_for(tmp_path):
    (ring,) = rings(tmp_path, [log_of(r, calls=3) for r in (0, 1)])
    assert "call 4 of" in timeline.of(log=ring).words
    assert "call 2 of" in timeline.of(log=ring, call=2).words
    with pytest.raises(DataError, match=r"call must be .* got 7\. They hold 0, 2, 4"):
        timeline.of(log=ring, call=7)


def test_of_several_backward_calls_the_last_is_drawn(tmp_path):
    """And not all of them as one, with the time between them."""
    (ring,) = rings(tmp_path, [log_of(r, again=True) for r in (0, 1)])
    (run,) = timeline.of(log=ring).runs
    assert run.seconds == pytest.approx((0.006, 0.006)) and run.spent_s(0, "compute") == pytest.approx(0.010)
    assert len(run.transfers) == 4


def test_another_ring_is_refused(tmp_path):
    (ring,) = rings(tmp_path, [log_of(0), log_of(1)])
    from ringspun.planner.hardware import cluster

    scene = Scene.of(64, 4)
    with pytest.raises(DataError, match="of a ring of 4 ranks"):
        timeline.of(scene, *timeline.on(scene, cluster("H100", 4)), log=ring)
    scene = Scene.of(64, 2)
    both = timeline.of(scene, *timeline.on(scene, cluster("H100", 2)), log=ring)
    assert [run.name for run in both.runs] == ["predicted", "measured"]
