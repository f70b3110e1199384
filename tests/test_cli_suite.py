"""`ringspun check --suite full`: what it runs, what it says of it, and how it ends."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ringspun import Contiguous, Zigzag
from ringspun.cli import suite as cli_suite
from ringspun.cli.check import app
from ringspun.cli.suite import Stages
from ringspun.testing import certify
from ringspun.testing.mutants import DroppedTile
from ringspun.testing.pool import RankLost
from ringspun.testing.yardstick import DTYPES

SMALL = ["--suite", "full", "--ranks", "1,2", "--layout", "zigzag", "--dtype", "float64", "--property", "causal,sinks"]


def run(*more: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*SMALL, *more], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_it_ends_with_what_it_certified():
    said = run("--driver", "loopback")
    assert "2 properties in 3 cases, forward and backward" in said
    assert "certified: 2 properties; float64; rings of 1, 2 over loopback; 1 layout; 6 cases passed; ringspun " in said
    assert ", torch " in said and "NOT" not in said


def test_json_is_the_same_as_data():
    report = json.loads(run("--driver", "loopback", "--json"))
    assert report["ok"] and (report["passed"], report["refused"], report["failed"]) == (6, 0, 0)
    assert (report["ranks"], report["layouts"], report["dtypes"]) == ([1, 2], ["zigzag"], ["float64"])
    causal = report["properties"]["causal"]["loopback"]
    assert causal["passed"] == 2 and 0 < causal["worst"]["of_bar"] < 1 and causal["worst"]["case"] == "causal"
    assert {"ringspun", "python", "numpy", "torch", "machine"} <= set(report["versions"])
    assert report["certified"].startswith("certified: 2 properties")


def test_what_no_case_passed_is_not_certified():
    options = ["--driver", "loopback", "--dtype", "bfloat16", "--property", "causal,lse gradient"]
    assert "certified: 1 property (not lse gradient); bfloat16; " in run(*options)


@pytest.mark.processes
def test_it_runs_over_processes_too():
    report = json.loads(run("--json"))
    assert report["ok"] and report["drivers"] == ["loopback", "gloo"] and report["passed"] == 9
    assert report["properties"]["sinks"]["gloo"]["passed"] == 2


def test_a_failure_is_shown_where_it_sits(monkeypatch: pytest.MonkeyPatch):
    """Exit code 0 on a broken machine."""
    monkeypatch.setattr(
        cli_suite, "_on_loopback", lambda stage, properties: certify(DroppedTile(), properties=properties)
    )
    said = run("--driver", "loopback", code=1)
    assert "FAIL" in said and "NOT certified: 6 failures in 6 cases." in said
    assert "causal, causal, loopback R=2 zigzag float64" in said and "ring rank 2" in said
    report = json.loads(run("--driver", "loopback", "--json", code=1))
    assert report["ok"] is False and report["failures"][0]["found"]


def test_processes_that_die_are_a_failure(monkeypatch: pytest.MonkeyPatch):
    """A traceback instead of a verdict."""

    class Dies:
        def __init__(self, size: int) -> None: ...
        def __enter__(self) -> Dies:
            return self

        def __exit__(self, *problem: object) -> None: ...
        def run(self, *given: object, **options: object) -> None:
            raise RankLost("ring rank 1 died with exit code -9.", (1,), {})

    monkeypatch.setattr("ringspun.testing.pool.RankPool", Dies)
    said = run("--driver", "gloo", code=1)
    assert "gloo R=2 zigzag float64" in said and "ring rank 1 died with exit code -9." in said
    assert "NOT certified: 1 failures in 0 cases." in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--suite", "half"], "suite must be one of full; got 'half'."),
        (["--suite", "full", "--mask", "causal"], "mask must be used without --suite"),
        (["--suite", "full", "--seq-len", "7"], "seq-len must be used without --suite"),
        (["--suite", "full", "--failures-only"], "failures-only must be used without --suite"),
        (["--property", "causal"], "property must be used with --suite"),
        (["--suite", "full", "--property", "casual"], "properties must be among"),
        (["--suite", "full", "--dtype", "float16"], "dtype must be one of float64, float32, bfloat16; got 'float16'."),
        (["--suite", "full", "--driver", "gloo", "--ranks", "1"], "ranks must hold a ring of more than one for gloo"),
        (["--suite", "full", "--ranks", "65"], "ranks must be at most 64; got 65."),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_has_no_effect_or_cannot_run_is_refused_in_one_line(options, words):
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2 and result.output.count("\n") == 1, result.output
    assert result.output.startswith("ringspun check: ") and words in result.output


def test_every_combination_runs_once_and_processes_of_one_size_together():
    stages = list(Stages(("loopback", "gloo"), (1, 2, 4), (Contiguous(), Zigzag()), DTYPES, ("causal",)).all())
    assert len(stages) == len(set(stages)) == (3 + 2) * 2 * 3
    sizes = [s.ranks for s in stages if s.driver == "gloo"]
    assert sizes == sorted(sizes) and 1 not in sizes
