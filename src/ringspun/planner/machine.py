"""This machine: what a ring takes, from what one rank alone and its links were measured to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspun.core import tiles as tl
from ringspun.core.accounting import memory
from ringspun.core.geometry import Geometry
from ringspun.core.layout import Contiguous
from ringspun.core.links import Link
from ringspun.core.mask import Full
from ringspun.core.passes import Pass
from ringspun.core.route import Ring
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format
from ringspun.errors import ConfigError
from ringspun.planner.ring import Place, sent_seconds


def ring_peak_bytes(alone_bytes: int, schedule: Schedule, wire: Format) -> int:
    """Peak bytes of one rank's forward + backward above its inputs.

    Args:
        alone_bytes: the peak of one rank that has as many tokens to itself and sees all of them, measured
            (`ringspun.testing.timing.peak_on_rank` with one rank): outputs, accumulators and the kernel's workspace,
            which no schedule knows. schedule: the rank's. wire: of its messages.
    Returns:
        that, with what the rank's count is larger by: blocks in flight, their gradients, other tiles.
    """
    (alone,) = Geometry(1, (0,), Contiguous(), Ring()).schedule(Full(), schedule.local_tokens)
    return alone_bytes + memory(schedule, wire).total - memory(alone, wire).total


@dataclass(frozen=True)
class Rates:
    """FLOP per second of one rank's kernel by size of tile, as `ringspun bench kernels` finds them.

    Args:
        tokens: sizes that were measured, ascending: rows, and as many keys. full, causal: of whole squares and of their
            lower triangles, the FLOPs of allowed pairs; (forward, backward) each.
    """

    tokens: tuple[int, ...]
    full: tuple[tuple[float, ...], tuple[float, ...]]
    causal: tuple[tuple[float, ...], tuple[float, ...]]

    def __post_init__(self) -> None:
        if not self.tokens or list(self.tokens) != sorted({*self.tokens}) or self.tokens[0] < 1:
            raise ConfigError(f"tokens must be ascending, from 1 on; got {self.tokens}.")
        for rates in (*self.full, *self.causal):
            if len(rates) != len(self.tokens) or min(rates) <= 0:
                raise ConfigError(f"rates must be positive, one for each of {len(self.tokens)} sizes; got {rates}.")

    def seconds(self, one: Pass, wire: Format, *, backward: bool) -> NDArray[np.float64]:
        """Of each step of a pass, its tiles cut into whole rectangles and triangles."""
        d, dv = wire.head_size, wire.value_size
        per_pair = (2 * (3 * d + 2 * dv) if backward else 2 * (d + dv)) * wire.heads * wire.batch
        steps = [tl.lower(one.tiles_of(step)) for step in range(len(one))]
        return np.array([sum(self._piece(*piece, per_pair, backward) for piece in zip(*s, strict=True)) for s in steps])

    def _piece(self, piece: NDArray[np.int64], kind: int, per_pair: int, backward: bool) -> float:
        q0, q1, k0, k1 = piece[tl.Q0 : tl.LO].tolist()
        rates = (self.full if kind == tl.Kind.FULL else self.causal)[backward]
        rate = np.interp(np.log(np.sqrt((q1 - q0) * (k1 - k0))), np.log(self.tokens), rates)
        return float(tl.count_pairs(piece[None])[0] * per_pair / rate)


def ring_seconds(schedules: Sequence[Schedule], wire: Format, rates: Rates, link: Link, cores: int) -> float:
    """Seconds of one forward + backward of a ring of processes that share some cores.

    Args:
        schedules: of all ranks. wire: of their messages. rates: of one rank with a core to itself, while the other
            cores work too. link: to the next rank.
        cores: of the machine. Ranks beyond them take turns, so that a step takes what all of them compute, shared out.
    """
    place = Place(link, link, len(schedules))
    total = 0.0
    for backward in (False, True):
        passes = [one.backward if backward else one.forward for one in schedules]
        compute = np.stack([rates.seconds(one, wire, backward=backward) for one in passes])
        sent = np.stack([sent_seconds(one, s.ring_rank, wire, place) for one, s in zip(passes, schedules, strict=True)])
        total += float(np.maximum(np.maximum(compute.max(0), compute.sum(0) / cores), sent.max(0)).sum())
    return total
