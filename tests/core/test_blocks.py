"""Block masks: the table is what is allowed, in as few regions as its runs, whatever the length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Blocks, Causal, parse_mask
from ringspun.core import regions as rg
from ringspun.errors import DtypeError, MaskError
from tests.core import strategies
from tests.core.test_documents import DeviceTensor


@given(strategies.blocks(12), st.integers(0, 20))
def test_a_pair_is_allowed_where_its_blocks_are_listed(mask, length):
    def listed(q, k):
        q_block = q // mask.size
        return q_block < len(mask.keys) and k // mask.size in mask.keys[q_block]

    expected = [[listed(q, k) for k in range(length)] for q in range(length)]
    np.testing.assert_array_equal(mask.as_array(length), np.array(expected, bool).reshape(length, length))


tables = st.tuples(st.integers(0, 6), st.integers(0, 6)).flatmap(
    lambda shape: st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
        lambda cells: np.array(cells, np.bool_).reshape(shape)
    )
)


@given(tables, st.integers(1, 4))
def test_from_array_spreads_each_cell_over_a_block(table, size):
    mask, (n, m) = Blocks.from_array(table, size), table.shape
    assert len(mask.keys) == n
    dense = mask.as_array(n * size + 2, m * size + 3)
    np.testing.assert_array_equal(dense[: n * size, : m * size], np.kron(table, np.ones((size, size), bool)))
    assert not dense[n * size :].any() and not dense[:, m * size :].any()
    assert Blocks.from_array(table.tolist() if n and m else table, size) == mask


@given(strategies.blocks(12), st.randoms())
def test_neither_order_nor_repetition_of_the_numbers_matters(mask, rnd):
    shuffled = [rnd.sample([*row, *row], 2 * len(row)) for row in mask.keys]
    assert Blocks(shuffled, mask.size) == mask and hash(Blocks(shuffled, mask.size)) == hash(mask)
    assert Blocks([np.array(row, np.int32) for row in shuffled], np.int64(mask.size)) == mask


def test_strings_of_block_masks():
    assert str(Blocks([[0], [1, 0]], size=64)) == "blocks([[0], [0, 1]], size=64)"
    assert str(Blocks([[], [2]])) == "blocks([[], [2]])"
    assert parse_mask("blocks([[0], [0, 1]], size=64)") == Blocks([[0], [0, 1]], size=64)
    assert Blocks([[0]]).size == 128


@pytest.mark.parametrize(
    ("keys", "rectangles"),
    [
        ([], []),
        ([[], []], []),
        ([range(4)] * 3, [(0, 9, 0, 12)]),  # a full table is one rectangle
        ([[0], [0, 1], [0, 1, 2]], [(0, 3, 0, 3), (3, 6, 0, 6), (6, 9, 0, 9)]),
        ([[0, 2], [0, 2], [0, 3]], [(0, 9, 0, 3), (0, 6, 6, 9), (6, 9, 9, 12)]),
        ([[1], [], [1]], [(0, 3, 3, 6), (6, 9, 3, 6)]),  # the row between sees nothing
    ],
)
def test_runs_of_blocks_are_joined_to_rectangles(keys, rectangles):
    table = Blocks(keys, size=3).regions(9, 12)
    assert table[:, :4].tolist() == [list(r) for r in rectangles]


def test_a_length_that_is_no_multiple_cuts_the_last_block():
    assert Blocks([[0], [1]], size=4).regions(7, 6)[:, :4].tolist() == [[0, 4, 0, 4], [4, 7, 4, 6]]
    assert Blocks([[0], [1]], size=4).regions(2, 6, q_start=3)[:, :4].tolist() == [[3, 4, 0, 4], [4, 5, 4, 6]]


@given(strategies.blocks(6), st.integers(-12, 12))
def test_queries_before_the_first_key_and_beyond_the_table_see_nothing(mask, q_start):
    dense = mask.as_array(8, 10, q_start=q_start)
    q = np.arange(q_start, q_start + 8)
    assert not dense[(q < 0) | (q >= len(mask.keys) * mask.size)].any()
    np.testing.assert_array_equal(rg.as_array(mask.regions(8, 10, q_start), 8, 10, q_start), dense)


def test_8192_query_blocks_hold_every_pair_once():
    """No loop over entries or regions: a million tokens in blocks of 128."""
    n, size = 8192, 128
    chosen = np.random.default_rng(3).integers(0, n, (n, 20)).tolist()
    mask = Blocks(chosen, size)
    assert rg.count(mask.regions(n * size, n * size)).sum() == size * size * sum(len(set(row)) for row in chosen)
    decoding = (Causal() & mask).regions(n * size, n * size)
    assert 0 < len(decoding) < 20 * n and (decoding[:, rg.K0] < decoding[:, rg.Q1]).all()


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: Blocks([[0]], size=0), MaskError, r"Blocks size must be >= 1; got 0\."),
        (lambda: Blocks([[0]], size=64.0), MaskError, r"Blocks size must be an integer; got 64\.0\."),
        (lambda: Blocks([[0], [3, -1]]), MaskError, r"key blocks of query block 1 must be >= 0; got -1\."),
        (lambda: Blocks([[0], [1.0]]), DtypeError, r"key blocks of query block 1 must be integers; got float64\."),
        (lambda: Blocks([[True, False]]), DtypeError, r"key blocks of query block 0 must be integers; got bool\."),
        (lambda: Blocks([0, 1]), MaskError, r"key blocks of query block 0 must be one-dimensional \(one row\); got"),
        (lambda: Blocks(3), MaskError, r"Blocks keys must be a list of block numbers per query block; got 3\."),
        (lambda: Blocks([[1 << 54]]), MaskError, r"Blocks must end at position 2\*\*60 or before; got block 18014398"),
        (
            lambda: Blocks(np.eye(3, dtype=int)),
            MaskError,
            r"got an array of shape \(3, 3\)\. Write Blocks\.from_array\(allowed\) for .*, Blocks\(keys\.tolist\(\)\)",
        ),
        (
            lambda: Blocks.from_array(np.eye(3, dtype=int)),
            DtypeError,
            r"allowed must be booleans, True = may look; got int64\. Write `allowed != 0` for zeros and ones",
        ),
        (
            lambda: Blocks.from_array(np.zeros((2, 2), np.float32)),
            DtypeError,
            r"got float32\. .*`allowed == 0` for an additive mask\.",
        ),
        (
            lambda: Blocks.from_array(np.ones(3, bool)),
            MaskError,
            r"allowed must be a table \[query blocks, key blocks\]; got shape \(3,\)\.",
        ),
        (lambda: Blocks.from_array([[True], [True, False]]), MaskError, r"allowed must have rows of one length; got"),
    ],
)
def test_bad_block_masks_are_refused(build, error, words):
    with pytest.raises(error, match=words):
        build()


def test_device_tables_are_refused_unread_with_the_line_to_write():
    tensor = DeviceTensor("cuda:0")
    with pytest.raises(DtypeError, match=r"allowed must be host data; got a tensor on cuda:0\..*`allowed\.cpu\(\)`"):
        Blocks.from_array(tensor)
    with pytest.raises(DtypeError, match=r"key blocks of query block 1 must be host data; got a tensor on cuda:0"):
        Blocks([[0], tensor])
    tensor.ndim = 2
    with pytest.raises(DtypeError, match=r"Blocks keys must be host data; got a tensor on cuda:0\..*`keys\.cpu\(\)`"):
        Blocks(tensor)
