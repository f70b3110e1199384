"""How far a result is from the oracle, and how far it may be: bars calibrated by dense attention in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core.reference import Reference

TENSORS = ("out", "lse", "dq", "dk", "dv")
SHARED = ("dsinks", "dbias")
"""Gradients of what all ranks hold; of calls that have such inputs."""
MANY_RANKS = 8
"""From so many ranks on bfloat16 is also held against its own error on one rank: errors must not grow with the ring."""
FLOAT64_BAR = 1e-12
FLOAT32_EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Errors:
    """Error of each tensor of `TENSORS`, and of `SHARED` where there are any, against the oracle.

    Args:
        worst: ``max|x - ref| / max(1, max|ref|)``. square: sum of squared errors. count: entries.
    """

    worst: dict[str, float]
    square: dict[str, float]
    count: dict[str, int]


def asked(ref: Reference) -> tuple[str, ...]:
    """The tensors that an answer can be judged by: `TENSORS`, and of `SHARED` what the oracle has."""
    return (*TENSORS, *(name for name in SHARED if getattr(ref, name) is not None))


def errors(found: dict[str, np.ndarray], ref: Reference, tensors: tuple[str, ...] | None = None) -> Errors:
    """Compare float64 copies of a result's tensors with the oracle; NaN, or -inf in a wrong place, counts as inf.

    Args:
        tensors: which; default all that are `asked` for.
    """
    worst, square, count = {}, {}, {}
    for name in asked(ref) if tensors is None else tensors:
        x, y = found[name], getattr(ref, name)
        empty = np.isneginf(y)
        wrong = x.shape != y.shape or np.isnan(x).any() or not np.array_equal(np.isneginf(x), empty)
        wrong = wrong or np.isposinf(x).any()
        difference = np.full(1, np.inf) if wrong else np.where(empty, 0, x) - np.where(empty, 0, y)
        size = float(np.abs(np.where(empty, 0, y)).max(initial=0.0))
        worst[name] = float(np.abs(difference).max(initial=0.0)) / max(1.0, size)
        square[name] = float(np.square(difference).sum())
        count[name] = int(difference.size)
    return Errors(worst, square, count)


def rms(many: list[Errors]) -> dict[str, float]:
    """Root mean square error of each tensor over several seeds."""
    return {
        name: (sum(e.square[name] for e in many) / max(1, sum(e.count[name] for e in many))) ** 0.5
        for name in many[0].worst
    }


def judge(
    dtype: str,
    found: list[Errors],
    dense: list[Errors],
    alone: list[Errors] | None = None,
) -> tuple[bool, dict[str, float]]:
    """Whether errors are within the bar of their dtype, and the bar of each tensor.

    float64: 1e-12. float32: twice dense float32's worst error + 16 eps. bfloat16: rms over the seeds at most twice
    dense bfloat16's and, where `alone` (the same on one rank) is given, 1.25 times that for all but lse: from
    `MANY_RANKS` on. Judged in both: what `dense` has.
    """
    if dtype == "float64":
        bars = dict.fromkeys((*TENSORS, *SHARED), FLOAT64_BAR)
        return all(error <= bars[n] for e in found for n, error in e.worst.items()), bars
    if dtype == "float32":
        bars = {n: 2 * max(e.worst[n] for e in dense) + 16 * FLOAT32_EPS for n in dense[0].worst}
        return all(e.worst[n] <= bar for e in found for n, bar in bars.items()), bars
    bars = {n: 2 * value for n, value in rms(dense).items()}
    if alone is not None:
        bars |= {n: min(bars[n], 1.25 * value) for n, value in rms(alone).items() if n != "lse"}
    tiny = 16 * FLOAT32_EPS  # where every entry is exact in dense bfloat16, e.g. one key per query
    bars = {n: bar + tiny for n, bar in bars.items()}
    achieved = rms(found)
    return all(achieved[n] <= bar for n, bar in bars.items()), bars
