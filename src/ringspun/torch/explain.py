"""`Plan.explain`: what a call would do, counted from its schedule, before it does it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ringspun.core import accounting, ways
from ringspun.core.choice import Weighed
from ringspun.core.choice_of_degrees import WeighedDegrees
from ringspun.core.degrees import Degrees
from ringspun.core.passes import Blocks, Pass
from ringspun.core.route.base import NONE, Action, MessageColumn, StepColumn, carried
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format, Side
from ringspun.torch.kernels import Call, Kernel, verdicts


@dataclass(frozen=True)
class Step:
    """One step of one pass.

    Args:
        source: ring rank that owns the keys, or the queries where these travel, -1: several at once; with
            ``deterministic="across_rings"`` the unit of keys.
        tiles: of this rank. pairs: allowed ones, of one head that it computes (and one batch row, unless rows have
            their own masks).
        imbalance: most over mean pairs among all ranks (of unequal `speeds`: of the time they take).
        sent_bytes, received_bytes: posted at this step, headers included.
    """

    source: int
    tiles: int
    pairs: int
    imbalance: float
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class Whole:
    """The forward pass of the whole ring: what to compare layouts by.

    Args:
        wait: time of a clock that waits for the busiest rank at every step, over that of perfect balance (1: nobody
            waits). sent_bytes, tiles: of all ranks. tokens: query rows of the emptiest and of the fullest rank.
        route: by which keys travel.
    """

    wait: float
    sent_bytes: int
    tiles: int
    tokens: tuple[int, int]
    route: str = "ring"

    def __str__(self) -> str:
        low, high = self.tokens
        held = f"{low}" if low == high else f"{low} to {high}"
        sends = f"sends {_size(self.sent_bytes)}, {held} tokens a rank"
        return f"all ranks, by {self.route}: wait {self.wait:.2f}, {self.tiles} tiles, {sends}"


@dataclass(frozen=True)
class Explanation:
    """What one rank does in a call; `str` is a page to read.

    Args:
        plan: mask and layout in words. kernel: chosen, None where all refuse. refusals: why the others cannot, by name.
        forward, backward: the steps. flops: of this rank, forward and backward. hops: steps that send keys and values.
        peak: bytes alive at once, itemised. ring: of all ranks together, forward. weighed: routes and the seconds that
            their messages would take, where the route was chosen by links. blocks: what of a shard travels at once, and
            why, in words. travels: in backward. sent: bytes of all ranks of the ring in backward, by what travels;
            empty where only keys can. exchanged: bytes that this rank sends in exchanges of heads for rows, forward and
            backward. degrees: of the hybrid; None: heads are not split; else all other counts are of its ring.
            weighed_degrees: what they were chosen from, if they were.
    """

    plan: str
    ring_rank: int
    kernel: str | None
    refusals: dict[str, str]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    flops: tuple[int, int]
    hops: int
    peak: accounting.Memory
    ring: Whole
    weighed: Weighed = ()
    blocks: str = ""
    travels: Side = Side.KEYS
    sent: dict[Side, int] = field(default_factory=dict)
    exchanged: tuple[int, int] = (0, 0)
    degrees: Degrees | None = None
    weighed_degrees: WeighedDegrees = ()

    def __str__(self) -> str:
        chosen = f"kernel {self.kernel}" if self.kernel else "no kernel can do this call"
        why = "".join(f"\n  not {name}: {reason}" for name, reason in self.refusals.items())
        lines = [self.plan, str(self.ring), chosen + why]
        if self.weighed:
            times = ", ".join(f"{route} {1e3 * seconds:.3g} ms" for route, seconds in self.weighed)
            lines.append(f"route chosen by its links, messages alone: {times}")
        lines += [self.blocks] if self.blocks else []
        if self.weighed_degrees:
            costs = ", ".join(f"{d.ring} x {d.ulysses}: {cost:.4g}" for d, cost in self.weighed_degrees)
            lines.append(f"ring x ulysses chosen by what is sent: {costs}")
        if self.degrees:
            forward, backward = map(_size, self.exchanged)
            lines.append(f"{self.degrees}: exchanges send {forward} forward, {backward} backward")
        if any(self.sent.values()):
            sizes = ", ".join(f"{side.value} {_size(n_bytes)}" for side, n_bytes in self.sent.items())
            lines.append(f"backward: {self.travels.value} travel; all ranks would send: {sizes}")
        lines.append(f"as ring rank {self.ring_rank}:")
        for name, steps, flops, side in (
            ("forward", self.forward, self.flops[0], Side.KEYS),
            ("backward", self.backward, self.flops[1], self.travels),
        ):
            lines.append(
                f"{name}: {sum(s.tiles for s in steps)} tiles, {flops / 1e9:.3g} GFLOP, sends "
                f"{_size(sum(s.sent_bytes for s in steps))}" + (f" in {self.hops} hops" if name == "forward" else "")
            )
            whose = f"{side.value} of"
            lines.append(f"  step  {whose}  tiles        pairs  most/mean       sends    receives")
            lines += [
                f"  {i:4}  {'several' if s.source < 0 else s.source:>{len(whose)}}  {s.tiles:5}  {s.pairs:11,}  "
                f"{s.imbalance:9.2f}  {_size(s.sent_bytes):>10}  {_size(s.received_bytes):>10}"
                for i, s in enumerate(steps)
            ]
        lines.append(f"at most alive: {_size(self.peak.total)}, kernel workspace excepted")
        lines.append(
            "keys of: the rank, or unit, that is met; pairs: allowed ones, per head; most/mean: busiest rank over mean"
        )
        return "\n".join(lines)


def explain(
    plan: str, ring_rank: int, everybody: tuple[Schedule, ...], speeds: Speeds, wire: Format, call: Call,
    wanted: str | Kernel | None, backward: str, blocks: str,
) -> Explanation:  # fmt: skip
    """See `Plan.explain`. `everybody`: the schedules of all ranks; speeds: of unequal ranks; backward: see
    `ringspun.core.ways`; blocks: in words."""
    found, schedule = verdicts(call, wanted), everybody[ring_rank]
    taken = ways.taken(everybody, wire, backward)
    passes = [s.forward for s in everybody], [s.backward for s in taken]
    going = schedule, taken[ring_rank]
    steps = [
        _steps(mine, all_ranks[ring_rank], all_ranks, speeds, wire, schedule.grid)
        for mine, all_ranks in zip(going, passes, strict=True)
    ]
    counts = [
        accounting.account(p[ring_rank], wire, backward=back) for p, back in zip(passes, (False, True), strict=True)
    ]
    return Explanation(
        plan,
        ring_rank,
        next((name for name, reason in found if reason is None), None),
        {name: reason for name, reason in found if reason is not None},
        steps[0],
        steps[1],
        (counts[0].flops, counts[1].flops),
        counts[0].hops,
        accounting.memory(schedule, wire, taken[ring_rank]),
        _whole(everybody, speeds, wire),
        schedule.weighed,
        blocks,
        passes[1][0].side,
        {} if schedule.origin is None else ways.sent_bytes(schedule, wire),
    )


Speeds = tuple[float, ...] | None


def _whole(everybody: tuple[Schedule, ...], speeds: Speeds, wire: Format) -> Whole:
    passes = [s.forward for s in everybody]
    return Whole(
        accounting.wait(passes, speeds),
        sum(accounting.account(one, wire, backward=False).total_sent_bytes for one in passes),
        sum(int(np.diff(one.tile_offsets)[accounting.computing(one, wire)].sum()) for one in passes),
        (int(everybody[0].tokens.min()), int(everybody[0].tokens.max())),
        everybody[0].route,
    )


def _steps(mine: Blocks, one: Pass, everybody: list[Pass], speeds: Speeds, wire: Format, grid: int) -> tuple[Step, ...]:
    balance = accounting.imbalance(everybody, speeds)
    blocks = one.steps[:, StepColumn.SOURCE].tolist()
    sources = blocks if grid else [NONE if b == mine.whole else mine.owner(b) for b in blocks]
    tiles, pairs = np.diff(one.tile_offsets), one.pairs
    tiles[~accounting.computing(one, wire)] = pairs[~accounting.computing(one, wire)] = 0
    moved = {action: np.zeros(len(one), np.int64) for action in Action}
    for m in carried(one.messages, wire.kv_heads):
        moved[Action(m[MessageColumn.ACTION])][m[MessageColumn.STEP]] += accounting.message_bytes(m, wire)
    return tuple(
        Step(source, int(tiles[i]), int(pairs[i]), float(balance[i]), *(int(moved[a][i]) for a in Action))
        for i, source in enumerate(sources)
    )


def _size(n_bytes: int) -> str:
    size, units = float(n_bytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
