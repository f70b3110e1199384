"""A NaN in a run is told with its step, its rank, and the first module or parameter that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stage_meshes as sm
import torch
from test_train_stages import no_profiler, run, staged  # noqa: F401
from torch import nn
from training_runs import write_text

from ringspun.errors import NonFiniteError
from ringspun.train.faults import Why
from ringspun.train.loop import Hooks
from ringspun.train.parallel.ranks import Mesh


def test_a_loss_names_the_module_in_which_it_came_up(tmp_path: Path) -> None:
    """A weight of the second layer; every module after it has it too."""
    words = (
        r"at step 3 on rank 0 the loss is nan; "
        r"the first that gives one is model\.layers\.1\.mlp\.up_proj on rank 0\."
    )
    with pytest.raises(NonFiniteError, match=words):
        run(staged(tmp_path / "run"), tmp_path / "text", hooks=Hooks(lambda *x: sm._strike(0, 2, *x)), ring=2)


def test_a_gradient_names_the_parameter_that_backward_meets_first(tmp_path: Path) -> None:
    def poison(step: int, model: Any) -> None:
        if step == 5:
            for layer in model.model.layers:  # backward comes to the last layer first
                layer.self_attn.k_proj.weight.grad[1, 2] = torch.inf

    words = (
        r"at step 5 on rank 0 the gradient has a NaN or Inf, first that of model\.layers\.1\.self_attn\.k_proj\.weight"
    )
    with pytest.raises(NonFiniteError, match=words):
        run(staged(tmp_path / "run"), tmp_path / "text", hooks=Hooks(poison))


def test_a_loss_of_its_own_is_told_from_a_module() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    assert Why(model, Mesh(), lambda: model(torch.ones(1, 2)) / 0).loss() == "no module gives one: it is the loss's own"
    assert not model[0]._forward_hooks, "nothing is left behind"


class ThreeRanks(Mesh):
    """A mesh whose other ranks say what the test tells them to."""

    def gather(self, values: Any) -> list[list[float]]:
        return [list(values), [4.0, 1.0], [2.0, 2.0]]


def test_the_rank_is_the_one_in_which_it_came_up_first() -> None:
    """What travels on the ring makes others' later modules give one too."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    assert Why(model, ThreeRanks(), lambda: model(torch.ones(1, 2))).loss() == "the first that gives one is 1 on rank 2"


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_ranks_of_a_ring_find_it_together(pools, tmp_path: Path) -> None:
    """With FSDP2, whose weights are pieces outside of a call, and whose gradients are sums."""
    write_text(tmp_path / "text")
    config = sm.config_of(tmp_path / "run", sm.ON_FOUR)
    said = {text for _, text in pools(4).run(sm.faulty_on, config, tmp_path / "text")}
    assert len(said) == 1
    assert "NonFiniteError" in (one := said.pop()) and "at step 3 on rank" in one and "layers.1.mlp.up_proj" in one
