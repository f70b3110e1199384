"""Policies of activation checkpointing beside each other, over the same layers on local ranks: what each keeps, sends
and computes, as predicted from schedules and formulas, and as measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ringspun.core.accounting import account, memory
from ringspun.core.geometry import Geometry
from ringspun.core.layout import Zigzag
from ringspun.core.mask import Causal
from ringspun.core.route import Ring
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format, Payload
from ringspun.planner.flops import Checkpointing, attention_factor, linear_factor, linear_flops
from ringspun.planner.memory import TORCH, kept_bytes
from ringspun.planner.models import Model as Sizes
from ringspun.steplog import What
from ringspun.testing.strategies import Block, Model
from ringspun.testing.timing import threads_per_rank
from ringspun.torch import ContextParallel
from ringspun.torch.memory import peak_memory
from ringspun.train.memory.recompute import Policy, apply_checkpointing

ELEMENT = 4
"""Bytes of float32, in which all of it runs."""


@dataclass(frozen=True)
class Variant:
    """A policy, and of how many hops a ring keeps the blocks."""

    policy: Policy
    kept_hops: int = 0

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.policy} {self.kept_hops}" if self.kept_hops else self.policy

    @property
    def planned(self) -> Checkpointing:
        """What the planner calls it."""
        return "attention" if self.policy == "ring_step" else self.policy


def variants(ranks: int) -> tuple[Variant, ...]:
    """All policies, and "ring_step" for every number of hops."""
    steps = (Variant("ring_step", n) for n in range(1, ranks))
    return Variant("none"), Variant("layer"), Variant("attention"), *steps


class Told(NamedTuple):
    """Of one rank's forward + backward of all layers.

    Args:
        kept_bytes: between forward and backward, the output apart. peak_bytes: above weights and input. flops: of
            matrix products, attention's as the schedule counts them. laps: how often keys and values went round.
        sent_bytes: all messages.
    """

    kept_bytes: float
    peak_bytes: float
    flops: float
    laps: float
    sent_bytes: float


def schedules(model: Model, ranks: int, kept_hops: int) -> tuple[Schedule, ...]:
    """Of all ranks."""
    return Geometry(ranks, tuple(range(ranks)), Zigzag(), _route(kept_hops)).schedule(Causal(), model.seq_len)


def predicted(model: Model, layers: int, ranks: int, variant: Variant, ring_rank: int = 0) -> Told:
    """What formulas and schedules say of one rank: the planner's bytes kept and factors of FLOPs, the schedule's
    messages, and at the peak what is kept, one layer whole, and what attention works with."""
    one, wire, sizes = schedules(model, ranks, variant.kept_hops)[ring_rank], wire_of(model), _sizes(model, layers)
    tokens = one.local_tokens
    recipe = TORCH.model_copy(update={"activation_bytes": ELEMENT})
    hops = min(variant.kept_hops, ranks - 1)
    kept = kept_bytes(sizes, tokens, recipe, variant.planned, kept_hops=hops)
    layer = 0.0 if variant.policy == "none" else kept_bytes(_sizes(model, 1), tokens, recipe, "none")
    works = memory(one, wire)
    forward, backward = account(one.forward, wire, backward=False), account(one.backward, wire, backward=True)
    again = 2 if variant.policy == "layer" else 1
    flops = linear_flops(sizes, tokens) * linear_factor(variant.planned)
    flops += forward.flops * attention_factor(variant.planned)
    blocks = again * forward.hops + backward.hops
    sent = again * forward.total_sent_bytes + backward.total_sent_bytes
    peak = kept + layer + works.leased + works.gradients + works.outputs
    return Told(kept, peak, layers * flops, blocks / max(1, ranks - 1), layers * sent)


def wire_of(model: Model) -> Format:
    """Of its attention."""
    return Format(1, model.heads, model.kv_heads, model.head_size, model.head_size, "float32", ELEMENT, ELEMENT)


def on_rank(rank: int, model: Model, layers: int, variant: Variant) -> Told:
    """On every rank of a pool: what is kept, computed and sent."""
    stack = _Stack(model, layers, variant)
    stack.run()  # the pool has its buffers now
    with peak_memory() as forward:
        out = stack.forward()
    kept = forward.left - out.nbytes
    del out
    state, before = stack.context.driver.state, _sent(stack.context)
    first = state.calls
    with peak_memory() as peak:
        stack.run()
    rows = [row for row in state.logs[0].rows if row.call >= first and row.what == What.SEND]
    blocks, sent = sum(row.payload == Payload.KV for row in rows), _sent(stack.context) - before
    hops = layers * max(1, dist.get_world_size() - 1)
    with FlopCounterMode(display=False, custom_mapping=stack.formulas()) as counter:
        stack.run()
    return Told(kept, peak.bytes, counter.get_total_flops(), blocks / hops, sent)


def time_on_rank(rank: int, model: Model, layers: int, variant: Variant) -> float:
    """On every rank of a pool: seconds of a second forward + backward, all starting together."""
    stack = _Stack(model, layers, variant)
    stack.run()
    dist.barrier()
    start = time.perf_counter()
    stack.run()
    return time.perf_counter() - start


class _Stack:
    """Layers, and an input, on one rank."""

    def __init__(self, model: Model, layers: int, variant: Variant) -> None:
        ranks = dist.get_world_size()
        torch.set_num_threads(threads_per_rank(ranks))
        route = _route(variant.kept_hops)
        self.context = ContextParallel(layout=Zigzag(), route=route, backward="keys")
        plan = self.context.plan(model.seq_len, Causal())
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block(model, plan.attention) for _ in range(layers)))
        given = plan if variant.policy == "ring_step" else None
        apply_checkpointing(self.blocks, variant.policy, layers=Block, plan=given)
        self.x = torch.randn(1, plan.partition.local_tokens, model.width).requires_grad_()
        self.schedule, self.wire = plan.schedule, wire_of(model)

    def forward(self) -> Tensor:
        out: Tensor = self.blocks(self.x)
        return out

    def run(self) -> None:
        self.blocks.zero_grad(set_to_none=True)
        self.x.grad = None
        self.forward().square().mean().backward()  # type: ignore[no-untyped-call]

    def formulas(self) -> dict[Any, Any]:
        """FLOPs of the op pair, for `FlopCounterMode`."""
        passes = ((self.schedule.forward, False), (self.schedule.backward, True))
        forward, backward = (account(one, self.wire, backward=b).flops for one, b in passes)
        ops = torch.ops.ringspun
        return {ops.attention: partial(_always, forward), ops.attention_backward: partial(_always, backward)}


def _always(flops: int, *args: Any, **kwargs: Any) -> int:
    return flops


def _route(kept_hops: int) -> Ring:
    return Ring(kept_hops=kept_hops or None)


def _sizes(model: Model, layers: int) -> Sizes:
    """As the planner describes a model; its embedding is nowhere used."""
    return Sizes(
        layers=layers, hidden=model.width, intermediate=model.hidden_size, heads=model.heads, kv_heads=model.kv_heads,
        head_size=model.head_size, vocab=1,
    )  # fmt: skip


def _sent(context: ContextParallel) -> int:
    return sum(context.driver.counts.bytes.values())


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows as Markdown; pairs are predicted / measured."""
    mib = 2.0**20
    lines = [
        "| policy | kept (MiB) | peak (MiB) | extra FLOPs | laps of keys | sent (MiB) | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        says, found = row["predicted"], row["measured"]
        lines.append(
            f"| {row['policy']} | {says['kept_bytes'] / mib:.2f} / {found['kept_bytes'] / mib:.2f} "
            f"| {says['peak_bytes'] / mib:.1f} / {found['peak_bytes'] / mib:.1f} "
            f"| {says['extra_flops']:+.1%} / {found['extra_flops']:+.1%} | {says['laps']:.2f} / {found['laps']:.2f} "
            f"| {says['sent_bytes'] / mib:.3f} / {found['sent_bytes'] / mib:.3f} | {row['seconds']:.3f} |"
        )
    return lines
