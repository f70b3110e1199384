"""A schedule: everything one rank does in one attention call, forward and backward, as read-only arrays.

It is made once by the core and executed by torch, jax, the planner and the pictures, which decide nothing. There is no
object per message or tile; equality and hash are those of the bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.core import needs
from ringspun.core import regions as rg
from ringspun.core import tiles as tl
from ringspun.core.choice import Weighed, choose
from ringspun.core.cut import Cut
from ringspun.core.degrees import Degrees
from ringspun.core.host import is_integer
from ringspun.core.layout.base import Layout
from ringspun.core.layout.in_parts import InParts
from ringspun.core.mask import Documents, Mask, RowMasks, documents_of
from ringspun.core.partition import Partition, Sides
from ringspun.core.readings import FIRST, LAST, Gathered, of_route
from ringspun.core.route.auto import Auto
from ringspun.core.route.base import OWN, Action, Legs, MessageColumn, Moment, Route, StepColumn, carried, pack_slot
from ringspun.core.text import shown
from ringspun.core.wire import Format, Payload, Side
from ringspun.errors import LayoutError, PlanError

FORMAT_VERSION = 4
MANY_BLOCKS = 1 << 32
"""More than there are."""
_OF_SLOT = [getattr(MessageColumn, name) for name in ("PAYLOAD", "SLOT", "ROW1", "STRIDE", "STRIDES")]


@dataclass(frozen=True, eq=False)
class Pass:
    """One direction of one rank: step and message rows (columns: `StepColumn`, `MessageColumn`), and all tiles.

    Tiles of step t are ``tiles[tile_offsets[t]:tile_offsets[t + 1]]`` (columns: `ringspun.core.tiles`). `side`: what
    goes round; it is what blocks are of, and tiles count the rows of the block of it.
    """

    steps: NDArray[np.int64]
    messages: NDArray[np.int64]
    tiles: tl.Tiles
    tile_offsets: NDArray[np.int64]
    side: Side = Side.KEYS

    def __post_init__(self) -> None:
        for array in self._arrays():
            array.setflags(write=False)

    def __reduce__(self) -> tuple[type[Pass], tuple[NDArray[np.int64] | Side, ...]]:
        return Pass, (
            *self._arrays(),
            self.side,
        )  # through __init__, so that a copy from a loader's worker is read-only too

    def __len__(self) -> int:
        return len(self.steps)

    def tiles_of(self, step: int) -> tl.Tiles:
        """Tiles that `step` computes, ``[n, 8]``."""
        return self.tiles[self.tile_offsets[step] : self.tile_offsets[step + 1]]

    def messages_of(self, step: int, moment: Moment) -> NDArray[np.int64]:
        """Messages that `step` posts at `moment`, ``[n, 12]``."""
        order, offsets = self._posts
        place = step * len(Moment) + moment
        chosen: NDArray[np.int64] = self.messages[order[offsets[place] : offsets[place + 1]]]
        return chosen

    @cached_property
    def _posts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Messages by step and moment, and where those of each begin: a pass may have thousands."""
        place = self.messages[:, MessageColumn.STEP] * len(Moment) + self.messages[:, MessageColumn.MOMENT]
        order = np.argsort(place, kind="stable")
        return order, np.searchsorted(place[order], np.arange(len(Moment) * len(self) + 1))

    @property
    def pairs(self) -> NDArray[np.int64]:
        """Allowed pairs per step and head that it computes: of one batch row; of all rows together where each has its
        own mask."""
        counts = np.append(0, np.cumsum(tl.count_pairs(self.tiles) * tl.rows(self.tiles)))
        return np.diff(counts[self.tile_offsets])

    @cached_property
    def last_uses(self) -> dict[tuple[Payload, int], int]:
        """When each buffer is used last, in thirds of a step: 3t when what is due before the tiles of step t was waited
        for, 3t + 1 when what is due after its first tile was, 3t + 2 at its end. Gradients that come home to the
        rank's own tiles are added before them."""
        m, s = self.messages, self.steps
        due = 3 * m[:, MessageColumn.DUE] + m[:, MessageColumn.MOMENT]
        elsewhere = (m[:, MessageColumn.SLOT] <= OWN) & (m[:, MessageColumn.PAYLOAD] == self.side.gradients)
        due[elsewhere] += 1  # added to the rank's own by the end of the step
        uses = np.column_stack([m[:, [MessageColumn.PAYLOAD, MessageColumn.SLOT]], due]).tolist()
        end = 3 * np.arange(len(s)) + 2
        home = end - (s[:, StepColumn.GRAD_SLOT] == OWN)
        packed = m[elsewhere & (m[:, MessageColumn.ACTION] == Action.SEND), MessageColumn.STEP]
        gathered = end + np.isin(np.arange(len(s)), packed)  # what messages take of them, they take after that
        for payload, column, time in (
            (self.side.block, StepColumn.SLOT, end),
            (self.side.gradients, StepColumn.GRAD_SLOT, gathered),
            (self.side.gradients, StepColumn.HOME_SLOT, home),
        ):
            buffered = s[:, column] >= 0
            uses += [(payload, *use) for use in np.column_stack([s[:, column], time])[buffered].tolist()]
        last: dict[tuple[Payload, int], int] = {}
        for payload, slot, time in uses:
            key = Payload(payload), pack_slot(slot)
            last[key] = max(last.get(key, 0), time)
        return last

    def _arrays(self) -> tuple[NDArray[np.int64], ...]:
        return self.steps, self.messages, self.tiles, self.tile_offsets


