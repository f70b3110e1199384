"""Runs of the training loop on meshes, as the ranks of a pool see them. They import this file."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from training_runs import PEAK_FLOPS, no_space_in_checkpoint_4, tiny_config

from ringspun import Causal, Zigzag
from ringspun.errors import CheckpointError
from ringspun.integrations.transformers import plans, prepare
from ringspun.torch import ContextParallel, Loopback
from ringspun.train import loop
from ringspun.train.checkpoints import checkpointing, saving
from ringspun.train.checkpoints.checkpointing import Checkpoint
from ringspun.train.checkpoints.sharded import save_sharded
from ringspun.train.checkpoints.shards import gathered, whole_model, whole_optimizer
from ringspun.train.data.text import Corpus, find_text
from ringspun.train.loop import Hooks, Run, TrainState
from ringspun.train.losses.causal_lm import CausalLMLoss
from ringspun.train.losses.chunked_loss import Terms
from ringspun.train.losses.mean import TokenMean
from ringspun.train.memory.decoder_blocks import apply_blockwise
from ringspun.train.parallel.meshes import make_mesh
from ringspun.train.parallel.ranks import Mesh
from ringspun.train.parallel.scaling import gradient_scale
from ringspun.train.parallel.wrapping import wrap
from ringspun.train.reporting.report import StepRecord

BATCH = 4
CLIP_NORM = 1.8  # between the norms of the steps


@dataclass(frozen=True)
class On:
    """Where a run is: sizes in the order of `AXES`, and who holds the weights."""

    sizes: tuple[int, int, int, int]
    shard: str
    checkpoints: str = "whole"

    @property
    def settings(self) -> dict[str, Any]:
        dp_replicate, dp_shard, ring, ulysses = self.sizes
        return {
            "dp_replicate": dp_replicate,
            "dp_shard": dp_shard,
            "ranks": ring * ulysses,
            "ulysses": ulysses,
            "shard": self.shard,
            "checkpoints": self.checkpoints,
            "batch_size": BATCH,
            "clip_norm": CLIP_NORM,
        }

    def __str__(self) -> str:
        return "-".join(map(str, [self.shard, *self.sizes, self.checkpoints]))


@dataclass
class Told:
    """What a rank tells of a run; takes the place of the report."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    digest: str = ""
    position: dict[str, int] = field(default_factory=dict)

    def sequence(self, scene: Any) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        self.norms.append(record.grad_norm)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.flops.append((record.mfu or 0.0) * record.seconds * ranks * PEAK_FLOPS)


def run_on(on: On, folder: Path, *, hooks: Hooks | None = None, **changes: Any) -> Run:
    """A run of this pool's ranks; its text is in ``folder / "text"``, its output ``folder / name``."""
    config = tiny_config(folder / changes.pop("name", str(on)), **on.settings, **changes)
    dp_replicate, dp_shard, ring, ulysses = on.sizes
    devices = make_mesh(dp_replicate=dp_replicate, dp_shard=dp_shard, ring=ring, ulysses=ulysses)
    context = ContextParallel(devices.context, layout=Zigzag(), timeout_s=30)
    return Run(config, find_text(folder / "text"), context, Mesh(dist.group.WORLD), devices, hooks or Hooks())


def run_alone(folder: Path, corpus: Corpus, **changes: Any) -> Run:
    """The same of one process, in whose ring is nobody else."""
    return Run(
        tiny_config(folder, batch_size=BATCH, clip_norm=CLIP_NORM, **changes), corpus, ContextParallel(Loopback(1))
    )


def told_of(state: TrainState) -> Told:
    return Told(digest=digest(state), position=state.position)


def digest(state: TrainState) -> str:
    """Of every bit of weights and optimizer, whole, and of the generator. Collective."""
    tensors = whole_model(state.model) | whole_optimizer(state.model, state.optimizer)
    tensors["rng"] = torch.get_rng_state()
    return tensors_digest(tensors)


def tensors_digest(tensors: dict[str, torch.Tensor]) -> str:
    lines = [f"{name} {x.dtype} {tuple(x.shape)}".encode() + x.numpy().tobytes() for name, x in sorted(tensors.items())]
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


def trained(run: Run) -> Told:
    """Goes on from the newest checkpoint to the last step."""
    state, told = loop._begin(run, print), Told()
    with patch.object(loop, "peak_memory", lambda: nullcontext(SimpleNamespace(bytes=0))):  # the profiler takes seconds
        loop._train(run, state, told)
    told.digest, told.position = digest(state), state.position
    return told


def train_on(rank: int, on: On, folder: Path, changes: dict[str, Any]) -> Told:
    torch.manual_seed(1 + (rank if changes.get("name") and on.checkpoints == "sharded" else 0))
    return trained(run_on(on, folder, **changes))


