"""A pool of byte buffers for messages, leased by size: no allocation from the second call of a shape on."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

KEPT = 12


class BufferPool:
    """Byte tensors that outlive a call. A buffer is given back only when every message that uses it is done; a call
    that fails keeps its buffers, because somebody may still be writing into them.

    Args:
        kept: idle buffers held at most; the longest unused are dropped.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._idle: OrderedDict[int, Tensor] = OrderedDict()
        self._kept = kept

    def lease(self, n_bytes: int, device: torch.device) -> Tensor:
        """A uint8 tensor of exactly `n_bytes`, contents undefined."""
        for key, buffer in reversed(self._idle.items()):
            if buffer.numel() == n_bytes and buffer.device == device:
                return self._idle.pop(key)
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """Return a leased buffer."""
        self._idle[id(buffer)] = buffer
        while len(self._idle) > self._kept:
            self._idle.popitem(last=False)


LINE_BYTES = 64


def in_lines(x: Tensor) -> Tensor:
    """`x` ``[B, H, T, ...]``, or a copy, in which every row of 64 begins a cache line, whatever T is: kernels that look
    at where their operands lie, as products of few rows do, then see the same on rings of every size."""
    rest = x.shape[3:]
    packed = x.stride()[2:] == (*rest, 1)
    at = x.data_ptr(), *(s * x.itemsize for s in x.stride()[:2])
    if packed and not any(a % LINE_BYTES for a in at):
        return x
    rows = -(-x.shape[2] // LINE_BYTES) * LINE_BYTES
    room = x.new_empty((*x.shape[:2], rows, *rest))
    return room.narrow(2, 0, x.shape[2]).copy_(x)
