"""The training loop: each sequence shared by the ranks of a ring, those of a step by the copies of that ring; stage
after stage."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ringspun.core.wire import Format
from ringspun.errors import CheckpointError, ConfigError, DataError
from ringspun.pictures import Scene
from ringspun.torch.memory import peak_memory
from ringspun.train.checkpoints import checkpointing
from ringspun.train.checkpoints.checkpointing import Checkpoint
from ringspun.train.checkpoints.resume import find_checkpoint, leg_at
from ringspun.train.checkpoints.saving import is_checkpoint, save_run
from ringspun.train.config import TrainConfig
from ringspun.train.data.contents import manifest
from ringspun.train.data.packed import PackedSequences
from ringspun.train.data.text import PackedSequence, Position, Sequences, TrainingData, consecutive
from ringspun.train.faults import Why
from ringspun.train.held_out import evaluate, lengths_of
from ringspun.train.losses.mean import TokenMean
from ringspun.train.model import NOTHING, Shard, attention_shape, build_loss, is_transformers
from ringspun.train.optimizer import build_optimizer, set_rate
from ringspun.train.output import CHECKPOINTS, DATA_MANIFEST, write_whole
from ringspun.train.parallel.gradient import FlatGradient, Gradient, WrappedGradient
from ringspun.train.parallel.meshes import JobMesh
from ringspun.train.parallel.ranks import Mesh, check_step
from ringspun.train.parallel.scaling import gradient_scale
from ringspun.train.parallel.sharding import SHARDED
from ringspun.train.parallel.wrapping import split_layers, wrap
from ringspun.train.recipe import Recipe
from ringspun.train.reporting.meter import StepMeter
from ringspun.train.reporting.report import Report, StepRecord
from ringspun.train.stages import Leg, learning_rate, told

if TYPE_CHECKING:
    from ringspun.torch import ContextParallel


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
    """One stage of a run on this rank: what to do, on what, with whom."""

    config: TrainConfig  # what holds in the stage
    corpus: TrainingData
    context: ContextParallel
    mesh: Mesh = field(default_factory=Mesh)  # all ranks of the job
    devices: JobMesh | None = None  # the same as a mesh; None: one ring
    hooks: Hooks = field(default_factory=Hooks)
    recipe: Recipe = NOTHING
    whole: TrainConfig | None = None  # of all stages; None: there is one, this
    number: int = 0  # of the stage, from 0

    @cached_property
    def legs(self) -> tuple[Leg, ...]:
        """All stages of the run."""
        return (self.whole or self.config).legs

    @property
    def stage(self) -> Leg:
        """This one."""
        return self.legs[self.number]

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.config.output / CHECKPOINTS

    @cached_property
    def stream(self) -> Sequences:
        """The sequences of this stage."""
        if self.recipe.sequences is not None:
            return self.recipe.sequences(self.config, self.stage)
        return self.corpus.sequences(seq_len=self.config.seq_len, seed=self.config.seed)

    def held_out(self, seq_len: int) -> Sequences:
        """Sequences of what is not trained on.

        Raises:
            ConfigError: there are none.
        """
        found = self.corpus.held_out(seq_len=seq_len, seed=self.config.seed)
        if found is None:
            raise ConfigError("[evaluate] must have sequences that are not trained on. Set data.held_out.")
        return found


def train(run: Run, *, warn: Callable[[str], None] = print) -> TrainState:
    """Trains a run of one stage; see `train_stages`."""
    return train_stages(run.config, run.corpus, run.mesh, lambda _: run, warn=warn)[1]


def train_stages(
    config: TrainConfig,
    corpus: TrainingData,
    ranks: Mesh,
    run_of: Callable[[Leg], Run],
    *,
    warn: Callable[[str], None] = print,
) -> tuple[Run, TrainState]:
    """Trains to the last step of the last stage, from the newest whole checkpoint if there is one.

    Each stage, like a run that goes on, begins with the checkpoint that the one before wrote at its end: so a run that
    was ended anywhere and started again is the run that was not, bit for bit on the same mesh.

    Args:
        config: all stages; its output folder gets checkpoints, log, TensorBoard scalars and the loss curve.
        corpus: what is trained on. ranks: of the job. run_of: one stage's run on this rank. Collective.
        warn: told of damaged checkpoints that are skipped.

    Returns:
        The last stage, and the state after the last step.

    Raises:
        NonFiniteError: on all ranks alike, when the loss or a gradient of any rank has a NaN or Inf; with the first
            module or parameter that has. The last checkpoint stays.
        CheckpointError: the checkpoints are all damaged, belong to another run or other data, or cannot be
            written.
        ConfigError: the output's files cannot be written at the start.
        DataError: a file changed, or ranks read different tokens.
    """
    warn = _silent if ranks.rank else warn
    found = _found(config, corpus, ranks, warn)
    first = leg_at(config.legs, found.step if found else 0)
    with ExitStack() as stack:
        run = run_of(first)
        if found is not None and found.state.get("recipe", "") != run.recipe.digest:
            warn(f"recipe is not what it was when {found.path} was written; the run goes on with it as it is now")
        state = _restored(run, found)
        report = stack.enter_context(_reporting(run, state.step))
        train_stage(run, state, report)
        for leg in config.legs[first.number + 1 :]:
            del state  # two at once may be too much
            ranks.gather([0.0])  # until rank 0 has written
            run = run_of(leg)
            state = _restored(run, _found(config, corpus, ranks, warn))
            train_stage(run, state, report)
        if report is not None and isinstance(run.stream, PackedSequences):
            report.say(run.stream.told(state.position))
    return run, state


def _found(config: TrainConfig, corpus: TrainingData, ranks: Mesh, warn: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that all ranks go on from. Collective."""
    found = find_checkpoint(config, corpus, warn=warn)
    steps = [int(row[0]) for row in ranks.gather([found.step if found else 0])]
    if len(set(steps)) > 1:
        raise CheckpointError(f"all ranks must see the same checkpoint; they found those of steps {steps}.")
    return found


