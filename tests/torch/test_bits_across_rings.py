"""With `deterministic="across_rings"` the results are the same bit for bit on rings of every size; and right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hard_cases import judged
from on_ranks_bits import different, in_one_thread, on_processes

from ringspun import (
    Anchors,
    Balanced,
    Band,
    Blocks,
    Causal,
    Contiguous,
    Documents,
    DocumentZigzag,
    Full,
    Prefix,
    Striped,
    Window,
    Zigzag,
)
from ringspun.core.route import InOrder, Ring
from ringspun.errors import LayoutError, PlanError
from ringspun.testing.cases import Arguments, Case, Shape, inputs
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.kernels.base import Rows
from ringspun.torch.softmax import RunningSoftmax
from ringspun.torch.sums import RowSum

S, UNIT = 137, 16
DOCUMENTS = Documents([30, 5, 1, 40, 52])
MASKS = (
    Full(),
    Causal(),
    Causal() & Window(20),
    Band(9, 30),
    Causal() & DOCUMENTS,
    Causal() | Prefix(25),
    Causal() & (Window(11) | Anchors(3)),
    Blocks([[0, 1], [5, 0], [2], [1, 3, 4], [0, 2, 3], [5]], 24),
    (Causal(), Causal() & DOCUMENTS),
)
ARGUMENTS = (
    Arguments(),
    Arguments(sinks=True, bias="alibi"),
    Arguments(bias="table", softcap=2.0),
    Arguments(sinks=True),
    Arguments(bias="function"),
)
CASES = [
    Case(1, S, mask, Contiguous(), dtype=dtype, arguments=ARGUMENTS[(i + j) % len(ARGUMENTS)], seed=i)
    for i, mask in enumerate(MASKS)
    for j, dtype in enumerate(("float32", "bfloat16"))
]
LAYOUTS = (Contiguous(), Zigzag())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.mask}-{case.dtype}-{case.arguments.bias}")
def test_every_ring_gives_the_same_bits(case):
    alone = in_one_thread(case, route=InOrder(UNIT))
    for ranks in range(2, 9):
        layout = LAYOUTS[(ranks + case.seed) % 2]
        other = replace(case, ranks=ranks, layout=layout)
        assert not different(alone, in_one_thread(other, route=InOrder(UNIT))), (ranks, layout)


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: f"{case.mask}-{case.arguments.bias}")
def test_and_the_right_ones(case):
    for ranks, layout in ((1, Contiguous()), (3, Zigzag())):
        one = replace(case, ranks=ranks, layout=layout, dtype="float64")
        judged(one, in_one_thread(one, route=InOrder(UNIT)))


@pytest.mark.parametrize("kernel", ["aten_cpu", "eager"])
@pytest.mark.parametrize("length", [2697, 700, 512, 0], ids="{} tokens".format)
def test_units_of_512(length, kernel):
    """Short sequences leave ranks without tokens; the last unit is short."""
    mask = Causal() & Window(1100) & Documents([100, length - 100] if length else [])
    shape = Shape(batch=1, heads=2, kv_heads=1, head_size=8, value_size=5)
    case = Case(1, length, mask, Zigzag(), dtype="float32", shape=shape)
    alone = in_one_thread(case, kernel, deterministic="across_rings")
    for ranks in (2, 3, 8):
        other = in_one_thread(replace(case, ranks=ranks), kernel, deterministic="across_rings")
        assert not different(alone, other), ranks


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("mask", [Causal(), Window(3), Band(5, 2)], ids=str)
def test_heads_of_odd_sizes(mask, size):
    """Their rows begin anywhere in a cache line, where matrix products of few rows give other bits."""
    case = Case(1, 91, mask, Zigzag(), dtype="float32", shape=Shape(2, 4, 2, size, size), lse_gradient=False)
    alone = in_one_thread(case, route=InOrder(UNIT))
    for ranks in range(2, 9):
        assert not different(alone, in_one_thread(replace(case, ranks=ranks), route=InOrder(UNIT))), ranks


def test_with_two_threads():
    """Long enough that elementwise operations are shared out: over 32,768 numbers."""
    torch.set_num_threads(2)
    shape = Shape(batch=2, heads=4, kv_heads=2, head_size=9, value_size=7)
    case = Case(1, 1100, Window(200), Zigzag(), dtype="float32", shape=shape, arguments=Arguments(sinks=True))
    found = [in_one_thread(replace(case, ranks=ranks), deterministic="across_rings") for ranks in (1, 3)]
    assert not different(*found)


def test_cross_attention():
    case = Case(1, 50, Causal(), Zigzag(), dtype="float32", key_len=S, query_start=S - 50, key_layout=Contiguous())
    alone = in_one_thread(case, route=InOrder(UNIT))
    for ranks in range(2, 9):
        assert not different(alone, in_one_thread(replace(case, ranks=ranks), route=InOrder(UNIT))), ranks
    judged(replace(case, dtype="float64"), in_one_thread(replace(case, dtype="float64"), route=InOrder(UNIT)))


def test_strides_of_the_inputs_do_not_show():
    """Nor whether a rank's tensors have other rows beside them."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(1, S, 2, 8, generator=generator) for _ in range(4)]
    found = []
    for ranks, copies in ((1, False), (1, True), (3, False), (3, True)):
        part = ContextParallel(Loopback(ranks), route=InOrder(UNIT)).partition(S)
        q, k, v, dout = (part.shard(t, dim=1).transpose(1, 2) for t in x)
        q, k, v = ((t.contiguous() if copies else t).detach().requires_grad_() for t in (q, k, v))
        out = part.plan(Causal()).attention(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), dout.contiguous() if copies else dout)
        found.append([part.gather(t.detach(), dim=2) for t in (out, *grads)])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("rows", [slice(0, 4), slice(0, 2), slice(1, 3)], ids=str)
