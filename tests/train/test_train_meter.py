"""MFU counts what a model needs, told only where that is known; waiting is seen where it happens."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import meter_on_ranks as on_ranks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meter_on_ranks import packed
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training_runs import tiny_config

from ringspun import Causal, Documents, Window
from ringspun.planner.flops import model_flops, packed_flops
from ringspun.planner.models import Model
from ringspun.torch.drivers.base import Counts, Waits
from ringspun.torch.drivers.part import CountsOfPart
from ringspun.train.model import build_model
from ringspun.train.parallel.ranks import Mesh
from ringspun.train.reporting import meter as meter_module
from ringspun.train.reporting.meter import StepMeter, measured_peak, planned

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return build_model(tiny_config(tmp_path_factory.mktemp("run")), on_ring=False)


def test_flops_are_those_of_the_model_that_runs(llama: nn.Module) -> None:
    """As PyTorch counts them, forward and backward, of attention that computes all pairs, masked or not."""
    llama.set_attn_implementation("eager")  # type: ignore[operator]
    with FlopCounterMode(display=False) as counter:
        llama(torch.arange(24)[None]).logits.sum().backward()
    llama.zero_grad()
    model = planned(llama)
    assert model is not None and counter.get_total_flops() == model_flops(model, 24, causal=False)


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 50), st.integers(0, 3))
def test_pairs_are_those_that_the_mask_allows(lengths: list[int], window: int, full: int) -> None:
    model = Model(layers=3, hidden=8, intermediate=4, heads=2, vocab=7, window=window, full=full)
    n = sum(lengths)
    seen, near = (Causal() & Documents(lengths)), Causal() & Documents(lengths) & Window(window)
    pairs = full * seen.as_array(n).sum() + (3 - full) * near.as_array(n).sum()
    without = packed_flops(model, [0] * len(lengths), n)
    assert packed_flops(model, lengths) == pytest.approx(without + 3 * 4 * 8 * pairs, rel=1e-12)


def changed(llama: nn.Module, **values: Any) -> Any:
    """A module of the same weights, and another configuration."""
    config = llama.config.to_dict() | values  # type: ignore[union-attr, operator]
    return SimpleNamespace(config=SimpleNamespace(to_dict=lambda: config), parameters=llama.parameters)


def test_a_model_that_is_not_known_is_not_guessed(llama: nn.Module) -> None:
    assert planned(llama) is not None and planned(changed(llama)) is not None
    assert planned(nn.Linear(3, 3)) is None
    assert planned(changed(llama, num_local_experts=4)) is None
    assert planned(changed(llama, intermediate_size=49)) is None  # other weights than it says
    weight = next(llama.parameters()).requires_grad_(False)
    assert planned(llama) is None  # nobody computes its gradient
    weight.requires_grad_(True)


class TwoRanks(Mesh):
    """Another rank brings a third of what this one brings."""

    size = 2

    def gather(self, values: Any) -> list[list[float]]:
        mine = list(values)
        return [[value / 3 for value in mine], mine]


class Clock:
    """Tells what it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def a_meter(module: nn.Module, mesh: Mesh, **more: Any) -> tuple[StepMeter, Counts]:
    counts = Counts()
    return StepMeter(module, SimpleNamespace(driver=SimpleNamespace(counts=counts)), mesh, **more), counts  # type: ignore[arg-type]


def test_a_step_is_measured(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    meter, counts = a_meter(llama, Mesh(), peak_flops=1e9)
    counts.waits.seconds = 7.0  # before the step
    meter.begin()
    clock.now = 0.5
    told = meter.end([packed(40, 24), packed(64)])
    model = planned(llama)
    assert model is not None
    flops = packed_flops(model, [40, 24]) + packed_flops(model, [64])
    assert told == {"seconds": 0.5, "tokens_per_s": 256.0, "seq_len": 64, "mfu": pytest.approx(flops / 0.5 / 1e9)}


def test_waits_of_ring_and_mesh_are_shares_of_the_ranks_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, mesh = Clock(), TwoRanks()
    monkeypatch.setattr(meter_module, "time", clock)
    meter, counts = a_meter(nn.Linear(1, 1), mesh)
    counts.waits.seconds, mesh.waits.seconds = 0.3, 0.1
    meter.begin()
    clock.now, counts.waits.seconds, mesh.waits.seconds = 2.0, 0.8, 0.2
    told = meter.end([packed(8)])
    assert "mfu" not in told  # not known
    assert (told["waiting"], told["waiting_most"]) == (pytest.approx(0.2), pytest.approx(0.3))


def test_the_peak_is_measured_once_and_draws_no_number() -> None:
    before = torch.get_rng_state()
    peak = measured_peak(torch.float32, torch.get_num_threads())
    assert 1e8 < peak < 1e15 and torch.equal(torch.get_rng_state(), before)
    hits = measured_peak.cache_info().hits
    assert measured_peak(torch.float32, torch.get_num_threads()) == peak and measured_peak.cache_info().hits == hits + 1


def test_a_wait_that_fails_is_counted_and_a_part_waits_with_the_whole() -> None:
    whole = Counts()
    with pytest.raises(ValueError), CountsOfPart(whole, [0, 1]).waits.timed():
        time.sleep(0.01)
        raise ValueError
    assert 0.01 <= whole.waits.seconds < 60 and isinstance(whole.waits, Waits)


@pytest.mark.processes
@pytest.mark.parametrize("ulysses", [1, 2])
def test_ranks_that_wait_for_a_late_one_are_seen(pools: Any, ulysses: int) -> None:
    told = pools(2).run(on_ranks.a_step_in_which_rank_1_is_late, ulysses)
    (share,) = {one["waiting_most"] for one in told}
    assert share * told[0]["seconds"] >= 0.9 * on_ranks.LATE_S
    assert told[0]["waiting"] == told[1]["waiting"] < 0.9 * share  # the late one itself hardly waits
