"""A process of a `RankPool` as Hugging Face's libraries know it: as torchrun would have started it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@contextmanager
def as_job() -> Iterator[None]:
    """This process's place in its group, in the environment; afterwards nothing of what Accelerate keeps in classes."""
    from accelerate.state import AcceleratorState

    before = {name: os.environ.get(name) for name in _NAMES}
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
