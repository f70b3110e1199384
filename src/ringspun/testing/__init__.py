"""What others can test with; it ships with the package and is public.

    conformance.py `certify`: anybody's attention against the suite, property by property
    suite.py       the suite: named cases by property
    problem.py     `Problem`, `Answer`, `Candidate`: what is asked and answered, numbers in and out
    report.py      `Report`: what passed, failed, was refused or not given
    diagnosis.py   where an error sits and how it looks
    candidates.py  torch's attentions as candidates: a ring, a kernel, what is called as torch's own
    miniature.py   a right ring in NumPy; mutants.py: the usual mistakes, planted in it
    support.py     the table of which kernel does what
    cases.py       the shared cases: masks, layouts, shapes, random inputs, and the float64 oracle's answer
    comparison.py  errors against the oracle, and how large they may be in each dtype
    yardstick.py   rounding, and dense attention in each dtype, which says how large
    pool.py        `RankPool`: processes that form a ring, started once and called many times
    faults.py      `Faulty`: a driver to whose messages faults happen, to order or at random
    orders.py      `every_order`: a ring in one thread, in every order of its events
    campaign.py    the same call under many faults, and what came of each
    soak.py        another plan in every call, for as long as one likes
    timing.py      paired timings of two things, taken in turns
    peers/         other attentions over ranks, judged and timed beside ours
    torch.py       a case on a ring, and dense attention in the same dtype

What certifies is exported here and needs NumPy alone. `candidates`, `peers`, `pool`, `timing`, `torch`, and all from
`faults` to `soak`, need torch.
"""

from __future__ import annotations

from ringspun.testing.conformance import certify
from ringspun.testing.problem import Answer, Candidate, Problem
from ringspun.testing.report import Report

__all__ = ["Answer", "Candidate", "Problem", "Report", "certify"]
