"""Halos: every token with the tokens before it, under any layout; no row twice, none that nobody needs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Contiguous, Documents, Striped, Zigzag
from ringspun.core.halo import halos
from ringspun.core.partition import Partition
from tests.core import strategies

NOTHING = -1


@st.composite
def dealt(draw):
    """A partition, with documents or without; and a number of tokens."""
    length = draw(st.integers(0, 40))
    documents = draw(st.none() | strategies.documents(length))
    layout = draw(strategies.layouts() | st.just(strategies.MixedSteps()) | st.just(Striped(128)))
    return Partition(length, draw(st.integers(1, 8)), layout, documents), draw(st.integers(0, 45))


def widened(part, before):
    """Which token lies in each row of the widened tensor of each rank, by the messages that halos tell of."""
    of_ranks = halos(part, before, tuple(range(part.ring_size)))
    for rank, halo in enumerate(of_ranks):
        wide, own = np.full(halo.width, NOTHING), part.indices(rank)
        wide[halo.rows[halo.kept]] = own[halo.kept]
        for peer, rows in halo.receives.items():
            assert peer != rank and (wide[rows] == NOTHING).all()
            wide[rows] = part.indices(peer)[of_ranks[peer].sends[rank]]
        assert all(rank in of_ranks[peer].receives for peer in halo.sends)
        yield halo, wide, own


def document_of(part, tokens):
    return np.zeros_like(tokens) if part.documents is None else part.documents.index(tokens)


@given(dealt())
def test_every_token_has_those_before_it_in_its_document(one):
    """And zeros where there are no more; padding has and is nothing."""
    part, before = one
    for halo, wide, own in widened(part, before):
        back = np.arange(before + 1)
        assert ((halo.rows >= before) & (halo.rows < halo.width)).all()
        found, wanted = wide[halo.rows[:, None] - back], own[:, None] - back
        document = document_of(part, own)[:, None]
        real = (wanted >= 0) & (document >= 0) & (document_of(part, np.maximum(wanted, 0)) == document)
        np.testing.assert_array_equal(found, np.where(real, wanted, NOTHING))


@given(dealt())
def test_no_row_is_there_twice_or_for_nobody(one):
    part, before = one
    for halo, wide, own in widened(part, before):
        there = wide[wide != NOTHING]
        assert len(np.unique(there)) == len(there)
        needed = (halo.rows[halo.kept][:, None] - np.arange(before + 1)).ravel()
        assert set(there) <= set(wide[needed])
        assert halo.width <= (before + 1) * (len(own) + 1)


@given(dealt())
def test_the_halos_of_some_ranks_are_those_of_all(one):
    part, before = one
    everybody = halos(part, before, tuple(range(part.ring_size)))
    for rank, wanted in enumerate(everybody):
        (found,) = halos(part, before, (rank,))
        assert found.width == wanted.width
        for a, b in ((found.sends, wanted.sends), (found.receives, wanted.receives)):
            assert list(a) == list(b) and all(np.array_equal(a[peer], b[peer]) for peer in a)
        assert np.array_equal(found.rows, wanted.rows) and np.array_equal(found.kept, wanted.kept)


def test_the_picture_in_the_docstring():
    (one, two) = (wide.tolist() for _, wide, _ in widened(Partition(8, 2, Zigzag(), Documents([5, 3])), 2))
    assert one == [-1, -1, 0, 1, -1, 5, 6, 7] and two == [0, 1, 2, 3, 4, -1, -1, 5]


def test_a_halo_is_small_where_runs_are_long():
    """Of a million tokens on 64 ranks, three before each of 128 runs; but from a rank's own run, none."""
    of_ranks = halos(Partition(1 << 20, 64, Zigzag()), 3, (0, 5, 63))
    assert [halo.width - len(halo.rows) for halo in of_ranks] == [6, 6, 3]
    assert [{p: len(rows) for p, rows in halo.receives.items()} for halo in of_ranks] == [
        {1: 3},
        {4: 3, 6: 3},
        {62: 3},
    ]


def test_a_striped_rank_holds_what_lies_between_its_tokens_once():
    wide = [halo.width for halo in halos(Partition(800, 8, Striped()), 20, (0, 3))]
    assert wide == [20 + 99 * 8 + 1] * 2, "not 21 rows for each of 100 tokens"
    assert halos(Partition(800, 8, Contiguous()), 0, (2,))[0].width == 100
