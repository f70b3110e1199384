"""The algebra of regions, against dense boolean arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ringspun.core import regions as rg
from tests.core import strategies

LENGTH = 8
SETS = strategies.region_sets(LENGTH)


def dense(table):
    return rg.as_array(table, LENGTH, LENGTH)


def assert_is(table, expected):
    """`table` holds the pairs of `expected`, each in one region."""
    np.testing.assert_array_equal(dense(table), expected)
    assert rg.count(table).sum() == expected.sum(), "regions overlap"


@given(SETS, SETS)
def test_intersect(a, b):
    assert_is(rg.intersect(a, b), dense(a) & dense(b))


@given(SETS, SETS)
def test_subtract(a, b):
    assert_is(rg.subtract(a, b), dense(a) & ~dense(b))


@given(SETS, SETS)
def test_unite(a, b):
    assert_is(rg.unite(a, b), dense(a) | dense(b))


@given(SETS)
def test_looks_tells_whether_any_pair_lies_ahead_or_back(table):
    pairs = dense(table)
    assert rg.looks(table) == (np.triu(pairs, 1).any(), np.tril(pairs, -1).any())


@given(SETS, SETS)
def test_operands_are_not_changed(a, b):
    before = a.copy(), b.copy()
    for operation in (rg.intersect, rg.subtract, rg.unite):
        operation(a, b)
    rg.tighten(a)
    np.testing.assert_array_equal(a, before[0])
    np.testing.assert_array_equal(b, before[1])


@st.composite
def loose_rows(draw):
    """One region whose bounds nobody has tightened; often empty."""
    span = st.integers(0, LENGTH)
    bound = st.integers(-2 * LENGTH, 2 * LENGTH) | st.sampled_from((-rg.UNBOUNDED, rg.UNBOUNDED))
    return np.array([[draw(s) for s in (span, span, span, span, bound, bound)]], np.int64)


@given(loose_rows())
def test_looks_is_exact_for_any_row(row):
    assert rg.looks(row) == (np.triu(dense(row), 1).any(), np.tril(dense(row), -1).any())


@given(loose_rows())
def test_count_is_exact_for_any_row(row):
    assert rg.count(row).tolist() == [dense(row).sum()]


@given(loose_rows())
@example(np.array([[2, 5, 1, 4, -rg.UNBOUNDED, rg.UNBOUNDED]]))
@example(np.array([[0, 8, 2, 7, -1, 9]]))
def test_tighten_keeps_the_pairs_and_reaches_its_fixed_point(row):
    tight = rg.tighten(row)
    np.testing.assert_array_equal(dense(tight), dense(row))
    assert len(tight) == dense(row).any()
    np.testing.assert_array_equal(rg.tighten(tight), tight)
    for q0, q1, k0, k1, lo, hi in tight:
        pairs = np.argwhere(dense(tight))
        behind = pairs[:, 0] - pairs[:, 1]
        assert (*pairs.min(axis=0), *pairs.max(axis=0) + 1) == (q0, k0, q1, k1)
        assert (behind.min(), behind.max()) == (lo, hi)


@given(SETS, loose_rows())
def test_rows_that_nobody_has_tightened_are_operands_like_any(a, row):
    """Rectangles and bands may reach beyond their pairs, or be empty by `lo > hi` alone."""
    assert_is(rg.subtract(a, row), dense(a) & ~dense(row))
    assert_is(rg.intersect(a, row), dense(a) & dense(row))


def test_count_at_lengths_no_array_could_hold():
    n = 1 << 24
    assert rg.count(rg.rectangle(0, n, 0, n)).tolist() == [n * n]
    assert rg.count(rg.rectangle(0, n, 0, n, lo=0)).tolist() == [n * (n + 1) // 2]
    assert rg.count(rg.rectangle(0, n, 0, n, lo=0, hi=99)).tolist() == [100 * n - 99 * 100 // 2]


def test_empty_sets():
    none, one = rg.empty(), rg.rectangle(0, 3, 0, 3)
    assert rg.rectangle(3, 3, 0, 3).shape == (0, 6)
    for a, b in ((none, none), (none, one), (one, none)):
        assert len(rg.intersect(a, b)) == 0
        assert len(rg.unite(a, b)) == len(a) + len(b)
    assert len(rg.subtract(one, one)) == 0
    np.testing.assert_array_equal(rg.subtract(one, none), one)