def _begin(run: Run, warn: Callable[[str], None]) -> TrainState:
    return _restored(run, _found(run.whole or run.config, run.corpus, run.mesh, _silent if run.mesh.rank else warn))


def _restored(run: Run, found: Checkpoint | None) -> TrainState:
    """The state that a checkpoint holds, or a new one. Collective."""
    state = _new_state(run)
    if found is not None:
        checkpointing.restore(found, model=state.model, optimizer=state.optimizer)
        state.step, state.position = found.step, found.state["position"]
    if run.mesh.rank == 0:
        write_whole(run.config.output / DATA_MANIFEST, manifest(run.corpus.files))
    return state


def _new_state(run: Run) -> TrainState:
    config = run.config
    model, loss = build_loss(config, run.recipe)
    if run.devices is None or config.shard == "none":
        return TrainState(model, loss, build_optimizer(model, config, run.recipe), FlatGradient(model))
    layers = None if run.recipe.build_model is None or is_transformers(model) else split_layers(model)
    narrow = config.shard in SHARDED and config.dtype == "bfloat16"
    loss = wrap(loss, run.devices, shard=config.shard, bfloat16=narrow, layers=layers)
    scale = gradient_scale(loss, TokenMean(run.context, data=run.devices.data))
    return TrainState(model, loss, build_optimizer(model, config, run.recipe), WrappedGradient(loss, scale))


def train_stage(run: Run, state: TrainState, report: Report | None) -> None:
    """Trains to the end of the run's stage, and evaluates: with its rotations before its first step, unless the weights
    are random yet, and after its last one."""
    stage = run.stage
    if report is not None and len(run.legs) > 1:
        report.stage(
            stage.number, seq_len=stage.seq_len, first_step=stage.first_step + 1, steps=stage.steps, text=told(stage)
        )
    if state.step == stage.first_step and (stage.number or run.config.init is not None):
        _evaluate(run, state, report, stage.number - 1)
    _train(run, state, report)


def _evaluate(run: Run, state: TrainState, report: Report | None, other: int) -> None:
    """At the first length, this stage's, and that of the stage before or after it. Collective."""
    lengths = lengths_of(run.legs, run.number, other)
    values = evaluate(run, state, lengths, partial(share_of, run, state))
    if report is not None and values:
        report.evaluation(state.step, run.stage.number, values)


