"""The wire: what one message looks like. One buffer of bytes: a 64-byte header, segments at multiples of 64 bytes, and
a 64-byte end mark.

offset 0            64                  64 + aligned(K)       + aligned(V)
| header (8 x int64) | K [B, H, T, D]    | V [B, H, T, Dv]     | end (8 x int64) |   (KV, in the inputs' dtype)
| header             | dK [B, H, T, D]   | dV [B, H, T, Dv]    | end             |   (DKV, in the accumulators' dtype)

In a backward pass in which queries travel (`ringspun.core.ways`) the messages are

| header | q [B, H, T, D] | dO [B, H, T, Dv] | lse [B, H, T] | delta [B, H, T] | end |   (QUERIES)
| header | dQ [B, H, T, D]                                                     | end |   (DQ)

q and dO in the inputs' dtype, the rest in the accumulators'.

A message cut short leaves what lay in the receiver's buffer before in its place: only the end can tell. So the end says
what the header says, and in the place of the length, which the receiver knows, the checksum of all between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, IntEnum
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = END_BYTES = 64
MAGIC = 0x52494E475350554E  # "RINGSPUN"
END_MAGIC = 0x4E555053474E4952  # "NUPSGNIR"


class Payload(IntEnum):
    """What a message carries."""

    KV = 0
    DKV = 1
    QUERIES = 2
    DQ = 3
    HEADS = 4
    """Some heads of some rows, on their way between ranks that split heads (`ringspun.core.degrees`)."""
    HALO = 5
    """Rows that tokens of another rank need ahead of them (`ringspun.core.halo`), or their gradients."""


class Side(Enum):
    """What goes round in a pass, while the other side stays where it is."""

    KEYS = "keys"
    QUERIES = "queries"

    @property
    def block(self) -> Payload:
        """What its blocks are sent as."""
        return Payload.KV if self == Side.KEYS else Payload.QUERIES

    @property
    def gradients(self) -> Payload:
        """What the gradients that follow them are sent as."""
        return Payload.DKV if self == Side.KEYS else Payload.DQ


class Part(NamedTuple):
    """One tensor of a message: its heads, the size of what it has per head and row, and whether it is of the
    accumulators' dtype."""

    heads: int
    entry: tuple[int, ...]
    wide: bool


