"""What does not fit raises a ValueError or TypeError that says what was wrong, where, and what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringspun import Causal, Contiguous, Documents, Full, Window, Zigzag
from ringspun.core.route import Ring
from ringspun.errors import (
    DtypeError,
    KernelRefused,
    LayoutError,
    MaskError,
    PlanError,
    RingspunError,
    ShapeError,
)
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.kernels import AtenCpu, Call, Eager, choose
from ringspun.torch.plan import Plan

S = 14


def make() -> Plan:
    return ContextParallel(Loopback(3), layout=Zigzag()).plan(S, Causal())


def fitting() -> dict[str, torch.Tensor]:
    return {"q": torch.randn(2, 6, S, 8), "k": torch.randn(2, 3, S, 8), "v": torch.randn(2, 3, S, 5)}


WRONG_TENSORS = {
    "a list": (DtypeError, {"q": [[1.0]]}, r"q must be a tensor \(ring rank 0 of 3\); got list"),
    "a NumPy array": (DtypeError, {"v": np.zeros((2, 3, S, 5))}, "v must be a tensor .*got ndarray"),
    "three dimensions": (
        ShapeError,
        {"k": torch.randn(3, S, 8)},
        r"k must be \[B, H, T, D\] .*got shape \(3, 14, 8\)",
    ),
    "integers": (
        DtypeError,
        {"q": torch.ones(2, 6, S, 8, dtype=torch.int32)},
        "q must be floating point .*torch.int32",
    ),
    "booleans": (DtypeError, {"v": torch.ones(2, 3, S, 5, dtype=torch.bool)}, "v must be floating point .*torch.bool"),
    "complex numbers": (DtypeError, {"q": torch.ones(2, 6, S, 8, dtype=torch.complex64)}, "q must be floating point"),
    "mixed dtypes": (
        DtypeError,
        {"k": torch.randn(2, 3, S, 8).half()},
        "q, k and v must have one dtype .*got torch.float32, torch.float16, torch.float32",
    ),
    "mixed devices": (
        DtypeError,
        {"v": torch.randn(2, 3, S, 5, device="meta")},
        "q, k and v must be on one device .*got cpu, cpu, meta",
    ),
    "too few rows": (
        ShapeError,
        {"q": torch.randn(2, 6, S - 1, 8)},
        r"q, k and v must hold 14 tokens in dim 2; got q \(2, 6, 13, 8\), .*Shard them by plan.partition",
    ),
    "keys of another length": (ShapeError, {"k": torch.randn(2, 3, S + 1, 8)}, r"hold 14 tokens .*k \(2, 3, 15, 8\)"),
    "values of another length": (ShapeError, {"v": torch.randn(2, 3, 1, 5)}, r"hold 14 tokens .*v \(2, 3, 1, 5\)"),
    "another batch": (ShapeError, {"k": torch.randn(1, 3, S, 8)}, "must share B, and k and v their heads"),
    "another number of value heads": (
        ShapeError,
        {"v": torch.randn(2, 2, S, 5)},
        "must share B, and k and v their heads",
    ),
    "heads that do not divide": (
        ShapeError,
        {"q": torch.randn(2, 5, S, 8)},
        r"query heads must be a multiple of key heads; got q \(2, 5, 14, 8\), k \(2, 3, 14, 8\)",
    ),
    "no query heads": (ShapeError, {"q": torch.randn(2, 0, S, 8)}, "query heads must be a multiple of key heads"),
    "no key heads": (
        ShapeError,
        {"k": torch.randn(2, 0, S, 8), "v": torch.randn(2, 0, S, 5)},
        "query heads must be a multiple of key heads",
    ),
    "unequal head sizes": (ShapeError, {"q": torch.randn(2, 6, S, 7)}, "q and k must have one head size, at least 1"),
    "no head size": (
        ShapeError,
        {"q": torch.randn(2, 6, S, 0), "k": torch.randn(2, 3, S, 0)},
        "q and k must have one head size, at least 1",
    ),
    "no value size": (ShapeError, {"v": torch.randn(2, 3, S, 0)}, "head size, at least 1"),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_tensors_that_do_not_fit(wrong):
    error, change, message = WRONG_TENSORS[wrong]
    assert issubclass(error, RingspunError) and issubclass(error, ValueError | TypeError)
    with pytest.raises(error, match=message):
        make().attention(**(fitting() | change))


def test_a_wrong_call_sends_nothing_and_the_plan_goes_on():
    plan = make()
    for error, change, _ in WRONG_TENSORS.values():
        with pytest.raises(error):
            plan.attention(**(fitting() | change))
    assert not plan.partition.context.driver.counts.messages
    assert plan.attention(**fitting()).isfinite().all()


def test_S12_tensors_in_another_order_raise_when_their_shapes_tell():
    """[B, T, H, D] where [B, H, T, D] is meant."""
    with pytest.raises(ShapeError, match=r"must hold 14 tokens in dim 2; got q \(2, 14, 6, 8\)"):
        make().attention(*(x.transpose(1, 2) for x in fitting().values()))


WRONG_PLANS = {
    "a mask in words": (PlanError, lambda c: c.plan(S, "causal"), "mask must be a ringspun mask; got 'causal'"),
    "a mask as an array": (PlanError, lambda c: c.plan(S, Full().as_array(S)), "mask must be a ringspun mask"),
    "no schedules": (PlanError, lambda c: c.partition(S).plan(()), "mask must be a ringspun mask"),
    "a negative length": (LayoutError, lambda c: c.plan(-1, Causal()), "seq_len must be an integer >= 0; got -1"),
    "a broken length": (LayoutError, lambda c: c.plan(7.5, Causal()), "seq_len must be an integer >= 0; got 7.5"),
    "documents that end too late": (
        MaskError,
        lambda c: c.plan(S, Causal() & Documents([9, 6])),
        "documents must fit the sequence; got documents that end at 15 in 14 tokens",
    ),
    "a partition's documents that end too late": (
        MaskError,
        lambda c: c.partition(S, documents=Documents([15])),
        "documents must fit the sequence; got documents that end at 15 in 14 tokens",
    ),
    "documents from a device": (
        DtypeError,
        lambda c: c.plan(S, Documents(torch.ones(3, dtype=torch.int64, device="meta"))),
        r"document lengths must be host data; got a tensor on meta.*boundaries\.cpu\(\)",
    ),
    "boundaries from a device": (
        DtypeError,
        lambda c: c.plan(S, Documents.from_cu_seqlens(torch.ones(3, dtype=torch.int64, device="meta"))),
        "cu_seqlens must be host data; got a tensor on meta",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_PLANS)
def test_plans_that_do_not_fit(wrong):
    error, call, message = WRONG_PLANS[wrong]
    with pytest.raises(error, match=message):
        call(ContextParallel(Loopback(3)))


WRONG_CONTEXTS = {
    "checks": ({"checks": "checksums"}, "checks must be 'header', 'checksum' or 'checksum/N' .*; got 'checksums'"),
    "route": ({"route": "dirct"}, "'dirct' is no route; did you mean 'direct'?"),
    "route of no kind": ({"route": 3}, "route must be 'auto', a Route or its string; got 3"),
    "timeout": ({"timeout_s": 0}, "timeout_s must be a number of seconds from 0.001 to 10 million; got 0"),
    "layout": ({"layout": "zigzag"}, r"layout must be a Layout, e.g. Zigzag\(\); got 'zigzag'"),
    "group": ({"group": 3}, "group must be a process group .*a mesh or a Loopback; got 3"),
}


@pytest.mark.parametrize("wrong", WRONG_CONTEXTS)
def test_contexts_that_cannot_be(wrong):
    change, message = WRONG_CONTEXTS[wrong]
    arguments = {"group": Loopback(2)} | change
    with pytest.raises(PlanError, match=message):
        ContextParallel(arguments.pop("group"), **arguments)


def test_a_loopback_of_nobody():
    with pytest.raises(ValueError, match="Loopback size must be at least 1; got 0"):
        Loopback(0)


def test_a_route_may_be_given_as_a_value():
    plan = ContextParallel(Loopback(3), route=Ring()).plan(S, Causal())
    assert torch.equal(plan.attention(**(x := fitting())), make().attention(**x))


def test_kernels_refuse_with_every_reason():
    with pytest.raises(KernelRefused, match="kernel must be one of aten_cpu, eager, triton; got 'flash'"):
        make().attention(**fitting(), kernel="flash")
    with pytest.raises(KernelRefused, match="all refuse: aten_cpu: device must be cpu; got meta"):
        make().attention(**{name: x.to("meta") for name, x in fitting().items()}, kernel="aten_cpu")
    call = Call(4, 2, 8, 8, torch.float8_e4m3fn, "cpu")
    with pytest.raises(
        KernelRefused, match=r"aten_cpu: dtype must be float64, float32, bfloat16 or float16; got torch"
    ):
        choose(call, "aten_cpu")
    mine = AtenCpu()
    assert choose(Call(4, 2, 8, 8, torch.float32, "cpu"), mine) is mine
    with pytest.raises(ValueError, match="block_size must be at least 1; got 0"):
        Eager(0)


def test_partitions_refuse_what_they_cannot_deal():
    part = ContextParallel(Loopback(3)).partition(S)
    with pytest.raises(ShapeError, match=r"shard must get 14 tokens along dim 1; got shape \(14, 13\)"):
        part.shard(torch.randn(S, S - 1), dim=1)
    with pytest.raises(ShapeError, match="shard must get 14 tokens along dim 2"):
        part.shard(torch.randn(S, S), dim=2)
    with pytest.raises(ShapeError, match="shard must get 14 tokens along dim 0"):
        part.shard(torch.tensor(1.0), dim=0)
    with pytest.raises(ShapeError, match=r"gather must get 14 rows along dim 1 \(ring rank 0\); got shape \(2, 13\)"):
        part.gather(torch.randn(2, 13), dim=1)
    with pytest.raises(ShapeError, match="gather must get 14 rows along dim 2"):
        part.gather(torch.randn(2, S), dim=2)
    with pytest.raises(PlanError, match=r"positions\(restart=True\) must know the documents"):
        part.positions(restart=True)
    with pytest.raises(ShapeError, match=r"labels must be \[B, 14\]; got shape \(2, 13\)"):
        part.shard_batch({"input_ids": torch.zeros(2, S, dtype=torch.int64), "labels": torch.zeros(2, 13)})


def test_schedules_of_another_ring_length_or_layout_are_refused():
    context = ContextParallel(Loopback(3), layout=Zigzag())
    part = context.partition(S)
    other = ContextParallel(Loopback(3), layout=Contiguous()).geometry
    with pytest.raises(PlanError, match=r"schedules must be those of ring ranks \(0, 1, 2\); got \(0, 1\)"):
        part.plan(context.geometry.schedule(Causal(), S)[:2])
    for schedules in (other.schedule(Causal(), S), context.geometry.schedule(Causal(), S + 1)):
        with pytest.raises(PlanError, match="schedule must be made from this partition's length, layout, route"):
            part.plan(schedules)
    fitting_one = context.geometry.schedule(Window(3), S)
    assert part.plan(fitting_one).mask == Window(3)
