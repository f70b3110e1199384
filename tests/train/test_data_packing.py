"""Best-fit packing: nothing is lost or cut that is not counted, and hardly anything is padded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun.errors import DataError
from ringspun.train.data.packing import Counts, Piece, Pool, cut, fit, pack

POLICIES = ("truncate", "split", "drop")


def fitted(lengths: list[int], seq_len: int, overflow) -> tuple[list[Piece], Counts]:
    counts = Counts()
    pieces = [p for i, n in enumerate(lengths) for p in fit(i, n, seq_len=seq_len, overflow=overflow, counts=counts)]
    return pieces, counts


@pytest.mark.parametrize(
    ("overflow", "kept", "dropped", "cut"),
    [("truncate", 10, 1, 1), ("split", 11, 0, 1), ("drop", 6, 5, 0)],
)
def test_T1_what_does_not_fit_is_counted(overflow, kept, dropped, cut):
    """Documents of 5, 2, 3 and 1 tokens, length 4; and one of a million, length 4096."""
    pieces, counts = fitted([5, 2, 3, 1], 4, overflow)
    assert sum(p.tokens for p in pieces) == kept
    assert (counts.tokens, counts.tokens_dropped, counts.documents_cut) == (11, dropped, cut)
    long, counts = fitted([1_000_000], 4096, overflow)
    assert sum(p.tokens for p in long) + counts.tokens_dropped == 1_000_000
    assert len(long) == {"truncate": 1, "split": 245, "drop": 0}[overflow]
    assert counts.documents_dropped == (overflow == "drop")


def test_T1_an_error_names_the_document_and_the_choices():
    with pytest.raises(DataError, match=r"at most seq_len = 4 tokens; got 5 in document 1\. Choose overflow='split'"):
        fitted([4, 5], 4, "error")


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 50), st.sampled_from(POLICIES))
def test_every_token_is_in_one_sequence_or_counted(lengths, seq_len, overflow):
    pieces, counts = fitted(lengths, seq_len, overflow)
    rows = pack(pieces, seq_len=seq_len)
    assert sorted(p for row in rows for p in row) == sorted(pieces)
    assert all(0 < sum(p.tokens for p in row) <= seq_len for row in rows)
    for row in rows:
        counts.add_sequence(row, seq_len)
    assert counts.tokens == sum(lengths) == counts.tokens_packed + counts.tokens_dropped
    assert counts.tokens_packed + counts.padding == len(rows) * seq_len
    assert counts.documents_cut + counts.documents_dropped == sum(n > seq_len for n in lengths)
    assert counts.documents_empty == lengths.count(0)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 60))
def test_a_sequence_begins_with_the_oldest_and_leaves_no_gap_that_a_waiting_piece_fills(lengths, seq_len):
    pool = Pool()
    for piece in fitted(lengths, seq_len, "split")[0]:
        pool.add(piece)
    while pool:
        oldest = next(iter(pool))
        row = [piece for _, piece in pool.take_sequence(seq_len)]
        assert row[0] == oldest
        room = seq_len - sum(p.tokens for p in row)
        assert room >= 0 and all(p.tokens > room for p in pool)
        assert pool.tokens == sum(p.tokens for p in pool)


def test_the_last_gap_is_filled_by_two_where_two_fill_it_better():
    """9 fits best at first sight, but 6 and 4 leave no gap."""
    pool = Pool()
    for i, tokens in enumerate((10, 9, 6, 4)):
        pool.add(Piece(i, 0, tokens))
    assert sorted(p.tokens for _, p in pool.take_sequence(20)) == [4, 6, 10]


def long_tailed(kind: str, random: np.random.Generator, count: int) -> list[int]:
    """Lengths of documents: as web pages are (median 665), as code (1,340, wider), and with a power law's tail."""
    sizes = {
        "web": lambda: random.lognormal(6.5, 1.3, count),
        "code": lambda: random.lognormal(7.2, 1.6, count),
        "power law": lambda: 100 * (random.pareto(1.1, count) + 1),
    }[kind]()
    return np.minimum(sizes.astype(np.int64) + 1, 1 << 20).tolist()


@pytest.mark.parametrize("seq_len", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("overflow", POLICIES)
@pytest.mark.parametrize("kind", ["web", "code", "power law"])
def test_at_most_two_percent_are_padding_at_every_stage(kind, overflow, seq_len):
    """As a stream packs: 1,024 documents and 4 sequences to choose from. Measured: at most 0.9 %, at 512."""
    lengths, counts, pool = iter(long_tailed(kind, np.random.default_rng(0), 60_000)), Counts(), Pool()
    for _ in range(200):
        while len(pool) < 1024 or pool.tokens < 4 * seq_len:
            for piece in fit(0, next(lengths), seq_len=seq_len, overflow=overflow, counts=counts):
                pool.add(piece)
        counts.add_sequence([piece for _, piece in pool.take_sequence(seq_len)], seq_len)
    assert counts.padding <= 0.02 * 200 * seq_len
    assert counts.tokens == counts.tokens_packed + counts.tokens_dropped + pool.tokens


@pytest.mark.parametrize("seq_len", [512, 4096, 16384])
def test_so_are_documents_that_are_packed_by_themselves(seq_len):
    pieces, counts = fitted(long_tailed("web", np.random.default_rng(1), 3000), seq_len, "split")
    rows = pack(pieces, seq_len=seq_len)
    assert len(rows) * seq_len <= 1.02 * sum(p.tokens for p in pieces) + seq_len  # the last sequence may be half full
    assert counts.tokens_dropped == 0


def test_a_piece_is_cut_again_for_a_shorter_sequence():
    counts = Counts()
    again = cut(Piece(7, 10, 33), seq_len=10, overflow="split", counts=counts)
    assert again == [Piece(7, 10, 20), Piece(7, 20, 30), Piece(7, 30, 33)] and counts == Counts(documents_cut=1)


def test_bad_arguments_are_named():
    with pytest.raises(DataError, match="pieces must have at most 4 tokens; got 5"):
        pack([Piece(0, 0, 5)], seq_len=4)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(DataError, match="seq_len must be an integer >= 1"):
            pack([], seq_len=wrong)
