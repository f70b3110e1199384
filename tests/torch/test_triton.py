"""`triton`, interpreted on the CPU in float32: `make triton-check`, which takes minutes. Skipped elsewhere."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringspun import Causal, Contiguous, Striped, Window, Zigzag
from ringspun.core import regions as rg
from ringspun.testing.candidates import LocalKernel, OnRing
from ringspun.testing.conformance import certify
from ringspun.testing.report import FAILED
from ringspun.testing.suite import PROPERTIES
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.kernels import Eager, Kernel, triton
from ringspun.torch.kernels.accumulate import Result, start
from ringspun.torch.kernels.base import Block, Saved, StepTiles
from ringspun.torch.sums import RowSum

pytestmark = [
    pytest.mark.skipif(
        not triton.interpreted(), reason="Triton must be installed, and TRITON_INTERPRET=1 set: make triton-check"
    ),
    pytest.mark.timeout(600),
]
SMALL = triton.Launch(16, 16)
UNEVEN = triton.Launches(triton.Launch(32, 16), triton.Launch(16, 32), triton.Launch(16, 32))
KERNEL = triton.Triton(triton.Launches(SMALL, SMALL, SMALL))
FASTER = triton.Triton(triton.Launches(*[triton.Launch(32, 32)] * 3))
"""An interpreter's time goes by programs, not by how much each does."""
REFUSED = {"bias", "together"}
"""Properties of which it does not do every case."""
LENGTH = 41


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_conformance_suite(name):
    report = certify(LocalKernel(KERNEL), dtype="float32", properties=[name])
    assert not report.properties(FAILED), str(report)
    assert bool(report.properties("passed")) == (name not in REFUSED), str(report)


@pytest.mark.parametrize(
    ("ranks", "layout", "options"),
    [
        (2, Zigzag(), {}),
        (3, Striped(), {}),
        (4, Contiguous(), {"route": "direct"}),
        (2, Zigzag(), {"route": "all_gather(1)"}),
        (3, Zigzag(), {"backward": "queries"}),
    ],
    ids=str,
)
def test_rings(ranks, layout, options):
    """The state is kept over steps, of some heads at a time, with queries or keys on their way in backward."""
    some = ["causal", "rows without keys", "grouped heads", "sinks"]
    context = ContextParallel(Loopback(ranks), layout=layout, **options)
    report = certify(OnRing(context, kernel=FASTER), dtype="float32", properties=some)
    assert report.properties("passed") == tuple(name for name in PROPERTIES if name in some), str(report)


@st.composite
def tables(draw) -> np.ndarray:
    """Up to three tiles, disjoint in their keys; for some batch rows; any band, empty ones too."""
    edges = draw(st.lists(st.integers(0, LENGTH), min_size=4, max_size=4, unique=True).map(sorted))
    rows = []
    for k0, k1 in pairwise(edges):
        q0, q1 = sorted(draw(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH))))
        lo = draw(st.integers(-LENGTH, LENGTH) | st.just(-rg.UNBOUNDED))
        hi = draw(st.integers(max(lo, -LENGTH), LENGTH) | st.just(rg.UNBOUNDED))
        rows.append([*draw(st.sampled_from(((0, -1), (0, 1), (1, 2)))), q0, q1, k0, k1, lo, hi])
    return np.array(rows, np.int64)


