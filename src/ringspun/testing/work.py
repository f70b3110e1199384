"""What is timed, and how pairs of times are judged; no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ringspun.core.host import cores
from ringspun.core.layout import Layout
from ringspun.core.mask import Mask
from ringspun.core.route import Ring, Route


@dataclass(frozen=True)
class Work:
    """One attention call to time, forward + backward.

    Args:
        ranks: R. seq_len: S (tokens). heads, kv_heads, head_size: H, K, D. dtype: name.
        mask, layout, checks, route, backward: of the ring. batch: B. ulysses: of the ranks, how many split heads.
    """

    ranks: int
    seq_len: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    mask: Mask
    layout: Layout
    batch: int = 1
    checks: str = "header"
    route: Route = field(default_factory=Ring)
    backward: Literal["auto", "keys", "queries"] = "keys"
    ulysses: int = 1


def threads_per_rank(ranks: int) -> int:
    """Threads of each of `ranks` processes on this machine."""
    return max(1, cores() // ranks)


@dataclass(frozen=True)
class Ratio:
    """Ratio of paired times.

    Args:
        median: of the pairs' ratios. low, high: its bootstrap interval. level: of the interval.
    """

    median: float
    low: float
    high: float
    level: float = 0.9


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], *, samples: int = 2000, level: float = 0.9) -> Ratio:
    """Median of ``ours / theirs`` over pairs, with the bootstrap interval of that median."""
    ratios = np.asarray(ours) / np.asarray(theirs)
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (samples, len(ratios))), axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Ratio(float(np.median(ratios)), float(low), float(high), level)
