"""Every argument of a call and of a plan, alone: scale, softcap, sinks, biases, other keys, other starts, row masks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from combinations import kernels

from ringspun import Anchors, Causal, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.core.buckets import Buckets
from ringspun.core.mask import documents_of
from ringspun.errors import PlanError
from ringspun.testing.cases import (
    BUCKETS,
    LAYOUTS,
    Arguments,
    Case,
    Inputs,
    Shape,
    bias_of_positions,
    inputs,
    reference,
)
from ringspun.testing.comparison import errors, judge
from ringspun.testing.torch import rounded, run_ring
from ringspun.torch import ContextParallel, Loopback, blockwise_attention, ring_attention
from ringspun.torch.bias import RelativeTable

S, RANKS = 23, (1, 2, 3, 5)
MASK = Causal() & (Window(9) | Anchors(2))

ALONE = {
    "nothing": {},
    "scale": {"arguments": Arguments(scale=0.3)},
    "negative scale": {"arguments": Arguments(scale=-0.3)},
    "softcap": {"arguments": Arguments(softcap=1.5)},
    "sinks": {"arguments": Arguments(sinks=True)},
    "alibi": {"arguments": Arguments(bias="alibi")},
    "table": {"arguments": Arguments(bias="table")},
    "function": {"arguments": Arguments(bias="function")},
    "wide values": {"shape": Shape(head_size=4, value_size=11)},
    "narrow values": {"shape": Shape(head_size=7, value_size=1)},
    "fewer keys": {"key_len": 9},
    "more keys": {"key_len": 41, "query_start": 18},
    "no keys": {"key_len": 0},
    "no keys but sinks": {"key_len": 0, "arguments": Arguments(sinks=True)},
    "a negative start": {"key_len": 17, "query_start": -7},
    "masks per row": {"mask": (Causal(), Documents([5, 0, 11], [1, 8, 8])), "shape": Shape(batch=2)},
    "everything": {
        "arguments": Arguments(0.6, 2.0, True, "table"),
        "mask": (MASK, Full(), MASK),
        "shape": Shape(batch=3, value_size=9),
        "key_len": 29,
        "query_start": 4,
    },
}


def case_of(name: str, layout, ranks: int) -> Case:
    return Case(**({"ranks": ranks, "seq_len": S, "mask": MASK, "layout": layout, "seed": ranks} | ALONE[name]))


def check(case: Case, given: Inputs, kernel: str | None) -> None:
    error = errors(run_ring(case, given, kernel=kernel), reference(case, given))
    assert judge("float64", [error], [])[0], f"{case}: {error.worst}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_an_argument_alone_equals_the_oracle(name, layout):
    for ranks in RANKS:
        case = case_of(name, layout, ranks)
        if layout.reads_documents and isinstance(case.mask, tuple) and len(set(map(documents_of, case.mask))) > 1:
            with pytest.raises(PlanError, match="batch rows must have the same documents under"):
                run_ring(case, inputs(case))
            continue
        given = inputs(case)
        for kernel in kernels(case)[1:]:
            check(case, given, kernel)


@pytest.mark.parametrize("layouts", [(Contiguous(), Zigzag()), (Zigzag(), Contiguous())], ids=str)
def test_keys_may_be_dealt_by_another_layout(layouts):
    for ranks, key_len in itertools.product(RANKS, (None, 31)):
        case = replace(case_of("sinks", layouts[0], ranks), key_layout=layouts[1], key_len=key_len)
        check(case, inputs(case), None)


@pytest.mark.parametrize("name", ["nothing", "sinks", "alibi", "table", "softcap", "more keys", "everything"])
def test_gradient_of_lse_alone(name):
    for ranks in RANKS:
        case = case_of(name, Zigzag(), ranks)
        given = inputs(case)
        given = replace(given, dout=0 * given.dout)
        assert np.abs(given.dlse).max() > 1
        for kernel in kernels(case)[1:]:
            check(case, given, kernel)


# -- one call with everything ----------------------------------------------------------------------------------------

NAMES = ("q", "k", "v", "sinks", "bias")


def tensors(dtype=torch.float64, seed: int = 0, wanted: tuple[str, ...] = NAMES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q": (2, 4, S, 6), "k": (2, 2, S, 6), "v": (2, 2, S, 5), "sinks": (4,), "bias": (BUCKETS.count, 4)}
    made = {n: torch.randn(size, dtype=torch.float64, generator=generator).to(dtype) for n, size in sizes.items()}
    return {n: x.requires_grad_(n in wanted) for n, x in made.items()}


def make(ranks: int = 3, mask=MASK):
    return ContextParallel(Loopback(ranks, seed=ranks), layout=Zigzag()).plan(S, mask)


def call(plan, q, k, v, sinks, bias, **options):
    table = RelativeTable(bias, BUCKETS)
    return plan.attention(q, k, v, sinks=sinks, bias=table, softcap=2.0, return_lse=True, **options)


def upstream(dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    dout, dlse = (torch.randn(2, 4, S, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    return dout.to(dtype), dlse[..., 0].to(torch.float64 if dtype == torch.float64 else torch.float32)


def gradients(plan, given: dict[str, torch.Tensor], ends=None) -> list[torch.Tensor]:
    wanted = [x for x in given.values() if x.requires_grad]
    return list(torch.autograd.grad(call(plan, **given), wanted, ends or upstream()))


def test_gradients_of_every_subset_of_the_inputs():
    plan = make()
    whole = dict(zip(NAMES, gradients(plan, tensors()), strict=True))
    assert all(x.abs().max() > 0.1 for x in whole.values())
    for count in range(1, len(NAMES)):
        for wanted in itertools.combinations(NAMES, count):
            found = gradients(plan, tensors(wanted=wanted))
            assert all(torch.equal(x, whole[n]) for n, x in zip(wanted, found, strict=True)), wanted


def test_inputs_and_incoming_gradients_that_are_not_contiguous():
    plan, given = make(), tensors(wanted=())
    strided = {n: x.mT.contiguous().mT if x.ndim > 1 else torch.stack([x, x], 1)[:, 0] for n, x in given.items()}
    ends = tuple(torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0] for x in upstream())
    assert not any(x.is_contiguous() for x in (*strided.values(), *ends))
    odd, plain = (
        gradients(plan, {n: x.detach().requires_grad_() for n, x in some.items()}, some_ends)
        for some, some_ends in ((strided, ends), (given, upstream()))
    )
    for a, b in zip(odd, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_a_gradient_of_stride_zero():
    plan, given = make(), tensors()
    out, lse = call(plan, **given)
    found = torch.autograd.grad(out.sum() + lse.sum(), list(given.values()), retain_graph=True)
    right = torch.autograd.grad((out, lse), list(given.values()), (torch.ones_like(out), torch.ones_like(lse)))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_a_second_backward_equals_the_first_bit_for_bit():
    given = tensors()
    results, ends = call(make(5), **given), upstream()
    first, second = (torch.autograd.grad(results, list(given.values()), ends, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(reentrant):
    plan, ends = make(), upstream()
    grads = []
    for checkpointed in (False, True):
        given = tensors()
        function = lambda *x: call(plan, *x)  # noqa: E731
        if checkpointed:
            results = torch.utils.checkpoint.checkpoint(function, *given.values(), use_reentrant=reentrant)
        else:
            results = function(*given.values())
        torch.autograd.backward(results, ends)
        grads.append([x.grad for x in given.values()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_autocast_leaves_sinks_and_bias_in_float32():
    plan, ends = make(), upstream(torch.bfloat16)
    given = tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = call(plan, **given)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    found = torch.autograd.grad((out, lse), list(given.values()), ends)
    assert all(x.dtype == torch.float32 for x in found)
    assert not any(torch.equal(x, x.bfloat16().float()) for x in found[3:])  # nor were they rounded on their way
    cast = {n: (x.bfloat16() if n in "qkv" else x).detach().requires_grad_() for n, x in given.items()}
    right_out, right_lse = call(plan, **cast)
    assert torch.equal(out, right_out) and torch.equal(lse, right_lse)
    for a, b in zip(found, torch.autograd.grad((right_out, right_lse), list(cast.values()), ends), strict=True):
        assert torch.equal(a, b.float())


@pytest.mark.parametrize("kernel", ["aten_cpu", "eager"])
def test_sinks_of_minus_infinity_are_no_sinks(kernel):
    plan, given, ends = make(mask=Causal() & Documents([7, 9], [2, 9])), tensors(), upstream()
    qkv = [given[n] for n in "qkv"]
    none = torch.full((4,), -torch.inf, dtype=torch.float64, requires_grad=True)
    plain = plan.attention(*qkv, return_lse=True, kernel=kernel)
    closed = plan.attention(*qkv, sinks=none, return_lse=True, kernel=kernel)
    assert all(torch.equal(a, b) for a, b in zip(plain, closed, strict=True))
    right, found = torch.autograd.grad(plain, qkv, ends), torch.autograd.grad(closed, [*qkv, none], ends)
    assert all(torch.equal(a, b) for a, b in zip(right, found[:3], strict=True))
    assert torch.equal(found[3], torch.zeros_like(none))


def test_rows_without_keys_have_their_sink():
    """out 0, lse the sink; a sink's gradient is the sum of those of lse."""
    plan, given, (dout, dlse) = make(mask=Documents([])), tensors(), upstream()
    sinks = given["sinks"]
    out, lse = plan.attention(given["q"], given["k"], given["v"], sinks=sinks, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, sinks[:, None].expand_as(lse))
    dq, dk, dv, dsinks = torch.autograd.grad((out, lse), [given[n] for n in ("q", "k", "v", "sinks")], (dout, dlse))
    assert not any(x.abs().max() for x in (dq, dk, dv))
    torch.testing.assert_close(dsinks, dlse.sum((0, 2)), rtol=0, atol=1e-13)


