"""One thread for tiny tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hard_cases import judged
from on_ranks import run_cases

from ringspun import Causal, Zigzag
from ringspun.testing.cases import Case
from ringspun.testing.pool import RankPool


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def trusted(pools: Callable[[int], RankPool]) -> Iterator[RankPool]:
    """A pool of 3 that must be as good after the test as before it."""
    pool = pools(3)
    yield pool
    case = Case(3, 10, Causal(), Zigzag())
    for (found,) in pool.run(run_cases, [case]):
        judged(case, found)
