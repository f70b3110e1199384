"""What checksums cost: forward + backward with `checks="checksum"` over the same with `checks="header"`, in turn.

python benchmarks/checksum.py              # a ring of 2 processes over gloo, one thread each: wall time
python benchmarks/checksum.py --loopback   # the same ring in one thread, processor time: no waiting
python benchmarks/checksum.py --sums       # GB/s of what could be the checksum, one thread

Inside: the part of the checked run's processor time spent in the checksum itself.

4,096 tokens a rank, 8 heads of 64, float32 (and bfloat16, whose messages are half as long), causal, zigzag.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from statistics import median

import numpy as np
import torch
import xxhash

from ringspun import Causal, Zigzag
from ringspun.core.accounting import account
from ringspun.core.geometry import Geometry
from ringspun.core.route import Ring
from ringspun.core.wire import Format
from ringspun.testing.pool import RankPool
from ringspun.testing.timing import Work, paired_ratio, time_on_rank
from ringspun.torch import ContextParallel, Loopback, Plan, ring
from ringspun.torch.checksum import checksum, weighted_sum

RANKS, TOKENS, HEADS, HEAD_SIZE = 2, 4096, 8, 64
WORKS = [
    Work(RANKS, RANKS * TOKENS, HEADS, HEADS, HEAD_SIZE, dtype, Causal(), Zigzag()) for dtype in ("float32", "bfloat16")
]
BYTES = 16 << 20


def in_processes(pool: RankPool, work: Work) -> float:
    """Seconds of a plan's second forward + backward, the slowest rank's."""
    return max(times[1] for times in pool.run(time_on_rank, work, 2, timeout_s=600.0))


def in_one_thread(work: Work) -> float:
    """Processor seconds of one forward + backward, all ranks together."""
    generator = torch.Generator().manual_seed(0)
    size = (1, work.heads, work.seq_len, work.head_size)
    q, k, v, dout = (torch.randn(size, generator=generator).to(getattr(torch, work.dtype)) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    start = time.process_time()  # autograd may run backward in a thread of its own
    torch.autograd.grad(_plan(work).attention(q, k, v), (q, k, v), dout)
    return time.process_time() - start


@cache
def _plan(work: Work) -> Plan:
    context = ContextParallel(Loopback(RANKS), layout=work.layout, checks=work.checks)
    return context.plan(work.seq_len, work.mask)


def row(run: Callable[[Work], float], work: Work, pairs: int) -> str:
    """One line of the table; every second pair runs in the other order."""
    checked = replace(work, checks="checksum")
    run(checked), run(work)  # warm
    ours, theirs = [], []
    for number in range(pairs):
        for one in (work, checked) if number % 2 else (checked, work):
            (theirs if one is work else ours).append(run(one))
    ratio = paired_ratio(ours, theirs)
    share = f"{100 * inside(lambda: run(checked)):.2f} %" if run is in_one_thread else "-"
    low, middle, high = (100 * (x - 1) for x in (ratio.low, ratio.median, ratio.high))
    return (
        f"| {work.dtype} | {median(ours):.3f} | {median(theirs):.3f} | {middle:+.2f} % "
        f"| {low:+.2f} to {high:+.2f} % | {share} | 2 % | {sent_bytes(work) / 2**20:.0f} MiB |"
    )


def inside(run: Callable[[], float]) -> float:
    """The part of a run's processor time that is spent in the checksum: exact where a ratio of whole runs is noise."""
    seconds: list[float] = []

    def timed(data: torch.Tensor) -> int:
        start = time.thread_time()
        value = checksum(data)
        seconds.append(time.thread_time() - start)
        return value

    ring.checksum = timed
    try:
        whole = run()
    finally:
        ring.checksum = checksum
    return sum(seconds) / whole


def sent_bytes(work: Work) -> int:
    """What the whole ring sends; each byte is summed twice, but for a relayed one's sending."""
    itemsize = getattr(torch, work.dtype).itemsize
    wire = Format(1, work.heads, work.heads, work.head_size, work.head_size, work.dtype, itemsize, 4)
    everybody = Geometry(RANKS, tuple(range(RANKS)), work.layout, Ring()).schedule(work.mask, work.seq_len)
    return sum(
        account(one, wire, backward=one is s.backward).total_sent_bytes
        for s in everybody
        for one in (s.forward, s.backward)
    )


def speed(total: Callable[[], object]) -> float:
    """GB/s, the best of 7."""
    seconds = []
    for _ in range(7):
        start = time.thread_time()
        total()
        seconds.append(time.thread_time() - start)
    return BYTES / min(seconds) / 1e9


def sums() -> None:
    """A table of what could be the checksum."""
    data = torch.randn(BYTES // 4).view(torch.uint8)
    flat = data.numpy()
    weights = np.random.default_rng(0).integers(-(2**63), 2**63, 1 << 15, dtype=np.int64)
    on_torch = torch.from_numpy(weights)
    candidates: dict[str, Callable[[], object]] = {
        "xxhash.xxh3_64": lambda: xxhash.xxh3_64_intdigest(flat),
        "xxhash.xxh64": lambda: xxhash.xxh64_intdigest(flat),
        "int64 words times int64 weights, numpy": lambda: np.dot(flat.view(np.int64).reshape(-1, 1 << 15), weights),
        "int64 words times int64 weights, torch": lambda: (data.view(torch.int64).view(-1, 1 << 15) * on_torch).sum(),
        "int32 words times int64 weights, torch (`weighted_sum`)": lambda: weighted_sum(data),
        "zlib.crc32": lambda: zlib.crc32(flat),
        "hashlib.sha1": lambda: hashlib.sha1(flat).digest(),
        "hashlib.sha256": lambda: hashlib.sha256(flat).digest(),
        "hashlib.blake2b": lambda: hashlib.blake2b(flat).digest(),
        "for comparison: a copy": lambda: data.clone(),
    }
    print("| of 16 MiB | GB/s |\n|---|---|")
    for name, total in candidates.items():
        print(f"| {name} | {speed(total):.2f} |", flush=True)


def main() -> None:
    """Print a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=15, help="timed pairs of each dtype")
    arguments.add_argument("--loopback", action="store_true", help="one thread, no processes")
    arguments.add_argument("--sums", action="store_true", help="speeds of checksums alone")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    if options.sums:
        return sums()
    print("| dtype | checksum, s | header, s | cost | 90 % interval | inside | bar | sent by both ranks |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    if options.loopback:
        for work in WORKS:
            print(row(in_one_thread, work, options.pairs), flush=True)
    else:
        with RankPool(RANKS) as pool:
            for work in WORKS:
                print(row(lambda w: in_processes(pool, w), work, options.pairs), flush=True)
    print(f"\nload average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
