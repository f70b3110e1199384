"""Recipes: what a run does that its config cannot say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_stages import LONG, SHORT, Stop, evaluations, no_profiler, run, staged, stop_in  # noqa: F401
from training_runs import losses, same_bits, write_text

from ringspun.errors import ConfigError, DataError
from ringspun.train.checkpoints.checkpointing import latest
from ringspun.train.config import TrainConfig, load_config
from ringspun.train.recipe import Recipe

MODEL = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.token, self.qkv = nn.Embedding(257, width), nn.Linear(width, 3 * width)
        self.taps, self.head = nn.Parameter(torch.randn(width, 3) / 2), nn.Linear(width, 257, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids, plan, positions):
        x = self.token(ids)
        x = x + plan.partition.causal_conv1d(x, self.taps)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.head(x + plan.attention(q, k, v).transpose(1, 2).flatten(2))

def build_model(config):
    return Small()
"""
OPTIMIZER = """
def build_optimizer(model, config):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return torch.optim.SGD([{"params": matrices, "lr": 0.1}, {"params": others, "lr": 0.01}], momentum=0.9)
"""


NUMBERS = """
class Numbers(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, beta=0.1, mean=torch.zeros_like(p))
                state["step"] += 1
                state["beta"] *= 1.1
                state["mean"].mul_(0.9).add_(p.grad)
                p.sub_(state["mean"] * (state["beta"] / (1 - 0.9 ** state["step"])), alpha=group["lr"])

def build_optimizer(model, config):
    return Numbers(model.parameters(), {"lr": 1.0})
"""


def with_recipe(output: Path, text: str, **changes: Any) -> tuple[TrainConfig, Recipe]:
    output.parent.mkdir(exist_ok=True)
    path = output.parent / "recipe.py"
    path.write_text(text)
    values = staged(output, **changes).model_dump()
    for name in ("seq_len", "steps", "warmup_steps", "final_lr", "decay", "decay_steps"):
        values.pop(name)
    config = TrainConfig.model_validate(values | {"model": None, "recipe": path})
    return config, Recipe.of(config)


def test_a_model_of_ones_own_trains_alike_on_any_ring(tmp_path: Path) -> None:
    for name, ring in (("one", 1), ("three", 3)):
        config, recipe = with_recipe(tmp_path / name, MODEL, evaluate={"sequences": 1})
        run(config, tmp_path / "text", ring=ring, recipe=recipe)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert len(evaluations(tmp_path / "one")) == 3


@pytest.mark.parametrize("optimizer", [OPTIMIZER, NUMBERS], ids=["momentum", "Python numbers"])
def test_an_interrupted_run_with_an_optimizer_of_ones_own_is_the_uninterrupted_one(
    tmp_path: Path, optimizer: str
) -> None:
    """Its momenta, its two rates, and weights that are tied."""
    torch.manual_seed(0)
    config, recipe = with_recipe(tmp_path / "whole", MODEL + optimizer)
    state = run(config, tmp_path / "text", ring=2, recipe=recipe)
    torch.manual_seed(0)
    config, recipe = with_recipe(tmp_path / "run", MODEL + optimizer)
    with pytest.raises(Stop):
        run(config, tmp_path / "text", ring=2, recipe=recipe, hooks=stop_in(5))
    run(config, tmp_path / "text", ring=2, recipe=recipe)
    assert same_bits(tmp_path / "run", tmp_path / "whole")
    assert state.model.head.weight is state.model.token.weight
    found = latest(tmp_path / "run" / "checkpoints", warn=print)
    assert found is not None and (found.model_path / "model.safetensors").exists()


def test_values_of_an_evaluation_may_be_tensors_and_others_are_refused(tmp_path: Path) -> None:
    config, recipe = with_recipe(tmp_path / "run", MODEL)
    run(config, tmp_path / "text", recipe=replace(recipe, evaluate=lambda *_: {"one": torch.ones(())}))
    assert {one["evaluation"]["one"] for one in evaluations(tmp_path / "run")} == {1.0}
    config, recipe = with_recipe(tmp_path / "other", MODEL)
    with pytest.raises(ConfigError, match="evaluate must return numbers by name; got None"):
        run(config, tmp_path / "text", recipe=replace(recipe, evaluate=lambda *_: None))


