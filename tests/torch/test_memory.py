"""Peak memory, as the profiler's events tell it."""

import torch

from ringspun.torch.memory import peak_memory


def test_peak_is_of_what_lives_at_once() -> None:
    held = torch.zeros(10_000)
    with peak_memory() as peak:
        for _ in range(3):
            a = torch.zeros(1000)
            b = torch.zeros(500)
            del a, b
        torch.zeros(1200)
        held.add_(1)
    assert peak.bytes == 6000


def test_freeing_what_was_there_before_is_no_gain() -> None:
    before = torch.zeros(10_000)
    with peak_memory() as peak:
        del before
        torch.zeros(2000)
    assert 0 <= peak.bytes <= 8000


def test_nothing_allocated() -> None:
    with peak_memory() as peak:
        pass
    assert peak.bytes == 0
