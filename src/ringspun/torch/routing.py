"""From what a user asks of a context, a route, links, a block size or the same bits everywhere, to the one route."""

from __future__ import annotations

from ringspun.core.links import Links
from ringspun.core.route import Auto, InOrder, Ring, Route
from ringspun.core.text import parse_route, shown
from ringspun.errors import PlanError


def route_of(route: Route | str, deterministic: object, links: Links | None, block_size: int | str | None) -> Route:
    """What `ContextParallel` is given, as a route."""
    if block_size is not None:
        return _ring(route, deterministic, links, block_size)
    if links is not None and (route != "auto" or deterministic):
        raise PlanError("links must come with route='auto', which is chosen by them; got another. Leave one out.")
    if deterministic is not None and deterministic is not False and deterministic != "across_rings":
        raise PlanError(
            f"deterministic must be None or 'across_rings'; got {deterministic!r}. The same inputs on the same ring "
            "give the same bits in any case."
        )
    if not deterministic:
        if route != "auto":
            return parse_route(route) if isinstance(route, str) else route
        if links is None:
            return Ring()
        return Auto(links)
    if route != "auto":
        raise PlanError(
            f"route must be 'auto' with deterministic='across_rings', which has its own; got {route}. Leave one out."
        )
    return InOrder()


def may_turn(route: Route | str, deterministic: object) -> bool:
    """Whether queries may travel in backward by what is asked for (`Route.turns`)."""
    if deterministic:
        return False
    return route == "auto" or (parse_route(route) if isinstance(route, str) else route).turns


def _ring(route: Route | str, deterministic: object, links: object, block_size: int | str) -> Ring:
    """The ring, where a block size is given."""
    given = {"deterministic": deterministic or None, "links": links}
    given["route"] = None if route in ("auto", "ring", Ring()) else route
    for name, value in given.items():
        if value is not None:
            raise PlanError(
                f"block_size must come with the ring, the default route without links; got {name}={shown(value, 60)}. "
                "Leave one out."
            )
    if isinstance(block_size, str) and block_size != "auto":
        raise PlanError(f"block_size must be None, a number of tokens or 'auto'; got {block_size!r}.")
    return Ring() if isinstance(block_size, str) else Ring(block_size)
