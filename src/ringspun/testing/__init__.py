"""What others can test with; it ships with the package and is public.

    cases.py       the shared cases: masks, layouts, shapes, random inputs, and the float64 oracle's answer
    comparison.py  errors against the oracle, and how large they may be in each dtype
    pool.py        `RankPool`: processes that form a ring, started once and called many times
    timing.py      paired timings of two things, taken in turns
    torch.py       a case on a ring, and dense attention in the same dtype

Nothing is imported here; `cases` and `comparison` need no framework.
"""
