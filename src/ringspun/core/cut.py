"""The cut: regions meet the runs of a partition's two sides. Where tiles, and who needs what, come from.

A region is first cut to the span of each query run that it reaches, then meets each key run in its reach; what they
have in common is one rectangle with a band, in local rows of both. Everything is flat arrays and binary search:
16 million tokens on 1,024 ranks in 10,000 documents take milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core.layout.base import RANK, START, STEP, STOP
from ringspun.core.partition import Partition
from ringspun.errors import PlanError

Indices = NDArray[np.int64]
CHUNK = 4_000_000


@dataclass(frozen=True, eq=False)
class Cut:
    """A mask's regions, cut by the runs of queries and keys.

    Args:
        regions: of the mask, queries counted from their partition's start.
    """

    queries: Partition
    keys: Partition
    regions: rg.Table

    @cached_property
    def _clipped(self) -> tuple[rg.Table, Indices]:
        starts, stops = self.queries.runs[:, START], self.queries.runs[:, STOP]
        ordered = self.regions[np.argsort(self.regions[:, rg.Q0], kind="stable")]
        reach = np.maximum.accumulate(ordered[:, rg.Q1]) if len(ordered) else ordered[:, rg.Q1]
        first = np.searchsorted(reach, starts, side="right")
        last = np.searchsorted(ordered[:, rg.Q0], stops, side="left")
        of_run, region = expand(first, np.maximum(first, last))
        clipped = ordered[region]
        np.maximum(clipped[:, rg.Q0], starts[of_run], out=clipped[:, rg.Q0])
        np.minimum(clipped[:, rg.Q1], stops[of_run], out=clipped[:, rg.Q1])
        kept = rg.tighten_rows(clipped)
        return clipped[kept], of_run[kept]

    @property
    def clipped(self) -> rg.Table:
        """Regions cut to the span of each query run ``[n, 6]``, tight, in order of the runs."""
        return self._clipped[0]

    @property
    def q_run(self) -> Indices:
        """Query run of each clipped region ``[n]``."""
        return self._clipped[1]

    @cached_property
    def q_rank(self) -> Indices:
        """Ring rank of each clipped region's queries ``[n]``; never falls."""
        ranks: Indices = self.queries.runs[self.q_run, RANK]
        return ranks

    @cached_property
    def by_start(self) -> Indices:
        """Key runs in order of their start."""
        return np.argsort(self.keys.runs[:, START], kind="stable")

    @cached_property
    def reach(self) -> tuple[Indices, Indices]:
        """For each clipped region the range of `by_start` that it may meet."""
        runs = self.keys.runs[self.by_start]
        ends = np.maximum.accumulate(runs[:, STOP]) if len(runs) else runs[:, STOP]
        first = np.searchsorted(ends, self.clipped[:, rg.K0], side="right")
        last = np.searchsorted(runs[:, START], self.clipped[:, rg.K1], side="left")
        return first, np.maximum(first, last)

    @property
    def without_steps(self) -> bool:
        """Whether all runs hold neighbours: a clipped region then meets every run in its reach, with all its keys."""
        return bool((self.queries.runs[:, STEP] == 1).all() and (self.keys.runs[:, STEP] == 1).all())

    def of_rank(self, ring_rank: int) -> slice:
        """The clipped regions of one rank's queries."""
        first, last = np.searchsorted(self.q_rank, [ring_rank, ring_rank + 1])
        return slice(int(first), int(last))

    def meetings(self, which: slice = slice(None)) -> int:
        """In how many places regions and key runs may meet."""
        first, last = self.reach
        return int((last[which] - first[which]).sum())

    def pieces(self, which: slice = slice(None)) -> Iterator[tuple[rg.Table, Indices, Indices]]:
        """What some clipped regions and key runs have in common: regions in local rows ``[m, 6]``, tight, with the
        query run and the key run of each; in parts, so that memory stays bounded.

        Raises:
            PlanError: runs that meet have different steps.
        """
        first, last = (x[which] for x in self.reach)
        clipped, q_run = self.clipped[which], self.q_run[which]
        for part in _parts(last - first):
            of_region, place = expand(first[part], last[part])
            q, k = q_run[part][of_region], self.by_start[place]
            local, kept = _to_local(self.queries, self.keys, clipped[part][of_region], q, k)
            yield local, q[kept], k[kept]


