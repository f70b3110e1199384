"""A schedule: everything one rank does in one attention call, forward and backward, as read-only arrays.

It is made once by the core and executed by torch, jax, the planner and the pictures, which decide nothing. There is no
object per message or tile; equality and hash are those of the bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core import tiles as tl
from ringspun.core.layout.base import Layout
from ringspun.core.mask import Documents, Mask
from ringspun.core.partition import Partition
from ringspun.core.route.base import BoundRoute, Legs, MessageColumn, Moment, Route, StepColumn
from ringspun.errors import PlanError

FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Pass:
    """One direction of one rank: step and message rows (columns: `StepColumn`, `MessageColumn`), and all tiles.

    Tiles of step t are ``tiles[tile_offsets[t]:tile_offsets[t + 1]]`` (columns: `ringspun.core.tiles`).
    """

    steps: NDArray[np.int64]
    messages: NDArray[np.int64]
    tiles: tl.Tiles
    tile_offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        for array in self._arrays():
            array.setflags(write=False)

    def __reduce__(self) -> tuple[type[Pass], tuple[NDArray[np.int64], ...]]:
        return Pass, self._arrays()  # through __init__, so that a copy from a loader's worker is read-only too

    def __len__(self) -> int:
        return len(self.steps)

    def tiles_of(self, step: int) -> tl.Tiles:
        """Tiles that `step` computes, ``[n, 8]``."""
        return self.tiles[self.tile_offsets[step] : self.tile_offsets[step + 1]]

    def messages_of(self, step: int, moment: Moment) -> NDArray[np.int64]:
        """Messages that `step` posts at `moment`, ``[n, 11]``."""
        m = self.messages
        chosen: NDArray[np.int64] = m[(m[:, MessageColumn.STEP] == step) & (m[:, MessageColumn.MOMENT] == moment)]
        return chosen

    @property
    def pairs(self) -> NDArray[np.int64]:
        """Allowed pairs per step (one batch row and head)."""
        counts = np.append(0, np.cumsum(tl.count_pairs(self.tiles)))
        return np.diff(counts[self.tile_offsets])

    def _arrays(self) -> tuple[NDArray[np.int64], ...]:
        return self.steps, self.messages, self.tiles, self.tile_offsets


@dataclass(frozen=True, eq=False)
class Schedule:
    """What one rank does in one attention call.

    Args:
        ring_rank, ring_size: this rank's place. tokens: local query rows of every rank ``[R]``.
        mask: what is computed. inputs: digest of all that the schedule was made from; equal on all ranks of a ring.
        forward, backward: the passes.
    """

    ring_rank: int
    ring_size: int
    tokens: NDArray[np.int64]
    mask: Mask
    inputs: bytes
    forward: Pass
    backward: Pass

    @property
    def local_tokens(self) -> int:
        """Query rows of this rank."""
        return int(self.tokens[self.ring_rank])

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for the whole schedule."""
        h = hashlib.blake2b(self.inputs, digest_size=32)
        h.update(np.array([self.ring_rank, self.ring_size, *self.tokens], np.int64).tobytes())
        for array in (*self.forward._arrays(), *self.backward._arrays()):
            h.update(np.array(array.shape, np.int64).tobytes())
            h.update(np.ascontiguousarray(array).tobytes())
        return h.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        sizes = f"{len(self.forward)} steps, {len(self.forward.tiles)} tiles, {len(self.forward.messages)} messages"
        return f"Schedule(ring_rank={self.ring_rank} of {self.ring_size}, mask={str(self.mask)[:60]}, forward: {sizes})"


@dataclass(frozen=True)
class Geometry:
    """Where this process stands in a ring, as plain data: picklable, so that a loader's worker can do the host work.

    Args:
        ring_size: R. ring_ranks: the rank that this process plays (all of them for a loopback ring).
        layout, route: the rules that every plan of this ring uses.
    """

    ring_size: int
    ring_ranks: tuple[int, ...]
    layout: Layout
    route: Route

    def partition(self, seq_len: int, documents: Documents | None = None) -> Partition:
        """Who holds which of `seq_len` tokens."""
        return Partition(seq_len, self.ring_size, self.layout, documents)

    def schedule(self, mask: Mask, seq_len: int, documents: Documents | None = None) -> tuple[Schedule, ...]:
        """The schedules of `ring_ranks`; no communication, no framework.

        Raises:
            PlanError, LayoutError, MaskError: a mask, layout and length that do not go together.
        """
        return compile_schedules(self.partition(seq_len, documents), mask, self.route, self.ring_ranks)


def input_digest(partition: Partition, mask: Mask, route: Route) -> bytes:
    """32 bytes that stand for what a schedule is made from; what the ranks of a ring compare."""
    text = "\n".join(
        str(part)
        for part in (
            FORMAT_VERSION,
            partition.seq_len,
            partition.ring_size,
            partition.layout,
            partition.documents,
            mask,
            route,
        )
    )
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


@lru_cache(maxsize=64)
def _regions(mask: Mask, seq_len: int) -> rg.Table:
    table = mask.regions(seq_len, seq_len)
    table.setflags(write=False)
    return table


def compile_schedules(
    partition: Partition, mask: Mask, route: Route, ring_ranks: Sequence[int]
) -> tuple[Schedule, ...]:
    """The schedules of `ring_ranks`: regions, then tiles per rank, then the route's messages.

    Raises:
        PlanError: runs that meet without a common step, or a `mask` that is no mask.
    """
    if not isinstance(mask, Mask):
        raise PlanError(f"mask must be a ringspun mask; got {mask!r}. Combine Causal(), Window(...), ... with & and |.")
    regions = _regions(mask, partition.seq_len)
    bound = route.bind(tl.meetings(partition, partition, regions), partition.tokens)
    inputs = input_digest(partition, mask, route)
    return tuple(_compile_one(partition, mask, regions, bound, rank, inputs) for rank in ring_ranks)


def _compile_one(
    partition: Partition, mask: Mask, regions: rg.Table, route: BoundRoute, ring_rank: int, inputs: bytes
) -> Schedule:
    table, source = tl.build(partition, partition, regions, ring_rank)
    forward = _attach(route.forward(ring_rank), table, source)
    backward = _attach(route.backward(ring_rank), table, source)
    return Schedule(ring_rank, partition.ring_size, partition.tokens, mask, inputs, forward, backward)


def _attach(legs: Legs, tiles: tl.Tiles, source: NDArray[np.int64]) -> Pass:
    """A route's pass with the tiles of each step: those of the block whose owner the step names first."""
    owners = legs.steps[:, StepColumn.SOURCE]
    names, first = np.unique(owners, return_index=True)
    place = np.searchsorted(names, source)
    unreached = (place >= len(names)) | (names[np.minimum(place, len(names) - 1)] != source)
    if unreached.any():
        raise PlanError(f"route must bring every needed block; got none from ring rank {int(source[unreached][0])}.")
    step = first[place]
    order = np.argsort(step, kind="stable")
    offsets = np.append(0, np.cumsum(np.bincount(step, minlength=len(owners)))).astype(np.int64)
    return Pass(legs.steps, legs.messages, tiles[order], offsets)
