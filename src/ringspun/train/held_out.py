"""The loss on sequences that are not trained on, at the lengths of a run's stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ringspun.errors import ConfigError
from ringspun.train.config import TrainConfig, every_rank_holds_some
from ringspun.train.data.text import PackedSequence, TrainingData, consecutive
from ringspun.train.rope.fixed_rope import FixedRope, fix_rope

if TYPE_CHECKING:
    from ringspun.train.loop import Run, TrainState
    from ringspun.train.stages import Leg


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
            values |= _numbers(run.recipe.evaluate(state.model, run.context, run.config, run.stage, state.step))
    return values


def check_held_out(config: TrainConfig, corpus: TrainingData, *, also: str = "") -> None:
    """Looks at what `[evaluate]` reads at each length, for a mean over no targets would be 0, and at who would hold it.

    Args:
        also: words to say where nothing is held out.
    Raises:
        ConfigError: nothing is, it has no targets, or a stage leaves a rank no token of it. DataError: it cannot be
            read, or does not fit a sequence.
    """
    assert config.evaluate is not None
    for leg in config.legs:
        for seq_len in lengths_of(config.legs, leg.number, leg.number - 1, leg.number + 1):
            _check_shared(leg.config, seq_len, str(leg))
    for seq_len in sorted({leg.seq_len for leg in config.legs}):
        stream = corpus.held_out(seq_len=seq_len, seed=config.seed)
        if stream is None:
            raise ConfigError(
                f"[evaluate] must have documents that are not trained on; got none. Set data.held_out{also}."
            )
        if not any(packed.targets for packed in consecutive(stream, {}, config.evaluate.sequences)):
            raise ConfigError(
                f"[evaluate] must have targets; the {config.evaluate.sequences} held-out sequences of {seq_len} tokens "
                "have none (labels, weights or turns of the assistant). Raise evaluate.sequences, or set data.held_out."
            )


def lengths_of(legs: Sequence[Leg], *stages: int) -> list[int]:
    """Tokens of the sequences that a stage is evaluated on: of the first stage and of these, where there are such."""
    return sorted({legs[0].seq_len, *(legs[number].seq_len for number in stages if 0 <= number < len(legs))})


def _check_shared(config: TrainConfig, seq_len: int, stage: str) -> None:
    """Refuses a length of which some rank of a stage would hold nothing."""
    if every_rank_holds_some(seq_len, config.ranks, config.layout):
        return
    raise ConfigError(
        f"[evaluate] must leave every rank a token; {stage} is also evaluated at {seq_len} tokens, with ranks = "
        f"{config.ranks}, layout = {config.layout!r}. Give longer sequences, fewer ranks or another layout."
    )


def _numbers(given: Any) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in given.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise ConfigError(f"evaluate must return numbers by name; got {given!r}. Mend the recipe.") from None


def _loss(run: Run, seq_len: int, share_of: Callable[[PackedSequence, float], Tensor]) -> float:
    assert run.config.evaluate is not None
    batch = consecutive(run.held_out(seq_len), {}, run.config.evaluate.sequences)
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
