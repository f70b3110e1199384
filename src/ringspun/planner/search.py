"""The search: every way to share a model, a length and a batch out over a cluster, the quickest first.

Memory decides what is possible; a bound that no layout or route can beat decides what is worth counting exactly, so
that nothing is left out that could have been better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from ringspun.core.layout import Contiguous, Layout, Striped, Zigzag
from ringspun.core.mask import Causal, Mask
from ringspun.core.partition import LARGEST_RING
from ringspun.core.route import AllGather, Bidirectional, Direct, DoubleRing, Ring, Route
from ringspun.errors import ConfigError
from ringspun.planner.flops import CHECKPOINTING, Checkpointing
from ringspun.planner.hardware import Cluster
from ringspun.planner.memory import TORCH, Longest, Memory, Method, Recipe, Zero, longest, memory
from ringspun.planner.models import Model
from ringspun.planner.split import Split
from ringspun.planner.time import Job, Step, least_seconds, step

TOKENS_PER_STEP = 4 << 20
"""Of all replicas, where nobody says: what papers on long contexts train with."""
ZEROS: tuple[Zero, ...] = (1, 2, 3)
MOST_DIRECT = 64
"""Ranks beyond which every rank talking to every other is not looked at."""
MOST_PRODUCT = 16
"""Ranks beyond which other layouts than zigzag are looked at on a plain ring alone."""
MOST_STRIPED = 1 << 28
"""Tokens beyond which striped shares are not looked at: they are checked one by one."""
LITTLE = 0.005
"""Part of a step lost on a ring up to which no other layout or route is counted."""


@dataclass(frozen=True)
class Question:
    """What to plan for.

    Args:
        seq_len: tokens; None asks for the longest. batch: sequences of a step, all replicas; None: 4 million tokens'
            worth.
        recipe: what a framework keeps. price: of a device and hour. max_tp: largest tensor parallel degree; None: a
            node.
    """

    model: Model
    cluster: Cluster
    seq_len: int | None = None
    batch: int | None = None
    mask: Mask = Causal()  # noqa: RUF009 - frozen
    recipe: Recipe = TORCH
    price: float | None = None
    max_tp: int | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch", "max_tp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1; got {value}.")
        if self.price is not None and not (0 <= self.price < math.inf):
            raise ConfigError(f"price must be a number >= 0; got {self.price}.")

    def sequences(self, seq_len: float) -> int:
        """Sequences of a step."""
        return self.batch or max(1, round(TOKENS_PER_STEP / seq_len))


@dataclass(frozen=True)
class Plan:
    """One way to do it.

    Args:
        job: of one pass of every replica over one sequence each. passes: of a step, gradients summed. memory: of a
            device.
        time: of one pass. longest: what would fit.
    """

    job: Job
    passes: int
    memory: Memory
    time: Step
    longest: Longest

    @property
    def seconds(self) -> float:
        """Of a step, all its passes."""
        once = self.time.items["optimizer"]
        return self.passes * (self.time.total - once) + once

    @property
    def tokens_per_s(self) -> float:
        """Of all devices."""
        return self.passes * self.time.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Part of the peak that the model's own FLOPs are, masked pairs not counted."""
        return self.passes * self.time.flops / self.seconds / self.time.peak

    def cost(self, price: float, tokens: float = 1e9) -> float:
        """Price of so many tokens."""
        return price * self.job.split.devices * tokens / self.tokens_per_s / 3600


