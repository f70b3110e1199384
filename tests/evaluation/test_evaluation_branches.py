"""The mask of branches: a document, and questions behind it, each as if the others were not there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspun.core import regions as rg
from ringspun.errors import MaskError
from ringspun.evaluation.branches import Branches

BRANCHES = st.builds(
    lambda document, branches, lead: Branches(document, tuple(branches), min(lead, document)),
    st.integers(0, 9), st.lists(st.integers(0, 4), max_size=5), st.integers(0, 4),
)  # fmt: skip


def test_the_picture_of_the_docstring():
    rows = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert Branches(3, (2, 1)).as_array(6).astype(int).tolist() == [
        *rows, [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 1]
    ]  # fmt: skip
    assert Branches(3, (1,), lead=2).as_array(6).astype(int).tolist() == [
        *rows, [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 1]
    ]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(mask=BRANCHES, more=st.integers(0, 3), start=st.integers(-2, 6), rows=st.integers(0, 9))
def test_regions_are_the_predicate(mask, more, start, rows):
    n = mask.seq_len + more
    for q_len, q_start in ((n, 0), (rows, start)):
        found = mask.regions(q_len, n, q_start)
        expected = mask.as_array(q_len, n, q_start=q_start)
        assert (rg.as_array(found, q_len, n, q_start) == expected).all()
        assert rg.count(found).sum() == expected.sum()  # disjoint


@settings(deadline=None, max_examples=60)
@given(mask=BRANCHES)
def test_a_branch_is_the_causal_sequence_that_it_goes_on_from(mask):
    sees, positions = mask.as_array(mask.seq_len), mask.positions()
    document = np.arange(mask.document)
    for start, size in zip(mask.starts, mask.branches, strict=True):
        own = np.arange(start + mask.lead, start + mask.lead + size)
        for row in (*range(start, start + mask.lead), *own):
            keys = np.flatnonzero(sees[row])
            # every position up to its own, once: of a leading token but for itself, which the document has
            assert sorted(positions[keys].tolist()) == list(range(positions[row] + 1))
            assert set(keys) <= {*document, *own}
    assert not sees[:, mask.document :][: mask.document].any()


def test_without_a_lead_the_questions_see_the_document_by_one_rectangle():
    assert len(Branches(100, (5,) * 50).regions(350, 350)) == 1 + 1 + 50


def test_what_cannot_be_is_refused():
    with pytest.raises(MaskError, match="lead must be at most the document's 3 tokens; got 4"):
        Branches(3, (1,), lead=4)
    with pytest.raises(MaskError, match="Branches branch must be >= 0; got -1"):
        Branches(3, (1, -1))
