"""Accelerate on a ring: a training loop of your own, with the model in `Accelerator.prepare`.

ring, accelerator = RingBatches(mesh=mesh), Accelerator()
check_accelerator(accelerator)
model, optimizer = accelerator.prepare(on_ring(model), optimizer)       # and no loader: it would deal rows to ranks
for batches in steps(ring.loader(rows, collate, batch_size=1), 4):      # lists of 4 micro-batches
    loss = backward(accelerator, model, ring, batches)                  # of the whole step, the same on all ranks
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ringspun.integrations.ring import RingBatches, on_ring
from ringspun.integrations.trainer_refusals import check_accelerator

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["RingBatches", "backward", "check_accelerator", "evaluate", "on_ring", "steps"]

Batch = Mapping[str, Any]


def steps(loader: Iterable[Batch], micro_batches: int) -> Iterator[list[Batch]]:
    """The batches of one optimizer step after another; the last may have fewer."""
    batches = iter(loader)
    while group := list(itertools.islice(batches, micro_batches)):
        yield group


def backward(accelerator: Accelerator, model: nn.Module, ring: RingBatches, batches: Sequence[Batch]) -> float:
    """Gradients of one optimizer step: of the mean loss over all ranks' targets in all its micro-batches. Collective.

    Args:
        accelerator: with `gradient_accumulation_steps` 1. model: as `prepare` returned it.
        batches: this ring's micro-batches, whole sequences.
    Returns:
        The mean loss, the same on every rank. Gradients are then whole on every rank: clip, step.
    Raises:
        UnsupportedByRing: a model that nobody reduces over all ranks. Others as `RingBatches.inputs`.
    """
    inputs = [ring.inputs(model, batch) for batch in batches]
    total, scale = ring.mean.count(inputs).total, ring.scale(model)
    loss = torch.zeros((), dtype=torch.float64)
    for number, one in enumerate(inputs):
        with nullcontext() if number == len(inputs) - 1 else accelerator.no_sync(model):
            share, _ = ring.share(model, one, total)
            accelerator.backward(share * scale)
        loss += share.detach().cpu()
    return float(ring.mean.whole(loss))


@torch.no_grad()
def evaluate(model: nn.Module, ring: RingBatches, loader: Iterable[Batch]) -> float:
    """The mean loss over all targets of all ranks; 0 without any. Collective. Every module's mode stays as it was."""
    modes, summed, targets = [(module, module.training) for module in model.modules()], 0.0, 0.0
    model.eval()
    try:
        for batch in loader:
            local = ring.inputs(model, batch)
            share, _ = ring.share(model, local, 1)
            summed += float(ring.mean.whole(share.double()))
            targets += ring.mean.count([local]).total
    finally:
        for module, training in modes:
            module.training = training
    return summed / (targets or 1)
