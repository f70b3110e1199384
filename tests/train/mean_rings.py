"""A small model on rings and their data-parallel replicas, beside one process. The ranks of a pool import this file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringspun import Causal, Documents
from ringspun.errors import RingspunError, RingspunWarning
from ringspun.torch import ContextParallel, reduce_gradients, watch_gradients
from ringspun.train.losses.loss import IGNORED, token_loss
from ringspun.train.losses.mean import StepCount, TokenMean
from ringspun.train.losses.metrics import Metrics, token_sums
from ringspun.train.parallel.scaling import clip_gradients, gradient_norm, gradient_scale

S, VOCABULARY, WIDTH, HEADS = 19, 13, 8, 2
MICRO_BATCHES, LR, PATIENCE_S = 2, 0.5, 20.0
MAX_NORM = {1: 0.72, 2: 0.52}  # by data ranks: between the norms of the steps
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(VOCABULARY, WIDTH), Block(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        return self.head(self.block(self.embed(ids), attention))


def build() -> Model:
    torch.manual_seed(4)
    return Model().double()


@dataclass(frozen=True)
class Sequence:
    """One packed sequence, whole: ``[1, S]`` each; some labels are none, the others weigh unequally."""

    ids: Tensor
    labels: Tensor
    loss_weights: Tensor
    documents: Documents


def sequence(step: int, data_rank: int, micro_batch: int) -> Sequence:
    """What a ring reads; micro-batches and rings have very different numbers of targets."""
    seed = 100 * step + 10 * data_rank + micro_batch
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (1, S), generator=generator)
    answer = torch.rand(1, S, generator=generator) < (0.9, 0.2)[(data_rank + micro_batch) % 2]
    weights = torch.rand(1, S, generator=generator, dtype=torch.float64) + 0.1
    cut = 3 + seed % 9
    return Sequence(ids, ids.masked_fill(~answer, IGNORED), weights, Documents([cut, S - 2 - cut]))  # two are padding


@dataclass
class Run:
    """What is compared, all of it the same on every rank."""

    weights: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    counts: list[StepCount] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


def alone(data: int, steps: int) -> Run:
    """One process and PyTorch alone, all sequences of a step as one batch: shifts, masks, and means are made here."""
    model, run = build(), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        loss, count, metrics = step_alone(model, data, step)
        optimizer.zero_grad()
        loss.backward()
        run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM[data])))
        optimizer.step()
        run.losses.append(metrics.loss)
        run.metrics.append(metrics)
        run.counts.append(count)
    run.weights = [p.detach() for p in model.parameters()]
    return run


def step_alone(model: Model, data: int, step: int) -> tuple[Tensor, StepCount, Metrics]:
    """The mean loss of a step, what it is over, and its metrics."""
    logs, targets, weights = predictions(
        model, [sequence(step, d, m) for d in range(data) for m in range(MICRO_BATCHES)]
    )
    nll = -logs[torch.arange(len(targets)), targets]
    correct, entropy = logs.argmax(-1) == targets, -(logs.exp() * logs).sum(-1)
    total = weights.sum()
    loss, accuracy, surprise = ((x * weights).sum() / total for x in (nll, correct, entropy))
    metrics = Metrics(*(float(x.detach()) for x in (total, loss, accuracy, surprise)))
    sequences = data * MICRO_BATCHES
    return loss, StepCount((len(targets),), (float(total),), sequences * S, sequences), metrics


def predictions(model: Model, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities where there is a target, the targets, and their weights: document by document."""
    found = []
    for seq in sequences:
        for first, length in zip(seq.documents.starts, seq.documents.lengths, strict=True):
            ids, labels, weights = (x[:, first : first + length] for x in (seq.ids, seq.labels, seq.loss_weights))
            logits = model(ids, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
            real = labels[0, 1:] != IGNORED
            found.append((logits[0, :-1][real].log_softmax(-1), labels[0, 1:][real], weights[0, 1:][real]))
    logs, targets, counts = (torch.cat(x) for x in zip(*found, strict=True))
    return logs, targets, counts


# -- over processes ----------------------------------------------------------------------------------------------------


def mesh_of(data: int, ring: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data, ring), mesh_dim_names=("data", "ring"))


