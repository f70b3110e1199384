"""Memory that outlives a call: a pool of byte buffers for messages and accumulators, leased by classes of sizes, so
that plans may change every call and none is allocated anew."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, UntypedStorage

from ringspun.core.wire import LARGER, buffer_bytes

LATELY = 1024
SLACK = 2
Room = Callable[[Sequence[int], torch.dtype], Tensor]
"""Gives memory of a shape and dtype, contents undefined."""


class BufferPool:
    """Byte tensors that outlive a call. A buffer is given back only when every message that uses it is done; a call
    that fails keeps its buffers, because somebody may still be writing into them.

    A lease gets the smallest idle buffer that holds it, up to four times as large, or a new one of its class
    (`ringspun.core.wire.buffer_bytes`: at most a sixteenth more). The pool holds at most twice what was leased at once
    at the worst moment of late; what is beyond is dropped, the longest unused first.

    Args:
        lately: times from nothing leased to nothing leased that are remembered: calls, or parts of them.
    """

    def __init__(self, lately: int = LATELY) -> None:
        self._idle: dict[tuple[torch.device, int], list[tuple[int, UntypedStorage]]] = {}  # per class, oldest first
        self._out: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # weak: nobody gives back what a failure left
        self._time = itertools.count()
        self._peak, self._peaks = 0, deque([0], maxlen=lately)

    @property
    def idle_bytes(self) -> int:
        """Bytes that nobody has leased."""
        return sum(size * len(those) for (_, size), those in self._idle.items())

    def lease(self, n_bytes: int, device: torch.device) -> Tensor:
        """A uint8 tensor of exactly `n_bytes`, contents undefined."""
        asked = buffer_bytes(n_bytes)
        fitting = [size for where, size in self._idle if where == device and n_bytes <= size <= LARGER * asked]
        held = min(fitting, default=asked)
        self._peak = max(self._peak, asked + self._leased()[0])
        if fitting:
            storage = self._take((device, held), -1)
        else:
            self._drop(asked)
            storage = torch.empty(asked, dtype=torch.uint8, device=device).untyped_storage()
        buffer = torch.empty(0, dtype=torch.uint8, device=device)
        buffer.set_(storage, 0, (n_bytes,))  # type: ignore[call-overload]
        self._out[buffer.data_ptr()] = weakref.ref(buffer), asked, held
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Return a leased buffer."""
        storage = buffer.untyped_storage()
        self._out.pop(storage.data_ptr(), None)
        self._idle.setdefault((buffer.device, storage.nbytes()), []).append((next(self._time), storage))
        if self._leased() == (0, 0):
            self._peaks.append(self._peak)
            self._peak = 0
            self._drop(0)

    def forget(self) -> None:
        """Drop all that nobody has leased."""
        self._idle.clear()

    def _leased(self) -> tuple[int, int]:
        """Bytes leased now: as asked for, and as held."""
        gone = [at for at, (buffer, *_) in self._out.items() if buffer() is None]
        for at in gone:
            del self._out[at]
        return sum(asked for _, asked, _ in self._out.values()), sum(held for *_, held in self._out.values())

    def _drop(self, more: int) -> None:
        """Make place for `more` bytes within the limit."""
        limit = SLACK * max(self._peak, *self._peaks) - self._leased()[1] - more
        while self._idle and self.idle_bytes > limit:
            self._take(min(self._idle, key=lambda kind: self._idle[kind][0][0]), 0)

    def _take(self, kind: tuple[torch.device, int], which: int) -> UntypedStorage:
        _, storage = self._idle[kind].pop(which)
        if not self._idle[kind]:
            del self._idle[kind]
        return storage


class Leases:
    """What one pass of one rank leases beside its messages, given back all at once."""

    def __init__(self, pool: BufferPool, device: torch.device) -> None:
        self._pool, self._device = pool, device
        self._buffers: list[Tensor] = []

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Leased memory, contents undefined."""
        self._buffers.append(self._pool.lease(torch.Size(shape).numel() * dtype.itemsize, self._device))
        return self._buffers[-1].view(dtype).view(shape)

    def room(self, accumulator: torch.dtype, result: torch.dtype) -> Room:
        """Where accumulators come from: leased, but fresh where they are results themselves, which outlive the call."""
        if accumulator != result:
            return self.tensor
        return lambda shape, dtype: torch.empty(torch.Size(shape), dtype=dtype, device=self._device)

    def close(self) -> None:
        """Give everything back."""
        while self._buffers:
            self._pool.give_back(self._buffers.pop())


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
