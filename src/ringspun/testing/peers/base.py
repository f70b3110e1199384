"""What a peer is: an attention over ranks that others made, or ours, behind one small face.

A peer says what it refuses, and made ready on a rank it says which tokens that rank holds and attends. Everything else
(inputs, clocks, memory, bytes, judging) is the same for all and stands in `on_ranks`.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ringspun.core.layout import Layout
from ringspun.core.mask import Causal, Full
from ringspun.core.partition import Partition
from ringspun.testing.timing import Work


@dataclass(frozen=True)
class Ready:
    """A peer on one rank, for one piece of work.

    Args:
        positions: global positions of the rank's tokens, in the order of its rows.
        attend: out of q, k, v, through which autograd goes; `by_token`: ``[B, T, H, D]``, else ``[B, H, T, D]``.
        sent_bytes: what this rank has sent so far, by the peer's own count; None: its collectives are counted.
        seen_by_torch: whether its memory and messages are torch's; others are not counted.
    """

    positions: NDArray[np.int64]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    by_token: bool = False
    sent_bytes: Callable[[], int] | None = None
    seen_by_torch: bool = True


@dataclass(frozen=True)
class Instead:
    """What a peer that refuses a piece of work can do that comes nearest to it, in `words`."""

    work: Work
    words: str


@dataclass(frozen=True)
class Peer(ABC):
    """One line of the comparison. It must be picklable, for it is sent to the ranks.

    Args:
        name: in tables. module, distribution: whose presence and version say whether it is installed.
        is_ring: whether queries stay and keys and values travel.
        most_tokens: longest sequence that it is timed with (tokens); None: any.
    """

    name: str = ""
    module: str = ""
    distribution: str = ""
    is_ring: bool = True
    most_tokens: int | None = None

    @property
    def version(self) -> str | None:
        """As installed; None where it is not."""
        if importlib.util.find_spec(self.module) is None:
            return None
        return metadata.version(self.distribution)

    @property
    def missing(self) -> str:
        """What to say where there is no version."""
        return "not installed (benchmarks/peers.txt)"

    def ranks(self, work: Work) -> int:
        """Processes that it runs in."""
        return work.ranks

    def remark(self, work: Work) -> str:
        """What a reader should know of how it is called."""
        return ""

    @abstractmethod
    def refuses(self, work: Work) -> str | None:
        """Why it cannot do this work, exactly as asked; None where it can."""

    def nearest(self, work: Work) -> Instead | None:
        """The nearest to a refused work that it can do; None: nothing."""
        if isinstance(work.mask, Causal | Full):
            return None
        whole = Instead(replace(work, mask=Causal()), "full causal")
        return None if self.refuses(whole.work) else whole

    @abstractmethod
    def prepare(self, ring_rank: int, work: Work) -> Ready:
        """On every rank of the default group: what attends there."""


def dealt(layout: Layout, work: Work, ring_rank: int) -> NDArray[np.int64]:
    """Global positions of a rank's tokens."""
    return Partition(work.seq_len, work.ranks, layout).positions(ring_rank)


def uneven(work: Work, pieces: int, words: str = "equal shards") -> str | None:
    """Why a length that `pieces` does not divide is refused."""
    if work.seq_len % pieces == 0:
        return None
    return f"it needs {words}: {pieces} must divide the length; got {work.seq_len}"


def only_plain(work: Work) -> str | None:
    """Why a mask other than causal and full is refused."""
    return None if isinstance(work.mask, Causal | Full) else "it knows the causal mask and none"
