"""Log, curve and scalars are not worth a run: a disk that is full costs it none of its steps, and is told."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from training_runs import losses

from ringspun.errors import CheckpointError, ConfigError
from ringspun.train.output import write_whole
from ringspun.train.reporting import log as log_module
from ringspun.train.reporting import report as report_module
from ringspun.train.reporting.log import Log
from ringspun.train.reporting.report import Report, StepRecord


class SmallDisk(io.RawIOBase):
    """A file whose disk takes a few bytes more at a time, and sometimes none."""

    def __init__(self, path: Path) -> None:
        self.path, self.room = path, 0

    def write(self, data: Any) -> int:
        taken = bytes(data[: self.room])
        if not taken:
            raise OSError(28, os.strerror(28))
        with self.path.open("ab") as file:
            file.write(taken)
        self.room -= len(taken)
        return len(taken)


def record(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / step}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Log, SmallDisk]]:
    log = Log(tmp_path / "log.jsonl", done=0)
    log._file.close()
    disk = SmallDisk(tmp_path / "log.jsonl")
    log._file = disk  # type: ignore[assignment]
    yield log, disk


@pytest.mark.parametrize("room", [[0] * 9, [5, 0, 0, 90, 0, 3], [1] * 9, [31, 31, 31], [0, 0, 500, 3]])
def test_lines_wait_for_room(tmp_path: Path, small: tuple[Log, SmallDisk], room: list[int]) -> None:
    log, disk = small
    written = ""
    for step, more in enumerate(room, 1):
        disk.room = more
        try:
            log.add(record(step))
        except OSError:
            assert log.behind
        else:
            assert not log.behind
        written += json.dumps(record(step)) + "\n"
        assert written.startswith((tmp_path / "log.jsonl").read_text())  # at any time a beginning of the right log
        whole = (tmp_path / "log.jsonl").read_text().count("\n")
        assert [r["step"] for r in log_module.records(tmp_path / "log.jsonl", 99)] == list(range(1, whole + 1))
    disk.room = 10_000
    log.close()
    assert (tmp_path / "log.jsonl").read_text() == written


def test_a_log_that_cannot_be_begun_is_refused_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(record(1)) + "\n")

    def full(self: Path, data: bytes) -> None:
        self.touch()
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"got .*log\.jsonl \(No space left on device\)\. Free space there, or give"):
        Log(path, done=1)
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"] and path.read_text() == json.dumps(record(1)) + "\n"


def test_a_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    write_whole(tmp_path / "a" / "x", b"one")
    write_whole(tmp_path / "a" / "x", b"two")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["x"] and (tmp_path / "a" / "x").read_bytes() == b"two"


def fails(*_: Any, **__: Any) -> None:
    raise OSError(28, os.strerror(28))


def steps_of(report: Report, last: int) -> None:
    for step in range(1, last + 1):
        report.step(StepRecord(step, 1.0, 1.0, 0.1, 0.1, 10.0, 1, 0))


def test_what_cannot_be_written_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    with Report(tmp_path, steps=4, console=Console(file=said, width=500)) as report:
        monkeypatch.setattr(Log, "_write", fails)
        monkeypatch.setattr(report._board, "add_scalar", fails)
        monkeypatch.setattr(report_module, "draw_loss", lambda *_: write_whole(tmp_path / "log.jsonl" / "x", b""))
        steps_of(report, 4)
    text = said.getvalue()
    for words in (
        "log.jsonl cannot be written: No space left on device. Training goes on; its lines are kept",
        "tensorboard/ cannot be written any more: No space left on device. Training goes on without it.",
        "log.jsonl lacks its last lines: No space left on device",
        "loss.png is not drawn: output must be a folder that can be written",
    ):
        assert text.count(words) == 1, text


def test_a_log_that_can_be_written_again_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    with Report(tmp_path, steps=5, console=Console(file=said, width=500)) as report:
        with monkeypatch.context() as spoilt:
            spoilt.setattr(Log, "_write", fails)
            steps_of(report, 2)
        report.step(StepRecord(3, 1.0, 1.0, 0.1, 0.1, 10.0, 1, 0))
    assert losses(tmp_path) == [1.0] * 3
    assert said.getvalue().count("log.jsonl is written again; no line is missing") == 1


def test_what_ends_a_run_is_not_hidden_by_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk meets the checkpoint first, then everything that is written at the end."""
    console = Console(file=io.StringIO())
    with pytest.raises(CheckpointError, match="the cause"), Report(tmp_path, steps=2, console=console) as report:
        steps_of(report, 1)
        for owner, name in ((report._log, "close"), (report._board, "close"), (console, "print")):
            monkeypatch.setattr(owner, name, fails)
        monkeypatch.setattr(report_module, "draw_loss", lambda *_: write_whole(tmp_path / "log.jsonl" / "x", b""))
        raise CheckpointError("the cause")


def test_a_folder_of_scalars_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    said = io.StringIO()
    with Report(tmp_path, steps=1, console=Console(file=said, width=500)) as report:
        steps_of(report, 1)
    assert "tensorboard/ cannot be written any more: " in said.getvalue() and losses(tmp_path) == [1.0]