def mean_of(mesh: DeviceMesh) -> tuple[ContextParallel, TokenMean]:
    cp = ContextParallel(mesh["ring"], timeout_s=PATIENCE_S)
    return cp, TokenMean(cp, data=ContextParallel(mesh["data"], timeout_s=PATIENCE_S))


def shards(cp: ContextParallel, mesh: DeviceMesh, step: int) -> tuple[list[dict[str, Any]], list[Attention]]:
    """The micro-batches of a step, as this rank holds them, and the attention of each."""
    batches, attentions = [], []
    for micro_batch in range(MICRO_BATCHES):
        seq = sequence(step, mesh["data"].get_local_rank(), micro_batch)
        part = cp.partition(S, documents=seq.documents)
        whole = {"input_ids": seq.ids, "labels": seq.labels, "loss_weights": seq.loss_weights}
        batches.append(part.shard_batch(whole))
        attentions.append(part.plan(Causal() & seq.documents).attention)
    return batches, attentions


def wrapped(bare: Model, wrapper: str, mesh: DeviceMesh) -> nn.Module:
    """The model as it is called."""
    if wrapper.startswith("ddp"):
        return DistributedDataParallel(bare)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(bare, device_id=torch.device("cpu"), use_orig_params=True)
    if wrapper in ("fsdp2", "fsdp2 that sums", "hsdp"):
        over = mesh if wrapper == "hsdp" else init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (bare.block, bare):
            sharded = fully_shard(module, mesh=over)
            if wrapper == "fsdp2 that sums":
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)
    return bare


