"""Masks: which query position may look at which key position. Frozen values that combine with ``&`` and ``|``.

A mask speaks of *global* positions and knows nothing of ranks, shards or kernels. It states itself twice: as a
predicate (`Mask.allowed`, the definition) and as disjoint regions (`Mask.regions`, what everything else computes with);
the tests hold one against the other. ``d = q - k`` below is how far a key lies behind its query.

    Full()           every pair                    Prefix(n)       q < n and k < n
    Causal()         0 <= d                        Anchors(n)      k < n
    Window(w)        0 <= d <= w - 1               Chunks(c)       q // c == k // c
    Band(l, r)       -r <= d <= l                  Documents(...)  q and k in the same document

Prefix-LM is ``Causal() | Prefix(n)``; StreamingLLM is ``Causal() & (Window(w) | Anchors(n))``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core.host import host_integers
from ringspun.errors import MaskError

Positions = NDArray[np.int64]
Allowed = NDArray[np.bool_]


@dataclass(frozen=True)
class Mask(ABC):
    """A set of allowed (query, key) pairs over global positions."""

    @abstractmethod
    def allowed(self, q: Positions, k: Positions) -> Allowed:
        """Whether each pair is allowed; `q` and `k` broadcast against each other."""

    @abstractmethod
    def regions(self, q_len: int, k_len: int) -> rg.Table:
        """The same set as disjoint regions ``[n, 6]`` (see `ringspun.core.regions`), for lengths in tokens."""

    def as_array(self, q_len: int, k_len: int | None = None) -> Allowed:
        """The dense boolean matrix ``[q_len, k_len]`` (True = may look), straight from the definition."""
        k_len = q_len if k_len is None else k_len
        return np.broadcast_to(
            self.allowed(np.arange(q_len)[:, None], np.arange(k_len)[None, :]), (q_len, k_len)
        ).copy()

    def __and__(self, other: Mask) -> Mask:
        return And(_operands(And, self, other)) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or(_operands(Or, self, other)) if isinstance(other, Mask) else NotImplemented

    def __str__(self) -> str:
        """The canonical string; for the masks of this module ``parse(str(mask)) == mask``."""
        values = [(f, getattr(self, f.name)) for f in dataclasses.fields(self)]
        shown = [
            _argument(value) if f.default is dataclasses.MISSING else f"{f.name}={_argument(value)}"
            for f, value in values
            if f.default is dataclasses.MISSING or value != f.default
        ]
        name = type(self).__name__.lower()
        return f"{name}({', '.join(shown)})" if shown else name


def documents_of(mask: Mask) -> tuple[Documents, ...]:
    """The documents outside of which `mask` allows nothing: its own, or those of the operands of its ``&``."""
    parts = mask.masks if isinstance(mask, And) else (mask,)
    return tuple(part for part in parts if isinstance(part, Documents))


def _argument(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _operands(kind: type[And] | type[Or], *masks: Mask) -> tuple[Mask, ...]:
    """Operands with nested ones of the same kind taken flat, so that equal expressions are equal values."""
    return tuple(part for m in masks for part in (m.masks if isinstance(m, kind) else (m,)))


@dataclass(frozen=True)
class And(Mask):
    """Pairs that every operand allows; made by ``a & b``."""

    masks: tuple[Mask, ...]

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return np.asarray(np.logical_and.reduce(np.broadcast_arrays(*(m.allowed(q, k) for m in self.masks))))

    def regions(self, q_len: int, k_len: int) -> rg.Table:
        first, *others = (m.regions(q_len, k_len) for m in self.masks)
        for other in others:
            first = rg.intersect(first, other)
        return first

    def __str__(self) -> str:
        return " & ".join(f"({m})" if isinstance(m, Or) else str(m) for m in self.masks)


@dataclass(frozen=True)
class Or(Mask):
    """Pairs that any operand allows; made by ``a | b``."""

    masks: tuple[Mask, ...]

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return np.asarray(np.logical_or.reduce(np.broadcast_arrays(*(m.allowed(q, k) for m in self.masks))))

    def regions(self, q_len: int, k_len: int) -> rg.Table:
        first, *others = (m.regions(q_len, k_len) for m in self.masks)
        for other in others:
            first = rg.unite(first, other)
        return first

    def __str__(self) -> str:
        return " | ".join(map(str, self.masks))


@dataclass(frozen=True)
class Band(Mask):
    """``-right <= q - k <= left``: the closed interval of flash-attention; None is unbounded.

        Band(2, 1), 5 tokens    k 0 1 2 3 4
                             q 0  1 1 . . .
                             q 1  1 1 1 . .
                             q 2  1 1 1 1 .
                             q 3  . 1 1 1 1
                             q 4  . . 1 1 1

    Args:
        left: keys visible before the query (tokens). right: keys visible after it (tokens).
    Raises:
        MaskError: a bound is not an integer, or the band is empty (``left < -right``).
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _integer(f"Band {name}", value))
        if self.left is not None and self.right is not None and self.left < -self.right:
            raise MaskError(f"Band must have left >= -right; got left={self.left}, right={self.right}.")

    def _bounds(self) -> tuple[int, int]:
        lo = -rg.UNBOUNDED if self.right is None else -self.right
        return lo, rg.UNBOUNDED if self.left is None else self.left

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        lo, hi = self._bounds()
        return np.asarray((lo <= q - k) & (q - k <= hi))

    def regions(self, q_len: int, k_len: int) -> rg.Table:
        return rg.rectangle(0, q_len, 0, k_len, *self._bounds())


