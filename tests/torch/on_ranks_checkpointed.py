"""Two blocks with attention on a ring, checkpointed in every way. Started processes import this file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from ringspun import Causal, Zigzag
from ringspun.torch import ContextParallel, Plan, keep_attention

HEADS, WIDTH = 2, 8

BLOCKS: dict[str, Callable[[Any, Tensor, Plan], Tensor]] = {
    "no checkpoint": lambda block, x, plan: block(x, plan),
    "reentrant": lambda block, x, plan: checkpoint(block, x, plan, use_reentrant=True),
    "recomputed": lambda block, x, plan: checkpoint(block, x, plan, use_reentrant=False),
    "attention kept": lambda block, x, plan: checkpoint(block, x, plan, use_reentrant=False, context_fn=keep_attention),
}


class Block(nn.Module):
    """Attention of one projection, and a nonlinearity."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_random(3 * WIDTH, WIDTH, seed=seed))

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in nn.functional.linear(x, self.weight).chunk(3, -1)
        )
        return x + plan.attention(q, k, v).transpose(1, 2).flatten(-2).tanh()


def gradients(plan: Plan, how: str) -> tuple[list[Tensor], Counter[tuple[int, int]]]:
    """Gradients of both weights and of the input, and the messages sent."""
    blocks = [Block(seed) for seed in (1, 2)]
    inputs = plan.partition.shard(_random(1, 22, WIDTH, seed=3), dim=1).requires_grad_()
    upstream = plan.partition.shard(_random(1, 22, WIDTH, seed=4), dim=1)
    before = plan.partition.context.driver.counts.messages.copy()
    x = inputs
    for block in blocks:
        x = BLOCKS[how](block, x, plan)
    x.backward(upstream)
    sent = plan.partition.context.driver.counts.messages - before
    return [*(b.weight.grad for b in blocks), inputs.grad], sent


def gradients_on_rank(rank: int, how: str) -> tuple[list[Tensor], int]:
    """The same on a rank of two; messages that it sent."""
    torch.set_num_threads(1)
    plan = ContextParallel(dist.group.WORLD, layout=Zigzag(), timeout_s=20).plan(22, Causal())
    found, sent = gradients(plan, how)
    return found, sum(sent.values())


def compiled_on_rank_1(rank: int, lengths: list[int]) -> list[list[Tensor]]:
    """`in_turn` on a rank of two; rank 1 alone compiles, and so comes later."""
    torch.set_num_threads(1)
    context = ContextParallel(dist.group.WORLD, layout=Zigzag(), timeout_s=60)
    return in_turn(context, lengths, compiled=rank == 1)


def in_turn(context: ContextParallel, lengths: list[int], *, compiled: bool = False) -> list[list[Tensor]]:
    """A block's output and the gradients of its input and weight, for each length in turn."""
    block, found = Block(1), []
    call = torch.compile(block, backend="aot_eager") if compiled else block
    for seq_len in lengths:
        plan = context.plan(seq_len, Causal())
        x = plan.partition.shard(_random(1, seq_len, WIDTH, seed=3), dim=1).requires_grad_()
        out = call(x, plan)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), (x, block.weight))])
    return found


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
