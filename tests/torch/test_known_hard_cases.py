"""Faults that others have met, by their id in the list of known hard cases; R ranks in one thread."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from on_ranks import STRIDED
from torch import Tensor

from ringspun import Causal, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.core.reference import attention
from ringspun.testing.cases import Case, Shape, inputs, reference
from ringspun.testing.comparison import TENSORS, errors, judge, rms
from ringspun.testing.torch import rounded, run_ring
from ringspun.torch import ContextParallel, Loopback, Plan, blockwise_attention, merge, ring_attention
from ringspun.torch.buffers import BufferPool

KERNELS = ("aten_cpu", "eager")
LAYOUTS = (Contiguous(), Zigzag(), Striped())
by_kernel = pytest.mark.parametrize("kernel", KERNELS)
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def check(case: Case, kernel: str | None = None) -> None:
    given = inputs(case)
    found = errors(run_ring(case, given, kernel=kernel), reference(case, given))
    assert judge(case.dtype, [found], [])[0], f"{case}: {found.worst}"


def seen_mean(ranks: int, layout, mask, seq_len: int, kernel: str) -> list[float]:
    """q = 0 and v = 0, 1, 2, ...: each row is the mean of the positions that it sees."""
    plan = ContextParallel(Loopback(ranks), layout=layout).plan(seq_len, mask)
    v = torch.arange(float(seq_len), dtype=torch.float64).view(1, 1, -1, 1)
    zero = torch.zeros_like(plan.partition.shard(v, dim=2))
    out = plan.attention(zero, zero, plan.partition.shard(v, dim=2), kernel=kernel)
    return plan.partition.gather(out, dim=2).flatten().tolist()


# -- N · numerics ----------------------------------------------------------------------------------------------------


@by_layout
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_N5_bfloat16_error_does_not_grow_with_the_ring(mask, layout):
    """Partials rounded to bf16 at every hop: rms at R=2 and R=8 at most twice that at R=1, every tensor."""
    shape = Shape(batch=1, heads=4, kv_heads=2, head_size=32, value_size=32)
    found: dict[int, list] = {1: [], 2: [], 8: []}
    for seed in range(2):
        case = Case(1, 640, mask, layout, dtype="bfloat16", shape=shape, seed=seed)
        given = rounded(case, inputs(case))
        ref = reference(case, given)
        for ranks, many in found.items():
            many.append(errors(run_ring(replace(case, ranks=ranks), given), ref))
    alone = rms(found.pop(1))
    for ranks, many in found.items():
        assert all(rms(many)[name] <= 2 * alone[name] for name in TENSORS), (ranks, rms(many), alone)


@by_kernel
def test_N5_through_16_layers(kernel):
    """The loss looks fine while the gradients blow up."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3, 16, 16, generator=generator, dtype=torch.float64) / 4 for _ in range(16)]
    start = torch.randn(1, 2, 64, 16, generator=generator, dtype=torch.float64).bfloat16().double()
    upstream = torch.randn(1, 2, 64, 16, generator=generator, dtype=torch.float64).bfloat16().double()

    def gradient(ranks: int, dtype: torch.dtype) -> Tensor:
        plan = ContextParallel(Loopback(ranks)).plan(64, Causal())
        x = start.to(dtype, copy=True).requires_grad_()
        hidden = plan.partition.shard(x, dim=2)
        for w in weights:
            normed = torch.nn.functional.rms_norm(hidden, (16,))
            hidden = hidden + plan.attention(*(normed @ m.to(dtype) for m in w), kernel=kernel)
        plan.partition.gather(hidden, dim=2).backward(upstream.to(dtype))
        return x.grad.double()

    right = gradient(1, torch.float64)
    torch.testing.assert_close(gradient(8, torch.float64), right, rtol=1e-11, atol=1e-11)
    alone, ring = ((gradient(ranks, torch.bfloat16) - right).square().mean().sqrt() for ranks in (1, 8))
    assert ring <= 2 * alone, (ring, alone)


