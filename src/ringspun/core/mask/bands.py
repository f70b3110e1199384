"""Masks of the distance between query and key: everything, causal, windows, bands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core import regions as rg
from ringspun.core.mask.base import Allowed, Mask, Positions, everything, integer
from ringspun.errors import MaskError


@dataclass(frozen=True)
class Band(Mask):
    """``-right <= q - k <= left``: the closed interval of flash-attention; None is unbounded.

        Band(2, 1), 5 tokens    k 0 1 2 3 4
                             q 0  1 1 . . .
                             q 1  1 1 1 . .
                             q 2  1 1 1 1 .
                             q 3  . 1 1 1 1
                             q 4  . . 1 1 1

    Args:
        left: keys visible before the query (tokens). right: keys visible after it (tokens).
    Raises:
        MaskError: a bound is not an integer, or the band is empty (``left < -right``).
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, integer(f"Band {name}", value))
        if self.left is not None and self.right is not None and self.left < -self.right:
            raise MaskError(f"Band must have left >= -right; got left={self.left}, right={self.right}.")

    def _bounds(self) -> tuple[int, int]:
        lo = -rg.UNBOUNDED if self.right is None else -self.right
        return lo, rg.UNBOUNDED if self.left is None else self.left

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        lo, hi = self._bounds()
        return np.asarray((lo <= q - k) & (q - k <= hi))

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        return rg.rectangle(q_start, q_start + q_len, 0, k_len, *self._bounds())


@dataclass(frozen=True)
class Full(Mask):
    """Every pair."""

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return np.ones(np.broadcast_shapes(q.shape, k.shape), np.bool_)

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        return everything(q_len, k_len, q_start)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and every key before it: ``0 <= q - k``."""

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return np.asarray(q >= k)

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        return rg.rectangle(q_start, q_start + q_len, 0, k_len, lo=0)


@dataclass(frozen=True)
class Window(Mask):
    """A query sees itself and the ``size - 1`` keys before it: Hugging Face's `sliding_window`, ``Band(size - 1, 0)``.

    Flash-attention's ``window_size=(left, 0)`` is ``Window(left + 1)``.

    Args:
        size: keys visible per query (tokens, at least 1); None sees every key before the query.
    """

    size: int | None

    def __post_init__(self) -> None:
        if self.size is not None:
            object.__setattr__(self, "size", integer("Window size", self.size, least=1))

    def _band(self) -> Band:
        return Band(None if self.size is None else self.size - 1, 0)

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return self._band().allowed(q, k)

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        return self._band().regions(q_len, k_len, q_start)
