"""What a language model's tokens are measured by, over exactly those that the loss is over.

Labels are shifted already (`shift_labels`), so nothing is shifted here; what is no target, a prompt or padding, is not
looked at. A rank sums over its own tokens, `TokenMean.metrics` over all ranks: the numbers are those of one process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ringspun.train.losses.loss import IGNORED, check_alike, wide_rows


@dataclass(frozen=True)
class Metrics:
    """Means over the loss tokens, each by its weight. Without any: 0, and a perplexity of 1.

    Args:
        weight: tokens that the means are over, by their weights. loss: cross-entropy (nats).
        accuracy: how many targets had the largest logit. entropy: of what the model predicts (nats).
    """

    weight: float
    loss: float
    accuracy: float
    entropy: float

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss; infinite where that is beyond floats."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @classmethod
    def of(cls, sums: Tensor) -> Self:
        """From sums of `token_sums`, over whatever was to be counted."""
        weight, *rest = sums.tolist()
        loss, accuracy, entropy = (x / weight if weight else 0.0 for x in rest)
        return cls(weight, loss, accuracy, entropy)


@torch.no_grad()
def token_sums(logits: Tensor, targets: Tensor, weights: Tensor | None = None, *, chunk_tokens: int = 1024) -> Tensor:
    """Sums over this rank's loss tokens, float64 ``[4]``: weight, loss, correct predictions, entropy. Sums of several
    calls add up.

    Args:
        logits: ``[..., V]``. targets: ``[...]``, already shifted; -100: no target. weights: ``[...]``, default 1.
        chunk_tokens: tokens whose probabilities are alive at once.
    """
    check_alike(logits, targets, weights)
    labels = targets.reshape(-1)
    chosen = labels != IGNORED
    if weights is not None:
        chosen = chosen & (weights.reshape(-1) != 0)
    rows, counts = chosen.nonzero()[:, 0], None if weights is None else weights.reshape(-1)
    flat, sums = logits.reshape(-1, logits.shape[-1]), torch.zeros(4, dtype=torch.float64, device=logits.device)
    for some in torch.split(rows, chunk_tokens):
        logs = F.log_softmax(wide_rows(flat[some]), dim=-1)
        label = labels[some].long()
        each = torch.stack(
            [
                torch.ones_like(logs[:, 0]),
                -logs.gather(1, label[:, None])[:, 0],
                (logs.argmax(dim=-1) == label).to(logs.dtype),
                torch.special.entr(logs.exp()).sum(dim=-1),
            ]
        ).double()
        sums += each.sum(dim=1) if counts is None else each @ counts[some].double()
    return sums
