"""Bands by `aten_cpu`: pieces and masked blocks hold every allowed pair once, and equal the oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringspun.core import regions as rg
from ringspun.core.reference import attention, attention_with_gradients
from ringspun.torch.kernels import AtenCpu, Call, Kernel, LoweredKernel, aten_cpu, bands
from ringspun.torch.kernels.base import Block, Saved, StepTiles
from ringspun.torch.softmax import RunningSoftmax

LENGTH = 24
SMALL = (bands.Sizes(5, 2, 3), bands.Sizes(8, 1, 1), bands.Sizes(6, 100, 4), bands.Sizes())


class Cutting(AtenCpu):
    """`aten_cpu` with other sizes."""

    def __init__(self, sizes: bands.Sizes) -> None:
        self.sizes = sizes


@st.composite
def tiles(draw):
    """A rectangle within `LENGTH` x `LENGTH` and any band, as loose as may be."""
    edges = st.lists(st.integers(0, LENGTH), min_size=2, max_size=2, unique=True).map(sorted)
    (q0, q1), (k0, k1) = draw(edges), draw(edges)
    lo = draw(st.integers(-LENGTH, LENGTH) | st.just(-rg.UNBOUNDED))
    return q0, q1, k0, k1, lo, draw(st.integers(max(lo, -LENGTH), LENGTH) | st.just(rg.UNBOUNDED))


def allowed(tile) -> np.ndarray:
    return rg.as_array(np.array([tile]), LENGTH, LENGTH)


def of_piece(piece: bands.Piece) -> np.ndarray:
    behind = np.arange(piece.q1 - piece.q0)[:, None] - np.arange(piece.k1 - piece.k0)
    return (piece.lo <= behind) & (behind <= piece.hi)


@given(tiles(), st.sampled_from(SMALL))
def test_pieces_hold_every_pair_once_and_are_tight(tile, sizes):
    times = np.zeros((LENGTH, LENGTH), int)
    for piece in bands.pieces(tile, sizes):
        seen = of_piece(piece)
        assert seen.any(0).all() and seen.any(1).all()
        assert piece.masked == (not seen.all())
        times[piece.q0 : piece.q1, piece.k0 : piece.k1] += seen
    assert np.array_equal(times, allowed(tile))


@given(tiles(), st.sampled_from(SMALL), st.sampled_from((bands.row_blocks, bands.key_blocks)))
def test_masked_blocks_hold_every_pair_once_and_are_tight(tile, sizes, blocks):
    for piece in bands.pieces(tile, sizes):
        times = np.zeros((piece.q1 - piece.q0, piece.k1 - piece.k0), int)
        for q0, q1, k0, k1, mask in blocks(piece, sizes.block, torch.float64):
            assert mask.shape == (q1 - q0, k1 - k0) and min(mask.shape) <= sizes.block
            assert mask.stride(1) == 1 or k1 - k0 == 1  # the op takes it for granted
            seen = (mask == 0).numpy()
            assert seen.any(0).all() and seen.any(1).all() and torch.isneginf(mask[mask != 0]).all()
            times[q0:q1, k0:k1] += seen
        assert np.array_equal(times, of_piece(piece))


def of_kernel(kernel: Kernel, tile, tensors, dlse: torch.Tensor | None) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of one tile."""
    q, k, v, dout = tensors
    block, step = Block(q, k, v, 0.4), StepTiles(np.array([[0, -1, *tile]], np.int64))
    running = RunningSoftmax(dout.shape, torch.float64, q.device)
    for rows, *part in kernel.forward(block, step):
        running.add(rows, *part)
    out, lse = running.out, running.lse
    delta = (out * dout).sum(-1) - (0 if dlse is None else dlse)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for g in kernel.backward(block, Saved(out, lse, dout, dlse, delta), step):
        for total, rows, share in zip(grads, (g.q_rows, g.k_rows, g.k_rows), (g.dq, g.dk, g.dv), strict=True):
            total[rows.batch, :, rows.tokens] += share
    return [out, lse, *grads]


def random(heads: int, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, LENGTH, size, dtype=torch.float64, generator=generator)


def given_tensors(sizes: tuple[int, int]) -> list[torch.Tensor]:
    """q, k, v and dout of 6 heads over 3, with these head sizes of q and v."""
    return [random(6, sizes[0], 0), random(3, sizes[0], 1), random(3, sizes[1], 2), random(6, sizes[1], 3)]


