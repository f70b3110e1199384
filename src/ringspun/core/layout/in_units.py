"""In units: another layout that deals whole units of tokens instead of tokens. For `ringspun.core.route.InOrder`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core.layout.base import START, STOP, Layout, Runs, drop_empty
from ringspun.core.layout.contiguous import Contiguous
from ringspun.core.layout.zigzag import Zigzag
from ringspun.core.mask import Documents
from ringspun.errors import LayoutError


@dataclass(frozen=True)
class InUnits(Layout):
    """What `layout` does with tokens, done with units of `unit` tokens, one run each; the last unit may be shorter.

        14 tokens in units of 3, 2 ranks, zigzag    rank 0: 0 1 2 3 4 5 12 13    rank 1: 6 7 8 9 10 11

    Units lie at multiples of `unit` whatever the number of ranks.

    Args:
        layout: one that keeps neighbours together and reads no documents. unit: tokens.
    Raises:
        LayoutError: another layout.
    """

    layout: Layout
    unit: int

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Contiguous | Zigzag):
            raise LayoutError(
                f"layout must be Contiguous or Zigzag for results that do not depend on the ring's size; got "
                f"{self.layout}, which cannot deal whole units of {self.unit} tokens."
            )

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """Those of `layout`."""
        return self.layout.speeds if isinstance(self.layout, Contiguous | Zigzag) else None

    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        dealt = self.layout.deal(-(-seq_len // self.unit), ring_size, None)
        runs = np.repeat(dealt, dealt[:, STOP] - dealt[:, START], axis=0)
        within = np.arange(len(runs)) - np.repeat(np.cumsum(sizes := dealt[:, STOP] - dealt[:, START]) - sizes, sizes)
        runs[:, START] = (runs[:, START] + within) * self.unit
        runs[:, STOP] = np.minimum(runs[:, START] + self.unit, seq_len)
        return drop_empty(runs)

    def __str__(self) -> str:
        return f"{self.layout} in units of {self.unit}"
