"""One mask per batch row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ringspun.core.mask.base import Mask
from ringspun.errors import MaskError


@dataclass(frozen=True)
class RowMasks:
    """A mask for each row of a batch; no mask itself, so it does not combine: combine the masks of its rows.

    Args:
        masks: one per batch row, at least one.
    Raises:
        MaskError: no mask at all, or an entry that is no mask.
    """

    masks: tuple[Mask, ...]

    def __init__(self, masks: Iterable[Mask] | Any) -> None:
        if not isinstance(masks, Iterable):
            raise MaskError(f"masks must be a list, one mask per batch row; got {masks!r}.")
        rows = tuple(masks)
        for row, mask in enumerate(rows):
            if not isinstance(mask, Mask):
                raise MaskError(f"masks must hold one mask per batch row; got {mask!r} for row {row}.")
        if not rows:
            raise MaskError("masks must hold at least one mask; got none. Give one per batch row.")
        object.__setattr__(self, "masks", rows)

    def __len__(self) -> int:
        return len(self.masks)

    def __str__(self) -> str:
        return f"rows[{', '.join(mask.text for mask in self.masks)}]"

    @cached_property
    def text(self) -> str:
        """`str` of it, made once."""
        return str(self)

    def distinct(self) -> list[tuple[Mask, list[tuple[int, int]]]]:
        """Each different mask, in order of its first row, with the half-open ranges of batch rows that have it."""
        ranges: dict[Mask, list[tuple[int, int]]] = {}
        start = 0
        for mask, same in itertools.groupby(self.masks):
            stop = start + len(list(same))
            ranges.setdefault(mask, []).append((start, stop))
            start = stop
        return list(ranges.items())