@dataclass(frozen=True)
class Full(Mask):
    """Every pair."""

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return np.ones(np.broadcast_shapes(q.shape, k.shape), np.bool_)

    def regions(self, q_len: int, k_len: int) -> rg.Table:
        return rg.rectangle(0, q_len, 0, k_len)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and every key before it: ``0 <= q - k``."""

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return np.asarray(q >= k)

    def regions(self, q_len: int, k_len: int) -> rg.Table:
        return rg.rectangle(0, q_len, 0, k_len, lo=0)


@dataclass(frozen=True)
class Window(Mask):
    """A query sees itself and the ``size - 1`` keys before it: Hugging Face's `sliding_window`, ``Band(size - 1, 0)``.

    Flash-attention's ``window_size=(left, 0)`` is ``Window(left + 1)``.

    Args:
        size: keys visible per query (tokens, at least 1); None sees every key before the query.
    """

    size: int | None

    def __post_init__(self) -> None:
        if self.size is not None:
            object.__setattr__(self, "size", _integer("Window size", self.size, least=1))

    def _band(self) -> Band:
        return Band(None if self.size is None else self.size - 1, 0)

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return self._band().allowed(q, k)

    def regions(self, q_len: int, k_len: int) -> rg.Table:
        return self._band().regions(q_len, k_len)


@dataclass(frozen=True)
class Chunks(Mask):
    """Local chunks (Llama 4): query and key in the same chunk of `size` tokens. With `Causal()` for decoding."""

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _integer("Chunks size", self.size, least=1))

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return np.asarray(q // self.size == k // self.size)

    def regions(self, q_len: int, k_len: int) -> rg.Table:
        starts = np.arange(0, min(q_len, k_len), self.size)
        return _squares(starts, starts + self.size, q_len, k_len)


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
            raise MaskError(f"document lengths must add up to at most 2**60; got {_short(sizes)}.")
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
            raise MaskError(f"cu_seqlens must start at 0 and never fall; got {_short(cu)}.")
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
                f"position_ids must start at 0 and rise by one or restart at 0; got {_short(p)}. "
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
            raise MaskError(f"segment_ids must give each document one unbroken run; got {_short(ids)}.")
        return cls(sizes[real], starts[real])

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

    def regions(self, q_len: int, k_len: int) -> rg.Table:
        self.check(min(q_len, k_len))
        table = self.table()
        return _squares(table[:, 0], table[:, 1], q_len, k_len)

    def __str__(self) -> str:
        back_to_back = self.starts == tuple((np.cumsum(self.lengths) - self.lengths).tolist())
        where = "" if not self.lengths or back_to_back else f", starts={list(self.starts)}"
        return f"documents({list(self.lengths)}{where})"


def _check_documents(sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
    if len(starts) != len(sizes):
        raise MaskError(f"document starts must be one per document; got {len(starts)} starts for {len(sizes)} lengths.")
    if (starts > rg.UNBOUNDED).any():
        raise MaskError(f"document starts must be at most 2**60; got {_short(starts)}.")
    wrong = np.flatnonzero(starts[1:] < starts[:-1] + sizes[:-1])
    if (len(starts) and starts[0] < 0) or len(wrong):
        i = int(wrong[0]) + 1 if len(wrong) else 0
        raise MaskError(
            f"documents must follow each other without overlap; got document {i} starting at {int(starts[i])}."
        )


@dataclass(frozen=True)
class _Leading(Mask):
    """Shared by `Prefix` and `Anchors`: the first tokens, of the sequence or of each document."""

    n: int | tuple[int, ...]
    documents: Documents | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.documents, Documents | None):
            raise MaskError(f"{name} documents must be Documents; got {self.documents!r}. Write Documents(lengths).")
        if isinstance(self.n, int | np.integer):
            object.__setattr__(self, "n", _integer(f"{name} n", self.n, least=0))
            return
        counts = host_integers(f"{name} n", self.n)
        object.__setattr__(self, "n", tuple(counts.tolist()))
        if self.documents is None:
            raise MaskError(f"{name} with one n per document must get documents=; got n={_short(counts)}.")
        if len(counts) != len(self.documents.lengths) or (counts < 0).any():
            raise MaskError(
                f"{name} n must be one count >= 0 per document; got {_short(counts)} "
                f"for {len(self.documents.lengths)} documents."
            )

    def _spans(self, documents: Documents) -> NDArray[np.int64]:
        """``[n, 3]`` of (start, end of the leading part, stop) per document."""
        sizes, starts = np.array(documents.lengths, np.int64), np.array(documents.starts, np.int64)
        lead = np.minimum(np.broadcast_to(np.array(self.n, np.int64), sizes.shape), sizes)
        return np.stack([starts, starts + lead, starts + sizes], axis=1)[lead > 0]

    def _leads(self, positions: Positions) -> Allowed:
        """Whether each position is in a leading part."""
        if self.documents is None:
            return np.asarray(positions < self.n)
        spans = self._spans(self.documents)
        hit = np.zeros(np.shape(positions), np.bool_)
        for start, lead, _ in spans:
            hit |= (start <= positions) & (positions < lead)
        return hit

    def _together(self, q: Positions, k: Positions) -> Allowed:
        return np.True_ if self.documents is None else self.documents.allowed(q, k)  # type: ignore[return-value]


@dataclass(frozen=True)
class Prefix(_Leading):
    """The first n tokens see each other both ways: ``q < n and k < n``. Prefix-LM is ``Causal() | Prefix(n)``.

    Args:
        n: tokens; one number, or one per document. documents: when given, n counts within each document.
    """

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return self._leads(q) & self._leads(k) & self._together(q, k)

    def regions(self, q_len: int, k_len: int) -> rg.Table:
        if self.documents is None:
            assert isinstance(self.n, int)
            return rg.rectangle(0, min(self.n, q_len), 0, min(self.n, k_len))
        self.documents.check(min(q_len, k_len))
        spans = self._spans(self.documents)
        return _squares(spans[:, 0], spans[:, 1], q_len, k_len)


@dataclass(frozen=True)
class Anchors(_Leading):
    """Every query sees the first n keys (attention-sink tokens): ``k < n``. Combine with `Causal()` for decoding.

    Args:
        n: tokens; one number, or one per document. documents: when given, queries see the first n keys of their own.
    """

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return self._leads(k) & self._together(q, k)

    def regions(self, q_len: int, k_len: int) -> rg.Table:
        if self.documents is None:
            assert isinstance(self.n, int)
            return rg.rectangle(0, q_len, 0, min(self.n, k_len))
        self.documents.check(min(q_len, k_len))
        start, lead, stop = self._spans(self.documents).T
        return _rectangles(start, stop, start, lead, q_len, k_len)


def _squares(start: Positions, stop: Positions, q_len: int, k_len: int) -> rg.Table:
    return _rectangles(start, stop, start, stop, q_len, k_len)


def _rectangles(q0: Positions, q1: Positions, k0: Positions, k1: Positions, q_len: int, k_len: int) -> rg.Table:
    wide = np.full(len(q0), rg.UNBOUNDED, np.int64)
    columns = [q0, np.minimum(q1, q_len), k0, np.minimum(k1, k_len), -wide, wide]
    return rg.tighten(np.stack(columns, axis=1).astype(np.int64))


def _integer(name: str, value: Any, least: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise MaskError(f"{name} must be an integer; got {value!r}.")
    if least is not None and value < least:
        raise MaskError(f"{name} must be >= {least}; got {value}.")
    if abs(int(value)) > rg.UNBOUNDED:
        raise MaskError(f"{name} must lie within +-2**60 (None, where allowed, is unbounded); got {value}.")
    return int(value)


def _short(values: NDArray[np.int64]) -> str:
    shown = ", ".join(map(str, values[:8].tolist()))
    return f"[{shown}{', ...' if len(values) > 8 else ''}] ({len(values)} values)"
