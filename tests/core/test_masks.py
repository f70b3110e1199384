"""Masks: the predicate is the definition; regions, strings and pictures are held against it."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringspun import (
    Anchors,
    Band,
    Blocks,
    Causal,
    Chunks,
    DocumentPairs,
    Documents,
    Full,
    Keys,
    Mask,
    Prefix,
    Window,
    parse_mask,
)
from ringspun.core import reference
from ringspun.core import regions as rg
from ringspun.errors import DtypeError, MaskError
from tests.core import strategies

LENGTH = 11


@st.composite
def masks_and_sides(draw):
    """A mask, a number of queries, a number of keys and the position of the first query."""
    q_len, k_len, q_start = (
        draw(st.integers(0, LENGTH)),
        draw(st.integers(0, LENGTH)),
        draw(st.integers(-LENGTH, LENGTH)),
    )
    return draw(strategies.masks(max(q_start + q_len, k_len))), q_len, k_len, q_start


@given(masks_and_sides())
@example((Prefix(5), 2, 4, 0))
@example((Prefix(5), 4, 2, 0))
@example((Chunks(9), 3, 7, 0))
@example((Anchors(5), 2, 4, 0))
def test_regions_are_the_predicate_and_disjoint(case):
    mask, q_len, k_len, q_start = case
    table = mask.regions(q_len, k_len, q_start)
    dense = mask.as_array(q_len, k_len, q_start=q_start)
    np.testing.assert_array_equal(rg.as_array(table, q_len, k_len, q_start), dense)
    assert rg.count(table).sum() == dense.sum(), "regions overlap"
    assert (rg.count(table) > 0).all(), "an empty region is kept"


@given(masks_and_sides())
def test_regions_are_tight_in_every_key_and_query(case):
    """What `needs.meetings` rests on: each row and each column of a region's rectangle holds a pair."""
    mask, *sides, q_start = case
    for row in mask.regions(*sides, q_start):
        q0, q1, k0, k1 = row[:4]
        inside = rg.as_array(row[None], *sides, q_start)[q0 - q_start : q1 - q_start, k0:k1]
        assert inside.any(axis=0).all() and inside.any(axis=1).all()


@given(strategies.masks(LENGTH), st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_queries_that_start_late_are_rows_of_the_whole(mask, start, stop):
    """Positions, not shapes, decide: a query sees the same keys whichever queries come with it."""
    start, stop = sorted((start, stop))
    late = mask.as_array(stop - start, LENGTH, q_start=start)
    np.testing.assert_array_equal(late, mask.as_array(LENGTH)[start:stop])


@pytest.mark.parametrize(
    ("q_len", "k_len", "q_start", "expected"),
    [(2, 5, 3, [2.5, 3.0]), (5, 2, -3, [0, 0, 0, 1.0, 1.5]), (2, 5, 0, [1.0, 1.5])],
)
def test_M1_positions_align_queries_and_keys_of_unequal_lengths(q_len, k_len, q_start, expected):
    """Causal results differ between backends when there are more keys than queries, or fewer."""
    q, k = np.zeros((1, 1, q_len, 3)), np.zeros((1, 1, k_len, 3))
    v = np.arange(1.0, k_len + 1)[None, None, :, None]
    table = Causal().regions(q_len, k_len, q_start)
    out, lse, _ = reference.attention(q, k, v, allowed=rg.as_array(table, q_len, k_len, q_start))
    np.testing.assert_allclose(out[0, 0, :, 0], expected, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(np.isneginf(lse[0, 0]), np.array(expected) == 0)


def test_documents_belong_to_positions():
    docs = Documents([2, 3])
    np.testing.assert_array_equal(docs.as_array(3, 4, q_start=3), matrix("..11 ..11 ...."))
    np.testing.assert_array_equal(docs.as_array(3, 5, q_start=-2), matrix("..... ..... 11..."))
    for sides in ((3, 4, 3), (3, 5, -2), (1, 5, 0), (5, 1, 0), (1, 0, 4), (2, 9, -7)):
        q_len, k_len, q_start = sides
        found = rg.as_array(docs.regions(*sides), *sides)
        np.testing.assert_array_equal(found, docs.as_array(q_len, k_len, q_start=q_start))


@given(strategies.masks(LENGTH))
def test_string_parses_back(mask):
    assert parse_mask(str(mask)) == mask
    assert hash(parse_mask(str(mask))) == hash(mask)


@given(strategies.plain_masks(LENGTH))
def test_shape_of_the_array(mask):
    assert mask.as_array(LENGTH).shape == (LENGTH, LENGTH)
    assert mask.as_array(LENGTH, 3).shape == (LENGTH, 3)
    assert mask.as_array(LENGTH).dtype == np.bool_


def matrix(rows: str) -> np.ndarray:
    return np.array([[c == "1" for c in row] for row in rows.split()])


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (Full(), "11111 11111 11111 11111 11111"),
        (Causal(), "1.... 11... 111.. 1111. 11111"),
        (Window(2), "1.... 11... .11.. ..11. ...11"),
        (Window(None), "1.... 11... 111.. 1111. 11111"),
        (Band(2, 1), "11... 111.. 1111. .1111 ..111"),
        (Band(None, 1), "11... 111.. 1111. 11111 11111"),
        (Band(0, None), "11111 .1111 ..111 ...11 ....1"),
        (Band(-1, 2), ".11.. ..11. ...11 ....1 ....."),
        (Documents([2, 0, 2]), "11... 11... ..11. ..11. ....."),
        (Documents([1, 2], starts=[1, 3]), "..... .1... ..... ...11 ...11"),
        (Prefix(2), "11... 11... ..... ..... ....."),
        (Causal() | Prefix(3), "111.. 111.. 111.. 1111. 11111"),
        (Prefix([1, 2], Documents([2, 3])), "1.... ..... ..11. ..11. ....."),
        (Prefix(1, Documents([2, 3])), "1.... ..... ..1.. ..... ....."),
        (Anchors(2), "11... 11... 11... 11... 11..."),
        (Anchors(1, Documents([2, 2])), "1.... 1.... ..1.. ..1.. ....."),
        (Anchors([0, 2], Documents([2, 3])), "..... ..... ..11. ..11. ..11."),
        (Causal() & (Window(2) | Anchors(1)), "1.... 11... 111.. 1.11. 1..11"),
        (Chunks(2), "11... 11... ..11. ..11. ....1"),
        (Blocks([[1], [0, 2]], size=2), "..11. ..11. 11..1 11..1 ....."),
        (Keys(1, 3), ".11.. .11.. .11.. .11.. .11.."),
        (DocumentPairs(Documents([2, 1]), Documents([3, 2])), "111.. 111.. ...11 ..... ....."),
    ],
    ids=str,
)
def test_masks_drawn(mask: Mask, rows: str):
    np.testing.assert_array_equal(mask.as_array(5), matrix(rows))
    assert mask.as_array(5).flags.writeable
    np.testing.assert_array_equal(rg.as_array(mask.regions(5, 5), 5, 5), matrix(rows))


