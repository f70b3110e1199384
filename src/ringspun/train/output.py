"""The output folder of a run: found usable before anything starts, and written by one run at a time."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ringspun.errors import ConfigError

CHECKPOINTS = "checkpoints"
FOLDERS = (CHECKPOINTS, "tensorboard")
DATA_MANIFEST = "data.json"
LOG, RUN, REPORT = "log.jsonl", "run.json", "report.html"
FILES = (LOG, RUN, REPORT, "ring.html", "loss.png", "proof.json", "failure.txt", DATA_MANIFEST)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of the system that more space would end
_LOCK = ".lock"


@contextmanager
def claimed(folder: Path, *, fresh: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Makes `folder`, checks that a run can write all that it will, and keeps every other run out meanwhile.

    The lock is the operating system's: it ends with this process, however that ends.

    Args:
        folder: the run's output.
        fresh: rename an old folder first; see `move_aside`.
        say: told of that.

    Raises:
        ConfigError: the folder is no folder, cannot be written, or another run writes there.
    """
    if fresh:
        _refuse_current(folder)
    lock = _locked(folder)
    try:
        if fresh and any(path.name != _LOCK for path in folder.iterdir()):
            lock = _renew(folder, lock, say)
        _check_writable(folder)
        yield
    finally:
        lock.release()


def move_aside(folder: Path) -> Path | None:
    """Renames `folder` to the first free of ``folder.1``, ``folder.2``, ...: a fresh run loses nothing."""
    if not folder.exists():
        return None
    folder, number = Path(os.path.normpath(folder)), 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    return target


def write_whole(path: Path, data: bytes) -> None:
    """Writes a small file of the output: afterwards there is the new one, or the one that was there.

    Raises:
        ConfigError: it cannot be written; a full disk, say.
    """
    fresh = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as problem:
        with suppress(OSError):
            fresh.unlink()
        raise _unusable(path, problem) from None


def _refuse_current(folder: Path) -> None:
    if Path.cwd().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"output must not hold the current folder with --fresh, which renames it; got {str(folder)!r}. "
            "Give a folder of its own."
        )


def _renew(folder: Path, lock: Any, say: Callable[[str], None]) -> Any:
    """Moves the old folder aside, its lock with it, and locks a new one."""
    try:
        moved = move_aside(folder)
    except OSError as problem:
        raise _unusable(folder, problem) from None
    lock.release()  # its path is the next one's: were it released later, that one's file would go
    say(f"the old {folder} is now {moved}")
    return _locked(folder)


def _locked(folder: Path) -> Any:
    from filelock import FileLock, Timeout

    lock = FileLock(folder / _LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(
            f"output must be free; another run writes into {folder}. Wait for its end, or give another output."
        ) from None
    except (OSError, NotImplementedError) as problem:
        raise _unusable(folder, problem) from None
    return lock


def _check_writable(folder: Path) -> None:
    """Tries what the run will do, rather than read permission bits: those do not bind everybody, nor tell all."""
    for name in FOLDERS:
        try:
            (folder / name).mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder / name, prefix=".probe-"):
                list((folder / name).iterdir())
        except OSError as problem:
            raise _unusable(folder / name, problem) from None
    for name in FILES:
        try:
            (folder / name).open("r+b").close()
        except FileNotFoundError:
            continue
        except OSError as problem:
            raise _unusable(folder / name, problem) from None


def _unusable(path: Path, problem: Exception) -> ConfigError:
    exists = isinstance(problem, OSError) and problem.errno in (errno.EEXIST, errno.ENOTDIR)
    why = "it is, or lies below, a file" if exists else getattr(problem, "strerror", None) or problem
    full = isinstance(problem, OSError) and problem.errno in FULL
    todo = "Free space there, or give another output." if full else "Give another output."
    return ConfigError(f"output must be a folder that can be written; got {path} ({why}). {todo}")