def aligned(n_bytes: int) -> int:
    """`n_bytes` rounded up to a multiple of 64."""
    return -(-n_bytes // HEADER_BYTES) * HEADER_BYTES


Segments = tuple[tuple[int, tuple[int, ...]], ...]


def segments(shapes: Sequence[tuple[int, ...]], itemsizes: Sequence[int]) -> tuple[Segments, int]:
    """Per tensor of a message its byte offset and shape; and the length of the whole message (bytes).

    Args:
        shapes: of the tensors. itemsizes: bytes per element of each.
    """
    found, offset = [], HEADER_BYTES
    for shape, itemsize in zip(shapes, itemsizes, strict=True):
        found.append((offset, tuple(shape)))
        offset += aligned(prod(shape) * itemsize)
    return tuple(found), offset + END_BYTES


def heads_of(stride: int, strides: int, kv_heads: int) -> slice:
    """The KV heads of one stride: as evenly as it goes, none where there are fewer heads than strides before it.

    >>> [heads_of(i, 3, 8) for i in range(3)], heads_of(2, 3, 2)
    ([slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)], slice(2, 2, None))
    """
    count = min(strides, max(kv_heads, 1))
    return slice(*(min(i, count) * kv_heads // count for i in (stride, stride + 1)))


LARGER = 4
"""A buffer more than so many times as large as asked for is left to others."""


def buffer_bytes(n_bytes: int) -> int:
    """The size of a buffer that is made for `n_bytes`, so that other lengths may use it later: header, end mark, and
    between them a power of two or some sixteenths more, hence at most a sixteenth more than asked for. A block of a
    power of two of elements fits exactly."""
    ends = HEADER_BYTES + END_BYTES
    inner = max(n_bytes - ends, HEADER_BYTES)
    step = max(HEADER_BYTES, 1 << max(0, inner.bit_length() - 5))
    return ends + -(-inner // step) * step


@dataclass(frozen=True)
class Format:
    """What all messages of one call agree on; every rank of a ring must hold the same.

    Args:
        batch: B. heads: query heads H. kv_heads: K. head_size: D. value_size: Dv. dtype: of q, k, v on the wire.
        itemsize: bytes per element of `dtype`. accumulator_itemsize: bytes per element of travelling gradients.
    """

    batch: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype: str
    itemsize: int
    accumulator_itemsize: int

    def of_stride(self, stride: int, strides: int) -> Format:
        """Of messages that carry one stride of the KV heads."""
        mine = heads_of(stride, strides, self.kv_heads)
        return self.of_heads(mine.stop - mine.start)

    def of_heads(self, kv_heads: int) -> Format:
        """Of messages that carry so many of the KV heads."""
        if kv_heads == self.kv_heads:
            return self
        return replace(self, heads=kv_heads * (self.heads // max(self.kv_heads, 1)), kv_heads=kv_heads)

    def parts(self, payload: Payload) -> tuple[Part, ...]:
        """What a message holds, in order."""
        h, k, size, value = self.heads, self.kv_heads, (self.head_size,), (self.value_size,)
        if payload == Payload.QUERIES:
            return Part(h, size, False), Part(h, value, False), Part(h, (), True), Part(h, (), True)
        if payload == Payload.DQ:
            return (Part(h, size, True),)
        wide = payload == Payload.DKV
        return Part(k, size, wide), Part(k, value, wide)

    def segments(self, payload: Payload, rows: int) -> Segments:
        """Per part its byte offset in the message and its shape."""
        return self._laid_out(payload, rows)[0]

    def message_bytes(self, payload: Payload, rows: int) -> int:
        """Length of a whole message, header and end mark included."""
        return self._laid_out(payload, rows)[1]

    def _laid_out(self, payload: Payload, rows: int) -> tuple[Segments, int]:
        parts = self.parts(payload)
        shapes = [(self.batch, part.heads, rows, *part.entry) for part in parts]
        return segments(shapes, [self.accumulator_itemsize if part.wide else self.itemsize for part in parts])


@dataclass(frozen=True)
class Header:
    """What a message says of itself; compared field by field with what the receiver's own schedule expects.

    Args:
        plan: 7 bytes that stand for the plan and its context (an int64 holds them unsigned).
        call: number of the call on this ring. phase: 0 forward; backward: 1 + the number of its forward call.
        payload: a `Payload`. step: step at which it was sent. source: ring rank that owns the rows. length: bytes.
    """

    plan: int
    call: int
    phase: int
    payload: int
    step: int
    source: int
    length: int

    def pack(self) -> NDArray[np.int64]:
        """Eight int64: the magic number and the fields in order."""
        return np.array([MAGIC, *self._values], np.int64)

    def pack_end(self, checksum: int) -> NDArray[np.int64]:
        """The end mark: eight int64, a magic number of its own and the fields, `checksum` in the place of the length.

        Args:
            checksum: of all bytes between header and end mark, as an int64; 0 where there is none.
        """
        return np.array([END_MAGIC, *self._values[:-1], checksum], np.int64)

    def differences(self, words: NDArray[np.int64]) -> list[str]:
        """What the received `words` say otherwise, one phrase a field."""
        return _differences((*_NAMES, "length"), self.pack(), words)

    def end_differences(self, words: NDArray[np.int64], checksum: int) -> list[str]:
        """What a received end mark says otherwise; `checksum`: of the bytes that came before it."""
        return _differences((*_NAMES, "checksum"), self.pack_end(checksum), words)

    @property
    def _values(self) -> list[int]:
        return [getattr(self, f.name) for f in fields(self)]


_NAMES = ("magic", *(f.name for f in fields(Header)[:-1]))
_IN_HEX = ("magic", "plan", "checksum")


def _differences(names: tuple[str, ...], wanted: NDArray[np.int64], words: NDArray[np.int64]) -> list[str]:
    def shown(name: str, value: int) -> str:
        return f"{value % 2**64:#x}" if name in _IN_HEX else str(value)

    return [
        f"{name} {shown(name, got)} instead of {shown(name, want)}"
        for name, want, got in zip(names, wanted.tolist(), words.tolist(), strict=True)
        if want != got
    ]
