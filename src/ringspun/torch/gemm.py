"""How fast this process multiplies large matrices: what kernels and models are measured against."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def gemm_seconds(dtype: torch.dtype, repeats: int, n: int = 1024) -> list[float]:
    """Of a product of two n x n matrices of a dtype, each of some repeats: 2 n^3 FLOPs.

    By as many threads as the process has; no generator of the process is touched.
    """
    numbers = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, n, generator=numbers).to(dtype) for _ in range(2))
    return timed(lambda: a @ b, repeats)


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of some calls, after one that does not count."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times
