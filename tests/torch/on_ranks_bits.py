"""What the ranks of a pool compute for the tests of bits; they import this file."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from ringspun.testing.cases import Case, inputs
from ringspun.testing.torch import rounded, run_ring
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.kernels import Kernel

PATIENCE_S = 20.0


def on_processes(
    rank: int, cases: list[Case], repeats: int, options: dict[str, Any]
) -> list[list[dict[str, np.ndarray]]]:
    """Each case so often over the default group, one thread per rank. options: of the `ContextParallel`."""
    torch.set_num_threads(1)

    def once(case: Case) -> dict[str, np.ndarray]:
        context = ContextParallel(dist.group.WORLD, layout=case.layout, timeout_s=PATIENCE_S, **options)
        return run_ring(case, rounded(case, inputs(case)), context)

    return [[once(case) for _ in range(repeats)] for case in cases]


def in_one_thread(case: Case, kernel: str | Kernel | None = None, **options: Any) -> dict[str, np.ndarray]:
    """A case on a loopback, whose ranks advance in the order of the case's seed."""
    context = ContextParallel(Loopback(case.ranks, seed=case.seed), layout=case.layout, **options)
    return run_ring(case, rounded(case, inputs(case)), context, kernel=kernel)


def different(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """Names of the results that are not the same bit for bit; -0 is not 0."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]
