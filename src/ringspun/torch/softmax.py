"""The softmax monoid in torch: merging partial results of attention over disjoint keys.

The differentiable `merge` is for users and for results from anywhere: rows marked empty may hold anything.
`RunningSoftmax` is the in-place accumulator that rings and kernels use; emptiness is known from the tiles there, so
what it is given is a number. Both obey `ringspun.core.softmax`: ``(0, -inf)`` is the identity bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ringspun.errors import ShapeError
from ringspun.torch.buffers import Room
from ringspun.torch.kernels.base import Rows, accumulator_dtype
from ringspun.torch.scraps import scraps
from ringspun.torch.sums import without, write_to


def merge(
    out1: Float[Tensor, "*b T D"],
    lse1: Float[Tensor, "*b T"],
    out2: Float[Tensor, "*b T D"],
    lse2: Float[Tensor, "*b T"],
) -> tuple[Float[Tensor, "*b T D"], Float[Tensor, "*b T"]]:
    """One attention result from two over disjoint sets of keys. Differentiable in all four.

    Args:
        out1, out2: normalised outputs. lse1, lse2: natural-log normalisers; -inf (or an op's +inf) marks a row that saw
            no key; such a row may hold anything, NaN included.
    Returns:
        ``(out, lse)`` in the dtypes of `out1` and of fp32 (fp64 for fp64). A row empty in both gives 0 and -inf.
    Raises:
        ShapeError: shapes that do not fit.

    >>> merge(torch.ones(1, 2), torch.zeros(1), torch.full((1, 2), 3.0), torch.zeros(1))[0]
    tensor([[2., 2.]])

    Source: FlashAttention-2 (arXiv 2307.08691), section 3.1, for two blocks.
    """
    if out1.shape != out2.shape or lse1.shape != lse2.shape or out1.shape[:-1] != lse1.shape:
        raise ShapeError(
            f"merge must get two out [..., T, D] and two lse [..., T]; got {tuple(out1.shape)}, {tuple(lse1.shape)}, "
            f"{tuple(out2.shape)}, {tuple(lse2.shape)}."
        )
    dtype = accumulator_dtype(out1.dtype)
    parts = []
    for out, lse in ((out1, lse1), (out2, lse2)):
        empty = torch.isinf(lse)
        parts.append((out.to(dtype).masked_fill(empty[..., None], 0), lse.to(dtype).masked_fill(empty, 0), empty))
    (a, lse_a, empty_a), (b, lse_b, empty_b) = parts
    both = torch.logaddexp(lse_a, lse_b)
    lse = torch.where(empty_a, torch.where(empty_b, -torch.inf, lse_b), torch.where(empty_b, lse_a, both))
    safe = torch.where(empty_a & empty_b, 0.0, lse)
    # -inf goes in before exp: an overflow that is masked afterwards is still NaN in backward
    w_a = torch.exp((lse_a - safe).masked_fill(empty_a, -torch.inf))[..., None]
    w_b = torch.exp((lse_b - safe).masked_fill(empty_b, -torch.inf))[..., None]
    out = torch.where(w_a == 0, 0.0, a * w_a) + torch.where(w_b == 0, 0.0, b * w_b)
    return out.to(out1.dtype), lse


class RunningSoftmax:
    """A partial result that grows in place. Starts as the identity; `add` merges a part of its rows.

    What was there before shows in the result alone, not in its bits: whether the identity was written or not, and which
    other rows there are. So what comes first is added to 0, for -0 would stay what it is; and transcendental functions
    see numbers laid out as they came, for vector code rounds unlike the rest of a row.

    Args:
        shape: of `out`, ``[..., T, D]``. dtype: of both, fp32 or fp64. room: gives the memory of `out`; default: new.
    """

    def __init__(
        self,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        room: Room | None = None,
    ) -> None:
        self.shape, self.dtype, self.device, self._room = torch.Size(shape), dtype, device, room
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._fresh = 0  # from this row on nothing was added yet, and what comes is written instead of merged
        self._parts: dict[tuple[int, int], RunningSoftmax] = {}

    def of_heads(self, heads: slice) -> RunningSoftmax:
        """The result of some heads ``[B, H, ...]``, which lies in this one: what they get is added there alone."""
        if heads == slice(0, self.shape[1]):
            return self
        if (heads.start, heads.stop) not in self._parts:
            out, lse = self._memory()
            part = RunningSoftmax(out[:, heads].shape, self.dtype, self.device)
            part._out, part._lse = out[:, heads], lse[:, heads]
            self._parts[heads.start, heads.stop] = part
        return self._parts[heads.start, heads.stop]

    @property
    def out(self) -> Tensor:
        """Normalised output over all keys added so far."""
        return self._filled()[0]

    @property
    def lse(self) -> Tensor:
        """Natural-log normaliser over all keys added so far; -inf where there were none."""
        return self._filled()[1]

    def _memory(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            self._out = (self._room or self._new)(self.shape, self.dtype)
            self._lse = self._new(self.shape[:-1], self.dtype)
        return self._out, self._lse

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(torch.Size(shape), dtype=dtype, device=self.device)

    def _filled(self, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Both, with the identity in rows up to `last` (default: all) that nothing was written to."""
        last = self.shape[-2] if last is None else last
        out, lse = self._memory()
        for part in self._parts.values():
            part._filled(last)
        if last > self._fresh:
            rows = slice(self._fresh, last)
            places: list[Any] = [(..., rows)]
            if self._parts:
                places = [(slice(None), heads, rows) for heads in without(self._parts, self.shape[1])]
            for mine in places:
                lse[mine] = -torch.inf
                out[(*mine, slice(None))] = 0
            self._fresh = last
        return out, lse

    def add(self, rows: Rows | None, out: Tensor, lse: Tensor) -> None:
        """Merge a partial result of some rows (None: all); rows that saw no key are (0, -inf).

        Args:
            out, lse: of those rows; may be kept and written to.
        """
        rows = Rows(slice(0, None), slice(0, self.shape[-2])) if rows is None else rows
        first, last = rows.tokens.start, rows.tokens.stop
        if self._out is None and out.shape == self.shape and out.dtype == lse.dtype == self.dtype:
            self._out, self._lse, self._fresh = out.add_(0.0), lse.add_(0.0), last
            return
        fresh = first >= self._fresh and rows.of_all_batch_rows
        running, running_lse = self._filled(first if fresh else last)
        mine, mine_lse = running[rows.batch][..., rows.tokens, :], running_lse[rows.batch][..., rows.tokens]
        if fresh:
            write_to(mine, out)
            write_to(mine_lse, lse)
            self._fresh = last
            return
        lse, old = lse.to(self.dtype).contiguous(), mine_lse.contiguous()
        # Weights from the difference, not from the total: each is exact relative to itself, and they add up to 1.
        ahead = (lse - old.masked_fill(lse == -torch.inf, 0.0))[..., None]
        whole = mine, out, torch.sigmoid(-ahead), torch.sigmoid(ahead)
        for old_out, new_out, keep, take in [whole] if out.dtype == self.dtype else scraps(*whole):
            old_out.mul_(keep).addcmul_(new_out.to(self.dtype), take)
        mine_lse.copy_(torch.logaddexp(old, lse))

    def add_sinks(self, sinks: Tensor, rows: slice) -> None:
        """Merge one key of score ``sinks[h]`` and value 0 into some rows of head h; -inf is none. Once, at the end."""
        out, lse = (x[:, :, rows] for x in self._filled())
        old = lse.contiguous()
        total = torch.logaddexp(old, sinks.to(self.dtype)[:, None])
        out.mul_(torch.exp(old - total.masked_fill(total == -torch.inf, 0.0))[..., None])
        lse.copy_(total)
