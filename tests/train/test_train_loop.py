"""The training loop in one process: rings of any size are played by the loopback."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import losses, same_bits, tiny_config, write_text

from ringspun import Zigzag
from ringspun.errors import CheckpointError, DataError, NonFiniteError
from ringspun.train.data.contents import manifest
from ringspun.train.data.text import find_text
from ringspun.train.loop import Hooks, Run, TrainState, train
from ringspun.train.model import build_model
from ringspun.train.parallel.gradient import FlatGradient
from ringspun.train.parallel.ranks import Mesh, check_step, clip_, flat_gradient
from ringspun.train.proof import Proof, prove
from ringspun.train.reporting.log import Log
from ringspun.train.stages import learning_rate


class Stop(Exception):
    """An interruption."""


def a_run(folder: Path, *, name: str = "run", ring_size: int = 3, hooks: Hooks | None = None, **changes: Any) -> Run:
    from ringspun.torch import ContextParallel, Loopback

    corpus = find_text(folder / "text") if (folder / "text").exists() else write_text(folder / "text")
    context = ContextParallel(Loopback(ring_size, seed=0), layout=Zigzag())
    config = tiny_config(folder / name, **changes)
    return Run(config, corpus, context, hooks=hooks or Hooks())


def stop_in(step: int) -> Hooks:
    def stop(number: int, model: torch.nn.Module) -> None:
        if number == step:
            raise Stop

    return Hooks(after_backward=stop)


def test_a_run_writes_everything(tmp_path: Path) -> None:
    state = train(a_run(tmp_path))
    output = tmp_path / "run"
    assert state.step == 6
    assert losses(output)[-1] < losses(output)[0]
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((output / "tensorboard").iterdir())
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    records = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "peak_bytes" in r] == [2] and records[1]["peak_bytes"][0] > 0


@pytest.mark.parametrize("other_size", [1, 3, 4])
def test_interrupted_run_goes_on_on_any_ring(tmp_path: Path, other_size: int) -> None:
    """On the same one bit by bit: losses, weights, optimizer, generator, place in the data."""
    train(a_run(tmp_path, name="whole"))
    with pytest.raises(Stop):
        train(a_run(tmp_path, hooks=stop_in(6)))
    assert len(losses(tmp_path / "run")) == 5  # one more than the checkpoint holds
    torch.rand(3)  # the generator is elsewhere in another process
    train(a_run(tmp_path, ring_size=other_size))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    if other_size == 3:
        assert same_bits(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("ring_size", [1, 2])
def test_a_run_of_many_interruptions_is_the_uninterrupted_one(tmp_path: Path, ring_size: int) -> None:
    """Bit by bit, in bfloat16 too; also over the end of an epoch, in step 6."""
    values: dict[str, Any] = {"ring_size": ring_size, "checkpoint_every": 1, "dtype": "bfloat16"}
    train(a_run(tmp_path, name="whole", **values))
    for step in (1, 3, 6):
        with pytest.raises(Stop):
            train(a_run(tmp_path, hooks=stop_in(step), **values))
    train(a_run(tmp_path, **values))
    assert same_bits(tmp_path / "run", tmp_path / "whole")


def test_interrupted_checkpoint_leaves_the_last_one(tmp_path: Path) -> None:
    def stop(step: int) -> None:
        if step == 4:
            raise Stop

    train(a_run(tmp_path, name="whole"))
    with pytest.raises(Stop):
        train(a_run(tmp_path, hooks=Hooks(before_publish=stop)))
    warnings: list[str] = []
    train(a_run(tmp_path), warn=warnings.append)
    assert warnings == [] and losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path: Path) -> None:
    train(a_run(tmp_path))
    expected = losses(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-000006" / "optimizer.safetensors").unlink()
    warnings: list[str] = []
    train(a_run(tmp_path), warn=warnings.append)
    assert len(warnings) == 1 and "step-000006 is damaged and skipped" in warnings[0]
    assert losses(tmp_path / "run") == expected


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    train(a_run(tmp_path))
    before = losses(tmp_path / "run")
    assert train(a_run(tmp_path)).step == 6
    assert losses(tmp_path / "run") == before


def test_fewer_steps_than_done_are_refused_and_as_many_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(a_run(tmp_path))
    with pytest.raises(CheckpointError, match=r"steps must be at least the 6 that the run in .* already has; got 4\."):
        train(a_run(tmp_path, steps=4))
    capsys.readouterr()
    train(a_run(tmp_path))
    assert "the run already has its 6 steps" in capsys.readouterr().out


def test_data_that_changed_is_named_when_a_run_goes_on(tmp_path: Path) -> None:
    """Though every file has the size that it had; and not when it is again what it was."""
    train(a_run(tmp_path, steps=4))
    path = tmp_path / "text" / "doc2.txt"
    text = path.read_text()
    path.write_text(text[::-1])
    words = r"data must be as when .*step-000004 was written; doc2\.txt is changed or damaged\. Give the same data"
    for _ in range(2):  # being refused changes nothing
        with pytest.raises(CheckpointError, match=words):
            train(a_run(tmp_path))
    (tmp_path / "run" / "data.json").unlink()
    with pytest.raises(CheckpointError, match=r"files were added, removed or changed \(.*data\.json cannot be read"):
        train(a_run(tmp_path))
    path.write_text(text)
    train(a_run(tmp_path))
    assert (tmp_path / "run" / "data.json").read_bytes() == manifest(find_text(tmp_path / "text").files)


def test_data_that_changes_during_a_run_stops_it(tmp_path: Path) -> None:
    def rewrite(step: int, model: torch.nn.Module) -> None:
        if step == 3:
            for path in (tmp_path / "text").iterdir():
                path.write_text(path.read_text().upper())

    with pytest.raises(DataError, match=r"doc\d\.txt: data must not change during a run; bytes 0 to \d+ are not"):
        train(a_run(tmp_path, hooks=Hooks(after_backward=rewrite)))
    assert len(losses(tmp_path / "run")) == 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.parametrize("line", ["[]", "{}", '{"step": 1}', "null", '{"step": "x", "loss": 1.0}', "\\xff"])
def test_an_odd_line_ends_an_old_log(tmp_path: Path, line: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "loss": 2.0}\n' + line + '\n{"step": 2, "loss": 1.0}\n')
    assert Log(log, done=5).records == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, "seed must be as when"),
        ({"lr": 0.5}, "lr must be as when"),
        ({"seq_len": 32}, "seq_len must be"),
    ],
)
def test_another_run_is_not_resumed(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    train(a_run(tmp_path))
    with pytest.raises(CheckpointError, match=words):
        train(a_run(tmp_path, **changes))


def test_other_data_is_not_resumed(tmp_path: Path) -> None:
    train(a_run(tmp_path))
    (tmp_path / "text" / "more.txt").write_text("another file")
    with pytest.raises(CheckpointError, match="data must be as when"):
        train(a_run(tmp_path))


def test_ring_size_does_not_change_the_run(tmp_path: Path) -> None:
    for size in (1, 2, 5):
        train(a_run(tmp_path, ring_size=size, name=f"ring{size}"))
    one, two, five = (losses(tmp_path / f"ring{size}") for size in (1, 2, 5))
    assert two == pytest.approx(one, abs=1e-5) and five == pytest.approx(one, abs=1e-5)


def test_nan_stops_the_run_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    def poison(step: int, model: torch.nn.Module) -> None:
        if step == 4:
            next(model.parameters()).grad.view(-1)[7] = math.inf

    with pytest.raises(NonFiniteError, match="at step 4 on rank 0 the gradient has a NaN or Inf"):
        train(a_run(tmp_path, hooks=Hooks(after_backward=poison)))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    assert len(losses(tmp_path / "run")) == 3


def test_bfloat16_autocast_trains(tmp_path: Path) -> None:
    train(a_run(tmp_path, dtype="bfloat16", name="bf16"))
    train(a_run(tmp_path))
    assert losses(tmp_path / "bf16") != losses(tmp_path / "run")
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "run"), rel=0.02)


def test_proof_of_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path)
    proof = prove(run, train(run))
    assert proof is not None and proof.ok
    assert {g.name for g in proof.gradients} == {n for n, _ in build_model(run.config).named_parameters()}
    assert proof.attention_bytes_one_process > 0 and len(proof.attention_bytes_per_rank) == 1
    assert json.loads((tmp_path / "run" / "proof.json").read_text())["ok"] is True
    assert "lm_head" in capsys.readouterr().out


def test_proof_sees_a_wrong_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringspun.errors import ProofError
    from ringspun.train import proof as module

    run = a_run(tmp_path)
    state = train(run)

    def doubled(model: torch.nn.Module, shard: Any) -> torch.Tensor:
        return original(model, shard) * 1.001

    original = module.shard_loss
    monkeypatch.setattr(module, "shard_loss", doubled)
    with pytest.raises(ProofError, match=r"must agree to 0\.0001"):
        prove(run, state)


def test_a_nan_is_no_proof() -> None:
    assert not Proof(2, 8, (8,), math.nan, 1.0, (), 1, (1,)).ok


def test_learning_rate_warms_up_and_decays() -> None:
    config = tiny_config(Path("unused"), steps=12, warmup_steps=2, lr=1.0, final_lr=0.1)
    rates = [learning_rate(config, step) for step in range(1, 13)]
    assert rates[:2] == [0.5, 1.0] and rates[-1] == pytest.approx(0.1)
    assert rates[6] == pytest.approx(0.55) and rates[2:] == sorted(rates[2:], reverse=True)


def test_flat_gradient_is_the_parameters_gradient() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    flat = flat_gradient(model)
    for _ in range(2):  # backward adds into the buffer
        model(torch.ones(5, 3)).square().sum().backward()
    grads = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert torch.equal(flat, grads) and flat.any()
    assert clip_(flat, max_norm=0.5, step=1) == pytest.approx(float(grads.norm()))
    assert float(flat.norm()) == pytest.approx(0.5) and model[0].weight.grad.norm() < 0.5
    with pytest.raises(TypeError, match=r"parameters must be float32; got torch\.bfloat16 for weight"):
        flat_gradient(torch.nn.Linear(2, 2).bfloat16())


class TwoRanks(Mesh):
    """A mesh whose second rank says what the test tells it to."""

    other: tuple[float, ...] = ()

    def gather(self, values: Any) -> list[list[float]]:
        return [list(values), list(self.other)]


def test_ranks_with_other_data_are_named() -> None:
    mesh = TwoRanks()
    object.__setattr__(mesh, "other", (1.0, 1.0, 77.0))
    with pytest.raises(DataError, match="at step 9, rank 1 differs from rank 0"):
        check_step(mesh, step=9, loss=1.0, finite=True, data_digest=76)
    assert check_step(mesh, step=9, loss=0.5, finite=True, data_digest=77) == 1.5


def test_sum_that_overflows_is_named() -> None:
    with pytest.raises(NonFiniteError, match="at step 2 the sum over the ranks has norm inf"):
        clip_(torch.tensor([math.inf, 1.0]), max_norm=1.0, step=2)


def test_state_begins_at_the_start() -> None:
    model = build_model(tiny_config(Path("unused")), on_ring=False)
    state = TrainState(model, model, torch.optim.SGD(model.parameters()), FlatGradient(model))
    assert state.step == 0 and state.position == {}
