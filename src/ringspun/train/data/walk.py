"""Where a stream of packed documents is, and how it goes on with sequences of another length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ringspun.train.data.packing import Counts, Overflow, Piece, Pool, cut


@dataclass
class Walk:
    """The place of a stream: what its `state_dict` tells.

    Args:
        first_epoch: in which it began. epoch, next: the next document to read, in that epoch's order. sequence: number
            of the next one. pool: pieces that wait. counts: of the stream so far.
    """

    first_epoch: int = 0
    epoch: int = 0
    next: int = 0
    sequence: int = 0
    pool: Pool = field(default_factory=Pool)
    counts: Counts = field(default_factory=Counts)

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        pool = [list(piece) for piece in self.pool]
        return {
            "first_epoch": self.first_epoch,
            "epoch": self.epoch,
            "next": self.next,
            "sequence": self.sequence,
            "pool": pool,
            "counts": self.counts.as_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `as_dict` wrote."""
        first_epoch, epoch, after, sequence = (int(values[n]) for n in ("first_epoch", "epoch", "next", "sequence"))
        walk = cls(first_epoch, epoch, after, sequence, counts=Counts.from_dict(values["counts"]))
        for document, start, stop in values["pool"]:
            walk.pool.add(Piece(document, start, stop))
        return walk

    def refit(self, seq_len: int, look: Callable[[int], tuple[int, Overflow]]) -> None:
        """Fits the pieces that wait to sequences of another length: what was split and waits is joined again, what is
        too long now is what `overflow` makes of it. Nothing is read twice, nothing lost but what is counted.

        Args:
            seq_len: tokens of a sequence now. look: tokens of a document, and its policy.
        Raises:
            DataError: a document too long where that is an error.
        """
        waiting, self.pool = joined(self.pool), Pool()
        for piece, parts in waiting:
            tokens, overflow = look(piece.document) if parts > 1 or piece.tokens > seq_len else (0, "error")
            if parts > 1 and (piece.tokens == tokens or piece.tokens > seq_len):
                self.counts.documents_cut -= 1  # it is whole again; or is cut, and counted, again
            for part in cut(piece, seq_len=seq_len, overflow=overflow, counts=self.counts):
                self.pool.add(part)


def joined(pieces: Iterable[Piece]) -> list[tuple[Piece, int]]:
    """Neighbouring pieces of one document as one, at the first one's place; and how many each was."""
    chains: list[tuple[Piece, int]] = []
    ends: dict[tuple[int, int], list[int]] = {}  # (document, its next token): chains that end there, oldest first
    for piece in pieces:
        waiting = ends.get((piece.document, piece.start), [])
        if piece.start and waiting:
            at = waiting.pop(0)
            first, parts = chains[at]
            chains[at] = (Piece(first.document, first.start, piece.stop), parts + 1)
        else:
            at = len(chains)
            chains.append((piece, 1))
        ends.setdefault((piece.document, piece.stop), []).append(at)
    return chains
