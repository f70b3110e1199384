"""`ringspun bench checkpointing`."""

from __future__ import annotations

import json

import pytest

from tests.test_cli_bench_machine import told


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_every_policy_is_measured_and_sends_what_was_predicted():
    shape = ["--seq-len", "64", "--layers", "2", "--head-size", "8", "--hidden-size", "32"]
    rows = json.loads(told("checkpointing", "--ranks", "2", *shape, "--repeats", "3", "--json"))["rows"]
    assert [row["policy"] for row in rows] == ["none", "layer", "attention", "ring_step 1"]
    for row in rows:
        for same in ("laps", "sent_bytes"):
            assert row["measured"][same] == row["predicted"][same], (row["policy"], same)
        assert row["seconds"] > 0 and row["measured"]["peak_bytes"] > row["measured"]["kept_bytes"] > 0
    assert [row["measured"]["laps"] for row in rows] == [2, 3, 2, 1]
    measured, predicted = ([row[kind]["extra_flops"] for row in rows] for kind in ("measured", "predicted"))
    assert measured[0] == 0 < measured[2] == measured[3] < measured[1]
    assert all(m <= p for m, p in zip(measured, predicted, strict=True)), "the last product is not computed again"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "1"], "ranks must be at least 2; got 1."),
        (["--repeats", "1"], "repeats must be at least 3; got 1."),
        (["--heads", "3"], "kv-heads must divide heads; got 2 and heads = 3."),
    ],
)
def test_what_cannot_run_is_told_in_one_line(options, words):
    line = told("checkpointing", *options, code=2)
    assert line.startswith("ringspun bench: ") and words in line and line.count("\n") == 1
