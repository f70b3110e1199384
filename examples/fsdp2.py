"""Trains a small Llama on a mesh: each sequence on a ring, weights cut by FSDP2 over ring x data ranks; saves, resumes.

torchrun --nproc-per-node 4 examples/fsdp2.py      # 2 rings of 2; other numbers: 1 ring, the same losses
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from ringspun import Causal
from ringspun.integrations.transformers import plans, prepare
from ringspun.torch import ContextParallel
from ringspun.train.checkpoints import checkpointing
from ringspun.train.checkpoints.sharded import save_sharded
from ringspun.train.losses.mean import TokenMean
from ringspun.train.parallel.meshes import make_mesh
from ringspun.train.parallel.ranks import Mesh
from ringspun.train.parallel.scaling import clip_gradients, gradient_scale
from ringspun.train.parallel.wrapping import wrap

SEQUENCES, TOKENS = 2, 101

dist.init_process_group("gloo")
ranks = Mesh(dist.group.WORLD)
rings = 2 if ranks.size % 4 == 0 else 1
mesh = make_mesh(dp_shard=rings, ring=ranks.size // rings)
cp = ContextParallel(mesh.context)
mean = TokenMean(cp, data=mesh.data)


def build(seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = prepare(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)))
    wrap(model, mesh, shard="fsdp")  # each decoder layer, then the whole; or fully_shard(..., mesh=mesh.fsdp) yourself
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer):
    part = cp.partition(seq_len=TOKENS)
    mine = sequences[mesh.data_rank :: mesh.data_size]  # as DistributedSampler(data, data_size, data_rank) does
    batch = part.shard_batch({"input_ids": mine, "labels": mine})
    total = mean.count([batch]).total  # the targets of all ranks
    share = model(**batch | {"num_items_in_batch": total}, ringspun_plan=plans(model, part, Causal())).loss
    (share * gradient_scale(model, mean)).backward()
    clip_gradients(model, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(mean.whole(share))


sequences = torch.randint(0, 64, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
model, optimizer = build(seed=0)
losses = [step(model, optimizer) for _ in range(3)]
folder = [tempfile.mkdtemp()] if ranks.rank == 0 else [""]
dist.broadcast_object_list(folder)
save_sharded(Path(folder[0]), step=3, model=model, optimizer=optimizer, state={}, ranks=ranks)
losses.append(step(model, optimizer))

model, optimizer = build(seed=1)  # other weights, which the checkpoint replaces; another mesh would do
found = checkpointing.latest(Path(folder[0]), warn=print)
checkpointing.restore(found, model=model, optimizer=optimizer)
again = step(model, optimizer)
if ranks.rank == 0:
    print("losses", *(f"{loss:.5f}" for loss in losses), "resumed", f"{again:.5f}", flush=True)
dist.destroy_process_group()
