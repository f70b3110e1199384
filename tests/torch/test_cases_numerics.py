"""Known hard cases N: numerics. R ranks in one thread; N12 over processes is in `test_gloo.py`, `merge` by itself in
`test_merge_and_one_off_calls.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hard_cases import LAYOUTS, by_kernel, by_layout, ring_plan
from on_ranks_of_cases import swallow_a_row
from torch import Tensor

from ringspun import Causal, Contiguous, Documents, Full, Window
from ringspun.core.mask import Mask
from ringspun.core.reference import attention_with_gradients
from ringspun.errors import PlanError
from ringspun.testing.cases import Case, Shape, inputs, reference
from ringspun.testing.comparison import TENSORS, errors, judge, rms
from ringspun.testing.torch import rounded, run_ring
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.buffers import BufferPool
from ringspun.torch.kernels import KERNELS, Call
from ringspun.torch.kernels.base import Block, Gradients, Kernel, Partial, Saved, StepTiles


class Watched(Kernel):
    """Another kernel, whose partial results may hold neither NaN nor infinities."""

    def __init__(self, name: str) -> None:
        self.name, self.partials = name, 0
        self.inner = next(kernel for kernel in KERNELS if kernel.name == name)

    def refuses(self, call: Call) -> str | None:
        return self.inner.refuses(call)

    def forward(self, block: Block, tiles: StepTiles) -> Iterator[Partial]:
        for partial in self.inner.forward(block, tiles):
            assert partial.out.isfinite().all() and partial.lse.isfinite().all()  # a row of a tile has a key in it
            self.partials += 1
            yield partial

    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        for share in self.inner.backward(block, saved, tiles):
            assert all(x.isfinite().all() for x in (share.dq, share.dk, share.dv))
            yield share


@by_kernel
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_N1_blocks_of_which_a_rank_sees_nothing(dtype, kernel):
    """Causal and contiguous: rank 0 sees an empty block at 3 of 4 steps, and rows before documents see none ever."""
    bar = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 3e-2}[dtype]
    for mask in (Causal(), Causal() & Documents([6, 5], [2, 9])):
        case = Case(4, 16, mask, Contiguous(), dtype=dtype)
        given, watched = rounded(case, inputs(case)), Watched(kernel)
        found = run_ring(case, given, kernel=watched)
        if dtype == "bfloat16":  # there the incoming gradient of lse is left out
            given = replace(given, dlse=0 * given.dlse)
        error = errors(found, reference(case, given))  # NaN, and -inf in a wrong place, count as infinite
        assert watched.partials and all(error.worst[name] < bar for name in TENSORS), error.worst


@by_layout
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_N5_bfloat16_error_does_not_grow_with_the_ring(mask, layout):
    """Partials rounded to bf16 at every hop: rms at R=2, 4 and 8 at most twice that at R=1, every tensor."""
    shape = Shape(batch=1, heads=4, kv_heads=2, head_size=32, value_size=32)
    found: dict[int, list] = {1: [], 2: [], 4: [], 8: []}
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
def test_N7_rows_without_keys_have_the_sink_alone(layout, kernel):
    """With sinks the denominator of a row without keys is the sink: out 0, lse the sink."""
    plan = ring_plan(3, layout, Documents([4]), 8)
    sinks = torch.tensor([0.5, -2.0], requires_grad=True)
    x = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)]
    out, lse = plan.attention(*(plan.partition.shard(t, dim=2) for t in x), sinks=sinks, return_lse=True, kernel=kernel)
    out, lse = plan.partition.gather(out, dim=2), plan.partition.gather(lse, dim=2)
    assert not out[:, :, 4:].any() and torch.equal(lse[:, :, 4:], sinks[None, :, None].expand(1, 2, 4))
    *grads, dsinks = torch.autograd.grad(out[:, :, 4:].sum() + lse[:, :, 4:].sum(), (*x, sinks))
    assert not any(g.any() for g in grads) and dsinks.tolist() == [4.0, 4.0]


def hidden_rows(fill: float):
    """A bias of `fill` for every key of rows 4 to 7."""
    return lambda q, k: torch.zeros(len(q), k.shape[1], dtype=torch.float64).masked_fill(q >= 4, fill)


@by_layout
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_N7_minus_infinity_as_a_bias_hides_like_a_mask(ranks, layout):
    """Additive -inf in whole rows: out 0, lse -inf, gradients 0; all others as under the mask."""
    plan = ring_plan(ranks, layout, Full(), 8)
    part, generator = plan.partition, torch.Generator().manual_seed(5)
    x = [torch.randn(1, 2, 8, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    dout = torch.randn(1, 2, 8, 4, generator=generator, dtype=torch.float64)
    out, lse = plan.attention(*(part.shard(t, dim=2) for t in x), bias=hidden_rows(-math.inf), return_lse=True)
    grads = torch.autograd.grad(part.gather(out, dim=2), x, dout)
    allowed = np.broadcast_to(np.arange(8)[:, None] < 4, (8, 8))
    right = attention_with_gradients(*(t.detach().numpy() for t in x), dout.numpy(), allowed=allowed)
    found = (part.gather(out, dim=2), part.gather(lse, dim=2), *grads)
    for t, y in zip(found, (right.out, right.lse, right.dq, right.dk, right.dv), strict=True):
        np.testing.assert_allclose(t.detach().numpy(), y, rtol=0, atol=1e-14)


@by_layout
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_N7_a_finite_bias_that_swallows_a_row_is_refused(dtype, ranks, layout):
    """finfo.min in a whole row: lse + log(n) rounds to lse, and the mean of v would become its sum."""
    plan, x = ring_plan(ranks, layout, Full(), 8), torch.ones(1, 2, 8, 4, dtype=dtype)
    for fill in (torch.finfo(dtype).min, -1e15):
        with pytest.raises(PlanError, match=r"bias function must not move all scores of a row further than torch"):
            plan.attention(x, x, x, bias=hidden_rows(fill))
        plan.attention(x, x, x, bias=hidden_rows(fill), sinks=torch.zeros(2, dtype=dtype))  # the sink is in reach
    some = plan.attention(x, x, x, bias=lambda q, k: torch.zeros(len(q), k.shape[1]).masked_fill(q < k, -1e30))
    assert (some - 1).abs().max() < 1e-6  # each row has keys that are not hidden
    mean = plan.attention(x, x, x, bias=hidden_rows(-1e4))
    assert (mean - 1).abs().max() < 8e-3


@pytest.mark.processes
def test_N7_a_row_that_one_rank_refuses_is_told_to_the_other(pools):
    """The rows are rank 1's, so it alone can know: it raises, and the other hears of it in its next call."""
    try:
        (mine, next_call), (theirs, _) = pools(2).run(swallow_a_row, 1.0, timeout_s=20)
    finally:
        pools(2).restart()
    assert (mine[0], theirs[0]) == ("nothing", "PlanError")
    assert next_call[0] == "PeerError" and "ring rank 1 reported PlanError: bias function must not move" in next_call[1]


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
def test_N8_a_row_without_keys_in_one_sample_of_a_batch(kernel):
    """Padding and a window leave position 3 of sample 1, on rank 1, without keys: as if that row were not there."""
    window, seq_len, gap = Window(3), 5, 3
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(2, seq_len, 6, generator=generator, dtype=torch.float64)
    upstream = torch.randn(2, 2, seq_len, 3, generator=generator, dtype=torch.float64)

    def weight_gradient(rows: list[int], samples: slice, ranks: int, masks: list[Mask]) -> tuple[Tensor, Tensor]:
        weight = torch.linspace(-1, 1, 6 * 18, dtype=torch.float64).view(6, 18).requires_grad_()
        plan = ring_plan(ranks, Contiguous(), masks, len(rows))
        x = tokens[samples, rows].requires_grad_()
        q, k, v = (x @ weight).view(len(x), len(rows), 3, 2, 3).permute(2, 0, 3, 1, 4)
        plan.attention(q, k, v, kernel=kernel).backward(upstream[samples][:, :, rows])
        return weight.grad, x.grad

    padded = window & Documents([3, 1], [0, 4])
    upstream[1, :, gap] = math.nan  # whatever comes in there
    found, of_tokens = weight_gradient(list(range(seq_len)), slice(None), 2, [window, padded])
    first, _ = weight_gradient(list(range(seq_len)), slice(0, 1), 1, [window])
    second, _ = weight_gradient([0, 1, 2, 4], slice(1, 2), 1, [window & Documents([3, 1])])
    torch.testing.assert_close(found, first + second, rtol=0, atol=1e-13)
    assert not of_tokens[1, gap].any()


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
@pytest.mark.parametrize(
    ("seq_len", "documents"), [(12, Documents([5, 3], [0, 8])), (31, Documents([9, 1, 13], [1, 12, 14]))], ids=str
)
def test_N13_what_buffers_hold_at_first_is_never_read(seq_len, documents, layout, kernel):
    """Rows that nobody wrote held allocator garbage, and dK became NaN."""
    case = Case(3, seq_len, Causal() & documents, layout)
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
