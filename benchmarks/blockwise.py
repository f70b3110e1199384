"""Blocks of tokens and chunks of the loss beside the same work without: time and peak memory, in pairs in one run.

python benchmarks/blockwise.py              # a markdown table

Forward + backward, float32, where both fit; the ratio is the median over pairs, with its 90 % bootstrap interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringspun import Causal
from ringspun.testing.timing import paired_ratio
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.memory import peak_memory
from ringspun.train.losses.chunked_loss import Head, Terms, linear_cross_entropy
from ringspun.train.memory.blockwise import blockwise
from ringspun.train.memory.blockwise_layer import BlockwiseTransformerLayer, GatedFeedForward

PAIRS, WIDTH, TOKENS, BLOCK, VOCAB = 9, 512, 2048, 512, 16384
Run = Callable[[], Tensor]


def feed_forward() -> dict[str, Run]:
    """A SwiGLU layer of 4 times the width: 2 products of 9 are made again."""
    module, x = GatedFeedForward(WIDTH, 4 * WIDTH), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    upstream = torch.randn(1, TOKENS, WIDTH)
    return {
        "whole": lambda: (module(x) * upstream).sum(),
        "blocks of 512": lambda: (blockwise(module, x, BLOCK) * upstream).sum(),
    }


def layer() -> dict[str, Run]:
    """A transformer layer with causal attention in tiles, 8 heads of 64."""
    plan = ContextParallel(Loopback(1)).plan(TOKENS, Causal())
    x, upstream = torch.randn(1, TOKENS, WIDTH, requires_grad=True), torch.randn(1, TOKENS, WIDTH)
    runs: dict[str, Run] = {}
    for name, size in (("whole", None), ("blocks of 512", BLOCK)):
        module = BlockwiseTransformerLayer(WIDTH, 8, block_size=size)
        runs[name] = lambda module=module: (module(x, attention=plan.attention) * upstream).sum()
    return runs


def loss() -> dict[str, Run]:
    """The loss of a head of 16,384 entries."""
    hidden, weight = torch.randn(TOKENS // 2, WIDTH, requires_grad=True), nn.Parameter(torch.randn(VOCAB, WIDTH) / 20)
    targets = torch.randint(0, VOCAB, (TOKENS // 2,))
    options = torch.nn.LinearCrossEntropyOptions() if hasattr(torch.nn, "LinearCrossEntropyOptions") else None
    runs: dict[str, Run] = {
        "whole": lambda: F.cross_entropy(F.linear(hidden, weight), targets),
        "chunks of 256": lambda: linear_cross_entropy(hidden, Head(weight), targets, terms=Terms(chunk_tokens=256)),
        "chunks of 256, x 2,048 entries": lambda: linear_cross_entropy(
            hidden, Head(weight), targets, terms=Terms(chunk_tokens=256, chunk_vocab=2048)
        ),
        "chunks of 256, single losses": lambda: linear_cross_entropy(
            hidden, Head(weight), targets, reduction="none", terms=Terms(chunk_tokens=256)
        ).mean(),
    }
    if options is not None:
        runs["PyTorch's own chunks"] = lambda: F.linear_cross_entropy(hidden, weight, targets, options=options)
    return runs


def seconds(run: Run) -> float:
    """Of one forward and backward."""
    began = time.perf_counter()
    run().backward()
    return time.perf_counter() - began


def main() -> None:
    torch.manual_seed(0)
    print("| what | how | s | over whole | 90 % interval | peak (MiB) |\n|---|---|---:|---:|---|---:|")
    for what in (feed_forward, layer, loss):
        runs = what()
        took: dict[str, list[float]] = {name: [] for name in runs}
        peaks: dict[str, int] = {}
        for name, run in runs.items():
            with peak_memory() as peak:
                run().backward()
            peaks[name] = peak.bytes
        for _ in range(PAIRS):
            for name, run in runs.items():
                took[name].append(seconds(run))
        for name in runs:
            ratio, middle = paired_ratio(took[name], took["whole"]), sorted(took[name])[PAIRS // 2]
            cells = (
                f"{middle:.3f} | {ratio.median:.3f} | {ratio.low:.3f} to {ratio.high:.3f} | {peaks[name] / 2**20:.0f}"
            )
            print(f"| {what.__name__.replace('_', ' ')} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
