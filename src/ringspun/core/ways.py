"""The two ways of a backward pass: keys and values go round and queries stay, or queries go round.

    keys      k, v go round; their gradients dK, dV follow them home     per row 2 K D x size + 2 K D x 4 bytes
    queries   q, dO, lse, delta go round; their gradients dQ follow      per row 2 H D x size + 2 H x 4 + H D x 4

The second is the ring of the *turned* problem, in which queries and keys change places: every region (q, k, lo, hi)
becomes (k, q, -hi, -lo), readings and routes give steps and messages of it as of any other, and tiles are turned back.
So rows of queries that nobody else meets stay at home, and hops that nobody needs are left out, here as there.
Queries are fewer bytes where there are about as many heads of them as of keys: 3/4 in float32, 2/3 in bfloat16; and
where there are far fewer of them than of keys, as in cross-attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ringspun.core import needs
from ringspun.core import regions as rg
from ringspun.core import tiles as tl
from ringspun.core.cut import Cut
from ringspun.core.mask import Mask, RowMasks
from ringspun.core.partition import Sides
from ringspun.core.passes import Blocks, Pass, attach, nothing_gathered
from ringspun.core.readings import Gathered, Readings, of_route
from ringspun.core.route.base import BoundRoute, Legs, MessageColumn, Route
from ringspun.core.schedule import Origin, Schedule, cuts_of
from ringspun.core.wire import Format, Payload, Side
from ringspun.errors import PlanError

WANTED = ("auto", *(side.value for side in Side))
"""What may be asked for."""
_TURNED = Payload.QUERIES - Payload.KV
"""From a message of keys, or of their gradients, to that of queries."""


@dataclass(frozen=True, eq=False)
class Turned(Blocks):
    """The backward pass of one rank in which queries travel.

    Args:
        ring_rank, ring_size: its place. travelling: the query rows that others need, all ranks'. owners: ring rank of
            each block; None: a block is a rank's shard. backward: the pass; tiles count the rows of the block of
            queries, and all keys of the rank. gathered: nothing, ever.
    """

    ring_rank: int
    ring_size: int
    travelling: needs.Travelling
    owners: NDArray[np.int64] | None
    backward: Pass
    gathered: Gathered = field(default_factory=nothing_gathered)


def take(schedule: Schedule, wire: Format, wanted: str = "keys") -> Side:
    """What shall travel in backward: the fewer bytes of all ranks together, keys where they are equal; the same on all
    ranks, and for all calls of one format.

    Args:
        wanted: one of `WANTED`.
    Raises:
        PlanError: queries, where there is no such pass.
    """
    if wanted != "auto":
        if wanted == Side.QUERIES.value:
            _origin(schedule)
        return Side(wanted)
    if schedule.origin is None or not len(schedule.origin.sent):
        return Side.KEYS
    sent = sent_bytes(schedule, wire)
    return min(sent, key=lambda side: sent[side])  # the first of equals


def sent_bytes(schedule: Schedule, wire: Format) -> dict[Side, int]:
    """Bytes that all ranks together send in backward, headers included, keys travelling or queries.

    Raises:
        PlanError: there is no pass in which queries travel.
    """
    origin = _origin(schedule)
    _, bound = _bound(origin.sides, schedule.mask, origin.route)
    turned = bound.sent(schedule.ring_size) + np.array([_TURNED, 0, 0])
    return {
        side: sum(times * wire.message_bytes(Payload(payload), rows) for payload, rows, times in sent.tolist())
        for side, sent in ((Side.KEYS, origin.sent), (Side.QUERIES, turned))
    }


def taken(schedules: Sequence[Schedule], wire: Format, wanted: str = "keys") -> Sequence[Schedule | Turned]:
    """Whose `backward` calls of a format take; arguments as `take`."""
    return turned(schedules) if take(schedules[0], wire, wanted) == Side.QUERIES else schedules


def turned(schedules: Sequence[Schedule]) -> tuple[Turned, ...]:
    """The passes in which queries travel, of the ranks of some schedules of one plan.

    Raises:
        PlanError: there are none.
    """
    origin = _origin(schedules[0])
    read, bound = _bound(origin.sides, schedules[0].mask, origin.route)

    def of_rank(one: Schedule) -> Turned:
        legs = bound.backward(one.ring_rank)
        messages = legs.messages.copy()
        messages[:, MessageColumn.PAYLOAD] += _TURNED
        back = attach(Legs(legs.steps, messages), *read.of_rank(one.ring_rank))
        back = replace(back, tiles=tl.turned(back.tiles), side=Side.QUERIES)
        return Turned(one.ring_rank, one.ring_size, read.travelling, read.needs.owners, back)

    return tuple(map(of_rank, schedules))


def _origin(schedule: Schedule) -> Origin:
    if schedule.origin is None:
        raise PlanError(
            f"backward must be 'auto' or 'keys' by {schedule.route}, by which no queries travel; got 'queries'."
        )
    return schedule.origin


@lru_cache(maxsize=1)  # what is compared is mostly taken next; more would hold much
def _bound(sides: Sides, mask: Mask | RowMasks, route: Route) -> tuple[Readings, BoundRoute]:
    """The readings of the turned problem, and the route bound to them."""
    other = sides.turned()
    cuts = [(Cut(other.queries, other.keys, rg.turned(cut.regions)), rows) for cut, rows in cuts_of(sides, mask)]
    read = of_route(route, other, cuts)
    by_columns = np.asfortranarray(read.travelling)  # as in `compile_schedules`
    by_columns.setflags(write=False)
    return replace(read, travelling=by_columns), route.bind(read.needs)
