"""Memory that outlives a call: a pool of byte buffers for messages and accumulators, leased by classes of sizes, so
that plans may change every call and none is allocated anew."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from ringspun.core.wire import LARGER, buffer_bytes
from ringspun.torch.uploads import on_gpu

LATELY = 1024
SLACK = 2
Room = Callable[[Sequence[int], torch.dtype], Tensor]
"""Gives memory of a shape and dtype, contents undefined."""
Kind = tuple[torch.device, int, int]
"""What a buffer can be leased for again: device, stream, size (bytes)."""


class _Lease(NamedTuple):
    """What is leased, held weakly, for nobody gives back what a failure left; bytes asked for and held; the stream."""

    buffer: weakref.ref[Tensor]
    asked: int
    held: int
    stream: int


def current_stream(device: torch.device) -> int:
    """What tells the stream that this thread queues a device's work on from its others."""
    return torch.cuda.current_stream(device).cuda_stream if on_gpu(device) else 0


class BufferPool:
    """Byte tensors that outlive a call. A buffer is given back only when every message that uses it is done; a call
    that fails keeps its buffers, because somebody may still be writing into them.

    A lease gets the smallest idle buffer that holds it, up to four times as large, or a new one of its class
    (`ringspun.core.wire.buffer_bytes`: at most a sixteenth more). The pool holds at most twice what was leased at once
    at the worst moment of late; what is beyond is dropped, the longest unused first.

    A device works in the order of its streams, not of the host: what was leased for one stream may still be written to
    when it is given back, by work that is only queued, and goes to that stream alone, where what follows comes later.

    Args:
        lately: times from nothing leased to nothing leased that are remembered: calls, or parts of them.
        stream_of: tells the streams of a device apart: the one that this thread queues on.
    """

    def __init__(self, lately: int = LATELY, stream_of: Callable[[torch.device], int] | None = None) -> None:
        self._idle: dict[Kind, list[tuple[int, UntypedStorage]]] = {}  # per stream and class, oldest first
        self._out: dict[int, _Lease] = {}
        self._stream_of = current_stream if stream_of is None else stream_of
        self._time = itertools.count()
        self._peak, self._peaks = 0, deque([0], maxlen=lately)

    @property
    def idle_bytes(self) -> int:
        """Bytes that nobody has leased."""
        return sum(size * len(those) for (*_, size), those in self._idle.items())

    def lease(self, n_bytes: int, device: torch.device) -> Tensor:
        """A uint8 tensor of exactly `n_bytes`, contents undefined."""
        asked = buffer_bytes(n_bytes)
        here = device, self._stream_of(device)
        fitting = [size for *where, size in self._idle if (*where,) == here and n_bytes <= size <= LARGER * asked]
        held = min(fitting, default=asked)
        self._peak = max(self._peak, asked + self._leased()[0])
        if fitting:
            storage = self._take((*here, held), -1)
        else:
            self._drop(asked)
            storage = torch.empty(asked, dtype=torch.uint8, device=device).untyped_storage()
        buffer = torch.empty(0, dtype=torch.uint8, device=device)
        buffer.set_(storage, 0, (n_bytes,))  # type: ignore[call-overload]
        self._out[buffer.data_ptr()] = _Lease(weakref.ref(buffer), asked, held, here[1])
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Return a leased buffer."""
        storage = buffer.untyped_storage()
        lease = self._out.pop(storage.data_ptr(), None)
        stream = self._stream_of(buffer.device) if lease is None else lease.stream
        self._idle.setdefault((buffer.device, stream, storage.nbytes()), []).append((next(self._time), storage))
        if self._leased() == (0, 0):
            self._peaks.append(self._peak)
            self._peak = 0
            self._drop(0)

    def forget(self) -> None:
        """Drop all that nobody has leased."""
        self._idle.clear()

    def _leased(self) -> tuple[int, int]:
        """Bytes leased now: as asked for, and as held."""
        for at in [at for at, lease in self._out.items() if lease.buffer() is None]:
            del self._out[at]
        return sum(lease.asked for lease in self._out.values()), sum(lease.held for lease in self._out.values())

    def _drop(self, more: int) -> None:
        """Make place for `more` bytes within the limit."""
        limit = SLACK * max(self._peak, *self._peaks) - self._leased()[1] - more
        while self._idle and self.idle_bytes > limit:
            self._take(min(self._idle, key=lambda kind: self._idle[kind][0][0]), 0)

    def _take(self, kind: Kind, which: int) -> UntypedStorage:
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
