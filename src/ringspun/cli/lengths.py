"""How long the documents of a file or folder are, for pictures of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ringspun.errors import DataError
from ringspun.train.data.sources import open_source

MOST_TOKENS = 1 << 26
"""That are read where nobody says how long the sequence is."""


def packed_lengths(path: Path, seq_len: int | None) -> list[int]:
    """Lengths of the documents of a source, one after the other until the sequence is full; the last one is cut.

    A string is as many tokens as it has UTF-8 bytes, and one that ends it, as in `ringspun train`; a list of tokens, or
    a row with ``input_ids``, as many as it holds; other rows as many as the strings in them have bytes.

    Raises:
        DataError: a source that cannot be read, or has no token.
    """
    left = MOST_TOKENS if seq_len is None else seq_len
    found = []
    source = open_source(path)
    for i in range(len(source)):
        if left == 0:
            break
        found.append(min(_length(source[i]), left))
        left -= found[-1]
    if not sum(found):
        raise DataError(f"data must hold at least one token; got none in {path}.")
    return found


def _length(row: Any) -> int:
    if isinstance(row, Mapping) and "input_ids" in row:
        row = row["input_ids"]
    if isinstance(row, list | tuple) and all(isinstance(x, int) for x in row):
        return len(row)
    return sum(len(text.encode()) for text in _strings(row)) + 1


def _strings(row: Any) -> Iterator[str]:
    if isinstance(row, str):
        yield row
    elif isinstance(row, Mapping | list | tuple):
        for value in row.values() if isinstance(row, Mapping) else row:
            yield from _strings(value)
