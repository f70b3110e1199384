"""One rank's share of the mean token loss.

The mean is over all targets of the sequence, whichever rank holds them: a rank sums the cross-entropies of
its own tokens and divides by the number of targets of ALL ranks. So the shares add up to the mean, whatever
each rank holds (a mean of means would not), and a rank without targets adds 0, never 0/0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # a label that is no target


def token_loss(logits: Tensor, targets: Tensor, *, total_targets: int) -> Tensor:
    """This rank's share of the mean loss.

    Args:
        logits: ``[..., V]``, any floating dtype; the loss is computed in float32 (float64 for float64).
        targets: ``[...]``, already shifted: what each position is to predict, or -100 where there is no
            target.
        total_targets: targets of the whole sequence, over all ranks.

    Returns:
        A scalar; 0, with zero gradients, on a rank without targets. The sum over the ranks is the mean loss.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    summed = F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )
    return summed / max(total_targets, 1)


def chunked_token_loss(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    total_targets: int,
    chunk_tokens: int = 1024,
) -> Tensor:
    """`token_loss` of ``head(hidden)`` without ever holding the logits of more than `chunk_tokens` tokens.

    Each chunk's logits are computed again in backward, so the cost is one more pass of the head.

    Args:
        hidden: ``[..., C]``, the last hidden states of this rank's tokens.
        head: maps ``[t, C]`` to logits ``[t, V]``.
        targets: ``[...]``, as for `token_loss`.
        total_targets: as for `token_loss`.
        chunk_tokens: tokens whose logits are alive at once.
    """
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)

    def share(chunk: Tensor, labels: Tensor) -> Tensor:
        return token_loss(head(chunk), labels, total_targets=total_targets)

    if len(rows) <= chunk_tokens:
        return share(rows, labels)
    chunks = zip(torch.split(rows, chunk_tokens), torch.split(labels, chunk_tokens), strict=True)
    shares = [checkpoint(share, chunk, label, use_reentrant=False) for chunk, label in chunks]
    return torch.stack(shares).sum()