def train(rank: int, wrapper: str, data: int, ring: int, steps: int) -> Run:
    """Plain descent, clipped, on a mesh of all processes."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = trained(wrapper, mesh_of(data, ring), steps)
    run.warned = [str(w.message) for w in warned if issubclass(w.category, RingspunWarning)]
    return run


def trained(wrapper: str, mesh: DeviceMesh, steps: int) -> Run:
    cp, mean = mean_of(mesh)
    bare, run = build(), Run()
    bare = bare.float() if wrapper == "fsdp1" else bare  # whose norm is float32
    model = wrapped(bare, wrapper, mesh)
    scale = gradient_scale(model, mean)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=LR)
    watch_gradients(optimizer, ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S))
    for step in range(steps):
        batches, attentions = shards(cp, mesh, step)
        count = mean.count(batches)
        loss, sums = torch.zeros((), dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        optimizer.zero_grad()
        for number, (batch, attention) in enumerate(zip(batches, attentions, strict=True)):
            waits = wrapper == "ddp without sync" and number < MICRO_BATCHES - 1
            with model.no_sync() if waits else nullcontext():
                logits = model(batch["input_ids"], attention)
                labels, weights = batch["shift_labels"], batch["shift_loss_weights"]
                share = token_loss(logits, labels, total_targets=count.total, weights=weights)
                (share * scale).backward()
            loss += share.detach()
            sums += token_sums(logits, labels, weights, chunk_tokens=4)
        if wrapper == "bare":
            reduce_gradients(bare, ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S))
        if wrapper == "fsdp1":
            run.norms.append(float(model.clip_grad_norm_(MAX_NORM[mean.data_size])))
        else:
            norm = gradient_norm(model)
            assert clip_gradients(model, MAX_NORM[mean.data_size]) == norm
            run.norms.append(norm)
        optimizer.step()
        run.losses.append(float(mean.whole(loss)))
        run.metrics.append(mean.metrics(sums))
        run.counts.append(count)
    if wrapper == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model):
            run.weights = [p.detach().double() for p in bare.parameters()]
    else:
        run.weights = [whole(p).detach() for p in bare.parameters()]
    return run


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def caught(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except RingspunError as problem:
        return type(problem).__name__, str(problem)
    return "nothing", ""


def refused(rank: int) -> dict[str, tuple[str, str]]:
    """Counts and wrappers that do not fit a mesh of 2 x 2, as this rank hears of them."""
    torch.set_num_threads(1)
    mesh = mesh_of(2, 2)
    cp, mean = mean_of(mesh)
    batches, _ = shards(cp, mesh, 0)
    other = [batches[0] | {"shift_labels": torch.full_like(batches[0]["shift_labels"], 1)}, batches[1]]
    negative = [batches[0] | {"shift_loss_weights": -batches[0]["shift_loss_weights"]}, batches[1]]
    over_data = DistributedDataParallel(build(), process_group=mesh["data"].get_group())
    said = [batches[0] | {"num_items_in_batch": 3}, batches[1]]
    world = dist.group.WORLD
    return {
        "other tokens": caught(lambda: mean.count(other if rank == 0 else batches)),
        "fewer": caught(lambda: mean.count(batches[: 1 if rank == 3 else 2])),
        "negative": caught(lambda: mean.count(negative if rank == 2 else batches)),
        "another total": caught(lambda: mean.count(said if rank == 1 else batches)),
        "and then": caught(lambda: mean.count(batches)),
        "data": caught(lambda: TokenMean(cp, data=world)),
        "ddp over data": caught(lambda: gradient_scale(over_data, mean)),
        "ddp over others": caught(lambda: gradient_scale(over_data, TokenMean(cp))),
        "ddp over all": caught(lambda: gradient_scale(DistributedDataParallel(build()), TokenMean(cp))),
        "fsdp2 over data": caught(lambda: gradient_scale(fully_shard(build(), mesh=mesh["data"]), mean)),
        "a hook": caught(lambda: gradient_scale(torch.compile(hooked(), backend="eager"), mean)),
        "left out": caught(lambda: gradient_scale(partly(mesh, 4.0), mean)),
        "two ways": caught(lambda: gradient_scale(two_ways(mesh), mean)),
    }


def hooked() -> nn.Module:
    model = DistributedDataParallel(build())
    model.register_comm_hook(None, summed)
    return model


def summed(_, bucket):  # PyTorch reads a hook's annotations, and wants no strings
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def partly(mesh: DeviceMesh, divisor: float) -> nn.Module:
    """Its head is not sharded."""
    model = build()
    model = fully_shard(model, mesh=mesh, ignored_params=set(model.head.parameters()))
    model.set_gradient_divide_factor(divisor)
    model.set_force_sum_reduction_for_comms(True)
    return model


def two_ways(mesh: DeviceMesh) -> nn.Module:
    model = build()
    fully_shard(model.block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh)


def mixed(rank: int) -> tuple[float, float, list[Tensor]]:
    """A model of which FSDP2 leaves the head alone: scale, norm, and the gradients after clipping."""
    torch.set_num_threads(1)
    mesh = mesh_of(2, 2)
    cp, mean = mean_of(mesh)
    model = partly(mesh, 1.0)
    batches, attentions = shards(cp, mesh, 0)
    count, scale = mean.count(batches), gradient_scale(model, mean)
    for batch, attention in zip(batches, attentions, strict=True):
        logits = model(batch["input_ids"], attention)
        share = token_loss(
            logits, batch["shift_labels"], total_targets=count.total, weights=batch["shift_loss_weights"]
        )
        (share * scale).backward()
    reduce_gradients(model.head.parameters(), ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S))
    norm = clip_gradients(model, 0.05)
    return scale, norm, [whole(p.grad) for p in model.parameters()]


def empty(rank: int, with_targets: tuple[int, ...]) -> tuple[float, StepCount, Metrics, list[Tensor]]:
    """Only some data ranks have targets; the loss, what was counted, metrics, and the gradients under DDP."""
    torch.set_num_threads(1)
    mesh = mesh_of(2, 2)
    cp, mean = mean_of(mesh)
    batches, attentions = shards(cp, mesh, 0)
    batch = batches[0]
    del batch["shift_loss_weights"]
    if mesh["data"].get_local_rank() not in with_targets:
        batch |= {"shift_labels": torch.full_like(batch["shift_labels"], IGNORED), "num_items_in_batch": 0}
    model = DistributedDataParallel(build())
    count = mean.count([batch])
    logits = model(batch["input_ids"], attentions[0])
    share = token_loss(logits, batch["shift_labels"], total_targets=count.total)
    (share * gradient_scale(model, mean)).backward()
    metrics = mean.metrics(token_sums(logits, batch["shift_labels"]))
    return float(mean.whole(share)), count, metrics, [p.grad for p in model.parameters()]


def per_process_means(rank: int) -> tuple[float, list[Tensor]]:
    """`average_tokens_across_devices` off: the average over data ranks of each one's mean over its micro-batches."""
    torch.set_num_threads(1)
    mesh = mesh_of(2, 2)
    cp, mean = mean_of(mesh)
    batches, attentions = shards(cp, mesh, 0)
    model = DistributedDataParallel(build())
    count, scale, logged = TokenMean(cp).count(batches), gradient_scale(model, mean), 0.0
    for batch, attention in zip(batches, attentions, strict=True):
        logits = model(batch["input_ids"], attention)
        share = token_loss(logits, batch["shift_labels"], total_targets=count.targets[0]) / mean.data_size
        (share * scale).backward()
        logged += float(mean.whole(share))
    return logged, [p.grad for p in model.parameters()]


