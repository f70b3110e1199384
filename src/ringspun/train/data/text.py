"""What a run trains on: `Sequences`, here text files as one endless stream of byte tokens.

One file is one document: its bytes (tokens 0..255), then one end-of-document token. Documents are joined in
an order shuffled by the seed, a new order every epoch. A document that is cut at the end of a sequence goes
on in the next sequence as a new document there (its positions restart at 0 and it does not see its first
part); how many were cut is counted. No token is lost, none is added, and nothing is padded.

The stream is a pure function of (files, seed, seq_len, position): a position is plain data, here three integers, and a
checkpoint that holds it resumes exactly. Documents as tokens of a tokenizer: `packed_data.py`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ringspun import Documents
from ringspun.core.host import is_integer
from ringspun.errors import CheckpointError, DataError
from ringspun.train.data.contents import Contents, read_again, read_text, unreadable

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
IGNORED = -100  # the label that means: no target; torch's, which is not imported before the data is found right


@dataclass(frozen=True)
class Corpus:
    """The files of a run, in a fixed order, with what was in them when they were found."""

    root: Path
    names: tuple[str, ...]  # relative to root, with forward slashes; "" where root is the one file
    contents: tuple[Contents, ...]
    held: Corpus | None = None  # documents that are never trained on

    @classmethod
    def joined(cls, corpora: Sequence[Corpus]) -> Corpus:
        """All files of several, sorted by name, names relative to the folder that they have in common.

        Raises:
            DataError: a file is in two of them.
        """
        if len(corpora) == 1:
            return corpora[0]
        paths = [Path(os.path.abspath(one.path(i))) for one in corpora for i in range(len(one.names))]
        root = Path(os.path.commonpath(paths))
        named = zip([path.relative_to(root).as_posix() for path in paths], _contents(corpora), strict=True)
        rows = sorted(named, key=lambda row: row[0])
        names = [name for name, _ in rows]
        for name, after in pairwise(names):
            if name == after:
                raise DataError(f"data must name each file once; got {root / name} twice. Leave one out.")
        return cls(root, tuple(names), tuple(contents for _, contents in rows))

    def some(self, chosen: NDArray[np.bool_]) -> Corpus:
        """The documents that are `chosen`, ``[n]``."""
        keep = chosen.tolist()
        return replace(self, names=tuple(compress(self.names, keep)), contents=tuple(compress(self.contents, keep)))

    @property
    def summary(self) -> str:
        """What there is, for people."""
        held = f", and {len(self.held.names):,} held out" if self.held else ""
        return f"{len(self.names):,} documents, {self.tokens:,} tokens{held}"

    @property
    def tokens(self) -> int:
        """Tokens of one epoch, end-of-document tokens included."""
        return sum(one.size_bytes + 1 for one in self.contents)

    @property
    def files(self) -> dict[str, Contents]:
        """What was in each file, by the name that people know it by."""
        own = {name or self.root.name: one for name, one in zip(self.names, self.contents, strict=True)}
        return own | (prefixed("held out", self.held.files) if self.held else {})

    @property
    def digest(self) -> str:
        """Digest of names and contents: says whether a data position of another run means the same here."""
        rows = [f"{name}\0{one.sha256}\n" for name, one in zip(self.names, self.contents, strict=True)]
        rows += [f"held out\0{self.held.digest}\n"] if self.held else []
        return hashlib.sha256("".join(rows).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def sequences(self, *, seq_len: int, seed: int) -> ByteStream:
        """The corpus as sequences of bytes."""
        return ByteStream(self, seq_len=seq_len, seed=seed)

    def held_out(self, *, seq_len: int, seed: int) -> ByteStream | None:
        """The sequences of what is held out, or None."""
        return None if self.held is None else self.held.sequences(seq_len=seq_len, seed=seed)

    def path(self, document: int) -> Path:
        """The file of one document."""
        return self.root / self.names[document] if self.names[document] else self.root


def prefixed(kind: str, files: Mapping[str, Contents]) -> dict[str, Contents]:
    """Files that are not trained on, under names that say so."""
    return {f"{kind}: {name}": one for name, one in files.items()}


def _contents(corpora: Sequence[Corpus]) -> list[Contents]:
    return [contents for one in corpora for contents in one.contents]


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


Position = dict[str, Any]
"""A place in a stream of sequences, as plain data (for JSON, in checkpoints); the empty one is the beginning."""


@dataclass(frozen=True)
class PackedSequence:
    """One sequence: S tokens of joined documents, perhaps padding after them, and where the stream goes on.

    Args:
        ids: ``[S]``. documents: one after another from 0; what follows is padding. after: the next sequence's position.
        documents_cut: documents that the reader had to cut for this sequence. labels: ``[S]``, unshifted, -100 where
            nothing is learnt from predicting that token; default: all are learnt. loss_weights: ``[S]``, what
            predicting each token counts; default: 1.
    """

    ids: NDArray[np.int64]
    documents: Documents
    after: Position
    documents_cut: int = 0
    labels: NDArray[np.int64] | None = None
    loss_weights: NDArray[np.float32] | None = None

    @property
    def targets(self) -> float:
        """Tokens that are predicted from others of their document, or the sum of what they count: the loss's divisor.

        An integer without `loss_weights`; as `Partition.shard_batch` counts, but without a partition.
        """
        if self.labels is None and self.loss_weights is None:
            return sum(max(0, length - 1) for length in self.documents.lengths)
        number = self.documents.index(np.arange(len(self.ids)))
        found = (number[1:] == number[:-1]) & (number[1:] >= 0)
        if self.labels is not None:
            found &= self.labels[1:] != IGNORED
        return int(found.sum()) if self.loss_weights is None else float(self.loss_weights[1:][found].sum(dtype=float))

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything with one value per token, under the names of `Partition.shard_batch`."""
        made: dict[str, NDArray[Any]] = {"input_ids": self.ids}
        made["labels"] = self.ids if self.labels is None else self.labels
        return made if self.loss_weights is None else made | {"loss_weights": self.loss_weights}