def test_sequences_of_another_length_than_the_stages_are_refused(tmp_path: Path) -> None:
    config, recipe = with_recipe(tmp_path / "run", MODEL)
    longer = replace(recipe, sequences=lambda config, _: write_text(tmp_path / "text").sequences(seq_len=17, seed=0))
    with pytest.raises(DataError, match="sequences must have the stage's 16 tokens; got one of 17"):
        run(config, tmp_path / "text", recipe=longer)


def test_a_recipe_that_changed_is_told_when_the_run_goes_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    for text in (MODEL, MODEL + "# a comment"):
        config, recipe = with_recipe(tmp_path / "run", text)
        run(config, tmp_path / "text", recipe=recipe, warn=warnings.append)
    assert len(warnings) == 1 and "recipe is not what it was when" in warnings[0]


def test_the_rates_of_an_optimizer_of_ones_own_follow_the_schedule(tmp_path: Path) -> None:
    """The second stage decays by thirds to nothing; its own rates are those at the peak."""
    seen: list[tuple[float, ...]] = []

    def build(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([{"params": list(model.parameters()), "lr": 0.3}])
        optimizer.register_step_pre_hook(lambda one, *_: seen.append(tuple(g["lr"] for g in one.param_groups)))
        return optimizer

    run(staged(tmp_path / "run"), tmp_path / "text", recipe=Recipe(build_optimizer=build))
    assert [rate for (rate,) in seen] == pytest.approx([0.3, 0.3, 0.3, 0.2, 0.1, 0.0])


def test_a_loss_and_sequences_of_ones_own(tmp_path: Path) -> None:
    """Of one token that is to be learnt, whatever the data; asked for by each stage."""
    import numpy as np

    from ringspun import Documents
    from ringspun.train.data.text import PackedSequence
    from ringspun.train.model import shard_loss

    asked: list[tuple[int, int]] = []

    class Same:
        def __init__(self, length: int) -> None:
            self.length = length

        def at(self, position: dict[str, Any]) -> PackedSequence:
            ids = np.full(self.length, 7)
            return PackedSequence(ids, Documents([self.length]), {"index": position.get("index", 0) + 1})

    def sequences(config: TrainConfig, stage: Any) -> Same:
        asked.append((stage.number, config.seq_len))
        return Same(config.seq_len)

    recipe = Recipe(sequences=sequences, loss=lambda model, shard: 2 * shard_loss(model, shard))
    state = run(staged(tmp_path / "run", clip_norm=100.0), tmp_path / "text", recipe=recipe, ring=2)
    assert asked == [(0, 16), (1, 48)] and state.position == {"index": 9}
    assert losses(tmp_path / "run")[0] > 10 and losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "recipe must define one of build_model, loss, sequences, build_optimizer, evaluate; it defines none"),
        ("def build_modle(config): ...", "function 'build_modle' is nearly 'build_model'"),
        ("def loss(model, shard): ...", r"recipe must define build_model where there is no \[model\] and no init"),
        ("def loss(:", "recipe must be Python; line 1"),
        ("def build_model(config): return 3", "build_model must return an nn.Module; got int"),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config, recipe = with_recipe(tmp_path / "run", text)
        run(config, tmp_path / "text", recipe=recipe)


def test_what_a_model_of_ones_own_would_not_heed_is_refused(tmp_path: Path) -> None:
    config, recipe = with_recipe(tmp_path / "run", MODEL, checkpointing="layer")
    with pytest.raises(ConfigError, match="checkpointing must not be given for a recipe's own model; got 'layer'"):
        run(config, tmp_path / "text", recipe=recipe)


def test_a_recipe_lies_beside_its_config_and_may_import_what_lies_there_too(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('recipe = "mine.py"\nseq_len = 16\nsteps = 1\n')
    (tmp_path / "helper_of_mine.py").write_text("def build(config): return config.seq_len\n")
    (tmp_path / "mine.py").write_text("from helper_of_mine import build as build_model\n")
    config = load_config(tmp_path / "run.toml")
    assert config.recipe == tmp_path / "mine.py"
    assert Recipe.of(config).build_model(config) == 16
    with pytest.raises(ConfigError, match=r"recipe must be a Python file; got .*nowhere\.py"):
        Recipe.read(tmp_path / "nowhere.py")
