"""Gradient norm and clipping in one process. Over processes: `test_token_mean_on_ranks.py`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ringspun.errors import NonFiniteError, UnsupportedByRing
from ringspun.torch import Loopback
from ringspun.train.losses.mean import TokenMean
from ringspun.train.parallel.scaling import clip_gradients, gradient_norm, gradient_scale


def two(*grads: float) -> list[torch.Tensor]:
    """Parameters of two dtypes, and one without a gradient."""
    made = [torch.zeros(1, dtype=t, requires_grad=True) for t in (torch.float32, torch.bfloat16, torch.float32)]
    for parameter, grad in zip(made, grads, strict=False):
        parameter.grad = torch.tensor([grad], dtype=parameter.dtype)
    return made


def test_a_gradient_is_clipped_to_the_norm_and_not_raised_to_it():
    parameters = two(3.0, 4.0)
    assert gradient_norm(parameters) == 5
    assert clip_gradients([*parameters, parameters[0]], 10.0) == 5  # twice the same counts once
    assert gradient_norm(parameters) == 5
    assert clip_gradients(parameters, 1.0) == 5
    assert gradient_norm(parameters) == pytest.approx(1.0, rel=1e-2)  # one of them is bfloat16
    assert parameters[2].grad is None


def test_without_gradients_there_is_no_norm():
    assert gradient_norm(nn.Linear(2, 2)) == clip_gradients(nn.Linear(2, 2), 1.0) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_no_number_is_refused_and_changes_nothing(bad):
    parameters = two(bad, 4.0)
    with pytest.raises(NonFiniteError, match=f"gradient norm must be finite; got {bad}"):
        clip_gradients(parameters, 1.0)
    assert parameters[1].grad.item() == 4


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_norm_to_clip_to_is_above_zero(max_norm):
    with pytest.raises(ValueError, match="max_norm must be above 0; got"):
        clip_gradients(two(1.0), max_norm)


def test_a_bare_model_has_no_factor_and_an_engine_an_unknown_one():
    class DeepSpeedEngine(nn.Sequential):
        """Known by its name."""

    mean = TokenMean(Loopback(4))
    assert gradient_scale(nn.Linear(1, 1), mean) == 1
    with pytest.raises(UnsupportedByRing, match=r"got DeepSpeedEngine at 0\. Use the number of ranks"):
        gradient_scale(nn.Sequential(DeepSpeedEngine(nn.Linear(1, 1))), mean)


def test_one_parameter_is_taken_as_it_is():
    (parameter, *_) = two(1.0)
    parameter.grad = torch.full_like(parameter, 3.0)
    norm = float(parameter.grad.norm())
    assert gradient_norm(parameter) == pytest.approx(norm)
    assert clip_gradients(parameter, norm / 2) == pytest.approx(norm)
    assert float(parameter.grad.norm()) == pytest.approx(norm / 2)
