"""Rings, split heads and both on 4 local ranks, beside other libraries' all-to-alls.

python benchmarks/usp.py               # a markdown table; peers as in benchmarks/peers.txt, where they are installed

Forward + backward, all in turn in one run; the ratio is the median over rounds of each one's time over ours with all
ranks splitting heads, with its 90 % bootstrap interval.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from statistics import median

from ringspun import Causal, Contiguous, Full, Zigzag
from ringspun.testing.peers.base import Peer, Ready
from ringspun.testing.peers.exchanges import DeepSpeed, Yunchang
from ringspun.testing.peers.on_ranks import forget_on_rank, time_on_rank
from ringspun.testing.peers.own import Ring
from ringspun.testing.pool import RankPool
from ringspun.testing.timing import Work, paired_ratio

RANKS, TOKENS = 4, 4096
SHAPES = [
    Work(RANKS, TOKENS, 8, 8, 64, "float32", Causal(), Zigzag()),
    Work(RANKS, TOKENS, 8, 4, 64, "bfloat16", Causal(), Zigzag()),
    Work(RANKS, TOKENS, 4, 4, 128, "float32", Full(), Contiguous()),
]


@dataclass(frozen=True)
class Split(Ring):
    """Ours, `ulysses` of the ranks splitting heads."""

    ulysses: int = 1

    def prepare(self, ring_rank: int, work: Work) -> Ready:
        return super().prepare(ring_rank, replace(work, ulysses=self.ulysses))


OURS = [Split(f"ringspun {RANKS // u} x {u}", ulysses=u) for u in (4, 2, 1)]
PEERS: list[Peer] = [*OURS, Yunchang(), DeepSpeed()]


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=9)
    rounds = options.parse_args().rounds
    print("| shape | ring x ulysses | s | over ours 1 x 4 | 90 % interval |\n|---|---|---|---|---|")
    with RankPool(RANKS) as pool:
        for work in SHAPES:
            able = [peer for peer in PEERS if peer.version and not peer.refuses(work)]
            seconds: dict[str, list[float]] = {peer.name: [] for peer in able}
            for turn in range(rounds + 1):
                for peer in able:
                    told = pool.run(time_on_rank, peer, work, True, timeout_s=300)
                    seconds[peer.name] += [max(both for _, both in told)] if turn else []
            pool.run(forget_on_rank, timeout_s=60)
            shape = f"{work.mask}, {work.heads}:{work.kv_heads} x {work.head_size}, {work.dtype}"
            for name, found in seconds.items():
                ratio = paired_ratio(found, seconds[OURS[0].name])
                interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
                print(f"| {shape} | {name} | {median(found):.3f} | {ratio.median:.3f} | {interval} |", flush=True)
    missing = ", ".join(f"{peer.name}: {peer.missing}" for peer in PEERS if not peer.version)
    print(f"\n{', '.join(f'{p.name} {p.version}' for p in PEERS if p.version)}{'; ' + missing if missing else ''}")


if __name__ == "__main__":
    main()