@pytest.mark.parametrize(
    ("mask", "size"), [(Band(2, 1), 5), (Documents([2, 3]), 6), (Blocks([[0], [0, 2], []], size=2), 6)], ids=str
)
def test_pictures_in_docstrings_are_the_masks(mask: Mask, size: int):
    lines = [line.split() for line in type(mask).__doc__.splitlines() if line.strip().startswith("q ")]
    assert [line[1] for line in lines] == [str(i) for i in range(size)]
    drawn = np.array([[cell == "1" for cell in line[2 : 2 + size]] for line in lines])
    np.testing.assert_array_equal(drawn, mask.as_array(size))


def test_window_is_the_band_of_flash_attention():
    np.testing.assert_array_equal(Window(4).as_array(9), Band(3, 0).as_array(9))


def test_M2_window_counts_the_query_itself():
    """Sliding window sees one token too many (or twice too many)."""

    def seen(window):
        q, v = np.zeros((1, 1, 8, 3)), np.arange(8.0)[None, None, :, None]
        return reference.attention(q, q, v, allowed=Window(window).as_array(8))[0][0, 0, :, 0]

    np.testing.assert_allclose(seen(4), [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5], rtol=0, atol=1e-15)
    np.testing.assert_array_equal(seen(1), np.arange(8))
    np.testing.assert_array_equal(Window(8).as_array(8), Causal().as_array(8))
    np.testing.assert_array_equal(Window(50).as_array(8), Causal().as_array(8))


def test_nested_operands_are_taken_flat():
    a, b, c = Causal(), Window(3), Chunks(4)
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)
    assert a & (b | c) != (a & b) | c
    assert str(a & (b | c)) == "causal & (window(3) | chunks(4))"
    assert str((a & b) | c) == "causal & window(3) | chunks(4)"


def test_integers_of_numpy_make_equal_masks():
    assert Window(np.int32(4)) == Window(4) and str(Window(np.int64(4))) == "window(4)"
    assert Band(np.int16(4), None) == Band(4, None)
    assert Prefix(np.int64(2)) == Prefix(2)
    assert Anchors(np.array([1, 2]), Documents(np.array([3, 4], np.uint8))) == Anchors([1, 2], Documents([3, 4]))


