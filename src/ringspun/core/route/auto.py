"""Auto: whichever route is over soonest on given links, chosen for each mask and layout (`ringspun.core.choice`)."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from typing import NoReturn

from ringspun.core.links import Links
from ringspun.core.route.base import Needs, Route


@dataclass(frozen=True)
class Auto(Route):
    """Stands for a route until there is something to compute.

    Args:
        links: as measured; the same on every rank.
    """

    links: Links

    def bind(self, needs: Needs) -> NoReturn:
        raise NotImplementedError("another route is chosen before anything is bound")

    def __str__(self) -> str:
        return f"auto(links={hashlib.blake2b(repr(astuple(self.links)).encode(), digest_size=6).hexdigest()})"
