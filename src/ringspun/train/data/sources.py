"""Where documents come from: lists, text files, JSON lines, Parquet, Hugging Face data sets.

    open_source(["a text", "another"])         strings, lists of tokens, dicts
    open_source(Path("books"))                 a text file or a folder of them: one document each
    open_source(Path("chats.jsonl"))           one document a line
    open_source(Path("tokens.parquet"))        one document a row
    open_source(load_dataset(..., split=...))  the same

A source is read by index, in any order, so that a stream can shuffle it and go on in the middle. Its digest says
whether an index still means the same document.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.core.host import is_integer
from ringspun.errors import DataError, MissingExtra
from ringspun.train.data.contents import Contents, read_again, read_text, unreadable
from ringspun.train.data.text import Corpus, find_text

_ROW_GROUPS_KEPT = 2
_FOOTER_BYTES = 1 << 16
_LOOKED_AT = 16  # rows of a data set of somebody else's that its digest reads


class Source(ABC):
    """Documents by index. A new kind is one subclass with three methods."""

    @abstractmethod
    def __len__(self) -> int:
        """How many documents."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """The row of one document, as an `Encoder` takes it: a string, tokens, or a dict."""

    def __iter__(self) -> Iterator[Any]:
        """All rows, in order."""
        return (self[index] for index in range(len(self)))

    @abstractmethod
    def digest(self) -> str:
        """Says whether an index means the same document elsewhere or later; may take a while."""

    def blocks(self) -> NDArray[np.int64]:
        """Documents per block ``[n]`` that is read best as a whole; shuffling keeps blocks together. Default: one."""
        return np.array([len(self)], np.int64)

    def where(self, index: int) -> str:
        """A document's name in errors; with its file and line where there are any."""
        return f"document {index}"

    def order(self, seed: Sequence[int] | None) -> NDArray[np.int64]:
        """All indices: as they are, or shuffled by `seed`."""
        blocks = self.blocks()
        if seed is None:
            return np.arange(len(self))
        random = np.random.default_rng(list(seed))
        starts = np.cumsum(blocks) - blocks
        shuffled = [starts[b] + random.permutation(blocks[b]) for b in random.permutation(len(blocks))]
        return np.concatenate([np.zeros(0, np.int64), *shuffled])


def open_source(what: Any) -> Source:
    """The documents of a list, a file or folder, or a Hugging Face data set.

    Args:
        what: a `Source`; a list of strings, of token lists or of dicts; the path of a text, ``.jsonl`` or ``.parquet``
            file, or of a folder that holds one kind of them; a list of such paths (of ``.jsonl`` or ``.parquet``); a
            `datasets.Dataset`.
    Raises:
        DataError: none of these, or nothing in it. MissingExtra: Parquet without pyarrow.
    """
    if isinstance(what, Source):
        return what
    if isinstance(what, Path):
        return _of_path(what)
    if isinstance(what, str | Mapping) or not (callable(getattr(what, "__getitem__", None)) and _has_length(what)):
        raise DataError(
            f"source must be a list, a pathlib.Path or a data set that is read by index; got {type(what).__name__}. "
            "A file: write Path(name). One split of a DatasetDict: write data['train']. A data set that can only be "
            "read from its beginning cannot be shuffled or resumed here: save it with to_parquet, or make a list of it."
        )
    if len(what) == 0:
        raise DataError("source must hold at least one document; got none.")
    if isinstance(what, list | tuple) and isinstance(what[0], Path):
        return _of_files(list(what))
    return Rows(what) if isinstance(what, list | tuple) else DataSet(what)


def _has_length(what: Any) -> bool:
    try:
        return len(what) >= 0
    except TypeError:
        return False


