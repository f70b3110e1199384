"""A ring says what one process says, in one thread and on processes."""

from __future__ import annotations

import functools

import pytest
from stub_models import SAID, judged_on_ranks, judged_on_this_ring


@functools.cache
def alone():
    return judged_on_this_ring(1)


def judge(found) -> None:
    right, said, loss = found
    expected, _, alone_loss = alone()
    assert right == expected and 0 < sum(right) < len(right)
    assert said == [token == 16 for token in SAID]
    assert (loss.edges, loss.tokens, loss.windows) == (alone_loss.edges, alone_loss.tokens, alone_loss.windows)
    for row, same in zip(loss.losses, alone_loss.losses, strict=True):
        assert row == pytest.approx(same, rel=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rings_in_one_thread(size):
    judge(judged_on_this_ring(size))


@pytest.mark.processes
def test_a_ring_of_processes_sums_what_its_ranks_found(pools):
    for found in pools(2).run(judged_on_ranks):
        judge(found)
