"""What a batch of whole sequences becomes on one rank: the shard, the plans, and the share of the mean loss.

    ring   = RingBatches(mesh=mesh)                         # or RingBatches(): one ring of all ranks
    loader = ring.loader(rows, collate, batch_size=1)       # whole sequences, the same on all ranks of a ring
    inputs = [ring.inputs(model, batch) for batch in micro_batches]
    total  = ring.mean.count(inputs).total                  # targets of the step: all ranks, all micro-batches
    share, outputs = ring.share(model, inputs[0], total)

Trainer and loops on Accelerate are both made of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringspun.core.mask import Causal, Documents, Mask
from ringspun.errors import DataError, PlanError, UnsupportedByRing
from ringspun.integrations.loaders import Collate, DataPlace, RingLoader, ring_loader
from ringspun.integrations.transformers import NAME, PLAN_KEYWORD, plans, prepare
from ringspun.torch import ContextParallel
from ringspun.train.data.collate import (
    DOCUMENT_LENGTHS,
    POSITION_IDS,
    SCHEDULES,
    MaskRule,
    agree_on,
    documents_of,
    one_for_all,
    row_masks,
    sequence_fields,
    to_ring,
)
from ringspun.train.data.samples import INPUT_IDS, LABELS, LOSS_WEIGHTS
from ringspun.train.losses.loss import token_loss
from ringspun.train.losses.mean import TokenMean
from ringspun.train.parallel.meshes import JobMesh
from ringspun.train.parallel.scaling import gradient_scale

PADDING = "attention_mask"
_WEIGHT_FIELDS = (LOSS_WEIGHTS, "shift_loss_weights", "total_loss_weight")


class RingBatches:
    """A ring, the rings beside it that read other sequences, and what a row of a batch may see.

    Args:
        context: this rank's ring; default: that of the mesh, or of all ranks.
        mesh: of `make_mesh`, where several rings read different sequences. mask: what the full layers see, within a
            row's documents; a `MaskRule`. Collators that know the ring's geometry bring schedules instead.
    Raises:
        PlanError: ranks of the job that are in no ring.
    """

    def __init__(
        self, context: ContextParallel | None = None, *, mesh: JobMesh | None = None, mask: MaskRule | None = None
    ) -> None:
        if context is None:
            context = ContextParallel(None if mesh is None else mesh.context)
        self.context, self.mask = context, Causal() if mask is None else mask
        self.mean = TokenMean(context, data=None if mesh is None else mesh.data)
        self.place = DataPlace() if mesh is None else DataPlace(mesh.data_rank, mesh.data_size)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if self.mean.processes != world:
            raise PlanError(
                f"context must hold all {world} ranks of the job; its rings have {self.mean.processes}. Give "
                "mesh=make_mesh(dp_replicate=..., ring=...), whose rings read different sequences."
            )

    @property
    def processes_of_ring(self) -> int:
        """Ranks that hold one sequence together."""
        return self.mean.processes // self.place.size

    def loader(self, data: Any, collate: Collate, *, batch_size: int, **options: Any) -> RingLoader:
        """Whole sequences, the same for all ranks of a ring; see `ringspun.integrations.loaders.ring_loader`."""
        return ring_loader(data, collate, batch_size=batch_size, place=self.place, **options)

    def inputs(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of a model's call on this rank: its shard of the batch, and the plans. Collective over the ring.

        Args:
            model: wrapped or not; its config says which plans there are.
            batch: `input_ids` and `labels` (unshifted) ``[B, S]``, the same on every rank of the ring. Of a `Collator`,
                or of one of Transformers: documents are then read off `attention_mask` (padding) or `position_ids` (a
                document begins where they are 0).
        Raises:
            PlanMismatchError: ranks of the ring hold different batches. DataError: a batch without labels, or whose
                documents are said twice. PeerError: on another rank one of these was raised.
        """
        fields, documents, failure = sequence_fields(batch), None, None
        try:
            documents = _documents(batch)
        except Exception as problem:  # whatever it is, the other ranks are waiting to hear of it
            failure = problem
        for name in (PADDING, POSITION_IDS) if DOCUMENT_LENGTHS not in batch else ():
            fields.pop(name, None)  # the plan has the one; the shard's own positions are the other
        agree_on({**fields, DOCUMENT_LENGTHS: documents}, self.context, failure)
        if SCHEDULES in batch:
            shard, chosen = to_ring({**fields, **_host_data(batch)}, self.context, check=False)
        else:
            shard, chosen = self._planned(model, fields, documents)
        device = next(model.parameters()).device
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in shard.items()}
        return moved | {PLAN_KEYWORD: chosen}

    def _planned(
        self, model: nn.Module, fields: dict[str, Tensor], documents: list[Documents] | None
    ) -> tuple[dict[str, Any], Any]:
        seq_len = fields[INPUT_IDS].shape[1]
        same = None if documents is None else one_for_all(documents)
        mask: Mask | list[Mask]
        if documents is not None:
            mask = row_masks(self.mask, documents)
        else:
            mask = self.mask if isinstance(self.mask, Mask) else self.mask(Documents([seq_len]))
        chosen = plans(unwrapped(model), self.context.partition(seq_len, documents=same), mask)
        return next(iter(chosen.values())).partition.shard_batch(fields), chosen

    def share(self, model: nn.Module, inputs: Mapping[str, Any], total: float) -> tuple[Tensor, Any]:
        """This rank's share of the mean loss, and the model's outputs.

        The loss is the model's own; with `loss_weights` in the batch, their weighted cross-entropy.

        Args:
            inputs: of `inputs`. total: what the mean is over, `mean.count(...).total`; 1: the sum.
        """
        given = {name: x for name, x in inputs.items() if name not in _WEIGHT_FIELDS}
        weights = inputs.get("shift_loss_weights")
        if weights is None:
            outputs = model(**given | {"num_items_in_batch": total or 1})
            return (outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]), outputs
        targets = given.pop("shift_labels")
        outputs = model(**{name: x for name, x in given.items() if name not in (LABELS, "num_items_in_batch")})
        return token_loss(outputs.logits, targets, total_targets=total, weights=weights), outputs

    def scale(self, model: nn.Module) -> float:
        """What a share is multiplied by before `backward`, so that the wrapper leaves the sum over all ranks.

        Raises:
            UnsupportedByRing: nobody would sum, or over other ranks.
        """
        if self.mean.processes > 1 and not any(isinstance(m, DistributedDataParallel) for m in model.modules()):
            raise UnsupportedByRing(
                f"model must be in DistributedDataParallel over all {self.mean.processes} ranks; got "
                f"{type(model).__name__}. Each rank would take its share of the gradient for the whole."
            )
        return gradient_scale(model, self.mean)


