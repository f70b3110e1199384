"""Accounting: counts from a schedule, against formulas written down by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.core import ways
from ringspun.core.accounting import account, imbalance, memory, sources
from ringspun.core.geometry import Geometry
from ringspun.core.route import Ring
from ringspun.core.wire import END_BYTES, HEADER_BYTES, Format, buffer_bytes
from tests.core import strategies

HALF = Format(
    batch=3, heads=6, kv_heads=2, head_size=5, value_size=7, dtype="bfloat16", itemsize=2, accumulator_itemsize=4
)
DOUBLE = Format(
    batch=1, heads=4, kv_heads=4, head_size=8, value_size=8, dtype="float64", itemsize=8, accumulator_itemsize=8
)


def make(mask, length, size, layout):
    return Geometry(size, tuple(range(size)), layout, Ring()).schedule(mask, length)


def message(wire, rows, itemsize):
    """Header, keys and values, each at a multiple of 64 bytes."""
    up = [-(-wire.batch * wire.kv_heads * rows * d * itemsize // 64) * 64 for d in (wire.head_size, wire.value_size)]
    return HEADER_BYTES + sum(up) + END_BYTES


@given(strategies.masks(24, leaves=3), st.integers(1, 5), strategies.layouts())
def test_pairs_and_flops(mask, size, layout):
    allowed = int(mask.as_array(24).sum())
    for backward, products in ((False, 2 * (5 + 7)), (True, 2 * (3 * 5 + 2 * 7))):
        accounts = [
            account(s.backward if backward else s.forward, HALF, backward=backward)
            for s in make(mask, 24, size, layout)
        ]
        assert sum(int(a.pairs.sum()) for a in accounts) == allowed
        assert sum(a.flops for a in accounts) == allowed * products * HALF.batch * HALF.heads
        assert all(isinstance(a.flops, int) for a in accounts)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
@pytest.mark.parametrize(("size", "length"), [(1, 9), (2, 9), (4, 35), (5, 40)])
def test_bytes_of_a_full_ring(layout, size, length):
    """Forward relays R - 1 blocks to the next rank; backward relays them again and their gradients one hop farther."""
    for s in make(Full(), length, size, layout):
        r, held = s.ring_rank, s.tokens.tolist()
        blocks = sum(message(HALF, held[(r - t) % size], 2) for t in range(size - 1))
        forward = account(s.forward, HALF, backward=False)
        assert forward.sent_bytes == ({(r + 1) % size: blocks} if size > 1 else {})
        assert (forward.messages, forward.hops, forward.total_sent_bytes) == (size - 1, size - 1, blocks)
        gradients = sum(message(HALF, held[(r - t) % size], 4) for t in range(1, size))
        backward = account(s.backward, HALF, backward=True)
        assert backward.total_sent_bytes == blocks + gradients
        assert (backward.messages, backward.hops) == (2 * (size - 1), size - 1)


def test_bytes_of_a_cut_ring_by_peer():
    """window(6) on shards of 5 goes one hop; gradients go back the same way."""
    for s in make(Window(6), 20, 4, Contiguous()):
        r = s.ring_rank
        forward, backward = account(s.forward, DOUBLE, backward=False), account(s.backward, DOUBLE, backward=True)
        assert forward.sent_bytes == ({r + 1: message(DOUBLE, 5, 8)} if r < 3 else {})
        assert backward.sent_bytes == forward.sent_bytes | ({r - 1: message(DOUBLE, 5, 8)} if r > 0 else {})


def per_step(schedules):
    forward, backward = imbalance([s.forward for s in schedules]), imbalance([s.backward for s in schedules])
    np.testing.assert_array_equal(backward[: len(forward)], forward)
    assert (backward[len(forward) :] == 1).all()
    return forward


def test_imbalance_per_step():
    even = make(Causal(), 32, 4, Zigzag())
    np.testing.assert_array_equal(per_step(even), 1.0)
    uneven = make(Causal(), 32, 4, Contiguous())  # 36 pairs each, then 64 on 3, 2, 1 of the 4 ranks
    np.testing.assert_allclose(per_step(uneven), [1, 4 / 3, 2, 4])
    idle = make(Documents([4], starts=[8]), 16, 2, Contiguous())
    np.testing.assert_allclose(per_step(idle), [2])
    np.testing.assert_array_equal(per_step(make(Documents([]), 16, 2, Contiguous())), [1])


def test_sources():
    (s,) = Geometry(3, (1,), Zigzag(), Ring()).schedule(Full(), 12)
    assert sources(s.forward) == [1, 0, 2] and sources(s.backward) == [1, 0, 2, 1]


def test_memory_of_results_that_are_their_own_sums():
    """float64: at the last step, where the rank's own block is computed, what travelled is back in the pool."""
    for s in make(Full(), 24, 4, Contiguous()):
        m, x = memory(s, DOUBLE), 6 * 4 * 8 * 8  # rows, heads, size, bytes
        assert m.inputs == 4 * x and m.out == x + 2 * 6 * 4 * 8
        assert m.leased == 4 * buffer_bytes(message(DOUBLE, 6, 8)), "two blocks and two of their gradients"
        assert m.gradients == m.outputs == 3 * x
        assert m.total == m.inputs + m.out + m.leased + m.gradients + m.outputs


