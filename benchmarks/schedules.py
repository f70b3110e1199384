"""Time to make the schedules of a very long sequence: 16,777,216 tokens, 1,024 ranks, 10,000 long-tailed documents.

python benchmarks/schedules.py            # prints one JSON object
"""

from __future__ import annotations

import json
import platform
import time
import warnings
from statistics import median

import numpy as np

from ringspun import Causal, Contiguous, Documents, Layout, Striped, Zigzag
from ringspun.core.partition import Partition, Sides
from ringspun.core.route import Ring
from ringspun.core.schedule import compile_schedules

SEQ_LEN, RANKS, DOCUMENTS = 1 << 24, 1024, 10_000


def documents(seed: int) -> Documents:
    """Long-tailed lengths that fill the sequence."""
    weights = np.random.default_rng(seed).lognormal(0.0, 1.0, DOCUMENTS)
    lengths = np.maximum(1, (weights / weights.sum() * SEQ_LEN * 0.999).astype(np.int64))
    return Documents(lengths)


def one_rank(layout: Layout, repeats: int) -> float:
    """Median seconds for one rank, documents new every time (as in training)."""
    times = []
    for repeat in range(repeats):
        mask, rank = Causal() & documents(repeat), int(np.random.default_rng(repeat).integers(RANKS))
        start = time.perf_counter()
        compile_schedules(Sides(Partition(SEQ_LEN, RANKS, layout)), mask, Ring(), [rank])
        times.append(time.perf_counter() - start)
    return median(times)


def all_ranks(layout: Layout) -> float:
    """Seconds for all ranks at once."""
    mask = Causal() & documents(0)
    start = time.perf_counter()
    compile_schedules(Sides(Partition(SEQ_LEN, RANKS, layout)), mask, Ring(), range(RANKS))
    return time.perf_counter() - start


def striped() -> dict[str, object]:
    """What one striped rank says and takes."""
    mask = Causal() & documents(0)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (schedule,) = compile_schedules(Sides(Partition(SEQ_LEN, RANKS, Striped())), mask, Ring(), [0])
    return {
        "seconds": time.perf_counter() - start,
        "tiles": len(schedule.forward.tiles),
        "warning": [str(w.message) for w in caught],
    }


def main() -> None:
    """Print the figures."""
    report = {
        "seq_len": SEQ_LEN,
        "ranks": RANKS,
        "documents": DOCUMENTS,
        "one_rank_s": {str(layout): one_rank(layout, 15) for layout in (Contiguous(), Zigzag())},
        "all_ranks_s": {str(layout): all_ranks(layout) for layout in (Contiguous(), Zigzag())},
        "striped_one_rank": striped(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