def _of_path(path: Path) -> Source:
    if path.is_dir():
        found = {suffix: sorted(path.rglob(f"*{suffix}")) for suffix in _READERS}
        kinds = [suffix for suffix, files in found.items() if files]
        if len(kinds) > 1:
            raise DataError(
                f"folder must hold one kind of files; {path} has {' and '.join(kinds)}. Give a list of paths."
            )
        return _of_files(found[kinds[0]]) if kinds else TextFiles(find_text(path))
    return _of_files([path]) if path.suffix in _READERS else TextFiles(find_text(path))


def _of_files(paths: list[Path]) -> Source:
    suffixes = sorted({path.suffix for path in paths})
    if len(suffixes) != 1 or suffixes[0] not in _READERS:
        raise DataError(
            f"paths must all be .jsonl or all be .parquet; got {', '.join(suffixes)}. Give text as a folder."
        )
    for path in paths:
        if not path.is_file():
            raise DataError(f"data must exist; got {path}. Give a file or a folder.")
    return _READERS[suffixes[0]](paths)


class Rows(Source):
    """A list in memory: strings, token lists or dicts."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]

    def digest(self) -> str:
        return digest_of(self._rows)


class DataSet(Source):
    """Anything read by index, such as a `datasets.Dataset`; its digest looks at its length and a few of its rows."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[int(index)]

    def digest(self) -> str:
        some = np.unique(np.linspace(0, len(self) - 1, _LOOKED_AT).astype(np.int64)).tolist()
        return digest_of([len(self), *(self[i] for i in some)])


class TextFiles(Source):
    """One document a file, UTF-8; a file that changes meanwhile is refused."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    def __len__(self) -> int:
        return len(self._corpus.names)

    def __getitem__(self, index: int) -> str:
        contents = self._corpus.contents[index]
        return read_again(self._corpus.path(index), contents, start=0, count=contents.size_bytes).decode("utf-8")

    def where(self, index: int) -> str:
        return f"document {index} ({self._corpus.path(index)})"

    def digest(self) -> str:
        return self._corpus.digest


class JsonLines(Source):
    """One document a line: a string, a list of tokens or an object. Blank lines are none. A file that changes meanwhile
    is refused.

    Raises:
        DataError: a file that cannot be read, is not UTF-8, or holds no line; later, a line that is not JSON.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._contents = tuple(map(read_text, self._paths))
        lines = [_lines(path, number) for number, path in enumerate(self._paths)]
        self._lines = np.concatenate(lines)  # file, line, first byte, bytes
        if len(self._lines) == 0:
            raise DataError(f"data must hold at least one line; got none in {', '.join(map(str, self._paths))}.")

    @property
    def contents(self) -> tuple[Contents, ...]:
        """What was in each file."""
        return self._contents

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Any:
        file, line, start, count = self._lines[index].tolist()
        return _parsed(
            read_again(self._paths[file], self._contents[file], start=start, count=count), self._paths[file], line
        )

    def __iter__(self) -> Iterator[Any]:
        """All rows, each file read once from its beginning to its end."""
        for path in self._paths:
            with path.open("rb") as file:
                yield from (_parsed(text, path, line) for line, text in enumerate(file) if text.strip())

    def where(self, index: int) -> str:
        file, line, _, _ = self._lines[index].tolist()
        return f"document {index} ({self._paths[file]}, line {line + 1})"

    def digest(self) -> str:
        return digest_of([contents.sha256 for contents in self._contents])


