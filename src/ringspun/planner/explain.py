"""Why a plan is the best, what would change that, and when not to ring at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ringspun.core.mask import Causal, Full, Mask
from ringspun.errors import ConfigError
from ringspun.planner.hardware import GIB
from ringspun.planner.memory import TRUST
from ringspun.planner.overlap import NEVER, Hop, hop, least_slice
from ringspun.planner.ring import head_pairs, schedules
from ringspun.planner.search import Plan, Question, search
from ringspun.planner.split import Split
from ringspun.planner.time import Job

MUCH = 1.1
"""Times more tokens per second from which another way is better in any case."""
HOLLOW = 0.25
"""Part of a step lost on a ring from which it is told that the ring is there for its memory alone."""


@dataclass(frozen=True)
class Verdict:
    """Whether to ring.

    Args:
        ring: whether. reasons: why. instead: what to do where not. changes: what would change the choice.
    """

    ring: bool
    reasons: tuple[str, ...]
    instead: str
    changes: tuple[str, ...]


def verdict(question: Question, plans: list[Plan]) -> Verdict:
    """What to do about `search`'s plans for a question."""
    best = plans[0]
    question = replace(question, seq_len=best.job.seq_len)
    if best.job.split.ring == 1:
        return _without(question, best)
    alone = _best(question, lambda split: split.ring == 1)
    spread = _spread(question) or alone
    reasons, changes = _hops(best), (*_slices(best), *_lengths(best))
    if spread is not None and spread.tokens_per_s > MUCH * best.tokens_per_s:
        sequences = spread.passes * spread.job.split.dp
        return Verdict(
            False,
            (*reasons, f"a sequence fits without a ring, and {spread.job.split} makes "
             f"{spread.tokens_per_s / best.tokens_per_s:.1f} times as many tokens per second"),
            f"{spread.job.split}, {sequences} sequences a step",
            changes,
        )  # fmt: skip
    if alone is not None:
        reasons += (
            f"without a ring, {alone.job.split}, a step takes {alone.seconds / best.seconds:.2f} times as long",
        )
    else:
        reasons += (f"without a ring {best.job.seq_len:,} tokens do not fit",)
    if best.time.lost_on_ring > HOLLOW * best.time.total:
        reasons += ("much of the step is lost on the ring: it is there for its memory alone",)
    return Verdict(True, reasons, "", changes)


def _without(question: Question, best: Plan) -> Verdict:
    """The best plan has no ring."""
    ring = _best(question, lambda split: split.ring > 1)
    reasons = [f"a sequence of {best.job.seq_len:,} tokens fits without one"]
    changes = _lengths(best)
    if ring is not None:
        slower = ring.seconds / best.seconds - 1
        reasons += [f"the best with a ring, {ring.job.split}, takes {slower:.1%} longer", *_hops(ring)]
        changes += _slices(ring)
    sequences = best.passes * best.job.split.dp
    return Verdict(False, tuple(reasons), f"{best.job.split}, {sequences} sequences a step", changes)


def _best(question: Question, only: Callable[[Split], bool]) -> Plan | None:
    try:
        return next(iter(search(question, keep=1, only=only)), None)
    except ConfigError:
        return None


def _spread(question: Question) -> Plan | None:
    """The quickest without a ring, if a step had a sequence for every device."""
    if question.seq_len is None or question.sequences(question.seq_len) >= question.cluster.count:
        return None
    return _best(replace(question, batch=question.cluster.count), lambda split: split.ring == 1)


def slowest_hop(plan: Plan, *, backward: bool = False) -> Hop:
    """A hop of the plan's ring over its slowest link, and a step of the layers that see most."""
    job = plan.job
    mask = job.masks()[0][0]
    link = job.place.far if job.split.ring > job.place.node else job.place.near
    shared = job.split.tp * job.split.ulysses
    told = hop(
        job.cluster.device, link, job.model, math.ceil(job.seq_len / job.split.ring), batch=job.batch,
        shared_heads=shared, causal=mask == Causal(), backward=backward,
    )  # fmt: skip
    return told if mask in (Causal(), Full()) else replace(told, compute=_step_seconds(job, mask, backward=backward))


def _step_seconds(job: Job, mask: Mask, *, backward: bool) -> float:
    """Of the steps that compute at all, their mean: a mask may leave most of a block out."""
    ranks = schedules(job.split.ring, job.layout, job.route, mask, job.seq_len)
    passes = [s.backward if backward else s.forward for s in ranks]
    steps = np.concatenate([job.work.seconds(head_pairs(p, job.work.wire), backward=backward) for p in passes])
    return float(steps[steps > 0].mean()) if (steps > 0).any() else 0.0


def _hops(plan: Plan) -> tuple[str, ...]:
    told, job = slowest_hop(plan), plan.job
    where = "between nodes" if job.split.ring > job.place.node else "inside a node"
    lost = max(0.0, plan.time.lost_on_ring) / plan.time.total  # a difference of sums
    return (
        f"a hop {where} takes {1e3 * told.transfer:.2f} ms, the compute that hides it {1e3 * told.compute:.2f} ms; "
        f"{lost:.1%} of a step is lost on the ring",
    )


def _slices(plan: Plan) -> tuple[str, ...]:
    job = plan.job
    link = job.place.far if job.split.ring > job.place.node else job.place.near
    shared = job.split.tp * job.split.ulysses
    least = least_slice(job.cluster.device, link, job.model, batch=job.batch, shared_heads=shared)
    told = "never" if least == NEVER else f"from slices of {least:,.0f} tokens on"
    return (
        f"hops of {job.split} hide {told} under a causal mask; slices are {job.seq_len / job.split.ring:,.0f} tokens",
    )


def _lengths(plan: Plan) -> tuple[str, ...]:
    found = plan.longest
    return (
        f"{plan.job.split} holds about {found.tokens:,.0f} tokens ({found.low:,.0f} to {found.high:,.0f}: memory is "
        f"known to a factor of {TRUST}), then {found.limit} ends it; {plan.memory.total / GIB:.1f} GiB of "
        f"{plan.memory.capacity / GIB:.1f} are taken",
    )
