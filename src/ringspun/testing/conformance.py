"""`certify`: run anybody's attention through the conformance suite and say what it does, refuses and gets wrong."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np

import ringspun
from ringspun.errors import KernelRefused, UnsupportedByRing
from ringspun.testing.cases import Case, uses_lse
from ringspun.testing.comparison import FLOAT32_EPS, Errors, asked, errors, judge, rms
from ringspun.testing.diagnosis import Finding, diagnose
from ringspun.testing.problem import GIVES, Answer, Candidate, Function, Problem, oracle, problem_of, yardstick
from ringspun.testing.report import FAILED, NOT_GIVEN, PASSED, REFUSED, Report, Trial, Verdict
from ringspun.testing.suite import PROPERTIES, NamedCase, suite

SEEDS = 4
"""Seeds of the dense attention that calibrates bars, and of the bfloat16 results whose errors are averaged."""
LSE_ROUNDINGS = 2
"""What large scores are granted beside, in units of their float32 rounding: a ring rounds lse again at each merge."""
FAR = 4.0
"""How many times the bar, which is a mean there, one entry of a bfloat16 result must miss to be shown as wrong."""


def certify(
    kernel: Callable[[Problem], Answer] | Candidate,
    *,
    dtype: str = "float64",
    properties: Iterable[str] | None = None,
    gives: Iterable[str] | None = None,
    name: str | None = None,
) -> Report:
    """Hold an attention, forward and backward, against the float64 oracle, property by property.

    A case passes when every tensor given is within its bar: 1e-12 in float64; in float32 and bfloat16 twice the error
    of dense attention in that dtype (`ringspun.testing.comparison.judge`). An attention that cannot do a case raises
    `KernelRefused` (or `UnsupportedByRing`) and is listed as refusing it; one that answers wrongly, or raises anything
    else, fails.

    Args:
        kernel: a function of a `Problem` that returns an `Answer`, or a `Candidate`: `ringspun.testing.candidates` has
            those of torch. dtype: "float64", "float32" or "bfloat16". properties: some of
            `ringspun.testing.suite.PROPERTIES`; default all.
        gives: which of out, lse, dq, dk, dv, dsinks, dbias a plain function returns; default all. What it does not give
            is listed as not certified. A `Candidate` says so itself. name: in the report; default the kernel's own.
    Returns:
        a `Report`: ``print`` it, ask ``report.ok``, or ``json.dumps(report.to_dict())``.
    Raises:
        ValueError: an unknown dtype, property or tensor; `gives` for a `Candidate`.
    """
    candidate = _candidate(kernel, gives, name)
    trials = [(named.property, _attempt(candidate, named)) for named in suite(dtype, properties)]
    order = list(PROPERTIES)
    trials.sort(key=lambda pair: order.index(pair[0]))
    verdicts = tuple(
        Verdict(kind, tuple(trial for _, trial in group)) for kind, group in groupby(trials, key=lambda pair: pair[0])
    )
    missing = tuple(n for n in GIVES if n not in candidate.gives)
    return Report(name or candidate.name, dtype, candidate.gives, missing, verdicts, versions())


def versions() -> dict[str, str]:
    """Of what a report was made with; frameworks add their own."""
    return {"ringspun": ringspun.__version__, "python": platform.python_version(), "numpy": np.__version__}


def _candidate(
    kernel: Callable[[Problem], Answer] | Candidate, gives: Iterable[str] | None, name: str | None
) -> Candidate:
    if isinstance(kernel, Candidate):
        if gives is not None:
            raise ValueError(f"gives must be left out for a Candidate, which says it itself; got {gives!r}.")
        return kernel
    wanted = GIVES if gives is None else tuple(gives)
    for tensor in wanted:
        if tensor not in GIVES:
            raise ValueError(f"gives must be among {', '.join(GIVES)}; got {tensor!r}.")
    if "out" not in wanted:
        raise ValueError(f"gives must hold 'out'; got {wanted!r}.")
    return Function(kernel, wanted, name or str(getattr(kernel, "__name__", type(kernel).__name__)))


def _attempt(candidate: Candidate, named: NamedCase) -> Trial:
    """One case, over as many seeds as its dtype is judged by."""
    lacking = _lacking(candidate, named)
    if lacking:
        return Trial(named.name, NOT_GIVEN, reason=lacking)
    cases = [replace(named.case, seed=seed) for seed in range(SEEDS if named.case.dtype == "bfloat16" else 1)]
    try:
        answers = _answers(candidate, cases)
    except (KernelRefused, UnsupportedByRing) as refusal:
        return Trial(named.name, REFUSED, reason=str(refusal))
    except Exception as problem:  # anybody's code: whatever it raises is its fault, and the suite goes on
        return Trial(named.name, FAILED, np.inf, reason=f"raised {type(problem).__name__}: {problem}")
    return _judged(candidate, named.name, cases, answers)


def _answers(candidate: Candidate, cases: list[Case]) -> list[dict[str, np.ndarray]]:
    return [_arrays(candidate.answer(problem_of(case)), case, candidate.gives) for case in cases]


def _lacking(candidate: Candidate, named: NamedCase) -> str:
    """Why a case cannot be certified, or ""."""
    if not uses_lse(named.case):
        return "there is no bar for it in bfloat16" if named.property == "lse gradient" else ""
    absent = [n for n in ("lse", "dq", "dk") if n not in candidate.gives]
    return f"needs {', '.join(absent)}" if absent else ""


def _arrays(answer: Answer, case: Case, gives: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Float64 copies of what is judged.

    Raises:
        ValueError: something that `gives` names is not there.
    """
    found = {}
    for name in asked(oracle(case)):
        if name in gives:
            value = getattr(answer, name)
            if value is None:
                raise ValueError(f"{name} must be given, as `gives` says; got None.")
            found[name] = np.array(value, np.float64)
    return found


