"""What a run would do, without doing it: each stage's memory and time, and where it would go on. No process is started
and no weight allocated: the model is built on the meta device, which knows shapes alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringspun.core.host import cores
from ringspun.core.layout import Contiguous, Zigzag
from ringspun.core.text import parse_layout
from ringspun.planner.hardware import GIB, Cluster, Device, LinkSpec, cluster
from ringspun.planner.memory import TORCH, Method, Zero, memory
from ringspun.planner.models import Model
from ringspun.planner.split import Split
from ringspun.planner.time import Job, step
from ringspun.torch.gemm import gemm_seconds, timed
from ringspun.train.config import TrainConfig
from ringspun.train.model import build_shapes, route_of
from ringspun.train.parallel.sharding import SHARDED
from ringspun.train.recipe import Recipe
from ringspun.train.reporting.meter import planned
from ringspun.train.stages import Leg

STATE_BYTES = 16
"""Per parameter: weight, gradient and AdamW's two moments, in float32."""
_LINK = LinkSpec(
    bytes_per_s=1.4e9, latency_s=2e-4, source="gloo between processes of one machine", date="2026-11", assumed="all"
)
_ATTENTION_TOKENS, _ATTENTION_HEADS, _HEAD_SIZE = 1024, 4, 64


@dataclass(frozen=True)
class Foreseen:
    """One stage.

    Args:
        leg: the stage. parameters: of the model. memory_bytes: of a rank at its peak; weights, gradients and moments
            alone where `is_whole` is False. seconds: of a step; None: the planner does not know such a model.
    """

    leg: Leg
    parameters: int
    memory_bytes: float
    is_whole: bool
    seconds: float | None

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.leg.config.batch_size * self.leg.seq_len


def foresee(config: TrainConfig, recipe: Recipe, *, device: str | None = None) -> list[Foreseen]:
    """What each stage would take, by the planner's formulas: memory is good to a factor of about 1.6.

    Args:
        device: name of an accelerator; None: ranks of this machine, whose rates are measured in a second.
    Raises:
        ConfigError: nobody knows the device, or stages that cannot be.
    """
    found = _cluster(config, device)
    return [_of_stage(leg, recipe, found) for leg in config.legs]


def _of_stage(leg: Leg, recipe: Recipe, found: Cluster) -> Foreseen:
    model: nn.Module = build_shapes(leg.config, recipe)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    known = planned(model)
    if known is None or recipe.build_model is not None:
        held = leg.config.dp_shard * leg.config.ranks if leg.config.shard in SHARDED else 1
        return Foreseen(leg, parameters, STATE_BYTES * parameters / held, False, None)
    return Foreseen(leg, parameters, _memory(leg.config, known, found), True, _seconds(leg.config, known, found))


def _split(config: TrainConfig, *, copies: int) -> Split:
    return Split(ring=config.ranks // config.ulysses, ulysses=config.ulysses, dp=copies)


def _memory(config: TrainConfig, model: Model, found: Cluster) -> float:
    width = 2 if config.dtype == "bfloat16" else 4
    own = {"reserve_bytes": 0.0, "activation_bytes": width, "gather_bytes": width, "logit_chunk": config.loss_chunk}
    block = {} if config.feed_forward_block is None else {"chunk": config.feed_forward_block}
    keeps = TORCH.model_copy(update=own | block)
    zero: Zero = 3 if config.shard in SHARDED else 0
    method: Method = "blockwise" if config.feed_forward_block else "memory_efficient"
    if config.ranks > config.ulysses:
        method = "ring"
    return memory(
        model, config.seq_len / config.ranks, _split(config, copies=config.dp_shard),
        memory_bytes=found.device.memory_bytes, recipe=keeps, method=method,
        checkpointing=_kept(config), zero=zero,
    ).total  # fmt: skip


def _kept(config: TrainConfig) -> Any:
    return "attention" if config.checkpointing == "ring_step" else config.checkpointing


def _seconds(config: TrainConfig, model: Model, found: Cluster) -> float:
    """Of a step, each sequence of a ring one after another."""
    layout = parse_layout(config.layout)
    if layout.reads_documents:
        layout = Zigzag()  # as balanced, of documents that nobody knows yet
    job = Job(
        model, found, _split(config, copies=config.data_size), config.seq_len,
        layout=layout if config.ranks > config.ulysses else Contiguous(), route=route_of(config),
        checkpointing=_kept(config), zero=3 if config.shard in SHARDED else 0,
    )  # fmt: skip
    once = step(job)
    passes = config.batch_size // config.data_size
    return passes * (once.total - once.items["optimizer"]) + once.items["optimizer"]


def _cluster(config: TrainConfig, device: str | None) -> Cluster:
    if device is not None:
        return cluster(device, config.processes)
    link = _LINK.link()
    return Cluster(_this_machine(config), config.processes, config.processes, link, link, link, link)


def _this_machine(config: TrainConfig) -> Device:
    """One rank's part of this machine, its rates measured with as many threads as it gets."""
    before, mine = torch.get_num_threads(), max(1, cores() // config.processes)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    turns = max(1.0, config.processes * mine / cores())  # ranks that share a core take turns
    try:
        torch.set_num_threads(mine)
        matmul = 2 * 1024**3 / min(gemm_seconds(dtype, 3)) / turns
        attention = _attention_flops() / turns
        block = torch.ones(1 << 24)
        streamed = 2 * block.nbytes / min(timed(block.clone, 3)) / turns
    finally:
        torch.set_num_threads(before)
    held = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / config.processes
    return Device(
        name="this machine", flops=matmul, matmul_flops=matmul, attention_flops=min(attention, matmul),
        memory_gib=held / GIB, memory_bytes_per_s=streamed, near="gloo", node=config.processes,
        source="measured", date="today",
    )  # fmt: skip


def _attention_flops() -> float:
    """Forward and backward of a full mask."""
    shape = (1, _ATTENTION_HEADS, _ATTENTION_TOKENS, _HEAD_SIZE)
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(3))

    def once() -> None:
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    flops = 14 * _ATTENTION_HEADS * _ATTENTION_TOKENS**2 * _HEAD_SIZE
    return float(flops / min(timed(once, 2)))