@by_kernel
@by_layout
def test_N7_rows_without_keys_have_one_rule(layout, kernel):
    """NaN, a mean of v, or what the backend likes: here out 0, lse -inf and gradients 0, on every kernel."""
    empty = [4, 5, 6, 7]
    plan = ContextParallel(Loopback(3), layout=layout).plan(8, Documents([4]))
    part = plan.partition
    x = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)]
    out, lse = plan.attention(*(part.shard(t, dim=2) for t in x), return_lse=True, kernel=kernel)
    out, lse = part.gather(out, dim=2), part.gather(lse, dim=2)
    assert torch.equal(out[:, :, empty], torch.zeros(1, 2, 4, 4)) and (lse[:, :, empty] == -math.inf).all()
    assert lse[:, :, :4].isfinite().all() and (out[:, :, :4] != 0).all()
    grads = torch.autograd.grad(out, x, torch.randn_like(out))
    for g in grads:
        assert torch.equal(g[:, :, empty], torch.zeros(1, 2, 4, 4)) and g.isfinite().all() and (g[:, :, :4] != 0).any()


@by_kernel
def test_N7_a_mask_that_allows_nothing(kernel):
    """Not one tile: identity everywhere, zero gradients, no message."""
    ring = Loopback(3)
    plan = ContextParallel(ring).plan(8, Documents([]))
    x = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)]
    out, lse = plan.attention(*x, return_lse=True, kernel=kernel)
    assert torch.equal(out, torch.zeros_like(out)) and (lse == -math.inf).all()
    assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(out.sum(), x))
    assert not ring.counts.messages


@by_kernel
@by_layout
def test_N8_a_row_without_keys_spoils_no_weight(layout, kernel):
    """One masked row outside the loss makes every weight gradient NaN: 0 times NaN, spread by a shared projection."""
    gap, seq_len = 5, 8
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(seq_len, 6, generator=generator, dtype=torch.float64)
    upstream = torch.randn(1, 2, seq_len, 3, generator=generator, dtype=torch.float64)
    upstream[:, :, gap] = 0

    def weight_gradients(rows: list[int], ranks: int, mask) -> tuple[Tensor, Tensor]:
        weight = torch.linspace(-1, 1, 6 * 18, dtype=torch.float64).view(6, 18).requires_grad_()
        plan = ContextParallel(Loopback(ranks), layout=layout).plan(len(rows), mask)
        x = tokens[rows].requires_grad_()
        q, k, v = (x @ weight).view(1, len(rows), 3, 2, 3).permute(2, 0, 3, 1, 4)
        out = plan.attention(*(plan.partition.shard(t, dim=2) for t in (q, k, v)), kernel=kernel)
        plan.partition.gather(out, dim=2).backward(upstream[:, :, rows])
        return weight.grad, x.grad

    others = [r for r in range(seq_len) if r != gap]
    found, of_tokens = weight_gradients(list(range(seq_len)), 2, Causal() & Documents([gap, 2], [0, gap + 1]))
    deleted, _ = weight_gradients(others, 1, Causal() & Documents([gap, 2]))
    assert found.isfinite().all() and torch.equal(of_tokens[gap], torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(found, deleted, rtol=0, atol=1e-13)


@by_kernel
@by_layout
def test_N12_same_inputs_same_bits(layout, kernel):
    """Gradients that differ from run to run, or with the order in which messages arrive."""
    case = Case(4, 45, Causal() & Documents([20, 22]), layout, dtype="float32")
    given = rounded(case, inputs(case))
    context = ContextParallel(Loopback(4, seed=1), layout=layout)
    runs = [run_ring(case, given, context, kernel=kernel) for _ in range(3)]  # buffers of the runs before, too
    runs += [run_ring(replace(case, seed=seed), given, kernel=kernel) for seed in (2, 3)]
    assert all(np.array_equal(runs[0][name], run[name]) for run in runs[1:] for name in TENSORS)


class Poisoned(BufferPool):
    """Buffers that hold something already, new or used."""

    def __init__(self, dtype: torch.dtype, value: float) -> None:
        super().__init__()
        self.dtype, self.value, self.leases = dtype, value, 0

    def lease(self, n_bytes: int, device: torch.device) -> Tensor:
        buffer = super().lease(n_bytes, device)
        buffer.view(self.dtype).fill_(self.value)
        self.leases += 1
        return buffer


@by_kernel
@by_layout
def test_N13_what_buffers_hold_at_first_is_never_read(layout, kernel):
    """Rows that nobody wrote held allocator garbage, and dK became NaN."""
    case = Case(3, 31, Causal() & Documents([9, 1, 13], [1, 12, 14]), layout)
    given, found = inputs(case), []
    for value in (math.nan, 0.0, 1e30):
        context = ContextParallel(Loopback(3), layout=layout)
        context.pool = Poisoned(torch.float64, value)
        found += [run_ring(case, given, context, kernel=kernel) for _ in range(2)]
        assert context.pool.leases
    error = errors(found[0], reference(case, given))
    assert judge("float64", [error], [])[0], error.worst
    assert all(np.array_equal(found[0][name], other[name]) for other in found[1:] for name in TENSORS)


@pytest.fixture
def filled_memory():
    """torch fills all memory that it hands out uninitialised: NaN, and the largest integer in bytes."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@by_kernel
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_N13_nor_what_any_new_tensor_holds(filled_memory, dtype, kernel):
    """Not the pool's buffers alone: accumulators, lse, delta, empty gradients."""
    for layout in LAYOUTS:
        case = Case(3, 31, Causal() & Documents([9, 1, 13], [1, 12, 14]), layout, dtype=dtype)
        found = run_ring(case, rounded(case, inputs(case)), kernel=kernel)
        assert (
            all(np.isfinite(found[name]).all() for name in TENSORS if name != "lse")
            and not np.isnan(found["lse"]).any()
        )


# -- M · masks -------------------------------------------------------------------------------------------------------


@by_kernel
def test_M2_a_window_sees_the_query_and_size_minus_one_before_it(kernel):
    """One token too many: Hugging Face counts the query in the window, flash-attention does not."""
    for ranks, layout in ((1, Contiguous()), (2, Zigzag()), (3, Striped())):
        rows = seen_mean(ranks, layout, Window(4), 8, kernel)
        assert rows == pytest.approx([0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5], abs=1e-14)
        assert seen_mean(ranks, layout, Causal() & Window(4), 8, kernel) == pytest.approx(rows, abs=0)
        assert seen_mean(ranks, layout, Window(1), 8, kernel) == pytest.approx(range(8), abs=1e-14)
        causal = seen_mean(ranks, layout, Causal(), 8, kernel)
        assert causal == pytest.approx([i / 2 for i in range(8)], abs=1e-14)
        for wide in (8, 9, 1000, None):
            assert seen_mean(ranks, layout, Window(wide), 8, kernel) == causal


@by_kernel
@by_layout
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 12])
def test_M3_windows_across_ranks(window, layout, kernel):
    """A window switched off where it should be on, and negative widths on blocks from elsewhere."""
    right = [float(np.mean(range(max(0, i - window + 1), i + 1))) for i in range(16)]
    assert window != 5 or right == [0, 0.5, 1, 1.5, *(float(i) for i in range(2, 14))]
    assert seen_mean(4, layout, Window(window), 16, kernel) == pytest.approx(right, abs=1e-13)
    check(Case(4, 16, Window(window), layout), kernel)


