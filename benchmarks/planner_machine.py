"""The planner's peak memory and step time of a ring on this machine beside what is measured: 12 configurations, profile
and measurement in one run. Four minutes, on an idle machine.

    python benchmarks/planner_machine.py --out benchmarks/results/$(date +%F)-planner_machine.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

from ringspun import Causal, Contiguous, Direct, Full, Ring, Zigzag
from ringspun.core.geometry import Geometry
from ringspun.core.host import cores
from ringspun.core.links import Link
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format
from ringspun.planner.machine import Rates, ring_peak_bytes, ring_seconds
from ringspun.testing.links import links_on_rank
from ringspun.testing.pool import RankPool
from ringspun.testing.speeds import Speed, speeds_on_rank
from ringspun.testing.timing import Work, peak_on_rank, time_on_rank

BARS = {"bytes": 0.10, "seconds": 0.15}
RANKS = (2, 4)
TOKENS = 4096
SIZES = (256, 512, 1024, 2048, 4096)
REPEATS = 7
BYTES = {"float32": 4, "bfloat16": 2}
CAUSAL = [(dtype, kv_heads, Causal(), Zigzag(), Ring()) for dtype, kv_heads in product(BYTES, (4, 1))]
FULL = [("bfloat16", 2, Full(), Contiguous(), Ring()), ("float32", 2, Full(), Contiguous(), Direct())]


def works(ranks: int) -> list[Work]:
    return [
        Work(ranks, ranks * TOKENS, 4, kv_heads, 64, dtype, mask, layout, route=route)
        for dtype, kv_heads, mask, layout, route in CAUSAL + FULL
    ]


def scheduled(work: Work) -> tuple[Sequence[Schedule], Format]:
    wire = Format(1, work.heads, work.kv_heads, work.head_size, work.head_size, work.dtype, BYTES[work.dtype], 4)
    geometry = Geometry(work.ranks, tuple(range(work.ranks)), work.layout, work.route)
    return geometry.schedule(work.mask, work.seq_len), wire


def peaks_alone() -> list[int]:
    """Peaks of one rank that sees all of its own tokens, for each of `works`."""
    alone = [replace(w, ranks=1, seq_len=TOKENS, mask=Full(), layout=Contiguous(), route=Ring()) for w in works(1)]
    with RankPool(1) as pool:
        return [max(pool.run(peak_on_rank, work, timeout_s=600.0)) for work in alone]


def rates() -> dict[str, Rates]:
    """Of each dtype, with every core at work; the slowest core's."""
    with RankPool(cores()) as pool:
        found = pool.run(speeds_on_rank, SIZES, list(BYTES), 4, 64, REPEATS, timeout_s=600.0)

    def least(dtype: str, causal: bool, which: str) -> tuple[float, ...]:
        def of(one: list[Speed], n: int) -> float:
            return next(getattr(s, which) for s in one if (s.dtype, s.tokens, s.causal) == (dtype, n, causal))

        return tuple(min(of(one, n) for one in found) for n in SIZES)

    return {
        dtype: Rates(SIZES, *((least(dtype, c, "forward"), least(dtype, c, "backward")) for c in (False, True)))
        for dtype in BYTES
    }


def link(pool: RankPool) -> Link:
    found: Link = pool.run(links_on_rank, tuple(1 << n for n in range(10, 25, 2)), 9, timeout_s=600.0)[0]
    return found


def row(work: Work, said: float, found: float, digits: str) -> tuple[str, float]:
    off = said / found - 1
    what = f"| {work.ranks} | {work.dtype} | {work.kv_heads} | {work.mask}, {work.layout} | {work.route} "
    return f"{what}| {said:{digits}} | {found:{digits}} | {off:+.1%} |", abs(off)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows: dict[str, list[tuple[str, float]]] = {"bytes": [], "seconds": []}
    alone, speeds = peaks_alone(), rates()
    for ranks in RANKS:
        with RankPool(ranks) as pool:
            near = link(pool)
            for work, one in zip(works(ranks), alone, strict=True):
                schedules, wire = scheduled(work)
                peak = max(ring_peak_bytes(one, s, wire) for s in schedules)
                rows["bytes"].append(row(work, peak, max(pool.run(peak_on_rank, work, timeout_s=600.0)), ",.0f"))
                times = zip(*pool.run(time_on_rank, work, REPEATS, timeout_s=600.0), strict=True)
                step = ring_seconds(schedules, wire, speeds[work.dtype], near, cores())
                rows["seconds"].append(row(work, step, median(max(t) for t in list(times)[1:]), ".3f"))
    lines = []
    for what, bar in BARS.items():
        worst = max(off for _, off in rows[what])
        lines += [f"| ranks | dtype | KV heads | mask | route | predicted {what} | measured | off |", "|" + "---|" * 8]
        lines += [line for line, _ in rows[what]]
        lines.append(f"\nWorst {worst:.1%}; bar {bar:.0%}: {'met' if worst <= bar else 'MISSED'}.\n")
    text = "\n".join(lines)
    print(text)
    if out is not None:
        command = f"    python benchmarks/planner_machine.py --out {out}"
        setting = (
            f"Forward + backward, {TOKENS} tokens a rank, 4 heads of 64, one thread a rank, {cores()} cores.\n"
            "Bytes: above the inputs, the largest rank, predicted from one rank alone. Seconds: the slowest rank's, "
            f"median of\n{REPEATS - 1}, predicted from kernels (all cores at work) and links, measured in the same run."
        )
        out.write_text(f"# A ring on this machine: predicted and measured\n\n{command}\n\n{setting}\n\n{text}", "utf-8")


if __name__ == "__main__":
    main()
