"""examples/line_retrieval as modules, and a tiny run of it as the ranks of a pool see it. They import this file."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import distributed as dist

from ringspun.torch import ContextParallel
from ringspun.train import launch, loop
from ringspun.train.config import TrainConfig, load_config
from ringspun.train.parallel.ranks import Mesh
from ringspun.train.recipe import OwnData

EXAMPLE = Path(__file__).parents[2] / "examples" / "line_retrieval"
sys.path.insert(0, str(EXAMPLE))

import judge  # noqa: E402

TINY = {512: 384, 8192: 480}
"""Of two stages, one without a ring and one with: lengths at which lines stand in each tenth of a half of them."""


def tiny_config(output: Path) -> TrainConfig:
    """recipe.toml as it is, but for two stages left out, lengths, steps, sequences of a step, and dtype."""
    stages: list[dict[str, Any]] = []
    for stage in (one for one in load_config(EXAMPLE / "recipe.toml").stages if one.seq_len in TINY):
        given = stage.model_dump(include=stage.model_fields_set, exclude_none=True)
        few = {"steps": 2, "warmup_steps": 1, "decay_steps": 1, "batch_size": dict(stage.mesh).get("dp_replicate", 1)}
        stages.append(given | few | {"seq_len": TINY[stage.seq_len], "mesh": dict(stage.mesh)})
    return load_config(EXAMPLE / "recipe.toml", output=output, stages=stages, dtype="float32")


def trained_and_judged(rank: int, output: Path) -> judge.Grids:
    """What the two commands of the example do, on two ranks."""
    config, group = tiny_config(output), dist.group.WORLD
    with patch.object(loop, "peak_memory", lambda: nullcontext(SimpleNamespace(bytes=0))):  # the profiler takes seconds
        launch._train(launch.Job(config, OwnData()), Mesh(group))
    return judge.retrieved(config, ContextParallel(group), judge.Asked((480,), documents=1, questions=10))
