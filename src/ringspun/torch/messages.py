"""What a message carries beside its numbers: the header before them, the end mark behind, and what the receiver makes
of both (`ringspun.core.wire`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspun.core.wire import END_BYTES, HEADER_BYTES, Header
from ringspun.errors import TransferError
from ringspun.torch.checksum import checksum


def seal(buffer: Tensor, header: Header, *, sums: bool, relayed: bool = False) -> None:
    """Write header and end mark.

    Args:
        sums: whether the end says the checksum of what is between. relayed: keep the checksum that is there: of a block
            that is passed on, so that what this rank's own memory does to it shows as well.
    """
    end = buffer[-END_BYTES:]
    value = int(_words(end)[-1]) if relayed else _checksum(buffer, sums)
    buffer[:HEADER_BYTES].copy_(torch.from_numpy(header.pack()).view(torch.uint8))
    end.copy_(torch.from_numpy(header.pack_end(value)).view(torch.uint8))


def clear(buffer: Tensor) -> None:
    """Before it is received into: a new buffer may lie where another ring's freed one lay, and hold the very mark that
    is expected."""
    buffer[-END_BYTES:].zero_()


def check(buffer: Tensor, header: Header, what: str, *, sums: bool) -> None:
    """Raise unless what came says of itself what `header` says.

    Args:
        what: the message and its receiver in words: ``ring rank 1: the KV block of ring rank 0 ...``.
    Raises:
        TransferError: it does not, or bytes are damaged.
    """
    end = _words(buffer[-END_BYTES:])
    must, why = "carry its own header", "A stale, reordered or foreign message"
    found = header.differences(_words(buffer[:HEADER_BYTES]))
    if not found:
        must, why = "end with its own mark", "A message cut short, or two mixed"
        found = header.end_differences(end, _checksum(buffer, sums)) if end.any() else ["none"]
        if found and found[0].startswith("checksum"):
            must, why = "arrive as it was sent", "Bytes were damaged on the way or in memory"
    if found:
        raise TransferError(f"{what} must {must}; got {', '.join(found)}. {why}; the result is not returned.")


def views(
    buffer: Tensor, segments: Sequence[tuple[int, tuple[int, ...]]], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """The tensors in a message: per segment its byte offset and shape."""
    return [
        buffer[offset : offset + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
        for (offset, shape), dtype in zip(segments, dtypes, strict=True)
    ]


def _checksum(buffer: Tensor, sums: bool) -> int:
    return checksum(buffer[HEADER_BYTES:-END_BYTES]) if sums else 0


def _words(data: Tensor) -> NDArray[np.int64]:
    return data.cpu().view(torch.int64).numpy()
