"""Traces: that they are what viewers read, that spans of a track never overlap, and that no time is lost."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Causal
from ringspun.pictures.figures import timeline
from ringspun.pictures.trace import trace, trace_text
from ringspun.steplog import What, dump
from ringspun.steplog.timeline import read
from ringspun.torch import ContextParallel, Loopback
from tests.pictures.scenes import SCENES, predicted

NAMED = {"process_name": {"name"}, "thread_name": {"name"}, "process_sort_index": {"sort_index"}}
"""Metadata events of the format and their arguments."""


def spans(told):
    return [e for e in told["traceEvents"] if e["ph"] == "X"]


def judge(told) -> None:
    """The documented format, for the two kinds of events that are written: complete ones and metadata."""
    assert set(told) == {"traceEvents", "displayTimeUnit", "otherData"} and told["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in told["otherData"].values())
    for event in told["traceEvents"]:
        assert isinstance(event["name"], str) and type(event["pid"]) is int and type(event["tid"]) is int
        assert event["ph"] in ("X", "M") and isinstance(event["args"], dict) and event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["cat"], str) and event["dur"] >= 0
            assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        else:
            assert set(event["args"]) == NAMED[event["name"]]
    named = {(e["pid"], e["tid"]) for e in told["traceEvents"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in spans(told)} <= named


def no_overlaps(told) -> None:
    tracks = defaultdict(list)
    for e in spans(told):  # in nanoseconds, which the microseconds are written in
        start = round(e["ts"] * 1000)
        tracks[e["pid"], e["tid"]].append((start, start + round(e["dur"] * 1000)))
    for found in tracks.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(found)))


def of_kind(told, kind):
    return [e for e in spans(told) if e["cat"] == kind]


@pytest.mark.parametrize("name", SCENES)
def test_a_predicted_trace_is_whole(name):
    figure = predicted(SCENES[name])
    (run,) = figure.runs
    told = json.loads(trace_text(figure))
    judge(told)
    no_overlaps(told)
    for place, rank in enumerate(figure.ranks):
        mine = [e["dur"] for e in of_kind(told, "compute") if e["pid"] == place + 1]
        assert sum(mine) == pytest.approx(run.spent_s(rank, "compute") * 1e6, abs=0.002 * (len(mine) + 1))
    messages = of_kind(told, "message")
    assert len(messages) == len(run.transfers)
    assert sum(e["args"]["bytes"] for e in messages) == sum(t.n_bytes for t in run.transfers)


Times = st.integers(0, 30)
Sent = st.tuples(st.integers(0, 2), st.integers(0, 2), Times, Times)


@given(st.lists(Sent, max_size=12))
def test_messages_under_way_at_once_lie_on_different_tracks(sent):
    figure = predicted(SCENES["zigzag"])
    transfers = tuple(timeline.Transfer(a, b, 0, 0, 0, 0, 8, min(s, e) / 1e9, max(s, e) / 1e9) for a, b, s, e in sent)
    told = trace(replace(figure, runs=(replace(figure.runs[0], transfers=transfers),)))
    judge(told)
    no_overlaps(told)
    assert len(of_kind(told, "message")) == len(sent)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in told["traceEvents"] if e["name"] == "thread_name"}
    found = sorted((e["pid"] - 1, int(names[e["pid"], e["tid"]].split()[2])) for e in of_kind(told, "message"))
    assert found == sorted((a, b) for a, b, _, _ in sent)


def measured(folder):
    """A ring's log, and of each rank how long it computed (ns) by the rows themselves."""
    ring = Loopback(3)
    plan = ContextParallel(ring).plan(60, Causal())
    x = [torch.ones(1, 2, 60, 4, requires_grad=True) for _ in range(3)]
    plan.attention(*x).sum().backward()
    rows = [log.rows for log in ring.state.logs]
    name = ring.state.logs[0].ring
    (log,) = [m for m in read([dump(folder)]) if m.name == name]
    return log, [computed(mine) for mine in rows]


def computed(rows) -> int:
    """Time in calls but for that from WAIT to LANDED (ns)."""
    total, inside, waits = 0, False, False
    for row, following in pairwise(rows):
        if row.what in (What.CALL, What.END):
            inside = row.what == What.CALL
        elif row.what in (What.WAIT, What.LANDED):
            waits = row.what == What.WAIT
        if row.phase >= 0 and inside and not waits:
            total += following.monotonic - row.monotonic
    return total


def test_a_measured_trace_computes_as_long_as_the_step_log_says(tmp_path):
    log, computes = measured(tmp_path)
    figure = timeline.of(log=log)
    told = json.loads(trace_text(figure))
    judge(told)
    no_overlaps(told)
    for rank, time in enumerate(computes):
        mine = [e for e in of_kind(told, "compute") if e["pid"] == rank + 1]
        assert sum(round(e["dur"] * 1000) for e in mine) == pytest.approx(time, abs=len(mine) + 1)
        assert {e["args"]["pass"] for e in mine} == {"forward", "backward"}
    assert of_kind(told, "message")


def test_the_predicted_and_the_measured_lie_side_by_side(tmp_path):
    """Each run's ranks are processes of their own, in the runs' order, named after them."""
    log, _ = measured(tmp_path)
    one, other = predicted(SCENES["documents, direct"]), timeline.of(log=log)
    told = trace(replace(one, runs=(*one.runs, *other.runs)))
    judge(told)
    no_overlaps(told)
    names = {e["pid"]: e["args"]["name"] for e in told["traceEvents"] if e["name"] == "process_name"}
    assert names == {
        1: "predicted: rank 0", 2: "predicted: rank 1", 3: "predicted: rank 2",
        4: "measured: rank 0", 5: "measured: rank 1", 6: "measured: rank 2",
    }  # fmt: skip
