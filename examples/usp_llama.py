"""A small Llama on a mesh ("dp", "ring", "ulysses"), and its gradients beside those of one process.

torchrun --nproc-per-node 4 examples/usp_llama.py      # 1 x 2 x 2; 8 ranks: 2 x 2 x 2
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from ringspun import Causal
from ringspun.integrations.transformers import plans, prepare
from ringspun.torch import ContextParallel, reduce_gradients

dist.init_process_group("gloo")
ranks = dist.get_world_size()
inside = 4 if ranks % 4 == 0 else 1  # ranks that hold one sequence together
sizes = ranks // inside, min(2, inside), min(2, inside)
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ring", "ulysses"))
torch.manual_seed(0)  # the same weights and tokens on every rank
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, **heads)
alone = LlamaForCausalLM(config).double()
ringed = prepare(copy.deepcopy(alone))
batches = torch.randint(0, 64, (mesh.size(0), 2, 101))  # of each data rank: 2 rows of 101 tokens

whole = sum(alone(ids, labels=ids).loss for ids in batches) / len(batches)
whole.backward()

cp = ContextParallel(mesh["ring", "ulysses"])
part = cp.partition(seq_len=101)
ids = batches[mesh.get_local_rank("dp")]
batch = part.shard_batch({"input_ids": ids, "labels": ids})
share = ringed(**batch, ringspun_plan=plans(ringed, part, Causal())).loss / len(batches)  # of the mean over data ranks
share.backward()
reduce_gradients(ringed, dist.group.WORLD)  # the sum of all shares

worst = 0.0
for expected, found in zip(alone.parameters(), ringed.parameters(), strict=True):
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)
    worst = max(worst, float((found.grad - expected.grad).abs().max() / expected.grad.abs().max()))
dist.all_reduce(share := share.detach())
if dist.get_rank() == 0:
    print(f"{mesh}: loss {share:.6f}, alone {whole:.6f}, gradients differ by {worst:.0e} of their largest")
dist.destroy_process_group()
