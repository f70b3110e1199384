"""The longest sequence that a small Llama can be trained on within a budget of memory per rank.

    plain           all scores of attention, all activations, all logits
    efficient       attention in tiles, of which nothing but (out, lse) is kept
    blockwise       and feed-forward a block of tokens at a time, the loss in chunks
    ring R          and the sequence cut over R ranks; each has the budget

What counts is the peak of one step's forward and backward by the profiler's memory events, of the rank that needs most,
and the weights and their two moments, which are the same for all. No layer is checkpointed.

Source of the comparison: Liu et al. 2023 (arXiv 2310.01889), table 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringspun import Causal
from ringspun.errors import ConfigError
from ringspun.testing.pool import RankPool
from ringspun.torch import ContextParallel, Loopback, Partition
from ringspun.torch.memory import peak_memory
from ringspun.train.losses.chunked_loss import Head, Terms, linear_token_loss
from ringspun.train.losses.loss import token_loss
from ringspun.train.memory.blockwise_layer import Attention, BlockwiseTransformerLayer, GatedFeedForward
from ringspun.train.rope import Default
from ringspun.train.rope.rotary import cos_sin

PLAIN, EFFICIENT, BLOCKWISE = "plain", "efficient", "blockwise"
MIB = 2**20
CLOSE = 0.02
"""How near the longest length that fits and the shortest that does not are, as a part of it."""


@dataclass(frozen=True)
class Shape:
    """A small Llama of tied embeddings.

    Args:
        layers, hidden_size, heads, kv_heads, feed_forward_size, vocab_size: as usual.
        block_size: tokens of a block of feed-forward, and of a chunk of the loss.
    """

    layers: int = 8
    hidden_size: int = 32
    heads: int = 4
    kv_heads: int = 4
    feed_forward_size: int = 128
    vocab_size: int = 512
    block_size: int = 64


@dataclass(frozen=True)
class Longest:
    """What was found of one way.

    Args:
        way: `PLAIN`, `EFFICIENT`, `BLOCKWISE`. ranks: that share a sequence. seq_len: the longest (tokens).
        peak_bytes: there, of the rank that needs most. steps: how many were run to find it.
    """

    way: str
    ranks: int
    seq_len: int
    peak_bytes: int
    steps: int

    @property
    def name(self) -> str:
        """As in the table."""
        return self.way if self.ranks == 1 else f"ring of {self.ranks}"


class SmallLlama(nn.Module):
    """Embedding, layers, norm; the head is the embedding."""

    def __init__(self, shape: Shape, *, blocks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape, self.blocks = shape, blocks
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            BlockwiseTransformerLayer(
                shape.hidden_size,
                shape.heads,
                kv_heads=shape.kv_heads,
                feed_forward=GatedFeedForward(shape.hidden_size, shape.feed_forward_size),
                block_size=shape.block_size if blocks else None,
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.RMSNorm(shape.hidden_size)

    def share(self, ids: Tensor, targets: Tensor, positions: Tensor, total: int, attention: Attention) -> Tensor:
        """This rank's share of the mean loss."""
        x = self.embedding(ids)
        rotation = cos_sin(positions, Default(), head_size=self.shape.hidden_size // self.shape.heads)
        for layer in self.layers:
            x = layer(x, attention=attention, rotation=rotation)
        hidden, weight = self.norm(x), self.embedding.weight
        if self.blocks:
            terms = Terms(chunk_tokens=self.shape.block_size)
            share: Tensor = linear_token_loss(hidden, Head(weight), targets, total_targets=total, terms=terms)
            return share
        return token_loss(F.linear(hidden, weight), targets, total_targets=total)


def all_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention that holds its S x S scores and weights."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights: Tensor = scores.masked_fill(later, -torch.inf).softmax(-1)
    return weights @ v


def step_bytes(shape: Shape, way: str, part: Partition) -> int:
    """Peak of this rank's weights, moments, and one forward and backward."""
    model = SmallLlama(shape, blocks=way == BLOCKWISE)
    attention = all_scores if way == PLAIN else part.plan(Causal()).attention
    ids = torch.arange(part.seq_len)[None] % shape.vocab_size
    batch = part.shard_batch({"input_ids": ids, "labels": ids})
    with peak_memory() as peak:
        loss = model.share(
            batch["input_ids"], batch["shift_labels"], part.positions(), int(batch["num_items_in_batch"]), attention
        )
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    return peak.bytes + 3 * sum(p.nbytes for p in model.parameters())


def on_rank(ring_rank: int, shape: Shape, seq_len: int) -> int:
    """`step_bytes` of a rank of a ring of processes."""
    torch.set_num_threads(1)
    return step_bytes(shape, BLOCKWISE, ContextParallel().partition(seq_len))


def longest(bytes_of: Callable[[int], int], budget_bytes: int, *, start: int) -> tuple[int, int, int]:
    """The longest length that fits, its bytes, and how many lengths were tried; within `CLOSE` of the first that does
    not.

    Args:
        bytes_of: of a length, growing with it, at least linearly. budget_bytes: what they may be.
        start: a length to begin with (tokens).
    Raises:
        ConfigError: a length below 16 does not fit.
    """
    known: dict[int, int] = {}
    guess = start
    while True:
        known[guess] = bytes_of(guess)
        fits = [n for n, held in known.items() if held <= budget_bytes]
        beyond = [n for n, held in known.items() if held > budget_bytes]
        if fits and beyond and min(beyond) - max(fits) <= max(1.0, CLOSE * max(fits)):
            return max(fits), known[max(fits)], len(known)
        if not fits and guess < 16:
            raise ConfigError(f"budget must hold a sequence of 16 tokens; it needs {known[guess] / MIB:.1f} MiB.")
        guess = _next(known, budget_bytes, max(fits, default=0), min(beyond, default=0))


def _next(known: dict[int, int], budget: int, fits: int, beyond: int) -> int:
    """The length to try between the longest that fits and the shortest that does not; 0: not known yet."""
    if not beyond:
        return max(fits + 1, min(8 * fits, round((1 + CLOSE / 2) * fits * budget / known[fits])))
    if not fits:  # as if bytes grew as a square: too far down would be a long way up again
        return max(1, min(beyond - 1, round((1 - CLOSE / 2) * beyond * math.sqrt(budget / known[beyond]))))
    if len(known) % 3 == 2:  # the curve alone creeps where much of the bytes is fixed
        return (fits + beyond) // 2
    held = max(1, known[fits])
    power: float = math.log(beyond / fits) / math.log(known[beyond] / held)  # a straight line on log scales
    aside = 0.4 * CLOSE * fits * (1 if len(known) % 3 else -1)  # a little to either side: it closes the gap
    at = round(fits * math.pow(budget / held, power) + aside)
    return min(max(at, fits + 1), beyond - 1)


def compare(shape: Shape, budget_bytes: int, rings: list[int], said: Callable[[str], None]) -> list[Longest]:
    """All ways, from the shortest to the longest.

    Args:
        shape: the model. budget_bytes: of each rank. rings: ring sizes. said: told of each way when it is found.
    """
    found: list[Longest] = []

    def one(way: str, ranks: int, bytes_of: Callable[[int], int], start: int) -> None:
        found.append(Longest(way, ranks, *longest(bytes_of, budget_bytes, start=start)))
        said(f"{found[-1].name}: {found[-1].seq_len:,} tokens")

    start = 64
    for way in (PLAIN, EFFICIENT, BLOCKWISE):

        def alone(seq_len: int, way: str = way) -> int:
            return step_bytes(shape, way, ContextParallel(Loopback(1)).partition(seq_len))

        one(way, 1, alone, start)
        start = found[-1].seq_len
    for ranks in rings:
        with RankPool(ranks) as pool:

            def largest(seq_len: int, pool: RankPool = pool) -> int:
                return max(pool.run(on_rank, shape, seq_len, timeout_s=600.0))

            one(BLOCKWISE, ranks, largest, round(0.9 * ranks * start))
    return found
