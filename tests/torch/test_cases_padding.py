"""Known hard cases of padding, whatever their group: rows that belong to nobody must not be seen, or spoil anything."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hard_cases import LAYOUTS, by_kernel, by_layout, judged, ring_plan, seen_mean
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringspun import Band, Blocks, Causal, Documents, Full, Window, Zigzag
from ringspun.core.mask import Mask
from ringspun.errors import DtypeError, MaskError
from ringspun.testing.cases import Arguments, Case, Inputs, Shape, inputs, spoiled
from ringspun.testing.torch import run_ring
from ringspun.torch import blockwise_attention, ring_attention


def check_spoiled(case: Case, kernel: str, value: float = math.nan) -> None:
    """Right with clean padding; with spoiled padding not one bit different."""
    plain = inputs(case)
    clean, found = (run_ring(case, x, kernel=kernel) for x in (plain, spoiled(case, plain, value)))
    judged(case, clean, plain)
    for name, x in clean.items():
        assert np.array_equal(x, found[name]), f"{case}: {name}"


PADDED: dict[str, Mask | tuple[Mask, ...]] = {
    "after documents": Causal() & Documents([9, 1, 5]),
    "between documents": Documents([4, 3, 1, 6], [2, 7, 11, 16]),
    "right": (Causal() & Documents([8]), Documents([19])),
    "left": (Causal() & Documents([8], [15]), Causal() & Documents([3], [20]) & Window(2)),
    "a row of padding": (Documents([]), Documents([23])),
    "keys in blocks that nobody sees": Blocks([[0], [0, 1], [4, 1], [0], [1]], 5),
    "keys that no band reaches": Band(-3, 9),
}


@by_kernel
@by_layout
@pytest.mark.parametrize("where", PADDED)
def test_M11_nan_in_padding_never_spreads(where, layout, kernel):
    """NaN in q, k, v and dout of padding: out, lse and every gradient are those of clean padding, bit for bit."""
    asked = [Arguments(), Arguments(sinks=True)]
    if kernel == "eager":
        asked.append(Arguments(sinks=True, softcap=2.0, bias="alibi"))
    for ranks in (2, 3):
        for one in asked:
            check_spoiled(Case(ranks, 23, PADDED[where], layout, arguments=one), kernel)


@st.composite
def padded_rows(draw) -> tuple[int, tuple[Mask, ...]]:
    """A length, and for each of two batch rows documents with padding before, between and after them."""
    seq_len = draw(st.integers(1, 17))
    rows = []
    for _ in range(2):
        cuts = sorted(draw(st.lists(st.integers(0, seq_len), max_size=6)))
        documents = list(zip(cuts[::2], cuts[1::2], strict=False))
        mask = Documents([b - a for a, b in documents], [a for a, _ in documents])
        rows.append(mask & Causal() if draw(st.booleans()) else mask)
    return seq_len, tuple(rows)


@by_kernel
@by_layout
@settings(max_examples=25)
@given(padded=padded_rows(), ranks=st.integers(1, 5))
def test_M11_nor_wherever_padding_lies(layout, kernel, padded, ranks):
    """The same of any documents in any rows."""
    seq_len, masks = padded
    check_spoiled(Case(ranks, seq_len, masks, layout), kernel)


@by_kernel
@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e300])
def test_M11_nor_do_infinities(value, kernel):
    for where in ("between documents", "left"):
        check_spoiled(Case(3, 23, PADDED[where], Zigzag()), kernel, value)


@by_kernel
@by_layout
def test_M11_padding_does_not_see_padding(layout, kernel):
    """-1 == -1: pads attend each other; or, where packing is off, real tokens read padding."""
    packed = Documents.from_segment_ids([0, 0, 0, 1, 1, -1, -1, -1])
    unpacked = Documents.from_attention_mask([1, 1, 1, 1, 1, 0, 0, 0])
    for mask, right in ((packed, [1, 1, 1, 3.5, 3.5, 0, 0, 0]), (unpacked, [2, 2, 2, 2, 2, 0, 0, 0])):
        plan = ring_plan(2, layout, mask, 8)
        assert seen_mean(plan, kernel) == pytest.approx(right, abs=1e-14)
        x = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        results = []
        for pad in (0.0, 1e6):
            x[:, :, 5:] = pad
            shard = plan.partition.shard(x, dim=2)
            results.append(plan.partition.gather(plan.attention(shard, shard, shard, kernel=kernel), dim=2))
        assert torch.equal(*results) and not results[0][:, :, 5:].any()


@by_kernel
@by_layout
@pytest.mark.parametrize("pad", [100.0, 200.0, math.nan])
def test_M6_seven_tokens_and_one_of_padding(pad, layout, kernel):
    """7 // 2 tokens per rank, twice, drops one: 1.9443 where dense attention gives 1.9269."""
    rows = torch.tensor([1.0, 1, 1, 1, 2, 2, 2, pad], dtype=torch.float64)
    x = rows.view(1, 1, 8, 1).expand(1, 1, 8, 8)
    plan = ring_plan(2, layout, Documents([7]), 8)
    shard = plan.partition.shard(x, dim=2)
    out, lse = plan.attention(shard, shard, shard, return_lse=True, kernel=kernel)
    out, lse = (plan.partition.gather(t, dim=2).view(8, -1) for t in (out, lse))
    right = [[1.926949, 6.831323]] * 4 + [[1.995364, 12.416968]] * 3 + [[0.0, -math.inf]]
    found = torch.stack([out[:, 0], lse[:, 0]], -1)
    torch.testing.assert_close(found, torch.tensor(right, dtype=torch.float64), rtol=0, atol=6e-7)
    assert (out == out[:, :1]).all()


