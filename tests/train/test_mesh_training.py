"""Training on meshes of data, ring and head ranks is the training of one process, whoever holds the weights; and its
checkpoints load on any other mesh, bit for bit."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import mesh_runs as mr
import pytest
import torch
from mesh_runs import On
from test_train_checkpointing import UNPICKLED, WATCHING, watch
from training_runs import tiny_toml, write_text
from typer.testing import CliRunner

from ringspun.cli.train import app
from ringspun.errors import CheckpointError
from ringspun.train.checkpoints.checkpointing import latest
from ringspun.train.checkpoints.export import export

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

STEPS = 5
MESHES = {
    4: [
        On((2, 1, 2, 1), "none"),
        On((2, 1, 1, 2), "ddp"),
        On((1, 2, 2, 1), "fsdp"),
        On((1, 1, 2, 2), "fsdp", "sharded"),
        On((2, 1, 2, 1), "hsdp", "sharded"),
    ],
    2: [On((1, 1, 2, 1), "fsdp", "sharded")],
}
LOADERS = {4: [On((1, 4, 1, 1), "fsdp"), On((1, 1, 4, 1), "none")], 2: [On((1, 1, 2, 1), "fsdp")]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pools) -> tuple[Path, dict[str, mr.Told]]:
    """A folder with the same run on each mesh, and what rank 0 told of it; and of one process."""
    folder = tmp_path_factory.mktemp("meshes")
    corpus = write_text(folder / "text")
    torch.manual_seed(1)
    alone = mr.trained(mr.run_alone(folder / "alone", corpus, steps=STEPS, checkpoint_every=0))
    told = {"alone": alone}
    for ranks, meshes in MESHES.items():
        for on in meshes:
            found = pools(ranks).run(mr.train_on, on, folder, {"steps": STEPS, "checkpoint_every": 0})
            assert len({(one.digest, tuple(one.losses), tuple(one.norms)) for one in found}) == 1, on
            told[str(on)] = found[0]
    return folder, told


def test_every_mesh_has_the_losses_of_one_process(runs) -> None:
    """A gradient scaled by a wrong number shows in the norms, which clipping reads, before it shows in the loss."""
    _, told = runs
    expected = told["alone"]
    assert expected.losses[-1] < expected.losses[0] and min(expected.norms) < mr.CLIP_NORM < max(expected.norms)
    for name, one in told.items():
        assert one.losses == pytest.approx(expected.losses, rel=1e-5), name
        assert one.norms == pytest.approx(expected.norms, rel=1e-4), name
        assert one.position == expected.position
        assert one.flops == pytest.approx(expected.flops, rel=1e-9) and min(one.flops) > 0, name


def test_what_saves_memory_goes_with_fsdp(runs, pools) -> None:
    """Layers that run again, and in blocks, on weights that come and go; logits by chunks."""
    folder, told = runs
    saving = {"checkpointing": "attention", "feed_forward_block": 8, "loss_chunk": 4, "name": "saving"}
    found = pools(4).run(mr.train_on, MESHES[4][2], folder, {"steps": STEPS, "checkpoint_every": 0, **saving})
    assert found[0].losses == pytest.approx(told["alone"].losses, rel=1e-5)
    assert found[0].norms == pytest.approx(told["alone"].norms, rel=1e-4)


def test_checkpoints_load_on_any_other_mesh_bit_for_bit(runs, pools, tmp_path: Path) -> None:
    """Weights, moments and generator: whole and sharded ones, on other meshes, other numbers of ranks, and alone."""
    folder, told = runs
    expected = [one.digest for one in told.values()]
    for ranks, meshes in LOADERS.items():
        for on in meshes:
            for found in pools(ranks).run(mr.load_on, on, folder, list(told)):
                assert found == expected, on
    assert [mr.load_alone(folder / name, folder / "text") for name in told] == expected


@pytest.mark.parametrize("on", [On((1, 2, 2, 1), "fsdp", "sharded"), On((2, 1, 2, 1), "ddp")], ids=str)
def test_an_interrupted_run_is_the_uninterrupted_one_bit_for_bit(pools, tmp_path: Path, on: On) -> None:
    write_text(tmp_path / "text")
    run = functools.partial(pools(4).run, mr.train_on, on, tmp_path)
    whole = run({"name": "whole", "steps": 4, "checkpoint_every": 2})
    assert {text for texts in pools(4).run(mr.stopped_on, on, tmp_path) for text in texts} == {"Stop"}
    again = run({"name": "run", "steps": 4, "checkpoint_every": 2})
    assert [one.digest for one in again] == [one.digest for one in whole]
    assert again[0].losses == whole[0].losses[2:]


def test_bfloat16_by_fsdp_sums_in_float32(pools, tmp_path: Path) -> None:
    """Weights are gathered in bfloat16; each rank's piece, its gradient and the optimizer's are float32."""
    corpus = write_text(tmp_path / "text")
    changes = {"steps": 3, "checkpoint_every": 0}
    alone = mr.trained(mr.run_alone(tmp_path / "alone", corpus, **changes))
    found = pools(4).run(mr.bfloat16_on, On((1, 2, 2, 1), "fsdp"), tmp_path, changes)
    for told, dtypes in found:
        assert dtypes == {"torch.float32"}
        assert told.losses == pytest.approx(alone.losses, rel=0.02) and told.losses != alone.losses


def test_a_torn_save_is_never_taken_for_whole(pools, tmp_path: Path) -> None:
    """One rank cannot write its shard; rank 0 cannot publish; both raise on every rank, and the last one stays."""
    write_text(tmp_path / "text")
    on = On((1, 2, 2, 1), "fsdp", "sharded")
    for rank, said in enumerate(pools(4).run(mr.torn_on, on, tmp_path)):
        assert "must be written by every rank; rank 2: [Errno 28] No space left" in said["a rank"]
        assert ("No space left" if rank == 0 else "rank 0 says why it is not") in said["rank 0"]
        assert said["found"] == "step-000002"
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-000002"]
    for path in sorted((checkpoints / "step-000002" / "shards").iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        with pytest.raises(CheckpointError, match="all are damaged"):
            latest(checkpoints, warn=lambda _: None)
        path.write_bytes(data)


def test_shards_are_read_without_a_pickle_and_exported(runs, tmp_path: Path, monkeypatch) -> None:
    """By one process: what Transformers loads has the weights of a checkpoint that rank 0 gathered."""
    import sys

    from transformers import AutoModelForCausalLM

    folder, _ = runs
    sys.addaudithook(watch)
    models = []
    for on in (MESHES[4][2], MESHES[4][3]):
        found = latest(folder / str(on) / "checkpoints", warn=print)
        assert found is not None and (found.shards is not None) == (on.checkpoints == "sharded")
        assert {path.suffix for path in found.path.rglob("*") if path.is_file()} == {".json", ".safetensors"}
        UNPICKLED.clear()
        monkeypatch.setattr(sys.modules["test_train_checkpointing"], "WATCHING", WATCHING)
        WATCHING.append(True)
        try:
            export(found, tmp_path / str(on))
        finally:
            WATCHING.clear()
        assert UNPICKLED == []
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / str(on)))
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)
    with pytest.raises(CheckpointError, match=r"export must be a new folder; got .*, which is not empty"):
        export(found, tmp_path / str(on))


def test_tied_weights_stay_tied(pools, tmp_path: Path) -> None:
    """Sharded on 2 ranks, saved by both, read by one, exported, and loaded: one tensor for embedding and head."""
    from transformers import AutoModelForCausalLM

    for digest in pools(2).run(mr.save_tied, tmp_path):
        found = latest(tmp_path, warn=print)
        assert found is not None
        assert mr.digest_of_tied(found) == digest
    export(found, tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert mr.tensors_digest(model.state_dict()) == digest[0]


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_a_wrapped_chunked_loss_has_the_gradients_of_one_process(pools, shard: str) -> None:
    """The loss is what is called, so it is what DDP must wrap; in float64."""
    model, ids = mr.tied().double(), mr.causal_ids()
    logits = model(input_ids=ids).logits[:, :-1]  # its own loss is computed in float32
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for found in pools(4).run(mr.causal_gradients, shard):
        for one, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad, rtol=1e-12, atol=1e-14)


def test_the_command_trains_with_fsdp_and_exports(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    keys = 'ranks = 1\ndp_shard = 2\nbatch_size = 2\nshard = "fsdp"\ncheckpoints = "sharded"\n'
    (tmp_path / "run.toml").write_text(keys + tiny_toml(steps=1))
    paths = ["--data", tmp_path / "text", "--output", tmp_path / "out", "--export", tmp_path / "model"]
    result = CliRunner().invoke(app, [str(x) for x in [tmp_path / "run.toml", *paths, "--prove"]])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "llama"
    assert json.loads((tmp_path / "out" / "proof.json").read_text())["ok"]
