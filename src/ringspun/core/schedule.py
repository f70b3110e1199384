"""A schedule: everything one rank does in one attention call, forward and backward, as read-only arrays.

It is made once by the core and executed by torch, jax, the planner and the pictures, which decide nothing. There is no
object per message or tile; equality and hash are those of the bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.core import needs
from ringspun.core import regions as rg
from ringspun.core.choice import Weighed, choose
from ringspun.core.cut import Cut
from ringspun.core.mask import Mask, RowMasks, documents_of
from ringspun.core.partition import Sides
from ringspun.core.passes import Blocks, Pass, attach, nothing_gathered
from ringspun.core.readings import Gathered, of_route
from ringspun.core.route.auto import Auto
from ringspun.core.route.base import KEPT, Action, MessageColumn, Route, StepColumn
from ringspun.core.route.ring import passing
from ringspun.core.text import shown
from ringspun.core.wire import Format, Payload
from ringspun.errors import PlanError

FORMAT_VERSION = 4


@dataclass(frozen=True)
class Origin:
    """What the schedules of a ring were made from, beside the mask, and what they come to.

    Args:
        route: taken, not `Auto`. sent: in backward by all ranks together (`BoundRoute.sent`).
    """

    sides: Sides
    route: Route
    sent: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Schedule(Blocks):
    """What one rank does in one attention call.

    Args:
        ring_rank, ring_size: this rank's place. tokens, key_tokens: query rows and key rows of every rank ``[R]``.
        travelling: the key rows that others need, all ranks' (`ringspun.core.needs`). A block on its way holds these
            rows and no others, and tiles count its rows.
        mask: what is computed, in every batch row or per row.
        inputs: digest of all that the schedule was made from; equal on all ranks of a ring.
        forward, backward: the passes.
        grid: tokens at whose multiples everything is cut (`ringspun.core.route.Route.grid`), or 0. A block is then one
            unit of keys, tiles count its rows on every rank, and no result depends on the number of ranks.
        owners: ring rank of each block; None: a block is a rank's shard.
        gathered: what this rank puts together as one more block, `whole`, of which its tiles count the rows; its own
            shard and what it needs of others. Empty where it computes with the blocks themselves.
        route: that it takes. weighed: what it was chosen from (`ringspun.core.choice`), if it was.
        origin: what a backward pass in which queries travel is made from (`ringspun.core.ways`); None: there is none.
            Who edits `backward` takes it away, or asks for keys.
    """

    ring_rank: int
    ring_size: int
    tokens: NDArray[np.int64]
    key_tokens: NDArray[np.int64]
    travelling: needs.Travelling
    mask: Mask | RowMasks
    inputs: bytes
    forward: Pass
    backward: Pass
    grid: int = 0
    owners: NDArray[np.int64] | None = None
    route: str = "ring"
    weighed: Weighed = ()
    gathered: Gathered = field(default_factory=nothing_gathered)
    origin: Origin | None = None

    @property
    def local_tokens(self) -> int:
        """Query rows of this rank."""
        return int(self.tokens[self.ring_rank])

    @cached_property
    def kept(self) -> dict[int, int]:
        """The blocks that forward leaves to backward, by slot."""
        m = self.forward.messages
        comes = (m[:, MessageColumn.ACTION] == Action.RECEIVE) & (m[:, MessageColumn.SLOT] >= KEPT)
        return dict(sorted(m[comes][:, [MessageColumn.SLOT, MessageColumn.SOURCE]].tolist()))

    @property
    def kept_rows(self) -> tuple[int, ...]:
        """Rows of each of them."""
        return tuple(map(self.rows, self.kept.values()))

    def kept_bytes(self, wire: Format) -> int:
        """Bytes of all of them, as they came."""
        return sum(wire.message_bytes(Payload.KV, rows) for rows in self.kept_rows)

    @cached_property
    def passing(self) -> Pass:
        """`forward`, where no backward will come: it keeps nothing."""
        if (self.forward.steps[:, StepColumn.SLOT] < KEPT).all():
            return self.forward
        steps, messages = self.forward.steps.copy(), self.forward.messages.copy()
        for table, column in ((steps, StepColumn.SLOT), (messages, MessageColumn.SLOT)):
            table[:, column] = passing(table[:, column])
        return replace(self.forward, steps=steps, messages=messages)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for the whole schedule."""
        h = hashlib.blake2b(self.inputs, digest_size=32)
        h.update(
            np.array([self.ring_rank, self.ring_size, self.grid, *self.tokens, *self.key_tokens], np.int64).tobytes()
        )
        owners = np.zeros(0, np.int64) if self.owners is None else self.owners
        for array in (self.travelling, owners, self.gathered, *self.forward._arrays(), *self.backward._arrays()):
            h.update(np.array(array.shape, np.int64).tobytes())
            h.update(np.ascontiguousarray(array).tobytes())
        return h.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        sizes = f"{len(self.forward)} steps, {len(self.forward.tiles)} tiles, {len(self.forward.messages)} messages"
        return (
            f"Schedule(ring_rank={self.ring_rank} of {self.ring_size}, mask={shown(self.mask, 60)}, forward: {sizes})"
        )


