"""How evenly each layout deals packed documents, and how long that takes: worst of many seeds, causal within documents.

python benchmarks/layouts.py                        # prints a table: long-tailed documents of 1 to 64K tokens, 16 ranks
python benchmarks/layouts.py --ranks 8 --seeds 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np

from ringspun import Balanced, Causal, Contiguous, Documents, DocumentZigzag, Layout, Zigzag
from ringspun.core import tiles as tl
from ringspun.core.cut import Cut
from ringspun.core.partition import Partition

LONGEST = 1 << 16
DRAWS = ("log-normal", "Pareto")


def documents(draw: str, tokens: int, seed: int) -> Documents:
    """Long-tailed lengths, 1 to 64K tokens each, `tokens` in all; the last document takes what is left."""
    rng = np.random.default_rng((seed, tokens, DRAWS.index(draw)))
    drawn = rng.lognormal(6.5, 1.6, tokens // 64) if draw == "log-normal" else 128 * (1 + rng.pareto(0.9, tokens // 64))
    lengths = np.clip(drawn.astype(np.int64), 1, LONGEST)
    ends = np.minimum(np.cumsum(lengths), tokens)
    return Documents(np.diff(np.unique(np.append(0, ends))))


@dataclass(frozen=True)
class Figures:
    """Largest over mean of tokens, of the worst step's pairs and of all pairs; tiles per rank; milliseconds to deal."""

    tokens: float
    step: float
    total: float
    tiles: float
    milliseconds: float


def measure(layout: Layout, docs: Documents, ranks: int) -> Figures:
    """One dealing, counted tile by tile."""
    start = time.perf_counter()
    layout.deal(docs.end, ranks, docs)
    milliseconds = 1e3 * (time.perf_counter() - start)
    part = Partition(docs.end, ranks, layout, docs)
    regions = (Causal() & docs).regions(docs.end, docs.end)
    pairs, tiles = np.zeros((ranks, ranks)), 0
    for rank in range(ranks):
        table, source = tl.build(Cut(part, part, regions), rank)
        np.add.at(pairs[rank], (rank - source) % ranks, tl.count_pairs(table))
        tiles += len(table)
    steps = pairs[:, pairs.any(axis=0)]
    step = float((steps.max(axis=0) / steps.mean(axis=0)).max())
    total = pairs.sum(axis=1)
    return Figures(
        part.tokens.max() / part.tokens.mean(), step, total.max() / total.mean(), tiles / ranks, milliseconds
    )


def rows(ranks: int, seeds: int) -> Iterator[str]:
    """The worst figures of every layout (of tiles and time: the mean) for each draw and length."""
    for draw in DRAWS:
        for tokens in (1 << 18, 1 << 19, 1 << 20, 1 << 21):
            for layout in (Contiguous(), Zigzag(), DocumentZigzag(), Balanced()):
                found = np.array([astuple(measure(layout, documents(draw, tokens, s), ranks)) for s in range(seeds)])
                worst, mean = found.max(axis=0), found.mean(axis=0)
                even = " | ".join(f"{x:.3f}" for x in worst[:3])
                yield f"| {draw} | {tokens >> 10}K | {layout} | {even} | {mean[3]:.0f} | {mean[4]:.1f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    print("| documents | tokens | layout | tokens max/mean | worst step's pairs | all pairs | tiles per rank | ms |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows(args.ranks, args.seeds):
        print(row, flush=True)


if __name__ == "__main__":
    main()