def test_what_comes_first_to_a_row_has_the_bits_of_a_sum_from_zero(rows):
    """Which rows were zeroed before anything came depends on the ring: -0 must become 0 in all."""
    x = torch.tensor([-0.0, 0.0, 1.0, -2.0]).view(1, 1, 4, 1)
    where = Rows(slice(0, None), rows)
    sums, merged = (
        [RowSum(x.shape, x.dtype, lambda shape, dtype: torch.empty(shape, dtype=dtype)) for _ in range(2)],
        [RunningSoftmax(x.shape, x.dtype, x.device) for _ in range(2)],
    )
    assert not sums[1].sum.any() and not merged[1].out.any()  # written from now on
    for one in sums:
        one.add(where, x[:, :, rows])
    for one in merged:
        one.add(where, x[:, :, rows].clone(), x[:, :, rows, 0].clone())
    results = [[t.numpy().tobytes() for t in (s.sum, m.out, m.lse)] for s, m in zip(sums, merged, strict=True)]
    assert results[0] == results[1] and not torch.signbit(sums[0].sum[sums[0].sum == 0]).any()


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_give_the_bits_of_one(pools, ranks):
    """The sums of all shares too: one rank holds the total, the others zero."""
    cases = [replace(case, ranks=ranks, layout=Zigzag()) for case in CASES[::3]]
    alone = [in_one_thread(case, route=InOrder(UNIT)) for case in CASES[::3]]
    for found in pools(ranks).run(on_processes, cases, 1, {"route": InOrder(UNIT)}):
        for case, (result,), expected in zip(cases, found, alone, strict=True):
            assert not different(result, expected), case


def test_the_relayed_ring_does_differ():
    """Else all of this would show nothing."""
    found = [in_one_thread(replace(CASES[0], ranks=ranks), route=Ring()) for ranks in (1, 2)]
    assert set(different(*found)) >= {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"deterministic": True}, PlanError, r"must be None or 'across_rings'; got True\. The same inputs on"),
        ({"deterministic": "across rings"}, PlanError, "got 'across rings'"),
        ({"deterministic": "across_rings", "route": Ring()}, PlanError, r"route must be 'auto' with .*got ring\."),
        *(
            (
                {"deterministic": "across_rings", "layout": layout},
                LayoutError,
                rf"Contiguous or Zigzag .*{layout}, which",
            )
            for layout in (Striped(), DocumentZigzag(), Balanced())
        ),
    ],
    ids=str,
)
def test_refusals(options, error, words):
    with pytest.raises(error, match=words.replace("striped(1)", "striped")):
        ContextParallel(Loopback(2), **options)
    assert ContextParallel(Loopback(2), deterministic=False).geometry.route == Ring()


def test_another_layout_of_a_partition_or_of_keys_is_refused_too():
    context = ContextParallel(Loopback(2), deterministic="across_rings")
    with pytest.raises(LayoutError, match="layout must be Contiguous or Zigzag"):
        context.partition(2000, layout=Striped())
    with pytest.raises(LayoutError, match="layout must be Contiguous or Zigzag"):
        context.plan(2000, Causal(), key_len=3000, key_layout=Balanced())


def test_rows_in_units_are_what_a_user_sees():
    part = ContextParallel(Loopback(3), deterministic="across_rings").partition(1700)
    assert part.core.tokens.tolist() == [512, 512, 512 + 164]
    x = torch.arange(1700.0)
    assert torch.equal(part.gather(part.shard(x, dim=0), dim=0), x)


def test_inputs_of_a_case_do_not_depend_on_the_ring():
    one, other = inputs(CASES[0]), inputs(replace(CASES[0], ranks=5))
    assert np.array_equal(one.q, other.q)