def test_M3_blocks_outside_the_window_are_not_computed():
    """Contiguous shards of 4: block j meets rank i only where the window reaches."""
    for window in (1, 3, 4, 5, 8, 12):
        plan = ContextParallel(Loopback(4), layout=Contiguous()).plan(16, Window(window))
        for schedule in plan.schedules:
            steps = [int(t) for t, pairs in enumerate(schedule.forward.pairs) if pairs]
            assert steps == list(range(min(schedule.ring_rank, -(-(window - 1) // 4)) + 1))


@by_kernel
@by_layout
def test_M5_documents_do_not_see_each_other(layout, kernel):
    """Packed documents attended to each other under context parallelism; a control of one document was right."""
    lengths = [200, 300, 100, 324, 100]
    plan = ContextParallel(Loopback(2), layout=layout).plan(1024, Causal() & Documents(lengths))
    part = plan.partition
    generator = torch.Generator().manual_seed(4)
    start = [torch.randn(1, 2, 1024, 8, generator=generator) for _ in range(4)]

    def results(x: list[Tensor]) -> list[Tensor]:
        x, dout = [t.clone().requires_grad_() for t in x[:3]], x[3]
        out = part.gather(plan.attention(*(part.shard(t, dim=2) for t in x), kernel=kernel), dim=2)
        return [out.detach(), *torch.autograd.grad(out, x, dout)]

    before = results(start)
    for t in start[:3]:
        t[:, :, 57] += 1.0
    after = results(start)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :, 200:], b[:, :, 200:]) and not torch.equal(a[:, :, :200], b[:, :, :200])
    allowed = (Causal() & Documents(lengths)).as_array(1024)
    out, _, _ = attention(*(t.numpy() for t in start[:3]), allowed=allowed)
    np.testing.assert_allclose(after[0].numpy(), out, rtol=0, atol=2e-6)


@by_kernel
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", [Zigzag(), Striped()], ids=str)
def test_M17_balanced_layouts_without_a_causal_mask(layout, ranks, kernel):
    """The causal shortcut hung on the layout: every rank must meet every block."""
    plan = ContextParallel(Loopback(ranks), layout=layout).plan(64, Full())
    for schedule in plan.schedules:
        assert schedule.forward.pairs.tolist() == [(64 // ranks) ** 2] * ranks
    check(Case(ranks, 64, Full(), layout), kernel)


# -- S · shapes ------------------------------------------------------------------------------------------------------


@by_layout
@pytest.mark.parametrize(("seq_len", "ranks"), [(7, 3), (3, 3), (4, 4), (9, 4), (13, 6)])
def test_S1_lengths_that_do_not_divide(seq_len, ranks, layout):
    """S = 7 on 3, S = R, S = 2R + 1: nothing is padded in silence, exactly S rows come back."""
    for mask in (Causal(), Full()):
        check(Case(ranks, seq_len, mask, layout))


def test_S1_2999_tokens_on_4_ranks():
    """chunk() of 2999 over 4 gives unequal parts, and the halves of the last do not fit."""
    shape = Shape(batch=1, heads=1, kv_heads=1, head_size=4, value_size=3)
    check(Case(4, 2999, Causal(), Zigzag(), shape=shape))


def test_S1_32769_tokens_on_4_ranks():
    """One token more than a power of two."""
    seq_len, window = 32769, 6
    plan = ContextParallel(Loopback(4), layout=Zigzag()).plan(seq_len, Window(window))
    assert plan.partition.core.tokens.tolist() == [8193, 8192, 8192, 8192]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, seq_len, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    out = plan.attention(*(plan.partition.shard(t, dim=2) for t in (q, k, v)), kernel="eager")
    out = plan.partition.gather(out, dim=2)
    assert out.shape == (1, 1, seq_len, 4)
    # the last `window` keys of each row, from padded copies: [S, window, 4]
    keys, values = (
        torch.cat([torch.zeros(window - 1, 4, dtype=torch.float64), t[0, 0]]).unfold(0, window, 1).mT for t in (k, v)
    )
    scores = (keys @ q[0, 0, :, :, None])[..., 0] / 2
    real = torch.arange(seq_len)[:, None] + torch.arange(window) >= window - 1
    weights = scores.masked_fill(~real, -math.inf).softmax(-1)
    torch.testing.assert_close(out[0, 0], (weights[:, None] @ values)[:, 0], rtol=0, atol=1e-13)


@by_layout
@by_kernel
@pytest.mark.parametrize(("ranks", "seq_len"), [(2, 4), (2, 3), (2, 2), (2, 1), (4, 2), (8, 1)])
def test_S3_very_short_sequences(ranks, seq_len, kernel, layout):
    """Chunks of one token, and ranks with none."""
    shape = Shape(batch=1, heads=1, kv_heads=1, head_size=4, value_size=4)
    for mask in (Causal(), Full(), Window(2)):
        check(Case(ranks, seq_len, mask, layout, shape=shape), kernel)


@by_kernel
@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 7), (8, 1), (4, 2)])
def test_S5_grouped_heads(heads, kv_heads, kernel):
    """dk and dv keep the key heads' number and sum over the group."""
    shape = Shape(batch=1, heads=heads, kv_heads=kv_heads, head_size=6, value_size=5)
    case = Case(2, 15, Causal(), Zigzag(), shape=shape)
    check(case, kernel)
    found = run_ring(case, inputs(case), kernel=kernel)
    assert found["dk"].shape == (1, kv_heads, 15, 6) and found["dv"].shape == (1, kv_heads, 15, 5)


@by_kernel
@by_layout
def test_S12_sizes_all_equal_and_all_different(layout, kernel):
    """The sequence taken for the heads goes unnoticed where S == H."""
    same = Shape(batch=16, heads=16, kv_heads=16, head_size=16, value_size=16)
    check(Case(2, 16, Causal(), layout, shape=same), kernel)
    check(Case(2, 17, Causal(), layout, shape=Shape(batch=3, heads=10, kv_heads=5, head_size=7, value_size=4)), kernel)


# -- G · gradients ---------------------------------------------------------------------------------------------------


@by_kernel
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("alone", ["v", "k", "qkv"])
def test_G1_backward_uses_the_block_that_has_come_round(alone, ranks, kernel):
    """Each backward step read the local block again: forward right, gradients wrong."""
    case = Case(ranks, 32, Causal(), Zigzag())
    given = replace(inputs(case), dlse=np.zeros(()))
    plan = ContextParallel(Loopback(ranks), layout=Zigzag()).plan(32, Causal())
    part = plan.partition
    x = {n: torch.from_numpy(getattr(given, n)).requires_grad_(n in alone) for n in "qkv"}
    out = plan.attention(*(part.shard(t, dim=2) for t in x.values()), kernel=kernel)
    part.gather(out, dim=2).backward(torch.from_numpy(given.dout))
    right = reference(case, given)
    for name in alone:
        np.testing.assert_allclose(x[name].grad.numpy(), getattr(right, f"d{name}"), rtol=0, atol=1e-12)


@by_kernel
def test_G2_backward_keeps_each_step_s_own_lengths(kernel):
    """Zigzag, causal: a whole first step, half steps after it."""
    check(Case(4, 64, Causal(), Zigzag()), kernel)


ENTRY_POINTS: dict[str, tuple[Callable[..., Tensor | tuple[Tensor, Tensor]], dict[str, object]]] = {
    "Plan.attention": (
        lambda q, k, v, **options: _plan().attention(q, k, v, **options),
        {"scale": 0.3, "return_lse": True, "kernel": "eager"},
    ),
    "ring_attention": (
        ring_attention,
        {
            "group": Loopback(2),
            "mask": Window(3),
            "layout": Striped(),
            "seq_len": 10,
            "scale": 0.3,
            "return_lse": True,
        },
    ),
    "blockwise_attention": (blockwise_attention, {"mask": Full(), "block_size": 3, "scale": 0.3}),
    "merge": (lambda q, k, v: merge(q, q[..., 0], q * 2, q[..., 1]), {}),
}


def _plan() -> Plan:
    return ContextParallel(Loopback(2)).plan(10, Causal())


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_G8_every_entry_point_with_every_option(entry):
    """'returned an incorrect number of gradients': a new argument of forward without its None in backward."""
    call, options = ENTRY_POINTS[entry]
    for chosen in ({}, *({name: value} for name, value in options.items()), options):
        q, k = (torch.randn(2, heads, 10, 4, requires_grad=True) for heads in (4, 2))
        v = torch.randn(2, 2, 10, 4, requires_grad=True)
        results = call(q, k, v, **chosen)
        results = results if isinstance(results, tuple) else (results,)
        assert len(results) == (2 if entry == "merge" or chosen.get("return_lse") else 1)
        sum(r.square().sum() for r in results).backward()
        assert q.grad.isfinite().all() and q.grad.abs().max() > 0
        assert entry == "merge" or all(x.grad.isfinite().all() and x.grad.abs().max() > 0 for x in (k, v))


# -- D · distributed, as far as one thread goes ----------------------------------------------------------------------


@by_kernel
@pytest.mark.parametrize("kind", STRIDED)
def test_D5_keys_and_values_of_any_strides(kind, kernel):
    """Raw storage is sent: wrong data in silence. The caller's tensors stay as they are."""
    plan = ContextParallel(Loopback(2), layout=Contiguous()).plan(12, Causal())
    generator = torch.Generator().manual_seed(6)
    start = [torch.randn(2, 2, 12, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    strided = [STRIDED[kind](x) for x in start[:3]]
    plain = [x.contiguous().clone() for x in strided]
    assert not any(x.is_contiguous() for x in strided)
    results = []
    for x in (strided, plain):
        x = [t.detach().requires_grad_() for t in x]
        out = plan.attention(*x, kernel=kernel)
        results.append([out.detach(), *torch.autograd.grad(out, x, start[3])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    assert all(torch.equal(x, y) for x, y in zip(strided, plain, strict=True))


@by_kernel
def test_D11_without_torch_distributed_a_ring_of_one_is_plain_attention(kernel):
    """Send to self raises, an empty list of operations fails: a ring of one must not get there."""
    assert not torch.distributed.is_initialized()
    context = ContextParallel()
    assert (context.ring_size, context.ring_rank) == (1, 0)
    case = Case(1, 19, Causal(), Zigzag())
    error = errors(run_ring(case, inputs(case), context, kernel=kernel), reference(case, inputs(case)))
    assert judge("float64", [error], [])[0], error.worst
    assert not context.driver.counts.messages
