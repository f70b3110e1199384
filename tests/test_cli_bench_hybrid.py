"""`ringspun bench ring --ulysses` and `bench strategies`."""

from __future__ import annotations

import json

import pytest

from ringspun.testing.strategies import STRATEGIES
from tests.test_cli_bench_machine import told


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_every_split_is_measured_with_its_bytes_and_hops():
    shape = ["--heads", "4", "--head-size", "8", "--seq-len", "64", "--mask", "full", "--pairs", "9"]
    rows = json.loads(told("ring", "--ranks", "2", "--ulysses", "1,2", *shape, "--json"))["rows"]
    assert [(r["ulysses"], r["hops"]) for r in rows] == [(1, 1), (2, 0)]
    # a ring: K and V, then q, dO, lse, delta, and dQ, to the other rank; an exchange: 6 messages of half the heads
    assert rows[0]["sent_bytes"] == (2 + 2 + 2) * 32 * 4 * 8 * 4 + 3 * 128
    assert rows[1]["sent_bytes"] == 8 * 32 * 2 * 8 * 4 + 6 * 128
    assert all(r["ring_s"] > 0 for r in rows)


def test_degrees_that_do_not_divide_are_told_in_one_line():
    line = told("ring", "--ranks", "4", "--ulysses", "3", code=2)
    assert "ulysses must divide ranks and be at most heads; got 3, 4 and 4." in line


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_strategies_are_measured_and_all_give_one_loss():
    shape = ["--seq-len", "64", "--heads", "4", "--kv-heads", "2", "--head-size", "8", "--hidden-size", "32"]
    rows = json.loads(told("strategies", "--ranks", "2", *shape, "--repeats", "3", "--json"))["rows"]
    assert [row["strategy"] for row in rows] == list(STRATEGIES)
    assert all(row["loss_error"] < 1e-5 and row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows)
    sent = {row["strategy"]: row["sent_bytes"] for row in rows}
    residual = 64 * 32 * 4
    assert sent["tp"] == 4 * residual  # 2 all-reduces forward and 2 backward, each (n - 1) / n twice
    assert sent["tp+sp"] == 8 * residual / 2  # 2 gathers and 2 scatters forward, as many backward
    weights = {row["strategy"]: row["gradient_bytes"] for row in rows}
    assert weights["ring"] == weights["ulysses"] == (4 * 32 * 32 - 2 * 32 * 16 + 3 * 32 * 32 + 2 * 32) * 4
    assert weights["tp"] == 2 * 32 * 4  # of norms alone


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "3"], "ranks must be even and divide"),
        (["--repeats", "1"], "repeats must be at least 3; got 1."),
        (["--dtype", "float16"], "dtype must be one of"),
    ],
)
def test_strategies_that_cannot_run_are_told_in_one_line(options, words):
    line = told("strategies", *options, code=2)
    assert line.startswith("ringspun bench: ") and words in line and line.count("\n") == 1
