"""The choice of a route: how long each would move messages, by its own schedule and by links as measured.

A rank's messages to ranks of its node follow each other on its near link; those that leave a node on its far link,
which all ranks of the node use together if it is shared. Both kinds move at once. Compute is the same by every route
and is left out: what is chosen hides best, whether or not it can be hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ringspun.core.links import Links
from ringspun.core.partition import Sides
from ringspun.core.readings import Cuts, of_route
from ringspun.core.route import AllGather, Direct, DoubleRing, Ring, Route
from ringspun.core.route.auto import Auto
from ringspun.core.route.base import Action, BoundRoute, MessageColumn, Rows
from ringspun.core.wire import Payload

ROW_BYTES = 4096
"""Of a key and its value: 8 heads of 128 in bfloat16. What it is in truth is not known yet; latency counts by it."""
MOST_RANKS = 64
"""Rings of more are not compared: it would take seconds. They are rings, or double rings where there are nodes."""
SHARED = 1.5
"""A link that is so much slower while all send is shared."""

Weighed = tuple[tuple[str, float], ...]
"""Routes and their seconds, best first."""


def choose(auto: Auto, sides: Sides, cuts: Cuts) -> tuple[Route, Weighed]:
    """The route to take, and what it was chosen from."""
    routes, links = candidates(auto.links, sides.keys.ring_size), auto.links
    size = sides.keys.ring_size
    if len(routes) == 1 or size > MOST_RANKS:
        return routes[0], ()
    bound = [(route.bind(of_route(route, sides, cuts).needs), route) for route in routes]
    seconds = [(weigh(one, size, links), route) for one, route in bound]
    ordered = sorted(seconds, key=lambda one: one[0])  # stable: the simpler first where they are equal
    return ordered[0][1], tuple((str(route), time) for time, route in ordered)


def candidates(links: Links, size: int) -> Sequence[Route]:
    """What may be chosen, simplest first."""
    if size < 3:
        return [Ring()]
    nodes = [] if links.node is None or links.far is None or size % links.node else [DoubleRing(links.node)]
    if size > MOST_RANKS:
        return [*nodes, Ring()][:1]
    return [Ring(), Direct(), *nodes, AllGather()]


def weigh(route: BoundRoute, size: int, links: Links) -> float:
    """Seconds that messages of forward and backward take, if nothing else does."""
    passes = ([legs(rank).messages for rank in range(size)] for legs in (route.forward, route.backward))
    return sum(_of_pass(messages, links) for messages in passes)


def _of_pass(messages: list[Rows], links: Links) -> float:
    node = links.node or len(messages)
    near: dict[int, float] = defaultdict(float)
    far: dict[int, float] = defaultdict(float)
    outside = links.far or links.near
    shared = outside.shared >= SHARED
    for rank, rows in enumerate(messages):
        sends = rows[rows[:, MessageColumn.ACTION] == Action.SEND]
        alike = np.unique(sends[:, _ALIKE], axis=0, return_counts=True)  # strides send the same again and again
        for (peer, payload, tokens, strides), count in zip(*(x.tolist() for x in alike), strict=True):
            n_bytes = tokens * ROW_BYTES // strides * (1 if payload == Payload.KV else 2)
            if rank // node == peer // node:
                near[rank] += count * links.near.seconds(n_bytes)
            else:
                far[rank // node if shared else rank] += count * outside.seconds(n_bytes, together=not shared)
    return max([0.0, *near.values(), *far.values()])


_ALIKE = [MessageColumn.PEER, MessageColumn.PAYLOAD, MessageColumn.ROW1, MessageColumn.STRIDES]
