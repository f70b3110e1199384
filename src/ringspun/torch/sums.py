"""Sums that grow in place: gradients of some rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ringspun.torch.kernels.base import Rows


class RowSum:
    """A sum over parts of rows ``[B, H, T, D]``. What comes first to a row is written, not added to a zero that would
    have had to be written before: kernels go through rows in order, and most of them are met once. The bits are those
    of a sum that starts from zero (-0 becomes 0), so that they do not tell what came to which row first.

    Args:
        like: whose shape and device. dtype: of the sum.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._sum = torch.empty(like.shape, dtype=dtype, device=like.device)
        self._fresh = 0  # from this row on nothing was written yet

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
        if last > self._fresh:
            self._sum[:, :, self._fresh : last] = 0
            self._fresh = last
