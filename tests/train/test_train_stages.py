"""A run of several stages is one run: ended anywhere and started again it is the run that was not, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_runs import logged_steps, losses, same_bits, tiny_config, write_text

from ringspun import Zigzag
from ringspun.errors import CheckpointError, ConfigError
from ringspun.torch import ContextParallel, Loopback
from ringspun.train import loop
from ringspun.train.config import TrainConfig
from ringspun.train.data.opening import open_data
from ringspun.train.launch import Job, check
from ringspun.train.loop import Hooks, Run, TrainState, train_stages
from ringspun.train.parallel.ranks import Mesh
from ringspun.train.recipe import Recipe
from ringspun.train.stages import learning_rate

SHORT = {"seq_len": 16, "steps": 3, "batch_size": 2, "lr": 1e-2, "warmup_steps": 1}
LONG = {"seq_len": 48, "steps": 3, "rope": 1e5, "lr": 3e-3, "decay": "linear", "mesh": {"ranks": 1}}


class Stop(Exception):
    """An interruption."""


@pytest.fixture(autouse=True)
def no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds."""
    monkeypatch.setattr(loop, "peak_memory", lambda: nullcontext(SimpleNamespace(bytes=0)))


def staged(output: Path, *stages: dict[str, Any], **changes: Any) -> TrainConfig:
    held = {"data": {"held_out": 0.5}} if "evaluate" in changes else {}
    values = tiny_config(output, **held | changes).model_dump()
    for name in ("seq_len", "steps", "warmup_steps", "final_lr", "decay", "decay_steps"):
        values.pop(name)
    return TrainConfig.model_validate(values | {"stages": stages or (SHORT, LONG)})


def run(
    config: TrainConfig,
    text: Path,
    *,
    hooks: Hooks | None = None,
    recipe: Recipe | None = None,
    ring: int = 1,
    warn: Callable[[str], None] = print,
) -> TrainState:
    """In this process; a ring of `ring`, in stages of more ranks of so many."""
    if not text.exists():
        write_text(text)
    corpus = open_data(config, [text])

    def of(leg: Any) -> Run:
        context = ContextParallel(Loopback(max(ring, leg.config.ranks), seed=0), layout=Zigzag())
        more = (Mesh(), None, hooks or Hooks(), recipe or Recipe())
        return Run(leg.config, corpus, context, *more, config, leg.number)

    return train_stages(config, corpus, Mesh(), of, warn=warn)[1]


def stop_in(step: int) -> Hooks:
    def stop(number: int, _: Any) -> None:
        if number == step:
            raise Stop

    return Hooks(after_backward=stop)


def stop_in_save(step: int) -> Hooks:
    def stop(number: int) -> None:
        if number == step:
            raise Stop

    return Hooks(before_publish=stop)


def stop_after_save(step: int) -> Callable[..., None]:
    def save(run: Run, state: TrainState) -> None:
        original(run, state)
        if state.step == step:
            raise Stop

    original = loop.save_run
    return save


