"""What grows from step to step of a ring: partial results that are merged, or the state of a kernel that keeps its own.

The ring asks for one accumulator per call, shows it every step and takes the result at the end. A kernel that yields
partial results is merged here (`Merging`). One whose state may stay in its own form until the last key is met derives
from `AccumulatingKernel` and brings an accumulator itself: nothing is normalised, written and merged in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspun.torch.buffers import Room
from ringspun.torch.kernels.base import Block, Kernel, Partial, Rows, StepTiles, accumulator_dtype
from ringspun.torch.softmax import RunningSoftmax


@dataclass(frozen=True)
class Result:
    """What a call's result will be, and where its accumulators lie.

    Args:
        shape: of `out`, ``[B, H, T, Dv]``. dtype: of `out`; lse and accumulators have that of `accumulator_dtype`.
        room: gives the memory of the largest accumulator, contents undefined. Where both dtypes are one it outlives
            the call and may be the result itself.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    room: Room


class Accumulator(ABC):
    """Attention of one rank's queries over the keys that they have met so far."""

    @abstractmethod
    def step(self, block: Block, tiles: StepTiles, heads: slice) -> None:
        """Take in every pair of `tiles` once. `block` has the queries of the heads `heads` and the keys they read."""

    @abstractmethod
    def finish(self, sinks: Tensor | None, parts: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """``(out [B, H, T, Dv], lse [B, H, T])``, once, after the last step; rows that saw no key: 0 and -inf.

        Args:
            sinks: ``[H]``, one more key of that score and value 0 for every row. parts: rows that are to get the same
                bits whatever other rows there are.
        """


class AccumulatingKernel(Kernel):
    """A kernel that keeps a state of its own between the steps of a forward pass."""

    @abstractmethod
    def start(self, result: Result) -> Accumulator:
        """The state of a call that has met no key."""

    def forward(self, block: Block, tiles: StepTiles) -> Iterator[Partial]:
        """One step by itself, as one partial result of all rows; those that see no key are (0, -inf)."""
        shape, q = torch.Size((*block.q.shape[:-1], block.v.shape[-1])), block.q
        state = self.start(Result(shape, q.dtype, q.device, lambda s, dtype: q.new_empty(torch.Size(s), dtype=dtype)))
        state.step(block, tiles, slice(0, shape[1]))
        rows = slice(0, shape[2])
        yield Partial(Rows(slice(0, None), rows), *state.finish(None, [rows]))


class Merging(Accumulator):
    """Merges the partial results that a kernel yields.

    Args:
        kernel: any.
    """

    def __init__(self, kernel: Kernel, result: Result) -> None:
        self._kernel, self._dtype = kernel, result.dtype
        self._running = RunningSoftmax(result.shape, accumulator_dtype(result.dtype), result.device, result.room)

    def step(self, block: Block, tiles: StepTiles, heads: slice) -> None:
        mine = self._running.of_heads(heads)
        for rows, out, lse in self._kernel.forward(block, tiles):
            mine.add(rows, out, lse)
            del out, lse  # not kept while the next are made

    def finish(self, sinks: Tensor | None, parts: Sequence[slice]) -> tuple[Tensor, Tensor]:
        if sinks is not None:
            for own in parts:
                self._running.add_sinks(sinks, own)
        return self._running.out.to(self._dtype), self._running.lse


def start(kernel: Kernel, result: Result) -> Accumulator:
    """The accumulator of a call by `kernel`."""
    return kernel.start(result) if isinstance(kernel, AccumulatingKernel) else Merging(kernel, result)
