"""Soaks a ring of processes: another plan in every call, compared with dense attention each time. `make soak`

python benchmarks/soak.py                    # 30 minutes, 4 ranks over gloo; a table, a line a minute
python benchmarks/soak.py --minutes 3

Fails where a result is out of its bar, or where a rank grows by 1 % or more once it has made the 1,024 plans that a
context keeps: until then memory is meant to grow, by about 20 kB a plan.
"""

from __future__ import annotations

import argparse
import math
import sys

from ringspun.testing.pool import RankPool
from ringspun.testing.soak import growth, soak

MOST_GROWTH = 0.01


def main() -> None:
    """Run, print a markdown table, fail where a law is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    seconds = 60 * asked.minutes
    with RankPool(asked.ranks) as pool:
        told = pool.run(soak, seconds, min(60.0, seconds / 20), asked.seed, timeout_s=seconds + 120)
    print(
        "| minutes | plans | calls | worst error / its bar | resident, MB per rank |", "|--:|--:|--:|--:|---|", sep="\n"
    )
    for moment in zip(*told, strict=True):
        first = moment[0]
        sizes = ", ".join(f"{s.resident / 1e6:.1f}" for s in moment)
        worst = max(s.worst for s in moment)
        print(f"| {first.seconds / 60:.1f} | {first.plans:,} | {first.calls:,} | {worst:.2f} | {sizes} |")
    grown = [growth(one) for one in told]
    print(f"\nGrowth once all kept plans were there, per rank: {', '.join(f'{100 * g:+.2f} %' for g in grown)}.")
    if any(map(math.isnan, grown)):
        print("Too short to say: run longer.")
    sys.exit(any(g >= MOST_GROWTH for g in grown))


if __name__ == "__main__":
    main()