def of_steps(kernel: Kernel, block: Block, dout: Tensor, dlse: Tensor, steps: list[StepTiles]) -> dict[str, Tensor]:
    """What several steps with one block of keys give."""
    shape = dout.shape
    state = start(kernel, Result(shape, torch.float32, dout.device, lambda s, t: dout.new_full(tuple(s), torch.nan)))
    for tiles in steps:
        state.step(block, tiles, slice(0, shape[1]))
    out, lse = state.finish(None, [slice(0, shape[2])])
    saved = Saved(out, lse, dout, dlse, (out * dout).sum(-1) - dlse)
    sums = [RowSum(x.shape, torch.float32, lambda s, t: dout.new_empty(tuple(s))) for x in block[:3]]
    for tiles in steps:
        for g in kernel.backward(block, saved, tiles):
            for total, rows, part in zip(sums, (g.q_rows, g.k_rows, g.k_rows), (g.dq, g.dk, g.dv), strict=True):
                total.add(rows, part)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *(s.sum for s in sums)), strict=True))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(tables(), min_size=1, max_size=2),
    st.sampled_from(((2, 2), (4, 2), (3, 1))),
    st.sampled_from(((16, 16), (24, 40), (64, 16), (1, 5), (128, 128))),
    st.sampled_from((0.3, -0.3, 0.0)),
    st.sampled_from((0.0, 1.5)),
    st.sampled_from((KERNEL, triton.Triton(UNEVEN))),
    st.integers(0, 99),
)
def test_random_bands_equal_eager(steps, heads, sizes, scale, softcap, kernel, seed):
    """Memory of the state begins as NaN; queries and keys have other strides than their shapes say."""
    generator = torch.Generator().manual_seed(seed)

    def random(n: int, size: int) -> Tensor:
        return torch.randn(2, LENGTH, n, size, generator=generator).transpose(1, 2)

    block = Block(random(heads[0], sizes[0]), random(heads[1], sizes[0]), random(heads[1], sizes[1]), scale, softcap)
    dout, dlse = random(heads[0], sizes[1]), random(heads[0], 1)[..., 0]
    tiles = [StepTiles(np.concatenate([table, table[:0]])) for table in steps]
    if len(tiles) == 2:  # the second step meets other keys: what it sees of the first one's is taken from it
        edge = LENGTH // 2
        first, second = (t.tiles.copy() for t in tiles)
        first[:, 5], second[:, 4] = np.minimum(first[:, 5], edge), np.maximum(second[:, 4], edge)
        tiles = [StepTiles(first), StepTiles(second)]
    found, right = (of_steps(one, block, dout, dlse, tiles) for one in (kernel, Eager()))
    for name, x in found.items():
        size = 1 + right[name].masked_fill(right[name].isinf(), 0).abs().max()
        torch.testing.assert_close(x, right[name], rtol=0, atol=2e-6 * float(size), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("offset", range(SMALL.rows))
def test_bounds_at_every_offset_of_a_block(offset):
    """A block taken for one that all rows see, but for one pair: bounds meet the edges of blocks at every distance."""
    q, k, v, dout = (torch.randn(1, 1, 64, 16) for _ in range(4))
    dlse = torch.randn(1, 1, 64)
    for lo, hi in ((-offset, 63), (-63, offset), (offset - 8, offset + 33)):
        steps = [StepTiles(np.array([[0, -1, 0, 64, 0, 64, lo, hi]]))]
        found, right = (of_steps(one, Block(q, k, v, 0.25), dout, dlse, steps) for one in (KERNEL, Eager()))
        for name, x in found.items():
            torch.testing.assert_close(x, right[name], rtol=0, atol=1e-5, msg=f"{lo} to {hi}: {name}")


def test_queries_of_another_length_than_keys_and_one_row():
    for q_len, k_len in ((1, 33), (33, 1), (17, 16)):
        q, k, v = torch.randn(1, 2, q_len, 16), torch.randn(1, 1, k_len, 16), torch.randn(1, 1, k_len, 8)
        dout, dlse = torch.randn(1, 2, q_len, 8), torch.randn(1, 2, q_len)
        steps = [StepTiles(np.array([[0, -1, 0, q_len, 0, k_len, 1 - k_len, q_len - 1]]))]
        found, right = (of_steps(one, Block(q, k, v, 0.25), dout, dlse, steps) for one in (KERNEL, Eager()))
        for name, x in found.items():
            torch.testing.assert_close(x, right[name], rtol=0, atol=2e-5 if name[0] == "d" else 2e-6, msg=name)


def test_the_blocks_that_devices_take_give_the_same():
    """Interpreted with small blocks elsewhere, for speed."""
    q, k, v = torch.randn(1, 2, 150, 64), torch.randn(1, 1, 150, 64), torch.randn(1, 1, 150, 64)
    dout, dlse = torch.randn(1, 2, 150, 64), torch.randn(1, 2, 150)
    steps = [StepTiles(np.array([[0, -1, 3, 150, 0, 150, -2, 70]]))]
    right = of_steps(Eager(), Block(q, k, v, 0.1), dout, dlse, steps)
    for table in (triton.WIDE_BLOCKS, triton.NARROW_BLOCKS, triton.FLOAT32_BLOCKS):
        for _, launches in table:
            for name, x in of_steps(triton.Triton(launches), Block(q, k, v, 0.1), dout, dlse, steps).items():
                torch.testing.assert_close(x, right[name], rtol=0, atol=1e-5, msg=f"{launches}: {name}")


@pytest.mark.parametrize("mask", [Causal(), Window(700)], ids=str)
def test_the_same_bits_again_and_on_every_ring_where_asked(mask):
    kernel = triton.Triton(triton.Launches(*[triton.Launch(128, 128)] * 3))
    x = {n: torch.randn(1, 1, 1200, 16, generator=torch.Generator().manual_seed(i)) for i, n in enumerate("qkvd")}

    def bits(ranks: int) -> list[Any]:
        part = ContextParallel(Loopback(ranks), layout=Contiguous(), deterministic="across_rings").partition(1200)
        q, k, v, d = (part.shard(one, dim=2).requires_grad_() for one in x.values())
        out = part.plan(mask).attention(q, k, v, kernel=kernel)
        return [part.gather(y, dim=2) for y in (out.detach(), *torch.autograd.grad(out, (q, k, v), d))]

    first = bits(1)
    for ranks in (1, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(first, bits(ranks), strict=True)), ranks