@by_kernel
@by_layout
@pytest.mark.parametrize("ranks", [2, 4])
def test_M8_documents_shorter_than_what_they_are_padded_to(ranks, layout, kernel):
    """A chunk that is all padding counted as real: dk and dv explode. Document 0 has 3, 3, 3 and 0 real per chunk."""
    real, padded = np.array([0, 9, 17, 25, 37, 45, 57]), np.array([0, 12, 20, 28, 40, 48, 60])
    docs = Documents(np.diff(real), padded[:-1])
    short = Documents([1, *np.diff(real)], [0, *(padded[:-1] + 4)])  # and one of a single token, padded to 4
    for mask, seq_len in ((docs, 60), (Causal() & docs, 60), (Causal() & short, 64)):
        case = Case(ranks, seq_len, mask, layout)
        check_spoiled(case, kernel)
        found = run_ring(case, inputs(case), kernel=kernel)
        pads = ~case.allowed.any(0)
        assert pads.sum() == (6 if seq_len == 64 else 3)
        assert not found["dk"][:, :, pads].any() and not found["dv"][:, :, pads].any()


def entry_points(mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The same attention by every function that takes a mask."""
    plan = ring_plan(2, Zigzag(), mask, 8)
    part = plan.partition
    by_plan = part.gather(plan.attention(*(part.shard(x, dim=2) for x in (q, k, v))), dim=2)
    return [by_plan, ring_attention(q, k, v, mask=mask), blockwise_attention(q, k, v, mask=mask, block_size=3)]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_M13_true_means_keep_everywhere(kind):
    """A padding mask used upside down: real tokens hidden, padding attended."""
    zero, v = torch.zeros(1, 1, 8, 1), torch.arange(8.0).view(1, 1, 8, 1)
    for row in ([True] * 6 + [False] * 2, [1] * 6 + [0] * 2):
        for out in entry_points(Documents.from_attention_mask(kind(row)), zero, zero, v):
            assert out.flatten().tolist() == pytest.approx([2.5] * 6 + [0.0] * 2, abs=1e-6)
    with pytest.raises(DtypeError, match=r"attention_mask must be integers or booleans, 1 = keep and 0 = padding; got"):
        Documents.from_attention_mask(kind([1.0] * 6 + [0.0] * 2))


@pytest.mark.parametrize("fill", [1.0, True])
def test_M13_a_dense_mask_is_never_an_additive_bias(fill):
    plan, x = ring_plan(2, Zigzag(), Full(), 8), torch.ones(1, 1, 8, 2)
    dense = torch.full((8, 8), fill)
    with pytest.raises(TypeError, match=r"attn_mask must not be given to plan.attention; .*Write plan\(Causal\(\)"):
        plan.attention(x, x, x, attn_mask=dense)
    with pytest.raises(DtypeError, match=r"bias must be Alibi\(slopes\), .*got Tensor"):
        plan.attention(x, x, x, bias=dense)


@by_kernel
@pytest.mark.parametrize("causal", [True, False])
def test_S7_rows_past_the_last_document(causal, kernel):
    """Rows past cu_seqlens[-1] were never written: forward fine, gradients NaN."""
    docs = Documents.from_cu_seqlens([0, 144, 432, 944])
    shape = Shape(batch=1, heads=2, kv_heads=1, head_size=4, value_size=3)
    for layout in LAYOUTS:
        case = Case(2, 946, Causal() & docs if causal else docs, layout, shape=shape)
        check_spoiled(case, kernel)
        found = run_ring(case, inputs(case), kernel=kernel)
        assert all(not found[name][:, :, 944:].any() for name in ("out", "dq", "dk", "dv"))
    with pytest.raises(MaskError, match="documents must fit the sequence; got documents that end at 944 in 943 tokens"):
        ring_plan(2, Zigzag(), docs, 943)


@by_kernel
@by_layout
@pytest.mark.parametrize("side", ["right", "left"])
def test_S13_each_row_of_a_batch_has_its_own_length(side, layout, kernel):
    """One mask for the whole batch: padding of short rows gets into long ones. Each row equals its own run."""
    lengths, seq_len = (16, 9, 1), 16
    starts = [seq_len - n if side == "left" else 0 for n in lengths]
    masks = tuple(Causal() & Documents([n], [a]) for n, a in zip(lengths, starts, strict=True))
    case = Case(2, seq_len, masks, layout, dtype="float32", shape=Shape(batch=3))
    x = spoiled(case, inputs(case), 1e6)
    found = run_ring(case, x, kernel=kernel)
    for row, (n, a) in enumerate(zip(lengths, starts, strict=True)):
        cut = {name: getattr(x, name)[row : row + 1, :, a : a + n] for name in ("q", "k", "v", "dout", "dlse")}
        alone = run_ring(replace(case, seq_len=n, mask=Causal(), ranks=1), Inputs(**cut), kernel=kernel)
        for name, y in alone.items():
            np.testing.assert_allclose(found[name][row : row + 1, :, a : a + n], y, rtol=1e-6, atol=1e-6, err_msg=name)
        pads = np.delete(np.arange(seq_len), np.arange(a, a + n))
        assert np.isneginf(found["lse"][row][:, pads]).all()
        assert all(not found[name][row][:, pads].any() for name in ("out", "dq", "dk", "dv"))
