"""What `certify` found: per property one verdict, as text for people and as plain data for machines."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ringspun.testing.diagnosis import Finding

PASSED, FAILED, REFUSED, PARTLY, NOT_GIVEN = "passed", "failed", "refused", "partly", "not given"
SHOWN_FINDINGS = 3
"""Wrong tensors of a case that a report prints; the first is usually the cause of the others."""


@dataclass(frozen=True)
class Trial:
    """One case.

    Args:
        case: its name. status: passed, failed, refused or not given. worst: largest error over its bar. tensor: whose.
        error, bar: of that tensor. reason: of a refusal, or why it is not certified. findings: what is wrong.
    """

    case: str
    status: str
    worst: float = 0.0
    tensor: str = ""
    error: float = 0.0
    bar: float = 0.0
    reason: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """One property, `name`: what its cases say together."""

    name: str
    trials: tuple[Trial, ...]

    @property
    def status(self) -> str:
        """failed: a case failed. passed: all passed. partly: some passed, the others were not done. refused: none was
        done, one was refused. not given: what they need is not given."""
        found = {t.status for t in self.trials}
        if found == {PASSED} or FAILED in found:
            return min(found)
        return PARTLY if PASSED in found else max(found)

    @property
    def worst(self) -> Trial:
        """The case nearest to its bar, or furthest beyond it."""
        return max(self.trials, key=lambda t: t.worst)

    @property
    def reason(self) -> str:
        """Why the first case that was not done was not."""
        return next((t.reason for t in self.trials if t.reason), "")

    def count(self, status: str) -> int:
        """How many cases have a status."""
        return sum(t.status == status for t in self.trials)

    def __str__(self) -> str:
        total, done = len(self.trials), self.count(PASSED)
        name = f"  {self.status:<10} {self.name:<22}"
        if self.status == FAILED:
            return "\n".join([f"{name} {self.count(FAILED)} of {total} cases", *self._failures()])
        cases = f"{done} of {total} cases" if self.status == PARTLY else f"{total} case{'s' * (total > 1)}"
        if self.status in (REFUSED, NOT_GIVEN):
            return f"{name} {cases:<15} {self.reason}"
        nearest = self.worst
        figures = f"{nearest.tensor} {nearest.error:.1e}, bar {nearest.bar:.1e}"
        return f"{name} {cases:<15} {figures}{f'; not done: {self.reason}' if self.status == PARTLY else ''}"

    def _failures(self) -> list[str]:
        lines = []
        for trial in (t for t in self.trials if t.status == FAILED):
            said = [str(f) for f in trial.findings[:SHOWN_FINDINGS]] or [trial.reason]
            if len(trial.findings) > SHOWN_FINDINGS:
                said.append("and " + ", ".join(f.tensor for f in trial.findings[SHOWN_FINDINGS:]))
            lines += [f"             {trial.case}: {said[0]}", *(f"               {line}" for line in said[1:])]
        return lines


@dataclass(frozen=True)
class Report:
    """All verdicts on one attention in one dtype. ``print(report)``.

    Args:
        name: of the attention. dtype: of q, k, v. gives: tensors that were judged; the others are not certified.
        missing: tensors that are not given. verdicts: per property. versions: of what it ran with.
    """

    name: str
    dtype: str
    gives: tuple[str, ...]
    missing: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    versions: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether nothing failed and something passed. What is refused or not given is no failure, and no success."""
        return not self.properties(FAILED) and bool(self.properties(PASSED) or self.properties(PARTLY))

    def properties(self, status: str) -> tuple[str, ...]:
        """The properties with a status: "passed", "failed", "refused", "partly" (some cases refused), "not given"."""
        return tuple(v.name for v in self.verdicts if v.status == status)

    def __getitem__(self, name: str) -> Verdict:
        return next(v for v in self.verdicts if v.name == name)

    def __str__(self) -> str:
        passed = len(self.properties(PASSED))
        state = f"{passed} of {len(self.verdicts)} properties passed" if self.ok else "FAILED"
        lines = [f"{self.name}, {self.dtype}: {state}"]
        if self.missing:
            lines.append(f"  not given, so not certified: {', '.join(self.missing)}")
        return "\n".join([*lines, *map(str, self.verdicts)])

    def to_dict(self) -> dict[str, Any]:
        """As plain data that `json` writes."""
        verdicts = [
            {"property": v.name, "status": v.status, "trials": [asdict(t) for t in v.trials]} for v in self.verdicts
        ]
        return dict(plain({**asdict(self), "ok": self.ok, "verdicts": verdicts}))


def plain(x: Any) -> Any:
    """`x` with None for infinite numbers and NaN, which JSON has not."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
