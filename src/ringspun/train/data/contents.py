"""What is in the files of a run: read once before any rank starts, and compared whenever they are read again.

Each file has a SHA-256 and, in memory only, a CRC-32 of every block of 64 KiB. The first says on resume whether the
data is still the same; ``data.json`` in the run's output keeps it, so that the files that are not can be named. The
second says so of just the blocks that a step reads: 1/16,384 of the data's size in memory, and no second pass over it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ringspun.errors import DataError

BLOCK_BYTES = 1 << 16
_READ_BYTES = 16 * BLOCK_BYTES
_CRC_BYTES = 4
_NAMED = 5  # changed files that a message names


@dataclass(frozen=True)
class Contents:
    """What was in one file when it was read."""

    size_bytes: int
    sha256: str
    blocks: bytes  # CRC-32 of every BLOCK_BYTES, little-endian

    def crc32(self, block: int) -> bytes:
        """The checksum of one block, as it lies in `blocks`."""
        return self.blocks[_CRC_BYTES * block : _CRC_BYTES * (block + 1)]


def read_text(path: Path) -> Contents:
    """Reads a text file to its end.

    Raises:
        DataError: naming the file that cannot be read or is not UTF-8, and the byte.
    """
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0

    def check(chunk: bytes) -> None:
        nonlocal offset
        pending = len(decoder.getstate()[0])  # bytes of a character begun in the last chunk
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as problem:
            at = offset - pending + problem.start
            raise DataError(
                f"{path}: text must be UTF-8; byte {at} is {problem.object[problem.start]:#04x}. "
                "Convert the file, or leave it out with data.suffixes or data.skip_folders."
            ) from None
        offset += len(chunk)

    return read_whole(path, check)


def read_whole(path: Path, look: Callable[[bytes], None] = lambda chunk: None) -> Contents:
    """Reads a file to its end.

    Args:
        look: called with each piece of it, and with nothing at the end.
    Raises:
        DataError: naming the file that cannot be read; and what `look` raises.
    """
    whole, blocks, size, chunk = hashlib.sha256(), bytearray(), 0, b"-"
    try:
        with path.open("rb") as file:
            while chunk:
                chunk = file.read(_READ_BYTES)
                look(chunk)
                whole.update(chunk)
                for start in range(0, len(chunk), BLOCK_BYTES):
                    blocks += _crc32(memoryview(chunk)[start : start + BLOCK_BYTES])
                size += len(chunk)
    except OSError as problem:
        raise unreadable(path, problem) from None
    return Contents(size, whole.hexdigest(), bytes(blocks))


def read_again(path: Path, contents: Contents, *, start: int, count: int) -> bytes:
    """`count` bytes from `start` on, of a file that must still hold `contents`; their whole blocks are compared.

    Raises:
        DataError: naming the file, and the block that is another now.
    """
    size = contents.size_bytes
    first, last = start // BLOCK_BYTES, -(-(start + count) // BLOCK_BYTES)
    begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, size)
    try:
        with path.open("rb") as file:
            file.seek(begin)
            data = memoryview(file.read(end - begin))
            same = len(data) == end - begin and os.fstat(file.fileno()).st_size == size
    except OSError as problem:
        raise unreadable(path, problem) from None
    if not same:
        raise DataError(f"{path}: data must not change during a run; it had {size} bytes when the run began.")
    for block in range(first, last):
        at = block * BLOCK_BYTES
        if _crc32(data[at - begin : at - begin + BLOCK_BYTES]) != contents.crc32(block):
            raise DataError(
                f"{path}: data must not change during a run; bytes {at} to {min(at + BLOCK_BYTES, size)} are not what "
                "they were when the run began. Restore them, then run the same command again."
            )
    return bytes(data[start - begin : start - begin + count])


def manifest(files: Mapping[str, Contents]) -> bytes:
    """What ``data.json`` says of the files of a run: bytes and SHA-256, by name."""
    return json.dumps({"files": _entries(files)}, indent=1).encode()


def differences(path: Path, files: Mapping[str, Contents]) -> str:
    """In words, which files are not as the ``data.json`` at `path` says."""
    try:
        then = dict(json.loads(path.read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"files were added, removed or changed ({path} cannot be read, so which is not known)"
    now = _entries(files)
    words = [f"{name} is missing" for name in then if name not in now]
    words += [f"{name} is new" for name in now if name not in then]
    words += [f"{name} is changed or damaged" for name in now if name in then and now[name] != then[name]]
    if not words:
        return "files were added, removed or changed"
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more


def unreadable(path: Path, problem: OSError) -> DataError:
    """The error of a data file that the system does not let us read."""
    return DataError(f"{path}: data must be readable; {problem.strerror or problem}.")


def _entries(files: Mapping[str, Contents]) -> dict[str, dict[str, int | str]]:
    return {name: {"bytes": one.size_bytes, "sha256": one.sha256} for name, one in files.items()}


def _crc32(block: memoryview) -> bytes:
    return zlib.crc32(block).to_bytes(_CRC_BYTES, "little")
