"""What moving messages between processes costs: gloo beside the same schedule with free transport.

python benchmarks/transport.py             # a markdown table

Free transport is a loopback: all ranks in one thread, messages copied from buffer to buffer. Every process of the ring
runs the whole loopback at the same time, so that as many cores are busy, and takes as long for it as for R ranks; its
time over R is compared. Forward + backward, in turn in one run.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
from torch import distributed as dist

from ringspun import Causal, Zigzag
from ringspun.testing.pool import RankPool
from ringspun.testing.timing import paired_ratio, second_run, threads_per_rank
from ringspun.torch import ContextParallel, Loopback

HEADS, HEAD_SIZE = 4, 64


def timed(ring_rank: int, tokens: int, dtype: str, free: bool) -> float:
    """Seconds of one forward + backward of this rank, all starting together."""
    ranks = dist.get_world_size()
    torch.set_num_threads(threads_per_rank(ranks))
    plan = ContextParallel(Loopback(ranks) if free else None, layout=Zigzag()).plan(ranks * tokens, Causal())
    return second_run(plan, HEADS, HEAD_SIZE, dtype) / (ranks if free else 1)


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser()
    options.add_argument("--tokens", type=int, default=4096, help="of each rank")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--pairs", type=int, default=15)
    asked = options.parse_args()
    print("| dtype | gloo, s | free transport, s | ratio | 90 % interval |\n|---|---|---|---|---|")
    with RankPool(asked.ranks) as pool:
        for dtype in ("float32", "bfloat16"):
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(asked.pairs):
                for free, found in seconds.items():
                    found.append(max(pool.run(timed, asked.tokens, dtype, free, timeout_s=300)))
            ratio = paired_ratio(seconds[False], seconds[True])
            times = f"{median(seconds[False]):.3f} | {median(seconds[True]):.3f}"
            print(f"| {dtype} | {times} | {ratio.median:.3f} | {ratio.low:.3f} to {ratio.high:.3f} |")


if __name__ == "__main__":
    main()