def _train(run: Run, state: TrainState, report: Report | None) -> None:
    stream, config, first = run.stream, run.config, state.step + 1
    profiled = min(first + 1, config.steps)  # the second step: AdamW makes its moments in the first
    learns = True  # until a step does not, which is told once
    meter = StepMeter(state.model, run.context, run.mesh, dtype=config.dtype, peak_flops=config.peak_flops)
    while state.step < config.steps:
        meter.begin()
        batch = _next_batch(stream, state.position, config)
        if report is not None and learns and not any(packed.targets for packed in batch):
            learns = False
            report.say(f"step {state.step + 1} has no targets: its loss is 0, and so is that of every step like it")
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
                    learning_rate(config, state.step, first_step=run.stage.first_step),
                    documents=sum(len(packed.documents.lengths) for packed in batch),
                    documents_cut=sum(packed.documents_cut for packed in batch),
                    peak_bytes=peaks,
                    stage=run.stage.number,
                    **measured,
                )
            )
            if state.step == run.stage.first_step + 1:  # behind its clock
                report.sequence(_scene(run, state.model, batch[0]))
        if state.step == config.steps:  # before its checkpoint: a run that goes on from there must not do without
            _evaluate(run, state, report, run.number - 1 if run.stage.is_last else run.number + 1)
        if is_checkpoint(run, state.step):
            save_run(run, state)


def _next_batch(stream: Sequences, position: Position, config: TrainConfig) -> list[PackedSequence]:
    """The sequences of one step, the same on all ranks."""
    batch = consecutive(stream, position, config.batch_size)
    for packed in batch:
        if len(packed.ids) != config.seq_len:
            raise DataError(
                f"sequences must have the stage's {config.seq_len} tokens; got one of {len(packed.ids)}. Make them "
                "of config.seq_len."
            )
    return batch


def _scene(run: Run, model: nn.Module, packed: PackedSequence) -> Scene:
    """How one sequence is shared out, for pictures; of heads that are split, one ring."""
    ring, narrow, shape = run.context.geometry, run.config.dtype == "bfloat16", attention_shape(model)
    heads, kv_heads = (max(1, n // run.config.ulysses) for n in (shape.heads, shape.kv_heads))
    wire = Format(1, heads, kv_heads, shape.head_size, shape.head_size, run.config.dtype, 2 if narrow else 4, 4)
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
        why=Why(state.model, run.mesh, lambda: _forward(run, state, batch)),
    )
    gradient.sum(run.mesh)
    norm = gradient.clip(run.config.clip_norm, step=number)
    set_rate(state.optimizer, learning_rate(run.config, number, first_step=run.stage.first_step))
    state.optimizer.step()
    return loss, norm


def _backward(run: Run, state: TrainState, batch: list[PackedSequence]) -> float:
    """Gradients of this rank's sequences; its share of the loss, a mean over the targets of the whole batch."""
    total = sum(packed.targets for packed in batch)  # known without a message: every rank has read them all
    mine, loss = _mine(run, batch), 0.0
    for packed in mine:
        last = packed is mine[-1]
        with state.gradient.during(last=last):
            share = share_of(run, state, packed, total)
            state.gradient.backward(share, last=last)
        loss += float(share.detach())
    return loss


def _forward(run: Run, state: TrainState, batch: list[PackedSequence]) -> None:
    """Runs this rank's sequences once more."""
    for packed in _mine(run, batch):
        share_of(run, state, packed, sum(packed.targets for packed in batch))


def _mine(run: Run, batch: list[PackedSequence]) -> list[PackedSequence]:
    """Of the sequences of a step, those of this rank's ring."""
    return batch if run.devices is None else batch[run.devices.data_rank :: run.devices.data_size]


def share_of(run: Run, state: TrainState, packed: PackedSequence, total: float) -> Tensor:
    """This rank's share of the loss of one sequence, a mean over `total` targets. Collective."""
    shard = replace(Shard.of(packed, run.context), total_targets=total)
    with _autocast(run.config):
        return state.loss(shard)  # type: ignore[no-any-return]


def _autocast(config: TrainConfig) -> Any:
    by_autocast = config.dtype == "bfloat16" and config.shard not in SHARDED  # whose policy casts
    return torch.autocast("cpu", torch.bfloat16) if by_autocast else nullcontext()


@contextmanager
def _reporting(run: Run, done: int) -> Iterator[Report | None]:
    if run.mesh.rank:
        yield None
        return
    steps, config = run.legs[-1].last_step, run.whole or run.config
    plain = config.model_dump(mode="json")
    with Report(config.output, steps=steps, done=done, stages=len(run.legs), config=plain) as report:
        if done == steps:
            report.say(f"the run already has its {done} steps; raise steps to go on")
        elif done:
            report.say(f"going on after step {done} of {steps}")
        yield report


def _silent(_: str) -> None:
    pass
