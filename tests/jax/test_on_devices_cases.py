"""Known hard cases of groups N, M, S and G that have a meaning in jax, by id. One head of size 1 and a scale of 1: with
q = 0 every row is the mean of the values that it sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ringspun import Anchors, Causal, Chunks, Contiguous, Documents, Full, Keys, Striped, Window, Zigzag
from ringspun.testing.cases import Arguments, Case, Inputs, Shape, inputs, reference
from ringspun.testing.comparison import errors, judge
from ringspun.testing.jax import run_ring

pytestmark = pytest.mark.usefixtures("compiled_in_haste")
ONE = Shape(batch=1, heads=1, kv_heads=1, head_size=1, value_size=1)
BENT = Arguments(softcap=1.0, sinks=True)
LAYOUTS = (Contiguous(), Zigzag(), Striped())
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def check(case, given=None):
    """The oracle's numbers; what was found."""
    given = inputs(case) if given is None else given
    found = run_ring(case, given)
    error = errors(found, reference(case, given))
    assert judge("float64", [error], [])[0], (case, error.worst)
    return found


def of_ones(case, **changed):
    """q = k = 0, v = 0, 1, ..., and what is `changed`."""
    given = inputs(case)
    zeros = {"q": 0 * given.q, "k": 0 * given.k}
    v = np.arange(case.keys, dtype=np.float64).reshape(1, 1, -1, 1)
    return replace(given, **{**zeros, "v": v, **changed})


def means(ranks, seq_len, mask, layout, **sides):
    case = Case(ranks, seq_len, mask, layout, shape=ONE, **sides)
    return check(case, of_ones(case))["out"].reshape(-1).tolist()


@by_layout
def test_N1_N7_rows_that_see_nothing(layout):
    """Rows before, between and behind documents, with NaN in all that must not be read."""
    case = Case(4, 16, Causal() & Documents([6, 5], [2, 9]), layout, shape=ONE, spoiled=True)
    given = inputs(case)
    blind = ~case.allowed.any(-1)
    bad = {name: np.where(blind[:, None], np.nan, getattr(given, name)) for name in ("q", "k", "v", "dout")}
    found = run_ring(case, replace(given, **bad, dlse=np.where(blind, np.nan, given.dlse)))
    error = errors(found, reference(case, given))
    assert judge("float64", [error], [])[0], error.worst
    assert np.isneginf(found["lse"][0, 0, blind]).all() and not found["out"][0, 0, blind].any()
    assert not found["dq"][0, 0, blind].any() and not found["dk"][0, 0, blind].any()


@pytest.mark.parametrize("far", [100.0, -100.0, 1e4, -1e4])
def test_N4_scores_that_differ_by_more_than_exp_can(far):
    case = Case(2, 2, Full(), Contiguous(), shape=ONE)
    given = of_ones(
        case, q=np.ones((1, 1, 2, 1)), k=np.array([0, far]).reshape(1, 1, 2, 1), v=np.array([[[[1.0], [2.0]]]])
    )
    found = check(case, given)
    assert found["lse"].reshape(-1).tolist() == [max(far, 0)] * 2
    assert found["out"].reshape(-1).tolist() == [2.0 if far > 0 else 1.0] * 2


def test_N8_a_blind_row_spoils_no_gradient():
    case = Case(2, 8, Documents([3, 4], [0, 4]) & Causal(), Contiguous(), shape=ONE)
    given = inputs(case)
    found = check(case, replace(given, dout=np.where(np.arange(8)[:, None] == 3, 0, given.dout)))
    assert all(np.isfinite(found[name]).all() for name in ("dq", "dk", "dv"))


def test_N10_products_beyond_float16():
    case = Case(2, 16, Full(), Contiguous(), "float16", replace(ONE, head_size=64))
    full = np.full((1, 1, 16, 64), 40.0)
    found = run_ring(case, of_ones(case, q=full, k=full))
    assert np.allclose(found["out"], 7.5, rtol=1e-3) and np.isfinite(found["dq"]).all()


@by_layout
def test_N12_the_same_bits_every_time(layout):
    case = Case(4, 16, Causal(), layout, shape=ONE)
    first, second = (run_ring(case, inputs(case)) for _ in range(2))
    assert all((first[name] == second[name]).all() for name in first)


def test_M1_positions_decide_not_shapes():
    assert means(2, 2, Causal(), Contiguous(), key_len=5, query_start=3) == pytest.approx([1.5, 2.0])
    assert means(2, 5, Causal(), Contiguous(), key_len=2, query_start=-3)[3:] == pytest.approx([0, 0.5])


@by_layout
def test_M2_a_window_counts_the_query_itself(layout):
    assert means(2, 8, Window(4), layout) == pytest.approx([0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5])
    assert means(2, 8, Window(1), layout) == pytest.approx(range(8))
    assert means(2, 8, Window(99), layout) == pytest.approx([n / 2 for n in range(8)])


@by_layout
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 12])
def test_M3_windows_across_shards(layout, window):
    expected = [np.mean(range(max(0, q - window + 1), q + 1)) for q in range(16)]
    assert means(4, 16, Window(window), layout) == pytest.approx(expected)
    assert means(4, 16, Causal() & (Window(window) | Anchors(2)), layout)[0] == 0


