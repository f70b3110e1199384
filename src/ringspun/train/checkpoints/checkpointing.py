"""Checkpoints that are written whole or not at all, and do not depend on the ring.

    checkpoints/step-000020/
      model/                  what `save_pretrained` writes; `from_pretrained` loads it
      optimizer.safetensors   AdamW's moments, by parameter name
      state.json              step, data position, config, digest of the data
      rng.safetensors         PyTorch's generator; of other ranks too, where theirs is another (dropout, uneven shares)
      manifest.json           size and SHA-256 of every other file; written last

One that all ranks wrote together (`sharded.py`) has shards/ instead of model.safetensors and the two others:

      shards/                 weights, optimizer and generators, one file of each rank; see `shards.py`

Everything is written into a hidden folder beside its place and flushed to the disk; then one rename makes it
appear. A folder without a manifest that fits is damaged: it is named and skipped. One that may not be read is refused
instead, for nothing is known to be wrong with it.

    .writing-step-000020/   not whole yet; thrown away by the next run
    .replaced-step-000020/  the one that was there when step 20 was saved again; whole until the new one is in place
    .removing-step-000010/  no longer needed
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ringspun.errors import CheckpointError
from ringspun.train.checkpoints.manifests import MANIFEST, SHARDS, STATE, files, manifest_fault, write_manifest
from ringspun.train.checkpoints.saved_model import save_beside, save_model
from ringspun.train.output import FULL

if TYPE_CHECKING:
    from ringspun.train.checkpoints.shards import Whole

PARTIAL, _REPLACED, _TRASH = ".writing-", ".replaced-", ".removing-"
_NAME = re.compile(rf"(?:{re.escape(_REPLACED)})?step-([0-9]+)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    path: Path
    step: int  # optimizer steps that it holds
    state: dict[str, Any]  # what `save` was given, besides model and optimizer

    @property
    def model_path(self) -> Path:
        """The folder for `from_pretrained`."""
        return self.path / "model"

    @property
    def shards(self) -> Path | None:
        """The folder of the ranks' pieces, where all ranks wrote it together."""
        return self.path / SHARDS if (self.path / SHARDS).is_dir() else None


def save(
    folder: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    keep: int = 2,
    spare: Collection[int] = (),
    beside: Collection[Path] = (),
    before_publish: Callable[[int], None] | None = None,
    whole: Whole | None = None,
    generators: dict[str, Tensor] | None = None,
) -> Path:
    """Writes the checkpoint of `step` into `folder`, then removes those before it that are not among the newest
    `keep`.

    Args:
        folder: holds one folder per checkpoint; made if absent.
        step: optimizer steps done.
        model: see `saved_model.save_model`.
        optimizer: its tensors go into a safetensors file, by parameter name.
        state: plain data (JSON) that a resumed run needs.
        keep: checkpoints to keep, this one included. Those of later steps, which were skipped as damaged, stay
            until their step is saved again. spare: steps whose checkpoints stay, however old.
        beside: files that are copied to the model; its tokenizer, say.
        before_publish: called with `step` when all is written but nothing is visible yet; for tests of a
            crash there.
        whole: the tensors of a model that is cut over ranks, gathered; see `Whole`.
        generators: states of PyTorch's generators; see `saving.generators_of`. Default: this process's.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it cannot be written (a full disk, say). What was there before stays as it was.
    """
    from ringspun.train.checkpoints.shards import Whole

    tensors = Whole.of(model, optimizer) if whole is None else whole
    return publish(
        folder,
        step,
        lambda partial: _write(
            partial, step, model, tensors, state, beside, generators or {"cpu": torch.get_rng_state()}
        ),
        keep=keep,
        spare=spare,
        before_publish=before_publish,
    )


