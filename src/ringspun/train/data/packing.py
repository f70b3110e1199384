"""Best-fit packing: which pieces of which documents make one sequence, and what becomes of those that are too long.

It works on lengths alone and never cuts a document that fits. A document longer than the sequence is what the
`Overflow` policy makes of it; every token and document that is lost or cut on the way is counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, Self, get_args

import numpy as np

from ringspun.core.host import is_integer
from ringspun.errors import DataError

Overflow = Literal["truncate", "split", "drop", "error"]
"""What becomes of a document longer than the sequence. "truncate": its first tokens stay. "split": all stay, in pieces
of at most the sequence's length; each is a new document, which does not see the piece before and whose positions
restart. "drop": none stays. "error": `DataError`."""


class Piece(NamedTuple):
    """Tokens [start, stop) of one document."""

    document: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass
class Counts:
    """What became of the documents. Always: ``tokens == tokens_packed + tokens_dropped + tokens waiting to be packed``.

    Args:
        documents, tokens: that were read, separators included. documents_empty: of them, those without a token.
        documents_cut: truncated or split. documents_dropped: of which no token stays, and pieces left over at the end
            of a stream. tokens_dropped: of those, and by truncating. tokens_packed: in sequences. sequences: made.
            padding: tokens of no document in them.
    """

    documents: int = 0
    tokens: int = 0
    documents_empty: int = 0
    documents_cut: int = 0
    documents_dropped: int = 0
    tokens_dropped: int = 0
    tokens_packed: int = 0
    sequences: int = 0
    padding: int = 0

    def as_dict(self) -> dict[str, int]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> Self:
        """What `as_dict` wrote."""
        return cls(**values)

    def add_sequence(self, row: Sequence[Piece], seq_len: int) -> None:
        """Counts one sequence made of `row`."""
        packed = sum(piece.tokens for piece in row)
        self.sequences += 1
        self.tokens_packed += packed
        self.padding += seq_len - packed

    def drop(self, piece: Piece) -> None:
        """Counts a piece that no sequence takes."""
        self.documents_dropped += 1
        self.tokens_dropped += piece.tokens


def check_overflow(name: str, value: str) -> None:
    """Raise `DataError` unless `value` is an `Overflow`."""
    if value not in get_args(Overflow):
        known = ", ".join(map(repr, get_args(Overflow)))
        raise DataError(f"{name} must be one of {known}; got {value!r}.")


def fit(document: int, tokens: int, *, seq_len: int, overflow: Overflow, counts: Counts) -> list[Piece]:
    """The pieces of one document that sequences of `seq_len` tokens can hold, counted.

    Raises:
        DataError: it is longer, and `overflow` is "error".
    """
    counts.documents += 1
    counts.tokens += tokens
    if tokens == 0:
        counts.documents_empty += 1
        return []
    return cut(Piece(document, 0, tokens), seq_len=seq_len, overflow=overflow, counts=counts)


def cut(piece: Piece, *, seq_len: int, overflow: Overflow, counts: Counts) -> list[Piece]:
    """A piece as it is, or what `overflow` makes of it if it is longer than `seq_len`; what is lost or cut is counted.

    Raises:
        DataError: it is longer, and `overflow` is "error".
    """
    document, start, stop = piece
    if piece.tokens <= seq_len:
        return [piece]
    if overflow == "error":
        raise DataError(
            f"documents must have at most seq_len = {seq_len} tokens; got {piece.tokens} in document {document}. "
            "Choose overflow='split', 'truncate' or 'drop' (of a conversation: overflow_conversations), or a longer "
            "seq_len."
        )
    if overflow == "drop":
        counts.drop(piece)
        return []
    counts.documents_cut += 1
    if overflow == "truncate":
        counts.tokens_dropped += piece.tokens - seq_len
        return [Piece(document, start, start + seq_len)]
    return [Piece(document, at, min(at + seq_len, stop)) for at in range(start, stop, seq_len)]


class Pool:
    """Pieces that wait to be packed, in the order of their arrival."""

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}  # by number of arrival, and so from the oldest to the newest
        self._sorted: list[tuple[int, int]] = []  # (tokens, -number): of equal ones the oldest is last
        self._arrived = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces.values())

    def numbered(self) -> Iterator[tuple[int, Piece]]:
        """The pieces with their numbers, from the oldest to the newest."""
        return iter(self._pieces.items())

    def add(self, piece: Piece) -> int:
        """Puts in a piece; its number."""
        number, self._arrived = self._arrived, self._arrived + 1
        self._pieces[number] = piece
        insort(self._sorted, (piece.tokens, -number))
        self.tokens += piece.tokens
        return number

    def take_sequence(self, seq_len: int, *, first: Literal["oldest", "largest"] = "oldest") -> list[tuple[int, Piece]]:
        """Takes out the pieces of one sequence, none longer than `seq_len`: their numbers and they, as they arrived.

        After the `first`, always the largest that fits; but where nothing would fit after that one, the two (or the
        one) that leave the smallest gap. Beginning with the oldest bounds how long a piece waits; beginning with the
        largest packs a few documents better.
        """
        if not self._pieces:
            return []
        number = next(iter(self._pieces)) if first == "oldest" else -self._sorted[-1][1]
        row, room = [self._take(number)], seq_len
        room -= row[0][1].tokens
        while room and (chosen := self._best(room)):
            row += (taken := [self._take(number) for number in chosen])
            room -= sum(piece.tokens for _, piece in taken)
        return sorted(row)

    def _take(self, number: int) -> tuple[int, Piece]:
        piece = self._pieces.pop(number)
        del self._sorted[bisect_left(self._sorted, (piece.tokens, -number))]
        self.tokens -= piece.tokens
        return number, piece

    def _best(self, room: int) -> list[int]:
        """What goes next into `room` tokens: numbers of one or two pieces, or of none where none fits."""
        fitting = bisect_right(self._sorted, (room, 1))
        if fitting == 0:
            return []
        largest, number = self._sorted[fitting - 1]
        gap = room - largest
        if gap and gap < self._sorted[0][0] and (pair := self._best_pair(room, fitting, largest)):
            return pair
        return [-number]

    def _best_pair(self, room: int, fitting: int, largest: int) -> list[int]:
        """The two pieces that fill `room` best, if better than the `largest` one that fits."""
        sizes = np.fromiter((tokens for tokens, _ in self._sorted[:fitting]), np.int64, fitting)
        partner = np.searchsorted(sizes, room - sizes, side="right") - 1
        partner -= partner == np.arange(fitting)  # not itself, but the next smaller one
        together = np.where(partner >= 0, sizes + sizes[partner], 0)
        best = int(together.argmax())
        if together[best] <= largest:
            return []
        return [-self._sorted[i][1] for i in (best, int(partner[best]))]


def pack(pieces: Sequence[Piece], *, seq_len: int) -> list[list[Piece]]:
    """`pieces`, none longer than `seq_len`, as sequences of at most `seq_len` tokens: first-fit decreasing, with the
    last gap of each filled as well as can be.

    Raises:
        DataError: a piece that is longer.
    """
    check_seq_len(seq_len)
    pool = Pool()
    for piece in pieces:
        if piece.tokens > seq_len:
            raise DataError(f"pieces must have at most {seq_len} tokens; got {piece.tokens}. Call fit first.")
        pool.add(piece)
    rows = []
    while pool:
        rows.append([piece for _, piece in pool.take_sequence(seq_len, first="largest")])
    return rows


def check_seq_len(seq_len: int) -> None:
    """Raise `DataError` unless `seq_len` is a whole number of at least 1."""
    if not is_integer(seq_len) or seq_len < 1:
        raise DataError(f"seq_len must be an integer >= 1; got {seq_len!r}.")
