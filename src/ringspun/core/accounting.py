"""Accounting: exact counts from a schedule. What the wire, the profiler and the clock are held against.

One convention for FLOPs: a multiply-add is two; forward is two matrix products (scores, values), backward five.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from ringspun.core import tiles as tl
from ringspun.core.degrees import Degrees, HeadSplit
from ringspun.core.partition import Sides
from ringspun.core.route.base import Action, MessageColumn, StepColumn, carried
from ringspun.core.schedule import Pass, Schedule
from ringspun.core.ways import Turned
from ringspun.core.wire import Format, Payload, segments


@dataclass(frozen=True)
class Account:
    """Counts of one rank, one pass.

    Args:
        pairs: allowed pairs per step, as `Pass.pairs` counts them. flops: of the whole pass.
        messages: number sent. sent_bytes: bytes sent per peer, header included. hops: steps that send a block.
    """

    pairs: NDArray[np.int64]
    flops: int
    messages: int
    sent_bytes: dict[int, int]
    hops: int

    @property
    def total_sent_bytes(self) -> int:
        """Bytes sent to all peers."""
        return sum(self.sent_bytes.values())


def account(one: Pass, wire: Format, *, backward: bool) -> Account:
    """Exact counts of one pass under a wire format."""
    messages = carried(one.messages, wire.kv_heads)
    sends = messages[messages[:, MessageColumn.ACTION] == Action.SEND]
    sent: dict[int, int] = {}
    for row in sends:
        peer = int(row[MessageColumn.PEER])
        sent[peer] = sent.get(peer, 0) + message_bytes(row, wire)
    blocks = sends[sends[:, MessageColumn.PAYLOAD] == one.side.block]
    every_row = (one.tiles[:, tl.B1] < 0).all()  # else the tiles say themselves which batch rows they are for
    pairs = one.pairs
    heads = _heads(one, wire)
    d, dv = wire.head_size, wire.value_size
    per_pair = 2 * (3 * d + 2 * dv) if backward else 2 * (d + dv)
    flops = int(pairs @ heads) * per_pair * (wire.batch if every_row else 1)
    return Account(pairs, flops, len(sends), sent, len(np.unique(blocks[:, MessageColumn.STEP])))


def _heads(one: Pass, wire: Format) -> NDArray[np.int64]:
    """Query heads that each step computes."""
    strides = one.steps[:, [StepColumn.STRIDE, StepColumn.STRIDES]].tolist()
    return np.array([wire.of_stride(*stride).heads for stride in strides], np.int64)


def computing(one: Pass, wire: Format) -> NDArray[np.bool_]:
    """Which steps have heads: all, but for strides of more than a call has KV heads."""
    return _heads(one, wire) > 0


def message_bytes(message: NDArray[np.int64], wire: Format) -> int:
    """Length of a message, header and end mark included."""
    one = wire.of_stride(*map(int, message[[MessageColumn.STRIDE, MessageColumn.STRIDES]]))
    rows = int(message[MessageColumn.ROW1] - message[MessageColumn.ROW0])
    return one.message_bytes(Payload(message[MessageColumn.PAYLOAD]), rows)


def wait(passes: Sequence[Pass], speeds: Sequence[float] | None = None) -> float:
    """Time of a clock that waits for the busiest rank at every step, over that of a ring whose ranks never wait."""
    time = _times(passes, speeds)
    ideal = time.sum() / len(passes) if speeds is None else sum(one.pairs.sum() for one in passes) / sum(speeds)
    return float(time.max(axis=0).sum() / ideal) if ideal else 1.0


def _times(passes: Sequence[Pass], speeds: Sequence[float] | None) -> NDArray[np.float64]:
    """Pairs of each rank and step, over the rank's speed."""
    pairs = np.stack([one.pairs for one in passes]).astype(np.float64)
    return pairs if speeds is None else pairs / np.array(speeds)[:, None]


def imbalance(passes: Sequence[Pass], speeds: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Largest over mean time (pairs, over the rank's speed) among all ranks' passes, per step; 1 where nobody computes.
    What a clock would feel."""
    pairs = _times(passes, speeds)
    mean = pairs.mean(axis=0)
    return np.where(mean > 0, pairs.max(axis=0) / np.where(mean > 0, mean, 1), 1.0)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank that are alive at the peak of forward + backward, itemised (kernel workspace excepted).

    Args:
        tensors: q, k, v, out, dout and the gradients. lse: with delta. block_slots: blocks in flight, of k and v (or
            put together of such) or of q, dO, lse and delta. gradient_slots: travelling dK, dV, or dQ.
        accumulators: fp32 out (forward) or dq, dk, dv (backward), the larger.
    """

    tensors: int
    lse: int
    block_slots: int
    gradient_slots: int
    accumulators: int

    @property
    def total(self) -> int:
        """Sum of the items."""
        return self.tensors + self.lse + self.block_slots + self.gradient_slots + self.accumulators


def memory(schedule: Schedule, wire: Format, taken: Schedule | Turned | None = None) -> Memory:
    """Peak live bytes of one rank by the schedule's own slots.

    Args:
        taken: whose `backward` calls take (`ringspun.core.ways.taken`); default the schedule's.
    """
    way = schedule if taken is None else taken
    q = wire.batch * wire.heads * schedule.local_tokens
    kv = wire.batch * wire.kv_heads * int(schedule.key_tokens[schedule.ring_rank])
    widths = wire.head_size + wire.value_size
    tensors = wire.itemsize * 2 * (q * widths + kv * widths)
    accumulators = wire.accumulator_itemsize * max(q * wire.value_size, q * wire.head_size + kv * widths)
    slots = {way.backward.side.block: 0, way.backward.side.gradients: 0}
    for (payload, _), n_bytes in way.slot_bytes(way.backward, wire).items():
        slots[payload] += n_bytes
    blocks, gradients = slots.values()
    return Memory(tensors, 2 * wire.accumulator_itemsize * q, blocks, gradients, accumulators)


def exchanged(split: HeadSplit, degrees: Degrees, sides: Sides, rank: int, wire: Format) -> tuple[int, int]:
    """Bytes that a rank of a hybrid sends in exchanges of heads for rows, forward and backward, framing included; lse
    not asked for.

    Args:
        sides: who of the whole group holds what. rank: of the group. wire: of tensors with all heads.
    """
    ring_rank, mine = degrees.place(rank)
    d, dv, forward, backward = wire.head_size, wire.value_size, 0, 0

    def message(heads: tuple[int, int], rows: int, *widths: int) -> int:
        shapes = [(wire.batch, heads[1] - heads[0], rows, width) for width in widths]
        return segments(shapes, [wire.itemsize] * len(shapes))[1] if any(map(prod, shapes)) else 0

    for peer in degrees.row(ring_rank):
        if peer == rank:
            continue
        theirs = degrees.place(peer)[1]
        mine_q, mine_k, q, k = (int(side.tokens[one]) for one in (rank, peer) for side in (sides.queries, sides.keys))
        forward += message(split.queries(theirs), mine_q, d) + message(split.keys(theirs), mine_k, d, dv)
        forward += message(split.queries(mine), q, dv)
        backward += message(split.queries(theirs), mine_q, dv)
        backward += message(split.queries(mine), q, d) + message(split.keys(mine), k, d, dv)
    return forward, backward


def sources(one: Pass) -> list[int]:
    """The block of each step; of a ring, the rank that owns it."""
    return [int(s) for s in one.steps[:, StepColumn.SOURCE]]