@by_layout
def test_chunks_under_permuted_layouts(layout):
    assert means(4, 16, Causal() & Chunks(5), layout) == pytest.approx([(q // 5 * 5 + q) / 2 for q in range(16)])


@by_layout
def test_M5_M19_documents_do_not_see_each_other(layout):
    for lengths in ([7, 5, 4], [1, 1, 1, 13], [2, 3, 1, 3, 1]):
        mask = Causal() & Documents(lengths)
        case = Case(2, sum(lengths), mask, layout, shape=ONE)
        given = inputs(case)
        before = check(case, given)
        first = np.arange(case.seq_len)[:, None] < lengths[0]
        after = run_ring(case, replace(given, v=given.v + first, k=given.k + first))
        assert all(
            (before[n][..., lengths[0] :, :] == after[n][..., lengths[0] :, :]).all() for n in ("out", "dq", "dk")
        )


def test_M6_padding_takes_no_weight():
    """Heads of size 8 with all entries alike, as one entry: q.k and the scale make 8 ** 0.5 of a product."""
    case = Case(2, 8, Documents([7]), Contiguous(), shape=ONE)
    rows = np.array([1, 1, 1, 1, 2, 2, 2, 100.0])[None, None, :, None]
    found = check(case, replace(inputs(case), q=8**0.5 * rows, k=rows, v=rows))
    assert found["out"][0, 0, :, 0] == pytest.approx([1.926949] * 4 + [1.995364] * 3 + [0], abs=1e-6)
    assert found["lse"][0, 0, [0, 4]] == pytest.approx([6.831323, 12.416968], abs=1e-6)


def test_M8_a_document_shorter_than_a_chunk():
    for ranks in (2, 4):
        documents = Documents([9, 1, 3], [0, 10, 12])
        found = check(Case(ranks, 16, Causal() & documents, Zigzag(), shape=ONE))
        assert not found["dk"][0, 0, [9, 11, 15]].any()


def test_M11_padding_does_not_see_padding():
    documents = Documents.from_segment_ids([0, 0, 0, 1, 1, -1, -1, -1])
    case = Case(2, 8, documents, Contiguous(), shape=ONE)
    v = np.array([1, 2, 3, 4, 5, 1e6, 1e6, 1e6]).reshape(1, 1, 8, 1)
    assert check(case, of_ones(case, v=v))["out"].reshape(-1).tolist() == [2, 2, 2, 4.5, 4.5, 0, 0, 0]


def test_M15_softcap_does_not_bend_what_is_hidden():
    case = Case(2, 8, Causal(), Contiguous(), shape=ONE, arguments=BENT)
    given = of_ones(case)
    before = check(case, given)["out"]
    after = run_ring(case, replace(given, v=given.v + (np.arange(8) == 7)[:, None]))["out"]
    assert (before[..., :7, :] == after[..., :7, :]).all() and before[0, 0, 7, 0] != after[0, 0, 7, 0]


def test_M16_a_sink_counts_once_per_row():
    case = Case(2, 4, Full(), Contiguous(), shape=ONE, arguments=BENT)
    found = check(case, of_ones(case, v=np.ones((1, 1, 4, 1)), sinks=np.zeros(1)))
    assert found["out"].reshape(-1) == pytest.approx([0.8] * 4)
    assert found["lse"].reshape(-1) == pytest.approx([np.log(5)] * 4)


@by_layout
def test_M17_a_balanced_layout_need_not_be_causal(layout):
    assert means(4, 16, Full(), layout) == pytest.approx([7.5] * 16)


@by_layout
def test_S1_S3_lengths_that_do_not_divide(layout):
    for ranks, seq_len in ((2, 4), (2, 3), (2, 2), (2, 1), (4, 2), (4, 15), (4, 4), (4, 9), (3, 7)):
        assert means(ranks, seq_len, Causal(), layout) == pytest.approx([n / 2 for n in range(seq_len)])


def test_S7_rows_behind_the_last_document():
    found = check(Case(2, 16, Causal() & Documents.from_cu_seqlens([0, 2, 7, 14]), Contiguous(), shape=ONE))
    assert not found["out"][0, 0, 14:].any() and not found["dv"][0, 0, 14:].any()


def test_S8_cross_attention_over_keys_that_do_not_divide():
    assert means(3, 7, Keys(0, 16), Contiguous(), key_len=17) == pytest.approx([7.5] * 7)


def test_G12_the_gradient_of_lse():
    case = Case(2, 4, Full(), Contiguous(), shape=ONE)
    k = np.arange(4.0).reshape(1, 1, 4, 1)
    given = of_ones(case, k=k, dout=np.zeros((1, 1, 4, 1)), dlse=np.ones((1, 1, 4)))
    found = check(case, given)
    assert found["dq"].reshape(-1) == pytest.approx([1.5] * 4) and not found["dk"].any()


def test_G1_G2_each_gradient_by_itself():
    """An incoming gradient at one query alone, on each rank in turn: shares reach every owner."""
    case = Case(4, 16, Causal(), Zigzag(), shape=ONE)
    given: Inputs = inputs(case)
    for row in (0, 5, 10, 15):
        at = np.arange(16) == row
        check(case, replace(given, dout=given.dout * at[:, None], dlse=given.dlse * at))
