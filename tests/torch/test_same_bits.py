"""The same inputs on the same ring give the same bits, whoever comes first, in one thread and over processes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from on_ranks_bits import different, in_one_thread, on_processes

from ringspun import Anchors, Band, Blocks, Causal, Documents, Full, Window, Zigzag
from ringspun.testing.cases import LAYOUTS, Arguments, Case, Inputs, inputs
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.kernels import AtenCpu
from ringspun.torch.kernels.base import StepTiles

S = 41
MASKS = (
    Full(),
    Causal(),
    Causal() & Documents([7, 1, 20, 13]),
    Causal() & (Window(6) | Anchors(2)),
    (Causal(), Band(3, 9)),
)
ARGUMENTS = (
    Arguments(),
    Arguments(sinks=True, bias="alibi"),
    Arguments(bias="table", softcap=2.0),
)
CASES = [
    Case(ranks, S, mask, layout, dtype=dtype, arguments=ARGUMENTS[number % 3])
    for number, (ranks, mask, layout, dtype) in enumerate(
        (2 + (i + j) % 4, mask, layout, ("float32", "bfloat16")[(i + j // 2) % 2])
        for i, mask in enumerate(MASKS)
        for j, layout in enumerate(LAYOUTS)
    )
]


class Unfair(Loopback):
    """One rank runs as far as it can before any other, then the next in a drawn order: the most uneven orders."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size)
        order = random.Random(seed).sample(range(size), size)
        self._random = type("First", (), {"choice": lambda _, ready: min(ready, key=lambda r: order[r.number])})()


def on_a_loopback(case: Case, given: Inputs, driver: Loopback) -> dict[str, np.ndarray]:
    return run_ring(case, given, ContextParallel(driver, layout=case.layout))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whoever_comes_first(case):
    given = inputs(case)
    first = on_a_loopback(case, given, Loopback(case.ranks))
    for seed in range(1, 5):
        assert not different(first, on_a_loopback(case, given, Loopback(case.ranks, seed=seed)))
        assert not different(first, on_a_loopback(case, given, Unfair(case.ranks, seed)))


def test_orders_do_differ():
    """Else the test above shows nothing."""
    seen = set()
    for driver in (Loopback(3), Loopback(3, seed=1), Unfair(3, 0), Unfair(3, 1)):
        orders: list[int] = []
        advance = driver._advance
        driver._advance = lambda rank, orders=orders, advance=advance: (orders.append(rank.number), advance(rank))[1]
        case = Case(3, S, Full(), Zigzag(), dtype="float32")
        on_a_loopback(case, inputs(case), driver)
        seen.add(tuple(orders))
    assert len(seen) == 4


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", [2, 3])
def test_over_processes_again_and_in_one_thread(pools, ranks):
    """Gradients of sinks and biases are left out: their shares are added up over the ring by gloo, in its own order."""
    cases = [replace(case, ranks=ranks) for case in CASES[::2]]
    alone = [in_one_thread(case) for case in cases]
    for found in pools(ranks).run(on_processes, cases, 2, {}):
        for case, runs, expected in zip(cases, found, alone, strict=True):
            assert not different(*runs), case
            assert not set(different(runs[0], expected)) - {"dsinks", "dbias"}, case


class Shuffled(AtenCpu):
    """Takes the tiles of a step in an order of its own."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def backward(self, block, saved, tiles):
        return super().backward(block, saved, StepTiles(self.random.permutation(tiles.tiles)))


def test_another_order_of_sums_would_be_seen():
    case = Case(2, 60, Blocks([[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]] * 5, 6), Zigzag(), dtype="float32")
    found = [in_one_thread(case, Shuffled(seed)) for seed in (0, 0, 1)]
    assert not different(*found[:2])
    assert set(different(found[0], found[2])) <= {"dq", "dk", "dv"} and different(found[0], found[2])
