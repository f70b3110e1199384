"""Buckets: every distance has the row that its definition says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Buckets
from ringspun.errors import DtypeError, PlanError


def t5(distance: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """T5's rule, one distance at a time."""
    base = 0
    if bidirectional:
        num_buckets //= 2
        base, distance = (num_buckets, -distance) if distance < 0 else (0, distance)
    distance = max(distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return base + distance
    spread = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return base + min(exact + int(spread + 1e-6), num_buckets - 1)  # the paper's own code works in float32


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 20), (4, 3), (64, 1000)])
def test_t5_is_its_rule_and_ends_at_its_farthest(num_buckets, max_distance, bidirectional):
    buckets = Buckets.t5(num_buckets, max_distance, bidirectional=bidirectional)
    distance = np.arange(-2 * max_distance, 2 * max_distance)
    expected = [t5(int(d), num_buckets, max_distance, bidirectional) for d in distance]
    assert buckets(distance).tolist() == expected and buckets.count == num_buckets


@given(st.integers(-5, 9), st.integers(-5, 9))
def test_clipped_gives_every_distance_its_row(left, right):
    if left < -right:
        with pytest.raises(PlanError, match="left must be at least -right"):
            Buckets.clipped(left, right)
        return
    distance = np.arange(-20, 21)
    buckets = Buckets.clipped(left, right)
    assert buckets(distance).tolist() == (np.clip(distance, -right, left) + right).tolist()
    assert buckets.count == left + right + 1


@given(st.lists(st.integers(-50, 50), unique=True).map(sorted), st.data())
def test_any_piecewise_constant_function(edges, data):
    rows = data.draw(st.lists(st.integers(0, 9), min_size=len(edges) + 1, max_size=len(edges) + 1))
    buckets = Buckets(edges, rows)
    for d in range(-60, 60):
        assert buckets(np.array([d])) == rows[sum(e <= d for e in edges)]
    assert buckets == Buckets(tuple(edges), np.array(rows)) and buckets.count == max(rows) + 1
    assert str(buckets) == str(Buckets(edges, rows)) and f"{buckets.count} rows" in str(buckets)


def test_buckets_that_differ_look_different():
    """Ranks compare the string."""
    some = [Buckets([0], [0, 1]), Buckets([1], [0, 1]), Buckets([0], [1, 0]), Buckets([], [0]), Buckets([], [1])]
    assert len({str(b) for b in some}) == len(some)


WRONG = {
    "edges that fall": (lambda: Buckets([2, 1], [0, 1, 2]), PlanError, r"edges must rise; got \[2, 1\]"),
    "edges twice": (lambda: Buckets([1, 1], [0, 1, 2]), PlanError, "edges must rise"),
    "a row too few": (
        lambda: Buckets([1], [0]),
        PlanError,
        "rows must be one more than edges, each at least 0; got 1 for 1",
    ),
    "rows below 0": (lambda: Buckets([1], [0, -1]), PlanError, "each at least 0"),
    "half edges": (lambda: Buckets([0.5], [0, 1]), DtypeError, "edges must be integers"),
    "no exact distance": (
        lambda: Buckets.t5(2, 8, bidirectional=True),
        PlanError,
        "at least one exact distance per side",
    ),
    "an odd number of both sides": (lambda: Buckets.t5(9, 64, bidirectional=True), PlanError, "got 9 buckets"),
    "all exact": (lambda: Buckets.t5(32, 8, bidirectional=True), PlanError, "below max_distance"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_table_is_refused(what):
    make, error, words = WRONG[what]
    with pytest.raises(error, match=words):
        make()