def test_memory_of_sums_that_are_no_results():
    """bfloat16: dq is summed up in float32 beside what travels, in the buffer of forward's out, dk and dv of the rank's
    own block in place of what travelled."""
    for s in make(Full(), 22, 4, Contiguous()):
        rows, most, b = s.local_tokens, 6, HALF.batch
        h, k, d, dv = HALF.heads, HALF.kv_heads, HALF.head_size, HALF.value_size
        m = memory(s, HALF)
        travels = 2 * buffer_bytes(message(HALF, most, 2)) + 2 * buffer_bytes(message(HALF, most, 4))
        assert m.leased == travels + buffer_bytes(4 * b * h * rows * dv)
        assert m.out == 2 * b * h * rows * dv + 2 * 4 * b * h * rows
        assert m.inputs == 2 * b * rows * (h + k) * (d + dv)
        gradients = 2 * b * rows * (h * d + k * (d + dv))
        assert (m.gradients, m.outputs) in {(gradients, 0), (0, 2 * b * (h * rows * d + k * most * (d + dv)))}


def test_memory_of_queries_that_travel():
    """float32 sums are results, those of keys from the start; forward's blocks of keys serve as gradients of queries,
    which are half as long, and lie beside the queries."""
    wire = Format(1, 4, 4, 8, 8, "float32", 4, 4)
    schedules = make(Full(), 64, 4, Contiguous())
    for s, turned in zip(schedules, ways.turned(schedules), strict=True):
        m, x = memory(s, wire, turned), 16 * 4 * 8 * 4
        assert m.leased == 2 * buffer_bytes(2 * x + 2 * 16 * 4 * 4 + 128) + 2 * buffer_bytes(2 * x + 128)
        assert m.gradients == m.outputs == 3 * x and (m.inputs, m.out) == (4 * x, x + 2 * 16 * 4 * 4)


def test_memory_without_neighbours():
    (s,) = make(Causal(), 22, 1, Contiguous())
    assert memory(s, DOUBLE).leased == 0 and memory(s, DOUBLE).gradients > 0


def test_a_kernel_call_takes_part_of_a_long_tile():
    """Of a tile that a band cuts fewer rows than of a whole one."""
    rows = {}
    for mask in (Full(), Causal()):
        (s,) = make(mask, 5000, 1, Contiguous())
        rows[mask] = memory(s, DOUBLE).outputs // 8 // 4 // 8 - 2 * 5000
    assert rows == {Full(): 2048, Causal(): 1024}


def test_Q4_blocks_in_flight_do_not_grow_with_the_ring():
    """Ring keeps every received KV block, so memory grows to the full KV."""
    assert len({memory(make(Full(), 6 * size, size, Contiguous())[0], HALF).total for size in (4, 8, 16)}) == 1
