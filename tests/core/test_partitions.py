"""Layouts and partitions: every position exactly once, for any length on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Contiguous, Documents, Layout, Striped, Zigzag
from ringspun.core.layout.base import RANK
from ringspun.core.partition import Partition
from ringspun.errors import LayoutError, MaskError
from tests.core import strategies

LENGTHS, RING_SIZES = range(201), range(1, 10)


def assert_deals_everything(partition):
    order, size = partition.order(), partition.seq_len
    np.testing.assert_array_equal(np.sort(order), np.arange(size))
    np.testing.assert_array_equal(partition.inverse()[order], np.arange(size))
    np.testing.assert_array_equal(order[partition.inverse()], np.arange(size))
    held = [len(partition.positions(r)) for r in range(partition.ring_size)]
    assert partition.tokens.tolist() == held
    assert (np.diff(partition.runs[:, RANK]) >= 0).all()


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_every_position_exactly_once(layout):
    for size in RING_SIZES:
        for length in LENGTHS:
            assert_deals_everything(Partition(length, size, layout))


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_ranks_hold_numbers_of_tokens_that_differ_by_at_most_one(layout):
    for size in RING_SIZES:
        for length in LENGTHS:
            assert np.ptp(Partition(length, size, layout).tokens) <= 1


@pytest.mark.parametrize(("layout", "chunks"), [(Contiguous(), 1), (Zigzag(), 2)], ids=str)
def test_chunks_differ_by_at_most_one_token(layout, chunks):
    for size in RING_SIZES:
        for length in range(chunks * size, 201):
            partition = Partition(length, size, layout)
            assert len(partition.runs) == chunks * size
            assert np.ptp(partition.run_tokens) <= 1


@given(st.integers(0, 2000), st.integers(1, 9), st.sampled_from((128, 129, 300)))
def test_striped_blocks(length, size, block):
    partition = Partition(length, size, Striped(block))
    assert_deals_everything(partition)
    for rank in range(size):
        held = partition.positions(rank)
        assert (held // block % size == rank).all() and (np.diff(held) > 0).all()


@given(st.integers(0, 60), st.integers(1, 9), strategies.layouts())
def test_run_offsets_are_the_local_rows_of_runs(length, size, layout):
    partition = Partition(length, size, layout)
    assert_deals_everything(partition)
    for (rank, start, stop, step), offset in zip(partition.runs, partition.run_offsets, strict=True):
        members = np.arange(start, stop, step)
        np.testing.assert_array_equal(partition.positions(rank)[offset : offset + len(members)], members)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_pictures_in_docstrings_are_the_layouts(layout):
    drawn = next(line for line in type(layout).__doc__.splitlines() if "8 tokens, 4 ranks" in line)
    held = [[int(x) for x in part.split(":")[1].split()] for part in drawn.split("rank ")[1:]]
    partition = Partition(8, 4, layout)
    assert held == [partition.positions(r).tolist() for r in range(4)]


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        (Contiguous(), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
        (Zigzag(), [[0, 1, 10], [2, 3, 8, 9], [4, 5, 6, 7]]),
        (Striped(), [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]),
    ],
    ids=str,
)
def test_uneven_lengths_drawn(layout, held):
    partition = Partition(11, 3, layout)
    assert [partition.positions(r).tolist() for r in range(3)] == held


def test_P1_every_rank_knows_its_global_positions():
    """Every shard rotated as if it began at 0."""
    partition = Partition(12, 3, Zigzag())
    assert [partition.positions(r).tolist() for r in range(3)] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


@pytest.mark.parametrize(("length", "size"), [(2999, 4), (32769, 4), (7, 3), (5, 5), (11, 5)])
def test_S1_lengths_that_no_multiple_divides(length, size):
    """Cryptic size errors for lengths not divisible by 2W: here any length runs as it is, and none is padded."""
    for layout in (Contiguous(), Zigzag(), Striped()):
        partition = Partition(length, size, layout)
        assert_deals_everything(partition)
        assert partition.tokens.sum() == length


@pytest.mark.parametrize(("length", "size"), [(4, 2), (3, 2), (2, 2), (1, 2), (2, 4), (0, 3)])
def test_S3_very_short_sequences_leave_ranks_without_tokens(length, size):
    """Wrong output shape for very short sequences under load balancing."""
    for layout in (Contiguous(), Zigzag(), Striped(), Striped(128)):
        partition = Partition(length, size, layout)
        assert_deals_everything(partition)
        assert len(partition.tokens) == size
        assert all(partition.positions(r).dtype == np.int64 for r in range(size))


@dataclass(frozen=True)
class Dealt(Layout):
    """Deals what it is told to, right or wrong."""

    runs: tuple[tuple[int, int, int, int], ...]

    def deal(self, seq_len, ring_size, documents):
        return np.array(self.runs, np.int64).reshape(-1, 4)


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([(0, 0, 4, 1), (1, 5, 8, 1)], "exactly once"),  # 4 lost
        ([(0, 0, 5, 1), (1, 4, 8, 1)], "exactly once"),  # 4 repeated
        ([(0, 0, 4, 1), (1, 4, 7, 1)], "exactly once"),  # the last lost
        ([(0, 1, 4, 1), (1, 4, 8, 1)], "exactly once"),  # the first lost
        ([], "exactly once"),
        ([(0, 0, 8, 2), (1, 1, 6, 2)], "exactly once"),  # 7 lost
        ([(0, 0, 8, 2), (1, 1, 8, 2), (1, 3, 4, 1)], "exactly once"),  # 3 repeated
        ([(0, 0, 4, 1), (2, 4, 8, 1)], r"must deal to ranks 0\.\.1 in order; got \[0, 2\]"),
        ([(-1, 0, 4, 1), (1, 4, 8, 1)], r"must deal to ranks 0\.\.1 in order; got \[-1, 1\]"),
        ([(1, 0, 4, 1), (0, 4, 8, 1)], r"must deal to ranks 0\.\.1 in order; got \[1, 0\]"),
        ([(0, 0, 4, 1), (1, 4, 9, 1)], r"must deal runs inside 0\.\.8 with steps >= 1"),
        ([(0, -1, 4, 1), (1, 4, 8, 1)], r"must deal runs inside 0\.\.8 with steps >= 1"),
        ([(0, 0, 4, 0), (1, 4, 8, 1)], r"must deal runs inside 0\.\.8 with steps >= 1"),
        ([(0, 7, -1, -1)], r"must deal runs inside 0\.\.8 with steps >= 1"),
        ([(0, 0, 8, 2), (1, 1, 8, 2), (1, 6, 2, 2)], r"must deal runs inside 0\.\.8 with steps >= 1"),  # backwards
    ],
)
def test_layouts_that_lose_or_repeat_tokens_are_refused(runs, words):
    with pytest.raises(LayoutError, match=words) as caught:
        Partition(8, 2, Dealt(tuple(runs)))
    assert str(caught.value).startswith("dealt(")


def test_runs_without_tokens_are_harmless_wherever_they_stand():
    runs = ((0, 0, 4, 1), (0, 0, 0, 1), (0, 4, 4, 1), (1, 8, 8, 1), (1, 4, 8, 1), (1, 4, 4, 1))
    partition = Partition(8, 2, Dealt(runs))
    assert_deals_everything(partition)
    assert partition.run_tokens.tolist() == [4, 0, 0, 0, 4, 0]


@pytest.mark.parametrize(
    ("seq_len", "ring_size", "words"),
    [
        (-1, 2, r"seq_len must be an integer >= 0; got -1\."),
        ("8", 2, r"seq_len must be an integer >= 0; got '8'\."),
        (8.0, 2, r"seq_len must be an integer >= 0; got 8\.0\."),
        (8, 0, r"ring_size must be from 1 to 16384; got 0\."),
        (8, -2, r"ring_size must be from 1 to 16384; got -2\."),
    ],
)
def test_sizes_out_of_range_are_refused(seq_len, ring_size, words):
    with pytest.raises(LayoutError, match=words):
        Partition(seq_len, ring_size, Contiguous())


@pytest.mark.parametrize("block", [0, -1, 2, 127])
def test_stripes_of_awkward_size_are_refused(block):
    with pytest.raises(LayoutError, match=rf"Striped block must be 1 or at least 128 tokens; got {block}\."):
        Striped(block)


@pytest.mark.parametrize("block", [128.0, "128", None])
def test_stripes_must_be_whole(block):
    with pytest.raises(LayoutError, match=r"Striped block must be an integer; got"):
        Striped(block)


def test_documents_must_fit():
    docs = Documents([5, 4])
    assert Partition(9, 2, Zigzag(), docs).documents == docs
    with pytest.raises(MaskError, match=r"documents must fit the sequence; got documents that end at 9 in 8 tokens\."):
        Partition(8, 2, Zigzag(), docs)


def test_partitions_are_values_and_their_arrays_read_only():
    a, b = Partition(11, 3, Zigzag()), Partition(11, 3, Zigzag())
    assert a == b and hash(a) == hash(b) and a != Partition(12, 3, Zigzag())
    for array in (a.runs, a.tokens):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
