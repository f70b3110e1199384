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
from ringspun.torch import sharding, short_layers
from ringspun.torch.halo import Halo, widened

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
        # here, for a traced call can make none
        self.halos = {} if row_documents is not None or core.start else context.halos.ready(core)

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

    def halo(self, x: Tensor, *, before: int, dim: int = 1) -> Halo:
        """The rows of this process with the `before` tokens that precede each in its document. Collective.
        Differentiable, twice too: gradients go home and are summed in the order of ranks, in float32 (float64).

            wide, rows = part.halo(x, before=3)              # x [B, T, C], wide [B, W, C], rows [T]
            wide.index_select(1, rows - j)                   # the j-th token before each, for j = 0 .. 3
            conv(wide)[:, rows]                              # any function that looks at most 3 rows back

        Between two tokens of one document, W has the rows between them, but at most `before`; before the first
        `before` of them, zeros where its document, or the sequence, has no more. So it is little more than T
        where tokens lie side by side, and up to ``min(R, before + 1)`` times T for `Striped`. Padding belongs to
        no document: it is seen by nobody and stands for zeros itself.

        Args:
            x: this process's rows along `dim`, of any dtype but float8, uint16, uint32 and uint64. before: tokens n,
                of any number; all that lie between a rank's tokens and n back travel, so it should be small.
        Raises:
            PlanError: a number that is none; documents that differ between batch rows; a sequence that starts
                elsewhere. ShapeError, DtypeError, NotDifferentiable: a tensor that cannot be widened.
                PlanMismatchError: ranks call with different things. Others as `Plan.attention`.
        """
        wide, rows = widened(self, x, before, dim)
        return Halo(wide, rows.clone())  # the caller's own: later halos and shifts read the others

    def shift(self, x: Tensor, by: int = 1, *, dim: int = 1) -> Tensor:
        """Of each row of this process, the row `by` tokens before it in its document; zeros where there is none.
        Collective. Differentiable. Arguments and errors as `halo`.

        Source: token shift of RWKV, arXiv 2305.13048.
        """
        return short_layers.shift(self, x, by, dim)

    def causal_conv1d(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dim: int = 1) -> Tensor:
        """A short causal depthwise convolution over the sequence, each document by itself. Collective. Differentiable.

            out[t, c] = bias[c] + sum over j < K of weight[c, K - 1 - j] x[t - j, c]

        Args:
            x: this process's rows, ``[B, T, C]``, or ``[B, C, T]`` with ``dim=2``. weight: ``[C, K]``, or ``[C, 1, K]``
                as `torch.nn.Conv1d` of C groups has it; x's dtype, but under autocast. bias: ``[C]``.
        Returns:
            as x; padding: the bias. Gradients of weight and bias are this rank's shares.
        Raises: as `halo`; ShapeError, DtypeError also for a weight or bias that does not fit.
        """
        return short_layers.causal_conv1d(self, x, weight, bias, dim)

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