def splits(question: Question, batch: int) -> Iterator[Split]:
    """Every split of all devices whose degrees the model's heads and the batch allow."""
    model, count = question.model, question.cluster.count
    tps = [t for t in _divisors(count) if t <= min(question.max_tp or question.cluster.node, question.cluster.node)]
    for tp in tps:
        if model.heads % tp:
            continue
        for ulysses in _divisors(count // tp):
            if model.heads % (tp * ulysses):
                continue
            for ring in _divisors(count // tp // ulysses):
                if ring > LARGEST_RING:
                    break
                dp = count // tp // ulysses // ring
                if batch % dp == 0:
                    yield Split(ring=ring, ulysses=ulysses, tp=tp, dp=dp)


def search(question: Question, *, keep: int = 5, only: Callable[[Split], bool] | None = None) -> list[Plan]:
    """The quickest plans that fit, one for each split, best first; of the longest length if none is given.

    Args:
        keep: how many. only: of these splits alone.
    Raises:
        ConfigError: nothing fits, or no split goes; says what would.
    """
    if question.seq_len is None:
        return _longest_plans(question, keep, only)
    batch = question.sequences(question.seq_len)
    jobs = [
        job
        for job in _jobs(question, question.seq_len, batch)
        if (only is None or only(job.split)) and memory_of(question, job).fits
    ]
    if not jobs:
        raise ConfigError(_nothing_fits(question, batch, only))
    bounded = sorted(((_passes(question, job) * least_seconds(job), i) for i, job in enumerate(jobs)))
    best: dict[Split, Plan] = {}
    for bound, i in bounded:
        job = jobs[i]
        known = best.get(job.split)
        worst = sorted(plan.seconds for plan in best.values())[keep - 1] if len(best) >= keep else math.inf
        if bound >= worst:
            break
        if known is not None and known.seconds <= bound:
            continue
        plan = _quickest(question, job)
        if known is None or plan.seconds < known.seconds:
            best[job.split] = plan
    return sorted(best.values(), key=lambda plan: plan.seconds)[:keep]


def _jobs(question: Question, seq_len: int, batch: int) -> Iterator[Job]:
    for split, checkpointing, zero in product(splits(question, batch), CHECKPOINTING, ZEROS):
        if split.slices <= seq_len:
            yield Job(
                question.model, question.cluster, split, seq_len, mask=question.mask, checkpointing=checkpointing,
                zero=zero,
            )  # fmt: skip


def _passes(question: Question, job: Job) -> int:
    """At least one: the longest length takes so many replicas that a step's usual tokens may be fewer."""
    return max(1, question.sequences(job.seq_len) // job.split.dp)


def _method(split: Split) -> Method:
    return "ring" if split.ring > 1 else "memory_efficient"


def memory_of(question: Question, job: Job) -> Memory:
    """Memory of one device."""
    return memory(
        job.model, job.tokens, job.split, memory_bytes=job.cluster.device.memory_bytes, recipe=question.recipe,
        method=_method(job.split), checkpointing=job.checkpointing, zero=job.zero,
    )  # fmt: skip


def _longest(question: Question, split: Split, checkpointing: Checkpointing, zero: Zero) -> Longest:
    return longest(
        question.model, split, memory_bytes=question.cluster.device.memory_bytes, recipe=question.recipe,
        method=_method(split), checkpointing=checkpointing, zero=zero,
    )  # fmt: skip


def _quickest(question: Question, job: Job) -> Plan:
    """The job with the layout and route that take least, exactly counted."""
    passes = _passes(question, job)
    plan = Plan(
        job, passes, memory_of(question, job), step(job), _longest(question, job.split, job.checkpointing, job.zero)
    )
    for layout, route in ways(job):
        if plan.time.lost_on_ring <= LITTLE * plan.time.total:
            break
        tried = replace(job, layout=layout, route=route)
        other = replace(plan, job=tried, time=step(tried))
        plan = min(plan, other, key=lambda one: one.seconds)
    return plan


def ways(job: Job) -> Sequence[tuple[Layout, Route]]:
    """Layouts and routes worth counting, likeliest first."""
    ring, place = job.split.ring, job.place
    if ring == 1:
        return [(Contiguous(), Ring())]
    routes: list[Route] = [Ring()]
    if 1 < place.node < ring and ring % place.node == 0:
        routes.insert(0, DoubleRing(place.node))
    if 2 < ring <= MOST_DIRECT:
        routes.append(Direct())
        if place.apart:
            routes.append(Bidirectional())
    if 2 < ring <= MOST_PRODUCT:
        routes.append(AllGather())
    layouts: list[Layout] = [Zigzag(), Contiguous()]
    if (
        ring <= MOST_DIRECT and job.seq_len <= MOST_STRIPED
    ):  # on more ranks its tiles are many, and its balance is zigzag's
        layouts.append(Striped())
    if ring <= MOST_PRODUCT:
        return [(layout, route) for layout in layouts for route in routes]
    return [(Zigzag(), route) for route in routes] + [(layout, Ring()) for layout in layouts[1:]]


def _longest_plans(question: Question, keep: int, only: Callable[[Split], bool] | None) -> list[Plan]:
    found: dict[Split, tuple[float, Checkpointing, Zero]] = {}
    for split in splits(question, question.batch or question.cluster.count):
        if only is not None and not only(split):
            continue
        fits = _longest(question, split, "layer", 3)
        found[split] = (fits.tokens, "layer", 3)
    ranked = sorted(found, key=lambda split: -found[split][0])[:keep]
    if not ranked or found[ranked[0]][0] < 1:
        raise ConfigError(_nothing_fits(question, 1, only))
    plans = []
    for split in ranked:
        tokens, checkpointing, zero = found[split]
        seq_len = int(tokens)
        if seq_len < split.slices:
            continue
        job = Job(
            question.model, question.cluster, split, seq_len, mask=question.mask, checkpointing=checkpointing, zero=zero
        )
        plans.append(_quickest(question, job))
    return plans


def _nothing_fits(question: Question, batch: int, only: Callable[[Split], bool] | None) -> str:
    count, name = question.cluster.count, question.cluster.device.name
    asked = [split for split in splits(question, batch) if only is None or only(split)]
    if not asked:
        return (
            f"devices must go into heads, a batch and a ring of at most {LARGEST_RING:,}; got {count:,} devices, "
            f"{question.model.heads} heads, batch = {batch}. Give another number."
        )
    fewest = min(split.slices for split in asked)
    if question.seq_len is not None and question.seq_len < fewest:
        return (
            f"seq_len must give each device a token; got {question.seq_len:,} tokens for {fewest:,} devices, with "
            f"batch = {batch}. Give more sequences, or fewer devices."
        )
    lengths = [(_longest(question, split, "layer", 3).tokens, split) for split in asked]
    tokens, split = max(lengths, key=lambda one: one[0], default=(0.0, Split()))
    if tokens < 1:
        return (
            f"model must fit {count} x {name}; got {question.model.name} of {question.model.parameters / 1e9:.1f}B "
            "parameters, whose state alone does not. Give more devices, or offload."
        )
    return (
        f"seq_len must fit {count} x {name}; got {question.seq_len:,} tokens, {batch} sequences a step. At most about "
        f"{tokens:,.0f} do ({split}). Give more devices, or fewer tokens."
    )


@cache
def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
