"""A context that grows in stages: how long sequences are at which step, with which rotations, rate and mesh.

    [[stages]]
    seq_len = 4096
    steps = 1000
    rope = 10000.0                       # theta; or a table: {rope_type = "yarn", factor = 4.0, ...}

    [[stages]]
    seq_len = 16384
    tokens = 4000000000                  # instead of steps, with batch_tokens
    batch_tokens = 4000000
    rope = 100000.0
    lr = 4e-05
    mesh = {data = 4, ring = -1}         # -1: the rest

`str(schedule)` writes this, `ContextSchedule.parse` reads it.
"""

from __future__ import annotations

import bisect
import json
import re
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, InstanceOf, PlainSerializer, PrivateAttr, field_validator, model_validator

from ringspun.errors import ConfigError, RingspunWarning
from ringspun.train.rope import Default, Rope, from_parameters
from ringspun.train.sections import Section, validated


def _rope(given: Any) -> Any:
    """A theta, or Hugging Face's parameters, as a value."""
    if isinstance(given, Mapping):
        return from_parameters(given)
    return Default(theta=given) if isinstance(given, int | float) and not isinstance(given, bool) else given


def _plain(rope: Rope) -> Any:
    """A value as a theta, or as Hugging Face's parameters."""
    return rope.theta if rope == Default(theta=rope.theta) else rope.to_parameters()


AnyRope = Annotated[InstanceOf[Rope], BeforeValidator(_rope), PlainSerializer(_plain, when_used="json")]
"""A field that takes a theta, a table of Hugging Face's parameters, or a value."""


def _pairs(given: Any) -> Any:
    return tuple(given.items()) if isinstance(given, Mapping) else given