# -- narrow dtypes ---------------------------------------------------------------------------------------------------


def dense(case: Case, given: Inputs) -> dict[str, np.ndarray]:
    """A call with every argument in plain torch operations of the case's dtype, softmax in float32 at least."""
    dtype, asked = getattr(torch, case.dtype), case.arguments
    x = {n: torch.from_numpy(v).to(dtype).requires_grad_() for n in NAMES if (v := getattr(given, n)) is not None}
    groups = case.shape.heads // case.shape.kv_heads
    scores = x["q"] @ x["k"].repeat_interleave(groups, 1).mT * (asked.scale or case.shape.head_size**-0.5)
    if asked.softcap:
        scores = asked.softcap * torch.tanh(scores / asked.softcap)
    q, k = torch.arange(case.seq_len)[:, None], torch.arange(case.keys)[None, :]
    if asked.bias == "alibi":
        scores = scores - x["bias"][:, None, None] * (q - k).abs()
    elif asked.bias == "table":
        scores = scores + x["bias"][torch.from_numpy(BUCKETS((q - k).numpy()))].permute(2, 0, 1)
    elif asked.bias:
        scores = scores + bias_of_positions(q, k).to(dtype)
    scores = scores.float().masked_fill(~torch.from_numpy(case.allowed), -torch.inf)
    if asked.sinks:
        scores = torch.cat([scores, x["sinks"][:, None, None].float().expand(*scores.shape[:-1], 1)], -1)
    p = torch.softmax(scores, -1)[..., : case.keys].to(dtype)
    out, lse = p @ x["v"].repeat_interleave(groups, 1), scores.logsumexp(-1)
    ends = (out * torch.from_numpy(given.dout)).sum() + (lse * torch.from_numpy(given.dlse)).sum()
    ends.backward()
    results = {"out": out, "lse": lse} | {f"d{n}": t.grad for n, t in x.items()}
    return {n: t.detach().double().numpy() for n, t in results.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["nothing", "scale", "softcap", "sinks", "alibi", "table", "function", "everything"])
