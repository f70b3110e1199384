"""A job: one rank's part of one call, which the ring executes and its mail reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ringspun.core.passes import Blocks, Pass
from ringspun.core.route.base import MessageColumn, StepColumn
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format, heads_of
from ringspun.steplog import StepLog
from ringspun.steplog.meter import Meter
from ringspun.torch.bias import RankBias
from ringspun.torch.buffers import BufferPool
from ringspun.torch.kernels.base import Block, Kernel, StepTiles, Terms

_NO_TILES = StepTiles(np.zeros((0, 8), np.int64))


class Part(NamedTuple):
    """What a step computes: its tiles, of some query heads and the KV heads that they read."""

    tiles: StepTiles
    heads: slice
    kv_heads: slice


@dataclass(frozen=True)
class Job:
    """One rank's part of one call.

    Args:
        schedule: what to do. one: its pass that is to be done. blocks: what goes round in it. tiles: the tiles of each
            step. kernel: who computes them. wire: what messages look like.
        pool: where buffers come from. terms: what enters beside q, k, v. bias: this rank's, where there is one.
        plan_id, call, phase: what stands in headers: the plan; the number of this call on this ring; 0 in forward, in
            backward 1 + the number of the forward call that it belongs to.
        log: this rank's. sync_steps: whether all ranks finish a step before the next.
        sums: whether messages carry checksums. meter: measures the call, if one does.
        deferred: whether messages are judged when all of the call is queued, not on arrival.
        kept: memory of the blocks that forward leaves to backward (bytes); empty: it leaves none.
    """

    schedule: Schedule
    one: Pass
    blocks: Blocks
    tiles: list[StepTiles]
    kernel: Kernel
    wire: Format
    pool: BufferPool
    terms: Terms
    bias: RankBias | None
    plan_id: int
    call: int
    phase: int
    log: StepLog
    sync_steps: bool
    sums: bool
    meter: Meter | None
    deferred: bool
    kept: Tensor

    @property
    def parts(self) -> list[slice]:
        """Rows of the queries that are summed over, or gone through, by themselves: all, or each unit on a grid."""
        tokens, grid = self.schedule.local_tokens, self.schedule.grid
        return [slice(a, min(a + grid, tokens)) for a in range(0, tokens, grid)] if grid else [slice(0, tokens)]

    def owner(self, step: int, row: Any) -> int:
        """Ring rank whose block a step computes with; this one's where it computes nothing."""
        blocks = self.blocks
        return blocks.owner(int(row[StepColumn.SOURCE])) if len(self.tiles[step].tiles) else blocks.ring_rank

    def part(self, step: int, row: Any) -> Part:
        """What a step computes."""
        kv = self.kv_heads(row, StepColumn)
        return Part(self.tiles[step] if kv.start < kv.stop else _NO_TILES, self.query_heads(kv), kv)

    def kv_heads(self, row: Any, column: type[StepColumn] | type[MessageColumn]) -> slice:
        """The KV heads of a step or of a message."""
        return heads_of(int(row[column.STRIDE]), int(row[column.STRIDES]), self.wire.kv_heads)

    def query_heads(self, kv_heads: slice) -> slice:
        """The query heads that read some KV heads."""
        group = self.wire.heads // max(self.wire.kv_heads, 1)
        return slice(kv_heads.start * group, kv_heads.stop * group)

    def block(self, part: Part, source: int, operands: tuple[Tensor, ...]) -> Block:
        """The q, k and v of a step that meets the block `source`."""
        q, k, v = operands
        bias = None if self.bias is None or not len(part.tiles.tiles) else self.bias.block(source, part.heads)
        return Block(q, k, v, self.terms.scale, self.terms.softcap, bias)
