"""A pass: what one rank does in one direction, as read-only arrays; and the blocks of what goes round in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringspun.core import needs
from ringspun.core import tiles as tl
from ringspun.core.partition import Partition
from ringspun.core.readings import FIRST, LAST, Gathered
from ringspun.core.route.base import KEPT, OWN, Action, Legs, MessageColumn, Moment, StepColumn, carried, pack_slot
from ringspun.core.wire import Format, Payload, Side
from ringspun.errors import PlanError

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
        """Buffers that a pass uses, and the bytes of the longest message, or block, in each; what is kept excepted."""
        m = carried(one.messages, wire.kv_heads)
        m = m[m[:, MessageColumn.SLOT] < KEPT]
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
