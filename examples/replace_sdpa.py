"""An attention module of one's own on a ring, and its gradients beside those of one process.

python examples/replace_sdpa.py                           # a ring of 4 in this process
torchrun --nproc-per-node 2 examples/replace_sdpa.py      # a ring of processes
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ringspun import Causal
from ringspun.torch import ContextParallel, Loopback, reduce_gradients


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, plan=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        if plan is not None:  # after: x is this rank's rows, and the mask is the plan's
            return self.out(plan.attention(q, k, v).transpose(1, 2).flatten(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # before: x is the whole sequence
        return self.out(y.transpose(1, 2).flatten(2))


processes = "RANK" in os.environ
if processes:
    dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights and inputs on every rank
alone = Attention(width=48, heads=4).double()
ringed = copy.deepcopy(alone)
x, weight = torch.randn(2, 2, 101, 48, dtype=torch.float64)  # [B, S, width]; 101 tokens divide by nothing

loss = (alone(x) * weight).mean()
loss.backward()

cp = ContextParallel() if processes else ContextParallel(Loopback(4))
plan = cp.plan(seq_len=101, mask=Causal())
x_local, weight_local = (plan.partition.shard(t, dim=1) for t in (x, weight))
share = (ringed(x_local, plan) * weight_local).sum() / x.numel()  # a sum over the count of all ranks, not a mean
share.backward()
reduce_gradients(ringed, cp)  # the sum of the shares; nothing to do on a loopback

for (name, expected), found in zip(alone.named_parameters(), ringed.parameters(), strict=True):
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)
    if cp.ring_rank == 0:
        error = (found.grad - expected.grad).abs().max() / expected.grad.abs().max()
        print(f"gradient of {name}: largest difference over largest value {error:.0e}", flush=True)
if processes:
    dist.destroy_process_group()
