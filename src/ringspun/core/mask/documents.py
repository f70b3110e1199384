"""Packed sequences: documents, from what collators and kernels call their boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core.host import host_array, host_integers
from ringspun.core.mask.base import Allowed, And, Mask, Positions, everything, rectangles, short
from ringspun.errors import DtypeError, MaskError


def documents_of(mask: Mask) -> tuple[Documents, ...]:
    """The documents outside of which `mask` allows nothing: its own, or those of the operands of its ``&``."""
    parts = mask.masks if isinstance(mask, And) else (mask,)
    return tuple(part for part in parts if isinstance(part, Documents))


@dataclass(frozen=True)
class Documents(Mask):
    """Packed sequences: a query sees the keys of its own document; padding belongs to none and is seen by nobody.

        Documents([2, 3]), 6 tokens     k 0 1 2 3 4 5
                                     q 0  1 1 . . . .
                                     q 1  1 1 . . . .
                                     q 2  . . 1 1 1 .
                                     q 3  . . 1 1 1 .
                                     q 4  . . 1 1 1 .
                                     q 5  . . . . . .   (padding)

    Boundaries are host data (lists, NumPy, CPU tensors); a device tensor is refused, because reading it would be a
    hidden synchronisation: build the value in the collator, where the data still is.

    Args:
        lengths: tokens per document. starts: first position of each; default: one right after the other.
    Raises:
        MaskError: negative lengths, overlapping or unordered documents.
        DtypeError: boundaries that are not host integers.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...] = ()

    def __init__(self, lengths: Sequence[int] | Any, starts: Sequence[int] | Any | None = None) -> None:
        sizes = host_integers("document lengths", lengths)
        if (sizes < 0).any():
            bad = int(np.flatnonzero(sizes < 0)[0])
            raise MaskError(f"document lengths must be >= 0; got {int(sizes[bad])} for document {bad}.")
        if sum(sizes.tolist()) > rg.UNBOUNDED:
            raise MaskError(f"document lengths must add up to at most 2**60; got {short(sizes)}.")
        default = np.cumsum(sizes) - sizes
        first = default if starts is None or len(starts) == 0 else host_integers("document starts", starts)
        _check_documents(sizes, first)
        object.__setattr__(self, "lengths", tuple(sizes.tolist()))
        object.__setattr__(self, "starts", tuple(first.tolist()))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int] | Any) -> Documents:
        """From cumulative lengths ``[0, n0, n0 + n1, ...]`` as flash-attention takes them (host data)."""
        cu = host_integers("cu_seqlens", cu_seqlens)
        if len(cu) == 0 or cu[0] != 0 or (np.diff(cu) < 0).any():
            raise MaskError(f"cu_seqlens must start at 0 and never fall; got {short(cu)}.")
        return cls(np.diff(cu))

    @classmethod
    def from_position_ids(cls, position_ids: Sequence[int] | Any) -> Documents:
        """From positions that restart at 0 in each document, of the *whole* sequence (host data, one row).

        Two or more zeros at the end are padding: as one-token documents they would have no next token to predict.
        """
        p = host_integers("position_ids", position_ids)
        if len(p) == 0:
            return cls(())
        starts = np.flatnonzero(p == 0)
        steps_by_one = (np.diff(p) == 1) | (p[1:] == 0)
        if p[0] != 0 or not steps_by_one.all():
            raise MaskError(
                f"position_ids must start at 0 and rise by one or restart at 0; got {short(p)}. "
                "A shard's positions do not tell documents: build Documents from the whole sequence."
            )
        end = len(p)
        if len(p) >= 2 and p[-1] == 0 and p[-2] == 0:
            nonzero = np.flatnonzero(p)
            end = int(nonzero[-1]) + 1 if len(nonzero) else 0
        starts = starts[starts < end]
        return cls(np.diff(np.append(starts, end)), starts)

    @classmethod
    def from_segment_ids(cls, segment_ids: Sequence[int] | Any, *, padding: int = -1) -> Documents:
        """From one id per token of the *whole* sequence (host data, one row); `padding` marks tokens of no document."""
        ids = host_integers("segment_ids", segment_ids)
        edges = np.flatnonzero(np.diff(ids)) + 1
        starts = np.concatenate([[0], edges]).astype(np.int64)[: len(ids)]
        sizes = np.diff(np.append(starts, len(ids)))
        real = ids[starts] != padding
        if len(np.unique(ids[starts][real])) != int(real.sum()):
            raise MaskError(f"segment_ids must give each document one unbroken run; got {short(ids)}.")
        return cls(sizes[real], starts[real])

    @classmethod
    def from_attention_mask(cls, attention_mask: Sequence[int] | Any) -> Documents:
        """From one row of Hugging Face's `attention_mask` (host data): 1 or True = keep, 0 or False = padding.

        Padding may lie on either side or both; what is kept is one document, and no document if nothing is.
        """
        row = host_array("attention_mask", attention_mask, "attention_mask")
        if row.size and row.dtype.kind not in "iub":
            raise DtypeError(
                f"attention_mask must be integers or booleans, 1 = keep and 0 = padding; got {row.dtype}. "
                "An additive mask? 1 = keep: write `mask == 0` for an additive one, `mask != 0` for zeros and ones."
            )
        keep = host_integers("attention_mask", row.astype(np.int8) if row.dtype.kind == "b" else row)
        kept = np.flatnonzero(keep)
        if (keep[kept] != 1).any():
            raise MaskError(
                f"attention_mask must hold 1 (keep) and 0 (padding) alone; got {short(keep)}. "
                "Numbers of documents? Write Documents.from_segment_ids(row, padding=0)."
            )
        if len(kept) == 0:
            return cls(())
        start, size = int(kept[0]), int(kept[-1] - kept[0] + 1)
        if size != len(kept):
            hole = start + int(np.argmin(keep[start:]))
            raise MaskError(
                f"attention_mask must keep one unbroken run of tokens; got padding inside it, at {hole}. "
                "Several documents? Number them and write Documents.from_segment_ids(row, padding=0)."
            )
        return cls((size,), (start,))

    def table(self) -> NDArray[np.int64]:
        """``[n, 2]`` of (start, stop) of the documents that hold a token, in order."""
        starts, lengths = np.array(self.starts, np.int64), np.array(self.lengths, np.int64)
        return np.stack([starts, starts + lengths], axis=1)[lengths > 0]

    @property
    def end(self) -> int:
        """One past the last position that belongs to a document."""
        table = self.table()
        return int(table[-1, 1]) if len(table) else 0

    def index(self, positions: Positions) -> NDArray[np.int64]:
        """Document number (among the non-empty ones) of each position; -1 for padding."""
        table = self.table()
        if len(table) == 0:
            return np.full(np.shape(positions), -1, np.int64)
        i = np.searchsorted(table[:, 0], positions, side="right") - 1
        return np.where((i >= 0) & (positions < table[i, 1]), i, -1)

    def positions(self, seq_len: int) -> NDArray[np.int64]:
        """Position of each of `seq_len` tokens within its document; 0 for padding."""
        self.check(seq_len)
        p = np.arange(seq_len)
        i = self.index(p)
        return np.where(i >= 0, p - self.table()[i, 0], 0) if len(self.table()) else np.zeros(seq_len, np.int64)

    def check(self, seq_len: int) -> None:
        """Raise `MaskError` unless every document lies inside a sequence of `seq_len` tokens."""
        if self.end > seq_len:
            raise MaskError(
                f"documents must fit the sequence; got documents that end at {self.end} in {seq_len} tokens."
            )

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        i = self.index(q)
        return np.asarray((i == self.index(k)) & (i >= 0))

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        self.check(max(q_start + q_len, k_len))
        start, stop = self.table().T
        return rectangles(start, stop, start, stop, everything(q_len, k_len, q_start))

    def __str__(self) -> str:
        back_to_back = self.starts == tuple((np.cumsum(self.lengths) - self.lengths).tolist())
        where = "" if not self.lengths or back_to_back else f", starts={list(self.starts)}"
        return f"documents({list(self.lengths)}{where})"


def _check_documents(sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
    if len(starts) != len(sizes):
        raise MaskError(f"document starts must be one per document; got {len(starts)} starts for {len(sizes)} lengths.")
    if (starts > rg.UNBOUNDED).any():
        raise MaskError(f"document starts must be at most 2**60; got {short(starts)}.")
    wrong = np.flatnonzero(starts[1:] < starts[:-1] + sizes[:-1])
    if (len(starts) and starts[0] < 0) or len(wrong):
        i = int(wrong[0]) + 1 if len(wrong) else 0
        raise MaskError(
            f"documents must follow each other without overlap; got document {i} starting at {int(starts[i])}."
        )
