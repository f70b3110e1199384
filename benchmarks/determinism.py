"""What the same bits on every ring cost: deterministic="across_rings" over the default, forward + backward, in pairs.

python benchmarks/determinism.py                  # rings of 2 and 4 processes over gloo, one thread each
python benchmarks/determinism.py --one-thread     # all ranks in one thread, processor time: no waiting, no imbalance
python benchmarks/determinism.py --operands       # whether torch's op looks at anything but its operands' values
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ringspun import Causal, Contiguous, Layout, Mask, Window, Zigzag
from ringspun.testing.pool import RankPool
from ringspun.testing.timing import Ratio, paired_ratio
from ringspun.torch import ContextParallel, Loopback, Plan

SEQ_LEN, HEADS, HEAD_SIZE = 16384, 4, 64
Case = tuple[int, Mask, Layout]
CASES: tuple[Case, ...] = (
    (2, Causal(), Zigzag()),
    (4, Causal(), Zigzag()),
    (2, Causal(), Contiguous()),
    (2, Causal() & Window(2048), Contiguous()),
)
WAYS = ("across_rings", None)


def tensors(plan: Plan, seed: int) -> list[Tensor]:
    """q, k, v and the gradient of out, of the rows that this process holds."""
    generator = torch.Generator().manual_seed(seed)
    size = (1, HEADS, plan.queries.local_tokens, HEAD_SIZE)
    return [torch.randn(size, generator=generator).requires_grad_(i < 3) for i in range(4)]


def once(plan: Plan, x: list[Tensor], clock: Callable[[], float]) -> float:
    """Seconds of one forward + backward."""
    start = clock()
    torch.autograd.grad(plan.attention(*x[:3]), x[:3], x[3])
    return clock() - start


def on_rank(ring_rank: int, way: Any, mask: Mask, layout: Layout) -> float:
    """On every rank of a pool: seconds of a plan's second call."""
    torch.set_num_threads(1)
    plan = ContextParallel(layout=layout, deterministic=way).plan(SEQ_LEN, mask)
    x = tensors(plan, ring_rank)
    return [once(plan, x, time.perf_counter) for _ in range(2)][1]


@cache
def plan_in_one_thread(ranks: int, mask: Mask, layout: Layout, way: Any) -> tuple[Plan, list[Tensor]]:
    plan = ContextParallel(Loopback(ranks), layout=layout, deterministic=way).plan(SEQ_LEN, mask)
    return plan, tensors(plan, 0)


def in_one_thread(case: Case, way: Any) -> float:
    """Processor seconds of all ranks."""
    return once(*plan_in_one_thread(*case, way), time.process_time)


def in_processes(pool: RankPool, case: Case, way: Any) -> float:
    """Seconds of the slowest rank."""
    return max(pool.run(on_rank, way, *case[1:], timeout_s=600.0))


def row(run: Callable[[Any], float], case: Case, pairs: int) -> str:
    """One line of the table."""
    for way in WAYS:
        run(way)  # warm
    ours, theirs = zip(*((run(WAYS[0]), run(WAYS[1])) for _ in range(pairs)), strict=True)
    ratio: Ratio = paired_ratio(ours, theirs)
    ranks, mask, layout = case
    return (
        f"| {ranks} | {mask} | {layout} | {median(ours):.2f} | {median(theirs):.2f} | {ratio.median:.2f} | "
        f"{ratio.low:.2f} to {ratio.high:.2f} |"
    )


def table(one_thread: bool, pairs: int) -> None:
    """Print it."""
    print("| ranks | mask | layout | across rings, s | default, s | ratio | 90 % interval |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for case in CASES:
        if one_thread:
            print(row(partial(in_one_thread, case), case, pairs), flush=True)
            continue
        with RankPool(case[0]) as pool:
            print(row(partial(in_processes, pool, case), case, pairs), flush=True)


def operands() -> None:
    """Print whether the same values elsewhere in memory, or more threads, give other bits."""
    op, back = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )

    def results(x: list[Tensor]) -> list[Tensor]:
        out, lse = op(*x[:3], scale=0.125)
        return [out, lse, *back(x[3], *x[:3], out, lse.contiguous(), 0.0, False, scale=0.125)]

    def moved(x: Tensor, by: int) -> Tensor:
        """A copy `by` elements off where it would lie."""
        room = torch.empty(x.numel() + by, dtype=x.dtype)
        return room[by:].view(x.shape).copy_(x)

    def among_others(x: Tensor) -> Tensor:
        """A copy whose rows are not neighbours: those of one head after those of all heads."""
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    for dtype in (torch.float32, torch.bfloat16):
        for rows, keys in ((512, 512), (137, 512), (64, 64), (512, 3)):
            generator = torch.Generator().manual_seed(rows)
            q, dout = (torch.randn(1, HEADS, rows, HEAD_SIZE, generator=generator).to(dtype) for _ in range(2))
            k, v = (torch.randn(1, HEADS, keys, HEAD_SIZE, generator=generator).to(dtype) for _ in range(2))
            x = [q, k, v, dout]
            torch.set_num_threads(1)
            first = results(x)
            found = {f"{by} elements off": results([moved(t, by) for t in x]) for by in (1, 2, 4, 8, 16)}
            found["heads inside rows"] = results([among_others(t) for t in x])
            for threads in (2, 3, 4):
                torch.set_num_threads(threads)
                found[f"{threads} threads"] = results(x)
            odd = [n for n, r in found.items() if not all(torch.equal(a, b) for a, b in zip(first, r, strict=True))]
            print(
                f"{dtype}, {rows} x {keys}: {'other bits: ' + ', '.join(odd) if odd else 'the same bits'}", flush=True
            )


def main() -> None:
    """Print the table, or what the op looks at."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=7, help="timed pairs of each case")
    arguments.add_argument("--one-thread", action="store_true", help="all ranks in one thread")
    arguments.add_argument("--operands", action="store_true", help="look at the op alone")
    options = arguments.parse_args()
    if options.operands:
        operands()
        return
    torch.set_num_threads(1)
    table(options.one_thread, options.pairs)


if __name__ == "__main__":
    main()
