"""Soaking: a ring that computes another plan in every call, is compared with dense attention each time, and must
neither drift from it nor grow."""

from __future__ import annotations

import ctypes
import gc
import math
import random
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import distributed as dist

from ringspun.core.layout import Balanced, Contiguous, DocumentZigzag, Layout, Striped, Zigzag
from ringspun.core.mask import Causal, documents_of
from ringspun.testing.cases import Arguments, Case, Shape, all_masks, inputs, reference
from ringspun.testing.comparison import Errors, errors, judge, rms
from ringspun.testing.torch import run_ring
from ringspun.testing.yardstick import dense, rounded
from ringspun.torch import ContextParallel, Loopback, Partition, Plan
from ringspun.torch.ops import KEPT_PER_CONTEXT

LAYOUTS: tuple[Layout, ...] = (Contiguous(), Zigzag(), Striped(), DocumentZigzag(), Balanced())
SEEDS, CALIBRATING = 4, 16
"""Seeds of inputs: whose errors are averaged in bfloat16; of the dense attention that calibrates bars. More than the
suite takes: among thousands of cases the least likely happens."""


@dataclass(frozen=True)
class Stretch:
    """Some time of a soak, on one rank.

    Args:
        seconds: since the start, at its end. calls: attention calls so far, forward and backward. plans: so far.
        worst: largest error over its bar that this rank has seen so far. resident: bytes of this process at its end.
    """

    seconds: float
    calls: int
    plans: int
    worst: float
    resident: int


LENGTHS = tuple(range(16, 161, 12))
"""Of queries and keys: as many as let the caches of a long job, which hold the last 1,024 plans, fill in minutes."""


def random_case(draw: random.Random, ranks: int) -> Case:
    """Any mask, layout, lengths, dtype and arguments together."""
    kv_heads, dtype = draw.choice((1, 2, 3)), draw.choice(("float64", "float32", "bfloat16"))
    size = draw.choice((4, 8, 16))
    shape = Shape(draw.choice((1, 2, 3)), kv_heads * draw.choice((1, 2)), kv_heads, size, draw.choice((size, 5)))
    # in bfloat16 no gradients of a few numbers each: four of them are no sample, and there bars are of means
    narrow = dtype == "bfloat16"
    bias = draw.choice(("", "", "function") if narrow else ("", "", "alibi", "table", "function"))
    sinks = not narrow and draw.random() < 0.3
    arguments = Arguments(draw.choice((None, None, 0.3)), draw.choice((None, None, 3.0)), sinks, bias)
    seq_len, layout = draw.choice(LENGTHS), draw.choice(LAYOUTS)
    key_len = draw.choice((seq_len, seq_len, draw.choice(LENGTHS)))
    start = 0 if layout.reads_documents else max(0, key_len - seq_len)
    fit = [m for m in all_masks(key_len) if key_len == seq_len or not documents_of(m)]  # they pair equals
    one = draw.choice(fit)
    per_row = draw.random() < 0.2 and not layout.reads_documents
    mask = tuple(draw.choice((one, Causal())) for _ in range(shape.batch)) if per_row else one
    case = Case(ranks, seq_len, mask, layout, dtype, shape, draw.randrange(2**31), arguments)
    return case if key_len == seq_len else replace(case, key_len=key_len, query_start=start)


def soak(rank: int, seconds: float, stretch_s: float, seed: int) -> list[Stretch]:
    """What each rank of a pool does: random cases over the default group for so long. The ranks judge in turn.

    Args:
        seconds: about how long. stretch_s: how often memory is looked at (seconds). seed: of the cases.
    Raises:
        ValueError: a result out of its bar.
    """
    draw, start, told = random.Random(seed), time.monotonic(), []
    ranks = dist.get_world_size()
    context = ContextParallel(dist.group.WORLD, checks="checksum")
    worst, calls, plans = 0.0, 0, 0
    for end in _ends(seconds, stretch_s):
        while _all_go_on(time.monotonic() - start < end):
            case = random_case(draw, ranks)
            cases = [replace(case, seed=case.seed + n) for n in range(SEEDS if case.dtype == "bfloat16" else 1)]
            found = [run_ring(c, rounded(c, inputs(c)), context, plan=_plan(case, context)) for c in cases]
            calls, plans = calls + 2 * len(cases), plans + 1
            if plans % ranks == rank:
                worst = max(worst, _over_bar(cases, found))
        told.append(Stretch(time.monotonic() - start, calls, plans, worst, resident()))
        if rank == 0:
            print(f"{told[-1]}", file=sys.stderr, flush=True)
    return told