def from_gathered(rank: int, gathered: bool) -> tuple[float, list[Tensor]]:
    """The loss from log-probabilities that every rank of a ring gathers, or from its own: metric and gradients."""
    torch.set_num_threads(1)
    mesh = mesh_of(2, 2)
    cp, mean = mean_of(mesh)
    batches, attentions = shards(cp, mesh, 0)
    seq = sequence(0, mesh["data"].get_local_rank(), 0)
    part = cp.partition(S, documents=seq.documents)
    model, (batch, *_) = build(), batches
    count = mean.count([batch])
    labels = batch["shift_labels"]
    logs = model(batch["input_ids"], attentions[0]).log_softmax(-1)
    logs = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * batch["shift_loss_weights"]
    # gathered, the sum is the same on all ranks of the ring
    summed = mean.share_of(part.gather(logs, dim=1).sum()) if gathered else logs.sum()
    share = -summed / count.total
    share.backward()
    reduce_gradients(model, ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S))
    return float(mean.whole(share)), [p.grad for p in model.parameters()]


def epoch(rank: int, samples: int) -> tuple[int, StepCount]:
    """Steps of an epoch of single sequences, and what one step counts."""
    mesh = mesh_of(2, 2)
    cp, mean = mean_of(mesh)
    batches, _ = shards(cp, mesh, 0)
    return mean.steps_per_epoch(samples, rows=1), mean.count(batches[:1])


def malformed_on_one_rank(rank: int) -> str:
    """What each rank raises when one rank's weights cannot be of its labels."""
    _, mean = mean_of(mesh_of(2, 2))
    labels = torch.ones(1, 3, dtype=torch.int64)
    try:
        mean.count([{"shift_labels": labels, "shift_loss_weights": torch.ones(4 if rank == 0 else 3)}])
    except (RingspunError, RuntimeError) as problem:
        return type(problem).__name__
    return "nothing"


def outside_of_ddp(rank: int) -> list[str]:
    """What `gradient_scale` says of models that DDP reduces only in part."""
    _, mean = mean_of(mesh_of(2, 2))
    ignoring = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["1.weight"])
    frozen = nn.Linear(2, 2).requires_grad_(False)
    models = [
        nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)),
        DistributedDataParallel(ignoring),
        nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), frozen),
    ]
    said = []
    for model in models:
        try:
            said.append(f"{gradient_scale(model, mean):g}")
        except RingspunError as problem:
            said.append(str(problem).split(" is not")[0].split("; ")[-1])
    return said
