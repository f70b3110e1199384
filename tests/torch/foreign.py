"""A layout and masks that the package has never seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core import regions as rg
from ringspun.core.layout.base import RANK, Layout, Runs
from ringspun.core.mask import Allowed, Documents, Mask, Positions


@dataclass(frozen=True)
class RandomRuns(Layout):
    """The sequence cut at random places; each piece to a random rank, in random order. Some ranks may get nothing."""

    seed: int = 0
    pieces: int = 11

    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        rng = np.random.default_rng([self.seed, seq_len, ring_size])
        cuts = rng.choice(np.arange(1, max(seq_len, 1)), size=min(self.pieces, max(seq_len, 1)) - 1, replace=False)
        edges = np.concatenate([[0], np.sort(cuts), [seq_len]])
        starts, stops = edges[:-1], edges[1:]
        ranks = rng.integers(ring_size, size=len(starts))
        runs = np.stack([ranks, starts, stops, np.ones_like(starts)], axis=1)[rng.permutation(len(starts))]
        runs = runs[runs[:, 2] > runs[:, 1]]
        return runs[np.argsort(runs[:, RANK], kind="stable")]


@dataclass(frozen=True)
class Checkerboard(Mask):
    """The white squares of a board, `size` tokens wide."""

    size: int = 3

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return (q // self.size + k // self.size) % 2 == 0

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        wide, q_stop = rg.UNBOUNDED, q_start + q_len
        squares = [
            (max(q, q_start), min(q + self.size, q_stop), k, min(k + self.size, k_len), -wide, wide)
            for q in range(q_start // self.size * self.size, q_stop, self.size)
            for k in range((q // self.size) % 2 * self.size, k_len, 2 * self.size)
        ]
        return rg.tighten(np.array(squares, np.int64).reshape(-1, 6))


@dataclass(frozen=True)
class Diagonals(Mask):
    """Every `step`-th diagonal, future ones too: bands one pair wide."""

    step: int = 3

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return (q - k) % self.step == 1

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        q_stop = q_start + q_len
        distances = [d for d in range(q_start + 1 - k_len, q_stop) if d % self.step == 1]
        lines = [(q_start, q_stop, 0, k_len, d, d) for d in distances]
        return rg.tighten(np.array(lines, np.int64).reshape(-1, 6))
