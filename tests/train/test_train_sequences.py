"""Sequences of anybody's making: labels, weights and padding reach the loss, and their count every rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_train_stages import no_profiler as no_profiler  # autouse
from training_runs import SEQ_LEN, losses, same_bits, tiny_config

from ringspun import Documents, Striped, Zigzag
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.data.contents import Contents
from ringspun.train.data.text import PackedSequence, Position
from ringspun.train.loop import Hooks, Run, train
from ringspun.train.model import Shard, build_model
from ringspun.train.proof import prove


@dataclass(frozen=True)
class Drawn:
    """Sequences that a recipe might make: numbered, with padding, labels that are no targets, and weights."""

    seq_len: int = SEQ_LEN
    digest: str = "drawn"
    files: dict[str, Contents] = field(default_factory=dict)

    def sequences(self, *, seq_len: int, seed: int) -> Drawn:
        return replace(self, seq_len=seq_len)

    def at(self, position: Position) -> PackedSequence:
        number = position.get("number", 0)
        random = np.random.default_rng(number)
        ids = random.integers(0, 257, self.seq_len)
        labels = np.where(random.random(self.seq_len) < 0.3 + 0.2 * (number % 3), -100, ids)
        weights = random.random(self.seq_len).astype(np.float32) if number % 2 else None
        documents = Documents([5, self.seq_len - 16, 1])
        return PackedSequence(ids, documents, {"number": number + 1}, 0, labels, weights)


def a_run(folder: Path, ring_size: int, *, hooks: Hooks | None = None, **changes: Any) -> Run:
    context = ContextParallel(Loopback(ring_size, seed=0), layout=Zigzag())
    config = tiny_config(folder, steps=3, batch_size=3, checkpoint_every=1, **changes)
    return Run(config, Drawn(), context, hooks=hooks or Hooks())


lengths = st.lists(st.integers(1, 9), max_size=6)


@given(lengths, st.integers(0, 7), st.booleans(), st.booleans(), st.integers(0, 1 << 32))
def test_targets_are_counted_as_shards_are(lengths, padding, labelled, weighted, seed):
    """The total that a rank knows by itself, against the one of the batch that is dealt out."""
    random, seq_len = np.random.default_rng(seed), sum(lengths) + padding + 1
    ids = random.integers(0, 99, seq_len)
    labels = np.where(random.random(seq_len) < 0.5, ids, -100) if labelled else None
    weights = random.random(seq_len).astype(np.float32) if weighted else None
    packed = PackedSequence(ids, Documents(lengths), {}, 0, labels, weights)
    part = ContextParallel(Loopback(3), layout=Striped()).partition(seq_len, documents=packed.documents)
    batch = part.shard_batch({name: torch.from_numpy(values)[None] for name, values in packed.arrays.items()})
    assert packed.targets == pytest.approx(batch.get("total_loss_weight", batch["num_items_in_batch"]), rel=1e-12)
    assert isinstance(packed.targets, float if weighted else int)


def loss_by_hand(model: torch.nn.Module, batch: list[PackedSequence]) -> float:
    """Weighted mean over all targets of all sequences, document by document, by another path."""
    total, count = 0.0, 0.0
    for packed in batch:
        ids, labels = torch.from_numpy(packed.ids), torch.from_numpy(packed.arrays["labels"])
        weights = torch.ones(len(ids)) if packed.loss_weights is None else torch.from_numpy(packed.loss_weights)
        for start, length in zip(packed.documents.starts, packed.documents.lengths, strict=True):
            here = slice(start, start + length)
            logits = model(ids[None, here]).logits[0, :-1]
            each = torch.nn.functional.cross_entropy(logits, labels[here][1:], ignore_index=-100, reduction="none")
            counts = weights[here][1:] * (labels[here][1:] != -100)
            total, count = total + float((each * counts).sum()), count + float(counts.sum())
    return total / count


def test_the_loss_is_the_mean_of_the_targets_of_the_whole_batch(tmp_path):
    run = a_run(tmp_path / "3", 3)
    train(run)
    batch, drawn = [], Drawn()
    for number in range(3):
        batch.append(drawn.at({"number": number}))
    with torch.no_grad():
        expected = loss_by_hand(build_model(run.config, on_ring=False), batch)
    assert losses(tmp_path / "3")[0] == pytest.approx(expected, rel=1e-5)
    train(a_run(tmp_path / "1", 1))
    assert losses(tmp_path / "3") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


def test_a_run_goes_on_at_its_position(tmp_path):
    def stop(step: int, model: torch.nn.Module) -> None:
        if step == 3:
            raise InterruptedError

    train(a_run(tmp_path / "whole", 2))
    with pytest.raises(InterruptedError):
        train(a_run(tmp_path / "run", 2, hooks=Hooks(stop)))
    assert train(a_run(tmp_path / "run", 2)).position == {"number": 9}
    assert same_bits(tmp_path / "run", tmp_path / "whole")


def test_a_proof_knows_padding_labels_and_weights(tmp_path):
    run = a_run(tmp_path, 2)
    state = train(run)
    assert state.position == {"number": 9}  # an odd one, so with weights
    proof = prove(run, state)
    assert proof is not None and proof.ok and proof.documents == (5, SEQ_LEN - 16, 1)


def test_a_shard_has_no_weights_where_none_are_given():
    context, drawn = ContextParallel(Loopback(2)), Drawn()
    plain, weighted = (Shard.of(drawn.at({"number": n}), context) for n in range(2))
    assert plain.loss_weights is None and weighted.loss_weights is not None
    assert weighted.loss_weights.shape == weighted.targets.shape
