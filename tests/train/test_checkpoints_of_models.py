"""Checkpoints of models of one's own: tied, in other dtypes than their config says, torn, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mesh_runs as mr
import pytest
import torch

from ringspun.errors import CheckpointError
from ringspun.train.checkpoints.checkpointing import Checkpoint, latest, restore, save
from ringspun.train.checkpoints.export import check_target, export
from ringspun.train.checkpoints.sharded import save_sharded
from ringspun.train.parallel.ranks import Mesh

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def stepped(model: Any) -> torch.optim.Optimizer:
    """Its optimizer, after a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(10)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return optimizer


def saved_sharded(folder: Path, model: Any) -> Checkpoint:
    save_sharded(folder, step=1, model=model, optimizer=stepped(model), state={}, ranks=Mesh())
    found = latest(folder, warn=print)
    assert found is not None
    return found


def test_tied_weights_of_a_whole_checkpoint_are_restored(tmp_path: Path) -> None:
    """It has one of their names; the model has both."""
    model = mr.tied()
    save(tmp_path, step=1, model=model, optimizer=stepped(model), state={})
    found = latest(tmp_path, warn=print)
    assert found is not None
    assert mr.digest_of_tied(found)[0] == mr.tensors_digest(model.state_dict())


def test_moments_that_a_checkpoint_does_not_have_are_gone(tmp_path: Path) -> None:
    """One of before the first step, restored into a model that has gone on."""
    model = mr.tied()
    save(tmp_path, step=0, model=model, optimizer=torch.optim.AdamW(model.parameters()), state={})
    found, optimizer = latest(tmp_path, warn=print), stepped(model)
    assert found is not None and optimizer.state
    restore(found, model=model, optimizer=optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("kept", [0, 4, 100, -5])
def test_shards_that_were_torn_after_they_were_found_are_refused(tmp_path: Path, kept: int) -> None:
    found = saved_sharded(tmp_path, mr.tied())
    assert found.shards is not None
    (file,) = found.shards.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"shards in .* must be readable; "):
        export(found, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_model_is_exported_in_the_dtype_that_it_had(tmp_path: Path) -> None:
    """Its config says in which one it was loaded: bfloat16, of float32 master weights."""
    from transformers import AutoModelForCausalLM

    model = mr.tied()
    model.config.dtype = torch.bfloat16
    export(saved_sharded(tmp_path, model), tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert mr.tensors_digest(loaded.state_dict()) == mr.tensors_digest(model.state_dict())


@pytest.mark.parametrize("folder", [".", "..", "/"])
def test_an_export_needs_a_name(folder: str) -> None:
    with pytest.raises(CheckpointError, match="export must be a folder with a name; got "):
        check_target(Path(folder))
