"""What the tests of the known hard cases share: which kernels and layouts, held against the oracle how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ringspun import Contiguous, Mask, Striped, Zigzag
from ringspun.core.layout import Layout
from ringspun.testing.cases import Case, Inputs, inputs, reference
from ringspun.testing.comparison import errors, judge
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel, Loopback, Plan

KERNELS = ("aten_cpu", "eager")
LAYOUTS = (Contiguous(), Zigzag(), Striped())
by_kernel = pytest.mark.parametrize("kernel", KERNELS)
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def judged(case: Case, found: dict[str, np.ndarray], given: Inputs | None = None) -> None:
    """Assert that a float64 result of a case is the oracle's."""
    error = errors(found, reference(case, inputs(case) if given is None else given))
    assert judge("float64", [error], [])[0], f"{case}: {error.worst}"


def check(case: Case, kernel: str | None = None) -> None:
    """Run a float64 case and assert that it is the oracle's."""
    judged(case, run_ring(case, inputs(case), kernel=kernel))


def seen_mean(plan: Plan, kernel: str, first: float = 0.0, **options: Any) -> list[float]:
    """q = 0 and v = first, first + 1, ...: each row is the mean of the values that it sees."""
    v = torch.arange(first, first + plan.keys.seq_len, dtype=torch.float64).view(1, 1, -1, 1)
    q = torch.zeros(1, 1, plan.queries.seq_len, 1, dtype=torch.float64)
    values = plan.keys.shard(v, dim=2)
    out = plan.attention(plan.queries.shard(q, dim=2), 0 * values, values, kernel=kernel, **options)
    return plan.queries.gather(out, dim=2).flatten().tolist()


def ring_plan(ranks: int, layout: Layout, mask: Mask, seq_len: int, **sides: Any) -> Plan:
    """A plan of `ranks` in one thread."""
    return ContextParallel(Loopback(ranks), layout=layout).plan(seq_len, mask, **sides)
