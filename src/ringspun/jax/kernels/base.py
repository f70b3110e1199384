"""What a kernel is: local attention over the tiles of one hop, and an honest refusal of everything it cannot do.

A kernel never sees a ring, a mask or a layout: it gets local queries, one block of keys and values, and tiles as data.
Query heads stand as ``[K, G]``: G of them share each of K key/value heads. New kernel: one file, one subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


@dataclass(frozen=True)
class Call:
    """Facts of one attention call that are equal on all ranks; all that a kernel may judge by.

    Args:
        batch: B. heads, kv_heads: H and K. head_size, value_size: D and Dv. dtype: of q, k, v, by name.
        rows, key_rows: queries and keys that one rank holds. scale: of the scores. softcap: their bound, 0 for none.
        bias: what kind is added to them, "" for none. segments: whether every token has a segment id.
    """

    batch: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype: str
    rows: int
    key_rows: int
    scale: float = 1.0
    softcap: float = 0.0
    bias: str = ""
    segments: bool = False


class Queries(NamedTuple):
    """Local queries, and what masks and biases by data know of them."""

    q: Float[Array, "B K G T D"]
    segments: Int[Array, "B T"] | None = None
    positions: Int[Array, " T"] | None = None


class Block(NamedTuple):
    """One block of keys and values, side by side so that they travel as one message, and what is known of them."""

    kv: Float[Array, "B K s D+Dv"]
    segments: Int[Array, "B s"] | None = None
    positions: Int[Array, " s"] | None = None


class Tiles(NamedTuple):
    """Rows ``[first, last)`` of a table ``[n, 6]``: ``q in [q0, q1), k in [k0, k1), lo <= q - k <= hi``, local rows."""

    table: Int[Array, "n 6"]
    first: Int[Array, ""]
    last: Int[Array, ""]


class Running(NamedTuple):
    """The softmax so far, in the accumulators' dtype: ``sum(exp(score - top) * v)``, `top` (-inf: no key yet) and
    ``sum(exp(score - top))``."""

    total: Float[Array, "B K G T Dv"]
    top: Float[Array, "B K G T"]
    weight: Float[Array, "B K G T"]


class Saved(NamedTuple):
    """What backward knows of the queries: the incoming gradient of out, the final lse (finite: 0 where there is no
    key), and ``delta = sum(out * dout, -1) - dlse``."""

    dout: Float[Array, "B K G T Dv"]
    lse: Float[Array, "B K G T"]
    delta: Float[Array, "B K G T"]


class Sums(NamedTuple):
    """Gradients so far, in the accumulators' dtype: of the local queries, of a block, of the bias's slopes."""

    dq: Float[Array, "B K G T D"]
    dkv: Float[Array, "B K s D+Dv"]
    dslopes: Float[Array, "K G"] | None = None


class Kernel(ABC):
    """Local attention over a list of tiles."""

    name: str

    @abstractmethod
    def refuses(self, call: Call) -> str | None:
        """Why this kernel cannot do `call` exactly, or None. Judged only by facts equal on all ranks."""

    @abstractmethod
    def forward(
        self, call: Call, queries: Queries, block: Block, slopes: Any, tiles: Tiles, running: Running
    ) -> Running:
        """`running` and every pair of `tiles` once."""

    @abstractmethod
    def backward(
        self, call: Call, queries: Queries, block: Block, slopes: Any, saved: Saved, tiles: Tiles, sums: Sums
    ) -> Sums:
        """`sums` and the shares of every pair of `tiles` once."""


def accumulator(dtype: Any) -> Any:
    """float32, but float64 for float64: what lse, running results and travelling gradients are held in."""
    return jnp.promote_types(jnp.float32, dtype)
