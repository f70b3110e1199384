"""What ranks compare, and what plans are cached by, stands for everything that a plan is made from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun import Causal, Contiguous, Documents, Striped, Window, Zigzag
from ringspun.core.partition import Partition, Sides
from ringspun.core.route import Ring
from ringspun.core.schedule import input_digest


@dataclass(frozen=True)
class Nested(Ring):
    """A route with an option."""

    inner: int = 2


def test_whatever_changes_a_plan_changes_its_digest():
    """Two plans taken for one: ranks that disagree go unnoticed, or a cached plan computes something else."""
    documents = Documents([5, 7])
    cases = [
        (Partition(12, 3, Zigzag()), Causal(), Ring()),
        (Partition(13, 3, Zigzag()), Causal(), Ring()),
        (Partition(12, 2, Zigzag()), Causal(), Ring()),
        (Partition(12, 3, Contiguous()), Causal(), Ring()),
        (Partition(12, 3, Striped()), Causal(), Ring()),
        (Partition(12, 3, Striped(128)), Causal(), Ring()),
        (Partition(12, 3, Zigzag(), documents), Causal(), Ring()),
        (Partition(12, 3, Zigzag()), Causal() & documents, Ring()),
        (Partition(12, 3, Zigzag()), Causal() & Documents([5, 6], [0, 6]), Ring()),
        (Partition(12, 3, Zigzag()), Window(3), Ring()),
        (Partition(12, 3, Zigzag()), Window(4), Ring()),
        (Partition(12, 3, Zigzag()), Causal(), Nested(inner=2)),
        (Partition(12, 3, Zigzag()), Causal(), Nested(inner=4)),
        (Partition(12, 3, Zigzag()), Causal(), Ring(2)),
        (Partition(12, 3, Zigzag()), Causal(), Ring(4)),
    ]
    digests = [input_digest(Sides(case[0]), *case[1:]) for case in cases]
    assert len(set(digests)) == len(cases)
    assert input_digest(Sides(Partition(np.int64(12), 3, Zigzag())), Causal(), Ring()) == digests[0]
