"""Hugging Face's Trainer and Accelerate on rings of processes, in DDP."""

from __future__ import annotations

from pathlib import Path

import hf_accelerate
import hf_trainers as hf
import pytest
import torch

pytestmark = pytest.mark.processes


def test_a_ring_of_four_and_two_rings_of_two(pools) -> None:
    """The same losses, norms, gradients and evaluation on every rank, as Trainer has them in one process. Of 7 rows the
    last has no other to go with: one ring learns nothing from its batch."""
    for sizes, rows in ({"ring": 4}, 1), ({"dp_replicate": 2, "ring": 2}, 2):
        expected = hf.alone(per_device_train_batch_size=rows)
        for found in pools(4).run(hf.on_ranks, sizes):
            found.close_to(expected)
            assert rows == 2 or found.flos == expected.flos


def test_accelerate_on_two_rings_of_two_and_a_model_that_nobody_reduces(pools) -> None:
    expected = hf.alone(per_device_train_batch_size=2, max_steps=hf_accelerate.STEPS)
    for found, said in pools(4).run(hf_accelerate.on_ranks, {"dp_replicate": 2, "ring": 2}):
        found.close_to(expected)
        assert said.startswith("model must be in DistributedDataParallel over all 4 ranks; got LlamaForCausalLM")


def test_rank_0_saves_and_all_resume(pools, tmp_path: Path) -> None:
    straight, resumed = pools(2).run(hf.interrupted, str(tmp_path))[0]
    assert resumed.losses == straight.losses
    assert all(torch.equal(x, straight.weights[name]) for name, x in resumed.weights.items())
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()


def test_ranks_that_read_other_rows_are_told(pools) -> None:
    for kind, said in pools(2).run(hf.unlike):
        assert kind == "PlanMismatchError" and "the batch" in said
