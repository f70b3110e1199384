"""Runs of several stages, each on a mesh of its own, as the ranks of a pool see them. They import this file."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from mesh_runs import Stop, digest
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from training_runs import tiny_config

from ringspun.errors import NonFiniteError
from ringspun.train import launch, loop
from ringspun.train.config import TrainConfig
from ringspun.train.data.opening import open_data
from ringspun.train.launch import Job
from ringspun.train.loop import Hooks, train_stages
from ringspun.train.parallel.ranks import Mesh
from ringspun.train.recipe import Recipe

OF_STAGES = ("seq_len", "steps", "warmup_steps", "final_lr", "decay", "decay_steps")
STAGES: tuple[dict[str, Any], ...] = (
    {"seq_len": 16, "steps": 1, "batch_size": 4, "lr": 1e-2},
    {"seq_len": 48, "steps": 2, "batch_size": 2, "lr": 3e-3, "rope": 1e5},
    {"seq_len": 64, "steps": 1, "batch_size": 2, "lr": 1e-3, "rope": 1e6, "decay": "linear"},
)
ON_FOUR: tuple[dict[str, Any], ...] = (
    {"mesh": {"dp_replicate": 4}, "shard": "ddp"},
    {"mesh": {"dp_shard": 2, "ranks": 2}, "shard": "fsdp"},
    {"mesh": {"ranks": 4, "ulysses": 2}, "shard": "fsdp"},
)


def config_of(output: Path, more: tuple[dict[str, Any], ...] = ({}, {}, {}), **changes: Any) -> TrainConfig:
    values = {k: v for k, v in tiny_config(output, **changes).model_dump().items() if k not in OF_STAGES}
    return TrainConfig.model_validate(values | {"stages": [a | b for a, b in zip(STAGES, more, strict=True)]})


def trained(config: TrainConfig, text: Path, stop: int = 0, fault: int = -1) -> tuple[str, str]:
    """Digest of all that a run ends with, or how it ended instead. On this process's default group, if there is one."""
    job = Job(config, open_data(config, [text]), hooks=Hooks(partial(_strike, stop, fault)))
    ranks = Mesh(dist.group.WORLD if dist.is_initialized() else None)
    with patch.object(loop, "peak_memory", lambda: nullcontext(SimpleNamespace(bytes=0))):
        try:
            run_of = partial(launch._run, job, ranks, Recipe())
            return digest(train_stages(config, job.corpus, ranks, run_of)[1]), ""
        except (Stop, NonFiniteError) as problem:
            return "", f"{type(problem).__name__}: {problem}"


def _strike(stop: int, fault: int, step: int, model: Any) -> None:
    if step == stop:
        raise Stop
    if step == fault:  # what the next step meets
        for name, parameter in model.named_parameters():
            if name == "model.layers.1.mlp.up_proj.weight":
                local = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
                local.fill_(float("nan"))


def trained_on(rank: int, config: TrainConfig, text: Path, stop: int = 0) -> tuple[str, str]:
    return trained(config, text, stop)


def faulty_on(rank: int, config: TrainConfig, text: Path) -> tuple[str, str]:
    """In the second stage."""
    return trained(config, text, fault=2)