def _plan(case: Case, context: ContextParallel) -> Plan:
    """By the case's layout: one ring serves them all."""
    geometry = replace(context.geometry, layout=case.layout)
    sides = geometry.sides(
        case.seq_len, None, mask=case.mask, key_len=case.key_len, key_layout=None, query_start=case.query_start
    )
    keys = None if sides.same else Partition(context, sides.keys)
    return Partition(context, sides.queries).plan(case.mask, keys=keys)


def _ends(seconds: float, stretch_s: float) -> Iterator[float]:
    count = max(1, round(seconds / stretch_s))
    return (seconds * (n + 1) / count for n in range(count))


def _all_go_on(mine: bool) -> bool:
    """What the first rank thinks: clocks differ."""
    word = torch.tensor([int(mine)])
    dist.broadcast(word, 0)
    return bool(word.item())


def _over_bar(cases: list[Case], found: list[dict[str, np.ndarray]]) -> float:
    """The largest error of a result over its bar: that of the conformance suite; or, where a case's own numbers are
    hard (a gradient of one number, say, whose error depends on the seed more than on anything), twice the error of one
    rank for the same numbers."""
    case, tensors = cases[0], tuple(found[0])
    error = [errors(x, reference(c, rounded(c, inputs(c))), tensors) for x, c in zip(found, cases, strict=True)]
    bases = [] if case.dtype == "float64" else [replace(case, seed=case.seed + n) for n in range(CALIBRATING)]
    right, bars = judge(case.dtype, error, [_dense_errors(c, tensors) for c in bases])
    worst = rms(error) if case.dtype == "bfloat16" else {n: max(e.worst[n] for e in error) for n in tensors}
    if not right and case.dtype != "float64":
        alone = [_errors_alone(c, tensors) for c in cases]
        mine = rms(alone) if case.dtype == "bfloat16" else {n: max(e.worst[n] for e in alone) for n in tensors}
        bars = {n: max(bars[n], 2 * mine[n] + 16 * torch.finfo(getattr(torch, case.dtype)).eps) for n in tensors}
        right = all(worst[n] <= bars[n] for n in tensors)
    if not right:
        raise ValueError(f"results must be within {bars}; got {worst} in {case}.")
    return max(worst[n] / bars[n] for n in tensors)


def _errors_alone(case: Case, tensors: tuple[str, ...]) -> Errors:
    """Of a ring of one."""
    given = rounded(case, inputs(case))
    found = run_ring(case, given, ContextParallel(Loopback(1), layout=case.layout))
    return errors(found, reference(case, given), tensors)


def _dense_errors(case: Case, tensors: tuple[str, ...]) -> Errors:
    given = rounded(case, inputs(case))
    return errors(dense(case, given), reference(case, given), tensors)


def resident() -> int:
    """Bytes of this process in memory, when what is free has been given back where the system can (Linux)."""
    gc.collect()
    status = Path("/proc/self/statm")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(status.read_text().split()[1]) * resource.getpagesize()


def growth(told: list[Stretch], full: int = KEPT_PER_CONTEXT) -> float:
    """By what share memory grew once a context's last plans were all kept: the median of the later half of what is left
    of the soak over that of the earlier, less one; NaN where it was too short to say.

    Args:
        told: of one rank. full: plans from which on every new one drives an old one out.
    """
    after = [s.resident for s in told if s.plans > full]
    half = len(after) // 2
    return median(after[-half:]) / median(after[:half]) - 1 if half else math.nan
