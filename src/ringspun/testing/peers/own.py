"""This package: its ring, and its split of heads where `ContextParallel` has one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from ringspun.core.layout import Contiguous
from ringspun.testing.peers.base import Peer, Ready
from ringspun.testing.timing import Work
from ringspun.torch import ContextParallel


@dataclass(frozen=True)
class Ring(Peer):
    """Ours, in the layout that a user would choose for the mask."""

    name: str = "ringspun, ring"
    module: str = "ringspun"
    distribution: str = "ringspun"

    def refuses(self, work: Work) -> str | None:
        return None

    def remark(self, work: Work) -> str:
        name = str(work.layout)
        return name.partition("(")[0]

    def prepare(self, ring_rank: int, work: Work) -> Ready:
        return _ready(ContextParallel(layout=work.layout, checks=work.checks, route=work.route), ring_rank, work)


@dataclass(frozen=True)
class Heads(Peer):
    """Ours, all ranks splitting heads."""

    name: str = "ringspun, heads"
    module: str = "ringspun"
    distribution: str = "ringspun"
    is_ring: bool = False

    @property
    def version(self) -> str | None:
        known = inspect.signature(ContextParallel).parameters
        return super().version if "ulysses" in known else None

    @property
    def missing(self) -> str:
        return "not in this version"

    def refuses(self, work: Work) -> str | None:
        return None if work.heads >= work.ranks else f"{work.heads} heads cannot be split over {work.ranks} ranks"

    def prepare(self, ring_rank: int, work: Work) -> Ready:
        split: Any = {"ulysses": work.ranks}
        return _ready(ContextParallel(layout=Contiguous(), checks=work.checks, **split), ring_rank, work)


def _ready(context: ContextParallel, ring_rank: int, work: Work) -> Ready:
    plan = context.plan(work.seq_len, work.mask)
    counts = context.driver.counts

    def sent() -> int:
        return sum(n for (sender, _), n in counts.bytes.items() if sender == ring_rank)

    return Ready(plan.partition.positions().numpy(), plan.attention, sent_bytes=sent)