def test_a_run_that_is_ended_in_each_stage_and_between_is_the_run_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step of each stage, while the checkpoint between them is written, and right after it."""
    text, values = tmp_path / "text", {"checkpoint_every": 2, "evaluate": {"sequences": 1}}
    torch.manual_seed(0)  # as in a new process, where it always has the same seed
    run(staged(tmp_path / "whole", **values), text, ring=2)
    torch.manual_seed(0)
    again = staged(tmp_path / "run", **values)
    for hooks in (stop_in(1), stop_in(3), stop_in_save(3)):
        with pytest.raises(Stop):
            run(again, text, hooks=hooks, ring=2)
    torch.rand(3)
    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(loop, "save_run", stop_after_save(3))
        run(again, text, ring=2)
    for hooks in (stop_in(4), stop_in(6), stop_in_save(6), None):
        with nullcontext() if hooks is None else pytest.raises(Stop):
            run(again, text, hooks=hooks, ring=2)
    assert same_bits(tmp_path / "run", tmp_path / "whole")
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")


def evaluations(output: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [record for record in records if "evaluation" in record]


def test_evaluations_are_at_the_first_the_old_and_the_new_length_before_and_after_each_switch(tmp_path: Path) -> None:
    longer = {**LONG, "seq_len": 80, "steps": 1, "rope": 1e6}
    run(staged(tmp_path / "run", SHORT, LONG, longer, evaluate={"sequences": 2}), tmp_path / "text")
    told = [(r["step"], r["stage"], sorted(r["evaluation"])) for r in evaluations(tmp_path / "run")]
    two, three = ["loss@16", "loss@48"], ["loss@16", "loss@48", "loss@80"]
    assert told == [(3, 0, two), (3, 1, two), (6, 1, three), (6, 2, three), (7, 2, three)]
    before, after = (evaluations(tmp_path / "run")[i]["evaluation"]["loss@48"] for i in (0, 1))
    assert before != after, "the rotations of the second stage are others"


def test_evaluating_changes_no_bit(tmp_path: Path) -> None:
    own = Recipe(evaluate=lambda *_: {"drawn": float(torch.rand(1))})
    torch.manual_seed(0)
    run(staged(tmp_path / "with", evaluate={"sequences": 3}), tmp_path / "text", recipe=own)
    torch.manual_seed(0)
    run(staged(tmp_path / "without", data={"held_out": 0.5}), tmp_path / "text")
    assert same_bits(tmp_path / "with", tmp_path / "without")
    assert all("drawn" in record["evaluation"] for record in evaluations(tmp_path / "with"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_of_one_stage_is_the_run_without_stages(tmp_path: Path, dtype: str) -> None:
    stage = {"seq_len": 64, "steps": 4, "lr": 1e-2, "warmup_steps": 2, "decay": "cosine", "final_lr": 1e-3}
    run(staged(tmp_path / "stage", stage, dtype=dtype), tmp_path / "text", ring=2)
    run(tiny_config(tmp_path / "flat", dtype=dtype, steps=4, final_lr=1e-3), tmp_path / "text", ring=2)
    assert same_bits(tmp_path / "stage", tmp_path / "flat")


def test_the_ring_of_a_stage_does_not_change_the_run(tmp_path: Path) -> None:
    for name, ring in (("one", 1), ("three", 3)):
        run(staged(tmp_path / name), tmp_path / "text", ring=ring)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert [(r["stage"], r["seq_len"]) for r in logged_steps(tmp_path / "one")] == [(0, 16)] * 3 + [(1, 48)] * 3


def test_what_stages_ended_with_is_kept_and_loads_with_its_rotations(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    longer = {**LONG, "steps": 4, "rope": 1e6}
    run(staged(tmp_path / "run", SHORT, LONG, longer, checkpoint_every=1, keep_checkpoints=1), tmp_path / "text")
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-000003", "step-000006", "step-000010"]
    for folder, theta, length in zip(folders, (1e4, 1e5, 1e6), (16, 48, 48), strict=True):
        config = AutoModelForCausalLM.from_pretrained(folder / "model").config
        assert (config.rope_parameters["rope_theta"], config.max_position_embeddings) == (theta, length)


def test_the_moments_are_carried_over(tmp_path: Path) -> None:
    """AdamW's count of steps goes on: a new optimizer would warm its moments up again."""
    state = run(staged(tmp_path / "run"), tmp_path / "text")
    assert {int(one["step"]) for one in state.optimizer.state.values()} == {6}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"seq_len": 20}, {}, r"stages\.0\.seq_len must be as when .*step-000004 was written, 16; got 20"),
        ({"steps": 2}, {}, r"stages\.0\.steps must be as when .* was written, 3; got 2"),
        ({}, {"lr": 1e-3}, r"stages\.1\.lr must be as when .* was written, 0\.003; got 0\.001"),
        ({}, {"rope": 2e5}, r"stages\.1\.rope must be as when .* was written, 100000\.0; got 200000\.0"),
    ],
)
def test_a_stage_that_has_begun_must_be_what_it_was(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    interrupted(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        run(staged(tmp_path / "run", SHORT | first, LONG | second), tmp_path / "text")


def interrupted(folder: Path) -> None:
    """A run that has 4 steps, one of its second stage."""
    with pytest.raises(Stop):
        run(staged(folder / "run", checkpoint_every=4), folder / "text", hooks=stop_in(5))


def test_stages_that_have_not_begun_may_be_any_and_the_one_under_way_may_end_elsewhere(tmp_path: Path) -> None:
    interrupted(tmp_path)
    third = {"seq_len": 64, "steps": 1, "lr": 1e-4}
    state = run(staged(tmp_path / "run", SHORT, LONG | {"steps": 2}, third), tmp_path / "text", ring=2)
    assert state.step == 6 and [r["seq_len"] for r in logged_steps(tmp_path / "run")] == [16] * 3 + [48] * 2 + [64]
    with pytest.raises(CheckpointError, match=r"stages must be at least the 3 that the run in .* has begun; got 2"):
        run(staged(tmp_path / "run", SHORT, LONG | {"steps": 2}), tmp_path / "text")


def test_a_run_without_stages_gets_some(tmp_path: Path) -> None:
    run(tiny_config(tmp_path / "run", steps=2, warmup_steps=1), tmp_path / "text")
    same = {"seq_len": 64, "steps": 2, "lr": 1e-2, "warmup_steps": 1, "decay": "cosine"}
    state = run(staged(tmp_path / "run", same, LONG | {"seq_len": 96}), tmp_path / "text")
    assert state.step == 5 and losses(tmp_path / "run")


def test_each_stage_has_a_learning_rate_of_its_own() -> None:
    config = staged(Path("unused"), SHORT | {"steps": 4, "warmup_steps": 2}, LONG | {"steps": 4, "decay_steps": 2})
    one, two = config.legs
    assert [learning_rate(one.config, step) for step in (1, 2, 3, 4)] == [5e-3, 1e-2, 1e-2, 1e-2]
    rates = [learning_rate(two.config, step, first_step=4) for step in (5, 6, 7, 8)]
    assert rates == pytest.approx([3e-3, 3e-3, 1.5e-3, 0.0])


ROWS = {"model": {"layers": 1, "hidden_size": 8, "intermediate_size": 8, "heads": 2, "vocab_size": 9}}


def without_targets(path: Path) -> Path:
    path.write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [-100] * 3}) + "\n" + "[5]\n" * 5)
    return path


