"""A ring of devices gives what dense attention in float64 gives, forward and backward. Rows of shards that hold no
token are NaN. One compiled program per ring size takes every mask and layout: what differs between them is data."""

from __future__ import annotations

import pytest

from ringspun import Balanced, Causal, Contiguous, Documents, DocumentZigzag, Striped, Window, Zigzag
from ringspun.testing import certify
from ringspun.testing.cases import Arguments, Case, Shape, all_masks, inputs, reference
from ringspun.testing.comparison import errors, judge
from ringspun.testing.jax import OnDevices, run_ring
from ringspun.testing.problem import oracle, problem_of, yardstick

pytestmark = pytest.mark.usefixtures("compiled_in_haste")
SEQ_LEN = 37
LAYOUTS = (Contiguous(), Zigzag(), Striped(), DocumentZigzag(), Balanced(), Zigzag(speeds=[1, 2, 3, 1]))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_mask_and_layout_in_float64(ranks):
    """37 is divisible by nothing; the last layout gives unequal shares. Four ranks see all masks, others take turns."""
    masks = all_masks(SEQ_LEN) if ranks == 4 else all_masks(SEQ_LEN)[ranks % 5 :: 5]
    for n, mask in enumerate(masks):
        for layout in LAYOUTS if ranks == 4 and n % 4 == 0 else LAYOUTS[:3]:
            case = Case(ranks, SEQ_LEN, mask, layout)
            error = errors(run_ring(case, inputs(case)), reference(case, inputs(case)))
            assert judge("float64", [error], [])[0], (mask, layout, error.worst)


def test_all_terms_at_once():
    """Sinks, slopes and softcap, with their gradients, under masks that hide whole rows."""
    for mask in (Causal(), Causal() & Documents([5, 9, 1, 8], [0, 6, 15, 20]), Window(7)):
        for layout in LAYOUTS[:3]:
            case = Case(4, 29, mask, layout, arguments=Arguments(0.7, 1.5, sinks=True, bias="alibi"))
            error = errors(run_ring(case, inputs(case)), reference(case, inputs(case)))
            assert set(error.worst) == {"out", "lse", "dq", "dk", "dv", "dsinks", "dbias"}
            assert judge("float64", [error], [])[0], (mask, layout, error.worst)


@pytest.mark.parametrize(("dtype", "ranks"), [("float32", 4), ("bfloat16", 8)])
def test_narrow_dtypes_are_as_good_as_dense(dtype, ranks):
    """N5: float32 within twice dense float32's own error; bfloat16 on 8 ranks no worse than on one."""
    for mask in (Causal(), Window(9)):
        cases = [Case(ranks, 64, mask, Zigzag(), dtype, Shape(2, 4, 2, 16, 16), seed) for seed in range(4)]

        def measured(cases):
            return [errors(run_ring(case, problem_of(case).given), oracle(case)) for case in cases]

        dense = [errors(yardstick(case), oracle(case)) for case in cases]
        alone = None
        if dtype == "bfloat16":
            alone = measured([Case(1, 64, mask, Zigzag(), dtype, case.shape, case.seed) for case in cases])
        passed, bars = judge(dtype, measured(cases), dense, alone)
        assert passed, (mask, bars, [e.worst for e in measured(cases)])


def test_certified_by_the_suite_that_certifies_torch():
    """The same cases by the same judge; what jax cannot do is refused, not answered."""
    report = certify(OnDevices(3, Zigzag()), properties=["causal", "documents", "padding is never read", "bias"])
    assert report.ok, str(report)
    assert report["bias"].status == "partly" and "bias must be Alibi" in str(report)
