"""The training of `hf_trainers`, in a loop of one's own on Accelerate. Started processes import this."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hf_trainers import ROWS, Found, build, collate

from ringspun.errors import UnsupportedByRing
from ringspun.integrations.accelerate import RingBatches, backward, check_accelerator, evaluate, on_ring, steps
from ringspun.testing.jobs import as_job
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.parallel.meshes import make_mesh

STEPS = 2


def trained(ring: RingBatches) -> Found:
    """Clipped steps of SGD, two micro-batches each, and an evaluation."""
    accelerator = Accelerator(cpu=True)
    check_accelerator(accelerator)
    model: Any = on_ring(build())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    found, loader = Found(), ring.loader(ROWS, collate, batch_size=1)
    for _, batches in zip(range(STEPS), steps(loader, 2), strict=False):
        found.losses.append(backward(accelerator, model, ring, batches))
        found.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
        found.on_pre_optimizer_step(None, None, None, model=accelerator.unwrap_model(model))
        optimizer.step()
        optimizer.zero_grad()
    found.evaluated_by_tokens = evaluate(model, ring, ring.loader(ROWS[:5], collate, batch_size=2))
    assert model.training
    return found


def on_loopback(size: int) -> Found:
    """On a ring in this process."""
    try:
        return trained(RingBatches(ContextParallel(Loopback(size))))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def on_ranks(ring_rank: int, sizes: dict[str, int]) -> tuple[Found, str]:
    """On a mesh of processes; and what is said of a model in no wrapper."""
    with as_job():
        ring, accelerator = RingBatches(mesh=make_mesh(**sizes)), Accelerator(cpu=True)
        try:
            backward(accelerator, on_ring(build()), ring, [collate(ROWS[:1])])
        except UnsupportedByRing as problem:
            return trained(ring), str(problem)
        return trained(ring), "nothing"
