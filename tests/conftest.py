"""One pool of processes per ring size for the whole run, and how Hypothesis runs: the same examples every time, so that
a verdict never depends on luck, and without a deadline, because a busy machine is no fault.
`pytest --hypothesis-profile=explore` draws new examples, and many more of them.

`pytest -n 2 --dist loadgroup` runs files side by side, and all tests of processes in one worker, one after another:
their ranks are not twice as many, and wait for nobody but each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from ringspun.testing import pool
from ringspun.testing.pool import RankPool

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("ci")

PRELOAD = (
    *pool.PRELOAD,
    "ringspun.testing.torch",
    "torch.distributed.tensor",
    # what the tests of training fork from the same server
    "ringspun.train.proof",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "accelerate",
)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("loadgroup", False):
        return
    for item in items:
        alone = item.get_closest_marker("processes") or "pools" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("processes" if alone else item.nodeid.partition("::")[0]))


@pytest.fixture(scope="session")
def _pools_of_all() -> Iterator[dict[int, RankPool]]:
    made: dict[int, RankPool] = {}
    yield made
    for ranks in made.values():
        ranks.close()


@pytest.fixture(scope="module")
def pools(_pools_of_all: dict[int, RankPool]) -> Iterator[Callable[[int], RankPool]]:
    """``pools(n)``: the ring of n processes of this run. It loses a file's groups with that file: a few hundred, with
    their threads, would take half a core."""
    used: set[int] = set()

    def one(size: int) -> RankPool:
        used.add(size)
        if size not in _pools_of_all:
            _pools_of_all[size] = RankPool(size, preload=PRELOAD)
        return _pools_of_all[size]

    yield one
    for size in used:
        _pools_of_all[size].renew()
