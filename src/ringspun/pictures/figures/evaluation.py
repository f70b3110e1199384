"""The numbers behind pictures of what a model finds in its context, and of how well it predicts with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ringspun.pictures.figures.base import Figure, Rows


@dataclass(frozen=True)
class RetrievalFigure(Figure):
    """Exact answers by length and depth.

    Args:
        task: its name. seq_lens: the rows (tokens). right, asked: ``[lengths][depths]``, depths from the beginning of
            the document on. intervals: of the share at each length, 95 %.
    """

    name: ClassVar[str] = "retrieval"
    title: ClassVar[str] = "What a model finds in its context"
    source: ClassVar[str] = "its answers"
    task: str
    seq_lens: tuple[int, ...]
    right: Rows
    asked: Rows
    intervals: tuple[tuple[float, float], ...]

    @property
    def depths(self) -> tuple[str, ...]:
        """What each part of the document is called, in percent."""
        parts = len(self.asked[0])
        return tuple(f"{100 * i / parts:.0f}" for i in range(parts))

    @property
    def totals(self) -> tuple[float, ...]:
        """The share of exact answers at each length."""
        return tuple(sum(right) / sum(asked) for right, asked in zip(self.right, self.asked, strict=True))


@dataclass(frozen=True)
class LossFigure(Figure):
    """Mean losses by position.

    Args:
        edges: of the buckets (tokens). windows: truncated contexts (tokens). losses: nats of each bucket, with the
            whole context, then with each window; None: no token, or no finite number. means: of all tokens.
    """

    name: ClassVar[str] = "loss"
    title: ClassVar[str] = "How well a model predicts with its context"
    source: ClassVar[str] = "its losses"
    edges: tuple[int, ...]
    windows: tuple[int, ...]
    losses: tuple[tuple[float | None, ...], ...]
    means: tuple[float | None, ...]

    @property
    def contexts(self) -> tuple[str, ...]:
        """What each row is called."""
        return ("whole context", *(f"at most {window:,} tokens" for window in self.windows))
