"""Peers that cannot run here: they are listed, so that nobody takes them for forgotten."""

from __future__ import annotations

from dataclasses import dataclass

from ringspun.testing.peers.base import Peer, Ready
from ringspun.testing.timing import Work


@dataclass(frozen=True)
class Absent(Peer):
    """A peer by name, and why it is not measured.

    Args:
        why: words.
    """

    why: str = ""

    @property
    def version(self) -> str | None:
        return None

    @property
    def missing(self) -> str:
        return self.why

    def refuses(self, work: Work) -> str | None:
        return self.why

    def prepare(self, ring_rank: int, work: Work) -> Ready:
        raise NotImplementedError(self.why)
