"""Documents of any source, as tokens of a tokenizer, packed by best fit: what a run trains on beside plain bytes.

It rides on `PackedStream`: the position of a sequence is the state of that stream, which goes into checkpoints. Every
rank packs alike and so tokenizes every document; nothing is sent between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ringspun import Documents
from ringspun.errors import CheckpointError, DataError
from ringspun.train.data.collate import COUNTS, DOCUMENT_LENGTHS, Batch, Collator
from ringspun.train.data.contents import Contents
from ringspun.train.data.packing import Counts, Overflow
from ringspun.train.data.samples import INPUT_IDS, LABELS, LOSS_WEIGHTS
from ringspun.train.data.sources import Source
from ringspun.train.data.stream import STATE, PackedStream
from ringspun.train.data.text import PackedSequence, Position
from ringspun.train.data.vocabulary import encoder_of


class PackedSequences:
    """The sequences of a `PackedStream`, by position: its state.

    A position of a stream of another length goes on with the documents that were not used: what was split and waits is
    joined again, what is too long is what `overflow` says.

    Args:
        stream: without end, of one sequence a batch, for one data rank.
    """

    def __init__(self, stream: PackedStream) -> None:
        if (stream.batch_size, stream.data_ranks, stream.epochs) != (1, 1, None):
            raise DataError(
                "stream must be without end and have one sequence a batch for one data rank; got epochs="
                f"{stream.epochs}, batch_size={stream.batch_size}, data_ranks={stream.data_ranks}."
            )
        self._stream = stream
        self._batches: Iterator[Batch] | None = None
        self._next: Position = {}

    def at(self, position: Position) -> PackedSequence:
        """The sequence at a position; asked for one after another, each document is read once.

        Raises:
            CheckpointError: the position is not of these documents, tokens or way to pack. DataError: a document that
            cannot be read, or is too long where that is an error.
        """
        batches, self._batches = self._batches, None  # kept only if nothing is raised
        if batches is None or position != self._next:
            batches = self._begin(position)
        batch = next(batches)
        self._batches, self._next = batches, batch[STATE]
        before = position[COUNTS]["documents_cut"] if position else 0
        return PackedSequence(
            batch[INPUT_IDS][0].numpy(),
            Documents(batch[DOCUMENT_LENGTHS][0]),
            self._next,
            batch[COUNTS]["documents_cut"] - before,
            batch[LABELS][0].numpy(),
            batch[LOSS_WEIGHTS][0].numpy() if LOSS_WEIGHTS in batch else None,
        )

    def told(self, position: Position) -> str:
        """What became of the documents up to a position, for people."""
        counts = Counts.from_dict(position[COUNTS]) if position else Counts()
        padding = counts.padding / max(1, counts.padding + counts.tokens_packed)
        return (
            f"data: {counts.documents:,} documents read, {counts.documents_cut:,} of them cut, "
            f"{counts.documents_dropped:,} dropped ({counts.tokens_dropped:,} tokens); {padding:.1%} of the tokens are "
            "padding"
        )

    def _begin(self, position: Position) -> Iterator[Batch]:
        if not position:
            self._stream.set_epoch(0)
            return iter(self._stream)
        try:
            self._stream.load_state_dict(position, new_stage=True)
            return iter(self._stream)
        except (KeyError, TypeError, AttributeError) as problem:
            raise CheckpointError(
                f"position must be one of packed documents; got one with {', '.join(map(str, position))}. Start anew "
                "with --fresh."
            ) from problem


@dataclass(frozen=True)
class PackedData:
    """Documents and how they become sequences. Travels to other processes, where the tokenizer is loaded anew.

    Args:
        source: what is trained on. files: what was in the files, by name. held: what is never trained on.
        tokenizer: its folder; None: rows are tokens. vocab_size: token numbers that the model knows; None: any.
        overflow, overflow_conversations, pool_documents: as in `DataConfig`.
    """

    source: Source
    files: Mapping[str, Contents]
    held: Source | None = None
    tokenizer: Path | None = None
    vocab_size: int | None = None
    overflow: Overflow = field(default="split", kw_only=True)
    overflow_conversations: Overflow = field(default="error", kw_only=True)
    pool_documents: int = field(default=256, kw_only=True)

    @property
    def digest(self) -> str:
        """Digest of names and contents of all files, in their order."""
        rows = "".join(f"{name}\0{one.sha256}\n" for name, one in self.files.items())
        return hashlib.sha256(rows.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    @property
    def summary(self) -> str:
        """What there is, for people."""
        held = f", and {len(self.held):,} held out" if self.held is not None else ""
        size_bytes = sum(one.size_bytes for one in self.files.values())
        return f"{len(self.source):,} documents{held}, {size_bytes:,} bytes"

    def sequences(self, *, seq_len: int, seed: int) -> PackedSequences:
        """The sequences to train on."""
        return self._packed(self.source, seq_len, seed)

    def held_out(self, *, seq_len: int, seed: int) -> PackedSequences | None:
        """The sequences of what is held out, or None."""
        return None if self.held is None else self._packed(self.held, seq_len, seed)

    def _packed(self, source: Source, seq_len: int, seed: int) -> PackedSequences:
        collator = Collator(
            seq_len,
            overflow=self.overflow,
            overflow_conversations=self.overflow_conversations,
            encoder=encoder_of(self.tokenizer, vocab_size=self.vocab_size),
        )
        pool = min(self.pool_documents, len(source))  # more would be the same documents again, perhaps side by side
        return PackedSequences(PackedStream(source, collator, seed=seed, epochs=None, pool_documents=pool))
