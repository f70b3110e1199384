"""The softmax monoid: its laws, and that merging parts of the keys is attention over all of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringspun import Causal
from ringspun.core import reference
from ringspun.core.softmax import identity, merge

T, D = 5, 3
DTYPES = [np.float32, np.float64]


def same_bits(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@st.composite
def partials(draw, dtype=np.float64, reach=700):
    """``(out, lse)`` of T rows; some of them empty."""
    width = np.dtype(dtype).itemsize * 8
    out = draw(hnp.arrays(dtype, (T, D), elements=st.floats(-4, 4, width=width)))
    lse = draw(hnp.arrays(dtype, (T,), elements=st.floats(-reach, reach, width=width) | st.just(-np.inf)))
    out = np.where(np.isneginf(lse)[:, None], 0, out).astype(dtype)
    return out + dtype(0), lse + dtype(0)  # no negative zeros: they compare equal, but not bit for bit


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
def test_no_keys_is_the_identity_bit_for_bit(dtype, data):
    out, lse = data.draw(partials(dtype))
    for got in (merge(out, lse, *identity((T, D), dtype)), merge(*identity((T, D), dtype), out, lse)):
        assert same_bits(got[0], out) and same_bits(got[1], lse)


@given(partials(), partials(), partials())
def test_merge_is_associative(a, b, c):
    left, right = merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))
    np.testing.assert_allclose(left[0], right[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(left[1], right[1], rtol=1e-14, atol=1e-12)


@given(partials(), partials())
def test_merge_is_commutative(a, b):
    one, two = merge(*a, *b), merge(*b, *a)
    np.testing.assert_allclose(one[0], two[0], rtol=0, atol=1e-15)
    np.testing.assert_array_equal(one[1], two[1])


@given(partials(), partials())
def test_a_merged_row_lies_between_its_parts(a, b):
    out, lse = merge(*a, *b)
    assert not np.isnan(out).any() and not np.isnan(lse).any()
    assert (lse >= np.maximum(a[1], b[1])).all()
    both = ~np.isneginf(a[1]) & ~np.isneginf(b[1])
    low, high = np.minimum(a[0], b[0])[both], np.maximum(a[0], b[0])[both]
    assert (out[both] >= low - 1e-12).all() and (out[both] <= high + 1e-12).all()


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_whatever_an_empty_part_holds_cannot_spread(garbage):
    out, lse = np.linspace(-1, 1, T * D).reshape(T, D), np.linspace(-3, 3, T)
    nothing = np.full((T, D), garbage), np.full(T, -np.inf)
    with np.errstate(invalid="ignore"):
        for got in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
            assert same_bits(got[0], out) and same_bits(got[1], lse)
        np.testing.assert_array_equal(merge(*nothing, *nothing)[0], 0)


def test_identity_has_the_shapes_of_a_partial_result():
    out, lse = identity((2, 3, T, D), np.float32)
    assert out.shape == (2, 3, T, D) and lse.shape == (2, 3, T)
    assert out.dtype == lse.dtype == np.float32
    assert (out == 0).all() and np.isneginf(lse).all()
    assert identity((1, D))[0].dtype == np.float64


@pytest.mark.parametrize("dtype", DTYPES)
def test_N1_merge_of_two_empty_parts(dtype):
    """Merging two partial results that both saw no keys gives NaN, and the NaN then survives every later merge."""
    out, lse = merge(*identity((T, D), dtype), *identity((T, D), dtype))
    assert same_bits(out, np.zeros((T, D), dtype)) and np.isneginf(lse).all()
    x, ones = np.full((T, D), 7, dtype), np.ones(T, dtype)
    got = merge(out, lse, x, ones)
    assert same_bits(got[0], x) and same_bits(got[1], ones)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("b", "lse", "out"),
    [(100, 100.0, 2.0), (-100, 0.0, 1.0), (1e4, 1e4, 2.0), (-1e4, 0.0, 1.0), (0, np.log(2), 1.5)],
)
def test_N4_one_block_far_above_the_other(dtype, b, lse, out):
    """LSE update overflows to inf when one block's LSE is far above the running one."""
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        got = merge(np.full((1, 1), 1, dtype), np.zeros(1, dtype), np.full((1, 1), 2, dtype), np.full(1, b, dtype))
    np.testing.assert_allclose(got[1], lse, rtol=2 * np.finfo(dtype).eps, atol=1e-40)
    np.testing.assert_allclose(got[0], out, rtol=2 * np.finfo(dtype).eps)


@given(st.integers(0, 99), st.lists(st.integers(0, 11), min_size=1, max_size=4))
def test_merged_parts_are_attention_over_all_keys(seed, cuts):
    """Any cut of the keys into blocks, rows without keys in some of them included."""
    rng, s = np.random.default_rng(seed), 11
    q, k = rng.normal(size=(2, 4, s, 6)) * 3, rng.normal(size=(2, 2, s, 6))
    v, allowed = rng.normal(size=(2, 2, s, D)), Causal().as_array(s)
    whole, lse, _ = reference.attention(q, k, v, allowed=allowed)
    running = identity((2, 4, s, D))
    edges = [0, *sorted(cuts), s]
    for a, b in pairwise(edges):
        part = reference.attention(q, k[:, :, a:b], v[:, :, a:b], allowed=allowed[:, a:b])
        running = merge(*running, *part[:2])
    np.testing.assert_allclose(running[0], whole, rtol=0, atol=1e-14)
    np.testing.assert_allclose(running[1], lse, rtol=0, atol=1e-13)