def publish(
    folder: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    keep: int,
    spare: Collection[int] = (),
    before_publish: Callable[[int], None] | None = None,
) -> Path:
    """Makes what `write` writes into a folder of its own the checkpoint of `step`, whole or not at all; see `save`."""
    from safetensors import SafetensorError

    tidy(folder)
    place, partial = folder / f"step-{step:06d}", folder / f"{PARTIAL}step-{step:06d}"
    before = [path.name for path in _folders(folder) if _number(path) < step]
    try:
        partial.mkdir(parents=True)
        write(partial)
        write_manifest(partial)
        if before_publish is not None:
            before_publish(step)
        _publish(partial, place)
    except (OSError, SafetensorError) as problem:
        raise _unwritten(place, problem, before) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk it would take the room of the next try
    tidy(folder)
    with _removing(folder):
        for old in [path for path in _folders(folder) if _number(path) <= step][keep:]:
            if _number(old) not in spare:
                _remove(old)
    return place


def tidy(folder: Path) -> None:
    """Removes what an interrupted `save` left in `folder`, none of it ever visible, and puts back what it was about
    to replace. Not while another process may read or write there.

    Raises:
        CheckpointError: naming what cannot be removed.
    """
    with _removing(folder):
        for prefix in (PARTIAL, _TRASH):
            for path in folder.glob(f"{prefix}*"):
                shutil.rmtree(path)
        for path in folder.glob(f"{_REPLACED}*"):
            place = path.with_name(path.name.removeprefix(_REPLACED))
            _remove(path) if place.exists() else path.rename(place)


@contextmanager
def _removing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise CheckpointError(
            f"checkpoints that are no longer needed must be removable; got {problem.filename or folder} "
            f"({problem.strerror or problem}). Remove it; those beside it are whole."
        ) from None


def latest(
    folder: Path, *, warn: Callable[[str], None], needs: Mapping[str, type] = MappingProxyType({})
) -> Checkpoint | None:
    """The newest whole checkpoint of `folder`, or None if there has never been one.

    Args:
        folder: what `save` was given.
        warn: told the name and the fault of every damaged checkpoint that is skipped.
        needs: what the state must hold, and of which type; a checkpoint without it is damaged.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged; or `folder` or one of them may not be read.
    """
    damaged = []
    for path in _folders(folder):
        try:
            fault = _fault(path, {"step": int, **needs})
        except PermissionError as problem:
            raise _unreadable(Path(problem.filename or path), problem) from None
        if fault is None:
            state = _state(path)
            return Checkpoint(path, state["step"], state)
        damaged.append(path)
        warn(f"checkpoint {path} is damaged and skipped: {fault}.")
    if damaged:
        names = ", ".join(str(path) for path in damaged)
        raise CheckpointError(
            f"a checkpoint must be whole; all are damaged: {names}. Restore one, or start anew with --fresh."
        )
    return None