def _parts(sizes: NDArray[np.int64]) -> list[slice]:
    """Slices of consecutive entries whose sizes sum to at most about `CHUNK` each, so that memory stays bounded."""
    ends = np.cumsum(sizes)
    if len(ends) == 0 or ends[-1] <= CHUNK:
        return [slice(0, len(sizes))]
    cuts = np.searchsorted(ends, np.arange(CHUNK, int(ends[-1]), CHUNK)) + 1
    edges = [0, *np.unique(cuts).tolist(), len(sizes)]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if a < b]


def expand(first: NDArray[np.int64], last: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All (i, x) with first[i] <= x < last[i], as two flat arrays."""
    sizes = last - first
    owner = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return owner, np.repeat(first, sizes) + within


def _to_local(
    queries: Partition,
    keys: Partition,
    rows: rg.Table,
    q_run: NDArray[np.int64],
    k_run: NDArray[np.int64],
) -> tuple[rg.Table, NDArray[np.int64]]:
    """Global regions met by (query run, key run) pairs, in local rows ``[m, 6]``; and which pairs hold one.

    With a common step t a query of row i sits at ``a + t i`` and a key of row j at ``b + t j``, so that
    ``lo <= q - k <= hi`` is ``ceil((lo - (a - b)) / t) <= i - j <= floor((hi - (a - b)) / t)``.
    """
    (_, a, a_stop, t_q), (_, b, b_stop, t_k) = queries.runs[q_run].T, keys.runs[k_run].T
    step = np.where(queries.run_tokens[q_run] == 1, t_k, t_q)
    k_step = np.where(keys.run_tokens[k_run] == 1, step, t_k)
    q0, q1 = np.maximum(rows[:, rg.Q0], a), np.minimum(rows[:, rg.Q1], a_stop)
    k0, k1 = np.maximum(rows[:, rg.K0], b), np.minimum(rows[:, rg.K1], b_stop)
    local = np.empty((len(rows), 6), np.int64)
    one_q, one_k = queries.run_tokens[q_run] == 1, keys.run_tokens[k_run] == 1
    local[:, rg.Q0] = np.where(one_q, np.where(q0 > a, 1, 0), -((a - q0) // step))
    local[:, rg.Q1] = np.where(one_q, np.where(q1 > a, 1, 0), -((a - q1) // step))
    local[:, rg.K0] = np.where(one_k, np.where(k0 > b, 1, 0), -((b - k0) // k_step))
    local[:, rg.K1] = np.where(one_k, np.where(k1 > b, 1, 0), -((b - k1) // k_step))
    local[:, rg.LO] = -((a - b - rows[:, rg.LO]) // step)
    local[:, rg.HI] = (rows[:, rg.HI] - (a - b)) // step
    clash = (k_step != step) & (local[:, rg.Q0] < local[:, rg.Q1]) & (local[:, rg.K0] < local[:, rg.K1])
    if clash.any():
        bad = int(np.flatnonzero(clash)[0])
        raise PlanError(
            f"query and key runs that meet must share a step; got steps {t_q[bad]} and {t_k[bad]} "
            f"({queries.layout} and {keys.layout}). Use one layout for both."
        )
    kept = rg.tighten_rows(local)
    local, kept_at = local[kept], np.flatnonzero(kept)
    q_shift, k_shift = queries.run_offsets[q_run[kept_at]], keys.run_offsets[k_run[kept_at]]
    local[:, [rg.Q0, rg.Q1]] += q_shift[:, None]
    local[:, [rg.K0, rg.K1]] += k_shift[:, None]
    local[:, [rg.LO, rg.HI]] += (q_shift - k_shift)[:, None]
    return local, kept_at
