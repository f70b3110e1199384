"""All-gather: one stride of the KV heads after the other, a rank gets all keys that it needs, from all their owners.

    3 strides                    step 0       step 1       step 2       step 3
    every rank computes                       stride 0     stride 1     stride 2
    and meanwhile there come     stride 0     stride 1     stride 2

What comes is put together with the rank's own rows, in the order of the sequence, so that a query meets all keys of a
head at once: under a causal mask in one tile a chunk, with nothing to merge. dK and dV of a stride go straight back to
the owners of the keys, who add them up. The bytes are those of `direct`.

A stride of R parts lies there twice, as it came and put together, and once more packed for others: of R strides, as
many bytes as three shards. Only the first stride has nothing to hide behind.
Source: Llama 3 (arXiv 2407.21783), section 3.3.2, there with all heads at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core.host import is_integer
from ringspun.core.route.base import (
    NONE,
    OWN,
    Action,
    BoundRoute,
    Cutting,
    Legs,
    Moment,
    Needs,
    Route,
    Rows,
    StepColumn,
    legs,
    messages,
)
from ringspun.core.wire import Payload
from ringspun.errors import PlanError

MOST_STRIDES = 64
"""By default. More KV heads are rare, and strides without heads are empty steps."""


@dataclass(frozen=True)
class AllGather(Route):
    """All keys of some heads at a time.

    Args:
        strides: parts that the KV heads are cut into; a call with fewer heads has as many as heads. Default: the ring's
            size, up to `MOST_STRIDES`: then what is gathered at once is as large as a ring's block.
    Raises:
        PlanError: `strides` is no number of parts.
    """

    strides: int | None = None

    def __post_init__(self) -> None:
        n = self.strides
        if n is not None and not (is_integer(n) and n >= 1):
            raise PlanError(
                f"strides must be a number of parts of the KV heads >= 1; got {n!r}. None: as many as ranks."
            )

    @property
    def cutting(self) -> Cutting:
        return Cutting.GATHERED

    def bind(self, needs: Needs) -> BoundRoute:
        assert needs.owners is not None
        reader, block = np.unique(needs.pairs, axis=0).T
        strides = min(needs.size, MOST_STRIDES) if self.strides is None else self.strides
        return BoundAllGather(needs.tokens, reader, needs.owners[block], block, len(needs.owners), strides)


@dataclass(frozen=True, eq=False)
class BoundAllGather(BoundRoute):
    """Args:
    tokens: rows of each block. reader, owner, block: of each block that travels. whole: number of the block that a rank
        puts together. strides: how many there are.
    """

    tokens: Rows
    reader: Rows
    owner: Rows
    block: Rows
    whole: int
    strides: int

    def forward(self, ring_rank: int) -> Legs:
        return legs(self._steps(ring_rank, self._count), self._messages(ring_rank, Payload.KV))

    def backward(self, ring_rank: int) -> Legs:
        # one step more than forward, to wait for the gradients that come home last
        steps = self._steps(ring_rank, self._count + (self._count > 1))
        gathered = steps[:, StepColumn.SOURCE] == self.whole
        steps[gathered, StepColumn.GRAD_SLOT] = 0
        steps[gathered, StepColumn.GRAD_FRESH] = 1
        steps[gathered, StepColumn.HOME_SLOT] = 0
        steps[gathered, StepColumn.HOME] = self.whole
        gradients = self._messages(ring_rank, Payload.DKV)
        return legs(steps, [*self._messages(ring_rank, Payload.KV), *gradients])

    @property
    def _count(self) -> int:
        """Steps of forward, the same on every rank; 1: nothing travels."""
        return self.strides + 1 if len(self.block) else 1

    def _steps(self, ring_rank: int, count: int) -> Rows:
        steps = np.zeros((count, len(StepColumn)), np.int64)
        steps[:, [StepColumn.SLOT, StepColumn.GRAD_SLOT]] = OWN
        steps[:, [StepColumn.HOME_SLOT, StepColumn.READER]] = NONE
        steps[:, [StepColumn.SOURCE, StepColumn.HOME]] = ring_rank
        steps[:, StepColumn.STRIDES] = 1
        if self._count == 1:
            steps[:, StepColumn.READER] = ring_rank
            return steps
        computes = slice(1, self.strides + 1)
        steps[computes, StepColumn.READER] = ring_rank
        steps[computes, StepColumn.STRIDE] = np.arange(self.strides)
        steps[computes, StepColumn.STRIDES] = self.strides
        if (self.reader == ring_rank).any():
            steps[computes, StepColumn.SOURCE] = self.whole
            steps[computes, StepColumn.SLOT] = 0
        return steps

    def _messages(self, ring_rank: int, payload: Payload) -> list[Rows]:
        """Keys of stride i between step i and the next, their gradients one step later, the other way."""
        reads, owns = self.reader == ring_rank, self.owner == ring_rank
        of_keys = payload == Payload.KV
        moment, lag = (Moment.BEFORE, 0) if of_keys else (Moment.AFTER, 1)
        begin = 1  # after the slot of what is put together
        tables = [np.zeros((0, 12), np.int64)]
        for mine, peers, sends in ((reads, self.owner, not of_keys), (owns, self.reader, of_keys)):
            count = int(mine.sum())
            slots = OWN - (begin + np.arange(count))
            begin += count
            tables += [
                messages(
                    np.full(count, i + lag), moment, Action.SEND if sends else Action.RECEIVE, payload,
                    peers=peers[mine], sources=self.block[mine], tokens=self.tokens, slots=slots,
                    stride=i, strides=self.strides,
                )
                for i in range(self.strides)
            ]  # fmt: skip
        return tables
