"""Training on several processes: killed, resumed, poisoned; and a command line that looks before it starts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from training_runs import (
    die_in_checkpoint_4,
    die_in_step_4,
    losses,
    outcome,
    poison_rank_2_in_step_3,
    tiny_config,
    write_text,
)
from typer.testing import CliRunner

from ringspun.cli.train import app
from ringspun.errors import ConfigError, LaunchError
from ringspun.train import launch
from ringspun.train.launch import Job, start_ranks
from ringspun.train.loop import Hooks


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.processes
@pytest.mark.timeout(110)
def test_killed_in_a_step_and_in_a_checkpoint_the_run_goes_on(tmp_path: Path) -> None:
    """Rank 1 is killed in step 4; resumed, rank 0 in checkpoint 4; resumed, it ends; and goes on on another ring."""
    corpus = write_text(tmp_path / "text")
    launch.launch(Job(tiny_config(tmp_path / "whole", ranks=2), corpus))
    checkpoints = tmp_path / "run" / "checkpoints"

    two = tiny_config(tmp_path / "run", ranks=2)
    with pytest.raises(LaunchError, match=r"rank 1 failed: Signal 9 \(SIGKILL\)"):
        launch.launch(Job(two, corpus, hooks=Hooks(after_backward=die_in_step_4)))
    assert names(checkpoints) == ["step-000002"]
    with pytest.raises(LaunchError, match=r"rank 0 failed: Signal 9 \(SIGKILL\)"):
        launch.launch(Job(two, corpus, hooks=Hooks(before_publish=die_in_checkpoint_4)))
    assert names(checkpoints) == ["step-000002"]

    launch.launch(Job(two, corpus))
    assert names(checkpoints) == ["step-000004", "step-000006"]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-6)

    launch.launch(Job(tiny_config(tmp_path / "run", ranks=3, steps=8), corpus, prove=True))
    assert names(checkpoints) == ["step-000006", "step-000008"]
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
        "NonFiniteError: loss and gradients must be finite; at step 3 on rank 2 the gradient has a NaN or Inf."
    }
    assert names(tmp_path / "run" / "checkpoints") == ["step-000002"]
    assert len(losses(tmp_path / "run")) == 2


def test_joins_a_job_that_was_started_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_text(tmp_path / "text")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    launch.launch(Job(tiny_config(tmp_path / "run"), corpus))
    assert len(losses(tmp_path / "run")) == 6
    with pytest.raises(ConfigError, match="ranks must be the 1 processes that torchrun started; got 3"):
        launch.launch(Job(tiny_config(tmp_path / "other", ranks=3), corpus))


def command(*arguments: str | Path):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


CONFIG = """
seq_len = 32
steps = 2
dtype = "float32"
[model]
layers = 1
hidden_size = 16
intermediate_size = 16
heads = 2
"""


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
        (CONFIG, "caf\udce9", "text must be UTF-8; byte 3 is 0xe9"),
    ],
    ids=["unknown key", "empty", "missing", "not text"],
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
