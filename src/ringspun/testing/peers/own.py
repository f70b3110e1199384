"""This package: its ring, and its split of heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        return str(work.layout).partition("(")[0]

    def prepare(self, ring_rank: int, work: Work) -> Ready:
        context = ContextParallel(layout=work.layout, checks=work.checks, route=work.route, ulysses=work.ulysses)
        plan = context.plan(work.seq_len, work.mask)
        counts = context.driver.counts

        def sent() -> int:
            return sum(n for (sender, _), n in counts.bytes.items() if sender == ring_rank)

        return Ready(plan.partition.positions().numpy(), plan.attention, sent_bytes=sent)


@dataclass(frozen=True)
class Heads(Ring):
    """Ours, all ranks splitting heads."""

    name: str = "ringspun, heads"
    is_ring: bool = False

    def refuses(self, work: Work) -> str | None:
        return None if work.heads >= work.ranks else f"{work.heads} heads cannot be split over {work.ranks} ranks"

    def remark(self, work: Work) -> str:
        return "contiguous"

    def prepare(self, ring_rank: int, work: Work) -> Ready:
        return super().prepare(ring_rank, replace(work, ulysses=work.ranks, layout=Contiguous()))
