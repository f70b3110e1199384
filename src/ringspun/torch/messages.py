"""What a message carries beside its numbers: the header before them, the end mark behind, and what the receiver makes
of both (`ringspun.core.wire`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspun.core.wire import END_BYTES, HEADER_BYTES, Header
from ringspun.errors import TransferError
from ringspun.torch.checksum import checksum, checksum_there
from ringspun.torch.drivers.base import Verdict
from ringspun.torch.uploads import staged, uploaded


class Marks(Verdict):
    """Headers and end marks of messages that came to a device, with their bytes' checksums, and what they must be.

    Args:
        sums: whether ends say checksums.
    """

    def __init__(self, sums: bool) -> None:
        self._sums = sums
        self._seen: list[Tensor] = []
        self._must: list[tuple[Header, str]] = []

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, buffer: Tensor, header: Header, what: str) -> None:
        """Look at a message: its buffer may then be used again. Arguments as of `check`."""
        words = [buffer[:HEADER_BYTES].view(torch.int64), buffer[-END_BYTES:].view(torch.int64)]
        if self._sums:
            words.append(checksum_there(buffer[HEADER_BYTES:-END_BYTES]))
        self._seen.append(torch.cat(words))
        self._must.append((header, what))

    def flag(self) -> Tensor:
        seen = torch.stack(self._seen)
        must = np.stack([np.concatenate([header.pack(), header.pack_end(0)]) for header, _ in self._must])
        if not self._sums:
            return (seen != uploaded(must, seen.device)).any()
        found = seen[:, :-2] != uploaded(must[:, :-1], seen.device)
        return found.any() | (seen[:, -2] != seen[:, -1]).any()

    def judge(self) -> None:
        for words, (header, what) in zip(torch.stack(self._seen).cpu().numpy(), self._must, strict=True):
            total = partial(int, words[16] if self._sums else 0)
            _compare(words[:8], words[8:16], total, header, what)


def seal(buffer: Tensor, header: Header, *, sums: bool, relayed: bool = False) -> None:
    """Write header and end mark.

    Args:
        sums: whether the end says the checksum of what is between. relayed: keep the checksum that is there: of a block
            that is passed on, so that what this rank's own memory does to it shows as well.
    """
    end, words = buffer[-END_BYTES:], header.pack_end(0)
    _write(buffer[:HEADER_BYTES], header.pack())
    if relayed:
        _write(end[:-8], words[:-1])
    elif sums and buffer.device.type != "cpu":
        _write(end[:-8], words[:-1])
        end[-8:].view(torch.int64).copy_(checksum_there(buffer[HEADER_BYTES:-END_BYTES]))
    else:
        _write(end, header.pack_end(_checksum(buffer, sums)))


def clear(buffer: Tensor) -> None:
    """Before it is received into: a new buffer may lie where another ring's freed one lay, and hold the very mark that
    is expected."""
    buffer[-END_BYTES:].zero_()


def check(buffer: Tensor, header: Header, what: str, *, sums: bool, marks: Marks | None = None) -> None:
    """Raise unless what came says of itself what `header` says.

    Args:
        what: the message and its receiver in words: ``ring rank 1: the KV block of ring rank 0 ...``.
        marks: look at it on its device, and raise when they are judged.
    Raises:
        TransferError: it does not, or bytes are damaged.
    """
    if marks is not None:
        marks.add(buffer, header, what)
        return
    first, end = _words(buffer[:HEADER_BYTES]), _words(buffer[-END_BYTES:])
    _compare(first, end, lambda: _checksum(buffer, sums), header, what)


def _compare(
    first: NDArray[np.int64], end: NDArray[np.int64], total: Callable[[], int], header: Header, what: str
) -> None:
    must, why = "carry its own header", "A stale, reordered or foreign message"
    found = header.differences(first)
    if not found:
        must, why = "end with its own mark", "A message cut short, or two mixed"
        found = header.end_differences(end, total()) if end.any() else ["none"]
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


def _write(into: Tensor, words: NDArray[np.int64]) -> None:
    into.copy_(staged(words, into.device).view(torch.uint8), non_blocking=True)
