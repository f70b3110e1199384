"""When `triton` is taken, and what it refuses: without Triton, and without a card."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ringspun import Causal
from ringspun.errors import KernelRefused
from ringspun.torch import ContextParallel, Loopback, kernels
from ringspun.torch.kernels import FASTER, Call, choose, triton, verdicts
from ringspun.torch.kernels.base import StepTiles

ON_A_CARD = Call(8, 2, 128, 128, torch.bfloat16, "cuda")
ON_CPU = Call(8, 2, 128, 128, torch.float32, "cpu")


def as_if(monkeypatch, *, installed: bool = True, interpreted: bool = False) -> None:
    monkeypatch.setattr(triton, "installed", lambda: installed)
    monkeypatch.setattr(triton, "interpreted", lambda: interpreted)


@pytest.mark.parametrize(
    ("call", "interpreted", "words"),
    [
        (ON_A_CARD, False, None),
        (replace(ON_A_CARD, dtype=torch.float16, head_size=1, value_size=256, softcap=30.0), False, None),
        (ON_CPU, True, None),
        (ON_CPU, False, "device must be cuda; got cpu (TRITON_INTERPRET=1 in the environment interprets it there)"),
        (
            replace(ON_A_CARD, dtype=torch.float64),
            False,
            "dtype must be bfloat16, float16 or float32; got torch.float64",
        ),
        (
            replace(ON_CPU, dtype=torch.bfloat16),
            True,
            "dtype must be float32 where Triton is interpreted; got torch.bfloat16",
        ),
        (replace(ON_A_CARD, head_size=288), False, "head sizes must be at most 256; got 288 and 128"),
        (
            replace(ON_A_CARD, value_size=512, bias="alibi"),
            False,
            "head sizes must be at most 256; got 128 and 512, bias must be None; got alibi",
        ),
    ],
)
def test_what_it_refuses(monkeypatch, call, interpreted, words):
    as_if(monkeypatch, interpreted=interpreted)
    assert triton.Triton().refuses(call) == words


def test_what_it_refuses_on_an_old_card(monkeypatch):
    as_if(monkeypatch)
    monkeypatch.setattr(triton, "compute_capability", lambda: (7, 5))
    assert triton.Triton().refuses(ON_A_CARD) == "compute capability must be 8.0 or more; got 7.5"


def test_each_stream_has_lists_of_its_own(monkeypatch):
    """A list is copied to the device in the order of one stream; another would not wait for it."""
    tiles = StepTiles(np.array([[0, -1, 0, 32, 0, 32, 0, 31]]))
    for stream, already in ((7, 0), (8, 1), (7, 2)):
        monkeypatch.setattr(triton, "current_stream", lambda device, stream=stream: stream)
        assert len(tiles.kept) == already
        assert triton.Triton()._list(tiles, 16, False, torch.device("cpu")).blocks == 2
    assert len(tiles.kept) == 2


def test_without_triton_it_says_what_to_install(monkeypatch):
    as_if(monkeypatch, installed=False)
    q = torch.zeros(1, 2, 8, 4)
    with pytest.raises(KernelRefused, match="all refuse: triton: triton must be installed; pip install triton"):
        ContextParallel(Loopback(2)).plan(8, Causal()).attention(q, q, q, kernel="triton")


def test_by_itself_it_is_taken_only_where_it_was_measured_faster(monkeypatch):
    as_if(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    assert not any(FASTER.values())  # a name here needs a results file of gpu-check
    assert "triton" not in dict(verdicts(ON_A_CARD))
    monkeypatch.setattr(kernels, "FASTER", {"triton": frozenset({"Another card"})})
    assert "triton" not in dict(verdicts(ON_A_CARD))
    monkeypatch.setattr(kernels, "FASTER", {"triton": frozenset({"A card"})})
    assert choose(ON_A_CARD).name == choose(ON_A_CARD, "auto").name == "triton"
    assert choose(ON_CPU).name == "aten_cpu" and "triton" not in dict(verdicts(ON_CPU))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shared_bytes", [64 << 10, 163 << 10, 227 << 10])
def test_every_head_size_has_blocks(itemsize, shared_bytes):
    for head_size in range(1, 257):
        found = triton.launches(head_size, itemsize, shared_bytes)
        for launch in (found.forward, found.queries, found.keys):
            assert all(n >= 16 and n & (n - 1) == 0 for n in (launch.rows, launch.keys))
