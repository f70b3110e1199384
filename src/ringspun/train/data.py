"""Text files as one endless stream of byte tokens, cut into sequences of exactly `seq_len`.

One file is one document: its bytes (tokens 0..255), then one end-of-document token. Documents are joined in
an order shuffled by the seed, a new order every epoch. A document that is cut at the end of a sequence goes
on in the next sequence as a new document there (its positions restart at 0 and it does not see its first
part); how many were cut is counted. No token is lost, none is added, and nothing is padded.

The stream is a pure function of (files, seed, seq_len, position): a position is three integers, and a
checkpoint that holds it resumes exactly.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ringspun import Documents
from ringspun.errors import DataError

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """The files of a run, in a fixed order, with the sizes they had when they were found."""

    root: Path
    names: tuple[str, ...]  # relative to root, with forward slashes; "" where root is the one file
    sizes_bytes: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of one epoch, end-of-document tokens included."""
        return sum(self.sizes_bytes) + len(self.sizes_bytes)

    @property
    def digest(self) -> str:
        """Digest of names and sizes: says whether a data position of another run means the same here."""
        rows = (f"{name}\0{size}\n" for name, size in zip(self.names, self.sizes_bytes, strict=True))
        return hashlib.sha256("".join(rows).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def path(self, document: int) -> Path:
        """The file of one document."""
        return self.root / self.names[document] if self.names[document] else self.root


def find_text(
    root: Path, *, suffixes: tuple[str, ...] = (".md", ".py", ".txt"), skip_folders: tuple[str, ...] = ()
) -> Corpus:
    """The text files under `root` (or `root` itself, if it is a file), sorted by name; empty files are left
    out.

    Raises:
        DataError: naming the path that is missing, unreadable or holds no text.
    """
    if not root.exists():
        raise DataError(f"data must exist; got {root}. Give a text file or a folder of them.")
    names = [""] if root.is_file() else sorted(_walk(root, suffixes, set(skip_folders)))
    if not names:
        raise DataError(
            f"data must hold text files; {root} has none that end in {', '.join(suffixes)}. "
            "Set data.suffixes in the config, or give another folder."
        )
    sizes = [_size(root / name if name else root) for name in names]
    kept = [(name, size) for name, size in zip(names, sizes, strict=True) if size]
    if not kept:
        raise DataError(f"data must not be empty; every text file of {root} has 0 bytes.")
    return Corpus(root, tuple(name for name, _ in kept), tuple(size for _, size in kept))


def check_text(corpus: Corpus) -> None:
    """Reads everything once, so that a bad file is found before any rank starts.

    Raises:
        DataError: naming the first file that cannot be read or is not UTF-8, and the byte.
    """
    for document in range(len(corpus.names)):
        path, decoder, offset, chunk = corpus.path(document), codecs.getincrementaldecoder("utf-8")(), 0, b"-"
        try:
            with path.open("rb") as file:
                while chunk:
                    chunk = file.read(_READ_BYTES)
                    pending = len(decoder.getstate()[0])  # bytes of a character begun in the last chunk
                    decoder.decode(chunk, final=not chunk)
                    offset += len(chunk)
        except OSError as problem:
            raise _unreadable(path, problem) from None
        except UnicodeDecodeError as problem:
            at = offset - pending + problem.start
            raise DataError(
                f"{path}: text must be UTF-8; byte {at} is {problem.object[problem.start]:#04x}. "
                "Convert the file, or leave it out with data.suffixes or data.skip_folders."
            ) from None


def _walk(root: Path, suffixes: tuple[str, ...], skip: set[str]) -> Iterator[str]:
    def fail(problem: OSError) -> None:
        raise _unreadable(Path(problem.filename or root), problem)

    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        for name in files:
            if name.endswith(suffixes):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except OSError as problem:
        raise _unreadable(path, problem) from None
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for ever
        raise DataError(f"{path}: data must be a regular file. Remove it, or leave it out with data.skip_folders.")
    return found.st_size


def _unreadable(path: Path, problem: OSError) -> DataError:
    return DataError(f"{path}: data must be readable; {problem.strerror or problem}.")


@dataclass(frozen=True)
class Position:
    """A place in the stream: the next token to read."""

    epoch: int = 0
    document: int = 0  # index in this epoch's order
    offset: int = 0  # tokens of that document already read

    def as_dict(self) -> dict[str, int]:
        """The position as plain data, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> Self:
        """The position that `as_dict` wrote."""
        return cls(**values)


@dataclass(frozen=True)
class PackedSequence:
    """One sequence: `seq_len` tokens of joined documents, and where the stream goes on."""

    ids: NDArray[np.int64]  # [S]
    documents: Documents  # lengths sum to S
    after: Position
    documents_cut: int  # 1 if the last document goes on in the next sequence


class ByteStream:
    """The stream of a corpus. `at(position)` is the same on every rank and in every run."""

    def __init__(self, corpus: Corpus, *, seq_len: int, seed: int) -> None:
        self.corpus = corpus
        self.seq_len = seq_len
        self._seed = seed
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))  # (epoch, its order)

    def at(self, position: Position) -> PackedSequence:
        """The sequence that begins at `position`.

        Raises:
            DataError: a file is no longer what it was when the run began.
        """
        ids = np.empty(self.seq_len, np.int64)
        lengths: list[int] = []
        filled = 0
        while filled < self.seq_len:
            document = int(self._order_of(position.epoch)[position.document])
            tokens = self._read(document, position.offset, self.seq_len - filled)
            ids[filled : filled + len(tokens)] = tokens
            lengths.append(len(tokens))
            filled += len(tokens)
            position = self._advance(position, document, len(tokens))
        return PackedSequence(ids, Documents(lengths), position, int(position.offset > 0))

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if self._order[0] != epoch:
            shuffled = np.random.default_rng([self._seed, epoch]).permutation(len(self.corpus.names))
            self._order = (epoch, shuffled.astype(np.int64))
        return self._order[1]

    def _read(self, document: int, offset: int, limit: int) -> NDArray[np.int64]:
        size, path = self.corpus.sizes_bytes[document], self.corpus.path(document)
        wanted = min(limit, size - offset)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(wanted)
                same = len(data) == wanted and os.fstat(file.fileno()).st_size == size
        except OSError as problem:
            raise _unreadable(path, problem) from None
        if not same:
            raise DataError(f"{path}: data must not change during a run; it had {size} bytes when the run began.")
        tokens = np.frombuffer(data, np.uint8).astype(np.int64)
        return np.append(tokens, END_OF_DOCUMENT) if wanted < limit else tokens

    def _advance(self, position: Position, document: int, tokens: int) -> Position:
        offset = position.offset + tokens
        if offset <= self.corpus.sizes_bytes[document]:
            return Position(position.epoch, position.document, offset)
        if position.document + 1 < len(self.corpus.names):
            return Position(position.epoch, position.document + 1, 0)
        return Position(position.epoch + 1, 0, 0)
