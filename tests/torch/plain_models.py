"""Models that know of no ring, and how they fare on one beside one process; the ranks of a pool import this file."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringspun import Causal, Full
from ringspun.errors import RingspunError, RingspunWarning
from ringspun.torch import ContextParallel, Plan, reduce_gradients, watch_gradients

WIDTH, HEADS, TOKENS, VOCABULARY, BATCH = 12, 3, 23, 17, 2
Run = Callable[[Callable[..., Tensor], Tensor], Tensor]
"""How a model runs one of its blocks: as it is, or checkpointed."""


def as_it_is(block: Callable[..., Tensor], x: Tensor) -> Tensor:
    return block(x)


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal, self.dropout = causal, 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=self.dropout, is_causal=self.causal)
        return self.out(y.transpose(1, 2).contiguous().view(x.shape))


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(causal=True), feed_forward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """A small GPT with learned positions and tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.h, self.ln_f = nn.ModuleList(GptBlock() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.run: Run = as_it_is

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(positions)
        for block in self.h:
            x = self.run(block, x)
        return F.linear(self.ln_f(x), self.wte.weight)


class DitBlock(nn.Module):
    """A block of a diffusion transformer: every token sees every other; its norms are bent by a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn, self.mlp = Attention(causal=False), feed_forward()
        self.bend = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.bend(condition)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attn(self.norm(x) * (1 + scale) + shift)
        return x + gate_mlp * self.mlp(self.norm(x) * (1 + scale_mlp) + shift_mlp)


class Dit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(5, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks, self.out = nn.ModuleList(DitBlock() for _ in range(2)), nn.Linear(WIDTH, 5)
        self.run: Run = as_it_is

    def forward(self, patches: Tensor, positions: Tensor, condition: Tensor) -> Tensor:
        x = self.embed(patches) + self.place(positions)
        for block in self.blocks:
            x = self.run(lambda x, block=block: block(x, condition), x)
        return self.out(x)


def seeded(model: type[nn.Module]) -> Any:
    torch.manual_seed(3)
    return model().double()


def on_ring(name: str, context: ContextParallel, run: Callable[[Plan], Run] | None = None) -> dict[str, float]:
    """Largest difference from one process: of the outputs, the loss, and every gradient, over their largest value.

    Args:
        run: how the blocks run on the ring, given the plan.
    """
    alone = seeded(Gpt if name == "gpt" else Dit)
    ringed = copy.deepcopy(alone)
    expected, loss, found, share = (gpt if name == "gpt" else dit)(alone, ringed, context, run or (lambda _: as_it_is))
    loss.backward()
    share.backward()
    reduce_gradients(ringed, context)
    pairs = {"output": (found, expected), "loss": (context.driver.all_reduce(share.detach()), loss)}
    pairs |= {n: (p.grad, q.grad) for (n, p), q in zip(ringed.named_parameters(), alone.parameters(), strict=True)}
    return {n: float(((a - b).abs().max() / b.abs().max()).detach()) for n, (a, b) in pairs.items()}


Four = tuple[Tensor, Tensor, Tensor, Tensor]


def gpt(alone: Gpt, ringed: Gpt, context: ContextParallel, run: Callable[[Plan], Run]) -> Four:
    """Logits and loss of one process, logits and this process's share of the loss on a ring."""
    ids = tokens(seed=1)
    plan = context.plan(TOKENS, Causal())
    expected = alone(ids, torch.arange(TOKENS))
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    ringed.run = run(plan)
    logits, share = share_of(ringed, plan, ids)
    return expected, loss, plan.partition.gather(logits, dim=1), share


def tokens(seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed))


