"""Blocks smaller than the shard: what they gain on a ring, by how slow its links are beside compute.

python benchmarks/pieces.py                 # a markdown table; compute is a kernel that sleeps
python benchmarks/pieces.py --kernel aten_cpu --ranks 2
python benchmarks/pieces.py --virtual       # on clocks of its own (`ringspun.testing.virtual_links`), "auto" too

Every rank has a link to the next one, a token bucket in the driver (`ringspun.testing.slow_links`): t is how long a
shard's keys and values take on it, c how long a shard's queries compute with them. Whole shards and pieces in turn in
one run, forward, and forward + backward; a ratio is the time of whole shards over that of pieces, with its 90 %
interval. Full mask, contiguous, so that every step is the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from torch import distributed as dist

from ringspun import Contiguous, Full, Ring
from ringspun.testing.pool import RankPool
from ringspun.testing.sleeping import Sleeping
from ringspun.testing.slow_links import SlowLinks
from ringspun.testing.timing import paired_ratio
from ringspun.testing.virtual_links import VirtualLinks
from ringspun.torch import ContextParallel, Gloo
from ringspun.torch.kernels import Kernel
from ringspun.torch.pieces import CALLS

HEADS, HEAD_SIZE = 4, 64
BYTES_PER_ROW = 2 * HEADS * HEAD_SIZE * 4
Times = tuple[float, float]
"""Of forward, and of forward + backward (seconds)."""


def kernel_of(name: str, tokens: int, seconds: float) -> Kernel | str:
    """The kernel of a name; one that sleeps takes so long for a shard's queries and keys."""
    return Sleeping(seconds / tokens**2) if name == "sleeping" else name


def timed(
    ring_rank: int, pieces: int, tokens: int, kernel: str, compute_s: float, bytes_per_s: float, folder: str
) -> Times:
    """A plan's second call on this rank, all starting together; over free links where `bytes_per_s` is 0."""
    torch.set_num_threads(1)
    gloo = Gloo(dist.group.WORLD)
    driver = SlowLinks(gloo, node=1, bytes_per_s=bytes_per_s, folder=Path(folder)) if bytes_per_s else gloo
    route = Ring(-(-tokens // pieces)) if pieces > 1 else Ring()
    plan = ContextParallel(driver, layout=Contiguous(), route=route).plan(driver.size * tokens, Full())
    q, k, v, dout = (torch.randn(1, HEADS, tokens, HEAD_SIZE) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    used = kernel_of(kernel, tokens, compute_s)
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        out = plan.attention(q, k, v, kernel=used)
        forward = time.perf_counter() - start
        torch.autograd.grad(out, (q, k, v), dout)
        both = time.perf_counter() - start
    return forward, both


def slowest(pool: RankPool, *asked: object) -> Times:
    """Of all ranks, with `timed`'s arguments but for the folder."""
    with tempfile.TemporaryDirectory() as folder:
        told = pool.run(timed, *asked, folder, timeout_s=300)
    forward, both = zip(*told, strict=True)
    return max(forward), max(both)


def compared(
    pool: RankPool, pieces: Sequence[int], pairs: int, tokens: int, kernel: str, compute_s: float, ratio: float
) -> list[str]:
    """Table rows of one ring and one speed of its links."""
    rate = BYTES_PER_ROW * tokens / (ratio * compute_s)
    found: dict[int, list[Times]] = {n: [] for n in pieces}
    for _ in range(pairs):
        for n in pieces:
            found[n].append(slowest(pool, n, tokens, kernel, compute_s, rate))
    rows = []
    for n in pieces:
        cells = []
        for which in range(2):
            whole, ours = ([times[which] for times in found[m]] for m in (pieces[0], n))
            gain = paired_ratio(whole, ours)
            cells.append(f"{1e3 * median(ours):.1f} | {gain.median:.2f} [{gain.low:.2f}, {gain.high:.2f}]")
        rows.append(f"| {pool.size} | {ratio:g} | {n} | {' | '.join(cells)} |")
    return rows


POST = 0.01
"""Work of posting a message, virtually, in parts of c."""
SETTLING = 24
"""Plans of "auto" that do not count, and then as many that do: also those that look at whole shards."""


def virtual(ranks: int, block_size: int | Literal["auto"] | None, tokens: int, ratio: float) -> Times:
    """Of a call, in c."""
    links = VirtualLinks(ranks, bytes_per_s=BYTES_PER_ROW * tokens / ratio, post_s=POST)
    context = ContextParallel(links, layout=Contiguous(), block_size=block_size)
    kernel = Sleeping(1 / tokens**2, sleep=links.spend)
    x = torch.zeros(1, HEADS, ranks * tokens, HEAD_SIZE, requires_grad=True)
    found = []
    for _ in range(2 * SETTLING if block_size == "auto" else 1):
        plan = context.plan(ranks * tokens, Full())
        for _ in range(CALLS if block_size == "auto" else 1):
            begin = max(links.now)
            out = plan.attention(x, x, x, kernel=kernel)
            forward = max(links.now) - begin
            torch.autograd.grad(out, x, out)
            found.append((forward, max(links.now) - begin))
    last = found[-(len(found) // 2) :]
    return sum(f for f, _ in last) / len(last), sum(b for _, b in last) / len(last)


def print_virtual(rings: Sequence[int], ratios: Sequence[float], pieces: Sequence[int], tokens: int) -> None:
    """A table of forward / forward + backward, in c."""
    print(f"| R | t / c | {' | '.join('whole' if n == 1 else str(n) for n in pieces)} | auto |")
    print("|---" * (3 + len(pieces)) + "|")
    sizes = [None if n == 1 else -(-tokens // n) for n in pieces]
    for ranks in rings:
        for ratio in ratios:
            times = [virtual(ranks, size, tokens, ratio) for size in (*sizes, "auto")]
            print(f"| {ranks} | {ratio:g} | {' | '.join(f'{one:.2f} / {two:.2f}' for one, two in times)} |", flush=True)


def main() -> None:
    """Print the tables."""
    options = argparse.ArgumentParser()
    options.add_argument("--ranks", default="2,4")
    options.add_argument("--ratios", default="0.25,0.5,1,2,4", help="t / c")
    options.add_argument("--pieces", default="1,2,4,8", help="the first is compared with")
    options.add_argument("--kernel", default="sleeping")
    options.add_argument("--tokens", type=int, default=256, help="of each rank")
    options.add_argument("--compute", type=float, default=0.02, help="c of the sleeping kernel (seconds)")
    options.add_argument("--virtual", action="store_true")
    options.add_argument("--pairs", type=int, default=9)
    asked = options.parse_args()
    ratios, pieces = ([kind(x) for x in text.split(",")] for kind, text in ((float, asked.ratios), (int, asked.pieces)))
    rings = [int(x) for x in asked.ranks.split(",")]
    if asked.virtual:
        print_virtual(rings, ratios, pieces, asked.tokens)
        return
    print("| R | t / c | pieces | forward ms | whole over it | forward + backward ms | whole over it |")
    print("|---|---|---|---|---|---|---|")
    for ranks in rings:
        with RankPool(ranks) as pool:
            compute_s = asked.compute
            if asked.kernel != "sleeping":
                free = [slowest(pool, 1, asked.tokens, asked.kernel, 0.0, 0.0)[0] for _ in range(5)]
                compute_s = median(free) / ranks
            for ratio in ratios:
                for row in compared(pool, pieces, asked.pairs, asked.tokens, asked.kernel, compute_s, ratio):
                    print(row, flush=True)


if __name__ == "__main__":
    main()
