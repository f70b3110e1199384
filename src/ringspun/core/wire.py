"""The wire: what one message looks like. One buffer of bytes: a 64-byte header, then segments at multiples of 64 bytes.

offset 0            64                  64 + aligned(K)
| header (8 x int64) | K [B, H, T, D]    | V [B, H, T, Dv]     |      (payload KV, in the inputs' dtype)
| header             | dK [B, H, T, D]   | dV [B, H, T, Dv]    |      (payload DKV, in the accumulators' dtype)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from math import prod

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 64
MAGIC = 0x52494E475350554E  # "RINGSPUN"


class Payload(IntEnum):
    """What a message carries."""

    KV = 0
    DKV = 1


def aligned(n_bytes: int) -> int:
    """`n_bytes` rounded up to a multiple of 64."""
    return -(-n_bytes // HEADER_BYTES) * HEADER_BYTES


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

    def segments(self, payload: Payload, rows: int) -> tuple[tuple[int, tuple[int, int, int, int]], ...]:
        """Per segment its byte offset in the message and its shape."""
        size = self.itemsize if payload == Payload.KV else self.accumulator_itemsize
        first = (self.batch, self.kv_heads, rows, self.head_size)
        second = (self.batch, self.kv_heads, rows, self.value_size)
        return (HEADER_BYTES, first), (HEADER_BYTES + aligned(prod(first) * size), second)

    def message_bytes(self, payload: Payload, rows: int) -> int:
        """Length of a whole message, header included."""
        size = self.itemsize if payload == Payload.KV else self.accumulator_itemsize
        offset, shape = self.segments(payload, rows)[-1]
        return offset + aligned(prod(shape) * size)


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
        return np.array([MAGIC, *(getattr(self, f.name) for f in fields(self))], np.int64)

    def differences(self, words: NDArray[np.int64]) -> list[str]:
        """What the received `words` say otherwise, one phrase a field."""
        names = ["magic", *(f.name for f in fields(self))]
        return [
            f"{name} {int(got):#x} instead of {int(want):#x}"
            if name in ("magic", "plan")
            else f"{name} {got} instead of {want}"
            for name, want, got in zip(names, self.pack().tolist(), words.tolist(), strict=True)
            if want != got
        ]
