"""Documents joined into the batch of a language model: sequences of exactly `seq_len` tokens.

    collate = Collator(4096, overflow="split")
    DataLoader(documents, batch_size=32, collate_fn=collate)              32 documents, packed by themselves
    DataLoader(PackedStream(documents, collate), batch_size=None)         packed out of all, resumable: `stream.py`

A batch is a dict of

    input_ids, labels, position_ids    int64 [B, S]; labels unshifted, -100 on padding and where a row says so
    loss_weights                       float32 [B, S], where a row has them or they are declared; 0 on padding
    the encoder's declared fields      [B, S]
    document_lengths                   per row, the tokens of each document; padding follows them and belongs to none
    schedules                          of this process's ranks, where the collator knows the ring: the mask's host work,
                                       done in the loader's worker
    counts                             what became of the documents (`ringspun.train.data.packing.Counts`, as a dict)

`to_ring` makes of it what one rank computes with; `chunks` the same for every rank, without a ring.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from ringspun.core.geometry import Geometry
from ringspun.core.layout import Layout
from ringspun.core.mask import Causal, Documents, Mask
from ringspun.core.partition import Partition
from ringspun.core.schedule import Schedule
from ringspun.errors import DataError
from ringspun.torch import sharding
from ringspun.train.data.packing import Counts, Overflow, check_overflow, check_seq_len, fit, pack
from ringspun.train.data.samples import INPUT_IDS, LABELS, LOSS_WEIGHTS, Encoder, Sample

if TYPE_CHECKING:
    from ringspun.torch import ContextParallel, Plan

POSITION_IDS, DOCUMENT_LENGTHS, SCHEDULES, COUNTS = "position_ids", "document_lengths", "schedules", "counts"
Batch = dict[str, Any]
MaskRule = Mask | Callable[[Documents], Mask]
"""What a row may see: a mask, which holds within its documents; or a function that makes one of the row's documents."""


