"""Targets of more than the next token, shifted inside documents before they are cut, as `Partition.shard_batch` does
it for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringspun.errors import ShapeError
from ringspun.torch.sharding import IGNORED, check_labels, shift

if TYPE_CHECKING:
    from ringspun.torch import Partition


def shard_targets(part: Partition, labels: Tensor, *, ahead: int, weights: Tensor | None = None) -> dict[str, Any]:
    """This rank's targets: for each of its tokens the next `ahead` tokens of the same document.

        batch = part.shard_batch({"input_ids": ids}) | shard_targets(part, ids, ahead=3)

    Args:
        part: who holds which token; its documents cut the labels.
        labels: ``[B, S]``, the whole sequence, not shifted; -100: no target.
        ahead: how many tokens are predicted, n.
        weights: ``[B, S]``, what each label counts as a target, whoever predicts it.
    Returns:
        under the names that `Partition.shard_batch` uses: `shift_labels` ``[B, T, n]``, -100 where there is no target;
        `shift_loss_weights` ``[B, T, n]``, with `weights`; `num_items_in_batch`, targets of the whole sequence,
        of all n.
    Raises:
        ShapeError: labels or weights that are not ``[B, S]``, or `ahead` below 1. DtypeError: labels that cannot be
            -100.
    """
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
        raise ShapeError(f"ahead must be a number of tokens, at least 1; got {ahead!r}.")
    for name, x in (("labels", labels), ("weights", weights)):
        if x is not None and (x.ndim != 2 or x.shape != labels.shape):
            raise ShapeError(f"{name} must be [B, {part.seq_len}]; got shape {tuple(x.shape)}.")
    check_labels(labels, weights)
    steps = range(1, ahead + 1)
    targets = torch.stack([shift(labels, part.core, part.row_documents, by=k) for k in steps], dim=-1)
    found: dict[str, Any] = {"shift_labels": part.shard(targets, dim=1)}
    if weights is not None:
        counts = torch.stack([shift(weights, part.core, part.row_documents, by=k, fill=0) for k in steps], dim=-1)
        found["shift_loss_weights"] = part.shard(counts.masked_fill(targets == IGNORED, 0), dim=1)
    return found | {"num_items_in_batch": int((targets != IGNORED).sum())}