def test_only_masks_combine():
    for other in (3, "causal", None, np.ones((2, 2), bool)):
        with pytest.raises(TypeError):
            Causal() & other
        with pytest.raises(TypeError):
            Causal() | other


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Window(0), r"Window size must be >= 1; got 0\."),
        (lambda: Window(-3), r"Window size must be >= 1; got -3\."),
        (lambda: Window(2.0), r"Window size must be an integer; got 2\.0\."),
        (lambda: Window(True), r"Window size must be an integer; got True\."),
        (lambda: Window("4"), r"Window size must be an integer; got '4'\."),
        (lambda: Band(1, -2), r"Band must have left >= -right; got left=1, right=-2\."),
        (lambda: Band(-1, 0), r"Band must have left >= -right; got left=-1, right=0\."),
        (lambda: Band(0.5, 1), r"Band left must be an integer; got 0\.5\."),
        (lambda: Band(0, "1"), r"Band right must be an integer; got '1'\."),
        (lambda: Chunks(0), r"Chunks size must be >= 1; got 0\."),
        (lambda: Chunks(None), r"Chunks size must be an integer; got None\."),
        (lambda: Prefix(-1), r"Prefix n must be >= 0; got -1\."),
        (lambda: Anchors(True), r"Anchors n must be an integer; got True\."),
        (lambda: Prefix([1, 2]), r"Prefix with one n per document must get documents=; got n=\[1, 2\] \(2 values\)\."),
        (
            lambda: Anchors([1], Documents([2, 3])),
            r"Anchors n must be one count >= 0 per document; got \[1\] \(1 values\) for 2 documents\.",
        ),
        (
            lambda: Prefix([1, -1], Documents([2, 3])),
            r"Prefix n must be one count >= 0 per document; got \[1, -1\] \(2 values\) for 2 documents\.",
        ),
        (
            lambda: Prefix([[1], [2]], Documents([2, 3])),
            r"Prefix n must be one-dimensional \(one row\); got shape \(2, 1\)",
        ),
        (lambda: Documents([2, 0, -1, -3]), r"document lengths must be >= 0; got -1 for document 2\."),
        (lambda: Documents([[2, 3]]), r"document lengths must be one-dimensional \(one row\); got shape \(1, 2\)\."),
        (
            lambda: Documents([2, 3], starts=[0]),
            r"document starts must be one per document; got 1 starts for 2 lengths\.",
        ),
        (
            lambda: Documents([2, 3], starts=[0, 1]),
            r"documents must follow each other without overlap; got document 1 starting at 1\.",
        ),
        (
            lambda: Documents([2, 3, 4], starts=[5, 1, 3]),
            r"documents must follow each other without overlap; got document 1 starting at 1\.",
        ),
        (
            lambda: Documents([2, 3], starts=[-1, 4]),
            r"documents must follow each other without overlap; got document 0 starting at -1\.",
        ),
        (
            lambda: Documents([2, 3]).regions(4, 3),
            r"documents must fit the sequence; got documents that end at 5 in 4 tokens\.",
        ),
        (
            lambda: Documents([2, 3]).regions(6, 3, q_start=-2),
            r"documents must fit the sequence; got documents that end at 5 in 4 tokens\.",
        ),
        (
            lambda: Anchors(1, Documents([2, 3])).regions(2, 1, q_start=2),
            r"documents must fit the sequence; got documents that end at 5 in 4 tokens\.",
        ),
        (
            lambda: Prefix(1, Documents([2, 3])).regions(4, 4),
            r"documents must fit the sequence; got documents that end at 5 in 4 tokens\.",
        ),
    ],
)
def test_bad_masks_are_refused(build, words):
    with pytest.raises(MaskError, match=words):
        build()


@pytest.mark.parametrize("kind", [Prefix, Anchors])
@pytest.mark.parametrize("given_documents", [[2, 3], Causal(), (5,)])
def test_documents_of_a_prefix_must_be_documents(kind, given_documents):
    with pytest.raises(MaskError, match=f"{kind.__name__} documents must be Documents; got"):
        kind(3, documents=given_documents)


@pytest.mark.parametrize("value", [sys.maxsize, np.int64(-1) << 63, 10**30, 2**60 + 1], ids=str)
def test_bounds_beyond_any_length_are_refused(value):
    """They would overflow in the regions, and a window of `sys.maxsize` silently see nothing."""
    for build in (lambda: Band(value, None), lambda: Band(None, value)):
        with pytest.raises(MaskError, match=r"Band (left|right) must lie within \+-2\*\*60 \(None, "):
            build()
    if value > 0:
        for kind in (Window, Chunks, Prefix, Anchors):
            with pytest.raises(MaskError, match=r"must lie within \+-2\*\*60"):
                kind(value)


def test_the_largest_window_sees_everything_before():
    np.testing.assert_array_equal(rg.as_array(Window(1 << 60).regions(6, 6), 6, 6), Causal().as_array(6))
    assert Band(-(1 << 60), 1 << 60).regions(6, 6).tolist() == []
    assert Documents([1 << 60]).end == Documents([0], [1 << 60]).starts[0] == 1 << 60
    assert Blocks([[(1 << 53) - 1]], size=128).keys == (((1 << 53) - 1,),)
    for beyond in (lambda: Documents([1 << 60, 1]), lambda: Documents([0], [(1 << 60) + 1])):
        with pytest.raises(MaskError, match=r"at most 2\*\*60"):
            beyond()
    with pytest.raises(MaskError, match=r"got block 9007199254740992 of 128 tokens"):
        Blocks([[1 << 53]], size=128)


@pytest.mark.parametrize("values", [[1.0, 2.0], ["1"], [True, False], 2.5])
def test_boundaries_must_be_integers(values):
    for build in (Documents, Documents.from_cu_seqlens, Documents.from_position_ids, Documents.from_segment_ids):
        with pytest.raises(DtypeError, match=r"must be integers; got"):
            build(values)
    with pytest.raises(DtypeError, match=r"Prefix n must be integers; got"):
        Prefix(values, Documents([1, 2]))
