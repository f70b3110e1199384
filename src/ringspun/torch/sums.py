"""Sums that grow in place: gradients of some rows at a time."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ringspun.torch.kernels.base import Rows


class RowSum:
    """A sum over parts of rows ``[B, H, T, D]``. What comes first to a row is written, not added to a zero that would
    have had to be written before: kernels go through rows in order, and most of them are met once. The bits are those
    of a sum that starts from zero (-0 becomes 0), so that they do not tell what came to which row first.

    Args:
        like: whose shape and device. dtype: of the sum. room: where it lies; default: in a tensor of its own.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, room: Tensor | None = None) -> None:
        self._sum = torch.empty(like.shape, dtype=dtype, device=like.device) if room is None else room
        self._fresh = 0  # from this row on nothing was written yet
        self._parts: dict[tuple[int, int], RowSum] = {}

    def of_heads(self, heads: slice) -> RowSum:
        """The sum of some heads, which lies in this one: what they get is added there alone."""
        if heads == slice(0, self._sum.shape[1]):
            return self
        if (heads.start, heads.stop) not in self._parts:
            mine = self._sum[:, heads]
            self._parts[heads.start, heads.stop] = RowSum(mine, mine.dtype, room=mine)
        return self._parts[heads.start, heads.stop]

    @property
    def sum(self) -> Tensor:
        """The whole, zero where nothing came."""
        self._zero_up_to(self._sum.shape[2])
        return self._sum

    def add(self, rows: Rows, part: Tensor) -> None:
        """Add `part` to some rows."""
        first, last = rows.tokens.start, rows.tokens.stop
        if not rows.of_all_batch_rows or first < self._fresh < last:
            self._zero_up_to(last)
        if first < self._fresh:
            self._sum[rows.batch, :, rows.tokens] += part
            return
        self._zero_up_to(first)
        torch.add(part, 0.0, out=self._sum[:, :, first:last])
        self._fresh = last

    def _zero_up_to(self, last: int) -> None:
        for part in self._parts.values():
            part._zero_up_to(last)
        if last > self._fresh:
            self._sum[:, without(self._parts, self._sum.shape[1]), self._fresh : last] = 0
            self._fresh = last


def without(parts: Collection[tuple[int, int]], heads: int) -> slice | list[int]:
    """Which of so many heads are in none of the parts."""
    found = [h for h in range(heads) if not any(first <= h < last for first, last in parts)]
    return found if parts else slice(None)
