"""A save that is killed, or finds the disk full, at any place leaves a whole checkpoint, and the next save does."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_checkpoints import names, no_space, save_tiny, spoil_everywhere, whole_step
from training_runs import tiny_config, write_text

from ringspun.errors import CheckpointError
from ringspun.testing.pool import RankPool
from ringspun.train import launch
from ringspun.train.checkpoints import checkpointing
from ringspun.train.checkpoints.checkpointing import latest, tidy
from ringspun.train.launch import Job

HOWS = ["kill at events", "kill in writes", "no space at events", "no space in writes"]


@pytest.fixture
def spoil(tmp_path: Path, pools: Callable[[int], RankPool]) -> Callable[..., list[tuple[str, int]]]:
    def run(how: str, step: int, keep: int) -> list[tuple[str, int]]:
        """In copies of a folder that holds steps 2 and 4 (the last of them alone, if that is all that is kept)."""
        for done in (2, 4):
            save_tiny(tmp_path / "base", done, keep=keep)
        (tmp_path / "scratch").mkdir()
        arguments = (tmp_path / "base", tmp_path / "scratch", how, step, keep)
        (outcomes,) = pools(1).run(spoil_everywhere, *arguments, timeout_s=60)
        return outcomes

    return run


@pytest.mark.processes
@pytest.mark.parametrize("how", HOWS)
def test_a_spoilt_save_leaves_a_whole_checkpoint(spoil, how: str) -> None:
    outcomes = spoil(how, step=6, keep=2)
    assert outcomes.pop() == ("saved", 6)
    assert {outcome for outcome, _ in outcomes} == {"killed" if how.startswith("kill") else "refused"}
    steps = [step for _, step in outcomes]
    assert steps == sorted(steps) and set(steps) == ({4, 6} if how.endswith("events") else {4})
    assert len(outcomes) > (30 if how.endswith("events") else 8)


@pytest.mark.processes
@pytest.mark.parametrize("how", [how for how in HOWS if how.endswith("events")])
def test_saving_a_step_again_never_leaves_none(spoil, how: str) -> None:
    """The one that is replaced is the only one."""
    outcomes = spoil(how, step=4, keep=1)
    assert outcomes.pop() == ("saved", 4) and {step for _, step in outcomes} == {4}


def test_a_killed_replacement_is_undone(tmp_path: Path) -> None:
    save_tiny(tmp_path, 4)
    (tmp_path / "step-000004").rename(tmp_path / ".replaced-step-000004")
    assert whole_step(tmp_path) == 4
    tidy(tmp_path)
    assert names(tmp_path) == ["step-000004"]


def test_a_later_one_that_was_skipped_does_not_push_out_the_new_one(tmp_path: Path) -> None:
    save_tiny(tmp_path, 4)
    save_tiny(tmp_path, 6)
    (tmp_path / "step-000006" / "state.json").write_text("damaged")
    save_tiny(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-000005", "step-000006"]
    warnings: list[str] = []
    found = latest(tmp_path, warn=warnings.append)
    assert found is not None and found.step == 5 and "step-000006 is damaged" in warnings[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount")
    if done.returncode:
        pytest.skip(f"only root can mount: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    """Of the real kind, with less and less room."""
    folder = small_disk / "checkpoints"
    save_tiny(folder, 2, keep=1)
    free = os.statvfs(small_disk).f_bavail
    messages = set()
    for taken in range(free - 1, 0, -1):
        (small_disk / "other").write_bytes(b"x" * (taken * os.statvfs(small_disk).f_bsize))
        try:
            save_tiny(folder, 4, keep=1)
            break
        except CheckpointError as problem:
            messages.add(str(problem))
        assert names(folder) == ["step-000002"] and whole_step(folder) == 2
        assert os.statvfs(small_disk).f_bavail == free - taken
    assert names(folder) == ["step-000004"] and whole_step(folder) == 4
    assert messages == {
        f"checkpoint {folder}/step-000004 must be written whole; got: No space left on device. Free space there, "
        "then run the same command again; it goes on from the last checkpoint (step-000002, untouched)."
    }


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, 2)

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(checkpointing.shutil, "rmtree", lambda path, ignore_errors=False: ignore_errors or busy(path))
    with pytest.raises(CheckpointError, match=r"must be removable; got .*step-000002 \(Device or resource busy\)"):
        save_tiny(tmp_path, 4, keep=1)
    assert whole_step(tmp_path) == 4


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    save_tiny(tmp_path, 2)
    monkeypatch.setattr(checkpointing, "_flush", fails)
    with pytest.raises(CheckpointError, match=r"got: Input/output error\. Make that possible, then run"):
        save_tiny(tmp_path, 4)
    monkeypatch.setattr(checkpointing, "_flush", lambda path: no_space())
    with pytest.raises(CheckpointError, match=r"got: No space left on device\. Free space there, then run"):
        save_tiny(tmp_path, 4)
    assert names(tmp_path) == ["step-000002"]


def test_leftovers_are_gone_before_a_run_needs_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    save_tiny(checkpoints, 4)
    shutil.copytree(checkpoints / "step-000004", checkpoints / ".writing-step-000006")
    (checkpoints / ".removing-step-000002").mkdir()
    seen: list[list[str]] = []
    monkeypatch.setattr(launch, "find_checkpoint", lambda *_, **__: None)
    monkeypatch.setattr(launch, "work", lambda _: seen.append(names(checkpoints)))
    launch.launch(Job(tiny_config(tmp_path / "run"), write_text(tmp_path / "text")))
    assert seen == [["step-000004"]]
