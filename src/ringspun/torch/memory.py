"""Peak memory of a piece of work, from the profiler's record of every allocation.

PyTorch keeps no peak counter for the CPU, and the resident size of a process says nothing about tensors, so
the events are summed up here. What is counted is what the calling thread allocates while the block runs,
above what was there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Peak:
    """The result of `peak_memory`, filled in when its block ends; `left` is what is alive then."""

    bytes: int = 0
    left: int = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measures the peak of what the block allocates, in bytes above its start.

    Example:
        >>> with peak_memory() as peak:
        ...     x = torch.zeros(1024)
        >>> peak.bytes
        4096
    """
    # The profiler's library announces each start and stop on standard error, unless told not to by then.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    peak = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        yield peak
    results = record.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    level = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak.bytes = max(peak.bytes, level)
    peak.left = level
