"""Two sides: queries and keys of one attention, their lengths, starts, rows and needs."""

from __future__ import annotations

import multiprocessing
import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Balanced, Blocks, Causal, Contiguous, Documents, Full, Keys, Window, Zigzag
from ringspun.core import host, needs
from ringspun.core.accounting import imbalance, wait
from ringspun.core.cut import Cut
from ringspun.core.geometry import Geometry
from ringspun.core.layout import DocumentZigzag
from ringspun.core.mask import DocumentPairs
from ringspun.core.mask.rows import RowMasks
from ringspun.core.partition import Partition, Sides
from ringspun.core.route import Ring
from ringspun.core.schedule import compile_schedules
from ringspun.errors import LayoutError, MaskError, PlanError
from tests.core import strategies

GEOMETRY = Geometry(3, (0, 1, 2), Zigzag(), Ring())
PART = Partition(8, 2, Zigzag())

WRONG = {
    "layout in words": (lambda: Partition(8, 2, "zigzag"), LayoutError, "A string: write parse_layout(text)"),
    "a start that is none": (lambda: Partition(8, 2, Zigzag(), None, "3"), LayoutError, "start must be an integer"),
    "a start too far": (lambda: Partition(8, 2, Zigzag(), None, 2**48 + 1), LayoutError, "within +-2**48"),
    "documents from elsewhere": (
        lambda: Partition(8, 2, Balanced(), Documents([8]), 1),
        LayoutError,
        "balanced must deal a sequence from its beginning; got one that starts at 1",
    ),
    "a sequence too long": (lambda: Partition(2**48 + 1, 2, Zigzag()), LayoutError, "at most 2**48 tokens"),
    "documents that are none": (lambda: Partition(8, 2, Zigzag(), [8]), LayoutError, "Write Documents(lengths)"),
    "another ring": (lambda: Sides(PART, Partition(8, 3, Zigzag())), LayoutError, "ring of 2; got one of 3"),
    "keys that start": (lambda: Sides(PART, Partition(8, 2, Zigzag(), None, 1)), LayoutError, "keys must start at"),
    "a start alone": (lambda: GEOMETRY.sides(8, query_start=3), PlanError, "query_start must come with key_len"),
    "half a start": (lambda: GEOMETRY.sides(8, key_len=8, query_start=0.5), LayoutError, "query_start must be an"),
    "a negative length": (
        lambda: GEOMETRY.sides(8, key_len=-1),
        LayoutError,
        "key_len must be an integer >= 0; got -1",
    ),
    "a switch for a length": (lambda: GEOMETRY.sides(8, key_len=True), LayoutError, "key_len must be an integer"),
    "rows under a layout of documents": (
        lambda: compile_schedules(
            Sides(Partition(8, 2, DocumentZigzag())), RowMasks([Documents([8]), Documents([4, 4])]), Ring(), (0,)
        ),
        PlanError,
        "batch rows must have the same documents under documentzigzag",
    ),
    "documents beyond 2**60": (lambda: Documents([2**59] * 3), MaskError, "add up to at most 2**60"),
    "a document that starts beyond": (lambda: Documents([1], [2**60 + 1]), MaskError, "starts must be at most 2**60"),
    "keys that end before they start": (lambda: Keys(3, 2), MaskError, "Keys stop must be >= 3; got 2"),
    "pairs of lists": (lambda: DocumentPairs([1], [1]), MaskError, "DocumentPairs queries must be Documents"),
    "pairs of other numbers": (
        lambda: DocumentPairs(Documents([1]), Documents([1, 2])),
        MaskError,
        "got 1 of queries and 2 of keys",
    ),
    "integers beyond int64": (lambda: Documents(np.array([2**63], np.uint64)), MaskError, "must fit int64"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused(what):
    make, error, words = WRONG[what]
    with pytest.raises(error, match=re.escape(words)):
        make()


def test_a_geometry_takes_the_documents_of_the_mask():
    docs = Documents([3, 5])
    assert GEOMETRY.sides(8, mask=Causal() & docs).queries.documents == docs
    assert GEOMETRY.sides(8, mask=[docs, Causal() & docs]).queries.documents == docs
    assert GEOMETRY.sides(8, mask=RowMasks([docs, Causal()])).queries.documents is None
    assert GEOMETRY.sides(8, mask=[docs & Documents([8]), docs]).queries.documents == docs, "the first of several"
    assert GEOMETRY.sides(8, Documents([8]), mask=Causal() & docs).queries.documents == Documents([8])
    assert GEOMETRY.sides(8, key_len=0).keys.seq_len == 0
    across = GEOMETRY.sides(2, mask=docs, key_len=8)
    assert across.queries.documents is None and across.keys.seq_len == 8, "documents of the keys alone"
    assert GEOMETRY.sides(2, mask=docs, key_len=8, query_start=6).queries.documents == docs
    assert GEOMETRY.schedule(Causal() & docs, 8) == GEOMETRY.schedule(Causal() & docs, 8, docs)


def test_keys_of_an_encoder():
    row = [0, 0, 1, 1, 1, 0]
    assert Keys.from_attention_mask(row) == Keys(2, 5) and Keys.from_attention_mask([0, 0]) == Keys(0, 0)
    assert Keys(2, 5).as_array(2, 6).tolist() == [[False, False, True, True, True, False]] * 2
    pairs = DocumentPairs(Documents([2, 1]), Documents([3, 2]))
    assert pairs.as_array(3, 5).astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]


def test_rows_write_themselves_once():
    rows = RowMasks([Causal(), Window(4)])
    assert rows.text == str(rows) == "rows[causal, window(4)]" and rows.text is rows.text


@given(st.data(), st.integers(0, 24), st.integers(1, 5))
def test_meetings_rank_by_rank_are_the_same(data, length, size):
    """What very many ranks and runs are counted by."""
    mask, layout = data.draw(strategies.masks(length)), data.draw(strategies.layouts())
    partition = Partition(length, size, layout)
    cut = Cut(partition, partition, mask.regions(length, length))
    if not cut.without_steps:
        return
    found = needs._meetings_by_rank(cut)
    assert set(map(tuple, found.tolist())) == set(map(tuple, needs.meetings(cut).tolist()))


def test_many_ranks_and_runs_are_counted_rank_by_rank(monkeypatch):
    docs = Documents([40] * 12)
    geometry = Geometry(8, (3,), DocumentZigzag(), Ring())
    whole = geometry.schedule(Causal() & docs, 480)
    monkeypatch.setattr(needs, "MANY_PLACES", 10)
    for places in (4096, 3):
        monkeypatch.setattr(needs, "PLACES", places)
        assert geometry.schedule(Causal() & docs, 480) == whole


def test_a_clock_that_waits():
    def passes(layout, mask):
        return [s.forward for s in Geometry(4, (0, 1, 2, 3), layout, Ring()).schedule(mask, 32)]

    assert wait(passes(Zigzag(), Full())) == 1.0
    assert wait(passes(Contiguous(), Causal())) == pytest.approx((36 + 64 * 3) / (528 / 4))
    assert wait(passes(Zigzag(), Blocks([], 32))) == 1.0, "nobody computes"
    speeds = [1.0, 1.0, 2.0, 4.0]
    dealt = passes(Contiguous(speeds=speeds), Full())  # 4, 4, 8 and 16 tokens
    pairs = np.array([[4 * 4, 4 * 16, 4 * 8, 4 * 4], [4 * 4, 4 * 4, 4 * 16, 4 * 8], [8 * 8, 8 * 4, 8 * 4, 8 * 16]])
    pairs = np.concatenate([pairs, [[16 * 16, 16 * 8, 16 * 4, 16 * 4]]])
    time = pairs / np.array(speeds)[:, None]
    assert wait(dealt, speeds) == pytest.approx(time.max(0).sum() / (32 * 32 / 8))
    np.testing.assert_allclose(imbalance(dealt, speeds), time.max(0) / time.mean(0))


def _child(ready: multiprocessing.connection.Connection) -> None:
    host.end_with_parent()
    ready.send(os.getpid())
    ready.recv()


def test_a_process_knows_its_parent():
    host.end_with_parent()  # nobody started this one by multiprocessing
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(theirs,))
    child.start()
    try:
        assert mine.poll(60) and mine.recv() == child.pid
        mine.send("done")
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()


def test_rows_that_agree_may_be_dealt_by_their_documents():
    docs = Documents([5, 3])
    rows = RowMasks([docs, Causal() & docs])
    geometry = Geometry(2, (0, 1), DocumentZigzag(), Ring())
    schedules = geometry.schedule(rows, 8)
    assert schedules == geometry.schedule([docs, Causal() & docs], 8)
    pairs = sum(int(s.forward.pairs.sum()) for s in schedules)
    assert pairs == sum(m.as_array(8).sum() for m in rows.masks)
    assert PART.rows_of((0, 1)) == 8 and PART.rows_of(()) == 0 and PART.rows_of((1,)) == 4


def test_sides_are_the_same_where_the_tokens_are():
    one, two = Partition(12, 3, Zigzag()), Partition(13, 3, Zigzag())
    assert Sides(one).same and Sides(one, Partition(12, 3, Zigzag())).same
    assert not Sides(one, two).same and not Sides(one, Partition(12, 3, Contiguous())).same