def test_an_evaluation_without_targets_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Its loss would be 0, the best there is."""
    rows = without_targets(tmp_path / "rows.jsonl")
    data = {"data": {"held_out": 0.5, "format": "jsonl"}, "evaluate": {"sequences": 2}}
    config = staged(tmp_path / "run", **data, **ROWS)
    with pytest.raises(ConfigError, match=r"\[evaluate\] must have targets; the 2 held-out sequences of 16 tokens"):
        check(Job(config, open_data(config, [rows])))


def test_an_evaluation_that_leaves_a_rank_of_a_late_stage_no_token_is_refused_before_the_first(tmp_path: Path) -> None:
    """A stage is evaluated at the lengths of others too."""
    first = SHORT | {"seq_len": 3, "batch_size": 4, "mesh": {"dp_replicate": 4}}
    config = staged(tmp_path / "run", first, LONG | {"mesh": {"ranks": 4}}, evaluate={"sequences": 1})
    with pytest.raises(ConfigError, match=r"stage 2 of 2 is also evaluated at 3 tokens, with ranks = 4"):
        check(Job(config, open_data(config, [write_text(tmp_path / "text").root])))


def test_steps_without_targets_are_told_once_a_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = without_targets(tmp_path / "rows.jsonl")
    run(staged(tmp_path / "run", SHORT, data={"format": "jsonl"}, **ROWS), rows)
    assert capsys.readouterr().out.count("step 1 has no targets") == 1
    assert losses(tmp_path / "run") == [0.0] * 3
