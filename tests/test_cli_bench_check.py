"""`ringspun bench` and `ringspun check`: what they cannot do is told in one line, before anything is measured."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ringspun.cli import bench_memory, check
from ringspun.cli.bench import app as bench_app
from ringspun.cli.check import app as check_app
from ringspun.errors import PlanError
from ringspun.testing.pool import Failure, RankFailed, RankPool
from ringspun.testing.timing import Work


def one_line(app, *arguments: str, code: int = 2) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit) and result.output.count("\n") == 1, result.output
    return result.output


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: RankPool, *args: object, **kwargs: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(RankPool, "__init__", refuse)


SHAPES = [
    (["--heads", "0"], "heads must be at least 1; got 0."),
    (["--heads", "-2"], "heads must be at least 1; got -2."),
    (["--kv-heads", "3"], "kv-heads must divide heads; got 3 and heads = 4."),
    (["--kv-heads", "7"], "kv-heads must divide heads; got 7 and heads = 4."),
    (["--kv-heads", "-1"], "kv-heads must be at least 1; got -1."),
    (["--kv-heads", "0"], "kv-heads must be at least 1; got 0."),
    (["--head-size", "0"], "head-size must be at least 1; got 0."),
    (["--head-size", "-8"], "head-size must be at least 1; got -8."),
    (["--head-size", "99999999999"], "must fit this machine's"),
    (["--mask", "documents([999])"], "999"),
    (["--mask", "casual"], "did you mean 'causal'?"),
    (["--layout", "striped(64)"], "Striped block must be 1 or at least 128"),
    (["--dtype", "foo"], "dtype must be one of float64, float32, bfloat16, float16; got 'foo'."),
    (["--dtype", "int32"], "dtype must be one of"),
    (["--ranks", "0"], "ranks must be at least 1; got 0."),
    (["--ranks", "65"], "ranks must be at most 64; got 65."),
]


@pytest.mark.parametrize(("options", "words"), SHAPES, ids=lambda v: "=".join(v) if isinstance(v, list) else "")
@pytest.mark.parametrize(
    "command", [["ring", "--ranks", "2", "--seq-len", "8"], ["memory", "--ranks", "2", "--tokens-per-rank", "4"]]
)
@pytest.mark.usefixtures("nothing_starts")
def test_bench_refuses_in_one_line(command: list[str], options: list[str], words: str) -> None:
    line = one_line(bench_app, *command, *options)
    assert line.startswith("ringspun bench: ") and words in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["ring", "--seq-len", "0"], "seq-len must be at least 1; got 0."),
        (["ring", "--seq-len", "99999999999999"], "must fit this machine's"),
        (["ring", "--pairs", "8"], "pairs must be at least 9; got 8."),
        (["memory", "--tokens-per-rank", "0"], "tokens-per-rank must be at least 1; got 0."),
        (["memory", "--tokens-per-rank", "-3"], "tokens-per-rank must be at least 1; got -3."),
        (["memory", "--tokens-per-rank", "99999999999"], "must fit this machine's"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_bench_refuses_sizes_in_one_line(options: list[str], words: str) -> None:
    line = one_line(bench_app, *options)
    assert line.startswith("ringspun bench: ") and words in line


def test_bench_tells_a_failed_rank_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Work) -> None:
        raise RankFailed({1: Failure("PlanError", "no plan.", "Traceback ...\n...")})

    monkeypatch.setattr(bench_memory, "_peak", fail)
    assert one_line(bench_app, "memory", code=1) == "ringspun bench: ring rank 1 raised PlanError: no plan.\n"


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_memory_units_are_elements_of_the_dtype(monkeypatch: pytest.MonkeyPatch, dtype: str, size: int) -> None:
    """A peak of 5 tensors of H * T * D elements is 5 units, whatever the dtype."""

    class FivePeaks:
        def __init__(self, ranks: int) -> None: ...
        def __enter__(self) -> FivePeaks:
            return self

        def __exit__(self, *problem: object) -> None: ...
        def run(self, function: object, work: Work, **kwargs: object) -> list[int]:
            return [5 * work.heads * (work.seq_len // work.ranks) * work.head_size * size] * work.ranks

    monkeypatch.setattr("ringspun.testing.pool.RankPool", FivePeaks)
    options = ["memory", "--ranks", "2", "--tokens-per-rank", "6", "--heads", "3", "--kv-heads", "1", "--json"]
    result = CliRunner().invoke(bench_app, [*options, "--head-size", "5", "--dtype", dtype])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"][0]["units"] == 5.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "99999999999"], "ranks must be at most 4096; got 99999999999."),
        (["--ranks", "65", "--driver", "gloo"], "ranks must be at most 64; got 65."),
        (["--seq-len", "999999999"], "seq-len must be at most 16384; got 999999999."),
        (["--seq-len", "7" * 5000], "seq-len must be a comma list of integers; got '7777"),
        (["--driver", "nccl"], "driver must be one of loopback, gloo; got 'nccl'."),
        (["--dtype", "float16"], "dtype must be one of float64, float32, bfloat16; got 'float16'."),
        (["--mask", "documents([999])"], "999"),
        (["--mask", "causal" + "&causal" * 3000], "nested too deeply"),
    ],
    ids=lambda v: "=".join(v)[:40] if isinstance(v, list) else "",
)
@pytest.mark.usefixtures("nothing_starts")
def test_check_refuses_in_one_line(options: list[str], words: str) -> None:
    line = one_line(check_app, *options)
    assert line.startswith("ringspun check: ") and words in line and len(line) < 500


def test_check_tells_which_case_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, case: object) -> None:
        raise PlanError("mask must go with the layout.")

    monkeypatch.setattr(check._Runner, "run", fail)
    line = one_line(check_app, "--ranks", "2", "--seq-len", "8", "--mask", "causal", "--layout", "zigzag")
    assert line == "ringspun check: R=2 S=8 float64 zigzag causal: mask must go with the layout.\n"


def test_check_runs_a_case() -> None:
    options = ["--ranks", "2", "--seq-len", "7", "--mask", "causal", "--layout", "zigzag"]
    result = CliRunner().invoke(check_app, options)
    assert result.exit_code == 0 and result.output.endswith("1 of 1 cases within their bars\n"), result.output
