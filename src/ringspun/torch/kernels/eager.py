"""`eager`: blockwise attention in plain torch operations. Slow, exact, any device and float dtype, takes bands whole.

Never more than a block x block of scores is alive; backward recomputes them.
Source: memory-efficient attention (arXiv 2112.05682) with the backward of FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ringspun.torch.kernels.base import (
    Block,
    Call,
    Gradients,
    Kernel,
    Partial,
    Rows,
    Saved,
    StepTiles,
    accumulator_dtype,
    tile_rows,
)
from ringspun.torch.softmax import RunningSoftmax
from ringspun.torch.uploads import uploaded


class Eager(Kernel):
    """Blockwise attention in plain torch.

    Args:
        block_size: rows of queries and of keys whose scores are alive at once (tokens).
    """

    name = "eager"

    def __init__(self, block_size: int = 512) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1; got {block_size}.")
        self.block_size = block_size

    def refuses(self, call: Call) -> str | None:
        return None if call.dtype.is_floating_point else f"dtype must be floating point; got {call.dtype}"

    def forward(self, block: Block, tiles: StepTiles) -> Iterator[Partial]:
        for tile in tiles.bands:
            for q0, q1, pieces in _blocks(tile, self.block_size):
                rows = Rows(tile_rows(tile)[0].batch, slice(q0, q1))
                q, running = _grouped(block.q, rows, block.k.shape[1]), None
                for k0, k1, allowed in pieces:
                    k_rows = Rows(rows.batch, slice(k0, k1))
                    k, v = _keys(block, k_rows)
                    scores, _ = _scores(q, k, block, rows, k_rows)
                    out, lse = _attend(_hidden(scores, allowed), v)
                    if running is None:
                        running = RunningSoftmax(out.shape, out.dtype, out.device)
                    running.add(None, out, lse)
                if running is not None:
                    yield Partial(rows, running.out.flatten(1, 2), running.lse.flatten(1, 2))

    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        for tile in tiles.bands:
            batch = tile_rows(tile)[0].batch
            for q0, q1, pieces in _blocks(tile, self.block_size):
                q_rows = Rows(batch, slice(q0, q1))
                kv_heads = block.k.shape[1]
                q, dout = _grouped(block.q, q_rows, kv_heads), _grouped(saved.dout, q_rows, kv_heads)
                lse, delta = (
                    _split_heads(x[q_rows.batch, :, q_rows.tokens], kv_heads)[..., None]
                    for x in (saved.lse, saved.delta)
                )
                lse = lse.masked_fill(lse == -torch.inf, 0.0)  # rows that a bias hides wholly: weights exp(-inf - 0)
                for k0, k1, allowed in pieces:
                    k_rows = Rows(batch, slice(k0, k1))
                    k, v = _keys(block, k_rows)
                    scores, slope = _scores(q, k, block, q_rows, k_rows)
                    p = torch.exp(_hidden(scores, allowed) - lse)
                    ds = p * (dout @ v.mT - delta)
                    dbias = None if block.bias is None else block.bias.gradient(ds.flatten(1, 2), q_rows, k_rows)
                    ds = ds * block.scale if slope is None else ds * slope * block.scale
                    dk, dv = (ds.mT @ q).sum(2), (p.mT @ dout).sum(2)
                    yield Gradients(q_rows, k_rows, (ds @ k).flatten(1, 2), dk, dv, dbias)


def _blocks(tile: list[int], size: int) -> Iterator[tuple[int, int, list[tuple[int, int, Tensor | None]]]]:
    """Query blocks of a tile, each with the key blocks that it meets and their masks (None: all allowed).

    Query blocks are aligned so that a row with a key of this tile is in a block whose pieces all see some key; rows
    that a piece hides wholly get weight zero from the running softmax.
    """
    _, _, q0, q1, k0, k1, lo, hi = tile
    for a in range(q0, q1, size):
        b = min(a + size, q1)
        pieces: list[tuple[int, int, Tensor | None]] = []
        for c in range(max(k0, a - hi), min(k1, b - lo), size):
            d = min(c + size, k1, b - lo)
            if a - (d - 1) >= lo and (b - 1) - c <= hi:
                pieces.append((c, d, None))
                continue
            distance = torch.arange(a, b)[:, None] - torch.arange(c, d)[None, :]
            pieces.append((c, d, (distance >= lo) & (distance <= hi)))
        yield a, b, pieces


def _grouped(x: Tensor, rows: Rows, kv_heads: int) -> Tensor:
    """``[B, H, T, D]`` rows as ``[b, K, H / K, t, D]`` in the accumulators' dtype."""
    part = x[rows.batch, :, rows.tokens]
    return _split_heads(part, kv_heads).to(accumulator_dtype(x.dtype))


def _split_heads(x: Tensor, kv_heads: int) -> Tensor:
    """``[b, H, ...]`` as ``[b, K, H / K, ...]``."""
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def _keys(block: Block, rows: Rows) -> tuple[Tensor, Tensor]:
    k, v = (x[rows.batch, :, rows.tokens].unsqueeze(2) for x in (block.k, block.v))
    return k.to(accumulator_dtype(k.dtype)), v.to(accumulator_dtype(v.dtype))


def _scores(q: Tensor, k: Tensor, block: Block, q_rows: Rows, k_rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Scores ``[b, K, H / K, t, s]`` and their derivative by ``scale * q.k`` (None: 1)."""
    scores = (q * block.scale) @ k.mT  # q first, so that large products cannot overflow a narrow dtype
    slope = None
    if block.softcap:
        bent = torch.tanh(scores / block.softcap)
        scores, slope = block.softcap * bent, 1 - bent * bent
    if block.bias is not None:
        bias = block.bias.scores(q_rows, k_rows)
        per_head = bias if bias.shape[0] == 1 else bias.reshape(*q.shape[1:3], *bias.shape[1:])
        scores = scores + per_head
    return scores, slope


def _hidden(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Scores with what is not allowed at -inf: last of all, so that nothing bends it back to a number."""
    return scores if allowed is None else scores.masked_fill(~uploaded(allowed, scores.device), -torch.inf)


def _attend(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys; rows that see none give (0, -inf)."""
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return p @ v, lse