class Sequences(Protocol):
    """Sequences of one length without end, in a fixed order: a pure function of what they are made of and a position.

    So every rank asks for the same ones and gets the same, and a run goes on from the position in its checkpoint. A
    position of a stream of another length goes on where that one was.
    """

    def at(self, position: Position) -> PackedSequence:
        """The sequence at a position: ``{}``, or `after` of the one before."""
        ...


def consecutive(stream: Sequences, position: Position, count: int) -> list[PackedSequence]:
    """The sequence at a position, and those after it: `count` in all, at least one."""
    found = [stream.at(position)]
    while len(found) < count:
        found.append(stream.at(found[-1].after))
    return found


class TrainingData(Protocol):
    """What a run reads. It travels to other processes."""

    @property
    def digest(self) -> str:
        """Says whether a position of another run means the same here."""
        ...

    @property
    def files(self) -> Mapping[str, Contents]:
        """What was in each file, by the name that people know it by."""
        ...

    def sequences(self, *, seq_len: int, seed: int) -> Sequences:
        """The sequences to train on."""
        ...

    def held_out(self, *, seq_len: int, seed: int) -> Sequences | None:
        """Sequences of documents that are never trained on, or None where there are none."""
        ...

    @property
    def summary(self) -> str:
        """What there is, for people."""
        ...


@dataclass(frozen=True)
class _Place:
    """Where a `ByteStream` is: the next token to read."""

    epoch: int = 0
    document: int = 0  # index in this epoch's order
    offset: int = 0  # tokens of that document already read


class ByteStream:
    """The sequences of a corpus: documents joined and cut at the end of each sequence, nothing lost or padded."""

    def __init__(self, corpus: Corpus, *, seq_len: int, seed: int) -> None:
        self.corpus = corpus
        self.seq_len = seq_len
        self._seed = seed
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))  # (epoch, its order)

    def at(self, position: Position) -> PackedSequence:
        """The sequence that begins at `position`: `epoch`, `document` in its order, `offset` of tokens already read.

        Raises:
            DataError: a file is no longer what it was when the run began. CheckpointError: no such position.
        """
        place = self._place(position)
        ids = np.empty(self.seq_len, np.int64)
        lengths: list[int] = []
        filled = 0
        while filled < self.seq_len:
            document = int(self._order_of(place.epoch)[place.document])
            tokens = self._read(document, place.offset, self.seq_len - filled)
            ids[filled : filled + len(tokens)] = tokens
            lengths.append(len(tokens))
            filled += len(tokens)
            place = self._advance(place, document, len(tokens))
        return PackedSequence(ids, Documents(lengths), asdict(place), int(place.offset > 0))

    def _place(self, position: Position) -> _Place:
        known, sizes = {one.name for one in fields(_Place)}, self.corpus.contents
        if known >= set(position) and all(is_integer(n) and n >= 0 for n in position.values()):
            place = _Place(**position)
            if place.document < len(sizes):
                document = self._order_of(place.epoch)[place.document]
                if place.offset <= sizes[document].size_bytes:
                    return place
        raise CheckpointError(
            f"position must be one of these {len(sizes)} documents' bytes; got {position}. Start anew with --fresh."
        )

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

    def _advance(self, place: _Place, document: int, tokens: int) -> _Place:
        offset = place.offset + tokens
        if offset <= self.corpus.contents[document].size_bytes:
            return _Place(place.epoch, place.document, offset)
        if place.document + 1 < len(self.corpus.names):
            return _Place(place.epoch, place.document + 1, 0)
        return _Place(place.epoch + 1, 0, 0)
