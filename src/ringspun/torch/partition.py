"""`Partition`: who holds which token of one sequence, and how tensors are dealt out by it and come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringspun.core import partition as core_partition
from ringspun.core.mask import Documents, Mask
from ringspun.core.schedule import Schedule
from ringspun.errors import PlanError, RingspunError
from ringspun.torch import sharding

if TYPE_CHECKING:
    from ringspun.torch.context import ContextParallel
    from ringspun.torch.plan import Plan


class Partition:
    """Who holds which token of one sequence; made by `ContextParallel.partition`.

    On a `Loopback` this process holds all shards, joined in rank order; `slices[r]` are rank r's rows.
    """

    def __init__(
        self,
        context: ContextParallel,
        core: core_partition.Partition,
        row_documents: tuple[Documents | None, ...] | None = None,
    ) -> None:
        self.context, self.core, self.row_documents = context, core, row_documents

    @property
    def seq_len(self) -> int:
        """Global length S (tokens)."""
        return int(self.core.seq_len)

    @property
    def documents(self) -> Documents | None:
        """The documents that the partition was made with. Those of a plan with a mask per batch row, where the rows
        have different ones, are its partition's `row_documents`."""
        return self.core.documents

    @property
    def restarts(self) -> bool:
        """Whether positions may restart: documents are known, of the partition or of each batch row."""
        return self.documents is not None or self.row_documents is not None

    @property
    def local_tokens(self) -> int:
        """Rows that this process holds."""
        return self.core.rows_of(self.context.driver.ring_ranks)

    @property
    def slices(self) -> list[slice]:
        """Rows of each rank that this process plays, in the tensors that `shard` returns."""
        return sharding.slices(self.core, self.context.driver.ring_ranks)

    def positions(self, *, restart: bool = False, device: torch.device | str | None = None) -> Tensor:
        """Global position of each row that this process holds, int64 ``[T]``; of queries that start elsewhere counted
        from `query_start`.

        Args:
            restart: count within each document instead (padding: 0); needs the partition's documents. ``[B, T]`` where
                batch rows have different ones.
        Raises:
            PlanError: `restart` without documents.
        """
        here = self.context.driver.ring_ranks
        return sharding.positions(self.core, here, restart, self.row_documents).to(device or "cpu")

    def position_count(self, *, restart: bool | None = None) -> int:
        """One more than the largest position of the whole sequence, the same on every rank whatever it holds.

        It decides rotations that depend on the length (dynamic NTK, LongRoPE): the longest document (of all batch rows)
        where positions restart, else the end of the sequence.
        Args:
            restart: whether they restart; default: as in `shard_batch`, where documents are known.
        """
        end = int(self.core.start + self.core.seq_len)
        if not (self.restarts if restart is None else restart):
            return end
        rows = (self.documents,) if self.row_documents is None else self.row_documents
        return max(end if row is None else max(row.lengths, default=0) for row in rows)

    def shard(self, x: Tensor, *, dim: int) -> Tensor:
        """The rows of `x` that this process holds, along `dim` (S there, T in the result). Differentiable.

        `x` is the whole tensor, the same on every rank; its gradient is this rank's share.
        Raises:
            ShapeError: `x` has not S entries along `dim`.
        """
        return sharding.shard(self.core, self.context.driver.ring_ranks, x, dim)

    def gather(self, x: Tensor, *, dim: int) -> Tensor:
        """All ranks' rows in global order: exactly S along `dim`. Collective. Differentiable: backward sums the shares.

        Raises:
            ShapeError: `x` has not this process's number of rows along `dim`. PlanMismatchError: ranks gather different
                things (dim, other dims, dtype, partition).
        """
        return sharding.gather(self.core, self.context.driver, x, dim)

    def shard_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """The shard of a language-model batch ``[B, S]``, labels shifted *before* they are cut.

        Args:
            batch: `input_ids`, optionally `labels` (-100: no target) and `loss_weights`, what each label counts as a
                target; other ``[B, S]`` tensors are sharded alike, and `position_ids` on several axes ``[A, B, S]``
                (M-RoPE).
        Returns:
            the shards ``[B, T]``; `position_ids` where the batch has none (restarting in each document where there are
            documents, of each row its own where they differ); with `labels`, `shift_labels` (the next token of the same
            document, -100 at its end and on padding) and `num_items_in_batch`, the number of targets of the whole
            sequence, equal on all ranks; with `loss_weights`, `shift_loss_weights` (what each of `shift_labels` counts,
            0 where it is no target) and `total_loss_weight`, their sum over the whole sequence.
        Raises:
            ShapeError: a tensor that is not ``[B, S]``.
        """
        return sharding.shard_batch(self.core, self.context.driver.ring_ranks, batch, self.row_documents)

    def plan(
        self, mask: Mask | Sequence[Mask] | Schedule | Sequence[Schedule], *, keys: Partition | None = None
    ) -> Plan:
        """What to compute over this partition. Collective: every rank must call it, with equal arguments.

        Args:
            mask: a mask; a list of masks, one per batch row; or what `ContextParallel.geometry.schedule` made of one
                (in a loader's worker, say).
            keys: who holds which key, where the queries (this partition) are other tokens.
        Raises: as `ContextParallel.plan`.
        """
        try:
            if not isinstance(keys, Partition | None):
                raise PlanError(f"keys must be a Partition; got {keys!r}. Write keys=context.partition(key_len).")
            sides = core_partition.Sides(self.core, None if keys is None else keys.core)
        except RingspunError as failure:
            self.context._agree_on_plan(bytes(32), {}, failure)
            raise
        return self.context._plan(sides, mask)

    def __repr__(self) -> str:
        return f"Partition(seq_len={self.seq_len}, tokens={self.core.tokens.tolist()}, layout={self.core.layout})"
