"""Arguments that cannot be taken: refused in the user's words; and the values that carry them travel and compare."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
import torch

from ringspun import Causal, Contiguous, Documents, Full, Striped, Zigzag
from ringspun.core.buckets import Buckets
from ringspun.errors import DtypeError, KernelRefused, LayoutError, NotDifferentiable, PlanError, ShapeError
from ringspun.testing.cases import BUCKETS, bias_of_positions
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.bias import Alibi, RelativeTable, function_rule

S, H = 8, 4


def attend(plan=None, batch: int = 2, **asked):
    plan = plan or ContextParallel(Loopback(2)).plan(S, Causal())
    q, k, v = (torch.ones(batch, heads, S, size) for heads, size in ((H, 6), (2, 6), (2, 5)))
    return plan.attention(q, k, v, **asked)


def table(*shape: int, **options) -> RelativeTable:
    return RelativeTable(torch.ones(shape, **options), BUCKETS)


class Unhashable:
    def __eq__(self, other):
        return True

    def __call__(self, q, k):
        return (q - k).float()


SLOPE = torch.ones((), requires_grad=True)
WRONG = {
    "sinks of another shape": (
        ShapeError,
        {"sinks": torch.ones(H + 1)},
        "sinks must be [H], one per query head; got (5,)",
    ),
    "sinks per key head": (ShapeError, {"sinks": torch.ones(2)}, "got (2,) for 4 heads"),
    "sinks with a batch": (ShapeError, {"sinks": torch.ones(1, H)}, "got (1, 4) for 4 heads"),
    "one sink": (ShapeError, {"sinks": torch.tensor(1.0)}, "got () for 4 heads"),
    "whole sinks": (
        DtypeError,
        {"sinks": torch.ones(H, dtype=torch.int64)},
        "sinks must be floating point (ring rank 0 of 2)",
    ),
    "sinks of a byte": (
        DtypeError,
        {"sinks": torch.ones(H).to(torch.float8_e4m3fn)},
        "sinks must be float64, float32, bfloat16 or float16 (ring rank 0 of 2); got torch.float8_e4m3fn",
    ),
    "a list of sinks": (DtypeError, {"sinks": [0.0] * H}, "sinks must be a tensor (ring rank 0 of 2); got list"),
    "sinks elsewhere": (DtypeError, {"sinks": torch.ones(H, device="meta")}, "sinks must be on q's device"),
    "slopes of another shape": (
        ShapeError,
        {"bias": Alibi(torch.ones(H, 1))},
        "slopes must be [H], one per query head; got (4, 1)",
    ),
    "whole slopes": (DtypeError, {"bias": Alibi(torch.ones(H, dtype=torch.int32))}, "slopes must be floating point"),
    "slopes elsewhere": (DtypeError, {"bias": Alibi(torch.ones(H, device="meta"))}, "slopes must be on q's device"),
    "a list of slopes": (DtypeError, {"bias": Alibi([1.0] * H)}, "slopes must be a tensor"),
    "a transposed table": (
        ShapeError,
        {"bias": table(H, 8)},
        "table must be [N, H], a row per bucket and a column per query head; got (4, 8)",
    ),
    "too few buckets": (ShapeError, {"bias": table(7, H)}, "got (7, 4) for 8 buckets and 4 heads"),
    "a whole table": (DtypeError, {"bias": table(8, H, dtype=torch.int64)}, "table must be floating point"),
    "no buckets": (DtypeError, {"bias": RelativeTable(torch.ones(8, H), [0, 1])}, "buckets must be Buckets; got list"),
    "a dense bias": (DtypeError, {"bias": torch.zeros(S, S)}, "A dense bias would need the whole S x S on every rank"),
    "a word": (
        DtypeError,
        {"bias": "alibi"},
        "bias must be Alibi(slopes), RelativeTable(table, buckets) or a function of positions; got str",
    ),
    "integers of a function": (
        DtypeError,
        {"bias": lambda q, k: q - k},
        "bias function must return a floating point tensor; got torch.int64",
    ),
    "booleans of a function": (DtypeError, {"bias": lambda q, k: q >= k}, "got torch.bool"),
    "an array of a function": (
        DtypeError,
        {"bias": lambda q, k: np.ones((2, 3))},
        "floating point tensor; got ndarray",
    ),
    "one number of a function": (
        ShapeError,
        {"bias": lambda q, k: torch.ones(())},
        "bias function must return [H, t, s]",
    ),
    "a batch of a function": (
        ShapeError,
        {"bias": lambda q, k: torch.ones(1, 1, 2, 3)},
        "got (1, 1, 2, 3) for t=2, s=3 and 4 heads",
    ),
    "heads of a function": (
        ShapeError,
        {"bias": lambda q, k: torch.ones(2, 2, 3)},
        "got (2, 2, 3) for t=2, s=3 and 4 heads",
    ),
    "keys before queries": (ShapeError, {"bias": lambda q, k: (k - q).float().T}, "got (3, 2)"),
    "a function with a gradient": (
        NotDifferentiable,
        {"bias": lambda q, k: SLOPE * (q - k)},
        "bias function must not return what needs a gradient",
    ),
    "a function without a hash": (DtypeError, {"bias": Unhashable()}, "bias function must be hashable"),
    "no softcap": (
        PlanError,
        {"softcap": 0.0},
        "softcap must be a number from 1e-30 to 1e30, or None for none; got 0.0",
    ),
    "a negative softcap": (PlanError, {"softcap": -1.0}, "got -1.0"),
    "nan": (PlanError, {"softcap": float("nan")}, "got nan"),
    "infinity": (PlanError, {"softcap": float("inf")}, "got inf"),
    "a softcap that float32 cannot hold": (PlanError, {"softcap": 1e300}, "got 1e+300"),
    "a softcap that float32 cannot divide by": (PlanError, {"softcap": 1e-320}, "got 1e-320"),
    "a softcap in a tensor": (PlanError, {"softcap": torch.tensor(2.0)}, "got tensor(2.)"),
    "a flag": (PlanError, {"softcap": True}, "got True"),
    "aten_cpu and softcap": (
        KernelRefused,
        {"softcap": 2.0, "kernel": "aten_cpu"},
        "aten_cpu: softcap must be None; got 2.0.",
    ),
    "aten_cpu and a bias": (
        KernelRefused,
        {"bias": bias_of_positions, "kernel": "aten_cpu"},
        "aten_cpu: bias must be None; got function.",
    ),
    "aten_cpu and both": (
        KernelRefused,
        {"softcap": 2.0, "bias": table(8, H), "kernel": "aten_cpu"},
        "aten_cpu: softcap must be None; got 2.0, bias must be None; got relative table.",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_of_a_call_that_do_not_fit(wrong):
    error, asked, words = WRONG[wrong]
    plan = ContextParallel(Loopback(2)).plan(S, Causal())
    with pytest.raises(error, match=re.escape(words)):
        attend(plan, **asked)
    assert not plan.partition.context.driver.counts.messages
    assert attend(plan).isfinite().all()


def test_a_dtensor_is_refused():
    class DTensor(torch.Tensor):
        """Known by its name, so that torch.distributed.tensor need not be imported."""

    for name, asked in (("sinks", {"sinks": torch.ones(H)}), ("slopes", {"bias": Alibi(torch.ones(H))})):
        x = (asked["sinks"] if name == "sinks" else asked["bias"].slopes).as_subclass(DTensor)
        with pytest.raises(
            DtypeError, match=rf"{name} must be a plain tensor .*got a DTensor\. Pass its `.to_local\(\)`"
        ):
            attend(**({"sinks": x} if name == "sinks" else {"bias": Alibi(x)}))


def test_a_function_is_tried_where_it_will_be_used():
    table = torch.ones(5, device="meta")
    rule = function_rule(lambda q, k: table[(q - k).abs()], H, torch.device("meta"))
    assert rule.scores(table, torch.ones(4, 1).long().to("meta"), torch.ones(1, 3).long().to("meta")).shape == (1, 4, 3)


@pytest.mark.parametrize("wrong", [lambda q, k: torch.zeros(2, 3), lambda q, k: (q * k).float().squeeze()[..., None]])
def test_a_function_whose_shape_is_wrong_only_for_some_blocks(wrong):
    def late(q, k):
        return wrong(q, k) if len(q) != 2 else (q - k).float()

    plan = ContextParallel(Loopback(1)).plan(S, Full())
    with pytest.raises(ShapeError, match=r"bias function must return \[H, t, s\] .*for t=8, s=8 and 4 heads"):
        attend(plan, bias=late)


def test_a_batch_of_another_size_than_the_masks():
    plan = ContextParallel(Loopback(2)).plan(S, [Causal(), Full(), Causal()])
    for batch in (0, 1, 2, 4):
        with pytest.raises(ShapeError, match="q, k and v must have a batch of 3, a row per mask of the plan; got"):
            attend(plan, batch)
    assert attend(plan, 3).shape == (3, H, S, 5)


PLANS = {
    "no list of masks": (PlanError, {"mask": []}, "mask must be a ringspun mask; got []"),
    "words among the masks": (PlanError, {"mask": [Causal(), "full"]}, "got [Causal(), 'full']"),
    "steps that do not meet": (
        PlanError,
        {"key_layout": Striped()},
        "query and key runs that meet must share a step; got steps 1 and 3",
    ),
    "a layout in words": (
        LayoutError,
        {"key_layout": "zigzag"},
        "layout must be a Layout, e.g. Zigzag(); got 'zigzag'",
    ),
    "a start alone": (PlanError, {"query_start": 3}, "query_start must come with key_len; got query_start=3 alone"),
    "a start and another layout": (
        PlanError,
        {"query_start": 3, "key_layout": Contiguous()},
        "query_start must come with key_len; got query_start=3 alone",
    ),
    "a start in words": (
        LayoutError,
        {"query_start": "3", "key_len": S, "mask": Documents([3, 5])},
        "start must be an integer within +-2**48; got '3'",
    ),
    "half a start": (
        LayoutError,
        {"query_start": 0.5, "key_len": S},
        "start must be an integer within +-2**48; got 0.5",
    ),
    "a start too far": (
        LayoutError,
        {"query_start": 2**48 + 1, "key_len": S},
        "start must be an integer within +-2**48",
    ),
    "a negative length": (LayoutError, {"key_len": -1}, "must be an integer >= 0; got -1"),
    "half a length": (LayoutError, {"key_len": 2.5}, "must be an integer >= 0; got 2.5"),
    "documents of the partition that are not the rows'": (
        PlanError,
        {"mask": [Documents([3, 5]), Documents([4, 4])], "documents": Documents([3, 5])},
        "the same in the partition and in the mask; the partition has documents([3, 5]), the mask documents([4, 4])",
    ),
}


@pytest.mark.parametrize("wrong", PLANS)
def test_arguments_of_a_plan_that_do_not_fit(wrong):
    error, asked, words = PLANS[wrong]
    with pytest.raises(error, match=re.escape(words)):
        ContextParallel(Loopback(3), layout=Zigzag()).plan(S, **({"mask": Causal()} | asked))


def test_keys_that_are_no_partition():
    part = ContextParallel(Loopback(2)).partition(S)
    with pytest.raises(PlanError, match=r"keys must be a Partition; got 8\. Write keys=context\.partition\(key_len\)"):
        part.plan(Causal(), keys=8)
    with pytest.raises(LayoutError, match=r"keys must be dealt to the queries' ring of 2; got one of 3\."):
        part.plan(Causal(), keys=ContextParallel(Loopback(3)).partition(S))


def test_shapes_of_cross_attention_name_both_sides():
    plan = ContextParallel(Loopback(2), layout=Contiguous()).plan(S, Full(), key_len=5)
    with pytest.raises(ShapeError, match=r"q must hold 8, k and v 5 tokens in dim 2; .*plan\.queries and plan\.keys"):
        attend(plan)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_biases_are_values_that_travel(copied):
    alibi, relative = copied(Alibi(torch.rand(H))), copied(table(8, H))
    assert relative.buckets == BUCKETS and hash(relative.buckets) == hash(BUCKETS)
    assert copied(BUCKETS) == BUCKETS and str(copied(BUCKETS)) == str(BUCKETS)
    for one in (alibi, relative):
        assert copied(one.rule) == one.rule and hash(copied(one.rule)) == hash(one.rule)
        assert torch.equal(copied(one).values, one.values)
        assert one == one and one != copied(one) and len({one, copied(one)}) == 2  # as tensors: by identity
        with pytest.raises(AttributeError):
            one.extra = 1
    right = attend(bias=Alibi(alibi.slopes))
    assert torch.equal(attend(bias=alibi), right)


def test_buckets_without_edges_have_one_row():
    one = Buckets([], [2])
    rows = torch.rand(3, H)
    assert one.count == 3 and one(np.arange(-2, 3)).tolist() == [2] * 5
    distance = torch.arange(4)[:, None] - torch.arange(5)[None, :]
    found = RelativeTable(rows, one).rule.scores(rows, torch.arange(4)[:, None], torch.arange(5)[None, :])
    assert torch.equal(found, rows[2][:, None, None].expand(H, *distance.shape))