@given(tiles(), st.sampled_from(SMALL), st.booleans(), st.sampled_from(((3, 5), (5, 3), (4, 4))))
def test_bands_equal_the_oracle(tile, sizes, with_dlse, head_sizes):
    tensors = given_tensors(head_sizes)
    dlse = random(6, 1, 4)[..., 0] if with_dlse else None
    seen = allowed(tile)
    found = of_kernel(Cutting(sizes), tile, tensors, dlse)
    q, k, v, dout = (x.numpy() for x in tensors)
    right = attention_with_gradients(q, k, v, dout, None if dlse is None else dlse.numpy(), allowed=seen, scale=0.4)
    for name, x in zip(("out", "lse", "dq", "dk", "dv"), found, strict=True):
        np.testing.assert_allclose(x.numpy(), getattr(right, name), rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("sizes", SMALL, ids=str)
@pytest.mark.parametrize("tile", [(3, 20, 2, 22, -2, 4), (0, 24, 4, 20, 0, rg.UNBOUNDED), (4, 9, 2, 22, -9, 9)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_no_row_of_a_tile_sees_is_never_read(tile, sizes, poison):
    tensors = given_tensors((3, 5))
    seen = allowed(tile)
    right = of_kernel(Cutting(sizes), tile, tensors, None)
    q, k, v, dout = (x.clone() for x in tensors)
    q[:, :, ~seen.any(1)] = dout[:, :, ~seen.any(1)] = poison
    k[:, :, ~seen.any(0)] = v[:, :, ~seen.any(0)] = poison
    found = of_kernel(Cutting(sizes), tile, [q, k, v, dout], None)
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))


def rows_alone(tile) -> list[bool]:
    return [piece.masked for piece in bands.pieces(tile, bands.Sizes())]


def test_narrow_bands_are_masked_whole_and_of_wide_ones_only_the_edges():
    n = 4096
    assert all(rows_alone((0, n, 0, n, 0, 511)))
    wide = rows_alone((2048, n, 0, n, 0, 2047))
    assert wide == [True, False, True] * 2
    assert rows_alone((0, n, 0, n, -n, n)) == [False]
    assert rows_alone((0, n, 0, n, 0, n)) == [True, *[False, True] * 3]


def test_a_band_computes_little_more_than_it_allows():
    """Pairs of all calls over allowed pairs: what a block has too many, and nothing else."""
    for width, most in ((256, 1.26), (512, 1.13), (1024, 1.07), (2048, 1.05)):
        tile = (width, 8192, 0, 8192, 0, width - 1)
        computed = 0
        for piece in bands.pieces(tile, bands.Sizes()):
            blocks = bands.row_blocks(piece, 64, torch.float32) if piece.masked else [piece]
            computed += sum((b[1] - b[0]) * (b[3] - b[2]) for b in blocks)
        assert 1 <= computed / int(rg.count(np.array([tile]))[0]) <= most


def test_bfloat16_bands_are_as_exact_as_float32_but_for_their_last_rounding():
    tile = (0, LENGTH, 0, LENGTH, -1, 7)
    narrow = [x.bfloat16() for x in given_tensors((4, 4))]
    block, step = Block(*narrow[:3], 0.4), StepTiles(np.array([[0, -1, *tile]], np.int64))
    (part,) = AtenCpu().forward(block, step)
    right, _, _ = attention(*(x.double().numpy() for x in narrow[:3]), allowed=allowed(tile), scale=0.4)
    assert part.out.dtype == torch.float32
    np.testing.assert_allclose(part.out.numpy(), right, rtol=0, atol=2e-6)


class Flagged(LoweredKernel):
    """A kernel that knows full and causal rectangles only, by the op's flag."""

    name = "flagged"

    def refuses(self, call: Call) -> str | None:
        return None

    def partial(self, block: Block, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return aten_cpu._forward(*block[:3], is_causal=causal, scale=block.scale)

    def partial_backward(self, block: Block, saved: Saved, *, causal: bool) -> tuple[torch.Tensor, ...]:
        given = (saved.dout, *block[:3], saved.out, saved.lse.contiguous())
        return aten_cpu._backward(*given, 0.0, causal, scale=block.scale)


@given(tiles())
def test_two_kinds_of_rectangles_are_enough_for_any_band(tile):
    tensors = given_tensors((4, 4))
    found, right = (of_kernel(kernel, tile, tensors, None) for kernel in (Flagged(), AtenCpu()))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
