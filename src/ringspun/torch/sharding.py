"""Dealing tensors out by a partition and bringing them back; the batch of a language model as shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspun.core.partition import Partition
from ringspun.errors import PlanError, ShapeError
from ringspun.torch.drivers.base import Driver

IGNORED = -100
"""The label that means: no target."""


def slices(part: Partition, ring_ranks: Sequence[int]) -> list[slice]:
    """Rows of each rank in the joined tensor of `ring_ranks`."""
    ends = np.cumsum([int(part.tokens[r]) for r in ring_ranks]).tolist()
    return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def held(part: Partition, ring_ranks: Sequence[int]) -> Tensor:
    """Global positions of the rows of `ring_ranks`, joined, int64."""
    return torch.from_numpy(np.concatenate([part.positions(r) for r in ring_ranks]))


def positions(part: Partition, ring_ranks: Sequence[int], restart: bool) -> Tensor:
    """Positions of the rows of `ring_ranks`, in the sequence or (restart) in their documents."""
    rows = held(part, ring_ranks)
    if not restart:
        return rows
    if part.documents is None:
        raise PlanError("positions(restart=True) must know the documents; got none. Use partition(..., documents=...).")
    return torch.from_numpy(part.documents.positions(int(part.seq_len)))[rows]


def shard(part: Partition, ring_ranks: Sequence[int], x: Tensor, dim: int) -> Tensor:
    """The rows of `x` that `ring_ranks` hold."""
    if x.ndim == 0 or not -x.ndim <= dim < x.ndim or x.shape[dim] != part.seq_len:
        raise ShapeError(f"shard must get {part.seq_len} tokens along dim {dim}; got shape {tuple(x.shape)}.")
    return x.index_select(dim, held(part, ring_ranks).to(x.device))


def gather(part: Partition, driver: Driver, x: Tensor, dim: int) -> Tensor:
    """All ranks' rows in global order."""
    rows = x.movedim(dim, 0)
    gathered: Tensor = _Gather.apply(rows, part, driver)  # type: ignore[no-untyped-call]
    return gathered.movedim(0, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Partition, driver: Driver) -> Tensor:
        ctx.part, ctx.driver = part, driver
        joined = driver.all_gather_rows(x, part.tokens.tolist())
        return joined.index_select(0, torch.from_numpy(part.inverse()).to(x.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = ctx.driver.all_reduce(grads[0])
        return total.index_select(0, held(ctx.part, ctx.driver.ring_ranks).to(total.device)), None, None


def shard_batch(part: Partition, ring_ranks: Sequence[int], batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """See `ringspun.torch.Partition.shard_batch`."""
    for name, x in batch.items():
        if x.ndim != 2 or x.shape[1] != part.seq_len:
            raise ShapeError(f"{name} must be [B, {part.seq_len}]; got shape {tuple(x.shape)}.")
    local: dict[str, Any] = {name: shard(part, ring_ranks, x, 1) for name, x in batch.items()}
    first = next(iter(batch.values()))
    rows = positions(part, ring_ranks, restart=part.documents is not None)
    local.setdefault("position_ids", rows.to(first.device).expand(first.shape[0], -1))
    if "labels" in batch:
        shifted = shift_labels(batch["labels"], part)
        local["shift_labels"] = shard(part, ring_ranks, shifted, 1)
        local["num_items_in_batch"] = int((shifted != IGNORED).sum())
    return local


def shift_labels(labels: Tensor, part: Partition) -> Tensor:
    """Each token's target, the next token of the same document; -100 at the ends of documents and on padding."""
    shifted = torch.full_like(labels, IGNORED)
    if labels.shape[1] < 2:
        return shifted
    shifted[:, :-1] = labels[:, 1:]
    if part.documents is not None:
        number = torch.from_numpy(part.documents.index(np.arange(part.seq_len)))
        follows = (number[1:] == number[:-1]) & (number[1:] >= 0)
        shifted[:, :-1].masked_fill_(~follows.to(labels.device), IGNORED)
    return shifted
