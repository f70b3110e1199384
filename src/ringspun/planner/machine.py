"""This machine: what a rank of a ring takes, from what one rank alone was measured to take."""

from __future__ import annotations

from ringspun.core.accounting import memory
from ringspun.core.geometry import Geometry
from ringspun.core.layout import Contiguous
from ringspun.core.mask import Full
from ringspun.core.route import Ring
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format


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
