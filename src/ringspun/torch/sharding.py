"""Dealing tensors out by a partition and bringing them back; the batch of a language model as shards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspun.core.mask import Documents
from ringspun.core.partition import Partition
from ringspun.errors import DtypeError, PlanError, ShapeError
from ringspun.torch.drivers.base import Driver, digest_of

IGNORED = -100
"""The label that means: no target."""


def slices(part: Partition, ring_ranks: Sequence[int]) -> list[slice]:
    """Rows of each rank in the joined tensor of `ring_ranks`."""
    ends = np.cumsum([int(part.tokens[r]) for r in ring_ranks]).tolist()
    return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def held(part: Partition, ring_ranks: Sequence[int]) -> Tensor:
    """Which tokens the rows of `ring_ranks` are, joined, int64: indices into the sequence."""
    return torch.from_numpy(np.concatenate([part.indices(r) for r in ring_ranks]))


RowDocuments = Sequence[Documents | None]
"""Documents of each batch row; None: one document."""


def positions(
    part: Partition, ring_ranks: Sequence[int], restart: bool, row_documents: RowDocuments | None = None
) -> Tensor:
    """Positions of the rows of `ring_ranks`, in the sequence or (restart) in their documents: ``[T]``, or ``[B, T]``
    where each batch row has its own."""
    rows = held(part, ring_ranks) + part.start
    if not restart:
        return rows
    if row_documents is not None:
        return torch.stack([_within(documents, part, rows) for documents in row_documents])
    if part.documents is None:
        raise PlanError("positions(restart=True) must know the documents; got none. Use partition(..., documents=...).")
    return _within(part.documents, part, rows)


def _within(documents: Documents | None, part: Partition, rows: Tensor) -> Tensor:
    if documents is None:
        return rows - part.start
    within = torch.from_numpy(documents.positions(max(0, int(part.start + part.seq_len))))
    return torch.where(rows < 0, 0, within[rows.clamp(min=0)]) if part.start < 0 else within[rows]


def shard(part: Partition, ring_ranks: Sequence[int], x: Tensor, dim: int) -> Tensor:
    """The rows of `x` that `ring_ranks` hold."""
    if not isinstance(x, Tensor):
        raise DtypeError(f"shard must get a tensor; got {type(x).__name__}. torch.from_numpy keeps its memory.")
    if x.ndim == 0 or not -x.ndim <= dim < x.ndim or x.shape[dim] != part.seq_len:
        raise ShapeError(f"shard must get {part.seq_len} tokens along dim {dim}; got shape {tuple(x.shape)}.")
    return x.index_select(dim, held(part, ring_ranks).to(x.device))


def gather(part: Partition, driver: Driver, x: Tensor, dim: int) -> Tensor:
    """All ranks' rows in global order; what is gathered is agreed on first, for nothing else would stop a mix."""
    failure: Exception | None = None
    rows_here = part.rows_of(driver.ring_ranks)
    if not isinstance(x, Tensor):
        failure = DtypeError(f"gather must get a tensor; got {type(x).__name__}.")
    elif not -x.ndim <= dim < x.ndim or x.shape[dim] != rows_here:
        failure = ShapeError(
            f"gather must get {rows_here} rows along dim {dim} (ring rank {driver.ring_ranks[0]}); "
            f"got shape {tuple(x.shape)}."
        )
    elif driver.size > len(driver.ring_ranks) and x.dtype in _NOT_GATHERED:
        failure = DtypeError(f"gather must get a dtype that gloo moves; got {x.dtype}. Convert it before and after.")
    fields = {} if failure else _gathered(part, x, dim)
    driver.agree("a gather", digest_of(fields), fields, failure)
    rows = x.movedim(dim, 0)
    gathered: Tensor = _Gather.apply(rows, part, driver)  # type: ignore[no-untyped-call]
    return gathered.movedim(0, dim)


