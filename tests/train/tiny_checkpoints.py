"""Checkpoints of a model of a few numbers, and what kills or fails their `save`. Started processes import this file."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ringspun.errors import CheckpointError
from ringspun.train.checkpoints.checkpointing import latest, restore, save

# What the interpreter tells of, before it does it, when it changes files. (safetensors writes behind its back.)
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


class Tiny(nn.Linear):
    """A model that can be saved as a checkpoint needs it."""

    def __init__(self, step: int) -> None:
        super().__init__(7, 5)
        with torch.no_grad():
            self.weight.fill_(step)

    def save_pretrained(self, path: Path) -> None:
        path.mkdir()
        save_file(self.state_dict(), path / "model.safetensors")
        (path / "config.json").write_text('{"width": 5}')


def save_tiny(folder: Path, step: int, *, keep: int = 2) -> None:
    """A checkpoint of `step`; its weights and its state tell which."""
    model = Tiny(step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(7)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.weight.fill_(step)
    save(folder, step=step, model=model, optimizer=optimizer, state={"position": step}, keep=keep)


def whole_step(folder: Path) -> int:
    """The step of the newest checkpoint, all of which must be whole and say the same step."""
    damaged: list[str] = []
    found = latest(folder, warn=damaged.append)
    assert found is not None and not damaged, damaged
    model = Tiny(0)
    restore(found, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert model.weight.unique().tolist() == [found.step] == [found.state["position"]]
    return found.step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def at_event(number: int, inside: Path, strike: Callable[[], None]) -> None:
    """From now on, `strike` before the number-th time that this process touches a file in `inside`."""
    counter = count()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS or not isinstance(arguments[0], (str, Path)):
            return
        path = Path(arguments[0])  # one that is removed with its folder is told by its name alone
        if (path.is_relative_to(inside) or not path.is_absolute()) and next(counter) == number:
            strike()

    sys.addaudithook(hook)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def largest_file(size: int, *, deadly: bool) -> None:
    """From now on, the system takes no file of more than `size` bytes: an error in the middle of a write, or death."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def in_child(folder: Path, prepare: Callable[[], None], step: int, keep: int) -> str:
    """What becomes of a save of `step` by a process of its own that `prepare` has spoilt: saved, refused or killed."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        code = 3
        try:
            prepare()
            save_tiny(folder, step, keep=keep)
            code = 0
        except CheckpointError as problem:
            code = 1 if "Free space" in str(problem) or "must be removable" in str(problem) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXFSZ), status
        return "killed"
    return {0: "saved", 1: "refused"}.get(os.WEXITSTATUS(status), f"exit code {os.WEXITSTATUS(status)}")


def spoil_everywhere(_: int, base: Path, scratch: Path, how: str, step: int, keep: int) -> list[tuple[str, int]]:
    """Saves `step` into copies of `base`, spoilt at one place after the other until nothing is left to spoil.

    After each: the newest checkpoint is whole, an error left nothing else, and the next save does.
    Returns what became of each, and the newest whole step then.
    """
    outcomes = []
    for number in count():
        folder = scratch / str(number)
        shutil.copytree(base, folder)
        outcome = in_child(folder, preparation(how, number, folder), step, keep)
        outcomes.append((outcome, whole_step(folder)))
        if outcome == "saved":
            return outcomes
        if outcome == "refused":
            assert not [name for name in names(folder) if name.startswith(".writing")], names(folder)
        save_tiny(folder, 10, keep=1)
        assert names(folder) == ["step-000010"] and whole_step(folder) == 10
    raise AssertionError("unreachable")


def preparation(how: str, number: int, folder: Path) -> Callable[[], None]:
    if how == "kill at events":
        return lambda: at_event(number, folder, kill)
    if how == "no space at events":
        return lambda: at_event(number, folder, no_space)
    return lambda: largest_file(499 * number, deadly=how == "kill in writes")
