"""The training loop: one sequence a step, shared by the ranks of one ring."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ringspun.core.wire import Format
from ringspun.errors import CheckpointError
from ringspun.pictures import Scene
from ringspun.torch.memory import peak_memory
from ringspun.train import checkpointing
from ringspun.train.checkpointing import Checkpoint
from ringspun.train.config import TrainConfig
from ringspun.train.contents import differences, manifest
from ringspun.train.data import ByteStream, Corpus, PackedSequence, Position
from ringspun.train.mesh import Mesh, check_step, clip_, flat_gradient
from ringspun.train.model import Shard, build_model, shard_loss
from ringspun.train.output import CHECKPOINTS, DATA_MANIFEST, write_whole
from ringspun.train.report import Report, StepRecord

if TYPE_CHECKING:
    from ringspun.torch import ContextParallel

# A resumed run may change these; everything else must be as it was.
_MAY_CHANGE = {
    *("ranks", "layout", "checkpointing", "kept_hops", "feed_forward_block", "loss_chunk"),
    *("steps", "warmup_steps", "checkpoint_every", "keep_checkpoints", "output"),
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

    model: nn.Module
    optimizer: Optimizer
    gradient: Tensor  # flat; the parameters' `.grad` are views of it
    position: Position = field(default_factory=Position)
    step: int = 0


@dataclass(frozen=True)
class Run:
    """One run on this rank: what to do, on what, with whom."""

    config: TrainConfig
    corpus: Corpus
    context: ContextParallel
    mesh: Mesh = field(default_factory=Mesh)
    hooks: Hooks = field(default_factory=Hooks)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.config.output / CHECKPOINTS

    @property
    def stream(self) -> ByteStream:
        """The sequences of this run."""
        return ByteStream(self.corpus, seq_len=self.config.seq_len, seed=self.config.seed)


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


def find_checkpoint(config: TrainConfig, corpus: Corpus, *, warn: Callable[[str], None]) -> Checkpoint | None:
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
        if before.get(name) != now[name]:
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


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of step 1, 2, ...: linear warm-up, then a cosine from `lr` down to `final_lr`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    return config.final_lr + (config.lr - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def _begin(run: Run, warn: Callable[[str], None]) -> TrainState:
    model = build_model(run.config)
    state = TrainState(model, _optimizer(model, run.config), flat_gradient(model))
    found = find_checkpoint(run.config, run.corpus, warn=warn)
    steps = [int(row[0]) for row in run.mesh.gather([found.step if found else 0])]
    if len(set(steps)) > 1:
        raise CheckpointError(f"all ranks must see the same checkpoint; they found those of steps {steps}.")
    if found is not None:
        checkpointing.restore(found, model=model, optimizer=state.optimizer)
        state.step, state.position = found.step, Position.from_dict(found.state["position"])
    if run.mesh.rank == 0:
        write_whole(run.config.output / DATA_MANIFEST, manifest(run.corpus.files))
    return state


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
    while state.step < config.steps:
        began = time.perf_counter()
        packed = stream.at(state.position)
        if report is not None and state.step == 0:
            report.sequence(_scene(run, packed))
        if state.step + 1 == profiled:
            with peak_memory() as peak:
                loss, norm = _step(run, state, packed)
            peaks = tuple(int(row[0]) for row in run.mesh.gather([peak.bytes]))
        else:
            (loss, norm), peaks = _step(run, state, packed), None
        state.step, state.position = state.step + 1, packed.after
        if report is not None:
            seconds = time.perf_counter() - began
            report.step(
                StepRecord(
                    state.step,
                    loss,
                    norm,
                    learning_rate(config, state.step),
                    seconds,
                    config.seq_len / seconds,
                    len(packed.documents.lengths),
                    packed.documents_cut,
                    peaks,
                )
            )
        if _is_checkpoint(config, state.step) and run.mesh.rank == 0:
            _save(run, state)


def _scene(run: Run, packed: PackedSequence) -> Scene:
    """How one sequence is shared out, for pictures."""
    ring, model, narrow = run.context.geometry, run.config.model, run.config.dtype == "bfloat16"
    heads, kv_heads, size = model.heads, model.kv_heads or model.heads, model.head_size
    wire = Format(1, heads, kv_heads, size, size, run.config.dtype, 2 if narrow else 4, 4)
    return Scene.of(
        len(packed.ids), ring.ring_size, None, ring.layout, ring.route, documents=packed.documents, wire=wire,
        backward=run.context.backward,
    )  # fmt: skip


def _step(run: Run, state: TrainState, packed: PackedSequence) -> tuple[float, float]:
    """One optimizer step; returns the loss and the gradient's norm, the same on all ranks."""
    number = state.step + 1
    state.gradient.zero_()
    with _autocast(run.config):
        share = shard_loss(state.model, Shard.of(packed, run.context), chunk_tokens=run.config.loss_chunk)
    share.backward()  # type: ignore[no-untyped-call]
    if run.hooks.after_backward is not None:
        run.hooks.after_backward(number, state.model)
    digest = zlib.crc32(packed.ids.tobytes())
    loss = check_step(run.mesh, step=number, loss=float(share.detach()), gradient=state.gradient, data_digest=digest)
    run.mesh.sum_(state.gradient)
    norm = clip_(state.gradient, max_norm=run.config.clip_norm, step=number)
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(run.config, number)
    state.optimizer.step()
    return loss, norm


def _autocast(config: TrainConfig) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if config.dtype == "bfloat16" else nullcontext()


def _is_checkpoint(config: TrainConfig, step: int) -> bool:
    return step == config.steps or (config.checkpoint_every > 0 and step % config.checkpoint_every == 0)


def _save(run: Run, state: TrainState) -> None:
    checkpointing.save(
        run.checkpoints,
        step=state.step,
        model=state.model,
        optimizer=state.optimizer,
        state={
            "position": state.position.as_dict(),
            "data": run.corpus.digest,
            "config": run.config.model_dump(mode="json"),
        },
        keep=run.config.keep_checkpoints,
        before_publish=run.hooks.before_publish,
    )


@contextmanager
def _reporting(run: Run, done: int) -> Iterator[Report | None]:
    if run.mesh.rank:
        yield None
        return
    with Report(run.config.output, steps=run.config.steps, done=done) as report:
        if done == run.config.steps:
            report.say(f"the run already has its {done} steps; raise steps to go on")
        elif done:
            report.say(f"going on after step {done} of {run.config.steps}")
        yield report


def _silent(_: str) -> None:
    pass
