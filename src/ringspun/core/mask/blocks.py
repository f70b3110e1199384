"""Masks of blocks of positions: local chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core import regions as rg
from ringspun.core.mask.base import Allowed, Mask, Positions, everything, integer, rectangles


@dataclass(frozen=True)
class Chunks(Mask):
    """Local chunks (Llama 4): query and key in the same chunk of `size` tokens. With `Causal()` for decoding."""

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", integer("Chunks size", self.size, least=1))

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return np.asarray(q // self.size == k // self.size)

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        first = max(q_start, 0) // self.size * self.size
        starts = np.arange(first, min(q_start + q_len, k_len), self.size)
        stops = starts + self.size
        return rectangles(starts, stops, starts, stops, everything(q_len, k_len, q_start))
