"""`xla`: blockwise attention in plain jax operations, on any device and in any float dtype; takes bands whole.

Loops over tiles, blocks of queries and blocks of keys have bounds that are data: work is in proportion to the pairs
that are allowed, and one compiled program does every mask. Never more than a block x block of scores is alive; backward
recomputes them. Source: memory-efficient attention (arXiv 2112.05682), backward of FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from ringspun.core.host import is_integer
from ringspun.errors import ShapeError
from ringspun.jax.kernels.base import Block, Call, Kernel, Queries, Running, Saved, Sums, Tiles, accumulator

SMALLEST, LARGEST = 128, 512
MOST_SCORES = 1 << 19
"""Scores of all heads and batch rows that a block chosen from shapes may have, if it is not of the smallest size: 2 MB
in float32, which caches hold."""
DTYPES = ("float64", "float32", "bfloat16", "float16")
TOKENS = -2
"""The axis of tokens in ``[..., T, D]``."""

S = TypeVar("S")


@dataclass(frozen=True)
class Xla(Kernel):
    """Blockwise attention in plain jax.

    Args:
        block_size: rows of queries and of keys whose scores are alive at once (tokens); None: chosen from shapes.
    Raises:
        ShapeError: a `block_size` that is no positive integer.
    """

    block_size: int | None = None
    name = "xla"

    def __post_init__(self) -> None:
        if self.block_size is not None and (not is_integer(self.block_size) or self.block_size < 1):
            raise ShapeError(f"block_size must be an integer >= 1, or None; got {self.block_size!r}.")

    def refuses(self, call: Call) -> str | None:
        if call.dtype not in DTYPES:
            return f"dtype must be one of {', '.join(DTYPES)}; got {call.dtype}"
        return None if call.bias in ("", "alibi") else f"bias must be Alibi; got {call.bias}"

    def forward(
        self, call: Call, queries: Queries, block: Block, slopes: Any, tiles: Tiles, running: Running
    ) -> Running:
        def of_queries(tile: _Tile, running: Running) -> Running:
            mine = tile.queries(queries)

            def of_keys(keys: _Keys, so_far: Running) -> Running:
                pairs = _pairs(call, tile, mine, keys, slopes)
                return _softmax(call, so_far, pairs, keys.v)

            rows = Running(tile.q_rows(running.total), tile.q_row(running.top), tile.q_row(running.weight))
            rows = tile.over_keys(block, call.head_size, _where_any(call, tile, mine, of_keys), rows)
            return Running(
                tile.put(running.total, rows.total, TOKENS),
                tile.put(running.top, rows.top, -1),
                tile.put(running.weight, rows.weight, -1),
            )

        return _over_queries(call, self._sizes(call), tiles, of_queries, running)

    def backward(
        self, call: Call, queries: Queries, block: Block, slopes: Any, saved: Saved, tiles: Tiles, sums: Sums
    ) -> Sums:
        def of_queries(tile: _Tile, sums: Sums) -> Sums:
            mine = tile.queries(queries)
            dout, lse = tile.q_rows(saved.dout), tile.q_row(saved.lse)[..., None]
            delta = tile.q_row(saved.delta)[..., None]

            def of_keys(keys: _Keys, so_far: Sums) -> Sums:
                pairs = _pairs(call, tile, mine, keys, slopes)
                p = jnp.exp(pairs.scores - lse)  # 0 where the score is -inf, for lse is finite
                ds = jnp.where(pairs.allowed, p * (_dot(call, "bkgtd,bksd->bkgts", dout, keys.v) - delta), 0)
                dslopes = so_far.dslopes
                if dslopes is not None:
                    dslopes = dslopes - (ds * pairs.distance).sum((0, 3, 4))
                ds = ds * pairs.slope * call.scale
                dk = _dot(call, "bkgts,bkgtd->bksd", ds, mine.q)
                dv = _dot(call, "bkgts,bkgtd->bksd", p, dout)
                dkv = keys.add(so_far.dkv, jnp.concatenate([dk, dv], axis=-1))
                return Sums(so_far.dq + _dot(call, "bkgts,bksd->bkgtd", ds, keys.k), dkv, dslopes)

            rows = sums._replace(dq=tile.q_rows(sums.dq))
            rows = tile.over_keys(block, call.head_size, _where_any(call, tile, mine, of_keys), rows)
            return rows._replace(dq=tile.put(sums.dq, rows.dq, TOKENS))

        return _over_queries(call, self._sizes(call), tiles, of_queries, sums)

    def _sizes(self, call: Call) -> tuple[int, int]:
        """Rows of a block of queries and of a block of keys."""
        size = self.block_size
        if size is None:
            size = LARGEST
            while size > SMALLEST and size * size * call.batch * call.heads > MOST_SCORES:
                size //= 2
        return min(size, call.rows), min(size, call.key_rows)


class _Keys(NamedTuple):
    """A block of key rows of a tile: rows ``start + [0, size)``, of which those that are `real` belong to it."""

    k: Array
    v: Array
    start: Array
    number: Array
    real: Array
    segments: Array | None
    positions: Array | None

    def add(self, total: Array, share: Array) -> Array:
        """`total` with `share` added to these rows."""
        size = share.shape[TOKENS]
        there = lax.dynamic_slice_in_dim(total, self.start, size, total.ndim + TOKENS)
        return lax.dynamic_update_slice_in_dim(total, there + share, self.start, total.ndim + TOKENS)


class _Tile(NamedTuple):
    """A block of the query rows of a tile: rows ``start + [0, size)``, of which those that are `real` belong to it."""

    key_size: int
    start: Array
    number: Array
    real: Array
    k0: Array
    k1: Array
    low: Array
    high: Array

    def q_rows(self, x: Array) -> Array:
        """The rows of ``[..., T, D]``, 0 where they are not real: they may hold anything."""
        rows = lax.dynamic_slice_in_dim(x, self.start, len(self.number), x.ndim + TOKENS)
        return jnp.where(self.real[:, None], rows, jnp.zeros_like(rows))

    def q_row(self, x: Array) -> Array:
        """The rows of ``[..., T]``."""
        return lax.dynamic_slice_in_dim(x, self.start, len(self.number), x.ndim - 1)

    def put(self, x: Array, rows: Array, axis: int) -> Array:
        """`x` with these rows, where they are real, in place of its own."""
        real = self.real[:, None] if axis == TOKENS else self.real
        there = lax.dynamic_slice_in_dim(x, self.start, len(self.number), x.ndim + axis)
        return lax.dynamic_update_slice_in_dim(x, jnp.where(real, rows, there), self.start, x.ndim + axis)

    def queries(self, all_rows: Queries) -> Queries:
        """These rows of the local queries."""
        q = self.q_rows(all_rows.q)
        segments, positions = (None if x is None else self.q_row(x) for x in all_rows[1:])
        return Queries(q, segments, positions)

    def over_keys(self, block: Block, head_size: int, body: Callable[[_Keys, S], S], state: S) -> S:
        """`state` after `body` of every block of key rows that these queries can see."""
        size, all_rows = self.key_size, block.kv.shape[TOKENS]

        def step(n: Array, state: S) -> S:
            first = self.k0 + n * size
            start = jnp.minimum(first, all_rows - size)  # the last block begins earlier rather than reach beyond
            number = start + jnp.arange(size, dtype=jnp.int32)
            real = (number >= first) & (number < self.k1)
            kv = lax.dynamic_slice_in_dim(block.kv, start, size, block.kv.ndim + TOKENS)
            kv = jnp.where(real[:, None], kv, jnp.zeros_like(kv))
            segments, positions = (
                None if x is None else lax.dynamic_slice_in_dim(x, start, size, x.ndim - 1) for x in block[1:]
            )
            keys = _Keys(kv[..., :head_size], kv[..., head_size:], start, number, real, segments, positions)
            return body(keys, state)

        return _loop(_blocks(self.k1 - self.k0, size), step, state)


def _over_queries(call: Call, sizes: tuple[int, int], tiles: Tiles, body: Callable[[_Tile, S], S], state: S) -> S:
    """`state` after `body` of every block of query rows of every tile."""
    size, key_size = sizes

    def of_tile(n: Array, state: S) -> S:
        q0, q1, k0, k1, low, high = (tiles.table[tiles.first + n, column] for column in range(6))

        def step(n: Array, state: S) -> S:
            first = q0 + n * size
            last = jnp.minimum(first + size, q1)
            start = jnp.minimum(first, call.rows - size)
            number = start + jnp.arange(size, dtype=jnp.int32)
            real = (number >= first) & (number < last)
            seen0, seen1 = jnp.maximum(k0, first - high), jnp.minimum(k1, last - low)
            return body(_Tile(key_size, start, number, real, seen0, seen1, low, high), state)

        return _loop(_blocks(q1 - q0, size), step, state)

    return _loop(tiles.last - tiles.first, of_tile, state)


def _blocks(rows: Array, size: int) -> Array:
    return (rows + size - 1) // size


def _loop(count: Array, body: Callable[[Array, S], S], state: S) -> S:
    result: S = lax.fori_loop(jnp.zeros_like(count), count, body, state)
    return result


class _Pairs(NamedTuple):
    """Scores ``[B, K, G, t, s]``, -inf where not allowed; their derivative by ``scale * q.k``; ``|q - k|``."""

    scores: Array
    allowed: Array
    slope: Array | float
    distance: Array | None


def _pairs(call: Call, tile: _Tile, queries: Queries, keys: _Keys, slopes: Any) -> _Pairs:
    scores = _dot(call, "bkgtd,bksd->bkgts", queries.q, keys.k) * call.scale
    slope: Array | float = 1.0
    if call.softcap:
        bent = jnp.tanh(scores / call.softcap)
        scores, slope = call.softcap * bent, 1 - bent * bent
    distance = None
    if slopes is not None:
        assert queries.positions is not None and keys.positions is not None
        distance = abs(queries.positions[:, None] - keys.positions[None, :]).astype(scores.dtype)
        scores = scores - slopes[..., None, None] * distance
    allowed = _allowed(tile, queries, keys)
    return _Pairs(jnp.where(allowed, scores, -jnp.inf), allowed, slope, distance)


def _allowed(tile: _Tile, queries: Queries, keys: _Keys) -> Array:
    """Which pairs of two blocks are the tile's: ``[t, s]``, or ``[B, 1, 1, t, s]`` by segments."""
    behind = tile.number[:, None] - keys.number[None, :]
    allowed = tile.real[:, None] & keys.real[None, :] & (tile.low <= behind) & (behind <= tile.high)
    if queries.segments is None or keys.segments is None:
        return allowed
    q, k = queries.segments[:, :, None], keys.segments[:, None, :]
    return (allowed & (q == k) & (q >= 0))[:, None, None]


