"""Faults found by trying to break arguments, plans and what is kept of them; each with its right value."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringspun import Causal, Contiguous, DocumentZigzag, Full, Zigzag
from ringspun.errors import DtypeError, NotDifferentiable, PlanError
from ringspun.torch import Alibi, ContextParallel, Loopback
from ringspun.torch.kernels.base import Rows
from ringspun.torch.ops import Registry
from ringspun.torch.recent import Recent
from ringspun.torch.sums import RowSum

S = 9


def plan(ranks: int = 3, **options):
    return ContextParallel(Loopback(ranks)).plan(S, Causal(), **options)


def three_layers(make) -> torch.Tensor:
    """Three layers, each with a bias of another slope; the gradient of what enters the first."""
    x = torch.randn(1, 2, S, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    hidden, one = x, plan()
    for slope in (0.0, 0.5, 2.0):
        hidden = hidden + one.attention(hidden, hidden, hidden, bias=make(slope))
    (gradient,) = torch.autograd.grad(hidden.square().sum(), x)
    return gradient


def test_a_bias_function_that_changed_since_forward_is_refused():
    """A lambda in a loop has in backward the loop's last value: gradients were off by 1,300 of 2,000, in silence."""
    right = three_layers(lambda slope: Alibi(torch.full((2,), slope, dtype=torch.float64)))
    bound = three_layers(lambda slope: lambda q, k, slope=slope: -slope * (q - k).abs().double())
    torch.testing.assert_close(bound, right, rtol=0, atol=1e-12)
    late = {}

    def make(slope):
        late["slope"] = slope
        return lambda q, k: -late["slope"] * (q - k).abs().double()

    with pytest.raises(NotDifferentiable, match=r"bias function must give in backward what it gave in forward"):
        three_layers(make)


def test_a_captured_tensor_that_changed_is_refused():
    weight = torch.ones(())
    x = torch.ones(1, 1, S, 2, requires_grad=True)
    out = plan().attention(x, x, x, bias=lambda q, k: weight * (q - k).float())
    out.sum().backward(retain_graph=True)
    weight.mul_(-3)
    with pytest.raises(NotDifferentiable, match="change no tensor that it captured"):
        out.sum().backward()


@pytest.mark.parametrize("kernel", ["aten_cpu", "eager"])
@pytest.mark.parametrize(("score", "value"), [(-36.8, 1e8), (-30.0, 3e6)])
def test_a_large_value_of_a_small_weight_is_not_lost(score, value, kernel):
    """Weight 1e-16 times 1e8 counts as much as the rest does, whichever rank's keys come first."""
    q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4)
    q[..., 0], k[:, :, 0, 0], v[:, :, 0] = 1.0, score, value
    weight = np.exp([score / 2, 0.0])  # of scale 4 ** -0.5
    right = float((weight * [value, 1.0]).sum() / weight.sum())
    for layout in (Contiguous(), Zigzag()):
        one = ContextParallel(Loopback(2), layout=layout).plan(2, Full())
        out = one.attention(*(one.partition.shard(x, dim=2) for x in (q, k, v)), kernel=kernel)
        torch.testing.assert_close(out, torch.full_like(out, right), rtol=2e-6, atol=0)


def test_where_float32_cannot_normalise_it_is_refused_of_any_bias():
    far = ContextParallel(Loopback(2)).plan(4, Causal(), key_len=8, query_start=2**25)
    q, k = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 8, 2)
    with pytest.raises(PlanError, match=r"bias alibi must not move all scores of a row further than torch\.float32"):
        far.attention(q, k, k, bias=Alibi(torch.ones(1)))
    exact = far.attention(q.double(), k.double(), k.double(), bias=Alibi(torch.ones(1).double()))
    assert exact.isfinite().all()


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_what_is_kept_is_bounded_by_count_and_by_bytes():
    recent: Recent[int, str] = Recent(kept=4, budget_bytes=100, least=2)
    for i in range(6):
        recent.use(i, str(i), 10)
    assert [i in recent for i in range(6)] == [False, False, True, True, True, True]
    assert recent.get(2) == "2" and recent.get(0) is None
    recent.use(2, "again", 70)  # 100 bytes: all stay; used last
    assert len(recent) == 4 and recent.get(2) == "again"
    recent.use(9, "nine", 60)  # the oldest go until two are left, for fewer are never kept
    assert len(recent) == 2 and 2 in recent and 9 in recent


