"""The choice of a route: seconds by hand, and what known networks call for."""

from __future__ import annotations

import pickle
import time

import pytest

from ringspun import AllGather, Causal, Contiguous, Direct, Documents, DoubleRing, Full, Ring, Window, Zigzag
from ringspun.core.choice import ROW_BYTES, candidates
from ringspun.core.geometry import Geometry
from ringspun.core.links import Link, Links
from ringspun.core.route import Auto


def link(bytes_per_s: float, shared: float = 1.0) -> Link:
    sizes = (1, 1 << 30)
    return Link(sizes, tuple(n / bytes_per_s for n in sizes), tuple(shared * n / bytes_per_s for n in sizes))


EVEN = Links(8, link(1e9))
"""Every rank with a link of its own to every other."""
TWO_NODES = Links(8, link(1e10), link(1e9, shared=4.0), node=4)
"""Two nodes of four, joined by one link at a tenth."""
NICS = Links(8, link(1e10), link(1e9), node=4)
"""Two nodes of four, each rank with a slow way out of its own."""


def chosen(links, mask, layout, size=8, length=8 * 64):
    (one,) = Geometry(size, (size - 1,), layout, Auto(links)).schedule(mask, length)
    return one.route, dict(one.weighed)


def test_seconds_are_those_of_the_messages():
    """64 rows a shard. A ring sends 7 blocks forward; backward 7, and 7 times gradients, of twice the bytes."""
    block = 64 * ROW_BYTES / 1e9
    _, seconds = chosen(EVEN, Full(), Contiguous())
    assert seconds["ring"] == pytest.approx((7 + 7 + 14) * block)
    assert seconds["direct"] == pytest.approx((7 + 7 + 14) * block)
    _, seconds = chosen(TWO_NODES, Full(), Contiguous())
    # out of a node: all hops of a ring at one of its ranks; directly 16 blocks; by a double ring 4
    assert seconds["ring"] == pytest.approx((7 + 7 + 14) * block)
    assert seconds["direct"] == pytest.approx((16 + 16 + 32) * block)
    assert seconds["double_ring(inner=4)"] == pytest.approx((4 + 4 + 8) * block)
    _, seconds = chosen(NICS, Full(), Contiguous())
    assert seconds["direct"] == pytest.approx((4 + 4 + 8) * block)
    assert seconds["double_ring(inner=4)"] == pytest.approx((1 + 1 + 2) * block, rel=0.6)  # or what is near, if longer


@pytest.mark.parametrize(
    ("links", "mask", "layout", "route"),
    [
        (EVEN, Full(), Contiguous(), "ring"),  # as many bytes either way: the simpler
        (EVEN, Causal(), Zigzag(), "direct"),
        (TWO_NODES, Full(), Contiguous(), "double_ring(inner=4)"),
        (TWO_NODES, Causal(), Zigzag(), "double_ring(inner=4)"),
        (TWO_NODES, Window(9), Contiguous(), "ring"),
        (NICS, Full(), Zigzag(), "double_ring(inner=4)"),
        (EVEN, Documents([64] * 8), Contiguous(), "ring"),
    ],
    ids=str,
)
def test_what_networks_call_for(links, mask, layout, route):
    assert chosen(links, mask, layout)[0] == route


def test_all_ranks_choose_alike_and_a_worker_chooses_the_same():
    geometry = Geometry(8, tuple(range(8)), Zigzag(), Auto(TWO_NODES))
    schedules = geometry.schedule(Causal(), 512)
    assert len({(s.route, s.weighed, s.inputs) for s in schedules}) == 1
    assert pickle.loads(pickle.dumps(geometry)).schedule(Causal(), 512) == schedules


def test_other_links_are_other_inputs():
    one, two = (Geometry(8, (0,), Zigzag(), Auto(links)).schedule(Full(), 64)[0] for links in (EVEN, NICS))
    assert one.inputs != two.inputs and str(Auto(EVEN)) != str(Auto(NICS))


def test_candidates():
    assert candidates(EVEN, 2) == [Ring()] and candidates(EVEN, 8) == [Ring(), Direct(), AllGather()]
    assert candidates(TWO_NODES, 8) == [Ring(), Direct(), DoubleRing(4), AllGather()]
    assert candidates(TWO_NODES, 6) == [Ring(), Direct(), AllGather()], "nodes of four do not make six"
    assert candidates(TWO_NODES, 1024) == [DoubleRing(4)] and candidates(EVEN, 1024) == [Ring()]


def test_many_ranks_are_not_compared():
    start = time.process_time()
    assert chosen(EVEN, Causal(), Zigzag(), size=1024, length=1 << 20) == ("ring", {})
    assert time.process_time() - start < 5