def _parsed(text: bytes, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{path}: every line must be JSON; line {line + 1} is not: {problem}.") from None


def _lines(path: Path, number: int) -> NDArray[np.int64]:
    """``[n, 4]`` of (number of the file, of the line, its first byte, its bytes), without blank lines."""
    rows, at = [], 0
    with path.open("rb") as file:
        for line, text in enumerate(file):
            if text.strip():
                rows.append((number, line, at, len(text)))
            at += len(text)
    return np.array(rows, np.int64).reshape(-1, 4)


class Parquet(Source):
    """One document a row. Shuffling keeps row groups together, of which the last two read stay in memory.

    Raises:
        DataError: a file that cannot be read, or no row. MissingExtra: pyarrow is not installed.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._footers = tuple(map(_footer, self._paths))
        groups: list[tuple[int, int, int]] = []
        for number, path in enumerate(self._paths):
            metadata = _parquet_file(path).metadata
            groups += [(number, g, metadata.row_group(g).num_rows) for g in range(metadata.num_row_groups)]
        self._groups = [group for group in groups if group[2]]
        if not self._groups:
            raise DataError(f"data must hold at least one row; got none in {', '.join(map(str, self._paths))}.")
        self._rows = np.array([rows for _, _, rows in self._groups], np.int64)
        self._starts = [0, *np.cumsum(self._rows).tolist()]
        self._read: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        group = bisect_right(self._starts, index) - 1
        return self._table(group).slice(index - self._starts[group], 1).to_pylist()[0]

    def where(self, index: int) -> str:
        group = bisect_right(self._starts, index) - 1
        number, in_file, _ = self._groups[group]
        row = index - self._starts[group]
        return f"document {index} ({self._paths[number]}, row group {in_file}, its row {row})"

    def blocks(self) -> NDArray[np.int64]:
        return self._rows

    def digest(self) -> str:
        return digest_of(list(self._footers))

    def _read_group(self, path: Path, footer: bytes, group: int) -> Any:
        file = _parquet_file(path)
        if _footer(path) != footer:
            raise DataError(f"{path}: data must not change while it is read; it did. Restore it, or start anew.")
        try:
            return file.read_row_group(group)
        except (OSError, ValueError) as problem:
            raise DataError(f"{path}: data must be a Parquet file; row group {group}: {problem}") from None

    def _table(self, group: int) -> Any:
        if group not in self._read:
            number, in_file, _ = self._groups[group]
            self._read[group] = self._read_group(self._paths[number], self._footers[number], in_file)
            while len(self._read) > _ROW_GROUPS_KEPT:
                self._read.popitem(last=False)
        self._read.move_to_end(group)
        return self._read[group]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_read": OrderedDict()}  # a loader's worker reads for itself


def _parquet_file(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as problem:
        raise MissingExtra("reading Parquet must find pyarrow; install it: pip install 'ringspun[data]'.") from problem
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as problem:  # pyarrow's own errors are these
        raise DataError(f"{path}: data must be a Parquet file; {problem}") from None


def _footer(path: Path) -> bytes:
    """Size and end of a file, where Parquet keeps the places and statistics of all its columns."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - _FOOTER_BYTES))
            return size.to_bytes(8, "little") + file.read()
    except OSError as problem:
        raise unreadable(path, problem) from None


def digest_of(value: Any) -> str:
    """A digest of plain data and arrays."""
    h = hashlib.blake2b(digest_size=16)
    _feed(h, value)
    return h.hexdigest()


def _feed(h: Any, value: Any) -> None:
    """Adds a value to a digest: equal plain data gives equal digests in every process."""
    if is_dataclass(value) and not isinstance(value, type):  # a Sample
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        value = [part for key in sorted(value) for part in (key, value[key])]
    if isinstance(value, bytes):
        h.update(b"b%d:" % len(value) + value)
    elif isinstance(value, str):
        _feed(h, value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, list | tuple) and not all(map(is_integer, value)):
        h.update(b"l%d:" % len(value))
        for part in value:
            _feed(h, part)
    elif value is None or isinstance(value, bool | float):
        h.update(f"v{value!r};".encode())
    elif (array := np.asarray(value)).dtype.hasobject:
        _feed(h, array.tolist() if isinstance(value, np.ndarray) else repr(value))  # numpy's repr leaves out the middle
    else:
        h.update(f"a{array.dtype.str}{array.shape}:".encode() + np.ascontiguousarray(array).tobytes())


_READERS: Mapping[str, type[JsonLines | Parquet]] = {".jsonl": JsonLines, ".parquet": Parquet}
