"""Peak memory of a ring, from what one rank alone takes: a small one. The 12 configurations of the bar are
`benchmarks/planner_machine.py`."""

from __future__ import annotations

import pytest

from ringspun import Contiguous, Full, Ring
from ringspun.core.geometry import Geometry
from ringspun.core.wire import Format
from ringspun.planner.machine import ring_peak_bytes
from ringspun.testing.timing import Work, peak_on_rank


@pytest.mark.processes
@pytest.mark.parametrize(("dtype", "element", "route"), [("bfloat16", 2, Ring())])
def test_peaks_are_within_a_tenth(pools, dtype, element, route):
    shape = (4, 2, 64, dtype, Full(), Contiguous())
    alone = pools(1).run(peak_on_rank, Work(1, 4096, *shape), timeout_s=60.0)
    measured = pools(2).run(peak_on_rank, Work(2, 8192, *shape, route=route), timeout_s=60.0)
    schedules = Geometry(2, (0, 1), Contiguous(), route).schedule(Full(), 8192)
    wire = Format(1, 4, 2, 64, 64, dtype, element, 4)
    said = max(ring_peak_bytes(alone[0], one, wire) for one in schedules)
    assert said == pytest.approx(max(measured), rel=0.1)
