"""How evenly each layout deals packed documents, and how long that takes: worst of many seeds, causal within documents.

python benchmarks/layouts.py                        # prints a table: long-tailed documents of 1 to 64K tokens, 16 ranks
python benchmarks/layouts.py --ranks 8 --seeds 5
python benchmarks/layouts.py --speeds               # ranks of unequal power: each rank's work over its share
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from ringspun import Balanced, Causal, Contiguous, Documents, DocumentZigzag, Full, Layout, Mask, Zigzag
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


def work(part: Partition, mask: Mask) -> tuple[NDArray[np.float64], int]:
    """Pairs of each rank and step, and tiles of all ranks."""
    cut = Cut(part, part, mask.regions(part.seq_len, part.seq_len))
    pairs, tiles = np.zeros((part.ring_size, part.ring_size)), 0
    for rank in range(part.ring_size):
        table, source = tl.build(cut, rank)
        np.add.at(pairs[rank], (rank - source) % part.ring_size, tl.count_pairs(table))
        tiles += len(table)
    return pairs, tiles


def measure(layout: Layout, docs: Documents, ranks: int) -> Figures:
    """One dealing, counted tile by tile."""
    start = time.perf_counter()
    layout.deal(docs.end, ranks, docs)
    milliseconds = 1e3 * (time.perf_counter() - start)
    part = Partition(docs.end, ranks, layout, docs)
    pairs, tiles = work(part, Causal() & docs)
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


def unequal(ranks: int, seeds: int) -> Iterator[str]:
    """Least and most work of a rank over its share, where ranks are 1 to 4 times as fast as the slowest."""
    for layout in (Contiguous, Zigzag, DocumentZigzag, Balanced):
        low, high = np.inf, 0.0
        for seed in range(seeds):
            speeds = np.random.default_rng(seed).uniform(1, 4, ranks)
            docs = documents("log-normal", 1 << 20, seed)
            mask = {Contiguous: Full(), Zigzag: Causal()}.get(layout, Causal() & docs)
            done = work(Partition(docs.end, ranks, layout(speeds=tuple(speeds)), docs), mask)[0].sum(axis=1)
            share = done / done.sum() / (speeds / speeds.sum())
            low, high = min(low, share.min()), max(high, share.max())
        what = {Contiguous: "full", Zigzag: "causal"}.get(layout, "causal & documents")
        yield f"| {layout.__name__.lower()} | {what} | {low:.3f} to {high:.3f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--speeds", action="store_true")
    args = parser.parse_args()
    if args.speeds:
        print("| layout | mask | work over share, worst ranks |", "|---|---|---|", sep="\n")
        for row in unequal(args.ranks, args.seeds):
            print(row, flush=True)
        return
    print("| documents | tokens | layout | tokens max/mean | worst step's pairs | all pairs | tiles per rank | ms |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows(args.ranks, args.seeds):
        print(row, flush=True)


if __name__ == "__main__":
    main()
