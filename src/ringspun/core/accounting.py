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
from ringspun.core.passes import Pass
from ringspun.core.route.base import OWN, Action, MessageColumn, StepColumn, carried, pack_slot
from ringspun.core.schedule import Schedule
from ringspun.core.ways import Turned
from ringspun.core.wire import LARGER, Format, Payload, Side, buffer_bytes, segments


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
    for peer, n_bytes in zip(sends[:, MessageColumn.PEER].tolist(), bytes_of(sends, wire).tolist(), strict=True):
        sent[peer] = sent.get(peer, 0) + n_bytes
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


_SIZED = [getattr(MessageColumn, name) for name in ("PAYLOAD", "ROW0", "ROW1", "STRIDE", "STRIDES")]


def bytes_of(messages: NDArray[np.int64], wire: Format) -> NDArray[np.int64]:
    """`message_bytes` of each of many, of which most are alike."""
    _, first, which = np.unique(messages[:, _SIZED], axis=0, return_index=True, return_inverse=True)
    lengths = np.array([message_bytes(messages[i], wire) for i in first.tolist()], np.int64)
    return lengths[which.ravel()]


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
    """Bytes of one rank that are alive at the worst moment of forward + backward, itemised (what a kernel needs inside
    of a call excepted).

    Args:
        inputs: q, k, v and dout. out: with lse and delta. leased: the pool's buffers: blocks and gradients on their way
            and sums that are not results themselves; what is given back stays there for the next to use.
        gradients: results, so far. outputs: of one kernel call. kept: blocks that forward leaves to backward.
    """

    inputs: int
    out: int
    leased: int
    gradients: int
    outputs: int
    kept: int = 0

    @property
    def total(self) -> int:
        """Sum of the items."""
        return self.inputs + self.out + self.leased + self.gradients + self.outputs + self.kept


BAND_ROWS, FULL_ROWS = 1024, 2048
"""Query rows that a kernel takes at once of a tile that a band cuts, and of one that it does not."""


def memory(schedule: Schedule, wire: Format, taken: Schedule | Turned | None = None) -> Memory:
    """Worst moment of one rank, by the schedule's own steps and buffers.

    Args:
        taken: whose `backward` calls take (`ringspun.core.ways.taken`); default the schedule's.
    """
    way = schedule if taken is None else taken
    one, narrow, wide = way.backward, wire.itemsize, wire.accumulator_itemsize
    per_row = wire.batch * wire.heads
    q, k = schedule.local_tokens, int(schedule.key_tokens[schedule.ring_rank])
    dq = per_row * q * wire.head_size
    dk, dv = (wire.batch * wire.kv_heads * k * size for size in (wire.head_size, wire.value_size))
    tiled = np.diff(one.tile_offsets) > 0
    own = one.steps[: len(tiled), StepColumn.GRAD_SLOT] == OWN
    home = one.steps[:, StepColumn.HOME_SLOT] >= 0
    end = 3 * len(one)
    staying, going = ((dk, dv), (dq,)) if one.side == Side.QUERIES else ((dq,), (dk, dv))
    begin = min(_time(tiled & own, end), _time(home, end))
    sums = [*((0, wide * size) for size in staying), *((begin, wide * size) for size in going)]
    leases, results = _slots(way, wire), sums
    if wide != narrow:
        leases = [*((first, end, size) for first, size in sums), *leases]
        results = [(end, narrow * (dq + dk + dv))]
    out = narrow * per_row * q * wire.value_size + 2 * wide * per_row * q
    inputs = narrow * (dq + dk + dv + per_row * q * wire.value_size)
    pool, kept = _Pool(_forward_leases(schedule, wire), leases), schedule.kept_bytes(wire)
    worst = Memory(inputs, out, 0, 0, 0, kept)
    for step in range(len(one) + 1):
        now = min(3 * step + 1, end)
        made = sum(size for first, size in results if first <= now)
        here = one.tiles_of(step).tolist() if step < len(tiled) else []
        stride = one.steps[min(step, len(one) - 1), [StepColumn.STRIDE, StepColumn.STRIDES]].tolist()
        outputs = narrow * max((_outputs(tile, wire.of_stride(*stride)) for tile in here), default=0)
        found = Memory(inputs, out, pool.bytes_at(3 * step + 2), made, outputs, kept)
        worst = max(worst, found, key=lambda m: m.total)
    return worst


