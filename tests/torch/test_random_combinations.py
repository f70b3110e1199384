"""Everything with everything: random masks, layouts, rings, lengths and arguments equal the oracle, gradients too."""

from __future__ import annotations

import pytest
from combinations import cases, kernels, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import run_cases

from ringspun.testing.cases import Case, inputs, reference
from ringspun.testing.comparison import errors, judge
from ringspun.testing.torch import run_ring

EXAMPLES = 300
"""Of the law on the loopback; `--hypothesis-profile=explore` draws more."""
SAMPLE, SEED = 20, 2024
"""Cases per ring of processes, and what they are drawn with."""


def check(case: Case, found: dict) -> None:
    error = errors(found, reference(case, inputs(case)))
    assert judge("float64", [error], [])[0], f"{case}: {error.worst}"


@settings(max_examples=max(EXAMPLES, settings().max_examples))
@given(st.data(), cases())
def test_any_call_on_a_loopback_equals_the_oracle(data, case):
    kernel = data.draw(st.sampled_from(kernels(case)))
    check(case, run_ring(case, inputs(case), kernel=kernel))


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_fixed_sample_over_processes_equals_the_oracle(pools, ranks):
    drawn = sample(SAMPLE, SEED, ranks)
    for one in pools(ranks).run(run_cases, drawn, timeout_s=50):
        for case, found in zip(drawn, one, strict=True):
            check(case, found)


def test_the_sample_is_the_same_everywhere():
    assert str(sample(SAMPLE, SEED, 3)) == str(sample(SAMPLE, SEED, 3)) != str(sample(SAMPLE, SEED, 2))
    asked = [case.arguments for ranks in (2, 3) for case in sample(SAMPLE, SEED, ranks)]
    assert {a.bias for a in asked} == {"", "alibi", "table", "function"}
    assert {a.sinks for a in asked} == {a.softcap is None for a in asked} == {True, False}
