"""A kernel that takes its time and computes nothing: overlap measured whatever else the machine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ringspun.torch.kernels import Call, Kernel
from ringspun.torch.kernels.base import Block, Gradients, Partial, Saved, StepTiles, tile_rows

BACKWARD = 2.5
"""Backward's share of products over forward's."""


class Sleeping(Kernel):
    """Sleeps for every pair of a tile's rectangle; its results mean nothing.

    Args:
        seconds_per_pair: of query and key, all heads together, in forward. sleep: what to do so long.
    """

    name = "sleeping"

    def __init__(self, seconds_per_pair: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._seconds, self._take = seconds_per_pair, sleep

    def refuses(self, call: Call) -> str | None:
        return None

    def forward(self, block: Block, tiles: StepTiles) -> Iterator[Partial]:
        for tile in tiles.bands:
            rows, _ = tile_rows(tile)
            self._sleep(tile, 1.0)
            out = block.q.new_zeros((*block.q[:, :, rows.tokens].shape[:-1], block.v.shape[-1]))
            yield Partial(rows, out, out.new_zeros(out.shape[:-1]))

    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        for tile in tiles.bands:
            q_rows, k_rows = tile_rows(tile)
            self._sleep(tile, BACKWARD)
            parts = block.q[:, :, q_rows.tokens], block.k[:, :, k_rows.tokens], block.v[:, :, k_rows.tokens]
            yield Gradients(q_rows, k_rows, *(x.clone() for x in parts))

    def _sleep(self, tile: list[int], times: float) -> None:
        _, _, q0, q1, k0, k1 = tile[:6]
        self._take(times * self._seconds * (q1 - q0) * (k1 - k0))
