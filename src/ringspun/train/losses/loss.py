"""One rank's share of the mean token loss.

The mean is over all targets of a step, whichever rank and micro-batch holds them: a rank sums the cross-entropies of
its own tokens and divides by the targets of ALL of them (`ringspun.train.losses.mean` counts those). So the shares add
up to the mean, whatever each rank holds (a mean of means would not), and a rank without targets adds 0, never 0/0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ringspun.errors import DtypeError, ShapeError
from ringspun.torch.sharding import IGNORED as IGNORED  # a label that is no target


def token_loss(logits: Tensor, targets: Tensor, *, total_targets: float, weights: Tensor | None = None) -> Tensor:
    """This rank's share of the mean loss.

    Args:
        logits: ``[..., V]``, any floating dtype; the loss is computed in float32 (float64 for float64).
        targets: ``[...]``, already shifted: what each position is to predict, or -100 where there is no
            target.
        total_targets: targets of all that the mean is over: ranks and micro-batches; with `weights`, their sum.
        weights: ``[...]``, what each target counts; default 1. Where there is no target they are not read.

    Returns:
        A scalar; 0, with zero gradients, on a rank without targets. The sum over the ranks is the mean loss.
    """
    check_alike(logits, targets, weights)
    wide = wide_rows(logits)
    labels = targets.reshape(-1).long()
    if weights is None:
        summed = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")
    else:
        each = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")
        summed = (each * weights.reshape(-1).to(each.dtype).masked_fill(labels == IGNORED, 0)).sum()
    return summed / (total_targets or 1)  # without targets anywhere every share is 0


def check_alike(logits: Tensor, targets: Tensor, weights: Tensor | None) -> None:
    """Refuses targets and weights that are not one for each row of logits (or of hidden states), in the same shape."""
    for name, x in (("targets", targets), ("weights", weights)):
        if x is not None and x.shape != logits.shape[:-1]:
            raise ShapeError(f"{name} must be {list(logits.shape[:-1])}, as the logits; got shape {list(x.shape)}.")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise DtypeError(f"targets must be integers; got {targets.dtype}.")


def wide_rows(logits: Tensor) -> Tensor:
    """``[..., V]`` as rows ``[N, V]``, in the dtype that losses are computed in."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.reshape(-1, wide.shape[-1])


def chunked_token_loss(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    total_targets: float,
    weights: Tensor | None = None,
    chunk_tokens: int = 1024,
) -> Tensor:
    """`token_loss` of ``head(hidden)`` without ever holding the logits of more than `chunk_tokens` tokens.

    Each chunk's logits are computed again in backward, so the cost is one more pass of the head.

    Args:
        hidden: ``[..., C]``, the last hidden states of this rank's tokens.
        head: maps ``[t, C]`` to logits ``[t, V]``.
        targets: ``[...]``, as for `token_loss`.
        total_targets: as for `token_loss`.
        weights: as for `token_loss`.
        chunk_tokens: tokens whose logits are alive at once.
    """
    check_alike(hidden, targets, weights)
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)

    weights = None if weights is None else weights.reshape(-1)

    def share(chunk: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        return token_loss(head(chunk), labels, total_targets=total_targets, weights=weights)

    if len(rows) <= chunk_tokens:
        return share(rows, labels, weights)
    pieces = torch.split(rows, chunk_tokens)
    parts = [None] * len(pieces) if weights is None else torch.split(weights, chunk_tokens)
    chunks = zip(pieces, torch.split(labels, chunk_tokens), parts, strict=True)
    shares = [checkpoint(share, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(shares).sum()


def multi_token_loss(
    logits: Sequence[Tensor],
    targets: Tensor,
    *,
    total_targets: Sequence[float],
    head_weights: Sequence[float],
    weights: Tensor | None = None,
) -> Tensor:
    """This rank's share of a loss over the next n tokens: the sum over k of ``head_weights[k - 1]`` times the mean
    loss of the k-th token ahead. Each head has a mean of its own, for near the end of a document it has fewer
    targets.

    Args:
        logits: n tensors ``[B, T, V]``, of the heads that predict the token 1, 2, ..., n ahead.
        targets: ``[B, T, n]``, as `ringspun.train.losses.targets.shard_targets` makes them.
        total_targets: targets of each head, over all ranks and micro-batches; with `weights`, their sums.
        head_weights: what each head counts (DeepSeek-V3: 1, then lambda / (n - 1) for each of the others).
        weights: ``[B, T, n]``, what each target counts.
    Raises:
        ShapeError: these are not of n heads each.
    Source: Gloeckle et al. 2024 (2404.19737), whose heads all count 1; DeepSeek-V3 (2412.19437), section 2.2.
    """
    heads = [len(logits), targets.shape[-1], len(total_targets), len(head_weights)]
    if len(set(heads)) > 1:
        raise ShapeError(
            "logits, targets, total_targets and head_weights must be of the same number of heads; got "
            f"{', '.join(map(str, heads))}. Targets are [B, T, n]."
        )
    of_heads = [None] * len(logits) if weights is None else weights.unbind(-1)
    shares = [
        factor * token_loss(one, target, total_targets=total, weights=weight)
        for one, target, total, factor, weight in zip(
            logits, targets.unbind(-1), total_targets, head_weights, of_heads, strict=True
        )
    ]
    return torch.stack(shares).sum()
