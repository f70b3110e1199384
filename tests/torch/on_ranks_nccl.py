"""What ranks of a pool do with the NCCL driver on streams that stand in for a GPU's (`standing_streams`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
from on_ranks import PATIENCE_S
from standing_streams import StandingStreams, WatchedNccl

from ringspun.testing.cases import Case, inputs
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel

Watched = tuple[dict[str, np.ndarray], list[str], list[str]]


def run_watched(rank: int, asked: list[tuple[Case, dict[str, Any]]], deaf: str = "") -> list[Watched]:
    """Each case forward and backward: its numbers, its races, and what its streams did."""
    found = []
    for case, options in asked:
        driver = WatchedNccl(dist.group.WORLD, streams=StandingStreams(deaf=deaf), timeout_s=PATIENCE_S)
        context = ContextParallel(driver, layout=case.layout, **options)
        numbers = run_ring(case, inputs(case), context, kernel="eager")  # torch's CPU op looks into its operands
        found.append((numbers, driver.streams.races[:3], driver.streams.told))
    return found
