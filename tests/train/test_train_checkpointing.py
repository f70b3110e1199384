"""Checkpoints are written whole or not at all, and say what is wrong with them."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import tiny_config

from ringspun.errors import CheckpointError
from ringspun.train.checkpoints import saving, shards
from ringspun.train.checkpoints.checkpointing import latest, restore, save
from ringspun.train.checkpoints.manifests import write_manifest
from ringspun.train.model import build_model
from ringspun.train.output import move_aside
from ringspun.train.parallel.ranks import Mesh


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


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("two")
    write(folder, 1)
    write(folder, 2)
    return folder


FILES = [
    "manifest.json",
    "state.json",
    "optimizer.safetensors",
    "rng.safetensors",
    "model/model.safetensors",
    "model/config.json",
    "model/generation_config.json",
]
DAMAGE = {
    "flipped": lambda path: flip(path, bit=4 * path.stat().st_size),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"}"),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}
EXTRA = {
    "a file": lambda path: path.write_text("more"),
    "a link": lambda path: path.symlink_to("state.json"),
    "a link to a folder": lambda path: path.symlink_to("model"),
    "a pipe": os.mkfifo,
}


def flip(path: Path, *, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def skipped(folder: Path) -> str:
    """Why step 2 was skipped, in one warning; step 1 is used."""
    warnings: list[str] = []
    found = latest(folder, warn=warnings.append)
    assert found is not None and found.step == 1
    assert len(warnings) == 1 and f"{folder}/step-000002 is damaged and skipped: " in warnings[0]
    return warnings[0]


def test_every_file_is_damaged_below(two: Path) -> None:
    path = two / "step-000002"
    assert {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} == set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_its_checkpoint_skipped(two: Path, tmp_path: Path, file: str) -> None:
    for name, damage in DAMAGE.items():
        shutil.copytree(two, tmp_path / name)
        damage(tmp_path / name / "step-000002" / file)
        assert file in skipped(tmp_path / name)


@pytest.mark.parametrize("place", ["more", "model/pytorch_model.bin"])
def test_what_was_not_written_is_named_and_its_checkpoint_skipped(two: Path, tmp_path: Path, place: str) -> None:
    for name, add in EXTRA.items():
        shutil.copytree(two, tmp_path / name)
        add(tmp_path / name / "step-000002" / place)
        assert f"{place} is not in its manifest.json" in skipped(tmp_path / name)


@given(data=st.data())
@settings(max_examples=150)
def test_any_flipped_bit_is_found(two: Path, data: st.DataObject) -> None:
    """In the manifest: or means the same, as some white space does."""
    path = two / "step-000002" / data.draw(st.sampled_from(FILES))
    before = path.read_bytes()
    flip(path, bit=data.draw(st.integers(0, 8 * len(before) - 1)))
    try:
        try:
            same = path.name == "manifest.json" and json.loads(path.read_bytes()) == json.loads(before)
        except ValueError:
            same = False
        if not same:
            skipped(two)
    finally:
        path.write_bytes(before)


def test_a_file_that_cannot_be_read_is_named(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad_sector(stream, algorithm):
        if stream.name == str(two / "step-000002" / "optimizer.safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return digest(stream, algorithm)

    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", bad_sector)
    assert "optimizer.safetensors cannot be read (Input/output error)" in skipped(two)


@pytest.mark.parametrize("text", ["", "damaged", "not tensors " * 9])
def test_tensors_that_cannot_be_read_are_refused(two: Path, tmp_path: Path, text: str) -> None:
    """Whatever the manifest says of them."""
    shutil.copytree(two / "step-000002", tmp_path / "step-000002")
    (tmp_path / "step-000002" / "optimizer.safetensors").write_text(text)
    write_manifest(tmp_path / "step-000002")
    found = latest(tmp_path, warn=ignore)
    assert found is not None
    model, optimizer = model_and_optimizer()
    with pytest.raises(CheckpointError, match=r"step-000002 must be readable; optimizer\.safetensors: "):
        restore(found, model=model, optimizer=optimizer)


class Bomb:
    """A pickle that touches a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


UNPICKLED: list[str] = []
WATCHING: list[bool] = []  # a hook cannot be taken off


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if event == "pickle.find_class" and WATCHING:
        UNPICKLED.append(str(arguments))


def test_no_pickle_in_a_checkpoint_is_loaded(two: Path, tmp_path: Path) -> None:
    """In the place of any file, under a manifest that fits; nor anything else when a whole one is restored."""
    sys.addaudithook(watch)
    WATCHING.append(True)
    bomb, mark = pickle.dumps(Bomb(tmp_path / "mark")), tmp_path / "mark"
    try:
        for number, file in enumerate([*FILES, "model/pytorch_model.bin", "model/extra.pt"]):
            folder = tmp_path / str(number)
            shutil.copytree(two / "step-000002", folder / "step-000002")
            (folder / "step-000002" / file).write_bytes(bomb)
            if file != "manifest.json":
                write_manifest(folder / "step-000002")
            with suppress(CheckpointError):
                found = latest(folder, warn=ignore)
                assert found is not None
                model, optimizer = model_and_optimizer()
                restore(found, model=model, optimizer=optimizer)
        assert UNPICKLED == [] and not mark.exists()
        pickle.loads(bomb)
        assert len(UNPICKLED) > 0 and mark.exists()  # it would have been seen
    finally:
        WATCHING.clear()


def test_what_was_restored_does_not_hang_on_the_file(two: Path, tmp_path: Path) -> None:
    """Loaded tensors are the mapped file: it would change with it, and keep the room of a removed one."""
    shutil.copytree(two, tmp_path / "two")
    found = latest(tmp_path / "two", warn=ignore)
    assert found is not None
    model, optimizer = model_and_optimizer()
    restore(found, model=model, optimizer=optimizer)
    if Path("/proc/self/maps").exists():
        assert str(found.path) not in Path("/proc/self/maps").read_text()


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
        write_manifest(tmp_path / "step-000002")
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


def test_each_rank_gets_its_own_generator_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws for as many tokens as a rank holds, so generators part where shares are uneven."""
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2, 1)]
    ranks = SimpleNamespace(gather=lambda mine: [list(map(float, one)) for one in states])
    stored = saving.generators_of(cast(Mesh, ranks))
    assert sorted(stored) == ["cpu", "cpu/1"]
    model, optimizer = write(tmp_path, 1, generators=stored)
    found = latest(tmp_path, warn=ignore)
    assert found is not None
    for rank in (0, 1, 2, 5):
        monkeypatch.setattr(shards, "world_rank", lambda rank=rank: rank)
        restore(found, model=model, optimizer=optimizer)
        assert torch.equal(torch.get_rng_state(), states[rank] if rank < 3 else states[0])
