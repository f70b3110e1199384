"""The stages of a training run: what `[[stages]]` may say, and what then holds in each.

A run without stages is a run of one. Each is trained under a config of its own, flat, as if there were no others, from
the checkpoint that the one before it ended with: to begin a stage and to go on in it are the same act.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from ringspun.train.context_schedule import Stage
from ringspun.train.parallel.sharding import Sharding
from ringspun.train.rope import Default, Rope

if TYPE_CHECKING:
    from ringspun.train.config import TrainConfig

MESH = ("ranks", "ulysses", "dp_replicate", "dp_shard")
"""What a stage's mesh may say: the keys of a config by the same names."""
Decay = Literal["none", "cosine", "linear"]
Kept = Literal["none", "layer", "attention", "ring_step"]
"""What of each layer is kept for backward."""


class TrainStage(Stage):
    """One of `[[stages]]`: a `Stage`, and what else may be another in it. What is not given is as at the top."""

    batch_size: int | None = Field(
        default=None, gt=0, description="Sequences of one optimizer step; or give `batch_tokens`. Default: the top's."
    )
    final_lr: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Learning rate at the stage's last step; needs `decay`."
    )
    decay: Decay = Field(default="none", description="How the learning rate falls to `final_lr`; none: it stays.")
    decay_steps: int | None = Field(
        default=None, gt=0, description="Steps of the decay, the stage's last ones. Default: all after the warm-up."
    )
    shard: Sharding | None = Field(default=None, description="Who holds the weights. Default: the top's.")
    layout: str | None = Field(default=None, description="Who holds which token. Default: the top's.")
    checkpointing: Kept | None = Field(
        default=None, description="What of each layer is kept for backward. Default: the top's."
    )
    kept_hops: int | None = Field(default=None, ge=0, description="With `checkpointing`. Default: the top's.")

    @model_validator(mode="before")
    @classmethod
    def _batch_is_one(cls, values: Any) -> Any:
        """Sequences for tokens of a step, and the other way round; which of both was given does not matter."""
        if not isinstance(values, Mapping):
            return values
        size, tokens, length = (values.get(name) for name in ("batch_size", "batch_tokens", "seq_len"))
        if not isinstance(length, int) or length < 1:
            return values
        if isinstance(tokens, int):
            if tokens % length or size not in (None, tokens // length):
                raise ValueError(
                    f"batch_tokens must be batch_size * seq_len; got {tokens}, batch_size = {size}, seq_len = {length}."
                )
            return {**values, "batch_size": tokens // length}
        if isinstance(size, int) and values.get("tokens") is not None and values.get("steps") is None:
            return {**values, "batch_tokens": size * length}
        return values

    @field_validator("mesh")
    @classmethod
    def _mesh_has_known_axes(cls, mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        unknown = [name for name, _ in mesh if name not in MESH]
        if unknown:
            raise ValueError(f"mesh must be of {', '.join(MESH)}; got {unknown[0]!r}. Rename or remove it.")
        if dict(mesh).get("ulysses") == -1:
            raise ValueError("ulysses must be a number of ranks; got -1. Its ranks are some of `ranks`.")
        return mesh

    @model_validator(mode="after")
    def _warm_up_has_a_rate(self) -> Self:
        return self  # where there is none here, the top has one

    @model_validator(mode="after")
    def _decay_fits(self) -> Self:
        check_decay(self.decay, self.decay_steps, self.final_lr, self.step_count - self.warmup_steps)
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """What holds in this stage other than at the top; without its mesh."""
        given = {name: getattr(self, name) for name in _SETTINGS if getattr(self, name) is not None}
        if "rope" in self.model_fields_set:
            given["rope"] = self.rope
        return given


_SETTINGS = (
    *("seq_len", "lr", "warmup_steps", "final_lr", "decay", "decay_steps", "batch_size"),
    *("shard", "layout", "checkpointing", "kept_hops"),
)


def check_decay(decay: Decay, decay_steps: int | None, final_lr: float, most: int) -> None:
    """Refuses settings of a decay that would have no effect, or more of it than `most` steps.

    Raises:
        ValueError: naming the setting.
    """
    if decay == "none" and (decay_steps is not None or final_lr):
        name, value = ("final_lr", final_lr) if decay_steps is None else ("decay_steps", decay_steps)
        raise ValueError(f"{name} must come with a decay; got {value} and decay = 'none'. Set 'cosine' or 'linear'.")
    if decay_steps is not None and decay_steps > most:
        raise ValueError(f"decay_steps must be at most the {most} steps after the warm-up; got {decay_steps}.")


@dataclass(frozen=True)
class Leg:
    """A stage as it is trained.

    Args:
        number: from 0. config: what holds in it, without stages; its `steps` count from the run's begin to the stage's
            end. first_step: optimizer steps before it. lengths: tokens of a sequence, of all stages of the run.
    """

    number: int
    config: TrainConfig
    first_step: int
    lengths: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Optimizer steps of the stage."""
        return self.config.steps - self.first_step

    @property
    def last_step(self) -> int:
        """The run's steps at the stage's end."""
        return self.config.steps

    @property
    def seq_len(self) -> int:
        """Tokens of one sequence."""
        return self.config.seq_len

    @property
    def rope(self) -> Rope | None:
        """The rotations, where the config says them; else they are the model's own."""
        return self.config.rope

    @property
    def is_last(self) -> bool:
        """Whether the run ends with it."""
        return self.number == len(self.lengths) - 1

    def __str__(self) -> str:
        return f"stage {self.number + 1} of {len(self.lengths)}"


def legs(config: TrainConfig) -> tuple[Leg, ...]:
    """The stages of a run as they are trained, at least one.

    Raises:
        ValueError: naming the stage in which settings do not go together.
    """
    if not config.stages:
        return (Leg(0, config, 0, (config.seq_len,)),)
    lengths = tuple(stage.seq_len for stage in config.stages)
    ends = list(accumulate(stage.step_count for stage in config.stages))
    shared = {name: getattr(config, name) for name in type(config).model_fields if name != "stages"}
    made = []
    for number, (stage, mesh, end) in enumerate(zip(config.stages, _meshes(config), ends, strict=True)):
        every = {"checkpoint_every": min(config.checkpoint_every, end)}
        try:
            flat = type(config).model_validate({**shared, **every, **stage.settings, **mesh, "steps": end})
        except ValidationError as problem:
            said = "; ".join(error["msg"].removeprefix("Value error, ") for error in problem.errors())
            raise ValueError(f"stages.{number}: {said}") from None
        made.append(Leg(number, flat, end - stage.step_count, lengths))
    return tuple(made)


def _meshes(config: TrainConfig) -> list[dict[str, int]]:
    """Sizes of each stage's mesh: of one with a -1, what makes as many processes as the others have."""
    top = {name: getattr(config, name) for name in MESH}
    given = [{**dict.fromkeys(MESH, 1), **dict(stage.mesh)} if stage.mesh else top for stage in config.stages]
    worlds = [_processes(mesh) for mesh in given if -1 not in mesh.values()]
    if not worlds:
        raise ValueError(
            "stages must say how many processes there are; got a mesh with -1 in each. Give one its sizes."
        )
    for mesh in given:
        rest = abs(_processes(mesh))
        if -1 in mesh.values():
            if worlds[0] % rest:
                raise ValueError(f"mesh must make the {worlds[0]} processes of the other stages; got {mesh}.")
            mesh.update({name: worlds[0] // rest for name, size in mesh.items() if size == -1})
    found = [_processes(mesh) for mesh in given]
    if len(set(found)) > 1:
        raise ValueError(
            f"stages must have the same number of processes (ranks * dp_replicate * dp_shard); got {found}. Set the "
            "mesh of each."
        )
    return given


def _processes(mesh: Mapping[str, int]) -> int:
    return mesh["ranks"] * mesh["dp_replicate"] * mesh["dp_shard"]


def mesh_of(config: TrainConfig) -> str:
    """Its sizes and who holds the weights, in a few words."""
    sizes = [f"{name} {getattr(config, name)}" for name in MESH if getattr(config, name) > 1]
    mesh = " x ".join(sizes) or "one rank"
    return mesh if config.shard == "none" else f"{mesh}, {config.shard}"


def rotations_of(config: TrainConfig) -> str:
    """Its rotations, in a few words."""
    if config.rope is None:
        return "the model's own"
    rope = config.rope
    usual = {one.name: one.default for one in fields(rope)}
    set_here = {name: getattr(rope, name) for name in usual if name != "theta" and getattr(rope, name) != usual[name]}
    kind = [] if isinstance(rope, Default) else [str(rope.rope_type)]
    return ", ".join([*kind, f"theta {rope.theta:g}", *(f"{name} {value}" for name, value in set_here.items())])


def told(leg: Leg) -> str:
    """A stage's mesh and rotations, in a line."""
    return f"{mesh_of(leg.config)}; rotations: {rotations_of(leg.config)}"


def learning_rate(config: TrainConfig, step: int, *, first_step: int = 0) -> float:
    """The learning rate of step 1, 2, ... of a run, or of a stage that begins after `first_step`: a linear warm-up,
    then `lr`, which in the last `decay_steps` falls to `final_lr`."""
    done, steps = step - first_step, config.steps - first_step
    if done <= config.warmup_steps:
        return config.lr * done / config.warmup_steps
    begin = config.warmup_steps if config.decay_steps is None else steps - config.decay_steps
    if config.decay == "none" or done <= begin:
        return config.lr
    progress = (done - begin) / (steps - begin)
    left = 1 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_lr + (config.lr - config.final_lr) * left
