"""Where a run goes on: the checkpoint that is there, and whether it is one of this run.

A checkpoint holds what each stage was trained with. A stage that has begun must still be what it was, but for how it is
shared out and saved; the one that the checkpoint is in may end elsewhere, and those after it may be any.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ringspun.errors import CheckpointError
from ringspun.train.checkpoints import checkpointing
from ringspun.train.checkpoints.checkpointing import Checkpoint
from ringspun.train.config import ModelConfig, TrainConfig
from ringspun.train.data.config import DataConfig
from ringspun.train.data.contents import differences
from ringspun.train.data.text import TrainingData
from ringspun.train.output import CHECKPOINTS, DATA_MANIFEST
from ringspun.train.sections import Section
from ringspun.train.stages import Leg

MAY_CHANGE = {
    *("ranks", "ulysses", "dp_replicate", "dp_shard", "shard", "layout"),
    *("checkpointing", "kept_hops", "feed_forward_block", "loss_chunk"),
    *(
        "steps",
        "warmup_steps",
        "decay_steps",
        "checkpoint_every",
        "keep_checkpoints",
        "checkpoints",
        "output",
        "peak_flops",
    ),
    *("stages", "evaluate", "recipe"),
}
"""What a resumed run may change; in stages that are not over yet, but for `OF_RUN`."""
OF_RUN = ("model", "init", "data", "seed", "dtype", "weight_decay", "clip_norm")
"""What is the same in all stages."""
_TODO = "Restore it, give another output, or start anew with --fresh."


def find_checkpoint(config: TrainConfig, corpus: TrainingData, *, warn: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that a run of this config and data goes on from, or None for a new run.

    Raises:
        CheckpointError: naming the setting (and the stage) in which the checkpoint's run was another, or the data.
    """
    found = checkpointing.latest(
        config.output / CHECKPOINTS, warn=warn, needs={"data": str, "config": dict, "position": dict}
    )
    if found is None:
        return None
    if found.state["data"] != corpus.digest:
        raise CheckpointError(
            f"data must be as when {found.path} was written; "
            f"{differences(config.output / DATA_MANIFEST, corpus.files)}. "
            "Give the same data, or start anew with --fresh."
        )
    _check_stages(found, config)
    return found


def stages_of(legs: tuple[Leg, ...]) -> list[dict[str, Any]]:
    """What each stage is trained with, as a checkpoint holds it; the path of `init` is one from any folder on."""
    return [
        leg.config.model_dump(mode="json")
        | {"first_step": leg.first_step, "init": None if leg.config.init is None else os.path.abspath(leg.config.init)}
        for leg in legs
    ]


def leg_at(legs: tuple[Leg, ...], step: int) -> Leg:
    """The stage that comes after so many steps; at the end the last."""
    return next((leg for leg in legs if step < leg.last_step), legs[-1])


def _check_stages(found: Checkpoint, config: TrainConfig) -> None:
    then, now = found.state.get("stages", [found.state["config"]]), stages_of(config.legs)
    for number, old in enumerate(then):
        if number and old["first_step"] >= found.step:
            return  # not begun
        where = f"stages.{number}." if len(then) > 1 or len(now) > 1 else ""
        if number == len(now):
            raise CheckpointError(
                f"stages must be at least the {number + 1} that the run in {config.output} has begun; got {number}. "
                f"{_TODO}"
            )
        over = found.step > old["steps"]
        _check_stage(found, old, now[number], where, over=over)
        if not over and found.step > now[number]["steps"]:
            raise CheckpointError(
                f"{where}steps must be at least the {found.step} that the run in {config.output} already has; got "
                f"{now[number]['steps']}. Raise it, give another output, or start anew with --fresh."
            )


def _check_stage(found: Checkpoint, old: dict[str, Any], new: dict[str, Any], where: str, *, over: bool) -> None:
    for name in new.keys() - (MAY_CHANGE - ({"steps"} if over else set())) - {"first_step"}:
        before = old.get(name, _default(name))
        if _comparable(name, before) != _comparable(name, new[name]):
            place = name if name in OF_RUN else where + name
            raise CheckpointError(
                f"{place} must be as when {found.path} was written, {before!r}; got {new[name]!r}. {_TODO}"
            )


def _default(name: str) -> Any:
    """What a setting was before there was one."""
    return TrainConfig.model_fields[name].default


def _comparable(name: str, value: Any) -> Any:
    """A setting as checkpoints of any age are compared by: keys that there were not yet have their defaults, and where
    files are does not matter, whose contents are compared."""
    if name == "init" and value is not None:
        return os.path.abspath(value)
    kinds: dict[str, type[Section]] = {"model": ModelConfig, "data": DataConfig}
    kind = kinds.get(name)
    if kind is None or not isinstance(value, dict):
        return value
    known = {key: field.default for key, field in kind.model_fields.items()} | value
    if kind is DataConfig:
        moved = {"path", "tokenizer"} | ({"held_out"} if isinstance(known["held_out"], str) else set())
        known = {key: value for key, value in known.items() if key not in moved}
    return {key: list(x) if isinstance(x, tuple) else x for key, x in known.items()}
