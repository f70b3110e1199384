"""Time of a training step, item by item: what is computed, what waits, and what part of the peak that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ringspun.core.layout import Contiguous, Layout, Zigzag
from ringspun.core.mask import Causal, Full, Mask, Window
from ringspun.core.route import Ring, Route
from ringspun.core.wire import Format, Payload
from ringspun.planner.flops import (
    Checkpointing,
    attention_factor,
    attention_flops,
    head_flops,
    linear_factor,
    linear_flops,
)
from ringspun.planner.hardware import Cluster
from ringspun.planner.memory import Zero
from ringspun.planner.models import Model
from ringspun.planner.rates import (
    LAUNCH_S,
    attention_rate,
    exchange_seconds,
    gather_seconds,
    linear_seconds,
    stream_seconds,
)
from ringspun.planner.ring import Lap, Place, Work, lap, schedules
from ringspun.planner.split import Split

ELEMENT = 2
"""Bytes of bfloat16, in which products are computed and blocks travel."""
GRADIENT = 4
"""Bytes of float32, in which gradients are reduced."""
OPTIMIZER = 28
"""Bytes per parameter that AdamW reads and writes: weight, gradient and two moments, all float32."""


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is shared out.

    Args:
        seq_len: tokens of a sequence. batch: sequences of one replica at once. mask: of layers that see all keys;
            sliding layers see their window of it. zero: what is sharded (`ringspun.planner.memory.memory`).
    """

    model: Model
    cluster: Cluster
    split: Split
    seq_len: int
    batch: int = 1
    mask: Mask = Causal()  # noqa: RUF009 - frozen
    layout: Layout = Zigzag()  # noqa: RUF009 - frozen
    route: Route = Ring()  # noqa: RUF009 - frozen
    checkpointing: Checkpointing = "layer"
    zero: Zero = 3

    @property
    def tokens(self) -> float:
        """Of one device, between layers."""
        return self.batch * self.seq_len / self.split.slices

    @property
    def place(self) -> Place:
        """Where the ring's ranks lie: beside each other but for the devices that share their heads."""
        shared = self.split.tp * self.split.ulysses
        c = self.cluster
        return Place(c.near, c.far, max(1, c.node // shared), c.apart)

    @property
    def work(self) -> Work:
        """One layer's attention on one device."""
        shared = self.split.tp * self.split.ulysses
        heads, kv_heads = self.model.heads // shared, max(1, self.model.kv_heads // shared)
        size = self.model.head_size
        wire = Format(self.batch, heads, kv_heads, size, size, "bfloat16", ELEMENT, GRADIENT)
        rows = self.seq_len / self.split.ring
        return Work(wire, attention_rate(self.cluster.device, heads * self.batch, rows))

    def masks(self) -> list[tuple[Mask, int]]:
        """Each mask, and how many layers have it."""
        sliding = self.model.layers - self.model.full_layers
        slid = [] if self.model.window is None else [(self.mask & Window(self.model.window), sliding)]
        return [(mask, n) for mask, n in [(self.mask, self.model.full_layers), *slid] if n]


@dataclass(frozen=True)
class Step:
    """Seconds of one training step of every replica, itemised.

    Args:
        items: by name; what communication hides behind compute is not in it. flops: of one device, forward and
            backward of the model, nothing recomputed, allowed pairs alone. dense_flops: the same with every pair, as
            papers count.
        peak: FLOP/s of the device. tokens: of all replicas.
    """

    items: Mapping[str, float]
    flops: float
    dense_flops: float
    peak: float
    tokens: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.items.values())

    @property
    def lost_on_ring(self) -> float:
        """Seconds that waiting for messages and for the busiest rank takes."""
        return self.items["ring, not hidden"] + self.items["waiting for the busiest rank"]

    @property
    def mfu(self) -> float:
        """Part of the peak that the model's own FLOPs are."""
        return self.flops / self.total / self.peak

    @property
    def dense_mfu(self) -> float:
        """The same with masked pairs counted as work: what papers print."""
        return self.dense_flops / self.total / self.peak

    @property
    def tokens_per_s(self) -> float:
        """Of all devices."""
        return self.tokens / self.total


def step(job: Job) -> Step:
    """Time of a step from the schedules' own counts."""
    job.split.check(job.model)
    items = {**_products(job), **_attention(job), **_exchanges(job)}
    items["sharding, not hidden"] = _sharding(job, items)
    shards = job.split.devices // job.split.tp if job.zero else 1
    parameters = job.model.parameters / job.split.tp
    items["optimizer"] = OPTIMIZER * parameters / shards / job.cluster.device.memory_bytes_per_s
    return Step(items, *_model_flops(job), job.cluster.device.flops, job.batch * job.seq_len * job.split.dp)


def least_seconds(job: Job) -> float:
    """Less than any layout and route take: all ranks equally busy, all messages hidden. Needs no schedule but one
    rank's."""
    work = job.work
    pairs = sum(layers * _pairs(mask, job.seq_len) for mask, layers in job.masks()) / job.split.ring
    factor = attention_factor(job.checkpointing)
    compute = factor * 4 * work.wire.head_size * work.wire.heads * job.batch * pairs / work.rate
    laps = job.model.full_layers * (3 if job.checkpointing == "layer" else 2)
    if job.mask in (Causal(), Full()):
        compute += laps * min(job.split.ring, 1 + work.wire.kv_heads) * LAUNCH_S  # strides of heads are steps too
    items = {**_products(job), "attention": compute, **_exchanges(job)}
    return sum(items.values()) + _sharding(job, items) + max(0.0, laps * _least_transfer(job) - compute)


def _least_transfer(job: Job) -> float:
    """Less than one lap's messages take: each rank gets every block, but for the half that a causal mask may spare it.
    Between nodes, what crosses once is shared inside."""
    ring, place = job.split.ring, job.place
    if ring == 1 or job.mask not in (Causal(), Full()):
        return 0.0
    rows = job.seq_len / ring
    block = job.work.wire.message_bytes(Payload.KV, math.ceil(rows / 2))
    near = (ring - 1) * place.near.seconds(block) / (2 if place.apart else 1)
    nodes = math.ceil(ring / place.node)
    return near if nodes == 1 else (nodes - 1) * place.far.seconds(block)


def laps(job: Job) -> list[tuple[int, Lap, Lap]]:
    """Of each kind of layer: how many there are, the ring forward and backward."""
    found = []
    for mask, layers in job.masks():
        ranks = schedules(job.split.ring, job.layout, job.route, mask, job.seq_len)
        forward, backward = (lap(ranks, job.work, job.place, backward=b) for b in (False, True))
        found.append((layers, forward, backward))
    return found


def _attention(job: Job) -> dict[str, float]:
    forwards = 2 if job.checkpointing == "layer" else 1
    names = ("busy", "imbalance", "exposed")
    rings = laps(job)
    sums = {name: sum(n * (forwards * getattr(f, name) + getattr(b, name)) for n, f, b in rings) for name in names}
    return {
        "attention": sums["busy"],
        "waiting for the busiest rank": sums["imbalance"],
        "ring, not hidden": sums["exposed"],
    }


def _products(job: Job) -> dict[str, float]:
    device, model, tokens = job.cluster.device, job.model, job.tokens
    times = linear_factor(job.checkpointing)
    weights = ELEMENT * model.layer_matrix_parameters / job.split.tp
    layer = linear_seconds(device, linear_flops(model, tokens), weights)
    stream = stream_seconds(device, tokens, model.hidden, ELEMENT)
    return {
        "linear layers": model.layers * times * layer,
        "norms and sums": model.layers * times * stream,
        "logits and loss": 3 * linear_seconds(device, head_flops(model, tokens), ELEMENT * model.vocab * model.hidden),
    }


def gather_bytes(model: Model, tokens: float, split: Split) -> float:
    """What a device holds after each gather of tensor parallel layers."""
    return tokens * split.tp * model.hidden * ELEMENT


def gathers(checkpointing: Checkpointing) -> int:
    """Gathers and reduce-scatters of a tensor parallel layer: 4 forward, 6 backward, 4 where forward runs again."""
    return 10 if checkpointing == "none" else 14


def exchange_bytes(model: Model, tokens: float, split: Split) -> float:
    """What a device holds of queries, keys, values and outputs, all of which Ulysses exchanges, once each way."""
    widths = 2 * (model.q_width + model.kv_width * split.kv_copies(model)) / split.tp
    return tokens * split.tp * widths * ELEMENT


def exchanges(checkpointing: Checkpointing) -> int:
    """How often they are exchanged: forward, backward, and where forward runs again."""
    return 2 if checkpointing == "none" else 3


def _exchanges(job: Job) -> dict[str, float]:
    """All-to-alls of Ulysses and gathers of tensor parallel layers: nothing hides them."""
    split, model, cluster = job.split, job.model, job.cluster
    tp = gather_seconds(cluster, split.tp, gather_bytes(model, job.tokens, split))
    link = cluster.link(split.ulysses * split.tp, collective=True)
    ulysses = exchange_seconds(link, exchange_bytes(model, job.tokens, split), split.ulysses)
    return {
        "tensor parallel exchanges": model.layers * gathers(job.checkpointing) * tp,
        "Ulysses exchanges": model.layers * exchanges(job.checkpointing) * ulysses,
    }


def _sharding(job: Job, items: Mapping[str, float]) -> float:
    """What gathering parameters and reducing gradients adds: each layer's hide behind a layer's compute."""
    split, model = job.split, job.model
    shards = split.devices // split.tp
    layer = model.layer_parameters / split.tp
    gather, reduce = (gather_seconds(job.cluster, shards, layer * n, stride=split.tp) for n in (ELEMENT, GRADIENT))
    compute = sum(items.get(name, 0.0) for name in ("linear layers", "norms and sums", "attention")) / model.layers
    forward = compute / (4.5 if job.checkpointing != "none" else 3.5)
    if job.zero == 3:
        return model.layers * (max(0.0, gather - forward) + max(0.0, gather + reduce - (compute - forward)))
    return model.layers * max(0.0, 2 * reduce - (compute - forward))


@lru_cache(maxsize=256)
def _pairs(mask: Mask, seq_len: int) -> float:
    """Allowed pairs of one sequence."""
    (alone,) = schedules(1, Contiguous(), Ring(), mask, seq_len)
    return float(alone.forward.pairs.sum())


def _model_flops(job: Job) -> tuple[float, float]:
    tokens = job.tokens
    linear = job.model.layers * linear_flops(job.model, tokens) + head_flops(job.model, tokens)
    pairs = sum(n * _pairs(mask, job.seq_len) for mask, n in job.masks())
    dense = pairs + job.model.full_layers * (float(job.seq_len) ** 2 - _pairs(job.mask, job.seq_len))
    per_device = job.batch / job.split.slices
    return tuple(3 * (linear + attention_flops(job.model, n * per_device)) for n in (pairs, dense))  # type: ignore[return-value]
