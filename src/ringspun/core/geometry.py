"""A geometry: a ring, its layout and its route as plain data, from which schedules are made without a framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringspun.core.degrees import Degrees
from ringspun.core.host import is_integer
from ringspun.core.layout.base import Layout
from ringspun.core.layout.in_parts import InParts
from ringspun.core.mask import Documents, Mask, RowMasks, documents_of
from ringspun.core.partition import Partition, Sides
from ringspun.core.route.base import Route
from ringspun.core.schedule import Schedule, compile_schedules, mask_of
from ringspun.errors import LayoutError, PlanError


@dataclass(frozen=True)
class Geometry:
    """Where this process stands in a ring, as plain data: picklable, so that a loader's worker can do the host work.

    Args:
        ring_size: R. ring_ranks: the rank that this process plays (all of them for a loopback ring).
        layout, route: the rules that every plan of this ring uses.
        degrees: where heads are split too (USP): then each share of the ring is held by several ranks.
    """

    ring_size: int
    ring_ranks: tuple[int, ...]
    layout: Layout
    route: Route
    degrees: Degrees | None = None

    def partition(
        self, seq_len: int, documents: Documents | None = None, *, layout: Layout | None = None, start: int = 0
    ) -> Partition:
        """Which rank of the group holds which of `seq_len` tokens."""
        wanted = self.route.layout(self.layout if layout is None else layout)
        if self.degrees is None:
            return Partition(seq_len, self.ring_size, wanted, documents, start)
        return Partition(seq_len, self.degrees.size, InParts(wanted, self.degrees), documents, start)

    def sides(
        self,
        seq_len: int,
        documents: Documents | None = None,
        *,
        mask: Any = None,
        key_len: int | None = None,
        key_layout: Layout | None = None,
        query_start: int = 0,
    ) -> Sides:
        """Queries and keys, see `ringspun.torch.ContextParallel.plan`.

        Args:
            mask: whose documents the queries get, unless others are given or they are those of the keys alone.
        Raises:
            PlanError: a `query_start` without `key_len`. LayoutError: lengths and starts that are none.
        """
        if key_len is None and query_start:
            raise PlanError(
                f"query_start must come with key_len; got query_start={query_start} alone. Queries and keys of one "
                "length that start together need neither."
            )
        if not is_integer(query_start):
            raise LayoutError(f"query_start must be an integer within +-2**48; got {query_start!r}.")
        if key_len is not None and not (is_integer(key_len) and key_len >= 0):
            raise LayoutError(f"key_len must be an integer >= 0; got {key_len!r}.")
        same = key_len in (None, seq_len) and key_layout in (None, self.layout) and not query_start
        own = None if documents is not None else _documents_of(mask)
        if own is not None and (same or own.end <= query_start + seq_len):
            documents = own
        queries = self.partition(seq_len, documents, start=query_start)
        if same:
            return Sides(queries)
        return Sides(queries, self.partition(seq_len if key_len is None else key_len, layout=key_layout))

    def schedule(
        self,
        mask: Mask | Sequence[Mask],
        seq_len: int,
        documents: Documents | None = None,
        *,
        key_len: int | None = None,
        key_layout: Layout | None = None,
        query_start: int = 0,
    ) -> tuple[Schedule, ...]:
        """The schedules of `ring_ranks`; no communication, no framework. Arguments: those of
        `ringspun.torch.ContextParallel.plan`; documents are the mask's where none are given, there as here.

        Raises:
            PlanError, LayoutError, MaskError: a mask, layout and length that do not go together.
        """
        sides = self.sides(
            seq_len, documents, mask=mask, key_len=key_len, key_layout=key_layout, query_start=query_start
        )
        return compile_schedules(sides.of_rings, mask_of(mask), self.route, self.ring_ranks)


def _documents_of(mask: Any) -> Documents | None:
    """The documents of a mask, or of several, where they are the same in all."""
    masks = mask if isinstance(mask, list | tuple) else mask.masks if isinstance(mask, RowMasks) else (mask,)
    found = {documents_of(one)[:1] for one in masks if isinstance(one, Mask)}
    return next(iter(found.pop()), None) if len(found) == 1 else None
