"""Time of a ring: what each step computes and sends, counted from the schedule that an executor would run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ringspun.core.accounting import bytes_of
from ringspun.core.geometry import Geometry
from ringspun.core.layout import Layout
from ringspun.core.links import Link
from ringspun.core.mask import Mask
from ringspun.core.passes import Pass
from ringspun.core.route import Route
from ringspun.core.route.base import Action, MessageColumn, StepColumn, carried
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format
from ringspun.planner.rates import LAUNCH_S

ALL_RANKS = 8
"""Rings of more are counted on some of their ranks, as many as this, evenly spread, first and last among them."""
LARGE = 64
"""Rings of more on three: the first, the middle one and the last."""
Seconds = NDArray[np.float64]


@lru_cache(maxsize=512)
def schedules(ring: int, layout: Layout, route: Route, mask: Mask, seq_len: int) -> tuple[Schedule, ...]:
    """The schedules of all ranks, or of some that stand for them."""
    counted = min(ring, ALL_RANKS if ring <= LARGE else 3)
    ranks = np.unique(np.linspace(0, ring - 1, counted).astype(int)).tolist()
    return Geometry(ring, tuple(ranks), layout, route).schedule(mask, seq_len)


def head_pairs(one: Pass, wire: Format) -> NDArray[np.int64]:
    """Allowed pairs of each step, over the heads that it computes."""
    strides, which = np.unique(one.steps[:, [StepColumn.STRIDE, StepColumn.STRIDES]], axis=0, return_inverse=True)
    heads = np.array([wire.of_stride(*stride).heads for stride in strides.tolist()])
    counts: NDArray[np.int64] = one.pairs * heads[which.ravel()]
    return counts


@lru_cache(maxsize=512)
def _head_pairs(ranks: tuple[Schedule, ...], wire: Format, *, backward: bool) -> NDArray[np.int64]:
    return np.stack([head_pairs(s.backward if backward else s.forward, wire) for s in ranks])


@dataclass(frozen=True)
class Place:
    """Where a ring's ranks lie, and what joins them.

    Args:
        near: between ranks of a node. far: between nodes. node: ring ranks of a node. apart: see `Cluster`.
    """

    near: Link
    far: Link
    node: int
    apart: bool = False

    def crosses(self, a: int, b: int) -> bool:
        """Whether two ring ranks lie in different nodes."""
        return a // self.node != b // self.node


@dataclass(frozen=True)
class Work:
    """One layer's attention on one device.

    Args:
        wire: batch, heads and sizes of this device. rate: FLOP/s of its kernel on slices of this length.
    """

    wire: Format
    rate: float

    def seconds(self, pairs: NDArray[np.int64], *, backward: bool) -> Seconds:
        """Of each step, by its `head_pairs`; the convention of `ringspun.core.accounting`."""
        d, dv = self.wire.head_size, self.wire.value_size
        per_pair = (2 * (3 * d + 2 * dv) if backward else 2 * (d + dv)) * self.wire.batch
        return pairs * (per_pair / self.rate) + LAUNCH_S * (pairs > 0)


@dataclass(frozen=True)
class Lap:
    """One pass of a ring, in seconds.

    Args:
        busy: of compute, the mean of all ranks. slowest: of compute, waiting at every step for the busiest rank.
        total: waiting for messages too.
    """

    busy: float
    slowest: float
    total: float

    @property
    def exposed(self) -> float:
        """What messages add."""
        return self.total - self.slowest

    @property
    def imbalance(self) -> float:
        """What waiting for the busiest rank adds."""
        return self.slowest - self.busy


@lru_cache(maxsize=4096)
def lap(ranks: tuple[Schedule, ...], work: Work, place: Place, *, backward: bool) -> Lap:
    """Time of a pass, if all ranks wait for each other at every step: an upper bound that is close on equal ranks
    (`ringspun.planner.simulate` has no such barrier)."""
    passes = [s.backward if backward else s.forward for s in ranks]
    compute = work.seconds(_head_pairs(ranks, work.wire, backward=backward), backward=backward)
    sent = np.stack([sent_seconds(one, s.ring_rank, work.wire, place) for one, s in zip(passes, ranks, strict=True)])
    slowest = compute.max(0)
    total = np.maximum(slowest, sent.max(0))
    return Lap(float(compute.sum(1).mean()), float(slowest.sum()), float(total.sum()))


def sent_seconds(one: Pass, ring_rank: int, wire: Format, place: Place) -> Seconds:
    """How long a rank's links take for what each step posts, all links side by side; what is due later is spread over
    the steps that it has."""
    messages = carried(one.messages, wire.kv_heads)
    sends = messages[messages[:, MessageColumn.ACTION] == Action.SEND]
    lengths = bytes_of(sends, wire)
    peers = sends[:, MessageColumn.PEER]
    crosses = peers // place.node != ring_rank // place.node
    ways = [(place.far, crosses)]
    ways += [(place.near, peers == p) for p in np.unique(peers[~crosses])] if place.apart else [(place.near, ~crosses)]
    slowest = np.zeros(len(one))
    for link, chosen in ways:
        sizes, which = np.unique(lengths[chosen], return_inverse=True)
        seconds = np.array([link.seconds(n) for n in sizes.tolist()])[which]
        slowest = np.maximum(slowest, _spread(len(one), sends[chosen], seconds))
    return slowest


def _spread(count: int, sends: NDArray[np.int64], seconds: Seconds) -> Seconds:
    """Each message's time over the steps between its posting and the one that waits for it."""
    into = np.zeros(count)
    first = sends[:, MessageColumn.STEP]
    steps = np.maximum(1, np.minimum(sends[:, MessageColumn.DUE], count) - first)
    for n in np.unique(steps).tolist():
        some = steps == n
        for ahead in range(n):
            np.add.at(into, np.minimum(first[some] + ahead, count - 1), seconds[some] / n)
    return into