@dataclass(frozen=True)
class Collator:
    """Joins documents into sequences of exactly `seq_len` tokens, by best fit; a call is a loader's `collate_fn`.

    Args:
        seq_len: S (tokens). overflow: what becomes of a longer document; there is no default.
        overflow_conversations: what becomes of a longer conversation. encoder: makes tokens of what the loader gives.
        positions: "restart" at 0 in each document (and 0 on padding), or "running" over the whole sequence.
        pad_id: token on padding; default: the encoder's.
        geometry: of the ring (`ContextParallel.geometry`): the batch then has the schedules of `mask`. mask: a
            `MaskRule`, or several by name, for models whose layers see different things.
    Raises:
        DataError: values that are none of these.
    """

    seq_len: int
    overflow: Overflow = field(kw_only=True)
    overflow_conversations: Overflow = field(default="error", kw_only=True)
    encoder: Encoder = field(default_factory=Encoder, kw_only=True)
    positions: Literal["restart", "running"] = field(default="restart", kw_only=True)
    pad_id: int | None = field(default=None, kw_only=True)
    geometry: Geometry | None = field(default=None, kw_only=True)
    mask: MaskRule | Mapping[str, MaskRule] = field(default_factory=Causal, kw_only=True)

    def __post_init__(self) -> None:
        check_seq_len(self.seq_len)
        check_overflow("overflow", self.overflow)
        check_overflow("overflow_conversations", self.overflow_conversations)
        if self.positions not in ("restart", "running"):
            raise DataError(f"positions must be 'restart' or 'running'; got {self.positions!r}.")

    def __call__(self, rows: Sequence[Any]) -> Batch:
        """The batch of some documents, all of them: as many sequences as they need.

        Args:
            rows: strings, tokens, dicts (see `Encoder`) or samples.
        Raises:
            DataError: a row that cannot be read, or a longer document where `overflow` is "error".
        """
        samples, counts = [self.encoder.named(row, f"document {i}") for i, row in enumerate(rows)], Counts()
        pieces = [
            piece
            for i, sample in enumerate(samples)
            for piece in fit(i, len(sample), seq_len=self.seq_len, overflow=self.policy(sample.whole), counts=counts)
        ]
        packed = pack(pieces, seq_len=self.seq_len)
        for row in packed:
            counts.add_sequence(row, self.seq_len)
        return self.batch([[samples[p.document].cut(p.start, p.stop) for p in row] for row in packed], counts)

    def policy(self, conversation: bool) -> Overflow:
        """What becomes of a longer document, or of a longer conversation."""
        return self.overflow_conversations if conversation else self.overflow

    def batch(self, rows: Sequence[Sequence[Sample]], counts: Counts) -> Batch:
        """The batch of sequences whose documents are chosen already; one may have none, and is then padding alone.

        Raises:
            DataError: documents that do not fit, or none has a field that others have.
        """
        if not rows:
            raise DataError("documents must hold at least one token; got none. Leave empty ones out.")
        lengths = [[len(sample) for sample in row] for row in rows]
        pads = self._pads(rows)
        batch: Batch = {name: self._join(rows, name, pad) for name, pad in pads.items()}
        batch[POSITION_IDS] = torch.from_numpy(np.stack([self._positions(row) for row in lengths]))
        batch[DOCUMENT_LENGTHS] = lengths
        batch[COUNTS] = counts.as_dict()
        if self.geometry is not None:
            batch[SCHEDULES] = self._schedules(self.geometry, documents_of(batch))
        return batch

    def _pads(self, rows: Sequence[Sequence[Sample]]) -> dict[str, float]:
        pads: dict[str, float] = {INPUT_IDS: self.encoder.pad_id if self.pad_id is None else self.pad_id}
        pads[LABELS] = sharding.IGNORED
        if LOSS_WEIGHTS in self.encoder.fields or any(LOSS_WEIGHTS in one.fields for row in rows for one in row):
            pads[LOSS_WEIGHTS] = 0.0
        return dict(self.encoder.fields) | pads

    def _join(self, rows: Sequence[Sequence[Sample]], name: str, pad: float) -> Tensor:
        values = [[_values(sample, name) for sample in row] for row in rows]
        dtype = np.result_type(*(v for row in values for v in row)) if any(values) else np.asarray(pad).dtype
        joined = np.full((len(rows), self.seq_len), pad, dtype)
        for line, row in zip(joined, values, strict=True):
            filled = np.concatenate([np.zeros(0, dtype), *row])
            if len(filled) > self.seq_len:
                raise DataError(f"documents of a sequence must have at most {self.seq_len} tokens; got {len(filled)}.")
            line[: len(filled)] = filled
        return torch.from_numpy(joined)

    def _positions(self, lengths: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.arange(self.seq_len) if self.positions == "running" else Documents(lengths).positions(self.seq_len)

    def _schedules(self, geometry: Geometry, documents: Sequence[Documents]) -> Any:
        def of(rule: MaskRule) -> tuple[Schedule, ...]:
            return geometry.schedule(row_masks(rule, documents), self.seq_len, one_for_all(documents))

        return {name: of(rule) for name, rule in self.mask.items()} if isinstance(self.mask, Mapping) else of(self.mask)


def _values(sample: Sample, name: str) -> np.ndarray[Any, Any]:
    if name == LOSS_WEIGHTS and name not in sample.fields:
        return np.ones(len(sample), np.float32)
    if name not in sample.fields:
        raise DataError(f"every document must have the declared field {name!r}; got one without. Leave the field out.")
    return sample.fields[name]


def documents_of(batch: Mapping[str, Any]) -> list[Documents]:
    """The documents of each row of a batch."""
    return [Documents(lengths) for lengths in batch[DOCUMENT_LENGTHS]]


def one_for_all(documents: Sequence[Documents]) -> Documents | None:
    """The documents of every row, where they are the same."""
    return documents[0] if len(set(documents)) == 1 else None


def row_masks(rule: MaskRule, documents: Sequence[Documents]) -> Mask | list[Mask]:
    """The mask of a batch: one, or one per row where rows have different documents."""
    masks = [rule & one if isinstance(rule, Mask) else rule(one) for one in documents]
    return masks if one_for_all(documents) is None else masks[0]


def sequence_fields(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """What of a batch has one value per token, and is sharded."""
    return {name: x for name, x in batch.items() if isinstance(x, Tensor)}


def chunks(batch: Mapping[str, Any], *, ring_size: int, layout: Layout) -> list[dict[str, Any]]:
    """What each rank of a ring gets of a batch, in rank order: as `Partition.shard_batch`, with no ring and no message.

    Args:
        batch: of a `Collator` or a stream. ring_size: R. layout: the rule that deals tokens.
    Raises:
        DataError: a layout that deals by documents, which differ from row to row.
    """
    documents = documents_of(batch)
    same = one_for_all(documents)
    if layout.reads_documents and same is None:
        raise DataError(
            f"rows must have the same documents under {layout}, which deals tokens by them; they differ. "
            "Make batches of one row, or use Zigzag(), Contiguous() or Striped()."
        )
    fields = sequence_fields(batch)
    part = Partition(next(iter(fields.values())).shape[1], ring_size, layout, same)
    rows = None if same is not None else documents
    return [sharding.shard_batch(part, [rank], fields, rows) for rank in range(ring_size)]


def to_ring(
    batch: Mapping[str, Any],
    context: ContextParallel,
    mask: MaskRule | Mapping[str, MaskRule] | None = None,
    *,
    check: bool = True,
) -> tuple[dict[str, Any], Plan | dict[str, Plan]]:
    """What this process computes with: its shard of the batch, and the plan (or plans, by name). Collective.

    Args:
        batch: of a `Collator` or a stream, the same on every rank of the ring. context: the ring. mask: where the
            collator had no `geometry`; otherwise the batch brings its schedules.
        check: compare a digest of the batch over the ring first (one all_gather of 32 bytes).
    Returns:
        as `Partition.shard_batch`; and the plan.
    Raises:
        PlanMismatchError: ranks of the ring hold different batches. DataError: neither schedules nor mask, or both.
    """
    made, failure = batch.get(SCHEDULES), None
    if (made is None) == (mask is None):
        failure = DataError(
            "mask must be given where the collator knew no geometry, and only there. Leave one of them out."
        )
    if check:
        agree_on(batch, context, failure)  # the other ranks hear of it, too
    if failure is not None:
        raise failure
    documents = documents_of(batch)
    part = context.partition(batch[INPUT_IDS].shape[1], documents=one_for_all(documents))

    def plan(what: Any) -> Plan:
        return part.plan(what if mask is None else row_masks(what, documents))

    wanted = made if mask is None else mask
    plans = {name: plan(one) for name, one in wanted.items()} if isinstance(wanted, Mapping) else plan(wanted)
    first = next(iter(plans.values())) if isinstance(plans, dict) else plans
    return first.partition.shard_batch(sequence_fields(batch)), plans


def agree_on(batch: Mapping[str, Any], context: ContextParallel, failure: Exception | None = None) -> None:
    """Compares a digest of the batch over the ring. Collective; one all_gather of 32 bytes.

    Args:
        failure: why this rank cannot go on; it is raised here, and told to the others.
    Raises:
        PlanMismatchError: ranks of the ring hold different batches; on all of them, with what differs. PeerError:
            another rank has a failure.
    """
    fields = {name: _digest(x) for name, x in sequence_fields(batch).items()}
    fields |= {"documents": str(batch[DOCUMENT_LENGTHS]), "sequences": str(batch.get("sequences"))}
    text = "\n".join(f"{name}={value}" for name, value in fields.items())
    context.driver.agree("the batch", hashlib.blake2b(text.encode(), digest_size=32).digest(), fields, failure)


def check_disjoint(batch: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Compares which sequences the data-parallel ranks hold. Collective over them; one all_gather of 24 bytes.

    Args:
        batch: this rank's, with as many sequences as everybody's. Those of a stream are told apart by their numbers,
            others by their tokens. group: one rank of each ring: ``mesh["data"].get_group()``; default: all processes.
    Raises:
        DataError: two of them hold the same; on all ranks, naming the two.
    """
    numbers = batch.get("sequences", [-1])
    mine = torch.tensor([numbers[0], len(numbers), int(_digest(batch[INPUT_IDS]), 16) >> 1])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    seen: dict[int, int] = {}
    for data_rank, (first, count, digest) in enumerate(row.tolist() for row in rows):
        for what in range(first, first + count) if first >= 0 else [digest]:
            if what in seen:
                raise DataError(
                    f"data-parallel ranks must read different sequences; ranks {seen[what]} and {data_rank} of the "
                    "data group hold the same. Give each its own data_rank, its place in the mesh's data axis."
                )
            seen[what] = data_rank


def _digest(x: Tensor) -> str:
    return hashlib.blake2b(x.cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
