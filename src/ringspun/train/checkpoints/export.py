"""A checkpoint as a folder that `from_pretrained` loads: config and safetensors, whatever ranks wrote it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

from ringspun.errors import CheckpointError
from ringspun.train.checkpoints.checkpointing import Checkpoint, latest
from ringspun.train.checkpoints.saved_model import save_beside, save_model
from ringspun.train.checkpoints.shards import cast_as_stored, read_shards
from ringspun.train.init import tokenizer_files
from ringspun.train.output import CHECKPOINTS


def check_target(folder: Path) -> None:
    """Refuses a folder that is there already, unless it is empty, and one that has no name to be renamed to.

    Raises:
        CheckpointError: it is.
    """
    if folder.name in ("", ".."):
        raise CheckpointError(
            f"export must be a folder with a name; got {str(folder)!r}. Give a new one, in it or beside it."
        )
    try:
        free = not folder.exists() or not any(folder.iterdir())
    except OSError as problem:
        raise _unusable(folder, problem) from None
    if not free:
        raise CheckpointError(f"export must be a new folder; got {folder}, which is not empty. Give another.")


def export(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes the weights of `checkpoint` into `folder`, whole or not at all. In one process, which holds all of them.

    Args:
        folder: new, or empty; tied weights are written once, and a large model in several files, as Transformers does.
    Raises:
        CheckpointError: the folder is not empty, or cannot be written; the checkpoint cannot be read, or has no config.
    """
    check_target(folder)
    partial = folder.with_name(f".writing-{folder.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        if checkpoint.shards is None:
            shutil.copytree(checkpoint.model_path, partial)
        else:
            save_model(model_of(checkpoint, checkpoint.shards), partial)
            save_beside(partial, tokenizer_files(checkpoint.model_path))
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as problem:
        raise _unusable(folder, problem) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def export_newest(output: Path, folder: Path) -> None:
    """`export` of the newest whole checkpoint of a run's output folder.

    Raises:
        CheckpointError: as `export`, or there is none.
    """
    found = latest(output / CHECKPOINTS, warn=print)
    if found is None:
        raise CheckpointError(f"output must hold a checkpoint to export; {output} has none.")
    export(found, folder)


def model_of(checkpoint: Checkpoint, shards: Path) -> Any:
    """The Transformers model of a checkpoint that all ranks wrote, whole on this process.

    Raises:
        CheckpointError: it has no config, or cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (checkpoint.model_path / "config.json").is_file():
        raise CheckpointError(
            f"checkpoint {checkpoint.path} must have model/config.json to be exported; it was saved from a model "
            "without a config. Build the model, and use ringspun.train.checkpoints.checkpointing.restore."
        )
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint.model_path))
    cast_as_stored(shards, cast(Any, model))  # a config says in what dtype a model was loaded, not what it has now
    read_shards(shards, cast(Any, model))
    return model


def _unusable(folder: Path, problem: OSError) -> CheckpointError:
    return CheckpointError(
        f"export must be a folder that can be written; got {folder} ({problem.strerror or problem})."
    )
