"""Arguments at their edges: nothing to attend to, positions far away, functions that fail, plans that look alike."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from combinations import cases
from hypothesis import given as given_by
from hypothesis import settings

from ringspun import Causal, Chunks, Contiguous, Documents, Full, Striped, Window, Zigzag
from ringspun.core.accounting import account
from ringspun.core.buckets import Buckets
from ringspun.core.reference import attention_with_gradients
from ringspun.core.wire import Format
from ringspun.errors import PlanError
from ringspun.testing.cases import Arguments, Case, Shape, inputs, reference
from ringspun.testing.comparison import errors, judge
from ringspun.testing.torch import plan_of, run_ring
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.bias import Alibi, RelativeTable
from ringspun.torch.execution import Options
from ringspun.torch.ops import REGISTRY
from ringspun.torch.plan import KEPT_OPTIONS

FAR = 2**40
EVERYTHING = Arguments(0.7, 3.0, True, "table")
ONE = Shape(1, 1, 1, 1, 1)


def check(case: Case) -> None:
    given = inputs(case)
    error = errors(run_ring(case, given), reference(case, given))
    assert judge("float64", [error], [])[0], f"{case}: {error.worst}"


EDGES = {
    "no batch row": Case(3, 9, Causal(), Zigzag(), shape=Shape(batch=0), arguments=EVERYTHING),
    "one of everything": Case(3, 1, Causal(), Zigzag(), shape=ONE, arguments=EVERYTHING),
    "one head of size one": Case(2, 9, Causal(), Striped(), shape=ONE, arguments=EVERYTHING),
    "no query": Case(3, 0, Full(), Zigzag(), key_len=9, arguments=EVERYTHING),
    "no query per row": Case(3, 0, (Full(), Causal()), Zigzag(), key_len=9, arguments=EVERYTHING),
    "no key": Case(3, 9, Full(), Zigzag(), key_len=0, arguments=EVERYTHING),
    "no key and no sink": Case(3, 9, Full(), Zigzag(), key_len=0, arguments=Arguments(bias="alibi")),
    "neither": Case(3, 0, Full(), Zigzag(), key_len=0, arguments=EVERYTHING),
    "ranks that hold keys alone": Case(6, 2, Full(), Contiguous(), key_len=13, arguments=EVERYTHING),
    "ranks that hold queries alone": Case(6, 13, Full(), Contiguous(), key_len=2, arguments=EVERYTHING),
    "opposite ranks": Case(4, 2, Full(), Contiguous(), key_len=2, key_layout=Zigzag(), arguments=EVERYTHING),
    "before the first key": Case(3, 5, Causal(), Zigzag(), key_len=9, query_start=-5, arguments=EVERYTHING),
    "a row that sees nothing": Case(3, 9, (Documents([]), Causal()), Zigzag(), arguments=EVERYTHING),
    "a row that sees nothing, no sink": Case(3, 9, (Causal(), Documents([])), Zigzag()),
    "no row sees anything": Case(3, 9, (Documents([]), Documents([])), Zigzag(), arguments=EVERYTHING),
    "documents of the keys alone": Case(3, 5, Documents([50, 50]), Zigzag(), key_len=100, query_start=48),
    "documents and a negative start": Case(3, 12, Causal() & Documents([3, 5]), Zigzag(), key_len=8, query_start=-9),
    "many documents per row": Case(
        2, 1000, (Causal() & Documents([1] * 1000), Documents([1, 2] * 333)), Zigzag(), shape=replace(ONE, batch=2)
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_equal_the_oracle(name):
    check(EDGES[name])


# -- far away --------------------------------------------------------------------------------------------------------


def tensors(queries: int, keys: int, dtype=torch.float64, grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((1, 2, queries, 4), (1, 2, keys, 4), (1, 2, keys, 3))
    made = [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
    return [x.to(dtype).requires_grad_(grad) for x in made]


def test_queries_far_away_see_what_they_see_from_nearby():
    """All keys lie before both, so distances differ by a constant, which the softmax takes no notice of."""
    context, x = ContextParallel(Loopback(3), layout=Zigzag()), tensors(4, 8)
    slopes = torch.tensor([2.0**-20, 2.0**-18], dtype=torch.float64)
    far, near = (context.plan(4, Causal(), key_len=8, query_start=start) for start in (FAR, 8))
    for plan in (far, near):
        assert plan.queries.positions().sort()[0].tolist() == list(
            range(plan.queries.core.start, 4 + plan.queries.core.start)
        )
    error = (far.attention(*x, bias=Alibi(slopes)) - near.attention(*x, bias=Alibi(slopes))).abs().max()
    assert error < 64 * FAR * float(slopes.max()) * np.finfo(np.float64).eps
    table = RelativeTable(torch.randn(32, 2, dtype=torch.float64), Buckets.t5(bidirectional=False))
    assert torch.allclose(far.attention(*x, bias=table), far.attention(*x), rtol=0, atol=1e-14)  # all in one bucket


@pytest.mark.parametrize("layout", [Contiguous(), Striped()], ids=str)
def test_masks_far_away(layout):
    context, x = ContextParallel(Loopback(2), layout=layout), tensors(4, 8)
    for start, seen in ((FAR, 0), (-FAR, 0), (2**48, 0), (6, 2)):
        plan = context.plan(4, Causal() & Chunks(6), key_len=8, query_start=start)
        _, lse = plan.attention(*x, return_lse=True)
        assert int(lse.isfinite().sum()) == 2 * (4 if seen else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_dtypes_with_everything_are_finite(dtype):
    q, k, v = (100 * x.detach() for x in tensors(9, 9, dtype))
    sinks, slopes = torch.tensor([1e4, -1e4], dtype=dtype), torch.tensor([300.0, -2.0], dtype=dtype)
    given = [x.clone().requires_grad_() for x in (q, k, v, sinks, slopes)]
    plan = ContextParallel(Loopback(3)).plan(9, Causal())
    out, lse = plan.attention(*given[:3], sinks=given[3], bias=Alibi(given[4]), softcap=50.0, return_lse=True)
    (out.float().mean() + lse.mean()).backward()
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert all(x.isfinite().all() for x in (out, lse)) and all(x.grad.isfinite().all() for x in given)
    assert all(x.grad.dtype == dtype for x in given)


# -- functions -------------------------------------------------------------------------------------------------------


def make(ranks: int = 3):
    return ContextParallel(Loopback(ranks, seed=1), layout=Zigzag()).plan(9, Causal())


def test_a_function_that_raises_leaves_the_plan_as_it_was():
    plan, x = make(), tensors(9, 9)

    def late(q, k):
        if q.max() > 5:
            raise LookupError("not for these positions")
        return (q - k).double()

    for function in (late, lambda q, k: {}[q]):
        with pytest.raises(LookupError):
            plan.attention(*x, bias=function)
    assert torch.equal(plan.attention(*x), make().attention(*x))


def test_nan_of_a_function_stays_in_its_row():
    plan, x = make(), tensors(9, 9)

    def bias(q, k):
        return torch.where(q == 4, torch.nan, 0.0) + 0 * k

    out = plan.partition.gather(plan.attention(*(plan.partition.shard(t, dim=2) for t in x), bias=bias), dim=2)
    assert out.isnan().any(-1).any(1)[0].nonzero().flatten().tolist() == [4]


def test_minus_infinity_of_a_function_hides_like_a_mask():
    """Whole rows of it too, forward and backward."""

    def bias(q, k):
        return torch.where((q == 4) | (k == 2) | (q - k == 1), -torch.inf, 0.0)

    q, k = np.arange(9)[:, None], np.arange(9)[None, :]
    hidden = (q == 4) | (k == 2) | (q - k == 1)
    case = Case(3, 9, Causal(), Zigzag(), shape=Shape(1, 2, 2, 4, 3))
    allowed = Causal().as_array(9) & ~hidden
    given = inputs(case)
    ref = attention_with_gradients(given.q, given.k, given.v, given.dout, allowed=allowed)
    plan = make()
    x = [torch.from_numpy(t).requires_grad_() for t in (given.q, given.k, given.v)]
    shard, gather = plan.partition.shard, plan.partition.gather
    out, lse = (gather(t, dim=2) for t in plan.attention(*(shard(t, dim=2) for t in x), bias=bias, return_lse=True))
    grads = torch.autograd.grad(out, x, torch.from_numpy(given.dout))
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (t.detach().numpy() for t in (out, lse, *grads)), strict=True))
    error = errors(found, ref)
    assert judge("float64", [error], [])[0], error.worst


def test_a_function_per_call_leaks_no_handles():
    plan, x = make(), tensors(9, 9, grad=True)
    first, default = plan.attention(*x, bias=lambda q, k: (q - k) * 0.5), plan._handle(Options())
    for n in range(200):
        plan.attention(*x, bias=lambda q, k, n=n: (q - k) * float(n))
    assert len(plan._handles) == KEPT_OPTIONS
    assert plan._handle(Options()) == default  # compiled calls hold it
    right = torch.autograd.grad(make().attention(*x, bias=lambda q, k: (q - k) * 0.5).sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(first.sum(), x), right, strict=True))


def test_functions_of_dropped_contexts_are_let_go():
    x, kept = tensors(9, 9), []
    plan = make()
    for n in range(KEPT_OPTIONS + 5):

        def bias(q, k, n=n):
            return (q - k) * float(n)

        kept.append(weakref.ref(bias))
        plan.attention(*x, bias=bias)
    del plan, bias
    for _ in range(REGISTRY._contexts + 1):
        make().attention(*x)
    gc.collect()
    assert not any(ref() for ref in kept)


# -- plans that look alike -------------------------------------------------------------------------------------------


def test_plans_that_differ_in_one_argument_are_different_plans():
    context = ContextParallel(Loopback(2), layout=Contiguous())
    asked = [{"mask": Causal(), "key_len": n, "query_start": start} for n in (7, 8, 9) for start in (-1, 0, 1)]
    asked += [{"mask": Causal(), "key_len": 8, "key_layout": Zigzag()}, {"mask": Causal(), "key_len": 80}]
    asked += [{"mask": m} for m in ([Causal()], [Causal(), Full()], [Full(), Causal()], [Causal(), Causal()])]
    plans = [context.plan(8, **a) for a in asked]
    assert len({id(p) for p in plans}) == len({p._calls.plan_id for p in plans}) == len(plans)
    assert all(context.plan(8, **a) is p for a, p in zip(asked, plans, strict=True))  # from the cache
    assert context.plan(8, Causal()) is context.plan(8, Causal(), key_len=8)  # the same tokens


def test_rows_of_one_mask_are_that_mask():
    context, x = ContextParallel(Loopback(3), layout=Zigzag()), [t.expand(4, -1, -1, -1) for t in tensors(9, 9)]
    one, rows = context.plan(9, Causal()), context.plan(9, [Causal()] * 4)
    assert rows.mask == (Causal(),) * 4
    assert [len(s.forward.tiles) for s in rows.schedules] == [len(s.forward.tiles) for s in one.schedules]
    assert torch.equal(rows.attention(*x), one.attention(*x))


def test_another_mask_over_the_same_sides():
    context, x = ContextParallel(Loopback(3), layout=Zigzag()), tensors(4, 9)
    cross = context.plan(4, Causal(), key_len=9, query_start=5)
    other = cross.with_mask([Window(3)])
    assert other is context.plan(4, [Window(3)], key_len=9, query_start=5) and other.with_mask(Causal()) is cross
    assert torch.equal(other.attention(*x), context.plan(4, Window(3), key_len=9, query_start=5).attention(*x))
    docs = Documents([4, 5])
    rows = context.plan(9, [Causal() & docs, docs])
    assert rows.queries.documents == docs and rows.with_mask([Full() & docs, docs]).mask[1] == docs
    with pytest.raises(PlanError, match="documents must be the same in the partition and in the mask"):
        rows.with_mask([docs, Documents([9])])


def test_a_long_list_of_masks_is_one_plan():
    """The work is in the different ones."""
    count = 2000
    masks = [Causal() & Window(1 + n % 40) for n in range(count)]
    plan = ContextParallel(Loopback(2), layout=Zigzag()).plan(16, masks)
    x = [t.expand(count, -1, -1, -1) for t in tensors(16, 16)]
    out = plan.attention(*x)
    for n in (0, 7, 39):
        assert torch.equal(out[n], out[n + 40]) and out[n].isfinite().all()
    assert not torch.equal(out[0], out[1])


@settings(max_examples=60)
@given_by(cases(most_ranks=4))
def test_bytes_and_pairs_are_those_of_accounting(case):
    """Of cross-attention and of row masks too."""
    context = ContextParallel(Loopback(case.ranks), layout=case.layout)
    plan = plan_of(case, context)
    rows = len(case.allowed) if isinstance(case.mask, tuple) else 1
    assert sum(s.forward.pairs.sum() for s in plan.schedules) == case.allowed.sum()
    shape = case.shape
    wire = Format(rows, shape.heads, shape.kv_heads, shape.head_size, shape.value_size, "float64", 8, 8)
    x = [
        torch.zeros(rows, heads, side.local_tokens, size, dtype=torch.float64)
        for side, heads, size in (
            (plan.queries, shape.heads, shape.head_size),
            (plan.keys, shape.kv_heads, shape.head_size),
            (plan.keys, shape.kv_heads, shape.value_size),
        )
    ]
    plan.attention(*x)
    told = {
        (s.ring_rank, peer): sent
        for s in plan.schedules
        for peer, sent in account(s.forward, wire, backward=False).sent_bytes.items()
    }
    assert dict(context.driver.counts.bytes) == told