def _judged(candidate: Candidate, name: str, cases: list[Case], answers: list[dict[str, np.ndarray]]) -> Trial:
    tensors, dtype = tuple(answers[0]), cases[0].dtype

    def measured(many: list[dict[str, np.ndarray]]) -> list[Errors]:
        return [errors(x, oracle(case), tensors) for x, case in zip(many, cases, strict=True)]

    found, one = measured(answers), candidate.alone()
    alone = None if one is None or dtype != "bfloat16" else measured(_answers(one, cases))
    seeded = [] if dtype == "float64" else [replace(cases[0], seed=seed) for seed in range(SEEDS)]
    _, bars = judge(dtype, found, [errors(yardstick(case), oracle(case), tensors) for case in seeded], alone)
    if seeded:
        bars = {n: bar + LSE_ROUNDINGS * FLOAT32_EPS * cases[0].offset for n, bar in bars.items()}
    error = rms(found) if dtype == "bfloat16" else {n: max(e.worst[n] for e in found) for n in tensors}
    wrong = [n for n in tensors if not error[n] <= bars[n]]
    worst = max(tensors, key=lambda n: error[n] / bars[n])
    findings = tuple(_findings(candidate, name, cases[0], answers[0], {n: (error[n], bars[n]) for n in wrong}))
    status = FAILED if wrong else PASSED
    return Trial(name, status, error[worst] / bars[worst], worst, error[worst], bars[worst], findings=findings)


def _findings(
    candidate: Candidate, name: str, case: Case, answer: dict[str, np.ndarray], wrong: dict[str, tuple[float, float]]
) -> Iterator[Finding]:
    for tensor, (error, bar) in wrong.items():
        shown = FAR * bar if case.dtype == "bfloat16" else bar
        owners = candidate.owners(problem_of(case))
        where, looks = diagnose(tensor, answer[tensor], getattr(oracle(case), tensor), shown, owners)
        yield Finding(name, tensor, error, bar, where, looks)
