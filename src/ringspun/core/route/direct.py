"""Direct: every rank gets from each owner just the rows that it needs, and sends their gradients straight back.

    R = 4                       step 0      step 1      step 2      step 3
                      rank 0    own         rows of 3   rows of 2   rows of 1
                      rank 1    own         rows of 0   rows of 3   rows of 2

Nothing is relayed, so nothing travels that its receiver does not compute with: under a causal mask and zigzag three
quarters of a ring's bytes. Over one slow link that ranks share it is the worst: each row crosses it once per reader.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core.route.base import BoundRoute, Cutting, Needs, Route, Rows, tally
from ringspun.core.route.diary import Diary, Written
from ringspun.core.route.lane import bring_home
from ringspun.core.wire import Payload


@dataclass(frozen=True)
class Direct(Route):
    """From each owner to each reader, nearest ranks first."""

    @property
    def cutting(self) -> Cutting:
        return Cutting.READERS

    def bind(self, needs: Needs) -> BoundRoute:
        assert needs.owners is not None
        reader, block = np.unique(needs.pairs, axis=0).T
        owner = needs.owners[block]
        away = reader != owner
        return BoundDirect(needs.size, needs.tokens, reader[away], owner[away], block[away])


@dataclass(frozen=True, eq=False)
class BoundDirect(Written):
    """Args:
    size: ranks. tokens: rows of each block. reader, owner, block: of each block that travels.
    """

    size: int
    tokens: Rows
    reader: Rows
    owner: Rows
    block: Rows

    @property
    def count(self) -> int:
        return 1 + int(((self.reader - self.owner) % self.size).max(initial=0))

    def sent(self, size: int) -> Rows:
        rows = self.tokens[self.block]
        return tally(rows, np.ones_like(rows), np.ones_like(rows))

    def write(self, ring_rank: int, *, backward: bool) -> Diary:
        diary = Diary(ring_rank, self.tokens)
        diary.compute_own(self.own_step(backward=backward))
        reads, owns = self.reader == ring_rank, self.owner == ring_rank
        sources = dict(zip(self.owner[reads].tolist(), self.block[reads].tolist(), strict=True))
        readers = dict(zip(self.reader[owns].tolist(), self.block[owns].tolist(), strict=True))
        for hop in range(1, self.count):
            source, reader = (ring_rank - hop) % self.size, (ring_rank + hop) % self.size
            if reader in readers:
                diary.send(None, Payload.KV, readers[reader], reader, hop - 1, hop)
            if source in sources:
                block = sources[source]
                diary.compute(hop, block, diary.receive(Payload.KV, block, source, hop - 1, hop))
            if backward and source in sources:
                diary.send(diary.gather(hop, block, None), Payload.DKV, block, source, hop, hop + 1)
            if backward and reader in readers:
                bring_home(diary, readers[reader], reader, hop)
        return diary
