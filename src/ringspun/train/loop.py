"""The training loop: each sequence shared by the ranks of a ring, those of a step by the copies of that ring."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ringspun.core.wire import Format
from ringspun.errors import CheckpointError
from ringspun.pictures import Scene
from ringspun.torch.memory import peak_memory
from ringspun.train import checkpointing
from ringspun.train.checkpointing import Checkpoint
from ringspun.train.config import TrainConfig, comparable
from ringspun.train.contents import differences, manifest
from ringspun.train.data import PackedSequence, Position, Sequences, TrainingData
from ringspun.train.gradient import FlatGradient, Gradient, WrappedGradient
from ringspun.train.gradients import gradient_scale
from ringspun.train.mean import TokenMean
from ringspun.train.mesh import Mesh, check_step
from ringspun.train.meshes import JobMesh
from ringspun.train.meter import StepMeter
from ringspun.train.model import Shard, SharedLoss, build_model
from ringspun.train.output import CHECKPOINTS, DATA_MANIFEST, write_whole
from ringspun.train.report import Report, StepRecord
from ringspun.train.sharded import save_sharded
from ringspun.train.sharding import SHARDED
from ringspun.train.shards import Whole, is_cut
from ringspun.train.wrapping import wrap

if TYPE_CHECKING:
    from ringspun.torch import ContextParallel

# A resumed run may change these; everything else must be as it was.
_MAY_CHANGE = {
    *("ranks", "ulysses", "dp_replicate", "dp_shard", "shard", "layout"),
    *("checkpointing", "kept_hops", "feed_forward_block", "loss_chunk"),
    *("steps", "warmup_steps", "checkpoint_every", "keep_checkpoints", "checkpoints", "output", "peak_flops"),
}


@dataclass(frozen=True)
class Hooks:
    """Called inside a run, on every rank; for experiments and for tests that break something on purpose.

    after_backward(step, model): this rank's share of the gradients is there, nothing is summed or checked
        yet.
    before_publish(step): rank 0 only; a checkpoint is written but not yet visible.
    """

    after_backward: Callable[[int, nn.Module], None] | None = None
    before_publish: Callable[[int], None] | None = None


@dataclass
class TrainState:
    """What changes from step to step."""

    model: nn.Module  # bare: its names are those of checkpoints
    loss: nn.Module  # of a `Shard`: the share of it; what DDP or FSDP2 wraps
    optimizer: Optimizer
    gradient: Gradient
    position: Position = field(default_factory=dict)
    step: int = 0


@dataclass(frozen=True)
class Run:
    """One run on this rank: what to do, on what, with whom."""

    config: TrainConfig
    corpus: TrainingData
    context: ContextParallel
    mesh: Mesh = field(default_factory=Mesh)  # all ranks of the job
    devices: JobMesh | None = None  # the same as a mesh; None: one ring
    hooks: Hooks = field(default_factory=Hooks)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.config.output / CHECKPOINTS

    @property
    def stream(self) -> Sequences:
        """The sequences of this run."""
        return self.corpus.sequences(seq_len=self.config.seq_len, seed=self.config.seed)


def train(run: Run, *, warn: Callable[[str], None] = print) -> TrainState:
    """Trains to the config's last step, from the newest whole checkpoint if there is one.

    Args:
        run: the run; its output folder gets checkpoints, log, TensorBoard scalars and the loss curve.
        warn: told of damaged checkpoints that are skipped.

    Returns:
        The state after the last step.

    Raises:
        NonFiniteError: on all ranks alike, when the loss or a gradient of any rank has a NaN or Inf. The last
            checkpoint stays.
        CheckpointError: the checkpoints are all damaged, belong to another run or other data, or cannot be
            written.
        ConfigError: the output's files cannot be written at the start.
        DataError: a file changed, or ranks read different tokens.
    """
    state = _begin(run, warn if run.mesh.rank == 0 else _silent)
    with _reporting(run, state.step) as report:
        _train(run, state, report)
    return state


def find_checkpoint(config: TrainConfig, corpus: TrainingData, *, warn: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that a run of this config and data goes on from, or None for a new run.

    Raises:
        CheckpointError: naming the setting in which the checkpoint's run was another, or the data files.
    """
    found = checkpointing.latest(
        config.output / CHECKPOINTS, warn=warn, needs={"data": str, "config": dict, "position": dict}
    )
    if found is None:
        return None
    if found.state["data"] != corpus.digest:
        raise CheckpointError(
            f"data must be as when {found.path} was written; "
            f"{differences(config.output / DATA_MANIFEST, corpus.files)}. "
            "Give the same data, or start anew with --fresh."
        )
    before, now = found.state["config"], config.model_dump(mode="json")
    for name in now.keys() - _MAY_CHANGE:
        if comparable(name, before.get(name, _default(name))) != comparable(name, now[name]):
            raise CheckpointError(
                f"{name} must be as when {found.path} was written, {before.get(name)!r}; "
                f"got {now[name]!r}. "
                "Restore it, give another output, or start anew with --fresh."
            )
    if found.step > config.steps:
        raise CheckpointError(
            f"steps must be at least the {found.step} that the run in {config.output} already has; got {config.steps}. "
            "Raise it, give another output, or start anew with --fresh."
        )
    return found


