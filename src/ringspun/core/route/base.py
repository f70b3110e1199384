"""What a route is, and the columns in which it writes down what a rank does.

A **pass** (forward or backward) is a number of steps. Each step is one row of `StepColumn`: whose block is computed, in
which slots it lies. Each **message** is one row of `MessageColumn`. How a step runs:

    wait for the BEFORE messages that are due; unpack them; post this step's
    compute this step's tiles
    wait for the AFTER messages that are due; add them in; post this step's

The backward pass waits for incoming gradients only when its first tile is done, so their journey is hidden.

Where a route moves keys in **strides**, stride i of n is the i-th part of the KV heads (`ringspun.core.wire.heads_of`),
with the query heads that read them. A call with fewer heads than strides leaves out the last ones, messages and all.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

import numpy as np
from numpy.typing import NDArray

from ringspun.core.layout.base import Layout
from ringspun.core.wire import Payload

Rows = NDArray[np.int64]
NONE = -1
OWN = -1
KEPT = 1 << 20
"""From this slot on, blocks lie in memory that forward leaves to backward, one a slot, and stay there as they came."""


class StepColumn(IntEnum):
    """Columns of a step: the key block; slot it lies in (`OWN`: the rank's own tensors); slot in which its gradients
    gather (`OWN`: the rank's own accumulators); whether that slot starts from zero here; the slot of gradients that
    have come home and are added to the rank's own (`NONE`: none), and their block; the reader whose queries meet
    the block (`Needs`; `NONE`: nobody's); and which stride of how many it computes (0 of 1: all heads)."""

    SOURCE = 0
    SLOT = 1
    GRAD_SLOT = 2
    GRAD_FRESH = 3
    HOME_SLOT = 4
    HOME = 5
    READER = 6
    STRIDE = 7
    STRIDES = 8


class MessageColumn(IntEnum):
    """Columns of a message: step that posts it; `Moment`; `Action`; `Payload`; the other rank; the block; row range;
    which stride of how many (0 of 1: all heads); buffer slot; step that waits for it, at the same moment.

    Slot ``OWN - n`` is slot n for the message alone. What is sent from there is packed first: keys out of the rank's
    own, or, where they are another's, out of the step's block; gradients out of those of the step's block. What is
    received there is unpacked at once: keys into the block of the step that waited, gradients are added to the rank's
    own."""

    STEP = 0
    MOMENT = 1
    ACTION = 2
    PAYLOAD = 3
    PEER = 4
    SOURCE = 5
    ROW0 = 6
    ROW1 = 7
    STRIDE = 8
    STRIDES = 9
    SLOT = 10
    DUE = 11


class Moment(IntEnum):
    """When a step posts a message."""

    BEFORE = 0
    AFTER = 1


class Action(IntEnum):
    """Whether a message is sent or received."""

    SEND = 0
    RECEIVE = 1


class Cutting(Enum):
    """What a route calls a block of keys, R the number of ranks (`ringspun.core.blocks`).

    SHARDS: block r is the shard of rank r. READERS: so are the first R; each further one is what one rank needs of
    another's. PIECES: so are the first R; of n pieces (`Route.pieces`), R + n * r and the n - 1 that follow it are
    equal parts, in order, of the rows of rank r that travel.
    GATHERED: as READERS; and what a rank computes with is one more block, put together of its shard and of all that it
    needs (`ringspun.core.passes.Blocks.whole`). UNITS: block n is the n-th unit of the sequence (`Route.grid`).
    """

    SHARDS = auto()
    READERS = auto()
    PIECES = auto()
    GATHERED = auto()
    UNITS = auto()


@dataclass(frozen=True, eq=False)
class Needs:
    """Which queries meet which block of keys. Readers are ranks. On a grid (`Cutting.UNITS`) they are a few
    neighbouring units of a rank's queries, numbered in the sequence's order.

    Args:
        pairs: ``[n, 2]`` of (reader, block), in any order, perhaps repeated. tokens: rows of each block that travel.
        size: ranks R. readers, owners: ring rank of each reader and of each block; default: that of its number.
    """

    pairs: Rows
    tokens: Rows
    size: int
    readers: Rows | None = None
    owners: Rows | None = None


@dataclass(frozen=True)
class Legs:
    """One pass of one rank as a route lays it out: ``steps [n, 9]``, ``messages [m, 12]`` by step, moment and due."""

    steps: Rows
    messages: Rows


class BoundRoute(ABC):
    """A route that knows who needs which keys; gives every rank its passes."""

    @abstractmethod
    def forward(self, ring_rank: int) -> Legs:
        """The forward pass of one rank."""

    @abstractmethod
    def backward(self, ring_rank: int) -> Legs:
        """The backward pass of one rank."""

    def sent(self, size: int) -> Rows:
        """What all `size` ranks together send in backward: ``[n, 3]`` of (payload, rows, times)."""
        found = np.concatenate([self.backward(rank).messages for rank in range(size)])
        sends = found[found[:, MessageColumn.ACTION] == Action.SEND]
        kinds, times = np.unique(sends[:, [MessageColumn.PAYLOAD, MessageColumn.ROW1]], axis=0, return_counts=True)
        return np.column_stack([kinds, times])


@dataclass(frozen=True)
class Route(ABC):
    """Which messages move whose rows. A new route is one subclass."""

    @abstractmethod
    def bind(self, needs: Needs) -> BoundRoute:
        """The route for given needs."""

    @property
    def cutting(self) -> Cutting:
        """What it calls a block."""
        return Cutting.SHARDS

    def pieces(self, longest: int) -> int:
        """Into how many blocks it cuts what travels of each rank, at most `longest` rows (`Cutting.PIECES`)."""
        return 1

    @property
    def grid(self) -> int:
        """Tokens at whose multiples queries and keys are cut, whoever holds them; 0: they are not."""
        return 0

    @property
    def turns(self) -> bool:
        """Whether it moves queries as well as keys, for a backward pass in which they travel (`ringspun.core.ways`)."""
        return self.cutting not in (Cutting.GATHERED, Cutting.UNITS)

    def layout(self, layout: Layout) -> Layout:
        """How tokens are dealt where the user wants `layout`."""
        return layout

    def __str__(self) -> str:
        """Name and options: what stands for the route in a plan's digest, so that different routes never look alike."""
        name = re.sub("(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        shown = ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
        return f"{name}({shown})" if shown else name


def pack_slot(slot: int) -> int:
    """The buffer that a message's slot means, wherever its content comes from and goes to."""
    return slot if slot >= 0 else OWN - slot


def messages(
    steps: Rows,
    moment: Moment,
    action: Action,
    payload: int,
    *,
    peers: Rows | int,
    sources: Rows,
    tokens: Rows,
    slots: Rows | int,
    stride: int = 0,
    strides: int = 1,
) -> Rows:
    """Message rows for all rows of blocks, one per entry of `steps`."""
    table = np.zeros((len(steps), len(MessageColumn)), np.int64)
    table[:, MessageColumn.STEP] = steps
    table[:, MessageColumn.MOMENT] = moment
    table[:, MessageColumn.ACTION] = action
    table[:, MessageColumn.PAYLOAD] = payload
    table[:, MessageColumn.PEER] = peers
    table[:, MessageColumn.SOURCE] = sources
    table[:, MessageColumn.ROW1] = tokens[sources]
    table[:, [MessageColumn.STRIDE, MessageColumn.STRIDES]] = stride, strides
    table[:, MessageColumn.SLOT] = slots
    table[:, MessageColumn.DUE] = steps + 1
    return table


def tally(tokens: Rows, blocks: Rows, gradients: Rows) -> Rows:
    """`BoundRoute.sent`, where each block of so many `tokens`, and its gradients, are sent so many times."""
    rows, place = np.unique(tokens, return_inverse=True)
    found = []
    for payload, times in ((Payload.KV, blocks), (Payload.DKV, gradients)):
        together = np.bincount(place, times, len(rows)).astype(np.int64)
        found.append(np.column_stack([np.full_like(rows, payload), rows, together])[together > 0])
    return np.concatenate(found)


def carried(rows: Rows, kv_heads: int) -> Rows:
    """The messages that a call of so many KV heads sends: those whose stride has any."""
    some: Rows = rows[rows[:, MessageColumn.STRIDE] < max(kv_heads, 1)]
    return some


def legs(steps: Rows, tables: list[Rows]) -> Legs:
    """A pass from its steps and its messages in any order."""
    table = np.concatenate(tables)
    return Legs(steps, table[np.lexsort([table[:, column] for column in reversed(_ORDER)])])


_ORDER = (
    MessageColumn.STEP,
    MessageColumn.MOMENT,
    MessageColumn.DUE,
    MessageColumn.ACTION,
    MessageColumn.PAYLOAD,
    MessageColumn.SOURCE,
)
