"""Campaigns: the same attention call under many faults, and what came of each.

A trial makes a call, forward and backward, with a fault. What it returns must be bit for bit what the call returns in
peace, or it must raise.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch import distributed as dist

from ringspun.core.layout import Contiguous, Layout, Striped, Zigzag
from ringspun.core.mask import Anchors, Causal, Documents, Full, Mask, Window
from ringspun.testing.cases import Case, Inputs, Shape, inputs
from ringspun.testing.faults import KINDS, Fault, Faulty, Stale, random_fault
from ringspun.testing.orders import Ordered
from ringspun.testing.pool import RankLost, RankPool
from ringspun.testing.torch import plan_of
from ringspun.torch import ContextParallel, Loopback, Plan
from ringspun.torch.drivers import Gloo

RIGHT, WRONG, DIED, HUNG = "right", "wrong", "died", "hung"
GRACE_S = 2.0
"""How much longer than its timeout a rank may take to notice (seconds)."""


@dataclass(frozen=True)
class Trial:
    """A case and what happens to it.

    Args:
        order: seed of the order of events, and of what the fault leaves open. timeout_s: between processes.
    """

    case: Case
    fault: Fault
    order: int
    checks: str = "checksum"
    timeout_s: float = 2.0


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Args:
        struck: whether the fault met its message. results: per process: "right" (bit for bit as in peace), "wrong",
            the name of the error that it raised, "died" or "hung". messages: of those errors.
        first_s, last_s: from the strike (of a process that is killed: from the call) to the first and last error.
        longest_s: the longest time that a process spent in the call.
    """

    struck: bool
    results: tuple[str, ...]
    messages: tuple[str, ...] = ()
    first_s: float = 0.0
    last_s: float = 0.0
    longest_s: float = 0.0

    @property
    def result(self) -> str:
        """The worst of all processes': wrong, hung, died, an error, right."""
        for one in (WRONG, HUNG, DIED):
            if one in self.results:
                return one
        return next((r for r in self.results if r != RIGHT), RIGHT)

    @property
    def detected(self) -> bool:
        """Whether some process said so."""
        return self.result not in (RIGHT, WRONG, HUNG)


LAYOUTS: tuple[Layout, ...] = (Contiguous(), Zigzag(), Striped())
SHAPE = Shape(batch=1, heads=2, kv_heads=1, head_size=16, value_size=8)


