"""The planner's peak memory of a ring on this machine beside what is measured: 12 configurations, profile and
measurement in one run. A minute.

    python benchmarks/planner_machine.py --out benchmarks/results/$(date +%F)-planner_machine.md
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

from ringspun import Causal, Contiguous, Direct, Full, Ring, Zigzag
from ringspun.core.geometry import Geometry
from ringspun.core.wire import Format
from ringspun.planner.machine import ring_peak_bytes
from ringspun.testing.pool import RankPool
from ringspun.testing.timing import Work, peak_on_rank

BAR = 0.10
TOKENS = 4096
BYTES = {"float32": 4, "bfloat16": 2}
CAUSAL = [(dtype, kv_heads, Causal(), Zigzag(), Ring()) for dtype, kv_heads in product(BYTES, (4, 1))]
FULL = [("bfloat16", 2, Full(), Contiguous(), Ring()), ("float32", 2, Full(), Contiguous(), Direct())]


def works(ranks: int) -> list[Work]:
    return [
        Work(ranks, ranks * TOKENS, 4, kv_heads, 64, dtype, mask, layout, route=route)
        for dtype, kv_heads, mask, layout, route in CAUSAL + FULL
    ]


def predicted(work: Work, alone_bytes: int) -> int:
    """Of the busiest rank."""
    wire = Format(1, work.heads, work.kv_heads, work.head_size, work.head_size, work.dtype, BYTES[work.dtype], 4)
    ranks = Geometry(work.ranks, tuple(range(work.ranks)), work.layout, work.route).schedule(work.mask, work.seq_len)
    return max(ring_peak_bytes(alone_bytes, one, wire) for one in ranks)


def measured(ranks: int) -> list[int]:
    with RankPool(ranks) as pool:
        return [max(pool.run(peak_on_rank, work, timeout_s=600.0)) for work in works(ranks)]


def profile() -> list[int]:
    """Peaks of one rank that sees all of its own tokens, for each of `works`."""
    alone = [replace(w, ranks=1, seq_len=TOKENS, mask=Full(), layout=Contiguous(), route=Ring()) for w in works(1)]
    with RankPool(1) as pool:
        return [max(pool.run(peak_on_rank, work, timeout_s=600.0)) for work in alone]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    alone = profile()
    lines = ["| ranks | dtype | KV heads | mask | route | predicted bytes | measured | off |", "|" + "---|" * 8]
    worst = 0.0
    for ranks in (2, 4):
        for work, one, found in zip(works(ranks), alone, measured(ranks), strict=True):
            said = predicted(work, one)
            worst = max(worst, abs(said / found - 1))
            lines.append(
                f"| {ranks} | {work.dtype} | {work.kv_heads} | {work.mask}, {work.layout} | {work.route} "
                f"| {said:,} | {found:,} | {said / found - 1:+.1%} |"
            )
    lines.append(f"\nWorst {worst:.1%}; bar {BAR:.0%}: {'met' if worst <= BAR else 'MISSED'}.")
    text = "\n".join(lines)
    print(text)
    if out is not None:
        command = f"    python benchmarks/planner_machine.py --out {out}"
        setting = (
            f"Forward + backward above its inputs, largest rank, {TOKENS} tokens a rank, 4 heads of 64, one thread."
        )
        head = f"# Peak memory of a ring on this machine: predicted and measured\n\n{command}\n\n{setting}\n\n"
        out.write_text(f"{head}{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
