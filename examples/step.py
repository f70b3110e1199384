"""Trains a small model of one's own, one sequence shared by all ranks; prints the loss of the whole sequence.

torchrun --nproc-per-node 2 examples/step.py      # any number of ranks prints the same losses
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ringspun import Causal, Documents
from ringspun.torch import ContextParallel, reduce_gradients

HEADS, WIDTH, TOKENS = 4, 32, 101


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x, plan):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        x = x + self.out(plan.attention(q, k, v).transpose(1, 2).flatten(2))  # the only line that knows of the ring
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, 256)

    def forward(self, ids, positions, plan):
        x = self.token(ids) + self.position(positions)  # global positions: a shard does not begin at 0
        for block in self.blocks:
            x = block(x, plan)
        return self.head(x)


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights and tokens on every rank
model, ids, documents = Model(), torch.randint(0, 256, (2, TOKENS)), Documents([70, 30])  # one token is padding
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
cp = ContextParallel()
plan = cp.plan(TOKENS, Causal() & documents)  # the same length and documents in every step here: one plan for all
batch = plan.partition.shard_batch({"input_ids": ids, "labels": ids})
for step in range(3):
    logits = model(batch["input_ids"], batch["position_ids"], plan)
    summed = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
    loss = summed / batch["num_items_in_batch"]  # a share of the mean: the targets of all ranks are counted
    optimizer.zero_grad()
    loss.backward()
    reduce_gradients(model, cp)  # the sum of the shares
    optimizer.step()
    dist.all_reduce(loss := loss.detach())
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss:.5f}", flush=True)
dist.destroy_process_group()
