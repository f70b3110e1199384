"""One mask per batch row: which rows share a mask."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Causal, Documents, Full, Mask, Window
from ringspun.core.mask import RowMasks
from ringspun.errors import MaskError


@given(st.lists(st.integers(1, 3).map(Window), min_size=1, max_size=12))
def test_the_ranges_of_distinct_masks_are_the_rows(masks):
    rows = RowMasks(masks)
    found = {row: mask for mask, ranges in rows.distinct() for start, stop in ranges for row in range(start, stop)}
    assert [found[row] for row in range(len(rows))] == masks
    assert sum(b - a for _, ranges in rows.distinct() for a, b in ranges) == len(masks), "a row is in two ranges"
    assert [mask for mask, _ in rows.distinct()] == list(dict.fromkeys(masks))
    for _, ranges in rows.distinct():
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(ranges)), "not joined"


def test_rows_that_share_a_mask_are_ranges():
    a, b = Causal(), Causal() & Window(4)
    rows = RowMasks([a, a, b, a])
    assert rows.distinct() == [(a, [(0, 2), (3, 4)]), (b, [(2, 3)])]
    assert str(RowMasks((a, b))) == "rows[causal, causal & window(4)]"
    assert len(rows) == 4 and rows.masks == (a, a, b, a)


def test_rows_are_values():
    rows = RowMasks([Documents([2, 3]), Full()])
    assert rows == RowMasks((Documents([2, 3]), Full())) != RowMasks([Full(), Documents([2, 3])])
    assert hash(rows) == hash(pickle.loads(pickle.dumps(rows)))


def test_rows_are_no_mask_and_do_not_combine():
    rows = RowMasks([Causal()])
    assert not isinstance(rows, Mask)
    for combine in (lambda: rows & Causal(), lambda: Causal() & rows, lambda: rows | rows):
        with pytest.raises(TypeError):
            combine()


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ([], r"masks must hold at least one mask; got none\."),
        ([Causal(), "full"], r"masks must hold one mask per batch row; got 'full' for row 1\."),
        ("causal", r"masks must hold one mask per batch row; got 'c' for row 0\."),
        ([RowMasks([Causal()])], r"masks must hold one mask per batch row; got RowMasks\(.*\) for row 0\."),
        (Causal(), r"masks must be a list, one mask per batch row; got Causal\(\)\."),
    ],
)
def test_what_is_no_list_of_masks_is_refused(masks, words):
    with pytest.raises(MaskError, match=words):
        RowMasks(masks)
