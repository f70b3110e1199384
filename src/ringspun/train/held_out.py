"""The loss on sequences that are not trained on, at the lengths of a run's stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ringspun.train.data.text import PackedSequence, Position
from ringspun.train.rope.fixed_rope import FixedRope, fix_rope

if TYPE_CHECKING:
    from ringspun.train.loop import Run, TrainState


def evaluate(
    run: Run, state: TrainState, lengths: Sequence[int], share_of: Callable[[PackedSequence, float], Tensor]
) -> dict[str, float]:
    """What `[evaluate]` and the recipe ask for, by name; nothing where neither does. Collective.

    Weights, optimizer and random numbers are afterwards as before: a run that evaluates is bit for bit one that does
    not.

    Args:
        lengths: of the sequences (tokens). share_of: this rank's share of the loss of a sequence, of so many targets.
    Returns:
        ``loss@LENGTH``: the mean over all targets of the held-out sequences; the same on every rank.
    """
    values: dict[str, float] = {}
    with _aside(state.model), torch.no_grad():
        if run.config.evaluate is not None:
            for seq_len in lengths:
                with _rotations(state.model, seq_len):
                    values[f"loss@{seq_len}"] = _loss(run, seq_len, share_of)
        if run.recipe.evaluate is not None:
            values |= run.recipe.evaluate(state.model, run.context, run.config, run.stage, state.step)
    return values


def _loss(run: Run, seq_len: int, share_of: Callable[[PackedSequence, float], Tensor]) -> float:
    assert run.config.evaluate is not None
    stream, position, batch = run.held_out(seq_len), Position(), list[PackedSequence]()
    for _ in range(run.config.evaluate.sequences):
        batch.append(stream.at(position))
        position = batch[-1].after
    total = sum(packed.targets for packed in batch)
    size, rank = (1, 0) if run.devices is None else (run.devices.data_size, run.devices.data_rank)
    mine = 0.0
    for turn in range(-(-len(batch) // size)):  # every rank as often, for FSDP's gathers
        place = turn * size + rank
        share = share_of(batch[place % len(batch)], total)
        mine += float(share) if place < len(batch) else 0.0
    return math.fsum(row[0] for row in run.mesh.gather([mine]))


@contextmanager
def _aside(model: nn.Module) -> Iterator[None]:
    """Random numbers and modes as they were, whatever is done in between."""
    training = [module for module in model.modules() if module.training]
    with torch.random.fork_rng(devices=[]):
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def _rotations(model: nn.Module, seq_len: int) -> Iterator[None]:
    """Frequencies that depend on the length are those of `seq_len` meanwhile."""
    fixed = [module for module in model.modules() if isinstance(module, FixedRope)]
    if not any(module.needs_length for module in fixed):
        yield
        return
    before = fixed[0].seq_len
    fix_rope(model, seq_len=seq_len)
    try:
        yield
    finally:
        fix_rope(model, seq_len=before)
