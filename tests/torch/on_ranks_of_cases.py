"""What the ranks of a pool are asked to do for the known hard cases; they import this file."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from ringspun.testing.cases import Case, inputs
from ringspun.torch import ContextParallel


def last_token_loss(hidden: Tensor) -> Tensor:
    """The last token's similarity to all tokens ``[B, H, S, D]``: it needs every row, and is one token's loss."""
    return (hidden[:, :, -1:] @ hidden.mT).logsumexp(-1).sum()


def loss_on_the_last_token(rank: int, case: Case) -> tuple[bool, list[np.ndarray]]:
    """Whether this rank holds the last token, and its shares of the gradients of whole q, k, v; others have no loss."""
    given = inputs(case)
    plan = ContextParallel(dist.group.WORLD, layout=case.layout, timeout_s=20.0).plan(case.seq_len, case.mask)
    part = plan.partition
    x = [torch.from_numpy(t).requires_grad_() for t in (given.q, given.k, given.v)]
    hidden = part.gather(plan.attention(*(part.shard(t, dim=2) for t in x)), dim=2)
    owned = case.seq_len - 1 in part.positions().tolist()
    loss = last_token_loss(hidden) if owned else 0 * hidden.sum()
    return owned, [g.numpy() for g in torch.autograd.grad(loss, x)]
