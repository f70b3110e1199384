"""What ranks of a pool do for the tests of the meter. They import this file."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ringspun import Causal, Documents
from ringspun.torch import ContextParallel
from ringspun.train.parallel.ranks import Mesh
from ringspun.train.reporting.meter import StepMeter

LATE_S = 0.3


def packed(*lengths: int) -> Any:
    """What the meter looks at of a sequence of documents."""
    return SimpleNamespace(ids=range(sum(lengths)), documents=Documents(lengths))


def a_step_in_which_rank_1_is_late(rank: int, ulysses: int) -> dict[str, Any]:
    """Attention, measured."""
    mesh, context = Mesh(dist.group.WORLD), ContextParallel(dist.group.WORLD, ulysses=ulysses)
    part = context.partition(16)
    plan, x = part.plan(Causal()), torch.randn(1, 2, part.local_tokens, 4)
    plan.attention(x, x, x)
    meter = StepMeter(nn.Linear(1, 1), context, mesh)
    meter.begin()
    if rank == 1:
        time.sleep(LATE_S)
    plan.attention(x, x, x)
    return meter.end([packed(16)])
