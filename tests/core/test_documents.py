"""Documents: packed sequences from what collators and kernels call their boundaries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Documents
from ringspun.core import regions as rg
from ringspun.errors import DtypeError, MaskError
from tests.core import strategies

LENGTH = 17


class DeviceTensor:
    """Stands for a tensor on an accelerator: knows its device, and reading it is a fault of the test."""

    def __init__(self, device):
        self.device = device

    def __len__(self):
        return 2

    def __array__(self, *args, **kwargs):
        raise AssertionError("a device tensor was read: a hidden synchronisation")


@pytest.mark.parametrize("device", ["cuda:0", "mps:0", "xla:1", "meta"])
def test_a_device_tensor_is_refused_unread_with_the_line_to_write(device):
    tensor = DeviceTensor(device)
    for name, build in {
        "document lengths": Documents,
        "document starts": lambda t: Documents([1, 2], starts=t),
        "cu_seqlens": Documents.from_cu_seqlens,
        "position_ids": Documents.from_position_ids,
        "segment_ids": Documents.from_segment_ids,
        "attention_mask": Documents.from_attention_mask,
    }.items():
        what = "attention_mask" if name == "attention_mask" else "boundaries"
        with pytest.raises(
            DtypeError, match=rf"{name} must be host data; got a tensor on {device}\..*`{what}.cpu\(\)`"
        ):
            build(tensor)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "TFRT_CPU_0"])
def test_arrays_on_the_host_are_read(device):
    class HostArray(DeviceTensor):
        def __array__(self, *args, **kwargs):
            return np.array([2, 3], np.int32)

    assert Documents(HostArray(device)) == Documents([2, 3])


@given(strategies.documents(LENGTH))
def test_index_positions_and_table_say_the_same(docs):
    number, inside = np.full(LENGTH, -1), np.zeros(LENGTH, int)
    real = [(a, n) for a, n in zip(docs.starts, docs.lengths, strict=True) if n]
    for i, (start, n) in enumerate(real):
        number[start : start + n], inside[start : start + n] = i, np.arange(n)
    np.testing.assert_array_equal(docs.index(np.arange(LENGTH)), number)
    np.testing.assert_array_equal(docs.positions(LENGTH), inside)
    np.testing.assert_array_equal(docs.table(), np.array([(a, a + n) for a, n in real]).reshape(-1, 2))
    assert docs.end == max([a + n for a, n in real], default=0)


@given(strategies.documents(LENGTH))
def test_padding_sees_nothing_and_is_seen_by_nobody(docs):
    allowed, padding = docs.as_array(LENGTH), docs.index(np.arange(LENGTH)) < 0
    assert not allowed[padding].any() and not allowed[:, padding].any()
    assert allowed.diagonal()[~padding].all()


@given(st.lists(st.integers(0, 6), max_size=6))
def test_from_cu_seqlens(lengths):
    docs = Documents.from_cu_seqlens([0, *np.cumsum(lengths).tolist()])
    assert docs == Documents(lengths) and docs.lengths == tuple(lengths)


@given(strategies.documents(LENGTH))
def test_from_segment_ids_undoes_index(docs):
    back = Documents.from_segment_ids(docs.index(np.arange(LENGTH)))
    np.testing.assert_array_equal(back.table(), docs.table())


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_from_position_ids_undoes_positions(lengths):
    lengths = [*lengths, 2]  # one-token documents at the very end read as padding
    docs = Documents(lengths)
    assert Documents.from_position_ids(docs.positions(sum(lengths))) == docs


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([], Documents(())),
        ([0], Documents([1])),
        ([0, 0], Documents(())),
        ([0, 0, 0], Documents(())),
        ([0, 1, 0], Documents([2, 1])),
        ([0, 1, 0, 0], Documents([2])),
        ([0, 0, 1, 2], Documents([1, 3])),
        ([0, 0, 0, 1, 0], Documents([1, 1, 2, 1])),
    ],
    ids=str,
)
def test_from_position_ids_of_short_rows(positions, expected):
    assert Documents.from_position_ids(positions) == expected


def test_T9_padding_with_position_0_is_not_thousands_of_documents():
    """Padding with position 0 becomes thousands of one-token documents."""
    docs = Documents.from_position_ids([*range(10), *[0] * 22])
    assert docs == Documents([10])
    longer = Documents.from_position_ids([*range(10), *[0] * 4000])
    assert longer == docs, "cost must not grow with padding"
    assert len(docs.regions(32, 32)) == 1
    np.testing.assert_array_equal(docs.index(np.arange(32)), [0] * 10 + [-1] * 22)


def test_M11_padding_segments_do_not_see_each_other():
    """Pad tokens attend each other because -1 == -1."""
    docs = Documents.from_segment_ids([0, 0, 0, 1, 1, -1, -1, -1])
    assert docs == Documents([3, 2])
    allowed = docs.as_array(8)
    assert not allowed[5:].any() and not allowed[:, 5:].any()
    np.testing.assert_array_equal(rg.as_array(docs.regions(8, 8), 8, 8), allowed)
    assert not Documents.from_segment_ids([-1, -1]).as_array(2).any()


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_from_attention_mask_is_what_it_keeps(left, kept, right):
    row = [0] * left + [1] * kept + [0] * right
    docs = Documents.from_attention_mask(row)
    np.testing.assert_array_equal(docs.index(np.arange(len(row))) >= 0, np.array(row, bool))
    assert docs == (Documents([kept], starts=[left]) if kept else Documents(()))
    for dtype in (np.bool_, np.int32, np.uint8):
        assert Documents.from_attention_mask(np.array(row, dtype)) == docs


def test_M11_padding_of_an_unpacked_row_sees_nothing():
    """Pad tokens attend each other, or real tokens read padding, when packing is off."""
    for row in ([1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0], [0] * 8):
        keep, docs = np.array(row, bool), Documents.from_attention_mask(row)
        np.testing.assert_array_equal(docs.as_array(8), keep[:, None] & keep[None, :])
        np.testing.assert_array_equal(rg.as_array(docs.regions(8, 8), 8, 8), docs.as_array(8))


def test_M13_true_means_keep():
    """Padding mask used upside down: real tokens hidden, pads attended."""
    assert Documents.from_attention_mask([True] * 6 + [False] * 2) == Documents([6])
    with pytest.raises(
        DtypeError, match=r"got float64\. An additive mask\? 1 = keep: write `mask == 0` for an additive"
    ):
        Documents.from_attention_mask([1.0] * 6 + [0.0] * 2)
    with pytest.raises(DtypeError, match=r"1 = keep and 0 = padding; got float32\."):
        Documents.from_attention_mask(np.array([0, 0, -np.inf], np.float32))


class Unreadable:
    """Stands for a tensor of a type that NumPy does not know."""

    device, dtype = "cpu", "torch.bfloat16"

    def __array__(self, *args, **kwargs):
        raise TypeError("Got unsupported ScalarType BFloat16")


def test_a_type_that_numpy_does_not_know_is_named():
    for build in (Documents, Documents.from_attention_mask):
        with pytest.raises(DtypeError, match=r"must be integers or booleans; got torch\.bfloat16\."):
            build(Unreadable())


def test_from_segment_ids_with_padding_anywhere():
    assert Documents.from_segment_ids([]) == Documents(())
    assert Documents.from_segment_ids([7, 7, 0, 0, 0, 3], padding=0) == Documents([2, 1], starts=[0, 5])
    assert Documents.from_segment_ids([-1, 4, 4, -1, 5]) == Documents([2, 1], starts=[1, 4])


def test_strings_of_documents():
    """Starts are shown where the lengths alone do not say them."""
    assert str(Documents([2, 0, 3])) == str(Documents([2, 0, 3], starts=[0, 2, 2])) == "documents([2, 0, 3])"
    assert str(Documents([2, 3], starts=[0, 3])) == "documents([2, 3], starts=[0, 3])"
    assert str(Documents(())) == "documents([])"


def test_P2_positions_restart_in_each_document():
    """Later packed documents reuse document 0's positions."""
    assert Documents([4, 4]).positions(9).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert Documents([2], starts=[3]).positions(6).tolist() == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Documents.from_cu_seqlens([]), r"cu_seqlens must start at 0 and never fall; got \[\] \(0 values\)\."),
        (lambda: Documents.from_cu_seqlens([1, 4]), r"cu_seqlens must start at 0 and never fall; got \[1, 4\]"),
        (lambda: Documents.from_cu_seqlens([0, 4, 3]), r"cu_seqlens must start at 0 and never fall; got \[0, 4, 3\]"),
        (
            lambda: Documents.from_cu_seqlens(range(1, 20)),
            r"got \[1, 2, 3, 4, 5, 6, 7, 8, \.\.\.\] \(19 values\)\.",
        ),
        (
            lambda: Documents.from_position_ids([8, 9, 10]),
            r"position_ids must start at 0 and rise by one or restart at 0; got \[8, 9, 10\] \(3 values\)\. "
            r"A shard's positions do not tell documents",
        ),
        (lambda: Documents.from_position_ids([0, 2]), r"rise by one or restart at 0; got \[0, 2\]"),
        (lambda: Documents.from_position_ids([0, 1, 1, 1]), r"rise by one or restart at 0; got \[0, 1, 1, 1\]"),
        (
            lambda: Documents.from_segment_ids([0, 1, 0]),
            r"segment_ids must give each document one unbroken run; got \[0, 1, 0\] \(3 values\)\.",
        ),
        (
            lambda: Documents.from_position_ids([[0, 1]]),
            r"position_ids must be one-dimensional \(one row\); got shape \(1, 2\)",
        ),
        (
            lambda: Documents.from_attention_mask([0, 1, 1, 0, 0, 1]),
            r"attention_mask must keep one unbroken run of tokens; got padding inside it, at 3\. "
            r".*Documents\.from_segment_ids",
        ),
        (
            lambda: Documents.from_attention_mask([1, 1, 2, 2, 0]),
            r"attention_mask must hold 1 \(keep\) and 0 \(padding\) alone; got \[1, 1, 2, 2, 0\] .*from_segment_ids",
        ),
        (lambda: Documents.from_attention_mask([0, -10000]), r"alone; got \[0, -10000\] \(2 values\)\."),
        (
            lambda: Documents.from_attention_mask(np.ones((2, 3), bool)),
            r"attention_mask must be one-dimensional \(one row\); got shape \(2, 3\)\.",
        ),
        (
            lambda: Documents([4, 4]).positions(7),
            r"documents must fit the sequence; got documents that end at 8 in 7 tokens\.",
        ),
    ],
)
def test_bad_boundaries_are_refused(build, words):
    with pytest.raises(MaskError, match=words):
        build()
