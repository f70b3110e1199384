"""Sums that grow in place: gradients of some rows at a time."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ringspun.torch.buffers import Room
from ringspun.torch.kernels.base import Rows
from ringspun.torch.scraps import scraps


def add_to(total: Tensor, part: Tensor) -> None:
    """``total += part``. Of another dtype torch would first make a whole copy in that of the total."""
    for mine, theirs in [(total, part)] if total.dtype == part.dtype else scraps(total, part):
        mine += theirs


def write_to(total: Tensor, part: Tensor) -> None:
    """``total = 0 + part``: -0 becomes 0."""
    if total.dtype == part.dtype:
        torch.add(part, 0.0, out=total)
    else:
        total.copy_(part).add_(0.0)


class RowSum:
    """A sum over parts of rows ``[B, H, T, D]``. What comes first to a row is written, not added to a zero that would
    have had to be written before: kernels go through rows in order, and most of them are met once. The bits are those
    of a sum that starts from zero (-0 becomes 0), so that they do not tell what came to which row first.

    Args:
        shape: of the whole. dtype: of the sum. room: gives its memory, when the first part comes.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, room: Room) -> None:
        self._shape, self._dtype, self._room = shape, dtype, room
        self._sum: Tensor | None = None
        self._fresh = 0  # from this row on nothing was written yet
        self._parts: dict[tuple[int, int], RowSum] = {}

    def reserve(self) -> Tensor:
        """Get its memory now, before the first part comes."""
        if self._sum is None:
            self._sum = self._room(self._shape, self._dtype)
        return self._sum

    def of_heads(self, heads: slice) -> RowSum:
        """The sum of some heads, which lies in this one: what they get is added there alone."""
        if heads == slice(0, self._shape[1]):
            return self
        if (heads.start, heads.stop) not in self._parts:
            mine = self.reserve()[:, heads]
            self._parts[heads.start, heads.stop] = RowSum(mine.shape, self._dtype, lambda *_: mine)
        return self._parts[heads.start, heads.stop]

    @property
    def sum(self) -> Tensor:
        """The whole, zero where nothing came."""
        return self._filled(self._shape[2])

    def add(self, rows: Rows, part: Tensor) -> None:
        """Add `part` to some rows."""
        first, last, _ = rows.tokens.indices(self._shape[2])
        if first == last:
            return
        if not rows.of_all_batch_rows or first < self._fresh < last:
            self._filled(last)
        if first < self._fresh:
            add_to(self._filled(first)[rows.batch, :, rows.tokens], part)
            return
        write_to(self._filled(first)[:, :, first:last], part)
        self._fresh = last

    def add_rows(self, rows: Tensor, part: Tensor) -> None:
        """Add `part`, of the sum's dtype, to rows of these numbers, all different."""
        self.sum.index_add_(2, rows, part)

    def _filled(self, last: int) -> Tensor:
        """The whole, with zeros in rows up to `last` that nothing was written to."""
        whole = self.reserve()
        for part in self._parts.values():
            part._filled(last)
        if last > self._fresh:
            for heads in without(self._parts, self._shape[1]):
                whole[:, heads, self._fresh : last] = 0
            self._fresh = last
        return whole


def without(parts: Collection[tuple[int, int]], heads: int) -> list[slice]:
    """Which of so many heads are in none of the parts, as slices: a device would have to be sent a list of them."""
    edges = [0, *(edge for part in sorted(parts) for edge in part), heads]
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