def mask_of(value: Any) -> Mask | RowMasks:
    """A mask as it is, a sequence of masks as one per batch row.

    Raises:
        PlanError: neither.
    """
    if isinstance(value, Mask | RowMasks):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(m, Mask) for m in value):
        return RowMasks(tuple(value))
    advice = "Combine Causal(), Window(...), ... with & and |; a list of masks gives one to each batch row."
    if isinstance(value, str):
        advice = "Write parse_mask(text)."
    elif isinstance(value, type) and issubclass(value, Mask):
        advice = f"Write {value.__name__}(...), a value."
    elif isinstance(value, list | tuple) and not value:
        advice = "An empty list has no row."
    raise PlanError(f"mask must be a ringspun mask; got {shown(value)}. {advice}")


def input_digest(sides: Sides, mask: Mask | RowMasks, route: Route) -> bytes:
    """32 bytes that stand for what a schedule is made from; what the ranks of a ring compare."""
    text = "\n".join(
        str(part)
        for part in (
            FORMAT_VERSION,
            *(
                getattr(side, name)
                for side in (sides.queries, sides.keys)
                for name in ("seq_len", "ring_size", "layout", "documents", "start")
            ),
            mask.text,
            route,
        )
    )
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


@lru_cache(maxsize=64)
def _regions(mask: Mask, sides: Sides) -> rg.Table:
    table = sides.regions(mask)
    table.setflags(write=False)
    return table


def compile_schedules(
    sides: Sides, mask: Mask | RowMasks, route: Route, ring_ranks: Sequence[int]
) -> tuple[Schedule, ...]:
    """The schedules of `ring_ranks`: regions, then tiles per rank, then the route's messages.

    Raises:
        PlanError: runs that meet without a common step, a `mask` that is none, or a layout that reads documents under
            masks whose documents differ from row to row.
    """
    mask = mask_of(mask)
    _check_rows(sides, mask)
    cuts = cuts_of(sides, mask)
    inputs = input_digest(sides, mask, route)
    weighed: Weighed = ()
    if isinstance(route, Auto):
        route, weighed = choose(route, sides, cuts)
    cut, taken = of_route(route, sides, cuts), route
    travelling = np.asfortranarray(cut.travelling)  # by columns: looking up a block then copies none of them
    travelling.setflags(write=False)
    bound = taken.bind(cut.needs)
    origin = Origin(sides, taken, bound.sent(sides.keys.ring_size)) if taken.turns else None

    def of_rank(ring_rank: int) -> Schedule:
        read = cut.of_rank(ring_rank)
        forward, backward = (attach(legs(ring_rank), *read) for legs in (bound.forward, bound.backward))
        size, queries, keys = sides.queries.ring_size, sides.queries.tokens, sides.keys.tokens
        owners, gathered = cut.needs.owners, cut.gathered(ring_rank)
        gathered.setflags(write=False)
        return Schedule(
            ring_rank, size, queries, keys, travelling, mask, inputs, forward, backward, taken.grid, owners,
            str(taken), weighed, gathered, origin,
        )  # fmt: skip

    return tuple(map(of_rank, ring_ranks))


ALL_ROWS = [(0, -1)]


def cuts_of(sides: Sides, mask: Mask | RowMasks) -> list[tuple[Cut, list[tuple[int, int]]]]:
    """Each different mask's cut, with the ranges of batch rows that it holds for."""
    return [(Cut(sides.queries, sides.keys, _regions(one, sides)), rows) for one, rows in _distinct(mask)]


def _distinct(mask: Mask | RowMasks) -> list[tuple[Mask, list[tuple[int, int]]]]:
    """Each different mask with the ranges of batch rows that it holds for."""
    return mask.distinct() if isinstance(mask, RowMasks) else [(mask, ALL_ROWS)]


def _check_rows(sides: Sides, mask: Mask | RowMasks) -> None:
    if not isinstance(mask, RowMasks):
        return
    for side in (sides.queries, sides.keys):
        if side.layout.reads_documents and len({documents_of(m) for m in mask.masks}) > 1:
            raise PlanError(
                f"batch rows must have the same documents under {side.layout}, which deals tokens by them; they "
                "differ. Use Zigzag(), Contiguous() or Striped()."
            )