def on_ring(model: nn.Module) -> nn.Module:
    """`model`, prepared for the ring unless it is; of a PEFT model, what the adapters are in.

    Raises:
        UnsupportedByRing: adapters that put tokens of their own before the sequence. Others as `prepare`.
    """
    if getattr(adapter := getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedByRing(
            f"model must add no tokens of its own; got {type(adapter).__name__}, whose tokens every shard would begin "
            "with. Use adapters inside of the layers, such as LoRA."
        )
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if base.config._attn_implementation != NAME:
        prepare(base)
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """`model` without DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@dataclass(frozen=True)
class _Said:
    """How a batch may say which documents its rows have."""

    name: str
    read: Any


_SAYINGS = (
    _Said(PADDING, Documents.from_attention_mask),
    _Said(POSITION_IDS, Documents.from_position_ids),
)


def _host_data(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: batch[name] for name in (DOCUMENT_LENGTHS, SCHEDULES)}


def _documents(batch: Mapping[str, Any]) -> list[Documents] | None:
    """The documents of each row; None: every row is one document."""
    if not isinstance(batch.get(LABELS), Tensor):
        raise DataError(f"batch must hold labels; got {', '.join(batch)}. Give a collator that makes them.")
    if DOCUMENT_LENGTHS in batch:
        if PADDING in batch:
            raise DataError(f"batch must say documents once; got {DOCUMENT_LENGTHS} and {PADDING}. Leave one out.")
        return documents_of(batch)
    seq_len = batch[INPUT_IDS].shape[1]
    said = [way for way in _SAYINGS if isinstance(batch.get(way.name), Tensor)]
    found = [[way.read(row) for row in batch[way.name]] for way in said]
    told = [(way, rows) for way, rows in zip(said, found, strict=True) if any(r != Documents([seq_len]) for r in rows)]
    if len(told) > 1:
        raise DataError(f"batch must say documents once; got {PADDING} with padding and {POSITION_IDS} that restart.")
    return told[0][1] if told else None
