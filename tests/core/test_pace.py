"""Into how many pieces a ring's shards are cut: a model of a ring whose links change, and what is chosen by it."""

from __future__ import annotations

import itertools
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun.core.pace import GAIN, MOST_PATIENCE, PIECES, Choice, Pace, of_ring, typical

AROUND = 1e-4
"""Work around a step (seconds)."""


def paced(pieces, size, compute, link, *, cost=0.0, calls=8):
    """What calls of a ring take whose ranks compute for so long with a block and whose links take so long for one.

    Args:
        cost: part of the compute that each piece adds, as small tiles do.
    """
    hops, steps = size - 1, 1 + (size - 1) * pieces
    compute *= 1 + cost * (pieces - 1)
    around = AROUND * steps
    under_way = max(hops * link, size * compute - compute / pieces)
    span = max(size * compute, hops * link + compute / pieces) + around
    wait = span - around - size * compute
    return Pace(1, hops, steps, 100, size * compute, wait, under_way, span) * calls


def chosen(choice, size, compute, link, times, **more):
    """The choices that follow each other."""
    found = []
    for _ in range(times):
        choice = choice.after(paced(choice.pieces, size, compute, link, **more))
        found.append(choice)
    return found


def time(pieces, size, compute, link):
    pace = paced(pieces, size, compute, link)
    return pace.span_s


sizes, times = st.integers(2, 16), st.floats(1e-3, 1e-1)


@given(sizes, times, st.floats(0.05, 8.0))
def test_what_is_settled_on_is_nearly_as_fast_as_any(size, compute, ratio):
    found = chosen(Choice(), size, compute, ratio * compute, 200)
    best = min(time(n, size, compute, ratio * compute) for n in PIECES)
    spent = [time(c.pieces, size, compute, ratio * compute) for c in found]
    assert np.median(spent) <= 1.1 * best
    assert np.mean(spent[100:]) <= 1.1 * best, "looking at whole shards costs little"
    changes = sum(a.pieces != b.pieces for a, b in itertools.pairwise(found[100:]))
    assert changes <= 2 * (100 / MOST_PATIENCE + 2), "it does not flap"


@given(sizes, times, st.floats(0.05, 0.9))
def test_on_fast_links_shards_stay_whole(size, compute, ratio):
    assert {c.pieces for c in chosen(Choice(), size, compute, ratio * compute, 20)} == {1}


@given(times)
def test_it_goes_to_more_pieces_when_a_link_slows_and_back(compute):
    fast = chosen(Choice(), 2, compute, compute / 2, 5)
    slow = chosen(fast[-1], 2, compute, 2 * compute, 20)
    again = chosen(slow[-1], 2, compute, compute / 2, 20)
    assert fast[-1].pieces == 1 and slow[0].pieces > 1 and slow[-1].pieces > 1 and again[-1].pieces == 1
    assert str(paced(1, 2, compute, 2 * compute)) in slow[0].why


@given(times)
def test_pieces_that_are_no_faster_are_taken_back_and_tried_ever_less_often(compute):
    """Small tiles that cost twice as much: no model of the link tells."""
    found = chosen(Choice(), 2, compute, 2 * compute, 200, cost=1.0)
    tried = [i for i, c in enumerate(found) if c.pieces > 1]
    assert tried and len(tried) < 12 and found[-1].pieces == 1
    gaps = np.diff(tried)
    assert (np.diff(gaps) >= 0).all(), "for longer after every failure"
    assert "pieces were no faster than 1" in found[tried[0] + 1].why


def test_a_look_that_finds_whole_shards_slower_goes_back():
    before = Choice(4, "before", None)
    look = before.after(paced(4, 2, 0.01, 0.015))
    assert look.pieces == 1 and look.why == "looks how whole shards do" and look.before is not None
    back = look.after(paced(1, 2, 0.01, 0.015))
    assert back.pieces == 2 and back.failed == 1 and back.look > 0
    still = back.after(paced(back.pieces, 2, 0.01, 0.015))
    assert still.pieces == 2 and still.look == back.look - 1


@given(sizes, times, st.floats(0.05, 8.0), st.sampled_from(PIECES))
def test_a_change_promises_a_gain(size, compute, ratio, pieces):
    pace = paced(pieces, size, compute, ratio * compute)
    to = Choice(pieces).after(pace)
    if to.pieces != pieces and to.why != "looks how whole shards do":
        assert pace.seconds(to.pieces) <= (1 - GAIN) * pace.seconds(pieces)


def test_a_busy_rank_is_no_slow_link():
    """Ranks that wait for one that computes twice as long; and a late link of one rank, which is."""
    busy, idle = Pace(1, 1, 2, 5, 0.2, 0.0, 0.1, 0.2), Pace(1, 1, 2, 5, 0.1, 0.1, 0.1, 0.2)
    ring = of_ring(np.array([astuple(busy), astuple(idle)]))
    assert ring == Pace(1, 1, 2, 10, 0.2, 0.0, 0.1, 0.2) and ring.hidden and ring.best == 1
    late = replace(idle, wait_s=0.3, link_s=0.4, span_s=0.4)
    ring = of_ring(np.array([astuple(busy), astuple(late)]))
    assert ring.wait_s == pytest.approx(0.2) and not ring.hidden and ring.best > 1


def test_ranks_choose_alike_from_the_same_rows():
    rows = np.random.default_rng(0).uniform(0.1, 1.0, (4, 8))
    assert Choice().after(of_ring(rows)) == Choice().after(of_ring(rows.copy()))


def test_paces_add_up():
    one = paced(2, 3, 0.01, 0.02, calls=1)
    assert astuple(one + one) == pytest.approx(astuple(paced(2, 3, 0.01, 0.02, calls=2)))
    assert (one + one).seconds(4) == pytest.approx(2 * one.seconds(4))


def test_a_call_that_was_held_up_is_no_measure():
    calls = [Pace(1, 1, 2, 5, span_s=span) for span in (9.0, 1.0, 1.2, 1.1, 7.0)]
    assert typical(calls) == Pace(5, 5, 10, 25, span_s=6.0)