class _Pool:
    """What the pool (`ringspun.torch.buffers`) comes to hold: each lease gets the smallest buffer that nobody has and
    that is long enough but not too long, or a new one.

    Messages are posted when those that are waited for have given their buffers back; what is put together, and
    gradients that start, lie beside them.

    Args:
        idle: bytes of the buffers that it has. leases: first and last use of each, and bytes.
    """

    def __init__(self, idle: list[int], leases: list[tuple[int, int, int]]) -> None:
        out: list[tuple[int, int]] = []
        self._grown = [(-1, sum(idle))]
        for first, last, n_bytes in sorted(leases, key=lambda lease: lease[0]):
            back = [one for one in out if one[0] < first or (one[0] == first and first % 3 != 1)]
            out, idle = [one for one in out if one not in back], idle + [size for _, size in back]
            fitting = [size for size in idle if n_bytes <= size <= LARGER * buffer_bytes(n_bytes)]
            held = min(fitting, default=buffer_bytes(n_bytes))
            out.append((last, held))
            if fitting:
                idle.remove(held)
            else:
                self._grown.append((first, self._grown[-1][1] + held))

    def bytes_at(self, time: int) -> int:
        """All that it holds then: it keeps what comes back."""
        return max(size for since, size in self._grown if since <= time)


def _time(which: NDArray[np.bool_], never: int) -> int:
    """When the first of some steps computes."""
    steps = np.flatnonzero(which)
    return 3 * int(steps[0]) + 1 if len(steps) else never


def _slots(way: Schedule | Turned, wire: Format) -> list[tuple[int, int, int]]:
    """First and last use of each buffer of backward (`Pass.last_uses`), and its bytes."""
    one, m = way.backward, carried(way.backward.messages, wire.kv_heads)
    posted = 3 * m[:, MessageColumn.STEP] + 2 * m[:, MessageColumn.MOMENT]
    keyed = np.column_stack([m[:, [MessageColumn.PAYLOAD, MessageColumn.SLOT]], posted]).tolist()
    fresh = np.flatnonzero(one.steps[:, StepColumn.GRAD_FRESH])
    keyed += [[one.side.gradients, int(one.steps[t, StepColumn.GRAD_SLOT]), 3 * int(t) + 1] for t in fresh]
    together = np.flatnonzero((one.steps[:, StepColumn.SOURCE] == way.whole) & (one.steps[:, StepColumn.SLOT] >= 0))
    keyed += [[one.side.block, int(one.steps[t, StepColumn.SLOT]), 3 * int(t) - 1] for t in together]
    first: dict[tuple[Payload, int], int] = {}
    for payload, slot, time in keyed:
        key = Payload(payload), pack_slot(slot)
        first[key] = min(first.get(key, time), time)
    held = way.slot_bytes(one, wire)
    return [(first[key], one.last_uses[key], n_bytes) for key, n_bytes in held.items()]


def _forward_leases(schedule: Schedule, wire: Format) -> list[int]:
    """Buffers that forward leaves in the pool."""
    slots = list(schedule.slot_bytes(schedule.forward, wire).values())
    out = wire.accumulator_itemsize * wire.batch * wire.heads * schedule.local_tokens * wire.value_size
    return [*map(buffer_bytes, slots + [out] * (wire.accumulator_itemsize != wire.itemsize))]


def _outputs(tile: list[int], wire: Format) -> int:
    """Elements of dq, dk and dv of one kernel call."""
    b0, b1, q0, q1, k0, k1, lo, hi = tile
    whole = lo <= q0 - (k1 - 1) and q1 - 1 - k0 <= hi
    rows = min(q1 - q0, FULL_ROWS if whole else BAND_ROWS)
    batch = wire.batch if b1 < 0 else b1 - b0
    keys = wire.kv_heads * (k1 - k0) * (wire.head_size + wire.value_size)
    return batch * (wire.heads * rows * wire.head_size + keys)


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
