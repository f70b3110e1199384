"""What windows and packed documents cost beside the causal mask, over what their pairs cost beside its pairs.

python benchmarks/masks.py                  # a ring of 2 processes over gloo, one thread each; a markdown table
python benchmarks/masks.py --kernel-only    # the same tiles in one thread, processor time: no waiting, no imbalance

Excess: time(mask) / time(causal) over pairs(mask) / pairs(causal), less one; forward + backward, in turn in one run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from statistics import median

import torch

from ringspun import Balanced, Causal, Contiguous, Documents, Layout, Mask, Window, Zigzag
from ringspun.core import regions
from ringspun.testing.cases import LONG_TAILED
from ringspun.testing.pool import RankPool
from ringspun.testing.timing import Work, paired_ratio, time_on_rank
from ringspun.torch import ContextParallel, Loopback

SEQ_LEN, RANKS, HEADS, HEAD_SIZE = 16384, 2, 4, 64


def even(window: int) -> Layout:
    """Neighbours stay together, so that few rows travel; the first queries see less than a window, and their rank gets
    a quarter of one more of them for it, so that both ranks have the same number of pairs."""
    return Contiguous(speeds=(SEQ_LEN / 2 + window / 4, SEQ_LEN / 2 - window / 4))


CASES: tuple[tuple[Mask, Layout, float], ...] = (
    (Window(4096), even(4096), 0.15),
    (Window(2048), even(2048), 0.15),
    (Window(1024), even(1024), 0.30),
    (Window(512), even(512), 0.45),
    (Causal() & Documents(LONG_TAILED), Balanced(), 0.25),
)
"""Masks, a layout that balances each on two ranks (the busier has at most 3 % more pairs in all), and the bar."""


def in_processes(pool: RankPool, work: Work) -> float:
    """Seconds of one forward + backward of a ring of processes, the slowest rank's; the second call of a plan, as in
    training every call but a batch's first is."""
    return max(times[1] for times in pool.run(time_on_rank, work, 2, timeout_s=600.0))


def in_one_thread(work: Work) -> float:
    """Processor seconds of the same in this thread."""
    context = ContextParallel(_loopback(), layout=work.layout)
    plan = context.plan(work.seq_len, work.mask)
    generator = torch.Generator().manual_seed(0)
    size = (1, work.heads, work.seq_len, work.head_size)
    q, k, v, dout = (torch.randn(size, generator=generator) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    start = time.thread_time()
    out = plan.attention(q, k, v)
    forward = time.thread_time() - start
    start = time.process_time()  # autograd may run backward in a thread of its own
    torch.autograd.grad(out, (q, k, v), dout)
    return forward + time.process_time() - start


@cache
def _loopback() -> Loopback:
    return Loopback(RANKS)


def row(run: Callable[[Work], float], mask: Mask, layout: Layout, bar: float, pairs: int) -> str:
    """One line of the table."""
    causal = Work(RANKS, SEQ_LEN, HEADS, HEADS, HEAD_SIZE, "float32", Causal(), Zigzag())
    work = replace(causal, mask=mask, layout=layout)
    run(work), run(causal)  # warm
    seconds = [(run(work), run(causal)) for _ in range(pairs)]
    ours, theirs = zip(*seconds, strict=True)
    ratio = paired_ratio(ours, theirs)
    of_pairs = _pairs(mask) / _pairs(Causal())
    low, middle, high = (100 * (x / of_pairs - 1) for x in (ratio.low, ratio.median, ratio.high))
    name = str(mask) if len(str(mask)) < 40 else f"causal & {len(LONG_TAILED)} documents"
    return (
        f"| {name} | {layout} | {median(ours):.3f} | {median(theirs):.3f} | {ratio.median:.4f} | {of_pairs:.4f} "
        f"| {middle:.1f} % | {low:.1f} to {high:.1f} % | {100 * bar:.0f} % |"
    )


def _pairs(mask: Mask) -> int:
    return int(regions.count(mask.regions(SEQ_LEN, SEQ_LEN)).sum())


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=11, help="timed pairs of each mask")
    arguments.add_argument("--kernel-only", action="store_true", help="one thread, no ring")
    arguments.add_argument("--only", default="", help="masks whose text holds this")
    options = arguments.parse_args()
    cases = [case for case in CASES if options.only in str(case[0])]
    print("| mask | layout | mask, s | causal, s | time ratio | pair ratio | excess | 90 % interval | bar |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    if options.kernel_only:
        torch.set_num_threads(1)
        for case in cases:
            print(row(in_one_thread, *case, options.pairs), flush=True)
        return
    with RankPool(RANKS) as pool:
        for case in cases:
            print(row(lambda work: in_processes(pool, work), *case, options.pairs), flush=True)


if __name__ == "__main__":
    main()