def nothing_gathered() -> Gathered:
    """Where a rank puts nothing together."""
    return np.zeros((0, 4), np.int64)


class Blocks:
    """What goes round, as one rank sees it."""

    ring_rank: int
    ring_size: int
    travelling: needs.Travelling
    owners: NDArray[np.int64] | None
    gathered: Gathered

    @cached_property
    def travelling_tokens(self) -> NDArray[np.int64]:
        """Rows of every block on its way."""
        return needs.count(self.travelling, self.whole)

    @property
    def whole(self) -> int:
        """The number of the block that is put together, one more than all others."""
        return self.ring_size if self.owners is None else len(self.owners)

    def owner(self, block: int) -> int:
        """Ring rank that holds a block."""
        if block == self.whole:
            return self.ring_rank
        return block if self.owners is None else int(self.owners[block])

    def rows(self, block: int) -> int:
        """Rows of a block as it lies in a buffer."""
        if block == self.whole:
            return int((self.gathered[:, LAST] - self.gathered[:, FIRST]).sum())
        return int(self.travelling_tokens[block])

    def travelling_rows(self, block: int) -> slice | NDArray[np.int64]:
        """Which of its owner's rows a block on its way holds."""
        first, last = np.searchsorted(self.travelling[:, needs.OWNER], [block, block + 1])
        mine = self.travelling[first:last, needs.ROW0 :]
        if len(mine) == 1:
            return slice(*map(int, mine[0]))
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(*row) for row in mine)])

    def rows_of_tiles(self, block: int) -> slice | NDArray[np.int64]:
        """Which of its owner's rows this rank's tiles count: all of its own shard, but for a grid."""
        if self.owners is None and block == self.ring_rank:
            return slice(0, None)
        return self.travelling_rows(block)

    def positions(self, block: int, side: Partition) -> NDArray[np.int64]:
        """Positions of the rows that this rank's tiles count, of the side that goes round."""
        if block != self.whole:
            return side.positions(self.owner(block))[self.rows_of_tiles(block)]
        found = np.empty(self.rows(block), np.int64)
        for part, first, last, place in self.gathered.tolist():
            of_part = side.positions(self.owner(part))[self.travelling_rows(part)]
            found[place : place + last - first] = of_part[first:last]
        return found

    def slot_bytes(self, one: Pass, wire: Format) -> dict[tuple[Payload, int], int]:
        """Buffers that a pass uses, and the bytes of the longest message, or block, in each."""
        m = carried(one.messages, wire.kv_heads)
        steps = one.steps[one.steps[:, StepColumn.STRIDE] < max(wire.kv_heads, 1)]
        used = m[:, _OF_SLOT].tolist()
        for slot, payload in ((StepColumn.SLOT, one.side.block), (StepColumn.GRAD_SLOT, one.side.gradients)):
            held = steps[:, slot] != OWN
            if payload == one.side.block:  # other blocks came as messages
                held &= steps[:, StepColumn.SOURCE] == self.whole
            columns = [slot, StepColumn.SOURCE, StepColumn.STRIDE, StepColumn.STRIDES]
            used += [[payload, at, self.rows(b), *stride] for at, b, *stride in steps[held][:, columns].tolist()]
        found: dict[tuple[Payload, int], int] = {}
        for payload, slot, rows, *stride in used:
            key = Payload(payload), pack_slot(slot)
            found[key] = max(found.get(key, 0), wire.of_stride(*stride).message_bytes(key[0], rows))
        return found


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


def attach(legs: Legs, tiles: tl.Tiles, reader: NDArray[np.int64], block: NDArray[np.int64]) -> Pass:
    """A route's pass with the tiles of each step: those of the reader and block that the step names first, and the same
    again in every further stride."""
    strides = legs.steps[:, StepColumn.STRIDE]
    named = legs.steps[:, StepColumn.READER] * MANY_BLOCKS + legs.steps[:, StepColumn.SOURCE]
    wanted = reader * MANY_BLOCKS + block
    found = []
    for stride in range(int(strides.max(initial=0)) + 1):
        mine = np.flatnonzero(strides == stride)
        names, first = np.unique(named[mine], return_index=True)
        place = np.searchsorted(names, wanted)
        unreached = (place >= len(names)) | (names[np.minimum(place, len(names) - 1)] != wanted)
        if unreached.any():
            raise PlanError(f"route must bring every needed block; got none from ring rank {int(block[unreached][0])}.")
        found.append(mine[first[place]])
    step, which = np.concatenate(found), np.tile(np.arange(len(tiles)), len(found))
    order = np.argsort(step, kind="stable")
    offsets = np.append(0, np.cumsum(np.bincount(step, minlength=len(named)))).astype(np.int64)
    return Pass(legs.steps, legs.messages, tiles[which[order]], offsets)