class Held:
    """Stands for an executable with a bias function."""

    n_bytes = 1

    def __init__(self, holds_function: bool) -> None:
        self.holds_function = holds_function


def test_bias_functions_are_kept_for_fewer_calls_than_plans():
    """Whatever a closure holds lives with it: 1,024 of 400 KB each did."""
    registry = Registry(kept=100, kept_functions=2)
    refs = {name: [] for name in (True, False)}
    for _ in range(5):
        for holds_function in (True, False):
            one = Held(holds_function)
            registry.add(1, one)
            refs[holds_function].append(weakref.ref(one))
    del one
    gc.collect()
    alive = {name: [r() is not None for r in mine] for name, mine in refs.items()}
    assert alive == {True: [False] * 3 + [True] * 2, False: [True] * 5}


def test_a_large_plan_counts_for_more_than_a_small_one():
    context = ContextParallel(Loopback(4), layout=DocumentZigzag())
    small, large = context.plan(8, Causal()), context.plan(800, Causal())
    many = ContextParallel(Loopback(4)).plan(800, [Causal()] * 2 + [Full()])
    assert 0 < small.n_bytes <= large.n_bytes < many.n_bytes


def test_what_belongs_to_a_ring_is_not_doubled():
    one = plan()
    assert copy.copy(one) is one and copy.deepcopy(one) is one
    part = copy.deepcopy(one.partition)
    assert part.context is one.partition.context and part.core == one.partition.core
    context = one.partition.context
    assert copy.deepcopy({"model": [context]})["model"][0] is context


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 7), st.booleans()), max_size=8))
def test_sums_take_parts_of_rows_in_any_order(parts):
    """First gradients are written, not added: gaps are zero, no part is lost or doubled, memory may hold anything."""
    like = torch.zeros(2, 3, 7, 5, dtype=torch.float64)
    expected = like.clone()
    found = RowSum(like.shape, torch.float64, lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype))
    for seed, (start, length, first_row) in enumerate(parts):
        rows = Rows(slice(0, 1 if first_row else None), slice(start, min(start + length, 7)))
        part = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        part = part[rows.batch, :, rows.tokens]
        expected[rows.batch, :, rows.tokens] += part
        found.add(rows, part)
    torch.testing.assert_close(found.sum, expected, rtol=0, atol=1e-14)


# -- words -----------------------------------------------------------------------------------------------------------

WORDS = {
    "a softcap at its end": ({"softcap": 1e30}, None, ""),
    "a softcap of numpy": ({"softcap": np.float32(3)}, None, ""),
    "a scale beyond all numbers": ({"scale": 10**400}, PlanError, "scale must be a finite number"),
    "a class for a bias": ({"bias": Alibi}, DtypeError, "bias must be Alibi(slopes)"),
    "one letter too few": ({"sink": 1}, TypeError, "did you mean sinks?"),
}


@pytest.mark.parametrize("what", WORDS)
def test_arguments_at_the_edge(what):
    asked, error, words = WORDS[what]
    x = torch.zeros(1, 1, S, 2)
    if error is None:
        assert plan().attention(x, x, x, **asked).isfinite().all()
        return
    with pytest.raises(error) as problem:
        plan().attention(x, x, x, **asked)
    assert words in str(problem.value)


def test_explain_of_half_a_rank():
    x = torch.zeros(1, 1, S, 2)
    with pytest.raises(PlanError, match=r"ring_rank must be from 0 to 2; got 1\.5"):
        plan().explain(x, x, x, ring_rank=1.5)
