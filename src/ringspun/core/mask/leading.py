"""Masks of the first tokens, of the sequence or of each document: prefixes and anchors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core.host import host_integers
from ringspun.core.mask.base import Allowed, Mask, Positions, everything, integer, rectangles, short
from ringspun.core.mask.documents import Documents
from ringspun.errors import MaskError


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
            object.__setattr__(self, "n", integer(f"{name} n", self.n, least=0))
            return
        counts = host_integers(f"{name} n", self.n)
        object.__setattr__(self, "n", tuple(counts.tolist()))
        if self.documents is None:
            raise MaskError(f"{name} with one n per document must get documents=; got n={short(counts)}.")
        if len(counts) != len(self.documents.lengths) or (counts < 0).any():
            raise MaskError(
                f"{name} n must be one count >= 0 per document; got {short(counts)} "
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

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        if self.documents is None:
            assert isinstance(self.n, int)
            return rg.rectangle(q_start, min(self.n, q_start + q_len), 0, min(self.n, k_len))
        self.documents.check(max(q_start + q_len, k_len))
        start, lead, _ = self._spans(self.documents).T
        return rectangles(start, lead, start, lead, everything(q_len, k_len, q_start))


@dataclass(frozen=True)
class Anchors(_Leading):
    """Every query sees the first n keys (attention-sink tokens): ``k < n``. Combine with `Causal()` for decoding.

    Args:
        n: tokens; one number, or one per document. documents: when given, queries see the first n keys of their own.
    """

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return self._leads(k) & self._together(q, k)

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        if self.documents is None:
            assert isinstance(self.n, int)
            return everything(q_len, min(self.n, k_len), q_start)
        self.documents.check(max(q_start + q_len, k_len))
        start, lead, stop = self._spans(self.documents).T
        return rectangles(start, stop, start, lead, everything(q_len, k_len, q_start))