def _where_any(call: Call, tile: _Tile, queries: Queries, body: Callable[[_Keys, S], S]) -> Callable[[_Keys, S], S]:
    """`body`, left out where segments allow no pair; tiles alone never ask for such blocks."""
    if not call.segments:
        return body

    def some(keys: _Keys, state: S) -> S:
        seen = _allowed(tile, queries, keys).any()
        result: S = lax.cond(seen, lambda state: body(keys, state), lambda state: state, state)
        return result

    return some


def _softmax(call: Call, before: Running, pairs: _Pairs, v: Array) -> Running:
    """The running softmax and one block of keys more."""
    top = jnp.maximum(before.top, pairs.scores.max(-1))
    safe = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(pairs.scores - safe[..., None])
    keep = jnp.exp(before.top - safe)
    total = before.total * keep[..., None] + _dot(call, "bkgts,bksd->bkgtd", weights, v)
    return Running(total, top, before.weight * keep + weights.sum(-1))


def _dot(call: Call, how: str, a: Array, b: Array) -> Array:
    """A product of operands in the call's dtype, added up in the accumulators'; never in fewer bits than asked for."""
    dtype = jnp.dtype(call.dtype)
    wide = accumulator(dtype)
    precision = lax.Precision.HIGHEST if dtype == wide else None
    return jnp.einsum(how, a.astype(dtype), b.astype(dtype), preferred_element_type=wide, precision=precision)
