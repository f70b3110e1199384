"""What is compared: the committed table of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ringspun.core.layout import Balanced, Contiguous, Layout, Zigzag
from ringspun.core.mask import Causal, Documents, Full, Mask, Window
from ringspun.testing.cases import LONG_TAILED
from ringspun.testing.timing import Work

Kind = Literal["causal", "full", "window", "documents"]
WINDOW_OF_32K = 1024
"""Tokens that a query sees of 32,768; of other lengths in proportion."""


@dataclass(frozen=True)
class Row:
    """One row: a mask, which stretches with the length, and sizes.

    Args:
        kind: of the mask. seq_len: S (tokens). ranks: R. heads, kv_heads, head_size: H, K, D. dtype: name.
    """

    kind: Kind
    seq_len: int
    ranks: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 64
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """For `--rows`: what it is in one word."""
        heads = f"-h{self.heads}" + (f":{self.kv_heads}" * (self.kv_heads != self.heads))
        return f"{self.kind}-{self.seq_len}-r{self.ranks}{heads}-d{self.head_size}-{self.dtype}"

    def work(self, seq_len: int | None = None) -> Work:
        """The row as work, at its own length or another."""
        length = self.seq_len if seq_len is None else seq_len
        mask, layout = mask_and_layout(self.kind, length, self.ranks)
        return Work(self.ranks, length, self.heads, self.kv_heads, self.head_size, self.dtype, mask, layout)


def mask_and_layout(kind: Kind, seq_len: int, ranks: int) -> tuple[Mask, Layout]:
    """A mask of that kind, and how our ring deals tokens for it."""
    if kind == "causal":
        return Causal(), Zigzag()
    if kind == "full":
        return Full(), Contiguous()
    if kind == "window":
        window = max(2, seq_len * WINDOW_OF_32K // 32768)
        # the first queries see less than a window: their rank gets a little more of them
        share = seq_len / ranks
        gain = window / 2 / ranks
        return Window(window), Contiguous(speeds=(share + gain * (ranks - 1), *[share - gain] * (ranks - 1)))
    return Causal() & Documents(long_tailed(seq_len)), Balanced()


def long_tailed(seq_len: int) -> list[int]:
    """`LONG_TAILED` stretched to another length; documents that vanish are left out."""
    ends = np.round(np.cumsum(LONG_TAILED) * (seq_len / sum(LONG_TAILED))).astype(int)
    return [int(n) for n in np.diff(ends, prepend=0) if n]


ROWS: tuple[Row, ...] = (
    Row("causal", 4096),
    Row("causal", 4096, ranks=4),
    Row("causal", 4096, dtype="bfloat16"),
    Row("causal", 4096, heads=8, kv_heads=2, head_size=128, dtype="bfloat16"),
    Row("full", 4096, ranks=4),
    Row("causal", 16384),
    Row("causal", 16384, ranks=4),
    Row("causal", 16384, dtype="bfloat16"),
    Row("causal", 16384, heads=2, kv_heads=2, head_size=128),
    Row("causal", 8192, heads=8, kv_heads=2),
    Row("full", 16384, heads=2, kv_heads=2),
    Row("causal", 32768, heads=2, kv_heads=2),
    Row("window", 32768, heads=2, kv_heads=2),
    Row("window", 16384, ranks=4),
    Row("documents", 32768, heads=2, kv_heads=2),
    Row("documents", 16384, ranks=4),
)
"""Long ones have few heads, so that all of it is over in half an hour."""
