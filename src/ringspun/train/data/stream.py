"""Documents without end as sequences of exactly `seq_len` tokens: shuffled, packed, resumable, the same on every rank.

There is one stream of sequences, a pure function of (documents, collator, seed). Batch k of all data-parallel ranks
together is its sequences ``k * data_ranks * batch_size`` and following; each data rank takes its own `batch_size` of
them, and every rank of one ring the same. So nothing depends on the number of a loader's workers, and a run may go on
with other numbers of data ranks or another batch size, exactly where it was.

Every reader walks the whole stream, but over lengths alone: it reads tokens only of what it yields. Where lengths are
not known beforehand (`measure`) it has to encode every document to know them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from ringspun.core.host import is_integer
from ringspun.errors import CheckpointError, DataError
from ringspun.train.data.collate import Batch, Collator
from ringspun.train.data.packing import Overflow, Piece, Pool, fit
from ringspun.train.data.samples import Encoder, Sample
from ringspun.train.data.sources import Source, open_source
from ringspun.train.data.walk import Walk

STATE, SEQUENCES = "state", "sequences"
_AHEAD = 4  # sequences whose tokens wait in the pool, at least
_VERSION = 1


def measure(source: Any, encoder: Encoder) -> NDArray[np.int64]:
    """Tokens of every document, and whether it is a conversation: int64 ``[n, 2]``, for `PackedStream(lengths=...)`.

    Encodes everything once; keep it with ``np.save``.
    """
    documents = open_source(source)
    samples = (encoder.named(documents[i], documents.where(i)) for i in range(len(documents)))
    return np.array([(len(sample), sample.whole) for sample in samples], np.int64).reshape(-1, 2)


class PackedStream(IterableDataset[Batch]):
    """The batches of one data-parallel rank, for ``DataLoader(stream, batch_size=None, num_workers=...)``.

    Beside what a `Collator` makes, a batch has `sequences` (their numbers in the whole stream; no two data ranks have
    one in common) and `state` (plain data: give it to `load_state_dict` to go on after this batch). Its `counts` are
    of the whole stream so far.

    Args:
        source: documents, as `open_source` takes them. collator: how they become sequences.
        batch_size: sequences per batch and data rank. seed: of the order of documents.
        data_rank, data_ranks: this process's place among the data-parallel ranks. The ranks of one ring have the same,
            so it is never the world rank: of a mesh ``("data", "ring")`` it is ``mesh["data"].get_local_rank()``.
        epochs: passes over the documents, each in a new order; None: without end. Sequences may hold the end of one
            and the beginning of the next. shuffle: False reads in the source's order.
        last: what is left over for the last batch of all data ranks: "pad" fills it up with sequences of padding
            alone, "drop" leaves it out and counts its tokens as dropped.
        pool_documents: documents to choose from for the best fit; in memory until they are used.
        lengths: of `measure`; otherwise every reader encodes every document.
    Raises:
        DataError: arguments that are none of these. MissingExtra: as `open_source`.
    """

    def __init__(
        self,
        source: Any,
        collator: Collator,
        *,
        batch_size: int = 1,
        seed: int = 0,
        data_rank: int = 0,
        data_ranks: int = 1,
        epochs: int | None = 1,
        shuffle: bool = True,
        last: Literal["pad", "drop"] = "pad",
        pool_documents: int = 1024,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        self.source: Source = open_source(source)
        self.collator, self.seed, self.shuffle, self.pool_documents = collator, seed, shuffle, pool_documents
        self.batch_size, self.data_rank, self.data_ranks = batch_size, data_rank, data_ranks
        self.epochs, self.last, self.lengths = epochs, last, lengths
        self._start: dict[str, Any] = Walk().as_dict()
        self._after: dict[str, Any] | None = None
        self._moves, self._moves_everywhere = 0, torch.zeros((), dtype=torch.int64)
        self._moves_everywhere.share_memory_()  # type: ignore[no-untyped-call]
        self._loaded, self._read_everywhere = False, torch.full((), -1, dtype=torch.int64)  # the move last read from
        self._read_everywhere.share_memory_()  # type: ignore[no-untyped-call]
        self._check()
        self._digest = self.source.digest()

    def _check(self) -> None:
        for name, least in {"batch_size": 1, "seed": 0, "data_ranks": 1, "data_rank": 0, "pool_documents": 1}.items():
            value = getattr(self, name)
            if not is_integer(value) or value < least:
                raise DataError(f"{name} must be an integer >= {least}; got {value!r}.")
        if self.data_rank >= self.data_ranks:
            raise DataError(
                f"data_rank must be below data_ranks = {self.data_ranks}; got {self.data_rank}. The ranks of one ring "
                "have the same data_rank: it is the place in the mesh's data axis, not the world rank."
            )
        if self.epochs is not None and not (is_integer(self.epochs) and self.epochs >= 1):
            raise DataError(f"epochs must be an integer >= 1, or None for no end; got {self.epochs!r}.")
        if self.last not in ("pad", "drop"):
            raise DataError(f"last must be 'pad' or 'drop'; got {self.last!r}.")
        if self.lengths is not None and self.lengths.shape != (len(self.source), 2):
            raise DataError(
                f"lengths must be what measure made of this source, [{len(self.source)}, 2]; got {self.lengths.shape}."
            )

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the beginning, or from the state that was loaded: the same each time that it is called.

        Raises:
            DataError: no batch at all, a document too long where that is an error, or a row that cannot be read.
        """
        info = get_worker_info()
        if info is not None and self._moves != int(self._moves_everywhere):
            raise DataError(
                "set_epoch and load_state_dict must come before the loader starts its workers, which keep the stream "
                "as it was; they came after. Write DataLoader(..., persistent_workers=False), or make a new loader."
            )
        self._read_everywhere.fill_(self._moves)
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reader = _Reader(self, Walk.from_dict(self._start))
        if self._start.get("of", self.identity())["seq_len"] != self.collator.seq_len:
            reader.refit()
        for number in itertools.count():  # a loader takes one batch of each worker in turn
            batch = reader.next(wanted=number % workers == worker)
            if batch is None:
                return
            if batch:
                self._after = batch[STATE] if info is None else None
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """Begin with the order of this epoch (0, 1, ...): for a loop that iterates anew for every epoch, as samplers
        have it. A state of this epoch that was loaded and not yet read from is kept: the epoch goes on there.

        Raises:
            CheckpointError: such a state is of another epoch.
        """
        if self._loaded and int(self._read_everywhere) != self._moves:
            if epoch != self._start["first_epoch"]:
                raise CheckpointError(
                    f"epoch must be that of the state that was loaded, {self._start['first_epoch']}; got {epoch}. "
                    "Begin the loop with that epoch, of which nothing is read twice, or do not load the state."
                )
            return
        self._move(Walk(epoch, epoch).as_dict(), loaded=False)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is after the last batch that it yielded in this process: plain data.

        Raises:
            DataError: it has yielded none here, as where a loader's workers read it; there each batch has its state.
        """
        if get_worker_info() is not None or self._after is None:
            raise DataError(
                "state_dict must be called in the process that reads the stream, after its first batch; the loader's "
                "workers may be ahead. Keep batch['state'] of the last batch that was used."
            )
        return self._after

    def load_state_dict(self, state: Mapping[str, Any], *, new_stage: bool = False) -> None:
        """Go on after the batch that this state is of, bit for bit, when next iterated.

        Call it before the loader starts its workers. The numbers of data ranks and of workers and the batch size may be
        others than before.

        Args:
            state: a batch's, or of `state_dict`. new_stage: allow another `seq_len`; pieces of one document that wait
                are joined, and documents too long for it are cut, dropped or refused as the collator says.
        Raises:
            CheckpointError: the state is of other documents, of another seed, or of another way to pack.
        """
        if get_worker_info() is not None:
            raise DataError("load_state_dict must be called in the main process, before the loader starts its workers.")
        wanted, given = self.identity(), state.get("of", {})
        for name, value in wanted.items():
            if given.get(name) != value and not (new_stage and name == "seq_len"):
                raise CheckpointError(
                    f"{name} must be as when the state was saved, {given.get(name)!r}; got {value!r}. "
                    + ("Write load_state_dict(state, new_stage=True)." if name == "seq_len" else "Restore it.")
                )
        self._move(dict(state), loaded=True)

    def _move(self, start: dict[str, Any], *, loaded: bool) -> None:
        self._start, self._after, self._loaded = start, None, loaded
        self._moves += 1
        self._moves_everywhere.fill_(self._moves)  # workers that persist read it, and nothing else of this process

    def identity(self) -> dict[str, Any]:
        """What the stream of sequences is a function of."""
        return {
            "version": _VERSION,
            "documents": self._digest,
            "encoder": self.collator.encoder.identity(),
            "seq_len": self.collator.seq_len,
            "overflow": [self.collator.overflow, self.collator.overflow_conversations],
            "seed": self.seed,
            "shuffle": self.shuffle,
            "pool_documents": self.pool_documents,
        }


class _Reader:
    """Walks the stream of sequences and reads the tokens of those that are wanted."""

    def __init__(self, stream: PackedStream, walk: Walk) -> None:
        self._stream, self._walk = stream, walk
        self._identity = stream.identity()
        self._samples: dict[int, Sample] = {}  # what is known of the pieces in the pool, by their number there
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))
        self._kept_any = False  # of the epoch's documents

    def next(self, *, wanted: bool) -> Batch | None:
        """This data rank's next batch, or an empty one if it is not wanted; None at the end."""
        stream = self._stream
        rows = self._round()
        if not rows:
            return None
        mine = rows[stream.data_rank * stream.batch_size :][: stream.batch_size] if wanted else []
        samples = [[self._sample(number, piece) for number, piece in row] for row in mine]
        for row in rows:
            for number, _ in row:
                self._samples.pop(number, None)
        if not wanted:
            return {}
        first = self._walk.sequence - len(rows) + stream.data_rank * stream.batch_size
        batch = stream.collator.batch(samples, self._walk.counts)
        batch[SEQUENCES] = list(range(first, first + stream.batch_size))
        batch[STATE] = self._walk.as_dict() | {"of": self._identity}
        return batch

    def _round(self) -> list[list[tuple[int, Piece]]]:
        """The next sequences of all data ranks together; none at the end."""
        walk, seq_len = self._walk, self._stream.collator.seq_len
        size = self._stream.data_ranks * self._stream.batch_size
        rows: list[list[tuple[int, Piece]]] = []
        while len(rows) < size and (self._refill() or walk.pool):
            rows.append(walk.pool.take_sequence(seq_len))
        if len(rows) < size and (not rows or self._stream.last == "drop"):
            if walk.sequence == 0:
                raise DataError(
                    f"documents must fill a batch of {size} sequences of {seq_len} tokens; got {len(rows)} from "
                    f"{walk.counts}. Give more documents, last='pad', or another overflow policy."
                )
            return []
        rows += [[] for _ in range(size - len(rows))]
        for row in rows:
            walk.counts.add_sequence([piece for _, piece in row], seq_len)
        walk.sequence += size
        if self._stream.last == "drop" and self._ended:
            self._drop_what_fills_no_round(size)
        return rows

    def _drop_what_fills_no_round(self, size: int) -> None:
        """Counts the rest while there is still a batch to tell of it."""
        rest = Walk.from_dict(self._walk.as_dict()).pool
        if all(rest.take_sequence(self._stream.collator.seq_len) for _ in range(size)):
            return
        for piece in self._walk.pool:
            self._walk.counts.drop(piece)
        self._walk.pool = Pool()

    @property
    def _ended(self) -> bool:
        epochs = self._stream.epochs
        return epochs is not None and self._walk.epoch >= self._walk.first_epoch + epochs

    def _refill(self) -> bool:
        """Has enough documents wait to choose from, if there are as many; whether documents are still to come."""
        pool, stream = self._walk.pool, self._stream
        while len(pool) < stream.pool_documents or pool.tokens < _AHEAD * stream.collator.seq_len:
            if self._ended:
                return False
            self._admit()
        return True

    def _admit(self) -> None:
        walk, collator = self._walk, self._stream.collator
        if self._order[0] != walk.epoch:
            seed = [self._stream.seed, walk.epoch] if self._stream.shuffle else None
            self._order, self._kept_any = (walk.epoch, self._stream.source.order(seed)), walk.next > 0
        document = int(self._order[1][walk.next])
        tokens, conversation, sample = self._look(document)
        policy = collator.policy(conversation)
        try:
            pieces = fit(document, tokens, seq_len=collator.seq_len, overflow=policy, counts=walk.counts)
        except DataError as problem:
            raise DataError(f"{self._stream.source.where(document)}: {problem}") from None
        for piece in pieces:
            self._put(piece, sample)
        self._kept_any |= bool(pieces)
        walk.next += 1
        if walk.next == len(self._order[1]):
            if not self._kept_any:
                raise DataError(f"documents must leave something to pack; got none in a whole epoch: {walk.counts}.")
            walk.epoch, walk.next = walk.epoch + 1, 0

    def _put(self, piece: Piece, sample: Sample | None) -> None:
        number = self._walk.pool.add(piece)
        if sample is not None:
            self._samples[number] = sample.cut(piece.start, piece.stop)

    def _look(self, document: int) -> tuple[int, bool, Sample | None]:
        """Tokens of a document, whether it is a conversation, and the document where it had to be read for that."""
        if self._stream.lengths is not None:
            tokens, conversation = self._stream.lengths[document].tolist()
            if tokens == 0:  # it leaves no piece, so it would never be read and compared
                self._read_measured(document)
            return tokens, bool(conversation), None
        sample = self._read(document)
        return len(sample), sample.whole, sample

    def _read(self, document: int) -> Sample:
        source = self._stream.source
        return self._stream.collator.encoder.named(source[document], source.where(document))

    def _read_measured(self, document: int) -> Sample:
        sample, lengths = self._read(document), self._stream.lengths
        if lengths is not None and len(sample) != lengths[document, 0]:
            raise DataError(
                f"lengths must be what measure made of these documents; got {lengths[document, 0]} tokens for document "
                f"{document}, which has {len(sample)}. Measure again."
            )
        return sample

    def _sample(self, number: int, piece: Piece) -> Sample:
        """The tokens of a piece that was taken out of the pool."""
        if number not in self._samples:
            self._recall(piece.document, {number: piece})
        return self._samples[number]

    def _recall(self, document: int, taken: dict[int, Piece]) -> None:
        """Reads a document whose tokens are not at hand, once for all its pieces."""
        sample = self._read_measured(document)
        waiting = {number: piece for number, piece in self._walk.pool.numbered() if piece.document == document}
        for number, piece in {**waiting, **taken}.items():
            self._samples.setdefault(number, sample.cut(piece.start, piece.stop))

    def refit(self) -> None:
        """Has what waits fit sequences of another length than before."""
        collator = self._stream.collator

        def look(document: int) -> tuple[int, Overflow]:
            tokens, conversation, _ = self._look(document)
            return tokens, collator.policy(conversation)

        self._walk.refit(collator.seq_len, look)
