"""Text files as one endless stream of byte tokens, cut into sequences of exactly `seq_len`.

One file is one document: its bytes (tokens 0..255), then one end-of-document token. Documents are joined in
an order shuffled by the seed, a new order every epoch. A document that is cut at the end of a sequence goes
on in the next sequence as a new document there (its positions restart at 0 and it does not see its first
part); how many were cut is counted. No token is lost, none is added, and nothing is padded.

The stream is a pure function of (files, seed, seq_len, position): a position is three integers, and a
checkpoint that holds it resumes exactly.
"""

from __future__ import annotations

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
from ringspun.train.contents import Contents, read_again, read_text, unreadable

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257


@dataclass(frozen=True)
class Corpus:
    """The files of a run, in a fixed order, with what was in them when they were found."""

    root: Path
    names: tuple[str, ...]  # relative to root, with forward slashes; "" where root is the one file
    contents: tuple[Contents, ...]

    @property
    def tokens(self) -> int:
        """Tokens of one epoch, end-of-document tokens included."""
        return sum(one.size_bytes + 1 for one in self.contents)

    @property
    def files(self) -> dict[str, Contents]:
        """What was in each file, by the name that people know it by."""
        return {name or self.root.name: one for name, one in zip(self.names, self.contents, strict=True)}

    @property
    def digest(self) -> str:
        """Digest of names and contents: says whether a data position of another run means the same here."""
        rows = (f"{name}\0{one.sha256}\n" for name, one in zip(self.names, self.contents, strict=True))
        return hashlib.sha256("".join(rows).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def path(self, document: int) -> Path:
        """The file of one document."""
        return self.root / self.names[document] if self.names[document] else self.root


def find_text(
    root: Path, *, suffixes: tuple[str, ...] = (".md", ".py", ".txt"), skip_folders: tuple[str, ...] = ()
) -> Corpus:
    """The text files under `root` (or `root` itself, if it is a file), sorted by name; empty files are left
    out. Reads everything once, so that a bad file is found before any rank starts and a changed one later.

    Raises:
        DataError: naming the path that is missing, unreadable, holds no text or is not UTF-8.
    """
    if not root.exists():
        raise DataError(f"data must exist; got {root}. Give a text file or a folder of them.")
    names = [""] if root.is_file() else sorted(_walk(root, suffixes, set(skip_folders)))
    if not names:
        raise DataError(
            f"data must hold text files; {root} has none that end in {', '.join(suffixes)}. "
            "Set data.suffixes in the config, or give another folder."
        )
    kept = [name for name in names if _size(root / name if name else root)]
    if not kept:
        raise DataError(f"data must not be empty; every text file of {root} has 0 bytes.")
    return Corpus(root, tuple(kept), tuple(read_text(root / name if name else root) for name in kept))


def _walk(root: Path, suffixes: tuple[str, ...], skip: set[str]) -> Iterator[str]:
    def fail(problem: OSError) -> None:
        raise unreadable(Path(problem.filename or root), problem)

    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        for name in files:
            if name.endswith(suffixes):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except OSError as problem:
        raise unreadable(path, problem) from None
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for ever
        raise DataError(f"{path}: data must be a regular file. Remove it, or leave it out with data.skip_folders.")
    return found.st_size


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
        contents = self.corpus.contents[document]
        wanted = min(limit, contents.size_bytes - offset)
        data = read_again(self.corpus.path(document), contents, start=offset, count=wanted)
        tokens = np.frombuffer(data, np.uint8).astype(np.int64)
        return np.append(tokens, END_OF_DOCUMENT) if wanted < limit else tokens

    def _advance(self, position: Position, document: int, tokens: int) -> Position:
        offset = position.offset + tokens
        if offset <= self.corpus.contents[document].size_bytes:
            return Position(position.epoch, position.document, offset)
        if position.document + 1 < len(self.corpus.names):
            return Position(position.epoch, position.document + 1, 0)
        return Position(position.epoch + 1, 0, 0)