def _default(name: str) -> Any:
    """What a setting was before there was one."""
    return TrainConfig.model_fields[name].default


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of step 1, 2, ...: linear warm-up, then a cosine from `lr` down to `final_lr`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    return config.final_lr + (config.lr - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def _begin(run: Run, warn: Callable[[str], None]) -> TrainState:
    state = _new_state(run)
    model = state.model
    found = find_checkpoint(run.config, run.corpus, warn=warn)
    steps = [int(row[0]) for row in run.mesh.gather([found.step if found else 0])]
    if len(set(steps)) > 1:
        raise CheckpointError(f"all ranks must see the same checkpoint; they found those of steps {steps}.")
    if found is not None:
        checkpointing.restore(found, model=model, optimizer=state.optimizer)
        state.step, state.position = found.step, found.state["position"]
    if run.mesh.rank == 0:
        write_whole(run.config.output / DATA_MANIFEST, manifest(run.corpus.files))
    return state


def _new_state(run: Run) -> TrainState:
    model, config = build_model(run.config), run.config
    loss: nn.Module = SharedLoss(model, chunk_tokens=run.config.loss_chunk)
    if run.devices is None or config.shard == "none":
        return TrainState(model, loss, _optimizer(model, config), FlatGradient(model))
    loss = wrap(loss, run.devices, shard=config.shard, bfloat16=config.shard in SHARDED and config.dtype == "bfloat16")
    scale = gradient_scale(loss, TokenMean(run.context, data=run.devices.data))
    return TrainState(model, loss, _optimizer(model, config), WrappedGradient(loss, scale))


def _optimizer(model: nn.Module, config: TrainConfig) -> AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(0.9, 0.95))


def _train(run: Run, state: TrainState, report: Report | None) -> None:
    stream, config, first = run.stream, run.config, state.step + 1
    profiled = min(first + 1, config.steps)  # the second step: AdamW makes its moments in the first
    meter = StepMeter(state.model, run.context, run.mesh, dtype=config.dtype, peak_flops=config.peak_flops)
    while state.step < config.steps:
        meter.begin()
        batch = _next_batch(stream, state.position, config.batch_size)
        if state.step + 1 == profiled:
            with peak_memory() as peak:
                loss, norm = _step(run, state, batch)
            peaks = tuple(int(row[0]) for row in run.mesh.gather([peak.bytes]))
        else:
            (loss, norm), peaks = _step(run, state, batch), None
        state.step, state.position = state.step + 1, batch[-1].after
        measured = meter.end(batch)
        if report is not None:
            report.step(
                StepRecord(
                    state.step,
                    loss,
                    norm,
                    learning_rate(config, state.step),
                    documents=sum(len(packed.documents.lengths) for packed in batch),
                    documents_cut=sum(packed.documents_cut for packed in batch),
                    peak_bytes=peaks,
                    **measured,
                )
            )
            if state.step == 1:  # behind its clock
                report.sequence(_scene(run, batch[0]))
        if _is_checkpoint(config, state.step):
            _save(run, state)


