"""Peak memory and step time of a ring, from what one rank alone takes. The 12 configurations of the bar are
`benchmarks/planner_machine.py`."""

from __future__ import annotations

import pytest

from ringspun import Causal, Contiguous, Full, Ring, Zigzag
from ringspun.core.geometry import Geometry
from ringspun.core.links import Link
from ringspun.core.wire import Format
from ringspun.errors import ConfigError
from ringspun.planner.machine import Rates, ring_peak_bytes, ring_seconds
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


FREE = Link((1, 1 << 40), (1e-12, 1e-12), (1e-12, 1e-12))
WIRE = Format(1, 4, 4, 64, 64, "float32", 4, 4)


def flat(rate, causal):
    """The same at all sizes; backward half as fast."""
    return Rates((128, 1024), ((rate, rate), (rate / 2, rate / 2)), ((causal, causal), (causal / 2, causal / 2)))


def ring_of(ranks, mask, layout, seq_len):
    return Geometry(ranks, tuple(range(ranks)), layout, Ring()).schedule(mask, seq_len)


def test_steps_take_what_their_pairs_do_at_the_rate_of_their_kind():
    """2 ranks of 512: 2 products of 64 numbers a pair forward, 5 backward at half the rate, 4 heads; two steps of whole
    squares or, of one rank's own shard, a triangle at another rate."""
    flops = 4 * 64 * 4 + 2 * 10 * 64 * 4
    full = ring_seconds(ring_of(2, Full(), Contiguous(), 1024), WIRE, flat(1e9, 1e8), FREE, cores=2)
    assert full == pytest.approx(2 * 512 * 512 * flops / 1e9)
    causal = ring_seconds(ring_of(2, Causal(), Contiguous(), 1024), WIRE, flat(1e9, 1e8), FREE, cores=2)
    triangle = 512 * 513 / 2 * flops / 1e8
    assert causal == pytest.approx(triangle + 512 * 512 * flops / 1e9), "rank 1 computes a square, rank 0 waits"


def test_ranks_beyond_the_cores_take_turns():
    four = ring_of(4, Causal(), Zigzag(), 512)
    on_four, on_two, on_one = (ring_seconds(four, WIRE, flat(1e9, 1e9), FREE, cores=n) for n in (4, 2, 1))
    assert on_one == pytest.approx(2 * on_two) and on_two == pytest.approx(2 * on_four, rel=0.02)


def test_a_link_that_is_slower_than_compute_is_what_a_step_takes():
    slow = Link((1, 1 << 40), (1.0, 1.0), (1.0, 1.0))
    ranks = ring_of(2, Full(), Contiguous(), 64)
    assert ring_seconds(ranks, WIRE, flat(1e12, 1e12), slow, cores=2) == pytest.approx(3.0, rel=0.01), "KV; KV, and dKV"


@pytest.mark.parametrize("tokens, rate", [((2, 1), 1.0), ((), 1.0), ((1, 2), 0.0)])
def test_rates_that_are_none_are_refused(tokens, rate):
    rates = (rate,) * len(tokens), (rate,) * len(tokens)
    with pytest.raises(ConfigError, match=r"ascending|positive"):
        Rates(tokens, rates, rates)