def test_narrow_dtypes_are_as_exact_as_dense_ones(name, dtype):
    """The bars of `judge`, those of dsinks and dbias too."""
    for ranks, layout in ((1, Contiguous()), (3, Zigzag()), (5, Striped())):
        found, yardstick = [], []
        for seed in range(4):
            case = replace(case_of(name, layout, ranks), dtype=dtype, seed=seed, key_len=None, query_start=0)
            given = rounded(case, inputs(case))
            ref = reference(case, given)
            found.append(errors(run_ring(case, given), ref))
            yardstick.append(errors(dense(case, given), ref))
        ok, bars = judge(dtype, found, yardstick)
        assert ok, f"{case}: {[e.worst for e in found]}, bars {bars}"
        assert ("dsinks" in bars) == case.arguments.sinks
        sizes = {n: np.abs(getattr(ref, n)).max() for n in bars}
        assert all(bar < 0.05 * max(1, sizes[n]) for n, bar in bars.items()), (bars, sizes)


# -- the other doors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_off_calls_take_them_all(ranks):
    given, ends = tensors(), upstream()
    options = {"softcap": 2.0, "scale": 0.3, "return_lse": True, "mask": MASK}

    def run(function, **more):
        sinks, table = given["sinks"], RelativeTable(given["bias"], BUCKETS)
        results = function(given["q"], given["k"], given["v"], sinks=sinks, bias=table, **options, **more)
        return [*results, *torch.autograd.grad(results, list(given.values()), ends)]

    whole, small = run(blockwise_attention), run(blockwise_attention, block_size=4)
    ring = run(ring_attention, group=Loopback(ranks), layout=Contiguous())
    case = Case(1, S, MASK, Contiguous(), shape=Shape(2, 4, 2, 6, 5), arguments=Arguments(0.3, 2.0, True, "table"))
    arrays = {n: x.detach().numpy() for n, x in given.items()} | {"dout": ends[0].numpy(), "dlse": ends[1].numpy()}
    ref = reference(case, Inputs(**arrays))
    for found in (whole, small, ring):
        named = dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks", "dbias"), found, strict=True))
        error = errors({n: x.detach().numpy() for n, x in named.items()}, ref)
        assert judge("float64", [error], [])[0], error.worst


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_are_those_of_hugging_face(bidirectional):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance, tried = torch.arange(-1500, 1501), 0
    for count, furthest in itertools.product((2, 4, 6, 8, 31, 32, 33, 64, 256), (2, 5, 17, 20, 100, 128, 129, 1000)):
        exact = count // (4 if bidirectional else 2)
        if exact < 1 or furthest <= exact or (bidirectional and count % 2):
            continue
        theirs = modeling.T5Attention._relative_position_bucket(
            -distance, bidirectional=bidirectional, num_buckets=count, max_distance=furthest
        )
        mine = Buckets.t5(count, furthest, bidirectional=bidirectional)(distance.numpy())
        assert np.array_equal(mine, theirs.numpy()), (count, furthest)
        tried += 1
    assert tried > 20
