"""Unequal ranks and links: which share, layout and order of hops is done first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ringspun.core.geometry import Geometry
from ringspun.core.layout import Contiguous, Layout, Striped, Zigzag
from ringspun.core.mask import Mask
from ringspun.core.route import AllGather, Bidirectional, Direct, DoubleRing, Ring, Route
from ringspun.core.schedule import Schedule
from ringspun.errors import ConfigError
from ringspun.planner.ring import Place, Work
from ringspun.planner.simulate import Edge, simulate


@dataclass(frozen=True)
class Way:
    """One way, simulated.

    Args:
        layout, route: which. tokens: of each rank. seconds: until the last rank is done, forward and backward.
    """

    layout: Layout
    route: Route
    tokens: tuple[int, ...]
    seconds: float


def quickest(
    mask: Mask,
    seq_len: int,
    speeds: Sequence[float],
    work: Work,
    place: Place,
    *,
    slow: Mapping[Edge, float] | None = None,
) -> list[Way]:
    """Every layout, with equal shares and shares by speed, on every route: the first to be done first.

    Args:
        speeds: of each rank's compute, as measured. slow: links (from, to) that take so many times as long.
    Raises:
        ConfigError: fewer than two ranks, or speeds that are none.
    """
    if len(speeds) < 2:
        raise ConfigError(f"speeds must be of two ranks or more; got {list(speeds)}.")
    if not all(0 < s < float("inf") for s in speeds):
        raise ConfigError(f"speeds must be positive numbers; got {list(speeds)}.")
    ways = []
    for layout in _layouts(tuple(speeds)):
        for route in _routes(len(speeds), place):
            ranks = _schedules(len(speeds), layout, route, mask, seq_len)
            seconds = sum(
                simulate(ranks, work, place, backward=b, speeds=speeds, slow=slow).total for b in (False, True)
            )
            ways.append(Way(layout, route, tuple(ranks[0].tokens.tolist()), seconds))
    return sorted(ways, key=lambda way: way.seconds)


def _layouts(speeds: tuple[float, ...]) -> list[Layout]:
    equal: list[Layout] = [Zigzag(), Contiguous(), Striped()]
    return equal if len(set(speeds)) == 1 else [*equal, Zigzag(speeds=speeds), Contiguous(speeds=speeds)]


def _routes(size: int, place: Place) -> list[Route]:
    routes: list[Route] = [Ring(), Direct()]
    if size > 2:
        routes += [Bidirectional(), AllGather()]
    if 1 < place.node < size and size % place.node == 0:
        routes.append(DoubleRing(place.node))
    return routes


@cache
def _schedules(size: int, layout: Layout, route: Route, mask: Mask, seq_len: int) -> tuple[Schedule, ...]:
    return Geometry(size, tuple(range(size)), layout, route).schedule(mask, seq_len)
