"""What the ranks of a pool are asked to do for the known hard cases; they import this file."""

from __future__ import annotations

import numpy as np
import torch
from on_ranks import PATIENCE_S, caught
from torch import Tensor
from torch import distributed as dist

from ringspun import Contiguous, Full
from ringspun.testing.cases import Case, inputs
from ringspun.torch import ContextParallel


def last_token_loss(hidden: Tensor) -> Tensor:
    """The last token's similarity to all tokens ``[B, H, S, D]``: it needs every row, and is one token's loss."""
    return (hidden[:, :, -1:] @ hidden.mT).logsumexp(-1).sum()


def loss_on_the_last_token(rank: int, case: Case) -> tuple[bool, list[np.ndarray]]:
    """Whether this rank holds the last token, and its shares of the gradients of whole q, k, v; others have no loss."""
    given = inputs(case)
    plan = ContextParallel(dist.group.WORLD, layout=case.layout, timeout_s=PATIENCE_S).plan(case.seq_len, case.mask)
    part = plan.partition
    x = [torch.from_numpy(t).requires_grad_() for t in (given.q, given.k, given.v)]
    hidden = part.gather(plan.attention(*(part.shard(t, dim=2) for t in x)), dim=2)
    owned = case.seq_len - 1 in part.positions().tolist()
    loss = last_token_loss(hidden) if owned else 0 * hidden.sum()
    return owned, [g.numpy() for g in torch.autograd.grad(loss, x)]


def swallow_a_row(rank: int, timeout_s: float) -> list[tuple[str, str]]:
    """A bias of finfo.min in all rows of rank 1, then a call without; class and message of what this rank hears."""
    plan = ContextParallel(dist.group.WORLD, layout=Contiguous(), timeout_s=timeout_s).plan(8, Full())
    x, lowest = torch.zeros(1, 1, 4, 1), torch.finfo(torch.float32).min
    return [
        caught(lambda: plan.attention(x, x, x, bias=lambda q, k: (q >= 4) * lowest + 0.0 * k)),
        caught(lambda: plan.attention(x, x, x)),
    ]