def _gathered(part: Partition, x: Tensor, dim: int) -> dict[str, str]:
    """What the ranks of a gather must have in common."""
    others = [n for i, n in enumerate(x.shape) if i != dim % x.ndim]
    runs = hashlib.blake2b(part.runs.tobytes(), digest_size=8).hexdigest()
    return {"dim": str(dim % x.ndim), "other dims": str(others), "dtype": str(x.dtype), "partition": runs}


_NOT_GATHERED = (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2)


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


def shard_batch(
    part: Partition,
    ring_ranks: Sequence[int],
    batch: Mapping[str, Tensor],
    row_documents: RowDocuments | None = None,
) -> dict[str, Any]:
    """See `ringspun.torch.Partition.shard_batch`."""
    if not batch:
        raise ShapeError("batch must hold at least one tensor [B, S]; got none.")
    for name, x in batch.items():
        several_axes = name == "position_ids" and isinstance(x, Tensor) and x.ndim == 3
        if not isinstance(x, Tensor) or x.ndim != 2 + several_axes or x.shape[-1] != part.seq_len:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"{name} must be [B, {part.seq_len}]; got {got}.")
    if len({x.shape[-2] for x in batch.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in batch.items())
        raise ShapeError(f"batch must have one B; got {shapes}.")
    if "labels" in batch:
        check_labels(batch["labels"], batch.get("loss_weights"))
    elif "loss_weights" in batch:
        raise ShapeError("loss_weights must come with labels, whose weights they are; got none.")
    local: dict[str, Any] = {name: shard(part, ring_ranks, x, -1) for name, x in batch.items()}
    first = next(iter(batch.values()))
    if row_documents is not None and len(row_documents) != first.shape[-2]:
        raise ShapeError(f"batch must have {len(row_documents)} rows, one per mask of the plan; got {first.shape[-2]}.")
    known = part.documents is not None or row_documents is not None
    rows = positions(part, ring_ranks, restart=known, row_documents=row_documents)
    local.setdefault("position_ids", rows.to(first.device).expand(first.shape[-2], -1))
    if "labels" in batch:
        shifted = shift(batch["labels"], part, row_documents)
        local["shift_labels"] = shard(part, ring_ranks, shifted, 1)
        local["num_items_in_batch"] = int((shifted != IGNORED).sum())
        if "loss_weights" in batch:
            weights = shift(batch["loss_weights"], part, row_documents, fill=0).masked_fill(shifted == IGNORED, 0)
            local["shift_loss_weights"] = shard(part, ring_ranks, weights, 1)
            local["total_loss_weight"] = float(weights.sum(dtype=torch.float64))
    return local


def check_labels(labels: Tensor, weights: Tensor | None = None) -> None:
    """Refuses labels that cannot hold -100, and weights that are no numbers for them."""
    if labels.dtype not in (torch.int64, torch.int32, torch.int16):
        raise DtypeError(f"labels must be int64, int32 or int16, to hold -100; got {labels.dtype}.")
    if weights is not None and not weights.is_floating_point():
        raise DtypeError(f"loss_weights must be floating; got {weights.dtype}. Write weights.float().")


def shift(
    x: Tensor, part: Partition, row_documents: RowDocuments | None = None, *, by: int = 1, fill: int = IGNORED
) -> Tensor:
    """What `x` ``[B, S]`` says of the token that comes `by` tokens after each, in the same document; `fill` at the
    ends of documents and on padding."""
    shifted = torch.full_like(x, fill)
    if x.shape[1] <= by:
        return shifted
    shifted[:, :-by] = x[:, by:]
    of_rows = [part.documents] * x.shape[0] if row_documents is None else row_documents
    for row, documents in zip(shifted, of_rows, strict=True):
        if documents is not None:
            row[:-by].masked_fill_(~_follows(documents, part, by).to(x.device), fill)
    return shifted


def _follows(documents: Documents, part: Partition, by: int) -> Tensor:
    """For each token but the last `by`, whether the `by`-th after it is of the same document ``[S - by]``."""
    number = torch.from_numpy(documents.index(part.start + np.arange(part.seq_len)))
    return (number[by:] == number[:-by]) & (number[by:] >= 0)