def _next_batch(stream: Sequences, position: Position, sequences: int) -> list[PackedSequence]:
    """The sequences of one step, the same on all ranks."""
    batch = [stream.at(position)]
    while len(batch) < sequences:
        batch.append(stream.at(batch[-1].after))
    return batch


def _scene(run: Run, packed: PackedSequence) -> Scene:
    """How one sequence is shared out, for pictures; of heads that are split, one ring."""
    ring, model, narrow = run.context.geometry, run.config.model, run.config.dtype == "bfloat16"
    heads, kv_heads = (max(1, n // run.config.ulysses) for n in (model.heads, model.kv_heads or model.heads))
    wire = Format(1, heads, kv_heads, model.head_size, model.head_size, run.config.dtype, 2 if narrow else 4, 4)
    return Scene.of(
        len(packed.ids), ring.ring_size, None, ring.layout, ring.route, documents=packed.documents, wire=wire,
        backward=run.context.backward,
    )  # fmt: skip


def _step(run: Run, state: TrainState, batch: list[PackedSequence]) -> tuple[float, float]:
    """One optimizer step; returns the loss and the gradient's norm, the same on all ranks."""
    number, gradient = state.step + 1, state.gradient
    gradient.zero()
    loss = _backward(run, state, batch)
    if run.hooks.after_backward is not None:
        run.hooks.after_backward(number, state.model)
    digest = 0
    for packed in batch:
        for values in packed.arrays.values():
            digest = zlib.crc32(values.tobytes(), digest)
    loss = check_step(
        run.mesh,
        step=number,
        loss=loss,
        finite=gradient.finite(),
        data_digest=digest,
        summed=gradient.summed_in_backward,
    )
    gradient.sum(run.mesh)
    norm = gradient.clip(run.config.clip_norm, step=number)
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(run.config, number)
    state.optimizer.step()
    return loss, norm


def _backward(run: Run, state: TrainState, batch: list[PackedSequence]) -> float:
    """Gradients of this rank's sequences; its share of the loss, a mean over the targets of the whole batch."""
    total = sum(packed.targets for packed in batch)  # known without a message: every rank has read them all
    mine, loss = batch if run.devices is None else batch[run.devices.data_rank :: run.devices.data_size], 0.0
    for packed in mine:
        last = packed is mine[-1]
        shard = replace(Shard.of(packed, run.context), total_targets=total)
        with state.gradient.during(last=last):
            with _autocast(run.config):
                share = state.loss(shard)
            state.gradient.backward(share, last=last)
        loss += float(share.detach())
    return loss


def _autocast(config: TrainConfig) -> Any:
    by_autocast = config.dtype == "bfloat16" and config.shard not in SHARDED  # whose policy casts
    return torch.autocast("cpu", torch.bfloat16) if by_autocast else nullcontext()


def _is_checkpoint(config: TrainConfig, step: int) -> bool:
    return step == config.steps or (config.checkpoint_every > 0 and step % config.checkpoint_every == 0)


def _save(run: Run, state: TrainState) -> None:
    """Collective."""
    values: dict[str, Any] = {
        "step": state.step,
        "model": state.model,
        "optimizer": state.optimizer,
        "state": {
            "position": state.position,
            "data": run.corpus.digest,
            "config": run.config.model_dump(mode="json"),
        },
        "keep": run.config.keep_checkpoints,
        "before_publish": run.hooks.before_publish,
    }
    if run.config.checkpoints == "sharded":
        save_sharded(run.checkpoints, ranks=run.mesh, **values)
        return
    first = run.mesh.rank == 0
    whole = Whole.of(state.model, state.optimizer, keep=first) if is_cut(state.model) else None
    if first:
        checkpointing.save(run.checkpoints, whole=whole, **values)


@contextmanager
def _reporting(run: Run, done: int) -> Iterator[Report | None]:
    if run.mesh.rank:
        yield None
        return
    config = run.config
    with Report(config.output, steps=config.steps, done=done, config=config.model_dump(mode="json")) as report:
        if done == run.config.steps:
            report.say(f"the run already has its {done} steps; raise steps to go on")
        elif done:
            report.say(f"going on after step {done} of {run.config.steps}")
        yield report


def _silent(_: str) -> None:
    pass