class Stage(Section):
    """One stage of a schedule. Of `steps`, `tokens` and `batch_tokens`, `steps` is enough; any two give the third."""

    seq_len: int = Field(gt=1, description="Tokens of one sequence.")
    steps: int | None = Field(default=None, gt=0, description="Optimizer steps of the stage.")
    tokens: int | None = Field(default=None, gt=0, description="Tokens of the whole stage.")
    batch_tokens: int | None = Field(default=None, gt=0, description="Tokens of one optimizer step.")
    rope: AnyRope = Field(default=Default(), description="Theta, or a table of Hugging Face's rope_parameters.")
    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="Learning rate after warm-up.")
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps of linear warm-up from 0 at the beginning of the stage; needs `lr`."
    )
    mesh: Annotated[tuple[tuple[str, int], ...], BeforeValidator(_pairs)] = Field(
        default=(), description="Size of each mesh axis, by name; -1: what is left, for one of them. None: the job's."
    )

    _first_step: int = PrivateAttr(default=0)

    @property
    def first_step(self) -> int:
        """The step at which the stage begins in its schedule; 0 outside of one."""
        return self._first_step

    @property
    def step_count(self) -> int:
        """Optimizer steps of the stage: `steps`, or as many as give at least `tokens`."""
        return self.steps or -(-(self.tokens or 0) // (self.batch_tokens or 1))  # validated: these are given then

    @property
    def total_tokens(self) -> int | None:
        """Tokens of the whole stage, where they are known: `tokens`, or steps times `batch_tokens`."""
        if self.tokens is not None or self.batch_tokens is None:
            return self.tokens
        return self.step_count * self.batch_tokens

    def lr_at(self, step: int) -> float:
        """Learning rate at a step of the schedule: a linear warm-up, then constant; the n-th step of W has n / W of it.

        Raises:
            ConfigError: the stage has no `lr`.
        """
        if self.lr is None:
            raise ConfigError(f"lr must be given to ask for it; the stage of {self.seq_len} tokens has none.")
        done = step - self.first_step + 1
        return (
            self.lr
            if done >= self.warmup_steps or not self.warmup_steps
            else self.lr * max(0, done) / self.warmup_steps
        )

    @field_validator("mesh")
    @classmethod
    def _mesh_is_one(cls, mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        names = [name for name, _ in mesh]
        if len(set(names)) < len(names) or not all(re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) for name in names):
            raise ValueError(f"mesh must name each axis once, by letters, digits and _; got {names}.")
        if any(size < 1 and size != -1 for _, size in mesh) or sum(size == -1 for _, size in mesh) > 1:
            raise ValueError(f"mesh must have sizes of at least 1, one of them perhaps -1; got {dict(mesh)}.")
        return mesh

    @model_validator(mode="after")
    def _length_is_known(self) -> Self:
        given = [name for name in ("steps", "tokens", "batch_tokens") if getattr(self, name) is not None]
        if given == ["steps", "tokens", "batch_tokens"]:
            raise ValueError("steps, tokens and batch_tokens must not all be given; leave one out.")
        if given in ([], ["tokens"], ["batch_tokens"]):
            raise ValueError(
                f"steps must be given, or tokens and batch_tokens; got {given[0] + ' alone' if given else 'none'}."
            )
        if self.batch_tokens is not None and self.batch_tokens < self.seq_len:
            raise ValueError(
                f"batch_tokens must be at least seq_len; got {self.batch_tokens} and {self.seq_len}. A step takes "
                "whole sequences."
            )
        if self.warmup_steps > self.step_count:
            raise ValueError(
                f"warmup_steps must be at most the stage's steps; got {self.warmup_steps} of {self.step_count}."
            )
        return self

    @model_validator(mode="after")
    def _warm_up_has_a_rate(self) -> Self:
        if self.warmup_steps and self.lr is None:
            raise ValueError(f"warmup_steps must be 0 without lr; got {self.warmup_steps}. It would have no effect.")
        return self


class ContextSchedule(Section):
    """Stages one after another; a frozen value.

        schedule = ContextSchedule.of(seq_len=[4096, 16_384], steps=[1000, 2000], rope=[1e4, 1e5])
        schedule.at(999).seq_len, schedule.at(1000).seq_len    # 4096, 16384

    A stage shorter than the one before it is a warning: contexts are meant to grow, but some runs end on short ones.

    Args:
        stages: at least one `Stage`, or a table of its fields.
    Raises:
        pydantic.ValidationError (a ValueError) from the class itself, as from every `Section`; `of`, `parse` and `read`
        raise ConfigError in its place.
    """

    stages: tuple[Stage, ...] = Field(strict=False, description="The stages, in order.")

    @field_validator("stages")
    @classmethod
    def _placed(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        if not stages:
            raise ValueError("stages must hold at least one stage; got none.")
        for one, two in pairwise(stages):
            if two.seq_len < one.seq_len:
                warnings.warn(
                    f"seq_len should grow from stage to stage; got {two.seq_len} after {one.seq_len}.",
                    RingspunWarning,
                    stacklevel=2,
                )
        placed = tuple(stage.model_copy() for stage in stages)
        for stage, first in zip(placed, accumulate((s.step_count for s in stages), initial=0), strict=False):
            stage._first_step = first
        return placed

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return self.stages[-1].first_step + self.stages[-1].step_count

    def at(self, step: int) -> Stage:
        """The stage of a step, counted from 0; beyond the end the last one.

        Raises:
            ConfigError: a negative step.
        """
        if step < 0:
            raise ConfigError(f"step must be at least 0; got {step}.")
        return self.stages[bisect.bisect_right([stage.first_step for stage in self.stages], step) - 1]

    @classmethod
    def of(cls, **fields: Sequence[Any]) -> Self:
        """From one list per field of `Stage`, all of one length.

        Raises:
            ConfigError: lists of unequal lengths, and as `read`.
        """
        sizes = {name: len(values) for name, values in fields.items()}
        if len(set(sizes.values())) > 1:
            got = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ConfigError(f"lists must have one entry per stage; got {got}.")
        columns = zip(*fields.values(), strict=True)
        return cls.read({"stages": [dict(zip(fields, row, strict=True)) for row in columns]})

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From plain values, as TOML and JSON have them: ``{"stages": [{"seq_len": 4096, "steps": 1000}]}``.

        Raises:
            ConfigError: naming the stage (counted from 0) and the key.
        """
        return validated(cls, values, source="context schedule")

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the TOML text that `str` gives.

        Raises:
            ConfigError: no TOML, and as `read`.
        """
        try:
            values = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as problem:
            raise ConfigError(f"context schedule must be TOML; {problem}.") from None
        return cls.read(values)

    def __str__(self) -> str:
        return "\n".join(f"[[stages]]\n{_lines(stage)}" for stage in self.stages)


def _lines(stage: Stage) -> str:
    """A stage's fields that are not their defaults, one a line."""
    values = {name: getattr(stage, name) for name in Stage.model_fields if name in stage.model_fields_set}
    given = {name: value for name, value in values.items() if value is not None}
    if "rope" in given:
        given["rope"] = _plain(given["rope"])
    if "mesh" in given:
        given["mesh"] = dict(given["mesh"])
    return "".join(f"{name} = {_toml(value)}\n" for name, value in given.items())


def _toml(value: Any) -> str:
    """JSON's numbers, texts and lists are TOML's too; its tables are not."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(x)}" for name, x in value.items()) + "}"
    return json.dumps(value)


def progressive_1m(steps: Sequence[int] = (1000, 2000, 2000, 2000, 1000)) -> ContextSchedule:
    """4K to 1M tokens, four times as many at each stage, theta 10K to 50M.

    Our own: no paper has it. At 256K and 1M theta is LWM-Text's; there is no learning rate in it.

    Args:
        steps: of each of the five stages.
    """
    return ContextSchedule.of(
        seq_len=[1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20],
        steps=steps,
        rope=[10_000.0, 100_000.0, 1_000_000.0, 10_000_000.0, 50_000_000.0],
    )


def lwm_text() -> ContextSchedule:
    """LWM-Text 7B as it was trained from Llama-2 7B: 32K to 1M tokens, about 4M tokens a step, on a TPU v4-512.

    Source: Liu et al., World Model on Million-Length Video and Language with Blockwise RingAttention, arXiv 2402.08268,
    table 11. Mesh axes by its names: dp data, fsdp sharded data, tp tensor, sp sequence (the ring).
    """
    meshes = [(1, -1, 4, 1), (1, -1, 8, 1), (1, -1, 16, 1), (1, -1, 16, 2), (1, -1, 16, 4)]
    return ContextSchedule.of(
        seq_len=[1 << 15, 1 << 17, 1 << 18, 1 << 19, 1 << 20],
        steps=[1200, 3000, 3000, 720, 450],
        tokens=[4_800_000_000, 12_000_000_000, 12_000_000_000, 3_000_000_000, 1_800_000_000],
        rope=[1_000_000.0, 10_000_000.0, 10_000_000.0, 25_000_000.0, 50_000_000.0],
        lr=[4e-5] * 5,
        warmup_steps=[100, 200, 200, 50, 25],
        mesh=[dict(zip(("dp", "fsdp", "tp", "sp"), sizes, strict=True)) for sizes in meshes],
    )


PRESETS = {"progressive_1m": progressive_1m, "lwm_text": lwm_text}
"""The schedules by name."""
