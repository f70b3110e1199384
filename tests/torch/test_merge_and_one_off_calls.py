"""The public functions beside plans: `merge`, `blockwise_attention`, `ring_attention`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringspun import Causal, Documents, Full, Striped, Window, Zigzag
from ringspun.core.reference import attention_with_gradients
from ringspun.core.softmax import merge as core_merge
from ringspun.errors import DtypeError, RingspunError, ShapeError
from ringspun.testing.cases import all_masks
from ringspun.torch import ContextParallel, Loopback, blockwise_attention, merge, ring_attention
from ringspun.torch.kernels import Eager
from ringspun.torch.kernels.base import Block, Rows, Saved, StepTiles
from ringspun.torch.softmax import RunningSoftmax

INF = math.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def partial(seed: int, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(2, 3, 7, 5, generator=generator, dtype=torch.float64).to(dtype)
    lse = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    return out, lse.to(torch.float64 if dtype == torch.float64 else torch.float32)


def empty(like: Tensor, marker: float = -INF, content: float = 0.0) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.full_like(like, content), torch.full(like.shape[:-1], marker, dtype=lse_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("marker", [-INF, INF])
def test_N1_merge_of_two_parts_that_saw_no_key(marker, dtype):
    """-inf minus -inf is NaN, and the NaN survives every later merge."""
    x, lse = partial(0, dtype)
    nothing = empty(x, marker)
    out, out_lse = merge(*nothing, *nothing)
    assert torch.equal(out, torch.zeros_like(x)) and torch.equal(out_lse, torch.full_like(lse, -INF))
    for merged in (merge(out, out_lse, x, lse), merge(x, lse, out, out_lse), merge(x, lse, *nothing)):
        assert torch.equal(merged[0], x) and torch.equal(merged[1], lse)  # bit for bit


def test_N1_an_empty_part_may_hold_anything():
    """A kernel leaves garbage in rows that it did not write."""
    x, lse = partial(0)
    for marker in (-INF, INF):
        garbage = empty(x, marker, content=math.nan)
        for merged in (merge(*garbage, x, lse), merge(x, lse, *garbage)):
            assert torch.equal(merged[0], x) and torch.equal(merged[1], lse)


def test_N1_gradients_past_an_empty_part_are_finite():
    """where() hides a NaN in forward and lets it through in backward."""
    x, lse = (t.requires_grad_() for t in partial(0))
    other, none = (t.requires_grad_() for t in empty(x))
    out, out_lse = merge(x, lse, other, none)
    (out.square().sum() + out_lse.sum()).backward()
    assert torch.equal(x.grad, 2 * x.detach()) and torch.equal(lse.grad, torch.ones_like(lse))
    assert torch.equal(other.grad, torch.zeros_like(x)) and torch.equal(none.grad, torch.zeros_like(lse))
    both = [t.requires_grad_() for part in (empty(x), empty(x)) for t in part]
    out, out_lse = merge(*both)
    grads = torch.autograd.grad(out.sum() + out_lse.masked_fill(out_lse == -INF, 0.0).sum(), both, allow_unused=True)
    assert all(g is None or torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("top", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_N1_gradients_past_an_empty_part_are_finite_wherever_the_other_lies(top, dtype):
    """exp overflows where the scores of the other part are very low, and 0 * inf is NaN in backward."""
    x, lse = torch.ones(1, 2, dtype=dtype), torch.full((1,), top, dtype=dtype)
    for marker in (-INF, INF):
        for empty_first in (False, True):
            parts = [t.requires_grad_() for t in (x.clone(), lse.clone(), *empty(x, marker))]
            order = [*parts[2:], *parts[:2]] if empty_first else parts
            out, out_lse = merge(*order)
            grads = torch.autograd.grad(2 * out.sum() + 3 * out_lse.sum(), parts)
            assert torch.equal(out, x) and torch.equal(out_lse, lse)
            assert [g.flatten().tolist() for g in grads] == [[2, 2], [3], [0, 0], [0]]


def test_N1_a_ring_in_which_a_rank_sees_nothing_at_most_steps():
    """Causal and contiguous: rank 0 sees an empty block on 3 of 4 steps."""
    plan = ContextParallel(Loopback(4)).plan(8, Causal())
    for dtype in DTYPES:
        x = torch.randn(1, 2, 8, 4).to(dtype)
        out, lse = plan.attention(x, x, x, return_lse=True)
        assert out.isfinite().all() and lse.isfinite().all()


def near(values):
    """Equal but for numbers so small that float32 can hardly hold them."""
    return pytest.approx(values, rel=1e-6, abs=1e-40)


@pytest.mark.parametrize("b", [100.0, -100.0, 1e4, -1e4])
def test_N4_one_part_far_above_the_other(b):
    """log(1 + exp(b - a)) overflows float32 above 88.7."""
    a = 0.0
    o = [torch.full((1, 1), value, requires_grad=True) for value in (1.0, 2.0)]
    lses = [torch.tensor([value], requires_grad=True) for value in (a, b)]
    out, lse = merge(o[0], lses[0], o[1], lses[1])
    assert lse.item() == near(max(a, b)) and out.item() == near(2.0 if b > a else 1.0)
    grads = torch.autograd.grad(out.sum() + lse.sum(), [*o, *lses])
    winner = int(b > a)
    assert [g.item() for g in grads] == near([1.0 - winner, 0.0 + winner, 1.0 - winner, 0.0 + winner])


@pytest.mark.parametrize("kernel", ["aten_cpu", "eager"])
@pytest.mark.parametrize("top", [100.0, -100.0, 1e4, -1e4])
def test_N4_through_the_ring(top, kernel):
    """Scores 0 in one block and far off in the other."""
    plan = ContextParallel(Loopback(2)).plan(2, Full())
    q = torch.tensor([1.0, 1.0]).view(1, 1, 2, 1).requires_grad_()
    k = torch.tensor([0.0, top]).view(1, 1, 2, 1).requires_grad_()
    v = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1).requires_grad_()
    out, lse = plan.attention(q, k, v, scale=1.0, return_lse=True, kernel=kernel)
    assert lse.flatten().tolist() == near([max(0.0, top)] * 2)
    assert out.flatten().tolist() == near([2.0 if top > 0 else 1.0] * 2)
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert grads[2].flatten().tolist() == near([0.0, 2.0] if top > 0 else [2.0, 0.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_is_the_core_s_monoid(dtype):
    parts = [partial(seed, dtype) for seed in range(3)]
    found = merge(*parts[0], *parts[1])
    right = core_merge(*(t.double().numpy() for part in parts[:2] for t in part))
    bar = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for x, y in zip(found, right, strict=True):
        np.testing.assert_allclose(x.double().numpy(), y, rtol=bar, atol=bar)
    assert found[0].dtype == dtype and found[1].dtype == parts[0][1].dtype
    left = merge(*merge(*parts[0], *parts[1]), *parts[2])
    turned = merge(*parts[0], *merge(*parts[1], *parts[2]))
    for x, y in zip(left, turned, strict=True):
        torch.testing.assert_close(x, y, rtol=4 * bar, atol=4 * bar)


def test_merge_by_finite_differences():
    parts = [t.requires_grad_() for seed in (0, 1) for t in partial(seed)]
    assert torch.autograd.gradcheck(merge, parts)


def test_merge_refuses_shapes_that_do_not_fit():
    x, lse = partial(0)
    for wrong in ((x, lse, x[:1], lse[:1]), (x, lse[..., None], x, lse[..., None]), (x, lse, x, lse[:, :1])):
        with pytest.raises(ShapeError, match=r"merge must get two out \[..., T, D\] and two lse \[..., T\]; got"):
            merge(*wrong)


def test_N1_the_running_merge_keeps_rows_that_nobody_has_seen_yet():
    """A row empty so far, met by an empty part, then by a real one."""
    x, lse = partial(0)
    nothing = empty(x)
    running = RunningSoftmax(x.shape, x.dtype, x.device)
    some = (slice(None), slice(None), slice(2, 5))
    for out, out_lse in (nothing, nothing, (x, lse), nothing):
        running.add(Rows(slice(0, None), some[2]), out[some].clone(), out_lse[some])
    assert torch.equal(running.out[some], x[some]) and torch.equal(running.lse[some], lse[some])
    assert torch.equal(running.out[:, :, 5:], nothing[0][:, :, 5:]) and (running.lse[:, :, :2] == -INF).all()
    whole = RunningSoftmax(x.shape, x.dtype, x.device)
    whole.add(None, *partial(1))
    whole.add(None, x.clone(), lse)
    for a, b in zip((whole.out, whole.lse), merge(*partial(1), x, lse), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-15)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 7), st.booleans()), max_size=8))
def test_the_running_merge_takes_parts_of_rows_in_any_order(parts):
    """What is added where nothing was yet is written, not merged: gaps stay empty, and no part is lost or doubled."""
    x, _ = partial(0)
    running, expected = RunningSoftmax(x.shape, x.dtype, x.device), empty(x)
    for seed, (start, length, first_batch_row) in enumerate(parts):
        part = tuple(t.clone() for t in empty(x))
        rows = (slice(0, 1 if first_batch_row else None), slice(None), slice(start, min(start + length, x.shape[2])))
        for mine, given_part in zip(part, partial(seed), strict=True):
            mine[rows] = given_part[rows]
        expected = merge(*expected, *part)
        running.add(Rows(rows[0], rows[2]), part[0][rows], part[1][rows])
    torch.testing.assert_close(running.out, expected[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(running.lse, expected[1], rtol=0, atol=1e-14)


def test_the_running_merge_keeps_its_dtype():
    """Whatever parts come in, the first one included, which is taken as it is where it is whole."""
    x, lse = partial(0)
    running = RunningSoftmax(x.shape, torch.float32, x.device)
    for _ in range(2):
        running.add(None, x.bfloat16(), lse.clone())
        assert running.out.dtype == running.lse.dtype == torch.float32
    torch.testing.assert_close(running.out, x.bfloat16().float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(running.lse, (lse + math.log(2)).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_sink_is_one_more_key_of_value_zero(dtype):
    """Per head, also for a row without keys; a sink of -inf is none, bit for bit."""
    (x, lse), sinks = partial(0, dtype), torch.tensor([0.5, -INF, -2.0], dtype=dtype)
    x[0, :, 1], lse[0, :, 1] = 0.0, -INF
    running = RunningSoftmax(x.shape, dtype, x.device)
    running.add(Rows(slice(0, None), slice(0, 6)), x[:, :, :6].clone(), lse[:, :, :6].clone())
    running.add_sinks(sinks.double(), slice(0, None))
    x[:, :, 6], lse[:, :, 6] = 0.0, -INF
    expected = merge(x, lse, torch.zeros_like(x), sinks[None, :, None].expand_as(lse))
    for found, right in zip((running.out, running.lse), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, right, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert torch.equal(running.out[:, 1], x[:, 1]) and torch.equal(running.lse[:, 1], lse[:, 1])


# -- blockwise_attention ---------------------------------------------------------------------------------------------


def tensors(seq_len: int, heads=4, kv_heads=2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seq_len)
    sizes = ((2, heads, seq_len, 6), (2, kv_heads, seq_len, 6), (2, kv_heads, seq_len, 5), (2, heads, seq_len, 5))
    return [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


@pytest.mark.parametrize("block_size", [1, 5, 16, 512])
def test_blockwise_attention_equals_the_oracle(block_size):
    for seq_len in (1, 2, 23):
        q, k, v, dout = tensors(seq_len)
        for mask in all_masks(seq_len) if block_size == 5 else (Causal(), Full(), Window(4)):
            out = blockwise_attention(q, k, v, mask=mask, block_size=block_size)
            grads = torch.autograd.grad(out, (q, k, v), dout)
            ref = attention_with_gradients(
                *(t.detach().numpy() for t in (q, k, v, dout)), allowed=mask.as_array(seq_len)
            )
            for x, y in zip((out.detach(), *grads), (ref.out, ref.dq, ref.dk, ref.dv), strict=True):
                np.testing.assert_allclose(x.numpy(), y, rtol=0, atol=1e-12)


def test_blockwise_attention_is_causal_unless_told_otherwise_and_scales():
    q, k, v, _ = tensors(11)
    causal = blockwise_attention(q, k, v)
    assert torch.equal(causal, blockwise_attention(q, k, v, mask=Causal()))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(blockwise_attention(q, k, v, scale=0.2), theirs, rtol=0, atol=1e-13)


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that any operation makes."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            self.entries = max(self.entries, x.numel() if isinstance(x, Tensor) else 0)
        return result


def test_blockwise_attention_never_holds_more_scores_than_a_block():
    """Forward and backward, where a dense kernel would hold S x S."""
    seq_len, block_size, heads = 96, 8, 2
    plan = ContextParallel(Loopback(1)).plan(seq_len, Causal())
    tiles = StepTiles(plan.schedule.forward.tiles_of(0))
    q, k, v, dout = (torch.randn(1, heads, seq_len, 4) for _ in range(4))
    block, kernel = Block(q, k, v, 0.5), Eager(block_size)
    out, lse = plan.attention(q, k, v, scale=0.5, return_lse=True)
    saved = Saved(out, lse, dout, None, (out * dout).sum(-1))
    with Largest() as seen:
        n_forward = sum(1 for _ in kernel.forward(block, tiles))
        n_backward = sum(1 for _ in kernel.backward(block, saved, tiles))
    blocks = seq_len // block_size
    assert (n_forward, n_backward) == (blocks, blocks * (blocks + 1) // 2)
    assert seen.entries <= max(heads * block_size**2, q.numel())  # q.numel(): views of the inputs themselves


def test_blockwise_attention_refuses_what_does_not_fit():
    q, k, v, _ = tensors(7)
    with pytest.raises(ShapeError, match=r"q must be \[B, H, T, D\]"):
        blockwise_attention(q[0], k, v)
    with pytest.raises(ShapeError, match=r"q must be \[B, H, T, D\]"):
        blockwise_attention(q[0, 0], k, v)
    with pytest.raises(ShapeError, match="q, k and v must hold 7 tokens"):
        blockwise_attention(q, k[:, :, 1:], v)
    with pytest.raises(DtypeError, match=r"q must be floating point .*got torch.int64"):
        blockwise_attention(q.long(), k.long(), v.long())
    with pytest.raises(ValueError, match="block_size must be at least 1; got 0"):
        blockwise_attention(q, k, v, block_size=0)


# -- ring_attention --------------------------------------------------------------------------------------------------


def test_ring_attention_without_torch_distributed_is_plain_attention():
    q, k, v, dout = tensors(9)
    out, lse = ring_attention(q, k, v, return_lse=True)
    ref = attention_with_gradients(*(t.detach().numpy() for t in (q, k, v, dout)), allowed=Causal().as_array(9))
    np.testing.assert_allclose(out.detach().numpy(), ref.out, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse.detach().numpy(), ref.lse, rtol=0, atol=1e-13)


def test_ring_attention_on_a_loopback_with_every_option():
    q, k, v, dout = tensors(13)
    docs = Documents([4, 6], [0, 5])
    for layout in (Zigzag(), Striped()):
        ring = Loopback(3)
        part = ContextParallel(Loopback(3), layout=layout).partition(13)
        mine = [part.shard(t, dim=2) for t in (q, k, v)]
        options = {"group": ring, "mask": Causal() & docs, "layout": layout, "scale": 0.3}
        out, lse = ring_attention(*mine, seq_len=13, return_lse=True, **options)
        again = ring_attention(*mine, **options)
        assert torch.equal(out, again) and ring.counts.messages
        ref = attention_with_gradients(
            *(t.detach().numpy() for t in (q, k, v, dout)), allowed=(Causal() & docs).as_array(13), scale=0.3
        )
        grads = torch.autograd.grad(part.gather(again, dim=2), (q, k, v), dout)
        found = (part.gather(out, dim=2), part.gather(lse, dim=2), *grads)
        for x, y in zip(found, (ref.out, ref.lse, ref.dq, ref.dk, ref.dv), strict=True):
            np.testing.assert_allclose(x.detach().numpy(), y, rtol=0, atol=1e-12)


def test_ring_attention_finds_its_plan_again():
    q, k, v, _ = tensors(9)
    ring = Loopback(2)
    ring_attention(q, k, v, group=ring)
    before = dict(ring.counts.messages)
    ring_attention(q, k, v, group=ring)
    assert {ends: 2 * n for ends, n in before.items()} == dict(ring.counts.messages)
    other = Loopback(2)
    ring_attention(q, k, v, group=other)  # another ring of the same size is another ring
    assert dict(other.counts.messages) == before


def test_ring_attention_refuses_what_does_not_fit():
    q, k, v, _ = tensors(9)
    with pytest.raises(ShapeError, match=r"q must be \[B, H, T, D\]; got shape \(4, 9, 6\)"):
        ring_attention(q[0], k[0], v[0])
    with pytest.raises(DtypeError, match="q must be a tensor"):
        ring_attention(q.detach().numpy(), k, v)
    with pytest.raises(ShapeError, match="must hold 8 tokens in dim 2"):
        ring_attention(q, k, v, group=Loopback(3), seq_len=8)
    with pytest.raises(RingspunError, match="group must be a process group"):
        ring_attention(q, k, v, group="world")
