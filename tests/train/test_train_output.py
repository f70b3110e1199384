"""The output folder: refused before anything starts if a run could not use it, and written by one run at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import tiny_config, tiny_toml, write_text
from typer.testing import CliRunner

from ringspun.cli.train import app
from ringspun.errors import ConfigError
from ringspun.train import launch
from ringspun.train.launch import Job
from ringspun.train.output import claimed

CONFIG = tiny_toml(steps=1)


def ignore(_: str) -> None:
    pass


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command, which must refuse; its message."""

    def unreachable(*args: object, **kwargs: object) -> None:
        raise AssertionError("a rank was started")

    def run(output: str, *options: str) -> str:
        (tmp_path / "run.toml").write_text(CONFIG)
        write_text(tmp_path / "text")
        arguments = [str(tmp_path / "run.toml"), "--data", str(tmp_path / "text"), "--output", output, *options]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1, result.output
        assert isinstance(result.exception, SystemExit) and "Traceback" not in result.output
        lines = [line for line in result.output.splitlines() if "documents," not in line]
        assert len(lines) == 1, lines
        return lines[0]

    monkeypatch.setattr(launch, "work", unreachable)
    return run


def test_no_folder_is_refused(tmp_path: Path, refused) -> None:
    (tmp_path / "file").write_text("precious")
    for output in (tmp_path / "file", tmp_path / "file" / "below", Path("/dev/null")):
        assert f"output must be a folder that can be written; got {output}" in refused(str(output))
        assert f"output must be a folder that can be written; got {output}" in refused(str(output), "--fresh")
    assert (tmp_path / "file").read_text() == "precious"
    assert "output must name a folder; got ''" in refused("")


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_a_file_in_the_place_of_an_inner_folder_is_refused(tmp_path: Path, refused, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("")
    assert f"got {tmp_path / 'out' / name} (it is, or lies below, a file)" in refused(str(tmp_path / "out"))


@pytest.mark.parametrize("name", ["log.jsonl", "proof.json", "loss.png", "failure.txt"])
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path, refused, name: str) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    assert f"got {tmp_path / 'out' / name} (Is a directory)" in refused(str(tmp_path / "out"))


@pytest.mark.parametrize("name", [".", "checkpoints", "log.jsonl"])
def test_what_may_not_be_written_is_refused(tmp_path: Path, name: str) -> None:
    """As another user than root, whom permission bits do not bind."""
    if os.getuid():
        pytest.skip("only root can become another user")
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    (out / "log.jsonl").write_text("")
    for path in (out, *out.iterdir()):
        os.chown(path, 65534, 65534)
    (out / name).chmod(0o500)
    for folder in [*tmp_path.parents[:3], tmp_path]:
        folder.chmod(folder.stat().st_mode | 0o011)
    code = (
        "import os, sys; from pathlib import Path; import filelock; from ringspun.train.output import claimed\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "with claimed(Path(sys.argv[1]), fresh=False, say=print): print('claimed')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, timeout=60)
    assert f"output must be a folder that can be written; got {out / name}" in done.stderr.splitlines()[-1]
    assert "Permission denied" in done.stderr and "claimed" not in done.stdout


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """To another process, for a resumed and for a fresh run; it is free again when the first has ended."""
    code = (
        "import sys; from pathlib import Path; from ringspun.train.output import claimed\n"
        "with claimed(Path(sys.argv[1]), fresh=False, say=print): print('claimed', flush=True); input()"
    )
    out = tmp_path / "out"
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "claimed\n"
        job = Job(tiny_config(out), write_text(tmp_path / "text"))
        for fresh in (False, True):
            with pytest.raises(ConfigError, match=r"output must be free; another run writes into .*out\. Wait"):
                launch.launch(Job(job.config, job.corpus, fresh=fresh))
        assert out.exists() and not (tmp_path / "out.1").exists()
    finally:
        first.kill()  # the lock must not outlive it
        first.communicate()
    with claimed(out, fresh=False, say=ignore):
        pass


def test_a_fresh_run_holds_the_new_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in (0, 1):
        said: list[str] = []
        with claimed(out, fresh=True, say=said.append):
            (out / "mine").write_text(str(number))
            with (
                pytest.raises(ConfigError, match="output must be free"),
                claimed(out, fresh=True, say=ignore),
            ):
                pass
        assert len(said) == number
    assert [(tmp_path / name / "mine").read_text() for name in ("out.1", "out")] == ["0", "1"]


@pytest.mark.parametrize("output", [".", "..", "../here", "x/.."])
def test_the_current_folder_is_not_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    (tmp_path / "here" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with (
        pytest.raises(ConfigError, match=r"output must not hold the current folder with --fresh"),
        claimed(Path(output), fresh=True, say=ignore),
    ):
        pass
    with claimed(Path("."), fresh=False, say=ignore):
        assert (tmp_path / "here" / "checkpoints").is_dir()