def masks(seq_len: int) -> tuple[Mask, ...]:
    """Masks of which some let every block go round, and some only a few."""
    third = max(1, seq_len // 3)
    documents = Documents([third, seq_len - third])
    return Full(), Causal(), Causal() & Window(third + 1), Causal() & documents, Causal() & (Window(2) | Anchors(1))


def trials(count: int, *, seed: int, kinds: Sequence[type[Fault]] = KINDS, ranks: Sequence[int]) -> Iterator[Trial]:
    """`count` random trials; kinds of faults and sizes of rings in turn, those of one case one after the other.

    Args:
        seed: the same seed, the same trials. kinds: of faults. ranks: sizes of rings.
    """
    draw = random.Random(seed)
    for number in range(count):
        turn, kind = divmod(number, len(kinds))
        if kind == 0:
            case, messages = _drawn(draw, ranks[turn % len(ranks)])
        fault = random_fault(draw.randrange(2**31), messages, kinds=[kinds[kind]])
        yield Trial(case, fault, order=number)


def _drawn(draw: random.Random, ranks: int) -> tuple[Case, Counter[tuple[int, int]]]:
    """A case that sends messages, and how many on which link."""
    while True:
        seq_len = draw.randint(ranks, 4 * ranks)
        mask, layout = draw.choice(masks(seq_len)), draw.choice(LAYOUTS)
        case = Case(ranks, seq_len, mask, layout, "float32", SHAPE, seed=draw.randrange(2**31))
        ring = Loopback(ranks)
        _call(plan_of(case, ContextParallel(ring, layout=layout)), inputs(case))
        if ring.counts.messages:
            return case, ring.counts.messages


@lru_cache(maxsize=1)
def _in_peace(case: Case) -> list[Tensor]:
    return _call(plan_of(case, ContextParallel(Loopback(case.ranks), layout=case.layout)), inputs(case))


def on_loopback(many: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
    """Each trial in this thread."""
    for trial in many:
        ring = Faulty(Ordered(trial.case.ranks, seed=trial.order), seed=trial.order)
        right = None if isinstance(trial.fault, Stale) else _in_peace(trial.case)  # those need buffers of earlier calls
        yield trial, _told([_attempt(trial, ring, right)])


def on_gloo(many: Iterable[Trial], *, pool_s: float = 60.0) -> Iterator[tuple[Trial, Outcome]]:
    """Each trial in a fresh group of processes, which serve until one of them is lost; trials of one ring size should
    follow each other.

    Args:
        pool_s: after which time they are replaced in any case (seconds): groups that broke leave threads behind.
    """
    pool, born = None, 0.0
    try:
        for trial in many:
            if pool is None or pool.size != trial.case.ranks or time.monotonic() - born > pool_s:
                if pool is not None:
                    pool.close(patience_s=0.0)
                pool, born = RankPool(trial.case.ranks, preload=(*PRELOAD, __name__)), time.monotonic()
            yield trial, _between_processes(pool, trial)
    finally:
        if pool is not None:
            pool.close(patience_s=0.0)


PRELOAD = ("ringspun.torch", "torch._dynamo")


def _between_processes(pool: RankPool, trial: Trial) -> Outcome:
    longest = 2 * (trial.timeout_s + GRACE_S) + 10.0  # making the group, the call in peace, and the one that counts
    try:
        return _told(pool.run(_on_rank, trial, timeout_s=longest))
    except RankLost as lost:
        told = [_Told(True, DIED if "died with" in str(lost) else HUNG, str(lost)) for _ in lost.ranks]
        return _told([*told, *(x for x in lost.outcomes.values() if isinstance(x, _Told))])


@dataclass(frozen=True)
class _Told:
    """What one process says of a trial; times are `time.monotonic()`, which all processes of a machine share."""

    struck: bool
    result: str
    message: str = ""
    struck_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0


def _told(all_ranks: list[_Told]) -> Outcome:
    errors = [x for x in all_ranks if x.ended_s and x.result not in (RIGHT, WRONG)]
    since = max((x.struck_s for x in all_ranks), default=0.0) or max((x.began_s for x in all_ranks), default=0.0)
    after = sorted(max(0.0, x.ended_s - since) for x in errors) or [0.0]
    return Outcome(
        any(x.struck for x in all_ranks),
        tuple(x.result for x in all_ranks),
        tuple(x.message for x in all_ranks if x.message),
        after[0],
        after[-1],
        max(x.ended_s - x.began_s for x in all_ranks),
    )


def _on_rank(rank: int, trial: Trial) -> _Told:
    group = dist.new_group(list(range(trial.case.ranks)))
    return _attempt(trial, Faulty(Gloo(group, timeout_s=trial.timeout_s), seed=trial.order))


def _attempt(trial: Trial, ring: Faulty, right: list[Tensor] | None = None) -> _Told:
    """The call with its fault. `right`: what it returns in peace; default: tried out first."""
    context = ContextParallel(ring, layout=trial.case.layout, checks=trial.checks)
    plan, given = plan_of(trial.case, context), inputs(trial.case)
    right = _call(plan, given) if right is None else right
    ring.arm(trial.fault)
    began = time.monotonic()
    try:
        found = _call(plan, given)
        result, message = (RIGHT if all(map(torch.equal, found, right)) else WRONG), ""
    except Exception as problem:
        result, message = type(problem).__name__, str(problem)
    struck = ring.injected[0].at_s if ring.injected else 0.0
    return _Told(bool(ring.injected), result, message, struck, began, time.monotonic())


def _call(plan: Plan, given: Inputs) -> list[Tensor]:
    """Forward and backward of this process's rows: out, dq, dk, dv."""
    q, k, v, dout = (
        plan.queries.shard(torch.from_numpy(x).float(), dim=2) for x in (given.q, given.k, given.v, given.dout)
    )
    ends = [x.requires_grad_() for x in (q, k, v)]
    out = plan.attention(*ends)
    return [out.detach(), *torch.autograd.grad(out, ends, dout)]