def load_on(rank: int, on: On, folder: Path, saved: list[str]) -> list[str]:
    """Digests of what this mesh makes of checkpoints of others."""
    found = []
    for name in saved:
        torch.rand(3)
        state = loop._begin(run_on(on, folder, name=name), print)
        assert state.position
        found.append(digest(state))
    return found


class Stop(Exception):
    """An interruption."""


def stop_in_step_4(step: int, model: torch.nn.Module) -> None:
    if step == 4:
        raise Stop


def stopped_on(rank: int, on: On, folder: Path) -> list[str]:
    """A run that ends in its fourth step, by no fault of a rank."""
    torch.manual_seed(1 + (rank if on.checkpoints == "sharded" else 0))
    try:
        trained(run_on(on, folder, name="run", hooks=Hooks(stop_in_step_4), steps=4, checkpoint_every=2))
    except Stop:
        return ["Stop"]
    return []


def bfloat16_on(rank: int, on: On, folder: Path, changes: dict[str, Any]) -> tuple[Told, set[str]]:
    run = run_on(on, folder, dtype="bfloat16", **changes)
    state, told = loop._begin(run, print), Told()
    loop._train(run, state, told)
    kept = [x for p in state.model.parameters() for x in (p, p.grad, *state.optimizer.state[p].values())]
    return told, {str(x.dtype) for x in kept}


def load_alone(output: Path, text: Path) -> str:
    run = run_alone(output, find_text(text), steps=9)
    return digest(loop._begin(run, print))


def torn_on(rank: int, on: On, folder: Path) -> dict[str, str]:
    """What this rank hears when the second save of a run fails, in two ways."""
    run = run_on(on, folder, name="run", hooks=Hooks(before_publish=no_space_in_checkpoint_4))
    state = loop._begin(run, print)
    loop._step(run, state, loop._next_batch(run.stream, state.position, run.config))
    state.step = 2
    saving.save_run(run, state)
    state.step = 4
    write = HuggingFaceStorageWriter.write_data
    if rank == 2:
        HuggingFaceStorageWriter.write_data = full  # type: ignore[method-assign]
    try:
        one = caught(lambda: saving.save_run(run, state))
    finally:
        HuggingFaceStorageWriter.write_data = write  # type: ignore[method-assign]
    other = caught(lambda: saving.save_run(run, state))
    found = checkpointing.latest(run.checkpoints, warn=print)
    return {"a rank": one, "rank 0": other, "found": "" if found is None else found.path.name}


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def caught(action: Callable[[], Any]) -> str:
    try:
        action()
    except CheckpointError as problem:
        return str(problem)
    return "nothing"


def tied() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, tie_word_embeddings=True, **sizes))


def causal_gradients(rank: int, shard: str) -> list[torch.Tensor]:
    """Of a chunked loss that is wrapped, on 2 data ranks with a ring of 2 each."""
    model = tied().double()
    loss = CausalLMLoss(model, terms=Terms(chunk_tokens=3))
    prepare(apply_blockwise(model, 2))
    mesh = make_mesh(dp_replicate=2 if shard == "ddp" else 1, dp_shard=1 if shard == "ddp" else 2, ring=2)
    cp = ContextParallel(mesh.context, timeout_s=30)
    mean, part, wrapped = TokenMean(cp, data=mesh.data), cp.partition(seq_len=11), wrap(loss, mesh, shard=shard)
    mine = causal_ids()[mesh.data_rank :: mesh.data_size]
    batch = part.shard_batch({"input_ids": mine, "labels": mine})
    total, plan = mean.count([batch]).total, plans(model, part, Causal())
    share = wrapped(batch["shift_labels"], total_targets=total, input_ids=batch["input_ids"], ringspun_plan=plan)
    (share * gradient_scale(wrapped, mean)).backward()
    return [gathered(parameter.grad) for parameter in model.parameters()]


def causal_ids() -> torch.Tensor:
    return torch.arange(22).square().remainder(11).view(2, 11)


def save_tied(rank: int, folder: Path) -> tuple[str, str]:
    """Takes a step, saves; digests of weights and optimizer."""
    model = tied()
    wrap(model, make_mesh(ring=2), shard="fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(10)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    save_sharded(folder, step=1, model=model, optimizer=optimizer, state={}, ranks=Mesh(dist.group.WORLD))
    return tensors_digest(whole_model(model)), tensors_digest(whole_optimizer(model, optimizer))


def digest_of_tied(checkpoint: Checkpoint) -> tuple[str, str]:
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpointing.restore(checkpoint, model=model, optimizer=optimizer)
    return tensors_digest(model.state_dict()), tensors_digest(whole_optimizer(model, optimizer))


def parts(rank: int, sizes: dict[str, int]) -> dict[str, list[int]]:
    """World ranks of each part of a mesh."""
    mesh = make_mesh(**sizes)
    found = {name: getattr(mesh, name).mesh.flatten().tolist() for name in ("data", "context", "fsdp", "hsdp")}
    return found | {"data_rank": [mesh.data_rank, mesh.data_size]}
