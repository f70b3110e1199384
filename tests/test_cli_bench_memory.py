"""`ringspun bench memory`: the longest length of a budget, what is compared with what, and what is refused."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from ringspun.cli import bench_memory
from ringspun.cli.bench import app
from ringspun.testing.context_length import CLOSE

SHAPE = ("--heads", "2", "--kv-heads", "2", "--head-size", "8", "--dtype", "float32")
INPUT_BYTES = 2 * (2 + 2) * 8 * 4
"""Of one token: q, k, v and the gradient of the output."""


def told(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["memory", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_of_a_budget_ring_sizes_are_compared_by_the_lengths_that_fit(monkeypatch):
    """Inputs count: 100 bytes a token above them on 2 ranks, 300 on 8."""
    monkeypatch.setattr(bench_memory, "_on_ranks", peaks_of({2: 100, 8: 300}))
    rows = json.loads(told("--ranks", "2,8", "--budget-mb", "1", *SHAPE, "--json"))["rows"]
    exact = {r: 10**6 // (INPUT_BYTES + more) for r, more in ((2, 100), (8, 300))}
    for row in rows:
        assert exact[row["ranks"]] * (1 - CLOSE) - 1 <= row["tokens_per_rank"] <= exact[row["ranks"]]
        assert row["seq_len"] == row["ranks"] * row["tokens_per_rank"] and row["peak_bytes"] <= row["budget_bytes"]
    assert rows[1]["over_first"] == rows[1]["seq_len"] / rows[0]["seq_len"]
    assert "R=8 K=2 float32: " in told("--ranks", "8", "--budget-mb", "1", *SHAPE)


def test_of_a_length_each_ring_size_is_beside_the_first_and_the_one_before(monkeypatch):
    monkeypatch.setattr(bench_memory, "_on_ranks", peaks_of({2: 30, 4: 40, 8: 40}))
    printed = told("--ranks", "2,4,8", "--seq-len", "1024", *SHAPE[:-1], "float32,bfloat16", "--json")
    rows = json.loads(printed)["rows"]
    assert [r["peak_bytes"] for r in rows] == 2 * [15360, 10240, 5120]
    assert [r["over_first"] for r in rows] == 2 * [1, 2 / 3, 1 / 3]
    assert [r["over_last"] for r in rows] == 2 * [1, 2 / 3, 1 / 2]
    assert [r["input_bytes"] for r in rows] == [INPUT_BYTES // e * 1024 // r for e in (1, 2) for r in (2, 4, 8)]
    assert "0.333 of the first ring size, 0.500 of the one before" in told(
        "--ranks", "2,4,8", "--seq-len", "1024", *SHAPE
    )


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--budget-mb", "0"], 2, "budget-mb must be at least 1; got 0."),
        (["--budget-mb", "9", "--seq-len", "8"], 2, "seq-len and budget-mb must not both be given. Leave one out."),
        (["--budget-mb", "9999999999"], 2, "budget-mb must be at most"),
        (["--budget-mb", "9", "--mask", "documents([3, 5])"], 2, "documents"),
        (["--route", "direct", "--block-size", "8"], 2, "block-size must come with --route ring; got direct"),
        (["--budget-mb", "1", "--head-size", "9999"], 1, "budget must hold a sequence of 16 tokens"),
    ],
)
def test_what_cannot_be_searched_is_told_in_one_line(monkeypatch, options, code, words):
    monkeypatch.setattr(bench_memory, "_on_ranks", peaks_of({2: 10**6}))
    line = told("--ranks", "2", *options, code=code)
    assert line.startswith("ringspun bench: ") and words in line and line.count("\n") == 1


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_a_budget_is_searched_over_ranks():
    (row,) = json.loads(told("--ranks", "2", "--budget-mb", "1", *SHAPE, "--block-size", "64", "--json"))["rows"]
    assert 100 < row["tokens_per_rank"] < 10**6 // INPUT_BYTES
    assert row["route"] == "ring(block_size=64)" and row["peak_bytes"] <= row["budget_bytes"] == 10**6


def peaks_of(each: dict[int, int]):
    """In the place of ranks: so many bytes of each token, by ring size."""

    @contextmanager
    def on_ranks(ranks: int):
        yield lambda work: [each[ranks] * -(-work.seq_len // ranks)] * ranks

    return on_ranks