def restore(checkpoint: Checkpoint, *, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Puts weights, optimizer state and PyTorch's generator back, in place. The ring may have another size now, and the
    model may be cut over ranks otherwise, or not at all. Collective where shards are read.

    Args:
        optimizer: None: the weights alone.
    Raises:
        CheckpointError: the checkpoint's tensors cannot be read, or are not those of this model.
    """
    from ringspun.train.checkpoints.shards import placed, read_shards, world_rank

    if checkpoint.shards is not None:
        return read_shards(checkpoint.shards, model, optimizer)
    mine = model.state_dict(keep_vars=True)
    found = _load(checkpoint, "model/model.safetensors")
    stored = {id(mine[name]): x for name, x in found.items() if name in mine}  # of tied weights only one name is
    found |= {name: stored[id(x)] for name, x in mine.items() if name not in found and id(x) in stored}
    try:
        model.load_state_dict({name: placed(x, mine[name]) if name in mine else x for name, x in found.items()})
    except RuntimeError as problem:
        raise CheckpointError(f"checkpoint {checkpoint.path} must fit the model; {problem}") from None
    if optimizer is not None:
        _restore_optimizer(checkpoint, model, optimizer, _load(checkpoint, "optimizer.safetensors"))
        states = _load(checkpoint, "rng.safetensors")
        torch.set_rng_state(states.get(f"cpu/{world_rank()}", states["cpu"]))
    return None


def _load(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(checkpoint.path / name)
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} must be readable; {name}: {problem}. It may have changed since it was "
            "found whole, or was not written by this program; remove it to go on from the one before."
        ) from None
    # A copy, for what is loaded is the mapped file: it would keep the room of a removed one, and change with it.
    return {key: tensor.clone() for key, tensor in tensors.items()}


def _write(
    partial: Path,
    step: int,
    model: nn.Module,
    whole: Whole,
    state: dict[str, Any],
    beside: Collection[Path],
    generators: dict[str, Tensor],
) -> None:
    from safetensors.torch import save_file

    save_model(model, partial / "model", whole.model)
    save_beside(partial / "model", beside)
    save_file(whole.optimizer, partial / "optimizer.safetensors")
    save_file(generators, partial / "rng.safetensors")
    write_state(partial, step, state)


def write_state(partial: Path, step: int, state: dict[str, Any]) -> None:
    """Writes the plain data of a checkpoint that is being written."""
    (partial / STATE).write_text(json.dumps({"step": step, **state}, indent=1))


def _unwritten(place: Path, problem: Exception, before: list[str]) -> CheckpointError:
    """The error of a `save`; safetensors tells the number of the system's error in its text alone."""
    told = re.search(r"os error (\d+)", str(problem))
    number = problem.errno if isinstance(problem, OSError) else int(told[1]) if told else None
    what = os.strerror(number) if number else str(problem)
    todo = "Free space there" if number in FULL else "Make that possible"
    left = f"; it goes on from the last checkpoint ({before[0]}, untouched)" if before else ""
    return CheckpointError(
        f"checkpoint {place} must be written whole; got: {what}. {todo}, then run the same command again{left}."
    )


def _restore_optimizer(
    checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]
) -> None:
    from ringspun.train.checkpoints.shards import entry_of, placed

    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for full_name, tensor in tensors.items():
        name, key = full_name.rsplit("/", 1)
        if name not in parameters:
            raise CheckpointError(f"checkpoint {checkpoint.path} must fit the model; it has no parameter {name!r}.")
        key, value = entry_of(key, placed(tensor, parameters[name]))
        optimizer.state[parameters[name]][key] = value


def _folders(folder: Path) -> list[Path]:
    """Folders of checkpoints, newest first, whole or not."""
    try:
        paths = list(folder.iterdir())  # not glob, which takes a folder that may not be read for an empty one
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise _unreadable(folder, problem) from None
    found = [path for path in paths if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (_number(path), not path.name.startswith(_REPLACED)), reverse=True)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _unreadable(path: Path, problem: OSError) -> CheckpointError:
    return CheckpointError(
        f"checkpoints must be readable; got {path} ({problem.strerror or problem}). "
        "Make it readable, or give another output."
    )


def _fault(path: Path, needs: Mapping[str, type]) -> str | None:
    """What is wrong with a checkpoint, or None. PermissionError goes through: nothing is known to be wrong."""
    try:
        entries = json.loads((path / MANIFEST).read_bytes())
        return manifest_fault(path, entries) or _state_fault(_state(path), needs)
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError) as problem:
        return f"its {MANIFEST} or {STATE} cannot be read ({getattr(problem, 'strerror', None) or problem})"


def _state_fault(state: Any, needs: Mapping[str, type]) -> str | None:
    if not isinstance(state, dict):
        return f"its {STATE} is no table"
    wrong = [name for name, kind in needs.items() if not isinstance(state.get(name), kind)]
    return f"its {STATE} has no {', '.join(wrong)} that can be used" if wrong else None


def _state(path: Path) -> Any:
    return json.loads((path / STATE).read_bytes())


def _publish(partial: Path, place: Path) -> None:
    for file in [*files(partial), partial / MANIFEST]:
        _flush(file)
    for inside in [path for path in partial.rglob("*") if path.is_dir()]:
        _flush(inside)
    _flush(partial)
    old = place.with_name(_REPLACED + place.name)
    if place.exists():  # a damaged one that was skipped, or a step that is saved again
        place.rename(old)
    try:
        partial.rename(place)
    except OSError:
        if old.exists():
            old.rename(place)
        raise
    _flush(place.parent)


def _flush(path: Path) -> None:
    """Forces a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    trash = path.with_name(_TRASH + path.name.removeprefix(_REPLACED))
    path.rename(trash)  # first out of sight: a half-removed one must not look like a damaged one
    shutil.rmtree(trash)
