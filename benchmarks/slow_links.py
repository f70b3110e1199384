"""Routes over a slow link: 8 local ranks as two nodes of 4, whose ranks share one link between them.

python benchmarks/slow_links.py             # a markdown table, and the route that `auto` takes

The link is a token bucket in the driver (`ringspun.testing.slow_links`), a tenth as fast as what `bench links` measures
between these ranks while all send. Forward + backward, routes in turn in one run.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import torch
from torch import distributed as dist

from ringspun import Contiguous, Full
from ringspun.core.links import Link, Links
from ringspun.testing.links import links_on_rank
from ringspun.testing.pool import RankPool
from ringspun.testing.slow_links import SlowLinks
from ringspun.testing.timing import paired_ratio, second_run
from ringspun.torch import ContextParallel, Gloo

RANKS, NODE, HEADS, HEAD_SIZE = 8, 4, 4, 64
ROUTES = ("ring", "direct", "double_ring(4)")


def timed(ring_rank: int, route: str, tokens: int, bytes_per_s: float, folder: str) -> float:
    """Seconds of a plan's second forward + backward on this rank, all starting together."""
    torch.set_num_threads(1)
    driver = SlowLinks(Gloo(dist.group.WORLD), node=NODE, bytes_per_s=bytes_per_s, folder=Path(folder))
    plan = ContextParallel(driver, layout=Contiguous(), route=route).plan(RANKS * tokens, Full())
    return second_run(plan, HEADS, HEAD_SIZE)


def taken(ring_rank: int, tokens: int, links: Links) -> str:
    """The route that `auto` takes."""
    return ContextParallel(layout=Contiguous(), links=links).plan(RANKS * tokens, Full()).schedule.route


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser()
    options.add_argument("--tokens", type=int, default=128, help="of each rank")
    options.add_argument("--pairs", type=int, default=9)
    asked = options.parse_args()
    block = 2 * HEADS * asked.tokens * HEAD_SIZE * 4
    with RankPool(RANKS) as pool:
        near = pool.run(links_on_rank, (1024, 1 << 16, block), 9, timeout_s=300)[0]
        rate = block / near.seconds(block) / 10
        far = Link((1024, block), (1024 / rate, block / rate), (NODE * 1024 / rate, NODE * block / rate))
        links = Links(RANKS, near, far, NODE)
        seconds: dict[str, list[float]] = {route: [] for route in ROUTES}
        for _ in range(asked.pairs):
            for route in ROUTES:
                with tempfile.TemporaryDirectory() as folder:
                    told = pool.run(timed, route, asked.tokens, rate, folder, timeout_s=300)
                seconds[route].append(max(told))
        chosen = pool.run(taken, asked.tokens, links, timeout_s=60)[0]
    print(f"link {rate / 1e6:.1f} MB/s, blocks of {block / 2**20:.2f} MiB; auto takes {chosen}\n")
    print("| route | s | ring over it | 90 % interval |\n|---|---|---|---|")
    for route in ROUTES:
        ratio = paired_ratio(seconds["ring"], seconds[route])
        print(f"| {route} | {median(seconds[route]):.3f} | {ratio.median:.2f} | {ratio.low:.2f} to {ratio.high:.2f} |")


if __name__ == "__main__":
    main()
