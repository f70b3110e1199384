"""Checkpoints are written whole or not at all, and say what is wrong with them."""

from pathlib import Path

import pytest
import torch
from training_runs import tiny_config

from ringspun.errors import CheckpointError
from ringspun.train import checkpointing
from ringspun.train.checkpointing import latest, restore, save
from ringspun.train.model import build_model
from ringspun.train.output import move_aside


def model_and_optimizer(seed: int = 0):
    model = build_model(tiny_config(Path("unused"), seed=seed), on_ring=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(20)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    return model, optimizer


def write(folder: Path, step: int, **kwargs):
    model, optimizer = model_and_optimizer(step)
    save(folder, step=step, model=model, optimizer=optimizer, state={"position": step}, **kwargs)
    return model, optimizer


def ignore(_: str) -> None:
    pass


def test_round_trip(tmp_path: Path) -> None:
    model, optimizer = write(tmp_path, 7)
    found = latest(tmp_path, warn=ignore)
    assert found is not None and found.step == 7 and found.state["position"] == 7
    other, other_optimizer = model_and_optimizer(seed=9)
    restore(found, model=other, optimizer=other_optimizer)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, other_optimizer.state[b][key]), (name, key)


def test_from_pretrained_loads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, _ = write(tmp_path, 1)
    found = latest(tmp_path, warn=ignore)
    assert found is not None
    loaded = AutoModelForCausalLM.from_pretrained(found.model_path)
    ids = torch.arange(12)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids, use_cache=False).logits)
    assert loaded.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > 12


def test_nothing_is_pickled(tmp_path: Path) -> None:
    write(tmp_path, 1)
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        write(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000010"]
    assert latest(tmp_path / "nowhere", warn=ignore) is None


def test_interrupted_write_is_invisible(tmp_path: Path) -> None:
    class PowerCut(Exception):
        pass

    def cut(step: int) -> None:
        raise PowerCut

    write(tmp_path, 1)
    with pytest.raises(PowerCut):
        write(tmp_path, 2, before_publish=cut)
    warnings: list[str] = []
    found = latest(tmp_path, warn=warnings.append)
    assert found is not None and found.step == 1 and warnings == []
    write(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]


@pytest.mark.parametrize("file", ["model/model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damaged_checkpoint_is_named_and_skipped(tmp_path: Path, file: str, damage: str) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    path = tmp_path / "step-000002" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    warnings: list[str] = []
    found = latest(tmp_path, warn=warnings.append)
    assert found is not None and found.step == 1
    assert len(warnings) == 1 and "step-000002 is damaged" in warnings[0] and file.split("/")[-1][:8] in warnings[0]


WRONG = [
    ("manifest.json", "[]", "its manifest.json is no list of files by name"),
    ("manifest.json", "{}", "state.json is not in its manifest.json"),
    ("manifest.json", "[" * 100_000, "cannot be read"),
    ("state.json", "x", "cannot be read"),
    ("state.json", "[]", "its state.json is no table"),
    ("state.json", "{}", "its state.json has no step, position that can be used"),
    ("state.json", '{"step": "two", "position": 2}', "its state.json has no step that can be used"),
]


@pytest.mark.parametrize(("file", "text", "words"), WRONG)
def test_odd_but_parseable_checkpoint_is_named_and_skipped(tmp_path: Path, file: str, text: str, words: str) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "step-000002" / file).write_text(text)
    if file == "state.json":  # with a manifest that fits
        checkpointing._write_manifest(tmp_path / "step-000002")
    warnings: list[str] = []
    found = latest(tmp_path, warn=warnings.append, needs={"position": int})
    assert found is not None and found.step == 1
    assert len(warnings) == 1 and "step-000002 is damaged" in warnings[0] and words in warnings[0]


@pytest.mark.parametrize("name", [".", "step-000001/state.json", "step-000001/manifest.json"])
def test_what_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Not taken for absent or damaged: the run would begin anew, and overwrite. (Bits would not bind root.)"""
    write(tmp_path, 1)
    closed = tmp_path / name

    def guarded(real):
        def call(path, *args, **kwargs):
            if Path(path) == closed:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        return call

    for method in ("iterdir", "open", "read_bytes", "read_text", "glob"):
        monkeypatch.setattr(Path, method, guarded(getattr(Path, method)))
    with pytest.raises(CheckpointError, match=rf"checkpoints must be readable; got {closed} \(Permission denied\)"):
        latest(tmp_path, warn=ignore)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoints must be readable; got .*\(Not a directory\)"):
        latest(tmp_path / "checkpoints", warn=ignore)


def test_all_damaged_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"all are damaged: .*step-000001"):
        latest(tmp_path, warn=ignore)


def test_other_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    found = latest(tmp_path, warn=ignore)
    assert found is not None
    model = build_model(tiny_config(Path("unused"), model=dict(_shape(), layers=3)), on_ring=False)
    with pytest.raises(CheckpointError, match="must fit the model"):
        restore(found, model=model, optimizer=torch.optim.AdamW(model.parameters()))


def _shape() -> dict[str, int]:
    return {"hidden_size": 32, "intermediate_size": 48, "heads": 4, "kv_heads": 2}


def test_fresh_run_loses_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert move_aside(run) is None
    for number in (1, 2):
        run.mkdir()
        assert move_aside(run) == tmp_path / f"run.{number}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.1", "run.2"]
