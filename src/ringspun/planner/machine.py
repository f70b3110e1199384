"""This machine: what a rank of a ring takes, from what one rank alone was measured to take."""

from __future__ import annotations

from ringspun.core.accounting import memory
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format


def ring_peak_bytes(alone_bytes: int, schedule: Schedule, wire: Format) -> int:
    """Peak bytes of one rank's forward + backward above its inputs.

    Args:
        alone_bytes: the peak of one rank that has as many tokens to itself and sees all of them, measured
            (`ringspun.testing.timing.peak_on_rank` with one rank): outputs, accumulators and the kernel's workspace,
            which no schedule knows. schedule: the rank's. wire: of its messages.
    Returns:
        that, with the schedule's blocks in flight and their gradients.
    """
    items = memory(schedule, wire)
    return alone_bytes + items.block_slots + items.gradient_slots
