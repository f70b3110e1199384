"""One pool of processes per ring size for the whole run; one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ringspun.testing import pool
from ringspun.testing.pool import RankPool

PRELOAD = (
    *pool.PRELOAD,
    "ringspun.testing.torch",
    "torch.distributed.tensor",
    # what the tests of training fork from the same server
    "ringspun.train.proof",
    "transformers.models.llama.modeling_llama",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """``pools(n)``: the ring of n processes of this run."""
    made: dict[int, RankPool] = {}

    def one(size: int) -> RankPool:
        if size not in made:
            made[size] = RankPool(size, preload=PRELOAD)
        return made[size]

    yield one
    for ranks in made.values():
        ranks.close()
