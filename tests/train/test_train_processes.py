"""Training on several processes: killed, resumed, poisoned; and a command line that looks before it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock
from training_runs import (
    complain_and_cause,
    die_in_checkpoint_4,
    die_in_step_4,
    launch_torn,
    logged_steps,
    losses,
    no_space_in_checkpoint_4,
    outcome,
    poison_rank_2_in_step_3,
    same_bits,
    tiny_config,
    tiny_toml,
    two_stages,
    write_text,
)
from typer.testing import CliRunner

from ringspun.cli.train import app
from ringspun.errors import ConfigError, LaunchError
from ringspun.steplog import FOLDER_VARIABLE
from ringspun.train import launch
from ringspun.train.data.text import find_text
from ringspun.train.launch import Job, start_ranks
from ringspun.train.loop import Hooks
from ringspun.train.output import claimed
from ringspun.train.reporting.run_page import figure_of


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.processes
@pytest.mark.timeout(110)
def test_killed_in_a_step_and_in_a_checkpoint_the_run_goes_on(tmp_path: Path) -> None:
    """Rank 1 is killed in step 4, the second stage's first; resumed, rank 0 in checkpoint 4; resumed, it ends; and goes
    on on another ring."""
    corpus = write_text(tmp_path / "text")
    launch.launch(Job(two_stages(tmp_path / "whole", ranks=2), corpus))
    checkpoints = tmp_path / "run" / "checkpoints"

    two = two_stages(tmp_path / "run", ranks=2)
    with pytest.raises(LaunchError, match=r"rank 1 failed: Signal 9 \(SIGKILL\)"):
        launch.launch(Job(two, corpus, hooks=Hooks(after_backward=die_in_step_4)))
    assert names(checkpoints) == ["step-000002", "step-000003"]
    assert figure_of(tmp_path / "run").done == 3 and (tmp_path / "run" / "report.html").exists()
    assert all(0 < record["waiting"] <= record["waiting_most"] < 1 for record in logged_steps(tmp_path / "run"))
    with pytest.raises(LaunchError, match=r"rank 0 failed: Signal 9 \(SIGKILL\)"):
        launch.launch(Job(two, corpus, hooks=Hooks(before_publish=die_in_checkpoint_4)))
    assert names(checkpoints) == ["step-000002", "step-000003"]

    launch.launch(Job(two, corpus))
    assert names(checkpoints) == ["step-000003", "step-000004", "step-000006"]
    assert same_bits(tmp_path / "run", tmp_path / "whole")

    launch.launch(Job(two_stages(tmp_path / "run", ranks=3, steps=5), corpus, prove=True))
    assert names(checkpoints) == ["step-000003", "step-000006", "step-000008"]
    proof = json.loads((tmp_path / "run" / "proof.json").read_text())
    assert proof["ok"] and proof["ranks"] == 3 and len(proof["attention_bytes_per_rank"]) == 3


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_nan_on_rank_2_stops_all_ranks_alike(tmp_path: Path) -> None:
    job = Job(
        tiny_config(tmp_path / "run", ranks=4),
        write_text(tmp_path / "text"),
        hooks=Hooks(after_backward=poison_rank_2_in_step_3),
    )
    outcomes = start_ranks(4, outcome, job, logs=tmp_path)
    assert set(outcomes) == {0, 1, 2, 3}
    assert set(outcomes.values()) == {
        "NonFiniteError: loss and gradients must be finite; at step 3 on rank 2 the gradient has a NaN or Inf, first "
        "that of model.embed_tokens.weight."
    }
    assert names(tmp_path / "run" / "checkpoints") == ["step-000002"]
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.processes
@pytest.mark.timeout(110)
def test_when_the_launching_process_is_killed_in_a_save_its_ranks_end_and_the_run_goes_on(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from training_runs import be_launched_and_killed\n"
        "if __name__ == '__main__': be_launched_and_killed(Path(sys.argv[1]))"
    )
    (tmp_path / "launcher.py").write_text(code)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    launcher = subprocess.run(
        [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        timeout=90,
    )
    assert launcher.returncode == -signal.SIGKILL
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}.lock").exists()
        with FileLock(tmp_path / f"rank{rank}.lock").acquire(timeout=15):
            pass
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [".writing-step-000004", "step-000002"]
    launch.launch(Job(tiny_config(tmp_path / "run"), find_text(tmp_path / "text")))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000004", "step-000006"]
    launch.launch(Job(tiny_config(tmp_path / "whole"), find_text(tmp_path / "text")))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_the_cause_is_told_not_a_complaint_about_it(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 failed: ValueError: the cause \(call stack: .*failure\.txt\)"):
        start_ranks(2, complain_and_cause, logs=tmp_path)
    assert "the cause" in (tmp_path / "failure.txt").read_text()


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_full_disk_on_two_ranks_is_told_in_the_words_of_the_one_that_met_it(tmp_path: Path) -> None:
    job = Job(tiny_config(tmp_path / "run", ranks=2), write_text(tmp_path / "text"))
    words = (
        r"rank 0 failed: CheckpointError: checkpoint .*/step-000004 must be written whole; got: No space left on dev"
    )
    with pytest.raises(LaunchError, match=words):
        launch.launch(replace(job, hooks=Hooks(before_publish=no_space_in_checkpoint_4)))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]


def failure(message: str, *, exitcode: int = 1, at: int = 0) -> SimpleNamespace:
    told = {"message": message, "extraInfo": {"py_callstack": "stack"}} if message else "a signal"
    return SimpleNamespace(message=told, exitcode=exitcode, timestamp=at)


def test_the_cause_comes_before_complaints_whatever_their_order(tmp_path: Path) -> None:
    complaint, gloo = failure("PeerError: rank 2 is gone"), failure("RuntimeError: [gloo/tcp] Connection closed")
    failures = {0: complaint, 1: gloo, 2: failure("ValueError: the cause", at=1)}
    assert launch._explain(failures, tmp_path).startswith("rank 2 failed: ValueError: the cause (call stack: ")
    killed = failures | {3: failure("", exitcode=-9, at=2)}
    assert launch._explain(killed, tmp_path) == "rank 3 failed: a signal"
    (tmp_path / "file").touch()
    assert "(call stack not written: " in launch._explain(failures, tmp_path / "file")


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_ranks_of_torchrun_refuse_a_folder_in_use_alike(tmp_path: Path) -> None:
    job = Job(tiny_config(tmp_path / "run", ranks=2), write_text(tmp_path / "text"))
    with claimed(tmp_path / "run", fresh=False, say=print):
        outcomes = start_ranks(2, launch_torn, job, logs=tmp_path)
    assert outcomes[0].startswith("ConfigError: output must be free; another run writes into")
    assert outcomes[1].startswith("LaunchError: output must be free; rank 0 says why")


def test_joins_a_job_that_was_started_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_text(tmp_path / "text")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    asked: list[bool] = []
    monkeypatch.setattr(launch, "dump_on_signal", lambda: asked.append(True))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "logs"))
    launch.launch(Job(tiny_config(tmp_path / "run"), corpus))
    assert len(losses(tmp_path / "run")) == 6
    with pytest.raises(ConfigError, match="ranks must be the 1 processes that torchrun started; got 3"):
        launch.launch(Job(tiny_config(tmp_path / "other", ranks=3), corpus))
    assert asked == [True], "with a folder for step logs a rank dumps its own at a signal"


def command(*arguments: str | Path):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


CONFIG = tiny_toml(steps=2)


def test_command_trains_and_moves_old_output_aside(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    write_text(tmp_path / "text")
    arguments = (tmp_path / "run.toml", "--data", tmp_path / "text", "--output", tmp_path / "out")
    first = command(*arguments, "--prove")
    assert first.exit_code == 0, first.output
    assert "6 documents, 328 tokens" in first.output and "worst error" in first.output
    assert command(*arguments, "--fresh").exit_code == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "out.1")


@pytest.mark.parametrize(
    ("config", "text", "words"),
    [
        (
            CONFIG.replace("heads", "haeds"),
            "some text",
            "unknown key 'model.haeds'; the nearest is 'model.heads'",
        ),
        (CONFIG, "", "data must not be empty"),
        (CONFIG, None, "data must exist"),
        (
            CONFIG.replace("seq_len = 32", "seq_len = 3"),
            "some text",
            "every rank must hold a token; got seq_len = 3, ranks = 4",
        ),
        (CONFIG, "caf\udce9", "text must be UTF-8; byte 3 is 0xe9"),
    ],
    ids=["unknown key", "empty", "missing", "a rank without tokens", "not text"],
)
def test_command_finds_faults_before_any_rank_starts(tmp_path: Path, config: str, text: str | None, words: str) -> None:
    (tmp_path / "run.toml").write_text(config)
    if text is not None:
        (tmp_path / "a.txt").write_bytes(text.encode(errors="surrogateescape"))
    began = time.perf_counter()
    result = command(tmp_path / "run.toml", "--data", tmp_path / "a.txt", "--ranks", "4", "--output", tmp_path / "o")
    assert result.exit_code == 1 and words in result.output
    assert "Traceback" not in result.output and not (tmp_path / "o").exists()
    assert time.perf_counter() - began < 2.0