def share_of(model: nn.Module, plan: Plan, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A language model's logits on a ring, and this process's share of the loss."""
    batch = plan.partition.shard_batch({"input_ids": ids, "labels": ids})
    with plan.as_sdpa():
        logits = model(batch["input_ids"], plan.partition.positions())
    summed = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
    return logits, summed / batch["num_items_in_batch"]


def dit(alone: Dit, ringed: Dit, context: ContextParallel, run: Callable[[Plan], Run]) -> Four:
    generator = torch.Generator().manual_seed(2)
    patches, noise = torch.randn(2, BATCH, TOKENS, 5, generator=generator, dtype=torch.float64)
    condition = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    plan = context.plan(TOKENS, Full())
    part = plan.partition
    expected = alone(patches, torch.arange(TOKENS), condition)
    ringed.run = run(plan)
    with plan.as_sdpa():
        found = ringed(part.shard(patches, dim=1), part.positions(), condition)
    share = (found - part.shard(noise, dim=1)).square().sum() / noise.numel()
    return expected, (expected - noise).square().mean(), part.gather(found, dim=1), share


# -- over processes ----------------------------------------------------------------------------------------------------

STEPS, LR, PATIENCE_S = 5, 0.3, 20.0


def over_processes(rank: int, name: str) -> dict[str, float]:
    return on_ring(name, ContextParallel(timeout_s=PATIENCE_S))


def trained_alone() -> list[Tensor]:
    """Weights after `STEPS` of plain descent in one process."""
    model = seeded(Gpt)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        ids = tokens(seed=step)
        optimizer.zero_grad()
        F.cross_entropy(model(ids, torch.arange(TOKENS))[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(rank: int, reducer: str) -> tuple[list[np.ndarray], list[str]]:
    """The same on a ring of all processes; this rank's weights, and what was warned of."""
    context = ContextParallel(timeout_s=PATIENCE_S)
    plan = context.plan(TOKENS, Causal())
    bare = seeded(Gpt)
    model, factor = wrapped(bare, reducer, context.ring_size)
    optimizer = torch.optim.SGD(bare.named_parameters(), lr=LR)
    watch_gradients(optimizer, context, every=2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RingspunWarning)
        for step in range(STEPS):
            optimizer.zero_grad()
            (share_of(model, plan, tokens(seed=step))[1] * factor).backward()
            if reducer == "reduce_gradients":
                reduce_gradients(bare, context, bucket_bytes=3000)
            if reducer == "by hand":
                for p in bare.parameters():
                    dist.all_reduce(p.grad)
            optimizer.step()
    whole = [p.full_tensor() if reducer == "fsdp2" else p for p in bare.parameters()]
    texts = [str(w.message) for w in warned if issubclass(w.category, RingspunWarning)]
    return [p.detach().numpy() for p in whole], texts


def wrapped(bare: Gpt, reducer: str, ring_size: int) -> tuple[nn.Module, int]:
    """The model as it is called, and the factor of its loss."""
    if reducer == "ddp":
        return DistributedDataParallel(bare), ring_size  # it averages
    if reducer == "ddp with a hook":
        model = DistributedDataParallel(bare)
        model.register_comm_hook(None, summed)
        return model, 1
    if reducer == "fsdp2":
        for module in (*bare.h, bare):
            sharded = fully_shard(module, mesh=dist.init_device_mesh("cpu", (ring_size,)))
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
    return bare, 1


def summed(_, bucket):  # PyTorch reads a hook's annotations, and wants no strings
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def over_ring_and_data(rank: int) -> list[np.ndarray]:
    """Gradients of a batch of two sequences, each on a ring of two of four processes: reduced over all."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    context = ContextParallel(mesh["ring"], timeout_s=PATIENCE_S)
    model = seeded(Gpt)
    _, share = share_of(model, context.plan(TOKENS, Causal()), tokens(seed=mesh["data"].get_local_rank()))
    (share / 2).backward()
    reduce_gradients(model, dist.group.WORLD)
    return [p.grad.numpy() for p in model.parameters()]


def alone_on_both() -> list[np.ndarray]:
    model = seeded(Gpt)
    for seed in range(2):
        ids = tokens(seed)
        logits = model(ids, torch.arange(TOKENS))[:, :-1]
        (F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / 2).backward()
    return [p.grad.numpy() for p in model.parameters()]


def reduce_oddly(rank: int, what: str) -> tuple[str, str, list[Any]]:
    """A reduction of gradients that rank 1 sees in its own way; what it raises, and the gradients after it."""
    given = [torch.zeros(n, dtype=dtype, requires_grad=True) for n, dtype in ((2, torch.float32), (3, torch.bfloat16))]
    given += [torch.zeros(1, requires_grad=True), torch.zeros(1, dtype=torch.float64, requires_grad=True)]
    given[3].grad = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    given[1].grad = torch.full((3,), 1.0 + rank / 128, dtype=torch.bfloat16)
    if rank == 1:
        given[0].grad = torch.ones(2)
        if what == "sparse":
            given[0].grad = torch.ones(2).to_sparse()
        if what == "fewer":
            given.pop()
    try:
        reduce_gradients(given, ContextParallel(timeout_s=PATIENCE_S))
        kind, text = "nothing", ""
    except RingspunError as problem:
        kind, text = type(problem).__name__, str(problem)
    return kind, text, [None if p.grad is None else (str(p.grad.dtype), p.grad.to_dense().tolist()) for p in given]


def refused_on_one_rank(rank: int) -> tuple[str, str]:
    """Rank 1's model has dropout; what each rank hears."""
    plan = ContextParallel(timeout_s=PATIENCE_S).plan(TOKENS, Causal())
    q = torch.zeros(1, 1, plan.partition.local_tokens, 4)
    try:
        with plan.as_sdpa():
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.1 * rank, is_causal=True)
    except RingspunError as problem:
        return type(problem).__name__, str(problem)
    return "nothing", ""
