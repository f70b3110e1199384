"""`certify`: right attentions pass, wrong ones are found and described, nothing is passed over."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ringspun import Contiguous
from ringspun.core.reference import attention_with_gradients
from ringspun.errors import KernelRefused, UnsupportedByRing
from ringspun.testing import Answer, Problem, certify
from ringspun.testing.diagnosis import diagnose
from ringspun.testing.miniature import Miniature
from ringspun.testing.mutants import IN_BFLOAT16, MUTANTS, Mutant, ScaledGradientOfOneHead
from ringspun.testing.problem import GIVES
from ringspun.testing.suite import PROPERTIES, suite
from ringspun.testing.yardstick import DTYPES

NARROW = {
    "rows without keys", "padding is never read", "large scores", "sliding window", "two-sided window", "documents",
    "prefix", "long sequences", "rows of a batch", "cross-attention", "grouped heads", "scale", "value size", "softcap",
    "sinks", "bias", "lse gradient",
}  # fmt: skip
"""Properties whose mutants are wrong in nothing that plain attention needs."""


def dense(problem: Problem) -> Answer:
    """Dense attention in float64, which reads no padding."""
    q, k, v, dout = (np.nan_to_num(x) for x in (problem.q, problem.k, problem.v, problem.dout))
    dlse = None if problem.dlse is None else np.nan_to_num(problem.dlse)
    ref = attention_with_gradients(
        q, k, v, dout, dlse, allowed=problem.allowed, scale=problem.scale, softcap=problem.softcap,
        sinks=problem.sinks, bias=problem.bias,
    )  # fmt: skip
    dbias = None if ref.dbias is None else problem.bias_gradient(ref.dbias)
    return Answer(ref.out, ref.lse, ref.dq, ref.dk, ref.dv, ref.dsinks, dbias)


@pytest.fixture(autouse=True)
def quiet():
    """Mutants overflow, and are meant to."""
    with np.errstate(all="ignore"):
        yield


def test_every_property_has_cases_and_every_case_a_property():
    for dtype in DTYPES:
        named = suite(dtype)
        assert {c.property for c in named} == set(PROPERTIES)
        assert len({(c.property, c.name) for c in named}) == len(named)
        assert all(c.case.dtype == dtype for c in named)


def test_every_query_sees_a_key_where_rows_without_keys_are_not_the_point():
    """A kernel that refuses rows without keys must be able to pass the rest."""
    for named in suite():
        seen = named.case.allowed.any(-1).all()
        spared = ("rows without keys", "padding is never read", "sinks", "lse gradient", "together")
        assert seen or named.property in spared, named


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("candidate", [dense, Miniature(3), Miniature(1, Contiguous())], ids=["dense", "R=3", "R=1"])
def test_a_right_attention_passes(candidate, dtype):
    """A false alarm."""
    report = certify(candidate, dtype=dtype)
    assert report.ok, str(report)
    left = {"lse gradient"} if dtype == "bfloat16" else set()
    assert set(report.properties("passed")) == set(PROPERTIES) - left
    assert set(report.properties("not given")) == left


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_every_mutant_is_found_by_its_property(mutant: type[Mutant]):
    """A suite that a planted fault gets through. What it does not touch still passes: the finding is no accident."""
    wanted = [mutant.found_by, "full attention"]
    report = certify(mutant(), properties=wanted)
    assert not report.ok and mutant.found_by in report.properties("failed"), str(report)
    if mutant.found_by in NARROW:
        assert report["full attention"].status == "passed", str(report)


@pytest.mark.parametrize("mutant", IN_BFLOAT16, ids=lambda m: m.__name__)
def test_rounding_at_every_step_is_found_in_bfloat16(mutant: type[Mutant]):
    """An error that grows with the ring; a short ring may do it, a right one of the same size passes."""
    wanted = [mutant.found_by]
    assert not certify(mutant(8), dtype="bfloat16", properties=wanted).ok
    assert certify(Miniature(8), dtype="bfloat16", properties=wanted).ok
    assert certify(mutant(8), properties=wanted).ok


def test_there_are_mutants_of_most_properties():
    assert len(MUTANTS) >= 25 and all(m.found_by in PROPERTIES and m.__doc__ for m in MUTANTS)


def test_a_subtle_fault_is_named_by_property_tensor_and_head():
    """dK of one head a thousandth too large, the forward pass right."""
    report = certify(ScaledGradientOfOneHead(), properties=["full attention"])
    (finding,) = report["full attention"].trials[0].findings
    assert (finding.tensor, finding.where) == ("dk", "kv head 1 of 3")
    assert finding.looks == "1.001 times the right value"
    assert "full: dk, kv head 1 of 3: 1.001 times the right value" in str(report)


def wrong(tensor: str, change) -> str:
    """What the report says of a dense attention with one tensor changed."""

    def attention(problem: Problem) -> Answer:
        answer = dense(problem)
        return Answer(**{**vars(answer), tensor: change(getattr(answer, tensor).copy())})

    report = certify(attention, properties=["causal"])
    assert report.properties("failed") == ("causal",)
    (finding,) = report["causal"].trials[0].findings
    return f"{finding.tensor}, {finding.where}: {finding.looks}"


def zeroed(x, at):
    x[at] = 0
    return x


@pytest.mark.parametrize(
    ("tensor", "change", "said"),
    [
        ("lse", lambda x: x / np.log(2), "lse, everywhere: 1.4427 times the right value (base 2 instead of e?)"),
        ("lse", lambda x: x + 0.5, "lse, everywhere: off by +0.5 throughout"),
        ("lse", lambda x: x * (1 + 1e-8), "lse, everywhere: 1+1.0e-08 times the right value"),
        ("dv", lambda x: 2 * x, "dv, everywhere: 2 times the right value (counted twice?)"),
        ("dq", lambda x: -x, "dq, rows 1 to 36 of 37: -1 times the right value (sign?)"),
        ("dk", lambda x: zeroed(x, np.s_[1, 2, 5:9]), "dk, kv head 2 of 3, batch row 1 of 2, rows 5 to 8 of 37: zero"),
        (
            "out",
            lambda x: x[:, :, ::-1],
            "out, 36 rows from 0 to 36 of 37: rows hold the results of others: row 0 that of row 36",
        ),
        ("out", lambda x: x * np.nan, "out, everywhere: NaN"),
        ("out", lambda x: x[..., :3], "out, : shape (2, 3, 37, 3) instead of (2, 3, 37, 8)"),
    ],
)
def test_a_finding_says_where_and_how(tensor, change, said):
    assert wrong(tensor, change) == said


def test_a_finding_in_a_ring_names_the_rank():
    right = np.arange(24.0).reshape(1, 1, 12, 2)
    owners = (np.repeat([0, 1, 2], 4), np.repeat([2, 0, 1], 4))
    found = right + np.isin(np.arange(12), [5, 6])[:, None] * np.array([3.0, -7.0])
    assert diagnose("dq", found, right, 1e-12, owners)[0] == "rows 5 to 6 of 12, ring rank 1"
    assert diagnose("dv", found, right, 1e-12, owners)[0] == "rows 5 to 6 of 12, ring rank 0"


def test_a_refusal_is_listed_and_is_neither_failure_nor_success():
    def picky(problem: Problem) -> Answer:
        if problem.softcap is not None:
            raise KernelRefused("softcap must be None.")
        if problem.sinks is not None:
            raise UnsupportedByRing("sinks must be None.")
        return dense(problem)

    wanted = ("causal", "softcap", "sinks", "together")
    report = certify(picky, properties=wanted)
    assert report.ok and report.properties("passed") == ("causal",)
    assert report.properties("refused") == ("softcap", "sinks", "together")
    assert report["softcap"].reason == "softcap must be None."
    nothing = certify(picky, properties=["softcap"])
    assert not nothing.ok  # what refuses everything is not certified


def test_an_attention_that_ignores_an_argument_fails():
    """Accepted and ignored: the commonest fault of all."""

    def deaf(problem: Problem) -> Answer:
        q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
        ref = attention_with_gradients(q, k, v, dout, problem.dlse, allowed=problem.allowed, scale=problem.scale)
        return Answer(ref.out, ref.lse, ref.dq, ref.dk, ref.dv, np.zeros(3), np.zeros(3))

    report = certify(deaf, properties=["causal", "softcap", "sinks", "bias"])
    assert report.properties("failed") == ("softcap", "sinks", "bias")


def test_what_raises_anything_else_fails():
    def broken(problem: Problem) -> Answer:
        raise ZeroDivisionError("by a window of none")

    report = certify(broken, properties=["causal"])
    assert not report.ok and "causal: raised ZeroDivisionError: by a window of none" in str(report)


def test_what_is_not_given_is_listed_and_never_passed():
    report = certify(lambda problem: Answer(dense(problem).out), gives=["out"], name="forward alone")
    assert report.ok and report.missing == tuple(n for n in GIVES if n != "out")
    assert report.properties("not given") == ("lse gradient",)
    assert "not given, so not certified: lse, dq, dk, dv, dsinks, dbias" in str(report)
    assert {t.tensor for v in report.verdicts for t in v.trials} <= {"out", ""}


def test_what_is_promised_must_come():
    report = certify(lambda problem: Answer(dense(problem).out), gives=["out", "dq"], properties=["causal"])
    assert not report.ok and "dq must be given, as `gives` says; got None." in str(report)


def test_a_report_is_plain_data():
    report = certify(ScaledGradientOfOneHead(), properties=["causal", "sinks"])
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["ok"] is False and data["dtype"] == "float64" and set(data["versions"]) >= {"ringspun", "numpy"}
    (causal, sinks) = data["verdicts"]
    assert (causal["property"], causal["status"], sinks["property"]) == ("causal", "failed", "sinks")
    assert causal["trials"][0]["findings"][0]["where"] == "kv head 1 of 3"


def test_inputs_cannot_be_changed():
    """A kernel that writes into its inputs would spoil the next one's."""

    def careless(problem: Problem) -> Answer:
        problem.q[:] = 0
        return dense(problem)

    assert "read-only" in str(certify(careless, properties=["causal"]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float16"}, "dtype must be one of float64, float32, bfloat16; got 'float16'."),
        ({"properties": ["casual"]}, "properties must be among"),
        ({"gives": ["out", "dw"]}, "gives must be among"),
        ({"gives": ["dq"]}, "gives must hold 'out'"),
    ],
)
def test_what_cannot_be_certified_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        certify(dense, **options)


def test_a_candidate_says_itself_what_it_gives():
    with pytest.raises(ValueError, match="gives must be left out for a Candidate"):
        certify(Miniature(), gives=["out"])


def test_a_report_of_infinite_errors_is_json_too():
    report = certify(lambda problem: Answer(problem.v * np.nan), gives=["out"], properties=["causal"])
    trial = json.loads(json.dumps(report.to_dict(), allow_nan=False))["verdicts"][0]["trials"][0]
    assert trial["status"] == "failed" and trial["error"] is None
