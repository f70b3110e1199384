"""The pool: what it hands out, what it keeps, and that plans which change every call allocate nothing anew."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from ringspun import Causal, Contiguous, Documents, Full, Zigzag
from ringspun.core import ways
from ringspun.core.accounting import memory
from ringspun.core.wire import buffer_bytes
from ringspun.testing.timing import Work, peak_on_rank
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.buffers import SLACK, BufferPool, Leases
from ringspun.torch.execution import wire_of
from ringspun.torch.kernels.aten_cpu import AtenCpu
from ringspun.torch.kernels.base import Block, Saved, StepTiles
from ringspun.torch.memory import peak_memory

CPU = torch.device("cpu")


@given(st.integers(0, 1 << 40))
def test_a_class_holds_what_it_is_for_and_wastes_at_most_a_sixteenth(n_bytes):
    size = buffer_bytes(n_bytes)
    assert n_bytes <= size <= max(17 / 16 * n_bytes, n_bytes + 192) and buffer_bytes(size) == size


@given(st.integers(6, 30), st.integers(1, 4))
def test_blocks_of_powers_of_two_waste_nothing(power, copies):
    """Header, end mark, and up to four segments of 2**power bytes."""
    assert buffer_bytes(128 + (copies << power)) == 128 + (copies << power)


@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.booleans()), max_size=40))
def test_no_two_leases_share_memory_and_idle_memory_is_bounded(actions):
    """Whatever is leased and given back in whatever order: its bytes stay what was written."""
    pool, out, asked, most = BufferPool(), [], 0, 0
    for number, (n_bytes, takes) in enumerate(actions):
        if takes or not out:
            buffer = pool.lease(n_bytes, CPU)
            assert buffer.numel() == n_bytes and buffer.dtype == torch.uint8
            out.append((buffer.fill_(number), number))
            asked += buffer_bytes(n_bytes)
            most = max(most, asked)
        else:
            buffer, value = out.pop(n_bytes % len(out))
            assert (buffer == value).all()
            asked -= buffer_bytes(buffer.numel())
            pool.give_back(buffer)
        assert pool.idle_bytes <= SLACK * most
    assert all((buffer == value).all() for buffer, value in out)


def test_what_was_large_once_is_forgotten():
    pool = BufferPool(lately=3)
    pool.give_back(pool.lease(1 << 20, CPU))
    for _ in range(4):
        pool.give_back(pool.lease(1 << 10, CPU))
    assert pool.idle_bytes == buffer_bytes(1 << 10)


def test_what_a_failed_call_left_is_not_handed_out_and_not_counted():
    pool = BufferPool()
    lost = pool.lease(1 << 20, CPU)
    at = lost.data_ptr()
    assert pool.lease(1 << 20, CPU).data_ptr() != at
    del lost
    small = pool.lease(64, CPU)
    pool.give_back(small)
    assert pool._leased() == (0, 0)


def test_results_are_fresh_memory():
    leases = Leases(BufferPool(), CPU)
    assert leases.room(torch.float32, torch.float32)((2, 3), torch.float32).shape == (2, 3)
    assert not leases._buffers
    assert leases.room(torch.float32, torch.bfloat16)((2, 3), torch.float32).shape == (2, 3)
    assert len(leases._buffers) == 1


def large_allocations(action, least):
    """Sizes of the allocations of at least so many bytes, of those that no kernel made."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        action()
    found, todo = [], list(record.profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        if "flash_attention" in event.name:
            continue
        todo += event.children
        if event.name == "[memory]" and event.extra_fields.alloc_size >= least:
            found.append(event.extra_fields.alloc_size)
    return found


@pytest.mark.parametrize(("dtype", "layout"), [(torch.float32, Contiguous()), (torch.bfloat16, Zigzag())], ids=str)
def test_plans_that_change_every_call_allocate_results_alone(dtype, layout):
    """New lengths and new documents in each call. Nothing as long as a message or a sum is allocated but four results,
    joined from those of both ranks, which are in this process."""
    ring = Loopback(2)
    context = ContextParallel(ring, layout=layout, route="ring")

    def call(lengths):
        seq_len = sum(lengths)
        plan = context.plan(seq_len, Causal() & Documents(lengths))
        q, k, v, dout = (torch.randn(1, seq_len, 1, 128, dtype=dtype).transpose(1, 2) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]

        def both():
            ring._random.seed(0)  # in another order ranks may hold more buffers at once
            torch.autograd.grad(plan.attention(*inputs), inputs, dout)

        return both, seq_len * 128 * dtype.itemsize

    # bfloat16 without thin pieces, whose operands the kernel copies to float32
    some, others = ([2040, 2040], [2000, 2000]) if dtype == torch.bfloat16 else ([2100, 1980], [1900, 2101])
    calls = [call(lengths) for lengths in ([4096], some, [3848], others)]
    first, whole = calls[0]
    assert len(large_allocations(first, 0.75 * whole)) > 4
    for later, whole in calls[1:]:
        assert large_allocations(later, 0.75 * whole) == [whole] * 4


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kv_heads", "backward"), [(4, "keys"), (4, "queries"), (1, "keys")])
def test_peak_memory_is_what_is_counted(pools, dtype, kv_heads, backward):
    """The budget: out and gradients, two blocks and two of their gradients on the way, the sums of what stays, one
    kernel call."""
    work = Work(2, 2048, 4, kv_heads, 64, dtype, Full(), Contiguous(), backward=backward)
    measured = max(pools(2).run(peak_on_rank, work))
    q, k, dout = (torch.zeros(1, h, 1024, 64, dtype=getattr(torch, dtype)) for h in (4, kv_heads, 4))
    plan = ContextParallel(Loopback(2), layout=Contiguous(), route="ring").plan(2048, Full())
    (taken,) = ways.taken([plan.schedule], wire_of(q, k, k), backward)
    counted = memory(plan.schedule, wire_of(q, k, k), taken)
    least = counted.total - counted.inputs
    assert least * 0.99 <= measured <= 1.01 * (least + workspace(q, k, dout, backward)), (measured, least)


def workspace(q, k, dout, backward):
    """What a kernel needs inside of a call, beyond what it returns."""
    lse = torch.zeros(q.shape[:3])
    saved = Saved(None if backward == "queries" else torch.zeros_like(q), lse, dout, None, lse)
    tiles = StepTiles(torch.tensor([[0, -1, 0, 1024, 0, 1024, -1023, 1023]]).numpy())
    with peak_memory() as peak:
        (found,) = AtenCpu().backward(Block(q, k, k, 0.1), saved, tiles)
    return peak.bytes - sum(x.numel() * x.itemsize for x in (found.dq, found.dk, found.dv))
