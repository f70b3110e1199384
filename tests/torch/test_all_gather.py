"""All-gather: strides of heads give dense attention, gradients go home to their owners, and memory is what is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hard_cases import judged

from ringspun import AllGather, Causal, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.core import accounting
from ringspun.core.wire import Payload
from ringspun.testing.cases import Case, Shape, inputs
from ringspun.testing.torch import run_ring
from ringspun.torch import Alibi, ContextParallel, Loopback
from ringspun.torch.execution import wire_of
from ringspun.torch.memory import peak_memory


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_float64_equals_the_oracle(ranks, layout):
    for mask in (Full(), Causal(), Causal() & Window(9), Causal() & Documents([5, 17, 9])):
        for length in (31, 3):
            case = Case(ranks, length, mask if length == 31 else Causal(), layout, seed=ranks)
            judged(
                case, run_ring(case, inputs(case), ContextParallel(Loopback(ranks), layout=layout, route="all_gather"))
            )


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 3), (5, 1), (4, 4)])
@pytest.mark.parametrize("strides", [None, 1, 2, 3, 7])
def test_query_heads_of_a_stride_are_those_of_its_key_heads(heads, kv_heads, strides):
    """Grouped heads, one head for all, strides that do not divide the heads and more strides than heads."""
    shape = Shape(batch=2, heads=heads, kv_heads=kv_heads, head_size=6, value_size=3)
    for kernel in ("eager", "aten_cpu"):
        case = Case(4, 23, Causal(), Zigzag(), shape=shape, seed=heads)
        context = ContextParallel(Loopback(4), layout=case.layout, route=AllGather(strides))
        judged(case, run_ring(case, inputs(case), context, kernel=kernel))


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=str)
@pytest.mark.parametrize("rank", range(3))
def test_G4_gradients_of_one_ranks_queries_go_home_to_the_owners(layout, rank):
    """dk, dv are summed over ranks and each keeps its own slice, in the order of the layout, whoever has a gradient."""
    generator = torch.Generator().manual_seed(rank)
    q, k, v, dout = (torch.randn(2, 3, 26, 5, generator=generator, dtype=torch.float64) for _ in range(4))
    for mask in (Causal(), Full()):
        context = ContextParallel(Loopback(3), layout=layout, route="all_gather")
        part = context.partition(26)
        mine = torch.zeros(26, dtype=torch.bool)
        mine[part.core.positions(rank)] = True
        given = dout * mine[:, None]
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        out = part.plan(mask).attention(*(part.shard(t, dim=2) for t in x))
        grads = torch.autograd.grad(out, x, part.shard(given, dim=2))
        allowed = torch.from_numpy(mask.as_array(26))
        y = [t.clone().requires_grad_() for t in (q, k, v)]
        scores = (y[0] @ y[1].mT / 5**0.5).masked_fill(~allowed, -torch.inf)
        right = torch.autograd.grad(scores.softmax(-1) @ y[2], y, given)
        for found, expected in zip(grads, right, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        seen = allowed[mine].any(0)
        assert not grads[0][:, :, ~mine].any() and not grads[2][:, :, ~seen].any() and grads[2][:, :, seen].any()


def test_values_per_head_of_a_bias_and_of_sinks_find_their_heads():
    generator = torch.Generator().manual_seed(4)
    q, k, v, dout = (torch.randn(1, heads, 22, 4, generator=generator, dtype=torch.float64) for heads in (6, 3, 3, 6))
    slopes, sinks = (torch.rand(6, generator=generator, dtype=torch.float64) for _ in range(2))

    def run(route):
        part = ContextParallel(Loopback(4), layout=Zigzag(), route=route).partition(22)
        x = [t.clone().requires_grad_() for t in (q, k, v, slopes, sinks)]
        rows = (part.shard(t, dim=2) for t in x[:3])
        given = {"bias": Alibi(x[3]), "sinks": x[4], "softcap": 3.0, "return_lse": True}
        out, lse = part.plan(Causal()).attention(*rows, **given)
        whole = [part.gather(out, dim=2), part.gather(lse, dim=2)]
        return [*whole, *torch.autograd.grad((whole[0] * dout).sum() + (whole[1] * dout[..., 0]).sum(), x)]

    for strides in (None, 2, 3):
        for found, expected in zip(run(AllGather(strides)), run("ring"), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_function_of_positions_gives_a_bias_of_each_head():
    def bias(i, j):
        return -(i - j).abs() * torch.arange(1, 5, dtype=torch.float64)[:, None, None] / 7

    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 4, 22, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    found = []
    for route in ("ring", "all_gather", "all_gather(3)"):
        part = ContextParallel(Loopback(3), layout=Zigzag(), route=route).partition(22)
        out = part.plan(Causal()).attention(*(part.shard(t, dim=2) for t in (q, k, v)), bias=bias)
        found.append(part.gather(out, dim=2))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("route", ["all_gather", "all_gather(2)", "all_gather(1)"])
def test_no_more_is_alive_than_is_said(route):
    """All four ranks are in this process; q, k and v were there before."""
    context = ContextParallel(Loopback(4), layout=Zigzag(), route=route)
    plan = context.plan(2048, Causal())
    x = [torch.randn(1, 4, 2048, 32).requires_grad_() for _ in range(3)]
    wire = wire_of(*x)
    with peak_memory() as peak:
        plan.attention(*x).sum().backward()
    said = [accounting.memory(s, wire) for s in plan.schedules]
    spare = sum(one.leased for one in said) / 4  # a lease may get a buffer that is larger by so much
    assert peak.bytes <= sum(one.total for one in said) - sum(t.nbytes for t in x) + spare


def test_more_strides_hold_less():
    (held,) = {tuple(_gathered(strides) for strides in (1, 2, 4))}
    assert held[0] / held[1] == pytest.approx(2, rel=0.01) and held[1] / held[2] == pytest.approx(2, rel=0.01)
    ring = _gathered(None, "ring")
    assert _gathered(None) <= 1.5 * ring


def _gathered(strides, route=None):
    context = ContextParallel(Loopback(4), layout=Zigzag(), route=route or AllGather(strides))
    schedule, wire = context.plan(4096, Full()).schedule, wire_of(*(torch.empty(1, 8, 4096, 32) for _ in range(3)))
    return sum(n for (payload, _), n in schedule.slot_bytes(schedule.backward, wire).items() if payload == Payload.KV)


def test_the_executor_puts_together_what_the_schedule_says():
    """An edit of one range shows."""
    context = ContextParallel(Loopback(3), layout=Contiguous(), route="all_gather")
    part, schedules = context.partition(24), context.geometry.schedule(Full(), 24)
    x = [torch.randn(1, 2, 24, 4, dtype=torch.float64) for _ in range(3)]
    table = schedules[1].gathered.copy()
    table[[0, 1], 3] = table[[1, 0], 3]
    edited = replace(schedules[1], gathered=table)
    assert edited.digest != schedules[1].digest
    plain = part.plan(schedules).attention(*x)
    assert torch.equal(plain, part.plan(Full()).attention(*x))
    torch.testing.assert_close(
        part.plan((schedules[0], edited, schedules[2])).attention(*x), plain
    )  # no order in a full one
    causal = context.geometry.schedule(Causal(), 24)
    wrong = replace(causal[2], gathered=np.column_stack([causal[2].gathered[:, :3], causal[2].gathered[::-1, 3]]))
    found = part.plan((causal[0], causal[1], wrong)).attention(*x)
    right = part.plan(causal).attention(*x)
    assert torch.equal(found[:, :, :16], right[:, :, :16]) and not torch.allclose(found[:, :, 16:], right[:, :, 16:])
