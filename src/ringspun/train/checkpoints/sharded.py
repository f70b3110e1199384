"""Checkpoints that all ranks write together, each its own pieces, as whole or absent as those of one rank."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ringspun.errors import CheckpointError
from ringspun.train.checkpoints.checkpointing import PARTIAL, publish, write_state
from ringspun.train.checkpoints.manifests import SHARDS
from ringspun.train.checkpoints.saved_model import save_beside
from ringspun.train.checkpoints.shards import write_shards
from ringspun.train.parallel.ranks import Mesh


def save_sharded(
    folder: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    ranks: Mesh,
    keep: int = 2,
    spare: Collection[int] = (),
    beside: Collection[Path] = (),
    before_publish: Callable[[int], None] | None = None,
) -> Path:
    """`checkpointing.save` of a model that is cut over ranks, without gathering it. Collective.

    `checkpointing.latest` finds it and `checkpointing.restore` loads it, on these or any other ranks, sharded or not,
    bit for bit. No rank sees it before all have written, and rank 0 has checked and renamed it.

    Args:
        folder: on a file system that all ranks share. step, state, keep, spare, beside, before_publish: as for
            `checkpointing.save`; `state` is rank 0's.
        model: bare, not in a `DistributedDataParallel`; FSDP2 cuts in place.
        ranks: all ranks of the job.
    Raises:
        CheckpointError: on every rank: some rank cannot write. What was there before stays as it was.
    """
    place = folder / f"step-{step:06d}"
    if ranks.rank:
        _follow(ranks, place, lambda: write_shards(folder / f"{PARTIAL}{place.name}" / SHARDS, model, optimizer))
        return place

    def write(partial: Path) -> None:
        write_shards(partial / SHARDS, model, optimizer)
        config = getattr(model, "config", None)
        if config is not None:
            config.save_pretrained(partial / "model")
        save_beside(partial / "model", beside)
        write_state(partial, step, state)

    _lead(ranks, write, lambda told: publish(folder, step, told, keep=keep, spare=spare, before_publish=before_publish))
    return place


def _lead(ranks: Mesh, write: Callable[[Path], None], save: Callable[[Callable[[Path], None]], Path]) -> None:
    """Rank 0: the others hear when its folder is there, and how it ended; whatever ends it, for they wait."""
    begun = done = False

    def told(partial: Path) -> None:
        nonlocal begun
        begun = True
        ranks.gather([1.0])
        write(partial)

    try:
        save(told)
        done = True
    finally:
        ranks.gather([float(begun and done)])


def _follow(ranks: Mesh, place: Path, write: Callable[[], None]) -> None:
    if _refused(ranks):
        raise _not_whole(place)
    try:
        write()
    finally:
        refused = _refused(ranks)
    if refused:
        raise _not_whole(place)


def _refused(ranks: Mesh) -> bool:
    return not ranks.gather([1.0])[0][0]


def _not_whole(place: Path) -> CheckpointError:
    return CheckpointError(f"checkpoint {place} must be written whole; rank 0 says why it is not.")
